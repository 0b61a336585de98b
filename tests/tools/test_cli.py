"""The output and the exit code of the `jitrope` command."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from jitrope.base import config
from jitrope.base.errors import JitropeError
from jitrope.base.spec import record_of
from jitrope.jit import render
from jitrope.jit.cache import KernelCache
from jitrope.jit.entry import Key
from jitrope.tools import cli, doctor
from jitrope.tools.models import specs_of_model
from jitrope.tools.prewarm import architecture, read_record, specs_of

from .. import fresh
from ..caches import DATA
from .conftest import Run, stored

COMMANDS = ["", "prewarm", "render", "doctor", "cache", "cache ls", "cache path", "cache verify", "cache clear"]
COMMANDS += ["cache prune", "bundle", "bundle write", "bundle load", "bundle ls", "bench", "bench rope", "bench decode"]
WITH_EXAMPLES = ["", "prewarm", "render", "cache verify", "cache prune", "bundle write"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(jitrope: Run, command: str) -> None:
    done = jitrope(*command.split(), "--help", COLUMNS="80")
    assert done.returncode == 0
    assert "usage" in done.stdout.lower()
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert jitrope(*command.split(), "-h", COLUMNS="80").stdout == done.stdout
    if command in WITH_EXAMPLES:
        assert f"jitrope {command}".strip() in done.stdout.split("Examples:")[1]


def test_commands_are_all_of_them(jitrope: Run) -> None:
    assert cli.COMMANDS.keys() <= set(COMMANDS)
    assert all("--json" in jitrope(*name.split(), "--help").stdout for name in cli.COMMANDS)
    assert "Exit codes: 0 done, 1 something failed" in jitrope("--help", COLUMNS="80").stdout
    assert jitrope("--version").stdout.strip() == config.__version__


OF_CALLS = "jitrope prewarm: error: a call and its options need --heads; --model takes --dtype and --backward"
ONE = "jitrope prewarm: error: pass one of --heads, --model, --from"
TEXTS = "bshd heads q k > rotate cos sin"
WRONG = {  # a command, and what the last line says
    **dict.fromkeys(("", "cache"), ""),  # the help lists its commands
    **dict.fromkeys(("nothing", "cache ls --nothing", "cache prune", "cache prune --older-than much"), "error: "),
    **dict.fromkeys(("prewarm --heads 8 --jobs -1", "prewarm --heads 8 --dtype int8", "bundle load"), "error: "),
    **dict.fromkeys(("prewarm --heads x --arch sm_90", "prewarm --heads 1,2,3 --arch sm_90"), "error: "),
    **dict.fromkeys(("prewarm --heads 8 --arch hopper", "prewarm --heads 8 --arch sm_090"), "error: "),
    "prewarm --heads 8 --head-dim 7 --arch sm_90": "error: ",
    **dict.fromkeys(("prewarm", "prewarm --backward", "prewarm --dtype fp16 --arch sm_90", "prewarm text"), ONE),
    **dict.fromkeys(("prewarm --from run.json --heads 8", "prewarm --model m --heads 8 --arch sm_90"), ONE),
    **{f"prewarm --arch sm_90 --model m {word}": OF_CALLS for word in ("--width full", "--head-dim 64", "text")},
    "prewarm --arch sm_90 --from run.json --width full": OF_CALLS,
    "render": "jitrope render: error: pass one of --heads, --from",
    "render --from run.json --head-dim 64": "error: a call and its options need --heads",
    f"prewarm '{TEXTS} turned > fresh' --heads 8,2": "call has 'turned', which is neither a word nor a tensor",
    f"prewarm '{TEXTS} rotary_dim=-4 > fresh' --heads 8,2": "heads or call have wrong sizes: Trying to create",
    f"prewarm '{TEXTS} > fresh' --heads 8": "heads is [8]; it must be those of q and k",
    f"prewarm '{TEXTS} > cache k_cache slot_mapping k_block_scale' --heads 8,2": "has k_block_scale",
}
NOTHING = "error: there are no kernels to bundle; run `jitrope prewarm` first, or name a record with --from"
FAILED = {
    **dict.fromkeys(("bundle load none.zip", "bundle ls none.zip", "prewarm --from none.json --arch sm_90"), "error: "),
    **dict.fromkeys(("bundle write k.zip", "bundle write k.zip --arch sm_90"), NOTHING),
    "prewarm --model none --arch sm_90": "error: ",
}


@pytest.mark.parametrize("command", [*WRONG, *FAILED])
def test_exit_codes_and_no_traceback(jitrope: Run, command: str) -> None:
    done = jitrope(*shlex.split(command))
    assert done.returncode == (2 if command in WRONG else 1)
    assert "Traceback" not in done.stderr
    if command in ("", "cache"):
        assert "usage" in done.stdout
    else:
        assert {**WRONG, **FAILED}[command] in done.stderr.splitlines()[-1]
        assert command in FAILED or done.stdout == ""


def test_an_interrupt_is_no_traceback(jitrope: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "run", Mock(side_effect=KeyboardInterrupt))
    done = jitrope("doctor")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


EXITS = """
import os, sys
from jitrope.tools import cli
reader, pipe = os.pipe()
os.close(reader)
CASES = [("cache ls", None), ("cache ls --json", "/dev/full"), ("cache path", "out"), ("render --heads 8", pipe)]
CASES += [("render --from /dev/stdin", "again.cu")]
for number, (words, stdout) in enumerate(CASES):
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open("run.json", os.O_RDONLY), 0)
        os.dup2(os.open(f"said{number}", os.O_WRONLY | os.O_CREAT), 2)
        if stdout is None:  # as Python does if it is closed
            os.close(1)
            sys.stdout = None
        else:
            os.dup2(stdout if stdout == pipe else os.open(stdout, os.O_WRONLY | os.O_CREAT), 1)
        sys.argv = ["jitrope", *words.split()]
        cli.main()
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_a_stdout_that_takes_no_text(jitrope: Run, tmp_path: Path) -> None:
    """It is closed, on a full disk, has another encoding than the path, or its reader ends first; no docstrings.

    The last one renders a source again, by the command at its head.
    """
    text = jitrope("render", "bshd heads q > rotate cos sin interleaved > fresh", "--heads", "24", "--backward").stdout
    call, _, text = text.partition("\n")  # the kernel may belong to other calls too, so its own text has none
    assert call == "// bshd heads q > rotate cos sin rotary_dim=128 interleaved inverse > fresh"
    (tmp_path / "kernel.cu").write_text(f"{call}\n{text}")
    (command,) = re.findall(r"^// To render this text again: (.*) \| jitrope render --from /dev/stdin$", text, re.M)
    subprocess.run(f"{command.replace('FILE', 'kernel.cu')} > run.json", shell=True, cwd=tmp_path, check=True)
    environment = {**os.environ, "PYTHONPATH": fresh.IMPORTS, "PYTHONIOENCODING": "ascii", "PYTHONOPTIMIZE": "2"}
    environment["JITROPE_CACHE_DIR"] = str(tmp_path / "ü")
    done = subprocess.run([sys.executable, "-c", EXITS], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "1", "0", "1", "0"], done.stderr
    closed, full, *others = [(tmp_path / f"said{number}").read_text() for number in range(5)]
    assert closed.startswith("0 kernels")
    assert full == "error: [Errno 28] No space left on device\n"
    assert others == ["", "", ""]
    assert (tmp_path / "out").read_text() == f"{tmp_path}/\\xfc\n"
    assert (tmp_path / "again.cu").read_text() == text


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["jitrope", "cache", "ls", "--json"])
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit, match=r"^1$"):
            cli.main()
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"


def test_prewarm_then_everything_is_cached(jitrope: Run, tmp_path: Path) -> None:
    """`prewarm` compiles even if calls must not. A dry run prints the same and builds nothing."""
    arguments = ("prewarm", "--heads", "32,8", "--arch", "sm_80,sm_90", "--json")
    dry = jitrope(*arguments, "--dry-run").data
    assert (dry["would compile"], dry["cached"], dry["failed"]) == (8, 0, 0)
    assert list(tmp_path.iterdir()) == []
    first = jitrope(*arguments, JITROPE_NO_COMPILE="1").data
    assert (first["compiled"], first["cached"], first["failed"]) == (8, 0, 0)
    (tmp_path / "run.json").write_text(jitrope("cache ls --json").stdout)
    assert set(read_record(tmp_path / "run.json")) == {*specs_of([32, 8])}
    second = jitrope(*arguments).data
    assert (second["compiled"], second["cached"]) == (0, 8)
    elsewhere = {"JITROPE_CACHE_DIR": str(tmp_path / "elsewhere")}  # what a cache lists is built elsewhere
    assert jitrope("prewarm --from run.json --arch sm_120 --json", **elsewhere).data["compiled"] == 4
    assert "constexpr int HEAD_DIM = 128;" in jitrope("render --from run.json").stdout
    data = jitrope("render --heads 32,8 --json").data
    assert data["text"].startswith(f"// {data['name']}\n")
    assert data["spec"]["heads_per_block"] == 40
    (next((tmp_path / "kernels").glob("*sm_90*")) / "kernel.cu").write_bytes(b"damaged")
    dry = jitrope(*arguments, "--dry-run").data
    assert (dry["would compile"], dry["cached"]) == (1, 7)
    assert {k["arch"] for k in dry["kernels"] if k["outcome"] != "cached"} == {"sm_90"}


def test_architectures(jitrope: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, however it is written; without a GPU there is no default."""
    command = ("prewarm", "--heads", "8", "--dry-run", "--json", "--arch")
    assert jitrope(*command, "sm90,90,9.0,sm_90").stdout == jitrope(*command, "sm_90").stdout
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = jitrope("prewarm --heads 8")
    assert (done.returncode, done.stdout) == (1, "")
    assert "--arch" in done.stderr


@pytest.mark.parametrize("arch", ["sm_130", "5.0", "sm_91", "12"])
def test_an_architecture_that_nvrtc_does_not_know_is_one_line(jitrope: Run, tmp_path: Path, arch: str) -> None:
    stored(tmp_path / "kernels", specs_of(8), "sm_90")
    done = jitrope("prewarm --heads 8 --arch", f"sm_90,{arch}")
    assert (done.returncode, done.stdout) == (1, "0 compiled, 2 cached, 2 failed\n")
    (line,) = done.stderr.splitlines()
    name = architecture(arch)
    assert re.match(rf"failed: rope_bf16_d128\w+ {name} and 1 more: NVRTC .* compiles for .*, not for {name}; ", line)


CALL = "bshd heads q k > norm q_weight k_weight > rotate cos sin position_ids rotary_dim=32 interleaved > in_place"


def test_every_option_of_a_call_has_a_meaning(jitrope: Run) -> None:
    """With each alone the kernels are those of the function's word, and others than without it. A call is one too."""
    plain, words = specs_of([8, 2]), {"head_dim": 64, "dtype": "fp16", "width": "full"}
    for word, value in {**words, "backward": True, "call": CALL}.items():
        given = [f"--{word.replace('_', '-')}", *([] if value is True else [str(value)])][word == "call" :]
        done = jitrope("prewarm --heads 8,2", *given, "--arch", "sm_90", "--dry-run", "--json")
        specs = specs_of([8, 2], **{word: value})
        assert [kernel["name"] for kernel in done.data["kernels"]] == [spec.name for spec in specs]
        assert specs != plain
    assert {spec.head_dim for spec in specs_of(8, **words)} == {64}
    done = jitrope("prewarm --heads 24,24 --heads 24 --arch sm_90 --dry-run --json")
    assert len(done.data["kernels"]) == len({*specs_of([24, 24]), *specs_of(24)}) > 2


def test_a_dry_run_lists_the_kernels_in_words(jitrope: Run, tmp_path: Path) -> None:
    stored(tmp_path / "kernels", specs_of(8), "sm_90")
    in_place = "bshd heads q > rotate cos sin > in_place"
    done = jitrope("prewarm", in_place, "--heads", "8", "--backward", "--arch", "sm_90", "--dry-run")
    *lines, total = done.stdout.splitlines()
    text = "bshd heads q > rotate cos sin rotary_dim=128"
    name = "rope bf16 d128 halves"
    assert f"would compile  sm_90   {name} forward grid 2d: {text} > in_place" in lines
    assert f"would compile  sm_90   {name} backward token linear: {text} inverse > fresh" in lines
    assert total == f"{len(lines)} would compile, 0 cached, 0 failed"
    lines = jitrope("prewarm --heads 8 --arch sm_90 --dry-run").stdout.splitlines()
    assert f"cached         sm_90   {name} forward grid 2d: {text} > fresh" in lines


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry run"])
def test_prewarm_reports_failures(jitrope: Run, tmp_path: Path, monkeypatch, dry: tuple[str, ...]) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(render, "TEMPLATE_PATHS", [tmp_path])
        render._texts.cache_clear()
        done = jitrope("prewarm --heads 8 --arch sm_90", *dry)
    assert done.returncode == 1
    assert "2 failed" in done.stdout
    (line,) = done.stderr.splitlines()  # one for all kernels with the same fault
    assert re.match(r"failed: rope_bf16_d128\w+ sm_90 and 1 more: the template rope.cu.jinja is missing", line)
    (tmp_path / "empty.json").touch()
    done = jitrope("prewarm --from empty.json --arch sm_90 --json", *dry)
    assert (done.returncode, done.data["kernels"]) == (1, [])
    assert "nothing to build" in done.stderr


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}
FLUX = {"_class_name": "FluxTransformer2DModel", "num_layers": 1, "num_single_layers": 1}


@pytest.mark.parametrize("config", [LLAMA, FLUX], ids=["llama", "flux"])
def test_prewarm_of_a_model(jitrope: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict) -> None:
    """Another test compares the kernels with those that the model launches."""
    library = "transformers" if "model_type" in config else "diffusers"
    pytest.importorskip(library)
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "float16"}))
    command = ("prewarm", "--model", "config.json", "--arch", "sm_90", "--dry-run", "--json")
    names = [kernel["name"] for kernel in jitrope(*command).data["kernels"]]
    assert names == [spec.name for spec in specs_of_model(tmp_path)]
    assert all(("_fp16_" if config is LLAMA else "_bf16_") in name for name in names)
    (tmp_path / "other.json").write_text(json.dumps({**LLAMA, "num_attention_heads": 1, "dtype": "float32"}))
    both = [kernel["name"] for kernel in jitrope(*command, "--model", "other.json").data["kernels"]]
    assert both == [*names, *[spec.name for spec in specs_of_model(tmp_path / "other.json")]] != names
    names = [x["name"] for x in jitrope(*command, "--dtype", "fp32", "--backward").data["kernels"]]
    assert names == [spec.name for spec in specs_of_model(tmp_path, "fp32", backward=True)]
    assert any("backward" in name for name in names)
    assert all("_fp32_" in name for name in names)
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    with pytest.raises(JitropeError, match=rf"^--model needs {library} \(.*\): pip install {library}$"):
        specs_of_model(tmp_path)


FP16 = {"dtype": "float16"}
MODELS = [  # a configuration, and why it cannot be run
    ({"_class_name": "Nonesuch"}, "the calls of Nonesuch are not known"),
    ({**FLUX, "axes_dims_rope": [16, 56, 57]}, "FluxTransformer2DModel are not known"),  # sizes that do not fit
    ({"_class_name": "SD3Transformer2DModel"}, "SD3Transformer2DModel are not known"),  # no rope
    *[(data, "cannot read") for data in ({}, {"model_type": "nonesuch"}, [])],
    ({"model_type": "qwen3_vl", "text_config": 5}, "cannot read"),
    (LLAMA, "names no dtype; pass a dtype that jitrope has, as --dtype bf16"),
    ({**LLAMA, "dtype": "float64"}, "names torch.float64; pass a dtype that jitrope has"),
    ({"model_type": "bert", **FP16}, "bert are not known (the file of BertModel has"),  # no rope
    ({"model_type": "jamba", **FP16}, "jamba are not known"),  # no rope that is called
    ({"model_type": "pe_audio", **FP16}, "pe_audio are not known (PeAudioModel.forward() missing"),  # two sounds
    ({"model_type": "wav2vec2-conformer", **FP16}, "Wav2Vec2ConformerModel has no rope function"),
    ({"model_type": "sam3", **FP16}, "sam3 are not known ('Sam3Config' object has no"),  # images and text
    ({**LLAMA, **FP16, "architectures": ["Nonesuch"]}, "Nonesuch"),
]
NO_RECORD = "cannot read bad.json: it is no record of version 1; record again with this jitrope, in a new file\n"
BAD_FILES = [
    ("--from", "{", "bad.json"),
    ("--from", json.dumps({**record_of(specs_of(8)), "version": 2}), NO_RECORD),
    ("--from", '{"version": 1, "spec": [5]}', "bad.json: spec[0]: "),
    *[("--model", text, "error: cannot read bad.json: ") for text in ("{", "[" * 100_000, "\0")],
    *[("--model", json.dumps(data), said) for data, said in MODELS],
]


@pytest.mark.parametrize(("word", "text", "said"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_file_that_says_no_kernels_is_one_line(jitrope: Run, tmp_path: Path, word: str, text: str, said: str) -> None:
    if word == "--model":
        for library in ("transformers", "diffusers"):
            pytest.importorskip(library)
    (tmp_path / "bad.json").write_text(text)
    done = jitrope("prewarm", word, "bad.json", "--arch", "sm_90", "--dry-run")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = [f"{line}\n" for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert said in line
    assert len(line) < 260
    assert done.stderr == line or text in [json.dumps(data) for data, _ in MODELS]  # a library may say more


def test_a_model_without_a_dtype_has_one_message(tmp_path: Path) -> None:
    """transformers warns of the old name of its attribute, in each process once."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    command = ("-m", "jitrope", "prewarm", "--model", "config.json", "--arch", "sm_90", "--dry-run")
    done = fresh.python(*command, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.stderr == "error: config.json names no dtype; pass a dtype that jitrope has, as --dtype bf16\n"


def test_what_a_listing_says_of_a_call_can_be_built(jitrope: Run, tmp_path: Path) -> None:
    """The text of `cache ls`, `bundle ls` and a record is that of the call, and `prewarm` reads it."""
    stored(tmp_path / "kernels", specs_of([8, 2], 64, call=CALL))
    jitrope("bundle write k.zip")
    lines = [*jitrope("cache ls").stdout.splitlines(), *jitrope("bundle ls k.zip").stdout.splitlines()]
    assert [line.partition(": ")[2] for line in lines] == [CALL] * 4
    listed = jitrope("cache ls --json").data
    assert listed["version"] == 1
    assert [x["call"] for x in (*listed["spec"], *listed["entries"])] == [CALL] * 4
    assert jitrope("prewarm --heads 8,2 --head-dim 64 --arch sm_50 --json", CALL).data["cached"] == 2


def test_cache_commands(jitrope: Run, tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    done = jitrope("cache ls")
    assert (done.stdout, done.stderr) == ("", f"0 kernels, 0.0 MiB in {kernels}\n")
    assert jitrope("cache path").stdout == f"{kernels}\n"
    victim, left = stored(kernels, specs_of(8))
    listed = jitrope("cache ls")
    rows = [line.split(maxsplit=3) for line in listed.stdout.splitlines()]
    call = "bshd heads q > rotate cos sin rotary_dim=128 > fresh"
    assert [(row[0], row[2], row[3]) for row in rows] == [
        ("sm_50", "KiB", f"rope bf16 d128 halves forward {launch}: {call}") for launch in ("grid 2d", "token linear")
    ]
    assert "2 kernels" in listed.stderr
    sizes = [entry["bytes"] for entry in jitrope("cache ls --json").data["entries"]]
    assert sum(sizes) == sum(file.stat().st_size for file in kernels.glob("*/*"))
    assert jitrope("cache verify").returncode == 0
    (victim / "kernel.cubin").write_bytes(b"broken")
    done = jitrope("cache verify --json")
    assert (done.returncode, [bad["path"] for bad in done.data["bad"]]) == (1, [str(victim)])
    assert jitrope("cache prune --older-than 1h --json").data["removed"] == []
    said = jitrope("cache prune --older-than 1h").stdout
    kept = "kernels from bundles are kept, which `jitrope cache clear` removes"
    assert said == f"0 kernels removed from {kernels}; {kept}\n"
    os.utime(victim, (1, 1))
    for more in (("--dry-run",), ()):
        assert jitrope("cache prune --older-than 30d --json", *more).data["removed"] == [str(victim)]
    for more, left_over in ((["--dry-run"], [left]), ([], [])):
        done = jitrope("cache clear --json", *more).data
        assert done == {"removed": [str(left)], "dry_run": bool(more)}
        assert [*kernels.iterdir()] == left_over


def test_verify_by_a_cold_start(jitrope: Run, tmp_path: Path) -> None:
    """A whole entry that no call would find is reported. Here another compiler made it."""
    done = jitrope("cache verify --cold --json")
    assert (done.returncode, done.data["looked_up"]) == (1, 0)
    assert "there is nothing to look up" in done.stderr
    assert jitrope("cache verify").returncode == 0
    (spec, _), folder = specs_of(8), tmp_path / "kernels"
    stored(folder, specs_of(8), "sm_52")
    entry, _ = stored(folder, specs_of(8))
    done = jitrope("cache verify --cold --json")
    assert (done.returncode, done.data) == (0, {"good": 4, "bad": [], "looked_up": 4, "missing": []})
    options = tuple(json.loads((entry / "spec.json").read_text())["options"])
    shutil.rmtree(entry)
    key = Key(spec.name, render.ingredients(spec), options, "sm_50", "old")
    KernelCache(folder).store(key, "text", DATA, spec.to_dict())
    assert jitrope("cache verify").returncode == 0
    done = jitrope("cache verify --cold")
    assert (done.returncode, done.stdout) == (1, "4 good, 0 damaged; cold start: 3 found, 1 missing\n")
    assert "would be compiled" in done.stderr


def test_layers_are_listed_and_verified(jitrope: Run, tmp_path: Path) -> None:
    folders = stored(tmp_path / "layer", specs_of(8))
    environment = {"JITROPE_SYSTEM_CACHE": str(tmp_path / "layer"), "JITROPE_CACHE_DIR": "/none"}
    done = jitrope("cache ls", **environment)
    assert done.stdout.count("sm_50") == 2
    assert re.fullmatch(r"0 kernels, .* in /none\n2 kernels, .* in .*/layer\n", done.stderr)
    listed = jitrope("cache ls --json", **environment).data
    assert (len(listed["spec"]), len(listed["entries"])) == (2, 2)
    assert jitrope("cache verify --cold", **environment).returncode == 0
    for folder in folders:
        (folder / "kernel.cubin").write_bytes(b"")
    done = jitrope("cache verify --cold --json", **environment)
    assert (done.returncode, len(done.data["bad"])) == (1, 2)


def test_another_versions_entry_blocks_nothing(jitrope: Run, tmp_path: Path, caplog) -> None:
    """One entry is whole, but its spec has a field that this version does not know."""
    entry, _ = stored(tmp_path / "kernels", specs_of(8))
    meta = json.loads((entry / "spec.json").read_text())
    key = Key(meta["name"], '[{"rope.cuh": "older"}, {}]', tuple(meta["options"]), "sm_50", meta["compiler"])
    spec = {**meta["spec"], "of_another_version": 1}
    KernelCache(tmp_path / "kernels").store(key, "text", DATA, spec)
    said = "1 of the cache's 3 kernels are another version's"
    assert jitrope("bundle write k.zip --json").data["cached"] == 2
    (tmp_path / "listing.json").write_text(jitrope("cache ls --json").stdout)
    assert caplog.text.count(said) == 2
    assert jitrope("prewarm --from listing.json --arch sm_50 --json").data["cached"] == 2
    assert jitrope("cache verify --cold --json").data["looked_up"] == 2
    (tmp_path / "run.json").write_text(json.dumps({"version": 1, "spec": [spec]}))  # so the kernel is needed
    done = jitrope("prewarm --from run.json --arch sm_50")
    assert done.returncode == 1
    assert "of_another_version" in done.stderr


def test_a_bundle_has_what_the_cache_has_and_serves_where_nothing_can_be_compiled(jitrope: Run, tmp_path: Path) -> None:
    """Also kernels of an architecture that no NVRTC knows."""
    victim, _ = stored(tmp_path / "kernels", specs_of(8))
    (tmp_path / "run.json").write_text(json.dumps(record_of(specs_of(8))))
    stored(tmp_path / "kernels", specs_of(40), "sm_52")
    dry = jitrope("bundle write k.zip --dry-run --json").data
    assert (dry["cached"], dry["would compile"]) == (6, 0)
    assert not (tmp_path / "k.zip").exists()
    assert jitrope("bundle write k.zip --json").data["cached"] == 6
    listed, bundled = (jitrope(f"{ls} --json").data["entries"] for ls in ("cache ls", "bundle ls k.zip"))
    assert {(x["name"], x["arch"]) for x in bundled} == {(x["name"], x["arch"]) for x in listed}
    dry = jitrope("bundle write k.zip --arch sm_52,sm_89 --dry-run --json").data
    assert (dry["cached"], dry["would compile"]) == (4, 6)  # five specs for two architectures
    (tmp_path / "more.json").write_text(json.dumps(record_of(specs_of(40))))
    dry = jitrope("bundle write l.zip --from run.json --from more.json --arch sm_50 --dry-run --json").data
    assert (dry["cached"], dry["would compile"]) == (2, 3)  # both files, each kernel once
    assert jitrope("bundle write l.zip --from run.json --arch sm_50 --json").data["cached"] == 2
    production = {"JITROPE_CACHE_DIR": str(tmp_path / "production"), "JITROPE_NO_COMPILE": "1"}
    assert len(jitrope("bundle load k.zip --json", **production).data["loaded"]) == 6
    for environment in (production, {"JITROPE_CACHE_DIR": "/none", "JITROPE_SYSTEM_CACHE": "k.zip"}):
        found = jitrope("cache verify --cold --json", **environment).data
        assert (found["looked_up"], found["missing"]) == (6, [])
    (victim / "kernel.cubin").write_bytes(b"")
    (tmp_path / "k.zip").unlink()
    failed = jitrope("bundle write k.zip")
    assert failed.returncode == 1
    assert str(victim) in failed.stderr
    assert not (tmp_path / "k.zip").exists()
