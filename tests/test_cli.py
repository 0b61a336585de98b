"""The output and the exit code of the `jitrope` command."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch

from jitrope import InvalidInput
from jitrope.base import config
from jitrope.base.errors import JitropeError
from jitrope.base.spec import record_of, spec_from_dict
from jitrope.jit import compiler, kernels, render
from jitrope.jit.cache import KernelCache
from jitrope.jit.entry import Key
from jitrope.tools import cli, doctor
from jitrope.tools import prewarm as prewarming
from jitrope.tools.models import specs_of_model
from jitrope.tools.prewarm import read_record, specs_of

from . import fresh

ROOT = Path(__file__).parent.parent


@pytest.fixture
def process(tmp_path: Path):
    """Run the command in a separate process, with its own cache and no GPU."""

    def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "JITROPE_CACHE_DIR": str(tmp_path / "kernels"), "PYTHONPATH": str(ROOT)}
        environment |= {"COLUMNS": "150", "CUDA_VISIBLE_DEVICES": "", **changes}
        return fresh.python("-m", "jitrope", *arguments, env=environment, cwd=tmp_path)

    return run


@pytest.fixture
def jitrope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the command in this process, which saves importing torch again."""

    def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        stdout, stderr, code = io.StringIO(), io.StringIO(), 0
        with monkeypatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
            for name, value in {"JITROPE_CACHE_DIR": str(tmp_path / "kernels"), "COLUMNS": "150", **changes}.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["jitrope", *arguments])
            patch.setattr(config, "_start", tmp_path)
            kernels._cache_at.cache_clear()
            patch.chdir(tmp_path)
            try:
                cli.main()
            except SystemExit as stop:
                code = int(stop.code or 0)
            finally:
                config.configure(compile=None)
        return subprocess.CompletedProcess(arguments, code, stdout.getvalue(), stderr.getvalue())

    return run


COMMANDS = ["", "prewarm", "render", "doctor", "cache", "cache ls", "cache path", "cache verify", "cache clear"]
COMMANDS += ["cache prune", "bundle", "bundle write", "bundle load", "bundle ls", "bench", "bench rope", "bench decode"]
WITH_EXAMPLES = ["", "prewarm", "render", "cache verify", "cache prune", "bundle write"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(jitrope, command: str) -> None:
    done = jitrope(*command.split(), "--help", COLUMNS="80")
    assert done.returncode == 0
    assert "usage" in done.stdout.lower()
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert jitrope(*command.split(), "-h", COLUMNS="80").stdout == done.stdout
    if command in WITH_EXAMPLES:
        assert f"jitrope {command}".strip() in done.stdout.split("Examples:")[1]


def test_commands_are_all_of_them(jitrope) -> None:
    assert cli.COMMANDS.keys() <= set(COMMANDS)
    assert all("--json" in jitrope(*name.split(), "--help").stdout for name in cli.COMMANDS)


WRONG = ["", "cache", "nothing", "cache ls --nothing", "cache prune", "cache prune --older-than much", "bundle load"]
WRONG += ["prewarm --heads 8 --jobs -1", "prewarm --heads 8 --dtype int8", "prewarm --heads x --arch sm_90"]
WRONG += ["prewarm --heads 8 --arch hopper", "prewarm --heads 8 --arch sm_090", "render --from run.json --head-dim 64"]
WRONG += ["prewarm --heads 8 --head-dim 7 --arch sm_90", "prewarm --from run.json --heads 8", "prewarm --backward"]
WRONG += [
    "prewarm --arch sm_90 --model m --heads 8",
    "prewarm --arch sm_90 --model m --from run.json",
    "prewarm",
    "render",
]
WRONG += ["prewarm --arch sm_90 --model m --width full", "prewarm --heads 1,2,3 --arch sm_90", "prewarm text"]
FAILED = ["bundle load none.zip", "bundle ls none.zip", "prewarm --from none.json --arch sm_90", "bundle write k.zip"]
FAILED += ["prewarm --model none --arch sm_90"]


@pytest.mark.parametrize("command", [*WRONG, *FAILED])
def test_exit_codes_and_no_traceback(jitrope, command: str) -> None:
    assert "Exit codes: 0 done, 1 something failed" in jitrope("--help", COLUMNS="80").stdout
    done = jitrope(*command.split())
    assert done.returncode == (2 if command in WRONG else 1)
    assert "Traceback" not in done.stderr
    if command in ("", "cache"):  # the help lists its commands
        assert "usage" in done.stdout
    else:
        assert done.stderr
        assert command in FAILED or done.stdout == ""


def test_a_reader_that_ends_first_and_an_interrupt_are_no_traceback(process, jitrope, monkeypatch) -> None:
    line = f"{sys.executable} -m jitrope render --heads 8 | true"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(line, shell=True, env=environment, capture_output=True, text=True).stderr == ""
    monkeypatch.setattr(doctor, "run", interrupt)
    done = jitrope("doctor")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def interrupt() -> None:
    raise KeyboardInterrupt


def test_version(jitrope) -> None:
    assert jitrope("--version").stdout.strip() == config.__version__


# ---- prewarm and render --------------------------------------------------------------------------


def test_prewarm_then_everything_is_cached(jitrope, tmp_path: Path) -> None:
    """`prewarm` compiles even if calls must not. A dry run prints the same and builds nothing."""
    arguments = ("prewarm", "--heads", "32,8", "--arch", "sm_80,sm_90", "--json")
    dry = json.loads(jitrope(*arguments, "--dry-run").stdout)
    assert (dry["would compile"], dry["cached"], dry["failed"]) == (4, 0, 0)
    assert list(tmp_path.iterdir()) == []
    first = json.loads(jitrope(*arguments, JITROPE_NO_COMPILE="1").stdout)
    assert (first["compiled"], first["cached"], first["failed"]) == (4, 0, 0)
    (tmp_path / "run.json").write_text(jitrope("cache", "ls", "--json").stdout)
    assert set(read_record(tmp_path / "run.json")) == {*specs_of([32, 8])}
    second = json.loads(jitrope(*arguments).stdout)
    assert (second["compiled"], second["cached"]) == (0, 4)
    (next((tmp_path / "kernels").glob("*sm_90*")) / "kernel.cu").write_bytes(b"damaged")
    dry = json.loads(jitrope(*arguments, "--dry-run").stdout)
    assert (dry["would compile"], dry["cached"]) == (1, 3)
    assert {k["arch"] for k in dry["kernels"] if k["outcome"] != "cached"} == {"sm_90"}


def test_options_of_a_call_are_never_ignored(jitrope) -> None:
    said = "jitrope prewarm: error: a call and its options need --heads; --model takes --dtype and --backward\n"
    for more in (
        ["--from", "run.json", "--width", "full"],
        ["--model", "m", "--head-dim", "64"],
        ["--model", "m", CALL],
    ):
        assert jitrope("prewarm", *more, "--arch", "sm_90").stderr.endswith(said)
    done = jitrope("prewarm", "--dtype", "fp16", "--arch", "sm_90")
    assert done.stderr.endswith("jitrope prewarm: error: pass one of --heads, --model, --from\n")
    assert jitrope("render").stderr.endswith("jitrope render: error: pass one of --heads, --from\n")


@pytest.mark.parametrize("written", ["sm_90", "sm90", "90", "9.0"])
def test_an_architecture_can_be_written_in_several_ways(jitrope, written: str) -> None:
    want = jitrope("prewarm", "--heads", "8", "--arch", "sm_90", "--dry-run", "--json").stdout
    assert jitrope("prewarm", "--heads", "8", "--arch", f"{written},sm_90", "--dry-run", "--json").stdout == want
    given = ("10.0", "12.1a", "sm_90a", "9", "hopper", 90)  # no GPU looks for the second and the third
    assert [prewarming.architecture(x) for x in given] == ["sm_100", None, None, "sm_9", None, None]


@pytest.mark.parametrize("arch", ["sm_130", "5.0", "sm_91", "12"])
def test_an_architecture_that_nvrtc_does_not_know_is_one_line(jitrope, arch: str) -> None:
    done = jitrope("prewarm", "--heads", "8", "--arch", f"sm_90,{arch}")
    assert (done.returncode, done.stdout) == (1, "2 compiled, 0 cached, 2 failed\n")
    (line,) = done.stderr.splitlines()
    name = prewarming.architecture(arch)
    assert re.match(rf"failed: rope_bf16_d128\w+ {name} and 1 more: NVRTC .* compiles for .*, not for {name}; ", line)


CALL = "bshd heads q k > norm q_weight k_weight > rotate cos sin position_ids rotary_dim=32 interleaved > in_place"
WORDS = {"head_dim": 64, "dtype": "fp16", "width": "full"}


def test_every_option_of_a_call_has_a_meaning(jitrope) -> None:
    """With each alone the kernels are those of the function's word, and others than without it. A call is one too."""
    plain = specs_of([8, 2])
    for word, value in {**WORDS, "backward": True, "call": CALL}.items():
        given = [f"--{word.replace('_', '-')}", *([] if value is True else [str(value)])][word == "call" :]
        done = jitrope("prewarm", "--heads", "8,2", *given, "--arch", "sm_90", "--dry-run", "--json")
        specs = specs_of([8, 2], **{word: value})
        assert [kernel["name"] for kernel in json.loads(done.stdout)["kernels"]] == [spec.name for spec in specs]
        assert specs != plain
    assert {spec.head_dim for spec in specs_of(8, **WORDS)} == {64}
    done = jitrope("prewarm", "--heads", "24,24", "--heads", "24", "--arch", "sm_90", "--dry-run", "--json")
    assert len(json.loads(done.stdout)["kernels"]) == len({*specs_of([24, 24]), *specs_of(24)}) > 2


def test_kernels_that_are_cached_need_no_nvrtc_that_knows_their_architecture(jitrope, tmp_path: Path) -> None:
    """A bundle may have kernels that another NVRTC compiled."""
    spec = specs_of(8)[0]
    KernelCache(tmp_path / "kernels").store(kernels.key_of(spec, "sm_50"), "text", b"cubin", spec.to_dict())
    (tmp_path / "run.json").write_text(json.dumps(record_of([spec])))
    done = jitrope("bundle", "write", "k.zip", "--from", "run.json", "--arch", "sm_50", "--json")
    assert (done.returncode, json.loads(done.stdout)["cached"]) == (0, 1)


def test_a_dry_run_lists_the_kernels_in_words(jitrope) -> None:
    jitrope("prewarm", "--heads", "8", "--arch", "sm_90")
    in_place = "bshd heads q > rotate cos sin > in_place"
    done = jitrope("prewarm", in_place, "--heads", "8", "--backward", "--arch", "sm_90", "--dry-run")
    *lines, total = done.stdout.splitlines()
    text = "bshd heads q > rotate cos sin rotary_dim=128"
    name = "rope bf16 d128 halves"
    assert f"would compile  sm_90   {name} forward grid 2d: {text} > in_place" in lines
    assert f"would compile  sm_90   {name} backward token linear: {text} inverse > fresh" in lines
    assert total == f"{len(lines)} would compile, 0 cached, 0 failed"
    lines = jitrope("prewarm", "--heads", "8", "--arch", "sm_90", "--dry-run").stdout.splitlines()
    assert f"cached         sm_90   {name} forward grid 2d: {text} > fresh" in lines


def test_prewarm_needs_an_architecture(process) -> None:
    done = process("prewarm", "--heads", "8")
    assert done.returncode == 1
    assert "--arch" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry run"])
def test_prewarm_reports_failures(jitrope, tmp_path: Path, monkeypatch, dry: tuple[str, ...]) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(render, "TEMPLATE_PATHS", [tmp_path])
        render._texts.cache_clear()
        done = jitrope("prewarm", "--heads", "8", "--arch", "sm_90", *dry)
    assert done.returncode == 1
    assert "2 failed" in done.stdout
    (line,) = done.stderr.splitlines()  # one for all kernels with the same fault
    assert re.match(r"failed: rope_bf16_d128\w+ sm_90 and 1 more: the template rope.cu.jinja is missing", line)
    (tmp_path / "empty.json").touch()
    done = jitrope("prewarm", "--from", "empty.json", "--arch", "sm_90", "--json", *dry)
    assert done.returncode == 1
    assert "nothing to build" in done.stderr
    assert json.loads(done.stdout)["kernels"] == []


def test_what_a_cache_lists_is_built_elsewhere(jitrope, tmp_path: Path) -> None:
    jitrope("prewarm", "--heads", "40", "--arch", "sm_90")
    listing = jitrope("cache", "ls", "--json").stdout
    (tmp_path / "specs.json").write_text(listing)
    elsewhere = {"JITROPE_CACHE_DIR": str(tmp_path / "elsewhere")}
    done = jitrope("prewarm", "--from", "specs.json", "--arch", "sm_120", "--json", **elsewhere)
    assert json.loads(done.stdout)["compiled"] == len(json.loads(listing)["spec"]) == 2
    assert "constexpr int HEAD_DIM = 128;" in jitrope("render", "--from", "specs.json").stdout


BAD_FILES = ["{", "{}", "[]", '{"spec": [{"dtype": "bf16"}]}', '{"spec": 5}', '{"spec": ' + "[" * 100000]
BAD_FILES += ['{"version": 1, "spec": [5]}', '{"call": [{"heads": 8}]}', "\0", "heads = 8", '{"version": 1, "spec": 5}']


@pytest.mark.parametrize("text", BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_file_of_something_else_is_one_line(jitrope, tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    done = jitrope("prewarm", "--from", "bad.json", "--arch", "sm_90", "--dry-run")
    assert done.returncode == 1
    assert done.stderr.startswith("error:")
    assert "bad.json" in done.stderr
    assert done.stderr.count("\n") == 1


def test_render(jitrope) -> None:
    call = "bshd heads q > rotate cos sin interleaved > fresh"
    text = jitrope("render", call, "--heads", "24", "--head-dim", "64", "--backward").stdout
    assert "constexpr int HEAD_DIM = 64;" in text
    assert "constexpr bool INTERLEAVED = true;" in text
    assert "constexpr bool INVERSE = true;" in text
    data = json.loads(jitrope("render", "--heads", "32,8", "--json").stdout)
    assert data["text"].startswith(f"// {data['name']}\n")
    assert data["spec"]["heads_per_block"] == 40


def test_a_source_renders_again_by_the_command_at_its_head(jitrope, tmp_path: Path) -> None:
    words = "bshd heads q > rotate cos sin interleaved > fresh"
    text = jitrope("render", words, "--heads", "24", "--backward").stdout
    call, _, text = text.partition("\n")  # the kernel may belong to other calls too, so its own text has none
    assert call == "// bshd heads q > rotate cos sin rotary_dim=128 interleaved inverse > fresh"
    (tmp_path / "kernel.cu").write_text(f"{call}\n{text}")
    (command,) = re.findall(r"^// To render this text again: (.*)$", text, re.MULTILINE)
    command = command.replace("FILE", "kernel.cu").replace("jitrope", f"{sys.executable} -m jitrope")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == text, done.stderr


@pytest.mark.parametrize(("where", "code", "text"), [
    (">&-", 0, "0 kernels"), ("> /dev/full", 1, "error: [Errno 28] No space left on device"), ("> out", 0, "0 kernels"),
])  # fmt: skip
def test_a_stdout_that_takes_no_text(tmp_path: Path, where: str, code: int, text: str) -> None:
    """It is closed, on a full disk, or has another encoding than the path of the cache."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    environment["JITROPE_CACHE_DIR"] = str(tmp_path / "ü")
    command = f"{sys.executable} -m jitrope cache ls {'--json' * (code > 0)} {where}"
    done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(text)
    assert done.stderr.count("\n") == 1
    if where == "> out":
        command = f"{sys.executable} -m jitrope doctor --json > out"
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert "Traceback" not in done.stderr


def test_a_spec_of_a_file_that_no_kernel_has_is_named_and_refused(tmp_path: Path) -> None:
    path = tmp_path / "specs.json"
    path.write_text(json.dumps({"version": 1, "spec": [specs_of(8)[0].to_dict(), {"kind": "rope"}]}))
    with pytest.raises(InvalidInput, match=rf"^{re.escape(str(path))}: spec\[1\]: "):
        read_record(path)


# ---- prewarm --model -----------------------------------------------------------------------------

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}
FLUX = {"_class_name": "FluxTransformer2DModel", "num_layers": 1, "num_single_layers": 1}


@pytest.mark.parametrize("config", [LLAMA, FLUX], ids=["llama", "flux"])
def test_prewarm_of_a_model(jitrope, tmp_path: Path, config: dict) -> None:
    """`tests/test_planning.py` compares the kernels with those that the model launches."""
    pytest.importorskip("transformers" if "model_type" in config else "diffusers")
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "float16"}))
    command = ("prewarm", "--model", "config.json", "--arch", "sm_90", "--dry-run", "--json")
    names = [kernel["name"] for kernel in json.loads(jitrope(*command).stdout)["kernels"]]
    assert names == [spec.name for spec in specs_of_model(tmp_path)]
    assert all(("_fp16_" if config is LLAMA else "_bf16_") in name for name in names)
    names = [x["name"] for x in json.loads(jitrope(*command, "--dtype", "fp32", "--backward").stdout)["kernels"]]
    assert names == [spec.name for spec in specs_of_model(tmp_path, "fp32", backward=True)]
    assert any("backward" in name for name in names)
    assert all("_fp32_" in name for name in names)


NO_MODELS = {
    "no class of diffusers": ({"_class_name": "Nonesuch"}, "the calls of Nonesuch are not known"),
    "sizes that do not fit": (
        {**FLUX, "axes_dims_rope": [16, 56, 57]},
        "FluxTransformer2DModel are not known",
    ),
    "no rope, of diffusers": ({"_class_name": "SD3Transformer2DModel"}, "SD3Transformer2DModel are not known"),
    "nothing": ({}, "cannot read"),
    "unknown": ({"model_type": "nonesuch"}, "cannot read"),
    "a list": ([], "cannot read"),
    "a number for a part": ({"model_type": "qwen3_vl", "text_config": 5}, "cannot read"),
    "no dtype": (LLAMA, "names no dtype; pass a dtype that jitrope has, as --dtype bf16"),
    "an odd dtype": ({**LLAMA, "dtype": "float64"}, "names torch.float64; pass a dtype that jitrope has"),
    "no rope": (
        {"model_type": "bert", "dtype": "float16"},
        "bert are not known (the file of BertModel has",
    ),
    "no rope that is called": (
        {"model_type": "jamba", "dtype": "float16"},
        "jamba are not known",
    ),
    "two sounds": (
        {"model_type": "pe_audio", "dtype": "float16"},
        "pe_audio are not known (PeAudioModel.forward() missing",
    ),
    "sound": ({"model_type": "wav2vec2-conformer", "dtype": "float16"}, "Wav2Vec2ConformerModel has no rope function"),
    "images and text": ({"model_type": "sam3", "dtype": "float16"}, "sam3 are not known ('Sam3Config' object has no"),
    "a class that is not there": ({**LLAMA, "dtype": "float16", "architectures": ["Nonesuch"]}, "Nonesuch"),
}


@pytest.mark.parametrize("name", NO_MODELS)
def test_a_model_that_cannot_be_run_is_one_line(jitrope, tmp_path: Path, name: str) -> None:
    for library in ("transformers", "diffusers"):
        pytest.importorskip(library)
    data, text = NO_MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(data))
    done = jitrope("prewarm", "--model", "config.json", "--arch", "sm_90", "--dry-run")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert text in line
    assert len(line) < 260


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "\0"])
def test_a_broken_configuration_is_one_line(jitrope, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    done = jitrope("prewarm", "--model", "config.json", "--arch", "sm_90")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: cannot read config.json: ")


def test_a_model_without_a_dtype_has_one_message(process, tmp_path: Path) -> None:
    """transformers warns of the old name of its attribute."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    done = process("prewarm", "--model", "config.json", "--arch", "sm_90", "--dry-run")
    assert done.stderr == "error: config.json names no dtype; pass a dtype that jitrope has, as --dtype bf16\n"


@pytest.mark.parametrize("config", [LLAMA, FLUX], ids=["transformers", "diffusers"])
def test_without_the_models_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    name = "transformers" if "model_type" in config else "diffusers"
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(JitropeError, match=rf"^--model needs {name} \(.*\): pip install {name}$"):
        specs_of_model(tmp_path)


def test_without_docstrings(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JITROPE_CACHE_DIR": str(tmp_path), "PYTHONOPTIMIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "jitrope", "cache", "ls"], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


# ---- cache and bundle ----------------------------------------------------------------------------

ROPE = "bshd heads q > rotate cos sin rotary_dim=128 > fresh"


def test_what_a_listing_says_of_a_call_can_be_built(jitrope, tmp_path: Path) -> None:
    """The text of `cache ls`, `bundle ls` and a record is that of the call, and `prewarm` reads it."""
    jitrope("prewarm", CALL, "--heads", "8,2", "--head-dim", "64", "--arch", "sm_90")
    jitrope("bundle", "write", "k.zip")
    lines = [*jitrope("cache", "ls").stdout.splitlines(), *jitrope("bundle", "ls", "k.zip").stdout.splitlines()]
    assert len(lines) == 4
    assert {line.partition(": ")[2] for line in lines} == {CALL}
    listed = json.loads(jitrope("cache", "ls", "--json").stdout)
    assert listed["version"] == 1
    assert [x["call"] for x in (*listed["spec"], *listed["entries"])] == [CALL] * 4
    given = (lines[0].partition(": ")[2], "--heads", "8,2", "--head-dim", "64", "--arch", "sm_90", "--json")
    assert json.loads(jitrope("prewarm", *given).stdout)["cached"] == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("bshd heads q k > rotate cos sin turned > fresh", "call has 'turned', which is neither a word nor a tensor"),
        ("bshd heads q k > rotate cos sin rotary_dim=x > fresh", "call has a wrong value in 'rotary_dim=x': invalid"),
        ("bshd heads q k > rotate cos sin interleaved=1 > fresh", "call has a wrong value in 'interleaved=1'"),
        ("bshd heads q k > rotate cos sin rotary_dim=-4 > fresh", "heads or call have wrong sizes: Trying to create"),
        ("bshd fused qkv > rotate cos sin > fresh", "heads is [8, 2]"),
        ("bshd heads q k > rotate cos sin > inplace", "call ends in 'inplace'; with its tensors it must be 'fresh'"),
        (
            "bshd heads q k turned > rotate cos sin > fresh",
            "call has 'turned', which is neither a word nor a tensor of its source",
        ),
        ("bshd heads q k > rotate cos sin rotary_dim=130 > fresh", "rotary_dim is 130"),
        ("bshd turn q k > rotate cos sin > fresh", "call has the source 'turn'"),
        ("bshd heads q > rotate cos sin > fresh", "heads is [8, 2]; it must be those of q and k"),
        ("bshd fused qkv > rotate cos sin q_per_group=2 > fresh", "call has 'q_per_group=2'"),
        ("bshd fused qkv q_per_group=2 order=qkv > rotate cos sin > fresh", "heads is [8, 2]"),
        (
            "bshd heads q k v > rotate cos sin > cache k_cache v_cache slot_mapping k_block_scale",
            "call has k_block_scale",
        ),
    ],
)
def test_a_text_that_no_call_has_is_one_line(jitrope, text: str, why: str) -> None:
    done = jitrope("prewarm", text, "--heads", "8,2", "--arch", "sm_90", "--dry-run")
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("version", [None, 0, 2, "1"])
def test_a_record_of_another_version_is_refused_in_one_line(jitrope, tmp_path: Path, version: object) -> None:
    record = {**record_of(specs_of(8)), "version": version}
    (tmp_path / "run.json").write_text(json.dumps(record))
    done = jitrope("prewarm", "--from", "run.json", "--arch", "sm_90", "--dry-run")
    what = "it is no record of version 1; record again with this jitrope, in a new file"
    assert (done.returncode, done.stderr) == (1, f"error: cannot read run.json: {what}\n")


def test_cache_commands(jitrope, tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    assert jitrope("cache", "ls").stdout == ""
    assert jitrope("cache", "ls").stderr == f"0 kernels, 0.0 MiB in {kernels}\n"
    assert jitrope("cache", "path").stdout == f"{kernels}\n"
    jitrope("prewarm", "--heads", "8", "--arch", "sm_90")
    listed = jitrope("cache", "ls")
    rows = [line.split(maxsplit=3) for line in listed.stdout.splitlines()]
    assert [(row[0], row[2], row[3]) for row in rows] == [
        ("sm_90", "KiB", f"rope bf16 d128 halves forward {launch}: {ROPE}") for launch in ("grid 2d", "token linear")
    ]
    assert "2 kernels" in listed.stderr
    sizes = [entry["bytes"] for entry in json.loads(jitrope("cache", "ls", "--json").stdout)["entries"]]
    assert sum(sizes) == sum(file.stat().st_size for file in kernels.glob("*/*"))
    assert jitrope("cache", "verify").returncode == 0
    victim = next(kernels.glob("*/kernel.cubin"))
    victim.write_bytes(b"broken")
    done = jitrope("cache", "verify", "--json")
    assert done.returncode == 1
    assert str(victim.parent) == json.loads(done.stdout)["bad"][0]["path"]
    assert json.loads(jitrope("cache", "prune", "--older-than", "1h", "--json").stdout)["removed"] == []
    said = jitrope("cache", "prune", "--older-than", "1h").stdout
    kept = "kernels from bundles are kept, which `jitrope cache clear` removes"
    assert said == f"0 kernels removed from {kernels}; {kept}\n"
    os.utime(victim.parent, (1, 1))
    for more in (("--dry-run",), ()):
        gone = json.loads(jitrope("cache", "prune", "--older-than", "30d", "--json", *more).stdout)
        assert gone["removed"] == [str(victim.parent)]
    (left,) = [str(path) for path in kernels.iterdir()]
    for more, left_over in ((["--dry-run"], 1), ([], 0)):
        done = json.loads(jitrope("cache", "clear", "--json", *more).stdout)
        assert done == {"removed": [left], "dry_run": bool(more)}
        assert len(list(kernels.iterdir())) == left_over


def test_a_listing_has_the_kernels_of_bundles_too(jitrope, tmp_path: Path) -> None:
    jitrope("prewarm", "--heads", "8", "--arch", "sm_90")
    jitrope("bundle", "write", "k.zip")
    where = {"JITROPE_CACHE_DIR": str(tmp_path / "other"), "JITROPE_SYSTEM_CACHE": str(tmp_path / "k.zip")}
    done = jitrope("cache", "ls", **where)
    assert done.stdout.count("sm_90") == 2
    assert re.fullmatch(r"0 kernels, .* in .*/other\n2 kernels, .* in .*/k.zip\n", done.stderr)
    listed = json.loads(jitrope("cache", "ls", "--json", **where).stdout)
    assert (len(listed["spec"]), len(listed["entries"])) == (2, 2)


def test_verify_by_a_cold_start(jitrope, tmp_path: Path) -> None:
    """A whole entry that no call would find is reported. Here another compiler made it."""
    jitrope("prewarm", "--heads", "8", "--arch", "sm_80,sm_90")
    done = jitrope("cache", "verify", "--cold", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == {"good": 4, "bad": [], "looked_up": 4, "missing": []}
    entry = next((tmp_path / "kernels").glob("*sm_90*"))
    files = {file.name: file.read_bytes() for file in entry.iterdir()}
    meta = json.loads(files["spec.json"])
    other = Key(meta["name"], render.ingredients(spec_from_dict(meta["spec"])), tuple(meta["options"]), "sm_90", "old")
    shutil.rmtree(entry)
    KernelCache(tmp_path / "kernels").store(other, files["kernel.cu"].decode(), files["kernel.cubin"], meta["spec"])
    assert jitrope("cache", "verify").returncode == 0
    done = jitrope("cache", "verify", "--cold")
    assert done.returncode == 1
    assert done.stdout == "4 good, 0 damaged; cold start: 3 found, 1 missing\n"
    assert "would be compiled" in done.stderr


def test_verify_sees_faulty_layers(jitrope, tmp_path: Path) -> None:
    jitrope("prewarm", "--heads", "8", "--arch", "sm_90", JITROPE_CACHE_DIR=str(tmp_path / "layer"))
    environment = {"JITROPE_SYSTEM_CACHE": str(tmp_path / "layer"), "JITROPE_CACHE_DIR": "/none"}
    assert jitrope("cache", "verify", "--cold", **environment).returncode == 0
    for cubin in (tmp_path / "layer").glob("*/kernel.cubin"):
        cubin.write_bytes(b"")
    done = jitrope("cache", "verify", "--cold", "--json", **environment)
    assert (done.returncode, len(json.loads(done.stdout)["bad"])) == (1, 2)
    (tmp_path / "layer").chmod(0o777)
    done = jitrope("cache", "verify", **environment)
    assert (done.returncode, done.stdout) == (1, "0 good, 1 damaged\n")
    assert "can be written by other users" in done.stderr


def test_a_cold_start_that_finds_nothing_fails(jitrope) -> None:
    done = jitrope("cache", "verify", "--cold", "--json")
    assert done.returncode == 1
    assert "there is nothing to look up" in done.stderr
    assert json.loads(done.stdout)["looked_up"] == 0
    assert jitrope("cache", "verify").returncode == 0


def test_another_versions_entry_blocks_nothing(process, tmp_path: Path) -> None:
    """One entry is whole, but its spec has a field that this version does not know."""
    process("prewarm", "--heads", "8", "--arch", "sm_90")
    entry = next((tmp_path / "kernels").glob("*sm_90*"))
    meta = json.loads((entry / "spec.json").read_text())
    key = Key(meta["name"], '[{"rope.cuh": "older"}, {}]', tuple(meta["options"]), "sm_90", meta["compiler"])
    spec = {**meta["spec"], "of_another_version": 1}
    KernelCache(tmp_path / "kernels").store(key, "text", (entry / "kernel.cubin").read_bytes(), spec)
    said = "1 of the cache's 3 kernels are another version's"
    done = process("bundle", "write", "k.zip", "--json")
    assert (done.returncode, json.loads(done.stdout)["cached"]) == (0, 2)
    assert said in done.stderr
    done = process("cache", "ls", "--json")
    (tmp_path / "listing.json").write_text(done.stdout)
    assert said in done.stderr
    done = process("prewarm", "--from", "listing.json", "--arch", "sm_90", "--json")
    assert (done.returncode, json.loads(done.stdout)["cached"]) == (0, 2)
    done = process("cache", "verify", "--cold", "--json")
    assert (done.returncode, json.loads(done.stdout)["looked_up"]) == (0, 2)
    (tmp_path / "run.json").write_text(json.dumps({"version": 1, "spec": [spec]}))  # so the kernel is needed
    done = process("prewarm", "--from", "run.json", "--arch", "sm_90")
    assert done.returncode == 1
    assert "of_another_version" in done.stderr


def test_a_bundle_of_nothing_says_how_to_name_kernels(jitrope) -> None:
    for more in ([], ["--arch", "sm_90"]):
        done = jitrope("bundle", "write", "k.zip", *more)
        said = "error: there are no kernels to bundle; run `jitrope prewarm` first, or name a record with --from"
        assert (done.returncode, done.stderr) == (1, f"{said}\n")


def test_a_bundle_has_what_the_cache_has_and_serves_where_nothing_can_be_compiled(jitrope, tmp_path: Path) -> None:
    jitrope("prewarm", "--heads", "8", "--arch", "sm_80")
    (tmp_path / "run.json").write_text(jitrope("cache", "ls", "--json").stdout)
    jitrope("prewarm", "--heads", "40", "--arch", "sm_90")
    dry = json.loads(jitrope("bundle", "write", "k.zip", "--dry-run", "--json").stdout)
    assert (dry["cached"], dry["would compile"]) == (4, 0)
    assert not (tmp_path / "k.zip").exists()
    assert json.loads(jitrope("bundle", "write", "k.zip", "--json").stdout)["cached"] == 4
    kernels, bundled = (
        {(e["name"], e["arch"]) for e in json.loads(jitrope(*command, "--json").stdout)["entries"]}
        for command in (("cache", "ls"), ("bundle", "ls", "k.zip"))
    )
    assert bundled == kernels
    done = json.loads(jitrope("bundle", "write", "k.zip", "--arch", "sm_90,sm_89", "--dry-run", "--json").stdout)
    assert (done["cached"], done["would compile"]) == (2, 4)  # three specs for two architectures
    done = json.loads(jitrope("bundle", "write", "l.zip", "--from", "run.json", "--arch", "sm_80", "--json").stdout)
    assert (done["cached"], done["compiled"]) == (2, 0)

    production = {"JITROPE_CACHE_DIR": str(tmp_path / "production"), "JITROPE_NO_COMPILE": "1"}
    assert len(json.loads(jitrope("bundle", "load", "k.zip", "--json", **production).stdout)["loaded"]) == 4
    for environment in (production, {"JITROPE_CACHE_DIR": "/none", "JITROPE_SYSTEM_CACHE": "k.zip"}):
        found = json.loads(jitrope("cache", "verify", "--cold", "--json", **environment).stdout)
        assert (found["looked_up"], found["missing"]) == (4, [])

    victim = next((tmp_path / "kernels").glob("*sm_90*/kernel.cubin"))
    victim.write_bytes(b"")
    (tmp_path / "k.zip").unlink()
    failed = jitrope("bundle", "write", "k.zip")
    assert failed.returncode == 1
    assert str(victim.parent) in failed.stderr
    assert not (tmp_path / "k.zip").exists()


# ---- doctor --------------------------------------------------------------------------------------


def status(done: subprocess.CompletedProcess[str], what: str) -> tuple[bool, str, str]:
    """(ok, found, advice) of a check."""
    report = json.loads(done.stdout)
    assert report["ok"] == (done.returncode == 0) == all(check["ok"] for check in report["checks"])
    (check,) = (check for check in report["checks"] if check["what"] == what)
    return check["ok"], check["found"], check["advice"]


def test_doctor(process, jitrope) -> None:
    done = process("doctor", "--json", JITROPE_CACHE_DR="/x")
    checks = {check["what"]: check["ok"] for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 0, done.stdout
    assert list(checks) == ["jitrope", "torch", "GPU", "compiler", "kernel cache", "variables", "kernel"]
    assert status(done, "GPU")[2].startswith("CPU tensors use plain torch")
    assert re.fullmatch(r"cupy 14\..*, nvrtc 1\d\.\d+, for CUDA 1\d; .*sm_90", status(done, "compiler")[1])
    assert "JITROPE_CACHE_DR is unknown" in status(done, "variables")[1]
    assert "jitrope reads JITROPE_CACHE_DIR" in status(done, "variables")[2]
    done = jitrope("doctor")
    assert done.stdout.endswith("\njitrope works here\n")
    assert re.search(r"^note  GPU  .*\n +to do: CPU tensors use plain torch", done.stdout, re.MULTILINE)


def test_doctor_of_amds_gpus(jitrope, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for ROCm shows them as CUDA GPUs. No NVIDIA architecture is made up for them."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    done = jitrope("doctor", "--json")
    ok, found, advice = status(done, "GPU")
    assert (done.returncode, ok, found) == (1, False, "torch is built for ROCm 6.4")
    assert advice.startswith("AMD GPUs are not supported; calls need an NVIDIA GPU")
    assert status(done, "compiler")[0]
    assert status(done, "kernel")[0]
    assert jitrope("doctor").stdout.endswith("\nfaults: GPU\n")
    assert "there is no GPU here" in jitrope("prewarm", "--heads", "8").stderr


FAULTY_FOLDERS = {
    "a file": (Path.touch, "Not a directory", "remove it"),
    "a broken link": (lambda folder: folder.symlink_to("nowhere"), "cannot be written", "set JITROPE_CACHE_DIR"),
    "a link to where nothing can be made": (
        lambda folder: folder.symlink_to("/proc/jitrope"),
        "cannot be written",
        "set JITROPE_CACHE_DIR",
    ),
}


@pytest.mark.parametrize("name", FAULTY_FOLDERS)
def test_doctor_of_a_faulty_cache_folder(jitrope, tmp_path: Path, name: str) -> None:
    make, text, advice = FAULTY_FOLDERS[name]
    make(tmp_path / "kernels")
    done = jitrope("doctor", "--json")
    found = status(done, "kernel cache")
    assert (done.returncode, found[0]) == (1, False)
    assert text in found[1]
    assert advice in found[2]


AS_OTHERS_MAY = "import ctypes, os, sys; os.geteuid() or ctypes.CDLL(None).prctl(24, 1, 0, 0, 0); "
AS_OTHERS_MAY += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
"""A file's mode restricts root too once CAP_DAC_OVERRIDE (1) is removed from the bounding set (24)."""


@pytest.mark.slow
def test_doctor_of_a_read_only_folder_of_kernels(jitrope, tmp_path: Path) -> None:
    """An image may contain its kernels in a read-only folder. That is a fault only if kernels have to be stored."""
    folder = tmp_path / "kernels"
    jitrope("prewarm", "--heads", "8", "--arch", "sm_90")
    folder.chmod(0o555)
    for changes, good in (
        ({"JITROPE_CACHE_DIR": str(folder)}, True),
        ({"JITROPE_CACHE_DIR": f"{folder}/none", "JITROPE_NO_COMPILE": "1"}, True),
        ({"JITROPE_CACHE_DIR": f"{folder}/none"}, False),
    ):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **changes}
        command = [sys.executable, "-c", AS_OTHERS_MAY, "-m", "jitrope", "doctor", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        found = status(done, "kernel cache")
        assert "cannot be written (Permission denied)" in found[1]
        assert found[0] == good
    folder.chmod(0o755)


def test_doctor_of_a_full_disk(tmp_path: Path) -> None:
    """A limit on the size of files acts like a disk that is too full for a kernel."""
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)); "
    code += "from jitrope.tools.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JITROPE_CACHE_DIR": str(tmp_path / "kernels")}
    found = status(fresh.python("-c", code, "doctor", "--json", env=environment), "kernel cache")
    assert not found[0]
    assert "File too large" in found[1]


def test_doctor_of_damaged_kernels_and_of_system_caches(jitrope, tmp_path: Path) -> None:
    jitrope("prewarm", "--heads", "8", "--arch", "sm_90")
    jitrope("bundle", "write", "k.zip")
    layer = {"JITROPE_SYSTEM_CACHE": str(tmp_path / "k.zip")}
    victim = next((tmp_path / "kernels").glob("*/kernel.cubin"))
    victim.write_bytes(victim.read_bytes()[:-9])
    done = jitrope("doctor", "--json", **layer)
    assert done.returncode == 0  # not a fault: the next call makes the kernel again
    assert "1 kernels, 1 damaged" in status(done, "kernel cache")[1]
    assert victim.parent.name in status(done, "kernel cache")[1]
    assert status(done, "system cache") == (True, f"{tmp_path}/k.zip, 2 kernels", "")
    (tmp_path / "k.zip").write_bytes(b"no zip")
    found = status(jitrope("doctor", "--json", **layer), "system cache")
    assert not found[0]
    assert "cannot read the bundle" in found[1]


def missing_kernel(*arguments: object) -> None:
    config.configure(compile=False)
    kernels.build(specs_of(6, 64)[0], "sm_90")


def test_doctor_where_its_kernel_is_in_no_cache(jitrope, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU a call needs no kernel, so the call is replaced by one that does. The next test uses a GPU."""
    monkeypatch.setattr(doctor, "apply_rope", missing_kernel)
    done = jitrope("doctor", "--json", JITROPE_NO_COMPILE="1")
    assert done.returncode == 0
    assert status(done, "kernel")[1] == "not there, and compiling is forbidden"


@pytest.mark.gpu
def test_doctor_of_a_gpu_that_nothing_may_be_compiled_for(process) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    done = process("doctor", "--json", JITROPE_NO_COMPILE="1", CUDA_VISIBLE_DEVICES=visible)
    assert done.returncode == 0, done.stdout
    assert status(done, "kernel")[1] == "not there, and compiling is forbidden"
    for changes in ({}, {"JITROPE_NO_COMPILE": "1"}):  # the first call stores the kernel
        done = process("doctor", "--json", CUDA_VISIBLE_DEVICES=visible, **changes)
        assert status(done, "kernel")[1] == "a call on the GPU gives the reference's bits"


def test_doctor_of_missing_templates(process, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "jitrope", tmp_path / "broken" / "jitrope", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "templates", tmp_path / "broken" / "templates")
    (tmp_path / "broken" / "templates" / "vec.cuh").unlink()
    found = status(process("doctor", "--json", PYTHONPATH=str(tmp_path / "broken")), "compiler")
    assert not found[0]
    assert "vec.cuh is missing" in found[1]
    assert "install jitrope again" in found[1]


def test_doctor_of_two_cupys(jitrope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "more" / "cupy_cuda11x-14.2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cupy-cuda11x\nVersion: 14.2.0\n")
    monkeypatch.syspath_prepend(tmp_path / "more")
    found = status(jitrope("doctor", "--json"), "compiler")
    assert not found[0]
    assert re.search(r"cupy-cuda11x and cupy-cuda1[23]x are installed", found[1])
    assert re.match(r"pip uninstall -y cupy-cuda11x cupy-cuda1[23]x && pip install cupy-cuda1[23]x nvidia", found[2])
    last = jitrope("doctor").stdout.splitlines()[-1]
    assert last == "faults: compiler"


def test_doctor_of_a_torch_for_another_cuda(jitrope, monkeypatch: pytest.MonkeyPatch) -> None:
    major = compiler.cuda_major()
    monkeypatch.setattr(torch.version, "cuda", f"{25 - major}.8")  # 12 beside 13, 13 beside 12
    found = status(jitrope("doctor", "--json"), "compiler")
    assert found[0]
    assert f"for CUDA {major}; a kernel compiles for sm_90; but torch is for CUDA {25 - major}.8" in found[1]
    assert found[2] == f"pip uninstall -y cupy-cuda{major}x && {compiler.install(25 - major)}"


Run = Callable[..., subprocess.CompletedProcess[str]]
needs_a_cpu_torch = pytest.mark.skipif(torch.version.cuda is not None, reason="a torch for CUDA needs these libraries")


@pytest.fixture
def without(tmp_path: Path) -> Callable[[str], Run]:
    """Run the command with all packages of this Python except some."""
    packages, site = Path(sysconfig.get_paths()["purelib"]), tmp_path / "site"

    def without(missing: str) -> Run:
        site.mkdir()
        for path in packages.iterdir():
            if not path.match(missing):
                (site / path.name).symlink_to(path)
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{site}", "COLUMNS": "150"}
        environment["JITROPE_CACHE_DIR"] = str(tmp_path / "k")

        def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-S", "-m", "jitrope", *arguments]  # without the folder of packages
            return subprocess.run(command, capture_output=True, text=True, env={**environment, **changes}, cwd=tmp_path)

        return run

    return without


def fails_with(done: subprocess.CompletedProcess[str], remedy: str) -> None:
    assert done.returncode == 1
    assert remedy in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@needs_a_cpu_torch
def test_without_nvrtc(without: Callable[[str], Run]) -> None:
    run = without("nvidia*")
    ok, found, _ = status(run("doctor", "--json"), "compiler")
    assert not ok
    assert "cannot be loaded" in found
    advice = compiler.install(compiler.cuda_major())
    assert found.endswith(advice)
    fails_with(run("prewarm", "--heads", "8", "--arch", "sm_90"), advice)
    # An image that only loads kernels needs no NVRTC.
    assert status(run("doctor", "--json", JITROPE_NO_COMPILE="1"), "compiler")[0]


@pytest.mark.slow
@needs_a_cpu_torch
def test_without_cupy_and_without_a_gpu(without: Callable[[str], Run]) -> None:
    """CPU tensors need no CuPy: it is a note. A dry run still lists the kernels."""
    run = without("cupy*")
    done = run("doctor", "--json")
    assert done.returncode == 0
    assert "needed only to compile kernels" in status(done, "compiler")[1]
    assert status(done, "compiler")[2] == compiler.install()
    assert status(done, "kernel") == (True, "a call on the CPU gives the reference's bits", "")
    assert run("doctor").stdout.endswith("\njitrope works here\n")
    prewarm = ("prewarm", "--heads", "8", "--arch", "sm_90")
    fails_with(run(*prewarm), compiler.install())
    done = run(*prewarm, "--dry-run")
    assert done.returncode == 0
    text = "bshd heads q > rotate cos sin rotary_dim=128 > fresh"
    assert f"would compile  sm_90   rope bf16 d128 halves forward grid 2d: {text}\n" in done.stdout
    assert done.stdout.endswith("\n2 would compile, 0 cached, 0 failed\n")
    assert done.stderr == ""


def test_a_cupy_that_cannot_be_imported_is_one_fault(process, tmp_path: Path) -> None:
    (tmp_path / "broken" / "cupy").mkdir(parents=True)
    (tmp_path / "broken" / "cupy" / "__init__.py").write_text("raise RuntimeError('for another Python')")
    done = process("doctor", "--json", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path / 'broken'}")
    assert "for another Python" in status(done, "compiler")[1]
    assert [x["what"] for x in json.loads(done.stdout)["checks"] if not x["ok"]] == ["compiler"]


@pytest.mark.gpu
def test_without_cupy_a_gpu_has_no_compiler_and_no_kernel(tmp_path: Path) -> None:
    code = "import sys; sys.modules['cupy'] = None; from jitrope.tools.cli import main; main()"  # as if not installed
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JITROPE_CACHE_DIR": str(tmp_path / "k")}
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--json"], env=environment, capture_output=True, text=True
    )
    assert [x["what"] for x in json.loads(done.stdout)["checks"] if not x["ok"]] == ["compiler", "kernel"]
    for what in ("compiler", "kernel"):
        assert status(done, what)[1].endswith(compiler.install())


def test_bench_says_that_it_needs_a_gpu(process) -> None:
    done = process("bench", "host")
    assert done.returncode == 1
    assert "needs a CUDA device" in done.stderr
