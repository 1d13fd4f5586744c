"""Several ranks of one engine: each has a store of its own under one root, and none is ever served another's bytes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from toy_engine import PROMPT, MakeCache, ToyEngine

from kvtier import ConfigError, KVCacheManager, Request, TierConfig
from kvtier.tiering.core import _sizes
from kvtier.tiering.namespace import store_namespace

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")


def make_rank(make_cache: MakeCache, rank: int, num_ranks: int = 2) -> KVCacheManager:
    return make_cache(8, 4, 16, rank=rank, num_ranks=num_ranks)


def engine_of(cache: KVCacheManager) -> ToyEngine:
    """Its bytes differ by rank, as they do where each rank has other heads."""
    engine = ToyEngine(cache)
    engine.model.salts = engine.model.salts + cache.config.rank
    return engine


@pytest.fixture
def full_root(make_cache: MakeCache, store_directory: Path) -> Path:
    """A root where each of two ranks has stored PROMPT, both at work side by side."""
    caches = [make_rank(make_cache, rank) for rank in range(2)]
    for cache in caches:
        engine_of(cache).serve(Request(1, PROMPT))
    for cache in caches:
        assert cache.flush()
        cache.close()
    return store_directory


def test_two_ranks_side_by_side_find_their_own_bytes_again(make_cache: MakeCache, full_root: Path) -> None:
    assert sorted(entry.name for entry in full_root.iterdir()) == ["rank-0-of-2", "rank-1-of-2"]
    caches = [make_rank(make_cache, rank) for rank in range(2)]
    for cache in caches:
        assert engine_of(cache).serve(Request(2, PROMPT)) == 12
        assert cache.stats().hit_tokens.nvme == 12


def test_a_block_has_one_name_on_all_ranks(make_cache: MakeCache, full_root: Path) -> None:
    keys = [{block.key for block in make_rank(make_cache, rank).store.stored_blocks()} for rank in range(2)]
    assert keys[0] == keys[1] != set()


def test_folders_of_ranks_that_were_swapped_are_refused(make_cache: MakeCache, full_root: Path) -> None:
    (full_root / "rank-0-of-2").rename(full_root / "rank-9-of-2")
    (full_root / "rank-1-of-2").rename(full_root / "rank-0-of-2")
    (full_root / "rank-9-of-2").rename(full_root / "rank-1-of-2")
    for rank in range(2):
        with pytest.raises(ConfigError, match=f"belongs to another cache: rank is {1 - rank}, configured is {rank}"):
            make_rank(make_cache, rank)


def test_slabs_of_ranks_that_were_swapped_are_never_served(make_cache: MakeCache, full_root: Path) -> None:
    slabs = [full_root / f"rank-{rank}-of-2" / "group-0.slab" for rank in range(2)]
    shutil.copyfile(slabs[1], slabs[0])
    cache = make_rank(make_cache, 0)
    assert engine_of(cache).serve(Request(2, PROMPT)) == 0
    assert cache.stats().checksum_failures > 0


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_root_made_by_another_number_of_ranks_is_refused(make_cache: MakeCache, full_root: Path, num_ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"holds stores of 2 ranks, configured is num_ranks={num_ranks}"):
        make_rank(make_cache, 0, num_ranks)
    assert sorted(entry.name for entry in full_root.iterdir()) == ["rank-0-of-2", "rank-1-of-2"]


def test_the_store_of_a_single_rank_is_not_taken_over_by_several(make_cache: MakeCache) -> None:
    make_cache(8, 4, 16).close()
    with pytest.raises(ConfigError, match="is the store of one rank, configured is num_ranks=2"):
        make_rank(make_cache, 0)


def test_each_rank_number_serves_one_process_at_a_time(make_cache: MakeCache) -> None:
    make_rank(make_cache, 0)
    with pytest.raises(ConfigError, match="in use by process"):
        make_rank(make_cache, 0)


def test_a_rank_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rank=2 with num_ranks=2: ranks are numbered from 0 to num_ranks - 1"):
        TierConfig(rank=2, num_ranks=2)
    with pytest.raises(ConfigError, match="must be at least 1"):
        TierConfig(num_ranks=0)


def test_rank_comes_from_the_environment_and_the_number_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tier.yaml").write_text("num_ranks: 4\nsize_scope: total\n")
    monkeypatch.setenv("KVTIER_RANK", "3")
    config = TierConfig.from_file(tmp_path / "tier.yaml")
    assert (config.rank, config.num_ranks, config.size_scope) == (3, 4, "total")


def test_the_namespace_of_a_single_rank_is_what_it_was_before_ranks_had_names(make_cache: MakeCache) -> None:
    assert '"ranks": 1}' in store_namespace(make_cache().layout, "m")
    assert '"rank": 0, "ranks": 2}' in store_namespace(make_cache().layout, "m", 0, 2)


def test_sizes_in_total_are_divided_and_blocks_are_not(make_cache: MakeCache, tmp_path: Path) -> None:
    layout = make_cache().layout
    block = layout.groups[0].block_bytes

    def sizes(**settings: object) -> tuple[int, ...]:
        config = TierConfig(**{"primary": "8 blocks", "secondary": "4 blocks", "nvme_directory": tmp_path,  # type: ignore[arg-type]
                               "nvme_free_space_reserve": "0B", **settings})
        found = _sizes(layout, config, "cpu")
        return (*found.primary, *found.secondary, *found.nvme)

    total = {"primary": f"{24 * block}B", "nvme": "96KiB"}
    assert sizes(**total, num_ranks=1) == sizes(**total, num_ranks=3) == (24, 4, 12)
    assert sizes(**total, num_ranks=3, size_scope="total") == (8, 4, 4)


def test_a_root_with_ranks_counts_what_all_of_them_occupy(make_cache: MakeCache, full_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.tiering import core
    monkeypatch.setattr(core, "free_disk_bytes", lambda _directory: 1 << 20)
    layout = make_cache().layout
    slot, own = 8192, 16

    def nvme(size: str, **settings: object) -> tuple[int, ...]:
        config = TierConfig(primary="8 blocks", secondary="4 blocks", nvme=size, nvme_directory=full_root, nvme_free_space_reserve="0B",
                            num_ranks=2, **settings)
        return _sizes(layout, config, "cpu").nvme

    assert nvme("100%") == (((1 << 20) + 2 * own * slot) // 2 // slot,), "half of what is free or taken by either rank"
    assert nvme(f"{(1 << 20) // slot + own} blocks"), "but one rank may take all that nobody else has"
    with pytest.raises(ConfigError, match=r"nvme: .* wanted"):
        nvme(f"{(1 << 20) // slot + own + 1} blocks")
