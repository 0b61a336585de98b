"""All shipped files are ours, and every dependency is in the table of licences of `jitrope/README.md`."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "jitrope", "templates")

GENERATED = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "PKG-INFO", "setup.cfg"}
GENERATED |= {"SOURCES.txt", "dependency_links.txt", "requires.txt"}
"""Names of files that setuptools writes. All others are files of the repository."""
SUFFIXES = {".py", ".typed", ".jinja", ".cuh", ".md", ".toml"}
NOTICE = re.compile(r"copyright|©|\(c\) \d|spdx|rights reserved|licen[sc]ed under|(adapted|copied|vendored) from", re.I)

BUILD = "from setuptools import build_meta; build_meta.build_wheel('dist'); build_meta.build_sdist('dist')"


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The files of the wheel and of the sdist, as setuptools makes them of a clean copy."""
    pytest.importorskip("setuptools", minversion="77", reason="building the wheel needs setuptools 77")
    folder = tmp_path_factory.mktemp("shipped")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    (folder / "dist").mkdir()
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,), (sdist,) = ((folder / "dist").glob(pattern) for pattern in ("*.whl", "*.tar.gz"))
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name: archive.read(name) for name in archive.namelist()}
    with tarfile.open(sdist) as archive:
        members = [m for m in archive.getmembers() if not m.isdir()]
        in_sdist = {m.name.split("/", 1)[1]: archive.extractfile(m).read() for m in members}
    return {"wheel": in_wheel, "sdist": in_sdist}


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_every_shipped_file_is_ours(shipped: dict[str, dict[str, bytes]], kind: str) -> None:
    """Each has the bytes of a file in the repository, which is text without notices of others."""
    files = {name: data for name, data in shipped[kind].items() if name.rsplit("/", 1)[-1] not in GENERATED}
    licences = [name for name in files if name.rsplit("/", 1)[-1] == "LICENSE"]
    assert len(licences) == 1
    assert files.pop(licences[0]) == (ROOT / "LICENSE").read_bytes()
    for name, data in files.items():
        source = ROOT / (name.removeprefix("jitrope/") if name.startswith("jitrope/templates/") else name)
        assert source.is_file(), f"{name} is no file of the repository"
        assert source.suffix in SUFFIXES, name
        assert data == source.read_bytes(), name
        assert not (found := NOTICE.search(data.decode())), f"{name}: {found[0]}"
    assert len(files) > 50


def test_the_wheel_says_its_licence(shipped: dict[str, dict[str, bytes]]) -> None:
    (text,) = (data.decode() for name, data in shipped["wheel"].items() if name.endswith("dist-info/METADATA"))
    metadata = Parser().parsestr(text)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert "Apache License\n" in (ROOT / "LICENSE").read_text()


SECTION = (ROOT / "jitrope" / "README.md").read_text().split("\n## Licences\n")[1].split("\n## ")[0]
ROWS = [line.split("|")[1:3] for line in SECTION.splitlines() if line.startswith("| `")]
TABLE = {name: licence.strip() for names, licence in ROWS for name in re.findall(r"`([^`]+)`", names)}
"""Package -> licence."""


def test_every_dependency_is_in_the_table() -> None:
    tomllib = pytest.importorskip("tomllib", reason="reading pyproject.toml needs Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = sum(project["optional-dependencies"].values(), project["dependencies"])
    needed = {re.match(r"[\w.-]+", requirement)[0] for requirement in listed} - {"jitrope"}
    assert {"torch", "numpy"} <= needed
    assert needed <= TABLE.keys(), needed - TABLE.keys()


def test_licences_are_those_that_packages_state() -> None:
    """The first word of the table's licence, up to its version, is in each installed package's metadata."""
    checked = set()
    for name, licence in TABLE.items():
        try:
            found = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        stated = [found["License-Expression"], found["License"], *(found.get_all("Classifier") or ())]
        stated = [text for text in stated if text and (text in stated[:2] or text.startswith("License"))]
        family = re.match(r"[A-Za-z]+", licence)[0].lower()
        assert family in " ".join(stated).lower(), f"{name}: {licence} in the table, {stated} in its metadata"
        checked.add(name)
    assert {"torch", "jinja2"} <= checked
