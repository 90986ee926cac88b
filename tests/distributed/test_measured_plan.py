"""The plan's memory and traffic agree with what real processes allocate and send, over each link.

Memory, of tens of megabytes, is planned to within 10 to 15 %. The pool's processes run the first
functions of this module. Sizes under tensor parallelism are measured here, so no test may use the
fixture `alone`, which holds a group.
"""

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cellmill.config.options import TrainOptions
from cellmill.planner.hardware import Hardware
from cellmill.planner.measure.load import Load
from cellmill.planner.memory import estimate_rank_memory
from cellmill.planner.planned_model import PlannedModel
from cellmill.planner.step_counts import CorpusSize
from cellmill.planner.traffic import list_traffic
from cellmill.train.telemetry import memory_bytes
from tests.checks import quick
from tests.distributed.cases import DEVICE, trainer
from tests.distributed.conftest import options
from tests.distributed.pool import Pool
from tests.models import split

WORLD = 4
LOCAL_WORLD = 2
N_GENES = 120
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "FULL_SHARD": {"sharding_strategy": "FULL_SHARD"},
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "HYBRID_SHARD": {"sharding_strategy": "HYBRID_SHARD"},
    "HYBRID_SHARD, each": {
        "sharding_strategy": "HYBRID_SHARD",
        "gradient_reduction": "micro_batch",
    },
    "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
    "FULL_SHARD x tp 2": {"sharding_strategy": "FULL_SHARD", "tp": 2},
    "sequence parallel": {"sharding_strategy": "FULL_SHARD", "tp": 2, "sequence_parallel": True},
    "pp 2 x FULL_SHARD": {"sharding_strategy": "FULL_SHARD", "pp": 2},
}
RECOMPUTED = {
    f"{name}, {how} recomputed": LAYOUTS[name] | {"activation_checkpointing": how}
    for name in ("FULL_SHARD x tp 2", "sequence parallel")
    for how in ("full", "selective")
}
LAYOUTS_OF_PROFILE = {
    "profile x tp 2": LAYOUTS["FULL_SHARD x tp 2"],
    "profile x tp 2, recomputed": RECOMPUTED["FULL_SHARD x tp 2, full recomputed"],
}
PIPELINE = "pp 2 x FULL_SHARD"
COUPLED = {
    f"{name}, coupled loss": LAYOUTS[name]
    for name in ("FULL_SHARD", "FULL_SHARD x tp 2", "sequence parallel", PIPELINE)
}


def allocated(corpus: str, options: dict[str, Any]) -> dict[str, int]:
    """Peak bytes of CPU tensors of this process in a step, of all since the model was built, as its
    allocator reports them; with the tokens of the largest micro-batch and the micro-batches of a
    step.

    A gloo thread's frees are sometimes not reported: the smallest of several steps counts.
    """
    gc.collect()  # frees of earlier cases would be counted
    first = 1
    steps = 3
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        made, _ = trainer(corpus, options, corpus, steps)
        batches = [next(iter(made.train_stream))] * steps  # the same batch in each step
        for batch in batches:
            with record_function("step"):
                made._step(iter([batch]))
    made.close()
    events = profiler.profiler.kineto_results.events()
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    live = np.cumsum([0] + [n_bytes for _, n_bytes in changes])
    times = np.array([time for time, _ in changes])
    spans = sorted(
        (event.start_ns(), event.end_ns()) for event in events if event.name() == "step"
    )[first:]
    borders = [np.searchsorted(times, span) for span in spans]
    return {
        "peak_bytes": min(int(live[start : end + 1].max()) for start, end in borders),
        "tokens": max(
            made.parallel_model.padded_lengths([len(batch.token_ids) for batch in batches[0]])
        ),
        "cells": max(len(batch.cell_ids) for batch in batches[0]),
        "micro_batches": len(batches[0]),
    }


def logged_memory(
    corpus: str, options: dict[str, Any], folder: str
) -> tuple[list[dict[str, Any]], float]:
    """Lines of two steps, and this process's peak after them, GB."""
    made, lines = trainer(corpus, options, folder, 2)
    made.run()
    made.close()
    return [line for line in lines.lines if "loss" in line], memory_bytes(DEVICE)[0] / 1e9


def collectives(corpus: str, options: dict[str, Any]) -> dict[str, Any]:
    """Every collective of one step: (kind, ranks of its group, bytes of its whole tensor); and the
    step's tokens.
    """
    made, _ = trainer(corpus, options, corpus, 2)
    batches = iter(made.train_stream)
    made._step(batches)  # DistributedDataParallel makes its buckets anew after the first
    batch = next(batches)
    with _Counter() as counter:
        made._step(iter([batch]))
    made.close()
    lengths = made.parallel_model.padded_lengths(
        [len(micro_batch.token_ids) for micro_batch in batch]
    )
    n_cells = sum(len(micro_batch.cell_ids) for micro_batch in batch)
    return {
        "seen": counter.seen,
        "tokens": sum(lengths),
        "cells": n_cells,
        "micro_batches": len(batch),
    }


class _Counter(TorchDispatchMode):
    """Record of the calls of torch.distributed, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = KINDS.get(func._schema.name)
        if kind is not None:
            given = pytree.tree_leaves((args, kwargs))
            tensors = [item for item in given if isinstance(item, torch.Tensor)]
            largest = max(tensor.numel() * tensor.element_size() for tensor in tensors)
            if func.namespace == "_c10d_functional" and kind == "all-gather":
                largest *= args[1]  # only its input is there yet
            self.seen.append((kind, _ranks(given), largest))
        return func(*args, **(kwargs or {}))


def _ranks(given: list[Any]) -> tuple[int, ...]:
    for item in given:
        if isinstance(item, torch.ScriptObject) and "ProcessGroup" in str(item._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(item)))
    name = [item for item in given if isinstance(item, str)][-1]
    return tuple(dist.get_process_group_ranks(_resolve_process_group(name)))


KINDS = {
    "c10d::_allgather_base_": "all-gather",
    "c10d::allgather_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::reduce_scatter_": "reduce-scatter",
    "c10d::allreduce_": "all-reduce",
    "c10d::send": "point to point",
    "_c10d_functional::all_gather_into_tensor": "all-gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce-scatter",
    "_c10d_functional::all_reduce": "all-reduce",
    "_c10d_functional::all_reduce_": "all-reduce",
}


def _planned(name: str, hidden: int, **train: Any) -> tuple[dict[str, Any], PlannedModel]:
    """Options of a run in a layout, and its plan."""
    model = {"hidden": hidden, "layers": 4, "dropout": 0.0}
    layout = (LAYOUTS | RECOMPUTED | LAYOUTS_OF_PROFILE | COUPLED)[name]
    given = options(layout, model=model, tokens={"max_tokens": 100}, train=train)
    if name in LAYOUTS_OF_PROFILE:
        given |= split(model | {"family": "profile", "objective": "denoise"})
    if name in COUPLED:
        given |= split(model | {"objective": "supervised_contrastive", "label_column": "cell_type"})
    corpus = CorpusSize(np.ones(1, np.int64), N_GENES, levels={"cell_type": ("T", "B")})
    hardware = Hardware(WORLD // LOCAL_WORLD, LOCAL_WORLD, "h100", device_bytes=0, usable_bytes=0)
    return given, PlannedModel.measure(TrainOptions.model_validate(given), corpus, hardware)


FEW_CELLS = {"global_batch": 12}
SEVERAL = {"global_batch": 12, "token_budget": 128}
ALLOCATED = [("HYBRID_SHARD", FEW_CELLS), ("sequence parallel", FEW_CELLS), (PIPELINE, SEVERAL)]
MORE = [(name, SEVERAL) for name in LAYOUTS if name not in (PIPELINE, "SHARD_GRAD_OP", "NO_SHARD")]


@pytest.mark.parametrize(("name", "train"), quick([*ALLOCATED, *MORE], ALLOCATED))
def test_planned_memory_agrees_with_what_processes_allocate(
    pool: Pool, corpus: str, name: str, train: dict[str, int]
) -> None:
    given, model = _planned(name, hidden=320, **train)
    ranks = pool.run("test_measured_plan.allocated", corpus=corpus, options=given)
    each = WORLD // model.layout.pp
    for stage in range(model.layout.pp):
        alike = ranks[stage * each : (stage + 1) * each]
        tokens = max(rank["tokens"] for rank in alike)
        cells = max(rank["cells"] for rank in alike)
        micro_batches = alike[0]["micro_batches"]
        load = Load(tokens, pairs=0, cells=cells)
        planned = estimate_rank_memory(model, stage, load, micro_batches)
        # memory freed in another thread is not reported: the smallest of equal ranks is nearest the
        # truth
        measured = min(rank["peak_bytes"] for rank in alike if rank["tokens"] == tokens)
        assert measured > 20e6
        # on a busy machine gloo's threads free more, unseen: up to 10.3 %, with a reduction in each
        # micro-batch 27 %
        least = 0.7 if "each" in name else 0.85
        assert least * measured <= planned.total <= 1.1 * measured, f"stage {stage}: {planned}"


@pytest.mark.parametrize(
    "name", quick(["HYBRID_SHARD", "FULL_SHARD x tp 2", PIPELINE], ["HYBRID_SHARD"])
)
def test_memory_of_every_rank_is_logged(pool: Pool, corpus: str, tmp_path: Path, name: str) -> None:
    given = {"corpus": corpus, "options": options(LAYOUTS[name]), "folder": str(tmp_path)}
    ranks = pool.run("test_measured_plan.logged_memory", **given)
    peaks = [peak for _, peak in ranks]
    for lines, _ in ranks:
        for line, first in zip(lines, ranks[0][0], strict=True):
            assert (
                line["peak_resident_gb"]
                == first["peak_resident_gb"]
                == pytest.approx(peaks, rel=0.2)
            )
            assert line["resident_gb"] == first["resident_gb"]
            assert all(
                0 < now <= peak for now, peak in zip(line["resident_gb"], line["peak_resident_gb"])
            )


ACCUMULATED = {"token_budget": 160}
FEW_BYTES = 1024  # reductions of targets, norms and signals
SENT: list[Any] = [
    ("HYBRID_SHARD", ACCUMULATED),
    ("sequence parallel", {}),
    ("profile x tp 2", {}),
    (PIPELINE, ACCUMULATED),
    ("sequence parallel, coupled loss", {}),
]
WITHOUT_TRAIN = [*RECOMPUTED, *LAYOUTS_OF_PROFILE, *COUPLED]
EVERY = [*((name, ACCUMULATED) for name in LAYOUTS), *((name, {}) for name in WITHOUT_TRAIN)]


@pytest.mark.parametrize(
    ("name", "train"), quick([*SENT, *(row for row in EVERY if row not in SENT)], SENT)
)
def test_measured_bytes_of_collectives_agree_with_the_plan(
    pool: Pool, corpus: str, name: str, train: dict[str, Any]
) -> None:
    given, model = _planned(name, hidden=64, **train)
    ranks = pool.run("test_measured_plan.collectives", corpus=corpus, options=given)
    for rank, measured in enumerate(ranks):
        assert measured["micro_batches"] > 1 or not train
        stage = rank // (WORLD // model.layout.pp)
        load = Load(measured["tokens"], pairs=0, cells=measured["cells"])
        planned = list_traffic(model, stage, load, measured["micro_batches"])
        seen: Counter[tuple[str, int, int]] = Counter()
        calls: Counter[tuple[str, int, int]] = Counter()
        small_calls: Counter[tuple[str, int, int]] = Counter()
        for kind, group, n_bytes in measured["seen"]:
            of_first_node = sum(other // LOCAL_WORLD == group[0] // LOCAL_WORLD for other in group)
            key = (kind, len(group), of_first_node)
            if name in COUPLED and kind == "all-reduce" and len(group) == WORLD:
                continue  # the table of rows is not planned
            if n_bytes >= FEW_BYTES:
                seen[key] += n_bytes
                calls[key] += 1
            else:
                small_calls[key] += 1
        expected = {(part.kind, part.processes, part.processes_per_node): part for part in planned}
        assert dict(seen) == pytest.approx(
            {key: part.payload_bytes for key, part in expected.items()}, rel=0.03
        )
        for key, part in expected.items():
            # calls with a few numbers per cell are planned, and small with so few cells
            small = small_calls[key] if name in LAYOUTS_OF_PROFILE or name in COUPLED else 0
            assert calls[key] - 1 <= part.calls <= calls[key] + small + 1, (rank, key)
