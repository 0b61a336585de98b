"""The benchmarks of examples/bench without a GPU: arithmetic, every command on tiny shapes, plots, kept results."""

from __future__ import annotations

import csv
import inspect
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections import Counter, defaultdict, namedtuple
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

import jitrope
from examples import bench
from examples.bench import cp, cp_step, diffusion, harness, hosts, kinds, plots, presets, qk_norm, report, results
from jitrope.integrations import _host

from . import fresh
from .context_parallel.batches import Living
from .hosts import missing, timm, triton, xdit
from .ranks import on_ranks

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "examples" / "results"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(report.app, arguments, env={"COLUMNS": "200"})


FILES = [path for path in sorted(RESULTS.glob("*.json")) if not path.stem.startswith("peers_")]
KEPT = {path.stem: json.loads(path.read_text())["rows"] for path in FILES}


def test_medians_are_of_rounds_in_which_all_take_turns() -> None:
    times = {"a": [2.0, 9.0, 1.0], "b": [6.0, 4.0, 5.0]}
    turns = {label: lambda label=label: (seen.append(label), times[label].pop())[1] for label in times}
    seen: list[str] = []
    assert harness.in_rounds(turns) == {"a": 2.0, "b": 5.0}
    assert "".join(seen) == "ababab"


def test_rows_are_over_the_copy_of_the_same_run() -> None:
    rows = harness.rows({"COPY": 2.0, "jitrope": 3.0}, 6_000_000, case="flux")
    assert rows[1] == {"case": "flux", "by": "jitrope", "us": 3.0, "x COPY": 1.5, "TB/s": 2.0}
    assert [row["x COPY"] for row in rows] == [1.0, 1.5]


One = namedtuple("One", "x")


def test_a_case_is_held_against_plain_torch_and_leaves_out_peers_that_refuse(caplog) -> None:
    ours, peers = {"jitrope": lambda x: x.x * 2}, {"a peer": lambda x: x.x.view(33)}
    plain = {"jitrope": lambda x: x.x + x.x}
    case = harness.Case(lambda: One(harness.bf16(4, 8)), ours, {"COPY": 128}, peers, plain=plain)
    times = harness.measure(case, trained=["x"])
    assert list(times) == ["COPY", "jitrope"]
    assert "a peer is left out of this row: shape '[33]' is invalid" in caplog.text
    assert times["COPY"].both == pytest.approx(2 * times["COPY"].forward)
    case.plain = {"jitrope": lambda x: x.x}
    with pytest.raises(AssertionError, match="jitrope differs from plain torch"):
        harness.measure(case)


def test_bytes_of_the_cases() -> None:
    """A copy reads and writes a call's. q and k are read and written once, and so are v and caches if present."""
    assert [call().nbytes for call in harness.copy_calls(4096, 3)] == [2048] * len(harness.copy_calls(4096, 3))
    one = 4608 * 24 * 128 * 2  # bytes of q
    assert bench.rope.case("flux", smoke=True).moved == {"COPY": 2 * 2 * 12 * (4 + 4) * 128}
    assert qk_norm.bytes_moved(qk_norm.CASES["flux"]) == 4 * one
    assert presets.case(presets.PRESETS["flux-fp8"]).moved == {"COPY": 2 * (one + one // 2) + 2 * one}
    assert qk_norm.bytes_moved(qk_norm.CASES["flux-joint"]) == 6 * one
    q, k = 2 * 32 * 128, 2 * 8 * 128
    moved = {"COPY": 2 * (q + k), "COPY, KV cache": 2 * (q + 2 * k), "COPY, fp8 KV cache": 2 * q + 3 * k}
    assert bench.decode.bytes_moved(1, 32, 8, 128) == moved
    assert {base for base, *_ in bench.decode.OURS.values()} == {*moved}
    case = kinds.serving(kinds.PREFILL, (32, 8), smoke=False)
    assert case.moved[case.beside[kinds.FP8_Q]] == kinds.PREFILL * 128 * (32 + 2 * 8) * (2 + 1)
    assert kinds.packed(65536, 32, 8, smoke=False).moved == {"COPY": 2 * 2 * 65536 * 32 * 128}


def test_a_target_is_held_against_the_median_of_places(monkeypatch: pytest.MonkeyPatch) -> None:
    places = iter([kinds.Timed(2, 1, 1), kinds.Timed(3, 3, 1), kinds.Timed(9, 8, 1)])
    monkeypatch.setattr(bench.targets, "timed", lambda *_: next(places))
    work, peers = "KV cache of a prefill: KV cache, 32/8", bench.targets.best_peers("NVIDIA H200")
    assert bench.targets.rows("KV cache of a prefill", "KV cache, 32/8", True, peers) == [
        {"work": work, "pass": "forward", "us": 3, "x COPY": 9 / 8, "target": 1.04, "reached": "no"}
        | {"peer": "SGLang", "peer x COPY": 1.16}
    ]


def test_a_peer_is_that_of_a_work_and_of_a_device() -> None:
    works = {f"{group}: {case}" for group, cases in kinds.KINDS.items() for case in cases}
    assert {*bench.targets.best_peers("NVIDIA H200")} <= works
    assert not bench.targets.best_peers("NVIDIA B200")


def test_the_axial_grid_has_its_cases_tokens_and_pairs() -> None:
    for name, (grid, section) in bench.rope.GRIDS.items():
        _, tokens, _, _, head_dim = bench.rope.CASES[name][0]
        assert (math.prod(grid), sum(section)) == (tokens, head_dim // 2)
        assert max(grid) <= bench.rope.AXIAL_ROWS


BY = {  # labels that a command has, among others
    "rope --only flux,wan": "COPY; jitrope in place, one table; jitrope, position_ids; torch eager",
    "decode": "COPY, fp8 KV cache; jitrope, fp8 KV cache; torch.compile, KV cache; x.add_(1)",
    "thd --no-peers --table freqs-half": "COPY; jitrope; jitrope, grid_2d",
    "train --no-peers": "COPY; jitrope",
    "qk-norm --no-peers": "COPY, tables too; jitrope in place; jitrope, rounded twice; F.rms_norm + apply_rope",
    "qk-norm --only prefill": "torch.compile; torch eager",
    "presets --no-peers": "COPY; jitrope",
    "presets --only deepseek-mla": "jitrope; torch.compile; torch eager",
    "diffusion --only flux,wan": "stock; jitrope; jitrope, rope only; no rope; no rope, no qk-norm",
    "layer --no-peers": "none; jitrope; jitrope fused QKV",
    "block": "none; torch; jitrope",
    "projection": "projection alone; projection, then prepare_fused_qkv; project_qkv",
    "host": "x.add_(1); apply_rope in place; apply_rope; apply_rope, packed; KV cache in place; norm in place; "
    "apply_rope, recorded for backward; torch.ops.jitrope.prepare",
    "hosts --only qwen3-decode": "stock; jitrope",
    "cold": "empty cache; from disk",
    "stages": "jitrope",
    "roofline": "jitrope; jitrope in place; jitrope, position_ids; jitrope, fp8 KV cache",
    "targets": "rope: prefill; one sequence: 65,536 tokens; decode: cos and sin rows, fresh, 32/8",
}


@pytest.mark.slow
@pytest.mark.tenth
@pytest.mark.parametrize("command", BY)
def test_a_smoke_run(command: str) -> None:
    for name, library in (("diffusion", "diffusers"), ("hosts", "transformers")):
        if command.startswith(name):
            pytest.importorskip(library, reason="the bench runs its models")
    done = run(*command.split(), "--smoke", "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    label = next(key for key in ("by", "rope", "call", "cache", "work") if key in rows[0])
    assert {row[label] for row in rows} >= {*BY[command].split("; ")}
    section = results.SECTIONS[command.split()[0].replace("-", "_")]
    shown = {column.where.get(label, "") for table in section.tables for column in table.columns.values()}
    assert {row[label] for row in rows} >= {name for name in shown if name.startswith("jitrope")}
    assert bench.sections.markdown(section.tables[0], rows)
    assert (section.plot(rows) is None) == (command in ("host", "cold", "stages", "targets"))
    for row in rows:
        keys = ("us", "ms", "fwd us", "host us", "layer ms", "block ms")
        times = [row.get(key) for key in keys if row.get("pass") != "backward"]
        assert all(time > 0 for time in times if time is not None)  # a backward is a difference of two times
        if "against eager stock" in row:
            assert row["against eager stock"] == (None if "no rope" in row["by"] else "same bits")
            assert row["host calls"] in (0, None)
            assert row["by"][:7] != "jitrope" or row["jitrope calls"] + row["fused calls"] > 0


@pytest.mark.slow
@pytest.mark.tenth
@pytest.mark.parametrize("name", hosts.HOSTS)
def test_a_step_of_hosts(name: str, tmp_path: Path) -> None:
    """Each model, stock and then with jitrope, eager and compiled: calls are taken, and nothing stays replaced."""
    host = hosts.HOSTS[name]
    package = host.package.partition(".")[0]
    if package == "timm":
        timm()
    elif (package == "transformer_engine" or name == "megatron-te-train") and not torch.cuda.is_available():
        pytest.skip("the kernels of its library need a GPU")
    elif package != "xfuser" and find_spec(package) is None:
        missing(f"pip install {package}")
    with {"torchtitan": triton, "xfuser": xdit}.get(package, nullcontext)():
        for on in (False, True):
            torch._dynamo.reset()
            with host.make(on, True) as side:
                runner = hosts.Runner(side, smoke=True)
                for mode in ("eager", "compiled"):
                    counted, path = Counter(runner.prepare(mode)), str(tmp_path / mode)
                    if not on:
                        runner.keep(path)
                        assert counted.total() == 0
                        continue
                    if (package, mode) != ("timm", "compiled"):  # where timm's own code runs
                        assert counted["jitrope"] + counted["fused"] > 0 == counted["host"]
                    assert runner.compare(path) < 0.02
    assert not _host.placed


@pytest.mark.parametrize("name", ["qwen3-train", "qwen3-decode", "gemma4-train"])
def test_models_of_hosts_have_their_real_widths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides of a step run at full size on the meta device."""
    pytest.importorskip("transformers", reason="the bench runs its models")
    for module in (harness, bench.host_models, hosts):
        monkeypatch.setattr(module, "DEVICE", "meta")
    steps = []
    for on in (False, True):
        with hosts.HOSTS[name].make(on, False) as side:
            steps.append(hosts.Runner(side, smoke=False).step())
            assert side.calls().get("fused", 0) > 0 or not on
    stock, ours = steps
    assert [x.shape for x in ours] == [x.shape for x in stock]
    batch, tokens, width = stock[0].shape
    assert (batch * tokens, width) == (8 if name == "qwen3-decode" else 4096, 2304 if name == "gemma4-train" else 4096)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the library is looked for")
def test_a_host_that_is_not_there_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process says why. Without a GPU TransformerEngine is not, whether its Python part is installed or not."""
    done = run("hosts", "--only", "te-train", "--smoke", "--json")
    assert (done.exit_code, json.loads(done.stdout)["rows"]) == (0, [])
    assert "te-train is left out: transformer_engine.pytorch cannot be imported (" in done.stderr


@pytest.mark.slow
def test_another_jitrope_runs_beside(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("diffusers", reason="the bench runs its transformers")
    words = "hosts", "--only", "flux", "--no-compile", "--smoke", "--json"
    done = run(*words, "--beside", str(ROOT))
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [row["by"] for row in rows] == ["stock", "jitrope", hosts.BESIDE]
    assert rows[1]["off %"] == rows[2]["off %"] < 2
    package = tmp_path / "jitrope"  # its drop-in for diffusers says that it was loaded, and then fails
    package.mkdir()
    for path in [*(ROOT / "jitrope").iterdir(), ROOT / "templates"]:
        if path.name not in ("integrations", "__pycache__"):
            (tmp_path if path.name == "templates" else package).joinpath(path.name).symlink_to(path)
    shutil.copytree(ROOT / "jitrope" / "integrations", package / "integrations")
    (package / "integrations" / "diffusers" / "__init__.py").write_text("raise RuntimeError('the other jitrope')")
    done = run(*words, "--beside", str(tmp_path))
    assert done.exit_code == 1
    assert f"the process of {hosts.BESIDE} has ended; its error is above" in done.stderr
    assert "RuntimeError: the other jitrope" in capfd.readouterr().err


def test_a_wrong_result_of_a_host_is_not_timed() -> None:
    x = torch.randn(64)
    for calls, off, why in (
        (1, hosts.difference([1.1 * x], [x]), r"off by 0\.1 of its norm"),
        (1, hosts.difference([x, x * torch.nan], [x, x]), "off by nan of its norm"),
        (0, hosts.difference([x], [x]), "jitrope was not called"),
    ):
        by = {}
        for name, said in (("stock", (0, 0.0)), ("jitrope", (calls, off))):  # processes that answer at once
            answers = {"prepare": {"jitrope": said[0]}, "compare": said[1]}
            by[name] = Mock(**{"receive.return_value": answers["prepare"]})
            by[name].ask.side_effect = lambda what, *_, answers=answers: answers.get(what)
        with pytest.raises(AssertionError, match=why):
            next(hosts.measured(by, "eager", {}, ""))


def test_a_smoke_run_of_cp() -> None:
    """All operations on even and ragged batches, tables of three batches, a step of two masks, its memory, balance."""
    done = run("cp", "--smoke", "--json")
    assert done.exit_code == 0, done.output
    cp_rows = json.loads(done.stdout)["rows"]
    parts = ("rows", "metadata", "step", "memory", "call", "balance")
    of = {part: [row for row in cp_rows if row["part"] == part] for part in parts}
    assert [len(part) for part in of.values()] == [2 * 8, 3 * 3, 2 * 3, 2 * (4 + 3), 2 * 3 * 3, 2 * 2 * 2 * 2]
    assert all(row["us"] > 0 and row["x"] > 0 and row["of"] == "COPY" for row in of["rows"])
    tables = (*cp.SECTION.tables[:3], cp.SECTION.tables[5])  # memory needs a GPU, ranks two
    assert all(bench.sections.markdown(table, cp_rows) for table in tables)
    assert cp.plot(cp_rows) is not None
    assert {row["case"] for row in of["step"]} == {"causal 4/2, math", "window 3 4/2, math"}
    assert {row["case"].split(", ")[1] for row in of["memory"]} == {"tensors", "with math's kernels"}
    alone = [row["x"] for row in of["step"] if row["what"].startswith("attention alone") and "causal" in row["case"]]
    assert sum(alone) == pytest.approx(1)
    # Causal pairs of 15, 18 and 32 tokens, padded to 32, are 336 and 483 in one cut, and 397 and 422 in the other.
    pairs = [row["x"] for row in of["balance"] if "pairs" in row["what"]]
    assert pairs[:2] == pytest.approx([483 / 409.5, 422 / 409.5])
    assert not dist.is_initialized()


def test_a_step_that_fails_is_named_and_the_others_are_shown(capsys) -> None:
    steps = {"one": lambda: {}["no code for this"], "two": lambda: [{"by": "jitrope", "us": 1.5}]}
    with pytest.raises(report.typer.Exit) as stop:
        report.show(steps, smoke=True, as_json=False)
    assert stop.value.exit_code == 1
    said = capsys.readouterr()
    assert "one failed: KeyError: 'no code for this'" in said.err
    assert "jitrope" in said.out
    assert "1.500" in said.out


@pytest.mark.slow
def test_a_stopped_run_prints_its_finished_rows() -> None:
    """`timeout` sends SIGTERM, and again to the whole process group; rows are on stderr as soon as they are there."""
    command = [sys.executable, "-m", "examples.bench", "presets", "--no-peers", "--smoke", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    pipe: Any = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=ROOT) as run:
        first = next(line for line in run.stderr if line.startswith("{"))
        for _ in range(2):
            run.send_signal(signal.SIGTERM)
        out, err = run.communicate(timeout=60)
    assert run.returncode != 0
    assert "stopped in " in err
    assert "Traceback" not in err
    rows = json.loads(out)["rows"]
    assert rows[0] == json.loads(first)
    assert {row["case"] for row in rows} < {*presets.PRESETS}


def test_tables_are_readable_at_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """No cell is cut off; a table that is too wide has its first columns as headings. A piped one has a row a line."""
    marks = str.maketrans(":;", "  ")
    for rows in KEPT.values():
        words = report.table(rows, 80)
        assert max(map(len, words.splitlines())) <= 80
        assert not set("\u2026\u2502\u2500|") & set(words)
        texts = [report._text(value).translate(marks) for row in rows for value in row.values()]
        assert {*" ".join(texts).split()} <= {*words.translate(marks).split()}
        report.show({"": lambda rows=rows: rows}, smoke=True, as_json=False)
        lines = capsys.readouterr().out.splitlines()
        firsts = [str(next(iter(row.values()))) for row in rows]
        assert all(line.strip().startswith(first) for line, first in zip(lines[1:], firsts, strict=True))
    assert "model: wan; blocks: 4 of 40; tokens: 32760; mode: compiled\n" in report.table(KEPT["diffusion_h100"], 80)


BAD = {
    "thd --sequences 1,x": "--sequences takes numbers", "thd --table sines": "--table is 'sines'",
    "layer --batches 128": "not '128'", "layer --out nowhere/layer": "there is no folder nowhere",
    "rope --only flux,flex": "--only has flex", "decode --heads 32/8,64": "not '32/8,64'",
}  # fmt: skip


@pytest.mark.parametrize("command", BAD)
def test_bad_options_are_named(command: str) -> None:
    done = run(*command.split())
    assert done.exit_code == 2
    assert BAD[command] in done.output


@pytest.mark.slow
@pytest.mark.parametrize("command", [["-m", "jitrope", "bench"], ["-m", "examples.bench"], [f"{ROOT}/examples/bench"]])
def test_ways_to_run_them(command: list[str]) -> None:
    """A checkout has all three. Without a GPU they exit with 1 and one line."""
    done = fresh.python(*command, "host", cwd=ROOT, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (1, "")
    assert "needs a CUDA device" in done.stderr
    assert "Traceback" not in done.stderr
    done = fresh.python(*command, "-h", cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: jitrope bench" in done.stdout


NEEDED = {
    "cli.__file__ = '/x/jitrope/tools/cli.py'": "are not in the package: run examples/bench in a checkout of the "
    "repository",
    "sys.modules['typer'] = None": "need typer: pip install -e '.[bench]'",  # as if not installed
}


@pytest.mark.parametrize("word", ["host", "--help"])
@pytest.mark.parametrize("change", NEEDED)
def test_what_the_command_needs(change: str, word: str) -> None:
    done = fresh.python("-c", f"import sys; from jitrope.tools import cli; {change}; cli.main()", "bench", word)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: the benchmarks {NEEDED[change]}\n"


PLOTS = {name: results.SECTIONS[name.rpartition("_")[0]].plot(rows) for name, rows in KEPT.items()}
PLOTS["gain_h100"] = qk_norm.gain(KEPT["qk_norm_h100"])
drawn = pytest.mark.skipif(find_spec("matplotlib") is None, reason="plots need it: pip install -e '.[bench]'")
HEAD = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4s2I", 13, b"IHDR", 1800, 900)
"""The first bytes of a picture of 1800 by 900 pixels."""


def test_the_page_of_results_is_what_report_writes() -> None:
    """The page is never edited by hand, and each of its plots exists."""
    page = (RESULTS / "README.md").read_text()
    assert page == results.page(RESULTS)
    assert sorted(re.findall(r"\]\((\w+)\.png\)", page)) == sorted(path.stem for path in RESULTS.glob("*.png"))
    assert set(re.findall(r"\]\((\w+)\.json\)", page)) == {*KEPT}
    first, _, _ = page.partition("\n## ")
    assert len(re.sub(r"^[|<].*", "", first, flags=re.MULTILINE).split()) <= 250


@drawn
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PLOTS if PLOTS[name]])
def test_a_plot_is_readable_at_900_pixels(name: str, tmp_path: Path) -> None:
    """At most five series, one colour for jitrope, words inside the picture; the kept file has the same size."""
    plot: Any = PLOTS[name]
    series = {series for group in plot.groups.values() for series in group}
    assert len(series) <= 5
    assert {plots.colour(each) for each in series if "jitrope" in each} == {plots.COLOURS["jitrope"]}
    assert len(plot.message) <= 75
    assert all(value > 0 for group in plot.groups.values() for value in group.values())
    plots.draw(plot, "a device", tmp_path / "plot.png")
    assert all(path.read_bytes().startswith(HEAD) for path in (tmp_path / "plot.png", RESULTS / f"{name}.png"))


def test_colours_are_distinct_and_stand_out_from_the_card() -> None:
    """By WCAG's contrast of graphics and of small text."""
    light = {}
    for colour in (plots.CARD, plots.TEXT, plots.QUIET, *plots.COLOURS.values()):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        light[colour] = sum(w * ((x + 0.055) / 1.055) ** 2.4 for w, x in zip((0.2126, 0.7152, 0.0722), parts))
    contrast = {colour: (light[plots.CARD] + 0.05) / (x + 0.05) for colour, x in light.items()}
    assert len({*plots.COLOURS.values()}) == len(plots.COLOURS)
    assert min(contrast[colour] for colour in plots.COLOURS.values()) >= 3
    assert min(contrast[plots.TEXT], contrast[plots.QUIET]) >= 4.5


@drawn
def test_a_second_device_is_a_second_table_of_the_section(tmp_path: Path) -> None:
    first = json.loads((RESULTS / "rope_h100.json").read_text())
    (tmp_path / "rope_h100.json").write_text(json.dumps(first))
    other = [{**row, "us": 2 * row["us"]} for row in first["rows"]]
    (tmp_path / "rope_other.json").write_text(json.dumps({**first, "device": "another GPU", "rows": other}))
    done = run("report", str(tmp_path))
    assert done.exit_code == 0, done.output
    page = (tmp_path / "README.md").read_text()
    assert page.count("## Rope of q and k\n") == 1
    ours, others = page.split("### Rope of q and k: another GPU")
    assert "### Rope of q and k: NVIDIA H100" in ours
    us = next(row["us"] for row in first["rows"] if (row["case"], row["by"]) == ("flux", "COPY"))
    assert f"| FLUX (1, 4608, 24, 24, 128) | {us:.1f} |" in ours
    assert f"| FLUX (1, 4608, 24, 24, 128) | {2 * us:.1f} |" in others
    assert {path.name for path in tmp_path.glob("*.png")} == {"rope_h100.png", "rope_other.png"}


def test_every_benchmark_has_a_section() -> None:
    commands = {command.name for command in report.app.registered_commands} - {"report"}
    assert {name.replace("_", "-") for name in results.SECTIONS} == commands
    shown = [section.command.split("`")[0] for section in results.SECTIONS.values()]
    assert shown == [f"jitrope bench {name.replace('_', '-')}" for name in results.SECTIONS]


def test_a_file_of_no_benchmark_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ropes_h100.json").write_text("{}")
    with pytest.raises(jitrope.JitropeError, match=r"^ropes_h100\.json: names must be NAME_DEVICE\.json"):
        results.page(tmp_path)


NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?")


def not_measured(table: list[str]) -> list[str]:
    """The lines of a Markdown table with a number that no JSON holds. Its columns of numbers are flush right.

    Numbers are rounded as they are shown, and microseconds may be shown as milliseconds. A line belongs to one case of
    one file; a cell of several numbers, such as "1.00 to 1.04", may have other cases.
    """
    keys, files = ("part", "case", "host", "model", "heads", "tokens", "sequences", "batch"), []
    for rows in KEPT.values():  # the numbers of each case, as texts, and under None those of the whole file
        texts: dict[Any, set[str]] = defaultdict(set)
        for row in rows:
            numbers = [(key, x) for key, x in row.items() if isinstance(x, (int, float))]
            values = [y for key, x in numbers for y in ((x, x / 1e3) if key.endswith("us") else (x,))]
            for place in (tuple(row.get(key) for key in keys), None):
                texts[place] |= {f"{value:.{digits}f}" for value in values for digits in range(5)}
        files.append(texts)
    columns = [i for i, align in enumerate(table[1].strip("|").split("|")) if align.strip() == "--:"]
    assert columns, "no column is flush right"
    wrong = []
    for line in table[2:]:
        cells = [cell for i, cell in enumerate(line.strip("|").split("|")) if i in columns]
        numbers = [NUMBER.findall(re.sub(r"\]\(.*?\)", "]", cell).replace(",", "")) for cell in cells]
        alone, ranges = ({x for found in numbers for x in found if (len(found) > 1) == many} for many in (False, True))
        right = (alone <= texts[case] and ranges <= texts[None] for texts in files for case in filter(None, texts))
        if not (alone | ranges and any(right)):
            wrong.append(line)
    return wrong


def gains() -> list[list[str]]:
    """The cells of the table of hosts: all steps of the H100's file, beside them the H200's, and losses in bold."""
    keys = ("host", "model", "step", "mode")
    ours = {
        name: {tuple(row[key] for key in keys): row for row in KEPT[f"hosts_{name}"] if row["by"] == "jitrope"}
        for name in ("h100", "h200")
    }
    assert {*ours["h200"]} <= {*ours["h100"]}

    def cell(key: tuple[str, ...], kind: str) -> str:
        found = [ours[name].get(key, {}).get(kind) for name in ours]
        texts = ["" if x is None else f"**{x:.2f}**" if round(x, 2) < 1 else f"{x:.2f}" for x in found]
        return texts[0] + (f" ({texts[1]})" if texts[1] else "")

    steps = dict.fromkeys(key[:3] for key in ours["h100"])
    kinds = [(mode, kind) for mode in ("eager", "compiled") for kind in ("x stock", "GPU x stock")]
    return [[step[1], *(cell((*step, mode), kind) for mode, kind in kinds)] for step in steps]


def test_the_numbers_of_the_readme_are_in_the_results() -> None:
    """Every table with columns of numbers, rounded as shown; that of hosts has all of their steps."""
    text = (ROOT / "README.md").read_text()
    tables = [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE) if "--:" in table]
    heads = [table[0] for table in tables]
    assert ["compiled" in head for head in heads] == [True, False], heads
    of_hosts, of_kernels = tables
    assert not not_measured(of_kernels)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in of_hosts[2:]]
    want = gains()
    assert [line[1:] for line in cells] == [line[1:] for line in want]
    assert all(re.split(" \\(|,", model)[0] in line[0] for line, (model, *_) in zip(cells, want))


@drawn
@pytest.mark.parametrize("command", ["thd", "layer"])
def test_a_run_writes_its_rows_and_its_plot(command: str, tmp_path: Path) -> None:
    """JSON as `--json` prints it, the same rows as CSV, and the plot."""
    out = tmp_path / f"{command}_cpu"
    done = run(command, "--no-peers", "--smoke", "--json", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{out.name}.{kind}" for kind in ("csv", "json", "png")]
    assert Path(f"{out}.json").read_text() == done.stdout
    rows = json.loads(done.stdout)["rows"]
    with open(f"{out}.csv", newline="") as file:
        assert [*csv.DictReader(file)] == [{key: str(value) for key, value in row.items()} for row in rows]
    assert Path(f"{out}.png").read_bytes().startswith(HEAD)


def test_a_number_that_was_not_measured_is_found() -> None:
    head = ["| q + k | COPY | jitrope | layer |", "| --- | --: | --: | --: |"]
    lines = [
        "| FLUX (1, 4608, 24, 24, 128) | 39.6 us | 1.02 | |",
        "| FLUX (1, 4608, 24, 24, 128) | 39.5 us | 1.01 | |",
        "| FLUX, with Wan's number | 39.6 us | 1.24 | |",
        "| rope, all cases | 1.00 to 1.04 | | |",
        "| another file's range | 39.6 us | 360.9 to 1.04 | |",
        "| packed, ms | 0.722 | 1.02 | [more](h100.png) |",
        "| no number | | | |",
    ]
    assert not_measured([*head, *lines]) == [lines[i] for i in (1, 2, 4, 6)]


def test_kept_results_hold_the_sweeps_of_the_commands() -> None:
    sequences = ",".join(dict.fromkeys(str(row["sequences"]) for row in KEPT["thd_h100"]))
    batches = ",".join(dict.fromkeys(row["batch"].replace(" ", "") for row in KEPT["layer_h100"]))
    assert sequences == inspect.signature(bench.train.thd).parameters["sequences"].default
    assert batches == inspect.signature(bench.layer.command).parameters["batches"].default


@pytest.mark.parametrize("name", ["flux", "flux-joint", "wan", "ltx", "prefill", "head72"])
def test_qk_norm_chains_agree(name: str) -> None:
    """The plain chain is F.rms_norm and our rope, bit for bit."""
    kind = qk_norm.tiny(qk_norm.CASES[name])
    x = qk_norm.inputs(kind)
    plain, ours = qk_norm.separate(kind)(x), qk_norm.separate(kind, partial(jitrope.apply_rope, inplace=True))(x)
    assert len(plain) == (3 if kind.text else 2)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_the_library_op_is_the_call() -> None:
    """`bench host` times the op with the arguments of the call."""
    q, k, angles = harness.bf16(1, 4, 2, 8), harness.bf16(1, 4, 2, 8), harness.angles(4, 8)
    cos, sin = angles.cos(), angles.sin()
    found = bench.host.library_op(lambda: jitrope.apply_rope(q, k, cos, sin))()
    assert all(torch.equal(a, b) for a, b in zip(found, jitrope.apply_rope(q, k, cos, sin), strict=True))


@pytest.mark.parametrize("name", diffusion.MODELS)
@torch.no_grad()
def test_diffusion_without_rope_and_norms(name: str) -> None:
    """No rope equals a rotation by no angle. Copies have the model's weights, and do not change the model."""
    pytest.importorskip("diffusers", reason="the bench runs its transformers")
    model = diffusion.MODELS[name]
    transformer, inputs, _ = diffusion.build(model, tuple(1 for _ in model.blocks), True, "cpu")

    none, bare = diffusion.without_rope(transformer), diffusion.without_norms(transformer)
    models = (transformer, none, bare, transformer)
    stock, *found = [of(**inputs, return_dict=False)[0] for of in models]
    tables = transformer.rope if hasattr(transformer, "rope") else transformer.pos_embed
    hook = tables.register_forward_hook(  # a rotation by no angle, in the host's form
        lambda _, given, out: (torch.ones_like(out[0]), out[1] * 0 + out[1].is_complex())
    )
    assert torch.equal(found[0], transformer(**inputs, return_dict=False)[0])
    hook.remove()
    assert [torch.equal(x, stock) for x in found] == [False, False, True]
    assert {type(getattr(module, norm)) for module, norm in diffusion.qk_norms(bare)} == {nn.Identity}
    addresses = [{x.data_ptr() for x in of.parameters()} for of in (transformer, none, bare)]
    assert addresses[0] == addresses[1] > addresses[2]


def test_diffusion_models_have_their_real_widths() -> None:
    """The tokens of a step are right, and each forward runs at full size on the meta device."""
    pytest.importorskip("diffusers", reason="the bench runs its transformers")
    tokens = {}
    for name, model in diffusion.MODELS.items():
        transformer, inputs, tokens[name] = diffusion.build(model, tuple(1 for _ in model.blocks), False, "meta")
        assert transformer(**inputs, return_dict=False)[0].device.type == "meta"
    assert tokens == {"flux": 4608, "flux2": 4608, "qwen": 4352, "wan": 32760, "hunyuan": 29056, "ltx": 5280}


FULL = cp.Batch()
CASES = [(cp_size, heads) for cp_size in (2, 4, 8) for heads in FULL.heads]


def test_bytes_of_moved_rows() -> None:
    """65,536 tokens, 16 heads of 64, bf16, rank 1 of 2: 2 KiB a row; chunks 1 and 2 of 4 see 2 + 3 chunks of keys."""
    row, tokens = 2 * 16 * 64, 65536
    order = 2 * tokens * row
    assert {work.name: work.bytes_moved for work in cp.works(2, FULL, ragged=False)} == {
        **{f"{there} order": order for there in ("sequence to rank", "rank to sequence")},
        **{f"{there} order, k and v": 2 * order for there in ("sequence to rank", "rank to sequence")},
        "copy valid": 2 * (tokens // 4) * row,
        "gather of visible keys, k and v": 2 * order * 5 // 4,
        "sum of chunks, dK and dV": 2 * (tokens * 5 // 4 + tokens) * row,
        "sum over ranks, dK and dV": 2 * (2 + 1) * (tokens // 2) * row,
    }


def test_te_peak_by_hand() -> None:
    """A rank of 2 with 4 rows, 3 heads of q, 1 of k and v, 8 numbers each: K = 128 bytes, Q = 192, L = 48."""
    assert cp_step.te_peak(4, 2, (3, 1), 8) == 9 * 128 + 4 * 192 + 2 * 48


@pytest.mark.parametrize("mask", ["causal", "window 512"])
@pytest.mark.parametrize(("cp_size", "heads"), CASES)
def test_share_of_te_peak(cp_size: int, heads: tuple[int, int], mask: str) -> None:
    """The autograd function itself at full size, with tables of rows but without the attention's kernels: at most
    0.6 of TransformerEngine's. Fake tensors have no memory, only its size."""
    with FakeTensorMode():
        schedule = FULL.schedule(cp_size, mask)
        x = cp_step.local(schedule, heads, FULL)
        with cp_step.one_rank_of(schedule), Living() as living:
            cp_step._fresh_step(x, cp_size, mask, heads, FULL, cp_step.SHAPES, {})
    assert living.bytes == 0, "something stayed"
    assert len(x.q) * cp_size == FULL.tokens
    # Every step needs at least the keys and values that a rank sees, and their gradients.
    least = 2 * (x.k.nbytes + x.v.nbytes) * (cp_size if mask == "causal" else 1)
    assert least < living.most <= 0.6 * cp_step.te_peak(len(x.q), cp_size, heads, FULL.head_dim)


def test_under_torchrun_only_the_step_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    done = run("cp")
    assert done.exit_code == 2
    assert "--only is 'step' under torchrun" in done.output


@on_ranks
def test_ranks() -> None:
    """The other ranks' rows in a step, in MiB; only the window's rows are exchanged."""
    steps = cp_step.rank_steps(cp.Batch(256, 3, ((4, 2),), 8, 3))
    rows, every = [row for step in steps.values() for row in step()], [None] * 4
    dist.all_gather_object(every, rows)
    assert every == [rows] * 4  # each time is the slowest rank's
    by = {(row["case"].split(" 4/2")[0], row["what"]): row["MiB"] * 2**20 for row in rows}
    row = 2 * 2 * 2 * 8  # bytes of k and v
    gathered = 3 * 64 * row
    assert by["causal", "step"] == 3 * by["causal", "all-gather of k and v"] == 3 * gathered
    assert by["causal", "step, keep_gathered"] == 2 * gathered
    assert ("causal", "exchange of k and v") not in by
    # Of each of three sequences a rank gets at most 3, 4 and 5 rows of the others, before its two chunks.
    assert by["window 3", "step"] == 3 * by["window 3", "exchange of k and v"] == 3 * 3 * (3 + 4 + 5) * row
