"""The `jitrope` command: what it prints, where, and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jitrope.ops import turned_back
from jitrope.prewarm import DEFAULT_CALLS, Call, read_calls
from jitrope.problem import NormCall, cache_view, head_views, plan_call
from jitrope.reference import FP8
from jitrope.spec import Norm, Options

ROOT = Path(__file__).parent.parent


@pytest.fixture
def jitrope(tmp_path: Path):
    """Run the command with a cache of its own."""

    def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ, "JITROPE_CACHE_DIR": str(tmp_path / "kernels"), "PYTHONPATH": str(ROOT), "COLUMNS": "150",
            "CUDA_VISIBLE_DEVICES": "", **changes,
        }  # fmt: skip
        return subprocess.run(
            [sys.executable, "-m", "jitrope", *arguments], capture_output=True, text=True, env=environment, cwd=tmp_path
        )

    return run


def test_help_of_every_command(jitrope) -> None:
    bench = [["bench"], ["bench", "rope"], ["bench", "decode"]]
    for command in ([], ["prewarm"], ["render"], ["cache"], ["cache", "ls"], ["doctor"], *bench):
        done = jitrope(*command, "--help")
        assert done.returncode == 0
        assert "Usage" in done.stdout


def test_version(jitrope) -> None:
    import jitrope as package

    assert jitrope("--version").stdout.strip() == package.__version__


def test_prewarm_then_everything_is_cached(jitrope) -> None:
    arguments = ("prewarm", "--heads", "32,8", "--heads", "24", "--arch", "sm_80,sm_90", "--json")
    first = json.loads(jitrope(*arguments).stdout)
    assert first["compiled"] == 6  # two token-linear tiles, one grid_2d for both, for two architectures
    assert first["failed"] == first["cached"] == 0
    second = json.loads(jitrope(*arguments).stdout)
    assert second["cached"] == 6
    assert second["compiled"] == 0


def test_prewarm_needs_to_know_for_what(jitrope) -> None:
    done = jitrope("prewarm")
    assert done.returncode == 1
    assert "--arch" in done.stderr
    assert done.stdout == ""


def test_prewarm_reports_failures(jitrope) -> None:
    done = jitrope("prewarm", "--heads", "8", "--arch", "sm_20")
    assert done.returncode == 1
    assert "2 failed" in done.stdout
    assert "this NVRTC compiles for" in done.stderr


@pytest.mark.parametrize("option", [("--head-dim", "7"), ("--dtype", "fp8"), ("--width", "third"), ("--heads", "x")])
def test_prewarm_refuses_nonsense(jitrope, option: tuple[str, str]) -> None:
    done = jitrope("prewarm", "--heads", "8", *option, "--arch", "sm_90")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr


def test_prewarm_from_a_real_runs_cache(jitrope, tmp_path: Path) -> None:
    jitrope("prewarm", "--heads", "40", "--packed", "int32", "--arch", "sm_90")
    listing = jitrope("cache", "ls", "--json").stdout
    (tmp_path / "specs.json").write_text(listing)
    elsewhere = {"JITROPE_CACHE_DIR": str(tmp_path / "elsewhere")}
    done = jitrope("prewarm", "--from", "specs.json", "--arch", "sm_120", "--json", **elsewhere)
    assert json.loads(done.stdout)["compiled"] == len(json.loads(listing)["spec"]) == 2


@pytest.mark.skipif(sys.version_info < (3, 11), reason="TOML needs Python 3.11")
def test_prewarm_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "calls.toml"
    path.write_text('[[call]]\nheads = [40, 64]\nhead_dim = 128\ndtype = ["bf16", "fp16"]\n')
    want = {spec for heads in (40, 64) for dtype in ("bf16", "fp16") for spec in Call(heads, dtype=dtype).specs()}
    assert set(read_calls(path)) == want


@pytest.mark.parametrize(
    "text", ["{", "{}", "[]", '{"call": [{"heads": 1, "nope": 2}]}', '{"spec": [{"dtype": "bf16"}]}', '{"call": [{}]}']
)
def test_prewarm_names_a_bad_file(jitrope, tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    done = jitrope("prewarm", "--from", "bad.json", "--arch", "sm_90")
    assert done.returncode == 1
    assert "bad.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_render(jitrope) -> None:
    text = jitrope("render", "--heads", "24", "--interleaved", "--head-dim", "64", "--backward").stdout
    assert "constexpr int HEAD_DIM = 64;" in text
    assert "constexpr bool INTERLEAVED = true;" in text
    assert "constexpr bool CONJUGATE = true;" in text
    data = json.loads(jitrope("render", "--json").stdout)
    assert data["text"].startswith("#line 1")
    assert data["spec"]["heads_per_block"] == 40
    assert jitrope("render", "--launch", "3d").returncode == 2
    norm = ("--norm", "twice", "--weight-dtype", "bf16")
    assert "constexpr NormRounding NORM_ROUNDING = TWICE;" in jitrope("render", *norm).stdout
    assert "jitrope_qk_norm_rope_backward(" in jitrope("render", *norm, "--backward").stdout
    assert "allowed are" in jitrope("render", "--norm", "thrice").stderr


def test_cache_commands(jitrope, tmp_path: Path) -> None:
    assert json.loads(jitrope("cache", "info", "--json").stdout)["kernels"] == 0
    jitrope("prewarm", "--heads", "8", "--arch", "sm_90")
    assert "rope_bf16_d128" in jitrope("cache", "ls").stdout
    assert jitrope("cache", "verify").returncode == 0
    victim = next((tmp_path / "kernels").glob("*/kernel.cubin"))
    victim.write_bytes(b"broken")
    done = jitrope("cache", "verify", "--json")
    assert done.returncode == 1
    assert str(victim.parent) == json.loads(done.stdout)["bad"][0]["path"]
    assert json.loads(jitrope("cache", "clear", "--json").stdout) == {"removed": 2}
    assert json.loads(jitrope("cache", "info", "--json").stdout)["kernels"] == 0


def test_doctor(jitrope, tmp_path: Path) -> None:
    done = jitrope("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert {check["what"] for check in report["checks"]} >= {
        "torch",
        "GPU",
        "CuPy and NVRTC",
        "kernel cache",
        "self-test",
    }
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    done = jitrope("doctor")
    assert done.returncode == 1
    assert "can be written by other users" in done.stdout


def test_without_cupy_the_extra_is_named_whole(jitrope, tmp_path: Path) -> None:
    """A terminal's markup must not swallow the brackets of `jitrope[cuda13]`."""
    code = "import sys; sys.modules['cupy'] = None; from jitrope.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JITROPE_CACHE_DIR": str(tmp_path / "k"), "COLUMNS": "200"}
    for arguments in (["prewarm", "--heads", "8", "--arch", "sm_90"], ["doctor"]):
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 1
        assert "pip install 'jitrope[cuda13]'" in done.stdout + done.stderr


def test_bench_says_that_it_needs_a_gpu(jitrope) -> None:
    done = jitrope("bench", "host")
    assert done.returncode == 1
    assert "needs a CUDA device" in done.stderr


NORM_CALLS = [
    Call(48, interleaved=True, width="full", norm="once", weight_dtype="bf16", backward=True),
    Call(72, interleaved=True, norm="twice", weight_dtype="fp32", two_streams=True, zero_centered=True, backward=True),
    Call(32, head_dim=64, norm="none", in_place=True),
    Call(64, head_dim=64, norm="once", across_heads=(32, 32), weight_dtype="bf16", backward=True),
]


@pytest.mark.parametrize("call", [*DEFAULT_CALLS, *NORM_CALLS], ids=str)
def test_prewarmed_spec_is_what_a_call_asks_for(call: Call) -> None:
    """The kernels that prewarm builds are the ones that a call plans, field for field."""
    specs = call.specs()
    wanted = {plan.spec for launch in ("token_linear", "grid_2d") for plan in plans_of(call, launch)}
    # A rope's gradient may be planned as another call's forward: what is asked of it is its own test's.
    assert wanted <= set(specs)
    assert call.backward or wanted == set(specs)


def plans_of(call: Call, launch: str):
    """What calls with aligned, ordinary tensors plan: of a norm its gradient too."""
    import torch

    def empty(*shape, dtype=None):
        return torch.empty(shape, dtype=dtype or torch_dtype[call.dtype], device="meta")

    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
    packed = call.packed is not None
    parts = 3 if call.two_streams else 2 if call.norm else 1
    heads = call.heads - 16 if call.slots else call.heads // parts  # of q; 8 each of k and v go to slots
    rotary = call.rotary_dim or call.head_dim
    if call.freqs_cis:
        cos = empty(4096, rotary // 2, dtype=torch.complex64)
    else:
        width = rotary if call.width == "full" else rotary // 2
        cos = empty(4096, width, dtype=torch_dtype[call.table_dtype])
    lengths = empty(5, dtype=getattr(torch, call.packed)) if packed else None
    ids, slots = (
        empty(4096, dtype=getattr(torch, kind)) if kind else None for kind in (call.position_ids, call.slots)
    )  # fmt: skip
    options = Options(
        layout="thd" if packed else "bshd", interleaved=call.interleaved, interleaved_out=call.interleaved,
        rotary_dim=rotary, table="freqs" if call.angles else "freqs_cis" if call.freqs_cis else "cos_sin",
        rounding=call.rounding, launch=launch, in_place=call.in_place,
    )  # fmt: skip
    tables = (cos, cos, lengths, None, ids)
    q = empty(4096, heads, call.head_dim) if packed else empty(1, 4096, heads, call.head_dim)
    if not call.norm:
        inputs, outputs = head_views(q, None, options)
        if slots is not None:
            k = empty(1, 4096, 8, 128).unsqueeze(3)
            cache = empty(99, 8, 128, dtype=FP8 if call.kv_dtype == "fp8" else q.dtype)
            inputs, outputs = (inputs[0], k, k), (outputs[0], cache_view(cache), cache_view(cache))
        yield plan_call(inputs, outputs, tables, slots, options, 132)[0]
        return
    q_heads, k_heads = call.across_heads or (heads, heads)
    q, k = empty(1, 4096, q_heads, call.head_dim), empty(1, 4096, k_heads, call.head_dim)
    weights = [
        empty(call.head_dim * (h if call.across_heads else 1), dtype=torch_dtype[call.weight_dtype])
        if call.weight_dtype
        else None
        for h in (q_heads, k_heads)
    ]
    norm = Norm(call.norm, bool(call.across_heads), call.zero_centered)
    if call.two_streams:
        views, out = ([empty(1, n, heads, 1, call.head_dim) for _ in range(3)] for n in (2048, 4096))
        second_tables = (cos, cos) if call.two_tables else ()
        normed = NormCall(norm, (*weights, *weights), tuple(views), second_tables)
        yield plan_call(tuple(views), tuple(out), tables, None, options, 132, normed)[0]
    else:
        yield plan_call(*head_views(q, k, options), tables, None, options, 132, NormCall(norm, tuple(weights)))[0]
    if call.backward:
        back = Options(*turned_back(tuple(options)))._replace(rounding="complex64")
        normed = NormCall(norm._replace(rounding="none"), tuple(weights), grads=head_views(q, k, back)[0][:2])
        yield plan_call(*head_views(q, k, back), tables, None, back, 132, normed)[0]
