"""Sizes of a model, measured by running one tensor-parallel rank of it on the meta device.

A family, objective or fine-tuning method declares no sizes. The sizes are measured with batches of
random cells, which the run's own tokenizer turns into tokens.

- Parameters, trained parameters and buffers are counted.
- FLOPs come from torch's flop counter.
- Activations that are kept for the backward pass, and the workspace of a backward pass, come from the
  lifetimes of storages.
- Tensor-parallel traffic comes from the calls of collectives.

Tensors on the meta device take no memory, and torch's "fake" process group sends nothing.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import nn

from cellmill.config.parallel import Parallel
from cellmill.config.parts.methods import MethodConfig
from cellmill.finetune.method import Depth, Method, check_trains, load_method, make_is_trained
from cellmill.models.build import ModelSpec, build
from cellmill.models.family import Model
from cellmill.parallel.apply import apply_tensor_parallel, checkpoint_activations, freeze
from cellmill.parallel.materialize import plain_name
from cellmill.parallel.mesh import build_mesh
from cellmill.parallel.torch_private import FakeStore, local_tensor
from cellmill.planner.measure.load import ZERO, Load, Rates
from cellmill.planner.measure.passes import (
    PartMeasurement,
    PassMeasurements,
    TwoLengths,
    measure_two_lengths,
)
from cellmill.planner.measure.workspace import Workspace, measure_finish
from cellmill.planner.units import FLOAT32_BYTES, FORWARDS_PER_BACKWARD

# Tokens of a measured batch. Of this many tokens, the masked fraction is within 1 % of its mean.
SAMPLE_TOKENS = 1 << 14
SMALL_SAMPLE_TOKENS = 1 << 12  # for measurements that do not depend on masks
# The tokenizer is fitted with these instead of the corpus's quantiles: sizes do not depend on values.
ANY_QUANTILES = (0.0, 10.0)


@dataclass(frozen=True)
class PartSize:
    """Sizes, in elements, of one part of a model.

    There are four parts: `begin` is what comes before the blocks, `block` is one block, `finish` is what
    comes after the blocks, and `tied` are the parameters that `begin` and `finish` share.
    """

    parameters: int
    trained: int  # parameters with a gradient and optimizer state
    # activations that are kept for the backward pass, with the input of `block` and of `finish`
    activations: Rates = ZERO
    # Tensor-parallel collectives of the forward pass, and for `finish` of the backward pass too. They are
    # measured without sequence parallelism; `planner.traffic` derives the collectives with it.
    collectives: int = 0  # number of calls
    collective_elements: Rates = ZERO  # elements of the full tensors of all calls together


@dataclass(frozen=True)
class Flops:
    """FLOPs of a model per token, per cell and per pair, on one tensor-parallel rank.

    The rates include all forward and backward passes of a step. The methods count the FLOPs for a load.
    """

    n_blocks: int
    # Forward passes of each micro-batch: 1, or 2 with a coupled loss. The first of these two has no
    # `finish`: it only collects rows of the whole global batch (`train/batch_rows.py`).
    forward_passes: int
    # Forward passes of each micro-batch in a validation: 1, or 2 if validation takes the coupled loss too.
    validation_passes: int
    begin_per_token: float
    begin_per_cell: float
    block_per_token: float  # one block without its attention
    finish_per_token: float
    block_per_cell: float
    finish_per_cell: float
    block_per_pair: float  # attention of one block, per (query, key) pair of a cell

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
    # Elements that one block passes to the next: the hidden size per token, or per cell in families
    # whose blocks compute one row per cell. With sequence parallelism it is this rank's share. Tokens that
    # a view hides from the model do not count.
    block_input: Rates
    selective_activations: Rates  # `block.activations` with selective activation checkpointing
    block_workspace: Rates  # peak of a block's backward pass above its kept activations
    finish_workspace: Workspace

    @property
    def n_blocks(self) -> int:
        return self.flops.n_blocks

    @property
    def parameters(self) -> int:
        outside = self.begin.parameters + self.finish.parameters - self.tied.parameters
        return self.n_blocks * self.block.parameters + outside


# Sizes that this process has measured. A key has the model with its fine-tuning method, the number of
# tensor-parallel ranks, and True for sequence parallelism.
_SIZES: dict[tuple[str, int, bool], ModelSize] = {}


def measure_size(
    spec: ModelSpec,
    tp: int = 1,
    sequence_parallel: bool = False,
    finetune: MethodConfig | None = None,
) -> ModelSize:
    """Measure a model's sizes on one of `tp` tensor-parallel ranks.

    A process measures each model once, and then remembers its sizes. With tp > 1 the process must have
    no default process group.
    """
    key = (repr((spec, finetune)), tp, sequence_parallel)
    if key not in _SIZES:
        with _prepare(spec, finetune, tp) as (fitted, method):
            _SIZES[key] = _measure_size(fitted, method, tp, sequence_parallel)
    return _SIZES[key]


def measure_flops(spec: ModelSpec, finetune: MethodConfig) -> Flops:
    """Measure the FLOPs of a model without tensor parallelism. This is faster than `measure_size`."""
    with _prepare(spec, finetune) as (fitted, method):
        model = _build(fitted, method, one_block=True)
        n_blocks = Depth.of(build(fitted, method.transform)).n_blocks
        return _count_flops(model, n_blocks, measure_two_lengths(model, fitted, SAMPLE_TOKENS))


@contextmanager
def _prepare(
    spec: ModelSpec, finetune: MethodConfig | None, tp: int = 1
) -> Iterator[tuple[ModelSpec, Method]]:
    """Prepare this process for measurements, and restore it at the end.

    Yield the specification with a fitted tokenizer, and the fine-tuning method. Until the end, Python
    collects no garbage. With tp > 1 there is a process group that sends nothing.
    """
    assert tp == 1 or not dist.is_initialized(), (
        "sizes under tensor parallelism are measured in a process without a group"
    )
    if tp > 1:
        dist.init_process_group("fake", rank=0, world_size=tp, store=FakeStore())
    # DTensor creates reference cycles. The lifetime of a storage must not depend on when Python collects
    # them.
    was_enabled = gc.isenabled()
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
    """Count the parameters of the whole model, and measure passes of a model with one block."""
    whole_model = _build(spec, method, tp, sequence_parallel)
    check_trains(method, (plain_name(name) for name, _ in whole_model.named_parameters()))
    blocks = whole_model.get_submodule(whole_model.plan.blocks)
    trained_by_block = tuple(map(_count_trained, blocks.children()))
    parts = _count_parameters(whole_model, trained_by_block)

    model = _build(spec, method, tp, sequence_parallel, one_block=True)
    # with sequence parallelism the trainer pads a batch to a multiple of tokens
    token_multiple = tp if sequence_parallel else 1

    # The first of two rounds only warms up. In it more storages stay alive: DTensor sees the shapes of an
    # operation for the first time, and a pass may import a module.
    measure_two_lengths(model, spec, SAMPLE_TOKENS, token_multiple)
    by_length = measure_two_lengths(model, spec, SAMPLE_TOKENS, token_multiple)

    # collectives are measured without sequence parallelism
    plain_by_length = by_length
    if sequence_parallel:
        plain_model = _build(spec, method, tp, one_block=True)
        plain_by_length = measure_two_lengths(plain_model, spec, SAMPLE_TOKENS)

    finish = measure_finish(model, spec, token_multiple)

    return ModelSize(
        begin=_add_measurements(
            parts["begin"], by_length, plain_by_length, lambda passes: passes.begin
        ),
        block=_add_measurements(
            parts["block"], by_length, plain_by_length, lambda passes: passes.block
        ),
        finish=replace(
            _add_measurements(
                parts["finish"], by_length, plain_by_length, lambda passes: passes.finish
            ),
            activations=finish.kept,
        ),
        tied=parts["tied"],
        trained_by_block=trained_by_block,
        buffers=sum(buffer.numel() for buffer in whole_model.buffers()),
        flops=_count_flops(model, len(trained_by_block), by_length),
        block_input=by_length.fit(lambda passes: passes.block_input),
        selective_activations=_measure_selective(spec, method, tp, sequence_parallel),
        block_workspace=by_length.fit(lambda passes: passes.block.workspace),
        finish_workspace=finish.workspace,
    )


def _add_measurements(
    part: PartSize,
    by_length: TwoLengths,
    plain_by_length: TwoLengths,
    get_part: Callable[[PassMeasurements], PartMeasurement],
) -> PartSize:
    """Add to the size of a part its kept activations, and its tensor-parallel collectives.

    The passes of `plain_by_length` were measured without sequence parallelism. `get_part` takes the part
    from the measurements of one pass.
    """
    return replace(
        part,
        activations=by_length.fit(lambda passes: get_part(passes).kept),
        collectives=get_part(plain_by_length.long).window.collectives,
        collective_elements=plain_by_length.fit(
            lambda passes: get_part(passes).window.collective_bytes / FLOAT32_BYTES
        ),
    )


def _measure_selective(spec: ModelSpec, method: Method, tp: int, sequence_parallel: bool) -> Rates:
    """Measure the elements that a block keeps with selective activation checkpointing."""
    model = _build(spec, method, tp, sequence_parallel, one_block=True)
    checkpoint_activations(model, model.plan.blocks, "selective")
    token_multiple = tp if sequence_parallel else 1
    by_length = measure_two_lengths(model, spec, SMALL_SAMPLE_TOKENS, token_multiple)
    return by_length.fit(lambda passes: passes.block.kept)


def _count_flops(model: Model, n_blocks: int, by_length: TwoLengths) -> Flops:
    """Derive the FLOPs of all passes of a step from measured passes of a model with one block."""
    begin = by_length.fit(lambda passes: passes.begin.window.flops)
    finish = by_length.fit(lambda passes: passes.finish.window.flops)
    block_per_token, block_per_cell = by_length.fit(lambda passes: passes.block.window.flops)

    # In long cells a token has more (query, key) pairs than in short cells. If a block also has more FLOPs
    # per token in long cells, attention has these FLOPs.
    per_pair = 0.0
    long, short = by_length
    long_pairs_per_token = long.load.pairs / long.load.tokens
    more_pairs_per_token = long_pairs_per_token - short.load.pairs / short.load.tokens
    if more_pairs_per_token > 0 and not block_per_cell:
        long_flops_per_token = long.block.window.flops / long.load.tokens
        short_flops_per_token = short.block.window.flops / short.load.tokens
        more_flops_per_token = long_flops_per_token - short_flops_per_token
        per_pair = max(0.0, more_flops_per_token / more_pairs_per_token)
        block_per_token -= per_pair * long_pairs_per_token

    forward_passes = 2 if model.objective.coupled_widths else 1
    validation_passes = forward_passes if model.objective.validates_coupled_loss else 1
    # all passes of a step together have the FLOPs of this many forward passes
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
        # the window of `finish` already has both passes: a chunked loss computes its gradients in the
        # forward pass
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

    Blocks are equal, except that the method may freeze weights in some. The block that trains the most is
    kept.
    """
    model = build(spec, method.transform)
    is_trained = make_is_trained(method, model)
    if one_block:
        # `_count_trained` must see what the method freezes
        freeze(model, is_trained)
        blocks = model.get_submodule(model.plan.blocks)
        largest_first = sorted(
            blocks.named_children(), key=lambda child: _count_trained(child[1]), reverse=True
        )
        for name, _ in largest_first[1:]:
            delattr(blocks, name)
    if tp > 1:
        parallel = Parallel.model_validate(
            {"strategy": "ddp", "tp": tp, "sequence_parallel": sequence_parallel}
        )
        apply_tensor_parallel(model, model.plan.tensor, parallel, build_mesh(parallel, tp, "cpu"))
    # again, since tensor parallelism has replaced the parameters by new ones
    freeze(model, is_trained)
    return model


def _count_trained(module: nn.Module) -> int:
    """Count the elements of this rank's trained parameters."""
    return sum(
        local_tensor(weight).numel() for weight in module.parameters() if weight.requires_grad
    )


def _count_parameters(model: Model, trained_by_block: tuple[int, ...]) -> dict[str, PartSize]:
    """Count the parameters and the trained parameters of this rank, by part of the model.

    Part `block` has the parameters of one block, and the trained parameters of the block that trains the
    most. `PartSize` describes the other parts.
    """
    parameters: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    begin = set(model.plan.begin)
    finish = set(model.plan.finish)
    blocks = model.plan.blocks.split(".")[0]
    for name, parameter in model.named_parameters():
        module = name.split(".")[0]
        if module == blocks:
            parts = ["block"]
        elif module in finish:
            parts = ["finish", "begin", "tied"] if module in begin else ["finish"]
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
