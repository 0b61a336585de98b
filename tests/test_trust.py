"""Who is trusted (jitrope/jit/README.md): two users, a folder that a third can write, and the volumes of clusters."""

from __future__ import annotations

import codecs
import ctypes
import hashlib
import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jitrope.base import config
from jitrope.base.errors import CacheError
from jitrope.jit.cache import KernelCache
from jitrope.jit.entry import CUBIN, FILES, META, Key, pack, write_bundle
from jitrope.tools import bundle

if not hasattr(os, "getuid") or os.getuid() != 0:
    pytest.skip("processes of other users need root", allow_module_level=True)

codecs.lookup("cp437")  # of names in a zip; another user may be unable to read the files of this Python
KEY = Key("rope_x", "ingredients", ("-std=c++17",), "sm_90", "nvrtc 13.0")
OURS, EVIL = b"\x7fELF ours", b"\x7fELF evil"
ME, OTHER, GROUP = 1234, 2345, 3456


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder of root's that every user can enter."""
    folder = Path(tempfile.mkdtemp(prefix="jitrope-trust-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def run(work: Callable[[], object], user: int = ME, group: int = ME, groups: tuple[int, ...] = ()) -> None:
    """Run a function in a process of another user. It must not raise."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups(groups)
            os.setgid(group)
            os.setuid(user)
            work()
        except BaseException as error:
            print(f"in the child: {error!r}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


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


def is_(want: object, got: object) -> None:
    assert want == got, f"{got!r}, not {want!r}"


# ---- the user's own folder -----------------------------------------------------------------------


def test_a_folder_that_is_exchanged_between_two_system_calls(place: Path) -> None:
    """All users can write the folder above, so another one may exchange the cache at any time."""
    above = make(place / "shared", 0o777)
    root, theirs = above / "kernels", above / "theirs"
    run(lambda: put(root, OURS))
    run(lambda: put(theirs, EVIL), OTHER)
    theirs.chmod(0o755)

    rename, calls = os.rename, []

    def exchange() -> None:
        for old, new in ((root, above / "aside"), (theirs, root), (above / "aside", theirs)):
            rename(old, new)

    def wrapped(real: Callable, at: int) -> Callable:
        def call(*arguments, **keywords):
            calls.append(real)
            if len(calls) == at:
                exchange()
            return real(*arguments, **keywords)

        return call

    def work() -> None:
        for at in range(1, 60):
            calls.clear()
            with pytest.MonkeyPatch.context() as patch:
                for name in ("open", "stat", "lstat", "fstat", "listdir"):
                    patch.setattr(os, name, wrapped(getattr(os, name), at))
                got = found(root)
            assert got in (None, OURS), at
            if len(calls) < at:
                break
            exchange()  # back
        assert 5 < at < 59

    run(work)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_user_is_not_read(place: Path, name: str) -> None:
    """It may have been put there while the folder could be written by others."""
    above = make(place / "mine", 0o700, ME)
    run(lambda: put(above / "kernels", OURS))
    os.chown(above / "kernels" / KEY.folder / name, OTHER, OTHER)

    def work() -> None:
        cache = KernelCache(above / "kernels")
        is_(cache.find(KEY), None)
        put(cache.root, OURS)
        is_(found(cache.root), OURS)

    run(work)


def test_an_entry_of_another_user_is_not_read(place: Path) -> None:
    above = make(place / "mine", 0o700, ME)
    run(lambda: put(above / "kernels", OURS))
    os.chown(above / "kernels" / KEY.folder, OTHER, OTHER)
    run(lambda: is_(found(above / "kernels"), None))


def test_a_link_of_another_user_is_not_followed(place: Path) -> None:
    above = make(place / "shared", 0o777)
    run(lambda: put(above / "mine", OURS))
    run(lambda: (above / "link").symlink_to("mine"), OTHER)

    def work() -> None:
        cache = KernelCache(above / "link")
        assert found(cache.root) is None
        assert not cache.store(KEY, "text", OURS, {})
        ((_, reason),) = cache.verify()[1]
        assert "can be written by other users" in reason

    run(work)


# ---- folders of volumes --------------------------------------------------------------------------

VOLUMES: dict[str, tuple[int, int, int, int, tuple[int, ...]]] = {
    # what: mode, owner, group of the folder; our group and other groups
    "emptyDir": (0o777, 0, 0, ME, ()),
    "emptyDir, sticky": (0o1777, 0, 0, ME, ()),
    "emptyDir with fsGroup": (0o2777, 0, GROUP, ME, (GROUP,)),
    "volume with fsGroup": (0o2775, 0, GROUP, ME, (GROUP,)),
    "OpenShift, emptyDir": (0o2777, 0, GROUP, 0, (GROUP,)),
    "OpenShift, a folder of the image": (0o775, 1001, 0, 0, (GROUP,)),
    "a folder of our own that its group can write": (0o770, ME, ME, ME, ()),
}


@pytest.mark.parametrize("what", VOLUMES)
def test_a_folder_that_others_can_write_gets_a_private_one(place: Path, what: str, caplog) -> None:
    mode, owner, group, own_group, groups = VOLUMES[what]
    given = make(place / "volume", mode, owner, group)
    private = given / f"uid-{ME}"
    before = stat.S_IMODE(given.stat().st_mode)

    def work() -> None:
        put(given, OURS)
        is_([record.message for record in caplog.records if str(private) in record.message], caplog.messages)
        is_(len(caplog.messages), 1)
        cache = KernelCache(given)
        is_(cache.root, private)
        is_(cache.find(KEY), OURS)
        is_([entry.path for entry in cache.entries()], [private / KEY.folder])
        is_(cache.verify(), (1, []))

    run(work, ME, own_group, groups)
    info = private.stat()
    assert (info.st_uid, stat.S_IMODE(info.st_mode) & 0o777) == (ME, 0o700)
    assert (stat.S_IMODE(given.stat().st_mode), [*given.iterdir()]) == (before, [private])
    run(lambda: is_(found(given), None), OTHER, own_group, groups)  # another pod on the same volume
    run(lambda: is_(len(KernelCache(given).clear()), 1), ME, own_group, groups)


def test_a_private_folder_of_another_user_is_not_used(place: Path, caplog) -> None:
    given = make(place / "volume", 0o777)
    make(given / f"uid-{ME}", 0o777, OTHER)

    def work() -> None:
        cache = KernelCache(given)
        assert not cache.store(KEY, "text", OURS, {})
        assert cache.find(KEY) is None
        assert "belongs to another user" in caplog.text

    run(work)
    assert stat.S_IMODE((given / f"uid-{ME}").stat().st_mode) == 0o777
    assert not [*(given / f"uid-{ME}").iterdir()]


def test_a_volume_whose_files_are_opened_to_the_group_at_each_start(place: Path) -> None:
    """Kubernetes does g+rwX to all of a volume when a pod with fsGroup starts, unless it is told not to."""
    given = make(place / "volume", 0o2775, 0, GROUP)
    private = given / f"uid-{ME}"
    run(lambda: put(given, OURS), ME, ME, (GROUP,))
    for path in (given, *given.rglob("*")):
        os.chown(path, -1, GROUP)
        path.chmod(stat.S_IMODE(path.stat().st_mode) | (0o2070 if path.is_dir() else 0o060))
    run(lambda: (private / KEY.folder / CUBIN).write_bytes(EVIL), OTHER, OTHER, (GROUP,))  # now they can

    def work() -> None:
        is_(found(given), None)
        put(given, OURS)
        is_(found(given), OURS)

    run(work, ME, ME, (GROUP,))
    assert stat.S_IMODE(private.stat().st_mode) & 0o777 == 0o700


def test_a_home_of_another_user(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenShift: a random user of group 0, whose home belongs to the image's user."""
    home = make(place / "home", 0o775, 1001, 0)
    for name in ("JITROPE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))

    def work() -> None:
        put(config.cache_dir(), OURS)
        is_(KernelCache(config.cache_dir()).root, home / ".cache" / "jitrope")
        is_(found(config.cache_dir()), OURS)

    run(work, 1_000_680_000, 0)


# ---- bundles and read-only folders ---------------------------------------------------------------


def bundled(path: Path, user: int, data: bytes = OURS) -> str:
    """Write a bundle that belongs to a user. Returns its digest."""
    write_bundle(path, {KEY.portable_folder: pack(KEY, "text", data, {})})
    os.chown(path, user, user)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("user", [0, ME, OTHER])
def test_a_bundle_is_roots_or_mine_or_has_a_digest(place: Path, user: int, caplog) -> None:
    digest = bundled(place / "k.zip", user)

    def work() -> None:
        named = f"{place / 'k.zip'}#sha256={digest}"
        is_(found(place / "none", place / "k.zip"), OURS if user != OTHER else None)
        is_(len(caplog.records), int(user == OTHER))
        for record in caplog.records:
            assert "belongs to another user" in record.message
            assert f"{place / 'k.zip'}#sha256=" in record.message
        is_(found(place / "none", named), OURS)
        is_(KernelCache(place / "none", [Path(named)]).system[0].verify(), (1, []))
        is_(len(bundle.entries(Path(named))), 1)
        is_(found(place / "none", named[:-1] + "."), None)
        assert "SHA-256" in caplog.records[-1].message
        if user == OTHER:
            with pytest.raises(CacheError, match="belongs to another user"):
                bundle.load(place / "k.zip")

    run(work)


def test_the_variable_takes_a_digest(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = bundled(place / "k.zip", OTHER)
    monkeypatch.setenv("JITROPE_SYSTEM_CACHE", f"{place / 'none.zip'}:{place / 'k.zip'}#sha256={digest}")
    run(lambda: is_(found(place / "none", *config.system_caches()), OURS))


def test_a_bundle_with_a_digest_that_its_owner_changes(place: Path) -> None:
    """What was checked is what is used, although it is the same file."""
    other = replace(KEY, ingredients="other")
    both = {key.portable_folder: pack(key, "text", OURS, {}) for key in (KEY, other)}
    write_bundle(place / "k.zip", both)
    os.chown(place / "k.zip", OTHER, OTHER)
    whole = (place / "k.zip").read_bytes()
    named = Path(f"{place / 'k.zip'}#sha256={hashlib.sha256(whole).hexdigest()}")
    times = os.stat(place / "k.zip")
    cache = KernelCache(place / "none", [named])
    assert cache.find(KEY) == OURS
    with open(place / "k.zip", "r+b") as file:
        file.write(bytes(len(whole)))
    os.utime(place / "k.zip", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert cache.find(other) == OURS
    os.utime(place / "k.zip")
    assert cache.find(other) is None


PARENTS: dict[str, tuple[int, int, bool]] = {
    "root's": (0o755, 0, True),
    "mine": (0o755, ME, True),
    "another user's": (0o755, OTHER, False),
    "that its group can write": (0o775, 0, False),
    "that all can write": (0o777, 0, False),
    "root's, sticky": (0o1777, 0, True),
    "my own, sticky": (0o1777, ME, True),
    "another user's, sticky": (0o1777, OTHER, False),
}


@pytest.mark.parametrize("kind", ["bundle", "folder", "below a folder", "link"])
@pytest.mark.parametrize("parent", PARENTS)
def test_the_folders_above_a_bundle(place: Path, parent: str, kind: str) -> None:
    """Who can write a folder above it can put another one in its place."""
    mode, owner, used = PARENTS[parent]
    above = make(place / "above", 0o755)
    layer = above / "layer"
    if kind == "folder":
        put(layer, OURS)
        layer.chmod(0o755)
    elif kind == "link":
        digest = bundled(place / "k.zip", 0)
        layer.symlink_to("../k.zip")
    else:
        layer = make(above / "below", 0o755) / "k.zip" if kind == "below a folder" else layer
        digest = bundled(layer, 0)
    os.chown(above, owner, owner)
    above.chmod(mode)
    run(lambda: is_(found(place / "none", layer), OURS if used else None))
    run(lambda: is_(KernelCache(place / "none", [layer]).system[0].verify()[0], int(used)))
    if kind != "folder":
        run(lambda: is_(found(place / "none", f"{layer}#sha256={digest}"), OURS))


def test_the_bundle_beside_jitrope_is_as_trusted_as_jitrope(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who installed it, such as a cluster's administrator, installed the code that runs."""
    bundled(place / "kernels.zip", OTHER)
    run(lambda: is_(found(place / "none", place / "kernels.zip"), None))
    monkeypatch.setattr("jitrope.jit.entry.OWN_BUNDLE", place / "kernels.zip")
    run(lambda: is_(found(place / "none", place / "kernels.zip"), OURS))


def test_a_link_of_another_user_to_my_own_bundle(place: Path) -> None:
    """It may lead to a file of mine that I do not trust, such as a download."""
    above = make(place / "above", 0o1777)
    bundled(place / "k.zip", ME)
    run(lambda: (above / "k.zip").symlink_to("../k.zip"), OTHER)
    run(lambda: is_(found(place / "none", above / "k.zip"), None))
    run(lambda: is_(found(place / "none", place / "k.zip"), OURS))


def test_a_folder_of_another_user_is_no_layer(place: Path) -> None:
    run(lambda: put(make(place / "theirs", 0o755, OTHER) / "k", OURS), 0, 0)
    for path in (place / "theirs" / "k", *(place / "theirs" / "k").rglob("*")):
        os.chown(path, OTHER, OTHER)
        path.chmod(0o755)
    run(lambda: is_(found(place / "none", place / "theirs" / "k"), None))
    os.chown(place / "theirs", 0, 0)
    run(lambda: is_(found(place / "none", place / "theirs" / "k"), None))


def test_a_container_in_which_root_is_nobody(place: Path) -> None:
    """Apptainer without setuid: all users but this one have the same number, also the owner of / and root."""
    if subprocess.run(["unshare", "--user", "true"], user=ME, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("users may make no user namespaces here")
    mine = make(place / "mine", 0o755, ME)
    bundled(place / "k.zip", 0)

    def work() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: else the process may not write its map
        assert libc.unshare(0x10000000) == 0, os.strerror(ctypes.get_errno())  # CLONE_NEWUSER
        Path("/proc/self/uid_map").write_text(f"{ME} {ME} 1")
        assert os.stat("/").st_uid not in (0, ME)
        put(mine / "kernels", OURS)
        is_(found(mine / "kernels"), OURS)
        write_bundle(mine / "k.zip", {KEY.portable_folder: pack(KEY, "text", OURS, {})})
        is_(found(place / "none", mine / "k.zip"), OURS)
        is_(found(place / "none", place / "k.zip"), None)  # it may be any user's

    run(work)


# ---- sizes ---------------------------------------------------------------------------------------

HUGE = 40 << 30


def huge_cubin(path: Path) -> Path:
    put(path, OURS)
    os.truncate(path / KEY.folder / CUBIN, HUGE)
    return path


def huge_bundle(path: Path) -> Path:
    """A zip behind zeros. The file is sparse."""
    bundled(path, 0)
    whole = path.read_bytes()
    with open(path, "wb") as file:
        file.seek(HUGE)
        file.write(whole)
    return path


HUGES: dict[str, Callable[[Path], Path]] = {
    "an entry's cubin": huge_cubin,
    "a bundle": huge_bundle,
}


@pytest.mark.parametrize("what", HUGES)
def test_what_claims_40_gib_is_refused(place: Path, what: str) -> None:
    """A sparse file takes no room on a disk. The process has 4 GiB more than it uses."""
    path = HUGES[what](place / "layer")

    def work() -> None:
        (kib,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line)
        resource.setrlimit(resource.RLIMIT_AS, (int(kib) * 1024 + (4 << 30),) * 2)
        cache = KernelCache(path if path.is_dir() else place / "none", [path])
        is_(cache.find(KEY), None)
        (_, reason), *_ = cache.system[0].verify()[1] or [("", "removed")]
        assert "bytes, more than" in reason or reason == "removed", reason
        if path.is_file():
            with pytest.raises(CacheError, match="bytes, more than"):
                bundle.load(path)
            with pytest.raises(CacheError, match="bytes, more than"):
                bundle.load(Path(f"{path}#sha256={'0' * 64}"))

    run(work, 0, 0)


def test_a_name_is_short_enough_for_an_encrypted_home() -> None:
    """eCryptfs allows 143 bytes."""
    assert len(replace(KEY, name="n" * 300, arch="sm_120a").folder) <= 143
    assert META in FILES
