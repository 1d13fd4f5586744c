"""A rate carries a size with its unit, per second."""

from __future__ import annotations

import pytest

from kvtier.errors import ConfigError
from kvtier.pools.rate import parse_rate


@pytest.mark.parametrize("text", ["200MiB", "200", "fast/s", "5 blocks/s", "90%/s", "0MiB/s", "-1MiB/s", "/s", "", None, 200])
def test_a_rate_that_is_none_is_refused_with_its_name(text: object) -> None:
    with pytest.raises(ConfigError, match="--bandwidth="):
        parse_rate(text, "--bandwidth")


@pytest.mark.parametrize("text", ["9" * 5000 + "KB/s", "x" * 5000, "0" * 5000 + "B/s"], ids=["digits", "letters", "noughts"])
def test_a_rate_that_fills_the_screen_is_shown_shortened(text: str) -> None:
    with pytest.raises(ConfigError, match="--bandwidth=") as refused:
        parse_rate(text, "--bandwidth")
    assert len(str(refused.value)) < 600


def test_a_rate_is_bytes_per_second() -> None:
    assert parse_rate("200MiB/s", "--bandwidth") == 200 * (1 << 20)
    assert parse_rate("1.5 GB/s", "--bandwidth") == 1.5e9
