"""Python in a separate process with torch imported: a fork takes milliseconds, `import torch` 3 s of a core.

multiprocessing's server forks; it has imported torch, but not jitrope.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

IMPORTS = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
"""A PYTHONPATH with this checkout."""
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch"])


def python(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 300,
    check: bool = False, **variables: str,
) -> CompletedProcess[str]:  # fmt: skip
    """Like `subprocess.run` of this Python with `-c CODE ...`, `-m MODULE ...` or `PATH ...`, with text output.

    env: by default the variables of this process, with this checkout on PYTHONPATH. variables: more of them.
    """
    env = {**os.environ, "PYTHONPATH": IMPORTS, **variables} if env is None else env
    with TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        process = SERVER.Process(target=_main, args=(arguments, dict(env), str(cwd or Path.cwd()), outputs))
        process.start()
        process.join(timeout)
        ended = process.exitcode is not None
        process.kill()
        stdout, stderr = (path.read_text() if path.exists() else "" for path in outputs)
    assert ended, f"{arguments} took longer than {timeout} s: {stderr}"
    assert not check or process.exitcode == 0, stderr
    return CompletedProcess(arguments, process.exitcode or 0, stdout, stderr)


def _main(arguments: Sequence[str], env: dict[str, str], cwd: str, outputs: list[Path]) -> None:
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    own = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]  # not pytest's
    sys.path[:] = ["", *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *own]
    kind, *rest = arguments
    sys.argv = [kind, *rest[kind in ("-c", "-m") :]]
    if kind == "-c":
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        if Path(kind).is_file():
            sys.path[0] = str(Path(kind).parent)
        runpy.run_path(kind, run_name="__main__")
