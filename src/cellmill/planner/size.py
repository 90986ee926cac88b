"""Sizes of a model, measured: it is built on the meta device as one tensor-parallel process has it, and run once.

Parameters, buffers and trained parameters are counted by part; FLOPs by torch's flop counter; what a pass keeps for
its backward pass, and what that allocates besides, from the lifetimes of storages; what tensor parallel sends from
the collectives. So a family, an objective or a fine-tuning method owes no numbers. The batch is random cells through
the run's own tokenizer; tensors have shapes and no memory, and a process group of torch's "fake" backend sends nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from cellmill.config.finetune import MethodConfig
from cellmill.config.options import TrainOptions
from cellmill.config.parallel import Parallel
from cellmill.data.tokens import Batch, Tokenizer
from cellmill.finetune.method import Method, load_method
from cellmill.models.batch import on_device, to_tensors
from cellmill.models.build import ModelSpec, build
from cellmill.models.family import Model
from cellmill.parallel.apply import freeze
from cellmill.parallel.mesh import build_mesh
from cellmill.parallel.recompute import checkpoint_activations
from cellmill.parallel.tensor_parallel import apply_tensor_parallel
from cellmill.planner.meter import OperationMeter

FLOAT32 = 4
SAMPLE_TOKENS = 1 << 14  # of the batch that is measured: a drawn fraction of them is within 1 %
CELL_TOKENS = 128  # of its cells, or fewer
PASSES = 3  # forward, and twice as much backward: gradients of inputs and of weights
WORKSPACE_TOKENS = tuple(1 << power for power in range(8, 19, 2))
META = torch.device("meta")


@dataclass(frozen=True)
class PartSize:
    """What lies before the blocks, one block, or what follows them. Elements and FLOPs, not bytes."""

    parameters: int
    trained: int
    """Parameters with a gradient and optimizer state."""
    flops_per_token: float
    """Forward and backward; of a block without its attention."""
    activations_per_token: float
    """Kept from the forward for the backward pass; of a block with its input."""
    sums_per_token: float
    """Combined over tensor-parallel processes, without sequence parallel: of a block in each of both passes."""


@dataclass(frozen=True)
class ModelSize:
    """Measured sizes of what one tensor-parallel process holds of a model."""

    blocks: int
    begin: PartSize
    block: PartSize
    finish: PartSize
    tied: PartSize
    """Parameters that `begin` and `finish` both have; the rest is 0."""
    buffers: int
    """Elements of all buffers."""
    width: int
    """Elements of a token that go from block to block."""
    pair_flops: float
    """Forward and backward FLOPs of one block's attention for each (query, key) pair of a cell."""
    selective_per_token: float
    """`block.activations_per_token` with selective activation checkpointing."""
    working_per_token: float
    """Peak of a block's backward pass above what it keeps."""
    workspace: tuple[tuple[int, float], ...]
    """(tokens of a micro-batch, peak elements of `finish` above `finish.activations_per_token`): logits and theirs."""

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.blocks * self.block.parameters + self.outside_parameters

    @property
    def outside_parameters(self) -> int:
        """Those outside the blocks."""
        return self.begin.parameters + self.finish.parameters - self.tied.parameters

    @property
    def flops_per_token(self) -> float:
        """Forward and backward FLOPs of one token, attention left out."""
        outside = self.begin.flops_per_token + self.finish.flops_per_token
        return self.blocks * self.block.flops_per_token + outside

    @property
    def flops_per_token_pair(self) -> float:
        """Forward and backward FLOPs of the attention of all blocks for each (query, key) pair of a cell."""
        return self.blocks * self.pair_flops

    def workspace_of(self, tokens: float) -> float:
        """Peak elements of `finish` beside its kept activations, for a micro-batch of `tokens`."""
        sizes, elements = zip(*self.workspace)
        if tokens >= sizes[-1]:  # as it grew last
            slope = (elements[-1] - elements[-2]) / (sizes[-1] - sizes[-2])
            return float(elements[-1] + slope * (tokens - sizes[-1]))
        return float(np.interp(tokens, (0, *sizes), (0.0, *elements)))


_measured: dict[tuple[str, int, bool], ModelSize] = {}


def measure(
    spec: ModelSpec, tp: int = 1, sequence_parallel: bool = False, finetune: MethodConfig | None = None
) -> ModelSize:
    """Return the sizes of one of `tp` tensor-parallel processes' part of the model that `spec` describes.

    As the method `finetune` changes and freezes it. With tp > 1 there must be no default process group in this
    process: a fake one is made and destroyed.
    """
    key = (repr((spec, finetune)), tp, sequence_parallel)
    if key not in _measured:
        # lifetimes must not depend on when Python looks for reference cycles, of which DTensor makes some
        collects = gc.isenabled()
        gc.disable()
        try:
            method = load_method(finetune or MethodConfig.model_validate({}))
            with _tensor_parallel(tp, sequence_parallel) as apply:
                _measured[key] = _measure(_Maker(spec, method, apply), tp)
        finally:
            if collects:
                gc.enable()
    return _measured[key]


def size_of(options: TrainOptions, n_genes: int) -> ModelSize:
    """Return the sizes of what one process of a run holds, but for pipeline stages and shards."""
    parallel = options.parallel
    return measure(ModelSpec.of(options, n_genes), parallel.tp, parallel.sequence_parallel, options.finetune)


@contextmanager
def _tensor_parallel(tp: int, sequence_parallel: bool) -> Iterator[Any]:
    """A function that cuts a model for process 0 of `tp`, with or without sequence parallel as asked for."""
    if tp == 1:
        yield lambda model, whole_tokens=False: None
        return
    assert not dist.is_initialized(), "sizes under tensor parallel are measured in a process without a group"
    dist.init_process_group("fake", rank=0, world_size=tp, store=FakeStore())
    try:

        def apply(model: Model, whole_tokens: bool = False) -> None:
            given = {"strategy": "ddp", "tp": tp, "sequence_parallel": sequence_parallel and not whole_tokens}
            parallel = Parallel.model_validate(given)
            apply_tensor_parallel(model, model.plan.tensor, parallel, build_mesh(parallel, tp, "cpu"))

        yield apply
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class _Maker:
    """Makes the model again and again: what is measured changes it."""

    spec: ModelSpec
    method: Method
    apply: Any

    def whole(self) -> Model:
        """The model of this process, frozen as the method says."""
        return self._laid_out(build(self.spec, self.method.transform))

    def one_block(self, whole_tokens: bool = False) -> Model:
        """The same with the first of its blocks alone: they are all alike."""
        model = build(self.spec, self.method.transform)
        blocks = model.get_submodule(model.plan.blocks)
        for name in [name for name, _ in blocks.named_children()][1:]:
            blocks._modules.pop(name)
        return self._laid_out(model, whole_tokens)

    def _laid_out(self, model: Model, whole_tokens: bool = False) -> Model:
        self.apply(model, whole_tokens)
        freeze(model, self.method.trains)
        return model


def _measure(maker: _Maker, tp: int) -> ModelSize:
    spec, model = maker.spec, maker.one_block()
    cell_tokens = min(spec.tokens.max_tokens, spec.n_genes, CELL_TOKENS)
    if tp > 1:
        _Passes(model, _sample(spec, 1, tp))  # DTensor finds out how to cut each operation when it first sees it
    long, short = (_Passes(model, _sample(spec, n, SAMPLE_TOKENS)) for n in (cell_tokens, max(1, cell_tokens // 2)))
    per_pair = 0.0
    if long.pairs_per_token > short.pairs_per_token:
        difference = long.block.flops / long.tokens - short.block.flops / short.tokens
        per_pair = difference / (long.pairs_per_token - short.pairs_per_token)
    # collectives are counted without sequence parallel, from which the planner derives those with it
    whole = long if tp == 1 else _Passes(maker.one_block(whole_tokens=True), _sample(spec, cell_tokens, 1 << 12))
    selective = maker.one_block()
    checkpoint_activations(selective, selective.plan.blocks, "selective")
    finish = {n: _Finish(model, _sample(spec, cell_tokens, n)) for n in WORKSPACE_TOKENS}
    most, fewer = finish[WORKSPACE_TOKENS[-1]], finish[WORKSPACE_TOKENS[-2]]
    # what does not grow with the tokens (gradients of a table, made in the forward pass) belongs to the workspace
    kept_by_finish = (most.kept - fewer.kept) / (most.tokens - fewer.tokens)
    full = maker.whole()
    counts, blocks = _parts(full), len(list(full.get_submodule(full.plan.blocks).children()))

    def part(name: str, flops: float, kept: float, sums: float) -> PartSize:
        return PartSize(*counts[name], PASSES * flops / long.tokens, kept, sums / FLOAT32 / whole.tokens)

    block_flops = long.block.flops - per_pair * long.pairs_per_token * long.tokens
    each = [count // max(blocks, 1) for count in counts["blocks"]]
    counts["blocks"] = (each[0], each[1])
    return ModelSize(
        blocks=blocks,
        begin=part("begin", long.begin.flops, long.kept_by_begin, whole.begin.sums_bytes),
        block=part("blocks", block_flops, long.kept_by_block, whole.block.sums_bytes),
        finish=part("finish", most.flops / most.tokens * long.tokens / PASSES, kept_by_finish, whole.finish_sums_bytes),
        tied=part("tied", 0, 0, 0),
        buffers=sum(buffer.numel() for buffer in full.buffers()),
        width=long.width,
        pair_flops=PASSES * per_pair,
        selective_per_token=_Passes(selective, _sample(spec, cell_tokens, 1 << 12)).kept_by_block,
        working_per_token=long.working,
        workspace=tuple((n, max(0.0, part.peak - kept_by_finish * part.tokens)) for n, part in finish.items()),
    )


def _parts(model: Model) -> dict[str, tuple[int, int]]:
    """(Parameters, trained parameters) of this process by part of the model."""
    begin, finish, blocks = set(model.plan.begin), set(model.plan.finish), model.plan.blocks.split(".")[0]
    counts = {part: [0, 0] for part in ("begin", "blocks", "finish", "tied")}
    for name, parameter in model.named_parameters():
        top = name.split(".")[0]
        own = _local_numel(parameter)
        if top == blocks:
            parts = ["blocks"]
        elif top in finish:
            parts = ["finish", "begin", "tied"] if top in begin else ["finish"]
        else:
            parts = ["begin"]
        for part in parts:
            counts[part][0] += own
            counts[part][1] += own * parameter.requires_grad
    return {part: (total, trained) for part, (total, trained) in counts.items()}


def _local_numel(parameter: nn.Parameter) -> int:
    to_local = getattr(parameter, "to_local", None)
    return int(parameter.numel() if to_local is None else to_local().numel())


def _sample(spec: ModelSpec, cell_tokens: int, tokens: int) -> Batch:
    """Random cells of `cell_tokens` tokens, about `tokens` of them in all, by the run's own tokenizer."""
    rng = np.random.Generator(np.random.Philox(0))
    cells = max(1, tokens // cell_tokens)
    genes = rng.integers(0, spec.n_genes, cells * cell_tokens, dtype=np.int32)
    counts = rng.integers(1, 50, cells * cell_tokens, dtype=np.uint32)
    starts = np.arange(cells + 1, dtype=np.int64) * cell_tokens
    tokenizer: Tokenizer = spec.tokens.load()(spec.tokens)
    return Batch(*tokenizer.tokenize(genes, counts, starts), np.arange(cells, dtype=np.int64))


class _Passes:
    """A forward and a backward pass, part by part, metered."""

    def __init__(self, model: Model, batch: Batch) -> None:
        prepared, self.tokens = _prepared(model, batch), int(batch.cu_seqlens[-1])
        self.pairs_per_token = float(np.square(np.diff(batch.cu_seqlens), dtype=np.float64).sum() / self.tokens)
        with OperationMeter() as meter:
            with meter.window() as self.begin:
                entered = model.begin(prepared)
            self.kept_by_begin = self._per_token(self.begin.live_bytes() - entered.nbytes)
            self.width = entered.numel() // self.tokens
            x = torch.empty_like(entered, requires_grad=True)
            with meter.window() as self.block:
                left = model.through(x, prepared)
            self.kept_by_block = self._per_token(self.block.live_bytes() - left.nbytes + x.nbytes)
            with meter.window() as backward:
                left.backward(torch.empty_like(left))
            self.working = self._per_token(backward.peak_bytes(_gradients(model)))
            x = torch.empty_like(left, requires_grad=True)
            with meter.window() as finish:
                model.finish(x, prepared).backward()
            self.finish_sums_bytes = finish.sums_bytes
        model.zero_grad(set_to_none=True)

    def _per_token(self, n_bytes: int) -> float:
        return n_bytes / FLOAT32 / self.tokens


class _Finish:
    """What follows the blocks, for micro-batches of any size."""

    def __init__(self, model: Model, batch: Batch) -> None:
        prepared, self.tokens = _prepared(model, batch), int(batch.cu_seqlens[-1])
        x = torch.empty_like(model.begin(prepared), requires_grad=True)
        with OperationMeter() as meter:
            with meter.window() as forward:
                loss = model.finish(x, prepared)
            with meter.window() as backward:
                loss.backward()
        self.flops = forward.flops + backward.flops  # a chunked loss makes its gradients in the forward pass
        self.kept = (forward.live_bytes() + x.nbytes) / FLOAT32
        above = forward.live_bytes() + backward.peak_bytes(_gradients(model))
        self.peak = (max(forward.peak_bytes(), above) + x.nbytes) / FLOAT32
        model.zero_grad(set_to_none=True)


def _prepared(model: Model, batch: Batch) -> Any:
    """The batch on the meta device; masks are drawn on the CPU before, since their number is a shape."""
    return on_device(model.prepare(to_tensors(batch), seed=0, step=0), META)


def _gradients(model: Model) -> frozenset[int]:
    """Storages of the parameters' gradients, which are counted as such."""
    gradients = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    local = (getattr(gradient, "_local_tensor", gradient) for gradient in gradients)
    return frozenset(gradient.untyped_storage()._cdata for gradient in local)
