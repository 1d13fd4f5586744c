"""What runs on tensors: pages written and read in place, offset tables, copies of parts and rows, token moves (design: rooms).

A kernel is one module with a plain reference and a host path; its Triton kernel, where a GPU needs one, is in a module of its own
that is imported only when a GPU asks for it. :mod:`kvtier.kernels.dispatch` is the one place that chooses.
"""

from __future__ import annotations

from kvtier.kernels.append import write_kv
from kvtier.kernels.attention import attention_decode, attention_prefill, attention_prefill_batch
from kvtier.kernels.attention_plan import DecodePlan, PrefillPlan
from kvtier.kernels.block_offsets import ScratchWindow, fill_block_offsets
from kvtier.kernels.checks import NULL_ENTRY
from kvtier.kernels.dispatch import use_reference
from kvtier.kernels.draft_mask import mask_of_parents, mask_of_places
from kvtier.kernels.fused_write import fused_write
from kvtier.kernels.gather import gather_tokens
from kvtier.kernels.indexer_scatter import scatter_indexer_keys
from kvtier.kernels.mla_append import append_mla
from kvtier.kernels.mla_attention import mla_decode, mla_prefill
from kvtier.kernels.nvfp4 import dequantise_nvfp4, quantise_nvfp4
from kvtier.kernels.offsets import OffsetTable
from kvtier.kernels.page_list import table_of_page_list
from kvtier.kernels.partial_copy import copy_partial_blocks
from kvtier.kernels.ring_map import RingMap
from kvtier.kernels.rotary import Rotary, RotaryStyle
from kvtier.kernels.token_moves import move_tokens
from kvtier.kernels.value_tail import zero_value_tail
from kvtier.kernels.visibility import Visibility
from kvtier.kernels.write_plan import WritePlan, plan_write

__all__ = [
    "NULL_ENTRY", "DecodePlan", "OffsetTable", "PrefillPlan", "RingMap", "Rotary", "RotaryStyle", "ScratchWindow", "Visibility",
    "WritePlan", "append_mla", "attention_decode", "attention_prefill", "attention_prefill_batch", "copy_partial_blocks",
    "dequantise_nvfp4", "fill_block_offsets", "fused_write", "gather_tokens", "mask_of_parents", "mask_of_places", "mla_decode",
    "mla_prefill", "move_tokens", "plan_write", "quantise_nvfp4", "scatter_indexer_keys", "table_of_page_list", "use_reference",
    "write_kv", "zero_value_tail",
]
