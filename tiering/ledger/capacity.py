"""What a scheduler asks before it admits: reuse to expect, blocks needed (design: scheduler's contract). Changes nothing."""

from __future__ import annotations

from kvtier.pools.pool_index import NUM_LEVELS, PRIMARY, level_of
from kvtier.tiering.ledger.admission import may_reuse, most_reusable, num_new_blocks
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.chunks import chunk_end
from kvtier.tiering.ledger.decoding import num_tail_copies
from kvtier.tiering.ledger.group import CROSS, FULL, RECURRENT, WINDOW
from kvtier.tiering.ledger.key import BlockKey, Namespace, TokenKeys, multimodal_keys
from kvtier.tiering.ledger.node import Walk
from kvtier.tiering.ledger.prefill import num_chunk_blocks
from kvtier.tiering.ledger.prefix import usable_rows, walked_values
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.sequence import ActiveSequence
from kvtier.tiering.ledger.state import LedgerState
from kvtier.tiering.ledger.storing import warm_prefix


class PrefixReuse:
    """What a prompt would reuse now.

    Attributes:
        reusable_blocks: full blocks of the prompt that are stored, on any level, and that every group can serve.
        referenced_blocks: those of them that active sequences hold in every group that needs them: they cost no free block.
        tokens_by_level: tokens of the reusable blocks by level (primary, secondary, NVMe); where groups differ, the slowest counts.
        unreferenced_by_group: reusable blocks that the group needs and nobody holds on the primary level: each takes a free block there.
    """

    def __init__(self, reusable_blocks: int, referenced_blocks: int, tokens_by_level: tuple[int, ...],
                 unreferenced_by_group: tuple[int, ...], request: Request, keys: TokenKeys) -> None:
        self.reusable_blocks = reusable_blocks
        self.referenced_blocks = referenced_blocks
        self.tokens_by_level = tokens_by_level
        self.unreferenced_by_group = unreferenced_by_group
        self._request = request
        self._keys = keys

    @property
    def first_new_key(self) -> BlockKey | None:
        """Key of the first block that would have to be computed; None when every full block is stored. Made when asked for."""
        return _key_of(self._request, self._keys, self.reusable_blocks)

    @property
    def reusable_tokens(self) -> int:
        return sum(self.tokens_by_level)

    def __repr__(self) -> str:
        return (f"PrefixReuse(reusable_blocks={self.reusable_blocks}, referenced_blocks={self.referenced_blocks}, "
                f"tokens_by_level={self.tokens_by_level})")


def match(state: LedgerState, request: Request) -> PrefixReuse:
    """Exact full blocks only; the last prompt token is never reused."""
    tokens = [0] * NUM_LEVELS
    usable = most_reusable(state, request)
    followed = state.follow(request, usable)
    keys = followed.keys
    walk = followed.walk
    if not may_reuse(state, request):
        return PrefixReuse(0, 0, tuple(tokens), (0,) * len(state.groups), request, keys)
    namespace = followed.namespace
    is_warm = state.has_warm() and namespace.is_persistent
    if state.is_single and not is_warm:
        number = referenced = 0
        if walk is not None:
            number, referenced = _count_single(walk, state.tokens_per_block, tokens)
        return PrefixReuse(number, referenced, tuple(tokens), (number - referenced,), request, keys)
    values: list[list[Block | None]] = [[] for _ in state.groups]
    if walk is not None:
        values = [walked_values(walk, group) for group in range(len(state.groups))]
    if is_warm:
        _add_warm(state, namespace, keys, usable, values)
    return _summary(state, request, keys, usable_rows(state, values))


def _summary(state: LedgerState, request: Request, keys: TokenKeys, rows: list[list[Block]]) -> PrefixReuse:
    number = len(rows[state.leading_group])
    levels = [PRIMARY] * number
    is_held = [True] * number
    unreferenced = [0] * len(rows)
    for group, row in enumerate(rows):
        for position, block in enumerate(row):
            if block.id < 0:
                continue
            level = level_of(block.index)
            if level > levels[position]:
                levels[position] = level
            if block.ref_count == 0 or level != PRIMARY:  # a lease may hold a lower block, which still has to come up
                unreferenced[group] += 1
                is_held[position] = False
    tokens = [0] * NUM_LEVELS
    for level in levels:
        tokens[level] += state.tokens_per_block
    return PrefixReuse(number, sum(is_held), tuple(tokens), tuple(unreferenced), request, keys)


def _count_single(walk: Walk, tokens_per_block: int, tokens: list[int]) -> tuple[int, int]:
    """Blocks along a walk up to the first hole, and how many of them are referenced; adds their tokens by level."""
    number = 0
    referenced = 0
    blocks = [0] * NUM_LEVELS
    for step in range(len(walk.nodes)):
        node = walk.nodes[step]
        count = walk.counts[step]
        if count == node.length and count == node.present[0] and node.lower[0] == 0:  # the rule: nothing to look at one by one
            blocks[PRIMARY] += count
            referenced += node.held[0]
            number += count
            continue
        values = node.values[0]
        for position in range(count):
            block = values[position]
            if block is None:
                count = -1
                break
            level = level_of(block.index)
            blocks[level] += 1
            if block.ref_count > 0 and level == PRIMARY:  # a lease may hold a lower block, which still has to come up
                referenced += 1
            number += 1
        if count < 0:
            break
    for level in range(NUM_LEVELS):
        tokens[level] += blocks[level] * tokens_per_block
    return number, referenced


def _add_warm(state: LedgerState, namespace: Namespace, keys: TokenKeys, usable: int, values: list[list[Block | None]]) -> None:
    """Blocks on NVMe since the start count as if they were in the tree already."""
    _walk, found = warm_prefix(state.tree, state.allocators, state.groups, namespace, keys, usable)
    for row, numbered in zip(values, found, strict=True):
        for number, block in numbered:
            while len(row) <= number:
                row.append(None)
            row[number] = block
    longest = max(len(row) for row in values)
    for row in values:
        row.extend([None] * (longest - len(row)))


def _key_of(request: Request, keys: TokenKeys, number: int) -> BlockKey | None:
    start = number * keys.tokens_per_block
    end = start + keys.tokens_per_block
    if end > request.num_tokens:
        return None
    extra = None if request.extra_ids is None else request.extra_ids[start:end]
    return BlockKey(tuple(keys.token_ids(start, end)), request.lora_id, request.cache_salt, extra,
                    tuple(multimodal_keys(request.multimodal, start, end)), request.encoder_digest, keys.prefix_digest(number))


def needed_blocks_one_step(state: LedgerState, request: Request | ActiveSequence, two_steps: bool, group: int = 0) -> int:
    """Primary blocks of a group that the next step (or two) may take.

    A request not admitted yet counts its whole prompt with drafts, or in a window group with chunked prefill the first chunk, less the
    stored blocks that it needs not take: those that somebody references, and those out of its window. An unreferenced stored block is
    reused too, but still takes a free one. A sequence counts what its next tokens need.

    While this many are free in every group, no full block that :func:`match` finds is given up for want of room. With fewer, a request to
    a model with recurrent layers may be admitted without any reuse: the state that it would start from takes a block beside its copy.
    """
    state.check_group(group)
    geometry = state.geometries[group]
    if isinstance(request, Request):
        reuse = match(state, request)
        reused = reuse.reusable_blocks * state.tokens_per_block
        if state.partial_reuse:  # a chunk that ends inside of a block may be reused as a whole with the block's first tokens
            reused += state.tokens_per_block - 1
        needed = num_new_blocks(state, request, group, reuse.reusable_blocks, reused) + reuse.unreferenced_by_group[group]
        if geometry.kind == CROSS or geometry.kind == RECURRENT:
            return needed
        if _is_chunked(state, group) and chunk_end(state.rules.chunk_size, reused, request.num_tokens) < request.num_tokens:
            return needed
        drafts = min(request.num_draft_tokens, request.max_new_tokens)
        behind = geometry.num_blocks(request.num_tokens + drafts) - geometry.num_blocks(request.num_tokens)
        return needed + behind * request.beam_width
    asked = request.request
    if _is_chunked(state, group) and request.covered < request.num_tokens:
        end = chunk_end(state.rules.chunk_size, request.covered, request.num_tokens)
        return num_chunk_blocks(geometry, request, request.rows[group], end)
    left = max(asked.max_new_tokens - (request.num_tokens - asked.num_tokens), 0)
    added = min((2 if two_steps else 1) * (asked.num_draft_tokens + 1), left)
    if geometry.kind == CROSS or added == 0:
        return 0
    positions = geometry.num_blocks(request.num_tokens + added) - geometry.num_blocks(request.num_tokens)
    copies = num_tail_copies(state, request, group)
    if geometry.kind == RECURRENT:  # the running state moves on; only a state that is kept on the way takes a block
        return max(min(positions, 2 if two_steps else 1) * asked.beam_width, copies)
    return positions * asked.beam_width + copies


def remaining_blocks_to_completion(state: LedgerState, request: Request | ActiveSequence, group: int = 0) -> int:
    """Primary blocks of a group from now until ``max_new_tokens`` are generated. Admitting no more requests than there are free
    blocks for guarantees that all complete. A new request subtracts stored blocks as in :func:`needed_blocks_one_step`."""
    state.check_group(group)
    kind = state.geometries[group].kind
    if isinstance(request, Request):
        reuse = match(state, request)
        total = most_blocks(state, request, request.num_tokens + request.max_new_tokens, group)
        if kind == CROSS:
            return total
        matched = reuse.reusable_blocks
        if _is_chunked(state, group):
            saved = matched - reuse.unreferenced_by_group[group]
            shared = saved - min(state.geometries[group].num_departed(matched * state.tokens_per_block), matched)
            whole = _whole_blocks(state, request, request.num_tokens + request.max_new_tokens, group)
            return min(total, whole - saved) + shared  # as below, but what was out of the window from the start is nobody's
        saved = num_new_blocks(state, request, group, 0, 0) - num_new_blocks(state, request, group, matched, 0)
        saved -= reuse.unreferenced_by_group[group]
        if kind == WINDOW and matched:
            # What leaves the window is free for the next block only if nobody else holds it: from now on not what both share, for
            # this request and for the other one.
            whole = _whole_blocks(state, request, request.num_tokens + request.max_new_tokens, group)
            return min(total, whole - saved) + min(saved, most_blocks(state, request, request.num_tokens, group))
        return max(total - saved, 0)
    asked = request.request
    end = max(asked.num_tokens + asked.max_new_tokens, request.num_tokens)
    total = most_blocks(state, asked, end, group)
    if kind == RECURRENT:  # of what was found again, it holds the last state only: what counts is the states that it will keep from now on
        row = request.rows[group]
        ahead = 1 + asked.beam_width - len({row.beam(beam)[-1].id for beam in range(len(row.other_beams) + 1)})
        if state.reuse:
            for position in range(len(row.blocks) - 1, end // state.tokens_per_block):
                if state.geometries[group].keeps_state(position, asked.num_tokens):
                    ahead += 1
        return min(ahead, max(total - held_blocks(request, group), 0)) + _leased_tails(state, request, group, end)
    if kind != WINDOW:
        return max(total - held_blocks(request, group), 0) + (_leased_tails(state, request, group, end) if kind == FULL else 0)
    left = max(total - _exclusive_blocks(request, group), 0)
    geometry = state.geometries[group]
    return min(left, num_chunk_blocks(geometry, request, request.rows[group], end) + num_tail_copies(state, request, group))


def most_blocks(state: LedgerState, request: Request, num_tokens: int, group: int) -> int:
    """Blocks of a group that a request holds at most on its way to ``num_tokens`` tokens, over all beams."""
    geometry = state.geometries[group]
    if geometry.kind == CROSS:
        return geometry.num_blocks(request.encoder_length)
    beams = request.beam_width
    if geometry.kind == RECURRENT:
        kept = 0
        if state.reuse:
            for position in range(num_tokens // state.tokens_per_block):
                if geometry.keeps_state(position, request.num_tokens):
                    kept += 1
        return kept + beams + 1  # one more while a kept state is copied on
    whole = _whole_blocks(state, request, num_tokens, group)
    if geometry.kind != WINDOW or not state.rules.chunk_size:
        return whole
    # Never more than the window and a chunk, which with reuse may begin and end inside of blocks. What beams share of it is all of the
    # prompt but its tail at first; later the sinks at least, and the rest of the prompt as long as it has not left the window.
    tokens_per_block = state.tokens_per_block
    chunk = (state.rules.chunk_size + tokens_per_block - 1) // tokens_per_block * tokens_per_block
    at_once = max(chunk, request.num_draft_tokens + 1)
    held = min(geometry.num_blocks(num_tokens), geometry.num_blocks(geometry.window + at_once) + 1)
    full = geometry.num_full_blocks(request.num_tokens)
    shared = min(full, held)
    if num_tokens > request.num_tokens:
        shared = min(shared, max(full - geometry.num_departed(num_tokens), min(full, geometry.num_sink_blocks)))
    return min(whole, max(min(geometry.num_blocks(request.num_tokens), held) + beams - 1, shared + (held - shared) * beams))


def _is_chunked(state: LedgerState, group: int) -> bool:
    return state.is_chunked and state.geometries[group].kind == WINDOW


def _whole_blocks(state: LedgerState, request: Request, num_tokens: int, group: int) -> int:
    """Blocks of a group that ``num_tokens`` tokens take, out of the window or not, over all beams: they share what the prompt fills."""
    geometry = state.geometries[group]
    shared = min(geometry.num_full_blocks(request.num_tokens), geometry.num_blocks(num_tokens))
    return shared + (geometry.num_blocks(num_tokens) - shared) * request.beam_width


def _exclusive_blocks(sequence: ActiveSequence, group: int) -> int:
    """Primary blocks of a group that nobody holds but this sequence's beams."""
    row = sequence.rows[group]
    references: dict[int, int] = {}
    for beam in range(len(row.other_beams) + 1):
        for block in row.beam(beam):
            if block.id >= 0:
                references[block.id] = references.get(block.id, block.ref_count) - 1
    return sum(1 for left in references.values() if left == 0)


def _leased_tails(state: LedgerState, sequence: ActiveSequence, group: int, end: int) -> int:
    """Blocks of a group that the next of ``end`` tokens are written into, or running states that go on, and that a lease holds too: each
    is copied, and stays beside its copy."""
    row = sequence.rows[group]
    references: dict[int, int] = {}
    if sequence.num_tokens < end:
        is_state = state.geometries[group].kind == RECURRENT
        for beam in range(len(row.other_beams) + 1):
            blocks = row.beam(beam)
            number = len(blocks) - 1 if is_state else sequence.num_tokens // state.tokens_per_block
            if number < len(blocks):
                last = blocks[number]
                references[last.id] = references.get(last.id, last.ref_count) - 1
    return sum(1 for left in references.values() if left > 0)


def held_blocks(sequence: ActiveSequence, group: int) -> int:
    """Primary blocks of a group that a sequence holds, over all its beams."""
    row = sequence.rows[group]
    if not row.other_beams:
        return sum(1 for block in row.blocks if block.id >= 0)
    held: set[int] = set()
    for beam in range(len(row.other_beams) + 1):
        for block in row.beam(beam):
            if block.id >= 0:
                held.add(block.id)
    return len(held)
