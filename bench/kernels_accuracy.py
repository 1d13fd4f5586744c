"""``python -m kvtier.bench.kernels_accuracy``: what a model loses when its keys and values are stored in FP8, INT8 or NVFP4.

A model reads texts token by token through paged attention, with the true token given each time (so that one wrong guess does not decide
the rest), once for each way to store: what it would have said is compared with what it says over a float32 cache. Scales are taken from
another text than those that are read. The float32 cache itself is compared with the model's own attention first.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from kvtier.bench.measure import Spread
from kvtier.bench.report import Limit, Report, ResultRow, check_writable, require_memory
from kvtier.errors import ConfigError, KVTierError
from kvtier.kernels import OffsetTable
from kvtier.kernels.nvfp4 import LARGEST_E2M1
from kvtier.kernels.quantise import LARGEST_E4M3
from kvtier.pools.primary import PrimaryPool

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvtier.tiering.attach.transformers import AttachedModel

LARGEST: Final = {"float8_e4m3fn": LARGEST_E4M3, "int8": 127.0, "nvfp4": LARGEST_E2M1 * LARGEST_E4M3}
"""The largest number of each storage type. A scale makes it the largest that the model has."""

_SHORT: Final = {"float8_e4m3fn": "fp8"}   # in names of rows

PLAIN: Final = "float32"
TOKENS_PER_BLOCK: Final = 16
_TOLERANCE: Final = 1e-3   # of logits, between float32 in pages and the model's own attention


@dataclass(frozen=True)
class AccuracyPlan:
    """What is read.

    Attributes:
        texts: read at the same time, each of a different person of the demo.
        tokens: predictions for each text.
    """

    texts: int = 8
    tokens: int = 320

    @classmethod
    def of(cls, quick: bool) -> AccuracyPlan:
        """Eight texts of 320 tokens; quick: two of 64."""
        return cls(2, 64) if quick else cls()


def run_accuracy(model_folder: Path | None = None, json_file: Path | None = None, quick: bool = False) -> int:
    """Measure the demo's model, or the one in ``model_folder``; print a table and write the JSON.

    Returns:
        0, or 1 when the float32 cache does not give what the model itself gives, or a result is no number.

    Raises:
        ConfigError: there is no model, its texts are too short, or a file cannot be written.
    """
    from kvtier.bench.demo_model import load_demo_model
    from kvtier.bench.demo_text import SYSTEM_PROMPT, USERS

    if json_file is not None:
        check_writable(json_file)
    plan = AccuracyPlan.of(quick)
    loaded = load_demo_model(model_folder, say=lambda line: print(line, flush=True))
    encode = loaded.tokenizer.encode
    texts = [encode("\n\n".join(user.turns))[:plan.tokens + 1] for user in USERS[:plan.texts]]
    report = Report("kvtier kernels, accuracy", {"command": "kernels_accuracy", "quick": quick, "device": "cpu", "model": loaded.identity,
                                                 "texts": plan.texts, "tokens": plan.tokens, "tokens_per_block": TOKENS_PER_BLOCK})
    report.note(f"{loaded.origin}: {plan.texts} texts of {plan.tokens} tokens, read token by token through paged attention over each kind "
                "of cache; figures are of a text, and the median is over texts. top1: how often the likeliest next token is that of the "
                "float32 cache. divergence: Kullback-Leibler, of the distribution over the float32 cache from this one.")
    measure_accuracy(report, loaded.model, texts, encode(SYSTEM_PROMPT)[:plan.tokens])
    return report.finish(json_file)


def measure_accuracy(report: Report, model: PreTrainedModel, texts: Sequence[Sequence[int]], calibration: Sequence[int]) -> None:
    """Read ``texts``, all of one length, over each kind of cache, and add three rows for each.

    Args:
        report: gets the rows, and a note with the scales.
        model: in float32 on the CPU.
        texts: token ids; each is a prompt of one token and what must be predicted behind it.
        calibration: token ids of another text, from whose keys and values the scales are taken.

    Raises:
        ConfigError: texts of different lengths or of less than two tokens, or a model that cannot be attached with one of the
            storage types.
    """
    from kvtier.tiering.attach.transformers import layout_of

    length = min(map(len, texts), default=0)
    if length < 2 or any(len(text) != length for text in texts) or not calibration:
        raise ConfigError(f"accuracy: texts of {sorted(map(len, texts))} tokens, and {len(calibration)} to take scales from: all texts "
                          "need one length, at least 2, and the other at least 1; use a tokenizer that makes more tokens, or --quick")
    for storage in LARGEST:   # before minutes are spent on the first of them
        layout_of(model.config, dtype=storage, tokens_per_block=TOKENS_PER_BLOCK)
    tokens = torch.tensor([list(text) for text in texts])
    require_memory("the accuracy of caches", 5 * tokens.numel() * model.config.vocab_size, "end other programs, or use --quick")
    largest = _largest_numbers(model, calibration)
    expected = torch.stack(list(_read(model, tokens, PLAIN, (1.0, 1.0))))   # [tokens, texts, vocabulary]
    error = _difference_from_own(model, tokens, expected)
    if not error < _TOLERANCE:
        report.reject(f"kernels/accuracy/{PLAIN}", f"logits differ from those of the model's own attention by {error:.1e} (allowed: "
                                                   f"{_TOLERANCE})")
        return
    scales = {storage: tuple(number / LARGEST[storage] for number in largest) for storage in LARGEST}
    plain = _compare(expected, tokens, expected)
    report.add(ResultRow(f"kernels/accuracy/{PLAIN}/perplexity", "", *_spread(plain.perplexity)))
    for storage, (key_scale, value_scale) in scales.items():
        name = f"kernels/accuracy/{_SHORT.get(storage, storage)}"
        report.say(f"reading over {storage}")
        found = _compare(_read(model, tokens, storage, (key_scale, value_scale)), tokens, expected)
        if not found.is_finite:
            report.reject(name, "what the model says is not a number")
            continue
        report.add(ResultRow(f"{name}/perplexity", "", *_spread(found.perplexity), Limit(PLAIN, _spread(plain.perplexity)[0]),
                             _spread(plain.perplexity / found.perplexity)[0]))
        report.add(ResultRow(f"{name}/top1", "%", *_spread(100 * found.top1), Limit(PLAIN, 100.0), _spread(found.top1)[0]))
        report.add(ResultRow(f"{name}/divergence", "nats", *_spread(found.divergence)))
    report.note("scales, of keys and of values, one for all layers: " + ", ".join(
        f"{storage} {keys:.3g} and {values:.3g}" for storage, (keys, values) in scales.items()))


@dataclass(frozen=True)
class _Compared:
    """Of each text, float64 ``[texts]``: perplexity, share of equal likeliest tokens, mean divergence."""

    perplexity: torch.Tensor
    top1: torch.Tensor
    divergence: torch.Tensor

    @property
    def is_finite(self) -> bool:
        return all(bool(numbers.isfinite().all()) for numbers in (self.perplexity, self.top1, self.divergence))


def _compare(said: Iterator[torch.Tensor] | torch.Tensor, tokens: torch.Tensor, expected: torch.Tensor) -> _Compared:
    """Logits ``[texts, vocabulary]`` after each token, against what was expected there."""
    loss, same, divergence = (torch.zeros(len(tokens), dtype=torch.float64) for _ in range(3))
    for place, logits in enumerate(said):
        found, wanted = logits.log_softmax(-1), expected[place].log_softmax(-1)
        loss -= found.gather(1, tokens[:, place + 1, None])[:, 0]
        same += found.argmax(-1) == wanted.argmax(-1)
        divergence += (wanted.exp() * (wanted - found)).sum(-1)
    predictions = tokens.shape[1] - 1
    return _Compared((loss / predictions).exp(), same / predictions, divergence / predictions)


def _read(model: PreTrainedModel, tokens: torch.Tensor, storage: str, scales: tuple[float, float]) -> Iterator[torch.Tensor]:
    """What the model says after each token but the last, float32 ``[texts, vocabulary]``."""
    with _attached(model, len(tokens), tokens.shape[1], storage, scales) as (attached, _, tables):
        for place in range(tokens.shape[1] - 1):
            yield attached.decode(tokens[:, place].tolist(), [place] * len(tokens), *tables)


@contextmanager
def _attached(model: PreTrainedModel, texts: int, length: int, storage: str,
              scales: tuple[float, float]) -> Iterator[tuple[AttachedModel, list[PrimaryPool], list[torch.Tensor]]]:
    """The model over pools of this storage type, the pools, and their block tables of all texts."""
    from kvtier.tiering.attach.transformers import AttachedModel, layout_of

    layout = layout_of(model.config, dtype=storage, tokens_per_block=TOKENS_PER_BLOCK)
    pools, tables = [], []
    for group in layout.groups:
        blocks = group.max_blocks(length)
        pools.append(PrimaryPool(group, texts * blocks, "cpu"))
        rows = [list(range(text, texts * blocks, texts)) for text in range(texts)]   # neighbours in a text are none in the pool
        tables.append(OffsetTable.for_group(group, max_rows=texts, max_blocks=blocks, num_blocks=texts * blocks).fill(rows))
    with AttachedModel(model, pools, key_scale=scales[0], value_scale=scales[1]) as attached:
        yield attached, pools, tables


def _largest_numbers(model: PreTrainedModel, calibration: Sequence[int]) -> tuple[float, float]:
    """The largest magnitude among the keys and among the values of a text, over all layers."""
    with _attached(model, 1, len(calibration), PLAIN, (1.0, 1.0)) as (attached, pools, tables):
        attached.prefill(calibration, 0, *(table[0] for table in tables))
        largest = [max(float(pool.tensor[:, :, field % pool.group.kv_factor].abs().amax()) for pool in pools) for field in (0, 1)]
    return largest[0], largest[1]


@torch.inference_mode()
def _difference_from_own(model: PreTrainedModel, tokens: torch.Tensor, expected: torch.Tensor) -> float:
    """How far the float32 cache is from the model's own attention over the same texts, relative to its logits."""
    error, size = 0.0, 0.0
    for text, ids in enumerate(tokens):
        own = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
        error += float((own - expected[:, text]).square().sum())
        size += float(own.square().sum())
    return math.sqrt(error / size)


def _spread(numbers: torch.Tensor) -> tuple[float, float, float]:
    spread = Spread.of(numbers.tolist())
    return spread.median, spread.low, spread.high


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvtier.bench.kernels_accuracy", description="What a model loses when its keys and "
                                     "values are stored in 8 or 4 bits: perplexity and agreement with a float32 cache.")
    parser.add_argument("--model", metavar="FOLDER", type=Path, help="a model as transformers saves it; without it the demo's, SmolLM2")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures to FILE")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter texts")
    asked = parser.parse_args(arguments)
    try:
        return run_accuracy(asked.model, asked.json, asked.quick)
    except KVTierError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
