"""docs/attach/prefill-decode.md, run as it stands there: two processes, both kinds of folder, the model's own answers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[3] / "docs" / "attach" / "prefill-decode.md"
[CODE] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8]]


@pytest.fixture(scope="module")
def page() -> Any:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(CODE, str(PAGE), "exec"), names)
    return SimpleNamespace(**names)


def expected(page: Any, prompt: list[int], count: int) -> list[int]:
    """What the model answers without any cache."""
    model, tokens = page.ToyModel(), list(prompt)

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(0, 1)

    for _ in range(count):
        tokens.append(int(model.logits(tokens, 0, attend).argmax()))
    return tokens


@pytest.mark.parametrize("through", ["directory", "shared memory"])
def test_two_processes_answer_as_the_model_alone_does(through: str, page: Any, tmp_path: Path) -> None:
    script = tmp_path / "prefill_decode.py"
    name = f"example-{uuid.uuid4().hex}"
    script.write_text(CODE.replace('"example"', f'"{name}"'))
    shared = tmp_path / "handover" if through == "directory" else Path(f"/dev/shm/kvtier-handover-{name}")
    arguments = [str(shared)] if through == "directory" else []
    try:
        said = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=200, check=True)
        assert os.listdir(shared) == [], "everything was handed over"
    finally:
        if shared.is_dir():
            for path in shared.iterdir():
                path.unlink()
            shared.rmdir()
    lines = [f"{expected(page, prompt, 8)} {len(prompt)}" for prompt in PROMPTS]
    assert said.stdout.splitlines() == lines, said.stderr
