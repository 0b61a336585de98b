"""Other projects' own rope tests, run with jitrope in place of their rope: `python -m tests.peers --list`.

Nothing of theirs is copied here. Each row of `PEERS` names their test files in a checkout that the user gives;
`adapters.install` puts jitrope where those files import the peer from.
"""

from __future__ import annotations

from typing import NamedTuple


class Peer(NamedTuple):
    """Tests of a peer, and the way to run them."""

    tests: tuple[str, ...]
    """Its test files, as globs relative to the checkout."""
    stands_for: str
    """The code that jitrope replaces."""
    cpu: str = "all, on CPU tensors; choose a few with -k"
    """The part that runs without a GPU."""
    deselect: tuple[tuple[str, str], ...] = ()
    """Parts of ids of deselected tests, each with the reason."""
    conftest: bool = False
    """Whether the peer's conftest.py is loaded; most need the peer itself, built."""
    needs: str = ""
    """The modules that must be importable, besides torch and pytest."""


RUNNABLE = "all that does not ask for an accelerator"
PEERS = {
    "transformer_engine": Peer(
        ("tests/pytorch/test_fused_rope.py",),
        "fused rope, of one tensor and of fused QKV; fused=False is plain torch"),
    "flash_attn": Peer(
        ("tests/layers/test_rotary.py", "tests/test_rotary.py"),
        "flash_attn.ops.triton.rotary.apply_rotary, under flash-attention's own autograd functions",
        deselect=(("test_compilation_count", "counts compilations of the peer's own Triton kernel"),), needs="einops"),
    "liger": Peer(
        (*(f"test/transformers/test_{name}rope.py" for name in ("", "qwen2vl_m", "llama4_")),),
        "liger's rope functions of Llama, Qwen2-VL, GPT-OSS and Llama 4", needs="transformers"),
    "megatron": Peer(
        ("tests/unit_tests/transformer/test_rope.py",),
        "the fused-rope hooks of megatron.core, and TransformerEngine's fused QKV where Megatron imports it",
        cpu="none: the tests start NCCL", needs="megatron-core, installed or in the checkout"),
    "diffusers": Peer(
        ("tests/models/transformers/test_models_transformer_*.py",),
        "the attention processors of every model that the tests make", RUNNABLE, conftest=True, needs="diffusers"),
    "transformers": Peer(
        ("tests/models/*/test_modeling_*.py",),
        "the rotary functions of the model files that the tests import", RUNNABLE, conftest=True, needs="transformers"),
}  # fmt: skip
