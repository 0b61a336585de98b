"""Rotate q and k, and take the gradient. Runs on a GPU, or on a CPU in plain torch.

python examples/quickstart.py
"""

import torch

import jitrope

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16
positions, head_dim = 1024, 128

# The angles of RoFormer and Llama: theta_i = 10000 ** (-2i / head_dim), one for each pair, in fp32.
frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
angles = torch.outer(torch.arange(positions, device=device), frequencies)
cos, sin = angles.cos(), angles.sin()

q = torch.randn(2, positions, 32, head_dim, device=device, dtype=dtype, requires_grad=True)  # (B, S, Hq, D)
k = torch.randn(2, positions, 8, head_dim, device=device, dtype=dtype, requires_grad=True)  # (B, S, Hk, D)

q_rotated, k_rotated = jitrope.apply_rope(q, k, cos, sin)
(q_rotated.float().square().sum() + k_rotated.float().square().sum()).backward()

# A rotation keeps lengths, so the gradient of |q|^2 is 2 q.
error = (q.grad.float() - 2 * q.detach().float()).abs().max()
right = bool(error < 0.1)
print(f"rotated q {tuple(q_rotated.shape)} and k {tuple(k_rotated.shape)} in {dtype} on {device}")
print(f"the gradient of |q|^2 is 2 q, up to rounding: {'yes' if right else 'NO'} (within {error:.3f})")
raise SystemExit(not right)
