"""Packed attention equals the softmax of each cell written out, values and gradients."""

import pytest
import torch

from cellmill.models.blocks import attention
from tests.checks import assert_near
from tests.models import seeded

LENGTHS = {
    "uneven": [3, 17, 1, 8],
    "equal": [6, 6, 6],
    "runs of equal cells": [4, 4, 9, 9, 9, 2],
    "one cell": [11],
    "cells without tokens": [0, 2, 0, 3],
    "short and long cells": [5, 300, 300, 257, 2],
}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def _qkv(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys and values (tokens, 3 heads, 8 columns)."""
    generator = seeded(0)
    inputs = []
    for _ in range(3):
        values = torch.randn(tokens, 3, 8, generator=generator)
        inputs.append(values.to(dtype).requires_grad_())
    return inputs


def _cu_seqlens(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], causal: bool
) -> torch.Tensor:
    """(T, h, d): softmax attention of each cell and head, one after the other, in float32."""
    _, n_heads, width = q.shape
    cells = []
    start = 0
    for length in lengths:
        end = start + length
        heads = []
        for head in range(n_heads):
            queries = q[start:end, head].float()
            keys = k[start:end, head].float()
            values = v[start:end, head].float()
            scores = queries @ keys.T / width**0.5
            if causal:
                is_later = torch.ones(length, length, device=q.device).triu(1).bool()
                scores = scores.masked_fill(is_later, -torch.inf)
            heads.append(scores.softmax(1) @ values)
        cells.append(torch.stack(heads, dim=1))
        start = end
    return torch.cat(cells).to(q.dtype)


either_way = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
all_lengths = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)


@all_lengths
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@either_way
def test_packed_attention_equals_the_plain_formula(
    lengths: list[int], dtype: torch.dtype, causal: bool
) -> None:
    tolerance = TOLERANCE[dtype]
    packed = _qkv(sum(lengths), dtype)
    plain = _qkv(sum(lengths), dtype)
    out = attention(*packed, _cu_seqlens(lengths), lengths, causal)
    expected = written_out(*plain, lengths, causal)
    assert out.dtype == dtype
    assert_near(out, expected, tolerance)
    weights = torch.randn(out.shape, generator=seeded(1)).to(dtype)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for ours, theirs in zip(packed, plain):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=4 * tolerance, rtol=tolerance)


def test_no_scores_are_kept_for_the_backward_pass() -> None:
    packed = _qkv(400, torch.float32)
    saved_sizes = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved_sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        attention(*packed, _cu_seqlens([400]), [400])
    assert max(saved_sizes) == packed[0].numel()
    assert max(saved_sizes) < 400 * 400


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the variable-length kernel needs a GPU")
@either_way
@all_lengths
def test_the_gpu_kernel_equals_the_plain_formula(lengths: list[int], causal: bool) -> None:
    qkv = [x.detach().cuda() for x in _qkv(sum(lengths), torch.bfloat16)]
    out = attention(*qkv, _cu_seqlens(lengths).cuda(), lengths, causal)
    assert_near(out, written_out(*qkv, lengths, causal), 2e-2)
