"""The model's layers as plain functions of their weights, for training.

Tokens of all sequences lie flat. What looks beyond its own token is apart: the convolution asks `positions`, the
recurrence and attention are called by the model between a function that enters a layer and one that leaves it. So the
two can be compiled once, whatever the number and length of sequences. Weights are float32 under their released names,
products run in the dtype that is asked for, the residual stream, norms, gates and decays in float32.

All experts are computed for every token, those not chosen with weight 0: at widths this small one product with all of
them is faster than sorting tokens.

Letters: T tokens, D model width, N and G query and KV heads, A their size, C channels of the convolution, J and H key
and value heads of GDN, K and V their sizes, E experts, F expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from training import gdn
from training.shape import Shape

Weights = dict[str, Tensor]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The family's norm, centred on zero: float32, times 1 + weight."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1.0 + weight)


def enter_gdn(
    w: Weights, x_TD: Tensor, positions_T: Tensor, shape: Shape, dtype: torch.dtype, chunk: int
) -> tuple[Tensor, ...]:
    """From the residual stream to what `gdn.scan` and `leave_gdn` take: M, B, seen, U, QK and the output gate z."""
    h = rms_norm(x_TD, w["input_layernorm.weight"], shape.eps).to(dtype)
    mixed_TC = linear(h, w["linear_attn.in_proj_qkv.weight"])
    mixed_TC = F.silu(_convolve(mixed_TC, w["linear_attn.conv1d.weight"][:, 0], positions_T))
    q, k, v = mixed_TC.split((shape.key_size, shape.key_size, shape.value_size), -1)
    q, k = _unit(q.unflatten(-1, (shape.key_heads, -1))), _unit(k.unflatten(-1, (shape.key_heads, -1)))
    v_THV = v.unflatten(-1, (shape.value_heads, -1)).to(dtype)
    beta_TH = linear(h, w["linear_attn.in_proj_b.weight"]).float().sigmoid()
    step_TH = F.softplus(linear(h, w["linear_attn.in_proj_a.weight"]).float() + w["linear_attn.dt_bias"])
    g_TH = -w["linear_attn.A_log"].exp() * step_TH
    prepared = gdn.prepare(q * shape.key_dim**-0.5, k, v_THV, g_TH, beta_TH, chunk)
    return *prepared, linear(h, w["linear_attn.in_proj_z.weight"])


def leave_gdn(
    w: Weights, x_TD: Tensor, states: Tensor, seen: Tensor, u: Tensor, qk: Tensor, z_TX: Tensor, shape: Shape
) -> tuple[Tensor, Tensor]:
    """The rest of the layer, its experts included: the residual stream, and the loss that keeps experts busy."""
    o_THV = gdn.finish(states, seen, u, qk).float()
    o_THV = o_THV * torch.rsqrt(o_THV.square().mean(-1, keepdim=True) + shape.eps) * w["linear_attn.norm.weight"]
    y_TX = o_THV.flatten(1) * F.silu(z_TX.float())
    x_TD = x_TD + linear(y_TX.to(z_TX.dtype), w["linear_attn.out_proj.weight"])
    return _add_experts(w, x_TD, shape, z_TX.dtype)


def enter_attention(
    w: Weights, x_TD: Tensor, cos_TR: Tensor, sin_TR: Tensor, shape: Shape, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [T, N, A], k and v [T, G, A], and the gate [T, N, A] of the output."""
    h = rms_norm(x_TD, w["input_layernorm.weight"], shape.eps).to(dtype)
    q, gate = linear(h, w["self_attn.q_proj.weight"]).unflatten(-1, (shape.heads, -1)).chunk(2, -1)
    k = linear(h, w["self_attn.k_proj.weight"]).unflatten(-1, (shape.kv_heads, -1))
    v = linear(h, w["self_attn.v_proj.weight"]).unflatten(-1, (shape.kv_heads, -1))
    q = _rotate(rms_norm(q, w["self_attn.q_norm.weight"], shape.eps), cos_TR, sin_TR)
    k = _rotate(rms_norm(k, w["self_attn.k_norm.weight"], shape.eps), cos_TR, sin_TR)
    return q.to(dtype), k.to(dtype), v, gate


def leave_attention(w: Weights, x_TD: Tensor, o_TNA: Tensor, gate_TNA: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    y_TX = (o_TNA.float() * gate_TNA.float().sigmoid()).flatten(1).to(gate_TNA.dtype)
    x_TD = x_TD + linear(y_TX, w["self_attn.o_proj.weight"])
    return _add_experts(w, x_TD, shape, gate_TNA.dtype)


def enter_draft(w: Weights, embedded_TD: Tensor, before_TD: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """The draft layer's residual stream from a token's embedding and the hidden of the position before it."""
    embedded = rms_norm(embedded_TD, w["mtp.pre_fc_norm_embedding.weight"], shape.eps)
    before = rms_norm(before_TD, w["mtp.pre_fc_norm_hidden.weight"], shape.eps)
    return linear(torch.cat((embedded, before), -1).to(dtype), w["mtp.fc.weight"]).float()


def final_norm(x_TD: Tensor, weight: Tensor, shape: Shape) -> Tensor:
    return rms_norm(x_TD, weight, shape.eps)


def token_losses(hidden_TD: Tensor, embed_VD: Tensor, targets_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each token, float32, and whether the greedy choice is the target."""
    logits_TV = linear(hidden_TD.to(dtype), embed_VD).float()
    losses_T = F.cross_entropy(logits_TV, targets_T, reduction="none")
    return losses_T, logits_TV.detach().argmax(-1) == targets_T


def rope_tables(num_positions: int, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, rotary_dim / 2], float32."""
    powers = torch.arange(0, shape.rotary_dim, 2, device=device, dtype=torch.float64) / shape.rotary_dim
    angles = torch.arange(num_positions, device=device, dtype=torch.float64)[:, None] * shape.rope_theta**-powers
    return angles.cos().float(), angles.sin().float()


def _convolve(x_TC: Tensor, weight_CW: Tensor, positions_T: Tensor) -> Tensor:
    """Causal depthwise convolution, float32; inputs before position 0 are zero."""
    width = weight_CW.shape[1]
    x_TC = x_TC.float()
    y_TC = x_TC * weight_CW[:, -1]
    for back in range(1, width):
        earlier_TC = F.pad(x_TC, (0, 0, back, 0))[: x_TC.shape[0]]
        y_TC = y_TC + torch.where(positions_T[:, None] >= back, earlier_TC, 0.0) * weight_CW[:, width - 1 - back]
    return y_TC


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _rotate(x_TNA: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotates the first 2R dims, pairing dim i with i + R."""
    width = cos_TR.shape[-1]
    first, second, rest = x_TNA.split((width, width, x_TNA.shape[-1] - 2 * width), -1)
    cos, sin = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def _add_experts(w: Weights, x_TD: Tensor, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    normed = rms_norm(x_TD, w["post_attention_layernorm.weight"], shape.eps)
    h = normed.to(dtype)
    weights_TE, balance = _route(F.linear(normed, w["mlp.gate.weight"]), shape.top_k)
    gate, up = linear(h, w["mlp.experts.gate_up_proj"].flatten(0, 1)).unflatten(-1, (shape.experts, 2, -1)).unbind(-2)
    inner_TEF = F.silu(gate.float()) * up.float() * weights_TE.unsqueeze(-1)
    routed = linear(inner_TEF.flatten(1).to(dtype), w["mlp.experts.down_proj"].transpose(0, 1).flatten(1))
    gate, up = linear(h, w["mlp.shared_expert.gate_proj.weight"]), linear(h, w["mlp.shared_expert.up_proj.weight"])
    share = F.linear(normed, w["mlp.shared_expert_gate.weight"]).sigmoid()
    inner_TF = F.silu(gate.float()) * up.float() * share
    shared = linear(inner_TF.to(dtype), w["mlp.shared_expert.down_proj.weight"])
    return x_TD + routed.float() + shared.float(), balance


def _route(logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """[T, E] weights, zero but for the top k (ties to the lower expert), and the load-balancing loss (1 if even)."""
    p_TE = logits_TE.softmax(-1)
    index = torch.arange(p_TE.shape[1], device=p_TE.device)
    ahead = (p_TE.unsqueeze(1) > p_TE.unsqueeze(2)) | (
        (p_TE.unsqueeze(1) == p_TE.unsqueeze(2)) & (index[None, :] < index[:, None])
    )
    chosen_TE = ahead.sum(-1) < top_k
    kept_TE = torch.where(chosen_TE, p_TE, 0.0)
    load_E = chosen_TE.float().mean(0) / top_k
    return kept_TE / kept_TE.sum(-1, keepdim=True), (load_E * p_TE.mean(0)).sum() * p_TE.shape[1]
