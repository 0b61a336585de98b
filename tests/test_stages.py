"""Every pair of sources, stages, places and kinds of tensors (`calls`), against a chain in fp64 (`sweep`).

Each test is a column of one table. A call's name has the values that are not plain.
"""

from __future__ import annotations

import contextlib
import cProfile
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import jitrope
from jitrope import InvalidInput
from jitrope.torch_state import memory_speed

from . import calls, oracle
from .calls import CALLS, GRADIENTS, Case, Table, fits, ident, named
from .devices import DEVICES
from .host import backend
from .results import LARGEST, Caches, check_gradients, flat, gradients, outputs, places_of, run, same, whole
from .sweep import FUNCTIONS, Made, S

OURS = str(Path(jitrope.__file__).parent)
MODES = [*CALLS, *GRADIENTS, *calls.PROJECTIONS, *calls.OF_PROJECTED]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [*CALLS, *map(named, calls.THREES), *calls.PROJECTIONS], ids=ident)
def test_a_call_is_the_chain_of_its_stages(case: Case, device: str) -> None:
    """Results, and memory that nothing names. The second call has other data, and is a known one."""
    counts = []
    for seed in (7, 8):
        m, like = Made(case, device, seed), Made(case, "cpu", seed)
        written = {"inplace": ("q", "k", "qkv"), "own": ("k", "qkv", *"q" * m.is_own)}.get(case["out"], ())
        before = {name: x.clone() for name, x in m.tensors.items() if name not in written}
        places = places_of(m)
        words = {**m.words(), **places.words}
        with cProfile.Profile() as profile:
            results = m.function(*m.arguments(), **words)
        ours = [x for x in profile.getstats() if getattr(x.code, "co_filename", "").startswith(OURS)]
        counts.append(sum(x.callcount for x in ours))
        places_of(like)  # draws the same numbers
        places.check(like, got := m.named(results))
        base = m.tensors["qkv"].untyped_storage().data_ptr() if "qkv" in m.tensors else 0
        views = {"v": case["source"] == "view", "g": case["source"] == "gated"}
        assert all(got[x].untyped_storage().data_ptr() == base for x in m.outputs if views.get(x))
        assert all(same(m.tensors[name], x) for name, x in before.items())
    if device == backend.DEVICE and case["more"] != "check":
        assert counts[1] < counts[0] / 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [*GRADIENTS, *calls.OF_PROJECTED], ids=ident)
def test_a_gradient_is_that_of_the_chain(case: Case, device: str) -> None:
    """Of all tensors that can have one, by all results or by one."""
    m, like = Made(case, device, leaves=True), Made(case, "cpu", leaves=True)
    check_gradients(like, gradients(outputs(m), m))


@pytest.mark.slow
@pytest.mark.tenth
@pytest.mark.parametrize(
    ("dynamic", "case"),  # sizes that may be any take torch ten times as long
    [
        pytest.param(name == "dynamic", case, id=f"{name}-{ident(case)}")
        for name, cases in (("static", CALLS), ("dynamic", CALLS[::6]))
        for case in cases
    ],
)
def test_compiled(dynamic: bool, case: Case) -> None:
    """The bits of the same call, with two numbers of tokens if it is dynamic."""
    torch._dynamo.reset()
    function = getattr(jitrope, FUNCTIONS[case["source"]])
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (S, S + 2) if dynamic else (S,):
        found = []
        for call in (compiled, function):
            m = Made(case, "cpu", tokens=tokens)
            places = places_of(m)
            words = {**m.words(), **places.words}
            if case["more"] == "check":
                with pytest.raises(Exception, match=r"check=True waits for the device, which torch\.compile"):
                    compiled(*m.arguments(), **words)
                return
            results = call(*m.arguments(), **words)
            found.append([*flat(results), *places.tensors, *m.tensors.values()])
        assert len(found[0]) == len(found[1])
        assert all(same(x, y) for x, y in zip(*found))


UTILS = ("test_schema", "test_autograd_registration", "test_faketensor")


class Ops(TorchDispatchMode):
    """Keeps the calls of jitrope's ops."""

    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if op.namespace == "jitrope":
            self.calls.append((op, args, kwargs or {}))
        return op(*args, **(kwargs or {}))


def launched(case: Case) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The ops of a call, with their arguments."""
    m = Made(case, "cpu", leaves="learned" in case)
    places = places_of(m)
    if case["out"] == "inplace":
        m.tensors = {name: x.clone() for name, x in m.tensors.items()}
    ops = Ops()
    ops.calls = []
    with ops:
        m.call(**places.words)
    assert ops.calls
    return ops.calls


@pytest.mark.tenth
@pytest.mark.parametrize("case", MODES, ids=ident)
def test_opcheck(case: Case) -> None:
    """torch compares no fp8 on a CPU, and fp4 nowhere; `test_a_call_is_the_chain` sees what is written."""
    for op, args, kwargs in launched(case):
        given = [x for xs in args if isinstance(xs, list) for x in xs]
        small = any(isinstance(x, Tensor) and x.dtype in LARGEST for x in given)
        torch.library.opcheck(op, args, kwargs, test_utils=UTILS[small:])


@pytest.mark.slow
@pytest.mark.tenth
@pytest.mark.parametrize("case", GRADIENTS[::4], ids=ident)
def test_compiled_for_any_size_with_its_gradient(case: Case) -> None:
    for op, args, kwargs in launched(case):
        torch.library.opcheck(op, args, kwargs, test_utils="test_aot_dispatch_dynamic")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", MODES, ids=ident)
def test_planned_as_launched(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results on meta tensors are as those in memory; on a GPU the planned kernels are those that are launched.

    A call is one launch, with one more for the scales of rows, and for a v that is normalised apart. In `tests.host`
    launches are counted, and no kernel runs.
    """
    on_host, leaves = backend.DEVICE == "cpu", "learned" in case
    monkeypatch.setattr(backend, "library", Mock())
    m = Made(case, device, leaves=leaves)
    like = Made({**case, "more": "none"} if case["more"] == "check" else case, "meta", leaves=leaves)
    gpu = (132, 0.0)
    if device != "cpu" or on_host:
        found = torch.cuda.get_device_properties(0)
        gpu = found.multi_processor_count, memory_speed(found)
    with jitrope.record() as known:
        pass
    count = backend.launched.copy()
    with jitrope.record() as needed:
        results = run(m)
    with jitrope.planning(["auto"], *gpu) as specs:
        planned = run(like)
    assert len(planned) == len(results)
    for x, y in zip(planned, results):
        if x is None or y is None:  # no gradient at all, or zeros
            assert y is None or on_host or not y.any()
        else:
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
    names = {spec.name for spec in specs}
    assert leaves or 1 <= len(specs) <= 1 + (case["convert"] in calls.OF_ROWS) + (case["norm"] == "v_norm")
    if leaves and m.wanted == "g":  # outside of planning a gradient of the gate alone launches that of zeros too
        return
    if on_host:
        launches = backend.launched - count
        assert {*launches} == names
        assert leaves or launches.total() == len(specs)
    elif device != "cpu":
        assert {*needed[len(known) :]} <= {*specs} <= {*needed}


def plainest(rules: list[tuple[dict[str, Any], str]]) -> Iterator[Any]:
    """For each rule a case for each of its values, otherwise as plain as the others allow, and its words."""
    for number, (rule, text) in enumerate(rules):
        table = Table(calls.AXES, [*calls.UNSAID, *[other for other, _ in calls.REFUSED if other is not rule]])
        every = [{axis: x[n % len(x)] for axis, x in rule.items()} for n in range(max(map(len, rule.values())))]
        learned = [{x: values.pop(x) for x in ("learned",) if x in values} for values in every]
        found = [(table.case(values, lambda numbers, _: numbers), more) for values, more in zip(every, learned)]
        assert any(case for case, _ in found), f"other rows hold wherever {rule} does"
        yield from [pytest.param(case | more, text, id=f"{number}-{ident(case)}") for case, more in found if case]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("case", "text"), [*plainest(calls.REFUSED)])
def test_a_refusal_is_by_name_and_writes_nothing(case: Case, text: str, device: str) -> None:
    m = Made(case, device)
    places = places_of(m)
    before = [x.clone() for x in (*m.tensors.values(), *places.tensors)]
    sentence = ".*".join(map(re.escape, f"{FUNCTIONS[case['source']]}: {text}".split("...")))
    with pytest.raises(InvalidInput, match=f"^{sentence}$"):
        m.call(**places.words)
    assert all(same(x, y) for x, y in zip((*m.tensors.values(), *places.tensors), before))


@pytest.mark.parametrize(("case", "text"), [*plainest(calls.WITHOUT_GRADIENT)])
def test_a_call_without_a_gradient_is_refused(case: Case, text: str) -> None:
    m = Made(case, "cpu", leaves=True)
    places = places_of(m)
    m.tensors = {name: x.clone() for name, x in m.tensors.items()}
    with pytest.raises(InvalidInput, match=f"{text}.*"):
        m.call(**places.words)
    with torch.no_grad():
        m.call(**places.words)


def test_every_pair_is_in_a_call_or_refused() -> None:
    """Few calls hold every pair; a pair without a call is that of one rule, or of two that leave no other value."""
    assert len(CALLS) < 450
    assert len(GRADIENTS) < 250
    for cases, never, axes in ((CALLS, calls.NEVER, calls.AXES), (GRADIENTS, calls.NO_GRADIENTS, calls.WITH_GRADIENT)):
        assert not any(fits(case, rule) for case in cases for rule in calls.RULES)
        covered = {frozenset(pair) for case in cases for pair in itertools.combinations(case.items(), 2)}
        covered |= {frozenset(pair.items()) for pair in never}
        for a, b in itertools.combinations(axes, 2):
            assert all(frozenset(((a, x), (b, y))) in covered for x in axes[a] for y in axes[b])


ALIKE = [
    case
    for case in CALLS
    if case["source"] != "two"  # two tables are not one
    and (case["source"], case["convert"]) != ("latent", "of_v")  # its v is not like k
    and not fits({**case, "convert": "none"} if case["out"] in calls.CACHES else case, calls.IDLE)  # a cache alone
    and (case["norm"] == "none" or case["strides"] != "apart")  # torch adds the squares in another order
]


# With other strides a kernel adds the squares of a norm in another order.
@pytest.mark.parametrize(
    ("device", "case"),
    [
        *[pytest.param("cpu", case, id=ident(case)) for case in ALIKE],
        *[
            pytest.param(backend.DEVICE, case, marks=pytest.mark.gpu, id=f"{ident(case)}-cuda")
            for case in ALIKE
            if case["norm"] == "none"
        ],
    ],
)
def test_the_bits_are_those_of_separate_heads(device: str, case: Case) -> None:
    """Of `prepare_qkv` of contiguous q, k and v in fresh tensors, in another launch."""
    m, like = Made(case, device), Made(case, device)
    places, twin = places_of(m), places_of(like)
    jitrope.configure(launch="token_linear")
    got = m.call(**places.words)
    jitrope.configure(launch="grid_2d")
    # Fresh results have the numbers of a cache without scales, and without a norm of its v, before they are converted.
    cached = case["out"] in calls.CACHES
    apart = (*calls.BLOCKS, *calls.PE, "fp8_slots", "fp8_pages")
    fresh = case["out"] not in apart and case["norm"] not in ("of_v", "k_nope")
    left = ("heads", "order", "copy_v", "copy_gate", "bias")
    if case["norm"] == "means" and "q" not in like.letters:
        like.weights["q_mean"] = like.weights["k_mean"]
    words = {name: x for name, x in like.words().items() if name not in left}
    if case["source"] == "latent":
        words.update(zip(("rotary_offset", "rotary_dim"), like.part))
    if fresh and cached and words.pop("quantize", None):
        words.update({"hadamard": True} if case["transform"] == "head" else {})
    # Positions that follow from lengths, where nothing else does, are ids; spare tokens have results then.
    of_sequences = case["convert"] in (*calls.OF_ROWS, "of_rows", "tiles") or case["more"] == "unrotated"
    counted = case["positions"] in ("starts", "cp", *calls.PACKED) and not of_sequences
    if counted:
        ids = oracle.rows_of(like.tokens, device, like.turn)[0][0].to(like.ints)
        words["positions"] = ids[0] if like.layout == "thd" else ids
        words.update({} if like.layout == "bshd" else {"layout": like.layout})
    letters = [x for x in like.letters if x != "v" or case["out"] not in calls.OF_K]
    letters = letters if "q" in letters else ["k", *letters]  # then k's heads are q's too, and so are its means
    heads = [oracle.heads(torch.cat(like.read(x), 1).to(like.dtype), like.layout).contiguous() for x in letters]
    words |= {} if fresh else twin.words
    want = dict(zip("qkv", jitrope.prepare_qkv(*[*heads, None, None][:3], **words)))
    pairs = [(whole(got[x], m, x), want[x]) for x in m.outputs.removesuffix("g")]
    if m.cu and (counted or m.in_place):  # spare tokens are zeros, or stay
        pairs = [([x[: m.ends[-1]] for x in flat(y)], [x[: m.ends[-1]] for x in flat(z)]) for y, z in pairs]
    if isinstance(places, Caches):
        for x in (places, twin):
            x.named = {slot: token for slot, token in x.named.items() if token < m.ends[-1] or not m.cu}
        if fresh:
            pairs = pairs if case["convert"] == "none" else []
            for letter in places.letters:
                stored = oracle.heads(want[letter], m.layout).flatten(0, 1)[[*places.named.values()]]
                pairs.append((places.stored(places.caches[letter]), stored))
        else:
            pairs += [(places.stored(x), twin.stored(y)) for x, y in zip(places.tensors, twin.tensors)]
    for x, y in pairs:
        assert [z.shape for z in flat(x)] == [z.shape for z in flat(y)]
        assert all(same(*both) for both in zip(flat(x), flat(y)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CALLS
        if case["norm"] == "none"
        and case["table"] not in ("angles", "scaled")
        and case["rounding"] in ("fp32", "dtype")
    ],
    ids=ident,
)
def test_the_bits_are_those_of_a_cpu(case: Case) -> None:
    """Without a sum of squares, a sine, or a product that joins a sum."""
    found = []
    for device in ("cpu", backend.DEVICE):
        m = Made(case, device)
        places = places_of(m)
        with backend.plain() if device == backend.DEVICE and not found else contextlib.nullcontext():
            got = m.call(**places.words)
        found.append([x.cpu() for x in (*flat(got), *places.tensors)])
    assert all(map(same, *found))
