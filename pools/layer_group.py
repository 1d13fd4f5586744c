"""``LayerGroup``: layers that share pools, and the shape of their blocks (design: public names)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvtier.pools.block_sections import BlockSection, sections_of
from kvtier.pools.layer_spec import DTYPE_BYTES, LayerSpec
from kvtier.pools.sequence_blocks import block_positions, blocks_per_sequence, sink_bubble


@dataclass(frozen=True)
class LayerGroup:
    """Layers of equal kind, window, sinks, shape and dtype: one set of pools, one block id space."""

    number: int
    spec: LayerSpec
    layers: tuple[int, ...]  #: model layer numbers, ascending
    tokens_per_block: int

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kind(self) -> str:
        """"attention", "mla", "recurrent" or "cross"."""
        return self.spec.kind

    @property
    def window(self) -> int | None:
        """Tokens that a token sees, itself included; None for all."""
        return self.spec.window

    @property
    def sinks(self) -> int:
        return self.spec.sinks

    @property
    def sink_bubble(self) -> int:
        """Empty places behind the sinks, up to a block boundary; a token t beyond the sinks has its place at t + bubble."""
        return sink_bubble(self.spec.sinks, self.spec.window, self.tokens_per_block)

    @property
    def snapshot_interval(self) -> int:
        """Tokens between two kept states, a multiple of ``tokens_per_block``; 0 for groups that are not recurrent."""
        return self.spec.snapshot_interval

    @property
    def dtype(self) -> str:
        """Storage dtype by torch's name."""
        assert isinstance(self.spec.dtype, str)
        return self.spec.dtype

    @property
    def kv_factor(self) -> int:
        """2 for separate keys and values, 1 where one row serves as both (MLA) and for recurrent state."""
        return self.spec.kv_factor

    @property
    def is_split(self) -> bool:
        """Whether keys and values have different widths and therefore tensors of their own."""
        return self.spec.is_split

    def max_blocks(self, max_seq_len: int) -> int:
        """Block positions of the longest sequence: the width of this group's block table.

        Pools are linear, so a position counts also when its block has left the window. For cross-attention pass the
        longest encoder output.
        """
        return block_positions(max_seq_len, self.spec.sinks, self.spec.window, self.tokens_per_block)

    def blocks_per_sequence(self, seq_len: int) -> int:
        """Blocks that one beam of a sequence holds at most at one time; see ``kvtier.pools.sequence_blocks``."""
        return blocks_per_sequence(seq_len, self.spec.sinks, self.spec.window, self.tokens_per_block)

    @cached_property
    def sections(self) -> tuple[BlockSection, ...]:
        """What a block consists of; the first is keys and values (or keys, or state)."""
        return sections_of(self.spec, self.num_layers, self.tokens_per_block)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block: all layers of the group, keys and values, and what lies beside them."""
        last = self.sections[-1]
        return last.offset + last.num_bytes

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """``(layers, kv_factor, heads, tokens_per_block, head_dim)`` of one block; one layer's page is the last three.

        Of attention whose keys and values have one width; others: see ``sections``.
        """
        return (self.num_layers, self.kv_factor, self.spec.num_kv_heads, self.tokens_per_block, self.spec.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one layer's keys in one block."""
        return self.spec.num_kv_heads * self.tokens_per_block * self.spec.head_dim * DTYPE_BYTES[self.dtype]

    def copied_bytes(self, num_tokens: int) -> int:
        """Bytes that a copy of a block's first tokens moves; 0, or all tokens, for the whole block."""
        if not 0 < num_tokens < self.tokens_per_block:
            return self.block_bytes
        return sum(section.num_bytes // self.tokens_per_block * num_tokens if section.is_by_token else section.num_bytes
                   for section in self.sections)

    # -- block tables --------------------------------------------------------------------------------------------------

    @property
    def table_layers(self) -> int:
        """By how many layers a table entry counts: the group's, or 1 where a kernel is given one layer's pages (recurrent)."""
        return 1 if self.spec.kind == "recurrent" else self.num_layers

    @property
    def table_factor(self) -> int:
        """Pages of one layer and block in one page tensor: 2 where keys and values lie in the same one, otherwise 1.

        It is what kernels call ``kv_factor``: entry = slot * table_layers * table_factor + field, and a kernel adds
        layer * table_factor.
        """
        return 1 if self.spec.is_split else self.kv_factor

    def describe(self) -> str:
        """In a few words, for messages."""
        spec = self.spec
        if spec.kind == "recurrent":
            return f"recurrent, {spec.state_bytes} bytes every {spec.snapshot_interval} tokens"
        window = "" if spec.kind != "attention" else " full" if spec.window is None else f" window={spec.window}"
        sinks = f" sinks={spec.sinks}" if spec.sinks else ""
        return f"{spec.kind}{window}{sinks}, {spec.num_kv_heads}x{spec.head_dim} {spec.dtype}"
