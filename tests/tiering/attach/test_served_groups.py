"""The serving loop over several groups, with chunked prefill over a window: a model that reads its pages and nothing else."""

from __future__ import annotations

import pytest
import torch

from kvtier.pools.layout import KVLayout, LayerSpec
from kvtier.tiering.attach.serving_loop import ServingLoop
from kvtier.tiering.config import TierConfig
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.manager import KVCacheManager

WINDOW, TOKENS_PER_BLOCK, VOCABULARY = 8, 4, 97


def next_token(tokens):
    return (sum(tokens) * 31 + sum(tokens[-WINDOW:]) * 17) % VOCABULARY


def answer_to(prompt, new_tokens):
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt):]


class Sums:
    """Writes token numbers where keys belong, and finds the next token from the numbers that each group shows it."""

    vocabulary_size = VOCABULARY

    def __init__(self, cache):
        self.pools = [cache.pool(group).primary.layer_buffer(0) for group in range(2)]

    def _place(self, group, row, position):
        entry = int(row[0, position // TOKENS_PER_BLOCK])
        assert entry >= 0, f"group {group}: no block for position {position}"
        return self.pools[group][entry // 2, 0, 0, position % TOKENS_PER_BLOCK]

    def _compute(self, tokens, past, rows):
        for offset, token in enumerate(tokens):
            position = past + offset
            for group, row in enumerate(rows):
                self._place(group, row, position)[:] = float(token)
        last = past + len(tokens) - 1
        everything = sum(float(self._place(1, rows[1], position)[0]) for position in range(last + 1))
        window = sum(float(self._place(0, rows[0], position)[0]) for position in range(max(last + 1 - WINDOW, 0), last + 1))
        logits = torch.zeros(VOCABULARY)
        logits[int(everything * 31 + window * 17) % VOCABULARY] = 1.0
        return logits

    def prefill(self, tokens, past, *table_rows):
        return self._compute(tokens, past, table_rows)

    def decode(self, tokens, pasts, *tables):
        return torch.stack([self._compute([token], past, [table[row] for table in tables])
                            for row, (token, past) in enumerate(zip(tokens, pasts, strict=True))])


@pytest.fixture
def serve():
    caches = []

    def start(primary=("40 blocks", "60 blocks"), loop_options=(), **settings):
        layout = KVLayout([LayerSpec.attention(1, 4, window=WINDOW), LayerSpec.attention(1, 4)], "float32", TOKENS_PER_BLOCK)
        cache = KVCacheManager(layout, TierConfig(primary=list(primary), secondary="30 blocks", max_batch_size=8, max_seq_len=128,
                                                 **settings))
        caches.append(cache)
        return ServingLoop(cache, Sums(cache), **dict(loop_options))

    yield start
    for cache in caches:
        cache.verify()
        stats = cache.stats()
        assert stats.leases == stats.sequences == 0
        cache.close(timeout=10)


@pytest.fixture
def conversations():
    generator = torch.Generator().manual_seed(4)
    return [[7, 8, 9] * 5 + torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in (30, 3, 45, 17, 60, 9)]


@pytest.mark.parametrize("settings", [{}, {"chunk_size": 16}, {"chunk_size": 12}], ids=str)
@pytest.mark.parametrize("options", [{"admission": "guaranteed_no_evict"}, {}, {"token_budget": 9, "chunking": "equal_progress"}], ids=str)
def test_requests_over_two_groups_read_what_they_wrote(serve, conversations, settings, options):
    loop = serve(loop_options={"max_batch_size": 4, **options}, **settings)
    for turn in range(2):
        answers = loop.run(Request(10 * turn + number, prompt, max_new_tokens=14) for number, prompt in enumerate(conversations))
        for number, prompt in enumerate(conversations):
            answer = answers[10 * turn + number]
            assert answer.error is None
            assert answer.tokens == answer_to(prompt, 14)
        loop.cache.verify()


def test_a_prefix_is_reused_in_both_groups(serve, conversations):
    loop = serve(primary=("120 blocks", "120 blocks"))
    for turn in range(2):
        answers = loop.run(Request(10 * turn + number, prompt, max_new_tokens=14) for number, prompt in enumerate(conversations))
    assert all(answers[10 + number].reused_tokens >= (len(prompt) - 1) // 4 * 4 for number, prompt in enumerate(conversations))
    assert all(answers[10 + number].tokens == answer_to(prompt, 14) for number, prompt in enumerate(conversations))


def test_prompts_that_wait_for_the_blocks_of_their_next_chunk_all_come_to_their_end(serve, conversations):
    """So few blocks that at times every sequence is paused: then the newest one makes room."""
    loop = serve(primary=("9 blocks", "60 blocks"), chunk_size=16, loop_options={"max_batch_size": 4})
    answers = loop.run(Request(number, prompt, max_new_tokens=8) for number, prompt in enumerate(conversations))
    for number, prompt in enumerate(conversations):
        assert answers[number].error is None
        assert answers[number].tokens == answer_to(prompt, 8)


def test_guaranteed_no_evict_holds_over_windows(serve, conversations):
    loop = serve(primary=("16 blocks", "40 blocks"), chunk_size=16, loop_options={"admission": "guaranteed_no_evict"})
    answers = loop.run(Request(number, prompt, max_new_tokens=20) for number, prompt in enumerate(conversations))
    assert [answers[number].tokens for number in range(6)] == [answer_to(prompt, 20) for prompt in conversations]
    assert not any(answer.preemptions for answer in answers.values())


def test_when_all_wait_for_blocks_the_newest_makes_room(serve, conversations):
    loop = serve(chunk_size=16, loop_options={"wait_for_shared_prefix": False})
    for number in (0, 2):
        loop.submit(Request(number, conversations[number], max_new_tokens=4))
    loop.step()
    is_paused, loop.cache.is_paused = loop.cache.is_paused, lambda request_id: True
    assert loop.step() == []
    loop.cache.is_paused = is_paused
    answers = loop.run()
    assert [answers[number].preemptions for number in (0, 2)] == [0, 1]
    assert [answers[number].tokens for number in (0, 2)] == [answer_to(conversations[number], 4) for number in (0, 2)]
