"""The contract of a kernel's spec: checked fields that become constants of a template, written to and read from JSON.

Pure Python without torch: dtypes are the words "fp32", "fp16", "bf16".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, replace
from typing import Any, ClassVar

from .errors import InvalidInput, require

_DEFINED = ("fp16", "bf16", "fp8", "fp8_e5m2", "int8", "fp4", "e8m0", "e8m0_fp32")  # by the templates, so named
C_TYPES = {"fp64": "double", "fp32": "float", "int32": "int", "int64": "long long", **{x: x for x in _DEFINED}}
ITEM_SIZES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}
DTYPES = ("fp32", "fp16", "bf16")
INDEX_DTYPES = ("int32", "int64")
MAX_AXES = 4  # of position_ids
MAX_PAIRS = 288  # of a head; also the most numbers in a field
MAX_INT = 2**31 - 1
NUMBERS = range(MAX_INT + 1)  # of a field, if it has no bounds of its own
MAX_THREADS = 1024  # of a block: CUDA's limit
ACCESS_BYTES = 16  # the widest load or store of one thread
TILE_TOKENS, TILE_WIDTH = 128, 256  # of a block's tile of a projection by tensor cores
ACCESSES = (1, 2, 4, 8, 16)  # elements or bytes of one load or store
# In the metadata of a field. words: its texts. given: it says whether a call has this tensor, or number.
OF_NORM: dict[str, Any] = {"of_norm": True}  # only kernels with a norm have its constant
VERSION = 1  # of records; texts of calls leave out defaults, so no default changes within one


class Spec:
    """A kernel's constants, as a frozen dataclass. The template and the entry are named after the kind."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    kind: Any
    name: Any  # a readable text
    threads: Any  # threads of a block
    words: Mapping[str, tuple[str, ...]]  # the allowed texts of each text field: dtypes, or enumerators of the template
    bounds: ClassVar[Mapping[str, Sequence[int]]] = {}  # the allowed numbers of fields
    unused: Any = ()  # fields that the template does not use
    shared_bytes: Any = 0  # of a launch, beside what the kernel declares
    features: Any = ""  # behind the name of an architecture
    call = ""  # the text of a call that needs the kernel; it is no field: specs of other calls are equal

    def runs_on(self, arch: str) -> bool:
        """Whether the kernel is for this architecture."""
        return not self.features or arch == "sm_90"

    @property
    def template(self) -> str:
        """The template's file name."""
        return f"{self.kind}.cu.jinja"

    @property
    def entry(self) -> str:
        """The kernel's name in the source."""
        return f"jitrope_{self.kind}"

    def check(self) -> None:
        """Raise InvalidInput for a wrong field: only words, flags and whole numbers may enter the source.

        This runs when constants are made: before rendering, once for each kernel and not at each call. A kind with
        fields that must fit together adds its own checks.
        """
        for field in fields(self):
            name, value, several = field.name, getattr(self, field.name), field.type.startswith("tuple")
            items = value if type(value) is tuple else (value,)
            allowed = (True, False) if field.type == "bool" else self.words.get(name) or self.bounds.get(name, NUMBERS)
            good = all(type(x) is type(allowed[0]) and x in allowed for x in items) and len(items) <= MAX_PAIRS
            good = (good and several == (type(value) is tuple)) or (value is None and field.type.endswith("None"))
            shown = " or ".join(map(repr, allowed)) if type(allowed) is tuple else f"{allowed[0]} to {allowed[-1]}"
            wanted = f"at most {MAX_PAIRS} numbers, each {shown}" if several else shown
            require(type(self).__name__, good, f"{name} is {value!r}, not {wanted}")
        require(type(self).__name__, 0 < self.threads <= MAX_THREADS, f"a block must have 1 to {MAX_THREADS} threads")

    def constants(self) -> dict[str, Any]:
        """The values for the template's parameter block. A flag or a number keeps its name, a dtype is a C type."""
        self.check()
        found: dict[str, Any] = {"threads": self.threads}
        for name in [field.name for field in fields(self) if field.name not in self.unused]:
            value, words = getattr(self, name), self.words.get(name, ())
            if words and C_TYPES.keys() >= {*words}:
                found[f"{name.removesuffix('dtype').rstrip('_')}_c_type".lstrip("_")] = C_TYPES[value or words[0]]
            else:
                found[name] = value.upper() if words else value
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
    require(made.__name__, not missing and not unknown, f"missing {missing}, unknown {unknown}")
    spec = made(**given)
    spec.check()
    require(made.__name__, kind == spec.kind, f"kind must be {spec.kind!r}")
    return spec.of(call)


def record_of(specs: Iterable[Spec]) -> dict[str, Any]:
    """A record, for JSON: kernels, each with its call's text, that `jitrope prewarm --from` builds."""
    return {"version": VERSION, "spec": [spec.to_dict() for spec in specs]}
