"""Packed batches of cells as tensors, as read and as an encoder sees them, and tokens at the ends
of a cell.

<cls> stands before the first gene and <eos> after the last. Their ids are negative, so they are in
no vocabulary, are never masked, and need no row in a table with one row per gene. They are added to
a view before it is padded, so that layouts count them.
"""

from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.stream.batch import Batch, Per
from cellmill.models.counter_rng import keyed_bits, keyed_token_bits
from cellmill.parallel.vocab_parallel import segment_sum

CPU = torch.device("cpu")
PAD_TOKEN, MASK_TOKEN = (SPECIAL.index(token) for token in ("<pad>", "<mask>"))
# tokens of one cell of padding: the cost of attention grows with the square of a cell's length
PAD_CELL = 256

AnyBatch = TypeVar("AnyBatch", bound=Batch)
# fields for models
SHOWN = ("genes", "values", "cu_seqlens", "cells", "levels", "covariate_rows", "lengths")
# token ids; row -1 - id of `end_embedding`
CLS = -1
EOS = -2


def to_tensors(batch: Batch, device: torch.device = CPU) -> Batch:
    """Return `batch` as tensors on `device`: integers as int64, except `cu_seqlens`."""

    def change(_: Per, array: Any) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if tensor.is_floating_point() else tensor.long()

    cu_seqlens = torch.from_numpy(batch.cu_seqlens)
    tensors: Batch = on_device(
        batch.map(change, cu_seqlens=cu_seqlens, lengths=batch.lengths), device
    )
    return tensors


def padded(batch: AnyBatch, tokens: int) -> AnyBatch:
    """Pad to `tokens` by cells of `<pad>` at the end, which are no targets and attend only to each
    other.
    """
    more = tokens - len(batch.genes)
    if not more:
        return batch
    lengths = [PAD_CELL] * (more // PAD_CELL) + ([more % PAD_CELL] if more % PAD_CELL else [])
    ends = batch.cu_seqlens[-1] + torch.tensor(lengths).cumsum(0)
    n = {"token": more, "cell": len(lengths)}
    return batch.map(
        lambda per, array: torch.cat(
            [array, array.new_full((n[per.axis], *array.shape[1:]), per.pad)]
        ),
        cu_seqlens=torch.cat([batch.cu_seqlens, ends.to(batch.cu_seqlens.dtype)]),
        lengths=[*batch.lengths, *lengths],
    )


def with_extra_tokens(batch: AnyBatch, before: int, after: int, token: int) -> AnyBatch:
    """Put `before` tokens of id `token` before each cell's and `after` behind them, with value and
    count 0.
    """
    more = before + after
    cell = positions(batch)[0]
    moved_to = torch.arange(len(batch.genes), device=batch.genes.device) + more * cell + before
    cells = torch.arange(
        len(batch.cu_seqlens), device=batch.cu_seqlens.device, dtype=batch.cu_seqlens.dtype
    )

    def spread(tensor: Tensor, fill: float) -> Tensor:
        return tensor.new_full((len(tensor) + more * len(batch.lengths),), fill).index_copy(
            0, moved_to, tensor
        )

    return batch.map(
        lambda per, array: spread(array, per.pad) if per.axis == "token" else array,
        genes=spread(batch.genes, token),
        cu_seqlens=batch.cu_seqlens + more * cells,
        lengths=[length + more for length in batch.lengths],
    )


def on_device(value: Any, device: torch.device) -> Any:
    """Copy CPU tensors of a dataclass to `device`, at any depth, each once; to a GPU pinned and not
    blocking.
    """
    copies: dict[int, Tensor] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in copies:
                source = value.pin_memory() if device.type == "cuda" else value
                copies[id(value)] = source.to(device, non_blocking=True)
            return copies[id(value)]
        if isinstance(value, tuple):
            return tuple(copied(part) for part in value)
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: copied(getattr(value, f.name)) for f in fields(value)})
        return value

    return value if device.type == "cpu" else copied(value)


def with_genes(batch: Batch) -> Tensor:
    """Return (cells,) bool: the cells with a gene, beside tokens of pooling, of obs columns and at
    their ends.
    """
    cell, _ = positions(batch)
    n_genes = torch.zeros(len(batch.lengths), dtype=torch.int64, device=cell.device)
    is_gene = (batch.genes >= 0) & (batch.genes != PAD_TOKEN)
    return n_genes.scatter_reduce(0, cell, is_gene.long(), "amax") > 0


def positions(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return (tokens,) int64 each: index of a token's cell in the batch, and the token's place in
    the cell.
    """
    n = len(batch.genes)
    starts = batch.cu_seqlens[:-1].long()
    cell = torch.repeat_interleave(batch.cu_seqlens.diff().long(), output_size=n)
    return cell, torch.arange(n, device=batch.genes.device) - starts[cell]


@dataclass(frozen=True, kw_only=True)
class EncoderBatch(Batch):
    """The tokens that an encoder is given, and nothing else of the batch (`SHOWN`); where hidden,
    `genes` are `<mask>` and `values` 0.

    Properties are computed when they are first read, on the batch's device: few families read all
    of them.
    """

    value_hidden: Tensor  # (tokens,) bool
    value_known: Tensor  # (tokens,) bool: those that `center` is the mean of
    keys: tuple[int, int] | None  # seed and step, which key the dropout; None: no dropout

    @classmethod
    def prepared(cls, batch: Batch, keys: tuple[int, int] | None = None, **own: Any) -> Self:
        """Return the batch, with hidden what `own` hides."""
        shared = {f.name for f in fields(cls)} & {f.name for f in fields(batch)}
        given = {name: getattr(batch, name) for name in shared} | {"keys": keys}
        given |= dict.fromkeys({f.name for f in fields(Batch)} - {*SHOWN})
        hidden = own.get("value_hidden")
        if hidden is None:
            hidden = own["value_hidden"] = torch.zeros_like(batch.genes, dtype=torch.bool)
        return cls(**given | {"value_known": ~hidden} | own)

    @cached_property
    def cell(self) -> Tensor:
        """(tokens,) int64: index of the token's cell in the batch."""
        return positions(self)[0]

    @property
    def place(self) -> Tensor:
        """(tokens,) int64: place of the token in its cell, from 0."""
        starts = self.cu_seqlens[:-1].long()
        return torch.arange(len(self.genes), device=self.genes.device) - starts[self.cell]

    @cached_property
    def token_keys(self) -> Tensor:
        """(tokens,) int64: keys of the dropout."""
        cell, place = positions(self)
        return (
            place
            if self.keys is None
            else keyed_bits(keyed_token_bits(self.cells, cell, *self.keys, place), 1)
        )

    @cached_property
    def cell_keys(self) -> Tensor:
        """(cells,) int64: keys of the dropout in layers whose rows are cells."""
        cells: Tensor = self.cells
        return cells if self.keys is None else keyed_bits(cells, *self.keys)

    @cached_property
    def center(self) -> Tensor:
        """(cells,) float32: mean of a cell's known continuous values, which hidden ones cannot leak
        into; else 0.
        """
        if not self.values.is_floating_point():
            return torch.zeros(len(self.lengths), device=self.values.device)
        known = self.value_known & (self.genes != PAD_TOKEN)  # a token without a gene has no value
        parts = (self.values * known, known.float())
        sums, n = (segment_sum(part, self.cell, self.cu_seqlens) for part in parts)
        return sums / n.clamp(min=1)


def with_ends(batch: Batch, n_ends: int) -> Batch:
    """Return the batch with <cls> (`n_ends` 1), or <cls> and <eos> (2), around each cell, with
    value and count 0.
    """
    if not n_ends:
        return batch
    ended = with_extra_tokens(batch, 1, n_ends - 1, CLS)
    if n_ends == 1:
        return ended
    return replace(ended, genes=ended.genes.index_fill(0, ended.cu_seqlens[1:].long() - 1, EOS))
