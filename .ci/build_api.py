"""The API reference, made from the docstrings by pdoc: `python .ci/build_api.py build/api`. A warning is an error.

Needs neither a GPU nor CuPy nor a host library.
"""

import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pdoc

MODULES = (
    "jitrope", "jitrope.tables", "jitrope.thd", "jitrope.context_parallel", "jitrope.integrations.transformers",
    "jitrope.integrations.diffusers", "jitrope.integrations.vllm", "jitrope.integrations.sglang",
    "jitrope.integrations.torchtitan", "jitrope.integrations.transformer_engine", "jitrope.integrations.megatron",
    "jitrope.integrations.deepspeed", "jitrope.integrations._host", "jitrope.tools.prewarm", "jitrope.tools.bundle",
    "jitrope.jit.cache",
)  # fmt: skip


def build(folder: str) -> None:
    for name in MODULES:
        for cls in vars(import_module(name)).values():
            if isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields"):
                # pdoc looks for the types of a named tuple where its constructor was made, which is not in our file.
                cls.__new__.__annotations__ = get_type_hints(cls)
                for field in cls._fields:
                    getattr(cls, field).__doc__ = ""  # "Alias for field number 0"
    pdoc.render.configure(docformat="google", footer_text=f"jitrope {import_module('jitrope').__version__}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pdoc.pdoc(*MODULES, "!jitrope.context_parallel.backends", output_directory=Path(folder))


if __name__ == "__main__":
    build(sys.argv[1])
