"""The engine and the store of docs/attach/your-own-pool.md, as on the page: what they load is what was stored, also after a restart."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[3] / "docs" / "attach" / "your-own-pool.md"


def blocks_of_page() -> list[str]:
    """The engine, and the store for calls that may wait."""
    engine, store = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [engine, store]


def load_page() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(blocks_of_page()[0], str(PAGE), "exec"), names)
    return names


def test_the_engine_of_the_page_computes_nothing_twice_and_loads_right_bytes(tmp_path: Path) -> None:
    page = load_page()
    prompts = [list(range(40)), list(range(24)) + [99] * 16, list(range(40))]
    computed = []
    for _life in range(2):
        engine = page["make"](str(tmp_path / "store"), f"test-{uuid.uuid4().hex[:12]}")
        try:
            for number, tokens in enumerate(prompts):
                pages = engine.serve(f"request {number}", tokens)
                found = [[rows[page_number].clone() for page_number in pages] for rows in engine.layers]
                before = engine.computed
                for page_number, key in zip(pages, page["content_keys"](tokens), strict=True):
                    engine.compute(page_number, key)
                wanted = [[rows[page_number] for page_number in pages] for rows in engine.layers]
                engine.computed = before
                assert all(torch.equal(left, right) for lefts, rights in zip(found, wanted, strict=True)
                           for left, right in zip(lefts, rights, strict=True))
            computed.append(engine.computed)
            engine.index.verify()
            assert engine.index.stats().leases == 0
        finally:
            engine.close()
    assert computed == [10 + 4, 0]


def test_the_store_of_the_page_gives_back_what_was_put_also_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = blocks_of_page()[1].replace("toy-store", f"test-{uuid.uuid4().hex[:12]}")
    for _life in range(2):
        names: dict[str, Any] = {}
        exec(compile(code, str(PAGE), "exec"), names)
        assert (names["stored"], names["found"], names["filled"]) == ([True] * 4, 4, 4)
        assert names["pool"][8:12, 0].tolist() == [0, 1, 2, 3]
    layout, pool = names["PageLayout"]([names["PageGroup"](512)]), torch.zeros(4, 512, dtype=torch.uint8)
    with names["TierStore"](layout, names["config"], model="toy@1:0", engine_id=f"test-{uuid.uuid4().hex[:12]}") as store:
        assert store.read(names["keys"], [pool], [3, 2, 1, 0]) == 4
    assert pool[:, 511].tolist() == [3, 2, 1, 0]
