"""Arguments of any type, for every parameter of the functions and values.

Each (function, parameter, kind of value) is called. A call gives the same result as the plain form, or it is refused
in one line that names the argument, and nothing was written. Nothing else is accepted, but what `TAKES` says.
Afterwards the valid call gives the same result as before.
"""

from __future__ import annotations

import copy
import enum
import fractions
import inspect
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, KVCache, Mrope, Norm, Packed, Pages, Quantize, Shifts, Starts, Ulysses, tables, thd
from jitrope import context_parallel as cp
from jitrope.base import config
from jitrope.base.spec import record_of
from jitrope.jit.cache import KernelCache
from jitrope.tools import bundle, prewarm
from jitrope.tools.models import specs_of_model

FP4 = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
ANY: dict[str, Any] = {
    "None": None, "a word": "nonsense", "empty str": "", "bytes": b"x", "module": torch.nn.Linear(2, 2),
    "python module": torch, "class": dict, "object": object(), "dict": {}, "set": {1}, "list of words": ["a", "b"],
    "list of lists": [[1], [2]], "empty list": [], "empty tuple": (), "ellipsis": ..., "numpy object": np.array([None]),
    "numpy str": np.str_("nonsense"), "numpy 0-d": np.array(3), "numpy matrix": np.ones((2, 2)),
    "numpy date": np.datetime64("2026-01-01"), "nan": float("nan"), "infinite": float("inf"), "complex": 1j,
    "huge int": 2**70, "huge float": 10**400, "negative": -7, "generator": (i for i in ()), "function": len,
    "fraction": fractions.Fraction(1, 3), "dtype": torch.qint8, "device": torch.device("cuda:77"),
    "0-d tensor": torch.tensor(3), "empty tensor": torch.empty(0), "bool tensor": torch.ones(2, dtype=torch.bool),
    "tensor of rank 7": torch.ones((1,) * 7), "meta tensor": torch.ones(3, device="meta"),
    "sparse": torch.ones(2).to_sparse(), "bool": True, "int": 1, "float": 2.0, "half float": 0.5,
}  # fmt: skip
# Kinds with the valid value, or none, in another form; others of these may be refused.
TAKEN = ("numpy int", "int subclass", "numpy bool", "numpy float", "list", "tuple", "numpy array", "as Path", "as str",
         "numpy word", "enum", "Parameter")  # fmt: skip
SAME = (*TAKEN, "int for float", "non-contiguous", "int64", "None", "expanded")


def kinds_of(value: Any) -> dict[str, Any]:
    """Every kind of thing in place of a valid value."""
    if type(value) is bool:
        return {**ANY, "numpy bool": np.bool_(value), "int for bool": int(value), "float for bool": float(value)}
    if type(value) is int:
        return {**ANY, "numpy int": np.int64(value), "int subclass": enum.IntEnum("Number", {"a": value}).a,
                "float for int": float(value), "tensor of int": torch.tensor(value),
                "numpy 0-d int": np.array(value)}  # fmt: skip
    if type(value) is float:
        whole = {"int for float": int(value)} if value == int(value) else {}
        return {**ANY, **whole, "numpy float": np.float64(value), "tensor of float": torch.tensor(value)}
    if type(value) is str and value.isidentifier():
        return {**ANY, "numpy word": np.str_(value), "enum": enum.Enum("Word", {"a": value}, type=str).a,
                "upper case": value.upper(), "500 letters": "a" * 500, "a space": f"{value} ",
                "a word in a list": [value]}  # fmt: skip
    if isinstance(value, os.PathLike):
        return {**ANY, "as Path": Path(value), "as str": str(value), "null": f"{value}\0"}
    if isinstance(value, (list, tuple)):
        others = {"list": [*value], "tuple": (*value,)}
        if all(isinstance(item, (int, float)) for item in value):
            others |= {"numpy array": np.array(value), "longer": (*value, *value), "tensor": torch.tensor(value)}
        return {**ANY, **others}
    if not isinstance(value, Tensor):
        return ANY
    return {
        **ANY, "non-contiguous": torch.stack([value, value + 1], -1)[..., 0], "on meta": value.to("meta"),
        "of another dtype": value.to(torch.float64 if value.is_floating_point() else torch.int16),
        "too short": value[:-1], "of another rank": value[None], "without axes": value.flatten()[0],
        "empty": value[:0], "expanded": value[:1].expand(value.shape), "as list": value.tolist(),
        "Parameter": torch.nn.Parameter(value, requires_grad=False), "as numpy": value.numpy(), "as tuple": (*value,),
        **({} if value.is_floating_point() else {"int64": value.long(), "float for int": value.float()}),
    }  # fmt: skip


def used(kind: Any, word: str, /, norm: Norm | None = None, **given: Any) -> Any:
    """The results of a call with a value, and the value's tensors."""
    heads, value = {name: x.clone() for name, x in HEADS.items()}, kind(**given)
    words = {word: value} | ({"norm": norm} if norm else {})
    written = [x for x in getattr(value, "tensors", {}).values() if isinstance(x, Tensor)]
    return jitrope.prepare_qkv(**heads, v=V, **TABLE, layout="thd", **words), written


def used_in_parts(kind: Any, **given: Any) -> Any:
    """The results of a call that rotates the last elements of its heads, and its cache's tensors."""
    words = {"cos": rows(6, 2), "sin": rows(6, 2), "rotary_dim": 4, "rotary_offset": 4, "layout": "thd"}
    value = kind(**given)
    written = [x for x in getattr(value, "tensors", {}).values() if isinstance(x, Tensor)]
    return jitrope.prepare_qkv(**{name: x.clone() for name, x in HEADS.items()}, v=None, cache=value, **words), written


def entered(kind: Any, /, **given: Any) -> Any:
    """What a context manager yields, after a call in it."""
    with kind(**given) as found:
        jitrope.apply_rope(*torch.empty(2, 1, 4, 2, 8, device="meta"), *torch.empty(2, 4, 4, device="meta"))
    return found


def rows(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) / 7


W, CU, SLOTS = rows(8), torch.tensor([0, 3, 6], dtype=torch.int32), torch.arange(6)
IDS, ENDS = torch.tensor([5, 0, 4, 1, 1, 2]), torch.tensor([0, 4, 6])
HEADS = {"q": rows(6, 4, 8), "k": rows(6, 2, 8)}
V, QKV, FLOATS, TABLE = rows(6, 2, 8), rows(6, 2, 32), rows(6), {"cos": rows(6, 4), "sin": rows(6, 4) + 1}
CACHES = {"k_cache": torch.zeros(6, 2, 8), "v_cache": torch.zeros(6, 2, 8)}
FP8 = lambda **given: KVCache(*torch.zeros(2, 6, 2, 8).to(torch.float8_e4m3fn), SLOTS, **given)  # noqa: E731
PAGED = partial(used, lambda **given: KVCache(*torch.zeros(2, 6, 2, 2, 8), Pages(**given)), "cache")
BLOCKS = {f"{x}_cache": torch.zeros(6, 2, 8, dtype=torch.int8) for x in "kv"}
BLOCKS |= {f"{x}_block_scale": rows(6, 2, 1) for x in "kv"}
BATCH = {name: x[None] for name, x in {**HEADS, "v": V}.items()}
LSE = {"lse": rows(2, 8), "lse_per_step": rows(2, 4), "cu_seqlens": torch.tensor([0, 4, 8], dtype=torch.int32)}
EIGHT = {"cu_seqlens": torch.tensor([0, 3, 8], dtype=torch.int32), "cp_size": 2, "rule": "contiguous"}
FOURS = {**EIGHT, "cu_seqlens": LSE["cu_seqlens"]}
YARN = {"rotary_dim": 8, "factor": 2.0, "original_max_position_embeddings": 16}
LONG = {**YARN, "rotary_dim": 4, "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
SPEC = prewarm.specs_of(heads=8)[0]
LLAMA = {"model_type": "llama", "dtype": "bfloat16", "hidden_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 2, "vocab_size": 8}  # fmt: skip
SPOKEN = {"heads": [8, 2], "head_dim": 128, "dtype": "bf16", "call": "bshd heads q k > rotate cos sin > fresh"}

# A valid call of each function and value, with the parameters that get every kind of thing.
CALLS: dict[str, partial[Any]] = {
    "rope": partial(jitrope.apply_rope, **HEADS, **TABLE, positions=IDS, layout="thd", interleaved=True, q_scale=0.5,
                    rotary_dim=8, rotary_offset=0, rounding="fp32", check=False, inplace=False, inverse=True,
                    interleaved_out=True, inplace_grad=False),
    "rope by angles": partial(jitrope.apply_rope, **HEADS, freqs=TABLE["cos"], mscale=1.25, unrotated=0, layout="thd"),
    "rope by a cache": partial(jitrope.apply_rope, **HEADS, cos_sin_cache=rows(6, 8), layout="thd", q_scale=FLOATS),
    "rope by cis": partial(jitrope.apply_rope, **HEADS, freqs_cis=torch.polar(*TABLE.values()), layout="thd"),
    "rope out": partial(jitrope.apply_rope, **HEADS, **TABLE, layout="thd", out=(rows(6, 4, 8), rows(6, 2, 8))),
    "qkv": partial(jitrope.prepare_qkv, **HEADS, v=V, **TABLE, layout="thd", norm=Norm(W, W, v_norm=True), cache=None,
                   quantize=None, hadamard=True, out=None),
    "fused": partial(jitrope.prepare_fused_qkv, qkv=QKV, **TABLE, layout="thd", heads=(4, 2), order="grouped",
                     bias=rows(64), copy_v=True, copy_gate=False, norm=None, cache=None, quantize=None, hadamard=False),
    "joint": partial(jitrope.prepare_joint_qkv, first=(*BATCH.values(),), second=(*BATCH.values(),),
                     cos=rows(12, 4), sin=rows(12, 4), norm=None, hadamard=False),
    "latent": partial(jitrope.prepare_mla_qkv, q=rows(6, 4, 8), kv=rows(6, 4, 10), k_pe=rows(6, 1, 4),
                      cos=rows(6, 2), sin=rows(6, 2), layout="thd", quantize=None),
    "Packed": partial(used, Packed, "positions", cu_seqlens=CU, max_seqlen=3, start_positions=IDS[:2],
                      packed_table=False, cp_size=1, cp_rank=0),
    "Starts": partial(used, Starts, "positions", start_positions=IDS[1:2], cp_size=1, cp_rank=0),
    "Mrope": partial(used, Mrope, "positions", position_ids=IDS.expand(3, 6).clone(), mrope_section=(2, 1, 1),
                     mrope_interleaved=False, axis_of_pair=None),
    "Shifts": partial(used, Shifts, "positions", position_ids=IDS, mrope_section=None, mrope_interleaved=False,
                      axis_of_pair=None),
    "Norm": partial(used, Norm, "norm", q_weight=W, k_weight=W, q_bias=W, k_bias=W, kind="layer_norm", eps=0.25,
                    of="qk", across_heads=False, zero_centered=True, after_rope=True, v_norm=False, rounding="once"),
    "Norm of v": partial(lambda **a: used(FP8, "cache", Norm(**a), k_scale=0.5, v_scale=0.5), of="v",
                         v_weight=rows(16)),
    "Norm of parts": partial(used, Norm, "norm", across_heads=True, mean_squares=(FLOATS, FLOATS)),
    "KVCache": partial(used, KVCache, "cache", **CACHES, slot_mapping=SLOTS, rotate_k=True),
    "KVCache of fp8": partial(used, FP8, "cache", k_scale=0.5, v_scale=0.5),
    "KVCache of k_pe": partial(used_in_parts, KVCache, k_cache=rows(6, 2, 4), v_cache=None, slot_mapping=SLOTS,
                               k_pe_cache=rows(6, 2, 4)),
    "KVCache of blocks": partial(used, KVCache, "cache", **BLOCKS, slot_mapping=SLOTS, scale_fmt="ue8m0"),
    "Pages": partial(PAGED, page_table=SLOTS, page_indptr=ENDS, last_page_len=ENDS[1:], cu_seqlens_q=ENDS,
                     clear_page=True, errors=torch.zeros(1, dtype=torch.int32)),
    "Pages of lengths": partial(PAGED, page_table=SLOTS.view(2, 3), seq_lens=ENDS[1:]),
    "Pages of tokens": partial(PAGED, page_table=SLOTS.view(2, 3), batch_indices=SLOTS % 2, cache_positions=SLOTS),
    "Quantize": partial(used, Quantize, "quantize", q_scale=0.5, k_scale=0.5, v_scale=FLOATS[:1],
                        dtype=torch.float8_e5m2, hadamard=True),
    "DynamicQuantize": partial(used, DynamicQuantize, "quantize", dtype=torch.float8_e5m2, group=None,
                               scale_fmt="ue8m0", q_weights=torch.ones(6, 4), hadamard=True, per="token",
                               swizzled=False, v=True),
    "nvfp4": partial(used, partial(DynamicQuantize, FP4, v=True), "quantize", scale_dtype=torch.float8_e4m3fn,
                     q_global_scale=0.5, k_global_scale=0.5, v_global_scale=0.5),
    "Ulysses": partial(used, Ulysses, "out", ranks=2),
    "default": partial(tables.inv_freq, rope_type="default", rotary_dim=8, theta=100.0, device="cpu"),
    "linear": partial(tables.inv_freq, rope_type="linear", rotary_dim=8, factor=2.0),
    "dynamic": partial(tables.inv_freq, "dynamic", rotary_dim=8, factor=2.0, max_position_embeddings=16, seq_len=40),
    "yarn": partial(tables.inv_freq, "yarn", **YARN, beta_fast=32.0, beta_slow=1.0, attention_factor=1.5, mscale=1.0,
                    mscale_all_dim=0.5, truncate=True),
    "llama3": partial(tables.inv_freq, "llama3", **YARN, low_freq_factor=1.0, high_freq_factor=4.0),
    "longrope": partial(tables.inv_freq, "longrope", **LONG, attention_factor=1.5, seq_len=40),
    "proportional": partial(tables.inv_freq, "proportional", rotary_dim=8, partial_rotary_factor=0.5, factor=2.0),
    "axial": partial(tables.inv_freq, "axial", rotary_dim=8, axes=2, in_turn=True),
    "from_config": partial(tables.from_config, config={"rope_theta": 100.0, "head_dim": 8}, layer_type=None, seq_len=4,
                           head_dim=16, device="cpu"),
    "cos_sin": partial(tables.cos_sin, positions=6, inv_freq=rows(4), attention_factor=1.5, width="full",
                       interleaved=True, dtype=torch.float16, angles="fp32"),
    "cos_sin of ids": partial(tables.cos_sin, positions=IDS, inv_freq=rows(4)),
    "cos_sin_cache": partial(tables.cos_sin_cache, positions=6, inv_freq=rows(4), attention_factor=1.5,
                             dtype=torch.float16, angles="fp32"),
    "freqs": partial(tables.freqs, positions=6, inv_freq=rows(4), width="full", interleaved=True),
    "to ranks": partial(thd.sequence_order_to_cp_rank_order, rows(8, 3), **FOURS, total_tokens=8),
    "from ranks": partial(thd.cp_rank_order_to_sequence_order, x=rows(8, 3), **FOURS, total_tokens=8),
    "indices": partial(thd.get_partitioned_indices, cu_seqlens=LSE["cu_seqlens"], total_tokens=8, world_size=2, rank=1,
                       rule="contiguous"),
    "valid tokens": partial(thd.copy_valid_tokens_from_per_split_to_rank_local, out=rows(6, 2), x=rows(6, 2) + 9,
                            cu_seqlens_padded=CU, cu_seqlens=CU),
    "half": partial(thd.read_half_tensor, x=rows(8, 2, 2), cu_seqlens=LSE["cu_seqlens"], half_idx=1),
    "lse": partial(thd.second_half_lse_correction, **LSE, lse_packed=True),
    "second lse": partial(thd.read_second_half_lse, lse=LSE["lse"], cu_seqlens=LSE["cu_seqlens"], lse_packed=True,
                          second_half_lse_seqlen=5),
    "correct": partial(thd.out_correction, out=rows(8, 2, 4), out_per_step=rows(8, 2, 4), lse=rows(2, 8),
                       lse_per_step=rows(2, 8), cu_seqlens=LSE["cu_seqlens"], only_second_half=False, lse_packed=True),
    "add": partial(thd.grad_correction, grad=rows(8, 2, 4), grad_per_step=rows(8, 2, 4), cu_seqlens=LSE["cu_seqlens"],
                   first_half="add", second_half="copy"),
    "Partition": partial(cp.Partition, **EIGHT, tokens=9, cp_rank=1, group=None),
    "padded": partial(cp.Partition, CU, tokens=9, cu_seqlens_padded=CU + CU, separate_padding=True),
    "shard": partial(cp.Partition(CU, 9).shard, x=rows(9, 2)),
    "unshard": partial(cp.Partition(CU, 9).unshard, x=rows(9, 2)),
    "Schedule": partial(cp.Schedule, **EIGHT, tokens=9, cp_rank=1, group=None, cu_seqlens_padded=None, max_seqlen=8,
                        causal=False, window=(3, 1)),
    "fixed": partial(cp.Schedule.fixed, batch=2, seqlen=8, device="cpu", group=None, cp_size=2, cp_rank=1,
                     causal=False, window=(3, 1), rule="contiguous"),
    "memory": partial(cp.Schedule(CU, 6).memory, heads=(4, 2), head_dims=(8, 6), dtype=torch.bfloat16,
                      keep_gathered=True, head_groups=2),
    "attention": partial(cp.all_gather_attention, **HEADS, v=V, schedule=cp.Schedule(CU, 6), layout="thd", rope=None,
                         softmax_scale=0.5, backend="math", return_lse=True, return_max_logit=True,
                         keep_gathered=False, head_groups=1, check=True),
    "Rope": partial(lambda **a: cp.all_gather_attention(**HEADS, v=V, schedule=cp.Schedule(CU, 6), rope=cp.Rope(**a)),
                    **TABLE, interleaved=True, rotary_dim=4, rotary_offset=0, rounding="complex64"),
    "configure": partial(
        lambda **a: (jitrope.configure(**a), config._may_compile, config.launch(), config.batch_invariant()),
        compile=False, launch="auto", batch_invariant=True),
    "planning": partial(entered, jitrope.planning, launches=["auto"], sm_count=132, memory_speed=4.8),
    "on_compile": partial(lambda callback: jitrope.on_compile(callback)(), callback=print),
    "record": partial(entered, jitrope.record, path=Path("run.json")),
    "KernelCache": partial(KernelCache, root=Path("kernels"), system=(Path("layer"),)),
    "prune": partial(lambda **a: KernelCache(Path("none")).prune(**a), older_than=5, dry_run=True),
    "clear": partial(lambda **a: KernelCache(Path("none")).clear(**a), dry_run=True),
    "bundle.write": partial(bundle.write, path=Path("k.zip"), kernels=[(SPEC, "sm_90")], jobs=1),
    "bundle.load": partial(lambda **a: len(bundle.load(**a)), path=Path("there.zip")),
    "bundle.entries": partial(lambda **a: len(bundle.entries(**a)), path=Path("there.zip")),
    "prewarm": partial(prewarm.prewarm, specs=[SPEC], archs=["sm_90"], jobs=1),
    "read_record": partial(prewarm.read_record, path=Path("run.json")),
    "specs_of": partial(prewarm.specs_of, **SPOKEN, width="half", backward=True),
    "specs_of_model": partial(lambda **a: len(specs_of_model(**a)), path=Path("llama"), dtype="bf16", backward=False),
}  # fmt: skip

# The kinds besides SAME that parameters accept with another meaning.
TAKES: dict[str, str] = {
    "tensor of float, negative": "rope.q_scale",
    "int, float, half float, fraction, bool, tensor of float, tensor of rank 7, without axes, of another rank":
        "rope by a cache.q_scale, Quantize.v_scale",
    "negative": "rope by a cache.q_scale",
    "tensor of float, tensor of rank 7": "KVCache of fp8.k_scale, KVCache of fp8.v_scale, Quantize.q_scale, "
        "Quantize.k_scale, nvfp4.q_global_scale, nvfp4.k_global_scale, nvfp4.v_global_scale",
    "of another rank": "rope by angles.freqs, rope by cis.freqs_cis, KVCache.slot_mapping, "
        "KVCache of blocks.slot_mapping, KVCache of k_pe.slot_mapping, "
        "Pages of tokens.batch_indices, Pages of tokens.cache_positions",
    "of another dtype": "to ranks.x, from ranks.x, shard.x, unshard.x, half.x",
    "too short, empty": "qkv.v, fused.qkv, Pages.page_table, Pages of tokens.page_table, half.x, second lse.lse",
    "too short": "Pages of lengths.seq_lens, to ranks.cu_seqlens, from ranks.cu_seqlens, half.cu_seqlens, "
        "lse.cu_seqlens, second lse.cu_seqlens, correct.cu_seqlens, add.cu_seqlens",
    "too short, on meta": "indices.cu_seqlens, Partition.cu_seqlens, Schedule.cu_seqlens",
    "on meta": "qkv.v",
    "on meta, meta tensor": "cos_sin.inv_freq, cos_sin_cache.inv_freq, freqs.inv_freq",
    "too short, empty, empty tensor": "cos_sin.inv_freq, cos_sin_cache.inv_freq, freqs.inv_freq, "
        "cos_sin of ids.inv_freq",
    "without axes": "Pages.errors",
    "0-d tensor, tensor of int": "dynamic.seq_len, longrope.seq_len, from_config.seq_len, cos_sin.positions, "
        "cos_sin_cache.positions, freqs.positions",
    "bool, int, float, too short, of another rank, without axes, empty, 0-d tensor": "cos_sin of ids.positions",
    "empty list, empty tuple, generator, dict, empty tensor": "planning.launches, prewarm.specs, prewarm.archs",
    "class, function, module": "on_compile.callback",
    "a word, numpy str": "record.path, KernelCache.root, bundle.write.path",
    "empty str": "KernelCache.root, specs_of.call",
    "list of words, empty list, empty tuple": "KernelCache.system",
    "fraction, half float": "prune.older_than",
}  # fmt: skip
# Names that some refusals have in place of the parameter's.
NAMED = {"rope.positions": "position_ids", "Shifts.position_ids": "positions", "latent.k_pe": "rotary_dim",
         "KVCache of blocks.k_cache": "k_block_scale", "KVCache of k_pe.k_cache": "k_pe_cache",
         "KVCache of k_pe.k_pe_cache": "k_cache",
         **{f"nvfp4.{x}_global_scale": f"{x}_scale" for x in "qkv"}}  # fmt: skip


def plain(x: Any) -> Any:
    """Results as numbers and words: tensors as lists, values as what they keep."""
    if isinstance(x, Tensor):
        x = x.view(torch.uint8) if x.element_size() == 1 else x
        return [*x.shape] if x.is_meta else [*x.shape, x.double().nan_to_num(7.0).tolist()]
    if isinstance(x, (list, tuple)):
        return [plain(item) for item in x]
    if isinstance(x, dict):
        return {name: plain(item) for name, item in x.items()}
    kept = ("asked", "items", "text")
    if type(x).__module__.startswith("jitrope.") and hasattr(x, "__dict__"):
        return {name: plain(item) for name, item in vars(x).items() if name not in kept}
    return x


def by_value(valid: Any, value: Any) -> Any:
    """The plain form of a number that equals it: 1 of True and of 1.0, True of 1."""
    if isinstance(valid, (list, tuple)) and isinstance(value, list) and len(value) == len(valid):
        items = [by_value(*pair) for pair in zip(valid, value)]
        return None if None in items else tuple(items)
    if type(valid) not in (bool, int, float) or not isinstance(value, (int, float, fractions.Fraction)):
        return None
    if value - value != 0 or abs(value) > 2**63:  # nan and infinite
        return None
    return type(valid)(value) if type(valid)(value) == value or type(valid) is float else None


@pytest.mark.parametrize(("name", "label"), [(name, label) for name, call in CALLS.items() for label in call.keywords])
def test_every_kind_of_argument_is_right_or_refused(
    name: str, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, valid, wrong = CALLS[name], CALLS[name].keywords[label], []
    monkeypatch.chdir(tmp_path)
    if {"path", "specs"} & {*call.keywords}:  # the kernel is there before the first call
        Path("run.json").write_text(json.dumps(record_of([SPEC])))
        Path("llama").mkdir()
        Path("llama/config.json").write_text(json.dumps(LLAMA))
        bundle.write(Path("there.zip"), [(SPEC, "sm_90")], 1)

    def result(value: Any) -> Any:
        """What a call returns, and its arguments afterwards."""
        given = {name: copy.deepcopy(x) for name, x in call.keywords.items() if name != label}
        given[label] = copy.deepcopy(value) if isinstance(value, Tensor) else value
        with torch.no_grad():
            return plain(call.func(*call.args, **given)), plain([x for x in given.values() if isinstance(x, Tensor)])

    want = result(valid)
    own = [kinds for kinds, names in TAKES.items() if f"{name}.{label}" in names.split(", ")]
    taken = ", ".join(own).split(", ")
    for kind, value in kinds_of(valid).items():
        meant = by_value(valid, value)
        try:
            got = result(value)
        except (jitrope.InvalidInput, jitrope.CacheError) as error:
            text = str(error)
            names = "|".join((label, NAMED.get(f"{name}.{label}", label), *["cannot (read|write)"] * (label == "path")))
            named = meant is not None or re.search(rf"(?<![a-z_])({names})(?![a-z_])", text)
            if not named or "\n" in text or kind in TAKEN:
                wrong.append(f"{kind}: {text}")
            continue
        except Exception as error:
            wrong.append(f"{kind}: {type(error).__name__} {error}"[:300])
            continue
        if kind in SAME and kind not in ("None", "expanded"):
            right = got == want
        elif meant is not None:
            right = got == result(meant)
        else:
            right = kind in ("None", "expanded", *taken)
        if not right:
            wrong.append(f"{kind}: it was taken")
    assert result(valid) == want, "afterwards the valid call is another"
    assert not wrong, "\n".join(wrong)


def test_every_parameter_gets_every_kind() -> None:
    spoken = {label for call in CALLS.values() for label in call.keywords}
    values = (Packed, Starts, Mrope, Shifts, Norm, KVCache, Pages, Quantize, DynamicQuantize, Ulysses)
    functions = [getattr(jitrope, name) for name in vars(jitrope) if name.startswith(("apply_", "prepare_"))]
    functions += [x for module in (tables, thd, cp) for name in module.__all__ if callable(x := getattr(module, name))]
    for thing in (*values, *functions, jitrope.configure, jitrope.planning, KernelCache, bundle.write):
        parameters = inspect.signature(thing).parameters.values()
        assert {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} <= spoken | {"rope_type"}, thing
