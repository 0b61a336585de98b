"""Kernels on disk: whole or not there, never stale, never somebody else's. Promises of the README's cache section."""

from __future__ import annotations

import errno
import importlib.util
import json
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import jitrope
from jitrope.base import config
from jitrope.base.errors import CacheError, CompileError
from jitrope.jit import compiler, kernels, recording
from jitrope.jit.cache import KernelCache
from jitrope.jit.entry import CUBIN, META, TEXT, Key, pack
from jitrope.tools import doctor
from jitrope.tools.prewarm import Call, prewarm, read_calls

KEY = Key("rope_x", "ingredients", ("-std=c++17",), "sm_90", "nvrtc 13.0")
DATA = b"\x7fELF cubin"
SPEC = Call(40).specs()[0]
ROOT = Path(__file__).parent.parent
IMPORTS = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
HOUR = 3600


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "kernels")


def filled(cache: KernelCache, key: Key = KEY) -> Path:
    path = cache.store(key, "text", DATA, {"a": 1})
    assert path is not None
    return path


def run_in_child(work: Callable[[], None]) -> int:
    """Run it in a fork; the exit status, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(f"in the child: {error!r}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ---- what an entry is ----------------------------------------------------------------------------


def test_round_trip(cache: KernelCache) -> None:
    assert cache.load(KEY) is None
    path = filled(cache)
    assert cache.load(KEY) == path
    assert path.read_bytes() == DATA
    assert sorted(p.name for p in path.parent.iterdir()) == ["kernel.cu", "kernel.cubin", "spec.json"]
    assert path.parent.name.startswith("rope_x-sm_90-")
    assert (cache.root.stat().st_mode & 0o777) == 0o700
    (entry,) = cache.entries()
    assert (entry.path, entry.name, entry.arch, entry.spec) == (path.parent, "rope_x", "sm_90", {"a": 1})
    assert entry.size == sum(file.stat().st_size for file in path.parent.iterdir())


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o077])
def test_the_umask_decides_who_may_read_and_nobody_else_may_write(cache: KernelCache, mask: int) -> None:
    before = os.umask(mask)
    try:
        path = filled(cache)
    finally:
        os.umask(before)
    assert cache.load(KEY) == path
    for file in (path.parent, *path.parent.iterdir()):
        assert (file.stat().st_mode & 0o777) == (0o755 if file.is_dir() else 0o644) & ~mask
    assert (cache.root.stat().st_mode & 0o777) == 0o700


@pytest.mark.parametrize("field", ["ingredients", "options", "arch", "compiler"])
def test_every_part_of_the_key_counts(field: str) -> None:
    """An upgrade of the templates, the compiler or the flags can never load an old kernel."""
    changed = replace(KEY, **{field: (*KEY.options, "-G") if field == "options" else "other"})
    assert changed.digest != KEY.digest
    assert changed.folder != KEY.folder
    assert (changed.source == KEY.source) == (field == "compiler")
    assert replace(KEY, name="other").digest == KEY.digest


def test_format_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jitrope.jit.entry.FORMAT", 999)
    assert replace(KEY).digest != KEY.digest


def test_every_constant_and_every_template_is_in_the_key() -> None:
    key = kernels.key_of(SPEC, "sm_90")
    assert {f"constant {name}" for name in SPEC.constants()} <= key.parts.keys()
    assert {"template rope.cu.jinja", "template heads.cuh.jinja"} <= key.parts.keys()
    for other in (replace(SPEC, vec=4), replace(SPEC, rotary_dim=64)):
        assert kernels.key_of(other, "sm_90").digest != key.digest


IMPORT = "from jitrope.jit import kernels; from jitrope.tools.prewarm import Call"


def test_same_key_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes' entries are equal, file for file; no time and no path is in them."""
    code = f"{IMPORT}; kernels.build(Call(40).specs()[0], 'sm_90')"
    environment = {**os.environ, "JITROPE_CACHE_DIR": str(tmp_path / "a"), "PYTHONPATH": IMPORTS}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, cwd=tmp_path)
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "b" / "c"))
    kernels.build(SPEC, "sm_90")
    (a,), (b,) = (list((tmp_path / name).glob("rope*")) for name in ("a", "b/c"))
    assert a.name == b.name
    assert all((a / name).read_bytes() == (b / name).read_bytes() for name in (META, CUBIN, TEXT))


# ---- damage --------------------------------------------------------------------------------------


def edit(folder: Path, name: str, value: object) -> None:
    meta = json.loads((folder / "spec.json").read_text())
    (folder / "spec.json").write_text(json.dumps({**meta, name: value}))


def other_entry(folder: Path) -> None:
    """A whole entry, but of another key."""
    for name, data in pack(replace(KEY, ingredients="other"), "text", DATA, {}).items():
        (folder / name).write_bytes(data)


def instead(folder: Path, make: Callable[[Path], object], name: str = "") -> None:
    """Something else where the folder, or a file of it, is."""
    path = folder / name if name else folder
    elsewhere = folder.parent.parent / "elsewhere"
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
    "another key": lambda folder: edit(folder, "digest", "0" * 64),
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
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_entry_is_a_miss_said_once_and_rebuilt(cache: KernelCache, how: str, caplog) -> None:
    DAMAGE[how](filled(cache).parent)
    with caplog.at_level(logging.WARNING, "jitrope"):
        assert cache.load(KEY) is None
        assert cache.load(KEY) is None
    assert len(caplog.records) == 1
    assert "is not usable" in caplog.text
    assert cache.counts.repaired == 1
    path = filled(cache)
    assert cache.load(KEY) == path
    assert [p.name for p in cache.root.iterdir()] == [KEY.folder]


TEXT_DAMAGE: dict[str, Callable[[Path], object]] = {
    "text truncated": lambda folder: (folder / TEXT).write_bytes(b"tex"),
    "no text": lambda folder: (folder / TEXT).unlink(),
    "text as a folder": lambda folder: instead(folder, Path.mkdir, TEXT),
    "text as a link": lambda folder: instead(folder, lambda path: path.symlink_to("../../elsewhere"), TEXT),
    "text that others may write": lambda folder: (folder / TEXT).chmod(0o666),
}


@pytest.mark.parametrize("how", [*DAMAGE, *TEXT_DAMAGE])
def test_a_store_on_top_of_damage_replaces_it(cache: KernelCache, how: str) -> None:
    """As when it was damaged between the look and the compile's end."""
    (DAMAGE | TEXT_DAMAGE)[how](filled(cache).parent)
    path = filled(cache)
    assert cache.load(KEY) == path
    assert cache.verify() == (1, [])


@pytest.mark.parametrize("how", TEXT_DAMAGE)
@pytest.mark.parametrize("ask", ["read", "find"])
def test_a_damaged_text_does_not_keep_a_kernel_from_running_and_is_repaired(cache, how: str, ask: str) -> None:
    """Whoever asks for all files makes them anew: else `verify` would find the same for ever."""
    path = filled(cache)
    TEXT_DAMAGE[how](path.parent)
    assert cache.load(KEY) == cache.find(KEY) == path
    assert cache.counts.repaired == 0
    assert (cache.read(KEY) if ask == "read" else cache.find(KEY, whole=True)) is None
    assert cache.counts.repaired == 1
    assert cache.verify() == (0, [])
    filled(cache)
    assert cache.read(KEY)[TEXT] == b"text"
    assert cache.find(KEY, whole=True) == path


@pytest.mark.parametrize("why", ["forbidden", "no compiler"])
def test_a_kernel_that_nothing_here_can_make_stays_without_its_text(cache, monkeypatch, why: str) -> None:
    path = filled(cache)
    (path.parent / TEXT).unlink()
    if why == "forbidden":
        monkeypatch.setenv("JITROPE_NO_COMPILE", "1")
    key = KEY if why == "forbidden" else replace(KEY, compiler="")
    assert cache.read(key) is None
    assert cache.find(key, whole=True) == path
    assert cache.counts.repaired == 0


@pytest.mark.parametrize("name", [META, CUBIN, TEXT])
def test_no_file_is_used_truncated_or_with_a_flipped_bit(cache: KernelCache, name: str) -> None:
    whole = (filled(cache).parent / name).read_bytes()
    step = max(1, len(whole) // 25)
    damaged = [whole[:length] for length in range(0, len(whole), step)]
    damaged += [whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :] for i in range(0, len(whole), step)]
    damaged += [whole + b"x", bytes(len(whole))]
    for data in damaged:
        path = filled(cache)
        (path.parent / name).write_bytes(data)
        assert len(cache.verify()[1]) == 1
        if name != TEXT:  # which is only for readers
            assert cache.load(KEY) is None
        cache.discard(KEY)
    assert len(damaged) > 8


def test_verify_finds_what_load_would_refuse(cache: KernelCache) -> None:
    DAMAGE["flipped bit"](filled(cache).parent)
    good, bad = cache.verify()
    assert good == 0
    assert "checksum" in bad[0][1]


def test_another_versions_entry_is_neither_whole_nor_damaged(cache: KernelCache) -> None:
    edit(filled(cache).parent, "format", 1)
    assert cache.verify() == (0, [])
    assert list(cache.entries()) == []
    assert cache.clear() == 1


# ---- many at once --------------------------------------------------------------------------------


def test_losing_the_race_is_as_good_as_winning(cache: KernelCache, monkeypatch) -> None:
    path = filled(cache)
    assert cache.store(KEY, "text", DATA, {}) == path
    assert [p.name for p in cache.root.iterdir()] == [path.parent.name]


STEPS = ("mkdir", "open", "fsync", "rename")
"""What a store asks of the system; a fault is injected at each of its calls in turn."""


@contextmanager
def fault(monkeypatch: pytest.MonkeyPatch, at: int, names: tuple[str, ...], strike: Callable[[], None]) -> Iterator:
    """Strike before the `at`-th call of the functions of `os`; yields a list with the number of calls."""
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


BEFORE: dict[str, Callable[[KernelCache], None]] = {
    "empty": lambda cache: None,
    "damaged": lambda cache: DAMAGE["truncated"](filled(cache).parent),
    "there": lambda cache: filled(cache),
}
WORK: dict[str, Callable[[KernelCache], object]] = {
    "store": lambda cache: filled(cache),
    "load and store": lambda cache: cache.load(KEY) or filled(cache),
    "discard": lambda cache: cache.discard(KEY),
    "clear": lambda cache: cache.clear(),
}


@pytest.mark.parametrize(("before", "work"), [("empty", "store"), ("damaged", "store"), ("damaged", "load and store"),
    ("there", "discard"), ("there", "clear")])  # fmt: skip
def test_kill_9_at_any_step_leaves_no_half_entry(cache: KernelCache, monkeypatch, before: str, work: str) -> None:
    """Whatever is found afterwards is whole, and the next store works."""
    for at in range(1, 40):
        cache.clear()
        BEFORE[before](cache)
        with fault(monkeypatch, at, (*STEPS, "unlink", "rmdir"), kill):
            status = run_in_child(lambda: WORK[work](KernelCache(cache.root)))
        again = KernelCache(cache.root)
        if before != "damaged":
            assert again.verify()[1] == []
        found = again.load(KEY)
        assert found is None or found.read_bytes() == DATA
        assert again.load(KEY) or again.store(KEY, "text", DATA, {})
        assert again.load(KEY).read_bytes() == DATA
        assert again.verify() == (1, [])
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert 3 < at < 39


@pytest.mark.parametrize(
    "number", ["ENOSPC", "EDQUOT", "EROFS", "EACCES", "EIO", "ESTALE", "EBUSY", "ENOENT", "EMFILE"]
)
def test_an_error_at_any_step_of_a_store_is_only_a_warning(cache, monkeypatch, number: str, caplog) -> None:
    def strike() -> None:
        raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)))

    for at in range(1, 40):
        cache.clear()
        fresh = KernelCache(cache.root)
        caplog.clear()
        with fault(monkeypatch, at, STEPS, strike) as calls:
            path = fresh.store(KEY, "text", DATA, {})
        more = fresh.store(KEY, "text", DATA, {})
        assert len([r for r in caplog.records if "stay in memory" in r.message]) == (path is None)
        assert more is not None  # the trouble is over
        assert KernelCache(cache.root).load(KEY) == more
        assert [p.name for p in cache.root.iterdir()] == [KEY.folder]
        if calls[0] < at:
            break
    assert 8 < at < 39


@pytest.mark.parametrize("number", ["EIO", "ESTALE", "EBUSY", "ENOENT", "EMFILE", "EACCES"])
def test_an_error_at_any_step_of_a_load_is_a_miss(cache: KernelCache, monkeypatch, number: str) -> None:
    """As on a network, where a file may vanish or be stale between two looks. What the moment did is not removed."""

    def strike() -> None:
        raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)), "kernel.cubin")

    for at in range(1, 40):
        filled(cache)
        with fault(monkeypatch, at, ("open", "lstat", "fstat", "stat", "utime"), strike) as calls:
            found = cache.load(KEY)
        if calls[0] < at:
            break
        assert found is None or found.read_bytes() == DATA
        if number in ("EIO", "ESTALE", "EBUSY", "EMFILE"):
            assert cache.load(KEY) is not None
    assert at > 4


def test_a_disk_that_fills_up(cache: KernelCache) -> None:
    """A real write that is cut short by the system."""

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        assert cache.store(KEY, "text", bytes(1_000_000), {}) is None
        assert cache.load(KEY) is None
        assert list(cache.root.iterdir()) == []
        assert cache.store(KEY, "text", bytes(1000), {}) is not None

    assert run_in_child(work) == 0


def test_readers_beside_a_writer_never_see_half_an_entry(tmp_path: Path) -> None:
    root = tmp_path / "k"
    process = subprocess.Popen(
        [sys.executable, "-c", STORE_FOR_EVER, str(root)], stdout=subprocess.PIPE, cwd=ROOT, env=os.environ
    )
    assert process.stdout.readline() == b"ready\n"
    cache, found = KernelCache(root), 0
    cache._repair = None  # nothing is ever damaged
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        for i in range(5):
            key = Key("n", str(i), (), "sm_90", "c")
            with_path = cache.read(key)
            found += with_path is not None
            assert with_path is None or with_path[CUBIN] == b"c" * 100_000
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
    cache.discard(Key("n", str((i + 2) % 5), (), "sm_90", "c"))
"""


# ---- whose it is ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o703])
def test_a_folder_that_others_can_write_is_not_trusted(cache: KernelCache, mode: int, caplog) -> None:
    filled(cache)
    cache.root.chmod(mode)
    assert cache.verify() == (0, [(cache.root, "it can be written by other users")])
    fresh = KernelCache(cache.root)
    assert fresh.load(KEY) is None
    assert fresh.load(KEY) is None
    assert [r.message for r in caplog.records if "can be written by other users" in r.message] == [caplog.messages[0]]
    assert fresh.store(replace(KEY, arch="sm_80"), "text", b"x", {}) is None
    assert not any("sm_80" in path.name for path in cache.root.iterdir())
    cache.root.chmod(0o700)
    assert fresh.load(KEY) is not None  # nothing in it was touched


@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder to another user needs root")
@pytest.mark.parametrize("what", ["root", "entry", "file", "link"])
def test_what_is_of_another_user_is_not_trusted(cache: KernelCache, what: str, caplog, tmp_path: Path) -> None:
    path = filled(cache)
    if what == "link":
        (tmp_path / "link").symlink_to(cache.root)
        os.chown(tmp_path / "link", 12345, 12345, follow_symlinks=False)
        cache = KernelCache(tmp_path / "link")
    else:
        os.chown({"root": cache.root, "entry": path.parent, "file": path}[what], 12345, 12345)
    assert cache.load(KEY) is None
    assert "another user" in caplog.text
    if what in ("root", "link"):
        assert [bad for bad, reason in cache.verify()[1] if "another user" in reason] == [cache.root]


def test_a_link_of_our_own_to_the_cache_is_followed(cache: KernelCache, tmp_path: Path) -> None:
    """~/.cache on another disk."""
    filled(cache)
    (tmp_path / "link").symlink_to(cache.root)
    assert KernelCache(tmp_path / "link").load(KEY) is not None


# ---- a folder that cannot be written -------------------------------------------------------------


def test_a_cache_that_cannot_be_written(tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("not a folder")
    cache = KernelCache(tmp_path / "file" / "kernels")
    assert cache.store(KEY, "text", b"x", {}) is None
    assert cache.store(replace(KEY, arch="sm_80"), "text", b"x", {}) is None
    assert cache.load(KEY) is None
    assert len(caplog.records) == 1
    assert "stay in memory" in caplog.text


def test_a_read_only_folder_is_read(cache: KernelCache, monkeypatch, caplog) -> None:
    """Root may write everywhere, so the system's answer is made here."""
    path = filled(cache)

    def read_only(*arguments: object, **keywords: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), arguments[0])

    for name in ("mkdir", "rename", "utime", "unlink"):
        monkeypatch.setattr(os, name, read_only)
    assert cache.load(KEY) == path
    for arch in ("sm_80", "sm_89"):
        assert cache.store(replace(KEY, arch=arch), "text", b"x", {}) is None
    assert len(caplog.records) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user needs root")
def test_a_folder_without_write_permission(tmp_path: Path) -> None:
    """The same for real: as a user that is not root, on a folder of mode 0555 of its own."""
    tmp_path.chmod(0o755)
    root = Path("kernels")
    (tmp_path / root).mkdir()
    os.chown(tmp_path / root, 12345, 12345)

    def work() -> None:
        os.chdir(tmp_path)  # the folders above need not let another user through
        os.setuid(12345)
        cache = KernelCache(root)
        path = filled(cache)
        root.chmod(0o555)
        assert cache.load(KEY) == path
        assert cache.store(replace(KEY, arch="sm_80"), "text", b"x", {}) is None
        DAMAGE["truncated"](path.parent)  # cannot be removed: a miss all the same
        assert cache.load(KEY) is None
        assert cache.store(KEY, "text", DATA, {}) is None

    assert run_in_child(work) == 0


def test_a_bad_entry_that_cannot_be_replaced_is_not_loaded(cache: KernelCache, monkeypatch) -> None:
    """Losing the rename to a damaged entry must not hand that entry out."""
    DAMAGE["flipped bit"](filled(cache).parent)
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if Path(source).name == KEY.folder:
            raise PermissionError(errno.EACCES, "it will not go")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    assert cache.store(KEY, "text", DATA, {}) is None
    assert cache.load(KEY) is None


def test_clear_and_leftovers(cache: KernelCache) -> None:
    filled(cache)
    (cache.root / DEAD).mkdir()
    (cache.root / "of-the-user.txt").write_text("keep")
    (cache.root / "folder").mkdir()
    assert cache.clear() == 1
    assert sorted(p.name for p in cache.root.iterdir()) == ["folder", "of-the-user.txt"]


DEAD, BUSY = f".tmp-{0:032x}", f".tmp-{1:032x}"
"""Temporary folders as a store makes them."""

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


@pytest.mark.parametrize("how", ["clear", "prune", "store"])
def test_what_jitrope_did_not_make_is_never_removed(cache: KernelCache, how: str) -> None:
    """`JITROPE_CACHE_DIR` may be a folder with work in it."""
    for name in OF_THE_USER:
        (cache.root / name).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        (cache.root / name).write_text(name)
    cache.root.chmod(0o700)
    (cache.root / DEAD).mkdir()
    folder = filled(cache).parent
    for path in (*cache.root.rglob("*"), *cache.root.iterdir()):
        os.utime(path, (1, 1))
    fresh = KernelCache(cache.root, max_bytes=1)
    assert [entry.path for entry in fresh.entries()] == [folder]
    assert fresh.verify() == (1, [])
    if how == "clear":
        assert fresh.clear() == 1
    elif how == "prune":
        assert [entry.path for entry in fresh.prune(1)] == [folder]
    else:
        filled(fresh, replace(KEY, arch="sm_80"))
    assert not folder.exists()
    assert not (cache.root / DEAD).exists()
    assert [name for name in OF_THE_USER if (cache.root / name).read_text() != name] == []


def test_a_folder_that_cannot_be_listed_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for work in (KernelCache.clear, KernelCache.verify):
        with pytest.raises(CacheError, match="cannot read the kernel cache"):
            work(KernelCache(tmp_path / "file"))


# ---- how large it may become ---------------------------------------------------------------------


def aged(cache: KernelCache, count: int, size: int = 10_000) -> list[Key]:
    """So many entries, the first used longest ago, all more than an hour ago."""
    keys = [replace(KEY, ingredients=str(i)) for i in range(count)]
    for i, key in enumerate(keys):
        folder = cache.store(key, "", bytes(size), {}).parent
        when = time.time() - (2 * HOUR - i)
        os.utime(folder, (when, when))
    return keys


def test_prune_takes_what_was_not_used_for_longest(cache: KernelCache) -> None:
    keys = aged(cache, 6)
    fresh = KernelCache(cache.root)
    size = next(fresh.entries()).size
    would = fresh.prune(4 * size + 100, dry_run=True)
    assert len(list(fresh.entries())) == 6
    gone = fresh.prune(4 * size + 100)
    assert [e.path for e in would] == [e.path for e in gone] == [cache.root / key.folder for key in keys[:2]]
    assert [entry.name for entry in gone] == ["rope_x"] * 2
    assert fresh.prune(4 * size + 100) == []
    assert fresh.load(keys[2])
    assert [e.path.name for e in fresh.prune(0)] == [key.folder for key in keys[3:]]  # not the one that is in use


def test_young_entries_and_those_in_use_stay(cache: KernelCache) -> None:
    keys = aged(cache, 3)
    assert cache.prune(0) == []  # this process stored them
    os.utime(cache.root / keys[0].folder)
    assert KernelCache(cache.root).load(keys[1])  # another process uses it
    assert [e.path.name for e in KernelCache(cache.root).prune(0)] == [keys[2].folder]


def test_damaged_entries_and_those_of_other_versions_are_pruned_too(cache: KernelCache) -> None:
    keys = aged(cache, 3)
    edit(cache.root / keys[0].folder, "format", 1)
    (cache.root / keys[1].folder / META).unlink()
    for key in keys:
        os.utime(cache.root / key.folder, (1, 1))
    assert len(KernelCache(cache.root).prune(0)) == 3
    assert list(cache.root.iterdir()) == []


def test_a_store_keeps_the_bound_once_an_hour(cache: KernelCache) -> None:
    keys = aged(cache, 5)
    (cache.root / DEAD).mkdir()
    (cache.root / BUSY).mkdir()
    os.utime(cache.root / DEAD, (1, 1))
    bounded = KernelCache(cache.root, max_bytes=40_000)
    filled(bounded)
    assert {p.name for p in cache.root.glob("rope*")} == {KEY.folder, keys[3].folder, keys[4].folder, keys[2].folder}
    assert not (cache.root / DEAD).exists()
    assert (cache.root / BUSY).exists()
    bounded.max_bytes = 1
    filled(bounded, replace(KEY, arch="sm_80"))
    assert len(list(bounded.entries())) == 5  # not again so soon
    os.utime(cache.root / ".pruned", (1, 1))
    filled(bounded, replace(KEY, arch="sm_89"))
    assert len(list(bounded.entries())) == 3


AHEAD = 4_070_908_800
"""A clock was wrong once: the year 2099."""


def test_what_is_dated_ahead_is_pruned_before_what_was_used_since(cache: KernelCache) -> None:
    keys = aged(cache, 4)
    for key in keys[2:]:
        os.utime(cache.root / key.folder, (AHEAD, AHEAD))
    fresh = KernelCache(cache.root)
    size = next(fresh.entries()).size
    gone = [e.path.name for e in fresh.prune(2 * size + 100)]
    assert sorted(gone) == sorted(key.folder for key in keys[2:])
    assert len(fresh.prune(0)) == 2


def test_a_clock_that_is_a_little_ahead_makes_nothing_old(cache: KernelCache) -> None:
    (key,) = aged(cache, 1)
    os.utime(cache.root / key.folder, (time.time() + 60,) * 2)  # a file server's
    assert KernelCache(cache.root).prune(0) == []


def test_a_stamp_or_a_leftover_dated_ahead_stops_no_pruning(cache: KernelCache) -> None:
    aged(cache, 5)
    (cache.root / ".pruned").touch()
    (cache.root / DEAD).mkdir()
    for name in (".pruned", DEAD):
        os.utime(cache.root / name, (AHEAD, AHEAD))
    filled(KernelCache(cache.root, max_bytes=10))
    assert [entry.name for entry in cache.entries()] == [KEY.name]
    assert not (cache.root / DEAD).exists()
    assert (cache.root / ".pruned").stat().st_mtime < time.time() + 60
    (cache.root / DEAD).mkdir()
    os.utime(cache.root / DEAD, (AHEAD, AHEAD))
    cache.clear()
    assert list(cache.root.iterdir()) == []


def test_pruning_beside_a_writer(cache: KernelCache, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STORE_FOR_EVER, str(cache.root)], stdout=subprocess.PIPE, cwd=ROOT, env=os.environ
    )
    assert process.stdout.readline() == b"ready\n"
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        KernelCache(cache.root).prune(0)  # its entries are young: nothing to do, nothing raised
    assert process.poll() is None
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("text", "size"),
    [("", 1 << 30), ("0", 0), ("1048576", 1 << 20), ("500M", 500 << 20), ("2GiB", 2 << 30), ("1.5 kb", 1536)],
)
def test_cache_size(monkeypatch: pytest.MonkeyPatch, text: str, size: int) -> None:
    monkeypatch.setenv("JITROPE_CACHE_SIZE", text)
    assert config.cache_size() == size
    assert kernels.kernel_cache().max_bytes == size


def test_a_cache_size_that_is_none_is_said(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setenv("JITROPE_CACHE_SIZE", "much")
    assert config.cache_size() == config.cache_size() == 1 << 30
    assert caplog.text.count("'much' is not a size") == 1
    monkeypatch.setenv("JITROPE_CACHE_SIZE", "9" * 400)
    assert config.cache_size() == 1 << 30
    assert "more than any disk has" in caplog.text


# ---- where it is ---------------------------------------------------------------------------------


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
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user that the system does not know
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert config.cache_dir() == tmp_path / f"jitrope-{os.getuid()}"

    def nowhere() -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", nowhere)
    assert config.cache_dir() == Path(f"/jitrope-{os.getuid()}")


def test_a_relative_cache_where_the_working_folder_is_gone(tmp_path: Path, monkeypatch, caplog) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("JITROPE_CACHE_DIR", "kernels")
    monkeypatch.setenv("JITROPE_SYSTEM_CACHE", "layer")
    monkeypatch.setenv("JITROPE_RECORD", "run.json")
    found = kernels.build(SPEC, "sm_90")
    assert (found.compiled, found.kept) == (True, False)
    assert "kernels stay in memory" in caplog.text
    assert kernels.kernel_cache().prune(0) == list(kernels.kernel_cache().entries()) == []
    assert doctor.cannot_write(kernels.kernel_cache().root)
    with pytest.raises(CacheError, match=r"cannot write run\.json"):
        recording.add(config.record_file(), [SPEC])


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
from jitrope.tools.prewarm import Call
found = kernels.build(Call(8).specs()[0], "sm_90")
from cupy.cuda import compiler
kept = compiler._kernel_cache_backend._cache_dir        # where a user's own CuPy kernels will be put
print(found.compiled, found.kept, os.path.isdir(kept), "CUPY_CACHE_DIR" in os.environ)
"""


@pytest.mark.parametrize("home", ["missing", "under a file", "with a file in CuPy's place", "unknown"])
@pytest.mark.parametrize("temporary", ["something", "nothing"])
def test_compiling_with_a_home_that_cannot_be_written(tmp_path: Path, home: str, temporary: str) -> None:
    """`import cupy` makes a folder in the home directory, fails where it cannot, and keeps to it."""
    (tmp_path / "file").touch()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".cupy").touch()
    homes = {"missing": "/proc/missing", "under a file": f"{tmp_path}/file/home", "unknown": "~"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("CUPY", "JITROPE", "XDG"))}
    environment |= {"HOME": homes.get(home, f"{tmp_path}/home"), "PYTHONPATH": IMPORTS}
    environment["JITROPE_CACHE_DIR"] = str(tmp_path / "kernels")
    command = [sys.executable, "-c", COMPILE, temporary]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True", "True", "False"]
    assert not (tmp_path / "~").exists()


def test_a_cupy_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = "from jitrope.jit import compiler\ntry: compiler.import_cupy()\nexcept compiler.CompileError as e: print(e)"
    environment = {**os.environ, "CUPY_CACHE_DIR": f"{tmp_path}/file/x", "PYTHONPATH": IMPORTS}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "set CUPY_CACHE_DIR to a folder that can be written" in done.stdout, done.stderr


def test_unknown_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITROPE_CACHEDIR", "/a/b")
    assert config.unknown_variables() == ["JITROPE_CACHEDIR"]


@pytest.mark.parametrize(("level", "said"), [("info", "compiled rope_"), ("loud", "is not a logging level"), ("", "")])
def test_jitrope_log(tmp_path: Path, level: str, said: str) -> None:
    code = f"{IMPORT}; kernels.build(Call(40).specs()[0], 'sm_90')"
    environment = {**os.environ, "JITROPE_CACHE_DIR": str(tmp_path), "JITROPE_LOG": level, "PYTHONPATH": IMPORTS}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said in done.stderr
    assert bool(said) == ("jitrope" in done.stderr or "JITROPE" in done.stderr)


# ---- with the compiler ---------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelCache:
    """The process's cache, empty."""
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "kernels"))
    return kernels.kernel_cache()


def test_build_compiles_once(own_cache: KernelCache) -> None:
    made = kernels.build(SPEC, "sm_90")
    assert (made.path, made.compiled, made.kept) == (None, True, True)
    found = kernels.build(SPEC, "sm_90")
    assert (found.data, found.compiled) == (None, False)
    assert found.path.read_bytes() == made.data
    assert (found.path.parent / "kernel.cu").read_text().startswith("#line 1")
    assert kernels.build(SPEC, "sm_80").compiled
    assert kernels.build(SPEC, "sm_90", rebuild=True).compiled


def test_what_happened_is_counted_and_said(own_cache: KernelCache, caplog) -> None:
    caplog.set_level(logging.INFO, "jitrope")
    kernels.build(SPEC, "sm_90")
    kernels.build(SPEC, "sm_90")
    path = kernels.build(SPEC, "sm_90").path
    path.write_bytes(b"")
    kernels.build(SPEC, "sm_90")
    counts = own_cache.counts
    assert (counts.hits, counts.misses, counts.compiled, counts.repaired) == (2, 2, 2, 1)
    assert counts.compile_ms > 1
    lines = [message for message in caplog.messages if message.startswith("compiled ")]
    assert len(lines) == 2
    assert f"compiled {SPEC.name} for sm_90 in" in lines[0]


def test_explain_names_what_differs(own_cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    key = kernels.key_of(SPEC, "sm_90")
    assert own_cache.explain(key) == f"there is no entry of {SPEC.name}"
    kernels.build(SPEC, "sm_90")
    assert own_cache.explain(key) == f"{key.folder} is the same"
    kernels.build(SPEC, "sm_80")  # farther away than the one that only another compiler made
    text = own_cache.explain(replace(key, compiler="cupy 99, nvrtc 99"))
    assert text == f"{key.folder} differs in compiler: {key.compiler!r} there, 'cupy 99, nvrtc 99' here"
    monkeypatch.setattr("jitrope.jit.render._texts", lambda name: {name: "changed"})
    assert "template rope.cu.jinja: " in own_cache.explain(kernels.key_of(SPEC, "sm_90"))


def test_a_hit_renders_nothing_and_loads_no_compiler(own_cache, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.build(SPEC, "sm_90")
    monkeypatch.setattr(kernels, "render", None)
    monkeypatch.setattr(compiler, "_nvrtc", None)
    assert not kernels.build(SPEC, "sm_90").compiled


def test_build_without_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    found = kernels.build(SPEC, "sm_90")
    assert (found.path, found.compiled, found.kept) == (None, True, False)
    assert found.data.startswith(b"\x7fELF")
    (built,) = prewarm([SPEC], ["sm_90"], 1)
    assert built.failed
    assert "cannot be written" in built.outcome


def test_a_compiled_kernel_is_never_read_again(own_cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network the winner's files may show up late, or not be what they were."""
    kernels.build(SPEC, "sm_90")
    want = own_cache.read(kernels.key_of(SPEC, "sm_90"))[CUBIN]
    monkeypatch.setattr(KernelCache, "find", lambda *_: None)  # another process is faster: it is there at the rename
    found = kernels.build(SPEC, "sm_90")
    assert (found.path, found.data, found.kept) == (None, want, True)


def test_a_cubin_is_handed_over_without_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    with kernels.cubin_file(DATA) as path:
        assert path.read_bytes() == DATA
    assert not path.exists()

    def no_folder(*_: object, **__: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(kernels.tempfile, "TemporaryDirectory", no_folder)
    with kernels.cubin_file(DATA) as path:
        assert path.read_bytes() == DATA


def test_a_new_compiler_never_loads_an_old_kernel(own_cache, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.build(SPEC, "sm_90")
    monkeypatch.setattr(compiler, "compiler_version", lambda: "cupy 99, nvrtc 99")
    assert kernels.build(SPEC, "sm_90").compiled


def test_without_a_compiler_any_compilers_kernel_serves(own_cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that was warmed elsewhere, on a machine that cannot compile."""
    want = kernels.build(SPEC, "sm_90").data

    def no_nvrtc() -> str:
        raise CompileError("NVRTC cannot be loaded")

    monkeypatch.setattr(compiler, "compiler_version", no_nvrtc)
    monkeypatch.setattr(compiler, "_nvrtc", no_nvrtc)
    assert kernels.build(SPEC, "sm_90").path.read_bytes() == want
    with pytest.raises(CompileError, match="NVRTC cannot be loaded"):
        kernels.build(SPEC, "sm_80")


def test_missing_cupy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.import_cupy.cache_clear()
    for cuda, extra in (("12.8", "cuda12"), ("13.0", "cuda13")):
        monkeypatch.setattr(kernels.torch.version, "cuda", cuda)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "cupy", None)
            with pytest.raises(CompileError, match=rf"pip install 'jitrope\[{extra}\]'"):
                kernels.build(SPEC, "sm_90")
    assert compiler.import_cupy()  # installed meanwhile


BROKEN = {
    "numpy": "raise ValueError('numpy.dtype size changed, may indicate binary incompatibility. Expected 96')",
    "library": "raise OSError('libcublas.so.13: cannot open shared object file: No such file or directory')",
    "import": "raise ImportError('libcublas.so.13: cannot open shared object file')",
    "attribute": "",  # an install that was interrupted
}
ASK_CUPY = """
from pathlib import Path
from jitrope import CompileError
from jitrope.tools import bundle
from jitrope.jit import compiler, kernels
from jitrope.tools.prewarm import Call, prewarm
(spec, *_) = Call(40).specs()
for ask in (
    lambda: kernels.build(spec, "sm_90"),
    lambda: kernels.build(spec, "sm_80"),
    lambda: kernels.is_cached(spec, "sm_90"),
    lambda: kernels.key_of(spec, "sm_90"),
    lambda: compiler.Kernel(Path("kernel.cubin"), "entry", 0),
    lambda: bundle.write(Path("kernels.tar"), [(spec, "sm_90")], 1),
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
    """Whatever asks for a kernel, and each time it does."""
    broken_cupy(tmp_path, how)
    done = subprocess.run(
        [sys.executable, "-c", ASK_CUPY], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{IMPORTS}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 7
    assert len({line[line.index("jitrope compiles") :] for line in lines}) == 1
    cause = {
        "numpy": "ValueError: numpy.dtype size changed",
        "attribute": "has no attribute",
        "cut": ".so: file too short",
    }
    assert cause.get(how, "libcublas.so.13: cannot open shared object file") in lines[0]
    assert re.search(r"pip install --force-reinstall cupy-cuda1[23]x, and start Python again$", lines[0])
    assert "cache folder" not in lines[0]
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["prewarm", "prewarm --dry-run", "doctor --json"])
def test_a_cupy_that_is_broken_is_no_traceback_of_a_command(tmp_path: Path, command: str) -> None:
    broken_cupy(tmp_path, "numpy")
    name, *options = command.split()
    options += ["--heads", "8", "--arch", "sm_90"] * (name == "prewarm")
    done = subprocess.run(
        [sys.executable, "-m", "jitrope", name, *options], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{IMPORTS}"},
    )  # fmt: skip
    assert done.returncode == 1
    said = done.stdout if name == "doctor" else done.stderr
    assert "numpy.dtype size changed" in said
    assert "pip install --force-reinstall cupy-cuda1" in said
    assert "Traceback" not in done.stdout + done.stderr


# ---- no compiling --------------------------------------------------------------------------------


@pytest.fixture
def _configured() -> Iterator[None]:
    yield
    jitrope.configure()


@pytest.mark.usefixtures("_configured")
@pytest.mark.parametrize("how", ["environment", "configure"])
def test_no_compile(own_cache, monkeypatch: pytest.MonkeyPatch, how: str, tmp_path: Path) -> None:
    """A miss is an error with the command that makes the kernel, which is then run here."""
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
    assert read_calls(tmp_path / "missing.json") == [SPEC]
    assert kernels.build(SPEC, "sm_90").path is not None


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
    jitrope.configure()
    assert config.compile_allowed()


# ---- on a GPU ------------------------------------------------------------------------------------

ON_THE_GPU = """
import torch, jitrope
torch.manual_seed(0)
q = torch.randn(1, 64, 4, 128, device="cuda", dtype=torch.bfloat16)
angles = torch.rand(64, 64, device="cuda")
cos, sin = angles.cos(), angles.sin()
def call():
    out, _ = jitrope.apply_rope(q, None, cos, sin)
    torch.cuda.synchronize()
    return out
"""


def on_the_gpu(code: str, cache: Path, **environment: str) -> str:
    """What a process that makes calls prints."""
    given = {**os.environ, "JITROPE_CACHE_DIR": str(cache), "PYTHONPATH": IMPORTS, **environment}
    done = subprocess.run([sys.executable, "-c", ON_THE_GPU + code], capture_output=True, text=True, env=given)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


COUNTED = """
from jitrope.jit import kernels
call()
counts = kernels.kernel_cache().counts
print(counts.compiled, counts.hits)
"""


@pytest.mark.gpu
def test_an_image_that_the_driver_refuses_is_rebuilt_once(tmp_path: Path) -> None:
    from jitrope.jit.registry import spec_from_dict
    from jitrope.jit.render import render

    assert on_the_gpu(COUNTED, tmp_path / "k") == "1 0"
    cache = KernelCache(tmp_path / "k")
    (entry,) = cache.entries()
    spec = spec_from_dict(entry.spec)
    alien = compiler.compile_source(render(spec), "sm_75")[0]
    key = kernels.key_of(spec, entry.arch)
    cache.discard(key)
    assert cache.store(key, "text", alien, entry.spec)
    assert on_the_gpu(COUNTED, tmp_path / "k") == "1 1"
    assert on_the_gpu(COUNTED, tmp_path / "k") == "0 1"


ALIEN = """
from jitrope.jit import compiler, kernels
whole = compiler.compile_source
def alien(source, arch, **rest):
    return whole(source, arch if arch.startswith("compute_") else "sm_75", **rest)
compiler.compile_source = alien
"""

NEWER = """
from jitrope.jit import compiler, kernels
compiler._nvrtc()
class Older:  # an NVRTC that does not know this GPU
    def __init__(self, nvrtc):
        self.nvrtc = nvrtc
    def __getattr__(self, name):
        return getattr(self.nvrtc, name)
    def getSupportedArchs(self):
        return [number for number in self.nvrtc.getSupportedArchs() if number < OWN]
    def compileProgram(self, program, options):
        if f"-arch=sm_{OWN}" in options:
            raise self.nvrtc.NVRTCError(5)  # NVRTC_ERROR_INVALID_OPTION
        return self.nvrtc.compileProgram(program, options)
older = Older(compiler._nvrtc())
compiler._nvrtc = lambda: older
"""


@pytest.mark.gpu
@pytest.mark.parametrize("fault", [ALIEN, NEWER], ids=["the driver refuses it twice", "NVRTC does not know the GPU"])
def test_ptx_where_no_cubin_can_be_had(tmp_path: Path, fault: str) -> None:
    major, minor = kernels.torch.cuda.get_device_capability()
    expected = on_the_gpu("print(call().float().norm().item())", tmp_path / "cubin")
    code = fault.replace("OWN", f"{major}{minor}") + "print(call().float().norm().item())"
    assert on_the_gpu(code, tmp_path / "ptx") == expected
    archs = {entry.arch for entry in KernelCache(tmp_path / "ptx").entries()}
    assert any(arch.startswith("compute_") for arch in archs), archs


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
def test_a_kernel_is_loaded_from_memory_where_no_disk_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = """
import tempfile
def no_folder(*_, **__):
    raise FileNotFoundError(2, "No usable temporary directory found")
from jitrope.jit import kernels
kernels.tempfile = type("", (), {"TemporaryDirectory": no_folder})
print(call().float().norm().item() > 0)
"""
    assert on_the_gpu(code, tmp_path / "file" / "k") == "True"


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
