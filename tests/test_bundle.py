"""Bundles and read-only caches, for machines that cannot compile."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import site
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jitrope.base.errors import CacheError, CompileError
from jitrope.jit import compiler, kernels
from jitrope.jit.cache import KernelCache
from jitrope.jit.entry import CUBIN, FILES, META, TEXT, Key, pack, seal, write_bundle
from jitrope.tools import bundle
from jitrope.tools.prewarm import specs_of

from . import fresh
from .caches import COUNTED, DATA, KEY, ROOT, edit, filled, on_the_gpu
from .test_cli import jitrope as jitrope

SPECS = specs_of(heads=[32, 8])
ARCHS = ["sm_80", "sm_90"]
KERNELS = list(itertools.product(SPECS, ARCHS))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of two specs for two architectures."""
    folder = tmp_path_factory.mktemp("bundle")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JITROPE_CACHE_DIR", str(folder / "kernels"))
        outcomes = [built.outcome for built in bundle.write(folder / "kernels.zip", KERNELS, 2)]
    assert outcomes == ["compiled"] * 4
    return folder / "kernels.zip"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelCache:
    """The cache of this process, empty."""
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "kernels"))
    return kernels.kernel_cache()


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in (folder, *folder.rglob("*"))}


# ---- writing -------------------------------------------------------------------------------------


def test_what_is_in_a_bundle(written: Path) -> None:
    found = bundle.entries(written)
    assert {(e.name, e.arch) for e in found} == {(spec.name, arch) for spec in SPECS for arch in ARCHS}
    assert all(e.spec["head_dim"] == 128 for e in found)
    with zipfile.ZipFile(written) as file:
        members = file.infolist()
        metas = [json.loads(file.read(m)) for m in members if m.filename.endswith(META)]
    folders = [entry.path.name for entry in found]
    assert [m.filename for m in members] == [f"{name}/{file}" for name in folders for file in ("", *sorted(FILES))]
    assert folders == sorted(folders)
    for m in members:
        mode = 0o40755 if m.is_dir() else 0o100644
        assert (m.date_time, m.external_attr >> 16) == ((1980, 1, 1, 0, 0, 0), mode)
        assert m.compress_type == zipfile.ZIP_STORED
    assert len(folders) == len(metas) == 4
    assert all(meta["compiler"] == compiler.compiler_version() for meta in metas)
    assert all(len(digest) == 64 for meta in metas for digest in meta["sha256"].values())


def test_the_same_kernels_give_the_same_bytes(written: Path, cache: KernelCache, tmp_path: Path, monkeypatch) -> None:
    """The order of the kernels does not matter, nor whether they are compiled or found in a cache."""
    for name, made in (("a.zip", KERNELS[::-1]), ("b.zip", KERNELS * 2)):
        bundle.write(tmp_path / name, made, 1)
        assert (tmp_path / name).read_bytes() == written.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.zip", "b.zip", "kernels"]
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "a.zip" / "kernels"))  # no folder can be made there
    bundle.write(tmp_path / "c.zip", KERNELS, 1)
    assert (tmp_path / "c.zip").read_bytes() == written.read_bytes()


def test_a_bundle_has_the_kernels_that_were_named_and_no_other(cache: KernelCache, tmp_path: Path) -> None:
    """A bundle may have one kernel for sm_80 and another for sm_90, not each for both."""
    named = [(SPECS[1], "sm_90"), (SPECS[0], "sm_80"), (SPECS[1], "sm_90")]
    built = bundle.write(tmp_path / "a.zip", iter(named), 2)
    assert [(b.spec, b.arch) for b in built] == named[:2]
    assert {(e.name, e.arch) for e in bundle.entries(tmp_path / "a.zip")} == {(s.name, a) for s, a in named}
    assert len(list(cache.entries())) == 2


def test_a_bundle_is_its_owners_to_write_whatever_the_umask(cache: KernelCache, tmp_path: Path, monkeypatch) -> None:
    """Otherwise `JITROPE_SYSTEM_CACHE` would refuse the new bundle."""
    before = os.umask(0o002)
    try:
        bundle.write(tmp_path / "a.zip", KERNELS[1:2], 1)
    finally:
        os.umask(before)
    assert (tmp_path / "a.zip").stat().st_mode & 0o777 == 0o644
    monkeypatch.setenv("JITROPE_SYSTEM_CACHE", str(tmp_path / "a.zip"))
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "empty"))
    assert not kernels.build(SPECS[0], "sm_90").compiled


def test_a_bundle_that_would_lack_a_kernel_is_not_written(cache: KernelCache, tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_text("before")
    with pytest.raises(CompileError, match="2 of 4 kernels are missing") as caught:
        bundle.write(tmp_path / "a.zip", itertools.product(SPECS, ["sm_90", "sm_20"]), 1)
    assert str(caught.value).count(" sm_20 and 1 more: ") == 1
    with pytest.raises(CacheError, match="no kernels to bundle"):
        bundle.write(tmp_path / "a.zip", [], 1)
    os.mkfifo(tmp_path / "pipe")  # a device would be replaced by a file
    (tmp_path / "stdout").symlink_to("pipe")
    for path in ("no/a.zip", "a.zip/b.zip", ".", "x" * 300, "pipe", "stdout"):
        with pytest.raises(CacheError, match=rf"^cannot write {tmp_path / path}: .*$"):
            bundle.write(tmp_path / path, KERNELS[1:2], 1)
    assert (tmp_path / "a.zip").read_text() == "before"
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "stdout").is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.zip", "kernels", "pipe", "stdout"]


def test_a_link_to_a_bundle_stays_a_link(cache: KernelCache, tmp_path: Path) -> None:
    (tmp_path / "current.zip").symlink_to("1.zip")
    bundle.write(tmp_path / "current.zip", KERNELS[:1], 1)
    assert (tmp_path / "current.zip").is_symlink()
    assert (tmp_path / "1.zip").is_file()


# ---- loading -------------------------------------------------------------------------------------


def test_a_bundle_may_be_replaced_while_a_process_uses_it(cache: KernelCache, tmp_path: Path, monkeypatch) -> None:
    """A process without a compiler finds the kernels of both bundles, which lie at other places in the new one."""
    bundle.write(tmp_path / "live.zip", KERNELS[2:3], 1)
    bundle.write(tmp_path / "new.zip", KERNELS, 1)
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("JITROPE_SYSTEM_CACHE", str(tmp_path / "live.zip"))
    monkeypatch.setenv("JITROPE_NO_COMPILE", "1")
    assert not kernels.build(*KERNELS[2]).compiled
    os.replace(tmp_path / "new.zip", tmp_path / "live.zip")
    assert not any(kernels.build(*kernel).compiled for kernel in KERNELS)


HOSTILE = "\x1b[31mred \x1b]0;title\x07 \x9b31m\u202e"
"""Text that colours a terminal, renames its window and reverses its text."""


@pytest.mark.parametrize(
    "fields",
    [
        {"name": HOSTILE},
        {"name": ["a"]},
        {"arch": HOSTILE},
        {"arch": 90},
        {"spec": [1]},
        {"format": HOSTILE},
    ],
    ids=str,
)
@pytest.mark.parametrize("command", ["bundle ls", "cache ls", "doctor"])
def test_nothing_of_a_hostile_bundle_reaches_the_terminal(jitrope, tmp_path: Path, fields: dict, command: str) -> None:
    files = pack(KEY, "text", DATA, {})
    meta = {**json.loads(files[META]), **fields}
    files[META] = json.dumps({**meta, "seal": seal(meta)}).encode()
    write_bundle(tmp_path / "hostile.zip", {KEY.folder: files})
    is_bundle = command.startswith("bundle")
    if not is_bundle:
        KernelCache(tmp_path / "kernels").install(KEY.folder, files)
    done = jitrope(*command.split(), *(["hostile.zip"] if is_bundle else []), JITROPE_SYSTEM_CACHE="hostile.zip")
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert all(c.isprintable() or c == "\n" for c in said)
    if is_bundle:
        assert done.stderr.startswith("error: cannot read the bundle hostile.zip: ")


def test_load_puts_kernels_into_the_cache(written: Path, cache: KernelCache, monkeypatch) -> None:
    monkeypatch.setenv("JITROPE_NO_COMPILE", "1")
    loaded = bundle.load(written)
    assert {e.path for e in loaded} == {e.path for e in cache.entries()}
    assert cache.verify() == (4, [])
    for spec in SPECS:
        assert kernels.build(spec, "sm_90").data.startswith(b"\x7fELF")
    assert len(bundle.load(written)) == 4  # a second time
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
    assert len(cache.clear()) == 4


def no_nvrtc() -> str:
    raise CompileError("NVRTC cannot be loaded")


def test_own_kernels_come_before_loaded_ones(cache: KernelCache) -> None:
    cache.install(KEY.portable_folder, pack(KEY, "text", DATA + b"loaded", {}))
    assert cache.find(KEY) == DATA + b"loaded"
    filled(cache)
    assert cache.find(KEY) == DATA


def test_a_damaged_loaded_kernel_is_a_miss(written: Path, cache: KernelCache) -> None:
    for entry in bundle.load(written):
        (entry.path / CUBIN).write_bytes(b"")
    assert kernels.build(SPECS[0], "sm_90").compiled
    assert len(bundle.load(written)) == 4
    assert cache.verify() == (5, [])


def test_a_newer_bundles_kernel_takes_an_older_ones_place(cache: KernelCache, tmp_path: Path) -> None:
    """Both kernels have the same source but different compilers. The kernel that `load` returns is in the cache."""
    for name in ("old", "new"):
        files = pack(replace(KEY, compiler=name), "text", DATA + name.encode(), {})
        write_bundle(tmp_path / f"{name}.zip", {KEY.portable_folder: files})
    for name in ("old", "new", "old"):
        (entry,) = bundle.load(tmp_path / f"{name}.zip")
        assert json.loads((entry.path / META).read_text())["compiler"] == name
        assert (entry.path / CUBIN).read_bytes() == DATA + name.encode()
        assert cache.find(KEY) == DATA + name.encode()
        assert cache.verify() == (1, [])
    before = entry.path.stat().st_ino
    bundle.load(tmp_path / "old.zip")
    assert entry.path.stat().st_ino == before  # an equal entry is kept


def test_a_cache_that_cannot_be_written_is_an_error_here(written: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    with pytest.raises(CacheError, match="cannot write the kernel cache"):
        bundle.load(written)


# ---- files that are not whole bundles ------------------------------------------------------------

Members = dict[str, bytes]


def rewritten(written: Path, path: Path, change: Callable[[Members], object]) -> Path:
    """Write the bundle with changed members."""
    with zipfile.ZipFile(written) as file:
        members = {name: file.read(name) for name in file.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


def put(members: Members, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file of the first kernel."""
    members[f"{kernels_of(members)[0]}/{name}"] = change(members[f"{kernels_of(members)[0]}/{name}"])


def kernels_of(members: Members) -> list[str]:
    return sorted({name.split("/")[0] for name in members})


def rename_kernels(members: Members, names: dict[str, str]) -> None:
    for name in [*members]:
        folder, _, file = name.partition("/")
        members[f"{names.get(folder, folder)}/{file} "] = members.pop(name)
    for name in [*members]:
        members[name.rstrip()] = members.pop(name)


def exchange_kernels(members: Members) -> None:
    """Two whole kernels, each in the folder of the other."""
    first, *_, last = kernels_of(members)
    rename_kernels(members, {first: last, last: first})


ALIEN = "x-sm_90-" + "0" * 20 + "-any/kernel.cubin"
CHANGES: dict[str, Callable[[Members], object]] = {
    "a file less": lambda m: m.popitem(),
    "nothing": lambda m: m.clear(),
    "a kernel of another format": lambda m: put(m, META, lambda data: data.replace(b'"format": 3', b'"format": 9')),
    "no JSON": lambda m: put(m, META, lambda data: b"{"),
    "a list": lambda m: put(m, META, lambda data: b"[]"),
    "cubin changed": lambda m: put(m, CUBIN, lambda data: data[:-1] + b"x"),
    "cubin cut": lambda m: put(m, CUBIN, lambda data: data[:-1]),
    "text changed": lambda m: put(m, TEXT, lambda data: data + b"x"),
    "a part of a kernel": lambda m: m.setdefault(ALIEN, b"x"),
    "kernels exchanged": exchange_kernels,
    "all kernels outside of the folder": lambda m: rename_kernels(m, {x: f"../{x}" for x in kernels_of(m)}),
}


@pytest.mark.parametrize("how", CHANGES)
def test_anything_else_is_refused_and_nothing_is_written(written, cache, tmp_path, monkeypatch, how: str) -> None:
    path = rewritten(written, tmp_path / "changed.zip", CHANGES[how])
    with pytest.raises(CacheError, match=r"changed\.zip"):
        bundle.load(path)
    with pytest.raises(CacheError, match=r"changed\.zip"):
        bundle.entries(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["changed.zip"]
    layered = KernelCache(cache.root, (path,))  # as a layer, every kernel that is found is right, and nothing is raised
    for spec in SPECS:
        key = kernels.key_of(spec, "sm_90")
        assert layered.find(key) in (None, bundle_bytes(written, key))


MORE = ["setup.py", "../kernel.cubin", "/tmp/kernel.cubin", "../folder/", "x-any/kernel.cubin"]


def test_files_of_no_kernel_are_never_read(written: Path, cache: KernelCache, tmp_path: Path) -> None:
    """Folders may be missing, as after `zip -D`, and kernels may have more files."""

    def files_and_more(members: Members) -> None:
        for folder in kernels_of(members):
            del members[f"{folder}/"]
            members[f"{folder}/notes"] = members[f"{folder}/../../kernel.cu"] = b"x"
        members.update(dict.fromkeys(MORE, b"x"))

    path = rewritten(written, tmp_path / "a.zip", files_and_more)
    assert [e.name for e in bundle.entries(path)] == [e.name for e in bundle.entries(written)]
    assert {entry.path.parent for entry in bundle.load(path)} == {cache.root}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.zip", "kernels"]
    assert len(list(cache.root.iterdir())) == 4


def bundle_bytes(written: Path, key: Key) -> bytes:
    with zipfile.ZipFile(written) as file:
        return file.read(f"{key.portable_folder}/{CUBIN}")


def test_no_bundle_is_used_truncated_or_with_a_flipped_bit(written: Path, cache: KernelCache, tmp_path: Path) -> None:
    whole = written.read_bytes()
    (tmp_path / "a.zip").write_bytes(whole)
    want = {e.path.name: e.size for e in bundle.entries(tmp_path / "a.zip")}
    key = kernels.key_of(SPECS[0], "sm_90")
    cubin = bundle_bytes(written, key)
    step = len(whole) // 60
    damaged = [whole[:length] for length in range(0, len(whole) - step, step)]
    flips = [*range(0, 2000, 37), *range(0, len(whole), step)]
    damaged += [whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :] for i in flips]
    refused = 0
    for data in damaged:
        (tmp_path / "a.zip").write_bytes(data)
        assert KernelCache(cache.root, (tmp_path / "a.zip",)).find(key) in (None, cubin)
        try:
            assert {e.path.name: e.size for e in bundle.entries(tmp_path / "a.zip")} == want  # only a date was changed
        except CacheError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("data", [b"", b"x" * 100_000, b"PK\x03\x04" + b"x" * 1000, bytes(10240)])
def test_a_file_that_is_no_zip_is_refused(cache: KernelCache, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.zip").write_bytes(data)
    with pytest.raises(CacheError, match=r"a\.zip"):
        bundle.load(tmp_path / "a.zip")
    with pytest.raises(CacheError, match="No such file"):
        bundle.load(tmp_path / "b.zip")


# ---- a system cache ------------------------------------------------------------------------------


def unpacked(written: Path, folder: Path) -> Path:
    with zipfile.ZipFile(written) as file:
        file.extractall(folder)
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
            assert found.data.startswith(b"\x7fELF")
            assert (found.compiled, found.kept) == (False, True)
    with pytest.raises(CompileError, match=f"is not in .*{layer.name}"):
        kernels.build(replace(SPECS[0], vec=4), "sm_90")
    with pytest.raises(CompileError, match="for sm_89 is not in"):
        kernels.build(SPECS[0], "sm_89")
    assert not cache.root.exists()
    assert snapshot(layer.parent if layer.is_file() else layer) == before


def test_a_system_caches_kernels_can_be_bundled_again(written, cache, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("JITROPE_SYSTEM_CACHE", str(written))
    monkeypatch.setattr(compiler, "compiler_version", no_nvrtc)
    assert [built.outcome for built in bundle.write(tmp_path / "a.zip", KERNELS, 1)] == ["cached"] * 4
    assert (tmp_path / "a.zip").read_bytes() == written.read_bytes()


def test_layers_are_asked_in_order(tmp_path: Path) -> None:
    """The user's own cache comes first, then the system caches in order. Here each has other bytes."""
    layers = [KernelCache(tmp_path / name) for name in "abc"]
    for cache in layers[1:]:
        cache.store(KEY, "text", DATA + cache.root.name.encode(), {})
    found = KernelCache(tmp_path / "a", tuple(cache.root for cache in layers[1:]))
    assert found.find(KEY) == DATA + b"b"
    assert found.find(replace(KEY, compiler="other")) == DATA + b"b"
    filled(layers[0])
    assert found.find(KEY) == DATA
    layers[1].clear()
    layers[0].clear()
    assert found.find(KEY) == DATA + b"c"


def test_of_several_compilers_the_same_one_is_taken(tmp_path: Path) -> None:
    layer = KernelCache(tmp_path / "layer")
    for version in ("a", "b", "c"):
        layer.store(replace(KEY, compiler=version), "text", DATA + version.encode(), {})
    cache = KernelCache(tmp_path / "own", (layer.root,))
    for version in ("a", "b", "c"):
        assert cache.find(replace(KEY, compiler=version)) == DATA + version.encode()
    assert cache.find(replace(KEY, compiler="d")) is not None


@pytest.mark.skipif(shutil.which("unzip") is None, reason="there is no unzip program")
@pytest.mark.parametrize("mask", ["002", "000", "077"])
def test_what_unzip_unpacks_is_used_whatever_the_umask(written, cache, tmp_path, mask: str) -> None:
    """Users with their own group have the umask 002. They protect the outer folder themselves."""
    layer = tmp_path / "layer"
    layer.mkdir(mode=0o755)
    command = f"umask {mask} && unzip -q {written} -d {layer}"
    subprocess.run(["sh", "-c", command], check=True)
    layered = KernelCache(cache.root, (layer,))
    for kernel in KERNELS:
        assert layered.find(kernels.key_of(*kernel)) is not None
    assert layered.system[0].verify() == (4, [])


@pytest.mark.parametrize("kind", LAYERS)
def test_what_is_in_a_layer_and_whether_it_is_whole(written, tmp_path, kind: str) -> None:
    layer = LAYERS[kind](written, tmp_path)
    (system,) = KernelCache(tmp_path / "own", (layer,)).system
    assert system.entries() == (bundle.entries(layer) if kind == "bundle" else KernelCache(layer).entries())
    assert len(system.entries()) == 4
    assert system.verify() == (4, [])


def test_a_damaged_entry_of_a_layer_is_said_once_and_left(written, cache, tmp_path, caplog) -> None:
    layer = unpacked(written, tmp_path / "layer")
    first, second, third, fourth = sorted(layer.iterdir())
    (first / CUBIN).write_bytes(b"")
    (second / TEXT).unlink()
    edit(third, "format", 1)
    (fourth / META).chmod(0o646)
    layered = KernelCache(cache.root, (layer,))
    for _ in range(2):
        assert [layered.find(kernels.key_of(*kernel)) for kernel in KERNELS] == [None] * 4
    assert len([r for r in caplog.records if "is not usable" in r.message]) == 4
    good, bad = layered.system[0].verify()
    assert (good, [path for path, _ in bad]) == (0, [first, second, fourth])  # the third is another version's
    assert "checksum" in bad[0][1]
    assert "can be written by other users" in bad[2][1]
    assert (first / CUBIN).exists()


UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "No such file"),
    "others may write it": (lambda path: (path.mkdir(), path.chmod(0o777)), "can be written by other users"),
    "no bundle": (lambda path: path.write_text("x" * 1000), "cannot read the bundle"),
    "a bundle that the group may write": (lambda path: (path.touch(), path.chmod(0o664)), "can be written by other"),
    "a pipe": (os.mkfifo, "is not a file"),
    "a link to itself": (lambda path: path.symlink_to(path), "symbolic links"),
}


@pytest.mark.parametrize("how", UNUSABLE)
def test_a_layer_that_cannot_be_used_is_said_once_and_is_one_bad_item(tmp_path: Path, how: str, caplog) -> None:
    make, reason = UNUSABLE[how]
    make(tmp_path / "layer")
    cache = KernelCache(tmp_path / "own", (tmp_path / "layer",))
    assert cache.find(KEY) is cache.find(KEY) is None
    assert len([r for r in caplog.records if "is not used" in r.message]) == 1
    good, ((path, said),) = cache.system[0].verify()
    assert (good, path) == (0, tmp_path / "layer")
    assert reason in said


# ---- without a compiler --------------------------------------------------------------------------

OFFLINE = """
import os, sys
from pathlib import Path
from jitrope.tools import bundle
from jitrope.jit import compiler, kernels
from jitrope.base.errors import CompileError
from jitrope.tools.prewarm import specs_of
spec = specs_of(heads=[32, 8])[0]
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
    assert found.data.startswith(b"\\x7fELF") and not found.compiled
assert not kernels.compiled
"""


@pytest.fixture(scope="module")
def no_nvrtc_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed packages without NVIDIA's, so without NVRTC and headers."""
    folder = tmp_path_factory.mktemp("site")
    for packages in site.getsitepackages():
        for path in Path(packages).iterdir() if Path(packages).is_dir() else ():
            if not path.name.startswith("nvidia") and path.suffix != ".pth" and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch for CUDA is not imported without NVIDIA's packages")
def test_a_machine_without_nvrtc_runs_from_a_bundle(written, tmp_path, no_nvrtc_site) -> None:
    """The bundle is written on one machine and used on another, which cannot compile."""
    environment = {**os.environ, "JITROPE_CACHE_DIR": str(tmp_path / "k"), "PYTHONNOUSERSITE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(no_nvrtc_site)])
    command = [sys.executable, "-S", "-c", OFFLINE, str(written)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


NO_CUPY = """
import sys
sys.modules["cupy"] = sys.modules["cupy_backends"] = None  # importing one of them fails
"""
DRIVER_ALONE = """
from jitrope.base.errors import CompileError
from jitrope.jit import driver, kernels
from jitrope.tools.prewarm import specs_of
spec = specs_of(heads=[32, 8])[0]
found = kernels.build(spec, "sm_90")
assert found.data.startswith(b"\\x7fELF") and not found.compiled
try:
    driver.Kernel(found.data, spec.entry, 0)
except CompileError as error:
    print(error)
try:
    kernels.build(spec, "sm_75")
except CompileError as error:
    print(error)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver, which loads the kernel")
def test_without_cupy_a_bundles_kernel_reaches_the_driver(written: Path, tmp_path: Path) -> None:
    """The kernel is found, and what is missing is named: the driver; CuPy, only for a kernel that must be compiled."""
    environment = {**os.environ, "JITROPE_CACHE_DIR": str(tmp_path / "k"), "PYTHONPATH": str(ROOT)}
    environment["JITROPE_SYSTEM_CACHE"] = str(written)
    done = fresh.python("-c", NO_CUPY + DRIVER_ALONE, env=environment)
    assert done.returncode == 0, done.stderr
    driver, compiler = done.stdout.splitlines()
    assert "NVIDIA's driver cannot be loaded (libcuda.so.1" in driver or "cannot be loaded: CUDA_ERROR_" in driver
    assert compiler.startswith("jitrope compiles through CuPy, which cannot be imported")


@pytest.mark.gpu
@pytest.mark.hardware
def test_a_gpu_without_cupy_runs_from_a_bundle(tmp_path: Path) -> None:
    """Calls in two threads, a gradient and a CUDA graph, with the bits of a process that compiles."""
    calls = """
import hashlib, threading
from jitrope.jit import kernels
def bits(x):
    return hashlib.sha256(bytes(x.detach().cpu().view(torch.uint8).flatten().tolist())).hexdigest()
seen = [bits(call())]
thread = threading.Thread(target=lambda: seen.append(bits(call())))
thread.start(); thread.join()
leaf = q.clone().requires_grad_()
out, _ = jitrope.apply_rope(leaf, None, cos, sin)
seen += [bits(out), bits(torch.autograd.grad(out.float().square().sum(), leaf)[0])]
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured, _ = jitrope.apply_rope(q, None, cos, sin)
graph.replay()
torch.cuda.synchronize()
seen.append(bits(captured))
print(*seen, len(kernels.compiled) > 0)
"""
    write = """
from pathlib import Path
from jitrope.base.spec import spec_from_dict
from jitrope.tools import bundle
specs = [spec_from_dict(entry.spec) for entry in kernels.kernel_cache().entries()]
bundle.write(Path(r"%s"), [(spec, kernels.arch_of(0)) for spec in specs], 1)
""" % (tmp_path / "kernels.zip")
    made = on_the_gpu(calls + write, tmp_path / "made").split()
    alone = {"JITROPE_NO_COMPILE": "1", "JITROPE_SYSTEM_CACHE": str(tmp_path / "kernels.zip")}
    used = on_the_gpu(NO_CUPY + calls, tmp_path / "used", **alone).split()
    assert made.pop() == "True"
    assert used.pop() == "False"
    assert used == made
    assert len(set(used)) == 2  # the rotated tensor, and the gradient


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["load", "system"])
def test_a_gpu_runs_from_a_bundle_with_nothing_compiled(tmp_path: Path, how: str) -> None:
    code = """
from pathlib import Path
from jitrope.tools import bundle
from jitrope.jit import kernels
from jitrope.base.spec import spec_from_dict
call()
specs = [spec_from_dict(entry.spec) for entry in kernels.kernel_cache().entries()]
bundle.write(Path(r"%s"), [(spec, kernels.arch_of(0)) for spec in specs], 1)
""" % (tmp_path / "kernels.zip")
    on_the_gpu(code, tmp_path / "made")
    hidden = """
from jitrope.tools import bundle
from jitrope.jit import compiler
from jitrope.base.errors import CompileError
def nothing(*_, **__):
    raise CompileError("there is no NVRTC")
compiler._nvrtc = compiler.compiler_version = nothing
"""
    environment = {"JITROPE_NO_COMPILE": "1"}
    if how == "load":
        hidden += f"from pathlib import Path\nbundle.load(Path(r'{tmp_path / 'kernels.zip'}'))\n"
    else:
        environment["JITROPE_SYSTEM_CACHE"] = str(tmp_path / "kernels.zip")
    assert on_the_gpu(hidden + COUNTED, tmp_path / "used", **environment) == "0 1"
