"""Random numbers as a pure function of a position, on any device.

A draw is splitmix64 (Steele, Lea & Flood 2014) folded over integer keys such as (seed, step, cell, place). There is
no generator to advance or to save: the same token gets the same draw in every layout, in every batch it falls into,
and when its block is recomputed.
"""

from __future__ import annotations

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


def keyed_bits(*keys: torch.Tensor | int) -> torch.Tensor:
    """63 random bits as non-negative int64, for each element of the broadcast keys (int64 tensors or ints).

    At least one key is a tensor.
    """
    return _shift(keyed_state(*keys), 1)


def keyed_state(*keys: torch.Tensor | int) -> torch.Tensor:
    """int64: the same before its last bit goes, into which more keys may be folded."""
    device = next(key.device for key in keys if isinstance(key, torch.Tensor))
    state = torch.zeros((), dtype=torch.int64, device=device)
    for key in keys:
        state = _mix(state ^ key)
    return state


def keyed_dropout(x: torch.Tensor, p: float, states: torch.Tensor) -> torch.Tensor:
    """Dropout of `x` (tokens, width) with probability `p`; what is dropped depends on (state, column).

    Parameters
    ----------
    states
        (tokens,) int64, of `keyed_state`: of the token and of the place in the network, so that no two drop the same.
    """
    columns = torch.arange(x.shape[1], device=x.device)
    kept = _shift(_mix(states[:, None] ^ columns[None, :]), 1) >= threshold(p)
    return x * kept.to(x.dtype) / (1 - p)


def threshold(probability: float) -> int:
    """The number that a share of `probability` of `keyed_bits` lies below."""
    return min(int(probability * 2.0**63), 2**63 - 1)


def _mix(state: torch.Tensor) -> torch.Tensor:
    state = state + _GOLDEN
    state = (state ^ _shift(state, 30)) * _FIRST
    state = (state ^ _shift(state, 27)) * _SECOND
    return state ^ _shift(state, 31)


def _shift(state: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; torch's is arithmetic."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
