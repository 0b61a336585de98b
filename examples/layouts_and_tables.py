"""One rotation in every layout, with every format of table and every kind of position. Nothing is copied or converted.

python examples/layouts_and_tables.py

Runs on a GPU, or on a CPU in plain torch. Each line compares a call with the first one.
"""

import torch

import jitrope
from jitrope import tables

device = "cuda" if torch.cuda.is_available() else "cpu"
B, S, HEADS, KV_HEADS, D = 2, 48, 8, 2, 64
torch.manual_seed(0)


def report(what: str, same: bool) -> None:
    print(f"  {what + ', the same bits':<58} {'yes' if same else 'NO'}")
    if not same:
        raise SystemExit(f"{what}: the result differs")


def near(what: str, out: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    error = float((out.float() - want.float()).abs().max())
    print(f"  {what + f', within {limit}':<58} {'yes' if error <= limit else 'NO'} ({error:.1e})")
    if not error <= limit:
        raise SystemExit(f"{what}: the result differs by {error}")


# Frequencies of YaRN, as transformers computes them, for a context four times as long as the model was trained on.
# `factor` scales the cosines and sines; the angles behind them are fp64.
inv_freq, factor = tables.inv_freq("yarn", rotary_dim=D, factor=4.0, original_max_position_embeddings=32)
inv_freq = inv_freq.to(device)
cos, sin = tables.cos_sin(4 * S, inv_freq, attention_factor=factor)  # (P, D / 2): one angle for each pair
q, k = (torch.randn(B, S, heads, D, device=device, dtype=torch.bfloat16) for heads in (HEADS, KV_HEADS))
q_out, k_out = jitrope.apply_rope(q, k, cos, sin)  # layout "bshd", pairs (i, i + D / 2)

print("Layouts are strides.")
for layout, axes in (("sbhd", (1, 0, 2, 3)), ("bhsd", (0, 2, 1, 3))):
    x, y = (t.permute(axes) for t in (q, k))  # views: nothing is copied
    out, _ = jitrope.apply_rope(x, y, cos, sin, layout=layout)
    report(f"{layout}, a view of bshd", torch.equal(out, q_out.permute(axes)))

# Packed: the sequences stand one after another, without padding.
cu_seqlens = torch.arange(B + 1, device=device, dtype=torch.int32) * S
packed = jitrope.Packed(cu_seqlens)  # made once per batch, for all layers
out, _ = jitrope.apply_rope(q.flatten(0, 1), k.flatten(0, 1), cos, sin, positions=packed)
report("thd, positions=Packed(cu_seqlens)", torch.equal(out, q_out.flatten(0, 1)))

# A projection's output before it is split: q, k and v of a token side by side.
qkv = torch.randn(B, S, HEADS + 2 * KV_HEADS, D, device=device, dtype=torch.bfloat16)
qkv[:, :, :HEADS], qkv[:, :, HEADS : HEADS + KV_HEADS] = q, k
jitrope.apply_rope(*qkv.split((HEADS, KV_HEADS, KV_HEADS), 2)[:2], cos, sin, inplace=True)  # in the fused tensor
report("in place, inside of a fused projection", torch.equal(qkv[:, :, :HEADS], q_out))

print("Tables are read as they are.")
twice = [torch.cat((t, t), -1) for t in (cos, sin)]
report("full width, as transformers has it", torch.equal(jitrope.apply_rope(q, k, *twice)[0], q_out))
cache = torch.cat((cos, sin), -1)
report("one tensor, as vLLM has it", torch.equal(jitrope.apply_rope(q, k, cos_sin_cache=cache)[1], k_out))
cis = torch.complex(cos, sin)
report("complex64, as torchtitan has it", torch.equal(jitrope.apply_rope(q, k, freqs_cis=cis)[0], q_out))

# Angles, as Megatron and TransformerEngine have them: the kernel computes their cosines and sines. These angles are
# fp32, those behind the table fp64, so the results are close but not equal.
angles = torch.outer(torch.arange(4 * S, device=device), inv_freq)
out, _ = jitrope.apply_rope(q, k, freqs=angles, mscale=factor)
near("angles, as Megatron has them", out, q_out, 0.02)

print("Positions are the table's rows.")
ids = torch.arange(S, device=device).flip(0)
out, _ = jitrope.apply_rope(q.flip(1), k, cos, sin, positions=ids)
report("ids for tokens in another order", torch.equal(out.flip(1), q_out))
starts = jitrope.Starts(torch.tensor([0, 17], device=device))
later, _ = jitrope.apply_rope(q[1:], k[1:], cos[17:], sin[17:])
out, _ = jitrope.apply_rope(q, k, cos, sin, positions=starts)
report("Starts, a sequence that goes on at 17", torch.equal(out[1:], later))

# Pairs (2i, 2i + 1) in place of (i, i + D / 2): the same rotation, if the elements of a head are reordered.
order = torch.arange(D, device=device).view(2, -1).t().flatten()
out, _ = jitrope.apply_rope(q[..., order], k[..., order], cos, sin, interleaved=True)
report("interleaved pairs", torch.equal(out, q_out[..., order]))

back, _ = jitrope.apply_rope(q_out, k_out, cos / factor**2, sin / factor**2, inverse=True)
print("inverse=True rotates back.")
near("rotated there and back, in bf16", back, q, 0.05)
