"""The contract of a kernel's spec: checked fields that become constants of a template, written to and read from JSON.

Pure Python without torch: dtypes are the words "fp32", "fp16", "bf16".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, fields, replace
from typing import Any, ClassVar

from .errors import InvalidInput

_DEFINED = ("fp16", "bf16", "fp8", "fp8_e5m2", "int8", "fp4", "e8m0", "e8m0_fp32")  # by the templates, so named
C_TYPES = {"fp64": "double", "fp32": "float", "int32": "int", "int64": "long long", **{x: x for x in _DEFINED}}
ITEM_SIZES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}
DTYPES = ("fp32", "fp16", "bf16")
INDEX_DTYPES = ("int32", "int64")
MAX_AXES = 4  # of position_ids; also the most numbers in a field
MAX_INT = 2**31 - 1
MAX_THREADS = 1024  # of a block: CUDA's limit
ACCESS_BYTES = 16  # the widest load or store of one thread
ACCESSES = (1, 2, 4, 8, 16)  # elements or bytes of one load or store
# In the metadata of a field. words: its texts. given: it says whether a call has this tensor.
OF_NORM: dict[str, Any] = {"of_norm": True}  # only kernels with a norm have its constant
VERSION = 1  # of records; texts of calls leave out defaults, so no default changes within one


def check_fields(spec: Any, words: Mapping[str, tuple[str, ...]]) -> None:
    """Raise InvalidInput for a wrong field: only words from `words`, flags and whole numbers may enter the source.

    words: the allowed texts of each text field. The check runs when constants are made: before rendering, once for each
    kernel and not at each call.
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
        refuse_unless(type(spec).__name__, good, f"{name} is {value!r}, not {wanted}")


def refuse_unless(spec: str, good: bool, text: str) -> None:
    """Raise InvalidInput(text) unless `good`."""
    if not good:
        raise InvalidInput(f"{spec}: {text}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INT


class Spec:
    """A kernel's constants, as a frozen dataclass. The template and the entry are named after the kind."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    kind: Any
    name: Any  # a readable text
    threads: Any  # threads of a block
    words: Mapping[str, tuple[str, ...]]  # the allowed texts of each text field
    enumerators: tuple[str, ...] = ()  # text fields that are enumerators of the template; the others are dtypes
    unused: tuple[str, ...] = ()  # fields that the template does not use
    call = ""  # the text of a call that needs the kernel; it is no field: specs of other calls are equal

    @property
    def template(self) -> str:
        """The template's file name."""
        return f"{self.kind}.cu.jinja"

    @property
    def entry(self) -> str:
        """The kernel's name in the source."""
        return f"jitrope_{self.kind}"

    def check(self) -> None:
        """Raise InvalidInput if a field is not a constant of its kind, or if the fields do not fit together."""
        check_fields(self, self.words)

    def constants(self) -> dict[str, Any]:
        """The values for the template's parameter block: the fields under their own names, with dtypes as C types."""
        self.check()
        found: dict[str, Any] = {"threads": self.threads}
        for name in [field.name for field in fields(self) if field.name not in self.unused]:
            value = getattr(self, name)
            if name.endswith("dtype"):
                found[name.replace("dtype", "c_type")] = C_TYPES[value]
            else:
                found[name] = value.upper() if name in self.enumerators else value
        return found

    def of(self, call: str) -> Spec:
        """The same spec with the text of a call."""
        made = replace(self)
        object.__setattr__(made, "call", call)
        return made

    def to_dict(self) -> dict[str, Any]:
        """The text of the call, if there is one, and the fields, for JSON."""
        return {"kind": self.kind, **({"call": self.call} if self.call else {}), **asdict(self)}


KINDS: dict[str, type[Spec]] = {}  # the spec class of each kind; a module with kernels adds its classes at import


def spec_from_dict(data: Any) -> Spec:
    """The inverse of every spec's `to_dict`. Raises InvalidInput for a missing, an unknown or a wrong field."""
    if not isinstance(data, dict) or not isinstance(data.get("call", ""), str):
        raise InvalidInput(f"a spec must be a table of fields, and its call a text, not {data!r}")
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    kind, call = given.pop("kind", None), str(given.pop("call", ""))
    if kind not in tuple(KINDS):
        raise InvalidInput(f"kind is {kind!r}; allowed are {', '.join(sorted(KINDS))}")
    made, known = KINDS[kind], {field.name: field for field in fields(KINDS[kind])}
    missing = sorted(name for name, field in known.items() if field.default is MISSING and name not in given)
    unknown = sorted(given.keys() - known.keys())
    refuse_unless(made.__name__, not missing and not unknown, f"missing {missing}, unknown {unknown}")
    spec = made(**given)
    spec.check()
    refuse_unless(made.__name__, kind == spec.kind, f"kind must be {spec.kind!r}")
    return spec.of(call)


def record_of(specs: Iterable[Spec]) -> dict[str, Any]:
    """A record, for JSON: kernels, each with its call's text, that `jitrope prewarm --from` builds."""
    return {"version": VERSION, "spec": [spec.to_dict() for spec in specs]}
