"""Bidirectional attention inside each cell of a packed batch, behind one function.

On a GPU in half precision, variable-length flash attention where the GPU has it; on a CPU tiles of plain matrix
products, where cells are long; elsewhere scaled-dot-product attention over runs of cells of equal length. Nothing is
padded in any of them. The padded form is the oracle of the tests.

Legend: T tokens of the batch, h heads, d width of a head.
"""

from __future__ import annotations

from functools import cache
from itertools import groupby

import torch
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.nn.utils.rnn import pad_sequence

from cellmill.models.cpu_attention import tiled_attention

LONG = 256
"""Tokens of a cell from which tiles of plain products are faster than torch's kernel on a CPU."""


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, lengths: list[int]
) -> torch.Tensor:
    """Attention of each token to all tokens of its cell.

    Parameters
    ----------
    q, k, v
        (T, h, d).
    cu_seqlens, lengths
        As in `TensorBatch`: where cells begin, and their lengths.

    Returns
    -------
    (T, h, d), the dtype of `q`.
    """
    if not lengths:
        return v + 0 * (q + k)  # no cells: nothing to attend to, but gradients flow, as zeros
    if _suits_varlen(q):
        longest = max(lengths)
        return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest)
    return _by_length(q, k, v, lengths)


def _suits_varlen(q: torch.Tensor) -> bool:
    """Flash attention's own conditions."""
    suits = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return suits and _has_flash(q.device)


@cache
def _has_flash(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere; a V100, whom 16-mixed is for, is older


def _by_length(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Neighbouring cells of the same length are one call: views, no copies."""
    runs = [(length, len(list(cells))) for length, cells in groupby(lengths)]
    sizes = [length * cells for length, cells in runs]
    parts = []
    tiled = q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16)
    for (length, cells), q_, k_, v_ in zip(runs, q.split(sizes), k.split(sizes), v.split(sizes)):
        if tiled and length >= LONG:
            parts.append(tiled_attention(q_, k_, v_, [length] * cells))
            continue
        batched = [x.unflatten(0, (cells, length)).transpose(1, 2) for x in (q_, k_, v_)]  # (cells, h, length, d)
        # on the meta device torch would plan for attention that keeps its scores
        attend = _flash_on_meta if q.is_meta else F.scaled_dot_product_attention
        parts.append(attend(*batched).transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)


def _flash_on_meta(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]
    return out


def attention_padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """The same, padded to the longest cell with a mask: slow, obvious, the reference of tests and benchmarks."""
    q_, k_, v_ = (pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2) for x in (q, k, v))
    inside = torch.arange(max(lengths), device=q.device) < torch.tensor(lengths, device=q.device)[:, None]
    out = F.scaled_dot_product_attention(q_, k_, v_, attn_mask=inside[:, None, None, :]).transpose(1, 2)
    return out[inside]
