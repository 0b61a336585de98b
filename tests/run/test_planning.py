"""`jitrope.planning` finds the kernels that launches of the same calls use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

import jitrope
from jitrope import InvalidInput, Norm, Packed

meta = partial(torch.empty, dtype=torch.bfloat16, device="meta")
Q, K = meta(1, 4096, 32, 128), meta(1, 4096, 8, 128)
COS = SIN = meta(4096, 64, dtype=torch.float32)
rope = partial(jitrope.apply_rope, cos=COS, sin=SIN)


def test_a_backward_is_planned_where_it_runs() -> None:
    q, k = meta(1, 64, 8, 128, requires_grad=True), meta(1, 64, 2, 128, requires_grad=True)
    weight = meta(128, requires_grad=True)
    with jitrope.planning() as specs:
        out = rope(q, k)
        assert [spec.inverse for spec in specs] == [False] * 3
        torch.autograd.backward(out, [torch.empty_like(x) for x in out])
        assert [spec.inverse for spec in specs] == [False] * 3 + [True] * 3
        qn, kn, _ = jitrope.prepare_qkv(q, k, None, COS, SIN, norm=Norm(weight, weight))
        torch.autograd.grad([qn, kn], [q, k, weight], [torch.empty_like(x) for x in (qn, kn)])
    assert [spec.kind for spec in specs] == ["rope"] * 6 + ["qk_norm_rope"] * 2 + ["qk_norm_rope_backward"]
    assert q.grad is not None


def test_a_call_in_place_has_a_backward_too() -> None:
    leaf = meta(8, 2, 128, requires_grad=True)
    lengths = torch.empty(3, dtype=torch.int32, device="meta")
    with jitrope.planning() as specs:
        q, _ = jitrope.apply_rope(leaf.clone(), None, COS, SIN, positions=Packed(lengths), inplace=True)
        torch.autograd.grad(q, leaf, torch.empty_like(q))
    assert [(spec.in_place, spec.inverse) for spec in specs] == [(True, False)] * 2 + [(False, True)] * 2


def test_each_kernel_is_listed_once_in_the_order_of_the_calls() -> None:
    with jitrope.planning() as specs:
        rope(Q, K)
        first = list(specs)
        rope(Q[:, :7], K[:, :7])
        rope(Q, K, check=True)  # there are no values to check
        assert specs == first
        rope(Q, Q)
    assert specs[:4] == first
    assert len(specs) == 6  # both calls share the tiles for few and for many tokens


def test_a_launch_can_be_named_or_left_to_the_sizes() -> None:
    cases = (["grid_2d"], 4096, "grid_2d"), (["auto"], 4096, "token_linear"), (["auto"], 1, "grid_2d")
    for launches, tokens, want in cases:
        with jitrope.planning(launches) as specs:
            rope(Q[:, :tokens], K[:, :tokens])
        assert [spec.launch for spec in specs] == [want] * (2 if launches == ["grid_2d"] else 1)  # for few and for many
    with jitrope.planning(("auto",), sm_count=4096) as specs:
        rope(Q, K)
    assert [spec.launch for spec in specs] == ["grid_2d"]


def test_the_tokens_of_a_planned_call_do_not_matter() -> None:
    """Kernels of few tokens are listed for very many, too."""
    found = []
    for tokens in (64, 2_000_000):
        with jitrope.planning() as specs:
            jitrope.apply_rope(meta(1, tokens, 128, 128), None, cos_sin_cache=meta(tokens, 128, dtype=torch.float32))
        found.append({*specs})
    assert found[0] == found[1]


def test_a_decode_step_is_planned_as_tokens() -> None:
    q, ids = meta(4, 1, 32, 128), meta(4, 1, dtype=torch.int64)
    with jitrope.planning() as specs:
        rope(q, None, positions=ids)
        first = list(specs)
        rope(q.transpose(0, 1), None, positions=ids.transpose(0, 1))
    assert specs == first


def test_only_calls_on_meta_tensors_in_the_block_are_noted() -> None:
    q, cos = torch.randn(1, 5, 2, 64), torch.rand(5, 32)
    want = jitrope.apply_rope(q, None, cos, cos)[0]
    with jitrope.planning() as specs:
        assert torch.equal(jitrope.apply_rope(q, None, cos, cos)[0], want)
        compiled = torch.compile(lambda q: jitrope.apply_rope(q, None, cos, cos)[0], backend="aot_eager")
        assert torch.equal(compiled(q), want)
        with ThreadPoolExecutor() as pool:
            pool.submit(rope, Q, K).result()
        assert rope(Q[:, :0], K[:, :0])[0].shape == (1, 0, 32, 128)  # no kernel without tokens
    rope(Q, K)
    assert specs == []


def test_a_block_inside_another_has_its_own_list_and_a_failed_one_ends() -> None:
    with jitrope.planning() as outer:
        with jitrope.planning() as inner:
            rope(Q, K)
        with pytest.raises(InvalidInput, match="only H may differ"), jitrope.planning():
            rope(Q, K[:, :9])
        assert (len(inner), len(outer)) == (4, 0)
        rope(Q, K)
    assert outer == inner


@pytest.mark.parametrize(("words", "message"), [
    ({"launches": ["3d"]}, "launches is '3d'; it must be one of 'auto', 'token_linear'"),
    ({"sm_count": 0}, "sm_count is 0; it must be a whole number of at least 1"),
    ({"memory_speed": "fast"}, "memory_speed is 'fast'; it must be a finite number"),
])  # fmt: skip
def test_other_arguments_are_refused(words: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=f"^planning: {message}"), jitrope.planning(**words):
        pass
