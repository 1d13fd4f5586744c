"""What a scheduler may ask and rely on: reuse, blocks needed, truncation, what-ifs."""

from __future__ import annotations

import pytest
from hand_run import LAST, TOKENS_PER_BLOCK, HandRun, on_nvme, on_secondary, words
from naive_model import snapshot

from kvtier.pools.pool_index import PRIMARY
from kvtier.tiering.ledger import capacity, scheduling
from kvtier.tiering.ledger.group import GroupSpec
from kvtier.tiering.ledger.invariants import verify
from kvtier.tiering.ledger.key import BlockKey, Namespace, TokenKeys, next_chain_key
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.moves import WarmRow
from kvtier.tiering.ledger.request import MultimodalItem, Request
from kvtier.tiering.ledger.rules import LedgerRules
from kvtier.tiering.ledger.scheduling import WhatIf
from kvtier.tiering.ledger.truncating import truncate

# -- match -------------------------------------------------------------------------------------------------------------


def test_match_counts_stored_blocks_by_level_and_names_the_first_new_one() -> None:
    run = HandRun(9, 3, 6)
    blocks = run.serve("abc")
    run.offload(blocks[1])
    run.settle()
    found = capacity.match(run.ledger, run.request("abcde"))
    assert found.reusable_blocks == 3
    assert found.tokens_by_level == (8, 4, 0)
    assert found.referenced_blocks == 0
    key = found.first_new_key
    assert key is not None
    assert key == BlockKey(tuple(words("d")), prefix=key.prefix)
    assert capacity.match(run.ledger, run.request("abc")).first_new_key is None, "only the newest token is new"
    run.finish()


def test_match_never_counts_the_last_prompt_token() -> None:
    run = HandRun(6)
    run.serve("ab")
    assert capacity.match(run.ledger, Request(1, words("ab"))).reusable_blocks == 1
    assert capacity.match(run.ledger, Request(1, [*words("ab"), LAST])).reusable_blocks == 2
    run.finish()


def test_match_counts_full_blocks_only() -> None:
    run = HandRun(6)
    run.serve([*words("a"), 1, 2, 3])
    assert capacity.match(run.ledger, Request(1, [*words("a"), 1, 2, 3, 4])).reusable_blocks == 1
    run.finish()


def test_match_tells_how_many_of_the_blocks_are_held_by_active_sequences() -> None:
    run = HandRun(9)
    run.serve("abc")
    run.add("ab")
    found = capacity.match(run.ledger, run.request("abcd"))
    assert (found.reusable_blocks, found.referenced_blocks) == (3, 2)
    run.finish()


def test_match_changes_nothing_and_moves_no_counter() -> None:
    run = HandRun(9, 2, 4, warm=[WarmRow(0, 0, b"\x01" * 32)])
    on_secondary(run, "ab")
    before = snapshot(run.ledger)
    for letters in ("a", "ab", "abz", "x"):
        capacity.match(run.ledger, run.request(letters))
        capacity.needed_blocks_one_step(run.ledger, run.request(letters), False)
        capacity.remaining_blocks_to_completion(run.ledger, run.request(letters))
    assert snapshot(run.ledger) == before
    assert run.note() == []
    run.finish()


def test_match_stops_at_a_hole() -> None:
    run = HandRun(9)
    blocks = run.serve("abc")
    run.ledger.allocators[0].forget(blocks[1])
    run.note()
    assert capacity.match(run.ledger, run.request("abcd")).reusable_blocks == 1
    run.finish()


def test_match_finds_nothing_where_reuse_is_off_or_not_asked_for() -> None:
    run = HandRun(9)
    run.serve("ab")
    assert capacity.match(run.ledger, run.request("ab", skip_read=True)).reusable_blocks == 0
    assert capacity.match(run.ledger, run.request("ab", cache_salt="tenant")).reusable_blocks == 0
    off = HandRun(9, enable_block_reuse=False)
    off.serve("ab")
    assert capacity.match(off.ledger, off.request("ab")).reusable_blocks == 0
    run.finish()
    off.finish()


def test_match_counts_warm_blocks_on_nvme_behind_and_between_stored_ones() -> None:
    request = Request(1, [*words("abcd"), LAST])
    keys = TokenKeys(request, TOKENS_PER_BLOCK)
    chain = [Namespace(b"", request).chain_seed]
    for number in range(4):
        chain.append(next_chain_key(chain[-1], keys.block_key(number, TOKENS_PER_BLOCK)))
    run = HandRun(9, 2, 4, warm=[WarmRow(0, slot, key) for slot, key in enumerate(chain[2:5])])
    assert capacity.match(run.ledger, request).reusable_blocks == 0, "the first block is missing"
    run.serve("a")
    found = capacity.match(run.ledger, request)
    assert found.reusable_blocks == 4
    assert found.tokens_by_level == (4, 0, 12)
    assert capacity.match(run.ledger, Request(1, [*words("abcd")])).reusable_blocks == 3
    assert len(run.ledger.allocators[0].warm) == 3, "asking adopts nothing"
    run.finish()


# -- blocks needed -----------------------------------------------------------------------------------------------------


def ledger_of(primary: int, tokens_per_block: int) -> Ledger:
    return Ledger([GroupSpec((primary, 0, 0))], tokens_per_block, LedgerRules(policy="lru"))


def generating(ledger: Ledger, prompt: int, generated: int, max_new: int, draft: int = 0) -> int:
    """A sequence with a prompt and generated tokens of these numbers; its id."""
    ledger.add_sequences([Request(1, range(prompt), max_new_tokens=max_new, num_draft_tokens=draft)])
    for token in range(generated):
        ledger.append_step([1], [[token]])
    verify(ledger)
    return 1


@pytest.mark.parametrize(("prompt", "blocks"), [(1, 1), (16, 1), (17, 2), (136, 9), (512, 32), (1024, 64)])
def test_a_new_request_needs_the_blocks_of_its_whole_prompt(prompt: int, blocks: int) -> None:
    ledger = ledger_of(80, 16)
    request = Request(1, range(prompt), max_new_tokens=1)
    assert capacity.needed_blocks_one_step(ledger, request, False) == blocks
    free = ledger.allocators[0].queues.num_free(PRIMARY)
    ledger.add_sequences([request])
    assert free - ledger.allocators[0].queues.num_free(PRIMARY) == blocks
    verify(ledger)


@pytest.mark.parametrize(("prompt", "generated", "max_new", "draft", "two_steps", "blocks"), [
    (512, 0, 1000, 0, False, 1),
    (512, 8, 1000, 0, False, 0),
    (518, 0, 1000, 0, False, 0),
    (512, 16, 1000, 0, False, 1),
    (128, 15, 1000, 0, False, 0),
    (128, 15, 1000, 0, True, 1),
    (302, 0, 1000, 3, False, 1),
    (298, 0, 1000, 3, False, 0),
    (512, 16, 16, 0, False, 0),    # nothing more may be generated
    (127, 0, 1, 30, False, 0),     # drafts do not count beyond what may be generated
    (128, 0, 100, 16, True, 3),
])
def test_a_sequence_needs_the_blocks_of_its_next_tokens(prompt: int, generated: int, max_new: int, draft: int, two_steps: bool,
                                                       blocks: int) -> None:
    ledger = ledger_of(80, 16)
    sequence = ledger.sequence(generating(ledger, prompt, generated, max_new, draft))
    assert capacity.needed_blocks_one_step(ledger, sequence, two_steps) == blocks
    steps = 2 if two_steps else 1
    tokens = min(steps * (draft + 1), max_new - generated)
    free = ledger.allocators[0].queues.num_free(PRIMARY)
    if tokens:
        ledger.append_step([1], [[1] * tokens])
    assert free - ledger.allocators[0].queues.num_free(PRIMARY) == blocks, "and that is what the step takes"


def test_drafts_of_a_new_request_count_up_to_what_may_be_generated() -> None:
    ledger = ledger_of(8, 16)
    assert capacity.needed_blocks_one_step(ledger, Request(1, range(16), num_draft_tokens=5, max_new_tokens=5), False) == 2
    assert capacity.needed_blocks_one_step(ledger, Request(1, range(16), num_draft_tokens=5, max_new_tokens=0), False) == 1


def test_only_referenced_stored_blocks_are_subtracted() -> None:
    run = HandRun(9)
    run.serve("abc")
    request = run.request("abcd")
    assert capacity.needed_blocks_one_step(run.ledger, request, False) == 5, "an unreferenced stored block still takes a free one"
    run.add("ab")
    assert capacity.needed_blocks_one_step(run.ledger, request, False) == 3
    free = run.free()
    run.add_all(request)
    assert free - run.free() == 3
    run.finish()


@pytest.mark.parametrize(("prompt", "max_new", "tokens_per_block", "blocks"), [(1024, 128, 1, 1152), (1024, 128, 64, 18), (1, 0, 64, 1)])
def test_remaining_blocks_count_prompt_and_output(prompt: int, max_new: int, tokens_per_block: int, blocks: int) -> None:
    ledger = ledger_of(1200, tokens_per_block)
    request = Request(1, range(prompt), max_new_tokens=max_new)
    assert capacity.remaining_blocks_to_completion(ledger, request) == blocks
    [sequence] = ledger.add_sequences([request])
    assert capacity.remaining_blocks_to_completion(ledger, sequence) == blocks - len(sequence.blocks)


def test_remaining_blocks_fall_to_zero_with_the_last_token() -> None:
    run = HandRun(8)
    sequence = run.add("ab", max_new_tokens=10)
    left = [capacity.remaining_blocks_to_completion(run.ledger, sequence)]
    for token in range(10):
        run.append(sequence, token)
        left.append(capacity.remaining_blocks_to_completion(run.ledger, sequence))
    assert left == [2] * 4 + [1] * 4 + [0] * 3
    run.finish()


def test_remaining_blocks_of_a_new_request_subtract_referenced_stored_blocks() -> None:
    run = HandRun(9)
    run.serve("abc")
    run.add("ab")
    assert capacity.remaining_blocks_to_completion(run.ledger, run.request("abc", max_new_tokens=8)) == 6 - 2
    run.finish()


@pytest.mark.parametrize("tokens_per_block", [1, 64])
@pytest.mark.parametrize(("prompt", "output"), [(128, 128), (256, 128), (500, 100), (20, 50), (63, 65), (1, 64)])
def test_what_was_admitted_by_remaining_blocks_can_be_generated_to_the_end(tokens_per_block: int, prompt: int, output: int) -> None:
    primary = 5000 // tokens_per_block
    ledger = ledger_of(primary, tokens_per_block)
    ids: list[int] = []
    promised = 0
    for number in range(1, 60):
        request = Request(number, range(number * 7, number * 7 + prompt), max_new_tokens=output)
        remaining = capacity.remaining_blocks_to_completion(ledger, request)
        if promised + remaining > primary:
            break
        promised += remaining
        ledger.add_sequences([request])
        ids.append(number)
    assert len(ids) > 1
    for start in range(0, output, 16):
        step = min(16, output - start)
        ledger.append_step(ids, [list(range(start, start + step))] * len(ids))
    for number in ids:
        assert capacity.remaining_blocks_to_completion(ledger, ledger.sequence(number)) == 0
        ledger.remove_sequence(number, True)
    verify(ledger)
    assert ledger.allocators[0].queues.num_free(PRIMARY) == primary


# -- truncation --------------------------------------------------------------------------------------------------------


def test_truncate_forgets_what_is_beyond_the_kept_tokens_on_every_level() -> None:
    run = HandRun(9, 3, 6)
    blocks = run.serve("abcd")
    run.offload(blocks[1])
    run.offload(blocks[2])
    run.refresh()
    run.settle()
    assert blocks[2].nvme_backing is not None
    assert truncate(run.ledger, run.request("abcd"), 5) == 2, "a block that is kept in part is kept"
    run.settle()
    assert [block.node is not None for block in blocks] == [True, True, False, False]
    assert capacity.match(run.ledger, run.request("abcd")).reusable_blocks == 2
    assert set(run.tier.rows.values()) <= {run.key(block) for block in blocks[:2]}
    run.finish()


def test_truncate_forgets_side_branches_behind_the_kept_part_and_no_others() -> None:
    run = HandRun(12)
    run.serve("abc")
    run.serve("abd")
    run.serve("axy")
    assert truncate(run.ledger, run.request("abc"), 4) == 3
    run.note()
    for letters, left in (("abc", 1), ("abd", 1), ("axy", 3)):
        assert capacity.match(run.ledger, run.request(letters)).reusable_blocks == left
    run.finish()


def test_truncate_forgets_a_stored_tail() -> None:
    run = HandRun(6)
    [_full, tail] = run.serve([*words("a"), 1, 2, 3])
    assert truncate(run.ledger, Request(1, [*words("a"), 1, 2, 3]), 4) == 1
    run.note()
    assert tail.node is None
    assert capacity.match(run.ledger, run.request("ab")).reusable_blocks == 1
    run.finish()


def test_truncate_leaves_blocks_with_the_sequences_that_hold_them() -> None:
    run = HandRun(9)
    run.serve("abc")
    sequence = run.add("abc")
    held = list(sequence.blocks)
    assert truncate(run.ledger, run.request("abc"), 0) == 3
    run.note()
    assert sequence.blocks == held
    assert all(block.ref_count == 1 for block in held)
    assert sequence.valid == 12
    assert run.compute(sequence)
    run.remove(sequence)
    assert capacity.match(run.ledger, run.request("abc")).reusable_blocks == 3, "and its end stores them again"
    run.finish()


def test_truncated_blocks_are_taken_before_any_content() -> None:
    run = HandRun(6)
    blocks = run.serve("ab")
    [other] = run.serve("c")
    assert run.free() == 6
    truncate(run.ledger, run.request("ab"), 0)
    run.note()
    run.add([1] * 17)
    assert other.node is not None
    assert all(block.node is None for block in blocks)
    run.finish()


def test_truncate_of_what_is_not_stored_forgets_nothing() -> None:
    run = HandRun(6)
    run.serve("ab")
    before = snapshot(run.ledger)
    assert truncate(run.ledger, run.request("xy"), 0) == 0
    assert truncate(run.ledger, run.request("ab", cache_salt="tenant"), 0) == 0
    assert truncate(run.ledger, run.request("ab"), 8) == 0
    assert snapshot(run.ledger) == before
    run.finish()


def test_truncate_reaches_nvme_and_deletes_the_rows() -> None:
    run = HandRun(6, 2, 4)
    on_nvme(run, "ab")
    assert len(run.tier.rows) >= 2
    assert truncate(run.ledger, run.request("ab"), 0) == 2
    run.settle()
    assert run.tier.rows == {}
    run.finish()


# -- what-ifs ----------------------------------------------------------------------------------------------------------


def test_a_what_if_counts_a_shared_block_when_its_last_sequence_goes_and_touches_no_real_count() -> None:
    run = HandRun(9)
    run.serve("ab")
    first, second = run.add_all(run.request("ab"), run.request("ab"))
    before = snapshot(run.ledger)
    what_if = WhatIf(1)
    assert what_if.remove(run.ledger, first) == 1
    assert what_if.remove(run.ledger, second) == 3
    assert snapshot(run.ledger) == before
    what_if = WhatIf(1)
    assert what_if.remove(run.ledger, second) == 1, "a new what-if starts from the real counts"
    free = run.free()
    run.remove(second)
    assert run.free() - free == 1
    run.finish()


def test_a_what_if_does_not_free_what_a_lease_holds() -> None:
    run = HandRun(6)
    sequence = run.add("ab")
    lease = run.ledger.pin(sequence.id)
    what_if = WhatIf(1)
    assert what_if.remove(run.ledger, sequence) == 0
    run.ledger.release_lease(lease)
    what_if = WhatIf(1)
    assert what_if.remove(run.ledger, sequence) == 3
    run.finish()


def test_a_request_asked_about_again_is_told_what_has_changed_since() -> None:
    run = HandRun(12)
    request = run.request("abc")
    assert capacity.match(run.ledger, request).reusable_blocks == 0
    run.serve("ab")
    assert capacity.match(run.ledger, request).reusable_blocks == 2
    (first,) = run.add_all(request)
    assert first.prepopulated == 8
    assert run.compute(first)
    run.append(first, 1, 2)
    assert capacity.match(run.ledger, request).reusable_blocks == 2, "not the sequence's own, longer keys"
    run.remove(first)
    assert capacity.match(run.ledger, request).reusable_blocks == 3
    truncate(run.ledger, run.request("ab"), 4)
    assert capacity.match(run.ledger, request).reusable_blocks == 1


def test_a_what_if_does_not_free_what_a_file_is_being_read_into() -> None:
    run = HandRun(8, 2, 4)
    on_nvme(run, "ab")
    sequence = run.add("abc")
    what_if = WhatIf(1)
    assert what_if.remove(run.ledger, sequence) == 2, "block c and the tail; a and b are being read"
    free = run.free()
    expected = scheduling.num_schedulable_blocks(run.ledger, what_if, 0)
    run.remove(sequence, store=False)
    assert run.free() == expected == free + 2
    run.finish()


def test_equal_blocks_behind_different_prompts_are_not_worth_waiting_for() -> None:
    run = HandRun(8)
    computing = {capacity.match(run.ledger, run.request("ax")).first_new_key, None}
    assert scheduling.beneficial_to_skip(run.ledger, run.request("ay"), computing)
    run.serve("a")
    run.serve("b")
    computing = {capacity.match(run.ledger, run.request("ax")).first_new_key}
    assert scheduling.beneficial_to_skip(run.ledger, run.request("axy"), computing)
    assert not scheduling.beneficial_to_skip(run.ledger, run.request("bx"), computing), "the same tokens behind others"
    run.finish()


def test_the_images_before_a_block_tell_its_key_from_others() -> None:
    run = HandRun(8)
    keys = []
    for letter in (b"i", b"j"):
        request = run.request("ax", multimodal=[MultimodalItem(letter * 32, [(0, 2)])])
        sequence = run.add("a", multimodal=[MultimodalItem(letter * 32, [(0, 2)])])
        assert run.compute(sequence)
        run.remove(sequence)
        keys.append(capacity.match(run.ledger, request).first_new_key)
    assert keys[0] is not None
    assert keys[0] != keys[1]
    assert keys[0].tokens == tuple(words("x"))
    run.finish()
