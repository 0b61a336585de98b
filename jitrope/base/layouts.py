"""How the heads of a call lie in its tensors: the words of its source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

QKV_ORDERS = {"grouped": 1, "qkv": 1, "qkv_gated": 2}
"""The orders of fused QKV, and the heads that q's projection has for each head of q: with a gate two."""
FUSED_AXES = {"bshd": "BS", "sbhd": "SB", "thd": "T"}
"""The layouts of fused QKV, and its axes before the heads."""
MAX_HEAD_DIM = 576
MAX_TOKENS = 2**31 - 1  # CUDA's limit on the first grid axis

# The axes of (batch, seq, head, dim) in each layout; None: no batch axis.
LAYOUT_AXES: dict[str, tuple[int | None, int, int, int]]
LAYOUT_AXES = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3), "thd": (None, 0, 1, 2)}


class Words:
    """The words of a source. Every part of a call has such a class, with the defaults; `options` joins them."""

    layout: str = "bshd"
    q_per_group: int = 0  # heads of q in a group of fused QKV; 0: separate q and k
    order: str = "grouped"  # of fused QKV, one of `QKV_ORDERS`
    copy_v: bool = True  # fused QKV: copy v, or return a view
    copy_gate: bool = False  # "qkv_gated": copy the gate too, or return a view
    round_projection: bool = False  # of x and a weight: round its sums to the dtype, as a tensor of it is
    v_dim: int = 0  # latent attention: elements of a head of v
    inplace: bool = False

    def __init__(self, **words: Any) -> None:
        for word in words:
            getattr(type(self), word)  # AttributeError: there is no such word
        vars(self).update(words)

    def __setattr__(self, word: str, value: Any) -> None:
        raise AttributeError(f"{word} cannot be set")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join([f'{word}={x!r}' for word, x in vars(self).items()])})"

    def _replace(self, **words: Any) -> Self:
        made = type(self)(**words)
        vars(made).update({**vars(self), **words})
        return made
