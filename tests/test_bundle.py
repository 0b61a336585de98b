"""Kernels in a file, and read-only caches below the user's own: what machines that cannot compile run from."""

from __future__ import annotations

import io
import json
import os
import site
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jitrope import bundle, compiler, kernels
from jitrope.archive import MANIFEST
from jitrope.cache import KernelCache
from jitrope.entry import CUBIN, Key, seal
from jitrope.errors import CacheError, CompileError
from jitrope.prewarm import Call

from .test_cache import COUNTED, DATA, KEY, ROOT, filled, on_the_gpu

SPECS = Call(40).specs()
ARCHS = ["sm_80", "sm_90"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of two specs for two architectures."""
    folder = tmp_path_factory.mktemp("bundle")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JITROPE_CACHE_DIR", str(folder / "kernels"))
        outcomes = [built.outcome for built in bundle.write(folder / "kernels.tar", SPECS, ARCHS, 2)]
    assert outcomes == ["compiled"] * 4
    return folder / "kernels.tar"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelCache:
    """The process's cache, empty."""
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "kernels"))
    return kernels.kernel_cache()


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in (folder, *folder.rglob("*"))}


# ---- writing -------------------------------------------------------------------------------------


def test_what_is_in_a_bundle(written: Path) -> None:
    found = bundle.entries(written)
    assert {(e.name, e.arch) for e in found} == {(spec.name, arch) for spec in SPECS for arch in ARCHS}
    assert all(e.compiler == compiler.compiler_version() and e.spec["head_dim"] == 128 for e in found)
    with tarfile.open(written) as tar:
        members = tar.getmembers()
        manifest = json.load(tar.extractfile(MANIFEST))
    assert members[0].name == MANIFEST
    assert [m.name for m in members[1:]] == sorted(m.name for m in members[1:])
    assert all((m.mtime, m.uid, m.gid, m.uname, m.mode, m.isreg()) == (0, 0, 0, "", 0o644, True) for m in members)
    assert len(manifest["kernels"]) == 4
    assert all(len(digest) == 64 for files in manifest["kernels"].values() for digest in files.values())


def test_the_same_kernels_give_the_same_bytes(written: Path, cache: KernelCache, tmp_path: Path) -> None:
    """Compiled anew, in another order, from a cache."""
    for name, specs in (("a.tar", SPECS[::-1]), ("b.tar", SPECS * 2)):
        bundle.write(tmp_path / name, specs, ARCHS[::-1], 1)
        assert (tmp_path / name).read_bytes() == written.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tar", "b.tar", "kernels"]


def test_a_bundle_is_written_without_a_cache(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    bundle.write(tmp_path / "a.tar", SPECS, ARCHS, 1)
    assert (tmp_path / "a.tar").read_bytes() == written.read_bytes()


def test_a_bundle_is_its_owners_to_write_whatever_the_umask(cache: KernelCache, tmp_path: Path, monkeypatch) -> None:
    """Else `JITROPE_SYSTEM_CACHE` would refuse what has just been written."""
    before = os.umask(0o002)
    try:
        bundle.write(tmp_path / "a.tar", SPECS[:1], ["sm_90"], 1)
    finally:
        os.umask(before)
    assert (tmp_path / "a.tar").stat().st_mode & 0o777 == 0o644
    monkeypatch.setenv("JITROPE_SYSTEM_CACHE", str(tmp_path / "a.tar"))
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "empty"))
    assert not kernels.build(SPECS[0], "sm_90").compiled


def test_a_bundle_that_would_lack_a_kernel_is_not_written(cache: KernelCache, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_text("before")
    seen = []
    with pytest.raises(CompileError, match="2 of 4 kernels are missing") as caught:
        bundle.write(tmp_path / "a.tar", SPECS, ["sm_90", "sm_20"], 1, seen.append)
    assert "sm_20" in str(caught.value)
    assert [built.failed for built in seen].count(True) == 2
    with pytest.raises(CacheError, match="nothing to bundle"):
        bundle.write(tmp_path / "a.tar", [], ARCHS, 1)
    with pytest.raises(CacheError, match="cannot write the bundle"):
        bundle.write(tmp_path / "no" / "a.tar", SPECS[:1], ["sm_90"], 1)
    assert (tmp_path / "a.tar").read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tar", "kernels"]


# ---- loading -------------------------------------------------------------------------------------


def test_load_puts_kernels_into_the_cache(written: Path, cache: KernelCache, monkeypatch) -> None:
    monkeypatch.setenv("JITROPE_NO_COMPILE", "1")
    loaded = bundle.load(written)
    assert {e.path for e in loaded} == {e.path for e in cache.entries()}
    assert cache.verify() == (4, [])
    for spec in SPECS:
        assert kernels.build(spec, "sm_90").path.read_bytes().startswith(b"\x7fELF")
    assert len(bundle.load(written, cache)) == 4  # again
    assert cache.verify() == (4, [])
    with pytest.raises(CompileError, match="compiling is forbidden"):
        kernels.build(SPECS[0], "sm_120")


def test_loaded_kernels_serve_beside_any_compiler_and_are_not_pruned(written, cache, monkeypatch) -> None:
    for entry in bundle.load(written):
        os.utime(entry.path, (1, 1))
    assert KernelCache(cache.root).prune(0) == []
    for version in (lambda: "cupy 99, nvrtc 99", no_nvrtc):
        monkeypatch.setattr(compiler, "compiler_version", version)
        assert not kernels.build(SPECS[0], "sm_90").compiled
    assert cache.clear() == 4


def no_nvrtc() -> str:
    raise CompileError("NVRTC cannot be loaded")


def test_own_kernels_come_before_loaded_ones(written: Path, cache: KernelCache) -> None:
    own = kernels.build(SPECS[0], "sm_90")
    bundle.load(written)
    found = kernels.build(SPECS[0], "sm_90").path
    assert not found.parent.name.endswith("-any")
    assert found.read_bytes() == own.data


def test_a_damaged_loaded_kernel_is_a_miss(written: Path, cache: KernelCache) -> None:
    for entry in bundle.load(written):
        (entry.path / CUBIN).write_bytes(b"")
    assert kernels.build(SPECS[0], "sm_90").compiled
    assert len(bundle.load(written)) == 4
    assert cache.verify() == (5, [])


def test_a_cache_that_cannot_be_written_is_an_error_here(written: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="cannot write the kernel cache"):
        bundle.load(written, KernelCache(tmp_path / "file" / "kernels"))


# ---- files that are not bundles, or not whole ones ------------------------------------------------

Members = list[tuple[tarfile.TarInfo, bytes]]


def rewritten(written: Path, path: Path, change: Callable[[Members], object]) -> Path:
    """The bundle with other members."""
    with tarfile.open(written) as tar:
        members = [(m, tar.extractfile(m).read()) for m in tar.getmembers()]
    change(members)
    with tarfile.open(path, "w") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def member(
    name: str, data: bytes = b"x", type: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = type, link
    return info, data if type == tarfile.REGTYPE else b""


def put(members: Members, at: int, data: bytes) -> None:
    members[at] = members[at][0], data


def first_kernel(members: Members) -> str:
    return members[1][0].name.split("/")[0]


def rename_kernel(members: Members) -> None:
    """A whole kernel under another's name, with a manifest that says so."""
    first, last = first_kernel(members), members[-1][0].name.split("/")[0]
    text = members[0][1].decode()
    manifest = json.loads(text)
    kernel = manifest["kernels"]
    kernel[first], kernel[last] = kernel[last], kernel[first]
    manifest["seal"] = seal(manifest)
    members[0] = (members[0][0], json.dumps(manifest).encode())
    for info, _ in members[1:]:
        folder, name = info.name.split("/")
        info.name = f"{ {first: last, last: first}.get(folder, folder) }/{name}"


ALIEN = "x-sm_90-" + "0" * 20 + "-any/kernel.cubin"
CHANGES: dict[str, Callable[[Members], object]] = {
    "out of the folder": lambda m: m.append(member("../evil-sm_90-" + "0" * 20 + "-any/kernel.cubin")),
    "absolute": lambda m: m.append(member("/tmp/kernel.cubin")),
    "foreign file": lambda m: m.append(member("setup.py")),
    "foreign file in a kernel": lambda m: m.append(member(f"{first_kernel(m)}/evil.so")),
    "folder": lambda m: m.append(member("folder", type=tarfile.DIRTYPE)),
    "symbolic link": lambda m: m.append(member(ALIEN, b"", tarfile.SYMTYPE, "/x")),
    "hard link": lambda m: m.append(member(ALIEN, b"", tarfile.LNKTYPE, "/x")),
    "device": lambda m: m.append(member(ALIEN, b"", tarfile.CHRTYPE)),
    "kernel of no manifest": lambda m: m.append(member(ALIEN)),
    "twice": lambda m: m.append(m[1]),
    "a file less": lambda m: m.pop(),
    "no manifest": lambda m: m.pop(0),
    "nothing": lambda m: m.clear(),
    "manifest of another format": lambda m: put(m, 0, m[0][1].replace(b'"format": 2', b'"format": 9')),
    "manifest changed": lambda m: put(m, 0, m[0][1].replace(b"any", b"amy", 1)),
    "manifest no JSON": lambda m: put(m, 0, b"{"),
    "manifest a list": lambda m: put(m, 0, b"[]"),
    "cubin changed": lambda m: put(m, 2, m[2][1][:-1] + b"x"),
    "cubin cut": lambda m: put(m, 2, m[2][1][:-1]),
    "text changed": lambda m: put(m, 1, m[1][1] + b"x"),
    "kernels exchanged": rename_kernel,
}  # fmt: skip


@pytest.mark.parametrize("how", CHANGES)
def test_anything_else_is_refused_and_nothing_is_written(written, cache, tmp_path, monkeypatch, how: str) -> None:
    path = rewritten(written, tmp_path / "changed.tar", CHANGES[how])
    with pytest.raises(CacheError, match=r"changed\.tar"):
        bundle.load(path)
    with pytest.raises(CacheError, match=r"changed\.tar"):
        bundle.entries(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["changed.tar"]
    layered = KernelCache(cache.root, (path,))  # as a layer: what is found is right, and nothing is raised
    for spec in SPECS:
        key = kernels.key_of(spec, "sm_90")
        found = layered.find(key)
        assert found is None or found == bundle_bytes(written, key)


def bundle_bytes(written: Path, key: Key) -> bytes:
    with tarfile.open(written) as tar:
        return tar.extractfile(f"{key.portable_folder}/{CUBIN}").read()


def test_no_bundle_is_used_truncated_or_with_a_flipped_bit(written: Path, cache: KernelCache, tmp_path: Path) -> None:
    whole = written.read_bytes()
    (tmp_path / "a.tar").write_bytes(whole)
    want = {e.path.name: e.size for e in bundle.entries(tmp_path / "a.tar")}
    key = kernels.key_of(SPECS[0], "sm_90")
    cubin = bundle_bytes(written, key)
    step = len(whole) // 60
    damaged = [whole[:length] for length in range(0, len(whole) - step, step)]
    flips = [*range(0, 2000, 37), *range(0, len(whole), step)]
    damaged += [whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :] for i in flips]
    refused = 0
    for data in damaged:
        (tmp_path / "a.tar").write_bytes(data)
        assert KernelCache(cache.root, (tmp_path / "a.tar",)).find(key) in (None, cubin)
        try:
            assert {e.path.name: e.size for e in bundle.entries(tmp_path / "a.tar")} == want  # padding was hit
        except CacheError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("data", [b"", b"x" * 100_000, b"\x1f\x8b" + b"x" * 1000, bytes(10240)])
def test_a_file_that_is_no_tar_is_refused(cache: KernelCache, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(CacheError, match=r"a\.tar"):
        bundle.load(tmp_path / "a.tar")
    with pytest.raises(CacheError, match="No such file"):
        bundle.load(tmp_path / "b.tar")


# ---- a system cache ------------------------------------------------------------------------------


def unpacked(written: Path, folder: Path) -> Path:
    with tarfile.open(written) as tar:
        tar.extractall(folder, filter="data") if hasattr(tarfile, "data_filter") else tar.extractall(folder)
    return folder


LAYERS: dict[str, Callable[[Path, Path], Path]] = {
    "bundle": lambda written, tmp: written,
    "unpacked": lambda written, tmp: unpacked(written, tmp / "unpacked"),
    "another cache": lambda written, tmp: written.parent / "kernels",
}


@pytest.mark.parametrize("how", LAYERS)
def test_a_system_cache_is_found_by_what_its_kernels_are_made_from(written, cache, tmp_path, monkeypatch, how) -> None:
    layer = LAYERS[how](written, tmp_path)
    before = snapshot(layer.parent if layer.is_file() else layer)
    monkeypatch.setenv("JITROPE_SYSTEM_CACHE", str(layer))
    monkeypatch.setenv("JITROPE_NO_COMPILE", "1")
    for version in (compiler.compiler_version, lambda: "cupy 99, nvrtc 99", no_nvrtc):
        monkeypatch.setattr(compiler, "compiler_version", version)
        for spec in SPECS:
            found = kernels.build(spec, "sm_90")
            data = found.data if found.path is None else found.path.read_bytes()
            assert data.startswith(b"\x7fELF")
            assert not found.compiled
            assert found.kept
    with pytest.raises(CompileError, match=f"is not in .*{layer.name}"):
        kernels.build(replace(SPECS[0], vec=4), "sm_90")
    with pytest.raises(CompileError, match="for sm_89 is not in"):
        kernels.build(SPECS[0], "sm_89")
    assert not cache.root.exists()
    assert snapshot(layer.parent if layer.is_file() else layer) == before


def test_a_system_caches_kernels_can_be_bundled_again(written, cache, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("JITROPE_SYSTEM_CACHE", str(written))
    monkeypatch.setattr(compiler, "compiler_version", no_nvrtc)
    assert [built.outcome for built in bundle.write(tmp_path / "a.tar", SPECS, ARCHS, 1)] == ["cached"] * 4
    assert (tmp_path / "a.tar").read_bytes() == written.read_bytes()


def test_layers_are_asked_in_order(tmp_path: Path) -> None:
    """The user's own, then the first of the system's; each with bytes of its own here."""
    layers = [KernelCache(tmp_path / name) for name in "abc"]
    for cache in layers[1:]:
        cache.store(KEY, "text", DATA + cache.root.name.encode(), {})
    found = KernelCache(tmp_path / "a", tuple(cache.root for cache in layers[1:]))
    assert found.find(KEY) == tmp_path / "b" / KEY.folder / CUBIN
    assert found.find(replace(KEY, compiler="other")) == tmp_path / "b" / KEY.folder / CUBIN
    filled(layers[0])
    assert found.find(KEY) == tmp_path / "a" / KEY.folder / CUBIN
    assert (found.counts.hits, found.counts.misses) == (3, 0)
    layers[1].discard(KEY)
    layers[0].discard(KEY)
    fresh = KernelCache(tmp_path / "a", (tmp_path / "b", tmp_path / "c"))
    assert fresh.find(KEY) == tmp_path / "c" / KEY.folder / CUBIN


def test_of_several_compilers_the_same_one_is_taken(tmp_path: Path) -> None:
    layer = KernelCache(tmp_path / "layer")
    for version in ("a", "b", "c"):
        layer.store(replace(KEY, compiler=version), "text", DATA + version.encode(), {})
    cache = KernelCache(tmp_path / "own", (layer.root,))
    for version in ("a", "b", "c"):
        assert cache.find(replace(KEY, compiler=version)).read_bytes() == DATA + version.encode()
    assert cache.find(replace(KEY, compiler="d")) is not None


FAULTS: dict[str, Callable[[Path], object]] = {
    "others may write it": lambda path: path.chmod(0o777),
    "it is missing": lambda path: path.rename(path.with_name("elsewhere")),
}


@pytest.mark.parametrize("kind", ["bundle", "folder"])
@pytest.mark.parametrize("how", FAULTS)
def test_a_system_cache_that_cannot_be_trusted_is_not_used(written, cache, tmp_path, caplog, kind, how) -> None:
    layer = tmp_path / "layer"
    if kind == "bundle":
        layer.write_bytes(written.read_bytes())
    else:
        unpacked(written, layer)
    FAULTS[how](layer)
    layered = KernelCache(cache.root, (layer,))
    for arch in ARCHS:
        assert layered.find(kernels.key_of(SPECS[0], arch)) is None
    assert len([r for r in caplog.records if "is not used" in r.message]) == 1


def test_a_damaged_entry_of_a_system_cache_is_said_and_left(written, cache, tmp_path, caplog) -> None:
    layer = unpacked(written, tmp_path / "layer")
    for path in layer.glob(f"*/{CUBIN}"):
        path.write_bytes(b"")
    layered = KernelCache(cache.root, (layer,))
    key = kernels.key_of(SPECS[0], "sm_90")
    assert layered.find(key) is layered.find(key) is None
    assert len(caplog.records) == 1
    assert "is not usable" in caplog.text
    assert (layer / key.portable_folder / CUBIN).exists()


# ---- without a compiler, for real ----------------------------------------------------------------

OFFLINE = """
import os, sys
from pathlib import Path
from jitrope import bundle, compiler, kernels
from jitrope.errors import CompileError
from jitrope.prewarm import Call
spec = Call(40).specs()[0]
try:
    compiler.nvrtc_version()
except CompileError:
    pass
else:
    raise SystemExit("there is NVRTC after all")
try:
    kernels.build(spec, "sm_90")
except CompileError:
    pass
else:
    raise SystemExit("compiled without a compiler")
for how in ("system", "load"):
    os.environ["JITROPE_SYSTEM_CACHE"] = sys.argv[1] if how == "system" else ""
    if how == "load":
        bundle.load(Path(sys.argv[1]))
    found = kernels.build(spec, "sm_90")
    assert (found.path is None) == (how == "system")
    data = found.data or found.path.read_bytes()
    assert data.startswith(b"\\x7fELF") and not found.compiled
assert not kernels.compiled
"""


@pytest.fixture(scope="module")
def no_nvrtc_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed packages, but for NVIDIA's: so there is no NVRTC and no header."""
    folder = tmp_path_factory.mktemp("site")
    for packages in site.getsitepackages():
        for path in Path(packages).iterdir() if Path(packages).is_dir() else ():
            if not path.name.startswith("nvidia") and path.suffix != ".pth" and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch for CUDA is not imported without NVIDIA's packages")
def test_a_machine_without_nvrtc_runs_from_a_bundle(written, tmp_path, no_nvrtc_site) -> None:
    """Warm on one machine, used on another: nothing is compiled, because nothing could."""
    environment = {**os.environ, "JITROPE_CACHE_DIR": str(tmp_path / "k"), "PYTHONNOUSERSITE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(no_nvrtc_site)])
    command = [sys.executable, "-S", "-c", OFFLINE, str(written)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["load", "system"])
def test_a_gpu_runs_from_a_bundle_with_nothing_compiled(tmp_path: Path, how: str) -> None:
    code = """
from pathlib import Path
from jitrope import bundle, kernels
from jitrope.thd_spec import spec_from_dict
call()
specs = [spec_from_dict(entry.spec) for entry in kernels.kernel_cache().entries()]
bundle.write(Path(r"%s"), specs, [kernels.arch_of(0)], 1)
""" % (tmp_path / "kernels.tar")
    on_the_gpu(code, tmp_path / "made")
    hidden = """
from jitrope import bundle, compiler
from jitrope.errors import CompileError
def nothing(*_, **__):
    raise CompileError("there is no NVRTC")
compiler._nvrtc = compiler.compiler_version = nothing
"""
    environment = {"JITROPE_NO_COMPILE": "1"}
    if how == "load":
        hidden += f"from pathlib import Path\nbundle.load(Path(r'{tmp_path / 'kernels.tar'}'))\n"
    else:
        environment["JITROPE_SYSTEM_CACHE"] = str(tmp_path / "kernels.tar")
    assert on_the_gpu(hidden + COUNTED, tmp_path / "used", **environment) == "0 1"
