"""Trainer = server: one call gives the same bits for a token in every layout, batch and launch, and with a cache.

Each form computes q and k of the same tokens. A form of the trainer is compared with all others to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import KVCache, Norm, Packed, Pages

from .host.backend import DEVICE

S, HQ, HK = 96, 4, 2
PER_RANK = S // 4  # tokens of a chunk, with two ranks


@dataclass(frozen=True)
class Case:
    """A model's heads. invariant: whether it needs `configure(batch_invariant=True)`."""

    dim: int
    rotary: int
    dtype: torch.dtype = torch.float16
    words: dict[str, Any] = field(default_factory=dict)
    norm: dict[str, Any] | None = None
    invariant: bool = False

    def random(self, *shape: int, seed: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, self.dtype)

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the tokens, (S, H, D).

        With a norm a head has one large element. The squares of the others are too small to change its square one by
        one, but not together, so the order of the sum shows in the results.
        """
        x = self.random(S, HQ + 2 * HK, self.dim, seed=1)
        if self.norm is not None:
            place = torch.randint(self.dim, (S, HQ + 2 * HK, 1), generator=torch.Generator().manual_seed(5)).to(DEVICE)
            layer = "kind" in self.norm  # its elements less their mean must differ
            small = x * 2**-12.5 if layer else x.sign() * (0.5 + (x.abs() / 8).clamp(max=0.4)) * 2**-12
            x = small.scatter(-1, place, x.gather(-1, place).sign())
        q, k, v = x.split([HQ, HK, HK], 1)
        return q, k, v

    def table(self) -> Tensor:
        table = jitrope.tables.cos_sin_cache(128, jitrope.tables.inv_freq(rotary_dim=self.rotary)[0])
        return table.to(DEVICE)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor | None = None, **more: Any) -> tuple[Tensor, Tensor]:
        words: dict[str, Any] = {"cos_sin_cache": self.table(), **self.words, **more}
        if self.norm is not None:
            shape = (2, self.dim)
            weights = self.random(*shape, seed=2).unbind()
            biases = dict(zip(("q_bias", "k_bias"), self.random(*shape, seed=3))) if "kind" in self.norm else {}
            words["norm"] = Norm(*weights, **biases, **self.norm)
        call = jitrope.apply_rope if {"norm", "cache"}.isdisjoint(words) else jitrope.prepare_qkv
        return call(*((q, k) if call is jitrope.apply_rope else (q, k, v)), **words)[:2]


RMS, LAYER = {"rounding": "once"}, {"kind": "layer_norm"}
CASES = {
    "Llama": Case(128, 128),
    "interleaved-dtype": Case(80, 80, words={"interleaved": True, "rounding": "dtype"}),
    "part-of-a-head": Case(96, 32),
    "Qwen3": Case(128, 128, norm={"rounding": "twice"}),
    "Qwen3-64": Case(64, 64, torch.bfloat16, norm={}),
    "Gemma": Case(256, 256, norm={"zero_centered": True, **RMS}),
    "Qwen3-Next": Case(256, 64, norm={"zero_centered": True, **RMS}),
    "half-a-head": Case(128, 64, norm={"rounding": "twice"}),
    "a-third-of-a-head": Case(96, 32, norm=RMS, invariant=True),
    "heads-of-80": Case(80, 80, norm=RMS, invariant=True),
    "heads-of-80-fp32": Case(80, 80, torch.float32, norm=RMS),
    "heads-of-88-interleaved": Case(88, 88, words={"interleaved": True}, norm=RMS, invariant=True),
    "LayerNorm": Case(128, 128, norm=LAYER, invariant=True),
    "after-rope": Case(96, 96, norm={"after_rope": True, **RMS}, invariant=True),
}

Form = Callable[[Case], tuple[Tensor, Tensor]]
FORMS: dict[str, Form] = {}


def form(function: Form) -> Form:
    FORMS[function.__name__] = function
    return function


def ids(*tokens: int) -> Tensor:
    return torch.tensor(tokens, device=DEVICE)


@form
def trained(case: Case) -> tuple[Tensor, Tensor]:
    q, k = (x.clone().unsqueeze(0).requires_grad_() for x in case.heads()[:2])
    q, k = case(q, k)
    return q[0].detach(), k[0].detach()


@form
def sbhd(case: Case) -> tuple[Tensor, Tensor]:
    q, k = case(*[x.unsqueeze(1) for x in case.heads()[:2]], layout="sbhd")
    return q[:, 0], k[:, 0]


@form
def bhsd(case: Case) -> tuple[Tensor, Tensor]:
    q, k = case(*[x.transpose(0, 1).contiguous()[None] for x in case.heads()[:2]], layout="bhsd")
    return q[0].transpose(0, 1), k[0].transpose(0, 1)


@form
def packed_batch(case: Case) -> tuple[Tensor, Tensor]:
    """Two sequences; the second one's positions begin behind the first one's."""
    starts = ids(0, 7)
    return case(*case.heads()[:2], positions=Packed(ids(0, 7, S), start_positions=starts))


@form
def context_parallel(case: Case) -> tuple[Tensor, Tensor]:
    chunks = [range(n * PER_RANK, (n + 1) * PER_RANK) for n in range(4)]
    shards, found = [[*chunks[0], *chunks[3]], [*chunks[1], *chunks[2]]], [x.clone() for x in case.heads()[:2]]
    for rank, rows in enumerate(shards):
        own = [x[rows].contiguous() for x in case.heads()[:2]]
        for x, part in zip(found, case(*own, positions=Packed(ids(0, S), S, cp_size=2, cp_rank=rank))):
            x[rows] = part
    return found[0], found[1]


@form
def in_place_in_fused_qkv(case: Case) -> tuple[Tensor, Tensor]:
    return case(*case.heads()[:2], positions=torch.arange(S, device=DEVICE), layout="thd", inplace=True)


@form
def other_batch(case: Case) -> tuple[Tensor, Tensor]:
    """Three rows of tokens in another order."""
    order = torch.randperm(S, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    q, k = case(*[x[order].unflatten(0, (3, -1)) for x in case.heads()[:2]], positions=order.view(3, -1))
    back = order.argsort()
    return q.flatten(0, 1)[back], k.flatten(0, 1)[back]


@form
def decoded_alone(case: Case) -> tuple[Tensor, Tensor]:
    """Each token by itself, as a slice at another address."""
    q, k, _ = case.heads()
    found = [case(q[None, n : n + 1], k[None, n : n + 1], positions=ids(n)) for n in range(S)]
    return torch.cat([x[0][0] for x in found]), torch.cat([x[1][0] for x in found])


@form
def decoded_in_a_batch(case: Case) -> tuple[Tensor, Tensor]:
    q, k = case(*[x.unsqueeze(1) for x in case.heads()[:2]], positions=torch.arange(S, device=DEVICE)[:, None])
    return q[:, 0], k[:, 0]


@form
def slots(case: Case) -> tuple[Tensor, Tensor]:
    """Prefill with the write to a cache; k is read from the cache."""
    caches = torch.zeros(2, S, HK, case.dim, device=DEVICE, dtype=case.dtype)
    order = torch.arange(S, device=DEVICE).flip(0)
    q, _ = case(*case.heads(), cache=KVCache(*caches, order), positions=order.flip(0), layout="thd")
    return q, caches[0].flip(0)


@form
def pages_token_by_token(case: Case) -> tuple[Tensor, Tensor]:
    """Decode steps into the pages of a sequence."""
    caches, rows = torch.zeros(2, S // 8, 8, HK, case.dim, device=DEVICE, dtype=case.dtype), []
    table = torch.arange(S // 8, device=DEVICE).flip(0)[None]
    for n in range(S):
        pages = Pages(table, seq_lens=ids(n + 1))
        step = [x[n : n + 1] for x in case.heads()]
        rows.append(case(*step, cache=KVCache(*caches, pages), positions=ids(n), layout="thd")[0])
    return torch.cat(rows), caches[0].flip(0).flatten(0, 1)


@form
def fused_projection(case: Case) -> tuple[Tensor, Tensor]:
    q, k, v = (x.unsqueeze(0) for x in case.heads())
    words: dict[str, Any] = {"cos_sin_cache": case.table(), "heads": (HQ, HK), **case.words}
    if case.norm is not None:
        weights, biases = (case.random(2, case.dim, seed=seed).unbind() for seed in (2, 3))
        more = dict(zip(("q_bias", "k_bias"), biases)) if "kind" in case.norm else {}
        words["norm"] = Norm(*weights, **more, **case.norm)
    q, k, _ = jitrope.prepare_fused_qkv(torch.cat((q, k, v), 2), **words)
    return q[0], k[0]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    found = CASES[request.param]
    jitrope.configure(batch_invariant=found.invariant)
    return found


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.gpu
def test_every_form_gives_the_trainers_bits(case: Case) -> None:
    jitrope.configure(launch="token_linear")
    want = trained(case)
    jitrope.configure(launch="auto")
    assert [name for name, function in FORMS.items() if not same(function(case), want)] == []
    jitrope.configure(launch="grid_2d")
    assert same(trained(case), want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.invariant])
def test_the_switch_is_needed(name: str) -> None:
    """Without it the two launches differ. If this fails for a case, the case needs no switch any more."""
    found = []
    for launch in ("token_linear", "grid_2d"):
        jitrope.configure(launch=launch)
        found.append(trained(CASES[name]))
    assert not same(found[0], found[1])


@pytest.mark.gpu
def test_what_is_not_aligned_is_refused() -> None:
    case = CASES["heads-of-80"]
    q, k = (x.clone() for x in case.heads()[:2])
    odd = torch.empty(q.numel() + 1, device=DEVICE, dtype=q.dtype)[1:].view_as(q).copy_(q)
    case(odd[None], k[None])
    jitrope.configure(batch_invariant=True)
    with pytest.raises(jitrope.InvalidInput, match="must be multiples of 8 elements"):
        case(odd[None], k[None])
    jitrope.configure(batch_invariant=False)
    case(odd[None], k[None])
