"""The parts that every layer of the family is made of: projections, norms, the two mixers and the dense FFN.

Tensor parallelism is declared, not computed: a Parameter says how it splits, a mixer or FFN splits its first weight
by column (whole heads) and its last by row, and sums the result over ranks once. Tokens of a step lie flat: extend
rows first, then prefill rows. Everything that treats tokens alone runs on all of them at once; only the convolution,
the recurrence and attention see rows, and are called once per kind of row that the step has.

Letters: T tokens, D model width, N and G query and KV heads of this rank, A attention head size, J and H key and
value heads of GDN on this rank, K and V their sizes, C = 2JK + HV channels of the convolution, F FFN width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deltaserve.model.config import ModelConfig
from deltaserve.model.inputs import BatchInputs, CacheTensors
from deltaserve.model.params import Parameter, Section, Split
from deltaserve.ops import attention, conv, gdn, linear, moe, norm, rope
from deltaserve.ops.rows import ExtendRows, PrefillRows
from deltaserve.parallel.mesh import Mesh

Rope = tuple[Tensor, Tensor]  # cos and sin of the step's positions, [T, rotary_dim // 2] float32 each


class Block(nn.Module):
    """An nn.Module whose call is its forward, without hooks, and whose parts are found as plain attributes.

    nn.Module's own call and attribute lookup take longer than a small operation, hundreds of times a step.
    """

    forward: Callable[..., Any]
    force: str | None = None  # the implementation that ops are told to run; None: the best one

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__call__ = cls.forward  # type: ignore[method-assign]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self._modules or name in self._parameters:
            self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.__dict__.pop(name, None)

    def prepare(self, force: str | None = None) -> None:
        """Lay the loaded weights out for this device's products, parts first. Once; changes no values."""
        self.force = force
        for module in self.children():
            for block in module if isinstance(module, nn.ModuleList) else (module,):
                if isinstance(block, Block):
                    block.prepare(force)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Moving a module to a device or dtype puts new parameters in place without setting the attributes."""
        super()._apply(fn, recurse)
        self.__dict__.update(self._parameters)
        return self


class Product(Block):
    """A weight [out, in] and the product x W^T with it."""

    def __init__(self, weight: Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.multiply: linear.Product = self._multiply_as_loaded

    def prepare(self, force: str | None = None) -> None:
        """Keep the weight only in the layout that multiplies fastest; one that others hold too stays with them."""
        self.multiply = linear.pack(self.weight, force)
        del self.weight

    def _multiply_as_loaded(self, x_TD: Tensor) -> Tensor:
        return linear.linear(x_TD, self.weight)


class Linear(Product):
    """y = x W^T; W [out, in], whole or split over ranks. A sum over ranks, where one is due, is the caller's."""

    def __init__(self, shape: tuple[int, int], mesh: Mesh, dtype: torch.dtype, split: Split | None = None) -> None:
        super().__init__(Parameter(shape, dtype, split, mesh.rank, mesh.size))

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.multiply(x_TD)


class Norm(Block):
    """RMS norm over the last dim. `scale` is float32, with the 1 of the family's zero-centred weights added."""

    def __init__(self, size: int, config: ModelConfig, mesh: Mesh) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.scale = Parameter((size,), torch.float32, None, mesh.rank, mesh.size)

    def forward(self, x: Tensor) -> Tensor:
        return norm.rms_norm(x, self.scale, self.eps, self.force)

    def add(self, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); None is the start of the residual stream."""
        if residual_TD is None:
            return norm.rms_norm(x_TD, self.scale, self.eps, self.force), x_TD
        return norm.add_rms_norm(x_TD, residual_TD, self.scale, self.eps, self.force)


class Embedding(Block):
    """The token table, split over ranks by token; a rank adds zeros for the tokens that it lacks."""

    def __init__(self, config: ModelConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.mesh = mesh
        rows = Section(config.vocab_size, config.vocab_size)
        self.first, self.stop = rows.local_range(mesh.rank, mesh.size)
        shape = (config.vocab_size, config.hidden_size)
        self.weight = Parameter(shape, dtype, Split(0, (rows,)), mesh.rank, mesh.size)
        self.rows_of: Callable[[Tensor], Tensor] = self._rows_as_loaded

    def prepare(self, force: str | None = None) -> None:
        if linear.is_for_kernels(self.weight, force):
            self.rows_of = linear.Table(self.weight)
            del self.weight

    def forward(self, ids_T: Tensor) -> Tensor:
        if self.mesh.size == 1:
            return self.rows_of(ids_T)
        absent_T = (ids_T < self.first) | (ids_T >= self.stop)
        x_TD = self.rows_of((ids_T - self.first).masked_fill(absent_T, 0))
        return self.mesh.all_reduce(x_TD.masked_fill(absent_T[:, None], 0))

    def _rows_as_loaded(self, ids_T: Tensor) -> Tensor:
        return nn.functional.embedding(ids_T, self.weight)


class Head(Product):
    """Hidden to logits. `weight` may be the token table itself (tied), and is split as it is."""

    def __init__(self, weight: Parameter, mesh: Mesh) -> None:
        super().__init__(weight)
        self.mesh = mesh

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """[T, vocabulary] float32, the same on every rank."""
        return self.mesh.all_gather(self.multiply(hidden_TD).float())


class Conv(Block):
    """Weight [C, W] of the depthwise convolution, in sections q, k, v."""

    def __init__(self, config: ModelConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        shape = (config.conv_channels, config.conv_width)
        self.weight = Parameter(shape, dtype, Split(0, _gdn_sections(config)), mesh.rank, mesh.size)

    def prepare(self, force: str | None = None) -> None:
        """One tap after the other in memory, as the op reads them; shape and values stay."""
        self.weight.data = linear.swap(self.weight.data)


def _gdn_sections(config: ModelConfig) -> tuple[Section, Section, Section]:
    """q, k and v of GDN; value heads follow their key head."""
    keys = Section(config.key_size, config.num_key_heads)
    return keys, keys, Section(config.value_size, config.num_key_heads)


class Half(Block):
    """Half of a layer: a mixer or an FFN."""

    def after(self, norm: Norm, x_TD: Tensor, residual_TD: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        """(self(norm(x + residual)), x + residual); kernels may do it all at once."""
        h_TD, residual_TD = norm.add(x_TD, residual_TD)
        return self(h_TD, *rest), residual_TD


class GatedDeltaNet(Half):
    """The recurrent mixer. `layer` counts the GDN layers before it: its place in the pools."""

    def __init__(self, config: ModelConfig, mesh: Mesh, dtype: torch.dtype, layer: int) -> None:
        super().__init__()
        self.mesh, self.layer, self.eps = mesh, layer, config.rms_norm_eps
        self.key_heads, self.value_heads = config.num_key_heads // mesh.size, config.num_value_heads // mesh.size
        self.key_dim, self.value_dim = config.key_head_dim, config.value_head_dim
        self.key_size, self.value_size = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.channels = 2 * self.key_size + self.value_size
        hidden, heads, values = config.hidden_size, config.num_value_heads, config.value_size
        qkv, per_head = _gdn_sections(config), Section(heads, config.num_key_heads)
        qkvz = Split(0, (*qkv, qkv[2]))
        self.in_proj_qkvz = Linear((config.conv_channels + values, hidden), mesh, dtype, qkvz)
        self.in_proj_ba = Linear((2 * heads, hidden), mesh, dtype, Split(0, (per_head, per_head)))
        self.conv = Conv(config, mesh, dtype)
        self.A_log = Parameter((heads,), torch.float32, Split(0, (per_head,)), mesh.rank, mesh.size)
        self.dt_bias = Parameter((heads,), torch.float32, Split(0, (per_head,)), mesh.rank, mesh.size)
        self.norm = Norm(config.value_head_dim, config, mesh)
        self.out_proj = Linear((hidden, values), mesh, dtype, Split(1, (qkv[2],)))
        self.whole: gdn.Mixer | None = None

    def prepare(self, force: str | None = None) -> None:
        super().prepare(force)
        qkvz, ba, out = (part.multiply for part in (self.in_proj_qkvz, self.in_proj_ba, self.out_proj))
        if isinstance(qkvz, linear.Packed) and isinstance(ba, linear.Packed) and isinstance(out, linear.Packed):
            vectors = (self.conv.weight, self.A_log, self.dt_bias, self.norm.scale)
            weights = gdn.MixerWeights(qkvz, ba, out, *vectors, self.key_heads, self.key_dim, self.eps)
            self.whole = gdn.Mixer(weights)

    def after(self, norm: Norm, x_TD: Tensor, residual_TD: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        if self.whole is None:
            return super().after(norm, x_TD, residual_TD, *rest)
        inputs: BatchInputs = rest[0]
        pool, rows = inputs.caches.gdn_layers[self.layer], (inputs.extend, inputs.prefill)
        y_TD, residual_TD = gdn.mix(self.whole, x_TD, residual_TD, norm.scale, pool, *rows)
        return self.mesh.all_reduce(y_TD), residual_TD

    def forward(self, x_TD: Tensor, inputs: BatchInputs, _: Rope) -> Tensor:
        qkv_TC, z_TX = self.in_proj_qkvz(x_TD).split_with_sizes((self.channels, self.value_size), -1)
        b_TH, a_TH = self.in_proj_ba(x_TD).chunk(2, -1)
        g_TH, beta_TH = gdn.gates(a_TH, b_TH, self.A_log, self.dt_bias, self.force)
        o_THV = by_kind(inputs, self._extend, self._prefill, qkv_TC, g_TH, beta_TH)
        z_THV = z_TX.view(-1, self.value_heads, self.value_dim)
        y_THV = norm.gated_rms_norm(o_THV, z_THV, self.norm.scale, self.eps, self.force)
        return self.mesh.all_reduce(self.out_proj(y_THV.view(-1, self.value_size)))

    def _extend(self, caches: CacheTensors, rows: ExtendRows, qkv_TC: Tensor, g_TH: Tensor, beta_TH: Tensor) -> Tensor:
        pool = caches.gdn_layers[self.layer]
        q, k, v = self._heads(conv.extend(qkv_TC, self.conv.weight, pool.conv_ring, rows, self.force))
        rings = (pool.states, pool.ring_k, pool.ring_u, pool.ring_g)
        return gdn.extend(q, k, v, g_TH, beta_TH, *rings, rows, self.force)

    def _prefill(
        self, caches: CacheTensors, rows: PrefillRows, qkv_TC: Tensor, g_TH: Tensor, beta_TH: Tensor
    ) -> Tensor:
        pool = caches.gdn_layers[self.layer]
        q, k, v = self._heads(conv.prefill(qkv_TC, self.conv.weight, pool.windows, pool.conv_ring, rows, self.force))
        rings = (pool.states, pool.ring_k, pool.ring_u, pool.ring_g)
        return gdn.prefill(q, k, v, g_TH, beta_TH, *rings, rows, self.force)

    def _heads(self, qkv_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [T, J, K] of unit norm (q scaled) and v [T, H, V]."""
        q_TX, k_TX, v_TX = qkv_TC.split_with_sizes((self.key_size, self.key_size, self.value_size), -1)
        by_key = (-1, self.key_heads, self.key_dim)
        q_TJK, k_TJK = gdn.normalize(q_TX.view(by_key), k_TX.view(by_key), self.force)
        return q_TJK, k_TJK, v_TX.view(-1, self.value_heads, self.value_dim)


class Attention(Half):
    """Gated full attention. `layer` counts the attention layers before it; `first_key` is the first position that
    may be seen (1 in the draft head)."""

    def __init__(self, config: ModelConfig, mesh: Mesh, dtype: torch.dtype, layer: int, first_key: int = 0) -> None:
        super().__init__()
        self.mesh, self.layer, self.first_key = mesh, layer, first_key
        self.heads, self.kv_heads = config.num_heads // mesh.size, max(config.num_kv_heads // mesh.size, 1)
        self.head_dim, self.scale = config.head_dim, config.head_dim**-0.5
        self.sizes = [2 * self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        kv = Section(keys, config.num_kv_heads)
        qkv = Split(0, (Section(2 * queries, config.num_heads), kv, kv))
        self.qkv_proj = Linear((2 * queries + 2 * keys, config.hidden_size), mesh, dtype, qkv)
        self.q_norm = Norm(config.head_dim, config, mesh)
        self.k_norm = Norm(config.head_dim, config, mesh)
        by_head = Split(1, (Section(queries, config.num_heads),))
        self.o_proj = Linear((config.hidden_size, queries), mesh, dtype, by_head)
        self.eps = config.rms_norm_eps
        self.whole: attention.Mixer | None = None

    def prepare(self, force: str | None = None) -> None:
        super().prepare(force)
        qkv, out = self.qkv_proj.multiply, self.o_proj.multiply
        if isinstance(qkv, linear.Packed) and isinstance(out, linear.Packed):
            norms, heads = (self.q_norm.scale, self.k_norm.scale), (self.heads, self.kv_heads)
            self.whole = attention.Mixer(attention.MixerWeights(qkv, out, *norms, *heads, self.eps, self.first_key))

    def after(self, norm: Norm, x_TD: Tensor, residual_TD: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        if self.whole is None:
            return super().after(norm, x_TD, residual_TD, *rest)
        inputs: BatchInputs = rest[0]
        pages, rows = inputs.caches.attention_layers[self.layer], (inputs.extend, inputs.prefill)
        entry = (x_TD, residual_TD, norm.scale)
        y_TD, residual_TD = attention.mix(self.whole, *entry, pages, inputs.kv_slots_T, rest[1], *rows)
        return self.mesh.all_reduce(y_TD), residual_TD

    def forward(self, x_TD: Tensor, inputs: BatchInputs, cos_sin: Rope) -> Tensor:
        q_TNA, gate_TNA = self.project(x_TD, inputs.kv_slots_T, inputs.caches, cos_sin)
        return self.output(by_kind(inputs, self.extend, self._prefill, q_TNA), gate_TNA)

    def project(self, x_TD: Tensor, kv_slots_T: Tensor, caches: CacheTensors, cos_sin: Rope) -> tuple[Tensor, Tensor]:
        """Queries and their gates, [T, N, A] each. Keys and values go to their pages."""
        q_TX, k_TX, v_TX = self.qkv_proj(x_TD).split_with_sizes(self.sizes, -1)
        q_TNA, gate_TNA = q_TX.view(-1, self.heads, 2 * self.head_dim).chunk(2, -1)
        by_kv_head = (-1, self.kv_heads, self.head_dim)
        q_TNA = rope.apply_rope(self.q_norm(q_TNA), *cos_sin, self.force)
        k_TGA = rope.apply_rope(self.k_norm(k_TX.view(by_kv_head)), *cos_sin, self.force)
        attention.write(k_TGA, v_TX.view(by_kv_head), caches.attention_layers[self.layer], kv_slots_T, self.force)
        return q_TNA, gate_TNA

    def output(self, o_TNA: Tensor, gate_TNA: Tensor) -> Tensor:
        return self.mesh.all_reduce(self.o_proj((o_TNA * gate_TNA.sigmoid()).flatten(1)))

    def extend(self, caches: CacheTensors, rows: ExtendRows, q_TNA: Tensor) -> Tensor:
        pages = caches.attention_layers[self.layer]
        return attention.extend(q_TNA, pages, rows, self.scale, self.first_key, self.force)

    def _prefill(self, caches: CacheTensors, rows: PrefillRows, q_TNA: Tensor) -> Tensor:
        pages = caches.attention_layers[self.layer]
        return attention.prefill(q_TNA, pages, rows, self.scale, self.first_key, self.force)


def by_kind(inputs: BatchInputs, extend: Callable[..., Tensor], prefill: Callable[..., Tensor], *x: Tensor) -> Tensor:
    """`extend` on the tokens of extend rows, `prefill` on those of prefill rows, the outputs in token order.

    Each gets the caches, its rows and its tokens' part of every x. A step with one kind of row copies nothing.
    """
    if inputs.prefill is None:
        return extend(inputs.caches, inputs.extend, *x)
    if inputs.extend is None:
        return prefill(inputs.caches, inputs.prefill, *x)
    n = inputs.num_extend_tokens
    y_extend = extend(inputs.caches, inputs.extend, *(t[:n] for t in x))
    y_prefill = prefill(inputs.caches, inputs.prefill, *(t[n:] for t in x))
    return torch.cat((y_extend, y_prefill))


class DenseFfn(Half):
    """SwiGLU. Its output is this rank's share: the caller sums over ranks."""

    def __init__(self, hidden: int, width: int, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        columns = Section(width, width)
        self.gate_up_proj = Linear((2 * width, hidden), mesh, dtype, Split(0, (columns, columns)))
        self.down_proj = Linear((hidden, width), mesh, dtype, Split(1, (columns,)))
        self.whole: moe.FeedForward | None = None

    def prepare(self, force: str | None = None) -> None:
        if not linear.is_for_kernels(self.down_proj.weight, force):
            super().prepare(force)
            return
        self.whole = moe.FeedForward(self.gate_up_proj.weight, self.down_proj.weight, None)
        del self.gate_up_proj, self.down_proj

    def after(self, norm: Norm, x_TD: Tensor, residual_TD: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        if self.whole is None:
            return super().after(norm, x_TD, residual_TD, *rest)
        return moe.feed_forward(self.whole, x_TD, residual_TD, norm.scale, norm.eps, rest[0])

    def forward(self, x_TD: Tensor, num_extend: int | None = None) -> Tensor:
        """`num_extend` tokens are those of extend rows and come first; None: all are."""
        if self.whole is not None:
            return moe.feed_forward(self.whole, x_TD, None, None, 0.0, len(x_TD) if num_extend is None else num_extend)[
                0
            ]
        return self.down_proj(linear.silu_mul(self.gate_up_proj(x_TD), self.force))


class DecoderLayer(Block):
    """x += mixer(norm x); x += ffn(norm x). The sum x travels as (newest term, rest), so that a norm adds both."""

    def __init__(self, mixer: GatedDeltaNet | Attention, ffn: Half, config: ModelConfig, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.input_norm = Norm(config.hidden_size, config, mesh)
        self.mixer = mixer
        self.post_norm = Norm(config.hidden_size, config, mesh)
        self.mlp = ffn

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor | None, inputs: BatchInputs, cos_sin: Rope
    ) -> tuple[Tensor, Tensor]:
        """(x, residual) -> (x, residual): their sum is the residual stream; residual None before the first layer."""
        x_TD, residual_TD = self.mixer.after(self.input_norm, x_TD, residual_TD, inputs, cos_sin)
        x_TD, residual_TD = self.mlp.after(self.post_norm, x_TD, residual_TD, inputs.num_extend_tokens)
        return self.mesh.all_reduce(x_TD), residual_TD
