"""What a scheduler asks before it admits: reuse to expect, blocks needed (design: scheduler's contract). Changes nothing."""

from __future__ import annotations

from kvtier.pools.pool_index import NUM_LEVELS, NVME, level_of
from kvtier.tiering.ledger.admission import present_prefix
from kvtier.tiering.ledger.key import BlockKey, Namespace, TokenKeys, multimodal_keys, next_chain_key
from kvtier.tiering.ledger.ledger import GROUP, Ledger
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.sequence import ActiveSequence
from kvtier.tiering.ledger.storing import warm_prefix


class PrefixReuse:
    """What a prompt would reuse now.

    Attributes:
        reusable_blocks: full blocks of the prompt that are stored, on any level.
        referenced_blocks: those of them that active sequences hold: they cost no free block.
        tokens_by_level: tokens of the reusable blocks by level (primary, secondary, NVMe).
        first_new_key: key of the first block that would have to be computed; None when every full block is stored.
    """

    def __init__(self, reusable_blocks: int, referenced_blocks: int, tokens_by_level: tuple[int, ...],
                 first_new_key: BlockKey | None) -> None:
        self.reusable_blocks = reusable_blocks
        self.referenced_blocks = referenced_blocks
        self.tokens_by_level = tokens_by_level
        self.first_new_key = first_new_key

    def __repr__(self) -> str:
        return (f"PrefixReuse(reusable_blocks={self.reusable_blocks}, referenced_blocks={self.referenced_blocks}, "
                f"tokens_by_level={self.tokens_by_level})")


def match(ledger: Ledger, request: Request) -> PrefixReuse:
    """Exact full blocks only; the last prompt token is never reused."""
    tokens_per_block = ledger.tokens_per_block
    keys = TokenKeys(request, tokens_per_block)
    namespace = Namespace(ledger.rules.namespace_seed, request)
    usable = request.num_tokens - 1
    tokens = [0] * NUM_LEVELS
    referenced = 0
    number = 0
    if ledger.rules.enable_block_reuse and not request.skip_read:
        root = ledger.tree.find_root(namespace)
        if root is not None:
            blocks = present_prefix(ledger.tree.walk(root, keys, usable), GROUP)
            for block in blocks:
                tokens[level_of(block.index)] += tokens_per_block
                referenced += 1 if block.ref_count > 0 else 0
            number = len(blocks)
        if ledger.allocators[GROUP].warm and namespace.is_persistent:
            number = _with_warm(ledger, namespace, keys, usable, number, tokens)
    return PrefixReuse(number, referenced, tuple(tokens), _key_of(request, keys, number))


def _with_warm(ledger: Ledger, namespace: Namespace, keys: TokenKeys, usable: int, number: int, tokens: list[int]) -> int:
    """Blocks on NVMe since the start that continue the prefix count too."""
    walk, found = warm_prefix(ledger.tree, ledger.allocators, ledger.groups, namespace, keys, usable)
    warm = {block_number for block_number, _block in found[GROUP]}
    stored = [] if walk is None else [value for node, count in zip(walk.nodes, walk.counts, strict=True)
                                      for value in node.values[GROUP][:count]]
    while number in warm or (number < len(stored) and stored[number] is not None):
        block = stored[number] if number < len(stored) else None
        level = NVME if block is None else level_of(block.index)
        tokens[level] += ledger.tokens_per_block
        number += 1
    return number


def _key_of(request: Request, keys: TokenKeys, number: int) -> BlockKey | None:
    start = number * keys.tokens_per_block
    end = start + keys.tokens_per_block
    if end > request.num_tokens:
        return None
    extra = None if request.extra_ids is None else request.extra_ids[start:end]
    return BlockKey(tuple(keys.token_ids(start, end)), request.lora_id, request.cache_salt, extra,
                    tuple(multimodal_keys(request.multimodal, start, end)))


def needed_blocks_one_step(ledger: Ledger, request: Request | ActiveSequence, two_steps: bool) -> int:
    """Primary blocks that the next step (or two) may take.

    A request not admitted yet counts its whole prompt with drafts, less the stored blocks that somebody references: an
    unreferenced stored block is reused too, but still takes a free one. A sequence counts what its next tokens need.
    """
    tokens_per_block = ledger.tokens_per_block
    if isinstance(request, Request):
        length = request.num_tokens + min(request.num_draft_tokens, request.max_new_tokens)
        shared = min(match(ledger, request).referenced_blocks, (request.num_tokens - 1) // tokens_per_block)
        return _blocks(length, tokens_per_block) - shared
    asked = request.request
    generated = request.num_tokens - asked.num_tokens
    left = max(asked.max_new_tokens - generated, 0)
    added = min((2 if two_steps else 1) * (asked.num_draft_tokens + 1), left)
    return _blocks(request.num_tokens + added, tokens_per_block) - _blocks(request.num_tokens, tokens_per_block)


def remaining_blocks_to_completion(ledger: Ledger, request: Request | ActiveSequence) -> int:
    """Primary blocks from now until ``max_new_tokens`` are generated. A new request subtracts referenced stored blocks."""
    tokens_per_block = ledger.tokens_per_block
    if isinstance(request, Request):
        total = _blocks(request.num_tokens + request.max_new_tokens, tokens_per_block)
        return total - min(match(ledger, request).referenced_blocks, (request.num_tokens - 1) // tokens_per_block)
    asked = request.request
    total = _blocks(max(asked.num_tokens + asked.max_new_tokens, request.num_tokens), tokens_per_block)
    return max(total - len(request.blocks), 0)


def _blocks(num_tokens: int, tokens_per_block: int) -> int:
    return (num_tokens + tokens_per_block - 1) // tokens_per_block


def truncate(ledger: Ledger, request: Request, keep_tokens: int) -> int:
    """Forget what is stored of this prompt beyond its first ``keep_tokens`` tokens. Referenced blocks stay with their sequences.

    Returns the number of blocks forgotten.
    """
    keys = TokenKeys(request, ledger.tokens_per_block)
    namespace = Namespace(ledger.rules.namespace_seed, request)
    first = _blocks(keep_tokens, ledger.tokens_per_block)
    forgotten = _forget_warm(ledger, namespace, keys, first)
    root = ledger.tree.find_root(namespace)
    if root is None:
        return forgotten
    walk = ledger.tree.walk(root, keys, request.num_tokens)
    number = 0
    for node, count in zip(list(walk.nodes), list(walk.counts), strict=True):
        if number + count > first:
            # Everything behind the kept part goes, side branches of it included: they extend what is to be forgotten.
            doomed = [value for value in node.values[GROUP][max(first - number, 0):] if value is not None]
            stack = list(node.children.values())
            while stack:
                child = stack.pop()
                doomed.extend([value for value in child.values[GROUP] if value is not None])
                stack.extend(child.children.values())
            for block in reversed(doomed):
                ledger.allocators[GROUP].forget(block)
                forgotten += 1
            return forgotten
        number += count
    # All full blocks are kept, or there are none beyond: what is left is a stored tail that is part of this prompt.
    if number >= first:
        tails = [(shared, node.values[GROUP][position]) for shared, node, position
                 in ledger.tree.partial_places(walk, keys, request.num_tokens)]
        for shared, tail in tails:
            if tail is not None and shared == tail.num_tokens:
                ledger.allocators[GROUP].forget(tail)
                forgotten += 1
    return forgotten


def _forget_warm(ledger: Ledger, namespace: Namespace, keys: TokenKeys, first: int) -> int:
    """Forget what NVMe has held since the start of blocks ``first`` and later, whatever is stored or missing between them."""
    forgotten = 0
    parent = namespace.chain_seed
    for number in range(keys.num_tokens // keys.tokens_per_block):
        if not ledger.allocators[GROUP].warm:
            break
        parent = next_chain_key(parent, keys.block_key(number, keys.tokens_per_block))
        block = ledger.allocators[GROUP].warm.get(parent)
        if block is not None and number >= first:
            ledger.allocators[GROUP].forget(block)
            forgotten += 1
    return forgotten


def start_scheduling(ledger: Ledger) -> None:
    """Begin a what-if, which :func:`scheduling_remove_sequence` goes on with."""
    ledger.allocators[GROUP].start_scheduling()


def scheduling_remove_sequence(ledger: Ledger, sequence: ActiveSequence) -> int:
    """As if the sequence were removed. Returns how many primary blocks that would free."""
    allocator = ledger.allocators[GROUP]
    return sum(1 for block in sequence.blocks if allocator.release_in_scheduling(block))
