"""Trainer = server: a call gives the same bits for a token in every layout, batch and launch, and with a cache."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jitrope
from jitrope import InvalidInput, KVCache, Norm, Packed, Pages, prepare_qkv

from . import oracle
from .host.backend import DEVICE

pytestmark = pytest.mark.gpu
S, HQ, HK = 96, 4, 2
assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)

RMS, LAYER = {"rounding": "once"}, {"kind": "layer_norm"}
MODELS: dict[str, tuple[int, int, torch.dtype, dict[str, Any], dict[str, Any] | None]] = {
    # elements of a head, rotated ones, dtype, words of the call, of its norm
    "Llama": (128, 128, torch.float16, {}, None),
    "interleaved-dtype": (80, 80, torch.float16, {"interleaved": True, "rounding": "dtype"}, None),
    "part-of-a-head": (96, 32, torch.float16, {}, None),
    "Qwen3": (128, 128, torch.float16, {}, {"rounding": "twice"}),
    "Qwen3-64": (64, 64, torch.bfloat16, {}, {}),
    "Gemma": (256, 256, torch.float16, {}, {"zero_centered": True, **RMS}),
    "Qwen3-Next": (256, 64, torch.float16, {}, {"zero_centered": True, **RMS}),
    "half-a-head": (128, 64, torch.float16, {}, {"rounding": "twice"}),
    "heads-of-80-fp32": (80, 80, torch.float32, {}, RMS),
    "a-third-of-a-head": (96, 32, torch.float16, {}, RMS),
    "heads-of-80": (80, 80, torch.float16, {}, RMS),
    "heads-of-88-interleaved": (88, 88, torch.float16, {"interleaved": True}, RMS),
    "LayerNorm": (128, 128, torch.float16, {}, LAYER),
    "after-rope": (96, 96, torch.float16, {}, {"after_rope": True, **RMS}),
}
INVARIANT = [*MODELS][9:]  # those that need `configure(batch_invariant=True)`


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> SimpleNamespace:
    """q, k and v of the tokens, (S, H, D), the words of a call, and its q and k as a trainer gets them.

    With a norm a head has one large element. The squares of the others are too small to change its square one by one,
    but not together, so the order of the sum shows in the results.
    """
    dim, rotary, dtype, words, norm = MODELS[request.param]
    seeds = [torch.Generator().manual_seed(n) for n in range(6)]
    x = torch.randn(S, HQ + 2 * HK, dim, generator=seeds[1]).to(DEVICE, dtype)
    if norm is not None:
        place = torch.randint(dim, (S, HQ + 2 * HK, 1), generator=seeds[5]).to(DEVICE)
        small = x.sign() * (0.5 + (x.abs() / 8).clamp(max=0.4)) * 2**-12
        small = x * 2**-12.5 if "kind" in norm else small  # less their mean they must differ
        x = small.scatter(-1, place, x.gather(-1, place).sign())
        weights, biases = (torch.randn(2, dim, generator=seeds[n]).to(DEVICE, dtype) for n in (2, 3))
        own = dict(zip(("q_bias", "k_bias"), biases)) if "kind" in norm else {}
        words = {**words, "norm": Norm(*weights, **own, **norm)}
    table = jitrope.tables.cos_sin_cache(128, jitrope.tables.inv_freq(rotary_dim=rotary)[0])
    q, k, v = x.split([HQ, HK, HK], 1)
    m = SimpleNamespace(q=q, k=k, v=v, words={**words, "cos_sin_cache": table.to(DEVICE)}, dim=dim, dtype=dtype)
    m.leaves = [x.clone().unsqueeze(0).requires_grad_() for x in (q, k)]
    jitrope.configure(batch_invariant=request.param in INVARIANT, launch="token_linear")
    m.trained = [x[0].detach() for x in prepare_qkv(*m.leaves, None, **m.words)[:2]]
    jitrope.configure(launch="auto")
    return m


def test_the_other_launch(model: SimpleNamespace) -> None:
    jitrope.configure(launch="grid_2d")
    assert_same([x[0] for x in prepare_qkv(*model.leaves, None, **model.words)[:2]], model.trained)


@pytest.mark.parametrize("layout", ["sbhd", "bhsd"])
def test_other_layouts(model: SimpleNamespace, layout: str) -> None:
    given = [oracle.heads(x[None], layout).contiguous() for x in (model.q, model.k)]
    got = prepare_qkv(*given, None, layout=layout, **model.words)[:2]
    assert_same([oracle.heads(x, layout)[0] for x in got], model.trained)


def test_a_packed_batch(model: SimpleNamespace) -> None:
    """Two sequences; the second one's positions begin behind the first one's."""
    ends, starts = torch.tensor([0, 7, S], device=DEVICE), torch.tensor([0, 7], device=DEVICE)
    packed = Packed(ends, start_positions=starts)
    assert_same([*prepare_qkv(model.q, model.k, None, positions=packed, **model.words)[:2]], model.trained)


@pytest.mark.parametrize("rank", [0, 1])
def test_context_parallel(model: SimpleNamespace, rank: int) -> None:
    chunks = torch.arange(S).chunk(4)
    rows = torch.cat((chunks[rank], chunks[3 - rank])).to(DEVICE)
    packed = Packed(torch.tensor([0, S], device=DEVICE), S, cp_size=2, cp_rank=rank)
    got = prepare_qkv(model.q[rows], model.k[rows], None, positions=packed, **model.words)[:2]
    assert_same([*got], [x[rows] for x in model.trained])


def test_in_place_in_fused_qkv(model: SimpleNamespace) -> None:
    ids = torch.arange(S, device=DEVICE)
    prepare_qkv(model.q, model.k, None, positions=ids, layout="thd", inplace=True, **model.words)
    assert_same([model.q, model.k], model.trained)


def test_another_batch(model: SimpleNamespace) -> None:
    """Three rows of tokens in another order."""
    order = torch.randperm(S, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    given = [x[order].unflatten(0, (3, -1)) for x in (model.q, model.k)]
    got = prepare_qkv(*given, None, positions=order.view(3, -1), **model.words)[:2]
    assert_same([x.flatten(0, 1)[order.argsort()] for x in got], model.trained)


def test_tokens_decoded_alone(model: SimpleNamespace) -> None:
    """Each token by itself, as a slice at another address."""
    for n, at in enumerate(torch.arange(S, device=DEVICE).split(1)):
        got = prepare_qkv(model.q[None, n : n + 1], model.k[None, n : n + 1], None, positions=at, **model.words)[:2]
        assert_same([x[0, 0] for x in got], [x[n] for x in model.trained])


def test_tokens_decoded_in_a_batch(model: SimpleNamespace) -> None:
    ids = torch.arange(S, device=DEVICE)[:, None]
    got = prepare_qkv(model.q[:, None], model.k[:, None], None, positions=ids, **model.words)[:2]
    assert_same([x[:, 0] for x in got], model.trained)


def test_prefill_into_slots(model: SimpleNamespace) -> None:
    caches = torch.zeros(2, S, HK, model.dim, device=DEVICE, dtype=model.dtype)
    ids = torch.arange(S, device=DEVICE)
    words = {"cache": KVCache(*caches, ids.flip(0)), "positions": ids, "layout": "thd"}
    q, *_ = prepare_qkv(model.q, model.k, model.v, **words, **model.words)
    assert_same([q, caches[0].flip(0)], model.trained)


def test_decode_steps_into_pages(model: SimpleNamespace) -> None:
    caches = torch.zeros(2, S // 8, 8, HK, model.dim, device=DEVICE, dtype=model.dtype)
    table = torch.arange(S // 8, device=DEVICE).flip(0)[None]
    for n, at in enumerate(torch.arange(S, device=DEVICE).split(1)):
        words = {"cache": KVCache(*caches, Pages(table, seq_lens=at + 1)), "positions": at, "layout": "thd"}
        q, *_ = prepare_qkv(*[x[n : n + 1] for x in (model.q, model.k, model.v)], **words, **model.words)
        assert_same(q[0], model.trained[0][n])
    assert_same(caches[0].flip(0).flatten(0, 1), model.trained[1])


def test_a_fused_projection(model: SimpleNamespace) -> None:
    qkv = torch.cat((model.q, model.k, model.v), 1)[None]
    q, k, _ = jitrope.prepare_fused_qkv(qkv, heads=(HQ, HK), **model.words)
    assert_same([q[0], k[0]], model.trained)


@pytest.mark.parametrize("model", INVARIANT, indirect=True)
def test_the_switch_is_needed(model: SimpleNamespace) -> None:
    """Without it the two launches differ. If this fails for a model, it needs no switch any more."""
    jitrope.configure(batch_invariant=False)
    found = []
    for launch in ("token_linear", "grid_2d"):
        jitrope.configure(launch=launch)
        found.append(prepare_qkv(*model.leaves, None, **model.words)[:2])
    assert not all(torch.equal(x, y) for x, y in zip(*found))


@pytest.mark.parametrize("model", ["heads-of-80"], indirect=True)
def test_what_is_not_aligned_is_refused_while_the_switch_is_on(model: SimpleNamespace) -> None:
    odd = torch.empty(model.q.numel() + 1, device=DEVICE, dtype=model.dtype)[1:].view(1, *model.q.shape)
    for on in (False, True, False):
        jitrope.configure(batch_invariant=on)
        if on:
            with pytest.raises(InvalidInput, match="must be multiples of 8 elements"):
                prepare_qkv(odd.copy_(model.q), model.k[None], None, **model.words)
        else:
            prepare_qkv(odd.copy_(model.q), model.k[None], None, **model.words)
