"""Arguments of any type, for every parameter of the functions other than the rotations.

Each (function, parameter, kind of value) is called. A call gives the same result as the plain form, or it is refused
by one `InvalidInput` on one line, which names the argument. Nothing else is accepted, and afterwards the valid call
gives the same result as before.
"""

from __future__ import annotations

import copy
import fractions
import json
import os
import re
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import InvalidInput, tables, thd
from jitrope import context_parallel as cp
from jitrope.base import config
from jitrope.base.spec import record_of
from jitrope.jit.cache import KernelCache
from jitrope.tools import bundle
from jitrope.tools import prewarm as prewarming
from jitrope.tools.models import specs_of_model
from jitrope.tools.prewarm import specs_of

# ---- the kinds of values ---------------------------------------------------------------------------

SAME = ("numpy int", "int subclass", "numpy bool", "numpy float", "int for float", "list", "tuple", "numpy array",
        "as Path", "as str", "non-contiguous", "expanded", "Parameter", "int64", "None")  # fmt: skip
"""Kinds with the valid value, or none, in another form."""


class Number(int):
    """As an IntEnum's."""


def kinds_of(value: Any) -> dict[str, Any]:
    """Every kind of thing in place of a valid value."""
    kinds: dict[str, Any] = {
        "None": None, "a word": "nonsense", "empty str": "", "bytes": b"x", "module": torch.nn.Linear(2, 2),
        "python module": torch, "class": dict, "object": object(), "dict": {}, "set": {1}, "list of words": ["a", "b"],
        "list of lists": [[1], [2]], "empty list": [], "empty tuple": (), "numpy object": np.array([None, 1]),
        "numpy str": np.str_("nonsense"), "numpy 0-d": np.array(3), "numpy matrix": np.ones((2, 2)),
        "nan": float("nan"), "infinite": float("inf"), "complex": 1j, "huge int": 2**70, "negative": -7,
        "generator": (i for i in ()), "function": len, "fraction": fractions.Fraction(1, 3), "dtype": torch.qint8,
        "device": torch.device("cuda:77"),
        "0-d tensor": torch.tensor(3), "empty tensor": torch.empty(0), "bool tensor": torch.ones(2, dtype=torch.bool),
        "tensor of rank 7": torch.ones((1,) * 7), "meta tensor": torch.ones(3, device="meta"),
        "bool": True, "int": 1, "float": 2.0, "half float": 0.5,
    }  # fmt: skip
    if type(value) is bool:
        kinds |= {"numpy bool": np.bool_(value), "int for bool": int(value)}
    elif type(value) is int:
        kinds |= {"numpy int": np.int64(value), "int subclass": Number(value), "float for int": float(value)}
        kinds |= {"str of int": str(value), "tensor of int": torch.tensor(value), "numpy 0-d int": np.array(value)}
    elif type(value) is float:
        kinds |= {"numpy float": np.float64(value), "str of float": str(value), "tensor of float": torch.tensor(value)}
        kinds |= {"int for float": int(value)} if value == int(value) else {}
    elif isinstance(value, (list, tuple)) and all(isinstance(item, Path) for item in value):
        kinds |= {"list": list(value), "tuple": tuple(value)}
    elif isinstance(value, (list, tuple)) and all(isinstance(item, (int, float)) for item in value):
        kinds |= {"list": list(value), "tuple": tuple(value), "numpy array": np.array(value)}
        kinds |= {"longer": (*value, *value), "list of bools": [True] * len(value), "tensor": torch.tensor(value)}
    elif isinstance(value, os.PathLike):
        kinds |= {"as Path": Path(value), "as str": str(value), "null": f"{value}\0"}
    elif isinstance(value, Tensor):
        kinds |= variants(value)
        kinds |= {"as list": value.tolist(), "as numpy": value.numpy(), "as tuple": tuple(value)}
    return kinds


def variants(x: Tensor) -> dict[str, Tensor]:
    """The tensor with the same values in other places, and with others."""
    other = torch.float64 if x.is_floating_point() else torch.int16
    found = {
        "non-contiguous": torch.stack([x, x + 1], -1)[..., 0], "of another dtype": x.to(other), "on meta": x.to("meta"),
        "too short": x[:-1], "of another rank": x[None], "without axes": x.flatten()[0], "empty": x[:0],
        "expanded": x[:1].expand(x.shape), "Parameter": torch.nn.Parameter(x, requires_grad=False),
    }  # fmt: skip
    return found | ({} if x.is_floating_point() else {"int64": x.long(), "float for int": x.float()})


# ---- the functions ----------------------------------------------------------------------------------


class Row(NamedTuple):
    """A function with a valid call, and the kinds besides SAME that a parameter accepts with another meaning."""

    function: Callable[..., Any]
    valid: dict[str, Any]
    takes: dict[str, set[str]] = {}  # noqa: RUF012


FLOAT = {"int", "float", "half float", "fraction"}
PATHS = {"a word", "numpy str", "empty str"}
NEGATIVE = {"negative"}
POSITIONS = {"int", "0-d tensor", "tensor of int"}
FREQUENCIES = {"too short", "empty", "on meta", "meta tensor", "empty tensor"}


def cu(*offsets: int) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32)


def rows(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) / 7


def made(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """A call of a function that writes some of its arguments, and these arguments afterwards."""

    def call(**arguments: Any) -> Any:
        arguments = {name: x.clone() if name in names and clonable(x) else x for name, x in arguments.items()}
        before = {name: arguments[name].clone() for name in names if clonable(arguments[name])}
        try:
            function(**arguments)
        except InvalidInput:
            for name, x in before.items():
                assert x.is_meta or torch.equal(arguments[name], x), f"{name} was written by a call that was refused"
            raise
        return [arguments[name] for name in names]

    call.__name__ = function.__name__
    return call


def clonable(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_contiguous()


def partition(**arguments: Any) -> Any:
    part = cp.Partition(**arguments)
    return part.indices, part.position_ids, part.local_cu_seqlens, part.rows


def schedule(**arguments: Any) -> Any:
    found = cp.Schedule(**arguments)
    return found.position_ids, found.sent, found.mask, found.max_seqlen, *found.segments[:3]


def fixed(**arguments: Any) -> Any:
    found = cp.Schedule.fixed(**arguments)
    return found.cu_seqlens, found.sent, found.mask


def roped(**arguments: Any) -> Any:
    q = rows(8, 2, 4)
    return cp.all_gather_attention(q, q, q, cp.Schedule(cu(0, 3, 8), 8), rope=cp.Rope(**arguments))


def recorded(path: Any) -> Any:
    with jitrope.record(path) as seen:
        pass
    return seen


def configured(compile: Any) -> Any:
    try:
        jitrope.configure(compile=compile)
        return config.compile_allowed()
    finally:
        assert config._may_compile in (None, True, False)
        jitrope.configure(compile=None)


def invariant(batch_invariant: Any) -> Any:
    try:
        jitrope.configure(batch_invariant=batch_invariant)
        return config.batch_invariant()
    finally:
        jitrope.configure(batch_invariant=False)


def kernel_cache(**arguments: Any) -> Any:
    cache = KernelCache(**arguments)
    return cache.root, [layer.root for layer in cache.system]


def prewarmed(**arguments: Any) -> Any:
    return [(built.spec, built.arch, built.failed) for built in prewarming.prewarm(**arguments)]


def planned(**arguments: Any) -> Any:
    with jitrope.planning(**arguments) as specs:
        jitrope.apply_rope(*torch.empty(2, 1, 4, 2, 8, device="meta"), *torch.empty(2, 4, 4, device="meta"))
    return specs


def bundled(**arguments: Any) -> Any:
    return [(built.spec, built.arch) for built in bundle.write(**arguments)]


PART = {"cu_seqlens": cu(0, 3, 8), "tokens": 9, "cp_size": 2, "cp_rank": 1, "rule": "contiguous"}
SPEC = specs_of(heads=8)[0]
SCALE = {"attention_factor": FLOAT | NEGATIVE}
TABLE = {"positions": 6, "inv_freq": rows(4)}
LSE = {"lse": rows(2, 8), "lse_per_step": rows(2, 4), "cu_seqlens": cu(0, 4, 8), "lse_packed": True}
ATTEND = {
    "q": rows(8, 2, 4), "k": rows(8, 1, 4), "v": rows(8, 1, 4), "schedule": cp.Schedule(cu(0, 3, 8), 8),
    "layout": "thd", "softmax_scale": 0.5, "backend": "math", "return_lse": True, "return_max_logit": True,
    "keep_gathered": False, "head_groups": 1, "check": True, "rope": None,
}  # fmt: skip

ROWS: dict[str, Row] = {
    "inv_freq": Row(tables.inv_freq, {"rope_type": "default", "rotary_dim": 8, "theta": 100.0, "device": "cpu"},
        {"theta": {"float"}, "device": {"None"}}),
    "inv_freq linear": Row(tables.inv_freq, {"rope_type": "linear", "rotary_dim": 8, "factor": 2.0}, {"factor": FLOAT}),
    "inv_freq ntk": Row(tables.inv_freq, {"rope_type": "ntk", "rotary_dim": 8, "factor": 2.0}, {"factor": FLOAT}),
    "inv_freq dynamic": Row(tables.inv_freq, {
        "rope_type": "dynamic", "rotary_dim": 8, "factor": 2.0, "max_position_embeddings": 16, "seq_len": 40,
    }, {"factor": FLOAT, "max_position_embeddings": {"float", "float for int"},
        "seq_len": POSITIONS}),
    "inv_freq yarn": Row(tables.inv_freq, {
        "rope_type": "yarn", "rotary_dim": 8, "factor": 2.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
        "beta_slow": 1.0, "attention_factor": 1.5, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": True,
    }, {"factor": FLOAT, "original_max_position_embeddings": {"float", "float for int"}, "beta_fast": {"float", "int"},
        "beta_slow": FLOAT, "attention_factor": FLOAT, "mscale": FLOAT | NEGATIVE, "mscale_all_dim": FLOAT | NEGATIVE}),
    "inv_freq llama3": Row(tables.inv_freq, {
        "rope_type": "llama3", "rotary_dim": 8, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }, {"factor": FLOAT, "low_freq_factor": FLOAT, "high_freq_factor": {"float"},
        "original_max_position_embeddings": {"float", "float for int"}}),
    "inv_freq longrope": Row(tables.inv_freq, {
        "rope_type": "longrope", "rotary_dim": 4, "factor": 2.0, "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0],
        "original_max_position_embeddings": 16, "attention_factor": 1.5, "seq_len": 40,
    }, {"factor": FLOAT, "attention_factor": FLOAT, "original_max_position_embeddings": {"float", "float for int"},
        "seq_len": POSITIONS}),
    "inv_freq proportional": Row(tables.inv_freq, {
        "rope_type": "proportional", "rotary_dim": 8, "partial_rotary_factor": 0.5, "factor": 2.0,
    }, {"factor": FLOAT, "partial_rotary_factor": {"int", "half float", "fraction"}}),
    "inv_freq axial": Row(tables.inv_freq, {"rope_type": "axial", "rotary_dim": 8, "axes": 2, "in_turn": True}, {}),
    "from_config": Row(tables.from_config, {
        "config": {"rope_theta": 100.0, "head_dim": 8}, "layer_type": None, "seq_len": 4, "head_dim": 16,
        "device": "cpu",
    }, {"seq_len": POSITIONS, "device": {"None"}}),
    "cos_sin": Row(tables.cos_sin, {
        **TABLE, "attention_factor": 1.5, "width": "full", "interleaved": True, "dtype": torch.float16,
        "angles": "fp32",
    }, {**SCALE, "positions": POSITIONS, "inv_freq": FREQUENCIES}),
    "cos_sin positions": Row(tables.cos_sin, {"positions": torch.arange(6), "inv_freq": rows(4)},
        {"positions": {"int", "0-d tensor", "too short", "empty", "of another rank", "without axes", "int64", "bool",
                       "float"},
         "inv_freq": {"too short", "empty", "empty tensor"}}),
    "cos_sin_cache": Row(tables.cos_sin_cache, {
        **TABLE, "attention_factor": 1.5, "dtype": torch.float16, "angles": "fp32",
    }, {**SCALE, "positions": POSITIONS, "inv_freq": FREQUENCIES}),
    "freqs": Row(tables.freqs, {**TABLE, "width": "full", "interleaved": True},
        {"positions": POSITIONS, "inv_freq": FREQUENCIES}),
    "sequence_order_to_cp_rank_order": Row(thd.sequence_order_to_cp_rank_order, {
        "x": rows(8, 3), "cu_seqlens": cu(0, 4, 8), "cp_size": 2, "total_tokens": 8, "rule": "contiguous",
    }, {"x": {"of another dtype"}, "cu_seqlens": {"too short"}, "cp_size": {"int"}}),
    "cp_rank_order_to_sequence_order": Row(thd.cp_rank_order_to_sequence_order, {
        "x": rows(8, 3), "cu_seqlens": cu(0, 4, 8), "cp_size": 2, "total_tokens": 8, "rule": "contiguous",
    }, {"x": {"of another dtype"}, "cu_seqlens": {"too short"}, "cp_size": {"int"}}),
    "get_partitioned_indices": Row(thd.get_partitioned_indices, {
        "cu_seqlens": cu(0, 4, 8), "total_tokens": 8, "world_size": 2, "rank": 1, "rule": "contiguous",
    }, {"cu_seqlens": {"too short", "on meta"}, "total_tokens": {"int"}, "rank": {"int"}}),
    "copy_valid_tokens": Row(made(thd.copy_valid_tokens_from_per_split_to_rank_local, "out"), {
        "out": rows(8, 2), "x": rows(8, 2) + 9, "cu_seqlens_padded": cu(0, 4, 8), "cu_seqlens": cu(0, 3, 6),
    }),
    "read_half_tensor": Row(thd.read_half_tensor, {"x": rows(8, 2, 2), "cu_seqlens": cu(0, 4, 8), "half_idx": 1},
        {"x": {"too short", "empty", "of another dtype"}, "cu_seqlens": {"too short"}, "half_idx": {"int"}}),
    "second_half_lse_correction": Row(made(thd.second_half_lse_correction, "lse"), LSE,
        {"cu_seqlens": {"too short"}}),
    "read_second_half_lse": Row(thd.read_second_half_lse, {
        "lse": rows(2, 8), "cu_seqlens": cu(0, 4, 8), "lse_packed": True, "second_half_lse_seqlen": 5,
    }, {"lse": {"too short", "empty"}, "cu_seqlens": {"too short"}, "second_half_lse_seqlen": {"int"}}),
    "out_correction": Row(made(thd.out_correction, "out"), {
        "out": rows(8, 2, 4), "out_per_step": rows(8, 2, 4), "lse": rows(2, 8), "lse_per_step": rows(2, 8),
        "cu_seqlens": cu(0, 4, 8), "only_second_half": False, "lse_packed": True,
    }, {"cu_seqlens": {"too short"}}),
    "grad_correction": Row(made(thd.grad_correction, "grad"), {
        "grad": rows(8, 2, 4), "grad_per_step": rows(8, 2, 4), "cu_seqlens": cu(0, 4, 8), "first_half": "add",
        "second_half": "copy",
    }, {"cu_seqlens": {"too short"}}),
    "Partition": Row(partition, {**PART, "group": None},
        {"cu_seqlens": {"too short", "on meta"}, "tokens": {"int"}, "cp_rank": {"int"}}),
    "Partition padded": Row(partition, {**PART, "cu_seqlens_padded": cu(0, 4, 9)}, {"cu_seqlens": set()}),
    "Partition.shard": Row(lambda x: cp.Partition(**PART).shard(x), {"x": rows(9, 2)}, {"x": {"of another dtype"}}),
    "Partition.unshard": Row(lambda x: cp.Partition(cu(0, 3, 8), 9).unshard(x), {"x": rows(9, 2)},
        {"x": {"of another dtype"}}),
    "Schedule": Row(schedule, {
        **PART, "group": None, "cu_seqlens_padded": cu(0, 4, 9), "max_seqlen": 8, "causal": False, "window": (3, 1),
    }, {"cu_seqlens": set(), "tokens": {"int"}, "max_seqlen": {"int"}, "cp_rank": {"int"}}),
    "Schedule.fixed": Row(fixed, {
        "batch": 2, "seqlen": 8, "device": "cpu", "group": None, "cp_size": 2, "cp_rank": 1, "causal": False,
        "window": (3, 1), "rule": "contiguous",
    }, {"batch": {"int"}, "cp_rank": {"int"}, "cp_size": {"int"}, "device": {"None"}}),
    "all_gather_attention": Row(cp.all_gather_attention, ATTEND,
        {"softmax_scale": FLOAT | NEGATIVE, "head_groups": {"int"}}),
    "Rope": Row(roped, {"cos": rows(8, 2), "sin": rows(8, 2), "interleaved": True, "rotary_dim": 4, "rotary_offset": 0,
                        "rounding": "complex64"},
        {"rotary_offset": set()}),
    "configure": Row(configured, {"compile": False}, {"compile": {"bool"}}),
    "configure batch_invariant": Row(invariant, {"batch_invariant": True}, {"batch_invariant": {"bool"}}),
    "on_compile": Row(lambda callback: jitrope.on_compile(callback)(), {"callback": print},
        {"callback": {"class", "function", "module"}}),
    "record": Row(recorded, {"path": Path("run.json")}, {"path": PATHS}),
    "KernelCache": Row(kernel_cache, {"root": Path("kernels"), "system": (Path("layer"),)},
        {"root": PATHS, "system": {"empty list", "empty tuple", "list of words"}}),
    "KernelCache.prune": Row(lambda **a: KernelCache(Path("none")).prune(**a), {"older_than": 5, "dry_run": True},
        {"older_than": {"int"} | FLOAT}),
    "KernelCache.clear": Row(lambda **a: KernelCache(Path("none")).clear(**a), {"dry_run": True}),
    "bundle.write": Row(bundled, {"path": Path("k.zip"), "kernels": [(SPEC, "sm_90")], "jobs": 1},
        {"path": PATHS, "jobs": {"int"}}),
    "bundle.load": Row(lambda **a: len(bundle.load(**a)), {"path": Path("there.zip")}, {"path": PATHS}),
    "bundle.entries": Row(lambda **a: len(bundle.entries(**a)), {"path": Path("there.zip")}, {"path": PATHS}),
    "prewarm": Row(prewarmed, {"specs": [SPEC], "archs": ["sm_90"], "jobs": 1},
        {"specs": {"empty list", "empty tuple", "generator", "dict", "empty tensor"},
         "archs": {"empty list", "empty tuple", "generator", "dict", "empty tensor"}, "jobs": {"int"}}),
    "read_record": Row(prewarming.read_record, {"path": Path("run.json")}, {"path": PATHS}),
    "specs_of": Row(specs_of, {
        "heads": [8, 2], "head_dim": 128, "dtype": "bf16", "call": "bshd heads q k > rotate cos sin > fresh",
        "width": "half", "backward": True,
    }, {"heads": {"int", "bool"} | FLOAT, "head_dim": {"int"}, "call": {"empty str"}}),
    "specs_of_model": Row(lambda **a: len(specs_of_model(**a)), {"path": Path("llama"), "dtype": "bf16",
        "backward": False}, {"path": PATHS, "dtype": {"None"}}),
    "planning": Row(planned, {"launches": ["auto"], "sm_count": 132},
        {"launches": {"empty list", "empty tuple", "generator", "dict", "empty tensor"}, "sm_count": {"int"}}),
}  # fmt: skip


# ---- the test ---------------------------------------------------------------------------------------


@pytest.fixture
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up the files of the valid calls."""
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text(json.dumps(record_of([SPEC])))
    Path("llama").mkdir()
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}
    Path("llama/config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16", **sizes}))
    bundle.write(Path("there.zip"), [(SPEC, "sm_90")], 1)


def same(a: Any, b: Any) -> bool:
    """Whether two results, with tensors anywhere in them, are equal; of meta tensors the shapes."""
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or a.shape != b.shape:
            return False
        return a.is_meta or b.is_meta or torch.equal(a.double(), b.double())
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def plain(valid: Any, kind: str, value: Any) -> Any:
    """The plain form of a value of a kind of SAME."""
    return value.clone() if kind == "expanded" else valid if value is not None else None


def by_value(valid: Any, value: Any) -> Any:
    """The plain form of a number that equals it: 1 of True and of 1.0, True of 1."""
    if isinstance(valid, (list, tuple)) and isinstance(value, list) and len(value) == len(valid):
        items = [by_value(*pair) for pair in zip(valid, value)]
        return None if None in items else tuple(items)
    if type(valid) not in (bool, int, float) or not isinstance(value, (int, float, fractions.Fraction)):
        return None
    if value - value != 0:  # nan and infinite
        return None
    return type(valid)(value) if type(valid)(value) == value or type(valid) is float else None


def cells(row: Row) -> Iterator[tuple[str, str, Any]]:
    for label, valid in row.valid.items():
        for kind, value in kinds_of(valid).items():
            yield label, kind, value


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize("name", ROWS)
def test_every_kind_of_argument_is_right_or_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    row, counts, wrong = ROWS[name], Counter[str](), []
    want = row.function(**copy.deepcopy(row.valid))
    for label, kind, value in cells(row):
        takes = row.takes.get(label, set())
        meant = by_value(row.valid[label], value)
        try:
            with torch.no_grad():
                got = row.function(**{**copy.deepcopy(row.valid), label: value})
        except (InvalidInput, jitrope.CacheError) as error:
            unread = label == "path" and re.match("cannot (read|write) ", str(error)) is not None
            ok = "\n" not in str(error) and (named(label, str(error)) or unread or meant is not None)
            counts["refused"] += ok
            if not ok or (
                kind in SAME and kind not in ("None", "expanded", "non-contiguous", "int64", "int for float")
            ):
                wrong.append(f"{label}, {kind}: {error}")
            continue
        except Exception as error:
            wrong.append(f"{label}, {kind}: {type(error).__name__} {error}"[:300])
            continue
        if kind in SAME:
            form = plain(row.valid[label], kind, value)
            right = want if form is row.valid[label] else row.function(**{**copy.deepcopy(row.valid), label: form})
            ok = same(got, right)
        elif meant is not None:
            ok = same(got, row.function(**{**copy.deepcopy(row.valid), label: meant}))
        else:
            ok = kind in takes or (kind == "bool" and type(row.valid[label]) is bool)
        counts["right"] += ok
        if not ok:
            wrong.append(f"{label}, {kind}: it was taken, and gave {got}"[:300])
        assert same(row.function(**copy.deepcopy(row.valid)), want), f"after {label}, {kind} the valid call is another"
    with capsys.disabled():
        print(f"\n{name}: {counts['right']} right, {counts['refused']} refused, {len(wrong)} wrong")
    assert not wrong, "\n".join(wrong)


def named(label: str, message: str) -> bool:
    return re.search(rf"(?<![a-z_]){re.escape(label)}(?![a-z_])", message) is not None


def test_every_parameter_has_cells() -> None:
    """The row of a function has all its parameters."""
    import inspect

    for name, row in ROWS.items():
        if isinstance(row.function, types.FunctionType) and row.function.__module__.startswith("jitrope"):
            parameters = inspect.signature(row.function).parameters.values()
            given = {label for other in ROWS.values() if other.function is row.function for label in other.valid}
            left = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} - given
            assert not left - {"theta", "device"}, (name, left)
    for module, rows_of in ((thd, ROWS), (cp, ROWS)):
        covered = {row.function.__name__ for row in rows_of.values()} | {"Partition", "Schedule", "Rope"}
        assert set(module.__all__) <= covered, set(module.__all__) - covered


def test_a_setting_that_is_none_changes_nothing() -> None:
    jitrope.configure(compile=False)
    try:
        with pytest.raises(InvalidInput, match=r"^configure: compile is 'no'; it must be True or False$"):
            jitrope.configure(compile="no")  # type: ignore[arg-type]
        assert not config.compile_allowed()
    finally:
        jitrope.configure(compile=None)
