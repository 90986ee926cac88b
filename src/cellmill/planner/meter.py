"""FLOPs, live bytes and collectives of torch operations on the meta device: of local tensors, also inside DTensors."""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from cellmill.parallel.torch_private import (
    FakeTensor,
    TorchDispatchMode,
    operator_name,
    overload_packet,
    storage_key,
    tree_leaves,
)

COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "allreduce_")
IN_PLACE = {torch.ops.aten.addmm_: torch.ops.aten.addmm}  # without a formula of its own in torch's registry


@dataclass
class Allocation:
    """One storage: its size, and when it was allocated and freed."""

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
        return sum(storage.n_bytes for storage in born if storage.died is None or storage.died > self.end)

    def peak_bytes(self, without: frozenset[int] = frozenset()) -> int:
        """Peak of live bytes above the start's; storages that stay, with a key in `without`, are left out."""
        changes: Counter[int] = Counter()
        for storage in self.allocations:
            born, died = storage.born, storage.died
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
        self._known: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self._windows: list[Window] = []

    @contextmanager
    def window(self) -> Iterator[Window]:
        """Count the operations of the enclosed code."""
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
                tensors = [item for item in tree_leaves((args, out)) if isinstance(item, torch.Tensor)]
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
