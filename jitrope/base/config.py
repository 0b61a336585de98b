"""Settings from the environment and from `configure`. No other file reads `os.environ`."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import arguments

__version__ = "0.1.0"  # read by the build, without an import
log = logging.getLogger("jitrope")

VARIABLES = ["JITROPE_CACHE_DIR", "JITROPE_SYSTEM_CACHE", "JITROPE_NO_COMPILE"]
VARIABLES += ["JITROPE_RECORD", "JITROPE_LAUNCH", "JITROPE_LOG"]
"""Every variable that jitrope reads. jit/README.md explains them."""

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
_may_compile: bool | None = None  # None: follow the environment
_launch: str | None = None  # None: follow the environment
_batch_invariant = False
_KEPT: Any = object()
LAUNCHES = ("token_linear", "grid_2d")
_reactions: list[Callable[[], None]] = []
_warned: set[Any] = set()


def unknown_variables() -> list[str]:
    """Variables that begin with JITROPE_ but are unknown, so they have no effect."""
    return sorted(name for name in os.environ if name.startswith("JITROPE_") and name not in VARIABLES)


def configure(*, compile: Any = _KEPT, launch: Any = _KEPT, batch_invariant: Any = _KEPT) -> None:
    """Change settings of this process. They take precedence over the environment; a missing argument changes nothing.

    >>> jitrope.configure(launch="token_linear", compile=False)
    >>> jitrope.configure(launch=None, compile=None)  # the defaults

    Args:
        compile: with False, a kernel that is in no cache raises `MissingKernel`, which names the kernel and the
            command that makes it. With True it is compiled, even if `JITROPE_NO_COMPILE` is set. None: follow
            `JITROPE_NO_COMPILE`.
        launch: "auto", or force "token_linear" or "grid_2d", to compare them. All give the same bits, except those of
            some norms without batch_invariant. None: follow `JITROPE_LAUNCH`, which is read when a call is new; a call
            that was made before follows a change of it after `configure(launch=None)`, and a compiled one never does.
        batch_invariant: True: a norm adds the squares of a head in one order, for any number of tokens and any stage;
            calls with a norm whose tensors are not aligned for that are refused. "The same bits everywhere" in the
            guide says which norms need it. False, the default: some norms of few tokens are faster.

    Raises:
        InvalidInput: an argument has another value; nothing was changed.
    """
    global _may_compile, _launch, _batch_invariant
    may_compile = _may_compile if compile is _KEPT else compile
    if may_compile is not None:
        may_compile = arguments.flag("configure", "compile", may_compile, " or None")
    forced = arguments.word("configure", "launch", _launch if launch is _KEPT else launch, (None, "auto", *LAUNCHES))
    given = _batch_invariant if batch_invariant is _KEPT else batch_invariant
    invariant = arguments.flag("configure", "batch_invariant", given)
    replanned = launch is not _KEPT or invariant != _batch_invariant
    _may_compile, _launch, _batch_invariant = may_compile, forced, invariant
    for react in _reactions if replanned else ():
        react()


def on_change(react: Callable[[], None]) -> Callable[[], None]:
    """Call a function whenever `configure` changes the plans of calls."""
    _reactions.append(react)
    return react


def launch() -> str:
    """The forced launch, else "auto": `configure`, else `JITROPE_LAUNCH`.

    Raises:
        InvalidInput: the variable has another value.
    """
    if _launch is not None:
        return _launch
    given = os.environ.get("JITROPE_LAUNCH") or "auto"
    return arguments.word("environment", "JITROPE_LAUNCH", given, ("auto", *LAUNCHES))


def batch_invariant() -> bool:
    """Whether a norm must add in one order."""
    return _batch_invariant


def compile_allowed() -> bool:
    """Whether a kernel that is in no cache may be compiled: `configure`, else `JITROPE_NO_COMPILE`."""
    if _may_compile is not None:
        return _may_compile
    word = os.environ.get("JITROPE_NO_COMPILE", "").strip().lower()
    if word not in _TRUE + _FALSE:
        warn_once(f"JITROPE_NO_COMPILE={word} is neither 1 nor 0; it counts as 1", word)
    return word in _FALSE


def cache_dir() -> Path:
    """The kernel cache: `JITROPE_CACHE_DIR`, else `$XDG_CACHE_HOME/jitrope`, else `~/.cache/jitrope`.

    Without a home folder (an unknown user in a container) it is a folder of this user in the temporary folder.
    """
    given = os.environ.get("JITROPE_CACHE_DIR", "")
    if os.path.expanduser(given).startswith("~"):
        warn_once(f"JITROPE_CACHE_DIR={given}: there is no such home folder; it counts as not set", given)
    elif given:
        return _path(given)
    for base in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(base):  # the standard ignores other paths, and without a home folder ~ stays
            return Path(base, "jitrope")
    temporary = os.sep  # if no folder is writable, nothing will be stored
    with contextlib.suppress(OSError):
        temporary = tempfile.gettempdir()
    return Path(temporary, f"jitrope-{os.getuid() if hasattr(os, 'getuid') else 'cache'}")


_start = Path()
with contextlib.suppress(FileNotFoundError):  # it was deleted
    _start = Path.cwd()


def _path(given: str) -> Path:
    """A path with `~` expanded if that home exists. A relative one is below the folder where jitrope was imported."""
    return _start / os.path.expanduser(given)


OWN_BUNDLE = Path(__file__).parent.parent / "kernels.zip"
"""A bundle that a distributor of jitrope may put into its folder. Wheels of this repository have none."""


def system_caches() -> tuple[Path, ...]:
    """The folders and bundles of `JITROPE_SYSTEM_CACHE`, in order, and `OWN_BUNDLE` if there is one."""
    named = [_path(part) for part in os.environ.get("JITROPE_SYSTEM_CACHE", "").split(os.pathsep) if part]
    return (*named, OWN_BUNDLE) if OWN_BUNDLE.exists() else tuple(named)


def record_file() -> Path | None:
    """`JITROPE_RECORD`."""
    given = os.environ.get("JITROPE_RECORD")
    return _path(given) if given else None


def warn_once(message: str, topic: Any) -> None:
    """Log the first warning about a topic."""
    if topic not in _warned:
        _warned.add(topic)
        log.warning(message)


def set_up_logging() -> None:
    """Show jitrope's messages of the level `JITROPE_LOG` (debug, info, warning, ...) and above."""
    if name := os.environ.get("JITROPE_LOG"):
        try:
            log.setLevel(name.upper())
        except ValueError:
            log.warning("JITROPE_LOG=%s is not a logging level; use debug, info, warning or error", name)
            return
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        handler.addFilter(lambda _: not logging.getLogger().handlers)  # they show it too
        log.addHandler(handler)


@contextlib.contextmanager
def cupy_import_environment() -> Iterator[None]:
    """Allow importing CuPy when its folder cannot be made, the user's `CUPY_CACHE_DIR` or one in the home folder.

    At import CuPy makes that folder for its own kernels or fails; it never changes the folder later. jitrope caches
    kernels itself, so CuPy gets another existing folder.
    """
    chosen = os.environ.get("CUPY_CACHE_DIR", "")
    folder = chosen or os.path.expanduser("~/.cupy/kernel_cache")
    with contextlib.suppress(OSError):
        if chosen or os.path.isabs(folder):  # without a home folder ~ stays
            os.makedirs(folder, exist_ok=True)  # as CuPy would: no other test is reliable
    if os.path.isdir(folder):
        yield
        return
    folder = str(Path(__file__).parent)  # an existing folder
    with contextlib.suppress(OSError):
        folder = tempfile.mkdtemp(prefix="jitrope-cupy-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["CUPY_CACHE_DIR"] = folder
    try:
        yield
    finally:
        os.environ.pop("CUPY_CACHE_DIR", None)  # another thread may import too
        if chosen:
            os.environ["CUPY_CACHE_DIR"] = chosen
