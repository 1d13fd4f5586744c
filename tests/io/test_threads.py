"""Where the system starts no more threads: an error that says what to do, and nothing waits for ever."""

from __future__ import annotations

import threading

import pytest

from kvtier.errors import ConfigError
from kvtier.io.cpu_stream import CpuStream
from kvtier.io.threads import start_thread


@pytest.fixture
def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return monkeypatch


def test_the_error_names_the_thread_and_the_remedy(no_more_threads: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'kvtier-x' cannot be started \(can't start new thread\); raise the limit"):
        start_thread(lambda: None, "kvtier-x")


def test_a_stream_without_its_second_thread_reports_all_the_same(monkeypatch: pytest.MonkeyPatch,
                                                                 request: pytest.FixtureRequest) -> None:
    stream = CpuStream("test")
    request.getfixturevalue("no_more_threads")
    gate = threading.Event()
    reported: list[int] = []
    stream.submit(lambda: gate.wait(60.0) and None)
    for number in range(20):
        stream.submit(lambda: None, done=lambda _event, number=number: reported.append(number))  # type: ignore[misc]
    gate.set()
    assert stream.synchronize(60.0)
    assert reported == list(range(20))
    assert stream.close(60.0)
