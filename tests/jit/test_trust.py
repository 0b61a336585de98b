"""Who is trusted (jitrope/jit/README.md): two users, a folder that a third can write, and the volumes of clusters."""

from __future__ import annotations

import codecs
import ctypes
import hashlib
import os
import pickle
import resource
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jitrope.base import config
from jitrope.base.errors import CacheError
from jitrope.jit.cache import KernelCache
from jitrope.jit.entry import CUBIN, FILES, pack, write_bundle
from jitrope.tools import bundle

from ..caches import KEY, fault, run_in_child

if not hasattr(os, "getuid") or os.getuid() != 0:
    pytest.skip("processes of other users need root", allow_module_level=True)

codecs.lookup("cp437")  # of names in a zip; another user may be unable to read the files of this Python
OURS, EVIL = b"\x7fELF ours", b"\x7fELF evil"
ME, OTHER, GROUP = 1234, 2345, 3456


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder of root's that every user can enter."""
    folder = Path(tempfile.mkdtemp(prefix="jitrope-trust-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def run(work: Callable[[], Any], user: int = ME, group: int | None = None, groups: tuple[int, ...] = ()) -> Any:
    """The result of a function in a process of another user. It must not raise."""
    reader, writer = os.pipe()
    assert run_in_child(lambda: os.write(writer, pickle.dumps(work())), user, group, groups) == 0
    os.close(writer)
    with open(reader, "rb") as file:
        return pickle.load(file)


def make(path: Path, mode: int, user: int = 0, group: int | None = None) -> Path:
    """A folder of a user."""
    path.mkdir()
    os.chown(path, user, user if group is None else group)
    path.chmod(mode)
    return path


def put(root: Path, data: bytes) -> None:
    assert KernelCache(root).store(KEY, "text", data, {})


def found(root: Path, *layers: Path | str) -> bytes | None:
    return KernelCache(root, [Path(layer) for layer in layers]).find(KEY)


def bundled(path: Path, user: int) -> str:
    """Write a bundle that belongs to a user. Returns its name with its digest."""
    write_bundle(path, {KEY.portable_folder: pack(KEY, "text", OURS, {})})
    os.chown(path, user, user)
    return f"{path}#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}"


def test_a_folder_that_is_exchanged_between_two_system_calls(place: Path) -> None:
    """All users can write the folder above, so another one may exchange the cache at any time."""
    above = make(place / "shared", 0o777)
    root, theirs = above / "kernels", above / "theirs"
    run(lambda: put(root, OURS))
    run(lambda: put(theirs, EVIL), OTHER)
    theirs.chmod(0o755)

    def exchange() -> None:
        for old, new in ((root, above / "aside"), (theirs, root), (above / "aside", theirs)):
            os.rename(old, new)

    def work() -> int:
        for at in range(1, 60):
            with pytest.MonkeyPatch.context() as patch:
                calls = fault(patch, at, "open stat lstat fstat listdir", exchange)
                got = found(root)
            assert got in (None, OURS), at
            if len(calls) < at:
                break
            exchange()  # back
        return at

    assert 5 < run(work) < 59


@pytest.mark.parametrize("name", [*FILES, ""])
def test_a_file_or_an_entry_of_another_user_is_not_read(place: Path, name: str) -> None:
    """It may have been put there while the folder could be written by others."""
    root = make(place / "mine", 0o700, ME) / "kernels"
    run(lambda: put(root, OURS))
    os.chown(root / KEY.folder / name, OTHER, OTHER)
    assert run(lambda: (found(root), put(root, OURS), found(root))) == (None, None, OURS)


def test_a_link_of_another_user_is_not_followed(place: Path) -> None:
    above = make(place / "shared", 0o777)
    run(lambda: put(above / "mine", OURS))
    run(lambda: (above / "link").symlink_to("mine"), OTHER)
    cache = KernelCache(above / "link")
    result, stored, (_, ((_, reason),)) = run(
        lambda: (cache.find(KEY), cache.store(KEY, "text", OURS, {}), cache.verify())
    )
    assert (result, stored) == (None, False)
    assert "can be written by other users" in reason


VOLUMES: dict[str, tuple[int, int, int, int, tuple[int, ...]]] = {
    # what: mode, owner, group of the folder; our group and other groups
    "emptyDir": (0o777, 0, 0, ME, ()), "emptyDir, sticky": (0o1777, 0, 0, ME, ()),
    "emptyDir with fsGroup": (0o2777, 0, GROUP, ME, (GROUP,)), "volume with fsGroup": (0o2775, 0, GROUP, ME, (GROUP,)),
    "OpenShift, emptyDir": (0o2777, 0, GROUP, 0, (GROUP,)), "OpenShift, of the image": (0o775, 1001, 0, 0, (GROUP,)),
    "a folder of our own that its group can write": (0o770, ME, ME, ME, ()),
}  # fmt: skip


@pytest.mark.parametrize("what", VOLUMES)
def test_a_folder_that_others_can_write_gets_a_private_one(place: Path, what: str, caplog) -> None:
    mode, owner, group, *groups = VOLUMES[what]
    given = make(place / "volume", mode, owner, group)
    private, cache = given / f"uid-{ME}", KernelCache(given)
    before = stat.S_IMODE(given.stat().st_mode)
    run(lambda: put(given, OURS), ME, *groups)
    there = run(
        lambda: (cache.root, cache.find(KEY), [x.path for x in cache.entries()], cache.verify(), caplog.messages),
        *(ME, *groups),
    )
    assert there[:-1] == (private, OURS, [private / KEY.folder], (1, []))
    (message,) = there[-1]  # said once
    assert str(private) in message
    info = private.stat()
    assert (info.st_uid, stat.S_IMODE(info.st_mode) & 0o777) == (ME, 0o700)
    assert (stat.S_IMODE(given.stat().st_mode), [*given.iterdir()]) == (before, [private])
    assert run(lambda: found(given), OTHER, *groups) is None  # another pod on the same volume
    assert len(run(KernelCache(given).clear, ME, *groups)) == 1


def test_a_private_folder_of_another_user_is_not_used(place: Path, caplog) -> None:
    given = make(place / "volume", 0o777)
    private = make(given / f"uid-{ME}", 0o777, OTHER)
    cache = KernelCache(given)
    *rest, said = run(lambda: (cache.store(KEY, "text", OURS, {}), cache.find(KEY), caplog.text))
    assert rest == [False, None]
    assert "belongs to another user" in said
    assert stat.S_IMODE(private.stat().st_mode) == 0o777
    assert not [*private.iterdir()]


def test_a_volume_whose_files_are_opened_to_the_group_at_each_start(place: Path) -> None:
    """Kubernetes does g+rwX to all of a volume when a pod with fsGroup starts, unless it is told not to."""
    given = make(place / "volume", 0o2775, 0, GROUP)
    private = given / f"uid-{ME}"
    run(lambda: put(given, OURS), ME, ME, (GROUP,))
    for path in (given, *given.rglob("*")):
        os.chown(path, -1, GROUP)
        path.chmod(stat.S_IMODE(path.stat().st_mode) | (0o2070 if path.is_dir() else 0o060))
    run(lambda: (private / KEY.folder / CUBIN).write_bytes(EVIL), OTHER, OTHER, (GROUP,))  # now they can
    again = run(lambda: (found(given), put(given, OURS), found(given)), ME, ME, (GROUP,))
    assert again == (None, None, OURS)
    assert stat.S_IMODE(private.stat().st_mode) & 0o777 == 0o700


def test_a_home_of_another_user(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenShift: a random user of group 0, whose home belongs to the image's user."""
    home = make(place / "home", 0o775, 1001, 0)
    for name in ("JITROPE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    own = config.cache_dir()
    got = run(lambda: (put(own, OURS), KernelCache(own).root, found(own)), 1_000_680_000, 0)
    assert got == (None, home / ".cache" / "jitrope", OURS)


@pytest.mark.parametrize("user", [0, ME, OTHER])
def test_a_bundle_is_roots_or_mine_or_has_a_digest(place: Path, user: int, monkeypatch, caplog) -> None:
    path, named = place / "k.zip", bundled(place / "k.zip", user)
    monkeypatch.setenv("JITROPE_SYSTEM_CACHE", f"{place / 'none.zip'}:{named}")
    none, layer = place / "none", KernelCache(place / "none", [Path(named)]).system[0]
    plain, said = run(lambda: (found(none, path), caplog.messages))
    assert plain == (OURS if user != OTHER else None)
    assert len(said) == int(user == OTHER)
    assert all("belongs to another user" in text and f"{path}#sha256=" in text for text in said)
    by_digest = run(lambda: (found(none, named), found(none, *config.system_caches()), layer.verify()))
    assert by_digest == (OURS, OURS, (1, []))
    assert run(lambda: len(bundle.entries(Path(named)))) == 1
    wrong, (last,) = run(lambda: (found(none, named[:-1] + "."), caplog.messages))
    assert wrong is None
    assert "SHA-256" in last

    def refused() -> str:
        with pytest.raises(CacheError) as error:
            bundle.load(path)
        return str(error.value)

    if user == OTHER:
        assert "belongs to another user" in run(refused)


def test_a_bundle_with_a_digest_that_its_owner_changes(place: Path) -> None:
    """What was checked is what is used, although it is the same file."""
    path, other = place / "k.zip", replace(KEY, ingredients="other")
    write_bundle(path, {key.portable_folder: pack(key, "text", OURS, {}) for key in (KEY, other)})
    os.chown(path, OTHER, OTHER)
    whole, times = path.read_bytes(), os.stat(path)
    cache = KernelCache(place / "none", [Path(f"{path}#sha256={hashlib.sha256(whole).hexdigest()}")])
    assert cache.find(KEY) == OURS
    with open(path, "r+b") as file:
        file.write(bytes(len(whole)))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert cache.find(other) == OURS
    os.utime(path)
    assert cache.find(other) is None


PARENTS: dict[str, tuple[int, int, bool]] = {  # mode, owner, and whether what is in it is used
    "root's": (0o755, 0, True), "mine": (0o755, ME, True), "another user's": (0o755, OTHER, False),
    "that its group can write": (0o775, 0, False), "that all can write": (0o777, 0, False),
    "root's, sticky": (0o1777, 0, True), "my own, sticky": (0o1777, ME, True),
    "another user's, sticky": (0o1777, OTHER, False),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["bundle", "folder", "below a folder", "link"])
@pytest.mark.parametrize("parent", PARENTS)
def test_the_folders_above_a_bundle(place: Path, parent: str, kind: str) -> None:
    """Who can write a folder above it can put another one in its place."""
    mode, owner, used = PARENTS[parent]
    above = make(place / "above", 0o755)
    layer, named = above / "layer", ""
    if kind == "folder":
        put(layer, OURS)
        layer.chmod(0o755)
    elif kind == "link":
        digest = bundled(place / "k.zip", 0).partition("#")[2]
        layer.symlink_to("../k.zip")
        named = f"{layer}#{digest}"
    else:
        layer = make(above / "below", 0o755) / "k.zip" if kind == "below a folder" else layer
        named = bundled(layer, 0)
    os.chown(above, owner, owner)
    above.chmod(mode)
    cache = KernelCache(place / "none", [layer])
    got = run(lambda: (cache.find(KEY), cache.system[0].verify()[0], named and found(place / "none", named)))
    assert got == (OURS if used else None, int(used), OURS if kind != "folder" else "")


def test_the_bundle_beside_jitrope_is_as_trusted_as_jitrope(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who installed it, such as a cluster's administrator, installed the code that runs."""
    bundled(place / "kernels.zip", OTHER)
    assert run(lambda: found(place / "none", place / "kernels.zip")) is None
    monkeypatch.setattr("jitrope.jit.entry.OWN_BUNDLE", place / "kernels.zip")
    assert run(lambda: found(place / "none", place / "kernels.zip")) == OURS


def test_a_link_of_another_user_to_my_own_bundle(place: Path) -> None:
    """It may lead to a file of mine that I do not trust, such as a download."""
    above = make(place / "above", 0o1777)
    bundled(place / "k.zip", ME)
    run(lambda: (above / "k.zip").symlink_to("../k.zip"), OTHER)
    assert run(lambda: [found(place / "none", folder / "k.zip") for folder in (above, place)]) == [None, OURS]


def test_a_folder_of_another_user_is_no_layer(place: Path) -> None:
    theirs = make(place / "theirs", 0o755, OTHER)
    run(lambda: put(theirs / "k", OURS), 0)
    for path in (theirs / "k", *(theirs / "k").rglob("*")):
        os.chown(path, OTHER, OTHER)
        path.chmod(0o755)
    os.chown(theirs, 0, 0)
    assert run(lambda: found(place / "none", theirs / "k")) is None


def test_a_container_in_which_root_is_nobody(place: Path) -> None:
    """Apptainer without setuid: all users but this one have the same number, also the owner of / and root."""
    if subprocess.run(["unshare", "--user", "true"], user=ME, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("users may make no user namespaces here")
    mine = make(place / "mine", 0o755, ME)
    bundled(place / "k.zip", 0)

    def work() -> Any:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: else the process may not write its map
        assert libc.unshare(0x10000000) == 0, os.strerror(ctypes.get_errno())  # CLONE_NEWUSER
        Path("/proc/self/uid_map").write_text(f"{ME} {ME} 1")
        assert os.stat("/").st_uid not in (0, ME)
        put(mine / "kernels", OURS)
        write_bundle(mine / "k.zip", {KEY.portable_folder: pack(KEY, "text", OURS, {})})
        return found(mine / "kernels"), *[found(place / "none", folder / "k.zip") for folder in (mine, place)]

    assert run(work) == (OURS, OURS, None)  # root's bundle may be any user's


HUGE = 40 << 30


@pytest.mark.parametrize("what", ["an entry's cubin", "a bundle"])
def test_what_claims_40_gib_is_refused(place: Path, what: str) -> None:
    """A sparse file takes no room on a disk. The process has 4 GiB more than it uses."""
    path = place / "layer"
    if what == "a bundle":  # a zip behind zeros
        bundled(path, 0)
        whole = path.read_bytes()
        with open(path, "wb") as file:
            file.seek(HUGE)
            file.write(whole)
    else:
        put(path, OURS)
        os.truncate(path / KEY.folder / CUBIN, HUGE)

    def work() -> Any:
        (kib,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line)
        resource.setrlimit(resource.RLIMIT_AS, (int(kib) * 1024 + (4 << 30),) * 2)
        for given in (path, Path(f"{path}#sha256={'0' * 64}")) if path.is_file() else ():
            with pytest.raises(CacheError, match="bytes, more than"):
                bundle.load(given)
        cache = KernelCache(path if path.is_dir() else place / "none", [path])
        return cache.system[0].verify()[1], cache.find(KEY)

    ((_, reason),), data = run(work, 0)
    assert data is None
    assert "bytes, more than" in reason
