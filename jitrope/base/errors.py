"""The errors of jitrope. All can be pickled, so a worker process can pass them to its parent."""

from __future__ import annotations

from typing import Any


class JitropeError(Exception):
    """Base of every error that jitrope raises on purpose."""


class InvalidInput(JitropeError, ValueError):
    """The caller's arguments do not fit together; nothing was written."""


class CompileError(JitropeError):
    """A kernel could not be compiled or loaded. The message says why, and names a missing package."""


class MissingKernel(CompileError):
    """A kernel is in no cache, and compiling is forbidden (`JITROPE_NO_COMPILE=1`, `jitrope.configure`).

    Attributes:
        spec: the kernel's constants, a dict for JSON; `jitrope.tools.prewarm.read_record` reads it back.
        arch: the GPU's architecture, as "sm_90".
        command: the shell line that makes the kernel.
    """

    def __init__(self, message: str, spec: dict[str, Any], arch: str, command: str) -> None:
        super().__init__(message)
        self.spec, self.arch, self.command = spec, arch, command

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.spec, self.arch, self.command)


class CacheError(JitropeError):
    """A kernel cache, a bundle or a recording cannot be read or written."""


def require(name: str, good: object, text: str) -> None:
    """Raise InvalidInput with a sentence about a function or a spec, unless it is good."""
    if not good:
        raise InvalidInput(f"{name}: {text}")
