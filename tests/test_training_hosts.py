"""TransformerEngine and DeepSpeed: jitrope's functions against the hosts' own."""

from __future__ import annotations

import importlib.util
import inspect
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope.integrations import deepspeed, transformer_engine

from .devices import devices
from .hosts import HOSTS, freqs_of, missing, stand_in

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def gradients(function: Any, t: Tensor, overlapping: bool) -> tuple[Tensor, Tensor]:
    """(output, gradient) of a loss whose gradient is an expanded tensor if `overlapping`."""
    leaf = t.detach().requires_grad_()
    out = function(leaf)
    loss = out.float().sum() * 2 if overlapping else (out.float() * torch.arange(out.shape[-1]).to(out)).sum()
    return out.detach(), torch.autograd.grad(loss, leaf)[0]


def assert_alike(ours: Any, host: Any, t: Tensor, overlapping: bool = False) -> None:
    """Output and gradient are the host's, computed in fp32 and rounded once."""
    got = gradients(ours, t, overlapping)
    want = gradients(host, t.float(), overlapping)
    for a, b in zip(got, want):
        assert a.dtype == t.dtype
        torch.testing.assert_close(a, b.to(t.dtype))


# ---- TransformerEngine ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def te() -> Any:
    """TransformerEngine's own rope.py, from a wheel that is not installed: Megatron-core cannot be imported beside a
    TransformerEngine without its compiled part, and that part has no CPU build. The plain torch path of rope.py does
    not use the two names from it."""
    path = HOSTS / "transformer_engine" / "pytorch" / "attention" / "rope.py"
    if not path.exists():
        missing("pip install --no-deps --target build/hosts transformer-engine")
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch, "transformer_engine_torch")
        attention = stand_in(patch, "transformer_engine.pytorch.cpp_extensions.fused_attn")
        patch.setattr(attention, "QKVFormat", None, raising=False)
        spec = importlib.util.spec_from_file_location("te_rope", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "apply_fused_qkv_rotary_pos_emb"])
def test_te_signatures(te: Any, name: str) -> None:
    def words(function: Any) -> list[tuple[str, Any]]:
        return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]

    assert name in te.__all__
    assert words(getattr(transformer_engine, name)) == words(getattr(te, name))


TE_CASES = [  # tensor_format, dtype, interleaved, rotary part, starts, cp, transposed axes, overlapping gradient
    ("sbhd", "fp32", False, 1.0, False, 1, None, False),
    ("sbhd", "bf16", False, 1.0, True, 1, None, True),
    ("sbhd", "fp16", True, 0.5, False, 2, (0, 1), False),
    ("sbhd", "fp32", False, 0.5, True, 2, (2, 3), False),
    ("bshd", "bf16", True, 1.0, True, 2, None, True),
    ("bshd", "fp16", False, 1.0, True, 1, (2, 3), True),
    ("thd", "fp32", False, 0.5, False, 1, None, False),
    ("thd", "bf16", False, 0.5, True, 2, None, False),
    ("thd", "fp16", True, 0.5, False, 2, None, False),
    ("thd", "fp32", True, 1.0, True, 2, None, True),
]
TE_NAMES = ("device", "tensor_format", "dtype", "interleaved", "part", "starts", "cp", "axes", "overlapping")


@pytest.mark.parametrize(TE_NAMES, devices(TE_CASES, (*TE_CASES[1:5], *TE_CASES[7:])))
def test_te_rope(
    te: Any, device: str, tensor_format: str, dtype: str, interleaved: bool, part: float, starts: bool, cp: int,
    axes: Any, overlapping: bool,
) -> None:  # fmt: skip
    """The plain torch path of TransformerEngine, padded and packed, on every rank."""
    torch.manual_seed(0)
    # The host's interleaved path fails on an empty sequence.
    lengths = torch.tensor([12, 4, 2 * cp if interleaved else 0, 20, 8, 4])
    cu_seqlens = torch.cat((torch.zeros(1), lengths.cumsum(0))).int().to(device)
    lead = {"sbhd": (22, 2), "bshd": (2, 22), "thd": (int(cu_seqlens[-1]) // cp,)}[tensor_format]
    t = torch.rand(*lead, 3, 32).to(device, DTYPES[dtype])
    if axes is not None:
        t = t.transpose(*axes).contiguous().transpose(*axes)
    freqs = freqs_of(32 * cp, int(32 * part), interleaved).to(device)
    words: dict[str, Any] = {"tensor_format": tensor_format, "interleaved": interleaved, "cp_size": cp}
    if tensor_format == "thd":
        words["cu_seqlens"] = cu_seqlens
    if starts:
        begin = torch.arange(6) if tensor_format == "thd" else torch.tensor([3, 9])
        words["start_positions"] = begin.int().to(device)
    for rank in range(cp):
        words["cp_rank"] = rank
        ours = partial(transformer_engine.apply_rotary_pos_emb, freqs=freqs, fused=True, **words)
        assert_alike(ours, partial(te.apply_rotary_pos_emb, freqs=freqs, **words), t, overlapping)
        assert ours(t).is_contiguous()


TE_QKV = [(*case, n) for case in (("sbhd", 1, False), ("bshd", 2, True), ("thd", 2, False)) for n in ("one", "two")]


@pytest.mark.parametrize(("device", "tensor_format", "cp", "interleaved", "tables"), devices(TE_QKV, TE_QKV[::2]))
def test_te_fused_qkv(te: Any, device: str, tensor_format: str, cp: int, interleaved: bool, tables: str) -> None:
    """The results are those of the host's single op on slices, also with starts and context parallelism."""
    torch.manual_seed(0)
    groups, dim, split = 3, 16, [64, 16, 16]
    lead = {"sbhd": (6, 2), "bshd": (2, 6), "thd": (12,)}[tensor_format]
    qkv = torch.rand(*lead, groups, sum(split)).to(device)
    q_freqs = freqs_of(40, dim, interleaved).to(device)
    k_freqs = q_freqs if tables == "one" else freqs_of(40, dim, interleaved, base=1e4).to(device)
    words = {"tensor_format": tensor_format, "interleaved": interleaved, "cp_size": cp, "cp_rank": cp - 1}
    words["start_positions"] = torch.tensor([2, 5], dtype=torch.int32, device=device)
    if tensor_format == "thd":
        words["cu_seqlens"] = torch.tensor([0, 8, 12 * cp], dtype=torch.int32, device=device)

    def host(x: Tensor) -> Tensor:
        q, k, v = x.split(split, -1)
        q = q.reshape(*lead, -1, dim)
        rotated = [te.apply_rotary_pos_emb(y, f, **words) for y, f in ((q, q_freqs), (k, k_freqs))]
        return torch.cat([y.flatten() for y in (*rotated, v)])

    def ours(x: Tensor) -> Tensor:
        parts = transformer_engine.apply_fused_qkv_rotary_pos_emb(x, q_freqs, k_freqs, split, **words)
        assert [y.shape[-2] for y in parts] == [12, 3, 3]
        assert all(y.is_contiguous() for y in parts)
        return torch.cat([y.flatten() for y in parts])

    assert_alike(ours, host, qkv)


def test_te_refusals() -> None:
    t, freqs = torch.ones(4, 2, 8), torch.zeros(4, 1, 1, 8)
    with pytest.raises(jitrope.InvalidInput, match="cu_seqlens is None"):
        transformer_engine.apply_rotary_pos_emb(t, freqs, "thd")
    with pytest.raises(jitrope.InvalidInput, match=r"\[8, 8, 9\] does not split groups of 24"):
        transformer_engine.apply_fused_qkv_rotary_pos_emb(torch.ones(4, 2, 2, 24), freqs, freqs, [8, 8, 9])


# ---- DeepSpeed -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layer() -> Any:
    try:
        from deepspeed.sequence import layer
    except ImportError:
        missing("pip install deepspeed")
    return layer


DEEPSPEED_CASES = {  # shape of t, shape of the tables
    "sbhd": ((6, 2, 3, 16), (6, 1, 1, 16)),
    "bshd": ((2, 6, 3, 16), (1, 6, 1, 16)),
    "bshd-batched": ((2, 6, 3, 16), (2, 6, 1, 16)),
    "sequence-is-batch": ((1, 1, 3, 16), (1, 1, 1, 16)),
    "partial": ((6, 2, 3, 16), (6, 1, 1, 8)),
    "shd": ((6, 3, 16), (6, 1, 16)),
    "sd": ((6, 16), (6, 16)),
    "heads-too": ((6, 2, 3, 16), (6, 1, 3, 16)),
    "one-angle": ((6, 2, 3, 16), (1, 1, 1, 16)),
    "fewer-axes": ((2, 6, 3, 16), (6, 1, 16)),
}


@pytest.mark.parametrize(
    ("device", "name", "dtype"),
    devices(product(DEEPSPEED_CASES, ("fp32", "bf16")), (("sbhd", "bf16"), ("bshd-batched", "fp32"))),
)
def test_deepspeed_forward_and_gradient(layer: Any, device: str, name: str, dtype: str) -> None:
    torch.manual_seed(0)
    shape, table_shape = DEEPSPEED_CASES[name]
    t = torch.randn(shape).to(device, DTYPES[dtype])
    angles = torch.rand(table_shape) * 9
    cos, sin = (f(angles).to(t) for f in (torch.cos, torch.sin))
    got = gradients(lambda t: deepspeed.apply_rotary_pos_emb(t, cos, sin), t, False)
    want = gradients(lambda t: layer.apply_rotary_pos_emb(t, cos.float(), sin.float()), t.float(), False)
    for a, b in zip(got, want):
        assert a.dtype == t.dtype
        rtol, atol = (2**-7, 0.1) if dtype == "bf16" else (1e-5, 1e-5)
        torch.testing.assert_close(a.float(), b, rtol=rtol, atol=atol)


def test_deepspeed_enable(layer: Any) -> None:
    from deepspeed.sequence import fpdt_layer

    host, host_backward = layer.apply_rotary_pos_emb, fpdt_layer.apply_rotary_pos_emb_backward
    t, angles = torch.randn(2, 6, 3, 16), torch.rand(1, 6, 1, 16)
    cos, sin = angles.cos(), angles.sin()
    with deepspeed.enable() as report:
        assert layer.apply_rotary_pos_emb is fpdt_layer.apply_rotary_pos_emb is not host
        torch.testing.assert_close(layer.apply_rotary_pos_emb(t, cos, sin), host(t, cos, sin))
        got = fpdt_layer.apply_rotary_pos_emb_backward(t, cos, sin)
        torch.testing.assert_close(got, host_backward(t, cos, sin))
        layer.apply_rotary_pos_emb(t.double(), cos.double(), sin.double())
        assert report.calls == {"jitrope": 2, "host": 1}
        assert "1 x apply_rope: q is torch.float64" in str(report)
    assert fpdt_layer.apply_rotary_pos_emb_backward is host_backward


def test_deepspeed_attention_calls_it(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a group of one the Ulysses layer calls the replaced function, with the host's result."""
    import deepspeed as host

    # A group of one needs no sums in shared memory, which DeepSpeed would build for a minute and a half.
    monkeypatch.setitem(host.ops.__compatible_ops__, "deepspeed_shm_comm", False)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        from deepspeed import comm

        comm.init_distributed("gloo", auto_mpi_discovery=False)
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 6, 4, 16, requires_grad=True) for _ in range(3))
        angles = torch.rand(6, 1, 1, 16)
        attention = layer.DistributedAttention(lambda q, k, v: q * k + v, torch.distributed.group.WORLD)
        results = []
        for patched in (False, True):
            if patched:
                report = deepspeed.enable()
            out = attention(q, k, v, 0, rotary_pos_emb=(angles.cos(), angles.sin()))
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k))))
    finally:
        deepspeed.disable()
        torch.distributed.destroy_process_group()
    assert report.calls == {"jitrope": 2, "host": 0}
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)
