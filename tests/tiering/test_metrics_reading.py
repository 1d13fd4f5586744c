"""What a ``/metrics`` answers is read as it stands, and what is none is a ValueError, whatever the parser stumbles over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiering.metrics_reading import read_metrics


def test_names_labels_and_values_stand_as_in_the_text() -> None:
    page = read_metrics('# TYPE a counter\na_total{level="nvme",rank="1"} 3\na_total{level="host",rank="1"} 4.5\n# TYPE b gauge\n')
    assert {"a", "b"} <= page.families, "also the one that has no sample yet"
    assert page.samples == (("a_total", {"level": "nvme", "rank": "1"}, 3.0), ("a_total", {"level": "host", "rank": "1"}, 4.5))


@pytest.mark.parametrize("text", ["<html></html>\n", "a{b=\n", "a{} x\n"])
def test_what_is_none_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        read_metrics(text)


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        read_metrics(text)
    except ValueError:
        pass
