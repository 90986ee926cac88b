"""Sizes of a model, measured by running one tensor-parallel rank of it on the meta device.

Parameters, buffers and trained parameters are counted by part; FLOPs come from torch's flop
counter, kept activations and the workspace of a backward pass from the lifetimes of storages,
tensor-parallel traffic from the collectives. So a family, objective or fine-tuning method declares
no sizes. The batch has random cells from the run's own tokenizer. Tensors on the meta device take
no memory, and torch's "fake" process group sends nothing.
"""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from cellmill.config.parallel import Parallel
from cellmill.config.parts.methods import MethodConfig
from cellmill.finetune.method import Method, check_trains, load_method, trained_names
from cellmill.models.build import ModelSpec, build
from cellmill.models.family import Model
from cellmill.parallel.apply import apply_tensor_parallel, checkpoint_activations, freeze
from cellmill.parallel.materialize import plain_name
from cellmill.parallel.mesh import build_mesh
from cellmill.parallel.torch_private import FakeStore, local_tensor
from cellmill.planner.measure.passes import FLOAT32_BYTES, PassMeasurements, measure_passes

# tokens of the measured batch: random fractions (masks) are within 1 % of their mean
SAMPLE_TOKENS = 1 << 14
SMALL_SAMPLE_TOKENS = 1 << 12  # for measurements without random fractions
# a part has FLOPs per cell if cells of half the length need more FLOPs per token by this fraction
PER_CELL_FRAC = 0.05
# a backward pass takes the FLOPs of 2 forward passes: it computes the gradients of inputs and of
# weights, each as many (Kaplan et al. 2020, section 2.1)
FORWARDS_PER_BACKWARD = 2
# tokens of the batches with which the workspace of `finish` is measured: 256, 1,024, … 262,144
WORKSPACE_TOKENS = tuple(1 << power for power in range(8, 19, 2))
ANY_QUANTILES = (0.0, 10.0)  # replace the corpus's quantiles: sizes do not depend on values


@dataclass(frozen=True)
class PartSize:
    """Sizes, in elements, of one part of a model.

    A part is what comes before the blocks, one block, what comes after them, or the parameters that
    both ends share.
    """

    parameters: int
    trained: int  # parameters with a gradient and optimizer state
    activations_per_token: float = 0.0  # kept for the backward pass; a block's with its input
    # elements of tensor-parallel collectives without sequence parallelism, and calls of them; a
    # block's in the forward pass, and as many again in the backward pass
    collective_elements_per_token: float = 0.0
    collectives: int = 0


Workspace = tuple[tuple[int, float], ...]
"""(tokens of a micro-batch, elements)."""


class Load(NamedTuple):
    """Cells that a rank computes, by what FLOPs are proportional to."""

    tokens: float
    pairs: float  # (query, key) pairs of attention within cells
    cells: float


@dataclass(frozen=True)
class Flops:
    """Measured FLOPs of a model on one tensor-parallel rank, forward and backward."""

    n_blocks: int
    # forward passes of a step: 1, or 2 for a loss over rows of the global batch
    forwards: int
    begin_per_token: float
    block_per_token: float  # one block without its attention
    finish_per_token: float
    # further FLOPs: blocks whose rows are cells, heads of the cell embedding
    block_per_cell: float
    finish_per_cell: float
    block_per_pair: float  # one block's attention, per (query, key) pair of a cell

    @property
    def forward_frac(self) -> float:
        """One forward pass as a fraction of a step's FLOPs."""
        return 1 / (self.forwards + FORWARDS_PER_BACKWARD)

    def count(
        self,
        load: Load,
        n_blocks: int | None = None,
        has_begin: bool = True,
        has_finish: bool = True,
    ) -> float:
        """Count the FLOPs for `load` of a part of the model, by default the whole.

        A part has `n_blocks` blocks, and the parts before and after all blocks if it has them.
        """
        n_blocks = self.n_blocks if n_blocks is None else n_blocks
        ends = has_begin * self.begin_per_token + has_finish * self.finish_per_token
        per_token = n_blocks * self.block_per_token + ends
        per_cell = n_blocks * self.block_per_cell + has_finish * self.finish_per_cell
        per_pair = n_blocks * self.block_per_pair
        return per_token * load.tokens + per_pair * load.pairs + per_cell * load.cells


@dataclass(frozen=True)
class ModelSize:
    """Measured sizes of a model on one tensor-parallel rank."""

    begin: PartSize
    block: PartSize
    finish: PartSize
    tied: PartSize  # parameters that are in both `begin` and `finish`
    buffers: int  # elements of all buffers
    flops: Flops
    width: float  # elements per token that pass from block to block
    # `block.activations_per_token` with selective activation checkpointing
    selective_per_token: float
    block_workspace_per_token: float  # peak of a block's backward pass above its kept activations
    finish_workspace_by_tokens: Workspace
    """(tokens of a micro-batch, peak elements of `finish` above `finish.activations_per_token`),
    mostly logits.
    """

    @property
    def n_blocks(self) -> int:
        return self.flops.n_blocks

    @property
    def parameters(self) -> int:
        outside = self.begin.parameters + self.finish.parameters - self.tied.parameters
        return self.n_blocks * self.block.parameters + outside

    def finish_workspace(self, tokens: float) -> float:
        """Interpolate the peak elements of `finish` above its kept activations, for `tokens` tokens."""
        measured, elements = zip((0, 0.0), *self.finish_workspace_by_tokens)
        if tokens >= measured[-1]:  # extrapolate
            slope = (elements[-1] - elements[-2]) / (measured[-1] - measured[-2])
            return float(elements[-1] + slope * (tokens - measured[-1]))
        return float(np.interp(tokens, measured, elements))


_SIZES: dict[tuple[str, int, bool], ModelSize] = {}
"""Sizes by model and fine-tuning method, tensor-parallel ranks and sequence parallelism."""


def measure_size(
    spec: ModelSpec,
    tp: int = 1,
    sequence_parallel: bool = False,
    finetune: MethodConfig | None = None,
) -> ModelSize:
    """Measure a model's sizes on one of `tp` ranks, once per process.

    With tp > 1 there must be no default process group.
    """
    key = (repr((spec, finetune)), tp, sequence_parallel)
    if key not in _SIZES:
        with _prepare(spec, finetune, tp) as (fitted, method):
            _SIZES[key] = _measure_size(fitted, method, tp, sequence_parallel)
    return _SIZES[key]


def measure_flops(spec: ModelSpec, finetune: MethodConfig) -> Flops:
    """Measure the FLOPs on one rank only, faster than `measure_size`."""
    with _prepare(spec, finetune) as (fitted, method):
        model = _build(fitted, method, one_block=True)
        n_blocks = _count_blocks(build(fitted, method.transform))
        long = measure_passes(model, fitted, SAMPLE_TOKENS)
        short = measure_passes(model, fitted, SAMPLE_TOKENS, length_divisor=2)
        return _count_flops(model, n_blocks, long, short)


def _count_blocks(model: Model) -> int:
    return len(list(model.get_submodule(model.plan.blocks).children()))


@contextmanager
def _prepare(
    spec: ModelSpec, finetune: MethodConfig | None, tp: int = 1
) -> Iterator[tuple[ModelSpec, Method]]:
    """Yield the specification with a fitted tokenizer, and the fine-tuning method.

    With tp > 1 there is a process group that sends nothing.
    """
    # lifetimes must not depend on when Python collects reference cycles, which DTensor creates
    was_enabled = gc.isenabled()
    gc.disable()
    if tp > 1:
        assert not dist.is_initialized(), (
            "sizes under tensor parallelism are measured in a process without a group"
        )
        dist.init_process_group("fake", rank=0, world_size=tp, store=FakeStore())
    try:
        method = load_method(finetune or MethodConfig.model_validate({}))
        yield replace(spec, tokens=spec.tokens.fitted(ANY_QUANTILES)), method
    finally:
        if tp > 1:
            dist.destroy_process_group()
        if was_enabled:
            gc.enable()


def _measure_size(spec: ModelSpec, method: Method, tp: int, sequence_parallel: bool) -> ModelSize:
    """Measure passes of a model of one block, and count the whole model's parameters."""
    model = _build(spec, method, tp, sequence_parallel, one_block=True)
    multiple = tp if sequence_parallel else 1  # the trainer pads a batch to a multiple of tokens
    # warm up: more is kept alive when DTensor sees an operation and its shapes for the first time,
    # or when a pass imports a module
    measure_passes(model, spec, SAMPLE_TOKENS, multiple)
    long = measure_passes(model, spec, SAMPLE_TOKENS, multiple)
    short = measure_passes(model, spec, SAMPLE_TOKENS, multiple, length_divisor=2)
    collective_passes = long
    if sequence_parallel:
        collective_passes = measure_passes(
            _build(spec, method, tp, one_block=True), spec, SAMPLE_TOKENS
        )
    selective_per_token = _measure_selective(spec, method, tp, sequence_parallel)
    finish_kept_per_token, workspace = _measure_workspace(model, spec, multiple)
    whole = _build(spec, method, tp, sequence_parallel)
    check_trains(method, (plain_name(name) for name, _ in whole.named_parameters()))
    parameters, trained = _count_parameters(whole)
    n_blocks = _count_blocks(whole)
    parameters["block"] //= max(n_blocks, 1)
    trained["block"] //= max(n_blocks, 1)

    def make_part(name: str, activations_per_token: float) -> PartSize:
        # collectives of sequence parallelism are derived from the ones without it
        window = getattr(collective_passes, name).window
        elements = window.collective_bytes / FLOAT32_BYTES
        return PartSize(
            parameters[name],
            trained[name],
            activations_per_token,
            collective_elements_per_token=elements / collective_passes.tokens,
            collectives=window.collectives,
        )

    return ModelSize(
        begin=make_part("begin", long.begin.kept / long.tokens),
        block=make_part("block", long.block.kept / long.tokens),
        finish=make_part("finish", finish_kept_per_token),
        tied=PartSize(parameters["tied"], trained["tied"]),
        buffers=sum(buffer.numel() for buffer in whole.buffers()),
        flops=_count_flops(model, n_blocks, long, short),
        width=long.width,
        selective_per_token=selective_per_token,
        block_workspace_per_token=long.block.workspace / long.tokens,
        finish_workspace_by_tokens=workspace,
    )


def _measure_selective(spec: ModelSpec, method: Method, tp: int, sequence_parallel: bool) -> float:
    """Measure the elements per token that a block keeps with selective activation checkpointing."""
    model = _build(spec, method, tp, sequence_parallel, one_block=True)
    checkpoint_activations(model, model.plan.blocks, "selective")
    multiple = tp if sequence_parallel else 1
    measured = measure_passes(model, spec, SMALL_SAMPLE_TOKENS, multiple)
    return measured.block.kept / measured.tokens


def _measure_workspace(model: Model, spec: ModelSpec, multiple: int) -> tuple[float, Workspace]:
    """Measure the elements that `finish` keeps per token, and its workspace.

    Elements that do not grow with the tokens, such as a table's gradient that a chunked loss makes
    in its forward pass, belong to the workspace.
    """
    passes_by_tokens = {n: measure_passes(model, spec, n, multiple) for n in WORKSPACE_TOKENS}
    *_, smaller, larger = passes_by_tokens.values()
    kept_per_token = larger.finish.kept - smaller.finish.kept
    kept_per_token /= larger.tokens - smaller.tokens
    workspace = []
    for passes in passes_by_tokens.values():
        peak = passes.finish.kept + passes.finish.workspace
        workspace.append((passes.tokens, max(0.0, peak - kept_per_token * passes.tokens)))
    return kept_per_token, tuple(workspace)


def _count_flops(
    model: Model, n_blocks: int, long: PassMeasurements, short: PassMeasurements
) -> Flops:
    """Derive the FLOPs from passes over cells of two lengths, `long` and half of it."""
    block_per_token, block_per_cell = _separate_flops(long, short, "block")
    # finish has both passes in its window: a chunked loss has all FLOPs in its forward pass
    finish_per_token, finish_per_cell = _separate_flops(long, short, "finish")
    # attention is the FLOPs per token that grow with the length of cells
    per_pair = 0.0
    if long.pairs_per_token > short.pairs_per_token and not block_per_cell:
        growth = long.block.window.flops / long.tokens - short.block.window.flops / short.tokens
        per_pair = max(0.0, growth / (long.pairs_per_token - short.pairs_per_token))
        block_per_token -= per_pair * long.pairs_per_token
    # a loss over rows of the global batch runs another forward pass, without heads
    forwards = 1 + int(bool(model.objective.coupled_widths))
    n_forwards = forwards + FORWARDS_PER_BACKWARD
    return Flops(
        n_blocks=n_blocks,
        forwards=forwards,
        begin_per_token=n_forwards * long.begin.window.flops / long.tokens,
        block_per_token=n_forwards * block_per_token,
        finish_per_token=finish_per_token,
        block_per_cell=n_forwards * block_per_cell,
        finish_per_cell=finish_per_cell,
        block_per_pair=n_forwards * per_pair,
    )


def _separate_flops(
    long: PassMeasurements, short: PassMeasurements, part: str
) -> tuple[float, float]:
    """Separate the FLOPs of a part into FLOPs per token and FLOPs per cell."""
    flops_per_long_token = getattr(long, part).window.flops / long.tokens
    flops_per_short_token = getattr(short, part).window.flops / short.tokens
    # random fractions differ by less
    if flops_per_short_token <= (1 + PER_CELL_FRAC) * flops_per_long_token:
        return flops_per_long_token, 0.0
    # solve per_token + per_cell * cells / tokens = FLOPs / tokens for both lengths
    cells_per_long_token = long.cells / long.tokens
    cells_per_short_token = short.cells / short.tokens
    per_cell = flops_per_short_token - flops_per_long_token
    per_cell /= cells_per_short_token - cells_per_long_token
    return max(0.0, flops_per_long_token - per_cell * cells_per_long_token), per_cell


def _build(
    spec: ModelSpec,
    method: Method,
    tp: int = 1,
    sequence_parallel: bool = False,
    one_block: bool = False,
) -> Model:
    """Build the model of one tensor-parallel rank, optionally with only one of its equal blocks."""
    model = build(spec, method.transform)
    if one_block:
        blocks = model.get_submodule(model.plan.blocks)
        for name in [name for name, _ in blocks.named_children()][1:]:
            delattr(blocks, name)
    if tp > 1:
        parallel = Parallel.model_validate(
            {"strategy": "ddp", "tp": tp, "sequence_parallel": sequence_parallel}
        )
        apply_tensor_parallel(model, model.plan.tensor, parallel, build_mesh(parallel, tp, "cpu"))
    freeze(model, trained_names(method, model))
    return model


def _count_parameters(model: Model) -> tuple[Counter[str], Counter[str]]:
    """Count the parameters and the trained parameters of this rank, by part of the model.

    Parts are `begin`, `block` (all blocks), `finish`, and `tied`: parameters of both ends.
    """
    parameters: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    begin = set(model.plan.begin)
    finish = set(model.plan.finish)
    blocks = model.plan.blocks.split(".")[0]
    for name, parameter in model.named_parameters():
        top = name.split(".")[0]
        if top == blocks:
            parts = ["block"]
        elif top in finish:
            parts = ["finish", "begin", "tied"] if top in begin else ["finish"]
        else:
            parts = ["begin"]
        elements = local_tensor(parameter).numel()
        for part in parts:
            parameters[part] += elements
            trained[part] += elements if parameter.requires_grad else 0
    return parameters, trained
