"""The workload of a host tier that knows content keys (W6/keys): what vLLM's offloading manager does, done by ``KeyLedger``."""

from __future__ import annotations

import hashlib

from kvtier.bench.ledger_rig import MAX_EVENTS, Side
from kvtier.policies.retention import DEFAULT_PRIORITY
from kvtier.tiering.ledger.key_ledger import KeyLedger
from kvtier.tiering.ledger.rules import TierRules


class KeyHostTier(Side):
    """One request stores its blocks, and they are complete; another one finds them, loads them, and that is complete. The host level is
    full: each block stored evicts one."""

    def __init__(self, blocks: int, blocks_per_prompt: int) -> None:
        super().__init__(blocks)
        self._per_prompt = blocks_per_prompt
        self.ledger = KeyLedger([(blocks, 0)], TierRules(), max_events=MAX_EVENTS)
        self._next = 0
        self._loaded = self._dropped = 0
        self._prompts: list[list[bytes]] = []
        self.prepare()
        self.run()  # fills it

    def prepare(self) -> None:
        self._loaded = 0
        self._dropped = self.ledger.counters.dropped
        self._prompts = []
        for _ in range(self.operations // self._per_prompt):
            self._prompts.append([hashlib.sha256(b"%d" % number).digest() for number in range(self._next, self._next + self._per_prompt)])
            self._next += self._per_prompt

    def run(self) -> None:
        ledger = self.ledger
        for number, keys in enumerate(self._prompts):
            writer = f"{number}w"
            store, _known = ledger.plan_store(ledger.request(writer), 0, keys, DEFAULT_PRIORITY)
            if store is not None:
                ledger.complete(store, None, set())
            ledger.end_request(writer)
            reader = ledger.request(f"{number}r")
            found = ledger.lookup(reader, 0, keys)
            load = ledger.plan_load(reader, 0, keys[:found.num_hits])
            if load is not None:
                ledger.complete(load, None, set())
                self._loaded += len(load.keys)
            ledger.end_request(reader.id)
            ledger.events.flush()

    def check(self) -> None:
        dropped = self.ledger.counters.dropped - self._dropped
        self.require("blocks loaded and evicted", (self._loaded, dropped), (self.operations, self.operations))
        self.require("leases and jobs", (self.ledger.num_leases(), len(self.ledger.jobs)), (0, 0))
