"""A stream on the CPU: order, errors, time-outs, and a close that is bounded whatever hangs."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from kvtier.errors import ConfigError, TransferError
from kvtier.io import cpu_stream
from kvtier.io.cpu_stream import CpuEvent, CpuStream, finished_event
from kvtier.io.device import open_device


@pytest.fixture
def stream() -> Iterator[CpuStream]:
    made = CpuStream("test")
    yield made
    made.close(60.0)


@pytest.fixture
def other() -> Iterator[CpuStream]:
    made = CpuStream("other")
    yield made
    made.close(60.0)


def fail() -> None:
    raise ValueError("on purpose")


def test_work_runs_in_the_order_of_submission(stream: CpuStream) -> None:
    seen: list[int] = []
    for number in range(200):
        stream.submit(lambda number=number: seen.append(number))  # type: ignore[misc]
    assert stream.synchronize(60.0)
    assert seen == list(range(200))


@pytest.fixture
def nobody_interrupts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A thread keeps the GIL until it gives it up by itself, and not because it collects what other tests left, which may give it up."""
    monkeypatch.setattr(cpu_stream, "_LONGEST_TURN", 60.0)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)
    gc.disable()
    yield
    gc.enable()
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("nobody_interrupts")
def test_a_thread_that_goes_on_in_python_lets_work_begin_first(stream: CpuStream) -> None:
    for _ in range(20):
        assert stream.synchronize(60.0)
        seen: list[str] = []
        stream.submit(lambda: seen.append("begun"))  # noqa: B023 - it is called in this round
        stream.let_begin()
        seen.append("went on")
        assert seen == ["begun", "went on"]


def test_nobody_makes_way_for_a_worker_that_is_busy(stream: CpuStream, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait(60.0)

    first = stream.submit(work)
    assert begun.wait(60.0)
    second = stream.submit(lambda: None)
    monkeypatch.setattr(cpu_stream, "_LONGEST_TURN", 60.0)  # as long as the work takes, if this waited
    stream.let_begin()
    assert not first.is_done()
    gate.set()
    assert second.wait(60.0)
    stream.let_begin()  # nor for one that has nothing to do


def test_work_runs_after_the_events_of_another_stream(stream: CpuStream, other: CpuStream) -> None:
    seen: list[str] = []
    gate = threading.Event()

    def slow() -> None:
        gate.wait(60.0)
        seen.append("first")

    first = other.submit(slow)
    second = stream.submit(lambda: seen.append("second"), after=(first,))
    assert not second.wait(0.05)
    gate.set()
    assert second.wait(60.0)
    assert seen == ["first", "second"]


def test_a_failure_is_the_events_error_and_the_stream_goes_on(stream: CpuStream) -> None:
    failed = stream.submit(fail)
    fine = stream.submit(lambda: None)
    assert fine.wait(60.0)
    assert failed.is_done()
    assert isinstance(failed.error, ValueError)
    assert fine.error is None


def test_a_failed_event_orders_but_does_not_fail_what_comes_after_it(stream: CpuStream, other: CpuStream) -> None:
    failed = other.submit(fail)
    after = stream.submit(lambda: None, after=(failed,))
    assert after.wait(60.0)
    assert after.error is None


def test_even_an_exit_raised_by_work_does_not_end_the_worker(stream: CpuStream) -> None:
    def leave() -> None:
        raise SystemExit(3)

    left = stream.submit(leave)
    assert stream.synchronize(60.0)
    assert isinstance(left.error, SystemExit)


def test_the_completion_call_comes_once_after_the_event_and_may_fail(stream: CpuStream) -> None:
    calls: list[bool] = []

    def done(event: object) -> None:
        assert isinstance(event, CpuEvent)
        calls.append(event.is_done())
        raise RuntimeError("on purpose")

    stream.submit(lambda: None, done=done)
    assert stream.synchronize(60.0)
    assert stream.synchronize(60.0)
    assert calls == [True]


def test_a_wait_keeps_its_time_out(stream: CpuStream) -> None:
    gate = threading.Event()
    event = stream.submit(lambda: gate.wait(60.0) and None)
    assert not event.wait(0.05)
    assert not event.wait(0.0)
    assert not event.wait(-1.0)
    assert not stream.synchronize(0.05)
    assert not event.is_done(), "all of them were over before the work was"
    gate.set()
    assert event.wait(1e12)
    assert event.wait()


def test_many_threads_may_wait_for_one_event(stream: CpuStream) -> None:
    gate = threading.Event()
    event = stream.submit(lambda: gate.wait(60.0) and None)
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(event.wait(60.0))) for _ in range(8)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(60.0)
    assert results == [True] * 8


def test_close_finishes_what_is_queued_and_then_refuses_work(stream: CpuStream) -> None:
    seen: list[int] = []
    for number in range(50):
        stream.submit(lambda number=number: seen.append(number))  # type: ignore[misc]
    assert stream.close(60.0)
    assert len(seen) == 50
    assert stream.close(60.0)
    with pytest.raises(TransferError, match="closed"):
        stream.submit(lambda: None)


def test_close_is_bounded_when_work_hangs_and_what_had_not_begun_fails(stream: CpuStream) -> None:
    gate = threading.Event()
    ran: list[int] = []
    hanging = stream.submit(lambda: gate.wait(60.0) and None)
    waiting = stream.submit(lambda: ran.append(1))
    assert not stream.close(0.05)
    assert not hanging.is_done(), "it was over before the work was"
    gate.set()
    assert waiting.wait(60.0)
    assert isinstance(waiting.error, TransferError)
    assert ran == []


def test_a_closed_stream_does_not_wait_for_ever_for_another_streams_event(stream: CpuStream) -> None:
    never = CpuEvent()
    waiting = stream.submit(lambda: None, after=(never,))
    assert not stream.close(0.05)
    assert waiting.wait(60.0)
    assert isinstance(waiting.error, TransferError)


def test_an_idle_stream_keeps_nothing_of_its_last_work_alive(stream: CpuStream) -> None:
    import weakref

    class Payload:
        def work(self) -> None:
            """Does nothing."""

    payload = Payload()
    gone = weakref.ref(payload)
    stream.submit(payload.work)
    assert stream.synchronize(60.0)
    del payload
    deadline = time.monotonic() + 60.0
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone() is None


# -- the device ----------------------------------------------------------------------------------------------------------


def test_on_the_cpu_the_engine_waits_on_the_host_and_has_nothing_pending(stream: CpuStream) -> None:
    device = open_device("cpu")
    assert device.name == "cpu"
    assert device.engine_event(None).is_done()
    gate = threading.Event()
    event = stream.submit(lambda: gate.wait(60.0) and None)
    assert not device.engine_waits(None, [finished_event(), event], 0.05)
    gate.set()
    assert device.engine_waits(None, [event], 60.0)
    assert device.engine_waits(None, [event], None)


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "cuda:²"])
def test_an_unknown_device_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="use 'cpu', 'cuda' or 'cuda:N'"):
        open_device(name)


def test_what_is_over_is_reported_in_order_while_the_next_work_runs() -> None:
    stream = CpuStream("test")
    reported: list[int] = []
    second_began, first_reported = threading.Event(), threading.Event()

    def second() -> None:
        second_began.set()
        assert first_reported.wait(60.0)  # it would never come if the worker had to call back itself

    def first_over(_event: object) -> None:
        assert second_began.wait(60.0)
        reported.append(1)
        first_reported.set()

    gate = threading.Event()
    stream.submit(lambda: gate.wait(60.0) and None)
    stream.submit(lambda: None, done=first_over)
    last = stream.submit(second, done=lambda _event: reported.append(2))
    gate.set()
    assert last.wait(60.0)
    assert stream.close(60.0)  # has reported everything when it is True
    assert last.error is None
    assert reported == [1, 2]


def test_a_callback_that_hangs_does_not_make_close_hang() -> None:
    stream = CpuStream("test")
    gate, release = threading.Event(), threading.Event()
    stream.submit(lambda: gate.wait(60.0) and None)
    stream.submit(lambda: None, done=lambda _event: release.wait(60.0) and None)
    stream.submit(lambda: None, done=lambda _event: None)
    gate.set()
    try:
        assert not stream.close(0.2)
    finally:
        release.set()
    assert stream.close(60.0)
