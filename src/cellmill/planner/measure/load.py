"""Work of a micro-batch or a step, and rates of what grows with it."""

from typing import NamedTuple

# What grows with the cells is told apart if cells of half the length need this fraction more per token.
# Random fractions make a smaller difference.
PER_CELL_FRAC = 0.05


class Load(NamedTuple):
    """The three quantities that FLOPs and bytes are proportional to."""

    tokens: float
    pairs: float  # (query, key) pairs of attention within cells
    cells: float


class Rates(NamedTuple):
    """Elements or FLOPs per token, and further ones per cell."""

    per_token: float = 0.0
    per_cell: float = 0.0  # of blocks whose rows are cells, and of heads on the cell embedding

    def total(self, load: Load) -> float:
        return self.per_token * load.tokens + self.per_cell * load.cells


ZERO = Rates()


def separate(long: Load, long_total: float, short: Load, short_total: float) -> Rates:
    """Separate totals over long and over short cells into a rate per token and one per cell."""
    per_long_token = long_total / long.tokens
    per_short_token = short_total / short.tokens
    if per_short_token <= (1 + PER_CELL_FRAC) * per_long_token:
        return Rates(per_long_token)
    # solve per_token + per_cell * cells / tokens = total / tokens for both lengths
    cells_per_long_token = long.cells / long.tokens
    cells_per_short_token = short.cells / short.tokens
    per_cell = per_short_token - per_long_token
    per_cell /= cells_per_short_token - cells_per_long_token
    return Rates(max(0.0, per_long_token - per_cell * cells_per_long_token), per_cell)
