"""Fault injection itself: a rule hits what it names, as often as it says, and nothing else."""

from __future__ import annotations

import errno
import pickle
import re
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from kvtier.errors import ConfigError
from kvtier.io import faults as faults_module
from kvtier.io.fault_text import KINDS, parse_faults
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.types import Level


def test_a_failure_rule_raises_its_error_number_at_its_operation_only() -> None:
    faults = Faults([FaultRule(FaultKind.FAILURE, FaultOperation.WRITE, errno=errno.ENOSPC)])
    faults.before(FaultOperation.READ)
    faults.before(FaultOperation.COPY)
    with pytest.raises(OSError, match="injected into write") as caught:
        faults.before(FaultOperation.WRITE)
    assert caught.value.errno == errno.ENOSPC
    assert faults.counts() == {"nvme.write.enospc": 1}


def test_a_rule_with_a_count_is_spent_after_that_many_hits() -> None:
    faults = Faults([FaultRule(FaultKind.FAILURE, FaultOperation.READ, count=2)])
    for _ in range(2):
        with pytest.raises(OSError, match="injected"):
            faults.before(FaultOperation.READ)
    faults.before(FaultOperation.READ)
    assert faults.counts() == {"nvme.read.eio": 2}


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


def test_a_delay_does_not_hold_up_other_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults([FaultRule(FaultKind.DELAY, FaultOperation.READ, seconds=2.0)])
    delayed, goes_on = threading.Event(), threading.Event()
    asked: list[float] = []

    def sleep(seconds: float) -> None:
        asked.append(seconds)
        delayed.set()
        goes_on.wait(60.0)

    monkeypatch.setattr(faults_module, "time", SimpleNamespace(sleep=sleep))
    thread = threading.Thread(target=faults.before, args=(FaultOperation.READ,), daemon=True)
    thread.start()
    assert delayed.wait(60.0)
    faults.before(FaultOperation.WRITE)
    assert faults.counts() == {"nvme.read.delay": 1}
    assert thread.is_alive(), "the read is still being delayed"
    goes_on.set()
    thread.join(60.0)
    assert asked == [2.0]


def test_a_flipped_bit_is_exactly_one_also_of_a_strided_buffer() -> None:
    rows = np.zeros((8, 64), np.uint8)
    Faults().flip_bit(rows[:, :10])
    assert int(np.unpackbits(rows).sum()) == 1
    assert not rows[:, 10:].any()


def test_a_rule_of_one_level_leaves_copies_to_the_other_alone() -> None:
    faults = Faults([FaultRule(FaultKind.FAILURE, FaultOperation.COPY, level=Level.SECONDARY)])
    faults.before(FaultOperation.COPY, Level.PRIMARY)
    with pytest.raises(OSError, match="injected into copy"):
        faults.before(FaultOperation.COPY, Level.SECONDARY)
    assert faults.counts() == {"secondary.copy.eio": 1}


def test_a_hang_ends_when_its_time_is_over_or_when_all_hangs_are_ended_and_then_fails() -> None:
    faults = Faults([FaultRule(FaultKind.HANG, FaultOperation.READ, seconds=0.02, count=1), FaultRule(FaultKind.HANG, FaultOperation.READ)])
    with pytest.raises(OSError, match="after it hung") as caught:
        faults.before(FaultOperation.READ)
    assert caught.value.errno == errno.EIO
    errors: list[OSError] = []

    def hang() -> None:
        try:
            faults.before(FaultOperation.READ)
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=hang, daemon=True)
    thread.start()
    while faults.counts()["nvme.read.hang"] < 2:
        time.sleep(0.001)
    thread.join(0.05)
    assert thread.is_alive(), "without a time it hangs until it is told otherwise"
    faults.end_hangs()
    thread.join(60.0)
    assert [error.errno for error in errors] == [errno.EIO]


def test_all_hangs_end_also_one_that_has_been_counted_and_has_not_begun_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults([FaultRule(FaultKind.HANG, FaultOperation.READ)])
    draw = faults._draw

    def interrupted(operation: FaultOperation, kind: FaultKind, level: Level | None) -> list[FaultRule]:
        hit = draw(operation, kind, level)
        if hit:
            faults.end_hangs()
        return hit

    monkeypatch.setattr(faults, "_draw", interrupted)
    with pytest.raises(OSError, match="after it hung"):
        faults.before(FaultOperation.READ)


def test_counts_stay_exact_with_many_threads() -> None:
    faults = Faults([FaultRule(FaultKind.BIT_FLIP, FaultOperation.READ, count=500)])

    def work() -> None:
        for _ in range(200):
            faults.hits(FaultOperation.READ, FaultKind.BIT_FLIP)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults.counts() == {"nvme.read.bit_flip": 500}


@pytest.mark.parametrize(("name", "value"), [("rate", 1.5), ("rate", -0.1), ("rate", float("nan")), ("count", -1),
                                             ("seconds", -1.0), ("seconds", float("inf")), ("errno", 0)])
def test_an_impossible_rule_is_a_config_error_that_names_the_value(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value!r}"):
        replace(FaultRule(FaultKind.FAILURE, FaultOperation.READ), **{name: value})


@pytest.mark.parametrize(("kind", "operation", "level"), [
    (FaultKind.TORN_WRITE, FaultOperation.READ, None), (FaultKind.SHORT_READ, FaultOperation.WRITE, None),
    (FaultKind.BIT_FLIP, FaultOperation.COPY, None), (FaultKind.LOST_FILE, FaultOperation.COMMIT, None),
    (FaultKind.DELAY, FaultOperation.READ, Level.PRIMARY), (FaultKind.DELAY, FaultOperation.COPY, Level.NVME)])
def test_a_rule_that_could_never_happen_is_refused(kind: FaultKind, operation: FaultOperation, level: Level | None) -> None:
    with pytest.raises(ConfigError, match=f"operation '{operation.value}'"):
        FaultRule(kind, operation, level=level)


# -- as a configuration writes them ----------------------------------------------------------------------------------------------


def test_rules_are_read_from_text_and_written_back() -> None:
    faults = parse_faults("nvme.read.bit_flip=0.01,  secondary.copy.delay=0.1:5ms*20,nvme.write.hang, nvme.commit.enospc*3, seed=7")
    assert str(faults) == ("nvme.read.bit_flip=0.01, secondary.copy.delay=0.1:0.005s*20, nvme.write.hang=1, nvme.commit.enospc=1*3, seed=7")
    assert str(parse_faults(str(faults).split(", "))) == str(faults)
    assert str(pickle.loads(pickle.dumps(faults))) == str(faults)
    assert faults.counts() == dict.fromkeys(("nvme.read.bit_flip", "secondary.copy.delay", "nvme.write.hang", "nvme.commit.enospc"), 0)


@pytest.mark.parametrize("word", KINDS)
def test_every_kind_has_a_word(word: str) -> None:
    operation = "read" if word == "short_read" else "write"
    (name,) = parse_faults(f"nvme.{operation}.{word}" + (":1s" if word == "delay" else "")).counts()
    assert name == f"nvme.{operation}.{word}"


@pytest.mark.parametrize(("text", "message"), [
    ("nvme.reed.eio", "unknown operation 'reed'; did you mean 'read'?"), ("nvme.read.bit_flop", "did you mean 'bit_flip'?"),
    ("secundary.copy.eio", "did you mean 'secondary'?"), ("disk.read.eio", "there are primary, secondary, nvme"),
    ("nvme.read.eio=1.5", "between 0.0 (never) and 1.0 (always)"), ("nvme.read.eio=1..2", "'1..2' is no number"),
    ("nvme.read.eio=nan", "is no rule"), ("nvme.read.delay", "takes a time above 0"), ("nvme.read.hang=1:0s", "takes a time above 0"),
    ("nvme.read.delay=1:3", "is no rule"), ("nvme.read.eio=1:3s", "only delay and hang take a time"),
    ("nvme.read.torn_write", "it can happen at write"), ("nvme.copy.eio", "a copy goes to"), ("primary.write.eio", "a copy goes to"),
    ("nvme.read.eio, nvme.read", "'nvme.read' is no rule"), ("nvme.read.eio,", "'' is no rule"), ("", "is no rule"),
    ("seed=7", "names no fault"), ("nvme.read.eio*" + "9" * 5000, "is no rule")])
def test_text_that_is_no_rule_says_what_is_wrong_and_the_nearest_word(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        parse_faults(text)
    assert len(str(caught.value)) < 400
