"""`integrations.xfuser`: xDiT's FLUX.1 as on one rank; its processors call diffusers' functions, then jitrope's."""

from __future__ import annotations

import importlib

import torch

from .. import hosts


def test_xdit() -> None:
    with hosts.xdit():
        xfuser, file, qwen, embeddings = map(importlib.import_module, (
            "jitrope.integrations.xfuser", "xfuser.model_executor.models.transformers.transformer_flux",
            "diffusers.models.transformers.transformer_qwenimage", "diffusers.models.embeddings",
        ))  # fmt: skip
        x, angles, theirs = torch.randn(2, 6, 3, 16).bfloat16(), torch.rand(6, 8), file.apply_rotary_emb
        tables = [table.repeat_interleave(2, -1) for table in (angles.cos(), angles.sin())]
        want = theirs(x, tables, sequence_dim=1)
        with xfuser.enable() as report:
            names = {f"{embeddings.__name__}.apply_rotary_emb", f"{qwen.__name__}.apply_rotary_emb_qwen"}
            assert report.replaced.keys() == names
            assert torch.equal(file.apply_rotary_emb(x, tables, sequence_dim=1), want)
            assert report.calls == {"jitrope": 1, "host": 0}
            qwen.apply_rotary_emb_qwen(x, torch.polar(torch.ones(6, 8), angles), use_real=False)
            assert report.calls == {"jitrope": 2, "host": 0}
        assert file.apply_rotary_emb is embeddings.apply_rotary_emb is theirs
