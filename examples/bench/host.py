"""`bench host`: the CPU's time for a call, beside torch's own in-place add."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jitrope import Norm, Packed, apply_rope, prepare_fused_qkv, prepare_joint_qkv, prepare_qkv

from . import decode
from .harness import DEVICE, angles, bf16, host_times
from .report import AS_JSON, SMOKE, Rows, app, show
from .sections import Section, Table, of


def calls() -> dict[str, Callable[[], Any]]:
    """Of a decode step's q and k (64 tokens, 32 + 8 heads of 128): the GPU's work is shorter than the call."""
    q, k, v = bf16(1, 64, 32, 128), bf16(1, 64, 8, 128), bf16(1, 64, 8, 128)
    both = angles(64, 128)
    cos, sin, ids = both.cos(), both.sin(), torch.arange(64, device=DEVICE)
    step, x, weight = decode.inputs(64, 32, 8, 128), torch.ones(64, device=DEVICE), bf16(128)
    leaf, flat = q.detach().requires_grad_(), (q[0], k[0])
    packed, qkv = Packed(torch.tensor([0, 20, 64], device=DEVICE).int()), bf16(1, 64, 8, 6 * 128)
    norm = Norm(weight, weight)
    joint = (q[:, :16], k[:, :16], v[:, :16]), (q[:, 16:], k[:, 16:], v[:, 16:])
    return {
        "x.add_(1)": lambda: x.add_(1),
        "two empty_like": lambda: (torch.empty_like(q), torch.empty_like(k)),
        "apply_rope in place": lambda: apply_rope(q, k, cos, sin, inplace=True),
        "apply_rope": lambda: apply_rope(q, k, cos, sin),
        "apply_rope in place, position_ids": lambda: apply_rope(q, k, cos, sin, positions=ids, inplace=True),
        "apply_rope, position_ids": lambda: apply_rope(q, k, cos, sin, positions=ids),
        "apply_rope in place, cos_sin_cache and position_ids": lambda: decode.by_ids(step),
        "apply_rope, packed": lambda: apply_rope(*flat, cos, sin, positions=packed),
        "prepare_fused_qkv": lambda: prepare_fused_qkv(qkv, cos, sin, heads=(32, 8), order="grouped"),
        "KV cache in place": lambda: decode.to_cache(step),
        "KV cache in place, fp8": lambda: decode.to_fp8_cache(step),
        "norm in place": lambda: prepare_qkv(q, k, v, cos, sin, norm=norm, inplace=True),
        "norm": lambda: prepare_qkv(q, k, v, cos, sin, norm=norm),
        "prepare_joint_qkv": lambda: prepare_joint_qkv(*joint, cos, sin, norm=norm),
        f"apply_rope, {RECORDED}": lambda: apply_rope(leaf, k, cos, sin),
        f"norm, {RECORDED}": lambda: prepare_qkv(leaf, k, v, cos, sin, norm=norm),
        "torch.ops.jitrope.prepare_": library_op(lambda: apply_rope(q, k, cos, sin, inplace=True)),
        "torch.ops.jitrope.prepare": library_op(lambda: apply_rope(q, k, cos, sin)),
    }


RECORDED = "recorded for backward"


class _Ops(TorchDispatchMode):
    """The last of jitrope's own ops, and its arguments."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "jitrope":
            self.call = partial(op.overloadpacket, *args, **(kwargs or {}))
        return op(*args, **(kwargs or {}))


def library_op(call: Callable[[], Any]) -> Callable[[], Any]:
    """The op that torch.compile finds in a call."""
    with torch.no_grad(), _Ops() as ops:
        call()
    found: Callable[[], Any] = ops.call
    return found


@app.command("host")
def command(smoke: SMOKE = False, as_json: AS_JSON = False) -> None:
    """Host time to enqueue a call, beside torch's own x.add_(1)."""
    show({"host": rows}, smoke, as_json)


def rows() -> Rows:
    """A row a call."""
    made = calls()
    times = host_times(made, [name for name in made if RECORDED in name])
    return [{"call": name, "host us": us, "x add_": us / times["x.add_(1)"]} for name, us in times.items()]


# ---- in examples/results/README.md -----------------------------------------------------------------------

SECTION = Section(
    "Host time",
    """
    CPU time to enqueue a call of a decode step's size (64 tokens, 32 and 8 heads of 128), beside torch's own in-place
    add. A CUDA graph has no host time.

    Where it goes, on a CPU with an empty launch: of 8.2 us of a norm in place 3.3 gather the tensors and words of the
    values, 0.7 find the known call, 2.0 compare its tensors with torch's guard and read their addresses, and 0.7 write
    the argument block. A call that is recorded for backward takes 8 us more than one that is not (beside an H100), and
    5 of them are torch's autograd function.
    """,
    "jitrope bench host",
    (Table("call", lambda row: f"`{row['call']}`", {"us": of("host us"), "over `x.add_(1)`": of("x add_")}),),
)
