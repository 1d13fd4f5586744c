"""Threads that write, read, count and reset one store at the same time, against slow and failing copies, hanging drives, jobs that are
given up and a close in the middle: every page read is whole, its key's, and of no weights that a reset has forgotten."""

from __future__ import annotations

import random
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from tier_rig import PATIENCE, key, on_nvme, until

from kvtier.errors import KVTierError, TransferError
from kvtier.pools.page_layout import PageGroup, PageLayout
from kvtier.tiering import hang_watch
from kvtier.tiering.config import TierConfig
from kvtier.tiering.tier_store import TierStore

PAGE_BYTES = (24, 5000)
NUM_PROMPTS, NUM_PAGES = 5, 7
FAULTS = "secondary.copy.eio=0.03, secondary.copy.delay=0.2:4ms, primary.copy.eio=0.05, primary.copy.delay=0.1:4ms, nvme.read.delay=0.1:3ms"
FAULTY_DRIVE = ", nvme.read.eio=0.03, nvme.read.bit_flip=0.05, nvme.write.torn_write=0.05"


def page(name: bytes, weights: int, group: int) -> torch.Tensor:
    """What these weights compute: the key, the weights' number, and bytes that follow from both."""
    head = name[:16] + weights.to_bytes(8, "big")
    return torch.frombuffer(bytearray((head * (PAGE_BYTES[group] // len(head) + 1))[:PAGE_BYTES[group]]), dtype=torch.uint8)


class Weights:
    """Which weights compute pages now, and the oldest whose pages may still be served."""

    def __init__(self) -> None:
        self.now = 0
        self.least = 0
        self.lock = threading.Lock()

    def replace(self, store: TierStore) -> None:
        with self.lock:
            self.now += 1
            number = self.now
            store.reset()
            self.least = number


class Engine:
    """One thread's calls."""

    def __init__(self, store: TierStore, weights: Weights, seed: int) -> None:
        self.store = store
        self.weights = weights
        self.chance = random.Random(seed)
        self.num_read = self.num_written = 0

    def turn(self) -> None:
        chance, group = self.chance, self.chance.randrange(2)
        names = [key(number, chance.randrange(NUM_PROMPTS)) for number in range(chance.randrange(1, NUM_PAGES))]
        if chance.random() < 0.1:
            names += names[:2]
        choice = chance.random()
        # The next jobs may be given up under way, or may not, however long copies take here.
        self.store.index._ledger.job_timeout = chance.choice([0.002, PATIENCE])
        if choice < 0.45:
            self.write(names, group)
        elif choice < 0.9:
            self.read(names, group)
        elif choice < 0.95:
            self.store.count(names, group)
        elif choice < 0.98:
            self.store.index.poll()
        else:
            self.weights.replace(self.store)

    def write(self, names: list[bytes], group: int) -> None:
        num_resets = self.store.num_resets  # first: what is computed behind it is of these weights, or of younger ones
        weights = self.weights.now
        pages = torch.stack([page(name, weights, group) for name in names])
        cut = PAGE_BYTES[group] // 3
        stored = self.store.write(names, [pages[:, :cut], pages[:, cut:]], range(len(names)), group, num_resets=num_resets)
        pages.fill_(255)  # the engine has other use for them
        self.num_written += sum(stored)

    def read(self, names: list[bytes], group: int) -> None:
        least = self.weights.least
        pages = torch.zeros(len(names), PAGE_BYTES[group], dtype=torch.uint8)
        count = self.store.read(names, [pages], range(len(names)), group)
        for name, found in zip(names[:count], pages, strict=False):
            weights = int.from_bytes(bytes(found[16:24].tolist()), "big")
            assert torch.equal(found, page(name, weights, group)), f"group {group}: other bytes"
            assert weights >= least, f"group {group}: a page of weights {weights}, which a reset has forgotten ({least})"
        self.num_read += count


def open_store(folder: Path, faults: str, **settings: Any) -> TierStore:
    config = TierConfig(**on_nvme(folder, secondary="9 blocks", write_ahead_share=1.0, faults=faults) | settings)
    store = TierStore(PageLayout([PageGroup(size) for size in PAGE_BYTES]), config, model="m@1:0",
                      engine_id=f"rush-{uuid.uuid4().hex[:12]}", read_timeout=0.3)
    return store


def rush(store: TierStore, weights: Weights, seed: int, turns: int, close_early: bool) -> list[Engine]:
    engines = [Engine(store, weights, 100 * seed + number) for number in range(3)]
    failures: list[BaseException] = []

    def live(engine: Engine) -> None:
        try:
            for _ in range(turns):
                engine.turn()
        except (KVTierError, TransferError) as error:
            if "closed" not in str(error):
                failures.append(error)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=live, args=(engine,), daemon=True) for engine in engines]
    for thread in threads:
        thread.start()
    if close_early:
        until(lambda: sum(engine.num_read for engine in engines) > 10 or not any(thread.is_alive() for thread in threads))
        store.close()
    for thread in threads:
        thread.join(3 * PATIENCE)
        assert not thread.is_alive()
    assert not failures, failures[0]
    return engines


@pytest.mark.parametrize("seed", range(4))
def test_a_rush_serves_whole_pages_of_weights_that_no_reset_has_forgotten(tmp_path: Path, seed: int, caplog: Any) -> None:
    caplog.set_level("CRITICAL")
    weights = Weights()
    for life in range(3):
        faults = f"{FAULTS}{FAULTY_DRIVE if seed % 2 else ''}, seed={10 * seed + life}"
        store = open_store(tmp_path / "kv", faults)
        engines = rush(store, weights, 10 * seed + life, 40, close_early=life == 1)
        assert sum(engine.num_read for engine in engines) > 0
        if life == 1:
            continue

        def is_over(store: TierStore = store) -> bool:
            stats = store.index.stats()
            return not (store.index.has_work or stats.jobs or stats.abandoned_jobs)

        until(is_over)
        stats = store.index.stats()
        store.index.verify()
        assert (stats.leases, stats.requests, stats.secondary.used_blocks, stats.secondary.busy_blocks) == (0, 0, 0, 0)
        store.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_rush_over_a_drive_that_hangs_ends_and_serves_right_pages(tmp_path: Path, seed: int, caplog: Any,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level("CRITICAL")
    monkeypatch.setattr(hang_watch, "HANG_SECONDS", 0.1)
    weights = Weights()
    for life in range(2):
        what = ("read", "write")[(seed + life) % 2]
        store = open_store(tmp_path / "kv", f"nvme.{what}.hang=0.05:400ms, {FAULTS}, seed={10 * seed + life}", read_threads=2)
        rush(store, weights, seed, 40, close_early=False)
        store.index.verify()
        stats = store.index.stats()
        assert (stats.leases, stats.requests) == (0, 0)

        def is_over(store: TierStore = store) -> bool:
            stats = store.index.stats()
            return not (store.index._ledger.reads_in_flight or stats.jobs or stats.abandoned_jobs or stats.secondary.used_blocks)

        until(is_over)
        store.close(1.0)
        until(lambda store=store: store.index._everything_let_go or (store.close(0.5) or store.index._everything_let_go))
