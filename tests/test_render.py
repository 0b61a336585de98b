"""Spec -> source: strict, readable, and errors that name the template's own line."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import jinja2
import pytest
from jinja2 import meta

from jitrope import compiler, render
from jitrope.errors import CompileError
from jitrope.prewarm import DEFAULT_CALLS, Call
from jitrope.spec import RopeSpec

SPEC = Call(40).specs()[0]
TEMPLATES = Path(__file__).parent.parent / "templates"


def test_every_constant_is_used_and_none_is_missing() -> None:
    text = (TEMPLATES / SPEC.template).read_text()
    assert meta.find_undeclared_variables(render.environment().parse(text)) == set(SPEC.constants())


def test_no_jinja_below_the_parameter_block() -> None:
    text = (TEMPLATES / SPEC.template).read_text()
    below = text.split("// ------------------------------------------------------------------------")[-1]
    assert len(below) > 1000
    assert not re.search(r"{{|{%|{#", below)
    for path in TEMPLATES.glob("*.cuh"):
        assert not re.search(r"{{|{%|{#", path.read_text())


def test_rendered_text_is_readable() -> None:
    text = render.render(SPEC).text
    assert text.endswith("}\n")
    assert "\n\n\n" not in text
    for line in text.splitlines():
        assert len(line) <= 120
        assert line == line.rstrip()


def test_text_is_whole_and_deterministic() -> None:
    source = render.render(SPEC)
    assert "#include" not in source.text
    assert f'extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) {SPEC.entry}' in source.text
    assert render.render(SPEC) == source


def test_ingredients_follow_every_field_and_file(monkeypatch: pytest.MonkeyPatch) -> None:
    base = render.ingredients(SPEC)
    changes = {
        "dtype": "fp16", "table_dtype": "bf16", "head_dim": 64, "rotary_dim": 64, "interleaved": True,
        "conjugate": True, "full_width": True, "per_head": True, "rounding": "complex64", "in_place": True,
        "index_dtype": "int64", "launch": "grid_2d", "vec": 4, "chunks": 1, "table_vec": 2, "tokens_per_block": 7,
        "heads_per_block": 7, "one_step": False, "rotary_offset": 8, "interleaved_out": True, "angles": True,
        "packed_table": True, "start_dtype": "int64", "cp_size": 2, "q_per_group": 4, "values": True,
        "batch_inner": True, "position_dtype": "int64", "sections": (16, 48), "spread": True, "one_row": True,
        "wide": True, "slot_dtype": "int64", "page_size": 16, "k_too": True, "q_out": "fp8", "kv_out": "fp8",
    }  # fmt: skip
    assert changes.keys() == SPEC.to_dict().keys()
    for name, value in changes.items():
        other = replace(SPEC, **{name: value})
        assert render.ingredients(other) != base, name
        assert render.render(other).text != render.render(SPEC).text, name
    for name in ("vec.cuh", "sequences.cuh", "dependents.cuh", "rope.cu.jinja"):
        assert (TEMPLATES / name).read_text()[:200] in render._texts("rope.cu.jinja")[name]


def test_missing_constant_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = SPEC.constants()
    del constants["head_dim"]
    monkeypatch.setattr(RopeSpec, "constants", lambda self: constants)
    with pytest.raises(jinja2.UndefinedError, match="head_dim"):
        render.render(SPEC)


@pytest.mark.parametrize(("value", "text"), [(True, "true"), (False, "false"), (3, 3), ("float", "float")])
def test_cpp_literals(value, text) -> None:
    assert render.cpp_literal(value) == text


@pytest.mark.parametrize("value", [1.5, None, [1]])
def test_other_types_are_refused(value) -> None:
    with pytest.raises(TypeError, match="template constant"):
        render.cpp_literal(value)


@pytest.mark.parametrize("name", ["rope.cu.jinja", "vec.cuh", "sequences.cuh", "dependents.cuh"])
def test_a_compile_error_names_the_templates_line(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    texts = dict(render._texts("rope.cu.jinja"))
    lines = texts[name].splitlines()
    at = next(i for i, line in enumerate(lines) if i > len(lines) // 2 and line.strip() == "}")
    lines.insert(at + 1, "int broken = nope;")
    texts[name] = "\n".join(lines) + "\n"
    monkeypatch.setattr(render, "_texts", lambda file: {file: texts[file]})
    render.environment.cache_clear()
    try:
        with pytest.raises(CompileError, match=rf'{re.escape(name)}\({at + 2}\): error: identifier "nope"'):
            compiler.compile_source(render.render(SPEC), "sm_90")
    finally:
        render.environment.cache_clear()


def test_names_are_short_and_different() -> None:
    names = [spec.name for call in DEFAULT_CALLS for spec in call.specs()]
    assert all(len(name) < 100 for name in names)
    assert "rope_bf16_d128_halves_fp32_half_table_forward_token_linear" in names


def test_spec_round_trips() -> None:
    assert RopeSpec.from_dict(SPEC.to_dict()) == SPEC
    with pytest.raises(ValueError, match="missing \\['vec'\\], unknown \\['width'\\]"):
        RopeSpec.from_dict({**{k: v for k, v in SPEC.to_dict().items() if k != "vec"}, "width": 1})
