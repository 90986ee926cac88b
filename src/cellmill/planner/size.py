"""Sizes of a model, measured on the meta device: built as one tensor-parallel rank holds it, run once.

Parameters, buffers and trained parameters are counted by part; FLOPs come from torch's flop
counter, kept activations and the workspace of a backward pass from the lifetimes of storages,
tensor-parallel traffic from the collectives. So a family, objective or fine-tuning method declares
no sizes. The batch has random cells from the run's own tokenizer. Tensors on the meta device take
no memory, and torch's "fake" process group sends nothing.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from cellmill.config.parallel import Parallel
from cellmill.config.parts.methods import MethodConfig
from cellmill.data.stream.batch import Batch, Tokenizer, make_batch
from cellmill.finetune.method import Method, check_trains, load_method, trained_names
from cellmill.models.batch import copy_to_device, pad_batch, to_tensors
from cellmill.models.build import ModelSpec, build
from cellmill.models.family import Model
from cellmill.parallel.apply import apply_tensor_parallel, checkpoint_activations, freeze
from cellmill.parallel.materialize import plain_name
from cellmill.parallel.mesh import build_mesh
from cellmill.parallel.torch_private import FakeStore, storage_key
from cellmill.planner.meter import OperationMeter, Window

FLOAT32 = 4  # bytes
# tokens of the measured batch: random fractions (masks) are within 1 % of their mean
SAMPLE_TOKENS = 1 << 14
SMALL_SAMPLE_TOKENS = 1 << 12  # for measurements without random fractions
CELL_TOKENS = 128  # tokens of each measured cell, or fewer
# FLOPs are counted by cell if cells of half the length have more than this fraction more per token
PER_CELL_FRAC = 0.05
PASSES = 3  # one forward, and twice as much backward: gradients of inputs and of weights
WORKSPACE_TOKENS = tuple(1 << power for power in range(8, 19, 2))
ANY_QUANTILES = (0.0, 10.0)  # replace the corpus's quantiles: sizes do not depend on values
META = torch.device("meta")


@dataclass(frozen=True)
class PartSize:
    """Sizes of the part before the blocks, of one block, or of the part after them, in elements."""

    parameters: int
    trained: int  # parameters with a gradient and optimizer state
    activations_per_token: float = 0.0  # kept for the backward pass; a block's with its input
    # elements reduced over tp without sequence parallelism; for a block, in each of both passes
    sums_per_token: float = 0.0


@dataclass(frozen=True)
class Flops:
    """Measured FLOPs of a model on one tensor-parallel rank, forward and backward."""

    blocks: int
    # per token
    begin: float
    block: float  # one block without its attention
    finish: float
    # further FLOPs per cell: blocks whose rows are cells, heads of the cell embedding
    block_by_cell: float
    finish_by_cell: float
    pair: float  # one block's attention, per (query, key) pair of a cell

    def of(
        self,
        tokens: float,
        pairs: float,
        cells: float,
        blocks: int | None = None,
        first: bool = True,
        last: bool = True,
    ) -> float:
        """FLOPs for `cells` cells of `tokens` tokens and `pairs` (query, key) pairs in total."""
        blocks = self.blocks if blocks is None else blocks
        ends = int(first) * self.begin + int(last) * self.finish
        per_token = blocks * self.block + ends
        per_cell = blocks * self.block_by_cell + int(last) * self.finish_by_cell
        return per_token * tokens + blocks * self.pair * pairs + per_cell * cells


@dataclass(frozen=True)
class ModelSize:
    """Measured sizes of a model on one tensor-parallel rank."""

    blocks: int
    begin: PartSize
    block: PartSize
    finish: PartSize
    tied: PartSize  # parameters that are in both `begin` and `finish`
    buffers: int  # elements of all buffers
    flops: Flops
    width: float  # elements per token that pass from block to block
    # `block.activations_per_token` with selective activation checkpointing
    selective_per_token: float
    working_per_token: float  # peak of a block's backward pass above its kept activations
    workspace: tuple[tuple[int, float], ...]
    """(tokens of a micro-batch, peak elements of `finish` above `finish.activations_per_token`),
    mostly logits.
    """

    @property
    def parameters(self) -> int:
        outside = self.begin.parameters + self.finish.parameters - self.tied.parameters
        return self.blocks * self.block.parameters + outside

    def workspace_of(self, tokens: float) -> float:
        """Peak elements of `finish` above its kept activations, for a micro-batch of `tokens`."""
        sizes, elements = zip((0, 0.0), *self.workspace)
        if tokens >= sizes[-1]:  # extrapolate
            slope = (elements[-1] - elements[-2]) / (sizes[-1] - sizes[-2])
            return float(elements[-1] + slope * (tokens - sizes[-1]))
        return float(np.interp(tokens, sizes, elements))


MEASURED: dict[tuple[str, int, bool], ModelSize] = {}
"""Sizes by model, tensor-parallel ranks and sequence parallelism."""


def measure(
    spec: ModelSpec,
    tp: int = 1,
    sequence_parallel: bool = False,
    finetune: MethodConfig | None = None,
) -> ModelSize:
    """Return a model's sizes on one of `tp` ranks, cached.

    With tp > 1 there must be no default process group.
    """
    key = (repr((spec, finetune)), tp, sequence_parallel)
    if key not in MEASURED:
        with _prepare(spec, finetune, tp) as (spec, method):
            MEASURED[key] = _measure(spec, method, tp, sequence_parallel)
    return MEASURED[key]


def measure_flops(spec: ModelSpec, finetune: MethodConfig) -> Flops:
    """Return the FLOPs of `measure` on one rank, without the seconds that sizes take."""
    with _prepare(spec, finetune) as (spec, method):
        model = _build(spec, method, one_block=True)
        blocks = _count_blocks(build(spec, method.transform))
        long = _Passes(model, spec, SAMPLE_TOKENS)
        short = _Passes(model, spec, SAMPLE_TOKENS, halves=2)
        return _flops(model, blocks, long, short)


def _count_blocks(model: Model) -> int:
    return len(list(model.get_submodule(model.plan.blocks).children()))


@contextmanager
def _prepare(
    spec: ModelSpec, finetune: MethodConfig | None, tp: int = 1
) -> Iterator[tuple[ModelSpec, Method]]:
    """Yield the model to be measured, with tp > 1 in a process group that sends nothing."""
    # lifetimes must not depend on when Python collects reference cycles, which DTensor creates
    collects = gc.isenabled()
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
        if collects:
            gc.enable()


def _measure(spec: ModelSpec, method: Method, tp: int, sequence_parallel: bool) -> ModelSize:
    model = _build(spec, method, tp, sequence_parallel, one_block=True)
    multiple = tp if sequence_parallel else 1  # the trainer pads a batch to a multiple of tokens
    # warm up: more is kept alive when DTensor sees an operation and its shapes for the first time,
    # or when a pass imports a module
    _Passes(model, spec, SAMPLE_TOKENS, multiple)
    long = _Passes(model, spec, SAMPLE_TOKENS, multiple)
    short = _Passes(model, spec, SAMPLE_TOKENS, multiple, halves=2)
    # reductions are measured without sequence parallelism; the planner derives its collectives from
    # them
    reduced = long
    if tp > 1:
        reduced = _Passes(_build(spec, method, tp, one_block=True), spec, SMALL_SAMPLE_TOKENS)
    selective = _build(spec, method, tp, sequence_parallel, one_block=True)
    checkpoint_activations(selective, selective.plan.blocks, "selective")
    by_tokens = {n: _Passes(model, spec, n, multiple) for n in WORKSPACE_TOKENS}
    # what does not grow with the tokens (a table's gradient, made in the forward pass) belongs to
    # the workspace
    *_, smaller, large = by_tokens.values()
    kept_by_finish = large.kept_by_finish - smaller.kept_by_finish
    kept_by_finish /= large.tokens - smaller.tokens
    workspace = [
        (n, max(0.0, passes.peak - kept_by_finish * passes.tokens))
        for n, passes in by_tokens.items()
    ]
    full = _build(spec, method, tp, sequence_parallel)
    check_trains(method, (plain_name(name) for name, _ in full.named_parameters()))
    counts = _parts(full)
    blocks = _count_blocks(full)
    counts["blocks"] = [count // max(blocks, 1) for count in counts["blocks"]]

    def part(name: str, kept: float, window: Window) -> PartSize:
        parameters, trained = counts[name]
        return PartSize(parameters, trained, kept, window.reduced_bytes / FLOAT32 / reduced.tokens)

    return ModelSize(
        blocks=blocks,
        begin=part("begin", long.kept_by_begin, reduced.begin),
        block=part("blocks", long.kept_by_block, reduced.block),
        finish=part("finish", kept_by_finish, reduced.finish),
        tied=PartSize(*counts["tied"]),
        buffers=sum(buffer.numel() for buffer in full.buffers()),
        flops=_flops(model, blocks, long, short),
        width=long.width,
        selective_per_token=_Passes(selective, spec, SMALL_SAMPLE_TOKENS, multiple).kept_by_block,
        working_per_token=long.working,
        workspace=tuple(workspace),
    )


def _flops(model: Model, blocks: int, long: "_Passes", short: "_Passes") -> Flops:
    """FLOPs from passes over cells of two lengths, `long` and half of it."""
    block, block_by_cell = _by_token_and_cell(long, short, long.block.flops, short.block.flops)
    # a chunked loss has all FLOPs in its forward pass
    finish, finish_by_cell = _by_token_and_cell(long, short, long.finish.flops, short.finish.flops)
    # attention is the FLOPs per token that grow with the length of cells
    pair = 0.0
    if long.pairs_per_token > short.pairs_per_token and not block_by_cell:
        difference = long.block.flops / long.tokens - short.block.flops / short.tokens
        pair = max(0.0, difference / (long.pairs_per_token - short.pairs_per_token))
        block -= pair * long.pairs_per_token
    # rows of the global batch take a forward pass of their own, without heads
    passes = PASSES + int(bool(model.objective.row_widths))
    return Flops(
        blocks=blocks,
        begin=passes * long.begin.flops / long.tokens,
        block=passes * block,
        finish=finish,
        block_by_cell=passes * block_by_cell,
        finish_by_cell=finish_by_cell,
        pair=passes * pair,
    )


def _by_token_and_cell(
    long: "_Passes", short: "_Passes", long_flops: int, short_flops: int
) -> tuple[float, float]:
    """FLOPs of a part per token, and per cell."""
    per_token = long_flops / long.tokens
    per_short_token = short_flops / short.tokens
    if per_short_token <= (1 + PER_CELL_FRAC) * per_token:  # random fractions differ by less
        return per_token, 0.0
    # solve per_token + per_cell * cells / tokens = FLOPs / tokens for both lengths
    cells_per_token = long.cells / long.tokens
    per_cell = (per_short_token - per_token) / (short.cells / short.tokens - cells_per_token)
    return max(0.0, per_token - per_cell * long.cells / long.tokens), per_cell


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


def _parts(model: Model) -> dict[str, list[int]]:
    """[parameters, trained parameters] of this rank by part of the model."""
    begin = set(model.plan.begin)
    finish = set(model.plan.finish)
    blocks = model.plan.blocks.split(".")[0]
    counts = {part: [0, 0] for part in ("begin", "blocks", "finish", "tied")}
    for name, parameter in model.named_parameters():
        top = name.split(".")[0]
        if top == blocks:
            parts = ["blocks"]
        elif top in finish:
            parts = ["finish", "begin", "tied"] if top in begin else ["finish"]
        else:
            parts = ["begin"]
        elements = _local(parameter).numel()
        for part in parts:
            counts[part][0] += elements
            if parameter.requires_grad:
                counts[part][1] += elements
    return counts


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _sample(spec: ModelSpec, cell_tokens: int, tokens: int) -> Batch:
    """Random cells of `cell_tokens` tokens each, about `tokens` in total, by the run's tokenizer."""
    rng = np.random.Generator(np.random.Philox(0))
    cells = max(1, tokens // cell_tokens)
    genes = rng.integers(0, spec.n_genes, cells * cell_tokens, dtype=np.int32)
    counts = rng.integers(1, 50, cells * cell_tokens, dtype=np.uint32)
    starts = np.arange(cells + 1, dtype=np.int64) * cell_tokens
    per_cell: dict[str, np.ndarray] = {}
    if spec.levels:
        # (cells, columns) int32: level codes from 1, each level in turn
        n_levels = np.array([len(levels) for levels in spec.levels.values()], np.int32)
        per_cell["levels"] = np.arange(cells, dtype=np.int32)[:, None] % n_levels + 1
    number_columns = len(spec.objective.columns().numbers)
    if number_columns:
        per_cell["numbers"] = np.zeros((cells, number_columns))
    for part in spec.objective.each():
        vectors = getattr(part, "vectors", None)
        if vectors:
            per_cell["teacher"] = np.zeros((cells, vectors.width), np.float32)
    tokenizer: Tokenizer = spec.tokens.load()(spec.tokens)
    most_counts = spec.tokens.max_tokens if spec.objective.needs_counts else None
    positions = np.arange(cells, dtype=np.int64)
    return make_batch(tokenizer, genes, counts, starts, positions, most_counts, **per_cell)


class _Passes:
    """Measurements of a forward and a backward pass of about `tokens` tokens, part by part.

    Cells have 1 / `halves` of the usual length.
    """

    def __init__(
        self, model: Model, spec: ModelSpec, tokens: int, multiple: int = 1, halves: int = 1
    ) -> None:
        cell_tokens = max(1, min(spec.tokens.max_tokens, spec.n_genes, CELL_TOKENS) // halves)
        batch = _sample(spec, cell_tokens, tokens)
        lengths = np.diff(batch.cu_seqlens)  # (cells,): tokens of each cell
        self.tokens = int(batch.cu_seqlens[-1])
        self.cells = len(lengths)
        self.pairs_per_token = float(np.square(lengths, dtype=np.float64).sum() / self.tokens)
        view = model.view(to_tensors(batch), seed=0, step=0)
        view = pad_batch(view, -(-len(view.genes) // multiple) * multiple)
        # masks are drawn on the CPU, since their number is a shape
        prepared = copy_to_device(model.prepare(view, seed=0, step=0), META)
        with OperationMeter() as meter:
            with meter.window() as self.begin:
                entered = model.begin(prepared)
            self.kept_by_begin = self._per_token(self.begin.live_bytes() - entered.nbytes)
            self.width = entered.numel() / self.tokens  # not an integer if a view hides tokens
            x = torch.empty_like(entered, requires_grad=True)
            with meter.window() as self.block:
                passed = model.through(x, prepared)
            kept_bytes = self.block.live_bytes() - passed.nbytes + x.nbytes
            self.kept_by_block = self._per_token(kept_bytes)
            with meter.window() as backward:
                passed.backward(torch.empty_like(passed))
            self.working = self._per_token(_peak_bytes(model, backward))
        x = torch.empty_like(passed, requires_grad=True)
        with OperationMeter() as meter, meter.window() as self.finish:
            with meter.window() as forward:
                loss = model.finish(x, prepared)
                loss = loss.sum() if loss.ndim else loss
            with meter.window() as backward:
                loss.backward()
        live_bytes = forward.live_bytes()
        peak_bytes = max(forward.peak_bytes(), live_bytes + _peak_bytes(model, backward))
        # elements of the batch
        self.kept_by_finish = (live_bytes + x.nbytes) / FLOAT32
        self.peak = (peak_bytes + x.nbytes) / FLOAT32
        model.zero_grad(set_to_none=True)

    def _per_token(self, n_bytes: int) -> float:
        return n_bytes / FLOAT32 / self.tokens


def _peak_bytes(model: Model, backward: Window) -> int:
    """Peak bytes of a backward pass without the gradients of parameters."""
    gradients = set()
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradients.add(storage_key(_local(parameter.grad).untyped_storage()))
    return backward.peak_bytes(frozenset(gradients))
