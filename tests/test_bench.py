"""What `jitrope bench` does without a GPU: options, tables, plots of the kept results."""

from __future__ import annotations

import importlib
import inspect
import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from jitrope.bench import cli, decode, report, rope
from jitrope.cli import app

RESULTS = Path(__file__).parent.parent / "examples" / "results"


@pytest.mark.parametrize("name", ["thd", "layer", "decode", "rope"])
def test_a_plot_of_the_kept_results(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need it: pip install 'jitrope[bench]'")
    rows = json.loads((RESULTS / f"{name}_h100.json").read_text())["rows"]
    path = tmp_path / "plot.png"
    importlib.import_module(f"jitrope.bench.{name}").plot(rows, "a title", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert len(report.table(rows).rows) == len(rows)


ROWS = {
    "rope": [
        {"case": case, "by": by, "us": us, "x COPY": us / 10, "TB/s": 1.0}
        for case, times in (("flux", {"COPY": 10.0, "jitrope": 10.2, "torch eager": 140.0}), ("wan", {"jitrope": 10.5}))
        for by, us in times.items()
    ],
    "decode": [
        {"heads": heads, "tokens": tokens, "L2": l2, "by": by, "us": us, "x COPY": us and us / 1.1, "host us": None}
        for heads in ("32/8", "64/8")
        for tokens, l2 in ((1, "hot"), (64, "hot"), (4096, "cold"))
        for by, us in (("COPY", 1.1), (decode.COPY_KV, 1.2), ("jitrope, KV cache", 1.4), ("x.add_(1)", None))
    ],
}


@pytest.mark.parametrize("name", ROWS)
def test_a_plot_of_rows(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need it: pip install 'jitrope[bench]'")
    path = tmp_path / "plot.png"
    importlib.import_module(f"jitrope.bench.{name}").plot(ROWS[name], "a title", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_table_leaves_out_what_was_not_measured() -> None:
    *_, host = (list(column.cells) for column in report.table(ROWS["decode"]).columns)
    assert set(host) == {""}


def test_bytes_of_a_decode_step() -> None:
    """One token, bf16: q and k read and written; v and the caches; caches of one byte an element."""
    q, k = 2 * 32 * 128, 2 * 8 * 128
    assert decode.bytes_moved(1, 32, 8, 128) == {
        decode.COPY: 2 * (q + k), decode.COPY_KV: 2 * (q + k + k), decode.COPY_FP8: 2 * q + 3 * k,
    }  # fmt: skip
    assert {base for base, _ in decode.OURS.values()} == {decode.COPY, decode.COPY_KV, decode.COPY_FP8}


def test_the_axial_grid_has_its_cases_tokens_and_pairs() -> None:
    for name, (grid, section) in rope.GRIDS.items():
        _, tokens, _, _, head_dim = rope.CASES[name][0]
        assert math.prod(grid) == tokens
        assert sum(section) == head_dim // 2
        assert max(grid) <= rope.AXIAL_ROWS


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
        (["rope", "--only", "flux,flex"], "--only has flex"),
        (["decode", "--tokens", "1,x"], "--tokens takes numbers"),
        (["decode", "--heads", "32/8,64"], "not '32/8,64'"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to run on")
@pytest.mark.parametrize("name", ["rope", "decode", "thd", "layer", "train", "host"])
def test_a_missing_device_is_said(name: str) -> None:
    result = CliRunner().invoke(app, ["bench", name])
    assert "needs a CUDA device" in str(result.exception)
