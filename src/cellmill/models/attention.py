"""Attention inside each cell of a packed batch, bidirectional or causal, behind one function.

Backends, neither of which pads: variable-length flash attention on GPUs that have it, in half precision; otherwise
scaled-dot-product attention over runs of cells of equal length.

Legend: T tokens of the batch, h heads, d width of a head.
"""

from functools import cache
from importlib import import_module
from itertools import groupby
from typing import cast

import torch
from torch.nn import functional as F

from cellmill.parallel.torch_private import flash_attention


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    lengths: list[int],
    causal: bool = False,
) -> torch.Tensor:
    """(T, h, d) each -> (T, h, d): each token attends to its cell's, if `causal` to itself and earlier ones."""
    if not lengths:
        return v + 0 * (q + k)  # no cells: an empty result, through which gradients flow as zeros
    suits = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    if suits and _has_flash(q.device):
        longest, window = max(lengths), (-1, 0 if causal else -1)
        # only here: the module imports torch's compiler, half a second
        varlen_attn = import_module("torch.nn.attention.varlen").varlen_attn
        return cast(torch.Tensor, varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, window_size=window))
    return _by_length(q, k, v, lengths, causal)


@cache
def _has_flash(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere; the V100, which needs 16-mixed, is older


def _by_length(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], causal: bool) -> torch.Tensor:
    """Call the backend once for each run of cells of equal length: views, no copies."""
    lengths = sorted(lengths) if q.is_meta else lengths  # nothing is computed: fewer calls for the planner to measure
    runs = [(length, len(list(cells))) for length, cells in groupby(lengths)]
    sizes = [length * cells for length, cells in runs]
    parts = []
    for (length, cells), q_, k_, v_ in zip(runs, q.split(sizes), k.split(sizes), v.split(sizes)):
        # (cells, h, length, d)
        q_, k_, v_ = (x.unflatten(0, (cells, length)).transpose(1, 2) for x in (q_, k_, v_))
        # on the meta device torch would plan for attention that keeps its scores
        attend = flash_attention if q.is_meta else F.scaled_dot_product_attention
        parts.append(attend(q_, k_, v_, is_causal=causal).transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)
