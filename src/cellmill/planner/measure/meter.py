"""Operations of torch counted while a model runs: FLOPs, storages by their lifetimes, collectives."""

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
# operators without a FLOP formula in torch's registry, and the operator whose formula they share
FORMULA_OF = {torch.ops.aten.addmm_: torch.ops.aten.addmm}


@dataclass
class Allocation:
    """A storage, with the times of the meter's clock at which it was first seen and freed."""

    key: int
    n_bytes: int
    born: int
    died: int | None = None  # None while it lives


@dataclass
class Window:
    """Operations between two times of the meter's clock."""

    meter_allocations: list[Allocation]  # also those outside the window
    start: int
    end: int = 0
    flops: int = 0
    collectives: int = 0  # calls
    collective_bytes: int = 0  # bytes of the full tensors of all collectives

    def live_bytes(self) -> int:
        """Sum the bytes allocated in the window and alive at its end."""
        return sum(
            allocation.n_bytes
            for allocation in self.meter_allocations
            if self.start <= allocation.born < self.end
            and (allocation.died is None or allocation.died > self.end)
        )

    def peak_bytes(self, excluded_keys: frozenset[int] = frozenset()) -> int:
        """Find the peak of live bytes above those at the start.

        Leave out storages with a key in `excluded_keys` that the window allocated and that still live.
        """
        changes: Counter[int] = Counter()
        for allocation in self.meter_allocations:
            born = allocation.born
            died = allocation.died
            is_excluded = died is None and born >= self.start and allocation.key in excluded_keys
            if born >= self.end or is_excluded:
                continue
            if born >= self.start:
                changes[born] += allocation.n_bytes
            if died is not None and self.start <= died <= self.end:
                changes[died] -= allocation.n_bytes
        return max(accumulate((changes[time] for time in sorted(changes)), initial=0))


class OperationMeter(TorchDispatchMode):
    """Count operations while entered, separately for each `window`."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0  # a clock that counts operations, freed storages, and ends of windows
        self.allocations: list[Allocation] = []
        self._storages = weakref.WeakValueDictionary[int, torch.UntypedStorage]()
        self._windows: list[Window] = []

    @contextmanager
    def window(self) -> Iterator[Window]:
        """Count operations in a window until it is left; windows may overlap."""
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
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if any(issubclass(kind, FakeTensor) for kind in types):
            return out  # DTensor infers the shapes of full tensors with these
        self.time += 1
        self._add_to_windows(func, args, kwargs, out)
        # storages made before the meter was entered, such as weights, are no allocations
        for tensor in _tensors(args, kwargs):
            storage = tensor.untyped_storage()
            self._storages.setdefault(storage_key(storage), storage)
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            key = storage_key(storage)
            if self._storages.get(key) is None:
                self._storages[key] = storage
                allocation = Allocation(key, storage.nbytes(), self.time)
                self.allocations.append(allocation)
                weakref.finalize(storage, self._free, allocation)
        return out

    def _add_to_windows(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add the FLOPs, or the call and bytes of a collective, to all open windows."""
        flops = 0
        packet = FORMULA_OF.get(overload_packet(func), overload_packet(func))
        if self._windows and packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
        is_collective = operator_name(func).partition("::")[2] in COLLECTIVES
        collective_bytes = 0
        if is_collective:
            collective_bytes = max(tensor.nbytes for tensor in _tensors(args, out))
        for window in self._windows:
            window.flops += flops
            window.collectives += is_collective
            window.collective_bytes += collective_bytes

    def _free(self, allocation: Allocation) -> None:
        self.time += 1
        allocation.died = self.time


def _tensors(*values: Any) -> list[torch.Tensor]:
    """List the tensors among nested values."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
