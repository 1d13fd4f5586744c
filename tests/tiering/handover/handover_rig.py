"""The two sides of a handover, each with a toy engine that checks every byte it reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from group_engine import GroupEngine, attention, mla

from kvtier import BlockExporter, BlockImporter, HandoverFolder, HandoverTicket, KVCacheManager, KVLayout, Request
from kvtier.tiering.handover.shards import heads_of

Make = Callable[..., Any]
TOTAL = 4
both_folders = pytest.mark.parametrize("folder", ["directory", "shared memory"], indirect=True)


class Clock:
    """Wall-clock seconds, as a test wants them."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


class Prefill:
    def __init__(self, cache: KVCacheManager, folder: HandoverFolder, **settings: Any) -> None:
        self.cache = cache
        self.engine = GroupEngine(cache)
        self.exporter = BlockExporter(cache, folder, **settings)

    def compute(self, tokens: Sequence[int], request_id: int = 1, sample: bool = True, **keywords: Any) -> list[int]:
        """Compute a prompt. Returns it with the token that follows."""
        self.engine.admit(Request(request_id, tokens, **keywords))
        self.engine.learn(request_id)
        sequence = self.engine.sequences[request_id]
        while sequence.computed < sequence.num_tokens:
            assert self.engine.forward([request_id]) == [request_id]
        if sample:
            self.engine.sample(request_id)
        return sequence.beams[0]

    def hand_over(self, tokens: Sequence[int], request_id: int = 1, skip_tokens: int = 0,
                  **keywords: Any) -> tuple[list[int], HandoverTicket]:
        """Compute a prompt, export and forget it. Returns what the other side is told."""
        known = list(self.compute(tokens, request_id, **keywords))
        ticket = self.exporter.export(request_id, skip_tokens)
        self.engine.remove(request_id)
        assert self.cache.stats().leases == 0
        self.cache.verify()
        return known, ticket


class Decode:
    def __init__(self, cache: KVCacheManager, folder: HandoverFolder, **settings: Any) -> None:
        self.cache = cache
        self.engine = GroupEngine(cache)
        self.importer = BlockImporter(cache, folder, **settings)

    def fill(self, tokens: Sequence[int], request_id: int = 1, **keywords: Any) -> int:
        """Admit a prompt and take in what there is of it."""
        self.engine.admit(Request(request_id, tokens, **keywords))
        taken = self.importer.fill(request_id)
        self.engine.sequences[request_id].computed = taken
        self.cache.verify()
        return taken

    def finish(self, request_id: int = 1, answer: int = 9) -> list[int]:
        """Answer, checking all that is read, and end. Returns all tokens."""
        sequence = self.engine.sequences[request_id]
        for step in range(answer + 1):
            while sequence.computed < sequence.num_tokens:
                assert self.engine.forward([request_id]) == [request_id]
            if step < answer:
                self.engine.sample(request_id)
            self.cache.verify()
        self.engine.remove(request_id)
        assert self.cache.stats().leases == 0
        self.cache.verify()
        self.cache.refresh()
        return sequence.beams[0]

    def serve(self, tokens: Sequence[int], request_id: int = 1, answer: int = 9, **keywords: Any) -> int:
        """A whole request. Returns how many tokens it did not have to compute."""
        taken = self.fill(tokens, request_id, **keywords)
        self.finish(request_id, answer)
        return taken


def files(folder: HandoverFolder) -> list[str]:
    return sorted(os.listdir(folder.directory))


def flip(folder: HandoverFolder, place: int, bit: int = 4, name: str = "") -> None:
    """Turn one bit over in a file, or the only one, of a folder; negative places count from its end."""
    if not name:
        [name] = files(folder)
    with (folder.directory / name).open("r+b") as file:
        file.seek(place, os.SEEK_SET if place >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << bit]))


def layout_of(heads: int, kind: str) -> KVLayout:
    layers = {
        "attention": [attention(heads, 8), attention(heads, 8)],
        "windows": [attention(heads, 8, window=8, sinks=4), attention(heads, 8, value_dim=4)],
        "side data": [attention(heads, 16, dtype="uint8", scale_bytes=2, indexer_bytes=20), attention(heads, 8)],
        "mla": [mla(16, 8), mla(16, 8, indexer_bytes=12)],
        "mla and attention": [mla(16, 8), attention(heads, 8)],
    }[kind]
    return KVLayout(layers, "float32", 4)


def shard_engine(engine: GroupEngine, whole: GroupEngine, rank: int, ranks: int) -> None:
    """Let a rank's engine compute its heads of what the whole model's engine would."""
    for mine, all_heads in zip(engine.pages, whole.pages, strict=True):
        for part, salts in enumerate(all_heads.salts):
            heads = heads_of(salts.shape[1], ranks, rank)
            assert heads is not None
            mine.salts[part] = salts[:, heads.start:heads.stop]


def sides(make_cache: Make, folder: HandoverFolder, ranks: int, kind: str, side: type, **settings: Any) -> list[Any]:
    whole = GroupEngine(make_cache(4, 0, layout=layout_of(TOTAL, kind)))
    made = []
    for rank in range(ranks):
        heads = heads_of(TOTAL, ranks, rank)
        assert heads is not None
        cache = make_cache(40, 10, layout=layout_of(len(heads), kind), rank=rank, num_ranks=ranks)
        made.append(side(cache, folder, total_kv_heads=TOTAL, **settings))
        shard_engine(made[-1].engine, whole, rank, ranks)
    return made
