"""Paged attention in plain torch, row by row. See the package for shapes.

A row's pages are gathered once into [2, G, context, D] (no more than the context: what lies behind it is never read).
The r = H / G query heads of a KV head stand below one another, so that keys and values are used as they are. Queries
go in blocks of 64 tokens, which bounds the mask and, since rows start on multiples of 64, makes the arithmetic of a
token independent of how its prompt was cut.

Letters beside the package's: r query heads per KV head, n tokens of a row, c its context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaserve.ops.rows import ExtendRows, PrefillRows

PAGE = 64
QUERY_BLOCK = 64


def write(k_TGD: Tensor, v_TGD: Tensor, pages: Tensor, kv_slots_T: Tensor) -> None:
    kv_TG2D = torch.stack((k_TGD, v_TGD), dim=2)
    if pages.dtype == torch.float8_e4m3fn:
        limit = torch.finfo(pages.dtype).max
        kv_TG2D = kv_TG2D.clamp_(-limit, limit)
    if kv_TG2D.dtype != pages.dtype:
        kv_TG2D = kv_TG2D.to(pages.dtype)
    kv_TG2D, pages = _as_storage(kv_TG2D), _as_storage(pages)
    pages.permute(0, 3, 1, 2, 4).index_put_((kv_slots_T // PAGE, kv_slots_T % PAGE), kv_TG2D)


def prefill(q_THD: Tensor, pages: Tensor, rows: PrefillRows, scale: float, first_key: int) -> Tensor:
    o_THD = torch.empty_like(q_THD)
    for row, start in enumerate(rows.starts):
        tokens = slice(rows.offsets[row], rows.offsets[row + 1])
        kv_2Gc = _gather(pages, rows.page_table_RP[row], start + tokens.stop - tokens.start)
        _attend(q_THD[tokens], kv_2Gc, start, first_key, scale, o_THD[tokens])
    return o_THD


def extend(q_THD: Tensor, pages: Tensor, rows: ExtendRows, scale: float, first_key: int) -> Tensor:
    if rows.width == 1:
        return _decode(q_THD, pages, rows, scale, first_key)
    o_THD = torch.empty_like(q_THD)
    for row, (context, num_new) in enumerate(zip(rows.contexts, rows.num_new, strict=True)):
        kv_2Gc = _gather(pages, rows.page_table_RP[row], context)
        first, stop = row * rows.width, (row + 1) * rows.width
        real = slice(first, first + num_new)
        _attend(q_THD[real], kv_2Gc, context - num_new, first_key, scale, o_THD[real])
        o_THD[real.stop : stop] = 0
    return o_THD


def _decode(q_RHD: Tensor, pages: Tensor, rows: ExtendRows, scale: float, first_key: int) -> Tensor:
    """`extend` of one token a row, in as few calls as it takes."""
    storage, num_kv_heads = _as_storage(pages).permute(2, 1, 0, 3, 4), pages.shape[1]
    q_R1GrD = q_RHD.float().view(rows.num_rows, 1, num_kv_heads, -1, q_RHD.shape[2])
    outputs = []
    for q, page_ids, context in zip(q_R1GrD.unbind(), rows.page_table_RP.unbind(), rows.contexts, strict=True):
        kv_2GnpD = storage.index_select(2, page_ids[: -(-context // PAGE)]).view(pages.dtype)
        first = min(first_key, context - 1)
        k, v = kv_2GnpD.flatten(2, 3).unsqueeze(1).narrow(3, first, context - first).float().unbind()
        outputs.append(F.scaled_dot_product_attention(q, k, v, scale=scale))
    o_RHD = torch.cat(outputs).view(q_RHD.shape)
    return o_RHD if q_RHD.dtype == torch.float32 else o_RHD.to(q_RHD.dtype)


def _gather(pages: Tensor, page_ids: Tensor, context: int) -> Tensor:
    """Keys and values of a row: float32 [2, G, context, D]."""
    page_ids = page_ids[: -(-context // PAGE)]
    picked = _as_storage(pages).permute(2, 1, 0, 3, 4).index_select(2, page_ids).view(pages.dtype)
    return picked.flatten(2, 3)[:, :, :context].float()


def _attend(q_nHD: Tensor, kv_2Gc: Tensor, start: int, first_key: int, scale: float, o_nHD: Tensor) -> None:
    """Query i sees positions first_key .. start + i of kv, or itself alone where that is nothing; writes o."""
    by_group = (kv_2Gc.shape[1], q_nHD.shape[1] // kv_2Gc.shape[1])
    q_GnrD = q_nHD.float().unflatten(1, by_group).transpose(0, 1)
    o_GnrD = o_nHD.unflatten(1, by_group).transpose(0, 1)
    if start < first_key:
        alone = min(first_key - start, q_nHD.shape[0])
        o_GnrD[:, :alone] = kv_2Gc[1, :, start : start + alone].unsqueeze(2)
        start, q_GnrD, o_GnrD = start + alone, q_GnrD[:, alone:], o_GnrD[:, alone:]
    if first_key:
        start, kv_2Gc = start - first_key, kv_2Gc[:, :, first_key:]
    _attend_in_blocks(q_GnrD, kv_2Gc.unsqueeze(1), start, scale, o_GnrD)


def _attend_in_blocks(q_GnrD: Tensor, kv_21Gc: Tensor, start: int, scale: float, o_GnrD: Tensor) -> None:
    """Query i sees the first start + i + 1 keys."""
    num_kv_heads, num_tokens, group, head_dim = q_GnrD.shape
    mask = _Mask.of(num_tokens, start, group, q_GnrD.device) if num_tokens > 1 else None
    for first in range(0, num_tokens, QUERY_BLOCK):
        stop = min(first + QUERY_BLOCK, num_tokens)
        q = q_GnrD[:, first:stop].reshape(1, num_kv_heads, -1, head_dim)
        k, v = kv_21Gc[:, :, :, : start + stop].unbind()
        visible = None if mask is None else mask.block(start + first, stop - first)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
        o_GnrD[:, first:stop] = o.view(num_kv_heads, stop - first, group, head_dim)


@dataclass(frozen=True, slots=True)
class _Mask:
    """One additive mask that serves every block of a row: zero, and -inf above a diagonal that starts at `before`."""

    mask_brc: Tensor
    before: int

    @classmethod
    def of(cls, num_tokens: int, start: int, group: int, device: torch.device) -> _Mask:
        block = min(num_tokens, QUERY_BLOCK)
        before = start + (num_tokens - 1) // QUERY_BLOCK * QUERY_BLOCK
        mask_brc = torch.zeros(block, group, before + block, device=device)
        mask_brc[:, :, before:] = torch.full((block, block), -torch.inf, device=device).triu_(1).unsqueeze(1)
        return cls(mask_brc, before)

    def block(self, before: int, num_tokens: int) -> Tensor:
        """[num_tokens * r, before + num_tokens]: token i sees the `before` positions and those of the block up to i."""
        return self.mask_brc[:num_tokens, :, self.before - before : self.before + num_tokens].flatten(0, 1)


def _as_storage(x: Tensor) -> Tensor:
    """x itself, or its bytes where torch cannot index the dtype."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
