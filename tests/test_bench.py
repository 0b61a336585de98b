"""What `jitrope bench` does without a GPU: options, tables, plots of the kept results."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from jitrope import apply_rope_
from jitrope.bench import cli, decode, diffusion, qk_norm, report, rope
from jitrope.tools.cli import app

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
    "qk_norm": [
        {"case": case, "pass": direction, "by": by, "us": us, "x COPY": us / 10, "TB/s": 1.0}
        for case, direction in (("flux", "forward"), ("flux", "backward"), ("wan", "forward"))
        for by, us in (("COPY", 10.0), ("jitrope", 10.5), ("torch eager", 300.0))
    ],
    "diffusion": [
        {"model": model, "mode": mode, "by": by, "ms": ms, "x stock": ms and 40 / ms}
        for model, mode in (("flux", "eager"), ("flux", "compiled"), ("wan", "eager"))
        for by, ms in (("stock", 40.0), ("jitrope", 32.0), ("jitrope, rope only", None), ("no rope", 31.0))
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
        (["qk-norm", "--only", "flux,flex"], "--only has flex"),
        (["diffusion", "--only", "sdxl"], "--only has sdxl"),
        (["decode", "--tokens", "1,x"], "--tokens takes numbers"),
        (["decode", "--heads", "32/8,64"], "not '32/8,64'"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to run on")
@pytest.mark.parametrize("name", ["rope", "decode", "thd", "layer", "train", "host", "qk-norm", "diffusion"])
def test_a_missing_device_is_said(name: str) -> None:
    result = CliRunner().invoke(app, ["bench", name])
    assert "needs a CUDA device" in str(result.exception)


# ---- qk-norm, on small shapes on the CPU ---------------------------------------------------------------


def small(case: qk_norm.Case) -> qk_norm.Case:
    b, s, hq, hk, d = case.shape
    shape = (min(b, 3), min(s, 6), 4, 4 * hk // hq, d)
    return dataclasses.replace(case, shape=shape, text=min(case.text, 2))


SMALL = {name: small(case) for name, case in qk_norm.CASES.items()}


def test_qk_norm_cases() -> None:
    """The shapes that figures are known of, and a COPY of what each reads and writes."""
    assert {qk_norm.CASES[name].shape for name in ("flux", "prefill", "decode64")} == {
        (1, 4608, 24, 24, 128), (1, 8192, 32, 8, 128), (64, 1, 32, 8, 128),
    }  # fmt: skip
    one = 4608 * 24 * 128 * 2  # bytes of q
    assert qk_norm.bytes_moved(qk_norm.CASES["flux"]) == 4 * one
    assert qk_norm.bytes_moved(qk_norm.CASES["flux-joint"]) == 6 * one
    assert qk_norm.bytes_moved(qk_norm.CASES["qwen3"]) == 4096 * (32 + 8) * 128 * 2 * 2
    assert {*qk_norm.TRAINED} <= {*qk_norm.CASES}


@pytest.mark.parametrize("name", SMALL)
def test_qk_norm_chains_agree(name: str) -> None:
    """What jitrope is timed beside computes the same: the plain chain is F.rms_norm and our rope, bit for bit."""
    case = SMALL[name]
    torch.manual_seed(0)
    x = qk_norm.inputs(case, "cpu")
    plain, ours = qk_norm.eager(case)(x), qk_norm.separate(case, apply_rope_)(x)
    assert len(plain) == (3 if case.text else 2)
    assert plain[0].shape == case.shape[:3] + case.shape[4:]
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    qk_norm.check(case, x)


def test_qk_norm_rows() -> None:
    rows = qk_norm.run(["flux", "flux-joint", "ltx"], peers=False, device="cpu", cases=SMALL)
    seen = {
        (row["case"], row["pass"]): [r["by"] for r in rows if r["case"] == row["case"] and r["pass"] == row["pass"]]
        for row in rows
    }
    rounded = ["jitrope, rounded once", "jitrope, rounded twice"]
    chain = "F.rms_norm + apply_rope"
    assert seen == {
        ("flux", "forward"): ["COPY", "jitrope", "jitrope in place", *rounded, chain + "_"],
        ("flux", "backward"): ["COPY", "jitrope", *rounded, chain],
        ("flux-joint", "forward"): ["COPY", "jitrope", *rounded, chain + "_"],
        ("ltx", "forward"): ["COPY", "COPY, tables too", "jitrope", "jitrope in place", *rounded, chain + "_"],
    }


def test_qk_norm_peers() -> None:
    """Autograd goes through all that are there, and the compiled chain's gradients are the eager one's."""
    case = SMALL["prefill"]
    torch.manual_seed(0)
    x = qk_norm.inputs(case, "cpu")
    gradients = {}
    for by, call in qk_norm.implementations(case, peers=True, training=True):
        torch.manual_seed(1)
        _, both = qk_norm._train_step(call, x)
        gradients[by] = both()
    assert {"torch.compile", "torch eager"} <= {*gradients}
    for by, found in gradients.items():
        for got, want in zip(found, gradients["torch eager"], strict=True):
            torch.testing.assert_close(
                got.float(), want.float(), rtol=0.05, atol=0.1, msg=lambda m, by=by: f"{by}: {m}"
            )


# ---- diffusion, tiny on the CPU ------------------------------------------------------------------------


@pytest.mark.parametrize("name", diffusion.MODELS)
def test_diffusion_rows(name: str) -> None:
    pytest.importorskip("diffusers", reason="the bench runs its transformers")
    compiled = name in ("flux", "wan")  # the others' blocks take as long to trace and show nothing more
    rows = diffusion.run([name], blocks=1, compiled=compiled, rounds=1, tiny=True, backend="eager")
    eager = ["stock", "jitrope", "jitrope, rope only", "no rope", "no rope, no qk-norm"]
    modes = [("eager", by) for by in eager] + [("compiled", by) for by in eager[:2]] * compiled
    assert [(row["mode"], row["by"]) for row in rows] == modes
    for row in rows:
        assert row["ms"] > 0
        if "no rope" in row["by"]:
            assert row["against eager stock"] is None
            continue
        assert row["against eager stock"] == "same bits"
        assert row["graph breaks"] == (0 if row["mode"] == "compiled" else None)
        if row["by"] != "stock":
            assert row["jitrope calls"] + row["fused calls"] > 0
            assert row["host calls"] == 0


def test_a_variant_that_fails_is_a_row() -> None:
    """A backend that raises: the eager rows stand, and the others say why they are empty."""
    pytest.importorskip("diffusers", reason="the bench runs its transformers")

    def backend(*_: object) -> None:
        raise NotImplementedError("no code for this")

    rows = diffusion.run(["flux"], blocks=1, rounds=1, tiny=True, backend=backend)
    failed = [row for row in rows if row["mode"] == "compiled"]
    assert [row["by"] for row in failed] == ["stock", "jitrope"]
    assert all(row["ms"] is None and row["against eager stock"].startswith("FAILED: ") for row in failed)
    assert len(report.table(rows).rows) == len(rows)


class _Still(nn.Module):
    """Tables of a rotation by no angle, in the form of the host's own."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, *args: object, **words: object) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = self.tables(*args, **words)
        return torch.ones_like(first), torch.ones_like(second) if second.is_complex() else torch.zeros_like(second)


@pytest.mark.parametrize("name", diffusion.MODELS)
@torch.no_grad()
def test_diffusion_without_rope_and_norms(name: str) -> None:
    """No rope is a rotation by no angle; copies have the model's weights, and leave the model as it was."""
    pytest.importorskip("diffusers", reason="the bench runs its transformers")
    model = diffusion.MODELS[name]
    transformer, inputs, _ = diffusion.build(model, tuple(1 for _ in model.blocks), True, "cpu")

    def result(of: nn.Module) -> torch.Tensor:
        return of(**inputs, return_dict=False)[0]

    stock = result(transformer)
    still = diffusion.sharing(transformer)
    tables = "rope" if hasattr(still, "rope") else "pos_embed"
    setattr(still, tables, _Still(getattr(still, tables)))
    none = diffusion.without_rope(transformer)
    assert torch.equal(result(none), result(still))
    assert not torch.equal(result(none), stock)

    bare = diffusion.without_norms(transformer)
    assert not torch.equal(result(bare), stock)
    kinds = {type(getattr(module, norm)) for module, norm in diffusion._qk_norms(bare)}
    assert kinds == {nn.Identity}
    assert torch.equal(result(transformer), stock)
    addresses = [{x.data_ptr() for x in of.parameters()} for of in (transformer, none, bare)]
    assert addresses[0] == addresses[1] > addresses[2]


def test_diffusion_models_have_their_real_widths() -> None:
    """Tokens of a step; and each forward goes through at full size, on the meta device, which computes nothing."""
    pytest.importorskip("diffusers", reason="the bench runs its transformers")
    tokens = {}
    for name, model in diffusion.MODELS.items():
        transformer, inputs, tokens[name] = diffusion.build(model, tuple(1 for _ in model.blocks), False, "meta")
        assert transformer(**inputs, return_dict=False)[0].device.type == "meta"
    assert tokens == {"flux": 4608, "flux2": 4608, "qwen": 4352, "wan": 32760, "hunyuan": 29056, "ltx": 5280}
