"""What jitrope raises."""


class JitropeError(Exception):
    """Base of every error that jitrope raises on purpose."""


class InvalidInput(JitropeError, ValueError):
    """The caller's arguments do not fit together; nothing was written."""


class CompileError(JitropeError):
    """A kernel could not be compiled or loaded."""


class CacheError(JitropeError):
    """A cache command was asked for something that the cache cannot do."""
