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
from functools import partial
from pathlib import Path

import pytest
import torch

from jitrope import CompileError, InvalidInput
from jitrope.base import config
from jitrope.base.errors import JitropeError
from jitrope.integrations import sglang, vllm
from jitrope.integrations import transformers as drop_in
from jitrope.jit import compiler, kernels, render
from jitrope.jit.cache import KernelCache
from jitrope.jit.entry import Key
from jitrope.jit.registry import spec_from_dict
from jitrope.ops.planning import planning
from jitrope.tools import cli, console, doctor
from jitrope.tools import prewarm as prewarming
from jitrope.tools.models import specs_of_model
from jitrope.tools.prewarm import read_calls, specs_of
from jitrope.tools.server import specs_of_server

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
                config.configure(compile=None, batch_invariant=False)
        return subprocess.CompletedProcess(arguments, code, stdout.getvalue(), stderr.getvalue())

    return run


COMMANDS = ["", "prewarm", "render", "doctor", "cache", "cache ls", "cache info", "cache verify", "cache clear"]
COMMANDS += ["cache prune", "bundle", "bundle write", "bundle load", "bundle ls", "bench", "bench rope", "bench decode"]
WITH_EXAMPLES = ["", "prewarm", "render", "cache info", "cache verify", "cache prune", "bundle write"]


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
WRONG += ["prewarm --jobs -1", "prewarm --heads 8 --dtype int8", "prewarm --heads x --arch sm_90"]
WRONG += ["prewarm --heads 8 --arch hopper", "prewarm --heads 8 --arch sm_090", "render --from run.json --head-dim 64"]
WRONG += ["prewarm --heads 8 --head-dim 7 --arch sm_90", "prewarm --from run.json --heads 8", "prewarm --backward"]
WRONG += ["prewarm --arch sm_90 --model m --heads 8", "prewarm --arch sm_90 --model m --from run.json", "cache info"]
FAILED = ["bundle load none.tar", "bundle ls none.tar", "prewarm --from none.json --arch sm_90", "bundle write k.tar"]
FAILED += ["prewarm --model none --arch sm_90", "cache info 00000000"]


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
        as_json = jitrope(*command.split(), "--json")
        assert as_json.returncode == done.returncode
        error = json.loads(as_json.stdout)["error"]
        assert error in done.stderr
        assert "Traceback" not in as_json.stderr


def test_a_reader_that_ends_first_and_an_interrupt_are_no_traceback(process, jitrope, monkeypatch) -> None:
    line = f"{sys.executable} -m jitrope render | true"
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
    arguments = ("prewarm", "--heads", "32,8", "--heads", "24", "--arch", "sm_80,sm_90", "--json")
    dry = json.loads(jitrope(*arguments, "--dry-run").stdout)
    assert (dry["would compile"], dry["cached"], dry["failed"]) == (6, 0, 0)
    assert list(tmp_path.iterdir()) == []
    # Two token-linear kernels and one shared grid_2d kernel, for two architectures.
    first = json.loads(jitrope(*arguments, JITROPE_NO_COMPILE="1").stdout)
    assert (first["compiled"], first["cached"], first["failed"]) == (6, 0, 0)
    (tmp_path / "run.json").write_text(jitrope("cache", "ls", "--json").stdout)
    assert set(read_calls(tmp_path / "run.json")) == {*specs_of(heads=[32, 8]), *specs_of(heads=24)}
    second = json.loads(jitrope(*arguments).stdout)
    assert (second["compiled"], second["cached"]) == (0, 6)
    (next((tmp_path / "kernels").glob("*sm_90*")) / "kernel.cu").write_bytes(b"damaged")
    dry = json.loads(jitrope(*arguments, "--dry-run").stdout)
    assert (dry["would compile"], dry["cached"]) == (1, 5)
    assert {k["arch"] for k in dry["kernels"] if k["outcome"] != "cached"} == {"sm_90"}


def test_options_of_a_call_are_never_ignored(jitrope) -> None:
    done = jitrope("prewarm", "--dtype", "fp16", "--arch", "sm_90")
    assert done.stderr.endswith("jitrope prewarm: error: the options of a call need --heads\n")
    done = jitrope("prewarm", "--from", "run.json", "--interleaved", "--arch", "sm_90")
    assert done.stderr.endswith(
        "jitrope prewarm: error: --from does not go with --model, nor with the options of a call\n"
    )


@pytest.mark.parametrize("written", ["sm_90", "sm90", "90", "9.0"])
def test_an_architecture_and_a_dtype_can_be_written_in_several_ways(jitrope, written: str) -> None:
    names = {"bf16": ["bfloat16", "torch.bfloat16"], "fp16": ["half", "float16"], "fp32": ["float", "float32"]}
    for dtype, others in names.items():
        want = jitrope("prewarm", "--heads", "8", "--dtype", dtype, "--arch", "sm_90", "--dry-run", "--json").stdout
        for other in [dtype, *others]:
            arguments = ("prewarm", "--heads", "8", "--dtype", other, "--arch", f"{written},sm_90", "--dry-run")
            assert jitrope(*arguments, "--json").stdout == want
    assert [prewarming.architecture(x) for x in ("10.0", "12.1a", "sm_90a", "9", "hopper", 90)] == [
        "sm_100",
        None,  # no GPU looks for these two
        None,
        "sm_9",
        None,
        None,
    ]


@pytest.mark.parametrize("written", ["12", "sm_9", "3.5", "hopper", "9.0a"])
def test_a_number_that_no_architecture_has_is_refused_without_nvrtc(
    jitrope, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    def missing() -> None:
        raise CompileError("no NVRTC")

    monkeypatch.setattr(compiler, "import_cupy", missing)
    monkeypatch.setattr(compiler, "supported_archs", missing)
    done = jitrope("prewarm", "--heads", "8", "--arch", f"sm_90,{written}", "--dry-run")
    assert (done.returncode, done.stdout) == (2, "")
    text = f"{written!r} must be an architecture from sm_50 on, such as sm_120, sm120, 120 or 12.0"
    assert done.stderr.endswith(f"{text}\n")


@pytest.mark.parametrize("arch", ["sm_130", "5.0", "sm_91", "sm_83"])
def test_an_unknown_architecture_is_one_line_before_any_work(jitrope, tmp_path: Path, arch: str) -> None:
    name = prewarming.architecture(arch)
    for more in ([], ["--dry-run"]):
        done = jitrope("prewarm", "--arch", f"sm_90,{arch}", *more)
        assert (done.returncode, done.stdout) == (1, "")
        known = r"it knows sm_\d+, .*\b90, 100,.*"
        assert re.fullmatch(rf"error: NVRTC \d+\.\d does not know {name}; {known}\n", done.stderr)
        assert len(done.stderr) < 120
    assert list(tmp_path.iterdir()) == []


def test_kernels_that_are_cached_need_no_nvrtc_that_knows_their_architecture(jitrope, tmp_path: Path) -> None:
    """A bundle may have kernels that another NVRTC compiled."""
    spec = specs_of(heads=8)[0]
    KernelCache(tmp_path / "kernels").store(kernels.key_of(spec, "sm_50"), "text", b"cubin", spec.to_dict())
    (tmp_path / "run.json").write_text(json.dumps({"spec": [spec.to_dict()]}))
    done = jitrope("bundle", "write", "k.tar", "--from", "run.json", "--arch", "sm_50", "--json")
    assert (done.returncode, json.loads(done.stdout)["cached"]) == (0, 1)


def test_a_dry_run_lists_the_kernels_in_words(jitrope) -> None:
    jitrope("prewarm", "--heads", "8", "--arch", "sm_90")
    done = jitrope("prewarm", "--heads", "8", "--in-place", "--backward", "--arch", "sm_90", "--dry-run")
    head, *lines, total = done.stdout.splitlines()
    assert head.split() == ["STATE", "ARCH", "KERNEL"]
    assert "would compile  sm_90  rope bf16 d128 halves fp32 half table forward in place grid 2d" in lines
    assert "would compile  sm_90  rope bf16 d128 halves fp32 half table backward token linear" in lines
    assert total == f"{len(lines)} would compile, 0 cached, 0 failed"
    lines = jitrope("prewarm", "--heads", "8", "--arch", "sm_90", "--dry-run").stdout.splitlines()
    assert "cached  sm_90  rope bf16 d128 halves fp32 half table forward grid 2d" in lines


def test_prewarm_needs_an_architecture(process) -> None:
    done = process("prewarm")
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
    (tmp_path / "empty.json").write_text('{"spec": []}')
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


@pytest.mark.skipif(sys.version_info < (3, 11), reason="TOML needs Python 3.11")
def test_prewarm_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "calls.toml"
    path.write_text('[[call]]\nheads = [[32, 8], [64, 8]]\nhead_dim = 128\ndtype = ["bf16", "fp16"]\n')
    several = ((heads, dtype) for heads in ([32, 8], [64, 8]) for dtype in ("bf16", "fp16"))
    want = {spec for heads, dtype in several for spec in specs_of(heads=heads, dtype=dtype)}
    assert set(read_calls(path)) == want


BAD_FIELDS = [{"nope": 2}, {"interleaved": 2}, {"dtype": {}}, {"dtype": []}, {"positions": "int8"}, {"norm": {}}]
BAD_FIELDS += [{"positions": {"position_ids": "int64", "mrope_section": 16}}, {"heads": [[[8]]]}, {"heads": "8"}]
BAD_FIELDS += [{"heads": 8.5}, {"heads": None}, {"heads": [1, 2, 3]}, {"heads": []}, {"heads": -1}, {"heads": 1 << 60}]
BAD_CALLS = [5, [5], "abc", {"heads": 8}, None, [{}], *([{"heads": 8, **field}] for field in BAD_FIELDS)]
BAD_FILES = ["{", "{}", "[]", '{"spec": [{"dtype": "bf16"}]}', '{"spec": 5}', '{"call": ' + "[" * 100000]
BAD_FILES += [json.dumps({"call": call}) for call in BAD_CALLS]


@pytest.mark.parametrize("text", BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_file_of_something_else_is_one_line(jitrope, tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    done = jitrope("prewarm", "--from", "bad.json", "--arch", "sm_90", "--dry-run")
    assert done.returncode == 1
    assert done.stderr.startswith("error:")
    assert "bad.json" in done.stderr
    assert done.stderr.count("\n") == 1


def test_render(jitrope) -> None:
    text = jitrope("render", "--heads", "24", "--interleaved", "--head-dim", "64", "--backward").stdout
    assert "constexpr int HEAD_DIM = 64;" in text
    assert "constexpr bool INTERLEAVED = true;" in text
    assert "constexpr bool INVERSE = true;" in text
    data = json.loads(jitrope("render", "--json").stdout)
    assert data["text"].startswith(f"// {data['name']}\n")
    assert data["spec"]["heads_per_block"] == 40


def test_a_source_renders_again_by_the_command_at_its_head(jitrope, tmp_path: Path) -> None:
    text = jitrope("render", "--heads", "24", "--interleaved", "--backward").stdout
    (tmp_path / "kernel.cu").write_text(text)
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


MROPE = {"position_ids": "int64", "mrope_section": [16, 24, 24]}
CALLS_OF_LISTS = [
    ({"heads": 40}, [{"heads": 40}]),
    ({"heads": [32, 8]}, [{"heads": [32, 8]}]),
    ({"heads": [[32, 8], [24]], "dtype": "fp16"}, [{"heads": [32, 8]}, {"heads": [24]}]),
    ({"heads": [[32, 8], 24]}, [{"heads": [32, 8]}, {"heads": 24}]),
    ({"heads": 40, "positions": ["int64", MROPE]}, [{"positions": "int64"}, {"positions": MROPE}]),
]


@pytest.mark.parametrize(("written", "meant"), CALLS_OF_LISTS, ids=range(len(CALLS_OF_LISTS)))
def test_every_word_of_a_call_can_be_a_list(tmp_path: Path, written: dict, meant: list[dict]) -> None:
    (tmp_path / "calls.json").write_text(json.dumps({"call": [written]}))
    specs = [spec for words in meant for spec in specs_of(**{**written, **words})]
    assert read_calls(tmp_path / "calls.json") == list(dict.fromkeys(specs))


SLOTS = {"slot_mapping": "int64", "k_cache": "bf16", "v_cache": "bf16"}
PACKED, NORM, PREPARED = {"cu_seqlens": "int32"}, {"rounding": "once"}, {"function": "prepare_qkv"}
NO_FUNCTION_TAKES = [
    ({**PREPARED, "cache": SLOTS, "backward": True}, "q requires a gradient"),
    ({**PREPARED, "cache": SLOTS, "positions": PACKED, "inverse": True}, "inverse does not go with cache"),
    ({**PREPARED, "norm": {"across_heads": True}, "cache": SLOTS}, "across_heads does not go with a cache"),
    ({**PREPARED, "quantize": {"q_scale": 1.0}, "cache": SLOTS, "inplace": True}, "q is returned as fp8, which cannot"),
    ({**PREPARED, "norm": NORM, "quantize": {"q_scale": 1.0}, "inplace": True}, "inplace does not go with quantize"),
    ({**PREPARED, "cache": {**SLOTS, "rotate_k": True}, "interleaved_out": True}, "does not go with rotate_k"),
    ({**PREPARED, "cache": {**SLOTS, "k_cache": "fp8", "v_cache": "fp8"}}, "k_scale is missing"),
    ({**PREPARED, "cache": {"k_cache": "bf16"}}, "missing 1 required positional argument"),
    ({"function": "prepare_joint_qkv", "norm": {**NORM, "across_heads": True}}, "across_heads does not go with two"),
    ({"function": "prepare_joint_qkv", "inverse": True}, "unexpected keyword argument 'inverse'"),
    ({"function": "prepare_packed_qkv", "heads": [5, 2]}, "heads is .*a multiple of k's"),
    ({"function": "prepare_packed_qkv", "heads": [4, 2], "order": "kqv"}, "order is 'kqv'; it must be one of"),
    ({"function": "rotate"}, "function is 'rotate'; it must be one of 'apply_rope', "),
    ({"interleaved_out": True, "inplace": True}, "interleaved_out does not go with inplace"),
    ({"interleaved_out": True, "width": "full"}, "interleaved_out goes with half-width tables"),
    ({"position_ids": "int64"}, "unexpected keyword argument 'position_ids'; pass positions=position_ids"),
    ({"positions": {**PACKED, "position_ids": "int64"}}, "unexpected keyword argument 'position_ids'"),
    ({"rounding": "complex128", "table": "freqs"}, "rounding='complex128' does not go with freqs"),
    ({"positions": {**PACKED, "cp_size": 0}}, "cp_size is 0; it must be at least 1"),
    ({"head_dim": 7}, "rotary_dim, by default D, is 7; it must be even"),
    ({"head_dim": 1024}, "at most 512 is possible"),
    ({"heads": [0, 8]}, r"heads\[0\] is 0; it must be a whole number of at least 1"),
]


@pytest.mark.parametrize(("words", "message"), NO_FUNCTION_TAKES, ids=str)
def test_a_call_that_no_function_takes_is_named_and_refused(tmp_path: Path, words: dict, message: str) -> None:
    """The message has the file's name, the index of the call and the function's own message."""
    path = tmp_path / "calls.json"
    path.write_text(json.dumps({"call": [{"heads": 8}, {"heads": [8, 4], **words}]}))
    with pytest.raises(InvalidInput, match=rf"^{re.escape(str(path))}: call\[1\]: .*{message}"):
        read_calls(path)


def test_a_spec_of_a_file_that_no_kernel_has_is_named_and_refused(tmp_path: Path) -> None:
    path = tmp_path / "specs.json"
    path.write_text(json.dumps({"spec": [specs_of(heads=8)[0].to_dict(), {"kind": "rope"}]}))
    with pytest.raises(InvalidInput, match=rf"^{re.escape(str(path))}: spec\[1\]: "):
        read_calls(path)


# ---- prewarm --model -----------------------------------------------------------------------------

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "intermediate_size": 64,
    "vocab_size": 64,
}
FAMILIES = {  # (name of the classes, words of the configuration)
    "Llama": {"num_key_value_heads": 2, "head_dim": 128},
    "Qwen3": {"num_key_value_heads": 8, "head_dim": 64},  # with norms before the rope
    "GPTNeoX": {},  # a part of the head
    "Cohere": {"num_key_value_heads": 2},  # interleaved pairs
    "Olmo2": {"num_key_value_heads": 2},  # norms across heads
    "HunYuanDenseV1": {"num_key_value_heads": 2, "head_dim": 64},  # norms after the rope
    "Glm": {"num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0},  # both, and half of each table is not read
}
FUSED = {"Qwen3", "Olmo2", "HunYuanDenseV1"}


@pytest.mark.parametrize("family", FAMILIES)
def test_prewarm_of_a_model_builds_what_its_calls_ask_for(jitrope, tmp_path: Path, family: str) -> None:
    """The model itself, with the drop-in, on meta tensors: one sequence and several, forward and backward."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**SMALL, **FAMILIES[family], dtype="bfloat16")
    config.save_pretrained(tmp_path / "model")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with drop_in.enable(model) as report, planning() as specs:
        for batch, tokens in ((1, 16), (3, 16), (1, 1), (2, 1)):
            ids = torch.zeros(batch, tokens, dtype=torch.int64, device="meta")
            mask = torch.zeros(batch, 1, tokens, tokens, dtype=torch.bool, device="meta")
            out = model(input_ids=ids, position_ids=ids[:1], attention_mask=mask, use_cache=False)
            out.logits.sum().backward()
    assert report.calls == {"jitrope": 8, "host": 0} | ({"jitrope": 0, "fused": 8} if family in FUSED else {})
    want = set(specs)
    specs = specs_of_model(tmp_path / "model")
    assert specs == specs_of_model(tmp_path / "model" / "config.json")
    assert want <= set(specs)
    more = set(specs) - want  # with equal heads of k, this attention's gradient is a transpose; a fused one's is not
    assert all(spec.inverse and spec.vec > 1 for spec in more)
    assert not more or config.num_attention_heads == getattr(config, "num_key_value_heads", 8)
    done = jitrope("prewarm", "--model", "model", "--arch", "sm_90", "--dry-run", "--json")
    assert {kernel["name"] for kernel in json.loads(done.stdout)["kernels"]} == {spec.name for spec in want}
    half = json.loads(
        jitrope("prewarm", "--model", "model", "--dtype", "half", "--arch", "sm_90", "--dry-run", "--json").stdout
    )
    assert all("_fp16_" in kernel["name"] for kernel in half["kernels"])


def test_a_server_compiles_nothing_after_its_warm_up(jitrope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`prewarm --model --serve 2` makes the kernels of the drop-ins' calls with a rank's heads, for any batch.

    The planned specs are looked up as a server's process does it: nothing may be compiled.
    """
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("cupy", reason="kernels are compiled")
    config = transformers.Qwen3Config(**SMALL, num_key_value_heads=4, head_dim=64, dtype="float32")
    config.save_pretrained(tmp_path / "model")
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "kernels"))
    done = jitrope("prewarm", "--model", "model", "--serve", "2", "--arch", "sm_90", "--json")
    assert all(kernel["outcome"] == "compiled" for kernel in json.loads(done.stdout)["kernels"])
    empty = partial(torch.empty, device="meta")
    with planning() as specs:
        for tokens in (1, 7, 5000):
            qkv, ids, table = empty(tokens, 8 * 64), empty(tokens, dtype=torch.int64), empty(4096, 64)
            q, k, v = qkv.split([256, 128, 128], 1)
            weights, one = (empty(64), empty(64)), empty(())
            vllm.rotary_embedding(ids, q, k, 64, table, True)
            vllm.fused_qk_norm_rope(qkv, 4, 2, 2, 64, 1e-6, *weights, table, True, ids)
            for kind, dtype in (("auto", torch.float32), ("fp8", torch.float8_e4m3fn)):
                for pages in (empty(9, 2, 16, 2, 64, dtype=dtype).unbind(1), empty(2, 9, 32, 2, 64, dtype=dtype)):
                    given = *pages, ids, kind, one, one
                    vllm.rotary_embedding_and_cache(ids, q, k, v, 64, table, True, *given)
                    counts = 4, 2, 64, 64, 1e-6, 0.0, kind, one, one
                    vllm.fused_qknorm_rope_cache(qkv, *weights, table, ids, ids, *pages, *counts)
            heads = [x.unflatten(1, (-1, 64)) for x in (q, k, v)]
            sglang.apply_rope_inplace_with_kvcache(*heads, *empty(2, 99, 128), table, ids, ids, is_neox=True)
            sglang.table_qk_norm_rope_(qkv, ids, *weights, table, 4, 2, 64, 1e-6)
            sglang.fused_qk_norm_rope(qkv, 4, 2, 2, 64, 1e-6, *weights, 1e4, True, ids.int(), 4.0, 3.0, 9.0, 1.1)
    monkeypatch.setenv("JITROPE_NO_COMPILE", "1")
    assert len(specs) > 18
    assert not any(kernels.build(spec, "sm_90").compiled for spec in specs)
    with pytest.raises(InvalidInput, match="8 heads of q and 4 of k, which 3 ranks cannot share"):
        specs_of_server(tmp_path / "model", ranks=3)
    for words in (["--serve"], ["--serve", "2", "--ids", "int32"]):
        assert "--serve needs --model" in jitrope("prewarm", *words, "--arch", "sm_90").stderr


LATENT = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 256, "qk_rope_head_dim": 64,
    "rope_interleave": True,
}  # fmt: skip
INDEXER = {"index_n_heads": 2, "index_head_dim": 128}


@pytest.mark.slow
def test_a_server_of_latent_attention_compiles_nothing_after_its_warm_up(
    jitrope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek's q_pe and k_pe are slices of projections, and c_kv and k_pe share the rows of a cache."""
    pytest.importorskip("cupy", reason="kernels are compiled")
    (tmp_path / "config.json").write_text(json.dumps({**LATENT, **INDEXER, "torch_dtype": "float32"}))
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "kernels"))
    done = jitrope("prewarm", "--model", ".", "--serve", "2", "--ids", "int32", "--arch", "sm_90", "--json")
    assert all(kernel["outcome"] == "compiled" for kernel in json.loads(done.stdout)["kernels"])
    empty = partial(torch.empty, device="meta")
    with planning() as specs:
        for tokens in (1, 7, 5000):
            ids, table, latent = empty(tokens, dtype=torch.int32), empty(4096, 64), empty(tokens, 256 + 64)
            q_pe, k_pe = empty(tokens, 2, 128 + 64)[..., 128:], latent[:, None, 256:]
            vllm.rotary_embedding(ids, q_pe, k_pe, 64, table, False)
            sglang.apply_rope_inplace(q_pe, k_pe, table, ids, is_neox=False)
            for kind, dtype in (("auto", torch.float32), ("fp8", torch.uint8)):
                given = ids, q_pe, k_pe[:, 0], latent[:, :256], table, False, ids, empty(9, 64, 320, dtype=dtype)
                vllm.concat_and_cache_mla_rope_fused(*given, kind, empty(()))
            q, weights = empty(tokens, 2, 128), empty(tokens, 2)
            for is_neox in (True, False):
                vllm.fused_indexer_q_rope_quant(ids, q, table, weights, 0.1, 0.5, is_neox)
                for of_q in (k_pe, q[..., :64]):
                    vllm.rotary_embedding(ids, of_q, k_pe, 64, table, is_neox)
            sglang.fused_q_indexer_rope_first_quant(q, weights, 0.1, table, ids)
            sglang.fused_k_indexer_norm_rope(q[:, 0].contiguous(), empty(128), empty(128), 1e-6, table, ids)
    monkeypatch.setenv("JITROPE_NO_COMPILE", "1")
    assert len(specs) == len({*specs_of_server(tmp_path, ranks=2, ids=["int32"])}) == 20
    assert not any(kernels.build(spec, "sm_90").compiled for spec in specs)


def test_what_a_server_asks_for(jitrope, tmp_path: Path) -> None:
    """All pairs of dtypes of positions and slots; the dtype of the model; norms that add in one order."""
    (tmp_path / "config.json").write_text(json.dumps(LATENT))
    both = specs_of_server(tmp_path, "bf16", ids=["int64", "int32"])
    assert set(specs_of_server(tmp_path, "bf16")) < set(both)
    pairs = {(spec.position_ids_dtype, spec.slot_mapping_dtype) for spec in both if spec.slot_mapping_dtype}
    assert pairs == {(a, b) for a in ("int32", "int64") for b in ("int32", "int64")}
    given = "prewarm", "--model", ".", "--arch", "sm_90", "--dry-run"
    for wrong, why in (
        (["--serve"], "names no dtype: pass one, as --dtype bf16"),
        (["--serve", "3"], "names 4 heads of q and 4 of k, which 3 ranks cannot share"),
        (["--ids", "int32"], "--ids needs --serve"),
        (["--serve", "--ids", "int8"], "'int8' must be int64, int32 or both"),
    ):
        done = jitrope(*given, *wrong)
        assert done.returncode
        assert why in done.stderr
    with pytest.raises(InvalidInput, match="ids is 'int8'"):
        specs_of_server(tmp_path, "bf16", ids=["int8"])


@pytest.mark.parametrize("form", ["file", "folder", "pipeline"])
def test_a_server_of_a_diffusers_model_is_refused(jitrope, tmp_path: Path, form: str) -> None:
    folder = tmp_path / "transformer" if form == "pipeline" else tmp_path
    folder.mkdir(exist_ok=True)
    config = {"_class_name": "FluxTransformer2DModel", "num_attention_heads": 24}
    (folder / "config.json").write_text(json.dumps(config))
    if form == "pipeline":
        (tmp_path / "model_index.json").write_text(json.dumps({"transformer": ["diffusers", config["_class_name"]]}))
    path = "config.json" if form == "file" else "."
    done = jitrope("prewarm", "--model", path, "--serve", "2", "--arch", "sm_90", "--dry-run")
    assert (done.returncode, done.stdout) == (1, "")
    said = f"error: {path} has a FluxTransformer2DModel of diffusers: --serve is for transformers models; leave it out"
    assert done.stderr.startswith(said)


def test_a_batch_invariant_server(jitrope, tmp_path: Path) -> None:
    """The flag, or the setting in Python, gives the kernels that calls with that setting ask for."""
    transformers = pytest.importorskip("transformers")
    model = transformers.Qwen3Config(**SMALL, num_key_value_heads=4, head_dim=64, dtype="bfloat16")
    model.save_pretrained(tmp_path / "model")
    empty = partial(torch.empty, device="meta", dtype=torch.bfloat16)
    ids, table = torch.empty(7, dtype=torch.int64, device="meta"), empty(4096, 64)
    usual, command = specs_of_server(tmp_path / "model"), ("prewarm", "--model", "model", "--serve", "--dry-run")
    listed = [jitrope(*command, "--arch", "sm_90", "--json", *more).stdout for more in ([], ["--batch-invariant"])]
    config.configure(batch_invariant=True)
    found = specs_of_server(tmp_path / "model")
    with planning() as specs:
        vllm.fused_qk_norm_rope(empty(7, 16 * 64), 8, 4, 4, 64, 1e-6, empty(64), empty(64), table, True, ids)
    assert set(specs) <= set(found)
    assert not set(specs) <= set(usual)
    names = [[kernel["name"] for kernel in json.loads(text)["kernels"]] for text in listed]
    assert names == [[spec.name for spec in specs] for specs in (usual, found)]


def test_a_server_of_a_model_with_positions_along_several_axes(tmp_path: Path) -> None:
    """In vLLM's call and in SGLang's."""
    pytest.importorskip("transformers")
    config = {"model_type": "qwen2_vl", "hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config["rope_scaling"] = {"type": "mrope", "mrope_section": [16, 24, 24]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    empty = partial(torch.empty, device="meta", dtype=torch.bfloat16)
    q, k, rows, ids = empty(9, 512), empty(9, 256), empty(3, 9, 64), torch.empty(3, 9, dtype=torch.int64, device="meta")
    with planning() as specs:
        vllm.triton_mrope(q, k, rows, rows, [16, 24, 24], 128, 128, False)
        sglang.triton_mrope_fused(
            q, k, empty(99, 128, dtype=torch.float32), ids, [16, 24, 24], 128, 128, False, False, True, None
        )
    assert len(specs) == 4
    assert set(specs) < set(specs_of_server(tmp_path, "bf16"))


def _planned(call) -> set:
    with planning() as specs, torch.no_grad():
        call()
    return set(specs)


def test_a_server_of_a_model_in_an_old_or_nested_file(tmp_path: Path) -> None:
    """Several axes that only transformers' configuration names (Qwen2.5-Omni), and a gate beside them (Qwen3.5)."""
    pytest.importorskip("transformers")
    empty = partial(torch.empty, device="meta", dtype=torch.bfloat16)
    ids, rope = torch.empty(3, 9, dtype=torch.int64, device="meta"), {"rope_type": "default", "type": "default"}
    text = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    omni = {"model_type": "qwen2_5_omni_text", **text, "rope_scaling": {**rope, "mrope_section": [16, 24, 24]}}
    thinker = {"model_type": "qwen2_5_omni_thinker", "text_config": omni}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni", "thinker_config": thinker}))
    q, k, rows = empty(9, 512), empty(9, 256), empty(3, 9, 64)
    specs = _planned(lambda: vllm.triton_mrope(q, k, rows, rows, [16, 24, 24], 128, 128, False))
    assert specs < set(specs_of_server(tmp_path, "bf16"))
    rope |= {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 1e7}
    gated = {"model_type": "qwen3_5_text", **text, "head_dim": 256, "rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": gated}))
    given = empty(9, 4 * 512), empty(9, 512), empty(256), empty(256), empty(99, 64), ids, 1e-6, 4, 2, 256, 64
    specs = _planned(lambda: vllm.fused_qk_rmsnorm_rope_gate(*given, [11, 11, 10], 1.0))
    assert specs < set(specs_of_server(tmp_path, "bf16"))


def test_layers_with_other_heads(tmp_path: Path) -> None:
    """MiMo-V2-Flash has twice as many heads of k in its sliding layers."""
    transformers = pytest.importorskip("transformers", minversion="5.20")
    file = pytest.importorskip("transformers.models.mimo_v2_flash.modeling_mimo_v2_flash")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mimo_v2_flash"}))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    sliding = config.layer_types.index("sliding_attention")
    empty = partial(torch.empty, device="meta", dtype=torch.bfloat16)
    ids, table = torch.empty(9, dtype=torch.int64, device="meta"), torch.empty(99, 64, device="meta")
    for ranks in (1, 2):
        found = set(specs_of_server(tmp_path, "bf16", ranks))
        for of_k in (4, 8):
            q, k = empty(9, 64 // ranks * 192), empty(9, of_k // ranks * 192)
            assert _planned(partial(vllm.rotary_embedding, ids, q, k, 192, table, True)) < found
    with torch.device("meta"):
        layer = file.MiMoV2FlashAttention(config, layer_idx=sliding).to(torch.bfloat16)
    tables = empty(1, 16, 64), empty(1, 16, 64)
    with drop_in.enable(layer) as report:
        specs = _planned(lambda: layer(empty(1, 16, config.hidden_size), tables, None))
    assert report.calls["jitrope"] == 1
    assert specs
    assert specs < set(specs_of_model(tmp_path, "bf16"))


def test_one_head_of_k_and_defaults_that_a_file_leaves_out(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    falcon = {"model_type": "falcon", "hidden_size": 512, "num_attention_heads": 8, "multi_query": True}
    (tmp_path / "config.json").write_text(json.dumps(falcon))
    x = torch.empty(9, 9 * 64, dtype=torch.bfloat16, device="meta")
    with planning() as specs:
        table, ids = torch.empty(99, 64, device="meta"), torch.empty(9, dtype=torch.int64, device="meta")
        vllm.rotary_embedding(ids, *x.split([512, 64], 1), 64, table, True)
    assert set(specs) < set(specs_of_server(tmp_path, "bf16"))
    gemma = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560}}
    (tmp_path / "config.json").write_text(json.dumps(gemma))
    assert specs_of_server(tmp_path, "bf16")
    latent = {"model_type": "minicpm3", "kv_lora_rank": 256}
    (tmp_path / "config.json").write_text(json.dumps(latent))
    with pytest.raises(JitropeError, match="minicpm3 models have multi-head latent attention"):
        specs_of_model(tmp_path, "bf16")


@pytest.mark.parametrize("form", ["multi-query", "new"])
def test_prewarm_of_falcon(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its one head of k has a gradient of another order, and its groups of k are expanded before rope."""
    transformers = pytest.importorskip("transformers")
    more = {"new_decoder_architecture": True, "num_kv_heads": 2} if form == "new" else {"multi_query": True}
    config = transformers.FalconConfig(num_hidden_layers=1, hidden_size=512, num_attention_heads=8, **more)
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", lambda *_, **__: None)
    specs = set()
    for attention in ("eager", "sdpa"):
        config._attn_implementation = attention
        with torch.device("meta"):
            model = transformers.AutoModel.from_config(config).to(torch.bfloat16)
            with drop_in.enable(model) as report, planning() as found:
                x = torch.empty(2, 16, 512, dtype=torch.bfloat16)
                model(inputs_embeds=x, use_cache=False).last_hidden_state.sum().backward()
        assert report.calls["jitrope"] == 1
        specs |= set(found)
    assert specs
    assert specs <= set(specs_of_model(tmp_path, "bf16"))


def test_a_model_whose_q_and_k_are_no_linear_layers_is_an_error(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ZayaConfig() if hasattr(transformers, "ZayaConfig") else pytest.skip("it has no Zaya")
    config.save_pretrained(tmp_path)
    with pytest.raises(JitropeError, match="q and k of zaya models are not those of linear layers; record a run"):
        specs_of_model(tmp_path, "bf16")


BROKEN = {
    "a text_config that is a number": ('{"text_config": 5, "kv_lora_rank": 5}', ["--serve"]),
    "a rank that is text": (
        '{"model_type": "deepseek_v3", "num_attention_heads": 8, "kv_lora_rank": "a", "qk_rope_head_dim": 64}',
        ["--serve", "--dtype", "bf16"],
    ),
    "too deep": ("[" * 100_000, []),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_configuration_is_one_error(jitrope, tmp_path: Path, name: str) -> None:
    text, options = BROKEN[name]
    (tmp_path / "config.json").write_text(text)
    done = jitrope("prewarm", "--model", "config.json", "--arch", "sm_90", "--json", *options)
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]


def test_without_docstrings(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JITROPE_CACHE_DIR": str(tmp_path), "PYTHONOPTIMIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "jitrope", "cache", "ls"], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_prewarm_of_the_language_model_in_a_larger_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    text = transformers.Gemma3TextConfig(num_key_value_heads=2, head_dim=128)
    transformers.Gemma3Config(text_config=text, dtype="bfloat16").save_pretrained(tmp_path)
    specs = specs_of_model(tmp_path)
    assert {(spec.dtype, spec.head_dim, spec.full_width) for spec in specs} == {("bf16", 128, True)}


def test_prewarm_of_a_model_for_text_and_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The kernels of the text's part, with positions on three axes, and a line on what is left."""
    transformers = pytest.importorskip("transformers")
    words = {"num_key_value_heads": 2, "head_dim": 64}
    rope = {"rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True}
    config = transformers.Qwen3VLConfig(text_config={**SMALL, **words, "rope_scaling": rope}, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config).language_model
        with drop_in.enable(model), planning() as specs:
            for batch in (1, 3):
                x = torch.empty(batch, 16, 512, dtype=torch.bfloat16)
                ids, mask = torch.zeros(3, batch, 16, dtype=torch.int64), torch.zeros(batch, 1, 16, 16) == 0
                out = model(inputs_embeds=x, position_ids=ids, attention_mask=mask, use_cache=False)
                out.last_hidden_state.sum().backward()
    assert set(specs_of_model(tmp_path)) == set(specs)
    assert "only the part of qwen3_vl for text is planned; for a vision tower, record a run" in caplog.text


def test_prewarm_of_a_diffusers_model(jitrope, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    config = {"_class_name": "FluxTransformer2DModel", "num_layers": 1, "num_single_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = jitrope("prewarm", "--model", "config.json", "--arch", "sm_90", "--dry-run", "--json")
    kernels = json.loads(done.stdout)["kernels"]
    assert {kernel["name"] for kernel in kernels} == {spec.name for spec in specs_of_model(tmp_path)}
    assert all(kernel["kernel"].startswith("qk norm rope bf16 d128 interleaved") for kernel in kernels)
    half = jitrope("prewarm", "--model", ".", "--dtype", "half", "--arch", "sm_90", "--dry-run", "--json").stdout
    assert all("_fp16_" in kernel["name"] for kernel in json.loads(half)["kernels"])


NO_MODELS = {
    "no transformer": ({"_class_name": "UNet2DConditionModel"}, "--model does not know UNet2DConditionModel; of diff"),
    "nothing": ({}, "it has neither model_type nor _class_name"),
    "unknown": ({"model_type": "nonesuch"}, "cannot read"),
    "a list": ([], "it has neither model_type nor _class_name"),
    "no dtype": ({"model_type": "llama"}, "names no dtype: pass one, as --dtype bf16"),
    "an odd dtype": (
        {"model_type": "llama", "dtype": "float64"},
        "names torch.float64; pass a dtype that jitrope has, as --dtype bf16",
    ),
    "norms that are not known": (
        {"model_type": "laguna", "dtype": "float16"},
        "LagunaAttention cannot be made from the configuration alone",
    ),
    "heads of several sizes": (
        {"model_type": "gemma4_text", "dtype": "bfloat16"},
        "the rope of gemma4 models is not known",
    ),
    "no text": ({"model_type": "musicgen", "dtype": "float16"}, "cannot read"),
    "no rope": ({"model_type": "bert", "dtype": "float16"}, "JITROPE_RECORD=run.json"),
    "two functions": (
        {"model_type": "deepseek_v3", "dtype": "float16"},
        "has apply_rotary_pos_emb_interleave too, and which one a layer calls is not known; record a run instead",
    ),
}


@pytest.mark.parametrize("name", NO_MODELS)
def test_a_model_that_is_not_known_is_one_line(jitrope, tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    data, text = NO_MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(data))
    served = [["--serve"]] if name in ("heads of several sizes", "norms that are not known", "no text") else []
    for more in ([], *served):
        done = jitrope("prewarm", "--model", "config.json", "--arch", "sm_90", "--dry-run", *more)
        assert (done.returncode, done.stdout) == (1, "")
        assert text in done.stderr
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert len(errors[0]) < (360 if name == "no transformer" else 240)  # that one lists those that are known


def test_a_model_without_a_dtype_has_one_message(process, tmp_path: Path) -> None:
    """transformers warns of the old name of its attribute."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    done = process("prewarm", "--model", "config.json", "--arch", "sm_90", "--dry-run")
    assert done.stderr == "error: config.json names no dtype: pass one, as --dtype bf16\n"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "float16"}))
    assert {spec.dtype for spec in specs_of_model(tmp_path)} == {"fp16"}


# ---- cache and bundle ----------------------------------------------------------------------------


def test_cache_commands(jitrope, tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    assert jitrope("cache", "ls").stdout == ""
    assert jitrope("cache", "ls").stderr == f"0 kernels, 0.0 MiB in {kernels}\n"
    jitrope("prewarm", "--heads", "8", "--arch", "sm_90")
    listed = jitrope("cache", "ls")
    head, *rows = [line.split(maxsplit=4) for line in listed.stdout.splitlines()]
    assert head == ["KEY", "ARCH", "SIZE", "KERNEL"]
    assert [(row[1], row[3], row[4]) for row in rows] == [
        ("sm_90", "KiB", "rope bf16 d128 halves fp32 half table forward grid 2d"),
        ("sm_90", "KiB", "rope bf16 d128 halves fp32 half table forward token linear"),
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


def test_cache_info_shows_one_kernel(jitrope, tmp_path: Path) -> None:
    jitrope("prewarm", "--heads", "8", "--arch", "sm_80,sm_90")
    rows = json.loads(jitrope("cache", "ls", "--json").stdout)["entries"]
    listed = [line.split()[0] for line in jitrope("cache", "ls").stdout.splitlines()[1:]]
    assert listed == [row["key"] for row in rows]
    assert {len(key) for key in listed} == {8}
    assert len(set(listed)) == 4
    row = rows[0]
    text = jitrope("cache", "info", row["key"]).stdout
    assert jitrope("cache", "info", Path(row["path"]).name).stdout == text  # a folder's name is a key too
    assert f"key           {row['key']}\n" in text
    assert f"architecture  {row['arch']}\n" in text
    assert f"options       -std=c++17 -arch={row['arch']}\n" in text
    assert re.search(r"^compiler +cupy .*nvrtc", text, re.MULTILINE)
    assert re.search(r"^files +kernel.cu \d+ KiB, kernel.cubin \d+ KiB, spec.json \d+ KiB$", text, re.MULTILINE)
    assert "  head_dim               128\n" in text
    shown = jitrope("cache", "info", row["key"], "--json").stdout
    assert sum(json.loads(shown)["files"].values()) == row["bytes"]
    (command,) = re.findall(r"^render again +(.*)$", text, re.MULTILINE)
    assert command == f"jitrope cache info {row['key']} --json | jitrope render --from /dev/stdin"
    (tmp_path / "shown.json").write_text(shown)
    again = jitrope("render", "--from", "shown.json").stdout
    assert again == (Path(row["path"]) / "kernel.cu").read_text()


def test_a_key_is_of_one_kernel(jitrope, tmp_path: Path) -> None:
    jitrope("prewarm", "--heads", "8", "--arch", "sm_90")
    done = jitrope("cache", "info", "rope")  # the start of both folders' names
    assert (done.returncode, done.stderr) == (
        1,
        "error: 'rope' is the start of 2 keys; `jitrope cache ls` lists the keys\n",
    )
    folder = next((tmp_path / "kernels").glob("*"))
    meta = json.loads((folder / "spec.json").read_text())
    spec = spec_from_dict(meta["spec"])
    key = Key(meta["name"], render.ingredients(spec), tuple(meta["options"]), "sm_90", "another compiler")
    KernelCache(tmp_path / "kernels").store(key, "text", b"cubin", meta["spec"])
    rows = json.loads(jitrope("cache", "ls", "--json").stdout)["entries"]
    names = [row["key"] for row in rows]
    assert sorted(map(len, names)) == [8, 17, 17]
    for name in names:
        assert json.loads(jitrope("cache", "info", name, "--json").stdout)["key"] == name


def test_a_table_is_wrapped_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [("1a2b3c4d", "rope bf16 d128 halves bf16 full table forward in place packed token linear")]
    whole = console.table(("KEY", "KERNEL"), lines)
    assert whole == f"KEY       KERNEL\n1a2b3c4d  {lines[0][1]}"
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    wrapped = console.table(("KEY", "KERNEL"), lines)
    assert [len(line) <= 60 for line in wrapped.splitlines()] == [True] * 3
    assert wrapped.splitlines()[2].startswith(" " * 10 + "place packed")
    assert " ".join(wrapped.split()) == " ".join(whole.split())


def test_every_popular_kernel_has_words_of_its_own() -> None:
    specs = prewarming.default_specs()
    assert len(set(console.each_in_words(specs))) == len(specs)  # with the fields in which those of one name differ
    two = [specs_of(heads=heads)[0] for heads in (8, [32, 8])]
    different = "tokens_per_block 1, heads_per_block 40"  # not in the name
    assert console.each_in_words(two)[1] == f"rope bf16 d128 halves fp32 half table forward token linear, {different}"


def test_verify_by_a_cold_start(jitrope, tmp_path: Path) -> None:
    """A whole entry that no call would find is reported. Here another compiler made it."""
    jitrope("prewarm", "--heads", "8", "--arch", "sm_80,sm_90")
    done = jitrope("cache", "verify", "--cold", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["cold"] == {"loaded": 0, "checked": 4, "bad": [], "others": 0}
    entry = next((tmp_path / "kernels").glob("*sm_90*"))
    files = {file.name: file.read_bytes() for file in entry.iterdir()}
    meta = json.loads(files["spec.json"])
    other = Key(meta["name"], render.ingredients(spec_from_dict(meta["spec"])), tuple(meta["options"]), "sm_90", "old")
    shutil.rmtree(entry)
    KernelCache(tmp_path / "kernels").store(other, files["kernel.cu"].decode(), files["kernel.cubin"], meta["spec"])
    assert jitrope("cache", "verify").returncode == 0
    done = jitrope("cache", "verify", "--cold")
    assert done.returncode == 1
    assert "3 looked up" in done.stdout
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
    assert json.loads(done.stdout)["cold"]["checked"] == 0
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
    done = process("bundle", "write", "k.tar", "--json")
    assert (done.returncode, json.loads(done.stdout)["cached"]) == (0, 2)
    assert said in done.stderr
    (tmp_path / "listing.json").write_text(process("cache", "ls", "--json").stdout)
    done = process("prewarm", "--from", "listing.json", "--arch", "sm_90", "--json")
    assert (done.returncode, json.loads(done.stdout)["cached"]) == (0, 2)
    assert said in done.stderr
    done = process("cache", "verify", "--cold", "--json")
    cold = json.loads(done.stdout)["cold"]
    assert (done.returncode, cold) == (0, {"loaded": 0, "checked": 2, "bad": [], "others": 1})
    recorded = {"spec": json.loads((tmp_path / "listing.json").read_text())["spec"]}
    (tmp_path / "run.json").write_text(json.dumps(recorded))  # not a cache's listing, so every kernel is needed
    done = process("prewarm", "--from", "run.json", "--arch", "sm_90")
    assert done.returncode == 1
    assert "of_another_version" in done.stderr


def test_a_bundle_of_nothing_says_how_to_name_kernels(jitrope) -> None:
    for more in ([], ["--arch", "sm_90"]):
        done = jitrope("bundle", "write", "k.tar", *more)
        said = "error: there are no kernels to bundle; run `jitrope prewarm` first, or name a file of calls with --from"
        assert (done.returncode, done.stderr) == (1, f"{said}\n")


def test_a_bundle_has_what_the_cache_has_and_serves_where_nothing_can_be_compiled(jitrope, tmp_path: Path) -> None:
    jitrope("prewarm", "--heads", "8", "--arch", "sm_80")
    (tmp_path / "run.json").write_text(jitrope("cache", "ls", "--json").stdout)
    jitrope("prewarm", "--heads", "40", "--arch", "sm_90")
    dry = json.loads(jitrope("bundle", "write", "k.tar", "--dry-run", "--json").stdout)
    assert (dry["cached"], dry["would compile"]) == (4, 0)
    assert not (tmp_path / "k.tar").exists()
    assert json.loads(jitrope("bundle", "write", "k.tar", "--json").stdout)["cached"] == 4
    kernels, bundled = (
        {(e["name"], e["arch"]) for e in json.loads(jitrope(*command, "--json").stdout)["entries"]}
        for command in (("cache", "ls"), ("bundle", "ls", "k.tar"))
    )
    assert bundled == kernels
    done = json.loads(jitrope("bundle", "write", "k.tar", "--arch", "sm_90,sm_89", "--dry-run", "--json").stdout)
    assert (done["cached"], done["would compile"]) == (2, 4)  # three specs for two architectures
    done = json.loads(jitrope("bundle", "write", "l.tar", "--from", "run.json", "--arch", "sm_80", "--json").stdout)
    assert (done["cached"], done["compiled"]) == (2, 0)

    production = {"JITROPE_CACHE_DIR": str(tmp_path / "production"), "JITROPE_NO_COMPILE": "1"}
    assert len(json.loads(jitrope("bundle", "load", "k.tar", "--json", **production).stdout)["loaded"]) == 4
    for environment in (production, {"JITROPE_CACHE_DIR": "/none", "JITROPE_SYSTEM_CACHE": "k.tar"}):
        cold = json.loads(jitrope("cache", "verify", "--cold", "--json", **environment).stdout)["cold"]
        assert cold == {"loaded": 0, "checked": 4, "bad": [], "others": 0}

    victim = next((tmp_path / "kernels").glob("*sm_90*/kernel.cubin"))
    victim.write_bytes(b"")
    (tmp_path / "k.tar").unlink()
    failed = jitrope("bundle", "write", "k.tar")
    assert failed.returncode == 1
    assert str(victim.parent) in failed.stderr
    assert not (tmp_path / "k.tar").exists()


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
    assert list(checks) == ["jitrope", "torch", "GPU", "CuPy", "NVRTC", "kernel cache", "variables", "kernel"]
    assert status(done, "GPU")[2].startswith("CPU tensors use plain torch")
    assert "JITROPE_CACHE_DR is unknown" in status(done, "variables")[1]
    assert "jitrope reads JITROPE_CACHE_DIR" in status(done, "variables")[2]
    done = jitrope("doctor")
    assert done.stdout.endswith("\njitrope works here. 1 note: GPU.\n")
    assert re.search(r"^note  GPU  .*\n +to do: CPU tensors use plain torch", done.stdout, re.MULTILINE)


def test_doctor_of_amds_gpus(jitrope, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for ROCm shows them as CUDA GPUs. No NVIDIA architecture is made up for them."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    done = jitrope("doctor", "--json")
    ok, found, advice = status(done, "GPU")
    assert (done.returncode, ok, found) == (1, False, "torch is built for ROCm 6.4")
    assert advice.startswith("AMD GPUs are not supported; calls need an NVIDIA GPU")
    assert status(done, "NVRTC")[0]
    assert status(done, "kernel")[0]
    assert jitrope("doctor").stdout.endswith("\n1 fault: GPU.\n")
    assert "there is no GPU here" in jitrope("prewarm").stderr


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
    jitrope("bundle", "write", "k.tar")
    layer = {"JITROPE_SYSTEM_CACHE": str(tmp_path / "k.tar")}
    victim = next((tmp_path / "kernels").glob("*/kernel.cubin"))
    victim.write_bytes(victim.read_bytes()[:-9])
    done = jitrope("doctor", "--json", **layer)
    assert done.returncode == 0  # not a fault: the next call makes the kernel again
    assert "1 kernels, 1 damaged" in status(done, "kernel cache")[1]
    assert victim.parent.name in status(done, "kernel cache")[1]
    assert status(done, "system cache") == (True, f"{tmp_path}/k.tar, 2 kernels", "")
    (tmp_path / "k.tar").write_bytes(b"no tar")
    found = status(jitrope("doctor", "--json", **layer), "system cache")
    assert not found[0]
    assert "cannot be read as a bundle" in found[1]


def missing_kernel(*arguments: object) -> None:
    config.configure(compile=False)
    kernels.build(specs_of(heads=6, head_dim=64)[0], "sm_90")


def test_doctor_where_its_kernel_is_in_no_cache(jitrope, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU a call needs no kernel, so the call is replaced by one that does. The next test uses a GPU."""
    monkeypatch.setattr(doctor, "apply_rope", missing_kernel)
    done = jitrope("doctor", "--json", JITROPE_NO_COMPILE="1")
    assert done.returncode == 0
    assert status(done, "kernel")[1].startswith("not run: its kernel is in no cache, and compiling is forbidden")


@pytest.mark.gpu
def test_doctor_of_a_gpu_that_nothing_may_be_compiled_for(process) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    done = process("doctor", "--json", JITROPE_NO_COMPILE="1", CUDA_VISIBLE_DEVICES=visible)
    assert done.returncode == 0, done.stdout
    assert status(done, "kernel")[1].startswith("not run")
    for changes in ({}, {"JITROPE_NO_COMPILE": "1"}):  # the first call stores the kernel
        done = process("doctor", "--json", CUDA_VISIBLE_DEVICES=visible, **changes)
        assert status(done, "kernel")[1] == "a call on the GPU gives the reference's bits"


def test_doctor_of_missing_templates(process, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "jitrope", tmp_path / "broken" / "jitrope", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "templates", tmp_path / "broken" / "templates")
    (tmp_path / "broken" / "templates" / "vec.cuh").unlink()
    found = status(process("doctor", "--json", PYTHONPATH=str(tmp_path / "broken")), "kernel")
    assert not found[0]
    assert "vec.cuh is missing" in found[1]
    assert "install jitrope again" in found[1]


def test_doctor_of_two_cupys(jitrope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "more" / "cupy_cuda11x-14.2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cupy-cuda11x\nVersion: 14.2.0\n")
    monkeypatch.syspath_prepend(tmp_path / "more")
    found = status(jitrope("doctor", "--json"), "CuPy")
    assert not found[0]
    assert re.search(r"cupy-cuda11x and cupy-cuda1[23]x are installed", found[1])
    assert re.match(r"pip uninstall -y cupy-cuda11x cupy-cuda1[23]x && pip install cupy-cuda1[23]x nvidia", found[2])
    last = jitrope("doctor").stdout.splitlines()[-1]
    assert last.startswith("1 fault: CuPy.")


def test_doctor_of_a_torch_for_another_cuda(jitrope, monkeypatch: pytest.MonkeyPatch) -> None:
    major = compiler.cuda_major()
    monkeypatch.setattr(torch.version, "cuda", f"{25 - major}.8")  # 12 beside 13, 13 beside 12
    found = status(jitrope("doctor", "--json"), "CuPy")
    assert found[0]
    assert f"for CUDA {major}, but torch is for CUDA {25 - major}.8" in found[1]
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
    ok, found, advice = status(run("doctor", "--json"), "NVRTC")
    assert not ok
    assert "cannot be loaded" in found
    assert advice == compiler.install(compiler.cuda_major())
    fails_with(run("prewarm", "--heads", "8", "--arch", "sm_90"), advice)
    # An image that only loads kernels needs no NVRTC.
    assert status(run("doctor", "--json", JITROPE_NO_COMPILE="1"), "NVRTC")[0]


@pytest.mark.slow
@needs_a_cpu_torch
def test_without_cupy_and_without_a_gpu(without: Callable[[str], Run]) -> None:
    """CPU tensors need no CuPy: it is a note. A dry run still lists the kernels."""
    run = without("cupy*")
    done = run("doctor", "--json")
    assert done.returncode == 0
    assert "needed only to compile kernels" in status(done, "CuPy")[1]
    assert status(done, "CuPy")[2] == compiler.install()
    assert status(done, "NVRTC")[:2] == (True, "not checked: CuPy is missing")
    want = "a CPU call gives the reference's bits; no kernel was compiled: CuPy is missing"
    assert status(done, "kernel") == (True, want, "")
    assert run("doctor").stdout.endswith("\njitrope works here. 3 notes: GPU, CuPy, NVRTC.\n")
    prewarm = ("prewarm", "--heads", "8", "--arch", "sm_90")
    fails_with(run(*prewarm), compiler.install())
    done = run(*prewarm, "--dry-run")
    assert done.returncode == 0
    assert "would compile  sm_90  rope bf16 d128 halves fp32 half table forward grid 2d\n" in done.stdout
    assert done.stdout.endswith("\n2 would compile, 0 cached, 0 failed\n")
    assert done.stderr == ""


def test_a_cupy_that_cannot_be_imported_is_one_fault(process, tmp_path: Path) -> None:
    (tmp_path / "broken" / "cupy").mkdir(parents=True)
    (tmp_path / "broken" / "cupy" / "__init__.py").write_text("raise RuntimeError('for another Python')")
    done = process("doctor", "--json", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path / 'broken'}")
    assert "for another Python" in status(done, "CuPy")[1]
    assert [x["what"] for x in json.loads(done.stdout)["checks"] if not x["ok"]] == ["CuPy"]
    assert status(done, "NVRTC")[1] == "not checked: CuPy cannot be imported"


@pytest.mark.gpu
def test_without_cupy_a_gpu_has_one_fault() -> None:
    code = "import sys; sys.modules['cupy'] = None; from jitrope.tools.cli import main; main()"  # as if not installed
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--json"], env=environment, capture_output=True, text=True
    )
    assert status(done, "CuPy")[2] == compiler.install()
    assert [x["what"] for x in json.loads(done.stdout)["checks"] if not x["ok"]] == ["CuPy"]
    for what in ("NVRTC", "kernel"):
        assert status(done, what)[1] == "not checked: CuPy is missing"


def test_bench_says_that_it_needs_a_gpu(process) -> None:
    done = process("bench", "host")
    assert done.returncode == 1
    assert "needs a CUDA device" in done.stderr
