"""Change one thing in a copy of the package, and see whether its tests notice.

    python -m tests.mutants                        # 120 mutants, the same each time, on two processes
    python -m tests.mutants --only norm --json mutants.json

A mutant differs in one word of a stage, a source, a sink, a check, a template or of `jit/`: a sign, a comparison, a
bound, a flag, a number, `and` for `or`. Its tests are the part of the table (`calls.py`) that its file has to do with,
and the file's own (`TESTS`), until the first one fails; those of a template run on the CPU (`tests.host`). The program
lists the mutants that live, and exits with 1 if more than `--lives` of them do.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import keyword
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FOLDERS = ("jitrope/stages", "jitrope/sources", "jitrope/sinks", "jitrope/checks", "jitrope/jit", "templates")
COPIED = ("jitrope", "templates", "tests", "examples", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", ".ci")
OTHERS = {
    **{"+": "-", "-": "+", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+=": "-=", "&&": "||"},
    **{"||": "&&", "and": "or", "or": "and", "True": "False", "False": "True", "true": "false", "false": "true"},
}
"""The words that change, and what they become. A number becomes the next one."""
CUDA = re.compile(r"(?<=[ (!])(?:true|false)\b|(?<= )(?:\+=|[<>]=?|[=!]=|[+-]|&&|\|\|)(?= )|(?<![\w.])\d+(?![\w.])")
SECONDS = 600
"""After which the tests of a mutant are stopped. It counts as one that dies: the gate ends in the same way."""


class Mutant(NamedTuple):
    """A word of a file, from `begin` on, that becomes another one."""

    file: str
    line: int
    begin: int
    old: str
    new: str


# Of a file's name: the part of the table, as pytest's -k, and tests elsewhere than at the file's place.
TESTS: dict[str, tuple[str, str]] = {
    "bias": ("bias", "sources/test_fused.py"),
    "norm": ("rms or layer or across or means or twice or v_norm or of_k or of_v or k_nope", "sources/test_heads.py"),
    "norm_backward": ("rms or layer or across or means or after", ""),
    "rotate": ("plain or interleaved or full or into or first or cis or complex or dtype", ""),
    "positions": ("ids or starts or cp or mrope or shifts or packed or unrotated", ""),
    "scale": ("tokens or number", ""),
    "transform": ("head", "stages/test_convert.py"),
    "convert": ("e4m3 or int8 or fp4 or mxfp8 or rows or heads or ue8m0 or of_v", ""),
    "heads": ("plain or alone or no_v or v_norm or gated", "stages/test_rotate.py"),
    "fused": ("qkv or grouped or gated or view", ""),
    "latent": ("latent", ""),
    "streams": ("streams or two", ""),
    "backward": (
        "rms or streams or gated or latent",
        "sources/test_heads.py sources/test_fused.py sources/test_latent.py",
    ),
    "operation": ("plain or ulysses or given or rows or none", "sinks/test_results.py sources/test_fused.py"),
    "source": ("v_norm or inplace", "sources/test_heads.py sources/test_fused.py"),
    "cache": ("slots or blocks or own or of_k or k_pe or record", ""),
    "pages": ("pages or indptr or indices", ""),
    "results": ("by_rank or ulysses or given or tiles", "stages/test_convert.py"),
    "checks": ("refus", "checks"),
    "check_values": ("check", "checks/test_words.py checks/test_refusals.py"),
    "words": ("refus", "checks"),
    "driver": ("", "jit/test_kernels.py"),
    "entry": ("", "tools/test_bundle.py jit/test_cache.py"),
    "kernels": ("", "tools/test_doctor.py"),
    **dict.fromkeys(("compiler", "recording", "render", "trust"), ("", "")),
}
KERNELS: dict[str, tuple[str, str]] = {
    **{"qk_norm_rope": ("rms or layer or head or mxfp8", ""), "largest": ("rows", "stages/test_convert.py")},
    **{"rope": ("plain or ids or packed", ""), "parameters": ("plain or rms or packed or full", "")},
    **dict.fromkeys(("qk_norm_rope_backward", "row"), ("rms or layer or across or means", "")),
    **dict.fromkeys(("tracks", "ring"), ("rms", "stages/test_norm.py")),
    "block_sums": ("rms", "stages/test_norm.py run/test_launch.py"),
    **{"torch_sum": ("once or twice or layer", "stages/test_norm.py"), "weights": ("rms or layer", "")},
    **{"pairs": ("into", "stages/test_rotate.py"), "formats": ("fp4 or mxfp8 or int8 or ue8m0", "")},
    **{"sequences": ("packed", ""), "angles": ("angles or full or cis", ""), "sink": ("e4m3 or slots", "")},
    "store": ("e4m3 or rms", ""),
}
"""Of other templates: the part of the table that runs their lines, and other tests."""


def of_python(file: str, text: str) -> Iterator[Mutant]:
    before: tokenize.TokenInfo | None = None
    inside = 0  # of f-strings, which Python 3.12 reads as words
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        word, kind = token.string, token.type
        name = tokenize.tok_name[kind]
        inside += (name == "FSTRING_START") - (name == "FSTRING_END")
        if inside or name == "FSTRING_END":
            continue
        binary = before is not None and (before.type in (tokenize.NAME, tokenize.NUMBER) or before.string in (")", "]"))
        binary = binary and before is not None and not keyword.iskeyword(before.string)
        new = OTHERS.get(word, "") if kind in (tokenize.OP, tokenize.NAME) else ""
        if kind == tokenize.NUMBER and word.isdigit():
            new = str(int(word) + 1)
        if new and (binary or word not in "+-"):
            yield Mutant(file, token.start[0], token.start[1], word, new)
        before = token if kind not in (tokenize.NL, tokenize.COMMENT) else before


def of_cuda(file: str, text: str) -> Iterator[Mutant]:
    for number, line in enumerate(text.splitlines(), 1):
        code = line.partition("//")[0]
        if code.lstrip().startswith(("#", "{%", "static_assert", "asm")) or "template" in code:
            continue
        for found in CUDA.finditer(code):
            word = found[0]
            yield Mutant(file, number, found.start(), word, OTHERS.get(word) or str(int(word) + 1))


def commands(file: str) -> list[list[str]]:
    """The tests of a file: of its part of the table, then its own, as plain torch and as kernels on the CPU."""
    folder, name = Path(file).parts[-2], Path(file).name.partition(".")[0]
    how = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
    torch, host = ([sys.executable, "-m", program, *how] for program in ("pytest", "tests.host"))
    kernel, jit = folder == "templates", folder == "jit"
    if kernel and name.startswith(("thd", "cp", "rows", "segments", "shards")):
        return [[*host, "tests/thd/test_thd.py"]]
    part, own = (KERNELS if kernel else {}).get(name) or TESTS.get(name, ("plain or rms or slots or head", ""))
    if kernel:
        columns = "gradient_is" if "backward" in name or name == "block_sums" else "chain_of or gradient_is"
        of_table = [*host, "tests/test_stages.py", "-k", f"({columns}) and ({part})"]
    else:
        columns = "refus" if part == "refus" else f"(chain_of or gradient_is or refus) and ({part})"
        of_table = [*torch, "-m", "", "tests/test_stages.py", "-k", f"({columns}) and not cuda"]
    places = ("stages", "sources", "sinks") if kernel else (folder,)
    others = [] if kernel or jit else ["checks/test_refusals.py"]
    files = dict.fromkeys([*[f"{place}/test_{name}.py" for place in places], *own.split(), *others])
    there = [f"tests/{file}" for file in files if (ROOT / "tests" / file).exists()]
    ways = [host] if kernel else [torch] if jit else [torch, host]
    return [*[of_table] * (not jit), *[[*way, *there] for way in ways if there]]


def lives(name: str, mutant: Mutant, copies: SimpleQueue[Path]) -> bool:
    """Whether no test of a mutant fails in one of the copies."""
    copy, begun, found = copies.get(), time.monotonic(), True
    path = copy / mutant.file
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    line = lines[mutant.line - 1]
    assert line[mutant.begin :].startswith(mutant.old), mutant
    lines[mutant.line - 1] = line[: mutant.begin] + mutant.new + line[mutant.begin + len(mutant.old) :]
    path.write_text("".join(lines))
    own = {"PYTHONPATH": str(copy), "JITROPE_CACHE_DIR": str(copy / "kernels"), "XDG_CACHE_HOME": str(copy / "cache")}
    try:
        for command in commands(mutant.file):
            left = SECONDS - (time.monotonic() - begun)
            done = subprocess.run(command, cwd=copy, env={**os.environ, **own}, capture_output=True, timeout=left)
            found = done.returncode in (0, 5)  # 5: there is no such test
            if not found:
                break
    except subprocess.TimeoutExpired:
        found = False
    finally:
        path.write_text(text)
        copies.put(copy)
    print(f"{'LIVES' if found else 'dead '} {time.monotonic() - begun:6.1f} s  {name}", flush=True)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="a part of the files' names")
    parser.add_argument("--lives", type=int, default=4, help="so many mutants may live")
    parser.add_argument("--list", action="store_true", help="list the mutants")
    parser.add_argument("--unchanged", action="store_true", help="change nothing: all must live")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    of_files = []
    for path in [path for folder in FOLDERS for path in sorted((ROOT / folder).iterdir())]:
        if path.suffix in (".py", ".cuh", ".jinja"):
            make, file = of_python if path.suffix == ".py" else of_cuda, str(path.relative_to(ROOT))
            found = [*make(file, path.read_text())]
            of_files.append(random.Random(f"{given.seed} {file}").sample(found, len(found)))
    turns = [own[n] for n in range(given.count) for own in of_files if n < len(own)]  # one of each file in turn
    mutants = [x for x in turns[: given.count] if given.only in x.file]
    if given.unchanged:
        mutants = [*{x.file: x._replace(new=x.old) for x in mutants}.values()]
    names = [f"{x.file}:{x.line}: {x.old!r} -> {x.new!r}" for x in mutants]
    if given.list:
        print(*names, sep="\n")
        return 0
    copies: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        for number in range(given.jobs):
            for name in COPIED:
                source, place = ROOT / name, Path(folder, str(number), name)
                place.parent.mkdir(exist_ok=True)
                ignored = shutil.ignore_patterns("__pycache__", "results")
                shutil.copytree(source, place, ignore=ignored) if source.is_dir() else shutil.copy(source, place)
            copies.put(Path(folder, str(number)))
        found = [*pool.map(lives, names, mutants, itertools.repeat(copies))]
    living = [name for name, left in zip(names, found) if left]
    print(f"\n{len(found)} mutants, {len(living)} live", *living, sep="\n")
    if given.json:
        given.json.write_text(json.dumps(dict(zip(names, found)), indent=1))
    return len(living) < len(found) if given.unchanged else len(living) > given.lives


if __name__ == "__main__":
    sys.exit(main())
