"""Fault injection itself: a rule hits what it names, as often as it says, and nothing else."""

from __future__ import annotations

import errno
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from kvtier.errors import ConfigError
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults


def test_a_failure_rule_raises_its_error_number_at_its_operation_only() -> None:
    faults = Faults([FaultRule(FaultKind.FAILURE, FaultOperation.WRITE, errno=errno.ENOSPC)])
    faults.before(FaultOperation.READ)
    faults.before(FaultOperation.COPY)
    with pytest.raises(OSError, match="injected into write") as caught:
        faults.before(FaultOperation.WRITE)
    assert caught.value.errno == errno.ENOSPC
    assert faults.counts() == {"write.failure": 1}


def test_a_rule_with_a_count_is_spent_after_that_many_hits() -> None:
    faults = Faults([FaultRule(FaultKind.FAILURE, FaultOperation.READ, count=2)])
    for _ in range(2):
        with pytest.raises(OSError, match="injected"):
            faults.before(FaultOperation.READ)
    faults.before(FaultOperation.READ)
    assert faults.counts() == {"read.failure": 2}


def test_a_second_failure_rule_is_not_used_up_by_the_first() -> None:
    faults = Faults([FaultRule(FaultKind.FAILURE, FaultOperation.READ, count=1, errno=errno.EIO),
                     FaultRule(FaultKind.FAILURE, FaultOperation.READ, count=1, errno=errno.EACCES)])
    numbers = []
    for _ in range(2):
        with pytest.raises(OSError, match="injected") as caught:
            faults.before(FaultOperation.READ)
        numbers.append(caught.value.errno)
    assert numbers == [errno.EIO, errno.EACCES]
    faults.before(FaultOperation.READ)


def test_a_rate_hits_about_its_share_and_the_same_seed_hits_the_same_operations() -> None:
    def pattern(seed: int) -> list[bool]:
        faults = Faults([FaultRule(FaultKind.FAILURE, FaultOperation.COPY, rate=0.3)], seed)
        hits = []
        for _ in range(1000):
            try:
                faults.before(FaultOperation.COPY)
                hits.append(False)
            except OSError:
                hits.append(True)
        return hits

    first = pattern(1)
    assert 230 < sum(first) < 370
    assert first == pattern(1)
    assert first != pattern(2)


def test_a_delay_rule_sleeps_and_lets_the_operation_go_on() -> None:
    faults = Faults([FaultRule(FaultKind.DELAY, FaultOperation.READ, seconds=0.05)])
    start = time.monotonic()
    faults.before(FaultOperation.READ)
    assert time.monotonic() - start >= 0.05


def test_a_delay_does_not_hold_up_other_operations() -> None:
    faults = Faults([FaultRule(FaultKind.DELAY, FaultOperation.READ, seconds=2.0)])
    thread = threading.Thread(target=faults.before, args=(FaultOperation.READ,), daemon=True)
    thread.start()
    while faults.counts()["read.delay"] == 0:
        time.sleep(0.001)
    start = time.monotonic()
    faults.before(FaultOperation.WRITE)
    assert time.monotonic() - start < 1.0


def test_a_bit_flip_turns_exactly_one_bit_over_in_place() -> None:
    faults = Faults([FaultRule(FaultKind.BIT_FLIP, FaultOperation.WRITE)])
    buffer = np.zeros(4096, np.uint8)
    faults.corrupt(FaultOperation.READ, buffer)
    assert not buffer.any()
    faults.corrupt(FaultOperation.WRITE, buffer)
    assert int(np.unpackbits(buffer).sum()) == 1


def test_a_bit_flip_reaches_a_strided_buffer_and_leaves_an_empty_one_alone() -> None:
    faults = Faults([FaultRule(FaultKind.BIT_FLIP, FaultOperation.READ)])
    rows = np.zeros((8, 64), np.uint8)
    faults.corrupt(FaultOperation.READ, rows[:, :10])
    assert int(np.unpackbits(rows).sum()) == 1
    assert not rows[:, 10:].any()
    faults.corrupt(FaultOperation.READ, np.zeros(0, np.uint8))


def test_counts_stay_exact_with_many_threads() -> None:
    faults = Faults([FaultRule(FaultKind.BIT_FLIP, FaultOperation.COPY, count=500)])

    def work() -> None:
        buffer = np.zeros(16, np.uint8)
        for _ in range(200):
            faults.corrupt(FaultOperation.COPY, buffer)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults.counts() == {"copy.bit_flip": 500}


@pytest.mark.parametrize(("name", "value"), [("rate", 1.5), ("rate", -0.1), ("rate", float("nan")), ("count", -1),
                                             ("seconds", -1.0), ("seconds", float("inf")), ("errno", 0)])
def test_an_impossible_rule_is_a_config_error_that_names_the_value(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value!r}"):
        replace(FaultRule(FaultKind.FAILURE, FaultOperation.READ), **{name: value})
