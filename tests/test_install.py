"""What a machine must have: the packages of an extra, and those without which the tests are still collected."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from . import fresh

ROOT = Path(__file__).parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text()
PINNED = {"2.6": "12.4.127", "2.7": "12.6.77", "2.8": "12.8.93"}
"""The nvidia-cuda-nvrtc-cu12 that a torch for CUDA 12 requires, exactly."""


def test_the_extra_of_cuda_12_takes_the_nvrtc_of_every_torch() -> None:
    """Otherwise pip finds no solution, or exchanges torch."""
    (floor,) = re.findall(r'"torch>=([\d.]+)"', PROJECT)
    assert floor == min(PINNED)
    (line,) = re.findall(r"^cuda12 = \[(.*)\]$", PROJECT, re.MULTILINE)
    cupy, nvrtc = (Requirement(text) for text in re.findall(r'"(.*?)"', line))
    assert [version for version in PINNED.values() if version not in nvrtc.specifier] == []
    assert (cupy.name, nvrtc.name) == ("cupy-cuda12x", "nvidia-cuda-nvrtc-cu12")


def test_no_text_tells_to_install_jitrope_from_an_index() -> None:
    """No index has jitrope. A stranger who takes the name there would get our users."""
    texts = [path for path in ROOT.glob("*.*") if path.suffix in (".md", ".toml")]
    for folder in ("jitrope", "examples", "templates", "tests"):
        texts += [path for path in (ROOT / folder).rglob("*.*") if path.suffix in (".py", ".md")]
    named = re.compile(r"""pip install [^\n]*["' ]jitrope(\[|["'` ,]|$)""", re.MULTILINE)
    assert len(texts) > 100
    assert named.search('pip install "jitrope[cuda13]"')
    assert not named.search("pip install ./jitrope-0.1.0-py3-none-any.whl")
    assert [str(path) for path in texts if path != Path(__file__) and named.search(path.read_text())] == []


HIDDEN = """
import importlib, pathlib, sys
import pytest

class Visible:  # finds what the finders of Python find, except the hosts
    finders = [*sys.meta_path]

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HOSTS:
            return None
        return next(filter(None, (finder.find_spec(name, path, target) for finder in self.finders)), None)

sys.meta_path[:] = [Visible()]
for path in sorted(pathlib.Path("tests").rglob("test_*.py")):
    name = ".".join(path.with_suffix("").parts)
    try:
        importlib.import_module(name)
    except pytest.skip.Exception:
        pass
    except BaseException as error:
        print(f"{name}: {type(error).__name__}: {error}")
print("imported", len([name for name in sys.modules if name.startswith("tests.")]))
"""


@pytest.mark.slow
def test_every_test_is_collected_without_any_host() -> None:
    """As on a GPU machine with torch, CuPy and a bare checkout."""
    (names,) = re.findall(r"^module = \[(.*)\]\nignore_missing_imports", PROJECT, re.MULTILINE)
    hosts = set(re.findall(r'"(\w+)\.\*"', names)) - {"cupy", "cupy_backends", "triton"}
    assert {"diffusers", "transformers", "megatron", "timm"} <= hosts
    done = fresh.python("-c", f"HOSTS = {hosts | {'peft', 'accelerate'}}\n{HIDDEN}", cwd=ROOT, CI="")
    *faults, last = done.stdout.splitlines()
    assert faults == [], done.stderr
    assert int(last.split()[1]) > 20
