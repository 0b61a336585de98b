"""The texts of calls: what a launch, a plan and a record say, and what `specs_of` makes of them."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch

import jitrope
from jitrope import KVCache, Norm, Packed, planning
from jitrope.base.spec import record_of, spec_from_dict
from jitrope.call import Call
from jitrope.jit import kernels
from jitrope.plan.spec import RopeSpec
from jitrope.run import dispatch
from jitrope.tools.prewarm import architecture, specs_of

from ..calls import CALLS, Case, ident
from ..host.backend import DEVICE
from ..results import places_of
from ..sweep import Made

NOT_SAID = ("q_mean_square", "k_mean_square", "k_block_scale", "page_indptr", "batch_indices")
"""Tensors whose text does not say enough."""
OF_TENSORS = {
    *("table_dtype", "table_vec", "table_step", "full_width", "per_head", "weight_dtype", "weight_vec", "vec", "wide"),
    *("one_row", "batch_inner", "page_size", "head_scales", "prefixed", "kv_out", "q_per_group", "kv_per_group"),
    *("copy_v", "ring", "one_step", "launch", "tiles", "chunks"),
    *("heads_per_thread", "tokens_per_block", "heads_per_block", "blocks_per_sm"),
}
"""What depends on dtypes, strides, shapes and counts, which a text leaves out, and the launch that follows."""
COMPILED = [x.name for x in fields(RopeSpec) if x.name not in OF_TENSORS and not x.name.endswith("_dtype")]


@pytest.mark.parametrize("case", [x for x in CALLS[::3] if x["more"] != "check"], ids=ident)  # which reads numbers
def test_a_text_says_what_is_compiled(case: Case) -> None:
    """A kernel of its text has the same constants, but for those of dtypes and shapes."""
    m = Made(case, "meta")
    with planning() as specs:
        m.call(**places_of(m).words)
    for spec in specs:
        call = Call.parse(spec.call)
        assert str(call) == spec.call
        alone = {"q", "k", "kv"}.intersection(call.tensors) == {"q"}  # as is v's norm beside tables for each head
        heads = m.counts[: 1 if alone else 2]
        given: Any = {"head_dim": int(case["size"]), "dtype": case["dtype"], "call": spec.call}
        given["width"] = "full" if spec.full_width else "half"
        if any(name in call.tensors for name in NOT_SAID):
            with pytest.raises(jitrope.InvalidInput, match="whose shape its text does not say; record a run instead"):
                specs_of(heads, **given)
            continue
        found = specs_of(heads, **given)
        assert found
        for name in COMPILED:
            assert {getattr(x, name) for x in found} == {getattr(spec, name)}, name


bf16 = partial(torch.zeros, dtype=torch.bfloat16, device="meta")


def test_specs_are_those_of_the_call() -> None:
    """Of calls with the tensors that `specs_of` says, exactly."""
    q, k, v = bf16(1, 4096, 32, 128), bf16(1, 4096, 8, 128), bf16(1, 4096, 8, 128)
    cos, sin = torch.empty(2, 4096, 64, device="meta")
    ids = torch.empty(4096, dtype=torch.int64, device="meta")
    weights = bf16(2, 128)
    cu_seqlens = torch.empty(5, dtype=torch.int32, device="meta")
    slots = KVCache(bf16(256, 16, 8, 128), bf16(256, 16, 8, 128), torch.empty(4096, dtype=torch.int64, device="meta"))
    in_parts = KVCache(*bf16(2, 256, 16, 8, 64)[:1], None, ids, k_pe_cache=bf16(256, 16, 8, 64))
    packed = Packed(cu_seqlens, max_seqlen=4096)
    with_errors = "bshd heads q k v > rotate cos sin rotary_dim=128 > cache k_cache v_cache page_table lengths errors"
    assert {x.call for x in specs_of([32, 8], call=with_errors)} == {with_errors}
    with pytest.raises(jitrope.InvalidInput, match="call lacks lengths, which it needs with its other tensors"):
        specs_of([32, 8], call=with_errors.replace(" lengths", ""))
    with pytest.raises(jitrope.InvalidInput, match="call lacks heads"):
        specs_of([32, 8], call="bshd heads > norm kind=no_norm > convert per_row > fresh")
    calls = [
        lambda: jitrope.prepare_qkv(q, k, v, cos, sin, norm=Norm(*weights), positions=ids, cache=slots, inplace=True),
        lambda: jitrope.prepare_qkv(None, k, v, cos, sin, positions=ids, cache=slots),
        lambda: jitrope.prepare_qkv(None, k, v, cos, sin, norm=Norm(k_weight=weights[1]), cache=slots),
        lambda: jitrope.prepare_qkv(q, k, None, cos, sin, norm=Norm(*weights, after_rope=True)),
        lambda: jitrope.prepare_qkv(
            *(q, k, None, cos[:, :32], sin[:, :32]),
            norm=Norm(of="k_nope", k_weight=weights[0, :64]),
            cache=in_parts,
            rotary_dim=64,
            rotary_offset=64,
        ),
        lambda: jitrope.apply_rope(q[0], k[0], cos, sin, positions=packed, interleaved=True),
        lambda: jitrope.prepare_fused_qkv(bf16(1, 4096, 48 * 128), cos, sin, heads=(32, 8), bias=bf16(48 * 128)),
        lambda: jitrope.prepare_mla_qkv(
            bf16(1, 4096, 32, 192), bf16(1, 4096, 32, 256), bf16(1, 4096, 1, 64), cos[:, :32], sin[:, :32]
        ),
    ]
    for call in calls:
        with planning() as specs:
            call()
        latent = "latent" in specs[0].call
        assert specs_of((32, 32) if latent else (32, 8), 192 if latent else 128, call=specs[0].call) == specs


def test_a_text_has_a_gradient_too() -> None:
    q, k = (bf16(1, 4096, heads, 128).requires_grad_() for heads in (32, 8))
    weights = [bf16(128).requires_grad_() for _ in "qk"]
    with planning() as specs:
        out = jitrope.prepare_qkv(q, k, None, *torch.empty(2, 4096, 64, device="meta"), norm=Norm(*weights))[:2]
        torch.autograd.grad(out, [q, k, *weights], [torch.empty_like(x) for x in out])
    assert specs_of([32, 8], call=specs[0].call, backward=True) == specs
    assert specs_of([32, 8], call=specs[-1].call) == [x for x in specs if x.call == specs[-1].call]


def test_specs_of_other_calls_are_equal_and_a_record_keeps_the_first() -> None:
    (spec, *_) = specs_of(8)
    other = spec.of("bhsd heads q > rotate cos sin rotary_dim=128 > fresh")
    assert other == spec
    assert hash(other) == hash(spec)
    assert [x["call"] for x in record_of({spec: None, other: None})["spec"]] == [spec.call]
    assert spec_from_dict(spec.to_dict()).call == spec.call != other.call
    with pytest.raises(jitrope.InvalidInput, match="its call a text"):
        spec_from_dict({**spec.to_dict(), "call": ["bshd"]})


def test_an_architecture_can_be_written_in_several_ways() -> None:
    """No GPU looks for one with a letter."""
    given = ("sm_90", "sm90", "90", "9.0", "10.0", "12.1a", "sm_90a", "9", "hopper", 90)
    found = ["sm_90", "sm_90", "sm_90", "sm_90", "sm_100", None, None, "sm_9", None, None]
    assert [architecture(x) for x in given] == found


@pytest.mark.gpu
def test_a_launch_says_the_text_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan and its launch have one text, also of a backward. It names no fresh results and no missing tables."""
    seen: list[str] = []
    get_kernel = kernels.get_kernel
    monkeypatch.setattr(kernels, "get_kernel", lambda spec, index: seen.append(spec.call) or get_kernel(spec, index))
    dispatch._forget()
    q, k, v = (bf16(1, 4, heads, 64, device=DEVICE).requires_grad_(heads > 1) for heads in (4, 2, 1))
    cos, sin = torch.rand(2, 4, 32, device=DEVICE)
    caches = [bf16(2, 4, 2, 64, device=DEVICE) for _ in "kv"]
    cache = KVCache(*caches, torch.arange(4, device=DEVICE))
    with torch.no_grad():
        jitrope.prepare_qkv(q, k, k, cos, sin, cache=cache)
        jitrope.prepare_qkv(v, None, None, norm=Norm())
    (out, _, _) = jitrope.prepare_qkv(q, None, None, cos, sin, norm=Norm())
    out.sum().backward()
    assert seen == [
        "bshd heads q k v > rotate cos sin rotary_dim=64 > cache k_cache v_cache slot_mapping",
        "bshd heads q > norm > fresh",
        "bshd heads q > norm > rotate cos sin rotary_dim=64 > fresh",
        "bshd heads_backward dq q > norm > rotate cos sin rotary_dim=64 rounding=complex64 inverse > fresh",
    ]
