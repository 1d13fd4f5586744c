"""``LayerSpec``: what one layer of a model keeps in the KV cache. Pure arithmetic: no torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from kvtier.errors import ConfigError

DTYPE_BYTES: Final[dict[str, int]] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1, "uint8": 1,
}
"""Bytes of one element of each storage dtype, by torch's names."""


class TorchDtype(Protocol):
    """A ``torch.dtype``, as far as it is looked at here, where torch is not imported."""

    @property
    def itemsize(self) -> int: ...


def dtype_name(dtype: str | TorchDtype) -> str:
    """A dtype's name: of ``torch.bfloat16``, and of that as text, "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def require_count(name: str, value: int, lowest: int = 1, highest: int = 1 << 40) -> None:
    """Raise ConfigError unless ``value`` is a whole number in these limits."""
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise ConfigError(f"{name}={value!r}: must be a whole number between {lowest} and {highest}")


@dataclass(frozen=True)
class LayerSpec:
    """One layer of the model. Make one with :meth:`attention`, :meth:`mla`, :meth:`recurrent` or :meth:`cross`.

    ``window=W``: a token attends to itself and the W-1 tokens before it; ``None`` means full attention.

    ``scale_bytes`` and ``indexer_bytes`` describe what lies beside keys and values, in the same block: it has the same slot
    and moves with them. Scales belong to a quantised storage type (4-bit: one e4m3 byte for 16 elements of ``head_dim``);
    the indexer's keys belong to sparse attention.
    """

    kind: str
    num_kv_heads: int = 1
    head_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    sinks: int = 0
    dtype: str | TorchDtype | None = None  # a name once it is made
    state_bytes: int = 0
    snapshot_interval: int = 0
    scale_bytes: int = 0
    indexer_bytes: int = 0

    def __post_init__(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", dtype_name(self.dtype))

    @classmethod
    def attention(cls, num_kv_heads: int, head_dim: int, value_dim: int | None = None, window: int | None = None,
                  sinks: int = 0, dtype: str | TorchDtype | None = None, *, scale_bytes: int = 0, indexer_bytes: int = 0) -> LayerSpec:
        """Self-attention: per token ``num_kv_heads`` keys of ``head_dim`` and values of ``value_dim`` (default equal).

        Args:
            num_kv_heads, head_dim, value_dim: heads, and elements of one key and of one value.
            window: tokens that a token sees, itself included; None for all.
            sinks: leading tokens that stay visible for ever and count towards the window; fewer than it has.
            dtype: storage dtype, by name or torch's own; None for the layout's.
            scale_bytes: bytes of block scales for each token and head, of keys and of values alike; 0 for none.
            indexer_bytes: bytes of the sparse-attention indexer's key for each token; 0 for none.

        Raises:
            ConfigError: a number outside its limits, sinks without a window or not fewer than it has tokens.
        """
        require_count("num_kv_heads", num_kv_heads)
        require_count("head_dim", head_dim)
        if value_dim is not None:
            require_count("value_dim", value_dim)
        if window is not None:
            require_count("window", window)
        require_count("sinks", sinks, lowest=0)
        if sinks and (window is None or sinks >= window):
            raise ConfigError(f"sinks={sinks} with window={window}: sinks are the part of a window that never leaves it; give a window of "
                              "more tokens, or no sinks")
        require_count("scale_bytes", scale_bytes, lowest=0)
        require_count("indexer_bytes", indexer_bytes, lowest=0)
        return cls("attention", num_kv_heads, head_dim, value_dim or head_dim, window, sinks, dtype, scale_bytes=scale_bytes,
                   indexer_bytes=indexer_bytes)

    @classmethod
    def mla(cls, latent_dim: int, rope_dim: int, dtype: str | TorchDtype | None = None, *, scale_bytes: int = 0,
            indexer_bytes: int = 0) -> LayerSpec:
        """Multi-head latent attention: per token one row of ``latent_dim + rope_dim`` that serves as key and value.

        ``scale_bytes`` and ``indexer_bytes`` as in :meth:`attention`, of one row and of one token.
        """
        require_count("latent_dim", latent_dim)
        require_count("rope_dim", rope_dim)
        require_count("scale_bytes", scale_bytes, lowest=0)
        require_count("indexer_bytes", indexer_bytes, lowest=0)
        return cls("mla", 1, latent_dim + rope_dim, latent_dim, dtype=dtype, scale_bytes=scale_bytes, indexer_bytes=indexer_bytes)

    @classmethod
    def recurrent(cls, state_bytes: int, snapshot_interval: int) -> LayerSpec:
        """A recurrent layer: ``state_bytes`` of state, kept every ``snapshot_interval`` tokens (a multiple of the block size).

        The engine keeps the running state in the block of a sequence's last position, and while it computes a prompt it writes the
        state after the last token of each block position that has a block of its own (``block_ids`` >= 0) into that block.
        """
        require_count("state_bytes", state_bytes)
        require_count("snapshot_interval", snapshot_interval)
        return cls("recurrent", state_bytes=state_bytes, snapshot_interval=snapshot_interval, dtype="uint8")

    @classmethod
    def cross(cls, num_kv_heads: int, head_dim: int, dtype: str | TorchDtype | None = None) -> LayerSpec:
        """Cross-attention over an encoder's output, written once per request."""
        require_count("num_kv_heads", num_kv_heads)
        require_count("head_dim", head_dim)
        return cls("cross", num_kv_heads, head_dim, head_dim, dtype=dtype)

    @property
    def kv_factor(self) -> int:
        """2 for separate keys and values, 1 where one row serves as both (MLA) and for recurrent state."""
        return 1 if self.kind in ("mla", "recurrent") else 2

    @property
    def is_split(self) -> bool:
        """Whether keys and values have different widths and therefore tensors of their own."""
        return self.kv_factor == 2 and self.value_dim != self.head_dim
