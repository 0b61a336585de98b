"""A new stage: a file, its device half, and the two lists that name it, beside the user's word for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .host import backend

ROOT = Path(__file__).parent.parent
FILES = {
    "jitrope/stages/clip.py": '''
"""Clip of q and k: y = min(max(x, -clip), clip)."""

from __future__ import annotations

from dataclasses import field

from torch import Tensor

from ..base import layouts
from ..base.fit import Fail
from ..base.spec import OF_NORM
from ..base.views import Tensors
from .positions import TURNED

LABEL = "clip"
ARGUMENTS = {"clipped": ("", "Number clip")}


class Words(layouts.Words):
    clip: float = 0.0


class Fields:
    clipped: bool = field(metadata=OF_NORM | {"given": "clip"})


def check(t: Tensors, o: Words, fail: Fail) -> None:
    fail.when(o.clip < 0, f"clip is {o.clip}; it must be 0 or above")


def forward(letter: str, x: Tensor, t: Tensors, o: Words) -> Tensor:
    return x.float().clamp(-o.clip, o.clip) if letter in TURNED else x
''',
    "templates/clip.cuh": """
// clip: y = min(max(y, -clip), clip). NaN stays.
struct Clip {
    float clip;

    DEVICE Clip(const Params& p) : clip(p.clip.value) {}
    DEVICE void apply(const Head& head, Elements& y) const {
        for (int i = 0; i < ELEMENTS && !head.is_v; ++i) y[i] = y[i] < -clip ? -clip : y[i] > clip ? clip : y[i];
    }
};
""",
}
BEHIND = {  # what stands behind which text of the lists, and in the signatures
    "jitrope/stages/__init__.py": {
        "from . import bias, ": "clip, ",
        "for stage in (": "clip, ",
        "class Words(": "clip.Words, ",
        "class Fields(": "clip.Fields, ",
    },
    "templates/stages.cuh.jinja": {
        '{% include "rotate.cuh.jinja" %}\n': '{% if clipped %}{% include "clip.cuh" %}'
        "{% else %}using Clip = Absent;{% endif +%}\n",
        "    const Order order = {rotate};\n": "    const Clip clip(p);\n",
        "            order.behind(p, own, x, y);\n": "            clip.apply(own.head, y);\n",
    },
    "jitrope/api/keywords.py": {"class SharedWords(TypedDict, total=False):\n": "    clip: float\n"},
}
CALLS = """
import sys
import jitrope, pytest, torch

if sys.argv[1] == "cpu":
    from tests.host import backend
    backend.install()

numbers = torch.Generator().manual_seed(0)
q, k = (torch.randn(2, 8, heads, 64, generator=numbers).to(sys.argv[1]) for heads in (4, 2))
tables = [x.to(sys.argv[1]) for x in jitrope.tables.cos_sin(8, jitrope.tables.inv_freq(rotary_dim=64)[0])]
text = "bshd heads q k > norm kind=no_norm > rotate cos sin rotary_dim=64 > clip clip=0.5 > fresh"
for clip, call in ((0.5, text), (0.0, "bshd heads q k > rotate cos sin rotary_dim=64 > fresh")):
    with jitrope.planning() as planned:
        jitrope.apply_rope(*[x.to("meta") for x in (q, k, *tables)], clip=clip)
    assert {spec.call for spec in planned} == {call}, planned
for words in ({}, {"norm": jitrope.Norm()}, {"rounding": "dtype"}, {"interleaved": True, "inplace": True}):
    for heads in ((q, k), (q.bfloat16(), k.bfloat16())):
        plain = jitrope.prepare_qkv(*[x.clone() for x in heads], None, *tables, **words)[:2]
        found = jitrope.prepare_qkv(*[x.clone() for x in heads], None, *tables, clip=0.5, q_scale=2.0, **words)[:2]
        must = [plain[0].clamp(-0.5, 0.5) * 2, plain[1].clamp(-0.5, 0.5)]
        assert all(map(torch.equal, found, must)), words
streams = [q[:, :2], k[:, :2], k[:, :2]], [q[:, 2:], k[:, 2:], k[:, 2:]]
qkv = torch.cat([q, k, k], 2).flatten(2)
for function, arguments, words in (
    (jitrope.prepare_joint_qkv, streams, {}), (jitrope.prepare_fused_qkv, (qkv,), {"heads": (4, 2)}),
):
    found, plain = (function(*arguments, *tables, **words, **own) for own in ({"clip": 0.5}, {}))
    assert all(map(torch.equal, found, [plain[0].clamp(-0.5, 0.5), plain[1].clamp(-0.5, 0.5), k])), function
with pytest.raises(jitrope.InvalidInput, match="clip does not go with latent attention"):
    jitrope.prepare_mla_qkv(q, torch.cat([k, k, k], -1), k[:, :, :1], *tables, clip=0.5)
with pytest.raises(jitrope.InvalidInput, match="clip is -1.0; it must be 0 or above"):
    jitrope.apply_rope(q, k, *tables, clip=-1.0)
with pytest.raises(jitrope.InvalidInput, match="q requires a gradient, but this call has none"):
    jitrope.apply_rope(q.requires_grad_(), k, *tables, clip=0.5)
"""


@pytest.mark.gpu
def test_a_stage_is_a_file_its_device_half_and_two_lists(tmp_path: Path) -> None:
    for folder in ("jitrope", "templates", "tests/host"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for name, places in BEHIND.items():
        text = (tmp_path / name).read_text()
        for place, added in places.items():
            text, found = re.subn(re.escape(place), lambda x, added=added: x[0] + added, text)
            assert found == 1, place
        (tmp_path / name).write_text(text)
    own = backend.environment() if backend.DEVICE == "cpu" else dict(os.environ)
    own["PYTHONPATH"], command = str(tmp_path), [sys.executable, "-c", CALLS, backend.DEVICE]
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
