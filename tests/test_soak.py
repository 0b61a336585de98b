"""The soak on CPU tensors, the faults that it must find, and the sanitizers' cases and verdicts."""

from __future__ import annotations

import functools
import itertools
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import jitrope
from jitrope import thd
from jitrope.plan.spec import KINDS
from jitrope.run import enqueue
from jitrope.run import launch as runtime

from . import bits, sanitizer, soak
from .jobs import pool
from .results import near_each
from .sanitizer import FOUND, GROUPS, WRONG

FUNCTIONS = ("apply_rope", "prepare_qkv", "prepare_fused_qkv", "prepare_mla_qkv", "prepare_joint_qkv")
OPS = {*FUNCTIONS, *[f"{name}, backward" for name in FUNCTIONS], "all_gather_attention", "thd order", "thd rows",
       "thd tables", "thd corrections", "cp segments"}  # fmt: skip
pytestmark = pytest.mark.slow


def soaked(folder: Path, seconds: float = 3.0) -> tuple[int, dict[str, Any]]:
    """The exit code and the report of a short run with 8 threads."""
    words = f"--device cpu --minutes {seconds / 60} --threads 8 --cases 31 --between-meetings 0.5 --json"
    with pytest.MonkeyPatch.context() as patch:  # the limits that `soak.main` lowers
        for module, limit in ((runtime, "MAX_RECENT"), (enqueue, "MAX_LAUNCHES")):
            patch.setattr(module, limit, getattr(module, limit))
        code = soak.main([*words.split(), str(folder / "report.json")])
    return code, json.loads((folder / "report.json").read_text())


# ---- the pool ----------------------------------------------------------------------------------------


def test_the_pool_has_every_op_and_is_the_same_again() -> None:
    assert {job.op for job in pool(150, 0)} >= OPS
    first, again, other = ([str(job) for job in pool(150, seed)] for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_a_seed_is_a_call_and_another_is_another() -> None:
    """The seed determines sizes and contents."""
    sizes: dict[str, set[Any]] = {}
    for job in pool(60, 3):
        results = [job.make("cpu", seed).start() for seed in (1, 1, 2)]
        near_each(results[0], results[1], 0.0)
        sizes.setdefault(job.op, set()).update(tuple(y.shape for y in out if y is not None) for out in results)
    assert all(len(seen) > 1 for seen in sizes.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32], ids=str)
def test_check_sees_one_element(dtype: torch.dtype) -> None:
    x = torch.arange(1, 9).to(dtype)
    near_each([x, None], [x.clone(), None], 0.0)
    wrong = x.float().index_add(0, torch.tensor([5]), torch.tensor([1.0])).to(dtype)
    for slack in (0.0, 2.0):
        with pytest.raises(AssertionError, match="output 0"):
            near_each([wrong, None], [x, None], slack)
    with pytest.raises(AssertionError, match="output 1"):
        near_each([x, x], [x, None], 0.0)


# ---- the soak ----------------------------------------------------------------------------------------


def test_soak_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = soaked(tmp_path, 4.0)
    assert code == 0, report["problems"]
    assert report["calls"] > 8 * 31
    assert report["wrong results"] == report["exceptions"] == 0
    assert sum(op["against bits"] for op in report["ops"].values()) > 7 * 20
    assert sum(op["against the CPU"] for op in report["ops"].values()) > 31
    assert len(report["meetings"]) >= 2
    assert re.search(r"wrong results 0(.*\n)*memory flat: yes", capsys.readouterr().out)


def test_a_planted_wrong_result_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """One call in five with one element off by a tenth."""
    real, calls = jitrope.apply_rope, itertools.count(1)

    @functools.wraps(real)
    def planted(*arguments: Any, **words: Any) -> Any:
        q, k = real(*arguments, **words)
        if next(calls) % 5:
            return q, k
        q = q.nan_to_num(0)
        off = torch.zeros(q.shape, dtype=q.dtype, device=q.device)  # dense, whatever q's strides
        off.view(-1)[0] = 0.1 + q.abs().max()
        return q + off, k

    monkeypatch.setattr(jitrope, "apply_rope", planted)
    code, report = soaked(tmp_path, 8.0)  # long enough for two meetings on a busy machine
    assert code == 1
    assert report["wrong results"] >= 1
    assert report["problems"] == [f"{report['wrong results']} wrong results"]
    assert all(" x apply_rope" in line for line in report["wrong"])
    assert report["wrong"][0] in capsys.readouterr().out


def test_a_planted_exception_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After fifty of them the run ends."""
    monkeypatch.setattr(jitrope, "apply_rope", lambda *_, **__: 1 / 0)
    start = time.monotonic()
    code, report = soaked(tmp_path, 600.0)
    assert code == 1
    assert time.monotonic() - start < 300
    assert report["exceptions"] >= soak.MOST_EXCEPTIONS
    assert "ZeroDivisionError: division" in report["failed"][0]
    assert not report["wrong results"]


def test_a_thread_that_hangs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "MEETING_TIMEOUT", 0.5)
    monkeypatch.setattr(jitrope, "apply_rope", lambda *_, **__: time.sleep(2))
    code, report = soaked(tmp_path)
    assert code == 1
    assert "a thread did not come" in " ".join(report["failed"])


@pytest.mark.parametrize("name", soak.LIMITS)
def test_memory_that_grows_is_reported(name: str) -> None:
    meetings = [dict.fromkeys(soak.LIMITS, 1 << 30) for _ in range(5)]
    report = {"wrong results": 0, "exceptions": 0, "meetings": meetings}
    meetings[3][name] += soak.LIMITS[name]
    assert soak.problems(report) == []
    meetings[3][name] += 1
    assert [problem.split(":")[0] for problem in soak.problems(report)] == ["memory is not flat"]
    assert name in soak.problems(report)[0]
    assert soak.problems({**report, "meetings": meetings[:1]})[0].startswith("too short")


def test_resident_bytes_are_this_process() -> None:
    before = soak.memory(False)["rss"]
    held = mmap.mmap(-1, size := 256 << 20)  # much more than earlier tests may free meanwhile
    held.write(b"1" * size)
    assert 0.75 * size < soak.memory(False)["rss"] - before < 2.25 * size
    held.close()


# ---- the sanitizers ----------------------------------------------------------------------------------


def test_every_template_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one without a case is refused before anything runs."""
    assert {*GROUPS.values()} == {*sanitizer.TEMPLATES}
    assert sanitizer.groups_named(None) == list(GROUPS)
    assert sanitizer.groups_named(["rope"]) == ["rope-0", "rope-1"]
    monkeypatch.setattr(sanitizer, "TEMPLATES", [*sanitizer.TEMPLATES, "a_new_one"])
    with pytest.raises(SystemExit, match="no case runs a_new_one"):
        sanitizer.groups_named(None)
    with pytest.raises(SystemExit, match="no such case: rop;"):
        sanitizer.groups_named(["rop"])


def test_entries_are_found_by_the_filter() -> None:
    """compute-sanitizer checks kernels with this in their names."""
    assert set(KINDS) == {*sanitizer.TEMPLATES}
    for template in sanitizer.TEMPLATES:
        text = (sanitizer.ROOT / "templates" / f"{template}.cu.jinja").read_text()
        entry = sanitizer.ENTRY.format(template).removeprefix("kns=")
        assert re.search(rf"__global__ void __launch_bounds__\([^)]*\) {entry}\(", text)


def test_a_case_compares_its_results(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert sanitizer.run_group("thd_corrections", "cpu") == 0
    assert "60 calls" in capsys.readouterr().out
    real, calls = thd.grad_correction, itertools.count(1)

    monkeypatch.setattr(
        thd, "grad_correction", lambda grad, *rest: (real(grad, *rest), grad.view(-1)[0].add_(next(calls) == 7))
    )
    assert sanitizer.run_group("thd_corrections", "cpu") == WRONG
    assert ", 1 wrong" in capsys.readouterr().out


CLEAN, ERRORS = "ERROR SUMMARY: 0 errors", "ERROR SUMMARY: 12 errors"
RACES = "RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)"
NO_RACES = "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"


@pytest.mark.parametrize(
    ("tool", "code", "output", "verdict"),
    [
        *[("memcheck", 0, CLEAN, "clean"), ("", 0, "", "clean"), ("racecheck", 0, NO_RACES, "clean")],
        *[("memcheck", FOUND, text, "found errors") for text in (ERRORS, CLEAN)],
        *[("memcheck", 0, ERRORS, "found errors"), ("racecheck", 0, RACES, "found errors")],
        *[("memcheck", WRONG, CLEAN, "wrong results"), ("", WRONG, "", "wrong results")],
        *[("memcheck", 0, "", "no summary"), ("initcheck", 124, "", "took too long")],
        *[("initcheck", 255, CLEAN, "exit code 255"), ("memcheck", -11, CLEAN, "exit code -11")],
    ],
)
def test_verdict(tool: str, code: int, output: str, verdict: str) -> None:
    assert sanitizer.verdict(tool, code, output)[0] == verdict


TOOL = """#!/bin/bash
# Takes compute-sanitizer's arguments, runs the program behind them and counts the errors that it is told.
[ "$1" = --help ] && { echo "  --kernel-name arg"; exit; }
echo "asked: $*"
while [[ "$1" == --* ]]; do shift 2; done
"$@" || exit
echo "========= ERROR SUMMARY: ERRORS errors"
[ ERRORS = 0 ] || exit 9
"""


@pytest.mark.parametrize("errors", [0, 4])
def test_the_parents_verdict_is_its_childrens(errors: int, tmp_path: Path, capsys: Any) -> None:
    """The whole run, with a program in place of the tool, because there is no GPU."""
    program = tmp_path / "tool"
    program.write_text(TOOL.replace("ERRORS", str(errors)))
    program.chmod(0o755)
    tool = "memcheck" if errors else "initcheck"  # which has no filter of kernels
    words = ["--case", "thd_tables", "--tool", tool, "--program", str(program), "--device", "cpu", "--log"]
    assert sanitizer.main([*words, str(tmp_path / "logs")]) == (1 if errors else 0)
    text = capsys.readouterr().out
    assert ("all 2 runs are clean" in text) == (errors == 0)
    assert text.count("found errors") >= 2 * (errors > 0)
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert set(logs) == {"thd_tables.plain.txt", f"thd_tables.{tool}.txt"}
    assert ("--kernel-name kns=jitrope_thd_tables" in logs[f"thd_tables.{tool}.txt"]) == (errors > 0)
    assert all("18 calls" in text for text in logs.values())


# ---- the tools themselves --------------------------------------------------------------------------------

MOVE = """
import sys
from pathlib import Path
import torch
from jitrope.jit import render
from jitrope import thd
render.TEMPLATE_PATHS.insert(0, Path(sys.argv[1]))
cu_seqlens = torch.tensor([0, 37, 100, 256], dtype=torch.int32, device="cuda")
x = torch.empty(256, 64, device="cuda")
if sys.argv[2] != "initcheck":
    x.fill_(1)
print(len(thd.sequence_order_to_cp_rank_order(x, cu_seqlens, 2).cpu()))
"""
FAULTS = {  # of the template, but for initcheck's, which is of the input
    "memcheck": ("let_the_next_begin();", "let_the_next_begin(); p.out[0][1ll << 40] = 1;"),
    "racecheck": ("__syncthreads();", ""),
    "initcheck": ("", ""),
}


@pytest.mark.gpu
@pytest.mark.parametrize("tool", FAULTS)
@pytest.mark.parametrize("planted", [True, False])
def test_a_planted_fault_is_found(tool: str, planted: bool, tmp_path: Path) -> None:
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        pytest.skip("compute-sanitizer comes with the CUDA toolkit, which is not installed")
    before, after = FAULTS[tool] if planted else ("", "")
    text = (sanitizer.ROOT / "templates" / "thd_rows.cu.jinja").read_text()
    assert before in text
    (tmp_path / "thd_rows.cu.jinja").write_text(text.replace(before, after, 1))
    arguments = sanitizer.command("thd_rows", tool, program, "cuda")
    own = arguments.index(sys.executable)
    arguments[own:] = [sys.executable, "-c", MOVE, str(tmp_path), tool if planted else ""]
    environment = {
        **os.environ, "JITROPE_CACHE_DIR": str(tmp_path / "k"), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join([str(sanitizer.ROOT), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    ran = subprocess.run(arguments, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    found = sanitizer.verdict(tool, ran.returncode, ran.stdout)[0]
    assert found == ("found errors" if planted else "clean"), ran.stdout[-3000:]


def test_other_bits_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bits.json"
    words = [str(file), "--count", "40", "--device", "cpu"]
    assert bits.main(words) == 0
    assert bits.main(words) == 0
    assert "0 with other bits" in capsys.readouterr().out
    kept = json.loads(file.read_text())
    name = next(iter(kept))
    file.write_text(json.dumps({**kept, name: "0" * 16}))
    assert bits.main(words) == 1
    assert f"1 with other bits\n{name}" in capsys.readouterr().out
