"""The pytest plugin: puts jitrope into the peer's place before anything is collected, and counts the calls."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from functools import wraps
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import jitrope
import tests

from . import PEERS, adapters

NAME, CHECKOUT, REPORTS = (os.environ[f"JITROPE_PEER_{key}"] for key in ("NAME", "CHECKOUT", "REPORTS"))
calls: Counter[str] = Counter()


@torch.compiler.assume_constant_result
def _count(name: str) -> None:
    calls[name] += 1


def _counted(name: str, function: Any) -> Any:
    @wraps(function)
    def call(*arguments: Any, **words: Any) -> Any:
        _count(name)
        return function(*arguments, **words)

    return call


def _count_calls() -> None:
    """Count calls of jitrope's public functions, wherever they are held. Compiled ones count when they are traced."""
    public = {n: getattr(jitrope, n) for n in jitrope.__all__ if n.startswith(("apply_rope", "prepare_"))}
    counted = {function: _counted(name, function) for name, function in public.items()}
    for name, module in list(sys.modules.items()):
        if name.startswith(("jitrope", "tests.peers")):
            for key, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and value in counted:
                    setattr(module, key, counted[value])


def _cpu(x: Any) -> Any:
    return "cpu" if isinstance(x, (str, torch.device)) and str(x).startswith("cuda") else x


class _OnCPU(TorchFunctionMode):
    """Replace the device "cuda" of tests by the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*map(_cpu, args), **{key: _cpu(x) for key, x in (kwargs or {}).items()})


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    tests.__path__.insert(0, str(Path(CHECKOUT, "tests")))  # the peer may have a package `tests` too
    if not torch.cuda.is_available():
        _OnCPU().__enter__()
        torch.set_default_device = lambda device: None
        torch.cuda.get_device_capability = lambda device=None: (9, 0)
        torch.cuda.synchronize = lambda device=None: None
    _count_calls()
    getattr(adapters, NAME)(Path(CHECKOUT))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def reason(item: pytest.Item) -> str:
        return next((why for part, why in PEERS[NAME].deselect if part in item.nodeid), "")

    left_out = Counter(filter(None, map(reason, items)))
    config.hook.pytest_deselected(items=[item for item in items if reason(item)])
    items[:] = [item for item in items if not reason(item)]
    _report("deselected", left_out)


def pytest_runtest_teardown() -> None:
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # as in hosts' own conftest.py files: a function is compiled in many tests


def pytest_terminal_summary(terminalreporter: Any) -> None:
    stats = terminalreporter.stats
    _report("outcomes", {key: len(stats.get(key, ())) for key in ("passed", "failed", "error", "skipped", "xfailed")})


def pytest_unconfigure() -> None:
    _report("calls", calls)


def _report(kind: str, numbers: dict[str, int]) -> None:
    Path(REPORTS, f"{kind}-{os.getpid()}.json").write_text(json.dumps(numbers))
