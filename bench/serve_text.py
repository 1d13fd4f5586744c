"""Real text for ``kvtier bench serve``, cut by the tokens: Python's own language reference, which every installation carries.

Every passage begins with a line of its own, so that no two prompts begin alike unless they are meant to, and goes on somewhere in the text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.errors import ConfigError

Encode = Callable[[str], Sequence[int]]
"""Text into tokens, without special ones."""


class TextSource:
    """A long text as tokens.

    Args:
        encode: of the engine's model.
        file: a text in UTF-8 to be taken instead.

    Raises:
        ConfigError: a file that cannot be read, or holds too little.
    """

    def __init__(self, encode: Encode, file: Path | None = None) -> None:
        self._encode = encode
        try:
            text = _reference() if file is None else file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--text {file}: {getattr(error, 'strerror', None) or error}; name a text file in UTF-8") from error
        self._tokens = tuple(encode(text))
        if len(self._tokens) < 2:
            raise ConfigError(f"--text {file}: {len(self._tokens)} tokens; name a longer text")

    def passage(self, title: str, count: int) -> tuple[int, ...]:
        """``count`` tokens that begin with a line of this title; the same title gives the same passage."""
        head = tuple(self._encode(f"{title}\n"))[:count]
        start = random.Random(title).randrange(len(self._tokens))
        rest = count - len(head)
        more = self._tokens[start:start + rest]
        while len(more) < rest:  # from the beginning again
            more += self._tokens[:rest - len(more)]
        return head + more


def _reference() -> str:
    """The language reference as ``help()`` shows it."""
    from pydoc_data.topics import topics
    return "\n\n".join(topics[name] for name in sorted(topics))
