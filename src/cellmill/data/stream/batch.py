"""Cells as tokens: a gene and a value each, packed one cell after another without padding."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from math import nan
from typing import Any, Literal, Self

import numpy as np

Array = Any  # numpy arrays as read, torch tensors in training (`models.batch.to_tensors`)


@dataclass(frozen=True)
class FieldAxis:
    """The first axis of a batch field, tokens or cells, and the value that pads it."""

    name: Literal["token", "cell"]
    pad: float = 0


# metadata of a field with an entry per token or cell
_PER_TOKEN = {"axis": FieldAxis("token")}
_PER_CELL = {"axis": FieldAxis("cell")}
_PER_CELL_PAD_NAN = {"axis": FieldAxis("cell", pad=nan)}
_PER_CELL_PAD_MINUS_ONE = {"axis": FieldAxis("cell", pad=-1)}


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one data rank, without padding.

    It may be empty: no cells, no tokens, `cu_seqlens` [0]. Arrays per token or per cell are
    declared only here, and sliced, padded and copied by `map`. Objectives read all of them, a model
    those in `models.batch.SHOWN`.
    """

    # (tokens,) int32, int64 as tensors: a gene's row in the vocabulary + len(SPECIAL)
    token_ids: Array = field(metadata=_PER_TOKEN)
    # (tokens,), by the tokenizer's value kind. scalar: numbers, float32. class: integers, from 1 for
    # detected genes, 0 for undetected ones. place: positions in the cell, from 0. none: not read
    values: Array = field(metadata=_PER_TOKEN)
    # (cells + 1,) int32: offset of each cell's first token, and the number of tokens
    cu_seqlens: Array
    # (cells,) int64: index of each cell in its split or file
    cell_ids: Array = field(metadata=_PER_CELL_PAD_MINUS_ONE)
    # (tokens,) int64: the gene's count in the cell, or 0; None unless the objective needs it
    counts: Array | None = field(default=None, metadata=_PER_TOKEN)
    # (cells, columns) int32: level codes of obs columns, 0 unknown; a column with missing values has a
    # last level for these
    levels: Array | None = field(default=None, metadata=_PER_CELL)
    # (cells, columns) float64: values of numeric obs columns, NaN unknown
    numbers: Array | None = field(default=None, metadata=_PER_CELL_PAD_NAN)
    # (cells, width) float32: a teacher model's vector of each cell
    teacher: Array | None = field(default=None, metadata=_PER_CELL_PAD_NAN)
    # (tokens,) int64: for a covariate's token its row in the embedding of covariates, else 0
    # (`models.cell_encoder`)
    covariate_rows: Array | None = field(default=None, metadata=_PER_TOKEN)
    # number of tokens of each cell, on the CPU: reading it never waits for a device
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.lengths:
            lengths = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).tolist()
            object.__setattr__(self, "lengths", lengths)

    @classmethod
    @cache
    def _axes(cls) -> dict[str, FieldAxis]:
        return {f.name: f.metadata["axis"] for f in fields(cls) if "axis" in f.metadata}

    def map(self, change: Callable[[FieldAxis, Array], Array], **replaced: Any) -> Self:
        """Return the batch with `change` applied to every array per token or per cell.

        Fields in `replaced` get the given value instead; `cu_seqlens` changes only in this way. Unless
        they are in `replaced`, lengths are computed again from `cu_seqlens`, which on a device waits
        for it.
        """
        fields_of_batch: dict[str, Any] = {"lengths": []}
        for name, axis in self._axes().items():
            array = getattr(self, name)
            if array is not None and name not in replaced:
                fields_of_batch[name] = change(axis, array)
        return replace(self, **fields_of_batch | replaced)

    def arrays(self, axis: Literal["token", "cell"]) -> dict[str, Array]:
        """Return the arrays of an axis that are not None, by field."""
        arrays = {}
        for name, field_axis in self._axes().items():
            array = getattr(self, name)
            if array is not None and field_axis.name == axis:
                arrays[name] = array
        return arrays

    def with_cell_fields(self, arrays_by_field: Mapping[str, Array | None]) -> Self:
        """Return the batch with further fields per cell, each taken from an array over all cell ids.

        A field whose array is None is left as it is.
        """
        added = {}
        for name, array in arrays_by_field.items():
            if array is not None:
                added[name] = array[self.cell_ids]
        return replace(self, **added) if added else self

    def slice_cells(self, start: int, stop: int) -> Self:
        """Return the batch of cells `start:stop`, whose arrays but `cu_seqlens` share memory with this one's."""
        offsets = self.cu_seqlens[start : stop + 1]
        slices = {
            "token": slice(int(offsets[0]), int(offsets[-1])),
            "cell": slice(start, stop),
        }
        return self.map(
            lambda axis, array: array[slices[axis.name]],
            cu_seqlens=offsets - offsets[0],
            lengths=self.lengths[start:stop],
        )


def empty_batch(dtype: np.dtype, with_counts: bool = False) -> Batch:
    """Make a batch of no cells, with values of `dtype`, and with counts if `with_counts`."""
    return Batch(
        token_ids=np.empty(0, np.int32),
        values=np.empty(0, dtype),
        cu_seqlens=np.zeros(1, np.int32),
        cell_ids=np.empty(0, np.int64),
        counts=np.empty(0, np.int64) if with_counts else None,
    )
