"""Count torch's operations while a model runs: FLOPs, collectives, and the lifetimes of storages.

A storage is the memory behind one tensor, or behind several tensors that share it. The meter has a
clock, whose times are numbers of events and not seconds.
"""

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
# operators without a FLOP formula in torch's registry, each with the operator whose formula it shares
FORMULA_OF = {torch.ops.aten.addmm_: torch.ops.aten.addmm}


@dataclass
class Allocation:
    """A storage, with the times of the meter's clock at which it was first seen and at which it was freed."""

    key: int  # identifies the storage while it lives
    n_bytes: int
    born: int
    died: int | None = None  # None while the storage lives


@dataclass
class Window:
    """What the meter counts between two times of its clock, `start` and `end`."""

    meter_allocations: list[Allocation]  # all of the meter, also before and after the window
    start: int
    end: int = 0
    flops: int = 0
    collectives: int = 0  # number of calls
    collective_bytes: int = 0  # of all calls together; each counts the bytes of its full tensor

    def live_bytes(self) -> int:
        """Sum the bytes of the storages that the window allocated and that still live at its end."""
        return sum(
            allocation.n_bytes
            for allocation in self.meter_allocations
            if self.start <= allocation.born < self.end
            and (allocation.died is None or allocation.died > self.end)
        )

    def peak_bytes(self, excluded_keys: frozenset[int] = frozenset()) -> int:
        """Find the peak of live bytes in the window, above the live bytes at its start.

        A storage with a key in `excluded_keys` does not count if the window allocated it and it was never
        freed.
        """
        # bytes allocated, minus bytes freed, by time
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
    """A meter that counts torch's operations while it is entered, in each open `window`."""

    def __init__(self) -> None:
        super().__init__()
        # the clock, which advances by 1 at each operation, freed storage, and start or end of a window
        self.time = 0
        self.allocations: list[Allocation] = []
        self._storages = weakref.WeakValueDictionary[int, torch.UntypedStorage]()
        self._windows: list[Window] = []

    @contextmanager
    def window(self) -> Iterator[Window]:
        """Open a window, which counts operations until it is left. Windows may overlap."""
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
            # torch then calls this method again, with operations on the local tensors
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if any(issubclass(kind, FakeTensor) for kind in types):
            return out  # DTensor only infers shapes with fake tensors: nothing is computed

        self.time += 1
        self._add_to_windows(func, args, kwargs, out)
        # An input that is new to the meter is older than the meter, such as a weight. Remember its
        # storage, so that it never counts as an allocation.
        for tensor in _list_tensors(args, kwargs):
            storage = tensor.untyped_storage()
            self._storages.setdefault(storage_key(storage), storage)
        # an output in a new storage is an allocation; one in the storage of an input is not
        for tensor in _list_tensors(out):
            storage = tensor.untyped_storage()
            key = storage_key(storage)
            if self._storages.get(key) is None:
                self._storages[key] = storage
                allocation = Allocation(key, storage.nbytes(), self.time)
                self.allocations.append(allocation)
                weakref.finalize(storage, self._free, allocation)
        return out

    def _add_to_windows(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add an operation to all open windows: its FLOPs, or the call and the bytes of a collective."""
        flops = 0
        packet = FORMULA_OF.get(overload_packet(func), overload_packet(func))
        if self._windows and packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
        is_collective = operator_name(func).partition("::")[2] in COLLECTIVES
        collective_bytes = 0
        if is_collective:
            collective_bytes = max(tensor.nbytes for tensor in _list_tensors(args, out))
        for window in self._windows:
            window.flops += flops
            window.collectives += is_collective
            window.collective_bytes += collective_bytes

    def _free(self, allocation: Allocation) -> None:
        self.time += 1
        allocation.died = self.time


def _list_tensors(*values: Any) -> list[torch.Tensor]:
    """List the tensors among values, which may be nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
