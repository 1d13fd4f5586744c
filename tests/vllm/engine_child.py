"""A vLLM engine in a process of its own, told what to do by lines of JSON on its standard input (see ``engine.Engine``).

Started by the tests as a script: an engine that is killed, hangs or dies must not take pytest with it, and only a new process is a
restart. The engine core is in this process, or in its own below it, as ``VLLM_ENABLE_V1_MULTIPROCESSING`` says.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

LOGPROBS = 2
"""Candidates reported for each token: the chosen one and its nearest rival tell a near tie from a wrong answer."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints: only answers may go where the tests read them
    engine = ChildEngine(json.loads(sys.argv[1]))
    _say(answers, {"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            _say(answers, {"result": getattr(engine, order.pop("do"))(**order)})
        except Exception as error:
            _say(answers, {"error": f"{type(error).__name__}: {error}"})


def _say(stream: Any, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


class ChildEngine:
    """The orders, one method each."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVEventsConfig
        if "kv_events_config" in arguments:
            arguments["kv_events_config"] = KVEventsConfig(**arguments["kv_events_config"])
        self.llm = LLM(**arguments)
        self.engine = self.llm.llm_engine
        self.count = 0
        self.adapters: dict[str, int] = {}

    def generate(self, prompts: list[list[int]], max_tokens: int, parameters: list[dict[str, Any] | None] | None = None,
                 abort: dict[str, int] | None = None, salt: str | None = None, adapter: str | None = None) -> list[dict[str, Any]]:
        """Serve all prompts at once. ``abort``: number of a prompt to the engine step before which it is given up. ``salt`` and
        ``adapter`` (its folder, which is its name) are of all of them."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        lora = LoRARequest(adapter, self.adapters.setdefault(adapter, len(self.adapters) + 1), adapter) if adapter else None
        salted = {"cache_salt": salt} if salt else {}
        names = {}
        for number, prompt in enumerate(prompts):
            self.count += 1
            sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=LOGPROBS,
                                      extra_args={"kv_transfer_params": parameters[number]} if parameters and parameters[number] else None)
            name = f"{self.count}"
            names[name] = number
            self.engine.add_request(name, {"prompt_token_ids": prompt, **salted}, sampling, lora_request=lora)
        results: list[dict[str, Any]] = [{"tokens": [], "gaps": [], "cached": None, "aborted": False} for _ in prompts]
        doomed = {step: [name for name, number in names.items() if (abort or {}).get(str(number)) == step]
                  for step in {*(abort or {}).values()}}
        step = 0
        while self.engine.has_unfinished_requests():
            for name in doomed.pop(step, ()):
                self.engine.abort_request([name])
                results[names[name]]["aborted"] = True
            for output in self.engine.step():
                if output.finished and output.outputs[0].finish_reason != "abort":
                    answer = output.outputs[0]
                    gaps = [_gap(candidates) for candidates in answer.logprobs or []]
                    results[names[output.request_id.split("-")[0]]] |= {"tokens": list(answer.token_ids), "gaps": gaps,
                                                                        "cached": output.num_cached_tokens, "aborted": False}
            step += 1
        return results

    def settle(self, seconds: float = 30.0) -> bool:
        """Let the idle engine finish what it stores. In one process nothing else lets it step."""
        import time
        core = getattr(self.engine.engine_core, "engine_core", None)
        end = time.monotonic() + seconds
        while core is not None and core.scheduler.has_requests() and time.monotonic() < end:
            core.step_fn()
            time.sleep(0.001)
        return core is None or not core.scheduler.has_requests()

    def reset(self, connector: bool = False) -> bool:
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def sleep_and_wake(self, prompts: list[list[int]], steps: int) -> None:
        """Put the scheduler to sleep in the middle of these requests, as ``LLM.sleep(1)`` does before it frees memory, and wake it.

        Not while a load is under way: then vLLM cannot clear its cache, and raises.
        """
        from vllm import SamplingParams
        from vllm.v1.request import RequestStatus
        names = [f"asleep-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(max_tokens=50, detokenize=False))
        for _ in range(steps):
            self.engine.step()
        core = self.engine.engine_core.engine_core
        while any(request.status == RequestStatus.WAITING_FOR_REMOTE_KVS for request in core.scheduler.requests.values()):
            self.engine.step()
        core.pause_scheduler(mode="abort", clear_cache=True)
        core.resume_scheduler()
        self.engine.abort_request(names)  # in one process, nobody tells the engine's front that the scheduler has ended them
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", getattr(metric, "sum", None))
            label = metric.labels.get("tier")
            if value is not None:
                name = metric.name.removeprefix("vllm:") + (f"/{label}" if label else "")
                found[name] = found.get(name, 0) + value
        return found

    def stats(self) -> dict[str, Any]:
        """The tier's statistics; its ledger is verified, too. In one process only."""
        import dataclasses
        index = self._index()
        index.poll()
        index.verify()
        stats = index.stats()
        return dataclasses.asdict(stats) | {"hit_blocks": stats.hit_blocks._asdict()}

    def flush(self, timeout: float = 30.0) -> bool:
        return bool(self._index().flush(timeout))

    def spoil_states(self) -> int:
        """Overwrite all states in host memory, behind the tier's back. Returns how many groups have some."""
        index = self._index()
        groups = [number for number, group in enumerate(index.layout.groups) if group.is_state]
        for number in groups:
            index.arena.groups[number].rows[:] = 0
        return len(groups)

    def storm(self, prompts: list[list[int]], max_tokens: int, seed: int, abort_share: float,
              reset_share: float = 0.0) -> list[dict[str, Any]]:
        """Serve prompts in random waves, give some up in mid-air, and now and then forget everything on all levels."""
        rng = random.Random(seed)
        results: list[dict[str, Any]] = []
        position = 0
        while position < len(prompts):
            wave = prompts[position:position + rng.randrange(1, 24)]
            position += len(wave)
            abort = {str(number): rng.randrange(0, 12) for number in range(len(wave)) if rng.random() < abort_share}
            results += self.generate(wave, max_tokens, abort=abort)
            if rng.random() < 0.3:
                self.reset(connector=False)
            if rng.random() < reset_share:
                self.reset(connector=True)
        return results

    def preemptions(self) -> float:
        return self.metrics().get("num_preemptions", 0.0)

    def check(self, level: str, **options: Any) -> dict[str, object]:
        """What ``kvtier check`` finds in process."""
        from kvtier.bench.check import check_llm
        return check_llm(self.llm, level, **options).as_json()

    def shutdown(self) -> None:
        self.engine.engine_core.shutdown()

    def _index(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler.connector.connector_scheduler.manager.index


def _gap(candidates: dict[int, Any]) -> float:
    """How much likelier the first candidate is than the second, as a difference of logarithms."""
    values = sorted((each.logprob for each in candidates.values()), reverse=True)
    return float(values[0] - values[1]) if len(values) > 1 else float("inf")


if __name__ == "__main__":
    main()
