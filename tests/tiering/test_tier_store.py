"""``TierStore``: what is written comes back byte by byte, also after a restart; whatever fails is a miss; nothing stays leased."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tier_rig import key, keys, until

from kvtier.errors import ConfigError, KVTierError, RequestError
from kvtier.io.page_copier import HostPageCopier
from kvtier.pools.page_layout import PageGroup, PageLayout
from kvtier.tiering.config import TierConfig
from kvtier.tiering.ledger.key_ledger import KeyLedger
from kvtier.tiering.tier_store import TierStore

PAGE_BYTES = 3000
Pieces = list[torch.Tensor]


def filled(count: int, seed: int = 0) -> Pieces:
    """Pages in two pieces of unequal width, as pools have them."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 255, (count, width), dtype=torch.uint8, generator=generator) for width in (1000, 2000)]


def empty(count: int) -> Pieces:
    return [torch.zeros(count, width, dtype=torch.uint8) for width in (1000, 2000)]


def same(left: Pieces, right: Pieces, rows: slice = slice(None)) -> bool:
    return all(torch.equal(one[rows], other[rows]) for one, other in zip(left, right, strict=True))


@pytest.fixture
def make() -> Iterator[Callable[..., TierStore]]:
    """Opens stores; at the end nothing is leased or under way, and every invariant stands."""
    opened: list[TierStore] = []

    def make(secondary: int = 16, layout: PageLayout | None = None, read_timeout: float = 5.0, **settings: Any) -> TierStore:
        config = TierConfig(secondary=f"{secondary} blocks", **({"write_ahead_share": 1.0} | settings))
        store = TierStore(layout or PageLayout([PageGroup(PAGE_BYTES)]), config, model="m@1:0", engine_id=f"store-{uuid.uuid4().hex[:12]}",
                          read_timeout=read_timeout)
        opened.append(store)
        return store

    yield make
    for store in opened:
        if not store._is_closed:
            store.index.verify()
            stats = store.index.stats()
            assert (stats.leases, stats.jobs, stats.requests) == (0, 0, 0)
        store.close()


def nvme(folder: Path, blocks: int = 64) -> dict[str, Any]:
    return {"nvme": f"{blocks} blocks", "nvme_directory": str(folder), "nvme_free_space_reserve": "1MiB"}


def test_pages_in_pieces_come_back_in_other_rows_byte_by_byte(make: Callable[..., TierStore]) -> None:
    store, source, target = make(), filled(8), empty(8)
    assert store.write(keys(5), source, [7, 1, 2, 3, 0]) == [True] * 5
    assert store.count(keys(8)) == 5
    assert store.read(keys(5), target, [0, 1, 2, 3, 7]) == 5
    for here, there in ((0, 7), (1, 1), (2, 2), (3, 3), (7, 0)):
        assert same([piece[here] for piece in target], [piece[there] for piece in source])


def test_a_page_cut_in_another_way_has_the_same_bytes(make: Callable[..., TierStore]) -> None:
    store, source, flat = make(), filled(1), torch.zeros(1, PAGE_BYTES, dtype=torch.uint8)
    store.write(keys(1), source, [0])
    assert store.read(keys(1), [flat], [0]) == 1
    assert torch.equal(flat[0], torch.cat([piece[0] for piece in source]))


def test_only_the_front_up_to_the_first_gap_counts_and_is_read(make: Callable[..., TierStore]) -> None:
    store, source, target = make(), filled(4), empty(4)
    store.write([key(0), key(2)], source, [0, 2])
    assert store.count(keys(3)) == 1
    assert store.read(keys(3), target, [0, 1, 2]) == 1
    assert store.count([key(9)]) == 0
    assert store.count([]) == store.read([], target, []) == 0


def test_what_is_there_already_is_not_written_again_and_counts_as_stored(make: Callable[..., TierStore]) -> None:
    store = make()
    store.write([key(1)], filled(1), [0])
    assert store.write(keys(4), filled(4, seed=1), [0, 1, 2, 3]) == [True] * 4
    assert store.index.stats().stored_blocks == 4
    target = empty(4)
    store.read(keys(4), target, [0, 1, 2, 3])
    assert same([piece[1] for piece in target], [piece[0] for piece in filled(1)])


def test_a_restart_finds_on_nvme_what_was_written_before(make: Callable[..., TierStore], tmp_path: Path) -> None:
    first, source = make(**nvme(tmp_path / "store")), filled(40)
    for start in range(0, 40, 8):
        rows = list(range(start, start + 8))
        assert first.write([key(row) for row in rows], source, rows) == [True] * 8
        until(lambda: not first.index.has_work)
    first.close()
    second, target = make(**nvme(tmp_path / "store")), empty(40)
    assert second.count(keys(40)) == 40
    assert second.read(keys(40), target, list(range(40))) == 40, "more pages than the host level holds, in one call"
    assert same(target, source)


def test_a_flipped_bit_on_nvme_is_a_miss_from_that_page_on(make: Callable[..., TierStore], tmp_path: Path) -> None:
    first, source = make(**nvme(tmp_path / "store")), filled(6)
    first.write(keys(6), source, list(range(6)))
    first.close()
    second, target = make(faults="nvme.read.bit_flip*1", read_threads=1, **nvme(tmp_path / "store")), empty(6)
    found = second.read(keys(6), target, list(range(6)))
    assert found < 6
    assert same(target, source, slice(0, found))
    assert second.index.stats().checksum_failures == 1


def test_a_failed_copy_into_the_store_is_not_stored(make: Callable[..., TierStore]) -> None:
    store = make(faults="secondary.copy.eio*1")
    assert store.write(keys(3), filled(3), [0, 1, 2]) == [False] * 3
    assert store.count(keys(3)) == 0
    assert store.write(keys(3), filled(3), [0, 1, 2]) == [True] * 3


def test_a_failed_copy_out_of_the_store_is_made_again_and_then_a_miss_that_is_forgotten(make: Callable[..., TierStore]) -> None:
    store, target = make(faults="primary.copy.eio*5"), empty(3)
    store.write(keys(3), filled(3), [0, 1, 2])
    assert store.read(keys(3), target, [0, 1, 2]) == 0
    assert store.count(keys(3)) == 0, "what cannot be copied is not found again for ever"
    store.write(keys(3), filled(3), [0, 1, 2])
    assert store.read(keys(3), target, [0, 1, 2]) == 3, "two failures, then the third attempt"
    assert same(target, filled(3))


@pytest.mark.parametrize("call", ["store", "load"])
def test_a_call_that_is_interrupted_leaves_no_job_and_no_torn_page(make: Callable[..., TierStore], monkeypatch: pytest.MonkeyPatch,
                                                                    call: str) -> None:
    store, target = make(), empty(3)
    if call == "load":
        store.write(keys(3), filled(3), [0, 1, 2])

    def interrupted(*_given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HostPageCopier, call, interrupted)
        with pytest.raises(KeyboardInterrupt):
            (store.write if call == "store" else store.read)(keys(3), filled(3), [0, 1, 2])
    assert (store.index.stats().jobs, store.index.stats().abandoned_jobs) == (0, 0)
    assert store.count(keys(3)) == (0 if call == "store" else 3)
    assert store.write(keys(3), filled(3), [0, 1, 2]) == [True] * 3
    assert store.read(keys(3), target, [0, 1, 2]) == 3
    assert same(target, filled(3))


def test_a_full_host_level_gives_up_what_is_oldest_and_a_call_keeps_its_own_front(make: Callable[..., TierStore]) -> None:
    store = make(secondary=4)
    store.write(keys(4, prompt=1), filled(4), [0, 1, 2, 3])
    stored = store.write(keys(7), filled(7), list(range(7)))
    assert stored == [True] * 4 + [False] * 3
    assert store.count(keys(7)) == 4
    assert store.count(keys(4, prompt=1)) == 0


def test_a_priority_below_the_threshold_stores_nothing(make: Callable[..., TierStore]) -> None:
    store = make(secondary_offload_min_priority=90)
    assert store.write(keys(2), filled(2), [0, 1]) == [False, False]


def test_groups_have_keys_of_their_own(make: Callable[..., TierStore]) -> None:
    store = make(layout=PageLayout([PageGroup(PAGE_BYTES), PageGroup(64)]))
    small = [torch.arange(64, dtype=torch.uint8).reshape(1, 64)]
    store.write(keys(1), small, [0], group=1)
    assert (store.count(keys(1)), store.count(keys(1), group=1)) == (0, 1)
    target = [torch.zeros(1, 64, dtype=torch.uint8)]
    assert store.read(keys(1), target, [0], group=1) == 1
    assert torch.equal(target[0], small[0])


def test_a_reset_forgets_everything(make: Callable[..., TierStore], tmp_path: Path) -> None:
    store = make(**nvme(tmp_path / "store"))
    store.write(keys(3), filled(3), [0, 1, 2])
    store.reset()
    assert store.count(keys(3)) == 0


@pytest.mark.parametrize("step", ["planned", "copied"])
def test_a_reset_in_the_middle_of_a_write_forgets_all_of_it(make: Callable[..., TierStore], monkeypatch: pytest.MonkeyPatch,
                                                            step: str) -> None:
    """What a write stored behind a reset would be served to prompts whose front other weights have computed since."""
    store = make(secondary=80)
    name = {"planned": "plan_store", "copied": "complete"}[step]
    known, calls = getattr(store.index, name), []

    def in_between(*given: Any, **more: Any) -> Any:
        calls.append(name)
        if len(calls) == 1 and step == "planned":
            store.reset()
        answer = known(*given, **more)
        if len(calls) == 1 and step == "copied":
            store.reset()
        return answer

    monkeypatch.setattr(store.index, name, in_between)
    assert store.write(keys(70), filled(70), list(range(70))) == [False] * 70
    assert store.index.stats().stored_blocks in (0, 32)
    assert [store.count([key(row)]) for row in range(70)] == [0] * 70
    assert store.write(keys(70), filled(70, seed=1), list(range(70))) == [True] * 70
    target = empty(70)
    assert store.read(keys(70), target, list(range(70))) == 70
    assert same(target, filled(70, seed=1))


def test_a_write_that_began_when_a_reset_had_only_begun_is_forgotten_too(make: Callable[..., TierStore],
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    store, has_begun, is_forgotten = make(), threading.Event(), threading.Event()
    plan_store, reset, answers = store.index.plan_store, store.index.reset, []

    def planned_late(*given: Any) -> Any:
        has_begun.set()
        assert is_forgotten.wait(10.0)
        return plan_store(*given)

    def overtaken(timeout: float) -> None:
        writer.start()
        assert has_begun.wait(10.0)
        reset(timeout)
        is_forgotten.set()

    monkeypatch.setattr(store.index, "plan_store", planned_late)
    monkeypatch.setattr(store.index, "reset", overtaken)
    writer = threading.Thread(target=lambda: answers.append(store.write(keys(3), filled(3), [0, 1, 2])))
    store.reset()
    writer.join(10.0)
    assert answers == [[False] * 3]
    assert [store.count([name]) for name in keys(3)] == [0, 0, 0]


def test_a_write_whose_time_was_over_before_it_was_done_says_that_it_stored_nothing(make: Callable[..., TierStore],
                                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    now, copy = [0.0], HostPageCopier.store
    store = make(clock=lambda: now[0])

    def slow(*given: Any) -> None:
        copy(*given)
        now[0] += 3600.0
        store.index.poll()

    store.write([key(0)], filled(1), [0])
    with monkeypatch.context() as patch:
        patch.setattr(HostPageCopier, "store", slow)
        assert store.write(keys(3), filled(3), [0, 1, 2]) == [True, False, False]
    assert store.index.stats().expired_jobs == 1
    assert [store.count([name]) for name in keys(3)] == [1, 0, 0]
    assert store.write(keys(3), filled(3), [0, 1, 2]) == [True] * 3


def test_what_another_call_is_only_just_storing_is_not_said_to_be_stored(make: Callable[..., TierStore]) -> None:
    store = make()
    other = store.index.plan_store("other", [key(1)])
    assert store.write(keys(3), filled(3), [0, 1, 2]) == [True, False, True]
    store.index.cancel_job(other.job_id)
    store.index.end_request("other")
    assert [store.count([name]) for name in keys(3)] == [1, 0, 1]


def test_pages_that_were_there_before_a_reset_are_not_stored_behind_it(make: Callable[..., TierStore]) -> None:
    store = make()
    before = store.num_resets
    store.reset()
    assert store.write(keys(2), filled(2), [0, 1], num_resets=before) == [False, False]
    assert store.count(keys(2)) == 0
    assert store.write(keys(2), filled(2), [0, 1], num_resets=store.num_resets) == [True, True]


def test_a_read_that_a_reset_overtakes_finds_nothing(make: Callable[..., TierStore], monkeypatch: pytest.MonkeyPatch) -> None:
    store, known = make(), TierStore._carry_out
    store.write(keys(3), filled(3), [0, 1, 2])

    def overtaken(*given: Any) -> bool:
        is_good = known(*given)
        store.reset()
        return is_good

    monkeypatch.setattr(TierStore, "_carry_out", overtaken)
    assert store.read(keys(3), empty(3), [0, 1, 2]) == 0


def test_closing_ends_calls_that_wait_for_nvme_and_frees_the_folder(make: Callable[..., TierStore], tmp_path: Path) -> None:
    first = make(**nvme(tmp_path / "store"))
    first.write(keys(3), filled(3), [0, 1, 2])
    first.close()
    second = make(read_timeout=60.0, faults="nvme.read.hang:20s", **nvme(tmp_path / "store"))
    found: list[int] = []
    reader = threading.Thread(target=lambda: found.append(second.read(keys(3), empty(3), [0, 1, 2])))
    reader.start()
    until(lambda: bool(second._calls))
    second.close(1.0)
    reader.join(10.0)
    assert found == [0]
    until(lambda: second.close(0.3) or second.index._everything_let_go)


def test_a_store_whose_copy_hung_while_it_was_closed_can_be_closed_again(make: Callable[..., TierStore], tmp_path: Path) -> None:
    store = make(**nvme(tmp_path / "store"))
    hangs, goes_on = threading.Event(), threading.Event()
    store._carry_out = lambda *given: hangs.set() or not goes_on.wait(20.0)  # type: ignore[method-assign, assignment]
    writer = threading.Thread(target=lambda: store.write(keys(1), filled(1), [0]))
    writer.start()
    assert hangs.wait(10.0)
    store.close(0.2)
    assert not store.index._everything_let_go
    goes_on.set()
    writer.join(10.0)
    store.close()
    store.close()
    assert store.index._everything_let_go
    assert make(**nvme(tmp_path / "store")).count(keys(1)) == 0, "the folder is free"


@pytest.mark.parametrize("timeout", [float("inf"), 1e12, 10 ** 30], ids=str)
def test_closing_may_be_given_any_amount_of_time(make: Callable[..., TierStore], tmp_path: Path, timeout: float) -> None:
    store = make(**nvme(tmp_path / "store"))
    store.close(timeout)
    assert store.index._everything_let_go


def test_a_call_whose_end_fails_is_over_all_the_same(make: Callable[..., TierStore], monkeypatch: pytest.MonkeyPatch) -> None:
    store = make()

    def fail(*_given: object) -> None:
        raise KVTierError("trouble")

    with monkeypatch.context() as patch:
        patch.setattr(KeyLedger, "end_request", fail)
        assert store.read(keys(1), empty(1), [0]) == 0
    assert not store._calls
    store.index.end_request("read-0")


@pytest.mark.parametrize(("tensors", "pages", "named"), [
    ([torch.zeros(4, 2999, dtype=torch.uint8)], [0], "2999 bytes"),
    ([torch.zeros(4, 3000, dtype=torch.int16)], [0], "int16"),
    ([torch.zeros(4, 6000, dtype=torch.uint8)[:, ::2]], [0], "contiguous"),
    ([torch.zeros(4, 3000, dtype=torch.uint8)], [4], "rows 0..3"),
    ([torch.zeros(4, 3000, dtype=torch.uint8)], [-1], "rows 0..3"),
    ([torch.zeros(4, 3000, dtype=torch.uint8)], [0, 1], "2 rows for 1 keys"),
    ([torch.zeros(4, 3000, dtype=torch.uint8)], [0.5], "pages: pass whole numbers"),
    ([torch.zeros(1, 3000, dtype=torch.uint8).expand(4, 3000)], [0], "memory of its own"),
    ([torch.zeros(6000, dtype=torch.uint8).as_strided((4, 3000), (1000, 1))], [0], "memory of its own"),
    ([torch.zeros(4, 3000, dtype=torch.uint8), torch.zeros(4, 0, dtype=torch.uint8)], [0], "a byte at least"),
])
def test_tensors_that_do_not_fit_are_refused_and_nothing_is_copied(make: Callable[..., TierStore], tensors: Pieces, pages: list[int],
                                                                   named: str) -> None:
    store = make()
    for call in (store.write, store.read):
        with pytest.raises(RequestError, match=named):
            call(keys(1), tensors, pages)
    assert store.count(keys(1)) == 0


@pytest.mark.parametrize("step", ["plan_store", "plan_load"])
def test_rows_are_those_that_were_checked_whatever_becomes_of_the_callers_list(make: Callable[..., TierStore],
                                                                               monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    store, source, target, rows = make(), filled(2), empty(2), [0]
    plan = getattr(store.index, step)

    def after_the_list_has_changed(*given: Any) -> Any:
        rows[0] = 1
        return plan(*given)

    monkeypatch.setattr(store.index, step, after_the_list_has_changed)
    assert store.write(keys(1), source, rows) == [True]
    rows[0] = 0
    assert store.read(keys(1), target, rows) == 1
    assert same(target, source, slice(0, 1))
    assert same(target, empty(2), slice(1, 2))


@pytest.mark.parametrize("bad", [None, [[1]], [bytearray(32)], b"key", iter([b"key"])],
                         ids=["None", "list", "bytearray", "bytes", "iterator"])
def test_bad_keys_are_refused_before_the_ledger_is_asked(make: Callable[..., TierStore], bad: Any) -> None:
    with make() as store:
        with pytest.raises(RequestError, match="key"):
            store.count(bad)
        assert not store.index.broken


def test_bad_keys_groups_and_layouts_are_refused(make: Callable[..., TierStore]) -> None:
    store = make()
    with pytest.raises(RequestError, match="content key"):
        store.write(["text"], filled(1), [0])  # type: ignore[list-item]
    with pytest.raises(RequestError, match=r"one group, numbered 0"):
        store.count(keys(1), group=1)
    with pytest.raises(RequestError, match="one rank"):
        make(layout=PageLayout([PageGroup(PAGE_BYTES)], ranks=2))
    with pytest.raises(ConfigError, match="primary"):
        make(primary="4 blocks")


def test_many_threads_write_and_read_right_bytes_and_closing_waits_for_them(make: Callable[..., TierStore], tmp_path: Path) -> None:
    store = make(secondary=12, **nvme(tmp_path / "store"))
    failures: list[str] = []

    def work(number: int) -> None:
        try:
            for turn in range(12):
                prompt = (number + turn) % 5
                source, target, names = filled(6, seed=prompt), empty(6), keys(6, prompt=prompt)
                store.write(names, source, list(range(6)))
                found = store.read(names, target, list(range(6)))
                if not same(target, source, slice(0, found)):
                    failures.append(f"prompt {prompt}: other bytes")
        except KVTierError as error:
            if "closed" not in str(error):
                failures.append(str(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    threads[0].join()
    store.close()
    for thread in threads:
        thread.join()
    assert not failures
    with pytest.raises(KVTierError, match="closed"):
        store.read(keys(1), empty(1), [0])


@pytest.mark.parametrize("call", [lambda store: store.count(keys(1)), lambda store: store.read(keys(1), empty(1), [0]),
                                  lambda store: store.write(keys(1), filled(1), [0]), lambda store: store.reset()],
                         ids=["count", "read", "write", "reset"])
def test_a_closed_store_names_what_the_user_has(make: Callable[..., TierStore], call: Callable[[TierStore], object]) -> None:
    store = make()
    store.close()
    with pytest.raises(KVTierError, match="this TierStore is closed; make a new one"):
        call(store)
