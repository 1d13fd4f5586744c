"""Sizes carry units, become whole blocks, and are refused before anything is allocated."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.pools.layout import KVLayout, LayerSpec
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY
from kvtier.pools.sizing import (
    FreeSpace,
    PoolSizes,
    SizeKind,
    check_fits,
    format_bytes,
    parse_size,
    parse_sizes,
    resolve_sizes,
    slot_bytes,
    warn_of_unread_levels,
)

PLENTY = FreeSpace(host_bytes=1 << 40, disk_bytes=1 << 40)
UNIT_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
              "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def one_group() -> KVLayout:
    """One group whose block is 2 layers x 2 x 1 head x 4 tokens x 8 x 4 bytes = 512 bytes."""
    return KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", tokens_per_block=4)


def two_groups() -> KVLayout:
    """A window group of 256-byte blocks and a full-attention group of 512-byte blocks."""
    window = LayerSpec.attention(1, 8, window=16)
    full = LayerSpec.attention(1, 8)
    return KVLayout([window, full, full], "float32", 4)


@given(st.integers(0, 10**6), st.sampled_from(sorted(UNIT_BYTES)), st.sampled_from(["", " ", "  "]),
       st.sampled_from([str, str.lower, str.upper]))
def test_bytes_are_exact_in_every_unit_and_spelling(number: int, unit: str, gap: str, spelling: type[str]) -> None:
    size = parse_size(f" {number}{gap}{spelling(unit)} ", "secondary")
    assert size.kind is SizeKind.BYTES
    assert size.amount == number * UNIT_BYTES[unit]


@given(st.decimals(0, 1000, places=3), st.sampled_from(sorted(UNIT_BYTES)))
def test_fractions_of_a_unit_round_down_to_whole_bytes(number: object, unit: str) -> None:
    size = parse_size(f"{number} {unit}", "secondary")
    assert size.amount == math.floor(Fraction(str(number)) * UNIT_BYTES[unit])


@given(st.integers(0, 2**31))
def test_blocks_stay_the_number_that_was_written(number: int) -> None:
    size = parse_size(f"{number} blocks", "primary")
    assert (size.kind, size.amount) == (SizeKind.BLOCKS, number)


@given(st.decimals(0, 100, places=2))
def test_percent_is_an_exact_share(number: object) -> None:
    size = parse_size(f"{number}%", "primary")
    assert (size.kind, size.amount) == (SizeKind.SHARE, Fraction(str(number)) / 100)


@given(st.one_of(st.text(), st.integers(), st.floats(), st.none(), st.booleans(), st.lists(st.integers())))
def test_anything_at_all_is_a_size_or_a_config_error(value: object) -> None:
    message, amount = "", Fraction(0)
    try:
        amount = parse_size(value, "primary").amount
    except ConfigError as error:
        message = str(error)
    assert amount >= 0
    assert not message or message.startswith("primary=")


@pytest.mark.parametrize(("text", "message"), [
    (8, r'primary=8: a size needs a unit; write "8 blocks", "8GiB" or "8%"'),
    (-8, "needs a unit"), (1.5, "needs a unit"),
    ("8", r'primary=\'8\': a size needs a unit; write "8 blocks"'),
    ("-8 blocks", "must not be negative"), ("-1GiB", "must not be negative"), ("-5%", "must not be negative"),
    ("1.5 blocks", r'write "2 blocks"'), ("101%", "at most 100%"),
    ("9 blokcs", "did you mean \"9 blocks\""), ("9 Gib/s", "not a size"),
    ("9 G", "unknown unit"), ("9 bananas", "unknown unit"),
    ("99999999999 blocks", "at most 2147483648 blocks"), ("9999999 TiB", "at most"),
    ("", "not a size"), ("1e9 B", "not a size"), ("1,000 MB", "not a size"), ("\u0663 blocks", "not a size"),
    (None, "not a size"), (True, "not a size"), (float("nan"), "needs a unit")])
def test_what_is_no_size_says_how_to_write_one(text: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_size(text, "primary")


@pytest.mark.parametrize(("given", "meant"), [
    (0.9, ["90%", "0.9GiB"]), ("0.35", ["35%", "0.35GiB"]), (1.0, ["100%", "1 blocks", "1.0GiB"]), (1.5, ["1.5GiB", "1.5%"]),
    (4096, ["4096 blocks", "4096GiB"]), ("64", ["64 blocks", "64GiB", "64%"]), (64 << 30, ["68719476736B"])], ids=str)
def test_a_number_without_its_unit_gets_only_suggestions_that_can_be_meant(given: object, meant: list[str]) -> None:
    with pytest.raises(ConfigError, match="needs a unit; write") as refused:
        parse_size(given, "primary")
    said = str(refused.value).partition("needs a unit;")[2]
    assert re.findall('"(.*?)"', said) == meant
    for text in meant:
        parse_size(text, "primary")


@pytest.mark.parametrize("given", [1e-05, 1.5e300, float("inf"), 10**50], ids=str)
def test_where_no_unit_goes_with_a_number_the_examples_are_shown(given: object) -> None:
    with pytest.raises(ConfigError, match='needs a unit; write for example "8 blocks"'):
        parse_size(given, "primary")


def test_a_list_of_sizes_names_the_item_that_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"primary\[1\]=4"):
        parse_sizes(["8 blocks", 4], "primary")
    with pytest.raises(ConfigError, match="one per group"):
        parse_sizes([], "primary")


def test_blocks_are_of_each_group_and_lists_are_per_group() -> None:
    sizes = resolve_sizes(two_groups(), "8 blocks", ["4 blocks", "2 blocks"], "0 blocks", PLENTY)
    assert sizes == PoolSizes((8, 8), (4, 2), (0, 0))


@pytest.mark.parametrize("level", ["primary", "secondary", "nvme"])
@pytest.mark.parametrize("given", [["4 blocks"], ("1GiB",), ["1 block"] * 3])
def test_a_list_names_every_group(level: str, given: object) -> None:
    """Also a list of one: it is not a size for all."""
    sizes: dict[str, object] = {"primary": "8 blocks", "secondary": "8 blocks", "nvme": "8 blocks", level: given}
    with pytest.raises(ConfigError, match=rf"{level}: {len(given)} sizes for 2 groups; give one for all, not in a list"):  # type: ignore[arg-type]
        resolve_sizes(two_groups(), sizes["primary"], sizes["secondary"], sizes["nvme"], PLENTY)


def test_an_encoders_blocks_have_no_lower_level(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of cross-attention is ever stored, so nothing of it goes down: its part of a lower level is the others'."""
    layout = KVLayout([LayerSpec.attention(1, 8), LayerSpec.cross(1, 8)], "float32", 4)
    assert resolve_sizes(layout, "8 blocks", "4 blocks", "2 blocks", PLENTY) == PoolSizes((8, 8), (4, 0), (2, 0))
    assert resolve_sizes(layout, "8 blocks", "8192 B", "16384 B", PLENTY) == PoolSizes((8, 8), (2, 0), (2, 0))
    assert resolve_sizes(layout, "8 blocks", "8192 B", "0 blocks", PLENTY, [0.25, 0.75]).secondary == (2, 0)
    assert not caplog.records
    assert resolve_sizes(layout, "8 blocks", ["4 blocks", "3 blocks"], "0 blocks", PLENTY).secondary == (4, 0)
    assert "'3 blocks' for group 1, which is cross-attention" in caplog.text
    with pytest.raises(ConfigError, match="gives group 0 no block"):
        resolve_sizes(layout, "1 KiB", "0 blocks", "0 blocks", PLENTY, [0.0, 1.0])


@pytest.mark.parametrize("text", ["9" * 5000 + " blocks", "1." + "0" * 5000 + " GiB", "9" * 5000, 10**5000, -(10**5000),
                                  "9" * 5000 + " foo", "9" * 4301 + "%"], ids=[str(number) for number in range(7)])
def test_a_size_of_thousands_of_digits_is_refused_in_a_few_words(text: object) -> None:
    with pytest.raises(ConfigError, match="primary=") as refused:
        parse_size(text, "primary")
    assert len(str(refused.value)) < 600


def test_slots_below_primary_are_padded_and_nvme_has_a_header() -> None:
    group = one_group().groups[0]
    assert [slot_bytes(group, level) for level in (PRIMARY, SECONDARY, NVME)] == [512, 4096, 8192]


def test_bytes_round_up_at_primary_and_down_below() -> None:
    # 1000 bytes are 7 tokens of 128 bytes: two blocks of 4 tokens. 10000 bytes below are two padded slots, one on NVMe.
    assert resolve_sizes(one_group(), "1000 B", "10000 B", "10000 B", PLENTY) == PoolSizes((2,), (2,), (1,))


def test_a_whole_number_of_blocks_stays_that_number() -> None:
    assert resolve_sizes(one_group(), "5120 B", "8192 B", "16384 B", PLENTY) == PoolSizes((10,), (2,), (2,))


def test_groups_share_bytes_equally_unless_shares_are_given() -> None:
    layout = two_groups()
    assert resolve_sizes(layout, "10240 B", "0 blocks", "0 blocks", PLENTY).primary == (20, 10)
    assert resolve_sizes(layout, "10240 B", "0 blocks", "0 blocks", PLENTY, [0.25, 0.75]).primary == (10, 15)
    assert resolve_sizes(layout, "10240 B", "0 blocks", "0 blocks", PLENTY, [0.5, 1.0]).primary[0] == 14  # ceil(13.33)
    assert resolve_sizes(layout, "8 blocks", "8192 B", "0 blocks", PLENTY, [0, 1]).secondary == (0, 2)


@pytest.mark.parametrize(("share", "blocks"), [(0.1, 1), (0.2, 2), (0.3, 3), (0.7, 7), (0.9, 9)])
def test_a_share_is_the_decimal_that_was_written(share: float, blocks: int) -> None:
    """The float beside 0.7 is less than that, and its part of ten blocks less than seven."""
    sizes = resolve_sizes(two_groups(), "8 blocks", f"{10 * 4096} B", "0 blocks", PLENTY, [share, round(1 - share, 1)])
    assert sizes.secondary == (blocks, 10 - blocks)


def test_shares_do_not_change_blocks_or_lists() -> None:
    sizes = resolve_sizes(two_groups(), "8 blocks", ["8192 B", "8192 B"], "0 blocks", PLENTY, [0.1, 0.9])
    assert sizes == PoolSizes((8, 8), (2, 2), (0, 0))


@pytest.mark.parametrize(("shares", "message"), [
    ([1.0], "1 shares for 2 groups"), ([0.5, 1.5], "between 0 and 1"), ([0.0, 0.0], "more than 0"),
    ([float("nan"), 1.0], "between 0 and 1"), ([1.0, 0.0], "gives group 1 no block")])
def test_bad_group_shares_are_refused(shares: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_sizes(two_groups(), "10240 B", "0 blocks", "0 blocks", PLENTY, shares)


def test_a_list_of_another_length_than_the_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match="secondary: 3 sizes for 2 groups"):
        resolve_sizes(two_groups(), "8 blocks", ["1 blocks"] * 3, "0 blocks", PLENTY)


@pytest.mark.parametrize("primary", ["0 blocks", "1 B", "0%", "0.0000001%"])
def test_a_group_without_primary_blocks_is_refused(primary: str) -> None:
    with pytest.raises(ConfigError, match=r"primary=.* gives group 0 no block"):
        resolve_sizes(one_group(), primary, "0 blocks", "0 blocks", FreeSpace(host_bytes=10**6))


@pytest.mark.parametrize("level", ["secondary", "nvme"])
def test_a_lower_level_smaller_than_one_block_is_refused(level: str) -> None:
    sizes = {"secondary": "0 blocks", "nvme": "0 blocks", level: "100 B"}
    with pytest.raises(ConfigError, match=rf"{level}='100 B' is less than one block of group 0"):
        resolve_sizes(one_group(), "1 blocks", sizes["secondary"], sizes["nvme"], PLENTY)


def test_on_the_cpu_primary_is_served_first_and_secondary_takes_of_the_rest() -> None:
    free = FreeSpace(host_bytes=1_000_000)
    sizes = resolve_sizes(one_group(), "90%", "90%", "0 blocks", free)
    assert sizes.primary == (900_000 // 512,)
    assert sizes.secondary == ((1_000_000 - sizes.primary[0] * 512) * 9 // 10 // 4096,)


def test_on_a_device_the_two_levels_do_not_compete() -> None:
    free = FreeSpace(host_bytes=1_000_000, device_bytes=512_000)
    assert resolve_sizes(one_group(), "100%", "100%", "0 blocks", free) == PoolSizes((1000,), (244,), (0,))


@given(st.integers(1, 10**7), st.integers(1, 100), st.integers(1, 100), st.integers(1, 100), st.booleans())
def test_shares_of_what_is_free_always_fit(
        free_bytes: int, primary: int, secondary: int, nvme: int, device: bool) -> None:
    layout = two_groups()
    free = FreeSpace(free_bytes, device_bytes=free_bytes if device else None, disk_bytes=free_bytes)
    message = ""
    try:
        check_fits(layout, resolve_sizes(layout, f"{primary}%", f"{secondary}%", f"{nvme}%", free), free)
    except ConfigError as error:
        message = str(error)
    assert not message or "no block" in message or "less than one block" in message  # never too much


@pytest.mark.parametrize(("sizes", "level", "wanted", "available"), [
    (("3 blocks", "0 blocks", "0 blocks"), "primary", 1536, 1024),
    (("1 blocks", "1 blocks", "0 blocks"), "secondary", 4096, 512),
    (("1 blocks", "0 blocks", "2 blocks"), "nvme", 16384, 8192)])
def test_what_does_not_fit_names_level_wanted_and_available(
        sizes: tuple[str, str, str], level: str, wanted: int, available: int) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve_sizes(one_group(), *sizes, FreeSpace(host_bytes=1024, disk_bytes=8192))
    message = str(raised.value)
    assert message.startswith(f"{level}: ")
    assert str(wanted) in message
    assert str(available) in message
    assert f"lower {level}=" in message


def test_device_memory_that_is_too_small_is_named_as_such() -> None:
    with pytest.raises(ConfigError, match="device memory"):
        resolve_sizes(one_group(), "3 blocks", "0 blocks", "0 blocks", FreeSpace(host_bytes=1 << 30, device_bytes=1024))


def test_nvme_without_a_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match="nvme_directory"):
        resolve_sizes(one_group(), "1 blocks", "1 blocks", "50%", FreeSpace(host_bytes=1 << 30))


def test_bytes_read_well() -> None:
    assert format_bytes(512) == "512 B"
    assert format_bytes(3 << 29) == "1.50 GiB (1610612736 bytes)"


@pytest.mark.parametrize(("max_tokens", "blocks"), [(1, 1), (4, 1), (5, 2), (32, 8), (33, 8), (10**9, 8)])
def test_the_primary_level_never_holds_more_than_max_tokens(max_tokens: int, blocks: int) -> None:
    sizes = resolve_sizes(two_groups(), "8 blocks", "9 blocks", "0 blocks", PLENTY, max_tokens=max_tokens)
    assert sizes == PoolSizes((blocks, blocks), (9, 9), (0, 0))


def test_of_size_and_cap_the_smaller_counts_in_each_group_and_a_warning_names_both(caplog: pytest.LogCaptureFixture) -> None:
    sizes = resolve_sizes(two_groups(), "10240 B", "0 blocks", "0 blocks", PLENTY, max_tokens=60)
    assert sizes.primary == (15, 10)
    assert [record.getMessage() for record in caplog.records] == [
        "primary: max_tokens=60 allows 15 blocks per group, primary='10240 B' would give 20, 10: the smaller one counts"]


def test_a_cap_that_has_no_effect_is_said_too(caplog: pytest.LogCaptureFixture) -> None:
    resolve_sizes(two_groups(), "8 blocks", "0 blocks", "0 blocks", PLENTY, max_tokens=60)
    assert [record.getMessage() for record in caplog.records] == [
        "primary: primary='8 blocks' gives 8, 8 blocks, max_tokens=60 would allow 15 per group: the smaller one counts"]


def test_no_warning_where_size_and_cap_agree_or_there_is_no_cap(caplog: pytest.LogCaptureFixture) -> None:
    resolve_sizes(two_groups(), "8 blocks", "0 blocks", "0 blocks", PLENTY, max_tokens=32)
    resolve_sizes(two_groups(), "8 blocks", "0 blocks", "0 blocks", PLENTY)
    assert not caplog.records


def test_what_the_cap_leaves_goes_to_the_secondary_level_of_a_cpu() -> None:
    free = FreeSpace(host_bytes=1_000_000)
    sizes = resolve_sizes(one_group(), "90%", "100%", "0 blocks", free, max_tokens=40)
    assert sizes == PoolSizes((10,), ((1_000_000 - 10 * 512) // 4096,), (0,))


def test_a_group_with_nvme_but_without_secondary_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gives group 0 3 blocks and secondary=.* gives it none"):
        resolve_sizes(two_groups(), "8 blocks", "8192 B", "3 blocks", PLENTY, [0, 1])


@pytest.mark.parametrize(("secondary", "reuse", "says"), [((2, 3), False, True), ((0, 0), False, False), ((2, 3), True, False)])
def test_host_memory_that_nothing_would_be_read_from_is_said_once(
        caplog: pytest.LogCaptureFixture, secondary: tuple[int, int], reuse: bool, says: bool) -> None:
    warn_of_unread_levels(PoolSizes((8, 8), secondary, (0, 0)), reuse)
    assert len(caplog.records) == says
    assert not says or "5 blocks of host memory with enable_block_reuse=False" in caplog.text
