"""Packed attention equals the softmax of each cell written out, values and gradients."""

import pytest
import torch

from cellmill.models.blocks import attention

LENGTHS = {
    "uneven": [3, 17, 1, 8],
    "equal": [6, 6, 6],
    "runs of equal cells": [4, 4, 9, 9, 9, 2],
    "one cell": [11],
    "cells without tokens": [0, 2, 0, 3],
    "short and long cells": [5, 300, 300, 257, 2],
}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def _qkv(tokens: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tokens, 3, 8, generator=generator).to(dtype).requires_grad_() for _ in range(3)
    ]


def _cu_seqlens(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], causal: bool
) -> torch.Tensor:
    """(T, h, d): softmax attention of one cell after another, in float32."""
    rows = []
    for q_cell, k_cell, v_cell in zip(*(x.float().split(lengths) for x in (q, k, v))):
        scores = torch.einsum("ihd,jhd->hij", q_cell, k_cell) / q.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(
                torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf
            )
        rows.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v_cell))
    return torch.cat(rows).to(q.dtype)


either_way = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
all_lengths = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)


@all_lengths
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@either_way
def test_packed_attention_equals_the_plain_formula(
    lengths: list[int], dtype: torch.dtype, causal: bool
) -> None:
    packed = _qkv(sum(lengths), dtype)
    other = _qkv(sum(lengths), dtype)
    out = attention(*packed, _cu_seqlens(lengths), lengths, causal)
    expected = written_out(*other, lengths, causal)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for ours, theirs in zip(packed, other):
        torch.testing.assert_close(
            ours.grad, theirs.grad, atol=4 * TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


def test_no_scores_are_kept_for_the_backward_pass() -> None:
    packed = _qkv(400, torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.numel()) or x, lambda x: x
    ):
        attention(*packed, _cu_seqlens([400]), [400])
    assert max(kept) == packed[0].numel() < 400 * 400


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the variable-length kernel needs a GPU")
@either_way
@all_lengths
def test_the_gpu_kernel_gives_what_is_written_out(lengths: list[int], causal: bool) -> None:
    q, k, v = (x.detach().cuda() for x in _qkv(sum(lengths), torch.bfloat16))
    out = attention(q, k, v, _cu_seqlens(lengths).cuda(), lengths, causal)
    torch.testing.assert_close(out, written_out(q, k, v, lengths, causal), atol=2e-2, rtol=2e-2)
