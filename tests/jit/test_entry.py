"""The key of a kernel covers all that it is made from; the files of an entry and of a bundle are checked."""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from jitrope.base.errors import CacheError
from jitrope.jit import entry, kernels
from jitrope.jit.cache import KernelCache
from jitrope.jit.entry import CUBIN, FILES, META, TEXT, pack, read_bundle, seal, write_bundle
from jitrope.tools import bundle
from jitrope.tools.prewarm import specs_of

from ..caches import DATA, KEY, filled


def test_every_part_of_the_key_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade of the compiler or the flags can never load an old kernel; `test_fuzz` has every part of a key."""
    for changed in (replace(KEY, options=(*KEY.options, "-G")), replace(KEY, compiler="other")):
        assert changed.folder != KEY.folder
        assert (changed.source == KEY.source) == (changed.compiler == "other")
    spec = specs_of([32, 8])[0]
    for other in (replace(spec, vec=4), replace(spec, rotary_dim=64)):
        assert kernels.key_of(other, "sm_90").source != kernels.key_of(spec, "sm_90").source
    monkeypatch.setattr(entry, "FORMAT", 999)
    assert replace(KEY).source != KEY.source


def test_a_name_is_short_enough_for_an_encrypted_home() -> None:
    assert len(replace(KEY, name="n" * 300, arch="sm_120a").folder) <= 143  # bytes, of eCryptfs


@pytest.mark.parametrize("odd", [{"name": "rope_y"}, {"compiler": None}, {"arch": "sm_80"}])
def test_a_sealed_entry_with_odd_fields_is_damaged(cache: KernelCache, odd: dict[str, object]) -> None:
    path = filled(cache).with_name(META)
    meta = {**json.loads(path.read_text()), **odd}
    path.write_text(json.dumps({**meta, "seal": seal(meta)}))
    assert [text for _, text in cache.verify()[1]] == [f"{KEY.folder} is another kernel"]


KEYS = sorted([replace(KEY, ingredients=str(i)) for i in range(4)], key=lambda key: key.folder)
BUNDLED = {key.portable_folder: pack(key, "text", DATA * 9 + key.ingredients.encode(), {}) for key in KEYS}
"""Four kernels, each of other bytes."""
NAMES = [*BUNDLED]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "k.zip", BUNDLED)
    return tmp_path / "k.zip"


def test_what_is_in_a_bundle(written: Path) -> None:
    """The files of each kernel, by name, without times, with the modes that `unzip` gives them."""
    with zipfile.ZipFile(written) as file:
        members = file.infolist()
    assert [m.filename for m in members] == [f"{name}/{file}" for name in NAMES for file in ("", *sorted(FILES))]
    for m in members:
        mode = 0o40755 if m.is_dir() else 0o100644
        assert (m.date_time, m.external_attr >> 16) == ((1980, 1, 1, 0, 0, 0), mode)
        assert m.compress_type == zipfile.ZIP_STORED
    assert [*read_bundle(written)] == NAMES


MEMBERS = {f"{name}/{file}": data for name, files in BUNDLED.items() for file, data in files.items()}
FIRST, SECOND, *_ = NAMES
SPEC = f"{FIRST}/{META}"
CHANGES: dict[str, dict[str, bytes]] = {  # the members of another bundle
    "a file less": dict([*MEMBERS.items()][:-1]),
    "nothing": {},
    "a kernel of another format": {**MEMBERS, SPEC: MEMBERS[SPEC].replace(b'"format": 3', b'"format": 9')},
    "cubin changed": {**MEMBERS, f"{FIRST}/{CUBIN}": MEMBERS[f"{FIRST}/{CUBIN}"][:-1] + b"x"},
    "text changed": {**MEMBERS, f"{FIRST}/{TEXT}": b"textx"},
    "a part of a kernel": {**MEMBERS, "x-sm_90-" + "0" * 20 + "-any/kernel.cubin": b"x"},
    "two whole kernels, each in the folder of the other": MEMBERS
    | {f"{a}/{file}": MEMBERS[f"{b}/{file}"] for a, b in ((FIRST, SECOND), (SECOND, FIRST)) for file in FILES},
    "all kernels outside of the folder": {f"../{name}": data for name, data in MEMBERS.items()},
}


@pytest.mark.parametrize("how", CHANGES)
def test_anything_else_is_refused_and_nothing_is_written(written: Path, cache: KernelCache, how: str) -> None:
    right = {key: KernelCache(cache.root, (written,)).find(key) for key in KEYS}
    assert None not in right.values()
    assert CHANGES[how] != MEMBERS
    with zipfile.ZipFile(written, "w") as file:
        for name, data in CHANGES[how].items():
            file.writestr(name, data)
    for ask in (bundle.load, bundle.entries):
        with pytest.raises(CacheError, match=r"k\.zip"):
            ask(written)
    assert [*written.parent.iterdir()] == [written]
    layered = KernelCache(cache.root, (written,))  # as a layer, every kernel that is found is right
    assert all(layered.find(key) in (None, data) for key, data in right.items())


def test_files_of_no_kernel_are_never_read(written: Path, cache: KernelCache, tmp_path: Path) -> None:
    """Folders may be missing, as after `zip -D`, and kernels may have more files."""
    others = ["setup.py", "../kernel.cubin", "/tmp/kernel.cubin", "../folder/", "x-any/kernel.cubin"]
    others += [f"{name}/{more}" for name in NAMES for more in ("notes", "../../kernel.cu")]
    with zipfile.ZipFile(written, "w") as file:
        for name, data in {**MEMBERS, **dict.fromkeys(others, b"x")}.items():
            file.writestr(name, data)
    assert [e.path.name for e in bundle.entries(written)] == NAMES
    assert {e.path.parent for e in bundle.load(written)} == {cache.root}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["k.zip", "kernels"]
    assert sorted(p.name for p in cache.root.iterdir()) == NAMES


def test_no_bundle_is_used_truncated_or_with_a_flipped_bit(written: Path, cache: KernelCache) -> None:
    whole = written.read_bytes()
    want = {e.path.name: e.size for e in bundle.entries(written)}
    right = KernelCache(cache.root, (written,)).find(KEYS[0])
    step = len(whole) // 60
    damaged = [whole[:length] for length in range(0, len(whole) - step, step)]
    flips = [*range(0, 2000, 37), *range(0, len(whole), step)]
    damaged += [whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :] for i in flips]
    refused = 0
    for data in damaged:
        written.write_bytes(data)
        assert KernelCache(cache.root, (written,)).find(KEYS[0]) in (None, right)
        try:
            assert {e.path.name: e.size for e in bundle.entries(written)} == want  # only a date was changed
        except CacheError:
            refused += 1
    assert refused > 100


def test_a_bundle_may_be_replaced_while_a_process_uses_it(written: Path, tmp_path: Path) -> None:
    """A process without a compiler finds the kernels of both bundles, which lie at other places in the new one."""
    write_bundle(tmp_path / "live.zip", {NAMES[2]: read_bundle(written)[NAMES[2]]})
    cache = KernelCache(tmp_path / "none", (tmp_path / "live.zip",))
    assert [cache.find(key) is not None for key in KEYS] == [False, False, True, False]
    os.replace(written, tmp_path / "live.zip")
    assert all(cache.find(key) for key in KEYS)
