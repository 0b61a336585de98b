"""What jitrope raises. Every error can be pickled, so that a worker process can hand it to its parent."""

from __future__ import annotations

from typing import Any


class JitropeError(Exception):
    """Base of every error that jitrope raises on purpose."""


class InvalidInput(JitropeError, ValueError):
    """The caller's arguments do not fit together; nothing was written."""


class CompileError(JitropeError):
    """A kernel could not be compiled or loaded."""


class MissingKernel(CompileError):
    """A kernel is in no cache, and compiling is forbidden (`JITROPE_NO_COMPILE=1`, `jitrope.configure`).

    spec: the kernel's, as `to_dict` gives it; arch: as `sm_90`; command: the shell line that makes it.
    """

    def __init__(self, message: str, spec: dict[str, Any], arch: str, command: str) -> None:
        super().__init__(message)
        self.spec, self.arch, self.command = spec, arch, command

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.spec, self.arch, self.command)


class CacheError(JitropeError):
    """A cache command was asked for something that the cache cannot do."""
