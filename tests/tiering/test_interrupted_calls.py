"""A call that an exception cuts short, wherever it lands, leaves nothing behind: either the tier goes on as if the call had ended there, or
it is broken, says so once, and answers as a tier does that fails. Never another error, other bytes, or a call that does not end."""

from __future__ import annotations

import asyncio
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupting import cut_short
from tier_rig import PATIENCE, TierRig, keys, on_nvme, until

import kvtier
from kvtier.errors import KVTierError
from kvtier.io.page_copier import HostPageCopier
from kvtier.pools.page_layout import PageGroup, PageLayout
from kvtier.tiering.config import TierConfig
from kvtier.tiering.ledger.key_ledger import KeyLedger
from kvtier.tiering.ledger.keyed_level import KeyedLevel
from kvtier.tiering.tier_messages import KeyState
from kvtier.tiering.tier_store import TierStore
from kvtier.tiering.transfer import TransferManager
from kvtier.tiering.turn import Turn

COUNT, PAGE_BYTES = 4, 96
OLD, NEW = keys(COUNT), keys(COUNT, prompt=1)


def pages_of(names: list[bytes]) -> torch.Tensor:
    return torch.stack([torch.frombuffer(bytearray(name * 3), dtype=torch.uint8) for name in names])


def open_store(**settings: Any) -> TierStore:
    """Room for one of two prompts, so that storing one gives up the other."""
    config = TierConfig(**{"secondary": "6 blocks", "write_ahead_share": 1.0} | settings)
    return TierStore(PageLayout([PageGroup(PAGE_BYTES)]), config, model="m@1:0", engine_id=f"cut-{uuid.uuid4().hex[:12]}")


def write(store: TierStore, names: list[bytes]) -> list[bool]:
    return store.write(names, [pages_of(names)], range(len(names)))


def read(store: TierStore, names: list[bytes]) -> int:
    """How many pages came, after a look at each."""
    target = torch.zeros(len(names), PAGE_BYTES, dtype=torch.uint8)
    count = store.read(names, [target], range(len(names)))
    assert torch.equal(target[:count], pages_of(names)[:count])
    return count


CALLS: dict[str, Callable[[TierStore], Any]] = {
    "write": lambda store: write(store, NEW), "read": lambda store: read(store, OLD), "count": lambda store: store.count(OLD),
    "reset": lambda store: store.reset(), "poll": lambda store: store.index.poll()}


def use(store: TierStore) -> None:
    assert store.count(OLD) <= COUNT
    read(store, OLD)
    read(store, NEW)
    until(lambda: not store.index.has_work)  # what is being written to NVMe makes no room
    stored = write(store, NEW)
    assert stored[0] is not bool(store.index.broken)
    assert read(store, NEW) == stored.count(True)
    assert store.index.flush(PATIENCE) is not bool(store.index.broken)


def use_elsewhere(store: TierStore) -> None:
    """What the call has left behind must not hold another thread up."""
    failures: list[BaseException] = []

    def live() -> None:
        try:
            use(store)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    thread.join(2 * PATIENCE)
    assert not thread.is_alive(), "it waits for what the other call holds"
    assert not failures, failures[0]


def cut_and_use(name: str, place: int, caplog: pytest.LogCaptureFixture, **settings: Any) -> bool:
    """False when the call was over before it came to that place."""
    caplog.clear()
    store = open_store(**settings)
    write(store, OLD)
    until(lambda: not store.index.has_work)  # on NVMe, too, where there is one
    was_cut = cut_short(lambda: CALLS[name](store), place)
    if was_cut:
        use_elsewhere(store)
        use(store)
        assert store.index.broken or write(store, NEW) == [True] * COUNT, "the thread's next call has ended what the last one had not"
        said = [record.getMessage() for record in caplog.records if "is broken" in record.getMessage()]
        assert len(said) == bool(store.index.broken)
        stats = store.index.stats()
        assert (stats.leases, stats.requests, stats.jobs, stats.abandoned_jobs) == (0, 0, 0, 0)
        store.index.verify()
    is_unknown = "while transfers were issued" in store.index.broken  # which of them run: they are waited for, as long as one may
    store.close(0.5 if is_unknown else PATIENCE)
    assert store.index._everything_let_go or is_unknown
    assert not store.index.arena_path.exists()
    return was_cut


@pytest.mark.parametrize(("name", "step"), [("write", 13), ("read", 11), ("count", 5), ("reset", 5), ("poll", 3)])
def test_wherever_a_call_is_cut_short_the_store_goes_on_or_is_broken(name: str, step: int, caplog: pytest.LogCaptureFixture) -> None:
    place = 0
    while cut_and_use(name, place, caplog):
        place += step
    assert place > step, "it was never cut short"


@pytest.mark.parametrize(("name", "step"), [("write", 101), ("read", 97), ("reset", 23)])
def test_what_lies_on_nvme_is_found_right_by_the_next_start(name: str, step: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = 0
    while cut_and_use(name, place, caplog, **on_nvme(tmp_path / str(place))):
        again = open_store(**on_nvme(tmp_path / str(place)))
        read(again, OLD)
        read(again, NEW)
        again.index.verify()
        again.close()
        place += step
    assert place > step


def out_of_memory(*_given: Any) -> Any:
    raise MemoryError


@pytest.mark.parametrize(("owner", "method"), [(KeyedLevel, "name"), (KeyLedger, "_new_job"), (KeyLedger, "start_reads"),
                                               (TransferManager, "issue"), (TransferManager, "drain")],
                         ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_want_of_memory_in_the_middle_of_a_change_breaks_the_index(tmp_path: Path, owner: type, method: str,
                                                                   caplog: pytest.LogCaptureFixture,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TierRig(**on_nvme(tmp_path, write_ahead_share=1.0))
    rig.store(keys(3))
    rig.store(keys(1, prompt=2))  # nobody holds it: the next poll writes it to NVMe
    assert rig.look_up(keys(3), request="holder") == 3
    loading = rig.index.plan_load("holder", keys(3))
    version = rig.index.version
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, out_of_memory)
        with pytest.raises(MemoryError):  # noqa: PT012 (whichever of them comes upon it)
            rig.index.plan_store("writer", keys(2, prompt=1))
            rig.index.end_request("holder")
            rig.index.poll()
    assert "MemoryError" in rig.index.broken
    assert rig.index.version != version, "who asks again only when something has changed does"
    assert [record.levelname for record in caplog.records if "is broken" in record.getMessage()] == ["ERROR"]

    pages = list(range(32, 35))
    rig.workers[0].submit_load(loading.job_id, 0, pages, loading.slots)
    until(lambda: rig.index.wait([loading.job_id], PATIENCE))
    rig.check(0, keys(3), pages)
    assert rig.index.complete(loading.job_id) == 0, "what was promised before is delivered"
    assert rig.states(keys(3)) == [KeyState.MISS] * 3
    assert rig.index.plan_load("reader", keys(3)).job_id == -1
    refused = rig.index.plan_store("writer", keys(2, prompt=1))
    assert (refused.job_id, refused.num_refused) == (-1, 2)
    assert rig.index.prefetch(keys(3)) == 0
    assert not rig.index.has_work
    rig.index.begin_request("writer")
    rig.index.begin_request("writer")
    rig.index.abort("writer")
    assert not rig.index.flush(PATIENCE)
    rig.index.poll()
    rig.close()
    with pytest.raises(KVTierError, match="closed"):
        rig.index.poll()


def test_a_job_of_before_has_ended_only_when_its_ranks_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with TierRig() as rig:
        plan = rig.index.plan_store("writer", keys(2))
        monkeypatch.setattr(KeyLedger, "lookup", out_of_memory)
        with pytest.raises(MemoryError):
            rig.index.lookup("reader", keys(2))
        assert not rig.index.wait([plan.job_id], 0.0), "its pages may still be read"
        rig.submit_store(plan, keys(2))
        assert rig.index.wait([plan.job_id], PATIENCE)


def test_a_turn_whose_end_never_came_holds_nobody_up() -> None:
    """The exception came where the turn is given back: before anything of that had been done."""
    with TierRig() as rig:
        rig.store(keys(2))

        def never_given_back() -> None:
            rig.index.turn.__enter__()

        thread = threading.Thread(target=never_given_back)
        thread.start()
        thread.join(PATIENCE)
        assert rig.states(keys(2)) == [KeyState.MISS] * 2
        assert "kept the ledger's lock" in rig.index.broken


def test_a_slow_turn_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.tiering import turn

    monkeypatch.setattr(turn, "LOOK_SECONDS", 0.001)
    with TierRig() as rig:
        rig.store(keys(2))
        looked = threading.Event()
        is_left_behind = Turn._is_left_behind

        def look(self: Turn[Any]) -> bool:
            looked.set()
            return is_left_behind(self)

        monkeypatch.setattr(Turn, "_is_left_behind", look)
        with rig.index.locked():
            thread = threading.Thread(target=rig.index.poll)
            thread.start()
            assert looked.wait(PATIENCE)
        thread.join(PATIENCE)
        assert not rig.index.broken
        assert rig.states(keys(2)) == [KeyState.HIT] * 2
        rig.index.end_request("reader")


def test_a_turn_within_a_generator_that_comes_to_rest_while_somebody_looks_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with TierRig() as rig:
        is_inside, may_rest, rests, may_end = (threading.Event() for _ in range(4))

        def steps() -> Iterator[None]:
            is_inside.set()
            may_rest.wait(PATIENCE)
            yield

        def hold() -> None:
            with rig.index.locked():
                walk = steps()
                next(walk)
                rests.set()
                may_end.wait(PATIENCE)

        current_frames = sys._current_frames

        def frames() -> dict[int, Any]:
            found = current_frames()
            may_rest.set()
            assert rests.wait(PATIENCE)
            return found

        thread = threading.Thread(target=hold)
        thread.start()
        assert is_inside.wait(PATIENCE)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "_current_frames", frames)
            was_left = rig.index.turn._is_left_behind()
        may_end.set()
        thread.join(PATIENCE)
        assert not was_left


def test_a_turn_taken_in_a_generator_is_not_left_behind_while_that_rests() -> None:
    with TierRig() as rig:

        def steps() -> Iterator[None]:
            with rig.index.locked():
                yield

        walk = steps()
        next(walk)
        assert not rig.index.turn._is_left_behind()
        list(walk)
        assert rig.index.stats().leases == 0


def test_a_signal_handler_that_calls_into_the_middle_of_a_call_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[KeyState] = []
    store = open_store()
    write(store, OLD)
    with monkeypatch.context() as patch:
        take_host = KeyedLevel.take_host

        def interrupted(self: KeyedLevel, priority: int, duration: float) -> Any:
            if not found:
                found.append(store.index.key_state("handler", OLD[0]))
            return take_host(self, priority, duration)

        patch.setattr(KeyedLevel, "take_host", interrupted)
        assert write(store, NEW) == [False] * COUNT
    assert found == [KeyState.MISS]
    assert read(store, OLD) == read(store, NEW) == 0
    store.close()
    assert store.index._everything_let_go


class TimeIsOver(Exception):
    """What a handler of SIGALRM raises."""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeIsOver])
def test_a_manager_that_was_cut_short_refuses_every_call_but_close(make_cache: Callable[..., kvtier.KVCacheManager],
                                                                   caplog: pytest.LogCaptureFixture, kind: type[BaseException]) -> None:
    def admit(cache: kvtier.KVCacheManager) -> None:
        cache.add_sequence(kvtier.Request(2, list(range(100, 113))))
        cache.append_tokens(2, [7])
        cache.remove_sequence(2)

    num_broken = place = 0
    while True:
        caplog.clear()
        cache = make_cache(8, 4, 0)
        cache.add_sequence(kvtier.Request(1, list(range(13))))
        if not cut_short(lambda cache=cache: admit(cache), place, kind):
            break
        with suppress(KVTierError):  # the next call finds out where it was cut short while it gave its turn back
            cache.verify()
        if cache.broken:
            num_broken += 1
            for call in (cache.refresh, cache.stats, lambda cache=cache: cache.remove_sequence(1), cache.reset, cache.flush):
                with pytest.raises(KVTierError, match=r"is broken: .* make a new one"):
                    call()
            assert sum("is broken" in record.getMessage() for record in caplog.records) == 1
        else:
            assert cache._all_issued, "whoever waits for a sequence would wait for ever"
            cache.verify()
            cache.remove_sequence(1)
        cache.close()
        assert cache._everything_let_go
        place += 7
    assert num_broken


def test_a_time_out_while_copies_are_issued_breaks_the_manager(make_cache: Callable[..., kvtier.KVCacheManager],
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that were taken out of the queue and are never made would be waited for, or taken for made."""
    def time_is_over(*_given: Any) -> Any:
        raise TimeIsOver

    cache = make_cache(2, 4, 0)
    cache.add_sequence(kvtier.Request(1, list(range(8))))
    cache.mark_computed(1, 8)
    cache.remove_sequence(1)
    with monkeypatch.context() as patch:
        patch.setattr(cache.transfers, "issue", time_is_over)
        with pytest.raises(TimeIsOver):
            cache.add_sequence(kvtier.Request(2, list(range(100, 108))))
    assert "TimeIsOver while transfers were issued" in cache.broken


def test_an_interrupt_between_copies_and_their_number_breaks_the_manager(make_cache: Callable[..., kvtier.KVCacheManager]) -> None:
    """With a number that stays behind, whoever waits for a sequence would wait for ever."""
    class Interrupted:
        def __iadd__(self, _count: int) -> Any:
            raise KeyboardInterrupt

    cache = make_cache(2, 4, 0)
    cache._num_issued = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        cache.add_sequence(kvtier.Request(1, list(range(8))))
    assert "while transfers were issued" in cache.broken


def test_a_time_out_while_ends_of_transfers_are_told_breaks_the_manager(make_cache: Callable[..., kvtier.KVCacheManager],
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    def time_is_over(*_given: Any) -> Any:
        raise TimeIsOver

    cache = make_cache(8, 4, 0)
    with monkeypatch.context() as patch:
        patch.setattr(cache.transfers, "drain", time_is_over)
        with pytest.raises(TimeIsOver):
            cache.refresh()
    assert "TimeIsOver at the beginning of a call" in cache.broken


def test_what_a_hook_raises_breaks_nothing(make_cache: Callable[..., kvtier.KVCacheManager]) -> None:
    class Elsewhere:
        def num_new_matched_tokens(self, _request: kvtier.Request, _num_matched: int) -> int:
            raise TimeIsOver

    cache = make_cache(8, 4, 0)
    cache.set_inbound(Elsewhere())
    with pytest.raises(TimeIsOver):
        cache.add_sequence(kvtier.Request(1, list(range(13))))
    assert not cache.broken
    cache.set_inbound(None)
    cache.add_sequence(kvtier.Request(1, list(range(13))))
    cache.remove_sequence(1)


def test_whoever_waits_for_a_sequence_of_a_manager_that_breaks_is_told(make_cache: Callable[..., kvtier.KVCacheManager],
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(8, 4, 0)
    cache.add_sequence(kvtier.Request(1, list(range(13))))
    waits = threading.Event()

    def not_yet(*_given: Any) -> bool:
        waits.set()
        return False

    monkeypatch.setattr(cache, "_has_arrived", not_yet)
    told: list[str] = []

    def wait() -> None:
        try:
            asyncio.run(asyncio.wait_for(cache.ready(1), PATIENCE))
        except KVTierError as error:
            told.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    assert waits.wait(PATIENCE)
    with monkeypatch.context() as patch:
        patch.setattr(cache._ledger, "refresh", out_of_memory)
        with pytest.raises(MemoryError):
            cache.refresh()
    thread.join(2 * PATIENCE)
    assert told
    assert "is broken: MemoryError" in told[0]


@pytest.mark.parametrize("inner", ["write", "read"])
def test_a_signal_handler_that_uses_the_store_between_two_turns_of_a_call_ends_nothing_of_it(inner: str,
                                                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store() as store:
        copy = HostPageCopier.store
        refused: list[KVTierError] = []

        def interrupted(self: HostPageCopier, runs: Any) -> None:
            if not refused:
                with pytest.raises(KVTierError, match="nothing was done") as caught:  # else this job's slots are OLD's now
                    write(store, OLD) if inner == "write" else read(store, OLD)
                refused.append(caught.value)
            copy(self, runs)

        with monkeypatch.context() as patch:
            patch.setattr(HostPageCopier, "store", interrupted)
            assert write(store, NEW) == [True] * COUNT
        assert refused
        assert read(store, NEW) == COUNT
        assert not store.index.broken
