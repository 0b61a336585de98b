"""compute-sanitizer over calls of every template: memcheck, racecheck, initcheck.

    python -m tests.sanitizer --log logs                      # all
    python -m tests.sanitizer --tool memcheck --case rope     # some

A case is a separate process under `compute-sanitizer`; its results are also compared with the CPU's. The same process
without the tool compiles its kernels first, into a cache that all cases share. torch allocates each tensor separately,
so a byte past its end belongs to no tensor. Exit code 1 if a tool found anything, a result was wrong, or a case did not
run its template.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jitrope
from jitrope.jit import kernels
from jitrope.jit.render import TEMPLATE_PATHS

from .calls import CALLS, GRADIENTS
from .jobs import MASKS, MOVES, STEPS, Job, correction_job, of_table, rows_job, segments_job, tables_job
from .results import planned
from .soak import in_host_memory

ROOT = Path(__file__).parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck")
FOUND, WRONG = 9, 3
"""Exit codes: of compute-sanitizer with findings, of a case with wrong results."""

ENTRY = "kns=jitrope_{}"
"""memcheck and racecheck check kernels with this in their names. initcheck checks all kernels, because torch's kernels
write our inputs and read our outputs."""

SEEDS = (1, 2, 3)
"""Of jobs of packed batches. Those of the table are many, and have one."""
CASE_TIMEOUT = 300.0


# ---- the cases -------------------------------------------------------------------------------------------


PARTS = {"rope": 2, "qk_norm_rope": 4, "qk_norm_rope_backward": 2}


def _of_table(template: str, part: int) -> Iterator[Job]:
    """A part of the calls of the table that run a template, with one of the launches."""
    jitrope.configure(launch=("token_linear", "grid_2d")[part % 2])
    for case in (GRADIENTS if "backward" in template else CALLS)[part :: PARTS[template]]:
        if any(spec.template == f"{template}.cu.jinja" for spec in planned(case)):
            yield of_table(case)


def _rows() -> Iterator[Job]:
    yield from (rows_job(move, random.Random(f"{move} {n}")) for move in MOVES for n in range(4))


def _tables() -> Iterator[Job]:
    yield from (tables_job(random.Random(n)) for n in range(6))


def _segments() -> Iterator[Job]:
    yield from (segments_job(mask, random.Random(n)) for mask in MASKS for n in range(4))


def _corrections() -> Iterator[Job]:
    yield from (correction_job(step, random.Random(f"{step} {n}")) for step in STEPS for n in range(2))


class Group(NamedTuple):
    """A template and calls that run it; each group is one process."""

    template: str
    jobs: Callable[[], Iterator[Job]]


GROUPS = {
    **{f"{name}-{n}": Group(name, partial(_of_table, name, n)) for name, parts in PARTS.items() for n in range(parts)},
    "thd_rows": Group("thd_rows", _rows),
    "thd_tables": Group("thd_tables", _tables),
    "cp_segments": Group("cp_segments", _segments),
    "cp_segment_rows": Group("cp_segment_rows", _segments),
    "thd_corrections": Group("thd_corrections", _corrections),
}


def templates() -> list[str]:
    """Names of all kernels' templates."""
    folder = next(path for path in TEMPLATE_PATHS if path.is_dir())
    return sorted(path.name.removesuffix(".cu.jinja") for path in folder.glob("*.cu.jinja"))


def groups_named(names: list[str] | None) -> list[str]:
    """The cases with these names or templates; all without names, and then each template must have one."""
    missing = set(templates()) - {group.template for group in GROUPS.values()}
    if missing and not names:
        raise SystemExit(f"no case runs {', '.join(sorted(missing))}; add one to GROUPS in {Path(__file__).name}")
    chosen = [name for name, group in GROUPS.items() if not names or name in names or group.template in names]
    unknown = set(names or ()) - set(GROUPS) - {group.template for group in GROUPS.values()}
    if unknown or not chosen:
        raise SystemExit(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    return chosen


# ---- a case ----------------------------------------------------------------------------------------------


def run_group(name: str, device: str) -> int:
    """Run every job in this process with a few seeds, and compare with the CPU. Returns the exit code."""

    group, failed, count = GROUPS[name], [], 0
    for job in group.jobs():
        for seed in SEEDS[: 1 if group.template in PARTS else 3]:
            count += 1
            call = job.make(device, seed)
            try:
                call.check(in_host_memory(call.start()))
            except AssertionError as error:
                failed.append(f"{job} seed {seed}: {error}")
    ran = {spec.template for spec, _ in kernels._kernels}
    if device != "cpu" and f"{group.template}.cu.jinja" not in ran:
        failed.append(f"{group.template} was not run, but {', '.join(sorted(ran))}")
    print("\n".join(failed))
    print(f"{name}: {count} calls, {len(kernels._kernels)} kernels, {len(kernels.compiled)} of them compiled, "
          f"{len(failed)} wrong")  # fmt: skip
    return WRONG if failed else 0


# ---- all cases under the tools ---------------------------------------------------------------------------


class Done(NamedTuple):
    """A process that has ended."""

    group: str
    tool: str  # "" without one
    code: int
    output: str
    seconds: float

    @property
    def found(self) -> str:
        """The number of errors that the tool counted; "-" if it did not count."""
        counts = re.findall(r"ERROR SUMMARY: (\d+)|RACECHECK SUMMARY: (\d+)", self.output)
        return "-" if not counts else str(max(int(errors or hazards) for errors, hazards in counts))

    @property
    def verdict(self) -> str:
        """ "clean", or the fault: from the exit code, or a tool without output, which has not checked."""
        if self.code:
            words = {FOUND: "found errors", WRONG: "wrong results", 124: "took too long"}
            return words.get(self.code, f"exit code {self.code}")
        if self.tool and self.found != "0":
            return "no summary" if self.found == "-" else "found errors"
        return "clean"


def kernel_option(program: str) -> str:
    """The option that restricts a tool to some kernels: --kernel-name in newer tools, which warn of --kernel-regex."""
    text = subprocess.run([program, "--help"], capture_output=True, text=True).stdout
    return "--kernel-name" if re.search(r"--kernel-name\s", text) else "--kernel-regex"


def command(group: str, tool: str, program: str, option: str, device: str) -> list[str]:
    child = [sys.executable, "-m", "tests.sanitizer", "--child", group, "--device", device]
    if not tool:
        return child
    only = [] if tool == "initcheck" else [option, ENTRY.format(GROUPS[group].template)]
    return [program, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20", *only, *child]


def run_process(group: str, tool: str, arguments: list[str], cache: Path, log: Path | None) -> Done:
    environment = {
        **os.environ, "JITROPE_CACHE_DIR": str(cache), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    if tool:
        environment["JITROPE_NO_COMPILE"] = "1"  # a kernel that is not prewarmed is an error
    start = time.monotonic()
    try:
        done = subprocess.run(
            arguments, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=CASE_TIMEOUT,
        )  # fmt: skip
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, output = 124, (late.stdout or b"").decode(errors="replace")
    result = Done(group, tool, code, output, time.monotonic() - start)
    if log is not None:
        (log / f"{group}.{tool or 'plain'}.txt").write_text(output)
    return result


def run_all(
    groups: list[str], tools: list[str], program: str, jobs: int, cache: Path, log: Path | None, device: str = "cuda"
) -> list[Done]:
    """Run all groups without a tool, which compiles their kernels, then the clean ones under every tool."""
    option = kernel_option(program)

    def run(pair: tuple[str, str]) -> Done:
        done = run_process(*pair, command(*pair, program, option, device), cache, log)
        print(f"{done.group:<28}{done.tool or 'plain':<12}{done.verdict:<20}{done.seconds:6.1f} s", flush=True)
        return done

    with ThreadPoolExecutor(jobs) as executor:
        plain = list(executor.map(run, [(group, "") for group in groups]))
        clean = [done.group for done in plain if not done.code]
        return plain + list(executor.map(run, [(group, tool) for tool in tools for group in clean]))


def table(results: list[Done]) -> str:
    lines = [f"{'template':<24}{'case':<28}{'tool':<12}{'errors':>7}{'seconds':>9}  verdict"]
    for done in results:
        template, errors = GROUPS[done.group].template, done.found if done.tool else "-"
        lines.append(
            f"{template:<24}{done.group:<28}{done.tool or 'plain':<12}{errors:>7}{done.seconds:>9.1f}  {done.verdict}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitizer", description=__doc__.split("\n")[0])
    parser.add_argument("--tool", action="append", choices=[*TOOLS, "synccheck"], help=f"default: {', '.join(TOOLS)}")
    parser.add_argument("--case", action="append", help="a case or a template; default: all")
    parser.add_argument("--jobs", type=int, default=12, help="processes at a time")
    parser.add_argument("--log", type=Path, help="a folder for what each process says")
    parser.add_argument("--cache", type=Path, help="a kernel cache to use and keep; default: a temporary one")
    parser.add_argument("--program", help="compute-sanitizer; default: from PATH or /usr/local/cuda/bin")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        return run_group(given.child, given.device)
    program = given.program or shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        raise SystemExit(f"{program} does not exist; compute-sanitizer comes with the CUDA toolkit")
    if given.log is not None:
        given.log.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="jitrope-sanitizer-") as folder:
        cache = (given.cache or Path(folder)).absolute()
        tools = given.tool or list(TOOLS)
        results = run_all(groups_named(given.case), tools, program, given.jobs, cache, given.log, given.device)
    bad = [done for done in results if done.verdict != "clean"]
    for done in bad:
        print(f"\n---- {done.group}, {done.tool or 'plain'}: {done.verdict}\n{done.output[-3000:]}")
    print(f"\n{table(results)}\n")
    print(f"{len(results)} runs, {len(results) - len(bad)} clean" if bad else f"all {len(results)} runs are clean")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
