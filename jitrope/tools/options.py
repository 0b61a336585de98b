"""The command line's options: the syntax of their values, and the errors for wrong ones."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ..base.spec import DTYPES
from ..jit.compiler import OLDEST_ARCH
from .console import answer
from .prewarm import architecture
from .server import IDS

Option = tuple[tuple[str, ...], dict[str, Any]]

_OLDEST = min(OLDEST_ARCH.values())
_SECONDS = {"d": 86400, "h": 3600, "m": 60}
_ALIASES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
"""torch's names of dtypes."""


class Parser(argparse.ArgumentParser):
    """A parser that keeps line breaks in help, prints errors as JSON under --json, and refuses shortened options."""

    def __init__(self, **words: Any) -> None:
        kept = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**{**kept, **words})

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with code 2."""
        if not wants_json():
            super().error(message)
        answer(True, {"error": message}, "")
        sys.exit(2)


def wants_json() -> bool:
    """Whether the command line has --json, also if the rest of it is wrong."""
    return "--json" in sys.argv[1:]


def option(*names: str, **words: Any) -> Option:
    """An option of a command, in the words of `add_argument`."""
    return names, words


def _value(pattern: str, example: str, read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the reader of an option's text, which must match a pattern."""

    def value(text: str) -> Any:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text!r} must be written as {example}")
        return read(text)

    return value


def _dtype(text: str) -> str:
    name = _ALIASES.get(text.removeprefix("torch."), text)
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} must be one of {', '.join((*DTYPES, *_ALIASES))}")
    return name


def _archs(text: str) -> list[str]:
    found = {part: architecture(part) for part in text.split(",")}
    for part, arch in found.items():
        if arch is None or int(re.sub(r"\D", "", arch)) < _OLDEST:
            must = f"an architecture from sm_{_OLDEST} on, such as sm_120, sm120, 120 or 12.0"
            raise argparse.ArgumentTypeError(f"{part!r} must be {must}")
    return list(dict.fromkeys(filter(None, found.values())))


def _ids(text: str) -> list[str]:
    found = text.split(",")
    if not set(found) <= set(IDS):
        raise argparse.ArgumentTypeError(f"{text!r} must be {', '.join(IDS)} or both, joined by a comma")
    return found


_heads = _value(r"\d+(,\d+)*", "32,8", lambda text: [*map(int, text.split(","))])
_count = _value(r"[1-9]\d*", "a whole number of at least 1, such as 8", int)
_age = _value(r"\d{1,6}[dhm]", "30d, 12h or 45m", lambda text: float(text[:-1]) * _SECONDS[text[-1]])
_FLAG: dict[str, Any] = {"action": "store_true", "default": None}  # None: not given

JSON = option("--json", action="store_true", help="print JSON on stdout, errors too")
DRY_RUN = option("--dry-run", action="store_true", help="print the actions, and change nothing")
ARCHS = option(
    "--arch",
    metavar="ARCH",
    type=_archs,
    help="architectures, such as sm_80,sm_90 (or sm90, 90, 9.0); default: this machine's GPUs",
)
JOBS = option(
    "--jobs", metavar="N", type=_count, default=os.cpu_count() or 1, help="compile N at a time; default: all cores"
)
FROM = option(
    "--from",
    dest="file",
    metavar="FILE",
    type=Path,
    help="TOML or JSON: calls, a recorded run, or the output of `cache ls --json`",
)
MODEL = option(
    "--model",
    metavar="PATH",
    type=Path,
    help="config.json of a transformers or diffusers model, its folder, or a diffusers pipeline's; needs that library",
)
_SERVE = "with --model: the kernels of a server's calls (vLLM, SGLang), for RANKS of tensor parallelism, by default 1"
SERVE = option("--serve", metavar="RANKS", type=_count, nargs="?", const=1, help=_SERVE)
SERVED_IDS = option(
    "--ids",
    metavar="DTYPE",
    type=_ids,
    help="with --serve: dtypes of positions and slots, int64 (default), int32 or both",
)
INVARIANT = option(
    "--batch-invariant", action="store_true", help="the kernels of a process with configure(batch_invariant=True)"
)
BUNDLE = option("path", metavar="FILE", type=Path, help="a file from `jitrope bundle write`")
WRITTEN = option("path", metavar="FILE", type=Path, help="the file to write, a tar")
KEY = option("key", metavar="KEY", help="a key from `jitrope cache ls`, or the start of one")
COLD = option("--cold", action="store_true", help="also look up every kernel without compiling")
OLDER = option("--older-than", metavar="AGE", type=_age, required=True, help="30d, 12h or 45m")
CALL = (
    option(
        "--heads",
        metavar="N,N",
        type=_heads,
        action="append",
        help="heads of q and k, such as 32,8, or of q alone; repeat it for more calls",
    ),
    option("--head-dim", metavar="N", type=_count, help="elements of a head; default: 128"),
    option(
        "--dtype",
        metavar="DTYPE",
        type=_dtype,
        help="bf16, fp16, fp32, or torch's name; default: a transformers model's, else bf16",
    ),
    option("--interleaved", **_FLAG, help="pairs are (2i, 2i+1); default: (i, i + half)"),
    option("--rotary-dim", metavar="N", type=_count, help="rotated elements of a head; default: all"),
    option(
        "--width", metavar="WIDTH", choices=("half", "full"), help="width of cos and sin, half or full; default: half"
    ),
    option("--in-place", dest="inplace", **_FLAG, help="write the result into q and k"),
    option("--backward", **_FLAG, help="also the kernels of the gradient; `render` prints only the first of these"),
    FROM,
)
