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
report: dict[str, Any] = {"calls": Counter(), "deselected": {}, "outcomes": {}}
count = torch.compiler.assume_constant_result(lambda name: report["calls"].update([name]))


class _OnCPU(TorchFunctionMode):
    """Replace the device "cuda" of tests by the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        cpu = lambda x: "cpu" if isinstance(x, (str, torch.device)) and str(x).startswith("cuda") else x  # noqa: E731
        return func(*map(cpu, args), **{key: cpu(x) for key, x in (kwargs or {}).items()})


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    tests.__path__.insert(0, str(Path(CHECKOUT, "tests")))  # the peer may have a package `tests` too
    if not torch.cuda.is_available():
        _OnCPU().__enter__()
        torch.set_default_device = lambda device: None
        torch.cuda.get_device_capability = lambda device=None: (9, 0)
        torch.cuda.synchronize = lambda device=None: None
    # Calls of jitrope's public functions are counted, wherever they are held; compiled ones when they are traced.
    counted = {}
    for name in jitrope.__all__:
        if name.startswith(("apply_rope", "prepare_")):

            @wraps(function := getattr(jitrope, name))
            def call(*arguments: Any, _name: str = name, _function: Any = function, **words: Any) -> Any:
                count(_name)
                return _function(*arguments, **words)

            counted[function] = call
    for name, module in list(sys.modules.items()):
        if name.startswith(("jitrope", "tests.peers")):
            for key, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and value in counted:
                    setattr(module, key, counted[value])
    adapters.install(NAME, Path(CHECKOUT))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    why = {item: [why for part, why in PEERS[NAME].deselect if part in item.nodeid] for item in items}
    report["deselected"] = Counter(reasons[0] for reasons in why.values() if reasons)
    config.hook.pytest_deselected(items=[item for item in items if why[item]])
    items[:] = [item for item in items if not why[item]]


def pytest_runtest_teardown() -> None:
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # as in hosts' own conftest.py files: a function is compiled in many tests


def pytest_unconfigure(config: pytest.Config) -> None:
    if terminal := config.pluginmanager.get_plugin("terminalreporter"):  # workers of pytest-xdist have none
        kinds = ("passed", "failed", "error", "skipped", "xfailed")
        report["outcomes"] = {kind: len(terminal.stats.get(kind, ())) for kind in kinds}
    Path(REPORTS, f"{os.getpid()}.json").write_text(json.dumps(report))
