"""Who may find whose blocks: requests with another adapter, another salt or another image share none, on any level."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from engine import BLOCK, Engine, differences, settled
from inputs import VOCABULARY, make_adapter

PROMPT = random.Random(70).choices(range(3, VOCABULARY), k=9 * BLOCK + 3)


def test_what_is_not_tokens_is_in_the_keys() -> None:
    """The tier's keys are vLLM's block hashes, whole."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_offload.base import get_offload_block_hash, make_offload_key
    from vllm.v1.request import Request
    init_none_hash(sha256)

    def keys(**more: Any) -> list[bytes]:
        request = Request("name", PROMPT, SamplingParams(max_tokens=1), None, block_hasher=get_request_block_hasher(BLOCK, sha256), **more)
        return [get_offload_block_hash(make_offload_key(hash_, 0)) for hash_ in request.block_hashes]

    def image(identifier: str) -> list[MultiModalFeatureSpec]:
        return [MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(BLOCK, BLOCK))]

    kinds = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"lora_request": LoRARequest("a", 1, "a")},
             {"lora_request": LoRARequest("b", 1, "b")}, {"mm_features": image("a")}, {"mm_features": image("b")},
             {"mm_features": image("a"), "cache_salt": "a"}]
    found = [keys(**kind) for kind in kinds]
    assert {len(key) for each in found for key in each} == {32}
    assert found == [keys(**kind) for kind in kinds]
    for number, one in enumerate(found):
        for other in found[number + 1:]:
            assert set(one[1:]).isdisjoint(other[1:]), "from the block on in which they part"
    assert found[5][0] == found[0][0], "before the image nothing differs"


def test_requests_with_another_adapter_or_salt_are_never_served_from_each_others_blocks(uniform: Path, tmp_path: Path,
                                                                                        nvme: dict[str, str]) -> None:
    adapters = [str(make_adapter(tmp_path / name, seed)) for seed, name in enumerate(("first", "second"))]
    whose: list[dict[str, str]] = [{}, {"salt": "a"}, {"salt": "b"}, {"adapter": adapters[0]}, {"adapter": adapters[1]},
                                   {"adapter": adapters[0], "salt": "a"}]
    engine_arguments = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    tier = {"secondary": "96 blocks", "trusted_lora_names": True, **nvme}
    with Engine(uniform, tier, **engine_arguments) as engine:
        right = [engine.generate(prompts=[PROMPT], max_tokens=6, parameters=[{"kvtier": {"skip_read": True, "skip_write": True}}], **who)
                 for who in whose]
        assert right[0][0]["tokens"] not in (right[3][0]["tokens"], right[4][0]["tokens"]), "the adapters change the answer"
        assert right[3][0]["tokens"] != right[4][0]["tokens"]
        for turn in range(2):
            for who, wanted in zip(whose, right, strict=True):
                engine.reset()
                answer = engine.generate(prompts=[PROMPT], max_tokens=6, **who)
                assert answer[0]["cached"] == turn * 9 * BLOCK, who
                assert differences(answer, wanted)[0] == []
                assert engine.settle()
        assert settled(engine)["hit_blocks"]["secondary"] == 9 * len(whose)
        engine.kill()
    with Engine(uniform, tier, **engine_arguments) as engine:
        assert engine.generate(prompts=[PROMPT], max_tokens=6, salt="c")[0]["cached"] == 0
        for who, wanted in reversed(list(zip(whose, right, strict=True))):
            answer = engine.generate(prompts=[PROMPT], max_tokens=6, **who)
            assert answer[0]["cached"] == 9 * BLOCK, who
            assert differences(answer, wanted)[0] == []
        assert settled(engine)["hit_blocks"]["nvme"] == 9 * len(whose)
