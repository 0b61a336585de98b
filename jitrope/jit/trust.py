"""Who is trusted: what only root and this user can change is read, nothing else (README.md, "Who is trusted")."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..base.errors import CacheError

LIMIT = 1 << 26
"""The most bytes that are read of one file, 64 MiB. A kernel has 0.1; a sparse file may claim any size."""

user = getattr(os, "geteuid", int)
"""The number of this user; 0 where there are no users."""

_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOFOLLOW"))  # a pipe must not block
_FOLDER = _FLAGS | getattr(os, "O_DIRECTORY", 0)


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
def closing(number: int) -> Iterator[int]:
    """Close a handle at the end of the block."""
    try:
        yield number
    finally:
        os.close(number)


def folder(path: str | Path, inside: int | None = None, private: bool = False) -> int:
    """A handle of a folder, not through a link. inside: the handle of its parent. private: close it to others.

    Raises ValueError if others can change it, OSError if it cannot be read or is no folder.
    """
    number = os.open(path, _FOLDER, dir_fd=inside)
    try:
        info = os.fstat(number)
        if private and info.st_uid == user() and info.st_mode & 0o022:
            os.fchmod(number, 0o700)
        elif wrong := fault(info):
            raise ValueError(wrong)
    except BaseException:
        os.close(number)
        raise
    return number


def root(path: Path, parents: bool = False, private: bool = False) -> int:
    """A handle of a cache's folder. parents: refuse it if other users can put another folder in its place.

    A link is followed only if they cannot.

    Raises:
        CacheError: it is not trusted or cannot be read.
        FileNotFoundError, NotADirectoryError: there is none.
    """
    try:
        follow = parents or os.path.islink(path)
        if follow and (wrong := way(path)):
            raise CacheError(wrong)
        return folder(os.path.realpath(path) if follow else path, private=private)
    except ValueError as error:
        raise CacheError(f"{path} {error}") from error
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise CacheError(f"{path} cannot be read ({error.strerror})") from error


def read(name: str, inside: int) -> bytes:
    """The bytes of a file in an open folder. Raises ValueError if it must not be used, OSError if it cannot be read."""
    try:
        number = os.open(name, _FLAGS, dir_fd=inside)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):  # there is none, or a link
            raise ValueError(f"{name}: {error.strerror}") from error
        raise
    with closing(number):
        info = regular(number, name)
        if wrong := fault(info):
            raise ValueError(f"{name} {wrong}")
        if info.st_size > LIMIT:
            raise ValueError(f"{name} has {info.st_size} bytes, more than any kernel")
        with open(number, "rb", closefd=False) as file:
            return file.read(LIMIT)


def regular(number: int, name: str) -> os.stat_result:
    """The properties of an open file. Raises ValueError if it is no file."""
    if stat.S_ISREG((info := os.fstat(number)).st_mode):
        return info
    raise ValueError(f"{name} is not a file")
