"""Request traces: one JSON line for each request, with an id for every block of its prompt.

``timestamp`` (milliseconds, never less than the line's before), ``input_length``, ``output_length`` (tokens) and ``hash_ids``: one whole
number for each ``block`` tokens of the prompt, equal where content *and* everything before it are equal. ``session_id`` may stand beside
them. The last id may stand for a block that is not full, so it is never reusable. That is the format of the Mooncake traces
(kvcache-ai/Mooncake, FAST'25). Files that end in ``.xz`` or ``.gz`` are read as they are.
"""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import IO, Final, cast

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError

Numbers = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]
Progress = Callable[[int, int], None]
"""Called with what is done and what there is to do."""

DEFAULT_BLOCK: Final = 512
EXAMPLE: Final = '{"timestamp": 0, "input_length": 700, "output_length": 20, "hash_ids": [0, 1]}'
_CHAT_REMEDY: Final = ("kvtier replay and kvtier tune make blocks of it with --tokenizer FILE, where FILE is the model's tokenizer.json "
                       "or a folder that holds one, or with --tokenizer bytes, which needs no file and counts each byte as a token")
_OTHER_BLOCKS: Final = (16, 32, 64, 128, 256, 512, 1024, 2048)
_MOST_TOKENS: Final = 1 << 31
_EVERY: Final = 256  # lines between two calls of the progress


@dataclass(frozen=True)
class Trace:
    """Requests in their order. Ids are numbered anew in the order of their first use: 0, 1, 2, ...

    Attributes:
        name: of its file.
        block: tokens of a block.
        milliseconds, input_lengths, output_lengths: int64 [requests].
        ids: int32 [block uses], those of all requests one after another; ends: int64 [requests], where each request's ids end in it.
        parents: int32 [unique ids], the id before each one; -1 at the start of a prompt.
    """

    name: str
    block: int
    milliseconds: Numbers
    input_lengths: Numbers
    output_lengths: Numbers
    ids: Ids
    ends: Numbers
    parents: Ids

    @property
    def num_requests(self) -> int:
        return len(self.ends)

    @property
    def num_unique(self) -> int:
        """Different blocks, those that may not be full included."""
        return len(self.parents)

    @property
    def input_tokens(self) -> int:
        return int(self.input_lengths.sum())

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return float(self.milliseconds[-1] - self.milliseconds[0]) / 1000

    def prompts(self) -> Iterator[Ids]:
        """The ids of each request."""
        start = 0
        for end in self.ends.tolist():
            yield self.ids[start:end]
            start = end

    def reusable_prompts(self) -> list[list[int]]:
        """The ids that each request may store and reuse: all but its last one."""
        ids = self.ids.tolist()
        starts = [0, *self.ends.tolist()]
        return [ids[start:end - 1] for start, end in pairwise(starts)]


class TraceBuilder:
    """Collects checked requests into a :class:`Trace`.

    Args:
        name: stands before the line number in messages.
        block: tokens of a block.
    """

    def __init__(self, name: str, block: int) -> None:
        if block < 1:
            raise ConfigError(f"block={block}: tokens of a block; a positive whole number such as {DEFAULT_BLOCK}")
        self.name = name
        self.block = block
        self._numbers: defaultdict[int, int] = defaultdict(count().__next__)
        self._names: list[int] = []  # by number, the id in the file
        self._parents = np.full(1024, -1, np.int32)
        self._known = 0
        self._milliseconds: list[int] = []
        self._inputs: list[int] = []
        self._outputs: list[int] = []
        self._prompts: list[Ids] = []

    def add(self, line: int, milliseconds: int, input_length: int, output_length: int, hash_ids: list[int]) -> None:
        """Take one request in.

        Raises:
            ConfigError: time runs backwards, the number of ids does not fit the length, an id has two parents.
        """
        if self._milliseconds and milliseconds < self._milliseconds[-1]:
            raise self._bad(line, f"timestamp {milliseconds} after {self._milliseconds[-1]}; expected requests in the order of arrival")
        if len(hash_ids) != -(-input_length // self.block):
            raise self._bad(line, self._wrong_number(input_length, len(hash_ids)))
        prompt = np.fromiter(map(self._numbers.__getitem__, hash_ids), np.int32, len(hash_ids))
        before = np.empty_like(prompt)
        before[0] = -1
        before[1:] = prompt[:-1]
        known = self._known
        total = len(self._numbers)
        if total > known:
            if total > len(self._parents):
                self._parents = np.concatenate([self._parents, np.full(max(total, len(self._parents)), -1, np.int32)])
            first = len(prompt) - (total - known)
            if not (prompt[:first] >= known).any():  # the new ones stand at the end, each once
                self._names += hash_ids[first:]
                self._parents[known:total] = before[first:]
            else:
                self._names += [name for name in dict.fromkeys(hash_ids) if self._numbers[name] >= known]
                first_uses, places = np.unique(prompt, return_index=True)  # the first use of each
                is_new = first_uses >= known
                self._parents[first_uses[is_new]] = before[places[is_new]]
            self._known = total
        wrong = np.flatnonzero(self._parents[prompt] != before)
        if len(wrong):
            raise self._bad(line, self._two_parents(prompt, int(wrong[0])))
        self._milliseconds.append(milliseconds)
        self._inputs.append(input_length)
        self._outputs.append(output_length)
        self._prompts.append(prompt)

    def finish(self) -> Trace:
        """The whole trace. ConfigError when there is no request."""
        if not self._prompts:
            raise ConfigError(f"{self.name}: no requests; expected one JSON object on each line, such as {EXAMPLE}")
        return Trace(self.name, self.block, np.array(self._milliseconds, np.int64), np.array(self._inputs, np.int64),
                     np.array(self._outputs, np.int64), np.concatenate(self._prompts),
                     np.cumsum([len(prompt) for prompt in self._prompts], dtype=np.int64), self._parents[:self._known].copy())

    def _wrong_number(self, input_length: int, found: int) -> str:
        fitting = [block for block in _OTHER_BLOCKS if -(-input_length // block) == found]
        hint = f"; the file seems to be made with blocks of {fitting[0]} tokens: --block {fitting[0]}" if fitting else ""
        return (f"{found} hash_ids for input_length {input_length}; expected {-(-input_length // self.block)}, one for each "
                f"{self.block} tokens{hint}")

    def _two_parents(self, prompt: Ids, place: int) -> str:
        number = int(prompt[place])
        shown = [f"id {self._names[parent]}" if parent >= 0 else "the start of a prompt"
                 for parent in (int(self._parents[number]), int(prompt[place - 1]) if place else -1)]
        return (f"id {self._names[number]} follows {shown[1]} here and {shown[0]} before; expected equal ids only where everything before "
                "them is equal too")

    def _bad(self, line: int, what: str) -> ConfigError:
        return ConfigError(f"{self.name}, line {line}: {what}")


def read_trace(path: Path, block: int = DEFAULT_BLOCK, progress: Progress | None = None) -> Trace:
    """Read a trace.

    Args:
        path: a file as described above; ``.xz`` and ``.gz`` are decompressed.
        block: tokens that one id stands for.
        progress: called now and then with the bytes read and the bytes of the file.

    Raises:
        ConfigError: no such file, or a line that is not a request (names the line and what was expected).
    """
    builder = TraceBuilder(path.name, block)
    for line, fields in json_lines(path, EXAMPLE, progress):
        hash_ids = fields.get("hash_ids")
        if "hash_ids" not in fields and "messages" in fields:
            raise ConfigError(f"{path.name}, line {line}: a chat as text, with messages instead of hash_ids; {_CHAT_REMEDY}")
        if not isinstance(hash_ids, list) or not set(map(type, hash_ids)) <= {int}:
            raise ConfigError(f"{path.name}, line {line}: {_given(fields, 'hash_ids')}; expected a list of whole numbers, one for each "
                              f"{block} tokens of the prompt, as in {EXAMPLE}")
        builder.add(line, _number(path, line, fields, "timestamp", 0), _number(path, line, fields, "input_length", 1),
                    _number(path, line, fields, "output_length", 0), hash_ids)
    return builder.finish()


def json_lines(path: Path, example: str, progress: Progress | None) -> Iterator[tuple[int, dict[str, object]]]:
    """(line number from 1, fields) of each line of a file that is not empty. Raises ConfigError as :func:`read_trace`."""
    with _opened(path) as (file, raw):
        total = path.stat().st_size
        for number, line in enumerate(file, 1):
            text = line.strip()
            if not text:
                continue
            try:
                fields = json.loads(text)
            except (ValueError, RecursionError) as error:
                end = "" if line.endswith(b"\n") else " (the file ends inside this line)"
                raise ConfigError(f"{path.name}, line {number}: not JSON, {_reason(error)}{end}; expected {example}") from error
            if not isinstance(fields, dict):
                raise ConfigError(f"{path.name}, line {number}: {_shown(fields)}; expected an object such as {example}")
            if progress is not None and number % _EVERY == 0:
                progress(raw.tell(), total)
            yield number, fields


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The file's content, decompressed, and the file itself. Every way in which it cannot be read becomes a ConfigError."""
    try:
        with open(path, "rb") as raw:
            if path.suffix == ".xz":
                with lzma.open(raw) as file:
                    yield cast(IO[bytes], file), raw
            elif path.suffix == ".gz":
                with gzip.open(raw) as unzipped:
                    yield cast(IO[bytes], unzipped), raw
            else:
                yield raw, raw
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error}); name a trace, one request on each line") from error
    except (EOFError, lzma.LZMAError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be decompressed ({error}); the file is damaged or cut off, fetch it again") from error


def _number(path: Path, line: int, fields: dict[str, object], key: str, least: int) -> int:
    value = fields.get(key)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _MOST_TOKENS << 16:
        raise ConfigError(f"{path.name}, line {line}: {_given(fields, key)}; expected a whole number of at least {least}")
    return value


def _reason(error: Exception) -> str:
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _given(fields: dict[str, object], key: str) -> str:
    return f"{key}={_shown(fields[key])}" if key in fields else f"no {key}"


def _shown(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:60]}..."
