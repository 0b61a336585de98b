"""Kernels on disk are whole, or they are not there; a disk fault is a miss; only jitrope's own files are removed."""

from __future__ import annotations

import errno
import itertools
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jitrope.base import config
from jitrope.base.errors import CacheError
from jitrope.jit.cache import KernelCache
from jitrope.jit.entry import CUBIN, FILES, META, TEXT, pack, write_bundle

from ..caches import DATA, KEY, edit, fault, filled, run_in_child

HOUR = 3600


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_round_trip(cache: KernelCache, mask: int) -> None:
    """The umask decides who may read an entry; nobody else may write it."""
    assert cache.read(KEY) is None
    before = os.umask(mask)
    try:
        path = filled(cache)
    finally:
        os.umask(before)
    assert cache.read(KEY)[CUBIN] == cache.find(KEY) == path.read_bytes() == DATA
    assert sorted(p.name for p in path.parent.iterdir()) == ["kernel.cu", "kernel.cubin", "spec.json"]
    assert path.parent.name.startswith("rope_x-sm_90-")
    assert (cache.root.stat().st_mode & 0o777) == 0o700
    for file in (path.parent, *path.parent.iterdir()):
        assert (file.stat().st_mode & 0o777) == (0o755 if file.is_dir() else 0o644) & ~mask
    (found,) = cache.entries()
    assert (found.path, found.name, found.arch, found.spec) == (path.parent, "rope_x", "sm_90", {"a": 1})
    assert found.size == sum(file.stat().st_size for file in path.parent.iterdir())
    assert KernelCache(cache.root / "of" / "folders").store(KEY, "text", DATA, {"a": 1})  # that are not yet there
    shutil.rmtree(cache.root / "of")
    (cache.root.parent / "link").symlink_to(cache.root)  # ~/.cache may be a link to another disk
    assert KernelCache(cache.root.parent / "link").find(KEY) == DATA
    assert cache.store(KEY, "text", DATA, {"a": 1})  # as if another process had been faster: its entry is kept
    assert [p.name for p in cache.root.iterdir()] == [KEY.folder]


def instead(folder: Path, make: Callable[[Path], object], name: str = "") -> None:
    """Put something else in place of the folder or of one of its files."""
    path = folder / name if name else folder
    elsewhere = folder.parent.parent / "elsewhere"
    elsewhere.unlink() if elsewhere.is_file() else None
    path.rename(elsewhere)
    make(path)


OTHER = pack(replace(KEY, ingredients="other"), "text", DATA, {})
DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda folder: (folder / CUBIN).write_bytes(DATA[:-2]),
    "no cubin": lambda folder: (folder / CUBIN).unlink(),
    "foreign spec": lambda folder: (folder / META).write_text("[1, 2]"),
    "binary spec": lambda folder: (folder / META).write_bytes(bytes(range(256))),
    "deep spec": lambda folder: (folder / META).write_text("[" * 100_000),
    "old format": lambda folder: edit(folder, "format", 0),
    "changed spec": lambda folder: edit(folder, "spec", {"a": 2}),
    "another entry": lambda folder: [(folder / name).write_bytes(data) for name, data in OTHER.items()],
    "folder as a file": lambda folder: instead(folder, Path.touch),
    "folder as a link": lambda folder: instead(folder, lambda path: path.symlink_to("../elsewhere")),
    "folder as a dangling link": lambda folder: instead(folder, lambda path: path.symlink_to("nowhere")),
    "empty folder": lambda folder: instead(folder, Path.mkdir),
    "cubin as a folder": lambda folder: instead(folder, Path.mkdir, CUBIN),
    "cubin as a link": lambda folder: instead(folder, lambda path: path.symlink_to("../../elsewhere"), CUBIN),
    "cubin as a pipe": lambda folder: instead(folder, os.mkfifo, CUBIN),
    "spec as a link to itself": lambda folder: instead(folder, lambda path: path.symlink_to(META), META),
    "cubin that others may write": lambda folder: (folder / CUBIN).chmod(0o666),
    "folder that others may write": lambda folder: folder.chmod(0o777),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_entry_is_a_miss_said_once_and_rebuilt(cache: KernelCache, how: str, caplog) -> None:
    DAMAGE[how](filled(cache).parent)
    with caplog.at_level(logging.WARNING, "jitrope"):
        assert [cache.read(KEY) for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    assert "is not usable" in caplog.text
    shutil.rmtree(cache.root.parent / "elsewhere", ignore_errors=True)
    DAMAGE[how](filled(cache).parent)
    filled(cache)  # also if it was damaged between the look-up and the end of the compile
    assert cache.find(KEY) == DATA
    assert cache.verify() == (1, [])
    assert [p.name for p in cache.root.iterdir()] == [KEY.folder]


@pytest.mark.parametrize("name", FILES)
def test_no_file_is_used_truncated_or_with_a_flipped_bit(cache: KernelCache, name: str) -> None:
    whole = (filled(cache).parent / name).read_bytes()
    step = max(1, len(whole) // 25)
    damaged = [whole[:length] for length in range(0, len(whole), step)]
    damaged += [whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :] for i in range(0, len(whole), step)]
    damaged += [whole + b"x", bytes(len(whole))]
    for data in damaged:
        path = filled(cache).parent / name
        path.write_bytes(data)
        assert [reason for _, reason in cache.verify()[1]]
        assert cache.read(KEY) is None
    assert len(damaged) > 8


@pytest.mark.parametrize(("before", "work"), [("empty", "store"), ("damaged", "load and store"), ("there", "clear")])
def test_kill_9_at_any_step_leaves_no_half_entry(cache: KernelCache, monkeypatch, before: str, work: str) -> None:
    """A kernel that is found afterwards is whole, and the next store works."""
    for at in range(1, 60):
        cache.clear()
        if before != "empty":
            filled(cache)
        if before == "damaged":
            DAMAGE["truncated"](cache.root / KEY.folder)
        used = KernelCache(cache.root)
        with monkeypatch.context() as patch:
            fault(patch, at, "mkdir open rename unlink rmdir", lambda: os.kill(os.getpid(), signal.SIGKILL))
            status = run_in_child(used.clear if work == "clear" else lambda: used.read(KEY) or filled(used))  # noqa: B023
        again = KernelCache(cache.root)
        if before != "damaged":
            assert again.verify()[1] == []
        assert again.find(KEY) in (None, DATA)
        assert again.read(KEY) or again.store(KEY, "text", DATA, {})
        assert again.find(KEY) == DATA
        assert again.verify() == (1, [])
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert 3 < at < 59


@pytest.mark.slow
def test_readers_beside_a_writer_never_see_half_an_entry(cache: KernelCache) -> None:
    keys, found = [replace(KEY, ingredients=str(n)) for n in range(5)], 0

    def write() -> None:
        for n in itertools.count():
            cache.store(keys[n % 5], "t" * 10_000, b"c" * 100_000, {})
            if n % 5 == 2:
                cache.clear()

    writer, deadline = multiprocessing.get_context("fork").Process(target=write), time.monotonic() + 1.5
    writer.start()
    while time.monotonic() < deadline:
        for key in keys:
            files = cache.read(key)
            found += files is not None
            assert files is None or files[CUBIN] == b"c" * 100_000
    writer.kill()
    writer.join()
    assert found > 20
    assert KernelCache(cache.root).verify()[1] == []


FAULTS = ["ENOSPC", "EROFS", "EACCES", "EIO", "ESTALE", "EBUSY", "ENOENT", "EMFILE", "ENOTEMPTY", "cleared"]


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_at_any_step_of_a_store_is_only_a_warning(cache: KernelCache, monkeypatch, what: str, caplog) -> None:
    """An error, or another process that clears the folder. A rename is tried again."""
    strike = cache.clear if what == "cleared" else OSError(getattr(errno, what), "said")
    for at in range(1, 40):
        cache.clear()
        used = KernelCache(cache.root)
        caplog.clear()
        monkeypatch.setattr(config, "_warned", set())  # as in a new process
        with monkeypatch.context() as patch:
            calls = fault(patch, at, "mkdir open rename", strike)
            stored = used.store(KEY, "text", DATA, {})
        assert stored or calls[at - 1] != "rename"
        assert used.store(KEY, "text", DATA, {})  # the fault is over
        assert len([r for r in caplog.records if "stay in memory" in r.message]) == (not stored)
        assert KernelCache(cache.root).find(KEY) == DATA
        assert [p.name for p in cache.root.iterdir()] == [KEY.folder]
        if len(calls) < at:
            break
    assert 5 < at < 39


@pytest.mark.parametrize("number", ["EIO", "ESTALE", "EBUSY", "ENOENT", "EMFILE", "EACCES"])
def test_an_error_at_any_step_of_a_load_is_a_miss(cache: KernelCache, monkeypatch, number: str) -> None:
    """On a network a file may vanish or become stale between two calls. A temporary error removes nothing."""
    for at in range(1, 40):
        filled(cache)
        with monkeypatch.context() as patch:
            error = OSError(getattr(errno, number), "said", "kernel.cubin")
            calls = fault(patch, at, "open lstat fstat stat", error)
            found = cache.find(KEY)
        if len(calls) < at:
            break
        assert found in (None, DATA)
        if number in ("EIO", "ESTALE", "EBUSY", "EMFILE"):
            assert cache.read(KEY) is not None
    assert at > 4


def test_a_folder_without_write_permission_is_read(tmp_path: Path, caplog) -> None:
    """A user other than root has a folder of mode 0555."""
    tmp_path.chmod(0o755)
    root = Path("kernels")
    (tmp_path / root).mkdir()

    def work() -> None:
        os.chdir(tmp_path)  # the other user may be unable to enter the folders above
        if os.getuid() == 0:
            os.chown(root, 12345, 12345)
            os.setuid(12345)
        cache = KernelCache(root)
        path = filled(cache)
        root.chmod(0o555)
        assert cache.find(KEY) == DATA
        for arch in ("sm_80", "sm_89"):
            assert not cache.store(replace(KEY, arch=arch), "text", b"x", {})
        assert len(caplog.records) == 1
        DAMAGE["truncated"](path.parent)  # it cannot be removed, but it is still a miss
        assert cache.read(KEY) is None
        assert not cache.store(KEY, "text", DATA, {})
        root.chmod(0o755)

    assert run_in_child(work) == 0


DEAD = f".tmp-{0:032x}"
"""The name of a temporary folder of a store."""
OF_THE_USER = [
    *("api/spec.json", "api/kernel.cubin", "api/src/main.c", "kernel.cubin", "notes", ".tmp-mine/notes"),
    *(f"{KEY.stem}/spec.json", f"{KEY.folder}.bak/spec.json", f".{KEY.folder}/kernel.cubin"),
    *(f"{DEAD}x/notes", f"{DEAD[:-1]}/notes", f"{DEAD[:-1]}G"),
]


@pytest.mark.parametrize("how", ["clear", "prune"])
def test_what_jitrope_did_not_make_is_never_removed(cache: KernelCache, how: str) -> None:
    """`JITROPE_CACHE_DIR` may be a folder with other files."""
    for name in OF_THE_USER:
        (cache.root / name).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        (cache.root / name).write_text(name)
    cache.root.chmod(0o700)
    (cache.root / DEAD).mkdir()
    folder = filled(cache).parent
    for path in (*cache.root.rglob("*"), *cache.root.iterdir()):
        os.utime(path, (1, 1))
    assert [entry.path for entry in cache.entries()] == [folder]
    assert cache.verify() == (1, [])
    assert (cache.clear() if how == "clear" else cache.prune(HOUR)) == [folder]
    assert not folder.exists()
    assert not (cache.root / DEAD).exists()
    assert [name for name in OF_THE_USER if (cache.root / name).read_text() != name] == []


def test_a_folder_that_cannot_be_listed_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = KernelCache(tmp_path / "file")
    for work in (cache.clear, cache.entries, lambda: cache.prune(1)):
        with pytest.raises(CacheError, match="cannot read the kernel cache"):
            work()
    ((path, reason),) = cache.verify()[1]
    assert path == tmp_path / "file"
    assert "cannot read the kernel cache" in reason


def test_prune_removes_what_was_written_before(cache: KernelCache) -> None:
    """Damaged entries, entries of another version and abandoned temporary folders are removed too."""
    keys = [replace(KEY, ingredients=str(i)) for i in range(4)]
    folders = [filled(cache, key).parent for key in keys]
    edit(folders[1], "format", 1)
    (folders[2] / META).unlink()
    assert [len(found) for found in cache.survey()] == [2, 1]  # another version's entry is neither whole nor damaged
    busy = cache.root / f".tmp-{1:032x}"
    for folder in (cache.root / DEAD, busy):
        folder.mkdir()
    for path in (*folders[:3], cache.root / DEAD):
        os.utime(path, (time.time() - 2 * HOUR,) * 2)
    assert cache.prune(3 * HOUR) == []
    assert len(cache.prune(HOUR, dry_run=True)) == 3
    assert all(folder.exists() for folder in folders)
    assert set(cache.prune(HOUR)) == set(folders[:3])
    assert set(cache.root.iterdir()) == {folders[3], busy}
    assert [cache.find(keys[n]) for n in (0, 3)] == [None, DATA]
    assert cache.prune(0) == folders[3:]


@pytest.mark.parametrize("ahead", [365 * 24 * HOUR, 600])
def test_a_date_in_the_future(cache: KernelCache, ahead: float) -> None:
    """A date far ahead means a wrong clock, so the entry is old. A date some minutes ahead is new."""
    folder = filled(cache, KEY).parent
    os.utime(folder, (time.time() + ahead,) * 2)
    assert cache.prune(HOUR) == [folder] * (ahead > HOUR)


def test_layers_are_asked_in_order(tmp_path: Path) -> None:
    """The user's own kernels come first, then loaded ones, then the system caches in order. Each has other bytes."""
    own, *layers = [KernelCache(tmp_path / name) for name in "abc"]
    for layer in layers:
        layer.store(KEY, "text", DATA + layer.root.name.encode(), {})
    found = KernelCache(own.root, tuple(layer.root for layer in layers))
    assert found.find(KEY) == DATA + b"b"
    assert found.find(replace(KEY, compiler="other")) == DATA + b"b"
    own.install(KEY.portable_folder, pack(KEY, "text", DATA + b"loaded", {}))
    assert found.find(KEY) == DATA + b"loaded"
    filled(own)
    assert found.find(KEY) == DATA
    layers[0].clear()
    own.clear()
    assert found.find(KEY) == DATA + b"c"


def test_of_several_compilers_the_same_one_is_taken(tmp_path: Path) -> None:
    layer = KernelCache(tmp_path / "layer")
    for version in ("a", "b", "c"):
        layer.store(replace(KEY, compiler=version), "text", DATA + version.encode(), {})
    cache = KernelCache(tmp_path / "own", (layer.root,))
    for version in ("a", "b", "c"):
        assert cache.find(replace(KEY, compiler=version)) == DATA + version.encode()
    assert cache.find(replace(KEY, compiler="d")) is not None


KEYS = [replace(KEY, ingredients=str(i)) for i in range(4)]


BUNDLED = {key.portable_folder: pack(key, "text", DATA, {}) for key in KEYS}


@pytest.mark.skipif(shutil.which("unzip") is None, reason="there is no unzip program")
@pytest.mark.parametrize("mask", ["002", "000", "077"])
def test_what_unzip_unpacks_is_used_whatever_the_umask(tmp_path: Path, mask: str) -> None:
    """Users with their own group have the umask 002. They protect the outer folder themselves."""
    layer, path = tmp_path / "layer", tmp_path / "k.zip"
    write_bundle(path, BUNDLED)
    layer.mkdir(mode=0o755)
    subprocess.run(["sh", "-c", f"umask {mask} && unzip -q {path} -d {layer}"], check=True)
    cache = KernelCache(tmp_path / "own", (layer,))
    assert [cache.find(key) for key in KEYS] == [DATA] * 4
    assert cache.system[0].verify() == (4, [])


def test_a_damaged_entry_of_a_layer_is_said_once_and_left(tmp_path: Path, caplog) -> None:
    write_bundle(tmp_path / "k.zip", BUNDLED)
    shutil.unpack_archive(tmp_path / "k.zip", tmp_path / "layer")
    first, second, third, fourth = sorted((tmp_path / "layer").iterdir())
    (first / CUBIN).write_bytes(b"")
    (second / TEXT).unlink()
    edit(third, "format", 1)
    (fourth / META).chmod(0o646)
    cache = KernelCache(tmp_path / "own", (tmp_path / "layer",))
    for _ in range(2):
        assert [cache.find(key) for key in KEYS] == [None] * 4
    assert len([r for r in caplog.records if "is not usable" in r.message]) == 4
    good, bad = cache.system[0].verify()
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
