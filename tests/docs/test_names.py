"""Names in running text are names of the code: methods, statistics, metrics, settings, modules."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path

import pytest
from docs_pages import ROOT, pages, spans_of

import kvtier
from kvtier.tiering.config import TierConfig
from kvtier.tiering.metrics_table import METRICS, Kind
from kvtier.tiering.statistics import Stats

PAGES = [page for page in pages() if page.name != "CHANGELOG.md" and "decisions" not in page.parts]
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
_SHOWN = {metric.shown_name for metric in METRICS} | {"kvtier_up", "kvtier_info"}
_SHOWN |= {f"{metric.name}_{part}" for metric in METRICS if metric.kind is Kind.HISTOGRAM for part in ("bucket", "sum", "count")}
_ATTRIBUTES = {"layout", "config", "model", "device", "pools", "store"}  # what a cache gets when it is made

_FILES = {"kvtier.lock"}


def unknown(page_text: str, spans: list[str], stats_of_cache: bool = True) -> list[str]:
    """Names that look like ours and are not. ``stats_of_cache``: whether ``stats()`` is that of a cache, not of something else."""
    found = [name for name in re.findall(r"(?<![\w:])(kvtier_[a-z_]+)", page_text) if name not in _SHOWN]
    for span in spans:
        found += [f"cache.{name}" for name in re.findall(r"\bcache\.([a-z]\w+)", span)
                  if not hasattr(kvtier.KVCacheManager, name) and name not in _ATTRIBUTES]
        found += [f"stats().{name}" for name in re.findall(r"\bstats\(\)\.([a-z]\w+)", span)
                  if stats_of_cache and name not in {field.name for field in dataclasses.fields(Stats)} and not hasattr(Stats, name)]
        found += [f"KVTIER_{name}" for name in re.findall(r"\bKVTIER_([A-Z_]+)\b", span)
                  if name.lower() not in TierConfig.model_fields and name not in ("CONFIG", "COMPILE")]
        found += [name for name in re.findall(r"^(kvtier(?:\.\w+)+)$", span) if name not in _FILES and not is_there(name)]
    return found


def is_there(name: str) -> bool:
    """A module of kvtier, or something in one."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and not error.name.startswith("kvtier"):
            return True  # a module that wants a package which is not here
        module, _, last = name.rpartition(".")
        return bool(module) and is_there(module) and hasattr(importlib.import_module(module), last)
    return True


@EVERY_PAGE
def test_names_are_of_the_code(page: Path) -> None:
    assert unknown(page.read_text(encoding="utf-8"), spans_of(page), stats_of_cache=page.parent.name != "attach") == []


@pytest.mark.parametrize("wrong", ["kvtier_no_such_total", "cache.no_such(7)", "stats().no_such", "KVTIER_NO_SUCH=1", "kvtier.no.such"])
def test_a_name_that_there_is_not_is_noticed(wrong: str) -> None:
    assert unknown(wrong, [wrong])
    assert unknown("kvtier_leases", ["cache.stats().gds", "KVTIER_PRIMARY", "kvtier.kernels.write_kv", "kvtier.tiering.metrics"]) == []
