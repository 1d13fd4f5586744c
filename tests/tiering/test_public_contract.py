"""The public names, exactly as the design lists them: a renamed argument, a changed default or a lost name fails here."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from toy_engine import MakeCache, tokens_of

import kvtier
from kvtier import (
    BlockExporter,
    BlockImporter,
    KVCacheManager,
    KVLayout,
    LayerSpec,
    Level,
    MultimodalItem,
    Request,
    RetentionConfig,
    TierConfig,
    TokenRange,
    TransferMode,
)
from kvtier.errors import KVTierError
from kvtier.tiering.ledger.events import Created, Event, Removed, Stored, Updated
from kvtier.tiering.statistics import LevelStats, Stats

REQUIRED = inspect.Parameter.empty

NAMES = {"KVCacheManager", "TierIndex", "TierWorker", "TierStore", "KVLayout", "LayerSpec", "TierConfig", "Request",
         "RetentionConfig", "RetentionLevel", "TokenRange",
         "MultimodalItem", "Level", "TransferMode", "KVTierError", "ConfigError", "RequestError", "UnknownRequest", "UnknownBlock",
         "CapacityError", "TransferError", "CorruptBlock", "LedgerError", "BlockExporter", "BlockImporter", "HandoverFolder",
         "HandoverTicket"}

# Arguments without self, in order, with their defaults.
METHODS: dict[str, dict[str, object]] = {
    "add_sequence": {"request": REQUIRED},
    "add_sequences": {"requests": REQUIRED},
    "wait_ready": {"request_id": REQUIRED, "layer": None, "timeout": None},
    "ready": {"request_id": REQUIRED, "layer": None},
    "is_ready": {"request_id": REQUIRED, "layer": None},
    "is_paused": {"request_id": REQUIRED},
    "step": {"stream": REQUIRED, "ids": REQUIRED, "layer": None},
    "block_table": {"ids": REQUIRED, "group": 0},
    "layer_buffer": {"layer": REQUIRED},
    "pool": {"group": 0},
    "mark_computed": {"request_id": REQUIRED, "num_tokens": REQUIRED},
    "append_tokens": {"request_id": REQUIRED, "tokens": REQUIRED},
    "append_step": {"ids": REQUIRED, "tokens": REQUIRED},
    "reorder_beams": {"request_id": REQUIRED, "parents": REQUIRED},
    "propose_drafts": {"request_id": REQUIRED, "tokens": REQUIRED, "parents": REQUIRED},
    "draft_table": {"request_id": REQUIRED},
    "draft_positions": {"request_id": REQUIRED},
    "accept_drafts": {"request_id": REQUIRED, "nodes": REQUIRED},
    "drop_drafts": {"request_id": REQUIRED},
    "store_context": {"request_id": REQUIRED},
    "remove_sequence": {"request_id": REQUIRED, "store": True},
    "block_ids": {"request_id": REQUIRED, "beam": 0, "group": 0},
    "block": {"block_id": REQUIRED, "group": 0},
    "pin": {"request_id": REQUIRED},
    "store_and_pin": {"request_id": REQUIRED},
    "set_inbound": {"inbound": REQUIRED},
    "match": {"tokens": REQUIRED, "lora_id": None, "cache_salt": None},
    "needed_blocks_one_step": {"request": REQUIRED, "two_steps": False, "group": 0},
    "remaining_blocks_to_completion": {"request": REQUIRED, "group": 0},
    "rewind": {"request_id": REQUIRED, "num_tokens": REQUIRED},
    "truncate": {"tokens": REQUIRED, "keep_tokens": REQUIRED, "lora_id": None, "cache_salt": None},
    "prefetch": {"tokens": REQUIRED, "lora_id": None, "cache_salt": None},
    "start_scheduling": {},
    "scheduling_remove_sequence": {"request_id": REQUIRED, "group": 0},
    "num_schedulable_blocks": {"group": 0},
    "request_block_budget": {"request_id": REQUIRED, "group": 0},
    "probe_prefix_tokens": {"request": REQUIRED},
    "beneficial_to_skip": {"request": REQUIRED, "contributed_keys": REQUIRED},
    "fit_token_budget": {"request_id": REQUIRED, "chunk_tokens": REQUIRED, "token_budget": REQUIRED},
    "report_prefill": {"tokens": REQUIRED, "seconds": REQUIRED},
    "set_priority": {"block_id": REQUIRED, "priority": REQUIRED, "group": 0},
    "offload": {"block_id": REQUIRED, "group": 0},
    "onboard": {"block_id": REQUIRED, "group": 0},
    "read_block": {"block_id": REQUIRED, "group": 0},
    "write_block": {"block_id": REQUIRED, "data": REQUIRED, "group": 0},
    "num_free_blocks": {"level": REQUIRED, "group": 0},
    "refresh": {},
    "flush": {"timeout": 60.0},
    "flush_events": {},
    "poll_events": {"timeout": 0.0},
    "events": {},
    "stats": {},
    "iteration_stats": {},
    "request_stats": {"request_id": REQUIRED},
    "block_hashes": {"request_id": REQUIRED},
    "reset": {"timeout": 60.0},
    "close": {"timeout": 10},
    "verify": {},
}

CONSTRUCTORS: dict[Callable[..., object], dict[str, object]] = {
    KVCacheManager: {"layout": REQUIRED, "config": REQUIRED, "device": "cpu", "model": None},
    BlockExporter: {"cache": REQUIRED, "folder": REQUIRED, "lifetime": 60.0, "total_kv_heads": None},
    BlockExporter.export: {"request_id": REQUIRED, "skip_tokens": 0},
    BlockImporter: {"cache": REQUIRED, "folder": REQUIRED, "total_kv_heads": None, "allreduce_min": None},
    BlockImporter.fill: {"request_id": REQUIRED, "stream": None, "timeout": 60.0},
    Request: {"id": REQUIRED, "tokens": REQUIRED, "lora_id": None, "cache_salt": None, "extra_ids": None, "multimodal": (),
              "retention": None, "beam_width": 1, "max_new_tokens": 16, "num_draft_tokens": 0, "encoder_length": 0, "skip_read": False,
              "skip_write": False, "lora_digest": None, "extra_ids_digest": None, "encoder_digest": None},
    MultimodalItem: {"digest": REQUIRED, "runs": REQUIRED},
    TokenRange: {"start": REQUIRED, "end": REQUIRED, "priority": REQUIRED, "duration_seconds": None, "expires_at": None},
    RetentionConfig: {"ranges": (), "decode_priority": 35, "decode_duration_seconds": None, "transfer_mode": TransferMode.DRAM,
                      "directory": None},
    KVLayout: {"layers": REQUIRED, "dtype": "bfloat16", "tokens_per_block": 32},
    KVLayout.uniform: {"num_layers": REQUIRED, "num_kv_heads": REQUIRED, "head_dim": REQUIRED, "dtype": "bfloat16", "tokens_per_block": 32},
    LayerSpec.attention: {"num_kv_heads": REQUIRED, "head_dim": REQUIRED, "value_dim": None, "window": None, "sinks": 0, "dtype": None,
                          "scale_bytes": 0, "indexer_bytes": 0},
    LayerSpec.mla: {"latent_dim": REQUIRED, "rope_dim": REQUIRED, "dtype": None, "scale_bytes": 0, "indexer_bytes": 0},
    LayerSpec.recurrent: {"state_bytes": REQUIRED, "snapshot_interval": REQUIRED},
    LayerSpec.cross: {"num_kv_heads": REQUIRED, "head_dim": REQUIRED, "dtype": None},
}

CONFIG_KEYS = {
    "primary", "secondary", "nvme", "max_batch_size", "max_seq_len", "max_beam_width", "chunk_size", "nvme_directory",
    "secondary_offload_min_priority", "nvme_offload_min_priority", "enable_block_reuse", "enable_partial_reuse", "copy_on_partial_reuse",
    "keep_backing", "event_buffer_max_size", "gds", "policy", "request_directory_root", "faults", "clock", "group_shares",
    "window_scratch_blocks",
}


def arguments(function: Callable[..., object]) -> dict[str, object]:
    """Names and defaults, without self and without catch-all keywords."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()
            if name != "self" and parameter.kind not in kinds}


def test_the_front_door_has_every_name() -> None:
    assert set(kvtier.__all__) == NAMES
    for name in NAMES:
        assert getattr(kvtier, name).__name__ == name
    assert set(dir(kvtier)) >= NAMES
    with pytest.raises(AttributeError, match="no attribute 'KVCacheManger'"):
        kvtier.KVCacheManger  # noqa: B018


def test_the_front_door_opens_without_torch() -> None:
    script = "import sys, kvtier; kvtier.Request; kvtier.Level; kvtier.KVLayout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("name", METHODS)
def test_a_method_takes_what_it_promised(name: str) -> None:
    assert arguments(getattr(KVCacheManager, name)) == METHODS[name]


def test_there_is_no_method_that_the_list_forgets() -> None:
    public = {name for name, member in inspect.getmembers(KVCacheManager, callable) if not name.startswith("_")}
    # The lock around the ledger and what block access needs, for the rooms above.
    assert public - METHODS.keys() == {"locked", "condemn"}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_says_what_it_does(name: str) -> None:
    assert inspect.getdoc(getattr(KVCacheManager, name))


@pytest.mark.parametrize("constructor", CONSTRUCTORS, ids=lambda constructor: constructor.__qualname__)
def test_a_constructor_takes_what_it_promised(constructor: Callable[..., object]) -> None:
    assert arguments(constructor) == CONSTRUCTORS[constructor]


def test_the_configuration_has_every_key() -> None:
    assert set(TierConfig.model_fields) >= CONFIG_KEYS


def test_levels_and_errors_are_as_the_design_says() -> None:
    assert [(level.name, level.value) for level in Level] == [("PRIMARY", 0), ("SECONDARY", 1), ("NVME", 2)]
    for name in NAMES:
        if name.endswith("Error") or name.startswith(("Unknown", "Corrupt")):
            assert issubclass(getattr(kvtier, name), KVTierError)
    assert issubclass(kvtier.CorruptBlock, kvtier.TransferError)


def test_statistics_and_events_have_their_fields() -> None:
    fields = {field.name for field in dataclasses.fields(Stats)}
    assert fields >= {"primary", "secondary", "nvme", "hit_tokens", "hit_blocks", "onboard_blocks", "onboard_bytes", "offload_blocks",
                      "offload_bytes", "alloc_new", "alloc_total", "reused_full", "reused_partial", "missed", "dropped", "fallbacks",
                      "checksum_failures", "leases"}
    assert [field.name for field in dataclasses.fields(LevelStats)] == [
        f"{what}_blocks" for what in ("max", "free", "used", "busy", "evictable", "backing")]
    assert list(arguments(Event)) == ["event_id", "group", "data"]
    assert list(arguments(Created)) == ["num_blocks_per_level"]
    assert list(arguments(Stored)) == ["parent_hash", "blocks"]
    assert list(arguments(Removed)) == ["block_hashes"]
    assert arguments(Updated) == {"block_hash": REQUIRED, "level": None, "priority": None}


def test_block_ids_start_in_slot_order(make_cache: MakeCache) -> None:
    cache = make_cache(3, 2, 4)
    places = [(cache.block(block_id).level, cache.block(block_id).slot) for block_id in range(9)]
    assert places == [(Level.PRIMARY, 0), (Level.PRIMARY, 1), (Level.PRIMARY, 2), (Level.SECONDARY, 0), (Level.SECONDARY, 1),
                      (Level.NVME, 0), (Level.NVME, 1), (Level.NVME, 2), (Level.NVME, 3)]
    cache.add_sequence(Request(1, tokens_of(1, 9)))
    assert cache.block_ids(1) == [0, 1, 2]


async def test_each_line_of_the_design_works(make_cache: MakeCache) -> None:
    """The public block of the design, line by line, as a user would copy it."""
    config: dict[str, Any] = {
        "max_batch_size": 64, "max_seq_len": 8192, "max_beam_width": 1, "chunk_size": None, "secondary_offload_min_priority": 35,
        "nvme_offload_min_priority": 35, "enable_block_reuse": True, "enable_partial_reuse": True, "copy_on_partial_reuse": True,
        "keep_backing": True, "event_buffer_max_size": 1024, "gds": "auto", "policy": "default", "request_directory_root": None,
        "faults": None}
    stream = None
    with make_cache(8, 4, 16, **config) as cache:
        ids = torch.arange(1, 11, dtype=torch.int32)
        request = Request(id=7, tokens=ids, lora_id=None, cache_salt=None, extra_ids=None, multimodal=(), retention=None, beam_width=1,
                          max_new_tokens=16, num_draft_tokens=0, encoder_length=0, skip_read=False, skip_write=False)
        admission = cache.add_sequence(request)
        assert admission.prepopulated_tokens == 0
        assert (admission.total_blocks, admission.new_blocks, admission.reused_blocks, admission.missed_blocks) == (3, 3, 0, 3)
        assert cache.wait_ready(7, layer=None, timeout=None) == await cache.ready(7) == 0
        assert cache.is_ready(7)
        with cache.step(stream, ids=[7]) as ready_ids:
            assert ready_ids == [7]
            table = cache.block_table(ready_ids, group=0)
            assert (table.dtype, table.shape) == (torch.int32, (1, 2, 2048))
            assert cache.layer_buffer(layer=0).shape == (8, 2, 1, 4, 8)
        assert cache.pool(group=0).primary.num_blocks == 8
        cache.mark_computed(7, 10)
        cache.append_tokens(7, [42])
        cache.append_step([7], [[43]])
        cache.store_context(7)
        assert cache.block_ids(7, beam=0, group=0) == [0, 1, 2]
        view = cache.block(0)
        assert (view.level, view.slot, view.backing, view.ref_count, view.priority, view.is_full, view.tokens) == (
            Level.PRIMARY, 0, (), 1, 35, True, (1, 2, 3, 4))
        lease = cache.pin(7)
        assert lease.block_ids == [0, 1, 2]
        lease.release()
        reuse = cache.match(ids, lora_id=None, cache_salt=None)
        assert (reuse.reusable_blocks, reuse.referenced_blocks, reuse.tokens_by_level) == (2, 2, (8, 0, 0))
        assert reuse.first_new_key is None
        assert cache.needed_blocks_one_step(7, two_steps=False) == 1
        assert cache.remaining_blocks_to_completion(7) == 4
        cache.rewind(7, num_tokens=1)
        cache.start_scheduling()
        assert cache.scheduling_remove_sequence(7) == 3
        cache.report_prefill(tokens=1000, seconds=0.5)
        assert cache.stats().prefill_tokens_per_second == 2000
        assert [len(block_hash) for block_hash in cache.block_hashes(7)] == [32, 32]
        cache.write_block(2, bytes(512))
        cache.remove_sequence(7, store=True)
        assert cache.num_free_blocks(Level.PRIMARY, group=0) == 8
        cache.set_priority(0, 50)
        cache.offload(0)
        cache.onboard(0)
        assert len(cache.read_block(0)) == 512
        assert cache.truncate(ids, keep_tokens=4) == 2
        cache.refresh()
        assert cache.flush(timeout=20)
        cache.flush_events()
        assert isinstance(cache.poll_events(timeout=0.0)[0], Event)
        assert isinstance(cache.stats(), Stats)
        assert cache.iteration_stats().missed >= 0
        cache.verify()
        cache.reset()
        cache.close(timeout=10)


def test_prompts_with_pictures_share_only_with_the_same_pictures(make_cache: MakeCache) -> None:
    cache = make_cache(16, 0)

    def request(request_id: int, digest: bytes) -> Request:
        return Request(request_id, tokens_of(1, 9), multimodal=[MultimodalItem(digest=digest, runs=[(2, 4)])])

    for request_id, digest, expected in ((1, bytes(32), 0), (2, bytes(32), 8), (3, bytes(31) + b"x", 0)):
        assert cache.add_sequence(request(request_id, digest)).prepopulated_tokens == expected
        cache.mark_computed(request_id, 9)
        cache.remove_sequence(request_id)
