"""Kernels on disk: whole or not there, never stale, never somebody else's."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jitrope import compiler, config, runtime
from jitrope.cache import KernelCache, Key
from jitrope.errors import CompileError
from jitrope.prewarm import Call

KEY = Key("rope_x", "ingredients", ("-std=c++17",), "sm_90", "nvrtc 13.0")
SPEC = Call(40).specs()[0]
ROOT = Path(__file__).parent.parent


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "kernels")


def filled(cache: KernelCache) -> Path:
    path = cache.store(KEY, "text", b"\x7fELF cubin", {"a": 1})
    assert path is not None
    return path


def test_round_trip(cache: KernelCache) -> None:
    assert cache.load(KEY) is None
    path = filled(cache)
    assert cache.load(KEY) == path
    assert path.read_bytes() == b"\x7fELF cubin"
    assert sorted(p.name for p in path.parent.iterdir()) == ["kernel.cu", "kernel.cubin", "spec.json"]
    assert path.parent.name.startswith("rope_x-sm_90-")
    assert (cache.root.stat().st_mode & 0o777) == 0o700


@pytest.mark.parametrize("field", ["ingredients", "options", "arch", "compiler"])
def test_every_part_of_the_key_counts(field: str) -> None:
    """An upgrade of the templates, the compiler or the flags can never load an old kernel."""
    changed = replace(KEY, **{field: (*KEY.options, "-G") if field == "options" else "other"})
    assert changed.digest != KEY.digest
    assert replace(KEY, name="other").digest == KEY.digest


def test_format_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jitrope.cache.FORMAT", 999)
    assert replace(KEY).digest != KEY.digest


DAMAGE = {
    "truncated": lambda folder: (folder / "kernel.cubin").write_bytes(b"\x7fELF cub"),
    "flipped bit": lambda folder: (folder / "kernel.cubin").write_bytes(b"\x7fELF cubio"),
    "empty": lambda folder: (folder / "kernel.cubin").write_bytes(b""),
    "no cubin": lambda folder: (folder / "kernel.cubin").unlink(),
    "no spec": lambda folder: (folder / "spec.json").unlink(),
    "foreign spec": lambda folder: (folder / "spec.json").write_text("[1, 2]"),
    "broken spec": lambda folder: (folder / "spec.json").write_text("{"),
    "old format": lambda folder: edit(folder, "format", 0),
    "another key": lambda folder: edit(folder, "digest", "0" * 64),
}


def edit(folder: Path, name: str, value: object) -> None:
    meta = json.loads((folder / "spec.json").read_text())
    (folder / "spec.json").write_text(json.dumps({**meta, name: value}))


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_entry_is_a_miss_said_once_and_rebuilt(cache: KernelCache, how: str, caplog) -> None:
    DAMAGE[how](filled(cache).parent)
    with caplog.at_level(logging.WARNING, "jitrope"):
        assert cache.load(KEY) is None
        assert cache.load(KEY) is None
    assert len(caplog.records) == 1
    assert "is not usable" in caplog.text
    path = filled(cache)
    assert cache.load(KEY) == path


def test_verify_finds_what_load_would_refuse(cache: KernelCache) -> None:
    DAMAGE["flipped bit"](filled(cache).parent)
    good, bad = cache.verify()
    assert good == 0
    assert "checksum" in bad[0][1]


def test_losing_the_race_is_as_good_as_winning(cache: KernelCache) -> None:
    path = filled(cache)
    assert cache.store(KEY, "text", b"\x7fELF cubin", {}) == path
    assert [p.name for p in cache.root.iterdir()] == [path.parent.name]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o703])
def test_a_folder_that_others_can_write_is_not_trusted(cache: KernelCache, mode: int, caplog) -> None:
    filled(cache)
    for folder in (cache.root, next(cache.root.iterdir())):
        folder.chmod(mode)
        assert KernelCache(cache.root).load(KEY) is None
        assert "can be written by other users" in caplog.text
        folder.chmod(0o700)
    assert cache.load(KEY) is not None
    cache.root.chmod(mode)
    assert cache.store(replace(KEY, arch="sm_80"), "text", b"x", {}) is None
    assert not any("sm_80" in path.name for path in cache.root.iterdir())


@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder to another user needs root")
def test_a_folder_of_another_user_is_not_trusted(cache: KernelCache, caplog) -> None:
    filled(cache)
    os.chown(cache.root, 12345, 12345)
    assert cache.load(KEY) is None
    assert "belongs to another user" in caplog.text


def test_a_cache_that_cannot_be_written(tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("not a folder")
    cache = KernelCache(tmp_path / "file" / "kernels")
    assert cache.store(KEY, "text", b"x", {}) is None
    assert cache.store(KEY, "text", b"x", {}) is None
    assert cache.load(KEY) is None
    assert len([r for r in caplog.records if "stay in memory" in r.message]) == 1


def test_a_bad_entry_that_cannot_be_replaced_is_not_loaded(cache: KernelCache, monkeypatch) -> None:
    """Losing the rename to a damaged entry must not hand that entry out."""
    folder = filled(cache).parent
    DAMAGE["flipped bit"](folder)
    monkeypatch.setattr("jitrope.cache.shutil.rmtree", lambda *_, **__: None)  # a folder that will not go
    assert cache.store(KEY, "text", b"\x7fELF cubin", {}) is None


def test_clear_and_leftovers(cache: KernelCache) -> None:
    filled(cache)
    (cache.root / ".tmp-dead").mkdir()
    (cache.root / "of-the-user.txt").write_text("keep")
    assert cache.clear() == 1
    assert [p.name for p in cache.root.iterdir()] == ["of-the-user.txt"]


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JITROPE_CACHE_DIR", "/a/b")
    assert config.cache_dir() == Path("/a/b")
    monkeypatch.delenv("JITROPE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert config.cache_dir() == Path("/x/jitrope")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert config.cache_dir() == Path("/home/me/.cache/jitrope")


@pytest.mark.parametrize(("level", "said"), [("info", "compiled rope_"), ("loud", "is not a logging level"), ("", "")])
def test_jitrope_log(tmp_path: Path, level: str, said: str) -> None:
    code = "from jitrope import runtime; from jitrope.prewarm import Call; runtime.build(Call(40).specs()[0], 'sm_90')"
    environment = {**os.environ, "JITROPE_CACHE_DIR": str(tmp_path), "JITROPE_LOG": level, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said in done.stderr
    assert bool(said) == ("jitrope" in done.stderr or "JITROPE" in done.stderr)


# ---- with the compiler ---------------------------------------------------------------------------


def test_build_compiles_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "kernels"))
    path, cubin, compiled = runtime.build(SPEC, "sm_90")
    assert compiled
    assert path.read_bytes() == cubin
    assert (path.parent / "kernel.cu").read_text().startswith("#line 1")
    assert runtime.build(SPEC, "sm_90") == (path, None, False)
    assert runtime.build(SPEC, "sm_80")[2]
    assert runtime.build(SPEC, "sm_90", rebuild=True)[2]


def test_a_hit_renders_nothing_and_loads_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "kernels"))
    runtime.build(SPEC, "sm_90")
    monkeypatch.setattr(runtime, "render", None)
    monkeypatch.setattr(compiler, "_nvrtc", None)
    assert not runtime.build(SPEC, "sm_90")[2]


def test_build_without_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    path, cubin, compiled = runtime.build(SPEC, "sm_90")
    assert path is None
    assert compiled
    assert cubin.startswith(b"\x7fELF")


def test_a_new_compiler_never_loads_an_old_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "kernels"))
    runtime.build(SPEC, "sm_90")
    monkeypatch.setattr(compiler, "compiler_version", lambda: "cupy 99, nvrtc 99")
    assert runtime.build(SPEC, "sm_90")[2]


def test_missing_cupy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_cupy() -> str:
        raise ModuleNotFoundError("No module named 'cupy'")

    monkeypatch.setattr(compiler, "compiler_version", no_cupy)
    for cuda, extra in (("12.8", "cuda12"), ("13.0", "cuda13")):
        monkeypatch.setattr(runtime.torch.version, "cuda", cuda)
        with pytest.raises(CompileError, match=rf"pip install 'jitrope\[{extra}\]'"):
            runtime.build(SPEC, "sm_90")


def _race(root: str, barrier, results) -> None:
    os.environ["JITROPE_CACHE_DIR"] = root
    from jitrope import compiler, runtime

    compiler.nvrtc_version()
    barrier.wait()
    path, _, _ = runtime.build(SPEC, "sm_90")
    results.put(path.read_bytes())


def test_eight_ranks_on_one_empty_cache(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(8), context.Queue()
    ranks = [context.Process(target=_race, args=(str(tmp_path / "k"), barrier, results)) for _ in range(8)]
    for rank in ranks:
        rank.start()
    cubins = {results.get(timeout=300) for _ in ranks}
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * 8
    assert len(cubins) == 1
    assert KernelCache(tmp_path / "k").verify() == (1, [])
    assert len(list((tmp_path / "k").iterdir())) == 1


STORE_FOR_EVER = """
import sys
from pathlib import Path
from jitrope.cache import Key, KernelCache
cache = KernelCache(Path(sys.argv[1]))
print("ready", flush=True)
for i in range(10**9):
    cache.store(Key("n", str(i % 50), (), "sm_90", "c"), "t" * 100000, b"c" * 1000000, {})
    cache.discard(Key("n", str((i + 25) % 50), (), "sm_90", "c"))
"""


def test_kill_at_any_point_leaves_no_half_entry(tmp_path: Path) -> None:
    root = tmp_path / "k"
    for i in range(5):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-c", STORE_FOR_EVER, str(root)], stdout=subprocess.PIPE, env=environment
        )
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.05 + 0.03 * i)
        process.send_signal(signal.SIGKILL)
        process.wait()
        cache = KernelCache(root)
        good, bad = cache.verify()
        # A discard that was cut short may leave a torn entry: it has to read as a miss.
        for path, _ in bad:
            assert not (path / "spec.json").exists() or not (path / "kernel.cubin").exists()
        assert good + len(bad) > 0
