"""Cells as tokens: a gene and a value each, packed one cell after another without padding, cut into
micro-batches.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import pairwise
from math import nan
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np

from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.recycled import recycled_empty
from cellmill.data.rows import SparseCounts

Array = Any  # numpy arrays as read, torch tensors in training (`models.batch.to_tensors`)


@dataclass(frozen=True)
class Per:
    """Axis along which a batch field runs, and its padding value."""

    axis: Literal["token", "cell"]
    pad: float = 0


TOKEN = {"per": Per("token")}
CELL = {"per": Per("cell")}


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank, without padding.

    It may be empty: no cells, no tokens, `cu_seqlens` [0]. Arrays per token or per cell are
    declared only here, and cut, padded and copied by `map`. Objectives read all of them, a model
    those in `models.batch.SHOWN`.
    """

    # (tokens,) token ids: int32, int64 as tensors
    genes: Array = field(metadata=TOKEN)
    # (tokens,) float32 (continuous), or integers: bins from 1, ranks from 0
    values: Array = field(metadata=TOKEN)
    # (cells + 1,) int32: offset of each cell's first token, and the number of tokens
    cu_seqlens: Array
    # (cells,) int64 stable ids: index in split or file
    cells: Array = field(metadata={"per": Per("cell", pad=-1)})
    # (tokens,) int64, if the objective needs them
    counts: Array | None = field(default=None, metadata=TOKEN)
    # (cells, columns) level codes of obs columns, 0 unknown
    levels: Array | None = field(default=None, metadata=CELL)
    # (cells, columns) float64
    numbers: Array | None = field(default=None, metadata={"per": Per("cell", pad=nan)})
    # (cells, width) float32
    teacher: Array | None = field(default=None, metadata={"per": Per("cell", pad=nan)})
    # (tokens,) int64: row of a covariate's token (`models.cell_encoder`), or 0
    covariate_rows: Array | None = field(default=None, metadata=TOKEN)
    # tokens of each cell: reading them never waits for a device
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.lengths:
            lengths = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).tolist()
            object.__setattr__(self, "lengths", lengths)

    @classmethod
    @cache
    def _axes(cls) -> dict[str, Per]:
        return {f.name: f.metadata["per"] for f in fields(cls) if "per" in f.metadata}

    def map(self, change: Callable[[Per, Array], Array], **replaced: Any) -> Self:
        """Return the batch with `change` applied to every array, except for fields in `replaced`."""
        fields_of_batch: dict[str, Any] = {"lengths": []}
        for name, per in self._axes().items():
            array = getattr(self, name)
            if array is not None and name not in replaced:
                fields_of_batch[name] = change(per, array)
        return replace(self, **fields_of_batch | replaced)

    def arrays(self, axis: Literal["token", "cell"]) -> dict[str, Array]:
        """Present arrays of an axis, by field."""
        names = [name for name, per in self._axes().items() if per.axis == axis]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def with_rows(self, per_cell: Mapping[str, Array | None]) -> Self:
        """Return the batch with added per-cell fields: each array in `per_cell` is indexed by `cells`;
        None is skipped.
        """
        added = {name: rows[self.cells] for name, rows in per_cell.items() if rows is not None}
        return replace(self, **added) if added else self

    def cut(self, first: int, last: int) -> Self:
        """Cells `first` up to `last`, without `last`."""
        ends = self.cu_seqlens[first : last + 1]
        spans = {"token": slice(int(ends[0]), int(ends[-1])), "cell": slice(first, last)}
        return self.map(
            lambda per, array: array[spans[per.axis]],
            cu_seqlens=ends - ends[0],
            lengths=self.lengths[first:last],
        )


class Tokenized(NamedTuple):
    """Tokens of some cells, as in `Batch`."""

    ids: np.ndarray  # (tokens,) int32
    values: np.ndarray  # (tokens,) of the tokenizer's `dtype`
    cu_seqlens: np.ndarray  # (cells + 1,) int32


class Tokenizer(Protocol):
    """Implementation of a `config.parts.tokens.Tokens`, made from those options; pure and vectorised over
    cells.

    The tokens of a cell are its first `max_tokens` genes, in their order.
    """

    dtype: np.dtype  # dtype of the values
    # if False, only the genes that fit into `max_tokens` are read, and no counts
    needs_counts: bool

    def tokenize(self, cells: SparseCounts) -> Tokenized:
        """Tokens of cells whose genes, rows of the vocabulary, are in rank order.

        Their counts are above 0, or None unless `needs_counts`.
        """


class Prefixes:
    """The first `max_tokens` genes of each cell.

    Attributes: the whole `cells`; `lengths` `(cells,)` and `cu_seqlens` `(cells + 1,)` int32 of
    what is kept.
    """

    def __init__(self, cells: SparseCounts, max_tokens: int) -> None:
        self.cells = cells
        self.lengths = np.minimum(cells.lengths, max_tokens)
        self.cu_seqlens = np.zeros(cells.n_cells + 1, np.int32)
        self.lengths.cumsum(out=self.cu_seqlens[1:])

    def copy(self, array: np.ndarray, dtype: np.dtype | type) -> np.ndarray:
        """Kept entries of `array`, `(nonzeros,)`, as `dtype`, in new memory."""
        kept = recycled_empty(self.cu_seqlens[-1], dtype)
        if self._is_whole():
            kept[:] = array
        else:
            first = self.cells.offsets[:-1].tolist()
            parts = [array[start : start + n] for start, n in zip(first, self.lengths.tolist())]
            np.concatenate(parts, out=kept, casting="unsafe")
        return kept

    def token_ids(self) -> np.ndarray:
        """Token ids, int32, of the kept genes."""
        genes = self.cells.genes
        if self._is_whole():
            ids = recycled_empty(self.cu_seqlens[-1], np.int32)
            return np.add(genes, len(SPECIAL), out=ids)
        ids = self.copy(genes, np.int32)
        ids += len(SPECIAL)
        return ids

    def _is_whole(self) -> bool:
        """True if no cell is cut."""
        return bool(self.cu_seqlens[-1] == self.cells.offsets[-1])


def make_batch(
    tokenizer: Tokenizer,
    cells: SparseCounts,
    ids: np.ndarray,
    with_counts: bool,
    **per_cell: Any,
) -> Batch:
    """Batch of `cells`, whose ids are `ids`, `(cells,)`, by `tokenizer.tokenize`.

    It has the counts of its tokens if `with_counts`, and further fields `per_cell`.
    """
    tokens = tokenizer.tokenize(cells)
    token_counts = None
    if with_counts:
        n_tokens = np.diff(tokens.cu_seqlens)
        counted_tokens = Prefixes(cells, int(n_tokens.max(initial=0)))
        token_counts = counted_tokens.copy(cells.counts, np.int64)
    return Batch(*tokens, ids, token_counts, **per_cell)


def empty_batch(dtype: np.dtype, with_counts: bool = False, **per_cell: Any) -> Batch:
    """Batch of no cells, with values of `dtype`, and with counts if `with_counts`."""
    none = np.empty(0, np.int64)
    counts = none if with_counts else None
    return Batch(
        np.empty(0, np.int32),
        np.empty(0, dtype),
        np.zeros(1, np.int32),
        none,
        counts,
        **per_cell,
    )


def greedy_borders(lengths: np.ndarray, token_budget: int) -> list[int]:
    """Borders `[0, ..., cells]` of micro-batches of at most `token_budget` tokens, filled greedily
    in order.

    `lengths`, `(cells,)`, are tokens of each cell. A cell above the budget is a micro-batch of its
    own.
    """
    total = lengths.cumsum()
    borders = [0]
    first = 0
    while first < len(lengths):
        used = int(total[first - 1]) if first else 0
        first = max(int(total.searchsorted(used + token_budget, side="right")), first + 1)
        borders.append(first)
    return borders


def count_greedy(lengths: np.ndarray, n_cells: np.ndarray, token_budget: int) -> np.ndarray:
    """Number of micro-batches that `greedy_borders` makes of each rank's cells, `(ranks,)`.

    `lengths`, `(cells,)`, are tokens of all ranks' cells, rank by rank, `n_cells` of them on each.
    """
    total = np.zeros(len(lengths) + 1, np.int64)
    lengths.cumsum(out=total[1:])
    ends = n_cells.cumsum()
    first = ends - n_cells
    numbers = np.minimum(n_cells, 1)
    # ranks with cells for a further micro-batch: at first, those whose cells do not fit in one
    ranks = np.flatnonzero(total[ends] - total[first] > token_budget)
    while len(ranks):
        fitting = np.searchsorted(total, total[first[ranks]] + token_budget, side="right") - 1
        first[ranks] = np.maximum(np.minimum(fitting, ends[ranks]), first[ranks] + 1)
        ranks = ranks[first[ranks] < ends[ranks]]
        numbers[ranks] += 1
    return numbers


def even_borders(lengths: np.ndarray, max_batches: int) -> list[int]:
    """Borders of at most `max_batches` micro-batches that minimise the largest one."""
    low = int(lengths.max(initial=1))
    high = int(lengths.sum())

    def fits(budget: int) -> bool:
        return len(greedy_borders(lengths, budget)) - 1 <= max_batches

    # the smallest budget in low:high that fits, else high
    return greedy_borders(lengths, low + bisect_left(range(low, high), True, key=fits))


def split_batch(batch: Batch, token_budget: int) -> Iterator[Batch]:
    """Parts of `batch` in order, of at most `token_budget` tokens if they have several cells."""
    for first, last in pairwise(greedy_borders(np.diff(batch.cu_seqlens), token_budget)):
        yield batch.cut(first, last)
