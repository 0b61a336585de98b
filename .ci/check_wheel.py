"""The wheel and the sdist in a folder hold every template, module and the licence, and no file of the tests."""

import sys
import tarfile
import zipfile
from pathlib import Path

root = Path(__file__).parent.parent
folder = Path(sys.argv[1])
(wheel,) = folder.glob("*.whl")
(sdist,) = folder.glob("*.tar.gz")

names = set(zipfile.ZipFile(wheel).namelist())
templates = {f"jitrope/templates/{path.name}" for path in (root / "templates").iterdir()}
modules = {str(path.relative_to(root)) for path in (root / "jitrope").rglob("*.py")}
assert {name for name in names if name.startswith("jitrope/templates/")} == templates, names
assert modules | {"jitrope/py.typed", "jitrope/tools/hub.md"} <= names, modules - names
assert any(name.endswith("licenses/LICENSE") for name in names), names
assert not [name for name in names if name.startswith(("tests", "examples", "templates"))], names

with tarfile.open(sdist) as archive:
    inside = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
assert {f"templates/{path.name}" for path in (root / "templates").iterdir()} <= inside, inside
assert modules | {"README.md", "LICENSE", "pyproject.toml"} <= inside, inside
assert not [name for name in inside if name.startswith("tests")], inside  # a part of them would not run
print(f"{wheel.name}: {len(names)} files, {len(templates)} templates; {sdist.name}: whole")
