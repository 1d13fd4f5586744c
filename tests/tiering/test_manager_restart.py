"""What outlives the process on NVMe, and what never does (design: warm start)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from toy_engine import PROMPT, MakeCache, ToyEngine, flip_stored_bit, tokens_of

from kvtier import ConfigError, KVCacheManager, KVLayout, Level, Request, RetentionConfig, TokenRange
from kvtier.tiering import core

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")


def keep(priority: int) -> RetentionConfig:
    return RetentionConfig([TokenRange(0, None, priority)])


def fill(cache: KVCacheManager, *prompts: list[int], **settings: object) -> ToyEngine:
    """Serve prompts, and write everything out."""
    engine = ToyEngine(cache)
    for number, prompt in enumerate(prompts):
        engine.serve(Request(number, prompt, **settings))  # type: ignore[arg-type]
    assert cache.flush()
    return engine


def reused_after_restart(make_cache: MakeCache, prompt: list[int], **settings: object) -> int:
    cache = make_cache(8, 4, 16)
    valid = ToyEngine(cache).serve(Request(1, prompt, **settings))  # type: ignore[arg-type]
    cache.verify()
    assert cache.stats().hit_tokens.nvme == valid
    cache.close()
    return valid


def test_a_restart_finds_its_blocks_again(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, 16)
    fill(cache, PROMPT, tokens_of(2, 9))
    cache.close()
    cache = make_cache(8, 4, 16)
    stats = cache.stats()
    assert (stats.nvme.evictable_blocks, stats.primary.evictable_blocks) == (5, 0)
    assert cache.match(PROMPT).tokens_by_level == (0, 0, 12)
    engine = ToyEngine(cache)
    assert engine.serve(Request(1, PROMPT)) == 12
    assert engine.serve(Request(2, tokens_of(2, 9))) == 8
    assert engine.serve(Request(3, [*PROMPT[:8], 1, 2, 3])) == 8
    stats = cache.stats()
    assert (stats.hit_tokens.nvme, stats.hit_blocks.nvme) == (20, 5)
    assert stats.onboard_bytes == {(Level.NVME, Level.PRIMARY): 5 * cache.layout.groups[0].block_bytes}
    cache.verify()


def test_flush_makes_everything_durable_also_what_is_in_primary(make_cache: MakeCache) -> None:
    cache = make_cache(16, 4, 32)
    engine = ToyEngine(cache)
    for user in range(6):
        engine.serve(Request(user, tokens_of(user, 13)))
    stats = cache.stats()
    assert (stats.primary.evictable_blocks, stats.secondary.evictable_blocks + stats.secondary.busy_blocks, stats.dropped) == (15, 3, 0)
    assert cache.flush()
    assert len(cache.store.stored_blocks()) == 18
    assert engine.serve(Request(9, tokens_of(5, 13))) == 12
    assert cache.stats().hit_tokens.primary == 12, "what was in primary has not moved"
    cache.close()
    cache = make_cache(16, 4, 32)
    for user in range(6):
        assert ToyEngine(cache).serve(Request(user, tokens_of(user, 13))) == 12


def test_flush_ends_where_nvme_is_too_small_for_everything(make_cache: MakeCache) -> None:
    cache = make_cache(16, 6, 4)
    engine = ToyEngine(cache)
    for user in range(5):
        engine.serve(Request(user, tokens_of(user, 13)))
    assert cache.flush(timeout=20)
    assert len(cache.store.stored_blocks()) == 4
    cache.verify()
    assert cache.flush(timeout=20), "and a second one finds nothing to do"


@pytest.mark.parametrize("length", [14, 15])
def test_tails_in_the_secondary_level_do_not_stop_a_flush(make_cache: MakeCache, length: int) -> None:
    cache = make_cache(16, 4, 64)
    engine = ToyEngine(cache)
    for user in range(6):
        engine.serve(Request(user, tokens_of(user, length)))
    full = sum(cache.match(tokens_of(user, length)).reusable_blocks for user in range(6))
    assert cache.flush()
    assert len(cache.store.stored_blocks()) == full >= 12
    cache.verify()


def test_flush_writes_nothing_twice(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, 16)
    fill(cache, PROMPT)
    written = cache.stats().offload_blocks
    assert cache.flush()
    assert cache.stats().offload_blocks == written


def test_an_evicted_block_with_a_copy_on_nvme_costs_no_write(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, 32)
    engine = fill(cache, PROMPT)
    for user in range(2, 6):
        engine.serve(Request(user, tokens_of(user, 13)))
        assert cache.flush()
    written = cache.stats().offload_blocks[Level.SECONDARY, Level.NVME]
    for _ in range(3):
        for user in range(1, 6):
            assert engine.serve(Request(user, tokens_of(user, 13))) == 12
            cache.refresh()
    assert cache.stats().hit_tokens.nvme > 0
    assert cache.stats().offload_blocks[Level.SECONDARY, Level.NVME] == written


def test_another_model_is_refused_and_nothing_is_touched(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, 16)
    fill(cache, PROMPT)
    cache.close()
    with pytest.raises(ConfigError, match=r"belongs to another cache: model is .*toy@1.*configured is .*other@2"):
        make_cache(8, 4, 16, model="other@2:ffff")
    with pytest.raises(ConfigError, match="layout is"):
        make_cache(8, 4, 16, layout=KVLayout.uniform(num_layers=4, num_kv_heads=1, head_dim=4, dtype="float32", tokens_per_block=4))
    assert reused_after_restart(make_cache, PROMPT) == 12


def test_a_directory_serves_one_manager_at_a_time(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, 16)
    with pytest.raises(ConfigError, match="in use by process"):
        make_cache(8, 4, 16)
    fill(cache, PROMPT)
    cache.close()
    assert reused_after_restart(make_cache, PROMPT) == 12


def test_a_directory_of_another_process_is_refused(make_cache: MakeCache, store_directory: Path) -> None:
    make_cache(8, 4, 16).close()
    script = ("import sys; from kvtier.io.store_directory import take_lock; from pathlib import Path; "
              "take_lock(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", script, str(store_directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"locked\n"
        with pytest.raises(ConfigError, match=f"in use by process {child.pid} "):
            make_cache(8, 4, 16)
    make_cache(8, 4, 16)


def test_nvme_needs_a_model_name(make_cache: MakeCache, store_directory: Path) -> None:
    for model in (None, ""):
        with pytest.raises(ConfigError, match="an NVMe level needs model="):
            make_cache(8, 4, 16, model=model)
    assert not store_directory.exists(), "refused before anything is made"
    make_cache(8, 4, 0, model=None)


def test_a_start_that_fails_gives_the_directory_back(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_arguments: object) -> None:
        raise ConfigError("secondary: no memory")

    with monkeypatch.context() as broken:
        broken.setattr(core, "open_group_pools", no_memory)
        with pytest.raises(ConfigError, match="no memory"):
            make_cache(8, 4, 16)
    make_cache(8, 4, 16)


@pytest.mark.parametrize("where", ["payload", "header"])
def test_a_flipped_bit_is_never_served(make_cache: MakeCache, store_directory: Path, where: str) -> None:
    cache = make_cache(8, 4, 16)
    engine = fill(cache, PROMPT, tokens_of(2, 9))
    engine.admit(Request(9, PROMPT))
    second = cache.block_hashes(9)[1]
    slot = next(stored.slot for stored in cache.store.stored_blocks() if stored.key == second)
    cache.close()
    flip_stored_bit(store_directory, cache.layout, slot, where)

    cache = make_cache(8, 4, 16)
    engine = ToyEngine(cache)
    admissions = engine.admit(Request(1, PROMPT), Request(2, tokens_of(2, 9)))
    assert [admission.prepopulated_tokens for admission in admissions] == [12, 8]
    assert engine.learn(2) == 8
    while not cache.is_ready(1):
        pass
    assert engine.forward([1, 2]) == [2], "not before it is told"
    assert engine.forward([1, 2]) == [2], "asking whether it is ready is not being told"
    assert engine.learn(1) == 4
    assert engine.forward([1, 2]) == [1, 2]
    engine.remove(1)
    engine.remove(2)
    assert cache.transfers.idle(10)
    stats = cache.stats()
    assert (stats.checksum_failures, stats.quarantined, stats.fallbacks, stats.lost) == (1, 1, 1, 1)
    assert stats.hit_tokens.nvme == 4 + 8, "what was promised and never came is no hit"
    assert (stats.nvme.busy_blocks, cache.store.quarantined()) == (1, [(0, slot)])
    assert engine.serve(Request(3, PROMPT)) == 12, "computed again, it is stored again"
    assert cache.stats().checksum_failures == 1
    assert cache.flush()
    cache.close()
    cache = make_cache(8, 4, 16)
    assert (cache.stats().nvme.busy_blocks, cache.store.quarantined()) == (1, [(0, slot)]), "out of service for good"
    assert ToyEngine(cache).serve(Request(1, PROMPT)) == 12


def test_a_block_below_the_nvme_threshold_never_reaches_disk(make_cache: MakeCache) -> None:
    cache = make_cache(8, 8, 16, secondary_offload_min_priority=10, nvme_offload_min_priority=50)
    engine = ToyEngine(cache)
    engine.serve(Request(1, tokens_of(1, 9), retention=keep(49)))
    engine.serve(Request(2, tokens_of(2, 9), retention=keep(50)))
    engine.serve(Request(3, tokens_of(3, 9)))
    engine.serve(Request(4, tokens_of(4, 29), retention=keep(50)))  # pushes the others down
    for _ in range(20):
        cache.refresh()
    assert cache.flush()
    assert cache.match(tokens_of(1, 9)).tokens_by_level == (0, 8, 0)
    assert len(cache.store.stored_blocks()) == 2 + 7
    cache.close()
    assert reused_after_restart(make_cache, tokens_of(1, 9)) == 0
    assert reused_after_restart(make_cache, tokens_of(3, 9)) == 0
    assert reused_after_restart(make_cache, tokens_of(2, 9)) == 8
    assert reused_after_restart(make_cache, tokens_of(4, 29)) == 28


def test_a_block_below_the_secondary_threshold_is_dropped(make_cache: MakeCache) -> None:
    cache = make_cache(4, 4, 16, secondary_offload_min_priority=40, nvme_offload_min_priority=0)
    engine = ToyEngine(cache)
    engine.serve(Request(1, tokens_of(1, 9), retention=keep(39)))
    engine.serve(Request(2, tokens_of(2, 9), retention=keep(40)))
    engine.serve(Request(3, tokens_of(3, 13), retention=keep(40)))
    assert cache.match(tokens_of(1, 9)).reusable_blocks == 0
    assert cache.match(tokens_of(2, 9)).tokens_by_level == (0, 8, 0)
    assert cache.stats().dropped >= 2
    assert cache.flush()
    cache.close()
    assert reused_after_restart(make_cache, tokens_of(1, 9)) == 0
    assert reused_after_restart(make_cache, tokens_of(2, 9)) == 8


def test_reset_forgets_all_levels_for_good(make_cache: MakeCache) -> None:
    cache = make_cache(8, 6, 16)
    prompts = [tokens_of(user, 13) for user in range(4)]
    engine = fill(cache, *prompts)
    engine.serve(Request(9, tokens_of(9, 13)))
    cache.refresh()
    for level in range(3):
        assert any(cache.match(prompt).tokens_by_level[level] for prompt in [*prompts, tokens_of(9, 13)])
    cache.reset()
    cache.verify()
    stats = cache.stats()
    assert [level.evictable_blocks + level.backing_blocks for level in (stats.primary, stats.secondary, stats.nvme)] == [0, 0, 0]
    assert [level.free_blocks for level in (stats.primary, stats.secondary, stats.nvme)] == [8, 6, 16]
    assert cache.store.stored_blocks() == []
    for prompt in prompts:
        assert engine.serve(Request(1, prompt)) == 0
    cache.close()
    cache = make_cache(8, 6, 16)
    assert ToyEngine(cache).serve(Request(9, tokens_of(9, 13))) == 0


def test_reset_holds_also_when_the_manifest_is_rebuilt_from_the_slots(make_cache: MakeCache, store_directory: Path) -> None:
    cache = make_cache(8, 4, 16)
    fill(cache, PROMPT)
    cache.reset()
    engine = ToyEngine(cache)
    engine.serve(Request(2, tokens_of(2, 9)))
    assert cache.flush()
    cache.close()
    for manifest in store_directory.glob("manifest.sqlite*"):
        manifest.unlink()
    cache = make_cache(8, 4, 16)
    assert cache.match(PROMPT).reusable_blocks == 0, "the slots may still hold it, but from before the reset"
    assert cache.match(tokens_of(2, 9)).reusable_blocks == 2
    assert ToyEngine(cache).serve(Request(1, PROMPT)) == 0


def test_what_is_stored_during_a_reset_is_kept(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(4, 4, 16, write_ahead_share=1.0)
    engine = fill(cache, PROMPT)
    clear = cache.store.clear

    def slow_clear() -> None:
        for user in (5, 6):  # others go on meanwhile
            engine.serve(Request(user, tokens_of(user, 13)))
            assert not cache.flush()
        assert cache.transfers.idle(10)
        clear()

    monkeypatch.setattr(cache.store, "clear", slow_clear)
    cache.reset()
    assert cache.flush()
    for user in (7, 8):
        engine.serve(Request(user, tokens_of(user, 13)))
        cache.flush()
    assert engine.serve(Request(5, tokens_of(5, 13))) == 12
    assert engine.serve(Request(1, PROMPT)) == 0
    assert cache.stats().transfer_failures == 0


def test_reset_takes_stores_in_flight_with_it(make_cache: MakeCache) -> None:
    cache = make_cache(8, 8, 16, write_ahead_share=1.0)
    engine = ToyEngine(cache)
    for user in range(3):
        engine.serve(Request(user, tokens_of(user, 13)))  # its refresh begins to write
    cache.reset()
    cache.close()
    for user in range(3):
        assert reused_after_restart(make_cache, tokens_of(user, 13)) == 0


def test_truncated_content_is_not_found_again(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, 16)
    fill(cache, PROMPT)
    assert cache.truncate(PROMPT, 4) == 2
    assert cache.match(PROMPT).reusable_blocks == 1
    cache.verify()
    cache.close()
    cache = make_cache(8, 4, 16)
    assert cache.match(PROMPT).reusable_blocks == 1
    assert cache.truncate(PROMPT, 0) == 1, "what was found on disk can be forgotten too"
    cache.close()
    assert reused_after_restart(make_cache, PROMPT) == 0


def test_content_that_goes_while_it_is_written_is_not_found_again(make_cache: MakeCache) -> None:
    cache = make_cache(4, 4, 16, write_ahead_share=1.0)
    engine = ToyEngine(cache)
    engine.serve(Request(1, PROMPT))
    engine.serve(Request(2, tokens_of(2, 13)))  # pushes it to the secondary level; its refresh begins to write
    cache.truncate(PROMPT, 0)
    cache.close()
    assert reused_after_restart(make_cache, PROMPT) == 0


def test_ids_of_one_process_mean_nothing_to_the_next(make_cache: MakeCache) -> None:
    cache = make_cache(16, 4, 16)
    engine = ToyEngine(cache)
    digest = bytes(range(32))
    extra = list(range(9))
    engine.serve(Request(1, tokens_of(1, 9), lora_id=7))
    engine.serve(Request(2, tokens_of(2, 9), lora_id=7, lora_digest=digest))
    engine.serve(Request(3, tokens_of(3, 9), extra_ids=extra))
    engine.serve(Request(4, tokens_of(4, 9), extra_ids=extra, extra_ids_digest=digest))
    engine.serve(Request(5, tokens_of(5, 9), cache_salt="tenant"))
    assert cache.flush()
    cache.close()
    assert reused_after_restart(make_cache, tokens_of(1, 9), lora_id=7) == 0
    assert reused_after_restart(make_cache, tokens_of(2, 9), lora_id=7, lora_digest=digest) == 8
    assert reused_after_restart(make_cache, tokens_of(2, 9), lora_id=7, lora_digest=bytes(32)) == 0
    assert reused_after_restart(make_cache, tokens_of(3, 9), extra_ids=extra) == 0
    assert reused_after_restart(make_cache, tokens_of(4, 9), extra_ids=extra, extra_ids_digest=digest) == 8
    assert reused_after_restart(make_cache, tokens_of(5, 9), cache_salt="tenant") == 8
    assert reused_after_restart(make_cache, tokens_of(5, 9)) == 0


def test_priorities_outlive_the_process(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, 16)
    fill(cache, PROMPT, retention=keep(80))
    cache.close()
    cache = make_cache(8, 4, 16)
    ids = [block_id for block_id in range(12, 28) if cache.block(block_id).priority == 80]
    assert len(ids) == 3
    assert {cache.block(block_id).level for block_id in ids} == {Level.NVME}


@pytest.mark.parametrize("nvme", [2, 40])
def test_the_nvme_level_may_change_its_size(make_cache: MakeCache, nvme: int) -> None:
    cache = make_cache(16, 4, 16)
    fill(cache, *(tokens_of(user, 13) for user in range(4)))
    cache.close()
    cache = make_cache(16, 4, nvme)
    engine = ToyEngine(cache)
    assert cache.stats().nvme.evictable_blocks == min(nvme, 12)
    for user in range(4):
        engine.serve(Request(user, tokens_of(user, 13)))
    cache.verify()
    assert cache.stats().transfer_failures == 0


@pytest.mark.parametrize(("path", "message"), [("file", "cannot be used"), ("full", "not a kvtier store")])
def test_a_directory_that_cannot_be_ours_is_refused(make_cache: MakeCache, tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "somebody's notes").write_text("keep me")
    with pytest.raises(ConfigError, match=message):
        make_cache(8, 4, 16, nvme_directory=tmp_path / path)
    assert (tmp_path / "full" / "somebody's notes").read_text() == "keep me"
