"""The environment's words: where kernels lie, whether they may be compiled, and what is logged."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

import jitrope
from jitrope.base import config

from .. import fresh
from ..caches import IMPORT


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for given, of_xdg, want in (
        *(("/a/b", "", "/a/b"), ("~/b", "", "/home/me/b"), ("", "/x", "/x/jitrope")),
        *(("", "not/absolute", "/home/me/.cache/jitrope"), ("", "", "/home/me/.cache/jitrope")),
    ):
        monkeypatch.setenv("JITROPE_CACHE_DIR", given)
        monkeypatch.setenv("XDG_CACHE_HOME", of_xdg)
        assert config.cache_dir() == Path(want)
    for name in ("HOME", "JITROPE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user without an entry in the password file
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert config.cache_dir() == tmp_path / f"jitrope-{os.getuid()}"
    monkeypatch.setattr("tempfile.gettempdir", lambda: os.listdir("/no/such/folder"))  # as where none is writable
    assert config.cache_dir() == Path(f"/jitrope-{os.getuid()}")


def test_a_home_folder_that_nobody_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JITROPE_CACHE_DIR", "~nobody-of-this-name/k")
    assert config.cache_dir() == config.cache_dir() == tmp_path / "jitrope"
    assert caplog.text.count("there is no such home folder") == 1
    monkeypatch.setenv("JITROPE_SYSTEM_CACHE", "~nobody-of-this-name/k:~/k")
    monkeypatch.setenv("JITROPE_RECORD", "~nobody-of-this-name/k.json")
    assert [path.is_absolute() for path in (*config.system_caches(), config.record_file())] == [True] * 3


GONE = f"""
import os
os.rmdir(os.getcwd())
{IMPORT}
from jitrope.base import config
from jitrope.base.errors import CacheError
from jitrope.jit import recording
from jitrope.tools import doctor
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
RELATIVE = {"JITROPE_CACHE_DIR": "kernels", "JITROPE_SYSTEM_CACHE": "layer", "JITROPE_RECORD": "run.json"}


@pytest.mark.skipif(sys.version_info[:3] == (3, 13, 0), reason="Python 3.13.0: a SystemError of its import")
def test_a_relative_cache_where_the_working_folder_is_gone(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    done = fresh.python("-c", GONE, cwd=tmp_path / "gone", check=True, **RELATIVE)
    assert done.stdout.startswith("cannot write run.json")
    assert "kernels stay in memory" in done.stderr


def test_relative_paths_keep_their_meaning_in_another_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are below the folder where jitrope was imported."""
    start = config._start
    assert start.is_absolute()
    for name, value in RELATIVE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    found = config.cache_dir(), *config.system_caches(), config.record_file()
    assert found == (start / "kernels", start / "layer", start / "run.json")


def test_configure_is_over_the_environment(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    for word, allowed in (("", True), ("0", True), ("no", True), ("1", False), ("TRUE", False), ("perhaps", False)):
        monkeypatch.setenv("JITROPE_NO_COMPILE", word)
        assert config.compile_allowed() == allowed
    assert "perhaps" in caplog.text
    for word, allowed in (("perhaps", True), ("0", False)):
        monkeypatch.setenv("JITROPE_NO_COMPILE", word)
        jitrope.configure(compile=allowed)
        assert config.compile_allowed() == allowed
    jitrope.configure(compile=None)
    assert config.compile_allowed()


LOGGED = f"""
import logging
{IMPORT}
first, second, *_ = specs_of(heads=[32, 8])
kernels.build(first, "sm_90")
logging.basicConfig()
kernels.build(second, "sm_90")
"""


def test_jitrope_log(tmp_path: Path) -> None:
    """Each line is there once, also where the program has handlers of its own."""
    done = fresh.python("-c", LOGGED, check=True, JITROPE_CACHE_DIR=str(tmp_path), JITROPE_LOG="info")
    first, second = done.stderr.splitlines()
    assert first.startswith("jitrope: compiled rope_")
    assert "compiled rope_" in second


@pytest.mark.parametrize("level", ["loud", ""])
def test_another_level_adds_no_handler(monkeypatch: pytest.MonkeyPatch, caplog, level: str) -> None:
    monkeypatch.setenv("JITROPE_LOG", level)
    before = [*config.log.handlers], config.log.level
    config.set_up_logging()
    assert (config.log.handlers, config.log.level) == before
    said = "JITROPE_LOG=loud is not a logging level; use debug, info, warning or error"
    assert caplog.record_tuples == ([("jitrope", logging.WARNING, said)] if level else [])
