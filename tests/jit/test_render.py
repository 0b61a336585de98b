"""Spec -> source. The source is readable, and errors name the line of the template."""

from __future__ import annotations

import json
import re
import struct
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import jinja2
import pytest
from jinja2 import meta

from jitrope.base.errors import CompileError, InvalidInput
from jitrope.base.spec import Spec, record_of, spec_from_dict
from jitrope.jit import compiler, render
from jitrope.plan import arguments
from jitrope.plan.spec import RopeSpec
from jitrope.thd.spec import CorrectionSpec, RowsSpec, SegmentsSpec, rows_spec

from ..calls import MODELS, named
from ..machine_code import ARCHS, disassemble, opcode
from ..results import planned

(SPEC,) = planned(named("rope 32+8 128"), tokens=4096)
NORM_SPEC, GRADIENT_SPEC = planned(named("once 32+8 128 grad"), tokens=4096)
(PROJECTED_SPEC,) = planned({**named("once 32+8 128"), "source": "projected"}, tokens=4096)
(ACROSS_SPEC,) = planned(named("norm=across 40+40 128"), tokens=4096)
PLAIN_SPECS = [
    rows_spec((2048, 1024), 1024, "to_ranks", cp_size=2),
    RowsSpec("positions", writes=True, cp_size=4, rule="contiguous", index_dtype="int64"),
    *[SegmentsSpec(rows, "int32", 2, "dual_chunk", False, False, True, True, 256) for rows in (False, True)],
    CorrectionSpec("out", "nothing", "add", True, "bf16", "int32", 8),
]
ROPE_SPECS = [SPEC, NORM_SPEC, ACROSS_SPEC, GRADIENT_SPEC]
SPECS = pytest.mark.parametrize("spec", [*ROPE_SPECS, *PLAIN_SPECS], ids=lambda spec: spec.call or spec.name)
TEMPLATES = Path(__file__).parents[2] / "templates"
ROPE_ENTRIES = {"rope.cu.jinja", "qk_norm_rope.cu.jinja", "qk_norm_rope_backward.cu.jinja", "project_qkv.cu.jinja"}
ENTRIES = ROPE_ENTRIES | {spec.template for spec in PLAIN_SPECS}
# A template's constants are in one block.
PARAMETERS = {"parameters.cuh.jinja", "rows.cuh.jinja", "segments.cuh.jinja", "thd_corrections.cu.jinja"}
HEADERS = {path.name for path in TEMPLATES.glob("*.cuh*")}
# Kernels with other stages, so that each file is in one.
STAGES = {"scales_q": True, "added_bias": True, "hadamard": True, "q_out": "fp8", "dynamic": True, "per_row": True}
WITH_STAGES = [replace(NORM_SPEC, **more) for more in (STAGES, {"interleaved_out": True})]
STAGE_SPECS = [*WITH_STAGES, replace(SPEC, v_dim=64, copy_v=True)]
TOUCHES = "LD(?!C)|ST|ATOM|RED|CCTL|U?BLK|UTMA|BR|JMP|CALL|EXIT|PREEXIT"
"""Instructions that access memory, but for a launch's parameters, leave the straight line, or let the next begin."""


def cuda(spec: Spec) -> str:
    """The source without the comment at its head."""
    return render.render(spec).text.removeprefix(render.head(spec))


def test_every_template_is_used() -> None:
    assert {spec.template for spec in (*ROPE_SPECS, PROJECTED_SPEC)} == ROPE_ENTRIES
    used = set().union(*[render._texts(entry) for entry in ENTRIES])
    assert {path.name for path in TEMPLATES.glob("*.cu*")} == used


@SPECS
def test_every_constant_is_used_and_none_is_missing(spec: Spec) -> None:
    used = set()
    for text in render._texts(spec.template).values():
        used |= meta.find_undeclared_variables(render.environment().parse(text))
    of_norms = set() if isinstance(spec, RopeSpec) and spec.norm else used & set(NORM_SPEC.constants())
    assert used - of_norms <= set(spec.constants()) <= used


def test_assembly_that_reads_or_writes_memory_is_volatile() -> None:
    """Otherwise the compiler may move a load before the condition that guards it."""
    pattern = r'\basm\b(\s+volatile)?\s*\(\s*"((?:ld|st|red|atom|prefetch)\b[^"]*)'
    found = re.findall(pattern, "".join(path.read_text() for path in TEMPLATES.glob("*.cu*")))
    assert len(found) > 5
    assert not [text for volatile, text in found if not volatile]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS[1:])
def test_kernels_wait_for_earlier_ones_before_they_touch_memory(arch: str, tmp_path: Path) -> None:
    """The order of dependent launches (`dependents.cuh`), in machine code."""
    tiled = [spec for call in ("rope", "rope packed", "once slots") for spec in planned(named(call), ["grid_2d"])]
    specs = [*ROPE_SPECS, *tiled, *PLAIN_SPECS, *[PROJECTED_SPEC] * (arch == "sm_90")]
    cubins = [compiler.compile_source(render.render(spec), arch + spec.features)[0] for spec in specs]
    for spec, lines in zip(specs, disassemble(cubins, arch, tmp_path)):
        codes = [*map(opcode, lines)]
        early = [x for x in codes[: codes.index("ACQBULK")] if re.match(TOUCHES, x)]  # the wait
        assert not early, (spec.name, early)
        assert not [x for x in codes if "CONSTANT" in x], spec.name  # ld.global.nc


@pytest.mark.parametrize("name", sorted(ENTRIES | PARAMETERS))
def test_constants_are_in_one_block(name: str) -> None:
    """Below it a template only chooses what its kernel has, but for the arguments."""
    text = (TEMPLATES / name).read_text()
    marker = "// --------------------------------------------------------------------------------------------"
    assert (marker in text) == (name in PARAMETERS)
    below = text.split(marker)[-1]
    assert {*re.findall(r"{{ (\w+) }}", below)} == ({"arguments"} if name == "parameters.cuh.jinja" else set())
    assert {*re.findall(r"{[%#] ?(\w*)", below)} <= {"if", "elif", "else", "endif", "include"}


def test_a_plain_rotation_has_few_constants() -> None:
    block = cuda(SPEC).split("// -----------------------------------------------------------")[0]
    assert len(re.findall(r"^(?:constexpr|using) ", block, re.MULTILINE)) <= 40


def test_no_jinja_in_plain_headers() -> None:
    for path in TEMPLATES.glob("*.cuh"):
        assert not re.search(r"{{|{%|{#", path.read_text())


@SPECS
def test_a_text_is_whole_readable_and_says_what_it_is(spec: Spec) -> None:
    source, head = render.render(spec), render.head(spec)
    assert render.render(spec) == source
    assert source.text.endswith("}\n")
    assert not re.search(r"\n\n\n|#include|[^\S\n]\n", source.text)
    assert max(map(len, source.text.splitlines())) <= 120
    blocks = "" if spec in PLAIN_SPECS else ", BLOCKS_PER_SM" if spec in ROPE_SPECS[1:] else ", MIN_BLOCKS"
    assert f'extern "C" __global__ void __launch_bounds__(THREADS{blocks}) {spec.entry}(' in source.text
    assert head.splitlines()[0] == f"// {spec.name}"
    assert f"Begin at the kernel, {spec.entry}, at the end" in head
    written = "".join(line.removeprefix("//: ") for line in head.splitlines() if line.startswith("//: "))
    assert json.loads(written) == json.loads(json.dumps(record_of([spec.of("")])))
    assert cuda(spec).startswith(f'#line 1 "{spec.template}"\n')


EVIL = ["x\n#error", "x\r#error", "x\u2028#error", "x\\", "??/", "*/ #error /*", '"', "a b " * 60, "{name}"]


@pytest.mark.parametrize("text", EVIL)
def test_no_text_ends_the_comment_at_the_head(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another author's spec, with any text in its name and in a field."""
    (tmp_path / "thd_corrections.cu.jinja").write_text('extern "C" __global__ void jitrope_thd_corrections() { nope; }')
    for name, value in (("name", text), ("check", lambda _: None), ("constants", lambda _: {})):
        monkeypatch.setattr(CorrectionSpec, name, value)
    monkeypatch.setattr(render, "TEMPLATE_PATHS", [tmp_path])
    for cached in (render._texts, render.environment):
        monkeypatch.setattr(render, cached.__name__, cache(cached.__wrapped__))
    spec = replace(PLAIN_SPECS[-1], quantity=text)
    lines = render.head(spec).splitlines()
    assert all(line.startswith("//") and line.isascii() and not line.endswith("\\") for line in lines)
    with pytest.raises(CompileError) as caught:  # only the template's error, at its line
        compiler.compile_source(render.render(spec), "sm_90")
    found = re.findall(r"\S+ error: .*", str(caught.value))
    assert found == ['thd_corrections.cu.jinja(1): error: identifier "nope" is undefined']


# What a constant needs to be in the text of its kernel.
_OF_BOTH = {"cu_seqlens_dtype": "int32", "start_positions_dtype": "int32", "position_ids_dtype": "int32", "cp_size": 3}
_OF_BOTH |= {"copy_v": True, "slot_mapping_dtype": "int32", "page_table_dtype": "int32", "q_out": "int8"}
_OF_BOTH |= {"kv_out": "int8", "added_bias": True, "axis_of_pair": (0, 1) * 32, "q_per_group": 2, "kv_per_group": 3}
WHOLE = _OF_BOTH, {"two_streams": True, "dynamic": True, "across_heads": True, "row_heads": (4, 4)}


def test_ingredients_follow_every_field_and_file() -> None:
    flags = "interleaved inverse full_width per_head in_place interleaved_out freqs packed_table copy_v batch_inner "
    flags += "one_row wide rotate_k scales_q prefixed shifts head_scales added_bias gated "
    flags += "page_indptr cu_seqlens_q clear_page batch_indices convert_v"
    changes = {"dtype": "fp16", "table_dtype": "bf16", "head_dim": 256, "rotary_dim": 64, "rounding": "complex64"}
    changes |= {"cu_seqlens_dtype": "int64", "launch": "grid_2d", "vec": 4, "chunks": 1, "table_vec": 2, "tiles": 1}
    changes |= {"tokens_per_block": 2, "heads_per_block": 7, "one_step": False, "rotary_offset": 8, "cp_size": 2}
    changes |= {"start_positions_dtype": "int64", "q_per_group": 4, "position_ids_dtype": "int64", "v_dim": 64}
    changes |= {"axis_of_pair": (0, 0, 1, 1) * 16, "slot_mapping_dtype": "int64", "page_size": 16, "q_out": "fp8"}
    changes |= {"kv_out": "fp8", "table_step": 2, "page_table_dtype": "int64", "kv_per_group": 2, "v_per_k": 8}
    changes |= {"pe_dtype": "fp8"}
    changes |= dict.fromkeys(flags.split(), True)
    flags = "hadamard dynamic dynamic_q weighs_q swizzled block_cache per_row biased across_heads given_means "
    flags += "zero_centered after_rope two_streams two_tables gradient v_norm latent_norm projected round_projection "
    flags += "norm_nope"
    norms_own = {"norm_rounding": "none", "norm_kind": "layer_norm", "group": 32, "scale_out": "e8m0", "norm_k": False}
    norms_own |= {"row_heads": (8,), "norm_q": False, "weight_dtype": "fp32", "weight_vec": 2, "heads_per_thread": 4}
    norms_own |= {"blocks_per_sm": 7, "ring": not NORM_SPEC.ring, **dict.fromkeys(flags.split(), True)}
    assert changes.keys() | norms_own.keys() == SPEC.to_dict().keys() - {"kind", "call"}
    for spec, fields in ((SPEC, changes), (NORM_SPEC, norms_own)):
        for name, value in fields.items():
            other = replace(spec, **{name: value})
            assert render.ingredients(other) != render.ingredients(spec), name
            whole = replace(spec, **{**WHOLE[spec is NORM_SPEC], name: getattr(spec, name)})  # with its stage
            assert cuda(replace(whole, **{name: value})) != cuda(whole), name
    for entry in ROPE_ENTRIES:
        for name, text in render._texts(entry).items():
            assert (TEMPLATES / name).read_text() == text


def test_ingredients_follow_every_field_of_a_plain_spec() -> None:
    changes = {"map": "valid", "writes": True, "index_dtype": "int64", "cp_size": 3, "rule": "contiguous"}
    changes |= {"sums": True, "dtype": "bf16", "out_dtype": "bf16", "access_bytes": 4, "lanes": 8, "unroll": 3}
    changes |= {"rows": True, "full": True, "extends": True, "padded": False, "exchange": False, "threads": 64}
    changes |= {"quantity": "grad", "first": "add", "second": "copy", "packed": False, "vec": 2}
    for spec in (PLAIN_SPECS[0], PLAIN_SPECS[2], PLAIN_SPECS[4]):
        for name in spec.to_dict().keys() - {"kind"}:
            changed = changes[name] if changes[name] != getattr(spec, name) else "fp16"
            other = replace(spec, **{name: changed})
            assert render.ingredients(other) != render.ingredients(spec), name
            assert cuda(other) != cuda(spec), name


OF_GRADIENT = ("weight_dtype", "biased", "gradient", "v_gradient")
PROJECTED = ("projected", "weight_dtype")
STAGED = tuple(stage for stage in arguments.OPTIONAL if stage not in (*OF_GRADIENT[2:], "projected"))


@pytest.mark.parametrize(
    "stages", [(), STAGED, OF_GRADIENT, PROJECTED], ids=["plain", "staged", "gradient", "projected"]
)
def test_the_host_and_the_kernel_count_the_same_words(stages: tuple[str, ...]) -> None:
    """The compiler and the host give each field the same offset."""
    if compiler.nvrtc_version() < (13, 5):
        pytest.skip("this NVRTC has no __builtin_offsetof, which 13.5 has")
    spec: RopeSpec = PROJECTED_SPEC if stages == PROJECTED else NORM_SPEC if stages else SPEC
    if stages == OF_GRADIENT:
        spec = replace(spec, gradient=True, v_norm=True, copy_v=True, biased=True)
    if stages == STAGED:
        own = dict.fromkeys({*stages, "convert_v", "dynamic"} - {"paged", "dynamic_v", "weight_dtype"}, True)
        spec = replace(spec, **own, page_table_dtype="int32", page_size=16, copy_v=True, q_per_group=2)
    assert {*spec.stages} == {*stages}
    own = [[argument for stage in spec.stages for argument in arguments.OPTIONAL[stage][n]] for n in (0, 1)]
    names = arguments.address_names(spec.stages)
    assert len(names) == len(set(names)) == 15 + sum(len(argument.names) for argument in own[0])
    source = render.render(spec)
    at, checks = 0, []
    for argument in (*arguments.ADDRESSES, *own[0], *arguments.WORDS, *own[1]):
        checks.append(f"static_assert(__builtin_offsetof(Params, {argument.field}) == {8 * at});")
        at += arguments.WORDS_OF.get(argument.c_type, 1) * len(argument.names)
    checks.append(f"static_assert(sizeof(Params) == {8 * at});")
    arch = f"sm_90{spec.features}"
    compiler.compile_source(source._replace(text="\n".join([source.text, *checks])), arch)
    checks.append("static_assert(__builtin_offsetof(Params, cp_rank) == 8);")
    with pytest.raises(CompileError, match="static assertion failed"):
        compiler.compile_source(source._replace(text="\n".join([source.text, *checks])), arch)


def test_words_take_every_name_in_any_order() -> None:
    sizes = {name: arguments.WORDS_OF.get(x.c_type) for x in arguments.WORDS for name in x.names}
    numbers = iter(range(sum(size or 1 for size in sizes.values())))
    given = {name: [next(numbers) for _ in range(size)] if size else next(numbers) for name, size in sizes.items()}
    shuffled = dict(reversed(given.items()))
    *words, mscale, eps = range(sum(size or 1 for size in sizes.values()))
    words += struct.unpack("2q", struct.pack("f4xf4x", mscale, eps))
    assert arguments.words(shuffled) == words
    without_k = {name: x for name, x in given.items() if name != "k"}
    assert arguments.words(without_k) == words[:5] + [0] * 5 + words[10:]
    with pytest.raises(AssertionError):
        arguments.words({**given, "q": [1, 2]})
    with pytest.raises(KeyError):
        arguments.words({name: x for name, x in given.items() if name != "batch"})


def test_a_kernel_of_whole_heads_does_not_know_latent_attention() -> None:
    with pytest.raises(InvalidInput, match="v_dim goes with no norm_kind"):
        replace(NORM_SPEC, v_dim=64).constants()


def test_missing_constant_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = SPEC.constants()
    del constants["head_dim"]
    monkeypatch.setattr(RopeSpec, "constants", lambda self: constants)
    with pytest.raises(jinja2.UndefinedError, match="head_dim"):
        render.render(SPEC)


def test_cpp_literals() -> None:
    assert [render.cpp_literal(value) for value in (True, False, 3, "float")] == ["true", "false", 3, "float"]
    for value in (1.5, None, [1]):
        with pytest.raises(TypeError, match="template constant"):
            render.cpp_literal(value)


@pytest.mark.parametrize("name", sorted(ENTRIES | PARAMETERS | HEADERS))
def test_a_compile_error_names_the_templates_line(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    spec = next(s for s in (*ROPE_SPECS, *STAGE_SPECS, PROJECTED_SPEC, *PLAIN_SPECS) if f'#line 1 "{name}"' in cuda(s))
    texts = dict(render._texts(spec.template))
    lines = texts[name].splitlines()
    ends = ("}", "};", "static_assert")  # line starts before a declaration
    half = 0 if "{% else %}" in lines else len(lines) // 2  # behind a choice a line may be left out
    at = next((i for i, line in enumerate(lines) if i > half and line.startswith(ends)), len(lines) - 1) if half else 0
    lines.insert(at + 1, "int broken = nope;")
    texts[name] = "\n".join(lines) + "\n"
    monkeypatch.setattr(render, "_texts", lambda file: {file: texts[file]})
    monkeypatch.setattr(render, "environment", cache(render.environment.__wrapped__))
    with pytest.raises(CompileError, match=rf'{re.escape(name)}\({at + 2}\): error: identifier "nope"'):
        compiler.compile_source(render.render(spec), f"sm_90{spec.features}")


def test_a_compile_error_has_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = render.render(SPEC)._replace(text=render.render(SPEC).text.replace("HEAD_DIM = 128", "HEAD_DIM = nope"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(CompileError) as caught:
        compiler.compile_source(source, "sm_90")
    first, *_, kept = str(caught.value).splitlines()
    assert first.startswith(f"{SPEC.name} for sm_90: ")
    assert re.search(r'parameters\.cuh\.jinja\(\d+\): error: identifier "nope"', str(caught.value))
    assert Path(kept.removeprefix("source: ")).read_text() == source.text
    assert Path(kept.removeprefix("source: ")).parent == tmp_path
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    with pytest.raises(CompileError, match=r"source: not kept \(.*No such file"):
        compiler.compile_source(source, "sm_80")  # for sm_90 the first message stays


NVRTC_12, NVRTC_13 = [f"sm_{n}" for n in (50, 60, 75, 80, 90, 120)], [f"sm_{n}" for n in (75, 80, 90, 100, 120, 121)]
HELP = "; for a newer architecture pip install cupy-cuda13x nvidia-cuda-nvrtc --upgrade; "
HELP += "for an older one pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12"


@pytest.mark.parametrize(("arch", "version", "known"), [
    ("sm_70", (13, 0), "sm_75, .*, sm_121"), ("sm_121", (12, 8), "sm_50, .*, sm_120"),
    ("sm_83", (12, 8), ".*"), ("hopper", (12, 8), ".*"),
])  # fmt: skip
def test_an_unknown_architecture_is_explained(arch: str, version: tuple[int, int], known: str) -> None:
    got = compiler.unsupported(arch, NVRTC_13 if version[0] == 13 else NVRTC_12, version)
    said = f"NVRTC {version[0]}.{version[1]} compiles for {known}, not for {arch}{HELP}"
    assert re.fullmatch(said, got or "")


@pytest.mark.parametrize("major", compiler.PACKAGES)
def test_the_packages_that_a_message_installs_are_those_of_the_extra(major: int) -> None:
    """The message works where jitrope is on no index. `cuda12` and `cuda13` name the same packages."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (extra,) = re.findall(rf"^cuda{major} = \[(.*)\]$", text, re.MULTILINE)
    names = re.findall(r'"([\w-]+)', extra)
    assert compiler.install(major) == f"pip install {' '.join(names)}"
    assert compiler.install(major + 5) == compiler.install(13)


def test_known_architectures_are_not() -> None:
    for arch in ("sm_75", "sm_90", "sm_90a", "sm_120f"):
        assert compiler.unsupported(arch, NVRTC_13, (13, 0)) is None
    for arch in ("sm_20", "sm_999", "sm_79", "90"):
        with pytest.raises(CompileError, match=f"{SPEC.name}: .*, not for {arch}; "):
            compiler.compile_source(render.render(SPEC), arch)


def test_names_are_short_and_different() -> None:
    names = [spec.name for call in map(named, MODELS) for spec in planned(call, tokens=4096)]
    assert all(len(name) < 120 for name in names)
    assert "rope_bf16_d128_halves_forward_token_linear" in names


def test_other_fields_are_named() -> None:
    with pytest.raises(ValueError, match=r"missing \['vec'\], unknown \['width'\]"):
        spec_from_dict({**{k: v for k, v in SPEC.to_dict().items() if k != "vec"}, "width": 1})
