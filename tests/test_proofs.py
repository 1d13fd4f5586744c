"""What is proved, by name: each bug class known of this kind of code, each known-answer case and each rule has a test in the default run.

A test of a bug class names its numbers at the start of its docstring (``Bug 13124.``, ``Bugs 8813, 8274, 9056: why``); a test of a case
is called after it (``test_case_D3_...``). Numbers are those of TensorRT-LLM's issues and pull requests.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

BUG_CLASSES: dict[tuple[int, ...], str] = {
    (11879, 12834, 12297): "free counts above the total: a claim after the swap of slots unlinked from the wrong level's list",
    (8813, 8274, 9056): "another prompt's tokens with a host level: copies on two streams not ordered, pending ones kept by block id",
    (15272,): "corruption when blocks go down and up at once: slot n of the device and of the host were one key",
    (15546, 15349): "wrong blocks under an overlap scheduler: the staging buffer of the block table overwritten before its copy was made",
    (13124,): "illegal memory access after an offload: a block id used as a slot",
    (12560, 12667): "hang and ghost free entry: a pin added a reference without taking the block out of its queue",
    (13055,): "a pin from another thread without the lock",
    (12878, 12892, 13029): "over-allocation, less reuse than scheduled: bringing one match up evicted another",
    (15065, 11731): "the scheduler counted reusable blocks twice",
    (12933, 15018): "orphaned blocks: a prompt stored behind a predecessor that had been evicted",
    (12673, 12786, 12818): "wrong output with chunked prefill: blocks stored whose tokens had not been computed",
    (11685,): "something reusable evicted although there were empty blocks",
    (4596, 3735, 699, 2708): "assertions about leaves: a primary block with children on the secondary level",
    (1687,): "the list of free primary blocks without a primary block in it",
    (2699,): "wrong output with an 8-bit cache and reuse",
    (13320,): "a block missing at a decode boundary",
    (16913,): "blocks sent elsewhere while they were offloaded; a transfer manager without a lock",
    (13346,): "placeholders of sliding windows treated like blocks",
    (11173,): "releasing a subtree",
    (15931,): "suspending again and again exhausts the host level",
    (3130,): "how to force the use of the host level",
}

CASES: dict[str, str] = {
    "A1": "free counts", "A2": "looking is not taking; release", "A3": "least recently used", "A4": "priority, and who may go down",
    "A5": "expiry", "A7": "invalid retention ranges", "A": "what holds for all queues",
    "B1": "equality of keys", "B2": "matching tokens", "B3": "shortening", "B4": "64-bit hash", "B5": "multimodal offsets",
    "C1": "attach and detach", "C2": "predecessors and pruning", "C4": "two groups on one node", "C5": "attached elsewhere",
    "C6": "an occupied place", "C9": "leaves",
    "D1": "beams", "D3": "isolation", "D4": "statistics of a request", "D6": "pins", "D8": "priority of a block, unknown ids",
    "E1": "block priorities", "E2": "decode priority", "E7": "a leaf reused in place",
    "F1": "two partial matches", "F3": "full beats partial", "F6": "two copies of an inner block",
    "G1": "order of transfers", "G6": "every byte through a file, by several threads",
    "H1": "event stream", "H4": "blocking poll", "H5": "events of two windows",
    "I1": "out of the window, released", "I2": "out of the window, alive", "I3": "out of the window, taken", "I7": "what-if",
    "I9": "stored and pinned", "I12": "a window below a block", "I15": "shared head",
    "J1": "blocks of one beam", "J2": "remaining to completion", "J3": "needed in one step", "J5": "fill and complete",
    "recurrent": "states, snapshots, growth",
}


RULES: dict[str, tuple[str, ...]] = {  # what breaks caches of this kind in practice, as rules; each with tests that would notice
    "a failed, short or corrupt read is never served, its entry goes, and the engine computes again": (
        "test_a_failed_read_is_a_miss_and_the_others_go_on", "test_a_flipped_bit_is_never_served",
        "test_sequences_that_share_a_failed_block_are_all_told", "test_a_quarantined_slot_is_in_no_queue_and_never_written_again"),
    "a bad entry is not asked for again and again": (
        "test_a_flipped_bit_is_never_served", "test_a_block_computed_again_after_a_failure_can_be_copied_again"),
    "a key names everything that changes the bytes, and is the same in every process": (
        "test_chain_keys_differ_when_any_part_of_the_namespace_does", "test_different_adapters_and_salts_never_share",
        "test_ids_of_one_process_mean_nothing_to_the_next", "test_another_model_is_refused_and_nothing_is_touched",
        "test_chain_keys_are_a_sha256_over_what_the_documentation_says_and_so_the_same_in_every_process"),
    "copies are ordered in both directions, and no slot is freed while one uses it": (
        "test_a_copy_that_takes_long_is_not_overtaken_by_what_depends_on_it",
        "test_blocks_of_a_sequence_that_went_are_reused_at_once_with_the_right_bytes",
        "test_handles_with_a_transfer_to_or_from_nvme_are_in_no_queue_until_it_ended"),
    "an abort or a pre-emption may come at any moment": (
        "test_a_sequence_may_go_while_its_reads_are_in_flight",
        "test_a_request_pre_empted_while_its_reads_are_in_flight_comes_again_under_the_same_id",
        "test_blocks_of_a_sequence_removed_within_its_step_are_not_handed_out_before_the_step_ends"),
    "what a look-up, a pin or a load holds ends with its request or its lease": (
        "test_hits_do_not_decay_however_requests_end", "test_case_D6_pinned_blocks_are_not_free_until_released",
        "test_a_lease_is_released_once"),
    "every wait has a time-out, and closing is bounded": (
        "test_a_slow_read_is_waited_for_as_long_as_asked", "test_a_timeout_is_a_number_of_seconds",
        "test_closing_is_bounded_while_reads_are_in_flight"),
    "a level that is full or all held is never an exception": (
        "test_a_host_level_held_by_leases_costs_content_and_nothing_else", "test_leased_blocks_are_not_promised",
        "test_preempting_who_is_named_makes_room", "test_a_full_disk_stops_stores_for_a_while_and_nothing_else"),
    "a block of low priority never reaches the disk": (
        "test_a_block_below_the_nvme_threshold_never_reaches_disk", "test_a_low_block_never_reaches_nvme_by_any_path"),
    "a reset clears all levels and the stores in flight before it returns": (
        "test_reset_forgets_all_levels_for_good", "test_reset_takes_stores_in_flight_with_it"),
    "stores are shed under pressure and loads are not": (
        "test_writes_are_shed_at_once_while_the_store_accepts_none_and_loads_are_not",),
    "what is evicted before it was written is counted": (
        "test_of_the_blocks_that_were_dropped_those_in_host_memory_are_counted_apart",
        "test_a_block_below_the_secondary_threshold_is_dropped"),
    "reads from disk have room of their own beside the cache": (
        "test_more_reads_than_staging_buffers_do_not_deadlock", "test_staging_buffers_are_bounded"),
    "a hit is counted when its bytes have arrived": (
        "test_hits_are_counted_when_the_bytes_have_arrived", "test_a_bad_read_is_no_hit"),
    "an unknown key is an error with the nearest name": (
        "test_an_unknown_keyword_names_the_nearest_key",),
    "the usable prefix is the shortest over all groups, and one group's loss shortens all": (
        "test_a_damaged_block_of_one_group_shortens_the_prefix_in_all",
        "test_a_lost_block_leaves_the_longest_prefix_that_every_group_still_holds"),
    "a hole at the head of a stored prompt is refilled, and its tail is found again": (
        "test_a_hole_in_a_stored_prompt_is_refilled_and_what_lies_behind_is_found_again",),
    "every kind of fault can be injected": (
        "test_no_wrong_byte_while_reads_and_copies_fail", "test_many_threads_share_a_cache"),
}


@cache
def default_tests() -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]:
    """Every test function of the default run."""
    return tuple(_default_tests())


def _default_tests() -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for path in TESTS.rglob("test_*.py"):
        if (TESTS / "gpu") in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                marks = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
                if not re.search(r"mark\.(slow|gpu|vllm|skip\b|xfail)", marks):
                    yield node


@pytest.fixture(scope="module")
def names_and_numbers() -> tuple[set[str], set[int]]:
    """Case labels, and numbers of bug classes, that tests of the default run carry."""
    labels: set[str] = set()
    numbers: set[int] = set()
    for test in default_tests():
        if label := re.match(r"test_case_([A-Z]\d*|[a-z]+)_", test.name):
            labels.add(label[1])
        if named := re.match(r"Bugs? (\d+(?:,\s\d+)*)[.:]", ast.get_docstring(test) or ""):
            numbers.update(int(number) for number in named[1].split(","))
    return labels, numbers


@pytest.mark.parametrize(("numbers", "symptom"), list(BUG_CLASSES.items()), ids=str)
def test_each_bug_class_has_a_test_that_carries_all_its_numbers(numbers: tuple[int, ...], symptom: str,
                                                                names_and_numbers: tuple[set[str], set[int]]) -> None:
    missing = set(numbers) - names_and_numbers[1]
    assert not missing, f"no test says \"Bug {missing.pop()}\" in its docstring ({symptom})"


def test_no_test_claims_a_bug_class_that_is_not_listed(names_and_numbers: tuple[set[str], set[int]]) -> None:
    assert names_and_numbers[1] <= {number for numbers in BUG_CLASSES for number in numbers}


@pytest.mark.parametrize("label", list(CASES))
def test_each_known_answer_has_a_test_called_after_it(label: str, names_and_numbers: tuple[set[str], set[int]]) -> None:
    assert label in names_and_numbers[0], f"no test_case_{label}_... ({CASES[label]})"


@pytest.mark.parametrize("rule", list(RULES))
def test_each_rule_has_the_tests_that_would_notice(rule: str) -> None:
    missing = set(RULES[rule]) - {test.name for test in default_tests()}
    assert not missing


def test_no_test_is_called_after_a_case_that_is_not_listed(names_and_numbers: tuple[set[str], set[int]]) -> None:
    assert names_and_numbers[0] <= set(CASES)
