"""The documentation site: `python .ci/build_api.py build/api`, made by pdoc from docstrings and Markdown files.

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
from typing import Any, get_type_hints

import pdoc
from pdoc.search import make_index

ROOT = Path(__file__).parent.parent
MODULES = (
    "jitrope", "jitrope.tables", "jitrope.thd", "jitrope.context_parallel", "jitrope.integrations",
    "jitrope.integrations.transformers", "jitrope.integrations.diffusers", "jitrope.integrations.torchtitan",
    "jitrope.integrations.transformer_engine", "jitrope.integrations.megatron", "jitrope.integrations.deepspeed",
    "jitrope.integrations.comfy_kitchen", "jitrope.integrations.xfuser", "jitrope.integrations.timm",
    "jitrope.jit", "jitrope.jit.cache", "jitrope.tools.prewarm", "jitrope.tools.bundle",
)  # fmt: skip

CONTENTS = (ROOT / "examples" / "README.md").read_text()
GUIDES = {
    "readme": "README.md",
    "guide": "examples/README.md",
    **{
        path.stem: f"examples/{path.name}"
        for path in sorted((ROOT / "examples").glob("[a-z]*.md"), key=lambda path: CONTENTS.find(path.name))
    },
    "jitrope/integrations": "jitrope/integrations/README.md",
    "jitrope/context_parallel": "jitrope/context_parallel/README.md",
    "commands": "jitrope/tools/README.md",
    "containers": "jitrope/tools/containers.md",
    "troubleshooting": "jitrope/tools/troubleshooting.md",
    "results": "examples/results/README.md",
    "architecture": "jitrope/README.md",
    "kernels": "templates/README.md",
    "jitrope/jit": "jitrope/jit/README.md",
    "testing": "tests/README.md",
}
"""Pages of the site and their Markdown files, which are in the docstring of a module if the page is its page."""


def place(path: str) -> str:
    """A file of the repository as `PAGES` has it: a README file by its folder."""
    return os.path.normpath(path).removesuffix("README.md").rstrip("/")


PAGES = {name.replace(".", "/"): f"{name.replace('.', '/')}.html" for name in MODULES[1:]}
PAGES |= {place(file): f"{page}.html" for page, file in GUIDES.items()}


def build(folder: str) -> None:
    for name in MODULES:
        module = import_module(name)
        described(module)
        if not hasattr(module, "__all__") and hasattr(module, "__path__"):
            module.__all__ = []  # pdoc adds all submodules otherwise
    titles = {}
    for name, file in GUIDES.items():
        text = text_of(file, f"{name}.html")
        titles[name] = text.removeprefix("# ").partition("\n")[0]
        if "/" in name:
            module = import_module(name.replace("/", "."))
            module.__doc__ = str(module.__doc__).replace(".. include:: README.md", text)
        else:
            module = sys.modules[name] = ModuleType(name, text)
            module.__file__ = str((ROOT / file).parent / "page.py")  # pdoc finds pictures beside it, and no code in it
            module.__spec__ = ModuleSpec(name, None)
    pdoc.render.configure(
        docformat="google",
        footer_text=f"jitrope {import_module('jitrope').__version__}",
        search=True,
        show_source=False,
        template_directory=Path(__file__).parent / "site",
    )
    pdoc.render.env.globals["titles"] = titles
    pdoc.render.make_index = sections
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pdoc.pdoc(*MODULES, *(name for name in GUIDES if "/" not in name), output_directory=Path(folder))


def sections(*args: Any) -> list[dict[str, str]]:
    """What the search finds: pdoc's entries, but a section of a page each, without pictures and relative links."""
    found: dict[str, dict[str, str]] = {}
    for item in make_index(*args):
        parts = re.split(r"(?=<h[1-4] id=)", item.get("doc", "")) if item["kind"] == "module" else [item.get("doc", "")]
        for part in parts:
            name, at = item["fullname"], {}
            if heading := re.match(r'<h\d id="([^"]+)">(.*?)</h\d>', part, re.DOTALL):
                name, at = f"{name}: {re.sub('<[^>]+>', '', heading[2])}", {"qualname": heading[1]}
            if part.strip() or len(parts) == 1:
                name = name if name not in found else f"{name} ({len(found)})"  # it must be found once
                found[name] = {**item, **at, "fullname": name, "doc": re.sub(r"</?a\b[^>]*>|<img[^>]*>", "", part)}
    return [*found.values()]


def described(module: ModuleType) -> None:
    """Give the fields of named tuples their types, and no text of their own."""
    for cls in vars(module).values():
        if isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields"):
            # pdoc looks for the types of a named tuple where its constructor was made, which is not in our file.
            cls.__new__.__annotations__ = get_type_hints(cls)
            for field in cls._fields:
                getattr(cls, field).__doc__ = ""  # "Alias for field number 0"


def text_of(file: str, page: str) -> str:
    """A Markdown file; its links lead to pages of the site, or are plain text where there is no such page."""

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match["words"], match["target"], match["anchor"] or ""
        if target.startswith("http"):
            return match[0]
        at = place(os.path.join(os.path.dirname(file), target))
        if at not in PAGES:
            return words if words in at else f"{words} (`{at}`)"
        return f"[{words}]({os.path.relpath(PAGES[at], os.path.dirname(page) or '.')}{anchor})"

    text = (ROOT / file).read_text()
    return re.sub(r"(?<!!)\[(?P<words>[^\]]+)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)]*)?\)", link, text)


if __name__ == "__main__":
    build(sys.argv[1])
