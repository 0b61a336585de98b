"""Bundles are written whole, with the same bytes of the same kernels, and loaded on machines that cannot compile."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from jitrope.base.errors import CacheError, CompileError
from jitrope.jit import compiler, kernels
from jitrope.jit.cache import KernelCache
from jitrope.jit.entry import CUBIN, META, pack, read_bundle, seal, write_bundle
from jitrope.tools import bundle
from jitrope.tools.prewarm import read_record, specs_of

from .. import fresh
from ..caches import DATA, KEY, no_nvrtc
from ..hosts import installed
from .conftest import Run, stored

ROOT = Path(__file__).parents[2]
SPECS, ARCHS = specs_of(heads=[32, 8]), ("sm_80", "sm_90")
KERNELS = [*itertools.product(SPECS, ARCHS)]


@pytest.fixture
def written(cache: KernelCache, tmp_path: Path) -> Path:
    """A bundle of `KERNELS`, which lie in no cache any more."""
    stored(cache.root, SPECS, *ARCHS)
    assert [built.outcome for built in bundle.write(tmp_path / "k.zip", KERNELS, 2)] == ["cached"] * len(KERNELS)
    cache.clear()
    return tmp_path / "k.zip"


def test_what_is_in_a_bundle(written: Path) -> None:
    found = bundle.entries(written)
    assert {(e.name, e.arch) for e in found} == {(spec.name, arch) for spec, arch in KERNELS}
    assert all(e.spec["head_dim"] == 128 for e in found)
    metas = [json.loads(files[META]) for files in read_bundle(written).values()]
    assert {meta["compiler"] for meta in metas} == {compiler.compiler_version()}


def test_the_same_kernels_give_the_same_bytes(cache: KernelCache, tmp_path: Path, monkeypatch) -> None:
    """The order of the kernels does not matter, nor whether they are compiled, or found in a cache or a bundle."""
    some = KERNELS[1:3]  # a kernel for each architecture
    for name, made, outcome in (("a", some, "compiled"), ("b", some[::-1], "cached"), ("c", some * 2, "cached")):
        built = bundle.write(tmp_path / name, iter(made), 2)
        assert [(x.spec, x.arch, x.outcome) for x in built] == [(*kernel, outcome) for kernel in made[:2]]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c", "kernels"]
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "a" / "kernels"))  # no folder can be made there
    bundle.write(tmp_path / "d", some, 1)
    monkeypatch.setenv("JITROPE_SYSTEM_CACHE", str(tmp_path / "a"))
    monkeypatch.setattr(compiler, "compiler_version", no_nvrtc)
    assert [built.outcome for built in bundle.write(tmp_path / "e", some, 1)] == ["cached"] * 2
    assert len({(tmp_path / name).read_bytes() for name in "abcde"}) == 1


def test_a_bundle_is_its_owners_to_write_whatever_the_umask(cache: KernelCache, tmp_path: Path, monkeypatch) -> None:
    """Otherwise `JITROPE_SYSTEM_CACHE` would refuse the new bundle."""
    stored(cache.root, SPECS, *ARCHS)
    (tmp_path / "current.zip").symlink_to("a.zip")  # which stays a link
    before = os.umask(0o002)
    try:
        bundle.write(tmp_path / "current.zip", KERNELS[1:2], 1)
    finally:
        os.umask(before)
    assert (tmp_path / "current.zip").is_symlink()
    assert (tmp_path / "a.zip").stat().st_mode & 0o777 == 0o644
    monkeypatch.setenv("JITROPE_SYSTEM_CACHE", str(tmp_path / "a.zip"))
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "empty"))
    assert not kernels.build(*KERNELS[1]).compiled


def test_a_bundle_that_would_lack_a_kernel_is_not_written(cache: KernelCache, tmp_path: Path) -> None:
    stored(cache.root, SPECS, *ARCHS)
    (tmp_path / "a.zip").write_text("before")
    with pytest.raises(CompileError, match="4 of 8 kernels are missing") as caught:
        bundle.write(tmp_path / "a.zip", itertools.product(SPECS, ["sm_90", "sm_20"]), 1)
    assert str(caught.value).count(" sm_20 and 3 more: ") == 1
    with pytest.raises(CacheError, match="no kernels to bundle"):
        bundle.write(tmp_path / "a.zip", [], 1)
    os.mkfifo(tmp_path / "pipe")  # a device would be replaced by a file
    (tmp_path / "stdout").symlink_to("pipe")
    for path in ("no/a.zip", "a.zip/b.zip", ".", "x" * 300, "pipe", "stdout"):
        with pytest.raises(CacheError, match=rf"^cannot write {tmp_path / path}: .*$"):
            bundle.write(tmp_path / path, KERNELS[1:2], 1)
    assert (tmp_path / "a.zip").read_text() == "before"
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "stdout").is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.zip", "kernels", "pipe", "stdout"]


def test_load_puts_kernels_into_the_cache(written: Path, cache: KernelCache, monkeypatch) -> None:
    """They serve beside any compiler, and are not pruned."""
    monkeypatch.setenv("JITROPE_NO_COMPILE", "1")
    for _ in range(2):
        assert {e.path for e in bundle.load(written)} == {e.path for e in cache.entries()}
        assert cache.verify() == (len(KERNELS), [])
    for version in (compiler.compiler_version, lambda: "cupy 99, nvrtc 99", no_nvrtc):
        monkeypatch.setattr(compiler, "compiler_version", version)
        assert [kernels.build(*kernel).data for kernel in KERNELS] == [DATA] * len(KERNELS)
    with pytest.raises(CompileError, match="compiling is forbidden"):
        kernels.build(SPECS[0], "sm_120")
    for entry in cache.entries():
        os.utime(entry.path, (1, 1))
    assert KernelCache(cache.root).prune(0) == []
    assert len(cache.clear()) == len(KERNELS)


def test_a_newer_bundles_kernel_takes_an_older_ones_place(cache: KernelCache, tmp_path: Path) -> None:
    """Both kernels have the same source but different compilers. The kernel that `load` returns is in the cache."""
    for name in ("old", "new"):
        files = pack(replace(KEY, compiler=name), "text", DATA + name.encode(), {})
        write_bundle(tmp_path / f"{name}.zip", {KEY.portable_folder: files})
    for name in ("old", "new", "old"):
        (entry,) = bundle.load(tmp_path / f"{name}.zip")
        assert json.loads((entry.path / META).read_text())["compiler"] == name
        assert (entry.path / CUBIN).read_bytes() == DATA + name.encode()
        assert cache.find(KEY) == DATA + name.encode()
        assert cache.verify() == (1, [])
    before = entry.path.stat().st_ino
    bundle.load(tmp_path / "old.zip")
    assert entry.path.stat().st_ino == before  # an equal entry is kept


def test_a_cache_that_cannot_be_written_is_an_error_here(written: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    with pytest.raises(CacheError, match="cannot write the kernel cache"):
        bundle.load(written)


# ---- a repository for `kernels` -------------------------------------------------------------------

PARTIAL = [
    *specs_of([4, 2], 64, backward=True),
    *specs_of([4, 2], 64, call="bshd heads q k > rotate cos sin rotary_dim=32 > fresh", backward=True),
]


def test_a_repository_is_written_whole_or_not_at_all(jitrope: Run, cache: KernelCache, tmp_path: Path) -> None:
    """It has every module and template, a card and the licence; the same kernels give the same bytes."""
    stored(cache.root, SPECS, *ARCHS)
    with pytest.raises(CompileError, match="4 of 8 kernels are missing"):
        bundle.write_hub(tmp_path / "hub", itertools.product(SPECS, ["sm_90", "sm_20"]), 1)
    assert [p.name for p in tmp_path.iterdir()] == ["kernels"]
    hubs = [tmp_path / "hub", tmp_path / "again"]
    assert [built.outcome for built in bundle.write_hub(hubs[0], iter(KERNELS), 2)] == ["cached"] * len(KERNELS)
    for code, said in ((0, "wrote again\n"), (1, "error: again exists; name a new folder\n")):
        done = jitrope("bundle write --hub again")
        assert (done.returncode, done.stderr) == (code, said)
    files, again = ({str(p.relative_to(hub)): p.read_bytes() for p in hub.rglob("*.*")} for hub in hubs)
    assert files == again
    assert files.pop("README.md").startswith(b"---\nlibrary_name: kernels\nlicense: apache-2.0\n")
    assert (hubs[0] / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    variant = hubs[0] / "build" / "torch-cuda"
    assert len(bundle.entries(variant / "kernels.zip")) == len(KERNELS)
    own = {f"build/torch-cuda/{p.relative_to(ROOT / 'jitrope')}" for p in (ROOT / "jitrope").rglob("*.py")}
    own |= {f"build/torch-cuda/templates/{p.name}" for p in (ROOT / "templates").iterdir()}
    others = {f"build/torch-cuda/{name}" for name in ("py.typed", "kernels.zip", "metadata.json")}
    assert files.keys() == own | others
    assert json.loads((variant / "metadata.json").read_text())["backend"] == {"type": "cuda", "archs": ["8.0a", "9.0a"]}


RESULTS = """
import sys
import torch

device = sys.argv[-1]

def results(package):
    torch.manual_seed(0)
    options = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    q, k = (torch.randn(1, 9, heads, 64, **options) for heads in (4, 2))
    found = []
    for dim in (64, 32):
        cos, sin = package.tables.cos_sin(9, package.tables.inv_freq(rotary_dim=dim, device=device)[0])
        call = lambda q, k: package.apply_rope(q, k, cos, sin, rotary_dim=dim)
        for made in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
            out = made(q, k)
            found += [*out, *torch.autograd.grad([x.float().square().sum() for x in out], (q, k))]
    return found
"""
HUB = """
from importlib import import_module
from pathlib import Path
hidden = ("cupy", "cupy_backends", "jinja2")  # importing one of them fails; nothing else loads NVRTC
sys.modules.update(dict.fromkeys(hidden))
import kernels

hub = kernels.get_local_kernel(Path(sys.argv[1]))
(loaded,) = kernels.get_loaded_kernels()
assert hub.__name__ == loaded.metadata.id and "jitrope" not in sys.modules
variant = Path(hub.__file__).parent
digest = loaded.metadata.digest
digest.validate(type(digest).hash_variant(digest.algorithm, variant))
jit = import_module(f"{hub.__name__}.jit.kernels")
(layer,) = jit.kernel_cache().system
assert layer.root == variant / "kernels.zip"
alone = results(hub)
assert jit.compiled == [] and not jit.kernel_cache().root.exists()
for entry in layer.entries() if device == "cpu" else ():  # every kernel is found, up to the driver, which refuses it
    spec = import_module(f"{hub.__name__}.base.spec").spec_from_dict(entry.spec)
    try:
        jit.Kernel(jit.build(spec, entry.arch).data, spec.entry, 0)
    except hub.CompileError as error:
        print(str(error).partition("driver")[1])
for name in hidden:
    del sys.modules[name]
import jitrope  # beside it: each has its own ops
assert all(map(torch.equal, alone, results(jitrope)))
ours, other = (package.Norm(torch.ones(64), torch.ones(64)) for package in (hub, jitrope))
assert repr(ours) == repr(other) and type(ours) is not type(other)
assert {*dir(torch.ops.jitrope)} & {*dir(getattr(torch.ops, hub.__name__))} >= {"call", "prepare"}
"""


def test_a_repository_works_with_torch_alone(cache: KernelCache, tmp_path: Path) -> None:
    """Its files are links, as in the cache of the Hub. A torch without CUDA takes the variant by its path."""
    installed("kernels")
    stored(cache.root, PARTIAL, "sm_90")
    bundle.write_hub(tmp_path / "hub", [(spec, "sm_90") for spec in PARTIAL], 2)
    variant = tmp_path / "hub" / "build" / "torch-cuda"
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(filter(Path.is_file, [*variant.rglob("*")])):
        file.rename(tmp_path / "blobs" / str(number))
        file.symlink_to(tmp_path / "blobs" / str(number))
    done = fresh.python("-c", RESULTS + HUB, str(variant), "cpu", check=True, JITROPE_CACHE_DIR=str(tmp_path / "none"))
    assert done.stdout.split() == ["driver"] * len(PARTIAL)


@pytest.mark.gpu
@pytest.mark.hardware
def test_a_gpu_runs_a_repository_with_torch_and_the_driver_alone(tmp_path: Path) -> None:
    """Rope of a whole head and of a part, gradients and compiled calls, with the bits of jitrope itself."""
    installed("kernels")
    record = tmp_path / "run.json"
    fresh.python("-c", f"{RESULTS}import jitrope\nresults(jitrope)", "cuda", check=True, JITROPE_RECORD=str(record))
    bundle.write_hub(tmp_path / "hub", [(spec, kernels.arch_of(0)) for spec in read_record(record)], 2)
    fresh.python(
        "-c", RESULTS + HUB, str(tmp_path / "hub"), "cuda", check=True, JITROPE_CACHE_DIR=str(tmp_path / "none")
    )


# ---- hostile bundles -------------------------------------------------------------------------------

HOSTILE = "\x1b[31mred \x1b]0;title\x07 \x9b31m\u202e"
"""Text that colours a terminal, renames its window and reverses its text."""
FIELDS = [{"name": HOSTILE}, {"name": ["a"]}, {"arch": HOSTILE}, {"arch": 90}, {"spec": [1]}, {"format": HOSTILE}]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_nothing_of_a_hostile_bundle_reaches_the_terminal(jitrope: Run, tmp_path: Path, fields: dict) -> None:
    files = pack(KEY, "text", DATA, {})
    meta = {**json.loads(files[META]), **fields}
    files[META] = json.dumps({**meta, "seal": seal(meta)}).encode()
    write_bundle(tmp_path / "hostile.zip", {KEY.folder: files})
    KernelCache(tmp_path / "kernels").install(KEY.folder, files)
    for command in ("bundle ls hostile.zip", "cache ls", "doctor"):
        done = jitrope(*command.split(), JITROPE_SYSTEM_CACHE="hostile.zip", JITROPE_NO_COMPILE="1")
        said = done.stdout + done.stderr
        assert done.returncode == 1
        assert "Traceback" not in said
        assert all(c.isprintable() or c == "\n" for c in said)
        if command.startswith("bundle"):
            assert done.stderr.startswith("error: cannot read the bundle hostile.zip: ")
