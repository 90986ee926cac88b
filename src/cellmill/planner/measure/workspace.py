"""Sizes of `finish`, the part of a model after the blocks: its kept activations and its workspace.

The workspace is what `finish` allocates at its peak, above the elements that it keeps for the backward
pass. The workspace consists mostly of logits. A chunked loss bounds the logits, so the workspace is measured in
micro-batches of several sizes. Heads on cell vectors make the workspace grow with the cells of a
micro-batch. Other heads make it grow with the tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cellmill.models.build import ModelSpec
from cellmill.models.family import Model
from cellmill.planner.measure.load import MIN_DIFFERENCE_FRAC, Load, Rates, fit_rates
from cellmill.planner.measure.passes import PassMeasurements, measure_passes

# tokens of the measured micro-batches: 256, 1,024, … 262,144
MEASURED_TOKENS = tuple(1 << power for power in range(8, 19, 2))

TokensAndWorkspace = tuple[float, float]  # tokens of a micro-batch, and elements of its workspace


@dataclass(frozen=True)
class Workspace:
    """Peak elements of `finish` above its kept activations, for micro-batches of any size."""

    by_tokens: tuple[TokensAndWorkspace, ...]  # of each measured micro-batch of long cells
    # A micro-batch has the workspace of a measured one with this many tokens. Where the workspace grows
    # with tokens, these are the micro-batch's own tokens. Where the workspace grows with cells, these are
    # its cells times the tokens of a measured cell. In between, these are a weighted mean of the two.
    equivalent_tokens: Rates

    def estimate(self, load: Load) -> float:
        """Estimate the elements for a micro-batch."""
        return self.interpolate(self.equivalent_tokens.total(load))

    def interpolate(self, tokens: float) -> float:
        """Estimate the elements for a micro-batch of long cells that has `tokens` tokens."""
        measured, elements = zip(*self.by_tokens)
        inside = float(np.clip(tokens, measured[0], measured[-1]))
        estimate = float(np.interp(inside, measured, elements))
        # outside the measured range, follow the line through the first or the last two measurements
        first = 0 if tokens < inside else -2
        more_elements = elements[first + 1] - elements[first]
        slope = more_elements / (measured[first + 1] - measured[first])
        return max(0.0, estimate + slope * (tokens - inside))


class FinishSize(NamedTuple):
    """Measured elements of `finish`."""

    kept: Rates  # kept for the backward pass
    workspace: Workspace


def measure_finish(model: Model, spec: ModelSpec, token_multiple: int) -> FinishSize:
    """Measure the elements that `finish` keeps for the backward pass, and its workspace.

    The workspace includes elements that do not grow with the micro-batch. An example is the gradient of
    a table, which a chunked loss makes in its forward pass.
    """
    long = [measure_passes(model, spec, n, token_multiple) for n in MEASURED_TOKENS]
    # cells of half the length, in micro-batches of all sizes but the largest
    short = [
        measure_passes(model, spec, n, token_multiple, length_divisor=2)
        for n in MEASURED_TOKENS[:-1]
    ]

    # Elements that do not grow with the micro-batch are in every measurement. They cancel in the
    # difference between two sizes, so they count as workspace and not as kept.
    kept = fit_rates(*_subtract_largest_two(long), *_subtract_largest_two(short))

    by_tokens = tuple(_find_tokens_and_workspace(passes, kept) for passes in long)
    short_by_tokens = [_find_tokens_and_workspace(passes, kept) for passes in short]
    long_cell_tokens = long[-1].load.tokens / long[-1].load.cells
    equivalent_tokens = _fit_equivalent_tokens(by_tokens, short_by_tokens, long_cell_tokens)
    return FinishSize(kept, Workspace(by_tokens, equivalent_tokens))


def _subtract_largest_two(measured: list[PassMeasurements]) -> tuple[Load, float]:
    """Subtract the second largest micro-batch from the largest.

    Return the difference of their loads, and of the elements that `finish` keeps.
    """
    smaller, larger = measured[-2:]
    load = Load(
        larger.load.tokens - smaller.load.tokens,
        larger.load.pairs - smaller.load.pairs,
        larger.load.cells - smaller.load.cells,
    )
    return load, larger.finish.kept - smaller.finish.kept


def _find_tokens_and_workspace(passes: PassMeasurements, kept: Rates) -> TokensAndWorkspace:
    """Find the tokens of a measured micro-batch, and its peak elements above the `kept` ones."""
    peak = passes.finish.kept + passes.finish.workspace
    return passes.load.tokens, max(0.0, peak - kept.total(passes.load))


def _fit_equivalent_tokens(
    long_by_tokens: tuple[TokensAndWorkspace, ...],
    short_by_tokens: list[TokensAndWorkspace],
    long_cell_tokens: float,
) -> Rates:
    """Fit `Workspace.equivalent_tokens` to micro-batches of long cells and of short cells.

    A long cell has `long_cell_tokens` tokens, and a short cell half as many. If the workspace grows with
    tokens, a micro-batch of short cells needs as much as a micro-batch of long cells with equal tokens. If
    the workspace grows with cells, a micro-batch of short cells needs as much as a micro-batch of long
    cells with twice the tokens.
    """
    short_total = sum(elements for _, elements in short_by_tokens)
    # of long cells with equal tokens: the largest micro-batch has no counterpart of short cells
    long_total = sum(elements for _, elements in long_by_tokens[:-1])
    if short_total <= (1 + MIN_DIFFERENCE_FRAC) * long_total:
        return Rates(per_token=1.0)
    # of long cells with twice the tokens: these are as many cells as in the short micro-batches
    workspace = Workspace(long_by_tokens, Rates(per_token=1.0))
    doubled_total = sum(workspace.interpolate(2 * tokens) for tokens, _ in short_by_tokens)
    # 0 if the workspace grows with tokens only, 1 if it grows with cells only
    more = short_total - long_total
    cell_frac = more / max(more, doubled_total - long_total)
    return Rates(1.0 - cell_frac, cell_frac * long_cell_tokens)
