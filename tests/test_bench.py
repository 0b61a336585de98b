"""What `jitrope bench` does without a GPU: options, tables, plots of the kept results."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from jitrope import cli
from jitrope.bench import report
from jitrope.cli import app

RESULTS = Path(__file__).parent.parent / "examples" / "results"


@pytest.mark.parametrize("name", ["thd", "layer"])
def test_a_plot_of_the_kept_results(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need it: pip install 'jitrope[bench]'")
    rows = json.loads((RESULTS / f"{name}_h100.json").read_text())["rows"]
    path = tmp_path / "plot.png"
    importlib.import_module(f"jitrope.bench.{name}").plot(rows, "a title", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert len(report.table(rows).rows) == len(rows)


def default(command, option: str) -> str:
    return inspect.signature(command).parameters[option].default


def test_kept_results_hold_the_sweeps_of_the_commands() -> None:
    rows = {name: json.loads((RESULTS / f"{name}_h100.json").read_text())["rows"] for name in ("thd", "layer")}
    sequences, batches = default(cli.bench_thd, "sequences"), default(cli.bench_layer, "batches")
    assert ",".join(dict.fromkeys(str(row["sequences"]) for row in rows["thd"])) == sequences
    assert ",".join(dict.fromkeys(row["batch"].replace(" ", "") for row in rows["layer"])) == batches
    assert sequences == "1,8,32,128,512,1024,2401"
    assert batches == "128x512,512x128,1024x64,2401x28"
    ours = [row["x 2 COPY"] for row in rows["thd"] if row["by"] == "jitrope"]
    assert max(ours) < 1.04  # the README's claim is this file's


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["thd", "--sequences", "1,x"], "--sequences takes numbers"),
        (["thd", "--table", "sines"], "--table is 'sines'"),
        (["layer", "--batches", "128"], "not '128'"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to run on")
@pytest.mark.parametrize("name", ["thd", "layer", "train"])
def test_a_missing_device_is_said(name: str) -> None:
    result = CliRunner().invoke(app, ["bench", name])
    assert "needs a CUDA device" in str(result.exception)
