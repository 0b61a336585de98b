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
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jitrope
from jitrope.jit import kernels
from jitrope.jit.render import TEMPLATE_PATHS

from .calls import CALLS, GRADIENTS, PROJECTIONS
from .jobs import MASKS, MOVES, STEPS, correction_job, in_host_memory, of_table, rows_job, segments_job, tables_job
from .results import planned

ROOT = Path(__file__).parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck")
FOUND, WRONG = 9, 3  # exit codes: of compute-sanitizer with findings, of a case with wrong results
# memcheck and racecheck check kernels with this in their names. initcheck checks all kernels, because torch's kernels
# write our inputs and read our outputs.
ENTRY = "kns=jitrope_{}"
SEEDS = (1, 2, 3)  # of jobs of packed batches; those of the table are many, and have one
CASE_TIMEOUT = 300.0

PARTS = {"rope": 2, "qk_norm_rope": 4, "qk_norm_rope_backward": 2, "project_qkv": 1}
SEGMENTS = [segments_job(mask, random.Random(n)) for mask in MASKS for n in range(4)]
PACKED = {
    "thd_rows": [rows_job(move, random.Random(f"{move} {n}")) for move in MOVES for n in range(4)],
    "thd_tables": [tables_job(random.Random(n)) for n in range(6)],
    "cp_segments": SEGMENTS,
    "cp_segment_rows": SEGMENTS,
    "thd_corrections": [correction_job(step, random.Random(f"{step} {n}")) for step in STEPS for n in range(2)],
}
# Each case is a process: calls that run a template, or a part of them.
GROUPS = {**{f"{name}-{n}": name for name, parts in PARTS.items() for n in range(parts)}, **dict(zip(PACKED, PACKED))}
FOLDER = next(path for path in TEMPLATE_PATHS if path.is_dir())
TEMPLATES = sorted(path.name.removesuffix(".cu.jinja") for path in FOLDER.glob("*.cu.jinja"))


def groups_named(names: list[str] | None) -> list[str]:
    """The cases with these names or templates; all without names, and then each template must have one."""
    missing = {*TEMPLATES} - {*GROUPS.values()}
    if missing and not names:
        raise SystemExit(f"no case runs {', '.join(sorted(missing))}; add one to GROUPS in {Path(__file__).name}")
    chosen = [name for name, group in GROUPS.items() if not names or name in names or group in names]
    unknown = {*(names or ())} - {*GROUPS, *GROUPS.values()}
    if unknown or not chosen:
        raise SystemExit(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    return chosen


def run_group(name: str, device: str) -> int:
    """Run every job in this process with a few seeds, and compare with the CPU. Returns the exit code."""
    template, failed, count = GROUPS[name], [], 0
    jobs = PACKED.get(template, [])
    if not jobs:  # a part of the table's calls, with one of the launches
        part = int(name.rpartition("-")[2])
        jitrope.configure(launch=("token_linear", "grid_2d")[part % 2])
        cases = {"project_qkv": PROJECTIONS, "qk_norm_rope_backward": GRADIENTS}.get(template, CALLS)
        cases = cases[part :: PARTS[template]]
        jobs = [of_table(x) for x in cases if any(spec.template == f"{template}.cu.jinja" for spec in planned(x))]
    for job in jobs:
        for seed in SEEDS[: 1 if template in PARTS else 3]:
            count += 1
            call = job.make(device, seed)
            try:
                call.check(in_host_memory(call.start()))
            except AssertionError as error:
                failed.append(f"{job} seed {seed}: {error}")
    ran = {spec.template for spec, _ in kernels._kernels}
    if device != "cpu" and f"{template}.cu.jinja" not in ran:
        failed.append(f"{template} was not run, but {', '.join(sorted(ran))}")
    made = f"{len(kernels._kernels)} kernels, {len(kernels.compiled)} of them compiled"
    print(*failed, f"{name}: {count} calls, {made}, {len(failed)} wrong", sep="\n")
    return WRONG if failed else 0


class Done(NamedTuple):
    """A process that has ended."""

    group: str
    tool: str  # "" without one
    verdict: str
    errors: str
    output: str
    seconds: float


def verdict(tool: str, code: int, output: str) -> tuple[str, str]:
    """("clean" or the fault, the number of errors that the tool counted, or "-").

    The fault is from the exit code, or a tool without output, which has not checked.
    """
    counts = re.findall(r"ERROR SUMMARY: (\d+)|RACECHECK SUMMARY: (\d+)", output)
    errors = "-" if not counts or not tool else str(max(int(errors or hazards) for errors, hazards in counts))
    if code:
        words = {FOUND: "found errors", WRONG: "wrong results", 124: "took too long"}
        return words.get(code, f"exit code {code}"), errors
    if tool and errors != "0":
        return "no summary" if errors == "-" else "found errors", errors
    return "clean", errors


def command(group: str, tool: str, program: str, device: str) -> list[str]:
    child = [sys.executable, "-m", "tests.sanitizer", "--child", group, "--device", device]
    if not tool:
        return child
    only = []
    if tool != "initcheck":  # the option is --kernel-name in newer tools, which warn of --kernel-regex
        text = subprocess.run([program, "--help"], capture_output=True, text=True).stdout
        option = "--kernel-name" if re.search(r"--kernel-name\s", text) else "--kernel-regex"
        only = [option, ENTRY.format(GROUPS[group])]
    return [program, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20", *only, *child]


def run_process(group: str, tool: str, program: str, device: str, cache: Path, log: Path | None) -> Done:
    environment = {
        **os.environ, "JITROPE_CACHE_DIR": str(cache), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    if tool:
        environment["JITROPE_NO_COMPILE"] = "1"  # a kernel that is not prewarmed is an error
    start, arguments = time.monotonic(), command(group, tool, program, device)
    both: dict[str, Any] = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        ran = subprocess.run(arguments, env=environment, cwd=ROOT, timeout=CASE_TIMEOUT, **both)
        code, output = ran.returncode, ran.stdout
    except subprocess.TimeoutExpired as late:
        code, output = 124, (late.stdout or b"").decode(errors="replace")
    if log is not None:
        (log / f"{group}.{tool or 'plain'}.txt").write_text(output)
    done = Done(group, tool, *verdict(tool, code, output), output, time.monotonic() - start)
    print(f"{group:<28}{tool or 'plain':<12}{done.verdict:<20}{done.seconds:6.1f} s", flush=True)
    return done


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
    groups = groups_named(given.case)
    with tempfile.TemporaryDirectory(prefix="jitrope-sanitizer-") as folder, ThreadPoolExecutor(given.jobs) as executor:
        own = program, given.device, (given.cache or Path(folder)).absolute(), given.log
        # All without a tool, which compiles their kernels, then the clean ones under every tool.
        plain = [executor.submit(run_process, group, "", *own) for group in groups]
        clean = [done.result().group for done in plain if done.result().verdict == "clean"]
        checked = [executor.submit(run_process, *x, *own) for x in itertools.product(clean, given.tool or TOOLS)]
        results = [done.result() for done in plain + checked]
    bad = [done for done in results if done.verdict != "clean"]
    for done in bad:
        print(f"\n---- {done.group}, {done.tool or 'plain'}: {done.verdict}\n{done.output[-3000:]}")
    print(f"\n{'template':<24}{'case':<28}{'tool':<12}{'errors':>7}{'seconds':>9}  verdict")
    for done in results:
        row = f"{GROUPS[done.group]:<24}{done.group:<28}{done.tool or 'plain':<12}"
        print(f"{row}{done.errors:>7}{done.seconds:>9.1f}  {done.verdict}")
    print()
    print(f"{len(results)} runs, {len(results) - len(bad)} clean" if bad else f"all {len(results)} runs are clean")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
