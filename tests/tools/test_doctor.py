"""`jitrope doctor` names each fault of a machine, with its remedy."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import Mock

import pytest
import torch

from jitrope.base import config
from jitrope.jit import compiler, kernels, render
from jitrope.tools import doctor
from jitrope.tools.prewarm import specs_of

from .. import fresh
from ..caches import run_in_child
from .conftest import Run, stored


def status(done: CompletedProcess[str], what: str) -> tuple[bool, str, str]:
    """(ok, found, advice) of a check."""
    report = json.loads(done.stdout)
    assert report["ok"] == (done.returncode == 0) == all(check["ok"] for check in report["checks"])
    (check,) = (check for check in report["checks"] if check["what"] == what)
    return check["ok"], check["found"], check["advice"]


def test_doctor(jitrope: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = jitrope("doctor --json", JITROPE_CACHE_DR="/x")
    assert done.returncode == 0, done.stdout
    checks = [check["what"] for check in json.loads(done.stdout)["checks"]]
    assert checks == ["jitrope", "torch", "GPU", "compiler", "kernel cache", "variables", "kernel"]
    assert status(done, "GPU")[2].startswith("CPU tensors use plain torch")
    assert re.fullmatch(r"cupy 14\..*, nvrtc 1\d\.\d+, for CUDA 1\d; .*sm_90", status(done, "compiler")[1])
    assert "JITROPE_CACHE_DR is unknown" in status(done, "variables")[1]
    assert "jitrope reads JITROPE_CACHE_DIR" in status(done, "variables")[2]
    done = jitrope("doctor")
    assert done.stdout.endswith("\njitrope works here\n")
    assert re.search(r"^note  GPU  .*\n +to do: CPU tensors use plain torch", done.stdout, re.MULTILINE)


def test_doctor_of_amds_gpus(jitrope: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for ROCm shows them as CUDA GPUs. No NVIDIA architecture is made up for them."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 4))
    done = jitrope("doctor --json")
    ok, found, advice = status(done, "GPU")
    assert (done.returncode, ok, found) == (1, False, "torch is built for ROCm 6.4")
    assert advice.startswith("AMD GPUs are not supported; calls need an NVIDIA GPU")
    assert status(done, "compiler")[0]
    assert status(done, "kernel")[0]
    assert jitrope("doctor").stdout.endswith("\nfaults: GPU\n")
    assert "there is no GPU here" in jitrope("prewarm --heads 8").stderr


UNWRITABLE = "cannot be written", "set JITROPE_CACHE_DIR"
FAULTY = [(None, "Not a directory", "remove it"), *((to, *UNWRITABLE) for to in ("nowhere", "/proc/jitrope"))]


@pytest.mark.parametrize(("target", "text", "advice"), FAULTY)
def test_doctor_of_a_faulty_cache_folder(jitrope: Run, tmp_path: Path, target: str | None, text: str, advice: str):
    (tmp_path / "kernels").symlink_to(target) if target else (tmp_path / "kernels").touch()
    done = jitrope("doctor --json")
    found = status(done, "kernel cache")
    assert (done.returncode, found[0]) == (1, False)
    assert text in found[1]
    assert advice in found[2]


AS_OTHERS_MAY = "import ctypes, os, sys; os.geteuid() or ctypes.CDLL(None).prctl(24, 1, 0, 0, 0); "
AS_OTHERS_MAY += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
"""A file's mode restricts root too once CAP_DAC_OVERRIDE (1) is removed from the bounding set (24)."""


@pytest.mark.slow
def test_doctor_of_a_read_only_folder_of_kernels(tmp_path: Path) -> None:
    """An image may contain its kernels in a read-only folder. That is a fault only if kernels have to be stored."""
    folder = tmp_path / "kernels"
    stored(folder, specs_of(8))
    folder.chmod(0o555)
    for changes, good in (
        ({"JITROPE_CACHE_DIR": str(folder)}, True),
        ({"JITROPE_CACHE_DIR": f"{folder}/none", "JITROPE_NO_COMPILE": "1"}, True),
        ({"JITROPE_CACHE_DIR": f"{folder}/none"}, False),
    ):
        environment = {**os.environ, "PYTHONPATH": fresh.IMPORTS, "CUDA_VISIBLE_DEVICES": "", **changes}
        command = [sys.executable, "-c", AS_OTHERS_MAY, "-m", "jitrope", "doctor", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        found = status(done, "kernel cache")
        assert "cannot be written (Permission denied)" in found[1]
        assert found[0] == good
    folder.chmod(0o755)


def test_doctor_of_a_full_disk(jitrope: Run) -> None:
    """A limit on the size of files acts like a disk that is too full for a kernel."""

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        found = status(jitrope("doctor --json"), "kernel cache")
        assert not found[0]
        assert "File too large" in found[1]

    assert run_in_child(work) == 0


def test_doctor_of_damaged_kernels_and_of_system_caches(jitrope: Run, tmp_path: Path) -> None:
    victim, _ = stored(tmp_path / "kernels", specs_of(8))
    jitrope("bundle write k.zip")
    layer = {"JITROPE_SYSTEM_CACHE": str(tmp_path / "k.zip")}
    (victim / "kernel.cubin").write_bytes(b"")
    done = jitrope("doctor --json", **layer)
    assert done.returncode == 0  # not a fault: the next call makes the kernel again
    assert "1 kernels, 1 damaged" in status(done, "kernel cache")[1]
    assert victim.name in status(done, "kernel cache")[1]
    assert status(done, "system cache") == (True, f"{tmp_path}/k.zip, 2 kernels", "")
    (tmp_path / "k.zip").write_bytes(b"no zip")
    found = status(jitrope("doctor --json", **layer), "system cache")
    assert not found[0]
    assert "cannot read the bundle" in found[1]


def test_doctor_where_its_kernel_is_in_no_cache(jitrope: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU a call needs no kernel, so the call is replaced by one that does. The next test uses a GPU."""
    missing = specs_of(6, 64)[0], "sm_90"
    call = Mock(side_effect=lambda *_: (config.configure(compile=False), kernels.build(*missing)))
    monkeypatch.setattr(doctor, "apply_rope", call)
    done = jitrope("doctor --json", JITROPE_NO_COMPILE="1")
    assert done.returncode == 0
    assert status(done, "kernel")[1] == "not there, and compiling is forbidden"


@pytest.mark.gpu
def test_doctor_of_a_gpu_that_nothing_may_be_compiled_for(tmp_path: Path) -> None:
    said = []
    for word in ("1", "", "1"):  # the second call stores the kernel
        variables = {"JITROPE_NO_COMPILE": word, "JITROPE_CACHE_DIR": str(tmp_path / "k")}
        done = fresh.python("-m", "jitrope", "doctor", "--json", **variables)
        said.append((done.returncode, status(done, "kernel")[1]))
    works = 0, "a call on the GPU gives the reference's bits"
    assert said == [(0, "not there, and compiling is forbidden"), works, works]


@pytest.mark.gpu
def test_without_cupy_a_gpu_has_no_compiler_and_no_kernel(tmp_path: Path) -> None:
    code = "import sys; sys.modules['cupy'] = None; from jitrope.tools.cli import main; main()"  # as if not installed
    done = fresh.python("-c", code, "doctor", "--json", JITROPE_CACHE_DIR=str(tmp_path / "k"))
    assert [x["what"] for x in json.loads(done.stdout)["checks"] if not x["ok"]] == ["compiler", "kernel"]
    for what in ("compiler", "kernel"):
        assert status(done, what)[1].endswith(compiler.install())


def test_doctor_of_missing_templates(jitrope: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(next(filter(Path.is_dir, render.TEMPLATE_PATHS)), tmp_path / "templates")
    (tmp_path / "templates" / "vec.cuh").unlink()
    monkeypatch.setattr(render, "TEMPLATE_PATHS", [tmp_path / "templates"])
    for caches in (render._texts, render.environment):
        monkeypatch.setattr(render, caches.__name__, cache(caches.__wrapped__))  # empty ones
    found = status(jitrope("doctor --json"), "compiler")
    assert not found[0]
    assert "vec.cuh is missing" in found[1]
    assert "install jitrope again" in found[1]


def test_doctor_of_two_cupys(jitrope: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "more" / "cupy_cuda11x-14.2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cupy-cuda11x\nVersion: 14.2.0\n")
    monkeypatch.syspath_prepend(tmp_path / "more")
    found = status(jitrope("doctor --json"), "compiler")
    assert not found[0]
    assert re.search(r"cupy-cuda11x and cupy-cuda1[23]x are installed", found[1])
    assert re.match(r"pip uninstall -y cupy-cuda11x cupy-cuda1[23]x && pip install cupy-cuda1[23]x nvidia", found[2])
    last = jitrope("doctor").stdout.splitlines()[-1]
    assert last == "faults: compiler"


def test_doctor_of_a_torch_for_another_cuda(jitrope: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    major = compiler.cuda_major()
    monkeypatch.setattr(torch.version, "cuda", f"{25 - major}.8")  # 12 beside 13, 13 beside 12
    found = status(jitrope("doctor --json"), "compiler")
    assert found[0]
    assert f"for CUDA {major}; a kernel compiles for sm_90; but torch is for CUDA {25 - major}.8" in found[1]
    assert found[2] == f"pip uninstall -y cupy-cuda{major}x && {compiler.install(25 - major)}"


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch for CUDA needs these libraries")
@pytest.mark.parametrize("missing", ["nvidia*", "cupy*"])
def test_without_nvrtc_or_cupy_and_without_a_gpu(tmp_path: Path, missing: str) -> None:
    """CPU tensors need no CuPy: it is a note. An image that only loads kernels needs no NVRTC."""
    (tmp_path / "site").mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not path.match(missing):
            (tmp_path / "site" / path.name).symlink_to(path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([fresh.IMPORTS, str(tmp_path / "site")])}
    environment |= {"JITROPE_CACHE_DIR": str(tmp_path / "k"), "COLUMNS": "150"}

    start = [sys.executable, "-S", "-m", "jitrope"]  # without the folder of packages
    run = lambda *words, **changes: subprocess.run(  # noqa: E731
        [*start, *words], capture_output=True, text=True, env={**environment, **changes}, cwd=tmp_path
    )
    doctor, prewarm = run("doctor", "--json"), ("prewarm", "--heads", "8", "--arch", "sm_90")
    ok, found, advice = status(doctor, "compiler")
    done = run(*prewarm)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    if missing == "nvidia*":
        remedy = compiler.install(compiler.cuda_major())
        assert not ok
        assert "cannot be loaded" in found
        assert found.endswith(remedy)
        assert remedy in done.stderr
        assert status(run("doctor", "--json", JITROPE_NO_COMPILE="1"), "compiler")[0]
        return
    assert doctor.returncode == 0
    assert "needed only to compile kernels" in found
    assert advice == compiler.install()
    assert advice in done.stderr
    assert status(doctor, "kernel") == (True, "a call on the CPU gives the reference's bits", "")
    assert run("doctor").stdout.endswith("\njitrope works here\n")
    done = run(*prewarm, "--dry-run")
    text = "bshd heads q > rotate cos sin rotary_dim=128 > fresh"
    assert f"would compile  sm_90   rope bf16 d128 halves forward grid 2d: {text}\n" in done.stdout
    assert done.stdout.endswith("\n2 would compile, 0 cached, 0 failed\n")
    assert (done.returncode, done.stderr) == (0, "")
