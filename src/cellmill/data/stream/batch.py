"""A batch of cells as tokens. Each token is a gene with a value. Cells follow each other without padding."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from math import nan
from typing import Any, Literal, Self

import numpy as np

Array = Any  # numpy arrays as read, torch tensors in training (`models.batch.to_tensors`)


@dataclass(frozen=True)
class FieldAxis:
    """The first axis of a field of `Batch`: it has an entry per token, or an entry per cell."""

    name: Literal["token", "cell"]
    pad: float = 0  # value of the field where a token or cell is padding


# metadata of fields that have an entry per token or per cell
_PER_TOKEN = {"axis": FieldAxis("token")}
_PER_CELL = {"axis": FieldAxis("cell")}
_PER_CELL_PAD_NAN = {"axis": FieldAxis("cell", pad=nan)}
_PER_CELL_PAD_MINUS_ONE = {"axis": FieldAxis("cell", pad=-1)}


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one data rank, without padding.

    A batch may be empty: it then has no cells and no tokens, and `cu_seqlens` is [0].

    All arrays with an entry per token or per cell are declared here. Batches are sliced and padded by
    `map`, which changes all of these arrays. Objectives read all arrays. Models read only the fields in
    `models.batch.SHOWN`.
    """

    # (tokens,) int32, as a tensor int64: row of the token's gene in the vocabulary + len(SPECIAL)
    token_ids: Array = field(metadata=_PER_TOKEN)

    # (tokens,): the value of each token. The value kind of the tokenizer says what it is:
    # - scalar: a number, float32
    # - class: an integer, from 1 for detected genes, and 0 for undetected genes
    # - place: the position of the token in its cell, from 0
    # - none: models do not read the values
    values: Array = field(metadata=_PER_TOKEN)

    # (cells + 1,) int32: index of each cell's first token; the last entry is the number of tokens
    cu_seqlens: Array

    # (cells,) int64: index of each cell in its split or file
    cell_ids: Array = field(metadata=_PER_CELL_PAD_MINUS_ONE)

    # (tokens,) int64: count of the token's gene in the cell, 0 if the gene is undetected. The array is
    # None unless the objective needs counts
    counts: Array | None = field(default=None, metadata=_PER_TOKEN)

    # (cells, columns) int32: level codes of obs columns; 0 is an unknown value. In a column with missing
    # values, the last level stands for them
    levels: Array | None = field(default=None, metadata=_PER_CELL)

    # (cells, columns) float64: values of numeric obs columns; NaN is an unknown value
    numbers: Array | None = field(default=None, metadata=_PER_CELL_PAD_NAN)

    # (cells, width) float32: a teacher model's vector of each cell
    teacher: Array | None = field(default=None, metadata=_PER_CELL_PAD_NAN)

    # (tokens,) int64: if the token is a covariate, its row in the embedding of covariates, otherwise 0
    # (`models.cell_encoder`)
    covariate_rows: Array | None = field(default=None, metadata=_PER_TOKEN)

    # number of tokens of each cell. The list is on the CPU, so reading it never waits for a device. If it
    # is left empty, `__post_init__` computes it from `cu_seqlens`
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        # a batch without cells is left alone: computing its empty list would wait for the device
        if not self.lengths and len(self.cu_seqlens) > 1:
            lengths = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).tolist()
            object.__setattr__(self, "lengths", lengths)

    @classmethod
    @cache
    def _axes(cls) -> dict[str, FieldAxis]:
        """Return, by name, the axis of each field that has an entry per token or per cell."""
        return {f.name: f.metadata["axis"] for f in fields(cls) if "axis" in f.metadata}

    def map(self, change: Callable[[FieldAxis, Array], Array], **replaced: Any) -> Self:
        """Return a copy of the batch in which every array per token or per cell is changed by `change`.

        A field in `replaced` gets the given value instead. Field `cu_seqlens` is changed only if it is in
        `replaced`.

        Pass `lengths` too if you know them. Otherwise they are computed from `cu_seqlens`, and the CPU
        then waits for the device that has `cu_seqlens`.
        """
        changed: dict[str, Any] = {"lengths": []}  # `__post_init__` computes an empty list
        for name, axis in self._axes().items():
            array = getattr(self, name)
            if array is not None and name not in replaced:
                changed[name] = change(axis, array)
        return replace(self, **changed | replaced)

    def arrays(self, axis: Literal["token", "cell"]) -> dict[str, Array]:
        """Return, by name, the arrays that have this axis and are not None."""
        arrays = {}
        for name, field_axis in self._axes().items():
            array = getattr(self, name)
            if array is not None and field_axis.name == axis:
                arrays[name] = array
        return arrays

    def with_cell_fields(self, arrays_by_field: Mapping[str, Array | None]) -> Self:
        """Return the batch with further fields that have an entry per cell.

        `arrays_by_field` has an array for each field. Entry i of the array belongs to the cell with id i.
        If the array of a field is None, the field is not changed.
        """
        added = {}
        for name, array in arrays_by_field.items():
            if array is not None:
                added[name] = array[self.cell_ids]
        return replace(self, **added) if added else self

    def slice_cells(self, start: int, stop: int) -> Self:
        """Return cells `start:stop` as a batch. Its arrays are views of this batch's, except `cu_seqlens`."""
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
    """Make a batch without cells. Its values have type `dtype`. It has an array of counts if `with_counts`."""
    return Batch(
        token_ids=np.empty(0, np.int32),
        values=np.empty(0, dtype),
        cu_seqlens=np.zeros(1, np.int32),
        cell_ids=np.empty(0, np.int64),
        counts=np.empty(0, np.int64) if with_counts else None,
    )
