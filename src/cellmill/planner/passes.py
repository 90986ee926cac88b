"""A forward and a backward pass on the meta device, measured part by part."""

from typing import Any

import numpy as np
import torch

from cellmill.data.stream.batch import Batch, Tokenizer, make_batch
from cellmill.models.batch import copy_to_device, pad_batch, to_tensors
from cellmill.models.build import ModelSpec
from cellmill.models.family import Model
from cellmill.parallel.torch_private import storage_key
from cellmill.planner.meter import OperationMeter, Window

FLOAT32 = 4  # bytes
CELL_TOKENS = 128  # tokens of each measured cell, or fewer
META = torch.device("meta")


class MeasuredPasses:
    """Measurements of a forward and a backward pass of about `tokens` tokens.

    Cells have 1 / `length_divisor` of the usual length. *Kept* are elements that stay allocated for
    the backward pass. Attributes:

    - `begin_window`, `block_window`: operations of the forward pass before the blocks, and of one
      block; `finish_window`: of both passes after the blocks
    - `begin_kept_per_token`, `block_kept_per_token` (with the block's input): elements kept
    - `block_workspace_per_token`: peak of a block's backward pass above its kept elements
    - `finish_kept`, `finish_peak`: elements of the whole batch, with the input of that part
    - `width`: elements per token from block to block; no integer if a view hides tokens
    - `pairs_per_token`: (query, key) pairs of attention
    """

    def __init__(
        self, model: Model, spec: ModelSpec, tokens: int, multiple: int = 1, length_divisor: int = 1
    ) -> None:
        usual_tokens = min(spec.tokens.max_tokens, spec.n_genes, CELL_TOKENS)
        cell_tokens = max(1, usual_tokens // length_divisor)
        batch = _draw_cells(spec, cell_tokens, tokens)
        lengths = np.diff(batch.cu_seqlens)  # `(cells,)`: tokens of each cell
        self.tokens = int(batch.cu_seqlens[-1])
        self.cells = len(lengths)
        self.pairs_per_token = float(np.square(lengths, dtype=np.float64).sum() / self.tokens)
        view = model.view(to_tensors(batch), seed=0, step=0)
        padded_tokens = -(-len(view.genes) // multiple) * multiple
        view = pad_batch(view, padded_tokens)
        # masks are drawn on the CPU, since their number is a shape
        prepared = copy_to_device(model.prepare(view, seed=0, step=0), META)
        passed = self._measure_blocks(model, prepared)
        self._measure_finish(model, prepared, passed)
        model.zero_grad(set_to_none=True)

    def _measure_blocks(self, model: Model, prepared: Any) -> torch.Tensor:
        """Measure the part before the blocks and one block. Return the block's output."""
        with OperationMeter() as meter:
            with meter.window() as self.begin_window:
                entered = model.begin(prepared)
            self.begin_kept_per_token = self._per_token(
                self.begin_window.live_bytes() - entered.nbytes
            )
            self.width = entered.numel() / self.tokens
            x = torch.empty_like(entered, requires_grad=True)
            with meter.window() as self.block_window:
                passed = model.through(x, prepared)
            kept_bytes = self.block_window.live_bytes() - passed.nbytes + x.nbytes
            self.block_kept_per_token = self._per_token(kept_bytes)
            with meter.window() as backward:
                passed.backward(torch.empty_like(passed))
            self.block_workspace_per_token = self._per_token(_peak_bytes(model, backward))
        return passed

    def _measure_finish(self, model: Model, prepared: Any, passed: torch.Tensor) -> None:
        """Measure the part after the blocks, whose input is like `passed`."""
        x = torch.empty_like(passed, requires_grad=True)
        with OperationMeter() as meter, meter.window() as self.finish_window:
            with meter.window() as forward:
                loss = model.finish(x, prepared)
                loss = loss.sum() if loss.ndim else loss
            with meter.window() as backward:
                loss.backward()
        live_bytes = forward.live_bytes()
        peak_bytes = max(forward.peak_bytes(), live_bytes + _peak_bytes(model, backward))
        self.finish_kept = (live_bytes + x.nbytes) / FLOAT32
        self.finish_peak = (peak_bytes + x.nbytes) / FLOAT32

    def _per_token(self, n_bytes: int) -> float:
        return n_bytes / FLOAT32 / self.tokens


def _peak_bytes(model: Model, backward: Window) -> int:
    """Return the peak bytes of a backward pass without the gradients of parameters."""
    gradients = set()
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradients.add(storage_key(local_tensor(parameter.grad).untyped_storage()))
    return backward.peak_bytes(frozenset(gradients))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; another tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def _draw_cells(spec: ModelSpec, cell_tokens: int, tokens: int) -> Batch:
    """Return about `tokens` tokens of random cells with `cell_tokens` each, by the run's tokenizer."""
    rng = np.random.Generator(np.random.Philox(0))
    n_cells = max(1, tokens // cell_tokens)
    genes = rng.integers(0, spec.n_genes, n_cells * cell_tokens, dtype=np.int32)
    counts = rng.integers(1, 50, n_cells * cell_tokens, dtype=np.uint32)
    starts = np.arange(n_cells + 1, dtype=np.int64) * cell_tokens
    columns: dict[str, np.ndarray] = {}
    if spec.levels:
        # `(cells, columns)` int32: level codes from 1, each level in turn
        n_levels = np.array([len(levels) for levels in spec.levels.values()], np.int32)
        columns["levels"] = np.arange(n_cells, dtype=np.int32)[:, None] % n_levels + 1
    n_number_columns = len(spec.objective.columns().numbers)
    if n_number_columns:
        columns["numbers"] = np.zeros((n_cells, n_number_columns))
    for part in spec.objective.each():
        vectors = getattr(part, "vectors", None)
        if vectors:
            columns["teacher"] = np.zeros((n_cells, vectors.width), np.float32)
    tokenizer: Tokenizer = spec.tokens.load()(spec.tokens)
    cell_ids = np.arange(n_cells, dtype=np.int64)
    return make_batch(
        tokenizer,
        genes,
        counts,
        starts,
        cell_ids,
        spec.objective.needs_counts,
        **columns,
    )
