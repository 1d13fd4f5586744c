"""What a history of uses tells about the blocks of a request (design: taking a slot of a level; ``policies/use_history.py``).

Nothing is noted before the first content has had to go: until then there is nothing to choose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from zlib import crc32

from kvtier.policies.eviction import GRADE_LISTS
from kvtier.policies.named import LRU, candidates_of
from kvtier.policies.retention import DEFAULT_PRIORITY
from kvtier.policies.use_history import UseHistory
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY
from kvtier.tiering.ledger.admission import AdmissionPlan, may_store
from kvtier.tiering.ledger.key import TokenKeys
from kvtier.tiering.ledger.rules import LedgerRules
from kvtier.tiering.ledger.sequence import ActiveSequence
from kvtier.tiering.ledger.state import LedgerState

if TYPE_CHECKING:
    from mypy_extensions import i64  # machine integers where this is compiled; plain ints otherwise

TOKENS_PER_KEY: Final = 1024


def history_of(rules: LedgerRules, num_blocks: tuple[int, int, int], tokens_per_block: int) -> UseHistory | None:
    """The history that a policy needs, for what ordinary content can be kept in; None for LRU that asks nothing of what goes to NVMe."""
    candidates = candidates_of(rules.policy)
    if candidates == (LRU,) and rules.nvme_min_uses == 0:
        return None
    capacity = num_blocks[PRIMARY]
    if rules.secondary_offload_min_priority <= DEFAULT_PRIORITY:
        capacity += num_blocks[SECONDARY]
        if rules.nvme_offload_min_priority <= DEFAULT_PRIORITY:
            capacity += num_blocks[NVME]
    return UseHistory(capacity, rules.history_stride or max(TOKENS_PER_KEY // tokens_per_block, 1), candidates)


def note_uses(state: LedgerState, history: UseHistory, plan: AdmissionPlan, sequence: ActiveSequence) -> None:
    """A request has its blocks: the matched ones have one use more, the others what is remembered of them."""
    counters = state.counters
    if counters.alloc_total == counters.alloc_new or not may_store(state, plan.request):
        return
    stride = history.stride
    end = (plan.request.num_tokens - 1) // state.tokens_per_block
    namespace = sequence.namespace
    # Nobody sees by what is kept here what others ask for under another salt.
    is_plain = namespace.lora_id is None and namespace.cache_salt is None and namespace.encoder_digest is None
    grades = history.observe(_parts(plan.keys, stride, end), 0 if is_plain else crc32(namespace.chain_seed))
    for allocator in state.allocators:
        allocator.queues.weights = history.weights
    once: i64 = GRADE_LISTS[1]
    more_often: i64 = GRADE_LISTS[2]
    for row in sequence.rows:
        blocks = row.blocks
        matched = min(plan.num_matched, len(blocks))
        for position in range(matched):
            block = blocks[position]
            if block.grade_list != more_often and block.id >= 0:
                block.grade_list = once if block.grade_list == 0 else more_often
        for number in range(matched // stride, len(grades)):
            grade = grades[number]
            if grade == 0:
                break  # whatever is behind a new block is new
            start: i64 = GRADE_LISTS[grade]
            for position in range(number * stride, min((number + 1) * stride, len(blocks))):
                block = blocks[position]
                if block.grade_list < start and block.id >= 0:
                    block.grade_list = start


def _parts(keys: TokenKeys, stride: int, end: int) -> list[bytes]:
    """The keys of every ``stride``-th of the first ``end`` blocks."""
    places = range(stride - 1, end, stride)
    if keys.suffixes:
        return [keys.block_key(place, keys.tokens_per_block) for place in places]
    size = keys.block_bytes
    data = keys.data_of(end * keys.tokens_per_block)
    return [data[place * size:(place + 1) * size] for place in places]
