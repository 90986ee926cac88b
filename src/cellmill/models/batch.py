"""Packed batches of cells as tensors, as read and as an encoder sees them.

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
from cellmill.data.stream.batch import Batch, FieldAxis
from cellmill.models.counter_rng import keyed_bits, keyed_token_bits
from cellmill.models.draws import TOKEN_DROPOUT_KEY
from cellmill.parallel.vocab_parallel import segment_sum

CPU = torch.device("cpu")
PAD_TOKEN = SPECIAL.index("<pad>")
MASK_TOKEN = SPECIAL.index("<mask>")
# token ids; row -1 - id of `end_embedding`
CLS = -1
EOS = -2
PAD_CELL = 256
"""Tokens of one cell of padding: the cost of attention grows with the square of a cell's length."""
SHOWN = ("token_ids", "values", "cu_seqlens", "cell_ids", "levels", "covariate_rows", "lengths")
"""Fields for models."""
AnyBatch = TypeVar("AnyBatch", bound=Batch)


def to_tensors(batch: Batch, device: torch.device = CPU) -> Batch:
    """Return `batch` as tensors on `device`: integers as int64, except `cu_seqlens`."""

    def to_tensor(_: FieldAxis, array: Any) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if tensor.is_floating_point() else tensor.long()

    cu_seqlens = torch.from_numpy(batch.cu_seqlens)
    tensors = batch.map(to_tensor, cu_seqlens=cu_seqlens, lengths=batch.lengths)
    copied: Batch = copy_to_device(tensors, device)
    return copied


def pad_batch(batch: AnyBatch, tokens: int) -> AnyBatch:
    """Pad to `tokens` by cells of `<pad>` at the end.

    These tokens are never targets, and those of a cell attend only to each other.
    """
    n_padding = tokens - len(batch.token_ids)
    if not n_padding:
        return batch
    n_whole, rest = divmod(n_padding, PAD_CELL)
    lengths = [PAD_CELL] * n_whole
    if rest:
        lengths.append(rest)
    ends = batch.cu_seqlens[-1] + torch.tensor(lengths).cumsum(0)
    n_rows = {"token": n_padding, "cell": len(lengths)}

    def extend(axis: FieldAxis, array: Tensor) -> Tensor:
        padding = array.new_full((n_rows[axis.name], *array.shape[1:]), axis.pad)
        return torch.cat([array, padding])

    return batch.map(
        extend,
        cu_seqlens=torch.cat([batch.cu_seqlens, ends.to(batch.cu_seqlens.dtype)]),
        lengths=[*batch.lengths, *lengths],
    )


def add_tokens(batch: AnyBatch, before: int, after: int, token: int) -> AnyBatch:
    """Add `before` tokens of id `token` before each cell and `after` after it, with value 0."""
    n_added = before + after
    token_cells, _ = positions(batch)
    index = torch.arange(len(batch.token_ids), device=batch.token_ids.device)
    new_index = index + n_added * token_cells + before  # (tokens,): where each token goes
    n_tokens = len(batch.token_ids) + n_added * len(batch.lengths)
    offsets = batch.cu_seqlens
    n_cells_before = torch.arange(len(offsets), device=offsets.device, dtype=offsets.dtype)

    def spread(tensor: Tensor, fill: float) -> Tensor:
        return tensor.new_full((n_tokens,), fill).index_copy(0, new_index, tensor)

    return batch.map(
        lambda axis, array: spread(array, axis.pad) if axis.name == "token" else array,
        token_ids=spread(batch.token_ids, token),
        cu_seqlens=offsets + n_added * n_cells_before,
        lengths=[length + n_added for length in batch.lengths],
    )


def copy_to_device(value: Any, device: torch.device) -> Any:
    """Copy the CPU tensors of a dataclass to `device`, at any depth, each once.

    To a GPU they are pinned and copied without blocking.
    """
    copies: dict[int, Tensor] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in copies:
                source = value.pin_memory() if device.type == "cuda" else value
                copies[id(value)] = source.to(device, non_blocking=True)
            return copies[id(value)]
        if isinstance(value, tuple):
            return tuple(map(copy, value))
        if is_dataclass(value) and not isinstance(value, type):
            copied = {field.name: copy(getattr(value, field.name)) for field in fields(value)}
            return replace(value, **copied)
        return value

    return value if device.type == "cpu" else copy(value)


def has_genes(batch: Batch) -> Tensor:
    """Return which cells have a gene, (cells,) bool.

    Tokens of pooling, of obs columns and at the ends of a cell are not genes.
    """
    token_cells, _ = positions(batch)
    has_gene = torch.zeros(len(batch.lengths), dtype=torch.int64, device=token_cells.device)
    is_gene = (batch.token_ids >= 0) & (batch.token_ids != PAD_TOKEN)
    return has_gene.scatter_reduce(0, token_cells, is_gene.long(), "amax") > 0


def positions(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the index of each token's cell, and its position in the cell, (tokens,) int64 each."""
    n_tokens = len(batch.token_ids)
    starts = batch.cu_seqlens[:-1].long()
    token_cells = torch.repeat_interleave(batch.cu_seqlens.diff().long(), output_size=n_tokens)
    return token_cells, torch.arange(n_tokens, device=batch.token_ids.device) - starts[token_cells]


@dataclass(frozen=True, kw_only=True)
class EncoderBatch(Batch):
    """The tokens that an encoder is given, and nothing else of the batch (`SHOWN`).

    Hidden `token_ids` are `<mask>` and hidden `values` 0. Properties are computed when they are first
    read, on the batch's device: few families read all of them.
    """

    value_hidden: Tensor  # (tokens,) bool
    enters_center: Tensor  # (tokens,) bool: values of which `center` is the mean
    dropout_keys: tuple[int, int] | None  # seed and step; None: no dropout

    @classmethod
    def from_batch(
        cls, batch: Batch, dropout_keys: tuple[int, int] | None = None, **changes: Any
    ) -> Self:
        """Return the batch with the fields in `changes`; `value_hidden` is False by default."""
        arguments: dict[str, Any] = {"dropout_keys": dropout_keys}
        names = {field.name for field in fields(cls)}
        for field in fields(batch):
            if field.name in names:
                arguments[field.name] = getattr(batch, field.name)
        for field in fields(Batch):
            if field.name not in SHOWN:
                arguments[field.name] = None
        nothing = torch.zeros_like(batch.token_ids, dtype=torch.bool)
        hidden = changes.get("value_hidden", nothing)
        arguments |= {"value_hidden": hidden, "enters_center": ~hidden}
        return cls(**arguments | changes)

    @classmethod
    def extend(cls, prepared: "EncoderBatch", **added: Any) -> Self:
        """Return `prepared` as this class, whose further fields are in `added`."""
        inherited = {field.name: getattr(prepared, field.name) for field in fields(prepared)}
        return cls(**inherited, **added)

    @cached_property
    def token_cells(self) -> Tensor:
        """(tokens,) int64: index of the token's cell in the batch."""
        return positions(self)[0]

    @property
    def position(self) -> Tensor:
        """(tokens,) int64: position of the token in its cell, from 0."""
        return positions(self)[1]

    @cached_property
    def token_keys(self) -> Tensor:
        """(tokens,) int64: keys of the dropout."""
        token_cells, position = positions(self)
        if self.dropout_keys is None:
            return position
        bits = keyed_token_bits(self.cell_ids, token_cells, *self.dropout_keys, position)
        return keyed_bits(bits, TOKEN_DROPOUT_KEY)

    @cached_property
    def cell_keys(self) -> Tensor:
        """(cells,) int64: keys of the dropout in layers whose rows are cells."""
        cells: Tensor = self.cell_ids
        return cells if self.dropout_keys is None else keyed_bits(cells, *self.dropout_keys)

    @cached_property
    def center(self) -> Tensor:
        """(cells,) float32: mean of a cell's continuous values in `enters_center`; 0 if there are none.

        Masked values cannot leak into it.
        """
        if not self.values.is_floating_point():
            return torch.zeros(len(self.lengths), device=self.values.device)
        # <pad>, <cls> and <eos> have no value
        is_in = self.enters_center & (self.token_ids > PAD_TOKEN)
        sums = segment_sum(self.values * is_in, self.token_cells, self.cu_seqlens)
        n_values = segment_sum(is_in.float(), self.token_cells, self.cu_seqlens)
        return sums / n_values.clamp(min=1)


def add_ends(batch: Batch, n_ends: int) -> Batch:
    """Return the batch with <cls> before each cell and, if `n_ends` is 2, <eos> after it."""
    if not n_ends:
        return batch
    ended = add_tokens(batch, 1, n_ends - 1, CLS)
    if n_ends == 1:
        return ended
    last_tokens = ended.cu_seqlens[1:].long() - 1
    return replace(ended, token_ids=ended.token_ids.index_fill(0, last_tokens, EOS))
