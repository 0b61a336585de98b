"""Spec -> source, with Jinja."""

from __future__ import annotations

import json
import re
import textwrap
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..base.errors import CompileError
from ..base.spec import Spec, record_of

_HERE = Path(__file__).parent.resolve().parent  # a cache of files may have links to them
TEMPLATE_PATHS = [_HERE / "templates", _HERE.parent / "templates"]  # in a wheel; in a checkout


class Source(NamedTuple):
    """The whole text of a kernel, its entry point and a readable name."""

    text: str
    entry: str
    name: str


def ingredients(spec: Spec) -> str:
    """The inputs of rendering, as text: the template files and the constants of a spec."""
    return json.dumps([_texts(spec.template), spec.constants()])


@cache
def _texts(name: str) -> dict[str, str]:
    """The texts of a template and of all files that it includes, directly or not, by name."""
    path = next((folder / name for folder in TEMPLATE_PATHS if (folder / name).is_file()), None)
    if path is None:
        folders = " and ".join(map(str, TEMPLATE_PATHS))
        raise CompileError(f"the template {name} is missing in {folders}; install jitrope again")
    texts = {name: path.read_text(encoding="utf-8")}
    for included in re.findall(r'{%\s*include\s*"([^"]+)"', texts[name]):
        texts.update(_texts(included))
    return texts


def mark_lines(text: str, name: str) -> str:
    """Add `#line` marks behind lines that may expand to several, so that compiler errors name the template's line."""
    lines = ["{%", *text.splitlines()]
    after = [f'#line {n} "{name}"\n' * ("{%" in line or line.startswith("{{")) for n, line in enumerate(lines, 1)]
    return "".join(mark + line + "\n" for mark, line in zip(after, lines[1:]))


def _needed_marks(text: str) -> str:
    """Drop the marks that say what a compiler has counted, and the lines that are left out."""
    kept = counted = ""  # counted: what a mark at the next line would say
    for mark, number, name, lines in re.findall(r"^(#line (\d+) (.+)\n)((?:(?!#line ).*\n)*)", text, re.MULTILINE):
        if lines.strip():
            kept += mark * (mark != counted) + lines
            counted = f"#line {int(number) + len(lines.splitlines())} {name}\n"
    return kept


def cpp_literal(value: Any) -> Any:
    """A template value as C++: booleans in lower case, integers and names unchanged."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, str)):
        return value
    raise TypeError(f"a template constant is a bool, an int or a name, not {value}")  # Undefined raises its own error


@cache
def environment() -> Any:
    """The `jinja2.Environment`. Jinja is imported here, because a kernel from the cache does not need it."""
    import jinja2

    loader = jinja2.FunctionLoader(lambda name: mark_lines(_texts(name)[name], name))
    lines: Any = {"keep_trailing_newline": True, "trim_blocks": True}
    return jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, finalize=cpp_literal, **lines)


def render(spec: Spec) -> Source:
    """The whole CUDA text of a spec with its includes. It begins with a descriptive comment (`head`)."""
    text = environment().get_template(spec.template).render(spec.constants())
    return Source(head(spec) + _needed_marks(text), spec.entry, spec.name)


HEAD = """\
// {name}
// Begin at the kernel, {entry}, at the end of this text.
// Its constants ("parameters") and pieces come first; `#line` marks name files. templates/README.md has the nouns.
// To render this text again: sed -n 's|^//: ||p' FILE | jitrope render --from /dev/stdin
"""


def head(spec: Spec) -> str:
    """The comment at the start of a source. No text of a spec can end the comment or begin code.

    It depends on the spec alone, as the constants do, so the cache's key need not include it. Other calls may need the
    same kernel, so it has no call's text.
    """
    name, entry = (re.sub(r"[^ -\[\]-~]", "?", text) for text in (spec.name, spec.entry))  # printable, no backslash
    lines = textwrap.wrap(json.dumps(record_of([spec.of("")])), 112, break_long_words=False, break_on_hyphens=False)
    return HEAD.format(name=name, entry=entry) + "".join(f"//: {line}\n" for line in lines)
