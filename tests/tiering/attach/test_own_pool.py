"""The engine of docs/attach/your-own-pool.md, as it stands there: what it loads is what it would have computed, after a restart, too."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parents[3] / "docs" / "attach" / "your-own-pool.md"


def load_page() -> dict[str, Any]:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
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
