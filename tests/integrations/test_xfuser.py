"""`integrations.xfuser`: xDiT's FLUX.1 as on one rank; its processors call diffusers' functions, then jitrope's."""

from __future__ import annotations

import importlib

import torch

from .. import hosts


def test_xdit() -> None:
    with hosts.xdit():
        xfuser = importlib.import_module("jitrope.integrations.xfuser")
        file = importlib.import_module("xfuser.model_executor.models.transformers.transformer_flux")
        qwen = importlib.import_module("diffusers.models.transformers.transformer_qwenimage")
        x, angles = torch.randn(2, 6, 3, 16).bfloat16(), torch.rand(6, 8)
        tables = [f(angles).repeat_interleave(2, -1) for f in (torch.cos, torch.sin)]
        theirs = file.apply_rotary_emb
        want = theirs(x, tables, sequence_dim=1)
        with xfuser.enable() as report:
            assert set(report.replaced) == {
                "diffusers.models.embeddings.apply_rotary_emb",
                "diffusers.models.transformers.transformer_qwenimage.apply_rotary_emb_qwen",
            }
            assert torch.equal(file.apply_rotary_emb(x, tables, sequence_dim=1), want)
            assert report.calls == {"jitrope": 1, "host": 0}
            qwen.apply_rotary_emb_qwen(x, torch.polar(torch.ones(6, 8), angles), use_real=False)
            assert report.calls == {"jitrope": 2, "host": 0}
        embeddings = importlib.import_module("diffusers.models.embeddings")
        assert file.apply_rotary_emb is embeddings.apply_rotary_emb is theirs
