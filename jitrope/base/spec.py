"""What every kernel's spec is: fields that become constants of a template, checked, and readable again from JSON.

Pure Python, no torch: dtypes are the words "fp32", "fp16", "bf16".
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any, ClassVar, Protocol, TypeVar

from .errors import InvalidInput

C_TYPES = {
    "fp64": "double",
    "fp32": "float",
    "fp16": "fp16",
    "bf16": "bf16",
    "fp8": "fp8",
    "int32": "int",
    "int64": "long long",
}
ITEM_SIZES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}
DTYPES = ("fp32", "fp16", "bf16")
INDEX_DTYPES = ("int32", "int64")
MAX_AXES = 4  # of position_ids, and numbers in any field
MAX_INT = 2**31 - 1
MAX_THREADS = 1024  # of a block: CUDA's limit
ACCESS_BYTES = 16  # the widest load or store of one thread
ACCESSES = (1, 2, 4, 8, 16)  # elements or bytes of one


class Spec(Protocol):
    """What rendering, compiling and keeping a kernel ask of it."""

    @property
    def template(self) -> str: ...
    @property
    def entry(self) -> str: ...
    @property
    def name(self) -> str: ...
    def constants(self) -> dict[str, Any]: ...
    def to_dict(self) -> dict[str, Any]: ...
    def __hash__(self) -> int: ...


def check_fields(spec: Any, words: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse whatever a field must not hold: source is made of words from `words`, flags and whole numbers only.

    words: what each field of text may be. It is looked at where constants are made, so before anything is rendered
    and once for each kernel, not at each call.
    """
    for field in fields(spec):
        name, kind, value = field.name, field.type, getattr(spec, field.name)
        if kind in ("str", "str | None"):
            good = (type(value) is str and value in words[name]) or (value is None and kind == "str | None")
            wanted = " or ".join(map(repr, words[name]))
        elif kind == "bool":
            good, wanted = type(value) is bool, "True or False"
        elif kind == "int":
            good, wanted = _is_count(value), f"a whole number up to {MAX_INT}"
        else:
            good = type(value) is tuple and len(value) <= MAX_AXES and all(map(_is_count, value))
            wanted = f"at most {MAX_AXES} whole numbers"
        if not good:
            raise InvalidInput(f"{type(spec).__name__}: {name} is {value!r}, not {wanted}")


def refuse_unless(spec: str, good: bool, text: str) -> None:
    """Raise InvalidInput with what is asked of a spec, unless it is so."""
    if not good:
        raise InvalidInput(f"{spec}: {text}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INT


_S = TypeVar("_S", bound="Named")


class Named:
    """A spec whose file and entry are named after its kind."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    kind: Any
    name: Any

    @property
    def template(self) -> str:
        """The file that it is rendered from."""
        return f"{self.kind}.cu.jinja"

    @property
    def entry(self) -> str:
        """The kernel's name in the source."""
        return f"jitrope_{self.kind}"

    @abstractmethod
    def check(self) -> None:
        """Raise InvalidInput if a field is not a constant of its kind, or if the fields do not fit together."""

    @abstractmethod
    def constants(self) -> dict[str, Any]:
        """The values of the template's parameter block."""

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return {"kind": self.kind, **asdict(self)}

    @classmethod
    def from_dict(cls: type[_S], data: Mapping[str, Any]) -> _S:
        """The inverse of `to_dict`; raises InvalidInput with a missing, an unknown or a wrong field."""
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        kind = given.pop("kind", None)
        known = {field.name: field.default is MISSING for field in fields(cls)}
        missing = sorted(name for name, needed in known.items() if needed and name not in given)
        unknown = sorted(given.keys() - known.keys())
        refuse_unless(cls.__name__, not missing and not unknown, f"missing {missing}, unknown {unknown}")
        spec = cls(**given)
        spec.check()
        refuse_unless(cls.__name__, kind in (None, spec.kind), f"its fields are those of a {spec.kind}")
        return spec
