"""The environment: where things are and how loud we are. No other file reads `os.environ`."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger("jitrope")


def cache_dir() -> Path:
    """The kernel cache: `JITROPE_CACHE_DIR`, else `$XDG_CACHE_HOME/jitrope`, else `~/.cache/jitrope`."""
    if given := os.environ.get("JITROPE_CACHE_DIR"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path(os.path.expanduser("~/.cache"))) / "jitrope"


@contextlib.contextmanager
def cache_dir_set_to(folder: str | Path) -> Iterator[None]:
    """Processes started inside use `folder` as their kernel cache."""
    before = os.environ.get("JITROPE_CACHE_DIR")
    os.environ["JITROPE_CACHE_DIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["JITROPE_CACHE_DIR"]
        else:
            os.environ["JITROPE_CACHE_DIR"] = before


def set_up_logging() -> None:
    """Show jitrope's messages from the level that `JITROPE_LOG` names (debug, info, warning, ...)."""
    if name := os.environ.get("JITROPE_LOG"):
        level = logging.getLevelNamesMapping() if hasattr(logging, "getLevelNamesMapping") else None
        number = level.get(name.upper()) if level else logging.getLevelName(name.upper())
        if not isinstance(number, int):
            log.warning("JITROPE_LOG=%s is not a logging level; use debug, info, warning or error", name)
            return
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        log.addHandler(handler)
        log.setLevel(number)


@contextlib.contextmanager
def cupy_import_environment() -> Iterator[None]:
    """Let CuPy be imported where the home folder cannot be written.

    CuPy makes its own kernel cache folder when it is imported and fails where it cannot. We keep
    our kernels ourselves, so unless the user chose a folder it gets a temporary one.
    """
    if "CUPY_CACHE_DIR" in os.environ or os.access(os.path.expanduser("~"), os.W_OK):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="jitrope-cupy-") as folder:
        os.environ["CUPY_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["CUPY_CACHE_DIR"]
