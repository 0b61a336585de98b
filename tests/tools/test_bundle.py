"""Bundles are written whole, with the same bytes of the same kernels, and loaded on machines that cannot compile."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from jitrope.base.errors import CacheError, CompileError
from jitrope.jit import compiler, kernels
from jitrope.jit.cache import KernelCache
from jitrope.jit.entry import CUBIN, META, pack, read_bundle, seal, write_bundle
from jitrope.tools import bundle
from jitrope.tools.prewarm import specs_of

from ..caches import DATA, KEY, no_nvrtc
from .conftest import Run, stored

SPECS, ARCHS = specs_of(heads=[32, 8]), ("sm_80", "sm_90")
KERNELS = [*itertools.product(SPECS, ARCHS)]


@pytest.fixture
def written(cache: KernelCache, tmp_path: Path) -> Path:
    """A bundle of `KERNELS`, which lie in no cache any more."""
    stored(cache.root, SPECS, *ARCHS)
    assert [built.outcome for built in bundle.write(tmp_path / "k.zip", KERNELS, 2)] == ["cached"] * len(KERNELS)
    cache.clear()
    return tmp_path / "k.zip"


def test_what_is_in_a_bundle(written: Path) -> None:
    found = bundle.entries(written)
    assert {(e.name, e.arch) for e in found} == {(spec.name, arch) for spec, arch in KERNELS}
    assert all(e.spec["head_dim"] == 128 for e in found)
    metas = [json.loads(files[META]) for files in read_bundle(written).values()]
    assert {meta["compiler"] for meta in metas} == {compiler.compiler_version()}


def test_the_same_kernels_give_the_same_bytes(cache: KernelCache, tmp_path: Path, monkeypatch) -> None:
    """The order of the kernels does not matter, nor whether they are compiled, or found in a cache or a bundle."""
    some = KERNELS[1:3]  # a kernel for each architecture
    for name, made, outcome in (("a", some, "compiled"), ("b", some[::-1], "cached"), ("c", some * 2, "cached")):
        built = bundle.write(tmp_path / name, iter(made), 2)
        assert [(x.spec, x.arch, x.outcome) for x in built] == [(*kernel, outcome) for kernel in made[:2]]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c", "kernels"]
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "a" / "kernels"))  # no folder can be made there
    bundle.write(tmp_path / "d", some, 1)
    monkeypatch.setenv("JITROPE_SYSTEM_CACHE", str(tmp_path / "a"))
    monkeypatch.setattr(compiler, "compiler_version", no_nvrtc)
    assert [built.outcome for built in bundle.write(tmp_path / "e", some, 1)] == ["cached"] * 2
    assert len({(tmp_path / name).read_bytes() for name in "abcde"}) == 1


def test_a_bundle_is_its_owners_to_write_whatever_the_umask(cache: KernelCache, tmp_path: Path, monkeypatch) -> None:
    """Otherwise `JITROPE_SYSTEM_CACHE` would refuse the new bundle."""
    stored(cache.root, SPECS, *ARCHS)
    (tmp_path / "current.zip").symlink_to("a.zip")  # which stays a link
    before = os.umask(0o002)
    try:
        bundle.write(tmp_path / "current.zip", KERNELS[1:2], 1)
    finally:
        os.umask(before)
    assert (tmp_path / "current.zip").is_symlink()
    assert (tmp_path / "a.zip").stat().st_mode & 0o777 == 0o644
    monkeypatch.setenv("JITROPE_SYSTEM_CACHE", str(tmp_path / "a.zip"))
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "empty"))
    assert not kernels.build(*KERNELS[1]).compiled


def test_a_bundle_that_would_lack_a_kernel_is_not_written(cache: KernelCache, tmp_path: Path) -> None:
    stored(cache.root, SPECS, *ARCHS)
    (tmp_path / "a.zip").write_text("before")
    with pytest.raises(CompileError, match="4 of 8 kernels are missing") as caught:
        bundle.write(tmp_path / "a.zip", itertools.product(SPECS, ["sm_90", "sm_20"]), 1)
    assert str(caught.value).count(" sm_20 and 3 more: ") == 1
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


def test_load_puts_kernels_into_the_cache(written: Path, cache: KernelCache, monkeypatch) -> None:
    """They serve beside any compiler, and are not pruned."""
    monkeypatch.setenv("JITROPE_NO_COMPILE", "1")
    for _ in range(2):
        assert {e.path for e in bundle.load(written)} == {e.path for e in cache.entries()}
        assert cache.verify() == (len(KERNELS), [])
    for version in (compiler.compiler_version, lambda: "cupy 99, nvrtc 99", no_nvrtc):
        monkeypatch.setattr(compiler, "compiler_version", version)
        assert [kernels.build(*kernel).data for kernel in KERNELS] == [DATA] * len(KERNELS)
    with pytest.raises(CompileError, match="compiling is forbidden"):
        kernels.build(SPECS[0], "sm_120")
    for entry in cache.entries():
        os.utime(entry.path, (1, 1))
    assert KernelCache(cache.root).prune(0) == []
    assert len(cache.clear()) == len(KERNELS)


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


HOSTILE = "\x1b[31mred \x1b]0;title\x07 \x9b31m\u202e"
"""Text that colours a terminal, renames its window and reverses its text."""
FIELDS = [{"name": HOSTILE}, {"name": ["a"]}, {"arch": HOSTILE}, {"arch": 90}, {"spec": [1]}, {"format": HOSTILE}]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_nothing_of_a_hostile_bundle_reaches_the_terminal(jitrope: Run, tmp_path: Path, fields: dict) -> None:
    files = pack(KEY, "text", DATA, {})
    meta = {**json.loads(files[META]), **fields}
    files[META] = json.dumps({**meta, "seal": seal(meta)}).encode()
    write_bundle(tmp_path / "hostile.zip", {KEY.folder: files})
    KernelCache(tmp_path / "kernels").install(KEY.folder, files)
    for command in ("bundle ls hostile.zip", "cache ls", "doctor"):
        done = jitrope(*command.split(), JITROPE_SYSTEM_CACHE="hostile.zip", JITROPE_NO_COMPILE="1")
        said = done.stdout + done.stderr
        assert done.returncode == 1
        assert "Traceback" not in said
        assert all(c.isprintable() or c == "\n" for c in said)
        if command.startswith("bundle"):
            assert done.stderr.startswith("error: cannot read the bundle hostile.zip: ")
