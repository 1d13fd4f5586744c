"""An ``LLM`` of vLLM in this process, as ``kvtier check`` sees it."""

from __future__ import annotations

import math
import random
from typing import Any

from kvtier.bench.check_engine import Answer, EngineTrouble, Order, Prompt
from kvtier.bench.check_metrics import Metrics, snapshot_metrics
from kvtier.errors import ConfigError


class LlmEngine:
    """See ``CheckedEngine``. ``LLM.generate`` cannot be ended from outside, so it takes the time it takes.

    Args:
        llm: a ``vllm.LLM``, made with ``disable_log_stats=False``: without that it counts nothing.

    Raises:
        ConfigError: something else.
    """

    is_shared = False

    def __init__(self, llm: Any) -> None:
        try:
            from vllm import SamplingParams
            model_config = llm.llm_engine.vllm_config.model_config
            self.max_tokens = int(model_config.max_model_len)
            self.model = self.name = str(model_config.model)
            self._vocabulary = int(model_config.get_vocab_size())
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{type(llm).__name__}: no LLM of vLLM 0.32 or newer ({error}); for a server use kvtier check --url"
                              ) from error
        self._sampling: Any = SamplingParams
        self._llm = llm

    def make_prompt(self, rng: random.Random, num_tokens: int) -> Prompt:
        first = min(100, self._vocabulary // 4)  # special tokens stand at either end of a vocabulary
        return [rng.randrange(first, max(min(self._vocabulary - first, 20_000), first + 1)) for _ in range(num_tokens)]

    def ask(self, order: Order, seconds: float) -> Answer:
        params = order.transfer_params
        sampling = self._sampling(temperature=0.0, max_tokens=order.num_tokens, min_tokens=order.num_tokens, ignore_eos=True, logprobs=2,
                                  detokenize=False, extra_args={"kv_transfer_params": params} if params is not None else None)
        try:
            output = self._llm.generate([{"prompt_token_ids": order.prompt, "cache_salt": order.salt}], sampling, use_tqdm=False)[0]
        except Exception as error:  # whatever the engine raises
            raise EngineTrouble(f"{self.name}: the engine failed: {error!r}") from error
        answer = output.outputs[0]
        ranked = [sorted((each.logprob for each in candidates.values()), reverse=True) for candidates in answer.logprobs or ()]
        chosen = [candidates[token].logprob for token, candidates in zip(answer.token_ids, answer.logprobs or (), strict=False)]
        return Answer(tuple(answer.token_ids), tuple(chosen), tuple(each[0] - each[1] if len(each) > 1 else math.inf for each in ranked),
                      len(output.prompt_token_ids))

    def metrics(self, seconds: float) -> Metrics:
        try:
            return snapshot_metrics(self._llm.get_metrics())
        except AssertionError:  # vLLM's answer to disable_log_stats
            return Metrics()

    def reset(self, seconds: float) -> bool | None:
        return bool(self._llm.reset_prefix_cache())
