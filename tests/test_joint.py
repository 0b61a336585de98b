"""Two streams in one launch: positions, angles, unrotated tokens, no norm, a norm of v; `test_norm` has the others.

With a conversion, a transform or `out` the results have the bits of `prepare_qkv` of the concatenated streams.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, InvalidInput, Mrope, Norm, Packed, Quantize, Scaled, Starts, Ulysses

from .devices import DEVICES

FIRST, SECOND = 3, 5
ANGLES = torch.outer(torch.arange(8.0), torch.rand(32, generator=torch.Generator().manual_seed(4)) * 3)
COS, SIN = ANGLES.cos(), ANGLES.sin()
IDS = torch.tensor([[5, 1, 0, 7, 7, 2, 3, 6], [0, 4, 4, 1, 6, 2, 5, 3]])
WAYS: dict[str, dict[str, Any]] = {
    "rows": {"cos": COS, "sin": SIN},
    "ids": {"cos": COS, "sin": SIN, "positions": IDS, "interleaved": True},
    "shared ids": {"cos_sin_cache": torch.cat((COS, SIN), -1), "positions": IDS[1], "interleaved_out": True},
    "mrope": {"cos": COS, "sin": SIN, "positions": (torch.stack((IDS[0], IDS[1], IDS[0].flip(0))), (16, 8, 8))},
    "angles": {"freqs": ANGLES, "mscale": 1.5, "q_scale": 0.5},
    "unrotated stream": {"cos": COS[:SECOND], "sin": SIN[:SECOND], "unrotated": FIRST, "rounding": "complex64"},
    "unrotated token": {"cos": COS[:7], "sin": SIN[:7], "unrotated": 1},
    "unrotated both": {"freqs": ANGLES[:4], "unrotated": 4},
    "no table": {},
    "two tables": {"cos": (COS[:FIRST], COS[FIRST:].clone()), "sin": (SIN[:FIRST], SIN[FIRST:].clone())},
}
NORMS: dict[str, dict[str, Any] | None] = {"plain": None, "norm": {}, "v_norm": {"v_norm": True}, "of k": {"of": "k"}}


def words_of(way: str, device: str) -> dict[str, Any]:
    words: dict[str, Any] = {}
    for name, x in WAYS[way].items():
        if isinstance(x, Tensor):
            words[name] = x.to(device)
        elif name == "positions":
            words[name] = Mrope(x[0].to(device), x[1])
        else:
            words[name] = tuple([y.to(device) for y in x]) if isinstance(x, tuple) else x
    return words


def streams(device: str) -> list[Tensor]:
    """q, k and v of the first stream, then of the second."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, tokens, heads, 64) for tokens in (FIRST, SECOND) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]


def weights_of(norm: str, device: str) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    names = [f"{letter}_weight" for letter in (NORMS[norm] or {}).get("of", "qk")]
    return [{name: torch.randn(64, generator=generator).to(device) for name in names} for _ in range(2)]


def joined(given: list[Tensor], norm: str, device: str, words: dict[str, Any], weights: Any = None) -> Any:
    own, weights = NORMS[norm], weights or weights_of(norm, device)
    norms = None if own is None else [Norm(**of_stream, **own) for of_stream in weights]
    return jitrope.prepare_joint_qkv(given[:3], given[3:], norm=norms, **words)


def apart(given: list[Tensor], norm: str, device: str, words: dict[str, Any]) -> list[Tensor]:
    """The norm in plain torch, then a concatenation, then a rotation."""
    own, weights = NORMS[norm], weights_of(norm, device)

    def normed(x: Tensor, letter: str, of_stream: dict[str, Tensor]) -> Tensor:
        taken = own is not None and (own.get("v_norm") if letter == "v" else letter in own.get("of", "qk"))
        return torch.nn.functional.rms_norm(x, (64,), of_stream.get(f"{letter}_weight"), 1e-6) if taken else x

    parts = [[normed(x, n, w) for n, x in zip("qkv", xs)] for xs, w in zip((given[:3], given[3:]), weights)]
    q, k, v = (torch.cat(pair, 1) for pair in zip(*parts))
    words = {name: torch.cat(x) if isinstance(x, tuple) else x for name, x in words.items()}
    return [*(jitrope.apply_rope(q, k, **words) if words else (q, k)), v]


def test_without_a_norm_a_backward_keeps_no_heads() -> None:
    """It keeps the first stream's q alone, for its length."""
    kept: list[Tensor] = []
    given = streams("cpu")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        joined(given, "plain", "cpu", words_of("rows", "cpu"))
    assert {x.data_ptr() for x in kept} & {x.data_ptr() for x in given} == {given[0].data_ptr()}


@pytest.mark.parametrize("norm", ["plain", "v_norm"])
@pytest.mark.parametrize("way", ["mrope", "angles", "unrotated stream"])
def test_one_launch(way: str, norm: str) -> None:
    """Forward; backward one for each stream."""
    given = [torch.empty(x.shape, device="meta", requires_grad=True) for x in streams("cpu")]
    with jitrope.planning(["auto"]) as specs:
        out = joined(given, norm, "meta", words_of(way, "meta"))
        assert len(specs) == 1
        torch.autograd.grad(out, given, [torch.empty_like(x) for x in out])
    assert 2 <= len(set(specs)) <= 3  # streams of one kind have one kernel
    assert {spec.v_norm for spec in specs} == {norm == "v_norm"}


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "ids": (
        {"cos": COS, "sin": SIN, "positions": IDS[:, 1:]},
        r"positions is .*; it must be \(8,\) or \(1\|2, 8\), int32",
    ),
    "ids beside two tables": ({**WAYS["two tables"], "positions": IDS}, "positions does not go with a table for each"),
    "unrotated beside two tables": ({**WAYS["two tables"], "unrotated": 1}, "unrotated does not go with a table for"),
    "two tables of angles": ({"freqs": (ANGLES, ANGLES)}, "freqs does not go with a table for each stream"),
    "unrotated beside ids": ({**WAYS["ids"], "unrotated": 1}, "positions does not go with unrotated"),
    "rows": ({"cos": COS[:6], "sin": SIN[:6], "unrotated": 1}, "cos has 6 rows; it needs 7"),
    "starts": (
        {"cos": COS, "sin": SIN, "positions": Starts(IDS[0, :2])},
        "start_positions does not go with two streams",
    ),
    "packed": (
        {"cos": COS, "sin": SIN, "positions": Packed(IDS[0, :2])},
        "cu_seqlens does not go with two streams; pass positions as a tensor of ids",
    ),
    "axes": ({"cos": COS[0], "sin": SIN[0]}, r"cos is .*\(32,\).*; it must be"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    given, (words, text) = streams("cpu"), REFUSALS[name]
    with pytest.raises(InvalidInput, match=f"prepare_joint_qkv: .*{text}"):
        jitrope.prepare_joint_qkv(given[:3], given[3:], **words)


# ---- conversions, a transform, and tensors of the caller -------------------------------------------

FP8 = torch.float8_e4m3fn
FP4 = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
STAGES: dict[str, dict[str, Any]] = {
    "fp8": {"quantize": Quantize(0.05, 0.02)},
    "fp8 with v, transformed": {"quantize": Quantize(0.05, 0.02, 0.1, dtype=torch.float8_e5m2, hadamard=True)},
    "scales of heads": {"quantize": Quantize(torch.rand(2, 4) + 0.1, torch.rand(2) + 0.1, torch.rand(2) + 0.1)},
    "int8": {"quantize": DynamicQuantize(torch.int8)},
    "fp8 of each token": {"quantize": DynamicQuantize(v=True), "out": Ulysses(2)},
    "fp4": {"quantize": DynamicQuantize(FP4, group=16, scale_dtype=FP8, q_global_scale=0.5, v=True)},
    "mxfp8 in tiles": {"quantize": DynamicQuantize(group=32, scale_dtype=E8M0, swizzled=True, hadamard=True)},
    "fp8 of rows": {"quantize": DynamicQuantize(per="head", v=True)},
    "int8 of rows": {"quantize": DynamicQuantize(torch.int8, per="kv_head")},
    "transform": {"hadamard": True},
    "transform to one rank": {"hadamard": True, "out": Ulysses(1)},
    "out": {"out": (None, None, None)},
}


def parts_of(device: str, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q, k and v of the first stream, then of the second, which are parts of one wider tensor."""
    wide = torch.cat([x.detach() for x in streams(device)[3:]], 2).to(dtype)
    return [*[x.detach().to(dtype) for x in streams(device)[:3]], *wide.split((4, 2, 2), 2)]


def on(device: str, x: Any) -> Any:
    """A norm or a conversion with its tensors on a device."""
    for name in ("tensors", "given"):
        if hasattr(x, name):
            found = {label: y.to(device) if isinstance(y, Tensor) else y for label, y in getattr(x, name).items()}
            setattr(x, name, found)
    return x


def separate(given: list[Tensor], words: dict[str, Any], **stages: Any) -> Any:
    """`prepare_qkv` of the concatenated streams."""
    tables = {name: torch.cat(x) if isinstance(x, tuple) and name != "out" else x for name, x in words.items()}
    return jitrope.prepare_qkv(*[torch.cat(pair, 1) for pair in zip(given[:3], given[3:])], **tables, **stages)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stage", ["fp8 with v, transformed", "int8", "fp4", "out"])
def test_norms_that_differ_have_the_bits_of_each_stream(stage: str, device: str) -> None:
    given, words, calls = parts_of(device), words_of("two tables", device), []
    norms = [Norm(**of_stream, zero_centered=True) for of_stream in weights_of("norm", device)]
    stages = {name: x if name == "out" else on(device, x) for name, x in STAGES[stage].items()}
    got = jitrope.prepare_joint_qkv(given[:3], given[3:], norm=norms, **words, **stages)
    for n, norm in enumerate(norms):
        tables = {name: x[n] for name, x in words.items()}
        calls.append(jitrope.prepare_qkv(*given[3 * n : 3 * n + 3], **tables, norm=norm, **stages))
    flat = [[y for x in results for y in (x if isinstance(x, Scaled) else (x,))] for results in (got, *calls)]
    for x, one, two in zip(*flat):
        for part, want in zip((x[:, :FIRST], x[:, FIRST:]), (one, two)):
            assert torch.equal(part.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def test_refusals_of_stages() -> None:
    given = parts_of("cpu")

    def refused(match: str, given: list[Tensor] = given, **words: Any) -> None:
        with pytest.raises(InvalidInput, match=match):
            jitrope.prepare_joint_qkv(given[:3], given[3:], **{"cos": COS, "sin": SIN, **words})

    quantize = Quantize(0.05, 0.02)
    refused("prepare_joint_qkv: quantize is 1; it must be a jitrope.Quantize", quantize=1)
    refused("prepare_joint_qkv: hadamard does not go with quantize", quantize=quantize, hadamard=True)
    refused("k_scale is missing", quantize=Quantize(0.05))
    for n, label in ((1, "first's k"), (2, "first's v"), (4, "second's k"), (5, "second's v")):
        without: list[Any] = [None if i == n else x for i, x in enumerate(given)]
        for stage in ({"quantize": quantize}, {"out": (None,) * 3}, {"out": jitrope.Ulysses(2)}):
            refused(f"{label} is None; it must be a tensor", without, **stage)
    refused("group is 128; it must divide D=64", quantize=DynamicQuantize(group=128))
    refused("across_heads does not go with two streams", quantize=quantize, norm=Norm(across_heads=True))
    refused(
        "positions does not go with a table for each", quantize=quantize, **{**WAYS["two tables"], "positions": IDS}
    )
    refused("start_positions does not go with two streams", quantize=quantize, positions=Starts(IDS[0, :2]))
    refused("out is .*; it must be a tuple of 3 tensors", out=given[0])
    refused(r"out's q is float32; it must be \(2, 8, 4, 64\), bfloat16", out=(torch.zeros(2, 7, 4, 64), None, None))
    refused("q is .*; for 3 ranks it needs a multiple of 3 heads", out=Ulysses(3))
    of_rows = DynamicQuantize(per="head")
    refused(
        r"out's q is .*; it must be \(2, 8, 4, 64\), float8_e4m3fn",
        quantize=of_rows,
        out=(torch.zeros(2, 9, 4, 64).to(FP8), None, None),
    )
    wants = [x.clone().requires_grad_() for x in given]
    buffer = torch.zeros(2, 8, 4, 64).bfloat16()
    text = "first's q requires .*; use a call without cache, quantize and out, or torch.no_grad"
    refused(text, wants, out=(buffer, None, None))
    refused("cos requires a gradient, but this call has none", quantize=quantize, cos=COS.clone().requires_grad_())
    refused("out's q and first's q share memory", [buffer[:, :3], *given[1:]], out=(buffer, None, None))
    odd = [*given[:3], *[torch.zeros(*x.shape[:3], 65).bfloat16()[..., :64] for x in given[3:]]]
    refused("q has D=64, strides .*; fp4 needs aligned pairs", odd, quantize=DynamicQuantize(FP4))
    refused("second's q is None; it must be a tensor", [*given[:3], None, *given[4:]], quantize=quantize)  # type: ignore[list-item]
    eight = [x.repeat(1, 1, 3, 1) if x.shape[2] == 2 else x for x in given]
    refused("per='kv_head' needs a multiple of k's heads; q has 4, k 6", eight, quantize=DynamicQuantize(per="kv_head"))
