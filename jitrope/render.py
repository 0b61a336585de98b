"""Spec -> source: the Jinja environment and nothing else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension

from .spec import RopeSpec

_HERE = Path(__file__).resolve().parent
TEMPLATE_PATHS = [_HERE / "templates", _HERE.parent / "templates"]  # in a wheel; in a checkout


@dataclass(frozen=True)
class Source:
    """The whole text of a kernel, its entry point and a readable name."""

    text: str
    entry: str
    name: str


class LineMarkers(Extension):
    """`#line` marks, so that a compiler's error names the template's own file and line."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        lines = [f'#line 1 "{name}"']
        for number, line in enumerate(source.splitlines(), start=1):
            lines.append(line)
            if re.search(r"{%", line):
                lines.append(f'#line {number + 1} "{name}"')
        return "\n".join(lines) + "\n"


def cpp_literal(value: Any) -> Any:
    """A template value as C++: booleans in lower case, integers and names as they are."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, str, jinja2.Undefined)):  # Undefined raises by itself, with its name
        return value
    raise TypeError(f"a template constant is a bool, an int or a name, not {value!r}")


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """The Jinja environment; templates are found in a wheel, an editable install and a checkout."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE_PATHS),
        extensions=[LineMarkers],
        undefined=jinja2.StrictUndefined,
        finalize=cpp_literal,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,
    )


def render(spec: RopeSpec) -> Source:
    """The CUDA text of a spec, includes and all."""
    text = environment().get_template(spec.template).render(spec.constants())
    return Source(text, spec.entry, spec.name)
