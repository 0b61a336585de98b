"""The API reference: pdoc builds it without a warning, and all public names are in it with shapes and errors."""

from __future__ import annotations

import doctest
import inspect
import re
import runpy
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jitrope

from . import fresh
from .hosts import timm, triton

pytest.importorskip("pdoc", reason="the API reference is built with pdoc: pip install -e '.[test]'")

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / ".ci" / "build_api.py"
SITE = runpy.run_path(str(SCRIPT))
MODULES: tuple[str, ...] = SITE["MODULES"]
GUIDES: dict[str, str] = SITE["GUIDES"]

# Modules that the machine that builds the reference may lack.
ABSENT = """
comfy_kitchen cupy cupy_backends deepspeed diffusers kernels
megatron timm torchtitan transformer_engine transformers
"""
BUILD = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({ABSENT.split()}))   # importing one of them fails
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


NAMES: dict[str, list[str]] = {}
"""The public names of a module: `__all__`, else its own functions and classes."""
for at in MODULES:
    own = ((name, x) for name, x in vars(import_module(at)).items() if getattr(x, "__module__", "") == at)
    NAMES[at] = getattr(import_module(at), "__all__", [name for name, x in own if name[0] != "_" and callable(x)])
PUBLIC = {
    f"{at}:{name}": inspect.unwrap(value)
    for at, names in NAMES.items()
    for name in names
    if callable(value := getattr(import_module(at), name))
}
"""Every public function and class, by module and name."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built without CuPy and host libraries."""
    folder = tmp_path_factory.mktemp("api")
    fresh.python("-c", BUILD, str(folder), cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, str]:
    """The reference as HTML, by module."""
    return {name: (site / f"{name.replace('.', '/')}.html").read_text() for name in MODULES}


def test_every_page_of_the_site_is_whole(site: Path) -> None:
    """Each Markdown page is there, with its pictures, and its links lead to a page and a heading or name in it."""
    html = {
        path: re.sub("<script>.*?</script>", "", path.read_text(), flags=re.DOTALL) for path in site.rglob("*.html")
    }
    ids = {path: {*re.findall(r'id="([^"]+)"', text)} for path, text in html.items()}
    for path in (site / f"{page}.html" for page in GUIDES):
        for target, anchor in re.findall(r'href="([^"#]*)(?:#([^"]*))?"', html[path]):
            if not re.match("http|data:", target):
                place = (path.parent / target).resolve() if target else path
                assert place in html, f"{path.name}: {target}"
                assert not anchor or anchor in ids[place], f"{path.name}: {target}#{anchor}"
        assert re.findall(r'<img[^>]* src="(?!data:)[^"]{0,80}', html[path]) == []
    assert "url=./readme.html" in html[site / "index.html"]
    assert {*GUIDES.values()} >= {str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*.md")}


def test_the_search_finds_sections_of_pages(site: Path) -> None:
    text = (site / "search.js").read_text()
    for anchor in ("who-is-trusted", "bundles", "a-head", "apply_rope"):
        assert f'"qualname": "{anchor}"' in text, anchor
    assert "base64" not in text


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_has_its_place(pages: dict[str, str], name: str) -> None:
    """pdoc recognised all sections and tables, and took no star or underscore for emphasis."""
    page = pages[name]
    assert {*NAMES[name]} <= {*dir(import_module(name))}
    assert NAMES[name] or hasattr(import_module(name), "__path__")  # a package of modules has its README
    assert [missing for missing in NAMES[name] if f'id="{missing}"' not in page] == []
    assert re.findall(r"<em>.{0,60}", page) == []
    assert re.findall(r"<p>[^<]*\b(?:Args|Attributes|Raises|Returns|Yields)\b[^<]*:\n", page) == []
    assert re.findall(r"<p>\s*\|.{0,60}|<p>[^<]*====", page) == []


def test_every_integration_is_in_it() -> None:
    folder = ROOT / "jitrope" / "integrations"
    found = {path.stem for path in (*folder.glob("[a-z]*.py"), *(file.parent for file in folder.glob("*/__init__.py")))}
    assert found == {name.split(".")[2] for name in MODULES if "integrations._" not in name and "integrations." in name}


def test_modules_stand_on_the_first_page(pages: dict[str, str]) -> None:
    rest = [name for name in MODULES[1:] if "._" not in name]
    assert [name for name in rest if f'href="jitrope/{name[8:].replace(".", "/")}.html"' not in pages["jitrope"]] == []


READMES = [str(path.relative_to(ROOT)) for path in sorted(ROOT.rglob("*.md"))]
READMES = [path for path in READMES if not re.search(r"(^|/)\.|^build/|/build/", path)]
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]*)(?:#([^)]+))?\)")


@pytest.mark.parametrize("readme", READMES)
def test_links_lead_somewhere(readme: str) -> None:
    path = ROOT / readme
    for target, anchor in LINK.findall(path.read_text()):
        if not target.startswith("http"):
            place = (path.parent / target).resolve() if target else path
            assert place.exists(), target
            headings = re.findall(r"^#+ (.+)$", place.read_text(), re.MULTILINE) if anchor else []
            anchors = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert not anchor or anchor in anchors, f"{target}#{anchor}"


README = (ROOT / "README.md").read_text()


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len(README.splitlines()) <= 200
    assert len(README.split()) <= 1000


@pytest.mark.parametrize("host", ["diffusers", "transformers", ""])
def test_the_readmes_blocks_run(host: str) -> None:
    """Three of them, for a pipeline, a model and one's own attention, with small random ones."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    (code,) = [block for block in blocks if (f"import {host} " in block if host else "integrations" not in block)]
    q, k, v, cos, sin = (torch.randn(size) for size in ((1, 4, 2, 8),) * 3 + ((4, 4),) * 2)
    names: dict[str, Any] = {"q": q, "k": k, "v": v, "cos": cos, "sin": sin}
    names |= {"q_norm": torch.nn.RMSNorm(8, eps=1e-6), "k_norm": torch.nn.RMSNorm(8, eps=1e-6)}
    if host:
        pytest.importorskip(host, reason=f"the README's lines for {host} need it")
    if host == "diffusers":
        transformer = import_module(".integrations.diffusion_zoo", __package__).prepared("FluxTransformer2DModel")[0]
        names["pipeline"] = SimpleNamespace(components={"transformer": transformer})
    if host == "transformers":
        names["model"] = import_module(".integrations.transformers_zoo", __package__).language_model("qwen3")
    try:
        exec(compile(code, "README.md", "exec"), names)
    finally:
        if host:
            import_module(f"jitrope.integrations.{host}").disable()
    if host:
        assert names["report"].replaced
    else:
        want = jitrope.apply_rope(names["q_norm"](q), names["k_norm"](k), cos, sin)
        torch.testing.assert_close((names["q"], names["k"]), want)


_DIM = r"(?:\.\.\.?|[A-Z]\w{0,2}\b|\d|[a-z]\d?\b|(?:rows|tokens|slots|pages|blocks|positions|max_\w+|cp_size)\b)"
_DIM += r"[^,()\[\]]*(?:\([^()]*\)[^,()\[\]]*)?"
SHAPE = re.compile(rf"[(\[]{_DIM}(?:, {_DIM})*,?[)\]]")
"""(B, S, H, D), [s, b, h, d], (N + 1), (cp_size * ceil(T / cp_size), ...)."""
ERRORS = re.compile(r"Raises:|InvalidInput|errors those are")


def test_docstrings_say_shapes_and_errors() -> None:
    """Functions of tensors document their shapes and errors, or name a function that does; methods too."""
    values = {at.replace(":", "."): value for at, value in PUBLIC.items()}
    for at, value in [(at, value) for at, value in values.items() if inspect.isclass(value)]:
        values |= {f"{at}.{name}": x for name, x in vars(value).items() if name[0] != "_" and inspect.isfunction(x)}
    docs = {}
    for at, value in values.items():
        annotations = getattr(value.__init__ if inspect.isclass(value) else value, "__annotations__", {})
        words = [str(word) for name, word in annotations.items() if name != "return"]
        docs[at] = (value.__doc__ or "", any(re.search(r"\b(?:Tensor|Rows)\b", word) for word in words))
    assert len(docs) > 90
    assert sum(takes for _, takes in docs.values()) > 40
    assert [name for name, (text, _) in docs.items() if not text] == []
    for pattern, word in ((SHAPE, ""), (ERRORS, "rrors")):
        said: set[str] = set()
        for _ in range(3):  # a reference to a function that refers to a third
            for name, (text, _) in docs.items():
                others = {other.split(".")[-1] for other in re.findall(r"`([\w.]+)`", text)} if word in text else set()
                if pattern.search(text) or others & {known.split(".")[-1] for known in said}:
                    said.add(name)
        records = {name for name in docs if pattern is ERRORS and name.split(".")[-1][0].isupper()}
        assert {name for name, (_, takes) in docs.items() if takes} - said - records == set(), pattern.pattern


HOSTED = ("", "register", "attention")
"""The examples of an integration that need its host: the module's own, with `enable`, and torchtitan's."""
COMPILED = ("jitrope.tools.prewarm:", "jitrope.tools.prewarm:Built", "jitrope.tools.bundle:")
"""The examples that need CuPy and NVRTC, but no GPU."""
EXAMPLES = {f"{at}:": import_module(at).__doc__ or "" for at in MODULES}
EXAMPLES |= {at: x.__doc__ or "" for at, x in PUBLIC.items() if not (inspect.isclass(x) and issubclass(x, Exception))}
"""The docstrings of everything public but errors, and of the modules themselves, under an empty name."""


def test_every_public_name_has_an_example() -> None:
    """In its own docstring or, as the pairs of `enable` and `disable`, in its module's."""
    without = [at for at, text in EXAMPLES.items() if ">>>" not in text and not at.endswith(":")]
    assert len(EXAMPLES) - len(MODULES) > 75
    for at in without:
        module, _, name = at.partition(":")
        lines = [example.source for example in doctest.DocTestParser().get_examples(EXAMPLES[f"{module}:"])]
        assert name in re.findall(r"(\w+)\(", "".join(lines)), at


@pytest.mark.parametrize("at", [at for at, text in EXAMPLES.items() if ">>>" in text])
def test_examples_give_what_they_show(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in one process on a CPU, from an empty folder and an empty kernel cache."""
    name, _, own = at.partition(":")
    module, last = import_module(name), name.split(".")[-1]
    if "integrations." in at and own in HOSTED:
        timm() if last == "timm" else pytest.importorskip(last, reason=f"the example needs {last}")
    if at in COMPILED:
        pytest.importorskip("cupy", reason="the example compiles a kernel")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "cache"))
    names = {**vars(module), "torch": torch, "jitrope": jitrope, last: module, f"jitrope_{last}": module}
    test = doctest.DocTestParser().get_doctest(EXAMPLES[at], names, at, module.__file__, 0)
    wrong: list[str] = []
    with triton() if last == "torchtitan" else nullcontext():
        ran = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=wrong.append)
    assert ran.attempted > 0
    assert not wrong, "".join(wrong)


GUIDE = [path for path in sorted((ROOT / "examples").glob("*.md")) if path.name != "README.md"]


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.stem)
def test_a_page_of_the_guide_is_a_program(page: Path, tmp_path: Path) -> None:
    """Its blocks run from top to bottom in a fresh process on a CPU."""
    text = page.read_text()
    assert len(text.split()) <= 800
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    fresh.python("-c", code, cwd=tmp_path, check=True, CUDA_VISIBLE_DEVICES="")


def test_the_guides_contents_name_every_page_and_script() -> None:
    text = (ROOT / "examples" / "README.md").read_text()
    assert len(text.split()) <= 200
    found = {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".md")} - {"README.md"}
    assert found - {target for target, _ in LINK.findall(text)} == set()
    assert len(GUIDE) == 4
