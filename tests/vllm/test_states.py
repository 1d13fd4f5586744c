"""Models with recurrent layers: a running state comes back with its prefix, from host memory and from NVMe."""

from __future__ import annotations

import random
from pathlib import Path

from engine import Engine, differences, settled
from inputs import VOCABULARY, make_deltas

DTYPE = "bfloat16"
"""vLLM runs Gated DeltaNet on a CPU in this dtype only. Prompts are served alone, so that all engines compute the same pieces."""


def test_states_come_back_from_host_memory_and_from_nvme(tmp_path: Path, nvme: dict[str, str]) -> None:
    model = make_deltas(tmp_path / "model")
    prompts = [random.Random(seed).choices(range(3, VOCABULARY), k=340 + 60 * seed) for seed in range(3)]
    tier = {"secondary": "64MiB", **nvme}

    def serve(engine: Engine) -> list[dict[str, object]]:
        answers = [answer for prompt in prompts for answer in engine.generate(prompts=[prompt], max_tokens=8)]
        assert engine.settle()
        engine.reset()
        return answers

    with Engine(model, dtype=DTYPE, enable_prefix_caching=True) as engine:
        right = serve(engine)
    with Engine(model, tier, dtype=DTYPE, enable_prefix_caching=True) as engine:
        assert differences(serve(engine), right)[0] == []
        again = serve(engine)
        assert differences(again, right)[0] == []
        assert all(answer["cached"] > 0 for answer in again)
        assert settled(engine)["hit_blocks"]["secondary"] > 0
        engine.kill()
    with Engine(model, tier, dtype=DTYPE, enable_prefix_caching=True) as engine:
        again = serve(engine)
        assert differences(again, right)[0] == []
        assert all(answer["cached"] > 0 for answer in again)
        assert settled(engine)["hit_blocks"]["nvme"] > 0
        assert engine.spoil_states() == 1
        assert differences(serve(engine), right)[0], "wrong states would be seen"
