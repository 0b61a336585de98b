"""The environment: where things are, what is allowed and how loud we are. No other file reads `os.environ`."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import arguments

__version__ = "0.1.0"  # read by the build, without an import
log = logging.getLogger("jitrope")


VARIABLES = {
    "JITROPE_CACHE_DIR": "the folder that kernels are kept in",
    "JITROPE_SYSTEM_CACHE": "read-only caches below it: folders or bundles, joined as in PATH",
    "JITROPE_NO_COMPILE": "1: a kernel that is in no cache is an error",
    "JITROPE_RECORD": "a JSON file that is told every kernel a run asks for, for `jitrope prewarm --from`",
    "JITROPE_LOG": "debug, info, warning or error",
}
"""Every variable that jitrope reads."""

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
_may_compile: bool | None = None  # None: what the environment says
_launch = "auto"
_KEPT: Any = object()
LAUNCHES = ("auto", "token_linear", "grid_2d")
_reactions: list[Callable[[], None]] = []
_warned: set[str] = set()


def unknown_variables() -> list[str]:
    """Variables that begin with JITROPE_ and mean nothing."""
    return sorted(name for name in os.environ if name.startswith("JITROPE_") and name not in VARIABLES)


def configure(*, compile: Any = _KEPT, launch: Any = _KEPT) -> None:
    """Settings of this process, over the environment's. One that is not given stays as it is.

    Args:
        compile: False: a kernel that is in no cache raises `MissingKernel`, which names it and the command that
            makes it; True: it is compiled, whatever `JITROPE_NO_COMPILE` says; None: as that says.
        launch: "auto", or force "token_linear" or "grid_2d", to compare them; all give the same bits.

    Raises:
        InvalidInput: an argument is none of these; nothing was changed.
    """
    global _may_compile, _launch
    if compile is not _KEPT:
        compile = None if compile is None else arguments.flag("configure", "compile", compile)
    if launch is not _KEPT and arguments.word("configure", "launch", launch, LAUNCHES) != _launch:
        _launch = launch
        for react in _reactions:
            react()
    if compile is not _KEPT:
        _may_compile = compile


def on_change(react: Callable[[], None]) -> Callable[[], None]:
    """Call a function when the launch is set to another."""
    _reactions.append(react)
    return react


def launch() -> str:
    """The launch that is forced, else "auto"."""
    return _launch


def compile_allowed() -> bool:
    """Whether a kernel that is in no cache may be compiled: `configure`, else `JITROPE_NO_COMPILE`."""
    if _may_compile is not None:
        return _may_compile
    word = os.environ.get("JITROPE_NO_COMPILE", "").strip().lower()
    if word not in _TRUE + _FALSE:
        _warn_once(f"JITROPE_NO_COMPILE={word} is neither 1 nor 0; it is taken as 1")
    return word in _FALSE


def cache_dir() -> Path:
    """The kernel cache: `JITROPE_CACHE_DIR`, else `$XDG_CACHE_HOME/jitrope`, else `~/.cache/jitrope`.

    Where there is no home folder (an unknown user in a container) it is one of this user in the temporary folder.
    """
    given = os.environ.get("JITROPE_CACHE_DIR", "")
    if os.path.expanduser(given).startswith("~"):
        _warn_once(f"JITROPE_CACHE_DIR={given}: there is no such home folder; it is taken as not set")
    elif given:
        return _path(given)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():  # the standard has others ignored
        return base / "jitrope"
    home = Path(os.path.expanduser("~"))
    if home.is_absolute():
        return home / ".cache" / "jitrope"
    try:
        temporary = tempfile.gettempdir()
    except OSError:  # nothing can be written, so nothing will be
        temporary = os.sep
    return Path(temporary) / f"jitrope-{os.getuid() if hasattr(os, 'getuid') else 'cache'}"


def _path(given: str) -> Path:
    """Absolute, `~` expanded where there is such a home folder; as given where the working folder is gone."""
    path = Path(os.path.expanduser(given))
    with contextlib.suppress(FileNotFoundError):
        return path.absolute()
    return path


def system_caches() -> tuple[Path, ...]:
    """The folders and bundles of `JITROPE_SYSTEM_CACHE`, the first before the others."""
    given = os.environ.get("JITROPE_SYSTEM_CACHE", "")
    return tuple(_path(part) for part in given.split(os.pathsep) if part)


def record_file() -> Path | None:
    """`JITROPE_RECORD`."""
    given = os.environ.get("JITROPE_RECORD")
    return _path(given) if given else None


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        log.warning(message)


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

    CuPy makes its own kernel cache folder when it is imported, fails where it cannot, and keeps to it. We keep our
    kernels ourselves, so unless the user chose a folder it gets another one that is there.
    """
    if "CUPY_CACHE_DIR" in os.environ or _home_takes_cupy():
        yield
        return
    os.environ["CUPY_CACHE_DIR"] = _folder_for_cupy()
    try:
        yield
    finally:
        del os.environ["CUPY_CACHE_DIR"]


def chosen_cupy_folder() -> Path | None:
    """The kernel cache folder of CuPy that the user chose."""
    given = os.environ.get("CUPY_CACHE_DIR")
    return Path(given) if given else None


def _home_takes_cupy() -> bool:
    """Whether CuPy can make its folder: made here, as CuPy would, because nothing else tells."""
    folder = os.path.expanduser("~/.cupy/kernel_cache")
    if not os.path.isabs(folder):
        return False
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return False
    return True


@lru_cache(maxsize=1)
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="jitrope-cupy-")


def _folder_for_cupy() -> str:
    """A temporary one, as long as this process lives; where nothing can be written, one that is there."""
    try:
        return _temporary_folder().name
    except OSError:
        return str(Path(__file__).parent)
