"""Workspace of the part after the blocks: elements above those kept for the backward pass, mostly logits.

It is measured in micro-batches of several sizes, since a chunked loss bounds it. Heads on cell
vectors make it grow with the cells of a micro-batch, others with its tokens.
"""

from dataclasses import dataclass

import numpy as np

from cellmill.models.build import ModelSpec
from cellmill.models.family import Model
from cellmill.planner.measure.load import PER_CELL_FRAC, Load, Rates, separate
from cellmill.planner.measure.passes import PassMeasurements, measure_passes

# tokens of the measured micro-batches: 256, 1,024, … 262,144
MEASURED_TOKENS = tuple(1 << power for power in range(8, 19, 2))


@dataclass(frozen=True)
class Workspace:
    """Peak of `finish` above its kept activations."""

    # (tokens, elements) of the measured micro-batches, whose cells are long
    by_tokens: tuple[tuple[float, float], ...]
    # A micro-batch needs as much as these tokens of long cells: its own, or its cells times the tokens
    # of a long one.
    equivalent_tokens: Rates

    def estimate(self, load: Load) -> float:
        """Estimate the elements for a micro-batch."""
        return self.interpolate(self.equivalent_tokens.total(load))

    def interpolate(self, tokens: float) -> float:
        """Interpolate the elements at a number of tokens of long cells, or extrapolate them."""
        measured, elements = zip(*self.by_tokens)
        inside = float(np.clip(tokens, measured[0], measured[-1]))
        estimate = float(np.interp(inside, measured, elements))
        # the line through the first or the last two
        end = 0 if tokens < inside else -2
        slope = elements[end + 1] - elements[end]
        slope /= measured[end + 1] - measured[end]
        return max(0.0, estimate + slope * (tokens - inside))


def measure_workspace(
    model: Model, spec: ModelSpec, token_multiple: int
) -> tuple[Rates, Workspace]:
    """Measure the elements that `finish` keeps for the backward pass, and its workspace.

    The workspace includes elements that do not grow with the micro-batch, such as the gradient of a
    table that a chunked loss makes in its forward pass.
    """
    long = [measure_passes(model, spec, n, token_multiple) for n in MEASURED_TOKENS]
    # cells of half the length, in all but the largest micro-batch
    short = [
        measure_passes(model, spec, n, token_multiple, length_divisor=2)
        for n in MEASURED_TOKENS[:-1]
    ]
    long_growth, long_kept = _measure_growth(long)
    short_growth, short_kept = _measure_growth(short)
    kept = separate(long_growth, long_kept, short_growth, short_kept)
    by_tokens = tuple(_measure_one(passes, kept) for passes in long)
    workspace = Workspace(by_tokens, Rates(per_token=1.0))
    total = sum(elements for _, elements in by_tokens[:-1])
    short_total = 0.0
    doubled_total = 0.0  # of long cells, twice as many: as many as there are short ones
    for passes in short:
        tokens, elements = _measure_one(passes, kept)
        short_total += elements
        doubled_total += workspace.interpolate(2 * tokens)
    if short_total <= (1 + PER_CELL_FRAC) * total:
        return kept, workspace
    cell_frac = min(1.0, (short_total - total) / (doubled_total - total))
    long_load = long[-1].load
    tokens_per_cell = long_load.tokens / long_load.cells
    equivalent_tokens = Rates(1.0 - cell_frac, cell_frac * tokens_per_cell)
    return kept, Workspace(by_tokens, equivalent_tokens)


def _measure_growth(measured: list[PassMeasurements]) -> tuple[Load, float]:
    """Subtract the second largest micro-batch from the largest: its load, and what `finish` keeps."""
    smaller, larger = measured[-2:]
    growth = Load(
        larger.load.tokens - smaller.load.tokens,
        larger.load.pairs - smaller.load.pairs,
        larger.load.cells - smaller.load.cells,
    )
    return growth, larger.finish.kept - smaller.finish.kept


def _measure_one(passes: PassMeasurements, kept: Rates) -> tuple[float, float]:
    """Return the tokens of a micro-batch, and the elements of its workspace."""
    peak = passes.finish.kept + passes.finish.workspace
    return passes.load.tokens, max(0.0, peak - kept.total(passes.load))
