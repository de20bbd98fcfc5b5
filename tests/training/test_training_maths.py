"""The differentiable model: gradients of its own functions, and drafts as a request would make them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from training import attention, gdn, layers
from training.model import Model, Settings
from training.shape import Shape, new_weights, parse_shape

SMALL = parse_shape(
    "vocab=96,hidden=32,layers=4,heads=4,head_dim=16,key_heads=2,value_heads=4,key_dim=8,value_dim=12,"
    "experts=4,top_k=2,expert_width=8,shared_width=12,rotary_fraction=0.5"
)


def make_model(shape: Shape = SMALL, chunk: int = 16) -> Model:
    """Weights far enough from their first values that a lost norm or a wrong order shows."""
    torch.manual_seed(0)
    weights = {n: w + 0.3 * torch.randn_like(w) * (w.dim() == 1) for n, w in new_weights(shape, 1).items()}
    weights = {n: (w * 3 if w.dim() > 1 else w).requires_grad_() for n, w in weights.items()}
    return Model(shape, weights, Settings(dtype=torch.float32, chunk=chunk))


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule token by token."""
    share = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(share, 1), k.repeat_interleave(share, 1)
    state, outputs = q.new_zeros(v.shape[1], k.shape[2], v.shape[2]), []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        new = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * new[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outputs)


@pytest.mark.parametrize("chunk", [8, 32])
def test_the_chunked_rule_and_its_gradients_are_those_of_the_recurrence(chunk: int) -> None:
    torch.manual_seed(chunk)
    q, k = (torch.nn.functional.normalize(torch.randn(64, 2, 6), dim=-1) for _ in range(2))
    k[:12] = k[0]  # equal keys are the worst case for the inverse
    v, g, beta = torch.randn(64, 4, 10), -torch.rand(64, 4) * 0.3, torch.rand(64, 4)
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    move, add, *rest = gdn.prepare(*inputs, chunk)
    ours = gdn.finish(gdn.scan(move, add, 2), *rest)
    reference = torch.cat([recurrence(*(x[s] for x in inputs)) for s in (slice(0, 32), slice(32, 64))])
    torch.testing.assert_close(ours, reference, atol=2e-5, rtol=1e-4)
    weights = torch.randn_like(ours)
    grads = torch.autograd.grad((ours * weights).sum(), inputs)
    for grad, wanted in zip(grads, torch.autograd.grad((reference * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(grad, wanted, atol=2e-4, rtol=1e-3)


def test_attention_over_two_kinds_of_keys_has_the_gradients_of_one_softmax() -> None:
    torch.manual_seed(0)
    length, count = 12, 2
    q, keys, values, *extra = (torch.randn(2, 3, length, 16, requires_grad=True) for _ in range(3 + 2 * count))
    ours = attention.attend_drafts(q, keys, values, list(zip(extra[::2], extra[1::2], strict=True)))
    rows = []
    for t in range(count, length):
        first = t - count + 1
        seen_k = [keys[:, :, :first], *(extra[2 * i][:, :, first + i, None] for i in range(count))]
        seen_v = [values[:, :, :first], *(extra[2 * i + 1][:, :, first + i, None] for i in range(count))]
        p = (torch.einsum("bna,bnta->bnt", q[:, :, t], torch.cat(seen_k, 2)) * 16**-0.5).softmax(-1)
        rows.append(torch.einsum("bnt,bnta->bna", p, torch.cat(seen_v, 2)))
    reference = torch.stack(rows, 2)
    torch.testing.assert_close(ours[:, :, count:], reference, atol=1e-5, rtol=1e-4)
    weights = torch.randn_like(reference)
    inputs = (q, keys, values, *extra)
    grads = torch.autograd.grad((ours[:, :, count:] * weights).sum(), inputs)
    for grad, wanted in zip(grads, torch.autograd.grad((reference * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(grad, wanted, atol=1e-5, rtol=1e-3)


def test_drafts_in_training_are_those_of_a_request() -> None:
    """Depth s for every position at once, against one request that drafts after each prefix."""
    model, length, depths = make_model(), 16, 3
    ids = torch.randint(0, 96, (1, length + 1))
    with torch.no_grad():
        hidden, _ = model.hidden(ids[:, :-1])
        all_at_once = [x for x, _ in model.draft(ids[:, 1:], hidden, depths)]
        for start in range(length - depths):
            before, cache = hidden[: start + 1], []
            for depth in range(depths):
                stop = start + depth + 1
                first = 0 if depth == 0 else stop - 1
                before = draft_request(model, ids[0, 1 + first : 1 + stop], before, first, cache)[-1:]
                torch.testing.assert_close(before[0], all_at_once[depth][stop - 1], atol=1e-4, rtol=1e-3)


def draft_request(model: Model, ids: Tensor, before: Tensor, first: int, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The draft layer on new tokens of one request, whose earlier keys and values are in the cache."""
    shape = model.shape
    z = layers.enter_draft(model.draft_weights, model.embed[ids], before, shape, torch.float32)
    cos, sin = (x[first:] for x in layers.rope_tables(first + len(ids), shape, ids.device))
    q, k, v, gate = layers.enter_attention(model.draft_layer, z, cos, sin, shape, torch.float32)
    cache.append((k, v))
    keys, values = (torch.cat(x).repeat_interleave(shape.heads // shape.kv_heads, 1) for x in zip(*cache, strict=True))
    scores = torch.einsum("qna,kna->nqk", q, keys) * shape.head_dim**-0.5
    seen = torch.arange(len(keys)) <= torch.arange(first, first + len(ids))[:, None]
    o = torch.einsum("nqk,kna->qna", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)
    x, _ = layers.leave_attention(model.draft_layer, z, o, gate, shape)
    return layers.final_norm(x, model.weights["mtp.norm.weight"], shape)


def test_every_weight_gets_a_gradient() -> None:
    model = make_model()
    losses = model.losses(torch.randint(0, 96, (2, 33)), 2, 3)
    total = losses.main.mean() + sum(x.mean() for x in losses.drafts) + losses.balance
    total.backward()
    still = [name for name, w in model.weights.items() if w.grad is None or not w.grad.abs().sum() > 0]
    assert not still, still


def test_tokens_do_not_see_later_ones_nor_other_sequences() -> None:
    model = make_model()
    ids = torch.randint(0, 96, (2, 32))
    changed = ids.clone()
    changed[0, 20:] = (changed[0, 20:] + 1) % 96
    with torch.no_grad():
        one, other = (model.hidden(x)[0].view(2, 32, -1) for x in (ids, changed))
    torch.testing.assert_close(one[0, :20], other[0, :20])
    torch.testing.assert_close(one[1], other[1])
    assert not torch.equal(one[0, 20:], other[0, 20:])
