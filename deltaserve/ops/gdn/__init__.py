"""The gated delta rule on the boundary state.

Per value head a matrix S [K, V], from log decay g <= 0, write strength b in (0, 1), key k, query q, value v:

    S_t = exp(g_t) S_{t-1};   u_t = b_t (v_t - S_t^T k_t);   S_t += k_t u_t^T;   o_t = S_t^T q_t

What a running request keeps is S at its last boundary (an absolute multiple of 64 tokens, in a slot) and a ring of
(k, u, g) for the at most 64 tokens since: entry p % 64 belongs to absolute position p. g is stored per token, not
summed. With G(i, t] the sum of g over (i, t] and c the boundary,

    u_t = b_t ( v_t - exp(G(c,t]) S_c^T k_t - sum_{c<i<t} exp(G(i,t]) (k_i . k_t) u_i )
    o_t = exp(G(c,t]) S_c^T q_t + sum_{c<i<=t} exp(G(i,t]) (k_i . q_t) u_i

| who     | reads                | writes                                                                |
| ------- | -------------------- | --------------------------------------------------------------------- |
| prefill | states[slots_in]     | states of every cut; ring: the tokens after the last multiple of 64   |
| extend  | states[slots], ring  | ring: the row's real tokens                                           |
| fold    | states[fold_in], ring| states[fold_out], all layers                                          |

All arithmetic is float32. Where states are float16 or bfloat16 the state is rounded at every multiple of 64 on every
path, so that a state does not depend on the path that made it.

Letters: T tokens, J key heads, H value heads (key head j serves value heads j*H/J .. (j+1)*H/J - 1), K and V head
sizes, S slots, R rows of the ring tables, LG GDN layers.
"""

from __future__ import annotations

from torch import Tensor

from deltaserve.ops.dispatch import choose
from deltaserve.ops.gdn import native, reference
from deltaserve.ops.gdn.native import Mixer, MixerWeights, Pool
from deltaserve.ops.lazy import Lazy
from deltaserve.ops.rows import ExtendRows, PrefillRows

__all__ = ["Mixer", "MixerWeights", "extend", "fold", "gates", "mix", "normalize", "prefill"]

IMPLEMENTATIONS = {"reference": reference, "native": native, "triton": Lazy("deltaserve.ops.gdn.triton")}


def gates(
    a_TH: Tensor, b_TH: Tensor, A_log_H: Tensor, dt_bias_H: Tensor, force: str | None = None
) -> tuple[Tensor, Tensor]:
    """g = -exp(A_log) * softplus(a + dt_bias) and beta = sigmoid(b): both [T, H] float32."""
    return choose(IMPLEMENTATIONS, a_TH, force).gates(a_TH, b_TH, A_log_H, dt_bias_H)


def normalize(q_TJK: Tensor, k_TJK: Tensor, force: str | None = None) -> tuple[Tensor, Tensor]:
    """x * rsqrt(sum(x^2) + 1e-6) per head, and q times K^-0.5; in the dtype of the inputs."""
    return choose(IMPLEMENTATIONS, q_TJK, force).normalize(q_TJK, k_TJK)


def prefill(
    q_TJK: Tensor,
    k_TJK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    states: Tensor,
    ring_k: Tensor,
    ring_u: Tensor,
    ring_g: Tensor,
    rows: PrefillRows,
    force: str | None = None,
) -> Tensor:
    """o [T, H, V] in v's dtype, of packed prefill rows that start on a boundary with an empty ring.

    One layer's views, written in place: states [S, H, K, V], ring_k [R, 64, J, K], ring_u [R, 64, H, V],
    ring_g [R, 64, H].
    """
    implementation = choose(IMPLEMENTATIONS, q_TJK, force)
    return implementation.prefill(q_TJK, k_TJK, v_THV, g_TH, beta_TH, states, ring_k, ring_u, ring_g, rows)


def extend(
    q_TJK: Tensor,
    k_TJK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    states: Tensor,
    ring_k: Tensor,
    ring_u: Tensor,
    ring_g: Tensor,
    rows: ExtendRows,
    force: str | None = None,
) -> Tensor:
    """o [T, H, V] in v's dtype, of T = rows * width tokens; shapes as in `prefill`, states are only read.

    Ring entries beyond num_ring are never read. Tokens beyond num_new of a row get a finite output and leave the ring
    alone.
    """
    implementation = choose(IMPLEMENTATIONS, q_TJK, force)
    return implementation.extend(q_TJK, k_TJK, v_THV, g_TH, beta_TH, states, ring_k, ring_u, ring_g, rows)


def fold(
    states: Tensor, ring_k: Tensor, ring_u: Tensor, ring_g: Tensor, rows: ExtendRows, force: str | None = None
) -> None:
    """states[fold_out] <- the state 64 tokens after states[fold_in], from the full rings of fold_rows.

    All layers at once: states [S, LG, H, K, V], ring_k [R, LG, 64, J, K], ring_u [R, LG, 64, H, V],
    ring_g [R, LG, 64, H]. Returns at once where no row folds.
    """
    choose(IMPLEMENTATIONS, ring_k, force).fold(states, ring_k, ring_u, ring_g, rows)


def mix(
    mixer: Mixer,
    x_TD: Tensor,
    residual_TD: Tensor | None,
    scale_D: Tensor,
    pool: Pool,
    extend: ExtendRows | None,
    prefill: PrefillRows | None,
) -> tuple[Tensor, Tensor]:
    """Norm and a whole layer by its prepared weights: (mixer(norm(x + residual)), x + residual), all [T, D].

    A residual of None is zero. The first output lacks the sum over ranks. Extend rows' tokens come first. Reads and
    writes the pool as convolution and recurrence do (`ops.conv` and above).
    """
    return mixer(x_TD, residual_TD, scale_D, pool, extend, prefill)
