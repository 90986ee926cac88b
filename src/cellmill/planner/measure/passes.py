"""A forward and a backward pass on the meta device, measured part by part.

A tensor on the meta device has a shape but no values, so a pass takes no memory and little time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from cellmill.data.rows import SparseCounts
from cellmill.data.stream.batch import Batch
from cellmill.data.stream.tokenizer import Tokenizer, tokenize_to_batch
from cellmill.models.batch import copy_to_device, pad_batch, to_tensors
from cellmill.models.build import ModelSpec
from cellmill.models.family import Model
from cellmill.parallel.torch_private import local_tensor, storage_key
from cellmill.planner.measure.load import Load, Rates, fit_rates
from cellmill.planner.measure.meter import OperationMeter, Window
from cellmill.planner.units import FLOAT32_BYTES

MAX_CELL_TOKENS = 128  # a measured cell has at most this many tokens
META = torch.device("meta")


class PartMeasurement(NamedTuple):
    """Measurements of one part of a model, for a whole batch."""

    window: Window  # operations of the forward pass; for `finish` of both passes
    kept: float  # elements that stay allocated for the backward pass
    # Peak elements above `kept`: of a block in its backward pass, of `finish` in either pass. The
    # workspace of `begin` is not measured.
    workspace: float = 0.0


@dataclass(frozen=True)
class PassMeasurements:
    """Measurements of a forward and a backward pass over one batch."""

    load: Load  # of the batch, without padding, before a view hides some of its tokens
    block_input: int  # elements that one block passes to the next
    # Each part counts its input as kept, and not its output. `begin` has no input.
    begin: PartMeasurement  # the part before the blocks
    block: PartMeasurement  # one block
    finish: PartMeasurement  # the part after the blocks


class TwoLengths(NamedTuple):
    """Passes over two batches with about equal tokens: one of long cells, one of cells half as long."""

    long: PassMeasurements
    short: PassMeasurements

    def fit(self, get_total: Callable[[PassMeasurements], float]) -> Rates:
        """Fit a rate per token and a rate per cell to the total that `get_total` takes from each pass."""
        return fit_rates(
            self.long.load, get_total(self.long), self.short.load, get_total(self.short)
        )


def measure_two_lengths(
    model: Model, spec: ModelSpec, tokens: int, token_multiple: int = 1
) -> TwoLengths:
    """Measure a forward and a backward pass over long cells, and the same over cells half as long."""
    return TwoLengths(
        long=measure_passes(model, spec, tokens, token_multiple),
        short=measure_passes(model, spec, tokens, token_multiple, length_divisor=2),
    )


def measure_passes(
    model: Model, spec: ModelSpec, tokens: int, token_multiple: int = 1, length_divisor: int = 1
) -> PassMeasurements:
    """Measure a forward and a backward pass of a `model` with one block.

    The batch has about `tokens` tokens, padded to a multiple of `token_multiple`. Each cell has the most
    tokens that a cell of the run may have, or MAX_CELL_TOKENS if these are fewer. This number of tokens
    is divided by `length_divisor`.
    """
    undivided_tokens = min(spec.tokens.max_tokens, spec.n_genes, MAX_CELL_TOKENS)
    cell_tokens = max(1, undivided_tokens // length_divisor)
    batch = _draw_cells(spec, cell_tokens, tokens)
    # (cells,) int32: tokens of each cell, with the covariate tokens that the model adds
    lengths = np.diff(batch.cu_seqlens) + len(spec.tokens.covariates)

    # as the trainer does: hide tokens from the model, pad the rest, and draw masks
    view = model.view(to_tensors(batch), seed=0, step=0)
    padded_tokens = -(-len(view.token_ids) // token_multiple) * token_multiple
    view = pad_batch(view, padded_tokens)
    # Masks are drawn on the CPU, where tensors have values: the number of masked tokens becomes the shape
    # of other tensors. Only then does the batch move to the meta device.
    prepared = copy_to_device(model.prepare(view, seed=0, step=0), META)

    begin, block, block_output = _measure_begin_and_block(model, prepared)
    finish = _measure_finish(model, prepared, block_output)
    model.zero_grad(set_to_none=True)
    return PassMeasurements(
        load=Load(
            int(lengths.sum()), float(np.square(lengths, dtype=np.float64).sum()), len(lengths)
        ),
        block_input=block_output.numel(),
        begin=begin,
        block=block,
        finish=finish,
    )


def _measure_begin_and_block(
    model: Model, prepared: Any
) -> tuple[PartMeasurement, PartMeasurement, torch.Tensor]:
    """Measure the part before the blocks and one block. Return both, and the block's output.

    The output of a part is not counted in this part, but as the input of the next part.
    """
    with OperationMeter() as meter:
        with meter.window() as begin_window:
            begin_output = model.begin(prepared)
        begin_kept_bytes = begin_window.live_bytes() - begin_output.nbytes

        block_input = torch.empty_like(begin_output, requires_grad=True)
        with meter.window() as block_window:
            block_output = model.through(block_input, prepared)
        block_kept_bytes = block_window.live_bytes() - block_output.nbytes + block_input.nbytes

        with meter.window() as backward:
            block_output.backward(torch.empty_like(block_output))
        workspace_bytes = _backward_peak_bytes(model, backward)
    begin = PartMeasurement(begin_window, begin_kept_bytes / FLOAT32_BYTES)
    block = PartMeasurement(
        block_window, block_kept_bytes / FLOAT32_BYTES, workspace_bytes / FLOAT32_BYTES
    )
    return begin, block, block_output


def _measure_finish(model: Model, prepared: Any, block_output: torch.Tensor) -> PartMeasurement:
    """Measure the part after the blocks in its forward and backward pass."""
    finish_input = torch.empty_like(block_output, requires_grad=True)
    with OperationMeter() as meter, meter.window() as window:
        with meter.window() as forward:
            loss = model.finish(finish_input, prepared)
            loss = loss.sum() if loss.ndim else loss
        with meter.window() as backward:
            loss.backward()
    # the forward pass may have its own peak, as with a chunked loss
    live_bytes = forward.live_bytes()
    workspace_bytes = max(forward.peak_bytes() - live_bytes, _backward_peak_bytes(model, backward))
    kept_bytes = live_bytes + finish_input.nbytes
    return PartMeasurement(window, kept_bytes / FLOAT32_BYTES, workspace_bytes / FLOAT32_BYTES)


def _backward_peak_bytes(model: Model, backward: Window) -> int:
    """Find the peak bytes of a backward pass, without the gradients of parameters."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    storages = [local_tensor(gradient).untyped_storage() for gradient in gradients]
    return backward.peak_bytes(frozenset(map(storage_key, storages)))


def _draw_cells(spec: ModelSpec, cell_tokens: int, tokens: int) -> Batch:
    """Draw random cells of `cell_tokens` tokens each, about `tokens` in all, for the run's tokenizer."""
    rng = np.random.Generator(np.random.Philox(0))
    n_cells = max(1, tokens // cell_tokens)
    genes = rng.integers(0, spec.n_genes, n_cells * cell_tokens, dtype=np.int32)
    counts = rng.integers(1, 50, n_cells * cell_tokens, dtype=np.uint32)
    offsets = np.arange(n_cells + 1, dtype=np.int64) * cell_tokens

    # other arrays of a batch that the objective reads
    columns: dict[str, np.ndarray] = {}
    if spec.levels:
        # (cells, columns) int32: codes of levels, from 1; successive cells have successive levels
        n_levels = np.array([len(levels) for levels in spec.levels.values()], np.int32)
        columns["levels"] = np.arange(n_cells, dtype=np.int32)[:, None] % n_levels + 1
    n_number_columns = len(spec.objective.columns().numbers)
    if n_number_columns:
        columns["numbers"] = np.zeros((n_cells, n_number_columns))
    for part in spec.objective.all_parts():
        vectors = getattr(part, "vectors", None)
        if vectors:
            columns["teacher"] = np.zeros((n_cells, vectors.width), np.float32)

    tokenizer: Tokenizer = spec.tokens.load()(spec.tokens)
    cell_ids = np.arange(n_cells, dtype=np.int64)
    cells = SparseCounts(offsets, genes, counts)
    return tokenize_to_batch(tokenizer, cells, cell_ids, spec.objective.needs_counts, **columns)
