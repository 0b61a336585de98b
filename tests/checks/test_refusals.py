"""The list of refusals: what was called, the argument that is wrong, and the whole sentence that the user reads.

Most of words that do not go together are in `calls.REFUSED`. A refused call writes nothing, and is refused each time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, KVCache, Mrope, Norm, Packed, Pages, Quantize, Shifts, Starts, Ulysses, tables, thd
from jitrope import torch_state as watch
from jitrope.base.spec import spec_from_dict
from jitrope.call import Call
from jitrope.context_parallel import Partition, Rope, Schedule, all_gather_attention
from jitrope.run import op_call
from jitrope.tools.prewarm import specs_of

from ..devices import slow

E4M3, E8M0 = torch.float8_e4m3fn, getattr(torch, "float8_e8m0fnu", torch.uint8)
FP4 = getattr(torch, "float4_e2m1fn_x2", torch.uint8)  # two elements in a byte

# Two rows of 6 tokens, 4 heads of q, 2 of k and v, of 8 elements; a table with a row for each token.
HEADS = Q, K, V = torch.ones(2, 6, 4, 8), torch.ones(2, 6, 2, 8), torch.ones(2, 6, 2, 8)
ANGLES = torch.arange(6.0)[:, None] / torch.arange(1.0, 5.0)
COS, SIN = ANGLES.cos(), ANGLES.sin()
T, NONE = {"cos": COS, "sin": SIN}, {"cos": None, "sin": None}
IDS, CU, W = torch.arange(6), torch.tensor([0, 6]), torch.ones(8)
QKV, PAGES = torch.ones(2, 6, 64), torch.zeros(2, 3, 4, 2, 8)
KC, VC, SLOTS = torch.zeros(12, 2, 8), torch.zeros(12, 2, 8), torch.arange(12)
TABLE, LENS, ENDS = torch.tensor([[0, 1], [2, 0]]), torch.tensor([3, 3]), torch.tensor([0, 3, 6])
K_PE_CACHE, LAST_FOUR = (
    torch.zeros(12, 2, 4),
    {"cos": COS[:, :2], "sin": SIN[:, :2], "rotary_dim": 4, "rotary_offset": 4},
)
BLOCKS, SCALES = torch.zeros(12, 2, 8, dtype=torch.int8), torch.zeros(12, 2, 1)  # a cache of int8 with scales of heads
KV, K_PE = torch.ones(2, 6, 4, 10), torch.ones(2, 6, 1, 4)  # latent: v has 6 elements
LEAF, LSE = torch.ones(2, 6, 4, 8, requires_grad=True), torch.ones(2, 6)
BYTES = torch.zeros(2, 6, 4, 4, dtype=torch.uint8)
RING: list[Any] = [None]
RING.append(RING)  # a list in itself
DICE = torch._empty_affine_quantized((6, 1, 8), scale=1.0, zero_point=0, dtype=torch.qint8)
PIPELINE = SimpleNamespace(model=torch.nn.Linear(1, 1))  # of transformers
CACHE, TWO, MEANS = KVCache(KC, VC, SLOTS), Quantize(0.5, 0.5), (torch.ones(2, 6), torch.ones(2, 6))
with torch.inference_mode():
    INFERRED = torch.ones(2, 6, 4, 8)
LENGTH, CONFIG = {"original_max_position_embeddings": 64}, {"head_dim": 8, "rope_theta": 1e4}

nvfp4, across = partial(DynamicQuantize, FP4, scale_dtype=E4M3), partial(Norm, across_heads=True, mean_squares=MEANS)
stored = partial(KVCache, k_cache=KC, v_cache=VC, slot_mapping=SLOTS)
blocks = partial(KVCache, k_cache=BLOCKS, v_cache=BLOCKS.clone(), slot_mapping=SLOTS, k_block_scale=SCALES,
                 v_block_scale=SCALES.clone())  # fmt: skip
of_pe = partial(KVCache, k_cache=KC[..., :4], v_cache=None, slot_mapping=SLOTS, k_pe_cache=K_PE_CACHE)
pages = partial(Pages, page_table=TABLE, seq_lens=LENS)
placed = partial(Pages, page_table=TABLE, batch_indices=IDS, cache_positions=IDS)

rope = partial(jitrope.apply_rope, q=Q, k=K, **T)
packed = partial(jitrope.apply_rope, q=Q[0], k=None, **T)
alone = partial(jitrope.prepare_qkv, q=Q, k=None, v=None, **T)
qkv = partial(jitrope.prepare_qkv, q=Q, k=K, v=V, **T)
without_q = partial(jitrope.prepare_qkv, q=None, k=K, v=V, cache=CACHE, **T)
paged = partial(jitrope.prepare_qkv, q=Q[0], k=K[0], v=V[0], layout="thd", **T)
fused = partial(jitrope.prepare_fused_qkv, qkv=QKV, heads=(4, 2), **T)
joint = partial(jitrope.prepare_joint_qkv, first=HEADS, second=HEADS, cos=COS.repeat(2, 1), sin=SIN.repeat(2, 1))
latent = partial(jitrope.prepare_mla_qkv, q=Q, kv=KV, k_pe=K_PE, cos=COS[:, :2], sin=SIN[:, :2])
attend = partial(all_gather_attention, q=Q[0], k=K[0], v=V[0], schedule=Schedule(CU, 6))
lse = partial(thd.second_half_lse_correction, lse=LSE, lse_per_step=LSE[:, :3].contiguous(), cu_seqlens=CU,
              lse_packed=True)  # fmt: skip
correct = partial(thd.out_correction, out=K[0], out_per_step=K[0], lse=LSE, lse_per_step=LSE, cu_seqlens=CU,
                  only_second_half=False, lse_packed=True)  # fmt: skip
add = partial(thd.grad_correction, grad=Q[0], grad_per_step=Q[0], cu_seqlens=CU, first_half="add", second_half="add")

# Parts of many sentences.
K_SIZES = "(B=2, S=6, H=2, D=8)"
SIZES, FLOATS = "(B=2, S=6, H=4, D=8)", "float32 or float16 or bfloat16"
TABLES = f"(P, 4|8) or (1|2, P, 4|8) or (1|2, P, 1, 4|8), {FLOATS}, on cpu like q"
F32, INTS = "float32, on cpu", "int32 or int64"
GIVE = "pass cos and sin, or one of cos_sin_cache, freqs and freqs_cis"
PLACES = "jitrope.Packed takes cu_seqlens, Starts first positions, Mrope several axes"
IDS_OF_Q = f"(6,) or (1|2, 6), {INTS}, on cpu like q {SIZES}; {PLACES}"
POSITIONS = "it must be a tensor of ids, or a jitrope.Packed, Mrope, Shifts or Starts"
AXES = (f'(B, S, H, D), {FLOATS}, on cpu; for (T, H, D) pass layout="thd", for (B, S, H * D) q.unflatten(-1, (H, D)), '
        "for (B, S, D) q.unsqueeze(2)")  # fmt: skip
ONLY_H = "only H may differ, and layout is 'bshd'"
A_NORM = "it must be jitrope.Norm(q_weight, k_weight)"
BY_MODULES = "pass jitrope.Norm(q_norm.weight, k_norm.weight, eps=q_norm.eps) of your modules"
A_CACHE = "it must be jitrope.KVCache(k_cache, v_cache, slot_mapping)"
A_QUANTIZE = "it must be jitrope.Quantize(q_scale, k_scale, v_scale) or jitrope.DynamicQuantize(dtype)"
EIGHT = ("but heads=(4, 2) with order='qkv' are 8 heads of D elements; it must be (B, S, 8 * D) or (B, S, 8, D) in "
         "layout 'bshd'")  # fmt: skip
LAST = "goes with heads whose last elements are rotated, behind others; D is"
SHARED = "share memory, which is written; pass tensors that do not overlap"
NO_GRADIENT = "requires a gradient, but this call has none"
NOT_HERE = "requires a gradient, which this function does not have; call it under torch.no_grad()"

# A sentence follows the name of the function and a colon.
REFUSALS: dict[Callable[..., Any], list[tuple[dict[str, Any], str]]] = {}
REFUSALS[rope] = [
    # heads
    ({"q": Q[0]}, f"q is a tensor of shape (6, 4, 8), float32, on cpu; it must be (B, S, H, D), {FLOATS}, on cpu; for "
     '(T, H, D) pass layout="thd", for (B, S, H * D) q.unflatten(-1, (H, D)), for (B, S, D) q.unsqueeze(2)'),
    ({"k": K[:, :, 0]}, f"k is a tensor of shape (2, 6, 8), {F32}; it must be (2, 6, H, 8), {F32} like q {SIZES}; for "
     '(T, H, D) pass layout="thd", for (B, S, H * D) k.unflatten(-1, (H, D)), for (B, S, D) k.unsqueeze(2)'),
    ({"k": K[:1]}, "k is a tensor of shape (1, 6, 2, 8), float32, on cpu; it must be (2, 6, H, 8), float32, on cpu "
     "like q (B=2, S=6, H=4, D=8); only H may differ, and layout is 'bshd'"),
    ({"k": K.half()}, "k is float16; it must be (2, 6, H, 8), float32, on cpu like q; pass k.to(q)"),
    ({"q": Q.double(), "k": None}, "q is float64; it must be (B, S, H, D), float32 or float16 or bfloat16, on cpu"),
    ({"q": Q.tolist()}, "q is a list of 2; it must be a tensor"),
    ({"q": Q.to_sparse()}, "q is a tensor of shape (2, 6, 4, 8), float32, on cpu; it must be a strided tensor"),
    ({"q": Q[:, :1, :, :1].expand(2, 1, 4, 578), "k": None},
     "q has D=578; at most 576 is possible; pass a view of the rotated elements"),
    ({"q": Q[:1, :1].expand(65536, 32768, 4, 8), "k": None},
     "q has 2147483648 tokens; at most 2147483647 are possible"),
    ({"q": Q[..., :7], "k": None}, "rotary_dim, by default D, is 7; it must be even and from 2 to D=7"),
    ({"rotary_offset": 1}, "rotary_dim, by default D - rotary_offset, is 7; it must be even and from 2 to "
     "D - rotary_offset=7"),
    ({"q": Q.flatten(2), "k": None, "layout": "bhsd"}, "q is a tensor of shape (2, 6, 32), float32, on cpu; it must be "
     '(B, H, S, D), float32 or float16 or bfloat16, on cpu; for (T, H, D) pass layout="thd"'),
    ({"layout": "thd"}, "q is a tensor of shape (2, 6, 4, 8), float32, on cpu; it must be (T, H, D), float32 or "
     "float16 or bfloat16, on cpu; the layout is 'thd', which Packed implies"),
    ({"layout": "hsbd"}, "layout is 'hsbd'; it must be one of 'bshd', 'sbhd', 'bhsd', 'thd'"),
    # the rotated part
    ({"rotary_dim": 3}, "rotary_dim is 3; it must be even and from 2 to D=8"),
    ({"rotary_offset": -1}, "rotary_offset is -1; it must be a whole number of at least 0"),
    ({"rotary_offset": 6, "rotary_dim": 4}, "rotary_dim is 4; it must be even and from 2 to D - rotary_offset=2"),
    # tables
    ({"sin": None}, f"sin is missing; {GIVE}, and None in the place of a k or v that there is not"),
    ({"cos": None}, "pass cos and sin, or one of cos_sin_cache, freqs and freqs_cis, not sin"),
    ({"freqs": ANGLES}, "pass cos and sin, or one of cos_sin_cache, freqs and freqs_cis, not cos and sin, freqs"),
    ({"cos": (COS, SIN), "sin": None}, "cos is a tuple of 2; unpack it: pass *table for cos and sin"),
    ({"cos": torch.polar(COS, SIN), "sin": None}, "cos is complex; pass a complex table as freqs_cis=table"),
    ({"cos": torch.polar(COS, SIN), "sin": torch.polar(COS, SIN)},
     f"cos is complex64; it must be {TABLES}; pass a complex table as freqs_cis=table"),
    ({"cos": COS.numpy()}, "cos is a numpy array of shape (6, 4); it must be a tensor; pass torch.from_numpy(cos)"),
    ({"cos": COS.to("meta")}, f"cos is a tensor of shape (6, 4), float32, on meta; it must be {TABLES} {SIZES}"),
    ({"cos": COS[:5], "sin": SIN[:5]}, "q is (B=2, S=6, H=4, D=8) but cos has 5 rows; it needs 6; make it longer"),
    ({"cos": COS[:0], "sin": SIN[:0], "positions": IDS}, "cos has no rows"),
    ({"cos": COS[:, :3], "sin": SIN[:, :3]}, f"cos is a tensor of shape (6, 3), float32, on cpu; it must be {TABLES} "
     f"{SIZES}; pass rotary_dim for a partial rotation"),
    ({"cos": COS.double(), "sin": SIN.double()}, "cos is float64; it must be (P, 4|8) or (1|2, P, 4|8) or (1|2, P, 1, "
     "4|8), float32 or float16 or bfloat16, on cpu like q; pass cos.float()"),
    ({"sin": SIN.half()}, "sin is float16; it must be (6, 4), float32, on cpu like cos"),
    ({"cos": COS[None, None], "sin": SIN[None, None]}, "cos is a tensor of shape (1, 1, 6, 4), float32, on cpu; it "
     f"must be {TABLES} {SIZES}; the third axis is the heads, as many of q and k; of (B, 1, S, W) pass cos.squeeze(1)"),
    ({"cos": COS.repeat(1, 2), "sin": SIN.repeat(1, 2), "interleaved_out": True},
     "cos is a tensor of shape (6, 8), float32, on cpu; it must be (P, 4) or (1|2, P, 4) or (1|2, P, 1, 4), float32 or "
     "float16 or bfloat16, on cpu like q (B=2, S=6, H=4, D=8); interleaved_out goes with half-width tables"),
    ({"cos": COS[:, :3], "sin": SIN[:, :3], "interleaved_out": True},
     "cos is a tensor of shape (6, 3), float32, on cpu; it must be (P, 4) or (1|2, P, 4) or (1|2, P, 1, 4), float32 or "
     "float16 or bfloat16, on cpu like q (B=2, S=6, H=4, D=8); pass rotary_dim for a partial rotation"),
    ({"cos_sin_cache": COS.repeat(1, 2), "rotary_dim": 6, **NONE}, "cos_sin_cache is a tensor of shape (6, 8), "
     f"float32, on cpu; it must be (P, 6), {FLOATS}, on cpu like q {SIZES}; pass rotary_dim for a partial rotation"),
    ({"cos_sin_cache": COS[:, :3], **NONE}, "cos_sin_cache is 3 wide; it must be (P, W) with W = rotary_dim (even)"),
    ({"freqs_cis": COS, **NONE}, "freqs_cis is float32; it must be (P, 4|8) or (1|2, P, 4|8) or (1|2, P, 1, 4|8), "
     "complex64, on cpu like q; pass torch.view_as_complex(table)"),
    ({"freqs_cis": torch.polar(COS, SIN)[:, :0], **NONE},
     "freqs_cis is 0 wide; it must be (P, W) with W = rotary_dim / 2"),
    ({"freqs": ANGLES.bfloat16(), **NONE}, "freqs is bfloat16; it must be (P, 4|8) or (1|2, P, 4|8) or (P, 1|2, 1, "
     "4|8), float32, on cpu like q; the angles must be computed and passed in fp32"),
    ({"freqs": ANGLES[:, None, None].expand(6, 1, 4, 4), **NONE}, "freqs is a tensor of shape (6, 1, 4, 4), float32, "
     "on cpu; it must be (P, 4|8) or (1|2, P, 4|8) or (P, 1|2, 1, 4|8), float32, on cpu like q (B=2, S=6, H=4, D=8); "
     "with freqs the heads must share it"),
    ({"mscale": 2.0}, "mscale goes with freqs; multiply cos and sin by it instead"),
    # positions
    ({"positions": [0, 1]},
     "positions is [0, 1]; it must be a tensor of ids, or a jitrope.Packed, Mrope, Shifts or Starts; pass "
     "torch.tensor(positions)"),
    ({"positions": COS[0]}, f"positions is float32; it must be (6,) or (1|2, 6), {INTS}, on cpu like q; {PLACES}"),
    ({"positions": Mrope(IDS.expand(2, 6), (2, 1))},
     "mrope_section or axis_of_pair has 3 pairs; it must have 4"),
    ({"positions": Mrope(IDS.expand(2, 6), axis_of_pair=[2, 2, 0, 1])},
     "position_ids is a tensor of shape (2, 6), int64, on cpu; it must be (3|4, 6) or (3|4, 1|2, 6), "
     f"{INTS}, on cpu like q {SIZES}"),
    ({"positions": Packed(CU), "layout": "bshd"}, "cu_seqlens goes with layout 'thd', not 'bshd'; leave layout out"),
    ({"positions": Starts(cp_size=2)}, "q is (B=2, S=6, H=4, D=8) but cos has 6 rows; it needs 12; make it longer"),
    ({"positions": Starts(cp_size=2, cp_rank=2)}, "cp_rank is 2; it must be from 0 to cp_size - 1 = 1"),
    ({"unrotated": 1, "positions": IDS},
     "positions does not go with unrotated; give these tokens a row of the table with cosines of 1"),
    ({"unrotated": 1, "cos": COS[:4], "sin": SIN[:4]},
     "q is (B=2, S=6, H=4, D=8) but cos has 4 rows; it needs 5; make it longer"),
    # check=True reads positions and tables
    ({"positions": IDS + 1, "check": True, "out": (None, KC.view(2, 6, 2, 8))},
     "positions go from 1 to 6, but the table has rows 0 to 5; make it longer"),
    ({"positions": IDS - 1, "check": True}, "positions go from -1 to 4; they must be 0 or above"),
    ({"positions": Shifts(IDS - 9), "check": True},
     "differences of positions have sizes from 4 to 9, but the table has rows 0 to 5; make it longer"),
    ({"cos": SIN, "sin": COS, "check": True},
     "row 0 of cos is 0 and row 0 of sin is not, as if they were exchanged; pass cos first, then sin"),
    ({"cos": COS.repeat_interleave(2, -1), "sin": SIN.repeat_interleave(2, -1), "check": True}, "every entry of cos is "
     "there twice in a row, but interleaved is False; pass interleaved=True, or half-width tables"),
    ({"cos": COS.repeat(1, 2), "sin": SIN.repeat(1, 2), "check": True, "interleaved": True}, "every entry of cos is "
     "there again in the second half, but interleaved is True; pass interleaved=False, or half-width tables"),
    ({"cos": COS[:, :2].repeat(1, 2), "sin": SIN[:, :2].repeat(1, 2), "check": True}, "every entry of cos is there "
     "again in the second half, as in a full-width table, not a half-width one; pass rotary_dim=4"),
    ({"q": Q.transpose(1, 2), "k": None, "check": True}, "q has shape (2, 4, 6, 8) and the table has 6 rows, as if q's "
     "layout were 'bhsd', not 'bshd'; pass layout='bhsd', or a table with another number of rows"),
    # q_scale
    ({"q_scale": "1"}, "q_scale is '1'; it must be a finite number, or a tensor in fp32 on q's device"),
    ({"q_scale": W.half()}, "q_scale is float16; it must be () or (6,) or (1|2, 6), float32, on cpu like q"),
    # in place, and tensors of the caller
    ({"q": torch.ones(2, 6, 1, 8).expand(2, 6, 4, 8), "inplace": True}, "q has strides (48, 8, 0, 1); its elements "
     "overlap in memory, so it cannot be written; pass q.contiguous(), or leave inplace=True out"),
    ({"q": LEAF, "inplace": True},
     "q requires a gradient and is a leaf, which torch cannot write in place; leave inplace=True out"),
    ({"q": INFERRED, "inplace": True}, "q is a tensor of shape (2, 6, 4, 8), float32, on cpu; it must be a tensor that "
     "was not made in inference mode; this call writes it outside of that mode"),
    ({"q": INFERRED, "cos": COS.clone().requires_grad_()}, "q is a tensor of shape (2, 6, 4, 8), float32, on cpu; it "
     "must be a tensor that was not made in inference mode; pass q.clone()"),
    ({"q": LEAF[:], "inplace": True, "cos": COS.clone().requires_grad_()},
     "cos requires a gradient, but this call has none; leave inplace=True out, or pass cos.detach()"),
    ({"q": Q[:, :, :2], "k": Q[:, :, 1:3], "inplace": True}, f"q and k {SHARED}"),
    ({"out": 3}, "out is 3; it must be a tuple of 2 tensors"),
    ({"out": RING}, "out's k is a list of 2; it must be a tensor"),
    ({"out": (None, K.half())}, "out's k is float16; it must be (2, 6, 2, 8), float32, on cpu like q"),
    ({"out": (torch.ones(2, 4, 6, 8), None)}, "out's q is a tensor of shape (2, 4, 6, 8), float32, on cpu; it must be "
     "(2, 6, 4, 8), float32, on cpu like q; pass its transpose(1, 2)"),
    ({"out": (None, torch.ones(2, 1, 2, 8).expand(2, 6, 2, 8))}, "out's k has strides (16, 0, 8, 1); its elements "
     "overlap in memory, so it cannot be written; pass a tensor with memory for each element"),
    ({"cos": KC.view(48, 4)[:6], "out": (None, KC.view(2, 6, 2, 8))}, f"out's k and cos {SHARED}"),
    ({"out": (None, K.clone().requires_grad_())}, "out's k requires a gradient, but this call has none; use a call "
     "without cache, quantize and out, or torch.no_grad()"),
    ({"out": (None, K.clone()), "k": None},
     "out's k is a tensor of shape (2, 6, 2, 8), float32, on cpu; it must be None, because k is None"),
    ({"inplace_grad": True}, "inplace_grad does not go with fresh results; pass inplace=True too"),
    ({"out": (None, None), "inplace": True}, "inplace does not go with out; leave it out"),
    ({"out": Ulysses(2), "inplace": True}, "inplace does not go with Ulysses; leave it out"),
    ({"out": (torch.zeros(4, 2, 6, 2, 8), None)}, "out's q is a tensor of shape (4, 2, 6, 2, 8), float32, on cpu; it "
     "must be (4, 2, 6, 1, 8), float32, on cpu like q"),
    ({"out": (torch.zeros(0, 2, 6, 4, 8), None)},
     "out's q is a tensor of shape (0, 2, 6, 4, 8), float32, on cpu; it must be (2, 6, 4, 8), float32, on cpu like q"),
]  # fmt: skip
REFUSALS[packed] = [
    ({"positions": Packed(IDS[::2])}, "cu_seqlens is a tensor of shape (3,), int64, on cpu, with strides (2,); it must "
     "be (N + 1,), int32 or int64, contiguous, on cpu like q (T=6, H=4, D=8)"),
    ({"positions": Packed(CU[:0])}, "cu_seqlens is empty; it must have N + 1 offsets"),
    ({"positions": Packed(CU, 7)}, "q is (T=6, H=4, D=8) but cos has 6 rows; it needs 7; make it longer"),
    ({"positions": Starts(cp_size=2), "q": Q[0, :5], "layout": "thd"},
     "q is (T=5, H=4, D=8); with cp_size=2 S must be even, for two equal chunks"),
    ({"positions": Packed(CU, start_positions=W)},
     "start_positions is float32; it must be (1,), int32 or int64, contiguous, on cpu like cu_seqlens"),
    ({"positions": Packed(torch.tensor([0, 4, 3, 6])), "check": True},
     "cu_seqlens[2] falls from 4 to 3; cu_seqlens must ascend from 0"),
    ({"positions": Packed(torch.tensor([1, 4])), "check": True}, "cu_seqlens[0] is 1; cu_seqlens must ascend from 0"),
    ({"positions": Packed(torch.tensor([0, 9])), "check": True}, "cu_seqlens ends at 9, but q has 6 tokens"),
    ({"positions": Packed(2 * CU, cp_size=2), "check": True, "q": Q[0, :5], "cos": KC[0], "sin": KC[1]},
     "cu_seqlens ends at 12, 6 of them on this rank, but q has 5 tokens")]  # fmt: skip
REFUSALS[alone] = [
    ({"norm": Norm(W, W)}, "k_weight is given, but k is not"),
    ({"norm": torch.nn.RMSNorm(8)}, f"norm is a module, RMSNorm; {A_NORM}; {BY_MODULES}"),
    ({"norm": Norm(W.double(), across_heads=True)},
     f"q_weight is float64; it must be (32,), {FLOATS}, contiguous, on cpu like q; pass across_heads=False"),
    ({"norm": Norm(q_bias=W)}, "q_bias goes with kind='layer_norm'; pass it, or leave q_bias out"),
    ({"norm": across()}, "mean_squares' k is given, but k is not"),
    ({"norm": Norm(W.clone().requires_grad_()), "inplace": True},
     "q_weight requires a gradient, but this call has none; leave inplace=True out, or torch.no_grad()"),
    ({"quantize": Quantize(0.5, 0.5)}, "k_scale is given, but no output is divided by it; leave it out"),
    ({"quantize": nvfp4(q_global_scale=W.half())},
     "q_global_scale is float16; it must be () or (4,) or (2, 4), float32, on cpu like q"),
    ({"quantize": DynamicQuantize(FP4), "rotary_dim": 4, "rotary_offset": 3, "cos": COS[:, :2], "sin": SIN[:, :2]},
     "rotary_offset is 3, rotary_dim 4; for fp4 the first must be even, and the second a multiple of 4"),
    ({"quantize": DynamicQuantize(FP4), "out": (BYTES.view(FP4).transpose(-1, -2), None, None)},
     "out's q has strides (96, 16, 1, 4); for fp4 the last must be 1")]  # fmt: skip
REFUSALS[qkv] = [
    ({"quantize": 1}, f"quantize is 1; {A_QUANTIZE}"),
    ({"quantize": TWO, "hadamard": True}, "hadamard does not go with quantize; give it to that"),
    ({"quantize": Quantize(0.5)}, "k_scale is missing; pass it, because fp8 is stored divided by it"),
    # norms
    ({"norm": across(mean_squares=(MEANS[0], None))}, "k is given, but mean_squares' k is not"),
    ({"norm": across(mean_squares=(None, MEANS[1]))}, "q is given, but mean_squares' q is not"),
    # conversions
    ({"quantize": Quantize(0.5, 0.5, 0.5), "v": None},
     "v is None; it must be a tensor, because quantize has a v_scale"),
    ({"quantize": Quantize(0.5, 0.5, 0.5), "v": Q}, "v is a tensor of shape (2, 6, 4, 8), float32, on cpu, k a tensor "
     "of shape (2, 6, 2, 8), float32, on cpu; quantize converts a v like k, beside neither a norm across heads nor "
     "tables for each head; or convert v in a call as q"),
    ({"quantize": Quantize(0.5, 0.5, 0.5), "out": (None, None, V.clone())},
     "out's v is float32; it must be (2, 6, 2, 8), float8_e4m3fn, on cpu like q"),
    ({"quantize": DynamicQuantize(q_weights=torch.ones(2, 6, 2))}, f"q_weights is a tensor of shape (2, 6, 2), {F32}; "
     f"it must be (2, 6, 4), {F32} like q {SIZES}"),
    ({"quantize": DynamicQuantize(v=True), "v": None}, "v is None; it must be a tensor, because quantize has v=True"),
    ({"quantize": DynamicQuantize(v=True), "v": V.clone().requires_grad_()},
     "v requires a gradient, but this call has none; leave v=True of quantize out, or torch.no_grad()"),
    ({"quantize": Quantize(W[0].requires_grad_(), 0.5)}, f"q_scale {NO_GRADIENT}; pass q_scale.detach()"),
    ({"quantize": DynamicQuantize(FP4), "out": (None, None, torch.ones(2, 6, 2, 8, 2)[..., 0])},
     "out's v has D=8, strides (192, 32, 16, 2) and offset 0; fp4 needs aligned pairs of neighbouring elements"),
    ({"out": (None, KC.view(2, 6, 2, 8), KC.view(2, 6, 2, 8))}, f"out's k and out's v {SHARED}"),
    ({"out": (None, None, V), "norm": Norm(v_norm=True)}, f"out's v and v {SHARED}"),
    ({"out": Ulysses(2), "v": V[0]}, f"v is a tensor of shape (6, 2, 8), {F32}; it must be (B, S, H, D), {F32} like q"),
    # caches
    ({"cache": stored(k_cache=KC.half())}, "k_cache is float16; it must be (slots, 2, 8) or (pages, rows, 2, 8), "
     "float32 or float8_e4m3fn or float8_e5m2, on cpu like k"),
    ({"cache": stored(v_cache=VC[:11])}, "v_cache is a tensor of shape (11, 2, 8), float32, on cpu; it must be (12, 2, "
     "8), float32, on cpu like k_cache and v (B=2, S=6, H=2, D=8)"),
    ({"cache": stored(slot_mapping=SLOTS[:5])}, "slot_mapping has 5 entries for 12 tokens"),
    ({"cache": stored(slot_mapping=W)}, f"slot_mapping is float32; it must be {INTS}, contiguous, on cpu like q"),
    ({"cache": stored(slot_mapping=SLOTS + 1), "check": True},
     "slot_mapping goes up to 12, but the caches have slots 0 to 11"),
    ({"cache": KVCache(KC.to(E4M3), VC.to(E4M3), SLOTS)},
     "k_scale is missing; pass it, because fp8 is stored divided by it"),
    ({"cache": KVCache(PAGES[0], PAGES.view(3, 2, 4, 2, 8)[:, 0], SLOTS)},
     "k_cache and v_cache have their pages in different orders; give both the same strides"),
    ({"cache": CACHE, "v": torch.ones(2, 6, 3, 8)},
     "k is (B=2, S=6, H=2, D=8) but v is (B=2, S=6, H=3, D=8); v must have as many heads, or a multiple of them"),
    ({"cache": CACHE, "out": Ulysses(2)}, "Ulysses does not go with a cache; leave out= out"),
    ({"cache": CACHE, "out": (None, None, V.clone())},
     "out's v is a tensor of shape (2, 6, 2, 8), float32, on cpu; it must be None, because v goes to the cache"),
    ({"cache": CACHE, "quantize": TWO}, "k_scale of quantize does not go with a cache; give its scales to KVCache"),
    ({"cache": CACHE, "quantize": DynamicQuantize(v=True)},
     "v=True of quantize does not go with a cache; give its scales to KVCache"),
    # a cache of the rotated elements
    ({"cache": of_pe(), "v": None}, f"k_pe_cache {LAST} 8, rotary_offset 0 and rotary_dim 8"),
    *[({"cache": cache, "v": None, **LAST_FOUR}, sentence) for cache, sentence in (
        (of_pe(k_cache=KC), "k_cache is a tensor of shape (12, 2, 8), float32, on cpu; it must be (slots, 2, 4) or "
         "(pages, rows, 2, 4), float32 or float8_e4m3fn or float8_e5m2, on cpu like k (B=2, S=6, H=2, D=8)"),
        (of_pe(k_pe_cache=K_PE_CACHE[:11]), "k_pe_cache is a tensor of shape (11, 2, 4), float32, on cpu; it must be "
         "(12, 2, 4), float32, on cpu like k (B=2, S=6, H=2, D=8)"),
        (of_pe(k_pe_cache=K_PE_CACHE.half()),
         "k_pe_cache is float16; it must be (12, 2, 4), float32, on cpu like k"),
        (of_pe(k_pe_cache=K_PE_CACHE.to(torch.float8_e4m3fn)),
         "k_pe_cache is float8_e4m3fn; it must be (12, 2, 4), float32, on cpu like k"),
        (of_pe(k_cache=torch.zeros(12, 2, 2, dtype=torch.uint8).view(FP4), k_block_scale=torch.zeros(12, 2, 1),
               k_pe_cache=torch.zeros(12, 2, 5)[..., 1:]),
         "k_pe_cache has D=4, strides (10, 5, 1) and offset 1; fp4 needs aligned pairs of neighbouring elements"),
        (of_pe(k_pe_cache=KC[..., 1:5]), f"k_cache and k_pe_cache {SHARED}"))],
    *[({"cache": of_pe(), "v": None, **LAST_FOUR, **words}, "hadamard does not go with k_pe_cache, because it mixes "
       "its elements with those of k_cache; leave it out")
      for words in ({"hadamard": True}, {"quantize": Quantize(0.5, hadamard=True)})],
    ({"norm": Norm(of="k_nope"), **LAST_FOUR}, "the norm has of='k_nope', which goes with a cache"),
    ({"norm": Norm(of="k_nope"), "cache": CACHE}, f"a norm with of='k_nope' {LAST} 8, rotary_offset 0 and rotary_dim "
     "8"),
    ({"norm": Norm(k_weight=W, of="k_nope"), "cache": CACHE, **LAST_FOUR}, f"k_weight is a tensor of shape (8,), {F32};"
     f" it must be (4,), {FLOATS}, contiguous, on cpu like k (B=2, S=6, H=2, D=8)"),
    # block scales
    ({"cache": blocks(k_block_scale=SCALES.repeat(1, 1, 3))}, f"k_block_scale is a tensor of shape (12, 2, 3), {F32}; "
     "it must be (12, 2, 1), float32 or float8_e8m0fnu, on cpu like k (B=2, S=6, H=2, D=8); a scale is for 8 elements"),
    ({"cache": blocks(k_cache=KC)}, "k_cache is float32; it must be (slots, 2, 8) or (pages, rows, 2, 8), "
     "float8_e4m3fn or float8_e5m2 or int8 or float4_e2m1fn_x2, on cpu like k"),
    ({"cache": blocks(k_scale=1.0)}, "k_scale is given, but no output is divided by it; leave it out"),
    ({"cache": blocks(k_block_scale=BLOCKS.view(torch.float32)[..., :1])}, f"k_cache and k_block_scale {SHARED}"),
    ({"cache": blocks(scale_fmt="ue8m0"), "quantize": DynamicQuantize(torch.int8)},
     "quantize makes q int8 with a scale of fp32 for 8 elements, but k_cache and k_block_scale are int8 with a scale "
     "of ue8m0 in fp32 for 8 elements; they must match"),
    ({"cache": blocks(k_cache=BLOCKS.view(FP4).view(12, 2, 4, 2)[..., 0])},
     "k_cache has strides (16, 8, 2); the last must be 1")]  # fmt: skip
REFUSALS[without_q] = [
    # sizes are those of k, by its name
    ({"k": K[:, :, 0]}, f"k is a tensor of shape (2, 6, 8), {F32}; it must be {AXES.replace(' q.', ' k.')}"),
    ({"k": K.double()}, f"k is float64; it must be (B, S, H, D), {FLOATS}, on cpu"),
    ({"k": None}, "k is None; it must be a tensor"),
    ({"cos": COS[:5], "sin": SIN[:5]}, f"k is {K_SIZES} but cos has 5 rows; it needs 6; make it longer"),
    ({"cos": COS.double()}, f"cos is float64; it must be (P, 4|8) or (1|2, P, 4|8) or (1|2, P, 1, 4|8), {FLOATS}, on "
     "cpu like k; pass cos.float()"),
    ({"positions": IDS[:4]}, f"positions is a tensor of shape (4,), int64, on cpu; it must be (6,) or (1|2, 6), "
     f"{INTS}, on cpu like k {K_SIZES}; {PLACES}"),
    ({"positions": Starts(cp_size=2), "k": K[:, :5], "v": V[:, :5]},
     "k is (B=2, S=5, H=2, D=8); with cp_size=2 S must be even, for two equal chunks"),
    ({"hadamard": True, "k": KV[..., :6], "v": KV[..., :6], "cos": COS[:, :3], "sin": SIN[:, :3]},
     "hadamard goes with a power of two of elements up to 256; k has D=6, so leave it out"),
    ({"norm": across(mean_squares=(None, MEANS[1])), "k": KV[..., :1].expand(2, 6, 4, 514), "rotary_dim": 8},
     "k has D=514; across_heads goes with at most 512"),
    ({"cache": stored(slot_mapping=W)}, f"slot_mapping is float32; it must be {INTS}, contiguous, on cpu like k"),
    ({"positions": Packed(2 * CU), "layout": "thd", "k": K[0], "v": V[0], "check": True,
      "cache": stored(slot_mapping=IDS)}, "cu_seqlens ends at 12, but k has 6 tokens"),
    ({"k": K.transpose(1, 2), "v": V.transpose(1, 2), "cache": KVCache(*torch.zeros(2, 4, 6, 8), IDS[:4]),
      "check": True}, "k has shape (2, 2, 6, 8) and the table has 6 rows, as if k's layout were 'bhsd', not 'bshd'; "
     "pass layout='bhsd', or a table with another number of rows"),
    # what has no effect without q
    ({"q_scale": 2.0}, "q_scale does not go with q=None; leave it out"),
    *[({"quantize": x}, "quantize does not go with q=None; leave it out")
      for x in (Quantize(0.5), TWO, DynamicQuantize(), DynamicQuantize(per="head"))],
    ({"norm": Norm(W, W)}, "q_weight does not go with q=None; leave it out"),
    ({"norm": Norm(q_bias=W, kind="layer_norm")}, "q_bias does not go with q=None; leave it out"),
    ({"norm": Norm(of="q")}, "the norm has of='q', but q is not given"),
    ({"norm": across()}, "mean_squares' q does not go with q=None; leave it out"),
    ({"out": (Q.clone(), None, None)},
     f"out's q is a tensor of shape (2, 6, 4, 8), {F32}; it must be None, because q is None"),
    ({"norm": across(mean_squares=(None, MEANS[1][:1]))}, f"mean_squares' k is a tensor of shape (1, 6), {F32}; it "
     f"must be (2, 6), {F32} like k {K_SIZES}"),
    ({"cache": None}, "q is None; it must be a tensor")]  # fmt: skip
REFUSALS[paged] = [
    ({"cache": KVCache(*PAGES, pages(page_table=COS))},
     "page_table is float32; it must be (N, max_pages), int32 or int64, on cpu like k"),
    ({"cache": KVCache(*PAGES, pages(page_table=TABLE.T))},
     "page_table has strides (1, 2); its last axis must be contiguous"),
    ({"cache": KVCache(*PAGES, pages(seq_lens=LENS.int()))},
     "seq_lens is int32; it must be (2,), int64, contiguous, on cpu"),
    ({"cache": KVCache(*PAGES, pages(page_table=TABLE[:1]))}, "page_table has 1 rows, but seq_lens has 2 entries"),
    ({"cache": KVCache(*PAGES, pages(page_table=TABLE.repeat(2, 1), seq_lens=LENS.repeat(2)))},
     "seq_lens has 4 entries for 6 tokens; pass cu_seqlens_q"),
    ({"cache": KVCache(*PAGES, pages(seq_lens=LENS + 9)), "check": True},
     "page_table and its lengths lead 6 tokens out of the caches or of the table"),
    ({"cache": KVCache(*PAGES[:, :, :0], pages())}, "k_cache has pages of 0 rows; a page table needs pages with rows"),
    ({"cache": KVCache(KC, VC, pages())},
     "k_cache has shape (12, 2, 8); with a page table it must be (pages, rows, H, D)"),
    ({"cache": KVCache(*PAGES, pages()), "positions": Packed(CU), "layout": "thd"},
     f"cu_seqlens is a tensor of shape (2,), int64, on cpu; it must be (3,), {INTS}, contiguous, on cpu like seq_lens"),
]  # fmt: skip
REFUSALS[fused] = [
    ({"heads": (0, 2)}, "heads[0] is 0; it must be a whole number of at least 1"),
    ({"heads": (5, 2)}, "heads is (5, 2); it must be (Hq, Hk), the heads of q and of k; Hk must divide Hq"),
    ({"order": "kqv"}, "order is 'kqv'; it must be one of 'grouped', 'qkv', 'qkv_gated'"),
    ({"qkv": torch.ones(())}, "qkv has shape (), but heads=(4, 2) with order='qkv' are 8 heads of D elements; it must "
     "be (B, S, 8 * D) or (B, S, 8, D) in layout 'bshd'"),
    ({"qkv": QKV[0], "layout": "thd", "order": "grouped", "heads": (6, 2)}, "qkv has shape (6, 64), but heads=(6, 2) "
     "with order='grouped' are 10 heads of D elements; it must be (T, 10 * D) or (T, 2, 5 * D) in layout 'thd'"),
    ({"copy_v": None}, "copy_v is None; it must be True or False"),
    ({"copy_gate": True}, "copy_gate does not go with order='qkv'; leave it out"),
    ({"order": "qkv_gated", "heads": (2, 2), "copy_gate": True, "copy_v": False},
     "copy_v=False does not go with copy_gate; leave copy_v out"),
    ({"norm": Norm(W, W.half())},
     "k_weight is float16; it must be (8,), float32, contiguous, on cpu like q_weight and k of qkv"),
    ({"norm": Norm(across_heads=True, v_norm=True)},
     "across_heads does not go with v_norm in fused QKV; split it, and pass q, k and v to prepare_qkv"),
    ({"bias": W.half()}, "bias is float16; it must be (8, 8) or (64,), float32, on cpu like qkv"),
    ({"bias": torch.ones(64), "copy_v": False}, "copy_v=False does not go with bias; leave copy_v out"),
    ({"bias": torch.ones(65)[1:], "quantize": DynamicQuantize(FP4)},
     "bias has D=64, strides (1,) and offset 1; fp4 needs aligned pairs of neighbouring elements"),
    ({"out": (None, None, V), "copy_v": False}, "copy_v=False does not go with out's v; leave copy_v out")]  # fmt: skip
REFUSALS[joint] = [
    ({"first": (None, K, V)}, "first's q is None; it must be a tensor (B, S, H, D)"),
    ({"first": (Q, None, V), "out": Ulysses(2)}, "first's k is None; it must be a tensor"),
    ({"second": (Q[:, :, :2], K, V)}, "second's q is a tensor of shape (2, 6, 2, 8), float32, on cpu; it must be (2, "
     "6, 4, 8), float32, on cpu like first's q (B=2, S=6, H=4, D=8)"),
    ({"first": (Q, K, V.half())}, "first's v is float16; it must be (2, 6, 2, 8), float32, on cpu like first's q"),
    ({"cos": (COS, COS), "sin": SIN}, "the first table is cos and sin, the second cos; pass two of one kind"),
    ({"cos": (COS, 1), "sin": (SIN, SIN)}, "cos is a tuple of 2; it must be a tensor, or a tuple of 2 tensors"),
    ({"cos": (COS, COS[:5]), "sin": (SIN, SIN[:5])},
     "q is (B=2, S=6, H=4, D=8) but cos has 5 rows; it needs 6; make it longer"),
    ({"positions": Packed(IDS[:2])}, "cu_seqlens does not go with two streams; pass positions as a tensor of ids"),
    ({"norm": (Norm(W, W), Norm(W.half(), W.half()))}, "the weights are torch.float16, torch.float32; they must match"),
    ({"norm": (Norm(W), Norm(eps=1e-5))}, "the norms are Norm(q_weight=a tensor of shape (8,), float32, on cpu) and "
     "Norm(eps=1e-05); only their weights may differ"),
    ({"norm": (Norm(), Norm(), Norm())}, "norm is (Norm(), Norm(), Norm()); it must be a tuple of 2 norms"),
]  # fmt: skip
REFUSALS[latent] = [
    ({"kv": KV[..., :4]}, "q is (B=2, S=6, H=4, D=8), k_pe (B=2, S=6, H=1, D=4) and kv (B=2, S=6, H=4, D=4); kv must "
     "be wider than q less k_pe, 4, by the elements of a head of v"),
    ({"cos": COS[:, :3], "sin": SIN[:, :3]}, "cos is a tensor of shape (6, 3), float32, on cpu; it must be (P, 2|4) or "
     f"(1|2, P, 2|4) or (1|2, P, 1, 2|4), {FLOATS}, on cpu like q {SIZES}; k_pe has rotary_dim elements"),
    ({"quantize": DynamicQuantize()}, "quantize is DynamicQuantize(); it must be "
     "jitrope.Quantize(q_scale, k_scale, v_scale)"),
    ({"quantize": Quantize(1.0, 1.0, hadamard=True)}, "hadamard does not go with latent attention; leave it out"),
    ({"out": (None, None, V.half())}, "out's v is float16; it must be (2, 6, 4, 6), float32, on cpu like q"),
    ({"out": Ulysses(2)}, "out is Ulysses(ranks=2); it must be a tuple of 3 tensors")]  # fmt: skip
REFUSALS[partial(Packed, CU)] = [({"max_seqlen": 2.5}, "max_seqlen is 2.5; it must be a whole number of at least 0")]
_AXES = "the number of pairs of each axis, at most 4; position_ids is a tensor of shape (6,), int64, on cpu"
REFUSALS[partial(Mrope, IDS)] = [
    ({"mrope_section": ()}, f"mrope_section is (); it must be {_AXES}"),
    ({"mrope_section": (1, 1, 1, 1, 1)}, f"mrope_section is (1, 1, 1, 1, 1); it must be {_AXES}"),
    ({"mrope_section": (2, 2)}, f"mrope_section is (2, 2); it must be {_AXES}"),
    ({}, "mrope_section is None; it must be the number of pairs of each axis, or pass axis_of_pair"),
    ({"mrope_section": (10**12,)}, f"mrope_section is (1000000000000,); it must be {_AXES}"),
    ({"axis_of_pair": [0, 1], "mrope_interleaved": True},
     "mrope_interleaved is True; it must be False without mrope_section"),
    ({"axis_of_pair": [0, 4]}, "axis_of_pair is [0, 4]; it must be the axis of each pair, from 0 to 3"),
    ({"axis_of_pair": [0], "mrope_section": (1,)}, "mrope_section does not go with axis_of_pair; leave one out"),
    ({"mrope_section": 4}, "mrope_section is 4; it must be a list or tuple of whole numbers")]  # fmt: skip
REFUSALS[partial(Mrope, IDS.expand(3, 6))] = [
    ({"mrope_section": (2, 20, 20), "mrope_interleaved": True}, "mrope_section is (2, 20, 20); it must be at most 14 "
     "for axis 1, because mrope_interleaved gives it one pair in 3")]  # fmt: skip
REFUSALS[Norm] = [
    ({"q_weight": "w"}, "q_weight is 'w'; it must be a tensor"),
    ({"eps": -10}, "eps is -10.0; it must be 0 or above"),
    ({"of": "k", "q_weight": W}, "q_weight does not go with of='k'; leave one out"),
    ({"of": "v", "kind": "layer_norm"}, "kind='layer_norm' does not go with of='v'; leave one out"),
    ({"of": "k_nope", "after_rope": True}, "after_rope does not go with of='k_nope'; leave one out"),
    ({"of": "k_nope", "q_weight": W}, "q_weight does not go with of='k_nope'; leave one out"),
    ({"of": "k_nope", "k_bias": W}, "k_bias does not go with of='k_nope'; leave one out"),
    ({"mean_squares": MEANS}, "mean_squares does not go with across_heads=False; leave one out"),
    ({"mean_squares": MEANS[:1], "across_heads": True},
     "mean_squares is a tuple of 1; it must be those of q and k: two tensors, or a tensor and None"),
    ({"mean_squares": (None, None), "across_heads": True},
     "mean_squares is (None, None); it must be those of q and k: two tensors, or a tensor and None"),
    ({"mean_squares": 0.5, "across_heads": True},
     "mean_squares is 0.5; it must be those of q and k: two tensors, or a tensor and None")]  # fmt: skip
REFUSALS[stored] = [
    ({"v_cache": None, "v_scale": 1.0}, "v_scale is 1.0; it must be None without v_cache"),
    ({"v_cache": None, "v_block_scale": SCALES}, "k_block_scale is None; it must be a tensor"),
    ({"k_block_scale": SCALES}, "v_block_scale is None; it must be a tensor"),
    ({"k_pe_cache": K_PE_CACHE}, "k_pe_cache does not go with v_cache; leave one out"),
    ({"v_cache": None, "k_pe_cache": 1}, "k_pe_cache is 1; it must be a tensor"),
    ({"scale_fmt": "ue8m0"},
     "scale_fmt is 'ue8m0'; it must be None without k_block_scale, and with scales in torch.float8_e4m3fn"),
    ({"v_cache": None, "k_block_scale": SCALES.to(E4M3), "scale_fmt": "ue8m0"},
     "scale_fmt is 'ue8m0'; it must be None without k_block_scale, and with scales in torch.float8_e4m3fn"),
]  # fmt: skip
REFUSALS[pages] = [
    ({"seq_lens": None}, "seq_lens is None; it must be a tensor"),
    ({"page_indptr": IDS, "last_page_len": LENS},
     "seq_lens is a tensor of shape (2,), int64, on cpu; it must be None beside page_indptr and last_page_len"),
    ({"page_indptr": IDS, "seq_lens": None}, "last_page_len is None; it must be a tensor")]  # fmt: skip
REFUSALS[placed] = [
    ({"cu_seqlens_q": ENDS},
     "cu_seqlens_q is a tensor of shape (3,), int64, on cpu; it must be None beside batch_indices and cache_positions"),
    ({"clear_page": True}, "clear_page is True; it must be False beside batch_indices")]  # fmt: skip
REFUSALS[Quantize] = [
    ({"q_scale": 1e-39}, "q_scale is 1e-39; it must be above 2.94e-39, so that fp32 holds its reciprocal"),
    ({"q_scale": 0.5, "k_scale": 1e39}, "k_scale is 1e+39; it must be a number that fp32 holds")]  # fmt: skip
REFUSALS[DynamicQuantize] = [
    ({"dtype": torch.float16}, "dtype is torch.float16; it must be one of torch.float8_e4m3fn, torch.float8_e5m2, "
     "torch.int8, torch.float4_e2m1fn_x2"),
    ({"group": 48}, "group is 48; it must be 16, 32, 64, 128 or None"),
    ({"scale_dtype": E4M3}, "scale_dtype is torch.float8_e4m3fn; it must be torch.float32 or torch.float8_e8m0fnu; "
     "only fp4 has scales in e4m3"),
    ({"scale_fmt": "mx"}, "scale_fmt is 'mx'; it must be one of None, 'ue8m0'"),
    ({"scale_fmt": "ue8m0", "dtype": FP4, "scale_dtype": E4M3},
     "scale_fmt does not go with scale_dtype=torch.float8_e4m3fn; leave one out"),
    ({"scale_fmt": "ue8m0", "swizzled": True, "group": 32},
     "swizzled needs scales of one byte; pass group and scale_dtype too"),
    ({"swizzled": True, "scale_dtype": E8M0}, "swizzled needs scales of one byte; pass group and scale_dtype too"),
    ({"q_weights": W, "group": 32}, "q_weights does not go with group; leave one out"),
    ({"q_weights": W, "per": "head"}, "q_weights does not go with per='head'; leave one out"),
    ({"per": "head", "group": 32}, "group does not go with per='head'; leave one out"),
    ({"per": "head", "dtype": FP4}, "fp4 does not go with per='head'; leave one out"),
    ({"q_global_scale": 1.0}, "q_global_scale is 1.0; it must be None without scale_dtype=torch.float8_e4m3fn"),
    ({"v_global_scale": 1.0, "dtype": FP4, "scale_dtype": E4M3},
     "v_global_scale is 1.0; it must be None without v=True")]  # fmt: skip
REFUSALS[jitrope.configure] = [
    ({"compile": "no"}, "compile is 'no'; it must be True or False or None"),
    ({"launch": "3d"}, "launch is '3d'; it must be one of None, 'auto', 'token_linear', 'grid_2d'")]  # fmt: skip
REFUSALS[partial(tables.inv_freq, rotary_dim=8)] = [
    ({"rope_type": "rotary"}, "rope_type is 'rotary'; it must be one of 'default', 'linear', 'ntk', 'dynamic', 'yarn', "
     "'llama3', 'longrope', 'proportional', 'axial'"),
    ({"rotary_dim": 7}, "rotary_dim is 7; it must be even"),
    ({"seq_len": 8}, "seq_len is not a parameter of 'default', which takes no parameters"),
    ({"rope_type": "linear", "factor": 2.0, "beta_fast": 1},
     "beta_fast is not a parameter of 'linear', which takes factor"),
    ({"rope_type": "linear", "factor": 0}, "factor is 0; it must be a finite number above 0.0"),
    ({"rope_type": "llama3", "factor": 8.0},
     "'llama3' needs low_freq_factor, high_freq_factor, original_max_position_embeddings"),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4.0, **LENGTH},
     "low_freq_factor is 4; it must be below high_freq_factor 4.0"),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1},
     "original_max_position_embeddings is 1; it must be a finite number above 1.0"),
    ({"rope_type": "yarn", "factor": 4.0, **LENGTH, "beta_fast": 1, "beta_slow": 2},
     "beta_fast is 1; it must be at least beta_slow 2"),
    ({"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 4, **LENGTH, "factor": 2.0},
     "short_factor has 3 entries for rotary_dim / 2 = 4 pairs"),
    ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1, 1, 0, 1], **LENGTH, "factor": 2.0},
     "long_factor[2] is 0; it must be a finite number above 0.0"),
    ({"rope_type": "proportional", "partial_rotary_factor": 2}, "partial_rotary_factor is 2; it must be from 0 to 1"),
    ({"rope_type": "axial", "rotary_dim": 10}, "rotary_dim is 10; it must be a multiple of 2 x axes = 4")]  # fmt: skip
REFUSALS[tables.from_config] = [
    ({"config": None}, "config is None; it must be a transformers configuration, or a dict of it"),
    ({"config": {"hidden_size": 8}},
     "config has no rope_theta, and its default depends on the model; add it, or pass its text_config"),
    ({"config": {"rope_theta": 1e4}}, "config has neither head_dim nor hidden_size and num_attention_heads"),
    ({"config": {"head_dim": 8, "rope_parameters": {"rope_theta": 1e4, "factor": 2.0, "beta_fast": None}}},
     "'default' has no factor; leave out what the model ignores"),
    ({"layer_type": "full", "config": {"head_dim": 8, "rope_parameters": {"full": {"rope_theta": 1e4, "a": 2}}}},
     "'default' has no a; leave out what the model ignores"),
    ({"config": {**CONFIG, "swa_rope_theta": 5e4}},
     "swa_rope_theta is unknown; pass a dict without it, or use inv_freq"),
    ({"config": {**CONFIG, "pos_embed_rescale": None}}, "pos_embed_rescale has its own kind of table: positions are "
     "fractions of an image's sides; compute it from inv_freq"),
    ({"config": {**CONFIG, "layer_rope_theta": 1e4}},
     "config's layer_rope_theta is 10000.0; it must be a list of numbers"),
    ({"config": {**CONFIG, "layer_rope_theta": [1e4, 5e5]}},
     "layers differ in layer_rope_theta; pass a dict with one layer's rope_theta"),
    ({"config": {"head_dim": 8, "rotary_dim": 4, "rope_parameters": {"rope_theta": 1e4}}},
     "rotary_dim is not partial_rotary_factor's 1; leave it out"),
    ({"config": {"head_dim": 8, "rope_parameters": {"full": {}, "sliding": {}}}},
     "layer_type is None; it must be one of 'full', 'sliding'"),
    ({"config": {"head_dim": 8, "rope_parameters": {}}, "layer_type": "full"},
     "layer_type is 'full'; it must be one of None"),
    ({"config": {"head_dim": 8, "global_head_dim": 16, "rope_theta": 1e4}},
     "config has heads of several sizes; pass head_dim, or transformers' object"),
    ({"config": {**CONFIG, "rope_scaling": 1}}, "config's rope_parameters is 1; it must be a dict")]  # fmt: skip
REFUSALS[partial(thd.cp_rank_order_to_sequence_order, cu_seqlens=CU, cp_size=2)] = [
    ({"x": W, "total_tokens": 6},
     "x has 8 rows; total_tokens=6 on cp_size=2 ranks are 6 (pass total_tokens if it is not the number of rows)"),
    ({"x": DICE}, "x is a tensor of shape (6, 1, 8), qint8, on cpu; it must be a tensor with memory, neither quantized "
     "nor torch's lazy zeros")]  # fmt: skip
REFUSALS[partial(thd.copy_valid_tokens_from_per_split_to_rank_local, cu_seqlens_padded=CU)] = [
    ({"out": IDS, "x": IDS, "cu_seqlens": ENDS}, "cu_seqlens is a tensor of shape (3,), int64, on cpu; it must be "
     "(2,), int32 or int64, contiguous, on cpu like cu_seqlens_padded"),
    ({"out": W.cfloat().conj(), "x": W.cfloat(), "cu_seqlens": CU},
     "out has torch's lazy negative or conjugate bit; pass out.resolve_conj().resolve_neg()"),
    ({"out": LEAF[0], "x": Q[0], "cu_seqlens": CU}, f"out {NOT_HERE}")]  # fmt: skip
REFUSALS[partial(thd.read_half_tensor, cu_seqlens=CU, half_idx=0)] = [
    ({"x": Q[0], "half_idx": 2}, "half_idx is 2; it must be below halves=2"),
    ({"x": LEAF[0]}, "x requires a gradient, which this function does not have; call it under torch.no_grad()"),
]  # fmt: skip
REFUSALS[lse] = [
    ({"lse": LSE.half()}, "lse is float16; it must be (H, rows), float32, contiguous, on cpu"),
    ({"lse_per_step": LEAF[0, :3, :2, 0]}, f"lse_per_step {NOT_HERE}")]  # fmt: skip
REFUSALS[correct] = [
    ({"out": Q[0], "out_per_step": Q[0]}, f"lse is a tensor of shape (2, 6), {F32}, lse_per_step a tensor of shape (2, "
     f"6), {F32}; they must have one shape, and out's heads and at least its rows: a tensor of shape (6, 4, 8), {F32}"),
    ({"out_per_step": LEAF[0, :, :2]}, f"out_per_step {NOT_HERE}")]  # fmt: skip
REFUSALS[add] = [
    ({"grad_per_step": Q[0, :1], "second_half": "none"},
     "grad_per_step is a tensor of shape (1, 4, 8), float32, on cpu; it must have at least 3 rows"),
    ({"grad": LEAF[0]}, "grad requires a gradient, which this function does not have; call it under torch.no_grad()"),
]  # fmt: skip
REFUSALS[attend] = [
    ({"layout": "bshd", "q": Q, "k": K, "v": V},
     "q has B=2 in layout 'bshd'; make the schedule with Schedule.fixed, for that batch"),
    ({"q": Q[0].int()}, f"q is int32; it must be (T, H, D), {FLOATS} or float64, on cpu; layout is 'thd'"),
    ({"q": Q[0, :5], "k": K[0, :5], "v": V[0, :5]}, "q has 5 rows; it must have 6 (tokens=6, rank 0 of 1)"),
    ({"k": torch.ones(6, 3, 8), "v": torch.ones(6, 3, 8)}, "q is (T=6, H=4, D=8), k is (T=6, H=3, D=8), v is (T=6, "
     "H=3, D=8); k's H must divide q's, and H and D be at least 1"),
    ({"schedule": None}, "schedule is None; it must be a Schedule"),
    ({"schedule": Schedule(CU.to("meta"), 6)}, "q is on cpu but cu_seqlens on meta"),
    ({"schedule": Schedule(CU, 6, max_seqlen=7), "rope": Rope(freqs=ANGLES)},
     "rope's tables have 6 rows; they must have at least max_seqlen=7"),
    ({"rope": Rope(freqs=ANGLES), **{x: y[0].double() for x, y in zip("qkv", (Q, K, V))}},
     "q is float64, which rope does not take; rotate q and k before, or leave rope out"),
    ({"schedule": Schedule(CU[:2] * 3, 6, cp_size=2, cp_rank=1)},
     "q has 6 rows; it must have 3 (tokens=6, rank 1 of 2); pass this rank's rows, schedule.shard(x)"),
    ({"head_groups": 3}, "head_groups is 3, which does not divide k's H=2"),
    ({"backend": "best"}, "backend is 'best'; it must be one of 'auto', 'flash', 'flex', 'math'"),
    ({"backend": "flash"}, "backend 'flash' cannot do this: q is on cpu; it needs a CUDA device"),
    ({"backend": "flex", "q": LEAF[0]}, "backend 'flex' cannot do this: it has no backward on CPUs"),
    ({"rope": Rope()}, "pass cos and sin, or one of cos_sin_cache, freqs and freqs_cis, not none")]  # fmt: skip
REFUSALS[partial(Schedule, CU)] = [
    ({"tokens": 2**31 - 1}, "2147483647 tokens are more than 2147483647 rows"),
    ({"tokens": 6, "window": (-2, 0)}, "window[0] is -2; it must be a whole number of at least -1")]  # fmt: skip
REFUSALS[partial(Partition, tokens=6)] = [
    ({"cu_seqlens": [0, 6]}, "cu_seqlens is [0, 6]; it must be a tensor; pass torch.tensor(cu_seqlens)"),
    ({"cu_seqlens": W},
     "cu_seqlens is float32; it must be (sequences + 1,), int32 or int64, contiguous, on cpu like cu_seqlens_padded"),
    ({"cu_seqlens": CU, "cp_size": 2}, "cp_size is 2 and cp_rank is None; pass both, or a group"),
    ({"cu_seqlens": CU[:1]}, "cu_seqlens has one offset; it must have those of one sequence at least")]  # fmt: skip
REFUSALS[Partition(CU, 12, cp_size=2, cp_rank=0).unshard] = [
    ({"x": Q[0]}, "the Partition was made with cp_size and cp_rank; make it with a group"),
    ({"x": Q[0, :2]}, "x has 2 rows; it must have 6 (tokens=12, rank 0 of 2)")]  # fmt: skip

# ---- the mistakes of a first hour: shapes, values and words of other libraries ----------------------------------

REFUSALS[rope] += [
    ({"positions": 3}, f"positions is 3; {POSITIONS}; for all rows to begin at 3 pass cos[3:] and sin[3:]"),
    ({"positions": torch.tensor(3)}, f"positions is a tensor of shape (), int64, on cpu; it must be {IDS_OF_Q}"),
    ({"positions": IDS[:1]}, f"positions is a tensor of shape (1,), int64, on cpu; it must be {IDS_OF_Q}"),
    ({"positions": IDS[:, None]}, f"positions is a tensor of shape (6, 1), int64, on cpu; it must be {IDS_OF_Q}"),
    ({"positions": IDS.expand(3, 2, 6)}, "positions is a tensor of shape (3, 2, 6), int64, on cpu; it must be "
     f"{IDS_OF_Q}"),
    ({"positions": CU}, f"positions is a tensor of shape (2,), int64, on cpu; it must be {IDS_OF_Q}"),
    ({"positions": range(6)}, f"positions is range(0, 6); {POSITIONS}; pass torch.tensor(positions)"),
    ({"positions": IDS.numpy()}, f"positions is a numpy array of shape (6,); {POSITIONS}; pass "
     "torch.from_numpy(positions)"),
    ({"positions": Starts(IDS)}, f"start_positions is a tensor of shape (6,), int64, on cpu; it must be (2,), {INTS}, "
     f"contiguous, on cpu like q {SIZES}"),
    ({"q": (Q, K)}, "q is a tuple of 2; it must be a tensor; unpack it"),
    ({"q": Q.numpy()}, "q is a numpy array of shape (2, 6, 4, 8); it must be a tensor; pass torch.from_numpy(q)"),
    ({"q": Q.to(E4M3)}, f"q is float8_e4m3fn; it must be (B, S, H, D), {FLOATS}, on cpu"),
    ({"q": QKV, "k": None}, f"q is a tensor of shape (2, 6, 64), {F32}; it must be {AXES}"),
    ({"k": K[:, :1]}, f"k is a tensor of shape (2, 1, 2, 8), {F32}; it must be (2, 6, H, 8), {F32} like q {SIZES}; "
     f"{ONLY_H}"),
    ({"k": K.transpose(1, 2)}, f"k is a tensor of shape (2, 2, 6, 8), {F32}; it must be (2, 6, H, 8), {F32} like q "
     f"{SIZES}; {ONLY_H}"),
    ({"k": K[0]}, f'k is a tensor of shape (6, 2, 8), {F32}; it must be (2, 6, H, 8), {F32} like q {SIZES}; for (T, H, '
     'D) pass layout="thd", for (B, S, H * D) k.unflatten(-1, (H, D)), for (B, S, D) k.unsqueeze(2)'),
    ({"layout": "bhsd"}, f"k is a tensor of shape (2, 6, 2, 8), {F32}; it must be (2, H, 4, 8), {F32} like q (B=2, "
     "H=6, S=4, D=8); only H may differ, and layout is 'bhsd'"),
    ({"layout": "bnsd"}, "layout is 'bnsd'; it must be one of 'bshd', 'sbhd', 'bhsd', 'thd'"),
    ({"interleaved": "halves"}, "interleaved is 'halves'; it must be True or False"),
    ({"rounding": "bf16"}, "rounding is 'bf16'; it must be one of 'fp32', 'complex64', 'complex128', 'dtype', "
     "'addcmul'"),
    ({"out": Q}, f"out is a tensor of shape (2, 6, 4, 8), {F32}; it must be a tuple of 2 tensors"),
    ({"cos": COS[:, None], "sin": SIN[:, None]}, f"cos is a tensor of shape (6, 1, 4), {F32}; it must be {TABLES} "
     f"{SIZES}; pass cos.squeeze(1)"),
    ({"sin": SIN[:5]}, f"sin is a tensor of shape (5, 4), {F32}; it must be (6, 4), {F32} like cos"),
    ({"sin": SIN.double()}, f"sin is float64; it must be (6, 4), {F32} like cos; pass sin.float()"),
    ({**NONE}, f"{GIVE}, not none"),
    ({"freqs_cis": torch.polar(COS, SIN).cdouble(), **NONE}, "freqs_cis is complex128; it must be (P, 4|8) or (1|2, P, "
     "4|8) or (1|2, P, 1, 4|8), complex64, on cpu like q; pass freqs_cis.to(torch.complex64)"),
    ({"freqs_cis": torch.view_as_real(torch.polar(COS, SIN)), **NONE}, "freqs_cis is float32; it must be (P, 2|4) or "
     "(1|2, P, 2|4) or (1|2, P, 1, 2|4), complex64, on cpu like q; pass torch.view_as_complex(table)"),
    ({"freqs": ANGLES.double(), **NONE}, "freqs is float64; it must be (P, 4|8) or (1|2, P, 4|8) or (P, 1|2, 1, 4|8), "
     f"{F32} like q; the angles must be computed and passed in fp32"),
    ({"freqs": torch.polar(COS, SIN), **NONE}, "freqs is complex64; it must be (P, 4|8) or (1|2, P, 4|8) or (P, 1|2, "
     f"1, 4|8), {F32} like q; pass a complex table as freqs_cis=table"),
    ({"cos_sin_cache": COS.repeat(1, 2).double(), **NONE}, f"cos_sin_cache is float64; it must be (P, 8), {FLOATS}, on "
     "cpu like q; pass cos_sin_cache.float()"),
    ({"cos_sin_cache": (COS, SIN), **NONE}, "cos_sin_cache is a tuple of 2; it must be a tensor; unpack it"),
]  # fmt: skip
REFUSALS[packed] += [
    ({"positions": IDS[None], "layout": "thd"}, "positions is a tensor of shape (1, 6), int64, on cpu; it must be "
     f"(6,), {INTS}, on cpu like q (T=6, H=4, D=8); pass positions.squeeze(0)"),
    ({"positions": ENDS, "layout": "thd"}, "positions is a tensor of shape (3,), int64, on cpu; it must be (6,), "
     f"{INTS}, on cpu like q (T=6, H=4, D=8); {PLACES}"),
    ({"positions": ENDS.int()}, f"q is a tensor of shape (6, 4, 8), {F32}; it must be {AXES}"),
    ({"positions": Packed(ENDS, start_positions=IDS)}, "start_positions is a tensor of shape (6,), int64, on cpu; it "
     f"must be (2,), {INTS}, contiguous, on cpu like cu_seqlens")]  # fmt: skip
REFUSALS[qkv] += [
    ({"norm": torch.nn.RMSNorm(8, eps=1e-5)}, f"norm is a module, RMSNorm; {A_NORM}; {BY_MODULES}"),
    ({"norm": torch.nn.LayerNorm(8)}, f"norm is a module, LayerNorm; {A_NORM}; pass jitrope.Norm(q_norm.weight, "
     "k_norm.weight, q_bias=q_norm.bias, k_bias=k_norm.bias, kind='layer_norm', eps=q_norm.eps) of your modules"),
    ({"norm": (torch.nn.RMSNorm(8), torch.nn.RMSNorm(8))}, f"norm is a tuple of 2; {A_NORM}; {BY_MODULES}"),
    ({"norm": (W, W)}, f"norm is a tuple of 2; {A_NORM}; unpack it"),
    ({"norm": W}, f"norm is a tensor of shape (8,), {F32}; {A_NORM}"),
    ({"norm": (Norm(W), Norm(W))}, f"norm is (Norm(q_weight=a tensor of shape (8,), {F32}), Norm(q_weight=a tensor "
     f"...; {A_NORM}"),
    ({"norm": Norm(W[:4], W[:4])}, f"q_weight is a tensor of shape (4,), {F32}; it must be (8,), {FLOATS}, contiguous, "
     f"on cpu like q {SIZES}"),
    ({"norm": Norm(W, W, across_heads=True)}, f"q_weight is a tensor of shape (8,), {F32}; it must be (32,), {FLOATS}, "
     f"contiguous, on cpu like q {SIZES}; pass across_heads=False"),
    ({"norm": Norm(torch.ones(32), torch.ones(16))}, f"q_weight is a tensor of shape (32,), {F32}; it must be (8,), "
     f"{FLOATS}, contiguous, on cpu like q {SIZES}; pass across_heads=True"),
    ({"norm": Norm(W, W.bfloat16())}, "k_weight is bfloat16; it must be (8,), float32, contiguous, on cpu like "
     "q_weight and k"),
    ({"norm": Norm(W, W), "inverse": True}, "inverse does not go with norm; rotate back in a call without a norm"),
    ({"v": COS, "cos": SIN, "sin": None}, f"sin is missing; {GIVE}, and None in the place of a k or v that there is "
     "not"),
    ({"v": None, "cache": CACHE}, "v is None; it must be a tensor"),
    ({"v": V.half(), "cache": CACHE}, f"v is float16; it must be (2, 6, H, 8), {F32} like k; pass v.to(k)"),
    ({"cache": (KC, VC)}, f"cache is a tuple of 2; {A_CACHE}; unpack it"),
    ({"cache": KC}, f"cache is a tensor of shape (12, 2, 8), {F32}; {A_CACHE}"),
    ({"cache": pages()}, "cache is Pages(page_table=a tensor of shape (2, 2), int64, on cpu, seq_lens=a tensor of "
     f"s...; {A_CACHE}"),
    ({"cache": stored(k_cache=torch.zeros(2, 12, 8), v_cache=torch.zeros(2, 12, 8))}, "k_cache is a tensor of shape "
     f"(2, 12, 8), {F32}; it must be (slots, 2, 8) or (pages, rows, 2, 8), float32 or float8_e4m3fn or float8_e5m2, on "
     "cpu like k (B=2, S=6, H=2, D=8)"),
    ({"cache": CACHE, "inplace": True, "quantize": Quantize(0.5)}, "inplace does not go with quantize; leave it out"),
    ({"quantize": torch.float8_e4m3fn}, f"quantize is torch.float8_e4m3fn; {A_QUANTIZE}"),
    ({"quantize": "fp8"}, f"quantize is 'fp8'; {A_QUANTIZE}"),
    ({"quantize": Quantize(W, W)}, f"q_scale is a tensor of shape (8,), {F32}; it must be () or (4,) or (2, 4), {F32} "
     f"like q {SIZES}"),
    ({"quantize": DynamicQuantize(group=16, hadamard=True)}, "group is 16; it must divide D=8"),
    ({"out": (None, None)}, "out is (None, None); it must be a tuple of 3 tensors"),
    ({"q": LEAF, "quantize": TWO}, "q requires a gradient, but this call has none; use a call without cache, quantize "
     "and out, or torch.no_grad()")]  # fmt: skip
REFUSALS[fused] += [
    ({"heads": 4}, "heads is 4; it must be (Hq, Hk), the heads of q and of k; Hk must divide Hq"),
    ({"heads": (4, 2, 2)}, "heads is (4, 2, 2); it must be (Hq, Hk), the heads of q and of k; Hk must divide Hq"),
    ({"heads": (32, 8)}, "qkv has shape (2, 6, 64), but heads=(32, 8) with order='qkv' are 48 heads of D elements; it "
     "must be (B, S, 48 * D) or (B, S, 48, D) in layout 'bshd'"),
    ({"qkv": torch.ones(2, 6, 3, 4, 8)}, f"qkv has shape (2, 6, 3, 4, 8), {EIGHT}; pass qkv.flatten(-3, -2)"),
    ({"qkv": torch.ones(2, 6, 65)}, f"qkv has shape (2, 6, 65), {EIGHT}"),
    ({"qkv": (Q, K, V)}, "qkv is a tuple of 3; it must be a tensor; unpack it"),
    ({"qkv": QKV[0]}, f"qkv has shape (6, 64), {EIGHT}; for (T, W) pass layout='thd'"),
    ({"qkv": torch.ones(2, 8, 6, 8)}, f"qkv has shape (2, 8, 6, 8), {EIGHT}"),
    ({"layout": "bhsd"}, "layout is 'bhsd'; it must be one of 'bshd', 'sbhd', 'thd'"),
    ({"bias": torch.ones(32)}, f"bias is a tensor of shape (32,), {F32}; it must be (8, 8) or (64,), {F32} like qkv"),
    ({"norm": Norm(torch.ones(64), torch.ones(64))}, f"q_weight is a tensor of shape (64,), {F32}; it must be (8,), "
     f"{FLOATS}, contiguous, on cpu like q of qkv {SIZES}")]  # fmt: skip
REFUSALS[latent] += [
    ({"k_pe": torch.ones(2, 6, 4, 4)}, f"k_pe is a tensor of shape (2, 6, 4, 4), {F32}; it must be (2, 6, 1, 4), {F32} "
     f"like q {SIZES}"),
    ({"k_pe": K_PE[:, :, 0]}, f"k_pe is a tensor of shape (2, 6, 4), {F32}; it must be (2, 6, 1, 4), {F32} like q "
     f"{SIZES}; pass k_pe.unsqueeze(2)"),
    ({"kv": KV.flatten(2)}, f"kv is a tensor of shape (2, 6, 40), {F32}; it must be (2, 6, H, D), {F32} like q "
     f"{SIZES}; pass kv.unflatten(-1, (H, D))"),
    ({"kv": KV[:1]}, f"kv is a tensor of shape (1, 6, 4, 10), {F32}; it must be (2, 6, H, D), {F32} like q {SIZES}"),
    ({"kv": KV.half()}, f"kv is float16; it must be (2, 6, H, D), {F32} like q"),
    ({"q": Q[..., :2]}, f"k_pe is a tensor of shape (2, 6, 1, 4), {F32}; it must be (2, 6, 1, 2), {F32} like q (B=2, "
     "S=6, H=4, D=2)"),
    ({"q": Q.flatten(2)}, f"q is a tensor of shape (2, 6, 32), {F32}; it must be {AXES}"),
    ({"cos": torch.ones(6, 8), "sin": torch.ones(6, 8)}, f"cos is a tensor of shape (6, 8), {F32}; it must be (P, 2|4) "
     f"or (1|2, P, 2|4) or (1|2, P, 1, 2|4), {FLOATS}, on cpu like q {SIZES}; k_pe has rotary_dim elements"),
]  # fmt: skip
REFUSALS[joint] += [
    ({"first": Q}, f"first is a tensor of shape (2, 6, 4, 8), {F32}; it must be a tuple of 3 tensors"),
    ({"second": (Q[..., :4], K[..., :4], V[..., :4])}, f"second's q is a tensor of shape (2, 6, 4, 4), {F32}; it must "
     f"be (2, 6, 4, 8), {F32} like first's q {SIZES}"),
    ({"second": (Q[:1], K[:1], V[:1])}, f"second's q is a tensor of shape (1, 6, 4, 8), {F32}; it must be (2, 6, 4, "
     f"8), {F32} like first's q {SIZES}"),
    ({"second": (Q[0], K[0], V[0])}, f"second's q is a tensor of shape (6, 4, 8), {F32}; it must be a tensor (B, S, H, "
     "D)"),
    ({"norm": (torch.nn.RMSNorm(8), torch.nn.RMSNorm(8))}, f"norm is a module, RMSNorm; {A_NORM}; {BY_MODULES}"),
    ({"norm": (W, W, W, W)}, "norm is a tuple of 4; it must be a tuple of 2 norms"),
    ({"cos": COS, "sin": SIN}, "q is (B=2, S=12, H=4, D=8) but cos has 6 rows; it needs 12; make it longer"),
    ({"norm": Norm(W, W, across_heads=True)}, "across_heads does not go with two streams; normalise before, or join "
     "them and use prepare_qkv")]  # fmt: skip
REFUSALS[partial(Packed, CU)] = [
    ({"max_seqlen": "6"}, "max_seqlen is '6'; it must be a whole number of at least 0"),
    ({"start_positions": 3}, "start_positions is 3; it must be a tensor"),
    ({"cp_size": 0}, "cp_size is 0; it must be a whole number of at least 1")]  # fmt: skip
REFUSALS[Packed] = [
    ({"cu_seqlens": [0, 6]}, "cu_seqlens is [0, 6]; it must be a tensor; pass torch.tensor(cu_seqlens)"),
    ({"cu_seqlens": CU.numpy()}, "cu_seqlens is a numpy array of shape (2,); it must be a tensor; pass "
     "torch.from_numpy(cu_seqlens)")]  # fmt: skip
REFUSALS[Starts] = [
    ({"start_positions": 3}, "start_positions is 3; it must be a tensor"),
    ({"start_positions": [3, 4]}, "start_positions is [3, 4]; it must be a tensor; pass torch.tensor(start_positions)"),
]  # fmt: skip
REFUSALS[Shifts] = [
    ({"position_ids": 3}, "position_ids is 3; it must be a tensor")]  # fmt: skip
REFUSALS[partial(Mrope, IDS)] = [
    ({"mrope_section": "16, 24, 24"}, "mrope_section is '16, 24, 24'; it must be a list or tuple of whole numbers"),
]  # fmt: skip
REFUSALS[Norm] += [
    ({"q_weight": torch.nn.RMSNorm(8), "k_weight": torch.nn.RMSNorm(8)}, "q_weight is a module, RMSNorm; it must be a "
     f"tensor; {BY_MODULES}"),
    ({"q_weight": W.tolist()}, "q_weight is [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]; it must be a tensor; pass "
     "torch.tensor(q_weight)"),
    ({"eps": None}, "eps is None; it must be a finite number; torch.nn.RMSNorm(eps=None) has "
     "torch.finfo(torch.float32).eps"),
    ({"eps": "1e-6"}, "eps is '1e-6'; it must be a finite number"),
    ({"kind": "rms"}, "kind is 'rms'; it must be one of 'rms_norm', 'layer_norm'"),
    ({"rounding": "bf16"}, "rounding is 'bf16'; it must be one of 'none', 'once', 'twice'"),
    ({"v_norm": torch.nn.RMSNorm(8)}, "v_norm is a module, RMSNorm; it must be True or False")]  # fmt: skip
REFUSALS[stored] += [
    ({"slot_mapping": None}, "slot_mapping is None; it must be a tensor"),
    ({"k_cache": None}, "k_cache is None; it must be a tensor")]  # fmt: skip
REFUSALS[pages] += [
    ({"seq_lens": [3, 3]}, "seq_lens is [3, 3]; it must be a tensor; pass torch.tensor(seq_lens)")]  # fmt: skip
REFUSALS[Quantize] += [
    ({"q_scale": None}, "q_scale is None; it must be a finite number, or a tensor in fp32 on q's device"),
    ({"q_scale": 0.0}, "q_scale is 0.0; it must be above 2.94e-39, so that fp32 holds its reciprocal")]  # fmt: skip
REFUSALS[DynamicQuantize] += [
    ({"dtype": "fp8"}, "dtype is 'fp8'; it must be one of torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, "
     "torch.float4_e2m1fn_x2"),
    ({"per": "tensor"}, "per is 'tensor'; it must be one of 'token', 'head', 'kv_head'"),
    ({"group": 8}, "group is 8; it must be 16, 32, 64, 128 or None")]  # fmt: skip
REFUSALS[partial(tables.inv_freq, rotary_dim=8)] = [
    ({"theta": "10000"}, "theta is '10000'; it must be a finite number above 1.0")]  # fmt: skip
REFUSALS[tables.inv_freq] = [
    ({"rotary_dim": "64"}, "rotary_dim is '64'; it must be a whole number of at least 2")]  # fmt: skip
REFUSALS[partial(tables.cos_sin, 6)] = [
    ({"inv_freq": tables.inv_freq(rotary_dim=8)}, "inv_freq is a tuple of 2; it must be a tensor; unpack it"),
]  # fmt: skip
REFUSALS[partial(tables.cos_sin, inv_freq=ANGLES[1])] = [
    ({"positions": -1}, "positions is -1; it must be a whole number of at least 0")]  # fmt: skip
REFUSALS[partial(tables.cos_sin, inv_freq=6)] = [
    ({"positions": ANGLES[1]}, "inv_freq is 6; it must be a tensor")]  # fmt: skip
REFUSALS[tables.from_config] += [
    ({"config": "llama"}, "config is 'llama'; it must be a transformers configuration, or a dict of it")]  # fmt: skip
WORDS: list[tuple[Any, str, str]] = [
    (rope, "seqlen_offsets", "; pass positions=jitrope.Starts(start_positions)"),
    (rope, "rotary_interleaved", "; pass interleaved=rotary_interleaved"),
    (rope, "in_place", "; pass inplace=in_place"),
    (rope, "start_pos", "; pass positions=jitrope.Starts(start_positions)"),
    (rope, "tensor_format", "; pass layout='bhsd' or 'bshd'"),
    *[(rope, "heads", "; pass heads=(Hq, Hk) to prepare_fused_qkv"), (rope, "scale", "")],
    *[(qkv, "q_norm", "; pass norm=jitrope.Norm(...)"), (qkv, "slot_mapping", "; pass cache=jitrope.KVCache(...)")],
    *[(qkv, "kv_cache", "; pass cache=jitrope.KVCache(...)"), (qkv, "page_table", "; pass cache=jitrope.KVCache(...)")],
    (qkv, "heads", "; pass heads=(Hq, Hk) to prepare_fused_qkv"),
    (fused, "num_heads", "; pass heads=(Hq, Hk) to prepare_fused_qkv"),
    *[(fused, "q_per_group", "; pass heads=(Hq, Hk) to prepare_fused_qkv"), (latent, "inplace", "")],
    (joint, "layout", ""),
]

# Calls within others, and sentences that begin in another way.
OTHERS: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch.vmap(lambda q, i: packed(q=q, positions=i, layout="thd", check=True)[0])(Q, IDS.expand(2, 6)),
     "apply_rope: check=True waits for the device, which torch.compile, torch.func and a CUDA graph do not; leave it "
     "out"),
    *[(lambda call=call, x=x: torch.func.jvp(call, (x,), (x,)),
       f"{name}: forward-mode derivatives (jvp) are not supported; use the backward") for name, call, x in (
        ("apply_rope", lambda x: rope(q=x)[0], Q), ("apply_rope", lambda x: rope(q=x * 1, inplace=True)[0], Q),
        ("prepare_qkv", lambda x: qkv(v=x, norm=Norm(v_norm=True))[2], V),
    )],
    (lambda: torch.func.grad(lambda x: rope(q=x)[0].sum())(Q),
     "apply_rope: torch.func's grad is not supported here; use torch.autograd.grad"),
    (lambda: torch.vmap(lambda x: packed(q=x, layout="thd", out=(Q[0].clone(), None))[0])(Q),
     "apply_rope: torch.func's vmap is not supported here; give the tensors a batch axis"),
    (lambda: torch.autograd.grad(torch.autograd.grad(qkv(q=LEAF, norm=Norm())[0].sin().sum(), LEAF,
                                                     create_graph=True)[0].sum(), LEAF),
     "a norm of q or k has no second derivative; compute the norm by itself; with a drop-in, enable(model, "
     "fuse_norm=False)"),
    (lambda: torch.autograd.grad(torch.autograd.grad(latent(q=LEAF)[0].sin().sum(), LEAF, create_graph=True)[0].sum(),
                                 LEAF), "prepare_mla_qkv has no second derivative"),
    (lambda: torch.vmap(lambda x: jitrope.prepare_qkv(x, None, None, quantize=DynamicQuantize())[0].scale)(LEAF[None])
     .sum().backward(), "prepare_qkv has no gradient"),
    (lambda: jitrope.integrations.transformers.enable(PIPELINE),
     f"enable: model is {PIPELINE}; it must be a model, such as pipeline.model, or None; diffusers has its own enable"),
    (lambda: jitrope.integrations.diffusers.enable(PIPELINE),
     f"enable: model_or_pipeline is {PIPELINE}; it must be a model or pipeline; transformers has its own enable"),
    (lambda: jitrope.integrations.transformers.enable(torch.nn.Linear(1, 1)),
     "the file of Linear has no rope function that jitrope can replace; call jitrope.apply_rope in it"),
    (lambda: jitrope.planning(launches="auto").__enter__(), "planning: launches is 'auto'; it must be a list of words"),
    (lambda: Schedule.fixed(2, 5, "cpu", cp_size=2, cp_rank=0),
     "Schedule.fixed: seqlen is 5; it must be a multiple of the group's size 2"),
    (lambda: Partition(CU, 6, separate_padding=True),
     "Partition: separate_padding=True needs cu_seqlens and cu_seqlens_padded; pass both"),
    (lambda: Schedule(CU, 6).memory((4, 2), (8, 8, 8), torch.float16),
     "Schedule.memory: head_dims is (8, 8, 8); it must be (D, Dv)"),
    (lambda: Schedule(CU, 6).memory((4, 2), (8, 8), torch.float16, head_groups=4),
     "Schedule.memory: heads is (4, 2) and head_groups 4; Hk must divide Hq, and head_groups Hk"),
    (lambda: jitrope.on_compile(1), "on_compile: callback is 1; it must be a function of a KernelEvent"),
    (lambda: Partition(CU, 6).shard(torch.zeros(())), "shard: x has no rows; it must have 6 (tokens=6)"),
    (lambda: Partition(CU, 6, group=1),
     'Partition: group is 1; it must be a process group, a DeviceMesh of one axis (mesh["cp"]), or None'),
    (lambda: tables.freqs(W, W), f"freqs: positions is float32; it must be {INTS}, on cpu like inv_freq"),
    (lambda: tables.cos_sin(2, W.bfloat16()), "cos_sin: inv_freq is bfloat16; it must be (R / 2,), float32, on cpu"),
    (lambda: thd.sequence_order_to_cp_rank_order((W, IDS), CU, 2), "sequence_order_to_cp_rank_order: x is a tensor of "
     f"shape (8,), {F32}, a tensor of shape (6,), int64, on cpu; it must be (T, ...), or a pair with as many rows on "
     "one device"),
    *[(partial(specs_of, [8, 2], call=f"bshd heads {text}"),
       f"specs_of: call lacks {lacked}, which it needs with its other tensors") for text, lacked in {
        "q k v > rotate cos sin > cache k_cache v_cache page_table": "lengths",
        "> norm kind=no_norm > convert per_row > fresh": "heads"}.items()],
    (lambda: thd.copy_valid_tokens_from_per_split_to_rank_local(ENDS, ENDS, CU, CU),
     "cu_seqlens is [0, 6]; it must ascend to at most 3, the rows of out"),
    (lambda: add(grad=Q[0, :5], grad_per_step=Q[0, :5]),
     "cu_seqlens is [0, 6]; it must ascend to at most 5, the rows of grad"),
    (lambda: lse(cu_seqlens=torch.tensor([0, 4, 2, 6])),
     "cu_seqlens is [0, 4, 2, 6]; it must ascend to at most 6, the rows of lse"),
    (lambda: lse(lse=torch.ones(2, 1, 3), lse_per_step=torch.ones(2, 1, 2), cu_seqlens=torch.tensor([0, 2, 6]),
                 lse_packed=False), "lse has room for 3 rows, but cu_seqlens has 4"),
    (lambda: op_call.given_to("bshd heads q > rotate cos sin > fresh", [0, 0], []),
     "call 'bshd heads q > rotate cos sin > fresh' is given 0 tensors, 0 of them written, and 2 sizes; it needs 3, 0 "
     "and 2"),
    (lambda: op_call.read("bshd turn q > fresh"), "call has the source 'turn', or stages without a kernel; the sources "
     "are heads, heads_backward, kv, fused, fused_backward, latent, latent_backward, projected, streams"),
    *[(partial(Call.parse, text), f"call {told}") for text, told in {
        "": "is ''; it must be like 'bshd heads q k > rotate cos sin > fresh'",
        "bhds heads q > fresh": "is 'bhds heads q > fresh'; it must be like 'bshd heads q k > rotate cos sin > fresh'",
        "bshd heads q > turn > fresh":
            "has 'turn'; it must be one of source, bias, norm, rotate, scale, transform, convert, sink",
        "bshd heads q > rotate first > fresh": "has 'first', which is neither a word nor a tensor of its rotate",
        "bshd heads q > rotate cos sin rotary_dim=x > fresh":
            "has a wrong value in 'rotary_dim=x': invalid literal for int() with base 10: 'x'",
        "bshd heads q > rotate cos sin > cache": "ends in 'cache'; with its tensors it must be 'fresh'",
    }.items()],
    (lambda: specs_of([8, 2], call="bshd heads q k > rotate cos sin rotary_dim=200 > fresh"),
     "prepare_qkv: rotary_dim is 200; it must be even and from 2 to D=128"),
    (lambda: spec_from_dict({"kind": "rope", "call": ["bshd"]}),
     "a spec must be a table of fields, and its call a text, not {'kind': 'rope', 'call': ['bshd']}"),
    (lambda: spec_from_dict({"kind": "turn"}),
     "kind is 'turn'; allowed are cp_segment_rows, cp_segments, project_qkv, qk_norm_rope, qk_norm_rope_backward, "
     "rope, thd_corrections, thd_rows, thd_tables")]  # fmt: skip
TENSORS = [x for x in globals().values() if isinstance(x, Tensor) and x is not DICE]


for refused, refusals in REFUSALS.items():
    function = getattr(refused, "func", refused).__qualname__.rpartition(".")[2]
    OTHERS += [(partial(refused, **words), f"{function}: {sentence}") for words, sentence in refusals]
for refused, label, told in WORDS:
    named = f"{refused.func.__name__}() got an unexpected keyword argument {label!r}"
    OTHERS.append((partial(refused, **{label: 1}), named + told))


@pytest.mark.parametrize(("call", "sentence"), OTHERS, ids=[sentence[:60] for _, sentence in OTHERS])
def test_a_refusal_is_a_sentence_and_writes_nothing(call: Callable[[], Any], sentence: str) -> None:
    before = [x.detach().clone() for x in TENSORS]
    for _ in range(2):
        with pytest.raises((jitrope.JitropeError, TypeError)) as error:
            call()
        assert str(error.value) == sentence
    assert all(torch.equal(x, y) for x, y in zip(TENSORS, before))


@pytest.mark.parametrize("call", [rope, partial(qkv, norm=Norm()), fused, latent, attend])
def test_a_check_in_a_capture_is_refused(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for the device, which ends the capture of a CUDA graph with an error of CUDA."""
    call(check=True)
    monkeypatch.setattr(watch, "capturing", lambda x: True)
    with pytest.raises(jitrope.InvalidInput) as error:
        call(check=True)
    others = "which torch.compile, torch.func and a CUDA graph do not"
    use = "so it cannot be compiled or captured in a CUDA graph" if call is attend else others
    assert str(error.value) == f"{call.func.__name__}: check=True waits for the device, {use}; leave it out"


@pytest.mark.parametrize(("norm", "sentence"), [
    slow(Norm(torch.ones(9)), f"prepare_qkv: q_weight is a tensor of shape (9,), {F32}; it must be (8,), {FLOATS}, "
         f"contiguous, on cpu like q {SIZES}"),
    (torch.nn.RMSNorm(8), f"prepare_qkv: norm is a module, RMSNorm; {A_NORM}; {BY_MODULES}")])  # fmt: skip
def test_a_compiled_call_is_refused_in_the_same_words(norm: Any, sentence: str) -> None:
    """Alone where torch may leave the graph; with fullgraph=True in Dynamo's own message, which nothing replaces."""
    call, old = partial(jitrope.prepare_qkv, norm=norm), tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
    for fullgraph in (False, True):
        torch._dynamo.reset()
        with pytest.raises((jitrope.InvalidInput, torch._dynamo.exc.Unsupported)) as error:
            torch.compile(lambda *given: call(*given), backend="eager", fullgraph=fullgraph)(*HEADS, COS, SIN)
        assert (str(error.value) == sentence) != fullgraph
        assert sentence in str(error.value) or (fullgraph and old)  # some versions do not show what was raised
