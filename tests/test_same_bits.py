"""Trainer = server: a call gives the same bits for a token in every layout, batch and launch, and with a cache."""

from __future__ import annotations

import os
import re

import pytest
import torch

import jitrope
from jitrope import InvalidInput, prepare_qkv

from . import same_bits
from .fresh import python
from .host.backend import DEVICE
from .same_bits import INVARIANT, MODELS, PROMISED, differing, model, without_the_switch

SECOND = [pytest.mark.hardware, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")]
FORMS = [pytest.param(form, marks=SECOND if form is PROMISED[-1] else [], id=form.__name__) for form in PROMISED]


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", FORMS)
def test_same_bits(form: same_bits.Form, name: str) -> None:
    m = model(name)
    found = [differing(got, m.trained) for got in form(m)]
    assert found
    assert not any(found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", INVARIANT)
def test_the_switch_is_needed(name: str) -> None:
    """If this fails for a model, it needs no switch any more."""
    assert without_the_switch(model(name))


@pytest.mark.gpu
def test_what_is_not_aligned_is_refused_while_the_switch_is_on() -> None:
    m = model("heads-of-80")
    odd = torch.empty(m.q.numel() + 1, device=DEVICE, dtype=m.q.dtype)[1:].view(1, *m.q.shape)
    for on in (False, True, False):
        jitrope.configure(batch_invariant=on)
        if on:
            with pytest.raises(InvalidInput, match="must be multiples of 8 elements"):
                prepare_qkv(odd.copy_(m.q), m.k[None], None, **m.words)
        else:
            prepare_qkv(odd.copy_(m.q), m.k[None], None, **m.words)


@pytest.mark.gpu
def test_the_command_sees_one_bit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def flipped(m: same_bits.Model) -> same_bits.Results:
        """one bit of k"""
        for q, k in same_bits.prefill_into_slots(m):
            k.view(torch.int16)[-1, -1, -1] ^= 1
            yield q, k

    for last, code in ((same_bits.in_place, 0), (flipped, 1)):
        monkeypatch.setattr(same_bits, "PROMISED", [same_bits.prefill_into_slots, last])
        assert same_bits.main(["--model", "Llama", "after-rope"]) == code
        out = capsys.readouterr().out
        assert re.search(r"prefill into slots +2 +129024 +0\n", out)
        assert bool(re.search(r"one bit of k +2 +129024 +2  Llama, after-rope\n", out)) == bool(code)
        assert ("all promised bits are the same" in out) != bool(code)


@pytest.mark.slow
def test_the_command_without_a_gpu() -> None:
    """It builds its kernels with g++."""
    own = {name: value for name, value in os.environ.items() if name not in ("TEST_DEVICE", "LD_PRELOAD")}
    done = python("-m", "tests.same_bits", "--model", "Llama", env={**own, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    assert re.match(r"a CPU, kernels built by g\+\+; torch [\d.]+\S*, jitrope \d", done.stdout)
    assert re.search(r"a second GPU +0 +0 +0  there is one device\n", done.stdout)
    assert "all promised bits are the same" in done.stdout
