"""Readers of events: each sees all of them, a slow one sees a gap, and nobody holds up the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading

import pytest

from kvtier import ConfigError, RequestError
from kvtier.tiering.event_queue import EventQueue
from kvtier.tiering.event_stream import EVENTS_IN_A_ROW, EventBuffer, EventStream
from kvtier.tiering.ledger.events import Event, Removed

SOON = 10.0  # seconds; a test that waits longer hangs


def event(event_id: int) -> Event:
    return Event(event_id, 0, Removed((bytes([event_id % 256]) * 32,)))


def ids(events: list[Event]) -> list[int]:
    return [found.event_id for found in events]


def filled(*batches: range, max_size: int = 8) -> EventQueue:
    queue = EventQueue(max_size)
    for batch in batches:
        queue.put([event(number) for number in batch])
    return queue


async def collected(stream: EventStream[Event]) -> list[int]:
    return [found.event_id async for found in stream]


# -- threads -------------------------------------------------------------------------------------------------------------


def test_each_reader_sees_every_event() -> None:
    queue = filled(range(3))
    first, second = queue.stream(), queue.stream()
    assert ids(first.poll()) == [0, 1, 2]
    queue.put([event(3)])
    assert ids(first.poll()) == [3]
    assert ids(second.poll()) == [0, 1, 2, 3]
    assert (first.poll(), second.poll()) == ([], [])


def test_what_comes_before_the_first_reader_is_kept_for_it() -> None:
    assert ids(filled(range(5)).stream().poll()) == [0, 1, 2, 3, 4]
    assert ids(filled(range(5)).take(0.0)) == [0, 1, 2, 3, 4]


def test_what_all_readers_have_read_is_let_go() -> None:
    queue = filled(range(3))
    first, second = queue.stream(), queue.stream()
    first.poll()
    assert ids(queue.stream().poll()) == [0, 1, 2], "the second has not had them"
    second.poll()
    late = queue.stream()
    queue.put([event(3)])
    assert ids(late.poll()) == [3]
    assert queue.dropped == 0


def test_a_slow_reader_sees_a_gap_and_a_quick_one_sees_none(caplog: pytest.LogCaptureFixture) -> None:
    queue = EventQueue(3)
    quick, slow = queue.stream(), queue.stream()
    seen: list[int] = []
    for number in range(10):
        queue.put([event(number)])
        seen += ids(quick.poll())
    assert seen == list(range(10))
    assert ids(slow.poll()) == [7, 8, 9], "the newest"
    assert queue.dropped == 7
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1, "once"
    assert "more than 3" in warnings[0]
    assert "raise event_buffer_max_size" in warnings[0]


def test_a_batch_larger_than_the_buffer_leaves_its_newest() -> None:
    queue = filled(range(2), range(2, 9), max_size=4)
    assert ids(queue.take(0.0)) == [5, 6, 7, 8]
    assert queue.dropped == 5


def test_events_that_the_ledger_dropped_count_too() -> None:
    queue = filled(range(2), range(5, 7))
    assert ids(queue.take(0.0)) == [0, 1, 5, 6]
    assert queue.dropped == 3


def test_nobody_is_warned_of_events_that_nobody_reads(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    queue = filled(range(20))
    queue.put([event(20)])
    assert [(record.levelno, "event_buffer_max_size=0" in record.getMessage()) for record in caplog.records] == [(logging.INFO, True)]
    queue.take(0.0)
    queue.put([event(number) for number in range(21, 40)])
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING], "from the first read on it matters"


def test_a_reader_that_was_dropped_or_closed_holds_nothing_back() -> None:
    queue = filled()
    reader, forgotten, closed = queue.stream(), queue.stream(), queue.stream()
    queue.put([event(0), event(1)])
    closed.close()
    del forgotten
    gc.collect()
    assert ids(reader.poll()) == [0, 1]
    queue.put([event(2)])
    assert ids(queue.stream().poll()) == [2], "0 and 1 are not kept"
    assert ids(closed.poll()) == [0, 1], "what had come until it was closed"
    assert closed.poll(timeout=SOON) == [], "and nothing is waited for"


def test_a_reader_that_went_hands_its_place_to_the_next() -> None:
    queue = filled(range(3))
    before = queue.stream()
    before.poll()
    before.close()
    queue.put([event(3)])
    assert ids(queue.stream().poll()) == [3]


@pytest.mark.parametrize("end", ["put", "close the stream", "close the queue"])
def test_a_poll_wakes_up(end: str) -> None:
    queue = filled()
    stream = queue.stream()
    found: list[list[int]] = []
    polling = threading.Thread(target=lambda: found.append(ids(stream.poll(timeout=60))))
    polling.start()
    if end == "put":
        queue.put([event(0)])
    elif end == "close the stream":
        stream.close()
    else:
        queue.close()
    polling.join(SOON)
    assert found == [[0] if end == "put" else []]


def test_several_pollers_share_what_comes() -> None:
    queue = EventQueue(1000)
    found: list[int] = []

    def poll() -> None:
        while batch := queue.take(SOON):
            found.extend(ids(batch))

    pollers = [threading.Thread(target=poll) for _ in range(3)]
    for poller in pollers:
        poller.start()
    for number in range(300):
        queue.put([event(number)])
    queue.close()
    for poller in pollers:
        poller.join(SOON)
    assert sorted(found) == list(range(300))


def test_without_a_buffer_there_is_nothing_to_read() -> None:
    queue = filled(range(3), max_size=0)
    assert queue.take(timeout=60) == []
    with pytest.raises(ConfigError, match="event_buffer_max_size=0"):
        queue.stream()


def test_a_time_out_must_be_one() -> None:
    stream = filled(range(1)).stream()
    with pytest.raises(RequestError, match="timeout=-1"):
        stream.poll(-1)
    assert ids(stream.poll()) == [0]


# -- event loops ---------------------------------------------------------------------------------------------------------


async def test_an_async_reader_ends_when_the_queue_is_closed() -> None:
    queue = filled(range(2))
    reading = asyncio.create_task(collected(queue.stream()))
    await asyncio.sleep(0.01)
    queue.put([event(2)])
    queue.put([event(3)])
    queue.close()
    assert await asyncio.wait_for(reading, SOON) == [0, 1, 2, 3], "all of them, then the end"


async def test_async_readers_see_what_another_thread_puts() -> None:
    queue = EventQueue(1000)
    readers = [asyncio.create_task(collected(queue.stream())) for _ in range(3)]

    def put() -> None:
        for number in range(200):
            queue.put([event(number)])
        queue.close()

    await asyncio.sleep(0)
    thread = threading.Thread(target=put)
    thread.start()
    assert await asyncio.wait_for(asyncio.gather(*readers), SOON) == [list(range(200))] * 3
    thread.join()


async def test_tasks_that_read_one_stream_share_it() -> None:
    queue = EventQueue(1000)
    stream = queue.stream()
    readers = [asyncio.create_task(collected(stream)) for _ in range(3)]
    await asyncio.sleep(0.01)
    for number in range(100):
        queue.put([event(number)])
        await asyncio.sleep(0)
    queue.close()
    found = await asyncio.wait_for(asyncio.gather(*readers), SOON)
    assert sorted(number for part in found for number in part) == list(range(100))


async def test_a_waiting_reader_does_not_hold_up_the_loop() -> None:
    queue = filled()
    reading = asyncio.create_task(collected(queue.stream()))
    for _ in range(50):  # a reader that blocked would let none of these run
        await asyncio.sleep(0.001)
    assert not reading.done()
    assert len(queue._sleepers) == 1, "it sleeps, and does not look again and again"
    queue.close()
    assert await asyncio.wait_for(reading, SOON) == []


async def test_a_reader_with_plenty_to_read_lets_others_run() -> None:
    queue = filled(range(10 * EVENTS_IN_A_ROW), max_size=10_000)
    stream = queue.stream()
    turns: list[int] = []
    seen: list[int] = []

    async def other() -> None:
        while len(seen) < 10 * EVENTS_IN_A_ROW:
            turns.append(len(seen))
            await asyncio.sleep(0)

    async def read() -> None:
        async for found in stream:
            seen.append(found.event_id)
            if len(seen) == 10 * EVENTS_IN_A_ROW:
                return

    await asyncio.wait_for(asyncio.gather(other(), read()), SOON)
    assert len(turns) >= 9


async def test_cancelling_leaves_nothing_behind_and_loses_nothing() -> None:
    queue = filled()
    seen: list[int] = []

    async def read() -> None:
        async for found in queue.stream():
            seen.append(found.event_id)

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    queue.put([event(0)])
    while seen != [0]:
        await asyncio.sleep(0.001)
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    del reading
    await asyncio.sleep(0)  # until its next turn the event loop itself keeps the error, and with it the task's frames
    gc.collect()
    assert queue._sleepers == {}
    queue.put([event(1)])
    assert queue._readers == []
    assert ids(queue.stream().poll()) == [1], "the next reader goes on where it stopped"


async def test_a_stream_may_be_read_on_after_a_time_out() -> None:
    queue = filled()
    stream = queue.stream()
    for number in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.005)
        queue.put([event(number)])
        assert (await asyncio.wait_for(anext(stream), SOON)).event_id == number


async def test_a_closed_stream_ends_after_what_it_has() -> None:
    queue = filled(range(2))
    async with contextlib.aclosing(queue.stream()) as stream:
        assert (await anext(stream)).event_id == 0
    queue.put([event(2)])
    assert await collected(stream) == [1]


def test_a_loop_that_was_closed_while_it_waited_harms_nobody() -> None:
    queue = filled()
    stream = queue.stream()
    loop = asyncio.new_event_loop()
    task = loop.create_task(collected(stream))
    loop.run_until_complete(asyncio.sleep(0.01))
    loop._ready.clear()  # type: ignore[attr-defined]
    loop.close()
    queue.put([event(0)])
    queue.put([event(1)])
    assert ids(stream.poll()) == [0, 1]
    task.get_coro().close()  # type: ignore[union-attr]
    del task


def test_names_in_messages_are_those_of_the_buffer(caplog: pytest.LogCaptureFixture) -> None:
    buffer: EventBuffer[int] = EventBuffer(2, "gathered events", "max_size")
    stream = buffer.stream()
    buffer.put([1, 2, 3])
    assert stream.poll() == [2, 3]
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("gathered events: more than 2 waited")
    assert caplog.messages[0].endswith("raise max_size")
