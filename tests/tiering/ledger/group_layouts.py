"""Layouts, requests and retention for the property tests of the ledger."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kvtier.policies.retention import RetentionConfig, TokenRange
from kvtier.tiering.ledger.group import CROSS, FULL, RECURRENT, WINDOW, GroupSpec
from kvtier.tiering.ledger.request import MultimodalItem, Request

PRIORITIES = (5, 29, 30, 31, 35, 80)
ENCODERS = (None, b"\x01" * 32, b"\x02" * 32)
IMAGES = (b"\x01" * 32, b"\x02" * 32)
NAMESPACES: tuple[dict[str, Any], ...] = (
    *[{}] * 9, {"cache_salt": "tenant"}, {"lora_id": 1}, {"lora_id": 2, "lora_digest": b"\x07" * 32},
)
TIGHT = ((3, 1, 6), (4, 2, 4), (2, 1, 4), (3, 2, 6), (5, 3, 3), (4, 1, 2), (3, 2, 1), (2, 2, 5), (4, 4, 4), (6, 2, 6), (2, 1, 1), (8, 6, 6),
         (4, 2, 0), (5, 1, 0), (3, 3, 0), (2, 0, 0), (6, 0, 0))
LAYOUTS = ("tight", "full", "window", "window full", "window window", "filling", "bubble", "full recurrent", "recurrent",
           "window full recurrent", "full cross", "window full cross")

suffixes = st.lists(st.integers(0, 2), min_size=1, max_size=5)


@st.composite
def layouts(draw: st.DrawFn, name: str, tokens_per_block: int, lower: bool = True) -> list[GroupSpec]:
    """Groups of one layout, with few blocks each; "tight" with hardly any. ``lower``: whether they may have other levels than the
    primary one."""
    groups: list[GroupSpec] = []
    for kind in name.split():
        if kind == "tight":
            groups.append(GroupSpec(draw(st.sampled_from(TIGHT)), FULL))
            continue
        primary = draw(st.integers(6, 14))
        secondary = draw(st.sampled_from((0, 2, 4))) if lower and kind != "cross" else 0
        sizes = (primary, secondary, draw(st.sampled_from((0, 2, 5))) if secondary else 0)
        if kind == "full":
            groups.append(GroupSpec(sizes, FULL))
        elif kind == "window":
            groups.append(GroupSpec(sizes, WINDOW, draw(st.integers(1, 2 * tokens_per_block + 1))))
        elif kind == "filling":
            groups.append(GroupSpec(sizes, WINDOW, tokens_per_block + draw(st.integers(1, tokens_per_block + 2)), tokens_per_block))
        elif kind == "bubble":
            sinks = draw(st.integers(1, tokens_per_block - 1))
            groups.append(GroupSpec(sizes, WINDOW, sinks + draw(st.integers(1, tokens_per_block + 2)), sinks))
        elif kind == "recurrent":
            groups.append(GroupSpec(sizes, RECURRENT, snapshot_interval=tokens_per_block * draw(st.integers(1, 3))))
        else:
            groups.append(GroupSpec(sizes, CROSS))
    return groups


def _retention(first: int, priority: int, rest: int, duration: float | None, decode: int) -> RetentionConfig:
    return RetentionConfig([TokenRange(0, first, priority, duration), TokenRange(first, None, rest)], decode_priority=decode)


retentions = st.none() | st.none() | st.builds(
    _retention, st.integers(1, 9), st.sampled_from(PRIORITIES), st.sampled_from(PRIORITIES), st.none() | st.sampled_from((1.0, 3.0)),
    st.sampled_from(PRIORITIES))


@st.composite
def prompts(draw: st.DrawFn, has_cross: bool, with_extras: bool = False) -> dict[str, Any]:
    """What decides the content of a prompt's blocks: few token values, so that much is found again, mostly in the plain namespace.
    ``with_extras``: some have extra ids or an image, and cannot be cut and continued."""
    tokens = draw(suffixes) * draw(st.integers(1, 3))
    keywords: dict[str, Any] = {"tokens": tokens, **draw(st.sampled_from(NAMESPACES))}
    kind = draw(st.integers(0, 14)) if with_extras else 0
    if kind == 13:
        width = draw(st.integers(2, 5))
        keywords["extra_ids"] = [position // width for position in range(len(tokens))]
    elif kind == 14 and len(tokens) > 2:
        start = draw(st.integers(0, len(tokens) - 2))
        keywords["multimodal"] = [MultimodalItem(draw(st.sampled_from(IMAGES)), [(start, draw(st.integers(1, len(tokens) - start)))])]
    if has_cross:
        keywords["encoder_length"] = draw(st.integers(1, 5))
        keywords["encoder_digest"] = draw(st.sampled_from(ENCODERS))
    return keywords


@st.composite
def requests(draw: st.DrawFn, number: int, keywords: dict[str, Any], beams: int = 3) -> Request:
    kind = draw(st.integers(0, 19))
    width = draw(st.sampled_from((1, 1, 1, 2, 3))) if beams > 1 else 1
    return Request(number, retention=draw(retentions), skip_read=kind == 18, skip_write=kind == 19, beam_width=min(width, beams),
                   max_new_tokens=draw(st.sampled_from((0, 1, 3, 8, 20))), num_draft_tokens=draw(st.integers(0, 2)) if width == 1 else 0,
                   **keywords)
