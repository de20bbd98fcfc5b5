"""Paged attention in plain torch. See the package for shapes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaserve.ops.rows import ExtendRows, PrefillRows

PAGE = 64
FP8_MAX = 448.0


def write(k_TGD: Tensor, v_TGD: Tensor, pages: Tensor, kv_slots_T: Tensor) -> None:
    kv_TG2D = torch.stack((k_TGD, v_TGD), dim=2)
    by_token = pages.permute(0, 3, 1, 2, 4)
    if pages.dtype == torch.float8_e4m3fn:
        kv_TG2D = kv_TG2D.clamp(-FP8_MAX, FP8_MAX).to(pages.dtype).view(torch.uint8)
        by_token = by_token.view(torch.uint8)
    by_token[kv_slots_T // PAGE, kv_slots_T % PAGE] = kv_TG2D.to(by_token.dtype)


def prefill(q_THD: Tensor, pages: Tensor, rows: PrefillRows, scale: float, first_key: int = 0) -> Tensor:
    outputs = []
    for row, start in enumerate(rows.starts):
        q = q_THD[rows.offsets[row] : rows.offsets[row + 1]]
        outputs.append(_attend(q, pages, rows.page_table_RP[row], start, start + q.shape[0], scale, first_key))
    return torch.cat(outputs)


def extend(q_THD: Tensor, pages: Tensor, rows: ExtendRows, scale: float, first_key: int = 0) -> Tensor:
    outputs = []
    for row, q in enumerate(q_THD.split(rows.width)):
        start = rows.contexts[row] - rows.num_new[row]
        outputs.append(_attend(q, pages, rows.page_table_RP[row], start, rows.contexts[row], scale, first_key))
    return torch.cat(outputs)


def _attend(
    q_THD: Tensor, pages: Tensor, page_ids_P: Tensor, start: int, context: int, scale: float, first_key: int
) -> Tensor:
    num_tokens, num_heads, _ = q_THD.shape
    picked = pages[page_ids_P[: -(-context // PAGE)]].float()
    k, v = picked.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :context].unbind()
    positions = torch.arange(start, start + num_tokens).unsqueeze(1)
    visible = torch.arange(context) <= positions
    if first_key:
        visible &= torch.arange(context) >= positions.clamp(max=first_key)
    group = num_heads // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    o = F.scaled_dot_product_attention(q_THD.float().transpose(0, 1), k, v, attn_mask=visible, scale=scale)
    return o.transpose(0, 1).to(q_THD.dtype)
