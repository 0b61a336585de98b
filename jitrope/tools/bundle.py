"""Kernels in a file, for machines that do not compile: `JITROPE_SYSTEM_CACHE=kernels.zip`, or `load`.

>>> from jitrope.tools import bundle, prewarm
>>> kernels = [(spec, "sm_90") for spec in prewarm.specs_of(heads=[32, 8])]
>>> results = bundle.write(Path("kernels.zip"), kernels, jobs=2)
>>> len(bundle.entries(Path("kernels.zip"))), len(bundle.load(Path("kernels.zip")))
(4, 4)
>>> results = bundle.write_hub(Path("hub"), kernels, jobs=2)
>>> sorted(path.name for path in Path("hub").iterdir())
['LICENSE', 'README.md', 'build']

A bundle is a zip of entries; each entry has SHA-256 checksums of its files. Kernels are matched by
source (templates, constants, options, architecture, format), not by compiler. So a machine that uses them needs torch
and NVIDIA's driver, but neither CuPy, NVRTC nor headers. The checksums detect damage, not tampering, and a bundle is
code: so it must be root's or yours, or be named with its digest, `kernels.zip#sha256=...`.
"""

from __future__ import annotations

import json
import shutil
from base64 import b64encode
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from ..base import arguments
from ..base.config import OWN_BUNDLE
from ..base.errors import CacheError, CompileError
from ..base.spec import Spec
from ..jit.entry import Entry, check, pack, read_bundle, write_bundle
from ..jit.kernels import build, kernel_cache, key_of
from ..jit.render import TEMPLATE_PATHS, render
from .prewarm import Built, build_each, reasons

__all__ = ["entries", "load", "write", "write_hub"]


def write(path: Path, kernels: Iterable[tuple[Spec, str]], jobs: int) -> list[Built]:
    """Write kernels to `path`, and compile those that are not in a cache. No GPU is needed.

    The same kernels of the same calls give the same bytes. The file is written completely or not at all.

    Args:
        path: the file; its folder must exist.
        kernels: a list of (spec, architecture), such as (spec, "sm_90"). The specs come from
            `jitrope.tools.prewarm.specs_of`, `jitrope.tools.prewarm.read_record` or `jitrope.record`. Repeated kernels
            are written once.
        jobs: the number of kernels to compile at a time.

    Returns:
        The result for each kernel, in order.

    Raises:
        InvalidInput: an argument has a wrong type.
        CompileError: a kernel could not be made; nothing is written.
        CacheError: the file cannot be written, or there is nothing to write.
    """
    path = arguments.path("write", "path", path)
    kernels = arguments.items("write", "kernels", kernels, "a list of (spec, architecture)")
    for i, kernel in enumerate(kernels):
        if not isinstance(kernel, (tuple, list)) or len(kernel) != 2:
            arguments.refuse("write", f"kernels[{i}]", kernel, "(spec, architecture)")
    files: dict[str, dict[str, bytes]] = {}

    def packed(spec: Spec, arch: str) -> Built:
        found, key = build(spec, arch), key_of(spec, arch)
        cached = None if found.compiled else kernel_cache().read(key)
        files[key.portable_folder] = cached or pack(key, render(spec).text, found.data, spec.to_dict())
        return Built(spec, arch, "compiled" if found.compiled else "cached")

    results = build_each("write", map(tuple, kernels), jobs, packed)
    if not results:
        raise CacheError("there are no kernels to bundle; run `jitrope prewarm` first, or name a record with --from")
    if failed := [built for built in results if built.failed]:
        text = f"{path} is not written, {len(failed)} of {len(results)} kernels are missing:"
        raise CompileError("\n".join([text, *reasons(failed)]))
    write_bundle(path, files)
    return results


def write_hub(path: Path, kernels: Iterable[tuple[Spec, str]], jobs: int) -> list[Built]:
    """Write a repository for Hugging Face's `kernels`: jitrope, with a bundle of kernels that it finds by itself.

    `kernels.get_local_kernel(path)` imports it, also beside jitrope itself, and so does `kernels.get_kernel` after an
    upload. Its layout and metadata are those of https://huggingface.co/docs/kernels/kernel-requirements, its variant
    torch-cuda. The folder is written completely or not at all.

    Args:
        path: the folder, which must not exist; the folder above it must.
        kernels, jobs: as `write` takes them.

    Returns:
        The result for each kernel, in order.

    Raises:
        InvalidInput, CompileError, CacheError: as `write` raises them; and there is something at `path`.
        OSError: the folder cannot be written.
    """
    path = arguments.path("write_hub", "path", path)
    if path.exists():
        raise CacheError(f"{path} exists; name a new folder")
    package, unused = OWN_BUNDLE.parent, shutil.ignore_patterns("__pycache__", "*.md")
    with TemporaryDirectory(prefix=".jitrope-", dir=path.parent) as made:
        variant = (hub := Path(made, "hub")) / "build" / "torch-cuda"
        shutil.copytree(package, variant, ignore=unused)
        shutil.copytree(next(filter(Path.is_dir, TEMPLATE_PATHS)), variant / "templates", dirs_exist_ok=True)
        (variant / "__init__.py").write_bytes((package / "__init__.py").read_bytes() + b"\nfrom .tools import layers\n")
        results = write(variant / OWN_BUNDLE.name, kernels, jobs)
        files = sorted(filter(Path.is_file, variant.rglob("*")))
        digests = {str(x.relative_to(variant)): b64encode(sha256(x.read_bytes()).digest()).decode() for x in files}
        name = f"_jitrope_cuda_{sha256(repr(digests).encode()).hexdigest()[:8]}"  # of the module, and of torch's ops
        archs = [f"{arch[3:-1]}.{arch[-1]}a" for arch in sorted({x.arch for x in results})]  # a: for no other one
        # Version 0 is for what may still change.
        about = {"id": name, "name": "jitrope", "version": 0, "license": "Apache-2.0", "python-depends": []}
        about |= {"backend": {"type": "cuda", "archs": archs}, "digest": {"algorithm": "sha256", "files": digests}}
        (variant / "metadata.json").write_text(json.dumps(about, indent=1))
        shutil.copy(package / "tools" / "hub.md", hub / "README.md")
        wheels = package.parent.glob("jitrope-*.dist-info/licenses/LICENSE")
        shutil.copy(next(wheels, package.parent / "LICENSE"), hub)
        hub.rename(path)
    return results


def load(path: Path) -> list[Entry]:
    """Copy a bundle's kernels into the user's cache, and return them.

    All kernels are checked before the first is copied. In the cache they work with any compiler and are not pruned.
    They replace the same kernels of an earlier bundle.

    Args:
        path: the bundle, or `path#sha256=digest`.

    Raises:
        CacheError: the file is not a bundle, is damaged or is not trusted, or the cache cannot be written.
    """
    cache, found = kernel_cache(), read_bundle(arguments.path("load", "path", path))
    for number, (folder, files) in enumerate(found.items()):
        if not cache.install(folder, files):
            raise CacheError(f"cannot write the kernel cache {cache.root}; {number} kernels of {path} are in it")
    return [check(cache.root / folder, files) for folder, files in found.items()]


def entries(path: Path) -> list[Entry]:
    """The kernels of a bundle, checked.

    Raises:
        CacheError: the file is not a bundle, is damaged or is not trusted.
    """
    path = arguments.path("entries", "path", path)
    return [check(path / folder, files) for folder, files in read_bundle(path).items()]
