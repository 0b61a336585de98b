"""Steps of libraries that serve models, for `bench hosts`: one model under two sets of functions, and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .harness import DEVICE
from .host_models import Host, Pair, Side, counts


class Layers(nn.Module):
    """Decoder layers that hand on a residual.

    context: makes the context of a step. more: each layer's arguments between its input and the residual.
    """

    def __init__(
        self, layers: nn.ModuleList, context: Callable[[], AbstractContextManager[Any]], more: tuple[Any, ...] = ()
    ) -> None:
        super().__init__()
        self.layers, self.context, self.more = layers, context, more

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        """x through all layers."""
        x = x.clone()  # the layers add to their input in place
        residual: Any = None
        with self.context():
            for layer in self.layers:
                x, residual = layer(positions, x, *self.more, residual)
        total: Tensor = x + residual
        return total


class Step(nn.Module):
    """A step of a model. functions: those that it first puts into modules, by module and name."""

    def __init__(self, model: nn.Module, functions: Mapping[tuple[Any, str], Callable[..., Any]]) -> None:
        super().__init__()
        self.model, self.functions = model, functions
        self.graph: Any = None
        self.out: Tensor | None = None

    def compile(self, **_: Any) -> None:
        """Take a CUDA graph from the next step on, as these libraries do without a compiler."""
        if DEVICE == "cuda":
            self.graph = torch.cuda.CUDAGraph()

    def forward(self, **words: Any) -> Tensor:
        """The model's. A graph has the arguments of its first step."""
        if self.graph is None:
            return self.eager(words)
        if self.out is None:
            with torch.cuda.graph(self.graph):
                self.out = self.eager(words)
        self.graph.replay()
        return self.out

    def eager(self, words: dict[str, Any]) -> Tensor:
        """The model's, without a graph."""
        for (module, name), function in self.functions.items():
            setattr(module, name, function)
        out: Tensor = self.model(**words)
        return out


@contextmanager
def pair_of(
    integration: Any, places: Iterable[tuple[Any, str]], model: nn.Module, words: dict[str, Any], fused: bool
) -> Iterator[Pair]:
    """Steps of a model with the functions at these places as they are, and with jitrope's. fused: they have norms."""
    stock = {(module, name): getattr(module, name) for module, name in places}
    with integration.enable() as report:
        ours = {(module, name): getattr(module, name) for module, name in stock}
        sides = [Side(Step(model, functions), words) for functions in (stock, ours)]
        yield Pair(sides[0], sides[1], partial(counts, report, fused), trained=False)


def sizes(decode: bool, smoke: bool) -> tuple[int, int, int]:
    """(Sequences, cached tokens of each, new tokens of each) of a step."""
    if smoke:
        return (2, 8, 1) if decode else (1, 0, 6)
    return (8, 1024, 1) if decode else (1, 0, 4096)


def hosts(
    package: str, model: str, kinds: Mapping[str, str], pair: Callable[[bool, str, bool], AbstractContextManager[Pair]]
) -> dict[str, Host]:
    """Decode and prefill of two layers with each kind of attention, by name.

    kinds: by the end of a name, the text after the model's. pair: of (decode, kind, smoke).
    """
    steps = {"decode": "decode, 8 sequences, 2 layers", "prefill": "prefill, 4096 tokens, 2 layers"}
    return {
        f"{package}-{step}{'-' if kind else ''}{kind}": Host(
            package, model + label, text, partial(pair, step == "decode", kind)
        )
        for kind, label in kinds.items()
        for step, text in steps.items()
    }
