"""The documentation site: `python .ci/build_api.py build/api`, made by pdoc from docstrings and README files.

A warning is an error. It needs neither a GPU nor CuPy nor a host library.
"""

import os
import re
import sys
import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pdoc

ROOT = Path(__file__).parent.parent
MODULES = (
    "jitrope", "jitrope.tables", "jitrope.thd", "jitrope.context_parallel", "jitrope.integrations",
    "jitrope.integrations.transformers", "jitrope.integrations.diffusers", "jitrope.integrations.torchtitan",
    "jitrope.integrations.transformer_engine", "jitrope.integrations.megatron", "jitrope.integrations.deepspeed",
    "jitrope.integrations.comfy_kitchen", "jitrope.integrations.xfuser", "jitrope.integrations.timm",
    "jitrope.jit", "jitrope.jit.cache", "jitrope.tools.prewarm", "jitrope.tools.bundle",
)  # fmt: skip

GUIDES = {
    "guide": "examples",
    "commands": "jitrope/tools",
    "results": "examples/results",
    "architecture": "jitrope",
    "kernels": "templates",
    "testing": "tests",
}
"""Pages that are README files, by their folders. The other README files are in the docstrings of their packages."""

PAGES = {folder: f"{page}.html" for page, folder in GUIDES.items()} | {
    name.replace(".", "/"): f"{name.replace('.', '/')}.html" for name in MODULES[1:]
}


def build(folder: str) -> None:
    for name in MODULES:
        module = import_module(name)
        described(module)
        if not hasattr(module, "__all__") and hasattr(module, "__path__"):
            module.__all__ = []  # pdoc adds all submodules otherwise
        if ".. include:: README.md" in (module.__doc__ or ""):
            place = name.replace(".", "/")
            module.__doc__ = str(module.__doc__).replace(".. include:: README.md", text_of(place, PAGES[place]))
    for name, place in GUIDES.items():
        page = ModuleType(name, text_of(place, f"{name}.html"))
        page.__file__ = str(ROOT / place / "page.py")  # pdoc finds pictures beside it, and no code in it
        page.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = page
    footer = f"jitrope {import_module('jitrope').__version__}"
    templates = Path(__file__).parent / "site"
    pdoc.render.configure(docformat="google", footer_text=footer, show_source=False, template_directory=templates)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pdoc.pdoc(*MODULES, *GUIDES, output_directory=Path(folder))


def described(module: ModuleType) -> None:
    """Give the fields of named tuples their types, and no text of their own."""
    for cls in vars(module).values():
        if isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields"):
            # pdoc looks for the types of a named tuple where its constructor was made, which is not in our file.
            cls.__new__.__annotations__ = get_type_hints(cls)
            for field in cls._fields:
                getattr(cls, field).__doc__ = ""  # "Alias for field number 0"


def text_of(folder: str, page: str) -> str:
    """A README file; its links lead to pages of the site, or are plain text where there is no such page."""

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match["words"], match["target"], match["anchor"] or ""
        if target.startswith("http"):
            return match[0]
        place = os.path.normpath(os.path.join(folder, target)).removesuffix("README.md").rstrip("/")
        if place not in PAGES:
            return words if words in place else f"{words} (`{place}`)"
        return f"[{words}]({os.path.relpath(PAGES[place], os.path.dirname(page) or '.')}{anchor})"

    text = (ROOT / folder / "README.md").read_text()
    return re.sub(r"(?<!!)\[(?P<words>[^\]]+)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)]*)?\)", link, text)


if __name__ == "__main__":
    build(sys.argv[1])
