"""Chats in plain text as a trace: what an inference server's log of requests holds.

Each line is one request, in the order of arrival: ``{"messages": [{"role": "user", "content": "..."}, ...]}`` as it was sent to a chat
endpoint, the conversation so far included. Beside it may stand ``timestamp`` (milliseconds), ``output_length`` (tokens) or ``output``
(text), ``session_id``. A message becomes ``<|role|>``, a line break, its content and another line break; a tokenizer makes tokens of each
by itself, so that a conversation's prompts share their beginnings; blocks are cut from the sequence of all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvtier.bench.trace import Progress, Trace, TraceBuilder, json_lines
from kvtier.errors import ConfigError
from kvtier.pools.sizing import shown

EXAMPLE: Final = '{"messages": [{"role": "user", "content": "Hello"}]}'
BYTES: Final = "bytes"
"""The tokenizer that needs no file: each byte of the text is a token."""

Encode = Callable[[str], list[int]]


def read_chats(path: Path, tokenizer: str, block: int, progress: Progress | None = None) -> Trace:
    """Read chats.

    Args:
        path: a file as described above; ``.xz`` and ``.gz`` are decompressed.
        tokenizer: ``bytes``, a ``tokenizer.json`` of the tokenizers library, or a folder that holds one.
        block: tokens of a block.
        progress: called now and then with the bytes read and the bytes of the file.

    Raises:
        ConfigError: a tokenizer or file that cannot be read, a line that is no request (names it and what was expected).
    """
    encode = _remembering(find_tokenizer(tokenizer))
    builder = TraceBuilder(path.name, block)
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    last = 0
    for line, fields in json_lines(path, EXAMPLE, progress):
        tokens = [token for role, content in _messages(path, line, fields) for token in encode(f"<|{role}|>\n{content}\n")]
        parent = -1
        ids = []
        for start in range(0, len(tokens), block):
            parent = numbers.setdefault((parent, tuple(tokens[start:start + block])), len(numbers))
            ids.append(parent)
        last = _whole(path, line, fields, "timestamp", last)
        output = fields.get("output")
        length = len(encode(output)) if isinstance(output, str) else _whole(path, line, fields, "output_length", 0)
        builder.add(line, last, len(tokens), length, ids)
    return builder.finish()


def find_tokenizer(name: str) -> Encode:
    """Raises ConfigError for one that cannot be read."""
    if name == BYTES:
        return lambda text: list(text.encode())
    path = Path(name)
    if os.path.isdir(path):  # unlike Path.is_dir, never an error
        path /= "tokenizer.json"
    if not os.path.isfile(path):
        raise ConfigError(f"--tokenizer={shown(name)}: no such file; name a tokenizer.json, a folder that holds one, or {BYTES!r}")
    from tokenizers import Tokenizer
    try:
        loaded: Any = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more exact
        raise ConfigError(f"--tokenizer={shown(name)}: cannot be read ({error}); name a tokenizer.json of the tokenizers "
                          "library") from error
    return lambda text: list(loaded.encode(text, add_special_tokens=False).ids)


def _remembering(encode: Encode) -> Encode:
    """A conversation's messages come again with each of its requests."""
    known: dict[str, list[int]] = {}

    def remembered(text: str) -> list[int]:
        tokens = known.get(text)
        if tokens is None:
            tokens = known[text] = encode(text)
        return tokens

    return remembered


def _messages(path: Path, line: int, fields: dict[str, object]) -> list[tuple[str, str]]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        ids = "; leave --tokenizer out for a trace that has hash_ids" if "hash_ids" in fields else ""
        raise ConfigError(f"{path.name}, line {line}: no messages; expected {EXAMPLE}{ids}")
    found = []
    for number, message in enumerate(messages):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise ConfigError(f"{path.name}, line {line}: message {number} has no text as role and content; expected {EXAMPLE}")
        found.append((role, content))
    return found


def _whole(path: Path, line: int, fields: dict[str, object], key: str, otherwise: int) -> int:
    value = fields.get(key, otherwise)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{path.name}, line {line}: {key}={shown(value)}; expected a whole number of at least 0")
    return value
