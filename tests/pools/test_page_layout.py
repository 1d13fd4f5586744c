"""Rules of ``PageLayout``: what a block of an engine's pages is, and which layouts cannot be."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.pools.page_layout import PageGroup, PageLayout


def test_a_slot_holds_all_ranks_side_by_side() -> None:
    layout = PageLayout([PageGroup([100, 60], 4), PageGroup(32)], ranks=3)
    assert [block.block_bytes for block in layout.blocks] == [3 * 4 * 160, 3 * 32]
    assert [layout.rank_offset(0, rank) for rank in range(3)] == [0, 640, 1280]
    assert layout.blocks[0].sections[0].num_bytes == layout.blocks[0].copied_bytes(1) == 1920


def test_a_slot_of_replicated_pages_holds_them_once() -> None:
    layout = PageLayout([PageGroup([100, 60], 4)], ranks=3, is_replicated=True)
    assert (layout.copies, layout.blocks[0].block_bytes, layout.rank_offset(0, 2)) == (1, 640, 0)


def test_what_keys_presuppose_is_in_its_description() -> None:
    layouts = [PageLayout([PageGroup([100, 60], 4)]), PageLayout([PageGroup([60, 100], 4)]), PageLayout([PageGroup([100, 60], 2)]),
               PageLayout([PageGroup([100, 60], 4)], ranks=2), PageLayout([PageGroup([100, 60], 4)], ranks=2, is_replicated=True),
               PageLayout([PageGroup([100, 60], 4, is_state=True)])]
    described = [layout.describe() for layout in layouts]
    assert len(set(described)) == len(layouts)
    assert all(json.loads(text) for text in described)
    assert PageLayout([PageGroup([100, 60], 4, name="another name")]).describe() == described[0]


def test_equal_layouts_are_equal_in_another_process() -> None:
    layout = PageLayout([PageGroup([100, 60], 4)], ranks=2)
    assert pickle.loads(pickle.dumps(layout)) == layout


@pytest.mark.parametrize(("make", "message"), [
    (lambda: PageGroup([]), "at least one tensor"), (lambda: PageGroup([0]), "page_bytes=0"),
    (lambda: PageGroup(8, 0), "pages_per_block=0"),
    (lambda: PageLayout([]), "at least one group"), (lambda: PageLayout([PageGroup(8)], ranks=0), "ranks=0"),
    (lambda: PageLayout(["pages"]), "pass PageGroup"),
    (lambda: PageLayout([PageGroup(1 << 30)], ranks=2), "take fewer pages per block")])
def test_layouts_that_cannot_be_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
