"""A naive world around a ``KeyLedger``: slots that really hold names, transfers and workers that end when they like, or never."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.pools.pool_index import NVME, SECONDARY, level_of, slot_of
from kvtier.tiering.ledger.key_events import KeyEvent
from kvtier.tiering.ledger.key_finding import HIT, MISS
from kvtier.tiering.ledger.key_invariants import verify_keys
from kvtier.tiering.ledger.key_jobs import EngineJob
from kvtier.tiering.ledger.key_ledger import KeyLedger
from kvtier.tiering.ledger.keyed_level import engine_key, file_key
from kvtier.tiering.ledger.moves import Discard, Move, WarmRow
from kvtier.tiering.ledger.rules import TierRules

NUM_GROUPS = 2
KEYS = [b"key%02d" % number for number in range(9)]
REQUESTS = ["a", "b", 3]

groups = st.integers(0, NUM_GROUPS - 1)
requests = st.sampled_from(REQUESTS)
prompts = st.integers(0, 2).flatmap(lambda start: st.integers(1, 6).map(lambda length: KEYS[start:start + length]))


class KeyMachine(RuleBasedStateMachine):
    """Every step is legal for an engine; after each, the invariants hold and nobody could be served wrong bytes."""

    HOST = 3
    NVME = 4

    def __init__(self) -> None:
        super().__init__()
        self.ledger = KeyLedger([(self.HOST, self.NVME)] * NUM_GROUPS, TierRules(write_ahead_share=0.5), max_events=100_000,
                                reads_at_once=2, lookup_timeout=5.0, job_timeout=20.0)
        self.now = 1.0
        self.ledger.set_time(self.now)
        self.bytes: dict[tuple[int, int], object] = {}  # by (group, pool index): the key whose bytes are there, or garbage
        self.moving: list[Move] = []
        self.copying: list[EngineJob] = []  # jobs that a worker has not ended
        self.ended: list[EngineJob] = []  # ended by the worker, not reported
        self.copied: dict[int, list[bool]] = {}
        self.present: dict[tuple[int, int], set[bytes]] = {(group, level): set() for group in range(NUM_GROUPS)
                                                          for level in (SECONDARY, NVME)}
        self.num_events = 0
        self.verifying: list[tuple[int, int]] = []
        self.records: list[Move | Discard] = []
        self.written: set[int] = set()  # numbers of Moves that ended well
        self.rows: dict[tuple[int, int], bytes] = {}  # of the manifest at the start, by (group, slot)

    # -- the engine ------------------------------------------------------------------------------------------------------

    @rule(request=requests, group=groups, keys=prompts)
    def look_up(self, request: str | int, group: int, keys: list[bytes]) -> None:
        record = self.ledger.request(request)
        answer = self.ledger.lookup(record, group, keys)
        again = self.ledger.lookup(record, group, list(keys))
        assert (again.num_hits, again.state) == (answer.num_hits, answer.state)  # asking changes nothing by itself
        for key in keys[:answer.num_hits]:
            assert key in record.leases[group]
        if answer.num_hits == len(keys):
            assert answer.state == MISS

    @rule(request=requests, group=groups, key=st.sampled_from(KEYS))
    def ask_for_one(self, request: str | int, group: int, key: bytes) -> None:
        record = self.ledger.request(request)
        if self.ledger.state(record, group, key) == HIT:
            assert key in self.known(group, SECONDARY)
            assert record.reads_host or key in record.from_nvme[group], "a level that was not asked for has served"
        self.ledger.start_reads()

    @rule(request=requests, group=groups, keys=prompts)
    def load(self, request: str | int, group: int, keys: list[bytes]) -> None:
        record = self.ledger.request(request)
        hits = self.ledger.lookup(record, group, keys).num_hits
        job = self.ledger.plan_load(record, group, keys[:hits])
        assert (0 if job is None else len(job.blocks)) == hits, "what was promised is there"
        if job is not None:
            self.copying.append(job)

    @rule(request=requests, group=groups, keys=prompts, priority=st.sampled_from([10, 35, 35, 60]))
    def store(self, request: str | int, group: int, keys: list[bytes], priority: int) -> None:
        job, _known = self.ledger.plan_store(self.ledger.request(request), group, keys, priority)
        if priority < 35:
            assert job is None
        if job is not None:
            self.copying.append(job)

    @rule(request=requests, use_nvme=st.booleans(), reads_nvme=st.booleans(), reads=st.booleans(), writes=st.booleans())
    def choose(self, request: str | int, use_nvme: bool, reads_nvme: bool, reads: bool, writes: bool) -> None:
        record = self.ledger.request(request)
        record.use_nvme, record.reads_nvme, record.reads, record.writes = use_nvme, reads_nvme, reads, writes

    @rule(request=requests)
    def want_nothing_from_host_memory(self, request: str | int) -> None:
        self.ledger.end_request(request)  # what it has leased from there would be served
        self.ledger.request(request).reads_host = False

    @rule(request=requests)
    def end(self, request: str | int) -> None:
        self.ledger.end_request(request)

    @rule(group=groups, keys=prompts)
    def prefetch(self, group: int, keys: list[bytes]) -> None:
        self.ledger.prefetch(group, keys)

    @rule()
    def reset(self) -> None:
        self.ledger.reset()
        self.replay()
        assert not any(self.present.values())

    # -- workers, which may be slow, fail, or go on after a job was given up -----------------------------------------------

    @precondition(lambda self: self.copying)
    @rule(data=st.data(), fails=st.booleans())
    def copy(self, data: st.DataObject, fails: bool) -> None:
        job = self.copying.pop(data.draw(st.integers(0, len(self.copying) - 1)))
        whole = []
        for key, block in zip(job.keys, job.blocks, strict=True):
            place = (job.group, block.index)
            if job.is_store:
                self.bytes[place] = "garbage" if fails else key
            else:
                assert self.bytes.get(place) == key, "a load copied other bytes than it was promised"
            whole.append(not fails)
        self.copied[job.number] = whole
        self.ended.append(job)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), bad=st.sets(st.sampled_from(KEYS), max_size=2))
    def report(self, data: st.DataObject, bad: set[bytes]) -> None:
        job = self.ended.pop(data.draw(st.integers(0, len(self.ended) - 1)))
        if job.number in self.ledger.jobs:
            self.ledger.complete(job, self.copied[job.number] if job.is_store else None, bad)
        else:
            assert self.ledger.release_abandoned(job.number)

    @precondition(lambda self: self.copying)
    @rule(data=st.data())
    def report_too_early(self, data: st.DataObject) -> None:
        job = self.copying[data.draw(st.integers(0, len(self.copying) - 1))]
        if job.number in self.ledger.jobs:
            self.ledger.complete(job, [False] * len(job.blocks) if job.is_store else None, set(), is_over=False)

    @precondition(lambda self: self.copying)
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        job = self.copying[data.draw(st.integers(0, len(self.copying) - 1))]
        if job.number in self.ledger.jobs:
            self.copying.remove(job)
            self.ledger.cancel(job)

    # -- files -----------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.moving)
    @rule(data=st.data(), outcome=st.sampled_from(["well", "well", "well", "bad", "unlucky"]))
    def move(self, data: st.DataObject, outcome: str) -> None:
        move = self.moving.pop(data.draw(st.integers(0, len(self.moving) - 1)))
        source, destination = (move.group, move.source), (move.group, move.destination)
        if outcome == "well":
            self.written.add(move.number)
            key = engine_key(move.key)
            assert self.bytes.get(source) == key, "a file operation moved other bytes than it was told"
            self.bytes[destination] = key
        else:
            self.bytes[destination] = "garbage"
        self.ledger.finish(move, outcome != "well", outcome == "bad")

    @rule(group=groups, slot=st.integers(0, NVME + 1))
    def find_bad(self, group: int, slot: int) -> None:
        level = self.ledger.allocators[group]
        if slot == 0 and not level.is_busy(level.holders[NVME][slot]) and len(level.quarantined) < 2:
            self.ledger.condemn(group, slot)

    @rule(group=groups, slot=st.integers(0, 3))
    def begin_to_verify(self, group: int, slot: int) -> None:
        level = self.ledger.allocators[group]
        if not self.verifying and slot not in level.quarantined:
            level.begin_access(level.holders[NVME][slot])
            self.verifying.append((group, slot))

    @rule(is_bad=st.booleans())
    def end_to_verify(self, is_bad: bool) -> None:
        while self.verifying:
            group, slot = self.verifying.pop()
            if is_bad and slot == 1:
                self.ledger.condemn(group, slot)
            self.ledger.allocators[group].end_access(NVME, slot)

    # -- time ------------------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 6.0, 25.0]), may_write=st.booleans())
    def step(self, seconds: float, may_write: bool) -> None:
        self.now += seconds
        self.ledger.set_time(self.now)
        self.ledger.refresh(may_write)

    @rule()
    def write_out(self) -> None:
        self.ledger.write_everything_out()

    # -- what always holds -----------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        for record in self.ledger.moves.take():
            self.records.append(record)
            if isinstance(record, Move):
                self.moving.append(record)

    def rows_of(self, group: int) -> dict[int, bytes]:
        """What the manifest names when all records have been carried out, as if in order. The rows of bad slots are left out."""
        rows = {slot: key for (number, slot), key in self.rows.items() if number == group}
        for record in self.records:
            if record.group == group and isinstance(record, Discard):
                rows.pop(record.slot, None)
            elif record.group == group and isinstance(record, Move) and level_of(record.destination) == NVME:
                rows.pop(slot_of(record.destination), None)
                if record.number in self.written:
                    rows[slot_of(record.destination)] = record.key
        return {slot: key for slot, key in rows.items() if slot not in self.ledger.allocators[group].quarantined}

    @invariant()
    def all_is_well(self) -> None:
        self.fetch()
        verify_keys(self.ledger)
        self.replay()
        for group in range(NUM_GROUPS):
            for level in (SECONDARY, NVME):
                assert self.present[group, level] == self.known(group, level), "events tell what each level holds"
        uses = sum(sum(level.busy.values()) for level in self.ledger.allocators)
        assert uses == 2 * len(self.moving) + len(self.verifying)

    def known(self, group: int, place: int) -> set[bytes]:
        """Keys whose verified bytes are on a level, from the slots."""
        found: set[bytes] = set()
        for holder in self.ledger.allocators[group].holders[place]:
            if holder.num_tokens:
                key = (holder.owner or holder).warm_key
                assert self.bytes[group, holder.index] == key, "a slot holds what the ledger says"
                assert key not in found
                found.add(key)
        return found

    def replay(self) -> None:
        for event in self.ledger.events.flush():
            assert isinstance(event, KeyEvent)
            assert event.event_id == self.num_events
            self.num_events += 1
            keys = self.present[event.group, event.level]
            for key in event.keys:
                assert (key in keys) == event.is_removed
                (keys.remove if event.is_removed else keys.add)(key)

    def teardown(self) -> None:
        """When everybody has gone, nothing is held, and every slot is accounted for."""
        self.end_to_verify(False)
        for job in self.copying + self.ended:
            if job.number in self.ledger.jobs:
                self.ledger.complete(job, [False] * len(job.blocks), set())
            else:
                self.ledger.release_abandoned(job.number)
        for request in list(self.ledger.requests):
            self.ledger.end_request(request)
        self.fetch()
        while self.moving:
            self.ledger.finish(self.moving.pop(), True, False)
            self.fetch()
        verify_keys(self.ledger)
        assert self.ledger.num_leases() == 0
        assert not self.ledger.jobs
        assert not self.ledger.abandoned
        for group, level in enumerate(self.ledger.allocators):
            kept = {slot: level.chain_key(holder.owner or holder) for slot, holder in enumerate(level.holders[NVME]) if holder.num_tokens}
            assert self.rows_of(group) == kept, "the manifest names what the ledger keeps"
            assert all(block.ref_count == 0 for block in level.blocks)
            assert level.queues.num_free(SECONDARY) == self.HOST
            assert level.queues.num_free(NVME) == self.NVME - len(level.quarantined)


class WarmKeyMachine(KeyMachine):
    """The same, beginning with a full NVMe level."""

    def __init__(self) -> None:
        super().__init__()
        rows = []
        for group in range(NUM_GROUPS):
            for slot in range(self.NVME):
                rows.append(WarmRow(group, slot, KEYS[slot]))
                self.rows[group, slot] = file_key(KEYS[slot])
                self.bytes[group, slot << 2 | NVME] = KEYS[slot]
        self.ledger.adopt_store(rows, [])


class NoBackingMachine(WarmKeyMachine):
    """The same without lower copies that are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger.rules.keep_backing = False

