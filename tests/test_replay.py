"""Functions of servers that enqueue a known call by the tensors they are given (`dispatch.replay`)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import jitrope
from jitrope.integrations import flashinfer, sglang, vllm
from jitrope.ops import dispatch, launch

from .host.backend import DEVICE

pytestmark = pytest.mark.gpu

T, HQ, HK, D, ROWS = 6, 4, 2, 64, 4
FP8 = torch.float8_e4m3fn
Made = dict[str, Any]


def make(seed: int, tokens: int = T, dtype: torch.dtype = torch.bfloat16, cache: torch.dtype | None = None) -> Made:
    """Tensors of a decode step, which all lie elsewhere in memory with each seed. q, k and v are slices of qkv."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    qkv = random(tokens, (HQ + 2 * HK) * D)
    q, k, v = qkv.split((HQ * D, HK * D, HK * D), -1)
    pages = 2 * -(-tokens // ROWS)
    shape = pages, ROWS, HK, D
    return {
        "qkv": qkv, "q": q, "k": k, "v": v, "latent": random(tokens, 2 * D), "rope": random(tokens, D),
        "table": jitrope.tables.cos_sin_cache(50, jitrope.tables.inv_freq(rotary_dim=D)[0]).to(DEVICE),
        "ids": torch.randint(50, (tokens,), generator=generator).to(DEVICE),
        "slots": torch.randperm(pages * ROWS, generator=generator)[:tokens].to(DEVICE),
        "weights": (random(D), random(D)), "scale": torch.rand(1, generator=generator).to(DEVICE) + 0.5,
        "caches": [torch.zeros(shape, device=DEVICE, dtype=dtype).to(cache or dtype) for _ in range(2)],
        "mla": torch.zeros(pages, ROWS, 3 * D, device=DEVICE, dtype=dtype),
    }  # fmt: skip


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, D))


def buffers(x: Made, **scales: Any) -> Any:
    k, v = (cache.flatten(0, 1) for cache in x["caches"])
    return SimpleNamespace(value=x["v"], k_buffer=k, v_buffer=v, cache_loc=x["slots"], **scales)


CALLS: dict[str, Callable[[Made], Any]] = {
    "rope": lambda x: vllm.rotary_embedding(x["ids"], x["q"], x["k"], D, x["table"], True),
    "rope of q": lambda x: vllm.rotary_embedding(x["ids"], x["q"], None, D, x["table"], False),
    "rope of heads": lambda x: vllm.rotary_embedding(x["ids"], heads(x["q"]), heads(x["k"]), D, x["table"], True),
    "rope of contiguous": lambda x: vllm.rotary_embedding(x["ids"], x["latent"], x["rope"], D, x["table"], True),
    "rope back": lambda x: vllm.rotary_embedding(
        x["ids"], x["q"], x["k"], D, x["table"][:, :32].contiguous(), True, 16, True, rounding="dtype"
    ),
    "rope, two axes of tokens": lambda x: vllm.rotary_embedding(
        x["ids"].view(2, -1), x["q"].unflatten(0, (2, -1)), x["k"].unflatten(0, (2, -1)), D, x["table"], True
    ),
    "cache": lambda x: vllm.rotary_embedding_and_cache(
        x["ids"], x["q"], x["k"], x["v"], D, x["table"], True, *x["caches"], x["slots"], "auto", 1.0, 1.0
    ),
    "cache, fewer slots": lambda x: vllm.rotary_embedding_and_cache(
        x["ids"], x["q"], x["k"], x["v"], D, x["table"], True, *x["caches"], x["slots"][:4], "auto", 1.0, 1.0
    ),
    "fp8 cache": lambda x: vllm.rotary_embedding_and_cache(
        x["ids"], x["q"], x["k"], x["v"], D, x["table"], True, *x["caches"], x["slots"], "fp8", 0.5, x["scale"]
    ),
    "fp8 cache of bytes": lambda x: vllm.rotary_embedding_and_cache(
        x["ids"], x["q"], x["k"], x["v"], D, x["table"], True, *[c.view(torch.uint8) for c in x["caches"]], x["slots"],
        "fp8", x["scale"], 2.0,
    ),
    "norm": lambda x: vllm.fused_qk_norm_rope(
        x["qkv"], HQ, HK, HK, D, 1e-6, *x["weights"], x["table"], True, x["ids"]
    ),
    "one weight": lambda x: vllm.fused_qk_norm_rope(
        x["qkv"], HQ, HK, HK, D, 1e-6, x["weights"][0], x["weights"][0], x["table"], True, x["ids"]
    ),
    "MLA": lambda x: vllm.concat_and_cache_mla_rope_fused(
        x["ids"], heads(x["q"]), x["rope"], x["latent"], x["table"], False, x["slots"], x["mla"], "auto", x["scale"]
    ),
    "SGLang, cache": lambda x: sglang.apply_rope_with_cos_sin_cache_inplace(
        x["ids"], x["q"], x["k"], D, x["table"], True, buffers(x)
    ),
    "SGLang, fp8 cache": lambda x: sglang.apply_rope_with_cos_sin_cache_inplace(
        x["ids"], x["q"], x["k"], D, x["table"], True, buffers(x, k_scale=0.25, v_scale=x["scale"])
    ),
    "SGLang, heads": lambda x: sglang.apply_rope_inplace(
        heads(x["q"]), heads(x["k"]), x["table"], x["ids"], is_neox=False
    ),
    "SGLang, heads and cache": lambda x: sglang.apply_rope_inplace_with_kvcache(
        heads(x["q"]), heads(x["k"]), x["v"], *[c.flatten(0, 1) for c in x["caches"]], x["table"], x["ids"], x["slots"],
        is_neox=True,
    ),
    "SGLang, norm by angles": lambda x: sglang.fused_qk_norm_rope(
        x["qkv"], HQ, HK, HK, D, 1e-6, *x["weights"], 1e4, True, x["ids"], 1.0, 0.0, 0.0, 1.0
    ),
    "FlashInfer": lambda x: flashinfer.apply_rope_with_cos_sin_cache_inplace(x["ids"], x["q"], x["k"], D, x["table"]),
}  # fmt: skip


def tensors(made: Made) -> list[Tensor]:
    return [x for value in made.values() for x in (value if isinstance(value, (list, tuple)) else [value])]


def versions(made: Made) -> list[int]:
    return [x._version for x in tensors(made)]


def same(a: Made, b: Made) -> bool:
    return all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in zip(tensors(a), tensors(b))
    )


def first_call(call: Callable[[Made], Any], *arguments: Any) -> Made:
    """The tensors after a call that is like none before it."""
    launch.local.recent.clear()
    made = make(*arguments)
    call(made)
    return made


@pytest.fixture(autouse=True)
def _forget() -> None:
    launch.local.recent.clear()


@pytest.mark.parametrize("name", CALLS)
def test_a_known_call_has_the_bits_of_the_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tensors of the same kind, at other places; a call of another kind; and then the first kind again."""
    call, cache = CALLS[name], FP8 if "fp8" in name else None
    kinds = [(T, torch.bfloat16, cache), (2 * T, torch.bfloat16, cache), (T, torch.float16, cache)]
    want = [[first_call(call, seed, *kind) for seed in range(3)] for kind in kinds]
    launch.local.recent.clear()
    for kind, made in zip(kinds, want):
        assert not same(made[0], make(0, *kind))
        for seed in range(3):
            got = make(seed, *kind)
            before = versions(got)
            call(got)
            assert same(got, made[seed])
            if seed == 0:
                first = [now - then for now, then in zip(versions(got), before)]
            assert [now - then for now, then in zip(versions(got), before)] == first
    monkeypatch.setattr(dispatch, "_call", lambda *_: pytest.fail("looked at again"))
    for kind, made in zip(kinds, want):
        for seed in range(3):
            got = make(seed, *kind)
            call(got)
            assert same(got, made[seed])


def test_tensors_in_another_order_in_memory() -> None:
    """q and k are views of one tensor, in either order, and with heads in between."""
    for _ in range(2):
        for first, second in ((0, 2), (3, 0), (1, 4)):
            qkv = make(7)["qkv"]
            q, k = (qkv[:, at * D : (at + 2) * D] for at in (first, second))
            given = make(7)
            want = jitrope.apply_rope(
                heads(q.clone()), heads(k.clone()), cos_sin_cache=given["table"], positions=given["ids"], layout="thd"
            )
            vllm.rotary_embedding(given["ids"], q, k, D, given["table"], True)
            assert torch.equal(heads(q), want[0])
            assert torch.equal(heads(k), want[1])


def test_tensors_that_share_memory_are_refused() -> None:
    """Also after calls of the same kind that share none."""
    made = make(1)
    for _ in range(2):
        vllm.rotary_embedding(made["ids"], made["qkv"][:, : 2 * D], made["k"], D, made["table"], True)
        with pytest.raises(jitrope.InvalidInput, match="q and k share memory"):
            vllm.rotary_embedding(
                made["ids"], made["qkv"][:, : 2 * D], made["qkv"][:, D : 3 * D], D, made["table"], True
            )


def test_gradients_are_recorded() -> None:
    """A tensor that requires a gradient is not rotated without a record, whatever was called before."""
    made = make(2, T, torch.float32)
    words = D, made["table"], True
    with torch.no_grad():
        leaf = made["q"].clone().requires_grad_()
        vllm.rotary_embedding(made["ids"], leaf, None, *words)
        vllm.rotary_embedding(made["ids"], leaf, None, *words)
    leaf = made["q"].clone().requires_grad_()
    y = leaf * 1
    vllm.rotary_embedding(made["ids"], y, None, *words)
    y.square().sum().backward()
    assert torch.allclose(leaf.grad, 2 * leaf, atol=1e-4)  # a rotation keeps lengths


def test_a_wrong_argument_after_known_calls() -> None:
    made = make(3)
    for _ in range(2):
        CALLS["rope"](made)
    with pytest.raises(jitrope.InvalidInput, match="query has shape"):
        vllm.rotary_embedding(made["ids"], made["q"][:, :-1], made["k"], D, made["table"], True)
    with pytest.raises(jitrope.InvalidInput, match=r"on cpu|on meta"):
        vllm.rotary_embedding(made["ids"], made["q"], made["k"], D, made["table"].to("meta"), True)


@pytest.mark.parametrize("name", ["rope", "norm", "fp8 cache", "MLA"])
def test_a_first_call_without_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = FP8 if "fp8" in name else None
    want = first_call(CALLS[name], 5, T, torch.bfloat16, cache)
    launch.local.recent.clear()
    CALLS[name](make(5, 0, torch.bfloat16, cache))
    CALLS[name](make(5, T, torch.bfloat16, cache))
    monkeypatch.setattr(dispatch, "_call", lambda *_: pytest.fail("looked at again"))
    got = make(5, T, torch.bfloat16, cache)
    CALLS[name](got)
    assert same(got, want)


def test_what_is_kept_is_bounded() -> None:
    most = launch.MAX_RECENT_KINDS
    for tokens in [*range(1, 3 * most), *range(1, 3 * most)]:
        CALLS["rope"](make(1, tokens))
    (kinds,) = launch.local.recent.values()
    assert len(kinds) == most


def test_tensors_of_other_kinds() -> None:
    """A subclass of Tensor without memory of its own."""
    made = make(6)
    q = made["q"].contiguous()
    twice = TwoTensor(q.clone(), q.clone())
    for _ in range(2):
        vllm.rotary_embedding(made["ids"], twice, None, D, made["table"], True)
        vllm.rotary_embedding(made["ids"], q, None, D, made["table"], True)
        assert torch.equal(twice.a, q)
        assert torch.equal(twice.b, q)


def test_two_calls_are_both_made() -> None:
    """A function that makes two calls is run each time."""
    table = make(4)["table"]

    def run(x: Made) -> None:
        for name in ("q", "k"):
            part = heads(x[name])[:, :2]  # of one kind
            jitrope.apply_rope(part, None, cos_sin_cache=table, positions=x["ids"], layout="thd", inplace=True)

    for seed in range(3):
        want, got = make(seed), make(seed)
        run(want)
        dispatch.replay("two", {"q": got["q"], "k": got["k"], "position_ids": got["ids"]}, lambda: run(got))  # noqa: B023
        assert same(got, want)
