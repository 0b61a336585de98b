"""Tests whose body runs on each of several processes: `@on_ranks`.

The processes start with the first such test, and serve all of a run. One failure ends them, because the ranks may be
out of step then, and the next test starts others.
"""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from .fresh import SERVER

GROUPS: list[dist.ProcessGroup | None] = []
"""In a process with gloo: those of `SUBSETS` that it is in, and None, torch's default group."""

SUBSETS: dict[int, Any] = {4: ([0], [1], [2], [3], [0, 2], [1, 3], [0, 1, 2]), 8: [range(n) for n in range(2, 8)]}
"""The groups of 4 and of 8 processes with gloo, beside torch's default group."""

_started: dict[tuple[str, int], list[tuple[Any, Any]]] = {}  # the processes, and the pipes to them


def _on_ranks(backend: str, most: int, body: Any) -> Any:
    @functools.wraps(body)
    def test(**words: Any) -> None:
        size, errors = most if backend == "gloo" else max(2, min(most, torch.cuda.device_count())), []
        if (backend, most) not in _started:
            folder, _started[backend, most] = tempfile.mkdtemp(), []
            for rank in range(size):
                ours, theirs = SERVER.Pipe()
                process = SERVER.Process(target=_serve, args=(rank, size, backend, folder, theirs), daemon=True)
                process.start()
                theirs.close()
                _started[backend, most].append((process, ours))
        for _, pipe in _started[backend, most]:
            pipe.send((body.__module__, body.__name__, words))
        for rank, (_, pipe) in enumerate(_started[backend, most]):
            try:
                error = pipe.recv() if pipe.poll(500) else "it does not end"
            except EOFError:
                error = "the process ended"
            errors += [f"rank {rank}: {error}"] if error else []
        if errors:
            for process, _ in _started.pop((backend, most)):
                process.kill()
        assert not errors, "\n".join(errors)

    test.body = body
    return pytest.mark.slow(test) if backend == "gloo" else pytest.mark.gpu(pytest.mark.hardware(test))


on_ranks = functools.partial(_on_ranks, "gloo", 4)  # a test whose body runs on four processes
on_eight = functools.partial(_on_ranks, "gloo", 8)
on_gpus = functools.partial(_on_ranks, "nccl", 4)
"""A test whose body runs on four processes with a GPU each, or on two if there are fewer GPUs. If there is one, both
run on it, as two hosts for NCCL, which takes a GPU for each process of a host; they speak over sockets."""


def _serve(rank: int, size: int, backend: str, folder: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        gpus = torch.cuda.device_count()
        os.environ["NCCL_HOSTID"] = f"host {rank // gpus}"
        torch.cuda.set_device(rank % gpus)
    words: dict[str, Any] = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=60)}
    dist.init_process_group(backend, init_method=f"file://{Path(folder, 'store')}", **words)
    for members in SUBSETS[size] if backend == "gloo" else ():
        group = dist.new_group(members, words["timeout"])
        if rank in members:
            GROUPS.append(group)
    GROUPS.append(None)
    while True:
        module, name, given = pipe.recv()  # the parent's end ends this process
        try:
            getattr(importlib.import_module(module), name).body(**given)
            pipe.send("")
        except Exception:
            pipe.send(traceback.format_exc())
