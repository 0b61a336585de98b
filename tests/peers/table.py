"""One row for each peer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """Tests of a peer, and the way to run them.

    Attributes:
        tests: its test files, as globs relative to the checkout.
        stands_for: the code that jitrope replaces.
        cpu: the part that runs without a GPU.
        deselect: parts of ids of deselected tests, each with the reason.
        conftest: the peer's conftest.py is loaded; most need the peer itself, built.
        needs: the modules that must be importable, besides torch and pytest.
    """

    tests: tuple[str, ...]
    stands_for: str
    cpu: str = "all, on CPU tensors; choose a few with -k"
    deselect: tuple[tuple[str, str], ...] = ()
    conftest: bool = False
    needs: str = ""


PEERS = {
    "transformer_engine": Peer(
        ("tests/pytorch/test_fused_rope.py",),
        "fused rope, of one tensor and of fused QKV; fused=False is plain torch",
    ),
    "flash_attn": Peer(
        ("tests/layers/test_rotary.py", "tests/test_rotary.py"),
        "flash_attn.ops.triton.rotary.apply_rotary, under flash-attention's own autograd functions",
        deselect=(("test_compilation_count", "counts compilations of the peer's own Triton kernel"),),
        needs="einops",
    ),
    "liger": Peer(
        (
            "test/transformers/test_rope.py", "test/transformers/test_qwen2vl_mrope.py",
            "test/transformers/test_llama4_rope.py",
        ),
        "liger's rope functions of Llama, Qwen2-VL, GPT-OSS and Llama 4",
        needs="transformers",
    ),
    "megatron": Peer(
        ("tests/unit_tests/transformer/test_rope.py",),
        "the fused-rope hooks of megatron.core, and TransformerEngine's fused QKV where Megatron imports it",
        cpu="none: the tests start NCCL",
        needs="megatron-core, installed or in the checkout",
    ),
    "diffusers": Peer(
        ("tests/models/transformers/test_models_transformer_*.py",),
        "the attention processors of every model that the tests make",
        cpu="all that does not ask for an accelerator",
        conftest=True,
        needs="diffusers",
    ),
    "transformers": Peer(
        ("tests/models/*/test_modeling_*.py",),
        "the rotary functions of the model files that the tests import",
        cpu="all that does not ask for an accelerator",
        conftest=True,
        needs="transformers",
    ),
}  # fmt: skip
