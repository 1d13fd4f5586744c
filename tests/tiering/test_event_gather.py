"""Events of several ranks at rank 0: all of them, in each rank's order, whatever the other ranks do."""

from __future__ import annotations

import multiprocessing
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gather_rig import PATIENCE, WAYS, Ranks, Transports, event, of_rank
from toy_engine import wait_until

from kvtier import ConfigError, RequestError, TransferError
from kvtier.tiering import connection_transport
from kvtier.tiering.connection_transport import ConnectionTransport
from kvtier.tiering.event_gather import EventGather, RankedEvent, RankState
from kvtier.tiering.event_queue import EventQueue
from kvtier.tiering.event_transport import GatherTransport, InProcessTransport
from kvtier.tiering.ledger.events import Event, Removed, Updated


@pytest.fixture(params=WAYS)
def transports(request: pytest.FixtureRequest) -> Iterator[Transports]:
    """``transports(num_ranks)``: one for each rank, connected."""
    made: list[GatherTransport] = []

    def make(num_ranks: int) -> list[GatherTransport]:
        made.extend(WAYS[request.param](num_ranks))
        return list(made)

    yield make
    for transport in made:
        transport.close()


def test_rank_0_has_the_events_of_all_ranks(transports: Transports) -> None:
    ranks = Ranks(transports(3))
    for turn in range(20):
        for rank in range(3):
            ranks.put(rank, 2 * turn, 2 * turn + 1)
    found = ranks.gathered(120)
    for rank in range(3):
        assert of_rank(found, rank) == list(range(40)), "in each rank's order, with each rank's ids"
    assert [(report.rank, report.events, report.problem) for report in ranks.root.ranks] == [(rank, 40, None) for rank in range(3)]
    assert ranks.close() == [True, True, True]


def test_what_has_come_last_is_gathered_before_all_leave(transports: Transports) -> None:
    ranks = Ranks(transports(3))
    for rank in range(3):
        ranks.put(rank, *range(90))
    assert ranks.close() == [True, True, True]
    found = ranks.root.poll()
    assert [len(of_rank(found, rank)) for rank in range(3)] == [90, 90, 90], "still there to be read"
    assert [report.state for report in ranks.root.ranks[1:]] == [RankState.LEFT, RankState.LEFT]
    assert ranks.close() == [True, True, True], "again is harmless"


def test_what_waits_for_the_next_period_is_sent_at_the_end(transports: Transports) -> None:
    ranks = Ranks(transports(2), period=60.0)
    for rank in range(2):
        ranks.put(rank, 0)
    assert len(ranks.gathered(2)) == 2, "the first at once"
    for rank in range(2):
        ranks.put(rank, 1)
    assert ranks.root.poll(0.02) == []
    assert ranks.close() == [True, True]
    assert sorted(ranked.rank for ranked in ranks.root.poll()) == [0, 1]


@pytest.mark.parametrize("first", [0, 1])
def test_the_order_in_which_ranks_leave_does_not_matter(transports: Transports, first: int) -> None:
    ranks = Ranks(transports(2))
    ranks.put(1, 0)
    agreed: list[bool] = []
    leaving = threading.Thread(target=lambda: agreed.append(ranks.gathers[first].close(PATIENCE)))
    leaving.start()
    assert of_rank(ranks.gathered(1), 1) == [0]
    assert ranks.gathers[1 - first].close(PATIENCE)
    leaving.join(PATIENCE)
    assert agreed == [True]


def test_a_rank_that_stays_cannot_keep_rank_0(transports: Transports, caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(transports(3))
    assert not ranks.root.close(timeout=0.05)
    assert "ranks [1, 2] have not said that they are done" in caplog.text
    assert not ranks.gathers[1].close(timeout=0.05), "and what it sends from then on has arrived nowhere"
    ranks.put(2, 0)
    wait_until(lambda: "events of rank 2 are gathered no more" in caplog.text)
    wait_until(lambda: not ranks.gathers[2]._forwarding.is_alive())
    ranks.put(2, *range(1, 50))
    assert ranks.queues[2]._readers == [], "it reads no more, so that it holds nothing back"


def test_a_lost_rank_is_reported_and_the_others_go_on(transports: Transports, caplog: pytest.LogCaptureFixture) -> None:
    ways = transports(3)
    ranks = Ranks(ways)
    ranks.put(1, 0)
    ranks.gathered(1)
    ways[1].close()  # as if its process had died
    wait_until(lambda: ranks.root.ranks[1].state is RankState.LOST)
    assert "rank 1 is lost" in caplog.text
    ranks.put(2, 0, 1)
    ranks.put(0, 0)
    assert len(ranks.gathered(3)) == 3
    assert ranks.root.ranks[2].state is RankState.ACTIVE
    assert ranks.close() == [False, False, True]


def test_garbage_is_reported_and_the_others_go_on(transports: Transports, caplog: pytest.LogCaptureFixture) -> None:
    ways = transports(3)
    queues = [EventQueue(100) for _ in range(3)]
    root = EventGather(queues[0].stream(), ways[0])
    good = EventGather(queues[2].stream(), ways[2])
    for garbage in (b"", b"E", b"Enonsense", b"E" + b"[" * 100_000, b"\x80\x04N.", b"C"):
        ways[1].send(0, garbage)
    queues[2].put([event(0, 2)])
    assert of_rank(root.poll(PATIENCE), 2) == [0]
    wait_until(lambda: root.ranks[1].unreadable == 6)
    assert root.ranks[1].state is RankState.ACTIVE
    assert len([message for message in caplog.messages if "cannot be read" in message]) == 1, "said once, counted always"
    assert root.ranks[2].unreadable == 0
    ways[1].send(0, b"L")
    assert [gather.close(PATIENCE) for gather in (good, root)] == [True, True]


def test_a_rank_that_says_nothing_is_reported_until_it_is_heard_again(transports: Transports, caplog: pytest.LogCaptureFixture) -> None:
    ways = transports(2)
    root = EventGather(EventQueue(100).stream(), ways[0], silent_after=0.05)
    wait_until(lambda: root.ranks[1].state is RankState.SILENT)
    assert "rank 1: nothing heard for 0.05 s" in caplog.text

    def is_heard() -> bool:
        ways[1].send(0, b"A")  # again and again: a moment later it is silent once more
        return root.ranks[1].state is RankState.ACTIVE

    wait_until(is_heard)
    assert not root.close(timeout=0.05)


def test_a_rank_without_events_gives_signs_of_life(transports: Transports) -> None:
    ranks = Ranks(transports(2), silent_after=0.5)
    heard = ranks.root._ranks[1].heard_at
    for _ in range(3):
        before = ranks.root._ranks[1].heard_at
        wait_until(lambda before=before: ranks.root._ranks[1].heard_at > before)  # type: ignore[misc]
    assert ranks.root._ranks[1].heard_at > heard
    wait_until(lambda: ranks.root.ranks[1].state is RankState.ACTIVE)
    assert ranks.close() == [True, True]


def test_gathered_events_are_bounded_by_the_limit_of_each_rank_times_the_ranks() -> None:
    ways = InProcessTransport.group(3)
    ranks = Ranks(list(ways), max_size=4)
    reader = ranks.root.events()
    for number in range(40):
        ranks.put(1, number)
        wait_until(lambda number=number: ranks.root.ranks[1].events > number)  # type: ignore[misc]
    assert of_rank(reader.poll(), 1) == list(range(28, 40))
    assert ranks.root.dropped == 28
    assert ranks.close() == [True, True, True]


def test_a_cache_that_is_closed_first_ends_its_part(transports: Transports) -> None:
    ranks = Ranks(transports(2))
    ranks.put(1, 0, 1)
    ranks.queues[1].close()
    wait_until(lambda: ranks.root.ranks[1].state is RankState.LEFT)
    assert of_rank(ranks.gathered(2), 1) == [0, 1]
    assert ranks.close() == [True, True]


def test_events_are_read_at_rank_0_only(transports: Transports) -> None:
    ranks = Ranks(transports(2))
    for look in (lambda: ranks.gathers[1].poll(), lambda: ranks.gathers[1].events(), lambda: ranks.gathers[1].ranks):
        with pytest.raises(RequestError, match="rank 1: events are gathered at rank 0"):
            look()
    ranks.close()


async def test_gathered_events_can_be_awaited() -> None:
    ranks = Ranks(list(InProcessTransport.group(2)))
    stream = ranks.root.events()
    ranks.put(1, 0)
    assert (await anext(stream)).rank == 1
    ranks.close()
    assert [ranked async for ranked in stream] == []


@pytest.mark.parametrize("setting", ["period", "silent_after"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), True, "1"])
def test_times_must_be_positive(setting: str, value: object) -> None:
    with pytest.raises(RequestError, match=setting):
        EventGather(EventQueue(4).stream(), InProcessTransport.group(1)[0], **{setting: value})  # type: ignore[arg-type]


def test_one_rank_alone_needs_nobody() -> None:
    ranks = Ranks(list(InProcessTransport.group(1)))
    ranks.put(0, 0)
    assert of_rank(ranks.gathered(1), 0) == [0]
    assert ranks.close() == [True]


def test_close_is_bounded_while_a_message_cannot_be_sent() -> None:
    """Rank 0 exists but takes nothing: rank 1 stands in the middle of a send."""
    pipe = multiprocessing.Pipe()
    queue = EventQueue(100_000)
    gather = EventGather(queue.stream(), ConnectionTransport(1, 2, {0: pipe[1]}), period=0.001)
    queue.put([Event(number, 0, Removed((bytes(32),) * 100)) for number in range(10_000)])
    wait_until(lambda: gather._transport._sending.locked())  # type: ignore[attr-defined]
    assert not gather.close(timeout=0.1)
    wait_until(lambda: not gather._forwarding.is_alive())
    pipe[0].close()


# -- processes -----------------------------------------------------------------------------------------------------------


RANK_PROCESS = """
import os, sys, time
from kvtier.tiering.connection_transport import ConnectionTransport
from kvtier.tiering.event_gather import EventGather
from kvtier.tiering.event_queue import EventQueue
from kvtier.tiering.ledger.events import Event, Updated

path, rank, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
queue = EventQueue(200)
gather = EventGather(queue.stream(), ConnectionTransport.connect(path, rank, 3))
queue.put([Event(number, rank, Updated(bytes([rank]) * 32, (0, 1), None)) for number in range(200)])
if how == "stays":
    time.sleep(600)
sys.exit(0 if gather.close(20) else 1)
"""


@pytest.mark.parametrize("how", ["leaves", "stays"])
def test_ranks_in_processes_of_their_own(tmp_path: Path, how: str) -> None:
    path = tmp_path / "gather"
    processes = [subprocess.Popen([sys.executable, "-c", RANK_PROCESS, str(path), str(rank), how if rank == 1 else "leaves"])
                 for rank in (1, 2)]
    try:
        transport = ConnectionTransport.listen(path, 3, timeout=60)
        assert not path.exists(), "nothing is left behind once all are there"
        gather = EventGather(EventQueue(400).stream(), transport)
        found: list[RankedEvent] = []
        while len(found) < 400:
            found += gather.poll(PATIENCE) or pytest.fail(f"{len(found)} events came")
        for rank in (1, 2):
            assert [ranked.event for ranked in found if ranked.rank == rank] == [
                Event(number, rank, Updated(bytes([rank]) * 32, (0, 1), None)) for number in range(200)]
        if how == "stays":
            processes[0].kill()
            wait_until(lambda: gather.ranks[1].state is RankState.LOST)
        assert gather.close(PATIENCE) == (how == "leaves")
        assert gather.ranks[2].state is RankState.LEFT
        assert [process.wait(PATIENCE) for process in processes] == [0 if how == "leaves" else -signal.SIGKILL, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def connecting(path: Path, rank: int, num_ranks: int, made: list[ConnectionTransport]) -> threading.Thread:
    thread = threading.Thread(target=lambda: made.append(ConnectionTransport.connect(path, rank, num_ranks, 10)))
    thread.start()
    return thread


def test_whoever_is_no_rank_is_turned_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "gather"
    made: list[ConnectionTransport] = []
    listening = threading.Thread(target=lambda: made.append(ConnectionTransport.listen(path, 2, 10)))
    listening.start()
    wait_until(path.exists)
    strangers = []
    for hello in (b"0", b"2", b"one", b"", b"x" * 50):
        with socket.socket(socket.AF_UNIX) as stranger:
            wait_until(lambda stranger=stranger: stranger.connect_ex(str(path)) == 0)  # type: ignore[misc]
            connection: Connection[Any, Any] = Connection(stranger.detach())
        connection.send_bytes(hello)
        strangers.append(connection)
    assert path.stat().st_mode & 0o777 == 0o600
    connecting(path, 1, 2, made).join(10)
    listening.join(10)
    assert sorted(transport.rank for transport in made) == [0, 1]
    assert caplog.text.count("is turned away") == 5
    for closing in [*strangers, *made]:
        closing.close()


def test_a_rank_that_does_not_come_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gather"
    made: list[ConnectionTransport] = []
    admit, now = connection_transport._admit, [0.0]

    def admit_last(*given: Any) -> None:
        admit(*given)
        now[0] += 100.0

    with monkeypatch.context() as patch:
        patch.setattr(connection_transport, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
        patch.setattr(connection_transport, "_admit", admit_last)
        thread = connecting(path, 2, 3, made)
        with pytest.raises(TimeoutError, match=r"ranks \[1\] of 3 have not connected"):
            ConnectionTransport.listen(path, 3, 60.0)
    thread.join(10)
    assert made[0].receive(PATIENCE) == [(0, None)], "rank 0 has given up"
    made[0].close()
    assert not path.exists()
    with pytest.raises(TimeoutError, match="rank 0 does not listen there"):
        ConnectionTransport.connect(path, 1, 3, 0.05)


def test_a_socket_that_a_crashed_process_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "gather"
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(path))
    made: list[ConnectionTransport] = []
    thread = connecting(path, 1, 2, made)
    made.append(ConnectionTransport.listen(path, 2, 10))
    thread.join(10)
    for transport in made:
        transport.close()


def test_a_path_that_is_taken_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="cannot be a socket"):
        ConnectionTransport.listen(path, 2, 1)
    assert path.read_text() == "mine"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "other"))
        other.listen()
        with pytest.raises(ConfigError, match="cannot be a socket"):
            ConnectionTransport.listen(tmp_path / "other", 2, 1)
        assert (tmp_path / "other").exists()
    for call in (lambda: ConnectionTransport.listen("/" + 200 * "x", 2, 1), lambda: ConnectionTransport.connect("/" + 200 * "x", 1, 2, 1)):
        with pytest.raises(ConfigError, match="cannot"):
            call()


def test_ranks_and_connections_must_match() -> None:
    with pytest.raises(ConfigError, match="rank=2 of num_ranks=2"):
        ConnectionTransport(2, 2, {})
    with pytest.raises(ConfigError, match=r"needed are \[1, 2\]"):
        ConnectionTransport(0, 3, {})
    with pytest.raises(ConfigError, match="rank 0 listens"):
        ConnectionTransport.connect("somewhere", 0, 2)


def test_nothing_is_sent_to_who_is_gone(transports: Transports) -> None:
    first, second = transports(2)
    second.close()
    assert first.receive(PATIENCE) == [(1, None)]
    with pytest.raises(TransferError, match="rank 1 is gone"):
        first.send(1, b"hello")
    with pytest.raises(TransferError, match="rank 0 is gone"):
        second.send(0, b"hello")
    with pytest.raises(TransferError, match="the transport of rank 1 is closed"):  # who has left waits for nothing
        second.receive(PATIENCE)


@pytest.fixture
def last_thread(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``last_thread(name)``: the system starts no thread of this name."""
    real = threading.Thread.start

    def forbid(name: str) -> None:
        def start(thread: threading.Thread) -> None:
            if thread.name == name:
                raise RuntimeError("can't start new thread")
            real(thread)
        monkeypatch.setattr(threading.Thread, "start", start)
    return forbid


def gather_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvtier-gather")]


@pytest.mark.parametrize("name", ["kvtier-gather-send", "kvtier-gather-receive"])
def test_a_gather_without_its_threads_is_an_error_and_leaves_none(transports: Transports, last_thread: Callable[[str], None],
                                                                  name: str) -> None:
    made = transports(2)
    before = gather_threads()
    last_thread(name)
    with pytest.raises(ConfigError, match=f"{name}.*raise the limit on processes"):
        EventGather(EventQueue(10).stream(), made[0])
    assert gather_threads() == before


def test_a_transport_without_its_threads_is_an_error_and_closes_its_connections(last_thread: Callable[[str], None]) -> None:
    pipes = [multiprocessing.Pipe() for _ in range(2)]
    before = gather_threads()
    last_thread("kvtier-gather-read-2")
    with pytest.raises(ConfigError, match=r"kvtier-gather-read-2.*raise the limit on processes"):
        ConnectionTransport(0, 3, {rank: ends[0] for rank, ends in enumerate(pipes, start=1)})
    assert gather_threads() == before
    for ours, theirs in pipes:
        assert ours.closed
        with pytest.raises(EOFError):
            theirs.recv_bytes()
