"""A handover that is cut short leaves no file that counts, and keeps none from others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from handover_rig import both_folders, files, layout_of
from interrupting import cut_short

import kvtier.io.handover_folder
from kvtier import HandoverFolder
from kvtier.tiering.handover import taking


@both_folders
def test_a_file_whose_making_is_cut_short_takes_no_room(folder: HandoverFolder) -> None:
    made: list[tuple[int, str]] = []
    place = 0
    while cut_short(lambda: made.append(folder.create(1 << 20)), place, room=Path(kvtier.io.handover_folder.__file__)):
        folder.collect()
        assert files(folder) == []
        place += 1
    assert place > 10


def test_want_of_memory_while_a_handover_is_taken_keeps_it_from_nobody(prefill: Callable[..., Any], decode: Callable[..., Any],
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_given: Any) -> Any:
        raise MemoryError

    layout = layout_of(4, "attention")
    tokens, ticket = prefill(layout).hand_over(list(range(100, 131)))
    other = decode(layout)
    other.importer.offer(ticket)
    with monkeypatch.context() as patch:
        patch.setattr(taking, "Taking", out_of_memory)
        with pytest.raises(MemoryError) as kept:  # with its frames, as a notebook keeps it
            other.fill(tokens)
    other.engine.remove(1)
    assert other.fill(tokens, 2) == len(tokens) - 1
    other.finish(2)
    assert kept
