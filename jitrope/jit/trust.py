"""Files and folders: read if only root and this user can change them (README.md, "Who is trusted"), written whole."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from ..base.errors import CacheError

LIMIT = 1 << 26
"""The most bytes that are read of one file, 64 MiB. A kernel has 0.1; a sparse file may claim any size."""

user = getattr(os, "geteuid", int)
"""The number of this user; 0 where there are no users."""

_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOFOLLOW"))  # a pipe must not block


def fault(info: os.stat_result, above: bool = False) -> str | None:
    """The reason why users other than root and this one may change a file or folder, or None.

    above: of a folder above a bundle. In a sticky one, such as /tmp, others can make files, but neither rename nor
    remove those of root and this user. The owner of / counts as root: in a container it may have another number.
    """
    if info.st_uid not in (0, user()) and not (above and info.st_uid == os.stat("/").st_uid):
        return "belongs to another user"
    writable = os.name == "posix" and info.st_mode & 0o022 and not (above and info.st_mode & stat.S_ISVTX)
    return "can be written by other users" if writable else None


def way(path: Path) -> str | None:
    """The reason why other users can put something else at a path, or None. Raises OSError.

    All folders above the path, and all links with the ways to their targets, must be trusted.
    """
    path = path.absolute()
    os.stat(path)  # raises for links in a circle
    for place in (*reversed(path.parents), path):
        link = os.lstat(place)
        if stat.S_ISLNK(link.st_mode):
            if link.st_uid not in (0, user()):
                return f"{place} is a link of another user"
            if wrong := way(place.parent / os.readlink(place)):
                return wrong
        if place != path and (wrong := fault(os.stat(place), above=True)):
            return f"{place} {wrong}"
    return None


@contextmanager
def folder(path: str | Path, inside: int | None = None, private: bool = False) -> Iterator[int]:
    """A handle of a folder, not through a link. inside: the handle of its parent. private: close it to others.

    Raises CacheError if others can change it, OSError if it cannot be read or is no folder.
    """
    number = os.open(path, _FLAGS | getattr(os, "O_DIRECTORY", 0), dir_fd=inside)
    try:
        info = os.fstat(number)
        if private and info.st_uid == user() and info.st_mode & 0o022:
            os.fchmod(number, 0o700)
        elif wrong := fault(info):
            raise CacheError(f"{path} {wrong}")
        yield number
    finally:
        os.close(number)


def root(path: Path, own: bool) -> AbstractContextManager[int]:
    """A handle of a cache's folder: the user's own, or one that is refused if other users can put another in its place.

    A link is followed only if they cannot. Raises as `folder` does.
    """
    follow = not own or os.path.islink(path)
    if follow and (wrong := way(path)):
        raise CacheError(wrong)
    return folder(os.path.realpath(path) if follow else path, private=own)


def read(name: str, inside: int | None = None, most: int = LIMIT, anybodys: bool = False) -> bytes:
    """The bytes of a file, not through a link. inside: the handle of its folder. anybodys: others may change it.

    Raises CacheError if it must not be used, or has more bytes than `most`; OSError if it cannot be read.
    """
    try:
        with open(name, "rb", opener=lambda name, _: os.open(name, _FLAGS, dir_fd=inside)) as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise CacheError(f"{name} is not a file")
            if not anybodys and (wrong := fault(info)):
                raise CacheError(f"{name} {wrong}")
            if info.st_size > most:
                raise CacheError(f"{name} has {info.st_size} bytes, more than {most}")
            return file.read(info.st_size)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):  # there is none, or a link
            raise CacheError(f"{name}: {error.strerror}") from error
        raise


# ---- writing -------------------------------------------------------------------------------------


def refuse_device(path: Path) -> None:
    """Raise CacheError if there is something else than a file, such as a device or a folder."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise CacheError(f"cannot write {path}: it is not a file")


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A new file, which replaces the one at a path at the end. The path may be a link to a file.

    Raises CacheError, and changes nothing, if it cannot be written, or is a device.
    """
    refuse_device(path)
    target = Path(os.path.realpath(path))
    temporary = target.parent / f".jitrope-{uuid.uuid4().hex}"
    try:
        yield temporary
        os.replace(temporary, target)
    except OSError as error:
        raise CacheError(f"cannot write {path}: {reason(error)}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def reason(error: BaseException) -> str:
    """An error's message without the path."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
