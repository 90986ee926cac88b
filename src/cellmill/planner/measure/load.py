"""The work of a micro-batch or a step, and rates of the quantities that grow with this work."""

from typing import NamedTuple

# `fit_rates` finds a rate per cell only if the total per token is larger over short cells, by more than
# this fraction. Random masks make a smaller difference.
MIN_DIFFERENCE_FRAC = 0.05


class Load(NamedTuple):
    """The three quantities that FLOPs and bytes are proportional to."""

    tokens: float
    pairs: float  # (query, key) pairs of attention within cells
    cells: float


class Rates(NamedTuple):
    """Elements or FLOPs per token, and further ones per cell."""

    per_token: float = 0.0
    # above 0 in blocks that compute one row per cell, and in heads on the cell embedding
    per_cell: float = 0.0

    def total(self, load: Load) -> float:
        return self.per_token * load.tokens + self.per_cell * load.cells


ZERO = Rates()


def fit_rates(long: Load, long_total: float, short: Load, short_total: float) -> Rates:
    """Fit a rate per token and a rate per cell to two totals: over long cells, and over short cells.

    A quantity that grows with the tokens has the same total per token for both lengths. A quantity that
    grows with the cells has a larger one for short cells, since a token of a short cell is a larger
    fraction of its cell. If the difference is at most MIN_DIFFERENCE_FRAC, the rate per cell is 0.
    """
    long_per_token = long_total / long.tokens
    short_per_token = short_total / short.tokens
    if short_per_token <= (1 + MIN_DIFFERENCE_FRAC) * long_per_token:
        return Rates(long_per_token)
    # solve per_token + per_cell * cells / tokens = total / tokens for both lengths
    long_cells_per_token = long.cells / long.tokens
    short_cells_per_token = short.cells / short.tokens
    per_cell = (short_per_token - long_per_token) / (short_cells_per_token - long_cells_per_token)
    return Rates(max(0.0, long_per_token - per_cell * long_cells_per_token), per_cell)
