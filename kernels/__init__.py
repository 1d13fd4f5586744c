"""What runs on tensors: paged append, paged attention, offset tables, partial block copies, token moves (design: rooms).

Every kernel is one module with a plain reference, a torch path and, where there is one yet, a Triton kernel in a module
of its own that is imported only when a GPU asks for it. :mod:`kvtier.kernels.dispatch` is the one place that chooses.
"""

from __future__ import annotations

from kvtier.kernels.append import write_kv
from kvtier.kernels.attention import attention_decode, attention_prefill
from kvtier.kernels.checks import NULL_ENTRY
from kvtier.kernels.offsets import OffsetTable
from kvtier.kernels.partial_copy import copy_partial_blocks
from kvtier.kernels.token_moves import move_tokens

__all__ = ["NULL_ENTRY", "OffsetTable", "attention_decode", "attention_prefill", "copy_partial_blocks", "move_tokens",
           "write_kv"]
