"""Views of a cell: the part of its expression that a model is given, and the part that it has to
predict.

Tokens that are not in the view are not in the batch. Values of the view are computed by the run's
own tokenizer from the counts in it, so neither values nor the library size reveal the rest. With a
view loss the hidden part is a second view of the cell, in the same batch. Binomial parts of Poisson
counts are independent given the cell's expression (Neufeld et al. 2022, count splitting), which two
draws of the whole are not.

A view is a function of (seed, step, cell, place in the cell): equal in every layout and in every
batch.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cellmill.config.parts.objectives import (
    CellDecodingConfig,
    DenoiseConfig,
    HiddenShareConfig,
    PerturbationResponseConfig,
)
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.arrays import positions_in_rows
from cellmill.data.stream.batch import Batch, Tokenizer
from cellmill.models.counter_rng import host_state

Decoding = CellDecodingConfig | DenoiseConfig | PerturbationResponseConfig
# last keys of the draws: of a cell's shares, and of what is hidden
SHARE = 2
HIDE = 3
DROP_SHARE = 4


@dataclass(frozen=True, kw_only=True)
class ViewBatch(Batch):
    """The shown tokens, and the profile to predict: entries in the order of their cells."""

    profile_cell: Tensor  # (entries,) int64: index of the cell in the batch
    profile_gene: Tensor  # (entries,) int64: token id
    profile_count: Tensor  # (entries,) int64, above 0
    paired: int = 0
    """Cells whose hidden part is in the batch too: that of cell i is cell i + paired. 0 without
    second views.
    """


def draw_view(
    batch: Batch, tokenizer: Tokenizer, config: Decoding, *, seed: int, step: int
) -> ViewBatch:
    """Return the view of each cell of a batch with counts, on the CPU."""
    assert batch.counts is not None, "the batch has no counts"
    genes = batch.genes.numpy()
    counts = batch.counts.numpy()
    ends = batch.cu_seqlens.numpy()
    cell = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    state = host_state(batch.cells.numpy(), seed, step)
    shown = counts
    if config.view != "thin":
        share = draw_share(state, config, SHARE if config.view == "drop" else DROP_SHARE)
        shown = counts * (
            uniform(host_state(positions_in_rows(ends), HIDE, state=state[cell])) >= share[cell]
        )
    if config.view != "drop":
        at = np.flatnonzero(shown)  # a draw of 0 is 0, and takes no random number
        drawn = _thinned(
            shown[at],
            np.searchsorted(at, ends),
            draw_share(state, config),
            host_state(HIDE, state=state),
        )
        shown = shown.copy()
        shown[at] -= drawn
    hidden = counts - shown
    predicted = counts if config.target == "all" else hidden
    at = np.flatnonzero(predicted)
    profile: dict[str, Any] = {
        f"profile_{name}": torch.from_numpy(array[at])
        for name, array in (("cell", cell), ("gene", genes), ("count", predicted))
    }
    per_cell = batch.arrays("cell")
    paired = 0
    if config.view_loss is not None:
        genes = np.concatenate([genes, genes])
        shown = np.concatenate([shown, hidden])
        ends = np.concatenate([ends, ends[1:] + ends[-1]])
        paired = len(batch.lengths)
        per_cell = {name: torch.cat([array, array]) for name, array in per_cell.items()}
        # ids of second views differ, and with them the keys of their dropout
        per_cell["cells"] = torch.cat([batch.cells, ~batch.cells])
    return ViewBatch(
        **tokens_of(genes, shown, ends, tokenizer), **per_cell, **profile, paired=paired
    )


def draw_share(state: np.ndarray, config: HiddenShareConfig, key: int = SHARE) -> np.ndarray:
    """(cells,) float64: the share of each cell that is hidden; `state` is of cell, seed and step."""
    low = config.min_hidden_frac
    high = config.max_hidden_frac
    return low + (high - low) * uniform(host_state(key, state=state))


def tokens_of(
    genes: np.ndarray, counts: np.ndarray, ends: np.ndarray, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Fields per token and lengths of a batch, of genes and counts, (n,) int64 each, cut into cells
    by `ends`.

    Values are made from these counts alone; a count of 0 is no token.
    """
    at = np.flatnonzero(counts)
    counts = counts[at]
    starts = np.searchsorted(at, ends)
    ids, values, cu_seqlens = tokenizer.tokenize(
        (genes[at] - len(SPECIAL)).astype(np.int32), counts, starts
    )
    numbers = torch.from_numpy(values)
    return {
        "genes": torch.from_numpy(ids).long(),
        "values": numbers if numbers.is_floating_point() else numbers.long(),
        "counts": torch.from_numpy(counts),
        "cu_seqlens": torch.from_numpy(cu_seqlens),
        "lengths": np.diff(starts).tolist(),
    }


def uniform(state: np.ndarray) -> np.ndarray:
    """Float64 in [0, 1) of the upper 53 bits of each uint64."""
    return (state >> np.uint64(11)).view(np.int64) * 2.0**-53


def _thinned(
    counts: np.ndarray, ends: np.ndarray, share: np.ndarray, state: np.ndarray
) -> np.ndarray:
    """(tokens,) int64: a binomial draw of each count with its cell's probability `share`, keyed by
    its `state`.
    """
    out = np.empty_like(counts)
    bounds = pairwise(ends.tolist())
    # one generator that is given each cell's key: a new one draws entropy of the system first,
    # which is not used
    philox = np.random.Philox(key=0)
    generator = np.random.Generator(philox)
    start = philox.state
    for (first, end), probability, key in zip(
        bounds, share.tolist(), (state >> np.uint64(1)).tolist()
    ):
        start["state"]["key"][0] = key
        philox.state = start
        out[first:end] = generator.binomial(counts[first:end], probability)
    return out
