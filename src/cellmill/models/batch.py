"""Packed batches of cells as tensors, as read and as an encoder sees them, and tokens at the ends of a cell.

<cls> stands before the first gene and <eos> after the last. Their ids are negative, so they are in no vocabulary, are
never masked, and need no row in a table with one row per gene. They are added to a view before it is padded, so that
layouts count them.
"""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch.nn import functional as F

from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.stream.batch import Batch
from cellmill.models.counter_rng import keyed_bits
from cellmill.parallel.vocab_parallel import segment_sum

CPU = torch.device("cpu")
PAD_TOKEN, MASK_TOKEN = (SPECIAL.index(token) for token in ("<pad>", "<mask>"))
PAD_CELL = 256  # tokens of one cell of padding: the cost of attention grows with the square of a cell's length


@dataclass(frozen=True)
class TensorBatch:
    """Concatenated cells without padding; possibly none."""

    genes: torch.Tensor
    """(tokens,) int64 token ids."""
    values: torch.Tensor
    """(tokens,) float32 (continuous) or int64 (bins from 1; ranks in the cell from 0)."""
    cu_seqlens: torch.Tensor
    """(cells + 1,) int32: start of each cell, and end of the last."""
    cells: torch.Tensor
    """(cells,) int64: stable id of each cell."""
    lengths: list[int]
    """Tokens of each cell as Python integers: reading them never waits for a device."""
    counts: torch.Tensor | None = None
    """(tokens,) int64, where the objective needs them."""
    levels: torch.Tensor | None = None
    """(cells, columns) int64, where asked for: numbers of levels of obs columns, 0 for unknown ones."""
    numbers: torch.Tensor | None = None
    """(cells, columns) float64, where asked for: numbers of obs columns, NaN for missing ones."""
    covariate_rows: torch.Tensor | None = None
    """(tokens,) int64, where cells have tokens of obs columns (`models.cell_encoder`): row of its embedding, or 0."""


AnyBatch = TypeVar("AnyBatch", bound=TensorBatch)


def to_tensors(batch: Batch, device: torch.device = CPU) -> TensorBatch:
    """Return `batch` as tensors on `device`."""
    values = torch.from_numpy(batch.values)
    tensors = TensorBatch(
        genes=torch.from_numpy(batch.genes).long(),
        values=values if values.is_floating_point() else values.long(),
        cu_seqlens=torch.from_numpy(batch.cu_seqlens),
        cells=torch.from_numpy(batch.cells),
        lengths=(batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).tolist(),
        counts=None if batch.counts is None else torch.from_numpy(batch.counts),
        levels=None if batch.levels is None else torch.from_numpy(batch.levels).long(),
        numbers=None if batch.numbers is None else torch.from_numpy(batch.numbers),
    )
    return on_device(tensors, device)


def padded(batch: TensorBatch, tokens: int) -> TensorBatch:
    """Pad `batch` to `tokens` with `<pad>` tokens, in cells of their own at the end.

    They attend only to each other and are never targets, so they change no loss and no gradient.
    """
    more = tokens - len(batch.genes)
    if not more:
        return batch
    lengths = [PAD_CELL] * (more // PAD_CELL) + ([more % PAD_CELL] if more % PAD_CELL else [])
    pad = batch.genes.new_full((more,), PAD_TOKEN)
    ends = batch.cu_seqlens[-1] + torch.tensor(lengths, dtype=batch.cu_seqlens.dtype).cumsum(0)
    return replace(
        batch,
        genes=torch.cat([batch.genes, pad]),
        values=torch.cat([batch.values, batch.values.new_zeros(more)]),
        cu_seqlens=torch.cat([batch.cu_seqlens, ends.to(batch.cu_seqlens.dtype)]),
        cells=torch.cat([batch.cells, batch.cells.new_full((len(lengths),), -1)]),
        lengths=[*batch.lengths, *lengths],
        counts=None if batch.counts is None else torch.cat([batch.counts, batch.counts.new_zeros(more)]),
        levels=None if batch.levels is None else F.pad(batch.levels, (0, 0, 0, len(lengths))),
        numbers=None if batch.numbers is None else F.pad(batch.numbers, (0, 0, 0, len(lengths)), value=torch.nan),
        covariate_rows=None if batch.covariate_rows is None else F.pad(batch.covariate_rows, (0, more)),
    )


def with_extra_tokens(batch: AnyBatch, before: int, after: int, token: int) -> AnyBatch:
    """Put `before` tokens of id `token` before those of each cell and `after` behind them, with value and count 0.

    They are added before a batch is padded, so that layouts count them.
    """
    more, cell = before + after, positions(batch)[0]
    at = torch.arange(len(batch.genes), device=batch.genes.device) + more * cell + before
    cells = torch.arange(len(batch.cu_seqlens), device=batch.cu_seqlens.device, dtype=batch.cu_seqlens.dtype)

    def spread(tensor: torch.Tensor, fill: int) -> torch.Tensor:
        return tensor.new_full((len(tensor) + more * len(batch.lengths),), fill).index_copy(0, at, tensor)

    return replace(
        batch,
        genes=spread(batch.genes, token),
        values=spread(batch.values, 0),
        cu_seqlens=batch.cu_seqlens + more * cells,
        lengths=[length + more for length in batch.lengths],
        counts=None if batch.counts is None else spread(batch.counts, 0),
    )


def on_device(value: Any, device: torch.device) -> Any:
    """Copy the CPU tensors of a dataclass to `device`, with those of dataclasses in it; each tensor once.

    Copies to a GPU use pinned memory and do not block.
    """
    return value if device.type == "cpu" else _copied(value, device, {})


def _copied(value: Any, device: torch.device, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in copies:
            source = value.pin_memory() if device.type == "cuda" else value
            copies[id(value)] = source.to(device, non_blocking=True)
        return copies[id(value)]
    if isinstance(value, tuple):
        return tuple(_copied(part, device, copies) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _copied(getattr(value, f.name), device, copies) for f in fields(value)})
    return value


def with_genes(batch: TensorBatch) -> torch.Tensor:
    """Return (cells,) bool: the cells with a gene, beside tokens of pooling, of obs columns and at their ends."""
    cell, _ = positions(batch)
    n_genes = torch.zeros(len(batch.lengths), dtype=torch.int64, device=cell.device)
    is_gene = (batch.genes >= 0) & (batch.genes != PAD_TOKEN)
    return n_genes.scatter_reduce(0, cell, is_gene.long(), "amax") > 0


def positions(batch: TensorBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens,) int64 each: index of a token's cell in the batch, and the token's place in the cell."""
    counts = batch.cu_seqlens.diff().long()
    cell = torch.repeat_interleave(counts, output_size=len(batch.genes))
    place = torch.arange(len(batch.genes), device=batch.genes.device) - batch.cu_seqlens[:-1].long()[cell]
    return cell, place


@dataclass(frozen=True, kw_only=True)
class EncoderBatch:
    """Base of what objectives for encoders prepare."""

    genes: torch.Tensor
    """(tokens,) int64; `<mask>` where the gene is hidden."""
    values: torch.Tensor
    """(tokens,); 0 where the value is hidden."""
    value_hidden: torch.Tensor
    """(tokens,) bool."""
    center: torch.Tensor
    """(cells,) float32: mean of a cell's visible continuous values; 0 for other tokenizers."""
    cell: torch.Tensor
    """(tokens,) int64: index of the token's cell in the batch."""
    cu_seqlens: torch.Tensor
    lengths: list[int]
    token_keys: torch.Tensor
    """(tokens,) int64: keys of the dropout."""
    cell_keys: torch.Tensor
    """(cells,) int64: keys of the dropout in layers whose rows are cells."""
    levels: torch.Tensor | None = None
    """(cells, columns) int64: as in the batch."""
    covariate_rows: torch.Tensor | None = None
    """(tokens,) int64: as in the batch."""


def whole(batch: TensorBatch, keys: tuple[int, int] | None = None) -> EncoderBatch:
    """Return the batch with nothing hidden.

    `keys`, seed and step, key the dropout; None where there is no dropout, as in evaluation.
    """
    cell, place = positions(batch)
    visible = torch.ones_like(place, dtype=torch.bool)
    return EncoderBatch(
        genes=batch.genes,
        values=batch.values,
        value_hidden=~visible,
        center=center_of(batch, cell, visible),
        cell=cell,
        cu_seqlens=batch.cu_seqlens,
        lengths=batch.lengths,
        token_keys=place if keys is None else keyed_bits(keyed_bits(batch.cells[cell], *keys, place), 1),
        cell_keys=batch.cells if keys is None else keyed_bits(batch.cells, *keys),
        levels=batch.levels,
        covariate_rows=batch.covariate_rows,
    )


def center_of(batch: TensorBatch, cell: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """(cells,) float32: mean of the visible genes' values only, so that hidden ones cannot leak."""
    if not batch.values.is_floating_point():
        return torch.zeros(len(batch.lengths), device=cell.device)
    visible = visible & (batch.genes != PAD_TOKEN)  # a token without a gene has no value
    sums, n = (segment_sum(part, cell, batch.cu_seqlens) for part in (batch.values * visible, visible.float()))
    return sums / n.clamp(min=1)


CLS, EOS = -1, -2
"""Token ids; row -1 - id of `end_embedding`."""


def with_ends(batch: TensorBatch, n_ends: int) -> TensorBatch:
    """Return the batch with <cls> (`n_ends` 1), or <cls> and <eos> (2), around each cell, with value and count 0."""
    if not n_ends:
        return batch
    ended = with_extra_tokens(batch, 1, n_ends - 1, CLS)
    if n_ends == 1:
        return ended
    return replace(ended, genes=ended.genes.index_fill(0, ended.cu_seqlens[1:].long() - 1, EOS))
