"""Mistakes of paged kernels that give no error, as changes of the source, each with a test that notices it.

``pytest -m slow tests/kernels/test_silent_mistakes.py`` puts them in one after another. What several paths can do wrong stands here for
each of them, under the same words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GPU_WRITE: Final = "test_triton_write::test_interpreted_they_leave_the_same_bytes_as_the_torch_paths"
GPU_READ: Final = "test_triton_attention::test_interpreted_they_are_attention"
GPU_CHECKSUM: Final = "test_page_checksum::test_the_kernels_interpreted_give_what_xxhash_gives"


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        says: what it is, as docs/explanation/silent-mistakes.md has it.
        file: in kernels/.
        right: what stands there once.
        wrong: what the mistake makes of it.
        noticed_by: ``file::test`` in tests/kernels.
    """

    says: str
    file: str
    right: str
    wrong: str
    noticed_by: str

    @property
    def test(self) -> str:
        """The test's name."""
        return self.noticed_by.partition("::")[2]


def _mistakes_of(says: str, *places: tuple[str, str, str, str]) -> list[Mistake]:
    return [Mistake(says, *place) for place in places]


MISTAKES: Final = [
    *_mistakes_of(
        "a chunk's second part is written over its first: `past` is left out",
        ("write_plan.py", "number = past + token - (ends[row]", "number = token - (ends[row]",
         "test_fused_write::test_a_second_chunk_comes_behind_the_first")),
    *_mistakes_of(
        "drafts are rotated by their offset alone, without `past`",
        ("write_plan.py", "past + position_offsets", "position_offsets",
         "test_fused_write::test_a_rotary_position_is_not_a_pool_position")),
    *_mistakes_of(
        "the pool position is taken for the rotary position",
        ("write_plan.py", "rotary = rotary + position_deltas[row]", "rotary = rotary * 1",
         "test_fused_write::test_a_rotary_position_is_not_a_pool_position"),
        ("write_plan.py", "rotary = rotary_positions.long()", "rotary = number",
         "test_fused_write::test_a_rotary_position_is_not_a_pool_position")),
    *_mistakes_of(
        "a token of another rank, or of padding, is written",
        ("write_plan.py", "written = written & is_owned", "written = written & True",
         "test_fused_write::test_tokens_of_another_rank_are_not_written_and_their_queries_are_prepared"),
        ("write_plan.py", "written = found < sequences", "written = found <= sequences",
         "test_write_plan::test_each_token_has_its_sequence_its_place_and_its_rotation")),
    *_mistakes_of(
        "a verification writes: `update_kv_cache=False` is not heard",
        ("fused_write.py", "stored if update_kv_cache else None", "stored",
         "test_fused_write::test_without_an_update_only_queries_are_prepared")),
    *_mistakes_of(
        "the pairs of one rotation style are taken for the other's, or a head's half for the rotated part's",
        ("rotary.py", "(slice(0, half), slice(half, width)) if self.style is RotaryStyle.HALF_SPLIT else",
         "(slice(0, half), slice(half, width)) if self.style is RotaryStyle.INTERLEAVED else",
         "test_fused_write::test_queries_keys_and_values_are_those_of_the_model"),
        ("triton_fused_write.py", "other = tl.where(is_first, dim + ROTARY_DIM // 2, dim - ROTARY_DIM // 2)",
         "other = tl.where(is_first, dim + DIM // 2, dim - DIM // 2)", GPU_WRITE)),
    *_mistakes_of(
        "queries in 8 bits are multiplied by their scale",
        ("fused_write.py", "queries, out.dtype, query_scale))\n    if stored is None",
         "queries, out.dtype, 1 / query_scale))\n    if stored is None",
         "test_fused_write::test_queries_in_eight_bits")),
    *_mistakes_of(
        "values are stored, or read, with the scale of keys",
        ("append.py", "stored.storage, stored.value_scale, runs.value_pages, runs, value)",
         "stored.storage, stored.key_scale, runs.value_pages, runs, value)",
         "test_append_storage::test_values_are_stored_with_the_scale_of_values"),
        ("triton_append.py", "store_rows(rows, head, placed, value_page, inside, value_scale,",
         "store_rows(rows, head, placed, value_page, inside, key_scale,", GPU_WRITE),
        ("triton_fused_write.py", "store_rows(values, head, placed, value_page, inside, value_scale,",
         "store_rows(values, head, placed, value_page, inside, key_scale,", GPU_WRITE),
        ("page_reader.py", "stored.value_scale if is_value else stored.key_scale", "stored.key_scale",
         "test_attention_storage::test_the_scale_of_keys_is_not_that_of_values"),
        ("gather.py", "scale = stored.value_scale if is_value else stored.key_scale\n    if stored.storage is Storage.NVFP4",
         "scale = stored.key_scale\n    if stored.storage is Storage.NVFP4",
         "test_gather::test_the_first_tokens_are_what_was_written"),
        ("triton_attention.py", "share = value_scale / tl", "share = 1.0 / tl", GPU_READ)),
    *_mistakes_of(
        "values are read with the block scales of keys",
        ("page_reader.py", "stored.value_block_scales if is_value else stored.key_block_scales", "stored.key_block_scales",
         "test_attention_storage::test_values_in_a_pool_of_their_own_have_block_scales_of_their_own"),
        ("triton_attention.py", "row_values = read_rows(value_pages, value_scales,", "row_values = read_rows(value_pages, key_scales,",
         GPU_READ)),
    *_mistakes_of(
        "codes of 4 bits are made for the scale before it was rounded",
        ("nvfp4.py", "step = (scales.float() * one)[..., None]", "step = (amax / LARGEST_E2M1)[..., None]",
         "test_nvfp4::test_codes_and_scales_are_those_of_the_model"),
        ("triton_rows.py", "e4m3_to_float(tl.where(has_nan, 0, block_scales.to(tl.int32)).to(tl.uint8), NATIVE) * scale)",
         "tl.minimum(quotient, 448.0) * scale)", GPU_WRITE)),
    *_mistakes_of(
        "the first of two codes is put into the high half of the byte",
        ("nvfp4.py", "return codes[..., ::2] | (codes[..., 1::2] << 4), scales.view(torch.uint8)",
         "return codes[..., 1::2] | (codes[..., ::2] << 4), scales.view(torch.uint8)",
         "test_nvfp4::test_codes_and_scales_are_those_of_the_model")),
    *_mistakes_of(
        "a group of zeros gets codes that are none",
        ("nvfp4.py", "torch.where(step > 0, codes, 0)", "torch.where(step >= 0, codes, 0)",
         "test_nvfp4::test_nothing_to_scale_by_gives_zeros")),
    *_mistakes_of(
        "a run of tokens goes on into the next sequence, or the next block",
        ("places.py", "begins[1:] |= rows[1:] != rows[:-1]", "begins[1:] |= rows[1:] < 0",
         "test_places::test_a_run_is_a_stretch_of_one_block_and_all_runs_are_all_tokens"),
        ("places.py", "begins[1:] |= np.bitwise_and(positions[1:], tokens_per_block - 1, out=numbers) == 0", "begins[1:] |= numbers == 0",
         "test_places::test_a_prefill_lands_where_single_tokens_would")),
    *_mistakes_of(
        "of several requests one's entry is judged by another's row of the table",
        ("places.py", "entries = table[runs.rows, :, runs.blocks]\n", "entries = table[runs.rows * 0, :, runs.blocks]\n",
         "test_fused_write::test_a_bad_entry_of_one_of_several_sequences_leaves_everything_untouched"),
        ("places.py", "entries = table[runs.rows, :, runs.blocks]\n", "entries = table[runs.rows * 0, :, runs.blocks]\n",
         "test_append::test_a_bad_entry_of_a_long_prompt_is_refused_before_anything_is_written")),
    *_mistakes_of(
        "behind the end of a row the next request's entry is read",
        ("triton_append.py", "(position >= 0) & (block < max_blocks)", "(position >= 0)", GPU_WRITE),
        ("triton_value_tail.py", "(first > 0) & (block < max_blocks)", "(first > 0)", GPU_WRITE)),
    *_mistakes_of(
        "a null entry is judged after the layer was added, and is somebody's page",
        ("checks.py", "bad: npt.NDArray[np.bool_] = (entries < 0)", "bad: npt.NDArray[np.bool_] = (entries + self.offset < 0)",
         "test_append::test_a_null_entry_plus_the_layer_offset_is_not_a_page"),
        ("places.py", "np.all((entries >= 0)", "np.all((entries + layer_offset >= 0)",
         "test_append::test_unchecked_a_token_without_a_page_is_left_out_whole"),
        ("triton_append.py", "placed & (value_entry >= 0)", "placed & (value_entry + layer_offset >= 0)", GPU_WRITE),
        ("triton_pages.py", "tl.where((entry >= 0) &", "tl.where((entry + layer_offset >= 0) &", GPU_READ)),
    *_mistakes_of(
        "a null entry plus the field of values is a page",
        ("block_offsets.py", "keys[missing] = values[missing] = NULL_ENTRY", "keys[missing] = NULL_ENTRY",
         "test_offsets::test_an_entry_is_the_first_page_of_its_field_and_the_rest_is_null"),
        ("triton_block_offsets.py", "tl.where(is_there, entry + value_field, -1)", "tl.where(is_there, entry, -1) + value_field",
         GPU_WRITE)),
    *_mistakes_of(
        "a reused block is written",
        ("places.py", "wrong = runs.positions < first ", "wrong = runs.positions < 0 ",
         "test_fused_write::test_a_reused_block_is_never_written"),
        ("places.py", "runs.positions, ends)", "runs.positions, runs.positions)",
         "test_append::test_what_is_reused_is_left_out_and_the_rest_is_written"),
        ("triton_append.py", "placed & (position >= tl.load(first_writable", "placed & (position >= 0 * tl.load(first_writable",
         GPU_WRITE)),
    *_mistakes_of(
        "the tail of values keeps what was there: its first row, a layer, or the block scales",
        ("value_tail.py", "is_tail = (inside >= (lengths", "is_tail = (inside > (lengths",
         "test_value_tail::test_only_value_rows_behind_the_end_become_zero"),
        ("value_tail.py", "torch.arange(layer_offsets.start, layer_offsets.stop, layer_offsets.step, device=table.device)",
         "torch.arange(layer_offsets.start, layer_offsets.start + 1, device=table.device)",
         "test_value_tail::test_only_value_rows_behind_the_end_become_zero"),
        ("value_tail.py", "    for tensor in (values, block_scales):\n        if tensor is not None:\n            zeroed",
         "    for tensor in (values,):\n        if tensor is not None:\n            zeroed",
         "test_value_tail::test_codes_and_block_scales_are_zeroed_together"),
        ("triton_value_tail.py", "for inside in range(first, TOKENS_PER_BLOCK)", "for inside in range(first + 1, TOKENS_PER_BLOCK)",
         GPU_WRITE)),
    *_mistakes_of(
        "rows that nobody wrote reach the result as 0 times NaN",
        ("decode_cpu.py", "piece[:, begin:end].zero_()", "piece[:, begin:begin].zero_()",
         "test_attention_grid::test_decode_is_attention_over_what_is_visible"),
        ("prefill_cpu.py", "data[:, hidden_from:first].zero_()", "data[:, first:first].zero_()",
         "test_attention::test_rows_that_nobody_wrote_never_reach_the_result")),
    *_mistakes_of(
        "writer and reader have different maps of a ring",
        ("write_plan.py", "places = ring.places(number)", "places = number % ring.capacity",
         "test_write_plan::test_each_token_has_its_sequence_its_place_and_its_rotation"),
        ("visibility.py", "return self.ring.places(tokens).long()", "return (tokens % (self.sinks + self.ring.ring)).long()",
         "test_attention_windows::test_a_ring_has_the_same_members_though_tokens_overwrite_each_other"),
        ("triton_pages.py", "behind = behind % RING", "behind = token % RING", GPU_READ)),
    *_mistakes_of(
        "the bubble behind the sinks is forgotten",
        ("ring_map.py", "return torch.where(tokens < self.sinks, tokens, self.sinks + self.bubble +",
         "return torch.where(tokens < self.sinks, tokens, self.sinks +",
         "test_ring_map::test_tokens_of_a_window_and_sinks_have_different_places_and_the_sinks_block_is_theirs_alone"),
        ("triton_pages.py", "behind + SINKS + BUBBLE)", "behind + SINKS)", GPU_READ)),
    *_mistakes_of(
        "of two tokens with one place on a ring both are written",
        ("write_plan.py", "written & ring.is_kept(number, cache_lengths.long()[row])", "written & (number >= 0)",
         "test_write_plan::test_each_token_has_its_sequence_its_place_and_its_rotation")),
    *_mistakes_of(
        "a window is longer by one, does not count its sinks, or loses them",
        ("visibility.py", "(keys > queries - self.reach))", "(keys >= queries - self.reach))",
         "test_attention_windows::test_the_members_of_a_window_are_the_same_however_a_text_is_computed"),
        ("visibility.py", "max(self.sinks, first - self.reach + 1)", "max(self.sinks, first - self.reach)",
         "test_attention_windows::test_the_members_of_a_window_are_the_same_however_a_text_is_computed"),
        ("visibility.py", "None if self.window is None else self.window - self.sinks", "self.window",
         "test_attention_windows::test_the_members_of_a_window_are_the_same_however_a_text_is_computed"),
        ("visibility.py", "seen & ((keys < self.sinks) | (keys >", "seen & ((keys < 0) | (keys >",
         "test_attention_windows::test_the_members_of_a_window_are_the_same_however_a_text_is_computed"),
        ("triton_attention.py", "(token > lowest - REACH))", "(token >= lowest - REACH))", GPU_READ),
        ("triton_attention.py", "(key_position[None, :] > position[:, None] - REACH))",
         "(key_position[None, :] >= position[:, None] - REACH))",
         GPU_READ)),
    *_mistakes_of(
        "a query sees the token behind it",
        ("visibility.py", "seen & (keys <= queries)", "seen & (keys <= queries + 1)", "test_attention::test_prefill_matches_the_reference"),
        ("triton_attention.py", "(key_position[None, :] <= position[:, None])", "(key_position[None, :] <= position[:, None] + 1)",
         GPU_READ)),
    *_mistakes_of(
        "cross-attention is causal, or counts its queries as keys",
        ("visibility.py", 'is_causal=spec.kind != "cross"', "is_causal=True",
         "test_attention_windows::test_visibility_is_what_a_layer_says"),
        ("attention_plan.py", "before + end - begin if is_causal else before", "before + end - begin",
         "test_attention_grid::test_cross_attention_sees_all_keys_whatever_the_position")),
    *_mistakes_of(
        "a draft sees another path's, or is counted by its place and not by its depth",
        ("prefill_cpu.py", "& (~is_draft | self._drafts[draft, key])", "& (~is_draft | (draft >= 0))",
         "test_attention_sharing::test_a_draft_sees_its_path_and_what_is_before_the_drafts"),
        ("prefill_cpu.py", "query_positions = past + self._drafts_depths[draft]", "query_positions = past + draft",
         "test_attention_sharing::test_a_draft_sees_its_path_and_what_is_before_the_drafts"),
        ("triton_attention.py", "seen = seen & (on_path != 0)", "seen = seen & (on_path != 7)", GPU_READ),
        ("triton_attention.py", "key_position = tl.where(is_draft, past + depth, token)", "key_position = token", GPU_READ)),
    *_mistakes_of(
        "an accepted path's token is moved after its place was overwritten",
        ("token_moves.py", "origins[destination] = origins.get(source, source)", "origins[destination] = source",
         "test_token_moves::test_moves_that_overlap_have_the_result_of_one_after_the_other")),
    *_mistakes_of(
        "a beam reads its own pages where another's are meant",
        ("decode_cpu.py", "torch.where(source[tokens] < 0, sequence, source[tokens].long())",
         "torch.where(source[tokens] < 0, sequence, sequence)",
         "test_attention_sharing::test_beams_read_tokens_from_the_pages_of_other_rows"),
        ("triton_pages.py", "row = tl.where(source < 0, row, source)", "row = tl.where(source < 0, row, row)", GPU_READ)),
    *_mistakes_of(
        "query heads are given to the wrong heads of keys",
        ("decode_cpu.py", "rows = query.reshape(sequences, heads, query_heads // heads, head_dim)",
         "rows = query.reshape(sequences, query_heads // heads, heads, head_dim).transpose(1, 2)",
         "test_attention::test_decode_matches_the_reference"),
        ("triton_attention.py", "head = kv_head * GROUP + row % GROUP", "head = kv_head + row % GROUP * tl.num_programs(1)", GPU_READ)),
    *_mistakes_of(
        "a row without a visible key is NaN",
        ("prefill_cpu.py", "shift = torch.where(largest == -math.inf, 0, largest)", "shift = largest",
         "test_attention_sharing::test_a_draft_that_sees_nothing_gives_zeros"),
        ("prefill_cpu.py", "self._values / torch.where(self._sums == 0, 1, self._sums)", "self._values / self._sums",
         "test_attention_sharing::test_a_draft_that_sees_nothing_gives_zeros"),
        ("triton_attention.py", "share = value_scale / tl.where(sums == 0, 1.0, sums)", "share = value_scale / sums", GPU_READ)),
    *_mistakes_of(
        "a score that is hidden is capped, and so visible again",
        ("decode_cpu.py", "            scores[..., begin:end] = -math.inf\n        piece",
         "            scores[..., begin:end] = -(soft_cap or math.inf)\n        piece",
         "test_attention_grid::test_decode_is_attention_over_what_is_visible")),
    *_mistakes_of(
        "parts of a sequence are weighted by a logarithm of another base, or the newest tokens are in none",
        ("split_kv.py", "weights = torch.exp2(log_sums - shift)", "weights = torch.exp(log_sums - shift)",
         "test_attention_plan::test_parts_are_joined_by_their_log_sums_in_any_number_and_order"),
        ("triton_attention.py", "largest + tl.log2(", "largest + tl.log(", GPU_READ),
        ("triton_attention.py", "tl.where(part == tl.num_programs(2) - 1, count, tl.minimum(count, start + split_tokens))",
         "tl.minimum(count, start + split_tokens)", GPU_READ)),
    *_mistakes_of(
        "a last page counts as full",
        ("page_list.py", "(counts - 1) * tokens_per_block + last_page_len", "counts * tokens_per_block",
         "test_page_list::test_a_list_is_a_table_and_lengths")),
    *_mistakes_of(
        "a null page is read as another one, or a value as a key",
        ("gather.py", "if entry == NULL_ENTRY:\n        return None", "if entry == NULL_ENTRY:\n        return 0",
         "test_gather::test_a_null_page_is_zeros"),
        ("gather.py", "rows[page_of_token < 0] = 0", "rows[page_of_token < -1] = 0",
         "test_gather::test_a_null_page_is_zeros"),
        ("gather.py", "entries = table_row[field,", "entries = table_row[0,",
         "test_gather::test_the_first_tokens_are_what_was_written"),
        ("triton_gather.py", "mask=mask & (page >= 0)", "mask=mask", GPU_WRITE)),
    *_mistakes_of(
        "an offset of 32 bits overflows in a large pool",
        ("page_reader.py", "pages = entries.long() + self._offset", "pages = entries + self._offset",
         "test_attention_grid::test_a_pool_beyond_the_32nd_bit_of_an_offset"),
        ("triton_append.py", "token = tl.program_id(0).to(tl.int64)\n    sequence", "token = tl.program_id(0)\n    sequence",
         "test_compile_check::test_no_offset_is_multiplied_in_32_bits")),
    *_mistakes_of(
        "a table is looked up once more after it was checked, and may be the next step's",
        ("places.py", "        total = int(runs.lengths.sum())",
         "        entries = self.table.numpy()[runs.rows, :, runs.blocks]\n        total = int(runs.lengths.sum())",
         "test_odd_tensors::test_what_is_written_to_is_what_was_checked")),
    *_mistakes_of(
        "rows are copied by address from where they do not lie",
        ("stored_rows.py", "(runs.lengths.cumsum() - runs.lengths) * row_step", "np.arange(len(numbers)) * row_step",
         "test_host_copy::test_both_ways_to_write_tokens_leave_the_same_pool"),
        ("checks.py", " and (tensor.is_neg() or tensor.is_conj())", " and False",
         "test_odd_tensors::test_a_tensor_whose_memory_does_not_hold_its_numbers_is_refused_by_name")),
    *_mistakes_of(
        "of a block that is copied in part, a row too many or the wrong fields are copied; no tokens are not the whole block",
        ("partial_copy.py", "num_tokens if 0 < num_tokens < tokens_per_block else tokens_per_block",
         "max(0, min(num_tokens, tokens_per_block))",
         "test_partial_copy::test_no_tokens_or_too_many_mean_the_whole_block"),
        ("partial_copy.py", "destination[:, :, :, :, :tokens], source[:, :, :, :, :tokens]",
         "destination[:, :, :1, :, :tokens], source[:, :, :1, :, :tokens]",
         "test_partial_copy::test_the_first_tokens_of_every_head_are_copied_and_nothing_else"),
        ("triton_partial_copy.py", "mask = (token < tokens) & (dim < DIM)", "mask = (token <= tokens) & (dim < DIM)", GPU_WRITE)),
    *_mistakes_of(
        "an indexer's cache is taken for contiguous, or a token is half skipped",
        ("indexer_scatter.py", "flat // d % c, flat % d] = data[is_there]", "flat // d % b, flat % d] = data[is_there]",
         "test_indexer_scatter::test_every_byte_lands_at_its_flat_place"),
        ("indexer_scatter.py", "is_there = (key_slots >= 0) & (scale_slots >= 0)", "is_there = key_slots >= 0",
         "test_indexer_scatter::test_every_byte_lands_at_its_flat_place")),
    *_mistakes_of(
        "rows, or columns, of sequences that ended stay in the table",
        ("offsets.py", "max(num_rows, self._filled_rows)", "num_rows", "test_offsets::test_rows_of_ended_sequences_become_null"),
        ("offsets.py", "max(longest, self._filled_blocks)", "longest",
         "test_offsets::test_an_entry_is_the_first_page_of_its_field_and_the_rest_is_null")),
    *_mistakes_of(
        "a table is written into a buffer that the device has still to read",
        ("staging_ring.py", "        self._wait(event)\n", "",
         "test_late_tables::test_the_table_of_a_step_is_not_overwritten_by_those_of_steps_planned_meanwhile"),
        ("staging_ring.py", "        try:\n            yield buffer\n        finally:\n            event.record()",
         "        event.record()\n        try:\n            yield buffer\n        finally:\n            pass",
         "test_late_tables::test_the_table_of_a_step_is_not_overwritten_by_those_of_steps_planned_meanwhile")),
    *_mistakes_of(
        "scratch pages are given to the wrong positions, or for good",
        ("block_offsets.py", "if begin < end:\n                joined", "if begin < end - 1:\n                joined",
         "test_block_offsets::test_each_pools_entries_are_its_pages_and_the_rest_is_null"),
        ("block_offsets.py", "joined = joined.copy()", "joined = joined[:]",
         "test_block_offsets::test_slots_are_not_changed_by_a_redirection"),
        ("triton_block_offsets.py", "scratch_row_stride + (position - begin) * scratch_slot_stride",
         "scratch_row_stride + position * scratch_slot_stride", GPU_WRITE)),
    *_mistakes_of(
        "a checksum does not depend on all bytes, or is another one on a GPU",
        ("page_checksum.py", "high = _merge(values, secret[_HIGH:", "high = _merge(values, secret[_LOW:",
         "test_page_checksum::test_the_algorithm_as_it_is_cut_up_here_is_xxh3"),
        ("triton_checksum.py", "    state += contribution(words, swapped, tl.load(secret + 24 + lane).to(tl.uint64, bitcast=True))\n", "",
         GPU_CHECKSUM),
        ("triton_checksum.py", "tl.load(block + place + (lane ^ 1), mask=is_there", "tl.load(block + place + lane, mask=is_there",
         GPU_CHECKSUM)),
]
