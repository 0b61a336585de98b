"""ComfyUI: jitrope as a backend of comfy-kitchen against its eager one."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from jitrope.integrations import comfy_kitchen

from .. import hosts
from ..devices import devices

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rotations(*shape: int) -> Tensor:
    """2 x 2 rotations by random angles of this shape."""
    angles = torch.randn(shape, generator=torch.Generator().manual_seed(7)) * 5
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2))


B, S, D = 2, 7, 64
LAYOUTS = {  # shapes of q and k, and of the angles
    "bhsd": ((B, 4, S, D), (B, 2, S, D), (1, 1, S, D // 2)),
    "bshd": ((B, S, 4, D), (B, S, 4, D), (B, S, 1, D // 2)),
    "each head": ((B, 4, S, D), (B, 4, S, D), (1, 4, S, D // 2)),
    "one row": ((B, 4, S, D), (B, 2, S, D), (B, 1, 1, D // 2)),
    "one token": ((B, 4, 1, D), (B, 2, 1, D), (1, 1, 1, D // 2)),
    "nhd": ((S, 4, D), (S, 2, D), (S, 1, D // 2)),
}
NAMES = [*comfy_kitchen.FUNCTIONS]
EVERY = [(*case, {}) for case in product(NAMES, LAYOUTS, DTYPES) if "rms" not in case[0] or case[1] != "nhd"]
SOME = [(name, ("bhsd", "bshd")[i % 2], DTYPES[i // 2 % 3], {}) for i, name in enumerate(NAMES)]
# A part of each head, k's weight from q, and tables longer than x, which neighbouring pairs may have.
OF_Q, LONGER = {"epsilon": 1e-3, "k_scale": None}, {"freqs_cis": rotations(1, 1, S + 3, D // 2)}
OPTIONS = [("rms_rope_split_half", OF_Q | {"freqs_cis": rotations(1, 1, S, 8), "rot_dim": 16}), ("apply_rope", LONGER)]
OPTIONS += [("rms_rope_split_half", OF_Q), ("rms_rope", OF_Q), ("rms_rope", OF_Q | LONGER)]
EVERY += [(name, "bhsd", torch.float32, more) for name, more in OPTIONS]


def arguments(name: str, layout: str, dtype: torch.dtype, device: str = "cpu") -> tuple[list[Tensor], dict[str, Any]]:
    """(q and k, or q alone; further arguments). q and k are views of a fused projection where their shapes allow."""
    torch.manual_seed(0)
    *shapes, angles = LAYOUTS[layout]
    if layout == "bshd":
        xs = [*torch.randn(B, S, 2, 4, D).to(device, dtype).unbind(2)]
    else:
        xs = [torch.randn(shape).to(device, dtype) for shape in shapes]
    names = ["scale"] if "1" in name else ["q_scale", "k_scale"]
    words: dict[str, Any] = {"freqs_cis": rotations(*angles).to(device)}
    if "rms" in name:
        words.update((scale, (torch.randn(D) + 1).to(device, dtype)) for scale in names)
    return xs[: len(names)], words


@pytest.mark.parametrize(("device", "name", "layout", "dtype", "more"), devices(EVERY, SOME))
def test_functions_of_the_registry(device: str, name: str, layout: str, dtype: Any, more: dict[str, Any]) -> None:
    """Each function of the registry gives the results of the eager backend: its bits for halves without a norm, else
    except for the last bits, because the second member of a neighbouring pair adds its products in another order."""
    ck = hosts.installed("comfy_kitchen")
    call = getattr(ck, name)
    xs, words = arguments(name, layout, dtype, device)
    words |= more
    given = [x.clone() for x in xs]
    with ck.use_backend("eager"):
        want = tree_leaves(call(*[x.clone() for x in xs], **words))
    with comfy_kitchen.enable() as report:
        got = tree_leaves(call(*xs, **words))
    assert report.calls == {"jitrope": 1, "host": 0}
    if name.endswith("_"):
        assert all(a is x for a, x in zip(got, xs))
    else:
        assert all(map(torch.equal, xs, given))
    exact = {"rtol": 0, "atol": 0} if "half" in name and "rms" not in name else {}
    torch.testing.assert_close(got, want, **exact)


def test_the_registry() -> None:
    """Calls that jitrope refuses, or another backend is asked for, reach the host's; disable leaves no trace."""
    ck = hosts.installed("comfy_kitchen")
    registry, before = ck.registry, [*ck.registry._priority]
    wide, table = torch.randn(1, 2, 3, 1024), rotations(1, 1, 3, 512)
    want = ck.apply_rope1(wide, table)
    xs, words = arguments("apply_rope1_", "bhsd", torch.float32)
    with comfy_kitchen.enable() as report:
        assert torch.equal(ck.apply_rope1(wide, table), want)
        with ck.use_backend("jitrope"):
            assert torch.equal(ck.apply_rope1(wide, table), want)
        with ck.use_backend("eager"):
            ck.apply_rope1(xs[0], **words)
        assert report.calls == {"jitrope": 0, "host": 2}
        with pytest.raises(RuntimeError, match="do not support autograd"):  # the host's own refusal
            ck.apply_rope1_(xs[0].requires_grad_(), **words)
        with pytest.raises((RuntimeError, ValueError)):
            ck.apply_rope_split_half1(xs[0].detach(), rotations(1, 1, S + 3, D // 2))
        assert report.calls == {"jitrope": 0, "host": 4}
        assert registry.get_capable_backend("apply_rope") == "jitrope"
        torch.compile(lambda x: ck.apply_rope1(x, **words), backend="aot_eager", fullgraph=True)(xs[0].detach())
    assert registry._priority == before
    assert registry.get_capable_backend("rms_rope_split_half1_") == "eager"


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with a keyword that jitrope does not know goes to the host, counted, and so do all calls of a function
    that another version lacks."""
    ck = hosts.installed("comfy_kitchen")
    xs, words = arguments("apply_rope1", "bhsd", torch.float32)
    stock = ck.backends.eager.apply_rope1
    grown = lambda x, freqs_cis, scale=1.0: stock(x, freqs_cis) * scale  # noqa: E731
    for place in (ck, ck.backends.eager):
        monkeypatch.setattr(place, "apply_rope1", grown)
    monkeypatch.delattr(ck, "rms_rope1_")
    with comfy_kitchen.enable() as report:
        for scale, calls in ((1.0, {"jitrope": 1, "host": 0}), (2.0, {"jitrope": 1, "host": 1})):
            given = {"x": xs[0], **words, "scale": scale}
            out = ck.registry.get_implementation("apply_rope1", kwargs=given)(**given)
            torch.testing.assert_close(out, grown(**given))
            assert report.calls == calls
        assert report.reasons == {"jitrope does not know the argument scale of <lambda>": 1}
        assert report.left == {"comfy_kitchen.rms_rope1_": "this version has none"}
        assert ck.registry.get_capable_backend("rms_rope1_") == "eager"
