"""MLA append: a token's compressed latent and its rotary key become one row, which serves as key and value (spec: MLA append).

Multi-head latent attention of DeepSeek-V2; the operation is FlashInfer's ``append_paged_mla_kv_cache``. No row is put together in
between: both parts are written straight to their places.
"""

from __future__ import annotations

import torch

from kvtier.errors import RequestError
from kvtier.kernels.append import write_kv
from kvtier.kernels.checks import check_shape

_KERNEL = "append_mla"


def append_mla(pages: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor, table: torch.Tensor, sequence_of_token: torch.Tensor,
               positions: torch.Tensor, *, layer: int, num_layers: int | None = None, check_values: bool | None = None,
               scale_pages: torch.Tensor | None = None, scale: float = 1.0, first_writable: torch.Tensor | None = None) -> None:
    """Write the latent rows of ``nnz`` tokens of one layer into their pages.

    Args:
        pages: ``[num_pages, 1, tokens_per_block, latent_dim + rope_dim]``, any strides, changed in place; storage types as of
            :func:`~kvtier.kernels.append.write_kv`.
        ckv: ``[nnz, latent_dim]``, any strides.
        kpe: ``[nnz, rope_dim]``, any strides, after rotation; rope_dim may be 0.
        table, sequence_of_token, positions, layer, num_layers, check_values, first_writable: as of ``write_kv``.
        scale_pages: uint8 ``[num_pages, 1, tokens_per_block, (latent_dim + rope_dim) / 16]`` with NVFP4.
        scale: what stored rows are multiplied by to be read; one for the row, because one row is key and value.

    Raises:
        RequestError: as of ``write_kv``; NVFP4 with a latent_dim that is no multiple of 16. Nothing has been written then.
    """
    check_shape(_KERNEL, "ckv", ckv, (None, None), "nnz, latent_dim")
    check_shape(_KERNEL, "kpe", kpe, (ckv.shape[0], None), "nnz, rope_dim")
    latent, rope = ckv.shape[1], kpe.shape[1]
    packed = 1 if scale_pages is None else 2
    check_shape(_KERNEL, "pages", pages, (None, 1, None, (latent + rope) // packed),
                f"pages, 1, tokens_per_block, {'latent_dim + rope_dim' if packed == 1 else '(latent_dim + rope_dim) / 2'}")
    if packed == 2 and latent % 16:
        raise RequestError(f"{_KERNEL}: latent_dim={latent}: with NVFP4 a multiple of 16, so that no group has parts of both")
    cut, scales, rope_scales = latent // packed, scale_pages, None
    if scale_pages is not None:
        check_shape(_KERNEL, "scale_pages", scale_pages, (*pages.shape[:3], (latent + rope) // 16), "pages, 1, tokens_per_block, dim / 16")
        scales, rope_scales = scale_pages[..., :latent // 16], scale_pages[..., latent // 16:]
    if not rope:   # layers without a rotary part
        write_kv(pages, ckv.unsqueeze(1), None, table, sequence_of_token, positions, layer=layer, num_layers=num_layers, kv_factor=1,
                 check_values=check_values, scale_pages=scale_pages, key_scale=scale, value_scale=scale, first_writable=first_writable)
        return
    write_kv(pages[..., :cut], ckv.unsqueeze(1), kpe.unsqueeze(1), table, sequence_of_token, positions, layer=layer,
             num_layers=num_layers, kv_factor=1, check_values=check_values, value_pages=pages[..., cut:], scale_pages=scales,
             value_scale_pages=rope_scales, key_scale=scale, value_scale=scale, first_writable=first_writable)
