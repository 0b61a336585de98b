"""Two streams in one launch: positions, angles, unrotated tokens, no norm, a norm of v; `test_norm` has the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import InvalidInput, Mrope, Norm, Packed, Starts

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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("way", WAYS)
def test_results_and_gradients_are_those_of_one_stream(way: str, norm: str, device: str) -> None:
    """By both launches, and the gradients also of some of the results alone."""
    words, given = words_of(way, device), streams(device)
    want = apart(given, norm, device, words)
    grads = [torch.sin(torch.arange(x.numel(), device=device).float()).view(x.shape) for x in want]
    for launch in ("token_linear", "grid_2d"):
        jitrope.configure(launch=launch)
        got = joined(given, norm, device, words)
        for x, y in zip(got, want):
            assert x.is_contiguous()
            torch.testing.assert_close(x, y)
    for some in ((0, 1, 2), (0,), (1,), (2,), (0, 2)):
        found = [
            torch.autograd.grad([xs[n] for n in some], given, [grads[n] for n in some], True, allow_unused=True)
            for xs in (got, want)
        ]
        for x, y in zip(*found):
            assert (x is None) == (y is None)
            assert x is None or torch.allclose(x, y, rtol=1e-4, atol=1e-5)


def test_without_a_norm_a_backward_keeps_no_heads() -> None:
    """It keeps the first stream's q alone, for its length."""
    kept: list[Tensor] = []
    given = streams("cpu")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        joined(given, "plain", "cpu", words_of("rows", "cpu"))
    assert {x.data_ptr() for x in kept} & {x.data_ptr() for x in given} == {given[0].data_ptr()}


@pytest.mark.parametrize("norm", NORMS)
def test_compiled(norm: str) -> None:
    words, given, weights = words_of("ids", "cpu"), streams("cpu"), weights_of(norm, "cpu")
    compiled = torch.compile(lambda *xs: joined([*xs], norm, "", words, weights), fullgraph=True, backend="aot_eager")
    results = [call(*given) for call in (compiled, lambda *xs: joined([*xs], norm, "", words, weights))]
    found = [torch.autograd.grad(out, given, [x.detach().sin() for x in out]) for out in results]
    for x, y in zip((*results[0], *found[0]), (*results[1], *found[1])):
        assert torch.equal(x, y)


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
    "ids": ({"cos": COS, "sin": SIN, "positions": IDS[:, 1:]}, r"positions has shape \(2, 7\); allowed are \(8,\)"),
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
    "axes": ({"cos": COS[0], "sin": SIN[0]}, r"cos has shape \(32,\); it must be"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    given, (words, text) = streams("cpu"), REFUSALS[name]
    with pytest.raises(InvalidInput, match=f"prepare_joint_qkv: .*{text}"):
        jitrope.prepare_joint_qkv(given[:3], given[3:], **words)
