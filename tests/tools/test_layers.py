"""transformers takes a layer of the repository that `bundle.write_hub` writes, through `kernels`."""

from __future__ import annotations

from pathlib import Path

from jitrope.jit.cache import KernelCache
from jitrope.tools import bundle
from jitrope.tools.prewarm import specs_of

from .. import fresh
from ..hosts import installed
from .conftest import stored

SCRIPT = """
import sys
from pathlib import Path
from transformers.utils import import_utils
# transformers asks for one minor version of kernels; what is used here is the same in its neighbours.
import_utils.is_kernels_available.__wrapped__.__defaults__ = ("0.17", "1.0")
import torch
from kernels import LocalLayerRepository, Mode, get_local_kernel, kernelize, use_kernel_mapping
from tests.integrations import transformers_zoo as zoo

calls, path, mode = [], Path(sys.argv[1]), Mode.TRAINING | Mode.TORCH_COMPILE
layers = get_local_kernel(path).layers
rope = layers.apply_rope
layers.apply_rope = lambda *xs, **words: calls.append(words) or rope(*xs, **words)
layer = LocalLayerRepository(path, layer_name="apply_rotary_transformers")
model = zoo.language_model("llama").train()
q, k, table = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 1, 8), torch.rand(1, 5, 8)

def run():
    model.zero_grad()
    out = model(input_ids=zoo.IDS)[0]
    out.sum().backward()
    turned = zoo.modeling("llama").apply_rotary_pos_emb(q, k, table.cos(), table.sin(), unsqueeze_dim=2)
    return out, *[x.grad for x in model.parameters()], *turned

stock = run()
with use_kernel_mapping({"rotary_pos_emb": {"cpu": {mode: layer}}}):
    kernelize(model, mode=mode, device="cpu")
assert calls == []
torch.testing.assert_close(run(), stock)
assert calls == [{"layout": "bhsd"}] * 2 + [{"layout": "bshd"}], calls
"""


def test_transformers_takes_its_rope_from_a_repository(cache: KernelCache, tmp_path: Path) -> None:
    """For training too, by the gradients of a Llama. transformers applies its decorators when it is imported."""
    for host in ("kernels", "transformers"):
        installed(host)
    specs = specs_of([4, 2], 8)
    stored(cache.root, specs, "sm_90")
    bundle.write_hub(tmp_path / "hub", [(spec, "sm_90") for spec in specs], 1)
    fresh.python("-c", SCRIPT, str(tmp_path / "hub" / "build" / "torch-cuda"), check=True)
