"""Models of diffusers and xDiT that take turns in one process, stock and with jitrope."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


class Turns:
    """Models that take turns in one process, with and without what `enable` assigns. Its end restores the host."""

    def __init__(self) -> None:
        self.stock: dict[Any, Any] = {}  # by (module or class, name)

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *_: object) -> None:
        self.put({})

    def take(self, model: nn.Module, enable: Callable[[], Any] | None = None) -> Any:
        """Prepare a model, stock or with what `enable` assigns; return its report."""
        self.put({})
        before, report = self._seen(model), enable and enable()
        ours = {place: value for place, value in self._seen(model).items() if before.get(place) is not value}
        self.stock |= {place: before[place] for place in ours}
        if report is not None:
            report.__exit__()
        model.register_forward_pre_hook(lambda *_: self.put(ours))
        return report

    def put(self, ours: Mapping[Any, Any]) -> None:
        """Assign these, and the host's own in all other places."""
        for (holder, name), original in self.stock.items():
            setattr(holder, name, ours.get((holder, name), original))

    def _seen(self, model: nn.Module) -> dict[Any, Any]:
        """The functions of the host's modules, and the methods of a model's processors."""
        modules = [x for path, x in [*sys.modules.items()] if path.startswith(("diffusers.models.", "xfuser."))]
        processors = {type(module.processor) for module in model.modules() if hasattr(module, "processor")}
        return {(x, name): value for x in (*modules, *processors) for name, value in [*vars(x).items()]}
