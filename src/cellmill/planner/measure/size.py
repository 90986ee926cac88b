"""Sizes of a model, measured by running one tensor-parallel rank of it on the meta device.

A family, objective or fine-tuning method declares no sizes: they are measured with a batch of random
cells from the run's own tokenizer.

- Parameters, trained parameters and buffers are counted.
- FLOPs come from torch's flop counter.
- Kept activations and the workspace of a backward pass come from the lifetimes of storages.
- Tensor-parallel traffic comes from the calls of collectives.

Tensors on the meta device take no memory, and torch's "fake" process group sends nothing.
"""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import nn

from cellmill.config.parallel import Parallel
from cellmill.config.parts.methods import MethodConfig
from cellmill.finetune.method import Depth, Method, check_trains, load_method, trained_names
from cellmill.models.build import ModelSpec, build
from cellmill.models.family import Model
from cellmill.parallel.apply import apply_tensor_parallel, checkpoint_activations, freeze
from cellmill.parallel.materialize import plain_name
from cellmill.parallel.mesh import build_mesh
from cellmill.parallel.torch_private import FakeStore, local_tensor
from cellmill.planner.measure.load import ZERO, Load, Rates, separate
from cellmill.planner.measure.passes import PassMeasurements, measure_passes
from cellmill.planner.measure.workspace import Workspace, measure_workspace
from cellmill.planner.units import FLOAT32_BYTES, FORWARDS_PER_BACKWARD

# tokens of the measured batch: random fractions (masks) are within 1 % of their mean
SAMPLE_TOKENS = 1 << 14
SMALL_SAMPLE_TOKENS = 1 << 12  # for measurements without random fractions
ANY_QUANTILES = (0.0, 10.0)  # replace the corpus's quantiles: sizes do not depend on values


@dataclass(frozen=True)
class PartSize:
    """Sizes, in elements, of one part of a model.

    A part is what comes before the blocks, one block, what comes after them, or the parameters that
    both ends share.
    """

    parameters: int
    trained: int  # parameters with a gradient and optimizer state
    activations: Rates = ZERO  # kept for the backward pass; a block's with its input
    # Tensor-parallel collectives of the forward pass, for `finish` of both passes. They are measured
    # without sequence parallelism, from which `planner.traffic` derives them.
    collectives: int = 0  # number of calls
    collective_elements: Rates = ZERO  # of all calls together


@dataclass(frozen=True)
class Flops:
    """FLOPs of a model per token, per cell and per pair; its methods count the FLOPs for a load.

    They are measured on one tensor-parallel rank, and include all passes of a step.
    """

    n_blocks: int
    # Forward passes of each micro-batch: 1, or 2 with a coupled loss. The first of these two, without
    # `finish`, collects rows of the whole global batch (`train/batch_rows.py`).
    forward_passes: int
    validation_passes: int  # the same in a validation, which may leave a coupled loss out
    begin_per_token: float
    begin_per_cell: float
    block_per_token: float  # one block without its attention
    finish_per_token: float
    block_per_cell: float
    finish_per_cell: float
    block_per_pair: float  # one block's attention, per (query, key) pair of a cell

    def count(self, load: Load) -> float:
        """Count the FLOPs of all passes of the whole model over `load`."""
        blocks = self.n_blocks * self.count_block(load)
        return self.count_begin(load) + blocks + self.count_finish(load)

    def count_begin(self, load: Load) -> float:
        return self.begin_per_token * load.tokens + self.begin_per_cell * load.cells

    def count_block(self, load: Load) -> float:
        per_token = self.block_per_token * load.tokens
        return per_token + self.block_per_pair * load.pairs + self.block_per_cell * load.cells

    def count_finish(self, load: Load) -> float:
        return self.finish_per_token * load.tokens + self.finish_per_cell * load.cells


@dataclass(frozen=True)
class ModelSize:
    """Measured sizes of a model on one tensor-parallel rank."""

    begin: PartSize
    block: PartSize  # the block with the most trained parameters
    finish: PartSize
    tied: PartSize  # parameters that are in both `begin` and `finish`
    trained_by_block: tuple[int, ...]  # trained parameters of each block; a method may freeze some
    buffers: int  # elements of all buffers
    flops: Flops
    # Elements that pass from block to block: the hidden size per token, or per cell if rows of the
    # blocks are cells; this rank's share of it with sequence parallelism, and less if a view hides tokens.
    block_input: Rates
    selective: Rates  # `block.activations` with selective activation checkpointing
    block_workspace: Rates  # peak of a block's backward pass above its kept activations
    finish_workspace: Workspace

    @property
    def n_blocks(self) -> int:
        return self.flops.n_blocks

    @property
    def parameters(self) -> int:
        outside = self.begin.parameters + self.finish.parameters - self.tied.parameters
        return self.n_blocks * self.block.parameters + outside


# by model and fine-tuning method, number of tensor-parallel ranks, and sequence parallelism
_SIZES: dict[tuple[str, int, bool], ModelSize] = {}


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
    """Measure only the FLOPs, and without tensor parallelism: faster than `measure_size`."""
    with _prepare(spec, finetune) as (fitted, method):
        model = _build(fitted, method, one_block=True)
        n_blocks = Depth.of(build(fitted, method.transform)).n_blocks
        long = measure_passes(model, fitted, SAMPLE_TOKENS)
        short = measure_passes(model, fitted, SAMPLE_TOKENS, length_divisor=2)
        return _count_flops(model, n_blocks, long, short)


@contextmanager
def _prepare(
    spec: ModelSpec, finetune: MethodConfig | None, tp: int = 1
) -> Iterator[tuple[ModelSpec, Method]]:
    """Yield the specification with a fitted tokenizer, and the fine-tuning method, for measurements.

    Until the end there is no garbage collection, and with tp > 1 a process group that sends nothing.
    """
    # lifetimes must not depend on when Python collects reference cycles, which DTensor creates
    was_enabled = gc.isenabled()
    assert tp == 1 or not dist.is_initialized(), (
        "sizes under tensor parallelism are measured in a process without a group"
    )
    if tp > 1:
        dist.init_process_group("fake", rank=0, world_size=tp, store=FakeStore())
    gc.disable()
    try:
        method = load_method(finetune or MethodConfig.model_validate({}))
        yield replace(spec, tokens=spec.tokens.fitted(ANY_QUANTILES)), method
    finally:
        if tp > 1:
            dist.destroy_process_group()
        if was_enabled:
            gc.enable()


def _measure_size(spec: ModelSpec, method: Method, tp: int, sequence_parallel: bool) -> ModelSize:
    """Count the parameters of the whole model, and measure passes of a model of one block."""
    whole_model = _build(spec, method, tp, sequence_parallel)
    check_trains(method, (plain_name(name) for name, _ in whole_model.named_parameters()))
    blocks = whole_model.get_submodule(whole_model.plan.blocks)
    trained_by_block = tuple(map(_count_trained, blocks.children()))
    parts = _count_parameters(whole_model, trained_by_block)

    model = _build(spec, method, tp, sequence_parallel, one_block=True)
    # with sequence parallelism the trainer pads a batch to a multiple of tokens
    token_multiple = tp if sequence_parallel else 1
    # Passes over cells of full length, and of half of it. The first ones warm up: more is kept alive when
    # DTensor first sees shapes of an operation, or when a pass imports a module.
    for _ in range(2):
        long = measure_passes(model, spec, SAMPLE_TOKENS, token_multiple)
        short = measure_passes(model, spec, SAMPLE_TOKENS, token_multiple, length_divisor=2)
    plain_long = long  # without sequence parallelism
    plain_short = short
    if sequence_parallel:
        plain_model = _build(spec, method, tp, one_block=True)
        plain_long = measure_passes(plain_model, spec, SAMPLE_TOKENS)
        plain_short = measure_passes(plain_model, spec, SAMPLE_TOKENS, length_divisor=2)
    finish_kept, finish_workspace = measure_workspace(model, spec, token_multiple)
    kept = {
        "begin": separate(long.load, long.begin.kept, short.load, short.begin.kept),
        "block": separate(long.load, long.block.kept, short.load, short.block.kept),
        "finish": finish_kept,
    }
    for name, activations in kept.items():
        long_window = getattr(plain_long, name).window
        short_window = getattr(plain_short, name).window
        collective_elements = separate(
            plain_long.load,
            long_window.collective_bytes / FLOAT32_BYTES,
            plain_short.load,
            short_window.collective_bytes / FLOAT32_BYTES,
        )
        parts[name] = replace(
            parts[name],
            activations=activations,
            collective_elements=collective_elements,
            collectives=long_window.collectives,
        )
    return ModelSize(
        **parts,
        trained_by_block=trained_by_block,
        buffers=sum(buffer.numel() for buffer in whole_model.buffers()),
        flops=_count_flops(model, len(trained_by_block), long, short),
        block_input=separate(long.load, long.block_input, short.load, short.block_input),
        selective=_measure_selective(spec, method, tp, sequence_parallel),
        block_workspace=separate(
            long.load, long.block.workspace, short.load, short.block.workspace
        ),
        finish_workspace=finish_workspace,
    )


def _measure_selective(spec: ModelSpec, method: Method, tp: int, sequence_parallel: bool) -> Rates:
    """Measure the elements that a block keeps with selective activation checkpointing."""
    model = _build(spec, method, tp, sequence_parallel, one_block=True)
    checkpoint_activations(model, model.plan.blocks, "selective")
    token_multiple = tp if sequence_parallel else 1
    long = measure_passes(model, spec, SMALL_SAMPLE_TOKENS, token_multiple)
    short = measure_passes(model, spec, SMALL_SAMPLE_TOKENS, token_multiple, length_divisor=2)
    return separate(long.load, long.block.kept, short.load, short.block.kept)


def _count_flops(
    model: Model, n_blocks: int, long: PassMeasurements, short: PassMeasurements
) -> Flops:
    """Derive the FLOPs from passes over cells of two lengths, `long` and half of it."""
    long_flops = long.block.window.flops
    short_flops = short.block.window.flops
    block_per_token, block_per_cell = separate(long.load, long_flops, short.load, short_flops)
    begin = separate(long.load, long.begin.window.flops, short.load, short.begin.window.flops)
    finish = separate(long.load, long.finish.window.flops, short.load, short.finish.window.flops)
    # FLOPs per token that grow with the length of cells belong to attention
    per_pair = 0.0
    long_pairs_per_token = long.load.pairs / long.load.tokens
    more_pairs_per_token = long_pairs_per_token - short.load.pairs / short.load.tokens
    if more_pairs_per_token > 0 and not block_per_cell:
        growth = long_flops / long.load.tokens - short_flops / short.load.tokens
        per_pair = max(0.0, growth / more_pairs_per_token)
        block_per_token -= per_pair * long_pairs_per_token
    forward_passes = 2 if model.objective.coupled_widths else 1
    validation_passes = forward_passes if model.objective.validates_coupled_loss else 1
    # all passes of a step have the FLOPs of this many forward passes
    forwards_per_step = forward_passes + FORWARDS_PER_BACKWARD
    return Flops(
        n_blocks=n_blocks,
        forward_passes=forward_passes,
        validation_passes=validation_passes,
        begin_per_token=forwards_per_step * begin.per_token,
        begin_per_cell=forwards_per_step * begin.per_cell,
        block_per_token=forwards_per_step * block_per_token,
        block_per_cell=forwards_per_step * block_per_cell,
        block_per_pair=forwards_per_step * per_pair,
        # the window of `finish` has both passes, since a chunked loss has all FLOPs in its forward pass
        finish_per_token=finish.per_token,
        finish_per_cell=finish.per_cell,
    )


def _build(
    spec: ModelSpec,
    method: Method,
    tp: int = 1,
    sequence_parallel: bool = False,
    one_block: bool = False,
) -> Model:
    """Build the model of one tensor-parallel rank, optionally with only one of its blocks.

    Blocks are equal, except that the method may freeze some; the one that trains the most is left.
    """
    model = build(spec, method.transform)
    is_trained = trained_names(method, model)
    if one_block:
        freeze(model, is_trained)
        blocks = model.get_submodule(model.plan.blocks)
        by_n_trained = sorted(
            blocks.named_children(), key=lambda child: _count_trained(child[1]), reverse=True
        )
        for name, _ in by_n_trained[1:]:
            delattr(blocks, name)
    if tp > 1:
        parallel = Parallel.model_validate(
            {"strategy": "ddp", "tp": tp, "sequence_parallel": sequence_parallel}
        )
        apply_tensor_parallel(model, model.plan.tensor, parallel, build_mesh(parallel, tp, "cpu"))
    freeze(model, is_trained)
    return model


def _count_trained(module: nn.Module) -> int:
    """Count the parameters of this rank that have a gradient."""
    return sum(
        local_tensor(weight).numel() for weight in module.parameters() if weight.requires_grad
    )


def _count_parameters(model: Model, trained_by_block: tuple[int, ...]) -> dict[str, PartSize]:
    """Count the parameters and the trained parameters of this rank, by part of the model.

    Parts are `begin`, `block` (the one that trains the most), `finish`, and `tied`: parameters of both
    ends.
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
    parameters["block"] //= max(len(trained_by_block), 1)
    trained["block"] = max(trained_by_block, default=0)
    return {
        part: PartSize(parameters[part], trained[part])
        for part in ("begin", "block", "finish", "tied")
    }
