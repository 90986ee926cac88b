"""Choice of the obs column of the batch, for `batch_column: auto`. Torch-free."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from cellmill.config.corpus import DATASET

AUTO = "auto"
CANDIDATES = ("batch", "donor", DATASET)
"""obs columns of shards, in the order in which they are tried."""
BIOLOGY = ("condition", "perturbation")
"""Roles that an embedding should keep."""
MIN_BATCH_CELLS = 100
"""Training cells that a batch needs to count; docs/quality.md has no measurement of fewer."""
MIN_COVERED_FRAC = 0.5  # of the training cells, in batches that count
MIN_PURE_FRAC = 0.95  # of the cells that have the most frequent value of their batch
ADVERSARY = 0.1
"""`batch_adversary` of a chosen batch: docs/quality.md compares strengths."""


class CellCounts(Protocol):
    """Numbers of training cells (`parts.objective.Facts`)."""

    def cells_by_level(self, column: str) -> Mapping[str, int]:
        """Number of cells of each level."""

    def cells_by_levels(self, column: str, other: str) -> Mapping[tuple[str, str], int]:
        """Number of cells of each pair of levels."""


class BatchChoice(NamedTuple):
    """The column of the batch, and how it was chosen."""

    column: str | None
    adversary: float | None  # `batch_adversary`
    reason: str


def choose_batch(facts: CellCounts, labels: Sequence[str]) -> BatchChoice:
    """Return the first candidate with two batches of `MIN_BATCH_CELLS` cells, or none.

    These batches hold `MIN_COVERED_FRAC` of the training cells. A column that is one of `labels`, or
    determines a label, condition or perturbation, is no batch: the model would remove that too.
    """
    rejected = []
    n_cells = sum(facts.cells_by_level(DATASET).values())
    for column in CANDIDATES:
        counts = facts.cells_by_level(column)
        sizes = [n for n in counts.values() if n >= MIN_BATCH_CELLS]
        values = "value" if len(sizes) == 1 else "values"
        described = (
            f"{column} has {len(sizes)} {values} of at least {MIN_BATCH_CELLS} training cells"
        )
        determined = _find_determined(facts, column, labels)
        if column in labels:
            rejected.append(f"{column} is a label")
        elif not counts:
            rejected.append(f"there is no {column}")
        elif len(sizes) < 2:
            rejected.append(described)
        elif sum(sizes) < MIN_COVERED_FRAC * n_cells:
            rejected.append(f"{described}, but these are {sum(sizes):,} of {n_cells:,}")
        elif determined is not None:
            rejected.append(f"{column} determines {determined}")
        else:
            adversary = ADVERSARY if column == CANDIDATES[0] else None
            rule = (
                f"adversary {adversary:g}"
                if adversary
                else f"{column} may be biology: no adversary"
            )
            return BatchChoice(column, adversary, "; ".join([described, rule, *rejected]))
    return BatchChoice(None, None, f"none: {'; '.join(rejected)}")


def _find_determined(facts: CellCounts, column: str, labels: Sequence[str]) -> str | None:
    """Return a label, condition or perturbation that the batch determines, or None."""
    for other in dict.fromkeys((*labels, *BIOLOGY)):
        if other != column and _is_determined(facts, column, other):
            return other
    return None


def _is_determined(facts: CellCounts, column: str, other: str) -> bool:
    """Return True if nearly all cells have the value of `other` most frequent in their batch."""
    pairs = facts.cells_by_levels(column, other)
    if len({value for _, value in pairs}) < 2:
        return False
    largest = Counter[str]()
    for (batch, _), n in pairs.items():
        largest[batch] = max(largest[batch], n)
    return largest.total() >= MIN_PURE_FRAC * sum(pairs.values())
