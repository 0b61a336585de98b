"""CuPy and NVRTC are found in any home, or what is missing or broken is named with its remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch

from jitrope.base.errors import CompileError
from jitrope.jit import compiler, kernels
from jitrope.jit.cache import KernelCache
from jitrope.jit.entry import pack, write_bundle
from jitrope.jit.render import Source
from jitrope.tools.prewarm import specs_of

from .. import fresh

SPEC = specs_of([32, 8])[0]


def test_the_key_has_the_nvrtc_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that pip installed: LD_PRELOAD, or CuPy for CUDA 12 beside torch for CUDA 13, loads another one."""
    monkeypatch.setattr(importlib.metadata, "version", lambda package: f"{package} of pip")
    real = compiler._nvrtc()
    other = types.SimpleNamespace(getVersion=lambda: (12, 4))
    for nvrtc, (major, minor) in ((real, real.getVersion()), (other, (12, 4))):
        monkeypatch.setattr(compiler, "_nvrtc", lambda nvrtc=nvrtc: nvrtc)
        compiler.compiler_version.cache_clear()
        found = kernels.key_of(SPEC, "sm_90").compiler
        assert found == f"cupy {compiler.import_cupy().__version__}, nvrtc {major}.{minor}"
    compiler.compiler_version.cache_clear()


def test_a_source_that_does_not_compile_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call needs the kernel and fails, with the same message; it keeps one file."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(compiler, "_refused", {})
    nvrtc, asked = compiler._nvrtc(), []
    counted = types.SimpleNamespace(**{name: getattr(nvrtc, name) for name in dir(nvrtc) if not name.startswith("__")})
    counted.compileProgram = lambda *arguments: asked.append(1) or nvrtc.compileProgram(*arguments)
    monkeypatch.setattr(compiler, "_nvrtc", lambda: counted)
    source, said = Source('#error "broken"\n', "f", "broken"), set()
    for _ in range(5):
        with pytest.raises(CompileError, match=r"broken for sm_90: (.*\n)*source: ") as caught:
            compiler.compile_source(source, "sm_90")
        said.add(str(caught.value))
    assert (len(said), len(asked), len([*tmp_path.iterdir()])) == (1, 1, 1)
    with pytest.raises(CompileError, match="broken for sm_80"):
        compiler.compile_source(source, "sm_80")  # another architecture may compile
    assert len(asked) == 2


def test_missing_cupy_names_the_packages(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (compiler.import_cupy, compiler._nvrtc, compiler.compiler_version):
        function.cache_clear()
    for cuda, packages in (("12.8", "cupy-cuda12x nvidia-cuda-nvrtc-cu12"), ("13.0", "cupy-cuda13x nvidia-cuda-nvrtc")):
        monkeypatch.setattr(kernels.torch.version, "cuda", cuda)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "cupy", None)
            with pytest.raises(CompileError, match=rf": pip install {packages}$"):
                kernels.build(SPEC, "sm_90")
    assert compiler.import_cupy()  # it has been installed in the meantime


FORKS = """
import json, os, sys
from pathlib import Path
from jitrope.base.errors import CompileError
from jitrope.jit import compiler, driver, kernels
from jitrope.tools import bundle, doctor
from jitrope.tools.prewarm import prewarm, specs_of
spec = specs_of(heads=[32, 8])[0]
for case in json.loads(sys.argv[1]):
    if os.fork() == 0:
        work(case)
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0
"""

COMPILE = """
def work(case):
    import tempfile
    os.environ.update(case["variables"])
    if case["nowhere"]:
        def nowhere(*_, **__):
            raise FileNotFoundError(2, "No usable temporary directory found")
        tempfile.TemporaryDirectory = tempfile.gettempdir = nowhere
    found = kernels.build(spec, "sm_90")
    from cupy.cuda import compiler
    kept = compiler._kernel_cache_backend._cache_dir        # the folder for a user's own CuPy kernels
    assert found.compiled and found.kept and os.path.isdir(kept), case
    assert os.environ.get("CUPY_CACHE_DIR") == case["variables"].get("CUPY_CACHE_DIR")
    print(kept)
"""


def test_compiling_with_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    """`import cupy` makes a folder in the home directory, fails if it cannot, and never changes the folder.

    A folder that the user chose is used, or another one if it cannot be made. The variable keeps its value.
    """
    (tmp_path / "file").touch()
    (tmp_path / "made").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".cupy").touch()  # a file in CuPy's place
    homes = {"/proc/missing": False, f"{tmp_path}/home": False, f"{tmp_path}/file/home": True, "~": True}
    cases = [{"variables": {"HOME": home}, "nowhere": nowhere} for home, nowhere in homes.items()]
    chosen = [f"{tmp_path}/made/x", f"{tmp_path}/file/x"]
    cases += [{"variables": {"CUPY_CACHE_DIR": folder}, "nowhere": False} for folder in chosen]
    for number, case in enumerate(cases):
        case["variables"]["JITROPE_CACHE_DIR"] = str(tmp_path / f"kernels{number}")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("CUPY", "JITROPE", "XDG"))}
    environment["PYTHONPATH"] = fresh.IMPORTS
    done = fresh.python("-c", COMPILE + FORKS, json.dumps(cases), env=environment, cwd=tmp_path, check=True)
    assert [folder in done.stdout.splitlines() for folder in chosen] == [True, False]
    assert len(done.stdout.splitlines()) == 6
    assert not (tmp_path / "~").exists()


CHANGED, CANNOT = "numpy.dtype size changed", "libcublas.so.13: cannot open"
BROKEN = {  # a cupy/__init__.py, and the cause that is named
    "numpy": (f"raise ValueError('{CHANGED}, may indicate binary incompatibility')", f"ValueError: {CHANGED}"),
    "library": (f"raise OSError('{CANNOT}')", f"OSError: {CANNOT}"),
    "attribute": ("", "has no attribute"),  # an interrupted install
}
ASK = """
def work(folder):
    sys.path.insert(0, folder)
    said = []
    for ask in (
        lambda: kernels.build(spec, "sm_90"),
        lambda: bundle.write(Path("kernels.zip"), [(spec, "sm_90")], 1),
    ):
        try:
            ask()
        except CompileError as error:
            said.append(str(error).splitlines()[-1])
    said.append(prewarm([spec], ["sm_90"], 1)[0].outcome)
    print(json.dumps([*said, *[f"{x.what}: {x.found}" for x in doctor.run() if not x.ok]]))
"""


def test_a_cupy_that_is_broken_is_one_error_with_its_cause(tmp_path: Path) -> None:
    """Each function that needs the compiler has the same error, each time. For `jitrope doctor` it is one fault."""
    for how, (text, _) in BROKEN.items():
        (tmp_path / how / "cupy").mkdir(parents=True)
        (tmp_path / how / "cupy" / "__init__.py").write_text(text)
    real = Path(importlib.util.find_spec("cupy").origin).parent
    shutil.copytree(real, tmp_path / "cut" / "cupy", copy_function=os.symlink)
    (core,) = (tmp_path / "cut" / "cupy" / "_core").glob("core.*.so")
    core.unlink()
    core.write_bytes(b"\x7fELF")  # a library that was cut
    causes = {how: cause for how, (_, cause) in BROKEN.items()} | {"cut": ".so: file too short"}
    folders = json.dumps([str(tmp_path / how) for how in causes])
    done = fresh.python("-c", ASK + FORKS, folders, cwd=tmp_path, check=True, JITROPE_CACHE_DIR=str(tmp_path / "empty"))
    assert done.stderr == ""
    for line, cause in zip(done.stdout.splitlines(), causes.values(), strict=True):
        first, *others = json.loads(line)
        assert len(others) == 3
        assert others[-1].startswith("compiler: ")
        assert all(first[first.index("jitrope compiles") :] in other for other in others)
        assert cause in first
        assert re.search(r": pip install cupy-cuda1[23]x nvidia\S+ --force-reinstall, and start Python again$", first)
        assert "cache folder" not in first


ALONE = """
sys.modules["cupy"] = sys.modules["cupy_backends"] = None  # importing one of them fails
found = kernels.build(spec, "sm_90")
assert not found.compiled
for make in (lambda: driver.Kernel(found.data, spec.entry, 0), lambda: kernels.build(spec, "sm_75")):
    try:
        make()
    except CompileError as error:
        print(error)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver, which loads the kernel")
def test_without_cupy_a_bundles_kernel_reaches_the_driver(tmp_path: Path) -> None:
    """The kernel is found, and what is missing is named: the driver; CuPy, only for a kernel that must be compiled."""
    key = kernels.key_of(SPEC, "sm_90")
    write_bundle(tmp_path / "k.zip", {key.portable_folder: pack(key, "text", b"\x7fELF cubin", SPEC.to_dict())})
    folders = {"JITROPE_CACHE_DIR": str(tmp_path / "k"), "JITROPE_SYSTEM_CACHE": str(tmp_path / "k.zip")}
    done = fresh.python("-c", FORKS + ALONE, "[]", check=True, **folders)
    driver, compiler = done.stdout.splitlines()
    assert "NVIDIA's driver cannot be loaded (libcuda.so.1" in driver or "cannot be loaded: CUDA_ERROR_" in driver
    assert compiler.startswith("jitrope compiles through CuPy, which cannot be imported")
