"""Measurements of a step in the pool's processes: bytes of memory, and collectives by kind and group."""

import gc
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cellmill.train.telemetry import memory_bytes
from tests.distributed.cases import DEVICE, trainer


def allocated(corpus: str, options: dict[str, Any]) -> dict[str, int]:
    """Peak bytes of CPU tensors of this process in a step, as its allocator reports them.

    With the tokens of the largest micro-batch and the most micro-batches of a step. Everything since the
    model was built counts. A gloo thread's frees are sometimes not reported: the smallest of several steps counts.
    """
    gc.collect()  # frees of earlier cases would be counted
    first, steps = 1, 3
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        made, _ = trainer(corpus, options, corpus, steps)
        batches = [next(iter(made.train_stream))] * steps  # the same batch in each step
        for batch in batches:
            with record_function("step"):
                made._step(iter([batch]))
    made.close()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    live = np.cumsum([0] + [n_bytes for _, n_bytes in changes])
    times = np.array([time for time, _ in changes])
    spans = sorted((event.start_ns(), event.end_ns()) for event in events if event.name() == "step")[first:]
    borders = [np.searchsorted(times, span) for span in spans]
    return {
        "peak_bytes": min(int(live[start : end + 1].max()) for start, end in borders),
        "tokens": max(made.parallel_model.padded_lengths([len(batch.genes) for batch in batches[0]])),
        "micro_batches": len(batches[0]),
    }


def logged_memory(corpus: str, options: dict[str, Any], folder: str) -> tuple[list[dict[str, Any]], float]:
    """Lines of two steps, and this process's peak after them, GB."""
    made, lines = trainer(corpus, options, folder, 2)
    made.run()
    made.close()
    return [line for line in lines.lines if "loss" in line], memory_bytes(DEVICE)[0] / 1e9


def collectives(corpus: str, options: dict[str, Any]) -> dict[str, Any]:
    """Every collective of one step: (kind, ranks of its group, bytes of its whole tensor); and the step's tokens."""
    made, _ = trainer(corpus, options, corpus, 2)
    batches = iter(made.train_stream)
    made._step(batches)  # DistributedDataParallel makes its buckets anew after the first
    batch = next(batches)
    with _Counter() as counter:
        made._step(iter([batch]))
    made.close()
    lengths = made.parallel_model.padded_lengths([len(micro_batch.genes) for micro_batch in batch])
    return {"seen": counter.seen, "tokens": sum(lengths), "micro_batches": len(batch)}


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
