"""What is proved, by name: each bug class that this kind of code is known for, and each known-answer case, has a test in the default run.

A test of a bug class names its numbers at the start of its docstring (``Bug 13124.``, ``Bugs 8813, 8274, 9056: why``); a test of a case
is called after it (``test_case_D3_...``). Numbers are those of TensorRT-LLM's issues and pull requests.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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


def default_tests() -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every test function of the default run."""
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


def test_no_test_is_called_after_a_case_that_is_not_listed(names_and_numbers: tuple[set[str], set[int]]) -> None:
    assert names_and_numbers[0] <= set(CASES)
