"""The engine of docs/attach/your-own-engine.md, as it stands there: it answers as its model does without a cache, on bad days too."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvtier import CapacityError, KVCacheManager, Request, TierConfig
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults

PAGE = Path(__file__).parents[3] / "docs" / "attach" / "your-own-engine.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.fixture(scope="module")
def page():
    """The names that the page's first code block defines."""
    names = {}
    exec(compile(BLOCKS[0], str(PAGE), "exec"), names)
    return SimpleNamespace(**names)


@pytest.fixture
def start(page, tmp_path):
    caches = []

    def open_engine(primary="40 blocks", engine=None, **settings):
        config = TierConfig(primary=primary, max_batch_size=4, max_seq_len=page.MOST_TOKENS, nvme_free_space_reserve="0B",
                            **{"secondary": "20 blocks", **settings})
        cache = KVCacheManager(page.LAYOUT, config, model="toy@1:0")
        caches.append(cache)
        return (engine or page.Engine)(cache, page.ToyModel())

    yield open_engine
    for cache in caches:
        cache.verify()
        stats = cache.stats()
        assert stats.leases == stats.sequences == 0
        cache.close(timeout=10)


@pytest.fixture(scope="module")
def expected(page):
    """The model by itself: everything is computed for each token, and no cache is there."""
    model = page.ToyModel()

    def attend(layer, query, key, value):
        scores = torch.einsum("qhd,khd->hqk", query, key) / page.DIM**0.5
        scores += torch.full(scores.shape[1:], float("-inf")).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)

    def run(prompt, new_tokens):
        tokens = list(prompt)
        for _ in range(new_tokens):
            tokens.append(int(model.logits(tokens, 0, attend).argmax()))
        return tokens
    return run


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(2)
    return [[5, 6, 7] * 4 + torch.randint(0, 61, (length,), generator=generator).tolist() for length in (30, 2, 17, 8, 41)]


def run(engine, requests=()):
    for request in requests:
        engine.submit(request)
    ended = {}
    while engine.waiting or engine.resources.active:
        ended.update((sequence.request.id, sequence) for sequence in engine.step())
    return ended


def requests(prompts, new_tokens=9, start=0):
    return [Request(start + number, prompt, max_new_tokens=new_tokens) for number, prompt in enumerate(prompts)]


def test_the_engine_is_about_a_hundred_lines():
    code = BLOCKS[0][BLOCKS[0].index("class Sequence"):].splitlines()
    assert len([line for line in code if line.strip()]) <= 110


def test_the_example_of_its_use_runs(page, capsys, expected):
    exec(compile(BLOCKS[1], str(PAGE), "exec"), vars(page) | {})
    assert capsys.readouterr().out.strip() == str(expected([3, 1, 4, 1, 5, 9, 2, 6], 5))


@pytest.mark.parametrize("settings", [{}, {"primary": "17 blocks"}, {"secondary": "10 blocks", "nvme": "100 blocks"}], ids=str)
def test_it_answers_as_the_model_does_without_a_cache(start, expected, prompts, settings, tmp_path):
    engine = start(**settings, **({"nvme_directory": tmp_path / "nvme"} if "nvme" in settings else {}))
    for turn in range(3):
        ended = run(engine, requests(prompts, start=10 * turn))
        assert [ended[10 * turn + number].tokens for number in range(5)] == [expected(prompt, 9) for prompt in prompts]
    assert sum(engine.cache.stats().hit_tokens) > 0


@pytest.mark.parametrize("operation", [FaultOperation.COPY, FaultOperation.READ])
def test_what_fails_is_computed_again(start, expected, prompts, operation, tmp_path):
    engine = start(secondary="10 blocks", nvme="100 blocks", nvme_directory=tmp_path / "nvme",
                   faults=Faults([FaultRule(FaultKind.FAILURE, operation, rate=0.2)], seed=1))
    for turn in range(3):
        ended = run(engine, requests(prompts, start=10 * turn))
        assert [ended[10 * turn + number].tokens for number in range(5)] == [expected(prompt, 9) for prompt in prompts]


def test_aborted_requests_leave_nothing_whatever_state_they_are_in(start, expected, prompts):
    for steps in (0, 1, 2, 3, 5, 8, 11):
        engine = start(primary="17 blocks")
        for request in requests(prompts):
            engine.submit(request)
        ended = {}
        for _ in range(steps):
            ended.update((sequence.request.id, sequence) for sequence in engine.step())
        engine.abort(0)
        engine.abort(4)
        ended.update(run(engine))
        assert all(ended[number].tokens == expected(prompts[number], 9) for number in (1, 2, 3))
        assert engine.cache.stats().sequences == 0


def test_a_prompt_longer_than_the_pool_says_so_and_others_are_answered(start, expected, prompts):
    engine = start(primary="12 blocks")
    ended = run(engine, [Request(0, [7] * 100, max_new_tokens=3), *requests(prompts[1:3], start=1)])
    assert isinstance(ended[0].error, CapacityError)
    assert "25" in str(ended[0].error)
    assert ended[1].tokens == expected(prompts[1], 9)
    assert ended[2].tokens == expected(prompts[2], 9)


def test_a_sequence_that_outgrows_the_pool_says_so(start, expected, prompts):
    engine = start(primary="12 blocks")
    ended = run(engine, [Request(0, prompts[0], max_new_tokens=30), Request(1, prompts[1], max_new_tokens=4)])
    assert isinstance(ended[0].error, CapacityError)
    assert ended[0].tokens == expected(prompts[0], 30)[:len(ended[0].tokens)]
    assert ended[1].tokens == expected(prompts[1], 4)


def test_an_engine_that_forgets_to_report_progress_is_told_and_nothing_is_held(start, page, expected, prompts, caplog):
    class Silent(page.Resources):
        def update_resources(self, computed):
            for sequence in computed:
                if len(sequence.tokens) >= sequence.end:
                    self.free_resources(sequence.request.id)
            return []

    class Forgetful(page.Engine):
        def __init__(self, cache, model):
            super().__init__(cache, model)
            self.resources = Silent(cache)

    engine = start(engine=Forgetful, primary="100 blocks")
    ended = run(engine, [Request(number, prompts[0][:10], max_new_tokens=2) for number in range(3)])  # within its three blocks
    assert all(sequence.tokens == expected(prompts[0][:10], 2) for sequence in ended.values())
    assert engine.cache.match(prompts[0][:10]).reusable_tokens == 0
    (message,) = [record.getMessage() for record in caplog.records if "reported" in record.getMessage()]
    assert "request 0 took part in 2 steps and none of its tokens was reported as computed" in message
    assert "Call mark_computed after each step" in message


def test_an_engine_that_reports_is_told_nothing(start, prompts, caplog):
    engine = start()
    run(engine, requests(prompts))
    engine.submit(Request(9, prompts[0], max_new_tokens=9))
    engine.step()
    engine.abort(9)
    assert not caplog.records


def test_what_is_computed_for_a_request_that_loses_blocks_in_a_step_is_left_aside(start, page, expected, prompts):
    class Losing(page.Engine):
        calls = 0

        def forward(self, sequence, row, ready):
            token = super().forward(sequence, row, ready)
            self.calls += 1
            if self.calls % 3:
                return token
            ready.lost.append(sequence.request.id)  # as wait_layer does
            return 0

    ended = run(start(engine=Losing, primary="100 blocks"), requests(prompts[:3]))
    assert [ended[number].tokens for number in range(3)] == [expected(prompt, 9) for prompt in prompts[:3]]
