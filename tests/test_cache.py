"""The promises of jitrope/jit/README.md: kernels on disk are whole, never stale and never written by others."""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import jitrope
from jitrope.base import config
from jitrope.base.errors import CacheError, CompileError
from jitrope.base.spec import record_of
from jitrope.jit import compiler, entry, kernels, recording
from jitrope.jit.cache import Folder, KernelCache
from jitrope.jit.entry import CUBIN, FILES, META, TEXT, Key, pack
from jitrope.jit.render import Source
from jitrope.tools.prewarm import prewarm, read_record, specs_of

from . import fresh
from .caches import COUNTED, DATA, IMPORT, IMPORTS, KEY, ROOT, edit, filled, on_the_gpu, run_in_child

SPEC = specs_of(heads=[32, 8])[0]
HOUR = 3600


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "kernels")


def cubin(cache: KernelCache, key: Key = KEY) -> bytes | None:
    """The cubin that a call would load from the user's own folder."""
    files = cache.read(key)
    return files and files[CUBIN]


# ---- entries -------------------------------------------------------------------------------------


def test_round_trip(cache: KernelCache) -> None:
    assert cache.read(KEY) is None
    path = filled(cache)
    assert cubin(cache) == cache.find(KEY) == path.read_bytes() == DATA
    assert sorted(p.name for p in path.parent.iterdir()) == ["kernel.cu", "kernel.cubin", "spec.json"]
    assert path.parent.name.startswith("rope_x-sm_90-")
    assert (cache.root.stat().st_mode & 0o777) == 0o700
    (entry,) = cache.entries()
    assert (entry.path, entry.name, entry.arch, entry.spec) == (path.parent, "rope_x", "sm_90", {"a": 1})
    assert entry.size == sum(file.stat().st_size for file in path.parent.iterdir())
    assert cache.store(KEY, "text", DATA, {"a": 1})  # as if another process had been faster: its entry is kept
    assert [p.name for p in cache.root.iterdir()] == [KEY.folder]


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_the_umask_decides_who_may_read_and_nobody_else_may_write(cache: KernelCache, mask: int) -> None:
    before = os.umask(mask)
    try:
        path = filled(cache)
    finally:
        os.umask(before)
    assert cubin(cache) == DATA
    for file in (path.parent, *path.parent.iterdir()):
        assert (file.stat().st_mode & 0o777) == (0o755 if file.is_dir() else 0o644) & ~mask
    assert (cache.root.stat().st_mode & 0o777) == 0o700


@pytest.mark.parametrize("field", ["ingredients", "options", "arch", "compiler"])
def test_every_part_of_the_key_counts(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade of the templates, the compiler or the flags can never load an old kernel."""
    changed = replace(KEY, **{field: (*KEY.options, "-G") if field == "options" else "other"})
    assert changed.folder != KEY.folder
    assert (changed.source == KEY.source) == (field == "compiler")
    assert replace(KEY, name="other").source == KEY.source
    for other in (replace(SPEC, vec=4), replace(SPEC, rotary_dim=64)):
        assert kernels.key_of(other, "sm_90").source != kernels.key_of(SPEC, "sm_90").source
    monkeypatch.setattr("jitrope.jit.entry.FORMAT", 999)
    assert replace(KEY).source != KEY.source


def test_same_key_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes write equal files, because no time and no path is in them."""
    code = f"{IMPORT}; kernels.build(specs_of(heads=[32, 8])[0], 'sm_90')"
    environment = {**os.environ, "JITROPE_CACHE_DIR": str(tmp_path / "a"), "PYTHONPATH": IMPORTS}
    fresh.python("-c", code, env=environment, check=True, cwd=tmp_path)
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "b" / "c"))
    kernels.build(SPEC, "sm_90")
    (a,), (b,) = (list((tmp_path / name).glob("rope*")) for name in ("a", "b/c"))
    assert a.name == b.name
    assert all((a / name).read_bytes() == (b / name).read_bytes() for name in (META, CUBIN, TEXT))


# ---- damage --------------------------------------------------------------------------------------


def other_entry(folder: Path) -> None:
    """Replace the files by those of another key's entry."""
    for name, data in pack(replace(KEY, ingredients="other"), "text", DATA, {}).items():
        (folder / name).write_bytes(data)


def instead(folder: Path, make: Callable[[Path], object], name: str = "") -> None:
    """Put something else in place of the folder or of one of its files."""
    path = folder / name if name else folder
    elsewhere = folder.parent.parent / "elsewhere"
    elsewhere.unlink() if elsewhere.is_file() else None
    path.rename(elsewhere)
    make(path)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda folder: (folder / CUBIN).write_bytes(DATA[:-2]),
    "flipped bit": lambda folder: (folder / CUBIN).write_bytes(b"\x7fELF cubio"),
    "empty": lambda folder: (folder / CUBIN).write_bytes(b""),
    "no cubin": lambda folder: (folder / CUBIN).unlink(),
    "no spec": lambda folder: (folder / META).unlink(),
    "empty spec": lambda folder: (folder / META).write_bytes(b""),
    "foreign spec": lambda folder: (folder / META).write_text("[1, 2]"),
    "broken spec": lambda folder: (folder / META).write_text("{"),
    "binary spec": lambda folder: (folder / META).write_bytes(bytes(range(256))),
    "deep spec": lambda folder: (folder / META).write_text("[" * 100_000),
    "empty object": lambda folder: (folder / META).write_text("{}"),
    "old format": lambda folder: edit(folder, "format", 0),
    "another key": lambda folder: edit(folder, "source", "0" * 64),
    "changed spec": lambda folder: edit(folder, "spec", {"a": 2}),
    "another entry": other_entry,
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
    "text truncated": lambda folder: (folder / TEXT).write_bytes(b"tex"),
    "no text": lambda folder: (folder / TEXT).unlink(),
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
    assert cubin(cache) == DATA
    assert cache.verify() == (1, [])
    assert [p.name for p in cache.root.iterdir()] == [KEY.folder]


@pytest.mark.parametrize("name", [META, CUBIN, TEXT])
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


def test_another_versions_entry_is_neither_whole_nor_damaged(cache: KernelCache) -> None:
    edit(filled(cache).parent, "format", 1)
    assert cache.verify() == (0, [])
    assert cache.entries() == []
    assert len(cache.clear()) == 1


# ---- many processes ------------------------------------------------------------------------------


STEPS = ("mkdir", "open", "rename")
"""The system calls of a store. A fault is injected at each of them in turn."""


@contextmanager
def fault(monkeypatch: pytest.MonkeyPatch, at: int, names: tuple[str, ...], strike: Callable[[], None]) -> Iterator:
    """Inject a fault before the `at`-th call of these functions of `os`. Yields a list with the number of calls."""
    calls = [0]

    def wrap(real: Callable) -> Callable:
        def call(*arguments, **keywords):
            calls[0] += 1
            if calls[0] == at:
                strike()
            return real(*arguments, **keywords)

        return call

    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(os, name, wrap(getattr(os, name)))
        yield calls


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


WORK: dict[tuple[str, str], Callable[[KernelCache], object]] = {
    ("empty", "store"): lambda cache: filled(cache),
    ("damaged", "store"): lambda cache: filled(cache),
    ("damaged", "load and store"): lambda cache: cache.read(KEY) or filled(cache),
    ("there", "clear"): lambda cache: cache.clear(),
}


@pytest.mark.parametrize(("before", "work"), WORK)
def test_kill_9_at_any_step_leaves_no_half_entry(cache: KernelCache, monkeypatch, before: str, work: str) -> None:
    """A kernel that is found afterwards is whole, and the next store works."""
    for at in range(1, 60):
        cache.clear()
        if before != "empty":
            filled(cache)
        if before == "damaged":
            DAMAGE["truncated"](cache.root / KEY.folder)
        with fault(monkeypatch, at, (*STEPS, "unlink", "rmdir"), kill):
            status = run_in_child(lambda: WORK[before, work](KernelCache(cache.root)))
        again = KernelCache(cache.root)
        if before != "damaged":
            assert again.verify()[1] == []
        assert cubin(again) in (None, DATA)
        assert again.read(KEY) or again.store(KEY, "text", DATA, {})
        assert cubin(again) == DATA
        assert again.verify() == (1, [])
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert 3 < at < 59


@pytest.mark.parametrize("number", ["ENOSPC", "EROFS", "EACCES", "EIO", "ESTALE", "EBUSY", "ENOENT", "EMFILE"])
def test_an_error_at_any_step_of_a_store_is_only_a_warning(cache, monkeypatch, number: str, caplog) -> None:
    def strike() -> None:
        raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)))

    for at in range(1, 40):
        cache.clear()
        fresh = KernelCache(cache.root)
        caplog.clear()
        monkeypatch.setattr(config, "_warned", set())  # as in a new process
        with fault(monkeypatch, at, STEPS, strike) as calls:
            stored = fresh.store(KEY, "text", DATA, {})
        assert fresh.store(KEY, "text", DATA, {})  # the fault is over
        assert len([r for r in caplog.records if "stay in memory" in r.message]) == (not stored)
        assert cubin(KernelCache(cache.root)) == DATA
        assert [p.name for p in cache.root.iterdir()] == [KEY.folder]
        if calls[0] < at:
            break
    assert 5 < at < 39


@pytest.mark.parametrize("number", ["EIO", "ESTALE", "EBUSY", "ENOENT", "EMFILE", "EACCES"])
def test_an_error_at_any_step_of_a_load_is_a_miss(cache: KernelCache, monkeypatch, number: str) -> None:
    """On a network a file may vanish or become stale between two calls. A temporary error removes nothing."""

    def strike() -> None:
        raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)), "kernel.cubin")

    for at in range(1, 40):
        filled(cache)
        with fault(monkeypatch, at, ("open", "lstat", "fstat", "stat"), strike) as calls:
            found = cubin(cache)
        if calls[0] < at:
            break
        assert found in (None, DATA)
        if number in ("EIO", "ESTALE", "EBUSY", "EMFILE"):
            assert cache.read(KEY) is not None
    assert at > 4


def test_readers_beside_a_writer_never_see_half_an_entry(tmp_path: Path) -> None:
    root = tmp_path / "k"
    process = subprocess.Popen(
        [sys.executable, "-c", STORE_FOR_EVER, str(root)], stdout=subprocess.PIPE, cwd=ROOT, env=os.environ
    )
    assert process.stdout.readline() == b"ready\n"
    cache, found = KernelCache(root), 0
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        for i in range(5):
            key = Key("n", str(i), (), "sm_90", "c")
            files = cache.read(key)
            found += files is not None
            assert files is None or files[CUBIN] == b"c" * 100_000
    process.kill()
    process.wait()
    assert found > 20
    assert KernelCache(root).verify()[1] == []


STORE_FOR_EVER = """
import sys
from pathlib import Path
from jitrope.jit.cache import KernelCache
from jitrope.jit.entry import Key
cache = KernelCache(Path(sys.argv[1]))
print("ready", flush=True)
for i in range(10**9):
    cache.store(Key("n", str(i % 5), (), "sm_90", "c"), "t" * 10000, b"c" * 100_000, {})
    if i % 5 == 2:
        cache.clear()
"""


# ---- a link ----------------------------------------------------------------------------


def test_a_link_of_our_own_to_the_cache_is_followed(cache: KernelCache, tmp_path: Path) -> None:
    """~/.cache may be a link to another disk."""
    filled(cache)
    (tmp_path / "link").symlink_to(cache.root)
    assert KernelCache(tmp_path / "link").read(KEY) is not None


# ---- a folder that cannot be written -------------------------------------------------------------


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
        assert cubin(cache) == DATA
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

OF_THE_USER = (
    "api/spec.json",
    "api/kernel.cubin",
    "api/src/main.c",
    "kernel.cubin",
    f"{KEY.stem}/spec.json",
    f"{KEY.folder}.bak/spec.json",
    f".{KEY.folder}/kernel.cubin",
    ".tmp-mine/notes",
    f"{DEAD}x/notes",
    f"{DEAD[:-1]}/notes",
    f"{DEAD[:-1]}G",
    "notes",
)


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


# ---- removing old entries ------------------------------------------------------------------------


def test_prune_removes_what_was_written_before(cache: KernelCache) -> None:
    """Damaged entries, entries of another version and abandoned temporary folders are removed too."""
    keys = [replace(KEY, ingredients=str(i)) for i in range(4)]
    folders = [filled(cache, key).parent for key in keys]
    edit(folders[1], "format", 1)
    (folders[2] / META).unlink()
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
    assert cubin(cache, keys[0]) is None
    assert cubin(cache, keys[3]) == DATA
    assert cache.prune(0) == folders[3:]


@pytest.mark.parametrize("ahead", [365 * 24 * HOUR, 600])
def test_a_date_in_the_future(cache: KernelCache, ahead: float) -> None:
    """A date far ahead means a wrong clock, so the entry is old. A date some minutes ahead is new."""
    folder = filled(cache, KEY).parent
    os.utime(folder, (time.time() + ahead,) * 2)
    assert cache.prune(HOUR) == ([folder] if ahead > HOUR else [])


# ---- the folder's place --------------------------------------------------------------------------


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JITROPE_CACHE_DIR", "/a/b")
    assert config.cache_dir() == Path("/a/b")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("JITROPE_CACHE_DIR", "~/b")
    assert config.cache_dir() == Path("/home/me/b")
    monkeypatch.delenv("JITROPE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert config.cache_dir() == Path("/x/jitrope")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert config.cache_dir() == Path("/home/me/.cache/jitrope")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert config.cache_dir() == Path("/home/me/.cache/jitrope")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user without an entry in the password file
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert config.cache_dir() == tmp_path / f"jitrope-{os.getuid()}"

    def nowhere() -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", nowhere)
    assert config.cache_dir() == Path(f"/jitrope-{os.getuid()}")


RELATIVE = {"JITROPE_CACHE_DIR": "kernels", "JITROPE_SYSTEM_CACHE": "layer", "JITROPE_RECORD": "run.json"}
GONE = """
import os
os.rmdir(os.getcwd())
from jitrope.base import config
from jitrope.base.errors import CacheError
from jitrope.jit import kernels, recording
from jitrope.tools import doctor
from jitrope.tools.prewarm import specs_of
spec = specs_of(heads=[32, 8])[0]
found = kernels.build(spec, "sm_90")
assert (found.compiled, found.kept) == (True, False)
assert kernels.kernel_cache().prune(0) == kernels.kernel_cache().entries() == []
assert doctor.cannot_write(kernels.kernel_cache().root)
try:
    recording.add(config.record_file(), [spec])
except CacheError as error:
    print(error)
"""
MOVED = """
import os
from jitrope.jit import kernels, recording
from jitrope.tools.prewarm import specs_of
first, second = specs_of(heads=[32, 8])
recording.note(first)
os.chdir("elsewhere")
kernels.build(first, "sm_90")
recording.note(second)
"""


@pytest.mark.skipif(sys.version_info[:3] == (3, 13, 0), reason="Python 3.13.0: a SystemError of its import")
def test_a_relative_cache_where_the_working_folder_is_gone(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **RELATIVE}
    done = fresh.python("-c", GONE, env=environment, cwd=tmp_path / "gone", check=True)
    assert done.stdout.startswith("cannot write run.json")
    assert "kernels stay in memory" in done.stderr


def test_relative_paths_keep_their_meaning_in_another_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    environment = {**os.environ, "PYTHONPATH": IMPORTS, **RELATIVE}
    fresh.python("-c", MOVED, env=environment, cwd=tmp_path, check=True)
    assert not [*(tmp_path / "elsewhere").iterdir()]
    assert len(read_record(tmp_path / "run.json")) == 2
    assert len(KernelCache(tmp_path / "kernels").entries()) == 1


def test_a_record_keeps_its_file_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with jitrope.record("run.json"):
        recording.note(SPEC)
        os.chdir("elsewhere")
    assert (tmp_path / "run.json").exists()


def test_a_writer_whose_folder_is_cleared_writes_again(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    write, cleared = Folder._write, []

    def written(folder: Folder, name: str, files: dict[str, bytes]) -> None:
        write(folder, name, files)
        if not cleared:
            cleared.extend(cache.clear() or [name])
            assert not (cache.root / name).exists()

    monkeypatch.setattr(Folder, "_write", written)
    assert cubin(cache) is None
    filled(cache)
    assert cubin(cache) == DATA


@pytest.mark.parametrize("odd", [{"name": "rope_y"}, {"compiler": None}, {"arch": "sm_80"}])
def test_a_sealed_entry_with_odd_fields_is_damaged(cache: KernelCache, odd: dict[str, object]) -> None:
    path = filled(cache).with_name(META)
    meta = {**json.loads(path.read_text()), **odd}
    path.write_text(json.dumps({**meta, "seal": entry.seal(meta)}))
    assert [text for _, text in cache.verify()[1]] == [f"{KEY.folder} is another kernel"]


def test_a_cache_with_a_name_that_is_too_long(tmp_path: Path, monkeypatch, caplog) -> None:
    """As a folder that this user may not enter: the kernel stays in memory."""
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / ("x" * 300)))
    found = kernels.build(SPEC, "sm_90")
    assert (found.compiled, found.kept) == (True, False)
    assert "kernels stay in memory" in caplog.text


def test_an_entry_that_is_removed_while_it_is_written_again(tmp_path: Path, monkeypatch) -> None:
    """Another process removes the entry between the failed rename and the look at it."""
    cache, rename, failed = KernelCache(tmp_path), os.rename, []

    def once(source: str, target: str, **folders: int) -> None:
        if not failed:
            failed.append(target)
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        rename(source, target, **folders)

    monkeypatch.setattr(os, "rename", once)
    assert cache.store(KEY, "text", DATA, {})
    assert failed
    assert cubin(cache) == DATA


def test_a_recording_replaces_no_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CacheError, match="pipe: it is not a file"):
        recording.add(tmp_path / "pipe", [SPEC])
    assert (tmp_path / "pipe").is_fifo()


def test_a_record_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(record_of([SPEC])), encoding="utf-8-sig")
    assert read_record(tmp_path / "run.json") == [SPEC]


def test_a_home_folder_that_nobody_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JITROPE_CACHE_DIR", "~nobody-of-this-name/k")
    assert config.cache_dir() == config.cache_dir() == tmp_path / "jitrope"
    assert caplog.text.count("there is no such home folder") == 1
    monkeypatch.setenv("JITROPE_SYSTEM_CACHE", "~nobody-of-this-name/k:~/k")
    monkeypatch.setenv("JITROPE_RECORD", "~nobody-of-this-name/k.json")
    assert [path.is_absolute() for path in (*config.system_caches(), config.record_file())] == [True] * 3


COMPILE = """
import os, sys, tempfile
if sys.argv[1] == "nothing":
    def nowhere(*_, **__):
        raise FileNotFoundError(2, "No usable temporary directory found")
    tempfile.TemporaryDirectory = tempfile.gettempdir = nowhere
from jitrope.jit import kernels
from jitrope.tools.prewarm import specs_of
found = kernels.build(specs_of(heads=8)[0], "sm_90")
from cupy.cuda import compiler
kept = compiler._kernel_cache_backend._cache_dir        # the folder for a user's own CuPy kernels
print(found.compiled, found.kept, os.path.isdir(kept), "CUPY_CACHE_DIR" in os.environ)
"""


@pytest.mark.parametrize("home", ["missing", "under a file", "with a file in CuPy's place", "unknown"])
def test_compiling_with_a_home_that_cannot_be_written(tmp_path: Path, home: str) -> None:
    """`import cupy` makes a folder in the home directory, fails if it cannot, and never changes the folder."""
    (tmp_path / "file").touch()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".cupy").touch()
    homes = {"missing": "/proc/missing", "under a file": f"{tmp_path}/file/home", "unknown": "~"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("CUPY", "JITROPE", "XDG"))}
    environment |= {"HOME": homes.get(home, f"{tmp_path}/home"), "PYTHONPATH": IMPORTS}
    environment["JITROPE_CACHE_DIR"] = str(tmp_path / "kernels")
    writes = "nothing" if home in ("under a file", "unknown") else "something"
    done = fresh.python("-c", COMPILE, writes, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True", "True", "False"]
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("chosen", ["made/x", "file/x"])
def test_a_cupy_folder_that_the_user_chose(tmp_path: Path, chosen: str) -> None:
    """It is used, or another one if it cannot be made. The variable keeps its value."""
    (tmp_path / "file").touch()
    (tmp_path / "made").mkdir()
    environment = {**os.environ, "CUPY_CACHE_DIR": f"{tmp_path}/{chosen}", "PYTHONPATH": IMPORTS}
    environment["JITROPE_CACHE_DIR"] = str(tmp_path / "kernels")
    done = fresh.python("-c", f"{COMPILE}print(kept, os.environ['CUPY_CACHE_DIR'])", "", env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *said, kept, named = done.stdout.split()
    assert said == ["True"] * 4
    assert named == f"{tmp_path}/{chosen}"
    assert (kept == named) == (chosen == "made/x")


@pytest.mark.parametrize(("level", "said"), [("info", "compiled rope_"), ("loud", "is not a logging level"), ("", "")])
def test_jitrope_log(tmp_path: Path, level: str, said: str) -> None:
    code = f"{IMPORT}; kernels.build(specs_of(heads=[32, 8])[0], 'sm_90')"
    environment = {**os.environ, "JITROPE_CACHE_DIR": str(tmp_path), "JITROPE_LOG": level, "PYTHONPATH": IMPORTS}
    done = fresh.python("-c", code, env=environment, check=True)
    assert said in done.stderr
    assert bool(said) == ("jitrope" in done.stderr or "JITROPE" in done.stderr)


def test_jitrope_log_where_the_program_has_handlers_of_its_own(tmp_path: Path) -> None:
    code = f"import logging; {IMPORT}; logging.basicConfig(); kernels.build(specs_of(heads=[32, 8])[0], 'sm_90')"
    environment = {**os.environ, "JITROPE_CACHE_DIR": str(tmp_path), "JITROPE_LOG": "info", "PYTHONPATH": IMPORTS}
    done = fresh.python("-c", code, env=environment, check=True)
    assert done.stderr.count("compiled rope_") == 1


# ---- with the compiler ---------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelCache:
    """The cache of this process, empty."""
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "kernels"))
    return kernels.kernel_cache()


def test_each_compile_is_said(own_cache: KernelCache, caplog) -> None:
    caplog.set_level(logging.INFO, "jitrope")
    made = kernels.build(SPEC, "sm_90")
    assert (made.compiled, made.kept) == (True, True)
    for _ in range(2):
        assert kernels.build(SPEC, "sm_90") == (made.data, False, True)
    (entry,) = own_cache.entries()
    assert (entry.path / TEXT).read_text().startswith(f"// {SPEC.name}\n")
    (entry.path / CUBIN).write_bytes(b"")
    assert kernels.build(SPEC, "sm_90").compiled
    lines = [message for message in caplog.messages if message.startswith("compiled ")]
    assert len(lines) == 2
    assert f"compiled {SPEC.name} for sm_90 in" in lines[0]
    assert kernels.build(SPEC, "sm_80").compiled
    assert kernels.build(SPEC, "sm_90", rebuild=True).compiled


def test_another_call_finds_the_kernel_of_the_first(own_cache) -> None:
    """The entry keeps the text of the first. One that the other builds differs in that text alone."""
    other = SPEC.of("bhsd heads q k > rotate cos sin rotary_dim=128 > fresh")
    seen: list[jitrope.KernelEvent] = []
    remove = jitrope.on_compile(seen.append)
    try:
        kernels.build(SPEC, "sm_90")
        kernels.build(other, "sm_90")
    finally:
        remove()
    assert [(event.call, event.source) for event in seen] == [(SPEC.call, "compiled"), (other.call, "disk")]
    (entry,) = own_cache.entries()
    assert entry.spec["call"] == SPEC.call
    first = {name: (entry.path / name).read_bytes() for name in FILES}
    own_cache.clear()
    assert kernels.build(other, "sm_90").compiled
    second = {name: (entry.path / name).read_bytes() for name in FILES}
    assert [name for name in FILES if first[name] != second[name]] == [META]
    assert json.loads(second[META])["spec"] == {**json.loads(first[META])["spec"], "call": other.call}


def test_a_monitor_is_told_of_compiles(own_cache) -> None:
    """An exception of a callback reaches the caller; the kernel is kept, and its text is a file for `--from`."""
    seen: list[jitrope.KernelEvent] = []
    remove, other = jitrope.on_compile(seen.append), jitrope.on_compile(seen.append)
    other()
    other()  # nothing is left to remove
    for _ in range(2):
        kernels.build(SPEC, "sm_90")
    found = [(event.name, event.arch, event.source) for event in seen]
    assert found == [(SPEC.name, "sm_90", source) for source in ("compiled", "disk")]
    assert seen[0].seconds > seen[1].seconds > 0
    assert seen[0].spec == json.dumps(record_of([SPEC]))
    assert seen[0].call == SPEC.call == "bshd heads q k > rotate cos sin rotary_dim=128 > fresh"
    remove()

    def refuse(event: jitrope.KernelEvent) -> None:
        raise RuntimeError(event.source)

    remove = jitrope.on_compile(refuse)
    try:
        with pytest.raises(RuntimeError, match="compiled"):
            kernels.build(SPEC, "sm_80")
    finally:
        remove()
    assert not kernels.build(SPEC, "sm_80").compiled
    assert len(seen) == 2


def test_a_hit_renders_and_compiles_nothing(own_cache, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.build(SPEC, "sm_90")
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "render", None)
        patch.setattr(compiler, "_nvrtc", None)
        assert not kernels.build(SPEC, "sm_90").compiled
    monkeypatch.setattr(compiler, "compiler_version", lambda: "cupy 99, nvrtc 99")
    assert kernels.build(SPEC, "sm_90").compiled  # a new compiler never loads an old kernel


def test_build_without_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    for _ in range(2):
        found = kernels.build(SPEC, "sm_90")
        assert (found.compiled, found.kept) == (True, False)
        assert found.data.startswith(b"\x7fELF")
    assert caplog.text.count("kernels stay in memory") == len(caplog.records) == 1
    (built,) = prewarm([SPEC], ["sm_90"], 1)
    assert built.failed
    assert "cannot be written" in built.outcome


def test_a_compiled_kernel_is_never_read_again(own_cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network the files of another process may appear late, or may have changed."""
    kernels.build(SPEC, "sm_90")
    want = own_cache.read(kernels.key_of(SPEC, "sm_90"))[CUBIN]
    monkeypatch.setattr(KernelCache, "find", lambda *_: None)  # as if another process had been faster
    assert kernels.build(SPEC, "sm_90") == (want, True, True)


def test_without_a_compiler_any_compilers_kernel_serves(own_cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that cannot compile uses a cache that another machine filled."""
    want = kernels.build(SPEC, "sm_90").data

    def no_nvrtc() -> str:
        raise CompileError("NVRTC cannot be loaded")

    monkeypatch.setattr(compiler, "compiler_version", no_nvrtc)
    monkeypatch.setattr(compiler, "_nvrtc", no_nvrtc)
    assert kernels.build(SPEC, "sm_90").data == want
    with pytest.raises(CompileError, match="NVRTC cannot be loaded"):
        kernels.build(SPEC, "sm_80")


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


def test_missing_cupy_names_the_packages(own_cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (compiler.import_cupy, compiler._nvrtc, compiler.compiler_version):
        function.cache_clear()
    for cuda, packages in (("12.8", "cupy-cuda12x nvidia-cuda-nvrtc-cu12"), ("13.0", "cupy-cuda13x nvidia-cuda-nvrtc")):
        monkeypatch.setattr(kernels.torch.version, "cuda", cuda)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "cupy", None)
            with pytest.raises(CompileError, match=rf": pip install {packages}$"):
                kernels.build(SPEC, "sm_90")
    assert compiler.import_cupy()  # it has been installed in the meantime


BROKEN = {
    "numpy": "raise ValueError('numpy.dtype size changed, may indicate binary incompatibility. Expected 96')",
    "library": "raise OSError('libcublas.so.13: cannot open shared object file: No such file or directory')",
    "attribute": "",  # an interrupted install
}
ASK_CUPY = """
from pathlib import Path
from jitrope import CompileError
from jitrope.tools import bundle
from jitrope.jit import kernels
from jitrope.tools.prewarm import prewarm, specs_of
(spec, *_) = specs_of(heads=[32, 8])
for ask in (
    lambda: kernels.build(spec, "sm_90"),
    lambda: bundle.write(Path("kernels.zip"), [(spec, "sm_90")], 1),
):
    try:
        ask()
    except CompileError as error:
        print(str(error).splitlines()[-1])
print(prewarm([spec], ["sm_90"], 1)[0].outcome)
"""


def broken_cupy(folder: Path, how: str) -> None:
    """Put a CuPy that cannot be imported into `folder`: one of `BROKEN`, or "cut", the real one with a cut library."""
    if how != "cut":
        (folder / "cupy").mkdir()
        (folder / "cupy" / "__init__.py").write_text(BROKEN[how])
        return
    real = Path(importlib.util.find_spec("cupy").origin).parent
    shutil.copytree(real, folder / "cupy", copy_function=os.symlink)
    (core,) = (folder / "cupy" / "_core").glob("core.*.so")
    core.unlink()
    core.write_bytes(b"\x7fELF")


@pytest.mark.parametrize("how", [*BROKEN, "cut"])
def test_a_cupy_that_is_broken_is_one_error_with_its_cause(tmp_path: Path, how: str) -> None:
    """Each function that needs the compiler raises the same error, each time."""
    broken_cupy(tmp_path, how)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{IMPORTS}"}
    environment["JITROPE_CACHE_DIR"] = str(tmp_path / "empty")
    done = fresh.python("-c", ASK_CUPY, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert len({line[line.index("jitrope compiles") :] for line in lines}) == 1
    cause = {
        "numpy": "ValueError: numpy.dtype size changed",
        "attribute": "has no attribute",
        "cut": ".so: file too short",
    }
    assert cause.get(how, "libcublas.so.13: cannot open shared object file") in lines[0]
    assert re.search(r": pip install cupy-cuda1[23]x nvidia\S+ --force-reinstall, and start Python again$", lines[0])
    assert "cache folder" not in lines[0]
    assert done.stderr == ""


# ---- compiling is forbidden ----------------------------------------------------------------------


@pytest.fixture
def _configured() -> Iterator[None]:
    yield
    jitrope.configure(compile=None)


@pytest.mark.usefixtures("_configured")
@pytest.mark.parametrize("how", ["environment", "configure"])
def test_no_compile(own_cache, monkeypatch: pytest.MonkeyPatch, how: str, tmp_path: Path) -> None:
    """A miss is an error with the command that makes the kernel. The test runs this command."""
    if how == "environment":
        monkeypatch.setenv("JITROPE_NO_COMPILE", "1")
    else:
        jitrope.configure(compile=False)
    before = len(kernels.compiled)
    with pytest.raises(jitrope.MissingKernel, match="compiling is forbidden") as caught:
        kernels.build(SPEC, "sm_90")
    error = caught.value
    assert isinstance(error, jitrope.CompileError)
    assert (error.spec, error.arch) == (SPEC.to_dict(), "sm_90")
    assert error.command in str(error)
    assert str(own_cache.root) in str(error)
    assert len(kernels.compiled) == before

    if how == "configure":
        return
    command = error.command.replace("jitrope prewarm", f"{sys.executable} -m jitrope prewarm")
    environment = {**os.environ, "JITROPE_NO_COMPILE": "0", "PYTHONPATH": IMPORTS}
    subprocess.run(["sh", "-c", command], check=True, cwd=tmp_path, env=environment, capture_output=True)
    assert read_record(tmp_path / "missing.json") == [SPEC]
    assert not kernels.build(SPEC, "sm_90").compiled


@pytest.mark.usefixtures("_configured")
def test_configure_is_over_the_environment(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    for word, allowed in (("", True), ("0", True), ("no", True), ("1", False), ("TRUE", False), ("perhaps", False)):
        monkeypatch.setenv("JITROPE_NO_COMPILE", word)
        assert config.compile_allowed() == allowed
    assert "perhaps" in caplog.text
    jitrope.configure(compile=True)
    assert config.compile_allowed()
    jitrope.configure(compile=False)
    monkeypatch.delenv("JITROPE_NO_COMPILE")
    assert not config.compile_allowed()
    jitrope.configure(compile=None)
    assert config.compile_allowed()


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_an_image_that_the_driver_refuses_is_rebuilt_once(tmp_path: Path) -> None:
    from jitrope.base.spec import spec_from_dict
    from jitrope.jit.render import render

    assert on_the_gpu(COUNTED, tmp_path / "k") == "1 0"
    cache = KernelCache(tmp_path / "k")
    (entry,) = cache.entries()
    spec = spec_from_dict(entry.spec)
    alien = compiler.compile_source(render(spec), "sm_75")[0]
    assert cache.store(kernels.key_of(spec, entry.arch), "text", alien, entry.spec)
    assert on_the_gpu(COUNTED, tmp_path / "k") == "1 1"
    assert on_the_gpu(COUNTED, tmp_path / "k") == "0 1"


@pytest.mark.gpu
def test_no_disk_is_touched_after_the_first_call(tmp_path: Path) -> None:
    code = """
import sys
call(); call()
events, on = [], True
sys.addaudithook(lambda name, _: events.append(name) if on and name.startswith(("open", "os.", "shutil")) else None)
for _ in range(100):
    call()
on = False
print(events)
"""
    assert on_the_gpu(code, tmp_path / "k") == "[]"


@pytest.mark.gpu
def test_no_compile_on_a_gpu(tmp_path: Path) -> None:
    code = """
try:
    call()
except jitrope.MissingKernel as error:
    print(error.arch, error.spec["head_dim"])
"""
    major, minor = kernels.torch.cuda.get_device_capability()
    assert on_the_gpu(code, tmp_path / "k", JITROPE_NO_COMPILE="1") == f"sm_{major}{minor} 128"
    assert on_the_gpu(COUNTED, tmp_path / "k") == "1 0"
    assert on_the_gpu(COUNTED, tmp_path / "k", JITROPE_NO_COMPILE="1") == "0 1"
