"""Measured sizes of a model: it is built on the meta device as one tensor-parallel rank holds it,
and run once.

Parameters, buffers and trained parameters are counted by part; FLOPs come from torch's flop
counter, kept activations and the workspace of a backward pass from the lifetimes of storages,
tensor-parallel traffic from the collectives. So a family, objective or fine-tuning method declares
no sizes. The batch has random cells from the run's own tokenizer. Tensors on the meta device take
no memory, and torch's "fake" process group sends nothing.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from cellmill.config.parallel import Parallel
from cellmill.config.parts.methods import MethodConfig
from cellmill.data.stream.batch import Batch, Tokenizer, make_batch
from cellmill.finetune.method import Method, check_trains, load_method, trained_names
from cellmill.models.batch import on_device, padded, to_tensors
from cellmill.models.build import ModelSpec, build
from cellmill.models.family import Model
from cellmill.parallel.apply import apply_tensor_parallel, checkpoint_activations, freeze
from cellmill.parallel.materialize import plain_name
from cellmill.parallel.mesh import build_mesh
from cellmill.parallel.torch_private import (
    FakeStore,
    FakeTensor,
    TorchDispatchMode,
    operator_name,
    overload_packet,
    storage_key,
    tree_leaves,
)

FLOAT32 = 4
# of the measured batch: random fractions (masks) are within 1 % of their mean
SAMPLE_TOKENS = 1 << 14
SMALL_SAMPLE_TOKENS = 1 << 12  # where nothing random is measured
CELL_TOKENS = 128  # of each measured cell, or fewer
# more FLOPs per token of cells half as long: above it, they are counted by cell
PER_CELL_FRAC = 0.05
PASSES = 3  # one forward, and twice as much backward: gradients of inputs and of weights
WORKSPACE_TOKENS = tuple(1 << power for power in range(8, 19, 2))
ANY_QUANTILES = (0.0, 10.0)  # of a corpus that is not read: sizes do not depend on values
META = torch.device("meta")
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "allreduce_")
# without a formula of its own in torch's registry
IN_PLACE = {torch.ops.aten.addmm_: torch.ops.aten.addmm}


@dataclass(frozen=True)
class PartSize:
    """Sizes of the part before the blocks, of one block, or of the part after them. Elements, not
    bytes.
    """

    parameters: int
    trained: int  # parameters with a gradient and optimizer state
    activations_per_token: float = 0.0  # kept for the backward pass; a block's with its input
    # reduced over tp without sequence parallelism; for a block in each of both passes
    sums_per_token: float = 0.0


@dataclass(frozen=True)
class Flops:
    """Measured FLOPs of a model on one tensor-parallel rank, forward and backward."""

    blocks: int
    begin: float  # per token, as those of the next two
    block: float  # one block without its attention
    finish: float
    # per cell beside those per token: blocks whose rows are cells, heads of the cell embedding
    block_by_cell: float
    finish_by_cell: float
    pair: float  # one block's attention per (query, key) pair of a cell

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
        per_token = blocks * self.block + (first * self.begin + last * self.finish)
        per_cell = blocks * self.block_by_cell + last * self.finish_by_cell
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
        """Return the peak elements of `finish` above its kept activations, for a micro-batch of
        `tokens` tokens.
        """
        sizes, elements = zip((0, 0.0), *self.workspace)
        if tokens >= sizes[-1]:  # extrapolate
            slope = (elements[-1] - elements[-2]) / (sizes[-1] - sizes[-2])
            return float(elements[-1] + slope * (tokens - sizes[-1]))
        return float(np.interp(tokens, sizes, elements))


_measured: dict[tuple[str, int, bool], ModelSize] = {}


def measure(
    spec: ModelSpec,
    tp: int = 1,
    sequence_parallel: bool = False,
    finetune: MethodConfig | None = None,
) -> ModelSize:
    """Return a model's sizes on one of `tp` ranks, cached. With tp > 1 there must be no default
    process group.
    """
    key = (repr((spec, finetune)), tp, sequence_parallel)
    if key not in _measured:
        with _measuring(spec, finetune, tp) as (spec, method):
            _measured[key] = _measure(spec, method, tp, sequence_parallel)
    return _measured[key]


def measure_flops(spec: ModelSpec, finetune: MethodConfig) -> Flops:
    """Return the FLOPs of `measure` on one rank, without the seconds that sizes take."""
    with _measuring(spec, finetune) as (spec, method):
        model = _build(spec, method, one_block=True)
        blocks = len(
            list(build(spec, method.transform).get_submodule(model.plan.blocks).children())
        )
        return _flops(
            model,
            blocks,
            *(_Passes(model, spec, SAMPLE_TOKENS, halves=halves) for halves in (1, 2)),
        )


@contextmanager
def _measuring(
    spec: ModelSpec, finetune: MethodConfig | None, tp: int = 1
) -> Iterator[tuple[ModelSpec, Method]]:
    """Yield the model to be measured, with tp > 1 in a process group that sends nothing."""
    # lifetimes must not depend on when Python collects reference cycles, of which DTensor creates
    # some
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
    multiple = tp if sequence_parallel else 1  # of the tokens of a batch, as the trainer pads it
    # more is kept alive when DTensor sees an operation and its shapes for the first time, or an
    # import happens inside
    _Passes(model, spec, SAMPLE_TOKENS, multiple)
    long, short = (_Passes(model, spec, SAMPLE_TOKENS, multiple, halves) for halves in (1, 2))
    # reductions are measured without sequence parallelism; the planner derives its collectives from
    # them
    reduced = long
    if tp > 1:
        reduced = _Passes(_build(spec, method, tp, one_block=True), spec, SMALL_SAMPLE_TOKENS)
    selective = _build(spec, method, tp, sequence_parallel, one_block=True)
    checkpoint_activations(selective, selective.plan.blocks, "selective")
    passes = {n: _Passes(model, spec, n, multiple) for n in WORKSPACE_TOKENS}
    large = passes[WORKSPACE_TOKENS[-1]]
    smaller = passes[WORKSPACE_TOKENS[-2]]
    # what does not grow with the tokens (a table's gradient, made in the forward pass) belongs to
    # the workspace
    kept_by_finish = (large.kept_by_finish - smaller.kept_by_finish) / (
        large.tokens - smaller.tokens
    )
    full = _build(spec, method, tp, sequence_parallel)
    check_trains(method, (plain_name(name) for name, _ in full.named_parameters()))
    counts = _parts(full)
    blocks = len(list(full.get_submodule(full.plan.blocks).children()))
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
        workspace=tuple(
            (n, max(0.0, each.peak - kept_by_finish * each.tokens)) for n, each in passes.items()
        ),
    )


def _flops(model: Model, blocks: int, long: "_Passes", short: "_Passes") -> Flops:
    def by_token_and_cell(part: str) -> tuple[float, float]:
        """FLOPs per token, and per cell, from cells of two lengths. A chunked loss has all in its
        forward pass.
        """
        flops, more = (getattr(passes, part).flops / passes.tokens for passes in (long, short))
        if more <= (1 + PER_CELL_FRAC) * flops:  # random fractions (masks) differ by less
            return flops, 0.0
        per_cell = (more - flops) / (short.cells / short.tokens - long.cells / long.tokens)
        return max(0.0, flops - per_cell * long.cells / long.tokens), per_cell

    (block, block_by_cell), (finish, finish_by_cell) = map(by_token_and_cell, ("block", "finish"))
    pair = 0.0
    if long.pairs_per_token > short.pairs_per_token and not block_by_cell:
        difference = long.block.flops / long.tokens - short.block.flops / short.tokens
        pair = max(0.0, difference / (long.pairs_per_token - short.pairs_per_token))
        block -= pair * long.pairs_per_token
    # rows of the global batch take a forward pass of their own, without heads
    passes = PASSES + bool(model.objective.row_widths)
    begin = passes * long.begin.flops / long.tokens
    return Flops(
        blocks, begin, passes * block, finish, passes * block_by_cell, finish_by_cell, passes * pair
    )


def _build(
    spec: ModelSpec,
    method: Method,
    tp: int = 1,
    sequence_parallel: bool = False,
    one_block: bool = False,
) -> Model:
    """Build the model of one tensor-parallel rank, optionally with the first of its identical
    blocks alone.
    """
    model = build(spec, method.transform)
    if one_block:
        blocks = model.get_submodule(model.plan.blocks)
        for name in [name for name, _ in blocks.named_children()][1:]:
            delattr(blocks, name)
    if tp > 1:
        given = {"strategy": "ddp", "tp": tp, "sequence_parallel": sequence_parallel}
        parallel = Parallel.model_validate(given)
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
        own = _local(parameter).numel()
        for part in parts:
            counts[part][0] += own
            counts[part][1] += own * parameter.requires_grad
    return counts


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _sample(spec: ModelSpec, cell_tokens: int, tokens: int) -> Batch:
    """Random cells of `cell_tokens` tokens, about `tokens` tokens in total, from the run's own
    tokenizer.
    """
    rng = np.random.Generator(np.random.Philox(0))
    cells = max(1, tokens // cell_tokens)
    genes = rng.integers(0, spec.n_genes, cells * cell_tokens, dtype=np.int32)
    counts = rng.integers(1, 50, cells * cell_tokens, dtype=np.uint32)
    starts = np.arange(cells + 1, dtype=np.int64) * cell_tokens
    tokenizer: Tokenizer = spec.tokens.load()(spec.tokens)
    counted = spec.tokens.max_tokens if spec.objective.needs_counts else None
    known = np.array([len(levels) for levels in spec.levels.values()], np.int32)
    per_cell: dict[str, Any] = (
        {"levels": np.arange(cells, dtype=np.int32)[:, None] % known + 1} if spec.levels else {}
    )
    columns = len(spec.objective.columns().numbers)
    if columns:
        per_cell["numbers"] = np.zeros((cells, columns))
    for vectors in filter(None, (getattr(part, "vectors", None) for part in spec.objective.each())):
        per_cell["teacher"] = np.zeros((cells, vectors.width), np.float32)
    return make_batch(
        tokenizer, genes, counts, starts, np.arange(cells, dtype=np.int64), counted, **per_cell
    )


@dataclass
class Allocation:
    key: int
    n_bytes: int
    born: int
    died: int | None = None


@dataclass
class Window:
    """Operations between two points in time."""

    allocations: list[Allocation]  # of the meter, not only those of the window
    start: int
    end: int = 0
    flops: int = 0
    reduced_bytes: int = 0  # of the full tensors of all collectives

    def live_bytes(self) -> int:
        """Bytes allocated in the window and alive at its end."""
        born = [storage for storage in self.allocations if self.start <= storage.born < self.end]
        return sum(
            storage.n_bytes for storage in born if storage.died is None or storage.died > self.end
        )

    def peak_bytes(self, without: frozenset[int] = frozenset()) -> int:
        """Peak of live bytes above the start's; storages that stay, with a key in `without`, are
        left out.
        """
        changes: Counter[int] = Counter()
        for storage in self.allocations:
            born = storage.born
            died = storage.died
            if born >= self.end or (died is None and born >= self.start and storage.key in without):
                continue
            if born >= self.start:
                changes[born] += storage.n_bytes
            if died is not None and self.start <= died <= self.end:
                changes[died] -= storage.n_bytes
        return max(accumulate((changes[time] for time in sorted(changes)), initial=0))


class OperationMeter(TorchDispatchMode):
    """Count operations while entered, separately for each `window`."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0
        self.allocations: list[Allocation] = []
        self._known: weakref.WeakValueDictionary[int, torch.UntypedStorage] = (
            weakref.WeakValueDictionary()
        )
        self._windows: list[Window] = []

    @contextmanager
    def window(self) -> Iterator[Window]:
        self.time += 1
        window = Window(self.allocations, start=self.time)
        self._windows.append(window)
        try:
            yield window
        finally:
            self._windows.remove(window)
            self.time += 1
            window.end = self.time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # dispatched again as operations on local tensors
        out = func(*args, **(kwargs or {}))
        if any(issubclass(kind, FakeTensor) for kind in types):
            return out  # DTensor infers the shapes of full tensors with these
        self.time += 1
        name = operator_name(func).partition("::")[2]
        packet = IN_PLACE.get(overload_packet(func), overload_packet(func))
        for window in self._windows:
            if packet in flop_registry:
                window.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
            if name in COLLECTIVES:
                tensors = [
                    item for item in tree_leaves((args, out)) if isinstance(item, torch.Tensor)
                ]
                window.reduced_bytes += max(tensor.nbytes for tensor in tensors)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if self._known.get(key := storage_key(storage)) is None:
                    self._known[key] = storage
                    self.allocations.append(Allocation(key, storage.nbytes(), self.time))
                    weakref.finalize(storage, self._freed, self.allocations[-1])
        return out

    def _freed(self, allocation: Allocation) -> None:
        self.time += 1
        allocation.died = self.time


class _Passes:
    """Measurements of a forward and a backward pass of about `tokens` tokens, part by part."""

    def __init__(
        self, model: Model, spec: ModelSpec, tokens: int, multiple: int = 1, halves: int = 1
    ) -> None:
        cell_tokens = max(1, min(spec.tokens.max_tokens, spec.n_genes, CELL_TOKENS) // halves)
        batch = _sample(spec, cell_tokens, tokens)
        self.tokens = int(batch.cu_seqlens[-1])
        self.cells = len(batch.cu_seqlens) - 1
        self.pairs_per_token = float(
            np.square(np.diff(batch.cu_seqlens), dtype=np.float64).sum() / self.tokens
        )
        view = model.view(to_tensors(batch), seed=0, step=0)
        view = padded(view, -(-len(view.genes) // multiple) * multiple)
        # masks are drawn on the CPU, since their number is a shape
        prepared = on_device(model.prepare(view, seed=0, step=0), META)
        with OperationMeter() as meter:
            with meter.window() as self.begin:
                entered = model.begin(prepared)
            self.kept_by_begin = self._per_token(self.begin.live_bytes() - entered.nbytes)
            self.width = entered.numel() / self.tokens  # not whole where a view hides tokens
            x = torch.empty_like(entered, requires_grad=True)
            with meter.window() as self.block:
                left = model.through(x, prepared)
            self.kept_by_block = self._per_token(self.block.live_bytes() - left.nbytes + x.nbytes)
            with meter.window() as backward:
                left.backward(torch.empty_like(left))
            self.working = self._per_token(_peak_bytes(model, backward))
        x = torch.empty_like(left, requires_grad=True)
        with OperationMeter() as meter, meter.window() as self.finish:
            with meter.window() as forward:
                loss = model.finish(x, prepared)
                loss = loss.sum() if loss.ndim else loss
            with meter.window() as backward:
                loss.backward()
        above = forward.live_bytes() + _peak_bytes(model, backward)
        self.kept_by_finish = (forward.live_bytes() + x.nbytes) / FLOAT32  # elements, as `peak`
        self.peak = (max(forward.peak_bytes(), above) + x.nbytes) / FLOAT32
        model.zero_grad(set_to_none=True)

    def _per_token(self, n_bytes: int) -> float:
        return n_bytes / FLOAT32 / self.tokens


def _peak_bytes(model: Model, backward: Window) -> int:
    """Peak of a backward pass without the gradients of parameters."""
    gradients = (
        _local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None
    )
    return backward.peak_bytes(
        frozenset(storage_key(gradient.untyped_storage()) for gradient in gradients)
    )
