"""The tier's blocks in the events that vLLM publishes: level, hashes, tokens, parents; and what each level holds at the end."""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine import BLOCK, Engine, settled
from inputs import VOCABULARY

PER_CHUNK = 2
OURS = {"CPU": None, "STORAGE": "kvtier-nvme"}
"""Mediums of the tier's two levels, and who is said to own what is there."""


class Subscriber:
    """Whoever follows the events from the first one on."""

    def __init__(self, stream: Any, connections: Any) -> None:
        self._stream = stream
        self._connections = connections
        self.batches = 0
        self.stored: list[Any] = []
        self.held: dict[str, Counter[Any]] = {medium: Counter() for medium in ("GPU", *OURS)}

    def join(self, engine: Engine) -> None:
        """Wait until the engine's socket is connected, and for a step in which nothing is stored, while it is told what is subscribed to:
        what is published before, nobody hears."""
        assert self._connections.poll(60_000), "the engine publishes no events"
        engine.generate(prompts=[[7] * 4], max_tokens=1)

    def follow(self, seconds: float = 2.0) -> None:
        """Take in what arrives until nothing has for so long."""
        import msgspec
        from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
        decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        while self._stream.poll(seconds * 1000):
            _topic, number, payload = self._stream.recv_multipart()
            assert int.from_bytes(number, "big") == self.batches, "a batch is missing"
            self.batches += 1
            for event in decoder.decode(payload).events:
                if isinstance(event, BlockStored):
                    self.stored.append(event)
                    self.held[event.medium].update(event.block_hashes)
                elif isinstance(event, BlockRemoved):
                    assert event.medium in self.held
                    self.held[event.medium].subtract(event.block_hashes)

    def of(self, medium: str) -> list[Any]:
        return [event for event in self.stored if event.medium == medium]


def blocks_of(event: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Tokens and hash of each block that an event speaks of."""
    return [(tuple(event.token_ids[place * BLOCK:][:BLOCK]), hash_) for place, hash_ in enumerate(event.block_hashes)]


@contextmanager
def subscribed() -> Iterator[tuple[dict[str, object], Subscriber]]:
    """An engine's ``kv_events_config``, and who hears it."""
    import zmq
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    with (zmq.Context() as context, context.socket(zmq.SUB) as stream,
          stream.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as connections):
        stream.setsockopt(zmq.SUBSCRIBE, b"")
        stream.connect(endpoint)
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint.replace("127.0.0.1", "*")}
        yield config, Subscriber(stream, connections)


def test_events_describe_themselves_and_tell_what_each_level_holds(uniform: Path, nvme: dict[str, str]) -> None:
    prompts = [random.Random(seed).choices(range(3, VOCABULARY), k=PER_CHUNK * BLOCK * 3 + 5) for seed in range(6)]
    tier = {"secondary": "8 blocks", "blocks_per_chunk": PER_CHUNK, "self_describing_kv_events": True, **nvme, "nvme": "16 blocks"}
    with subscribed() as (config, heard), Engine(uniform, tier, kv_events_config=config) as engine:
        heard.join(engine)
        for prompt in (*prompts, prompts[0]):
            engine.generate(prompts=[prompt], max_tokens=2)
            assert engine.settle()
            engine.reset()
        stats = settled(engine)
        engine.generate(prompts=[[7] * 4], max_tokens=1)  # a step, in which the last events are published
        heard.follow()
    computed = {tokens: hash_ for event in heard.of("GPU") for tokens, hash_ in blocks_of(event)}
    chunks = {tuple(prompt[at:at + PER_CHUNK * BLOCK]): tuple(prompt[max(at - BLOCK, 0):at])
              for prompt in prompts for at in range(0, len(prompt), PER_CHUNK * BLOCK)}
    for medium, owner in OURS.items():
        found = heard.of(medium)
        assert found
        for event in found:
            assert (event.block_size, event.ownership, event.locality, event.group_idx) == (BLOCK, owner, "LOCAL", 0)
            assert len(event.block_hashes) == PER_CHUNK
            assert all(computed[tokens] == hash_ for tokens, hash_ in blocks_of(event)), "the tier's names are those of the device's blocks"
            before = chunks[tuple(event.token_ids)]
            assert event.parent_block_hash == (computed[before] if before else None)
        held = {hash_: count for hash_, count in heard.held[medium].items() if count}
        level = stats["secondary" if medium == "CPU" else "nvme"]
        assert set(held.values()) == {1}, "each block is there once, and what has left was there"
        assert len(held) == PER_CHUNK * (level["evictable_blocks"] + (level["backing_blocks"] if medium == "STORAGE" else 0)), stats
    assert stats["hit_blocks"]["nvme"] > 0


@pytest.mark.slow
def test_what_a_restart_finds_on_nvme_is_announced_by_name(uniform: Path, nvme: dict[str, str]) -> None:
    """Nobody knows its tokens any more: vLLM then says a hash, and a block size of 0."""
    prompt = random.Random(9).choices(range(3, VOCABULARY), k=200)
    tier = {"secondary": "8 blocks", "self_describing_kv_events": True, **nvme}
    with Engine(uniform, tier) as engine:
        engine.generate(prompts=[prompt], max_tokens=1)
        assert engine.settle()
        engine.kill()
    with subscribed() as (config, heard), Engine(uniform, tier, kv_events_config=config) as engine:
        heard.join(engine)
        engine.generate(prompts=[prompt], max_tokens=1)
        assert engine.settle()
        engine.generate(prompts=[[7] * 4], max_tokens=1)
        heard.follow()
    found = [hash_ for event in heard.of("STORAGE") for hash_ in event.block_hashes]
    assert len(found) == 200 // BLOCK
    assert set(found) <= {hash_ for event in heard.of("GPU") for hash_ in event.block_hashes}
    assert {event.block_size for event in heard.of("STORAGE")} == {0}
