"""One life of a cache for ``scripts/soak.py``: several threads of real traffic under a random set of faults, every byte checked.

A life opens a store that other lives have left, in whatever state they left it, and leaves its own. It is run in a process of its own,
which may be killed at any moment; so what it has counted is handed out again and again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from group_engine import LAYOUTS, GroupEngine, attention
from toy_engine import tokens_of

import kvtier
from kvtier import (
    CapacityError,
    CorruptBlock,
    KVCacheManager,
    KVLayout,
    KVTierError,
    RequestError,
    TierConfig,
    TransferError,
    UnknownBlock,
)
from kvtier.io import write_pause
from kvtier.io.fault_text import FAILURES, KINDS
from kvtier.tiering import hang_watch

MODEL = "soak@1:0123abcd"
SOAKED = {"uniform": KVLayout([attention(1, 8)] * 2, "float32", 4), "large": KVLayout([attention(4, 128)] * 2, "bfloat16", 16)} | {
    name: LAYOUTS[name] for name in ("window and full", "states and a window", "windows of other heads and types", "encoder", "side data")}
FAMILIES = 10      # prompts begin in one of so many ways
ENGINE_THREADS = 3
NVME_BLOCKS = 64     # of each group
Report = Callable[[dict[str, Any]], None]


def random_faults(generator: random.Random) -> str:
    """Some rules, as a configuration writes them; seldom enough that the cache still does its work."""
    rules = []
    for operation in ("read", "write", "commit"):
        for kind in KINDS:
            if operation == "commit" and kind not in (*FAILURES, "delay", "hang"):
                continue
            if kind.endswith(("_read", "_write")) and not kind.endswith(f"_{operation}"):
                continue
            if kind in ("lost_file", "deleted_directory"):
                if generator.random() < 0.06:
                    rules.append(f"nvme.{operation}.{kind}=0.02*1")
            elif generator.random() < 0.25:
                wait = {"delay": ":4ms", "hang": f":{generator.choice([0.2, 1.0, 3.0])}s*3"}.get(kind, "")
                rules.append(f"nvme.{operation}.{kind}={generator.choice([0.002, 0.01, 0.04])}{wait}")
    for level, (kind, wait) in itertools.product(("primary", "secondary"), (("delay", ":3ms"), ("hang", ":0.2s*2"), ("eio", ""))):
        if generator.random() < 0.4:
            rules.append(f"{level}.copy.{kind}={generator.choice([0.002, 0.01])}{wait}")
    return ", ".join([*rules, f"seed={generator.randrange(1 << 30)}"]) if rules else ""


class Problems(logging.Handler):
    """What the cache logs: a failed callback is a bug of ours; warnings are counted, because there must be few."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.bugs: list[str] = []
        self.warnings: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.levelno >= logging.ERROR:
            self.bugs.append(self.format(record))
        else:
            self.warnings[str(record.msg)[:60]] += 1


class Traveller:
    """One engine at a shared cache, which does one thing after another."""

    def __init__(self, cache: KVCacheManager, guard: threading.Lock, number: int, generator: random.Random) -> None:
        self.cache = cache
        self.engine = GroupEngine(cache, guard)
        self.requests = 0
        self._ids = itertools.count(number * 1_000_000)
        self._generator = generator
        self._leases: list[Any] = []

    def step(self) -> None:
        """Admit, go on with, or end some requests. What is refused is refused for a reason that is promised."""
        generator, engine = self._generator, self.engine
        try:
            if len(engine.sequences) < 3 and generator.random() < 0.5:
                self._admit()
            elif generator.random() < 0.85:
                self._go_on()
            elif engine.sequences:
                engine.remove(generator.choice(list(engine.sequences)), store=generator.random() < 0.9)
            if engine.sequences and generator.random() < 0.03:
                self._leases.append(self.cache.pin(generator.choice(list(engine.sequences))))
            if self._leases and generator.random() < 0.2:
                self._leases.pop().release()
        except CapacityError as error:
            mine = [request_id for request_id in error.preempt if request_id in engine.sequences]
            for request_id in mine or list(engine.sequences)[:1]:
                engine.remove(request_id)
            while self._leases:
                self._leases.pop().release()
            time.sleep(0.001)

    def end(self) -> None:
        while self._leases:
            self._leases.pop().release()
        for request_id in list(self.engine.sequences):
            self.engine.remove(request_id)

    def _admit(self) -> None:
        generator = self._generator
        prompt = [*tokens_of(generator.randrange(FAMILIES), generator.randrange(4, 40)), generator.randrange(3)]
        self.engine.admit(self.engine.request(next(self._ids), prompt, cache_salt=generator.choice([None, None, None, "tenant"]),
                                              beam_width=generator.choice([1, 1, 1, 2])))
        self.requests += 1

    def _go_on(self) -> None:
        engine, generator = self.engine, self._generator
        for request_id in list(engine.sequences):
            engine.learn(request_id)
        with contextlib.suppress(RequestError):  # a copy failed during the step: the engine has to ask first
            for request_id in engine.forward(list(engine.sequences), generator.choice([None, None, 5])):
                sequence = engine.sequences[request_id]
                if sequence.computed == sequence.num_tokens < 60:
                    engine.sample(request_id)


class Life:
    """A cache from its start to its end."""

    def __init__(self, directory: Path, name: str, seed: int) -> None:
        self.generator = random.Random(seed)
        self.directory = directory
        self.layout = SOAKED[name]
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self._stop = threading.Event()

    def open(self, faults: str) -> KVCacheManager:
        """Waits for what a life before in this process still holds: a hanging call keeps the directory's lock."""
        generator = self.generator
        groups = len(self.layout.groups)
        primary, secondary = generator.randrange(24, 48), generator.randrange(4, 16)
        config = TierConfig(primary=[f"{primary} blocks"] * groups, secondary=[f"{secondary} blocks"] * groups,
                            nvme=f"{NVME_BLOCKS} blocks", nvme_directory=self.directory, nvme_free_space_reserve="1MiB",
                            nvme_sync=generator.random() < 0.2, max_seq_len=128, max_beam_width=2, read_threads=2,
                            chunk_size=generator.choice([None, None, 2 * self.layout.tokens_per_block]),
                            write_ahead_share=generator.choice([0.25, 1.0]), keep_backing=generator.random() < 0.7,
                            **({"faults": faults} if faults else {}))
        return KVCacheManager(self.layout, config, device="cpu", model=MODEL)

    def run(self, seconds: float, faults: str) -> None:
        """Traffic for some seconds, then the end, with everything that has to hold then."""
        cache = self.open(faults)
        travellers: list[Traveller] = []
        try:
            guard = threading.Lock()
            travellers += [Traveller(cache, guard, number + 1, random.Random(self.generator.random())) for number in range(ENGINE_THREADS)]
            work = [*(traveller.step for traveller in travellers), *self._housekeeping(cache)]
            threads = [threading.Thread(target=self._repeat, args=(step,), daemon=True) for step in work]
            for thread in threads:
                thread.start()
            self._stop.wait(seconds)
            self._stop.set()
            for thread in threads:
                thread.join(60.0)
                if thread.is_alive():
                    self.errors.append("a thread of the engine hangs")
                    return
            if not self.errors:
                self._end(cache, travellers)
        finally:
            self.counts.update({"lives": 1, "requests": sum(traveller.requests for traveller in travellers),
                                "tokens_checked": sum(traveller.engine.checked for traveller in travellers)})
            self._stop.clear()
            start = time.monotonic()
            patience = self.generator.choice([0.3, 2.0, 10.0])
            cache.close(patience)
            if time.monotonic() - start > patience + 10.0:
                self.errors.append(f"close({patience}) took {time.monotonic() - start:.1f} s")
            for _ in range(20):  # until nothing hangs: the next life wants the directory
                cache.close(0.5)
            if self.counts["quarantined slots"] > NVME_BLOCKS // 2:
                shutil.rmtree(self.directory, ignore_errors=True)  # what is quarantined stays so, and soon nothing would be stored at all

    def _end(self, cache: KVCacheManager, travellers: Sequence[Traveller]) -> None:
        for traveller in travellers:
            traveller.end()
        deadline = time.monotonic() + 30.0
        while True:
            cache.refresh()
            stats = cache.stats()
            if stats.primary.free_blocks == stats.primary.max_blocks:
                break
            if time.monotonic() > deadline:
                self.errors.append(f"primary blocks are missing at the end: {stats.primary}")
                break
            time.sleep(0.01)
        cache.verify()
        if stats.leases or stats.sequences:
            self.errors.append(f"{stats.leases} leases and {stats.sequences} sequences are left at the end")
        assert cache.store is not None
        self.counts["quarantined slots"] = len(cache.store.quarantined())
        self.counts.update({f"fault {name}": hits for name, hits in stats.faults.items()})
        self.counts.update({name: getattr(stats, name) for name in ("fallbacks", "checksum_failures", "transfer_failures", "lost",
                                                                     "quarantined", "dropped")})
        self.counts.update({f"{level} hits": hits for level, hits in zip(("primary", "secondary", "nvme"), stats.hit_blocks, strict=True)})

    def _repeat(self, step: Callable[[], None]) -> None:
        try:
            while not self._stop.is_set():
                step()
        except BaseException as error:
            if not self._stop.is_set() or not isinstance(error, KVTierError):
                self.errors.append(f"{type(error).__name__}: {error}")
            self._stop.set()

    def _housekeeping(self, cache: KVCacheManager) -> Iterator[Callable[[], None]]:
        """What else goes on in a process beside the engines."""
        generator = random.Random(self.generator.random())

        def refresh() -> None:
            cache.refresh()
            cache.verify()
            cache.poll_events()
            time.sleep(0.005)

        def tools() -> None:
            family = tokens_of(generator.randrange(FAMILIES), 32)
            cache.match(family)
            group = generator.randrange(len(cache.layout.groups))
            # Held, empty, lost, no room; an encoder's group has fewer blocks, for it has no lower levels.
            with contextlib.suppress(RequestError, TransferError, CorruptBlock, CapacityError, UnknownBlock):
                generator.choice([cache.offload, cache.onboard, cache.read_block])(generator.randrange(40), group=group)
            if generator.random() < 0.02:
                cache.truncate(family, generator.randrange(20))
            time.sleep(0.01)

        def flush() -> None:
            time.sleep(generator.random())
            cache.flush(0.5)
            if generator.random() < 0.1:
                with contextlib.suppress(RequestError, TransferError):  # requests are active, or the drive does not answer
                    cache.reset(0.2)

        yield from (refresh, tools, flush)


def damage(directory: Path, generator: random.Random) -> str:
    """What may happen to a store while nobody has it open. Returns what did."""
    files = sorted(file for file in directory.glob("*") if file.suffix in (".slab", ".sqlite") or file.name.endswith("-wal"))
    if not files:
        return "nothing"
    file = generator.choice(files)
    what = generator.choice(["flipped bits", "flipped bits", "lost file", "deleted directory"])
    if what == "deleted directory":
        if generator.random() < 0.3:
            shutil.rmtree(directory)
        return what
    if what == "lost file":
        file.unlink()
        return what
    with file.open("r+b") as opened:
        size = os.fstat(opened.fileno()).st_size
        for _ in range(generator.randrange(1, 6) if size else 0):
            place = generator.randrange(size)
            opened.seek(place)
            byte = opened.read(1)[0]
            opened.seek(place)
            opened.write(bytes([byte ^ 1 << generator.randrange(8)]))
    return what


def live(directory: Path, name: str, seed: int, seconds: float, report: Report) -> None:
    """Run lives one after the other on a directory, each for a few seconds, until time is over; report after each.

    The last message has ``"done": True``. Messages hold ``counts``, ``errors`` and ``warnings``.
    """
    hang_watch.HANG_SECONDS = 0.4  # type: ignore[misc]
    write_pause.FIRST_SECONDS, write_pause.LONGEST_SECONDS = 0.1, 0.4  # type: ignore[misc]
    problems = Problems()
    logging.getLogger("kvtier").addHandler(problems)
    logging.getLogger("kvtier").propagate = False
    life = Life(directory, name, seed)
    end = time.monotonic() + seconds
    while time.monotonic() < end and not life.errors:
        faults = random_faults(life.generator) if life.generator.random() < 0.85 else ""
        try:
            life.run(min(life.generator.uniform(0.5, 4.0), max(end - time.monotonic(), 0.5)), faults)
        except Exception as error:
            life.errors.append(f"{type(error).__name__}: {error}")
        life.errors += problems.bugs
        report({"counts": dict(life.counts), "errors": [f"seed {seed}, {name}, faults {faults!r}: {error}" for error in life.errors],
                "warnings": dict(problems.warnings)})
        life.counts.clear()
        problems.warnings.clear()
    report({"done": True, "kvtier": kvtier.__version__})
