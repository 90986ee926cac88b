"""FLOPs, live bytes and collectives of torch operations on the meta device, where nothing is computed.

DTensors are looked into: all counts are those of this process's local tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "allreduce_")


@dataclass
class _Block:
    """One storage: its size, and when it was allocated and freed."""

    n_bytes: int
    born: int
    died: int | None = None


@dataclass
class Window:
    """What happened between two points in time."""

    flops: int = 0
    sums_bytes: int = 0
    """Of whole tensors that collectives combined."""
    start: int = 0
    end: int = 0
    meter: OperationMeter | None = field(default=None, repr=False)

    def live_bytes(self) -> int:
        """Bytes allocated in the window and alive at its end."""
        return sum(
            block.n_bytes
            for _, block in self._blocks
            if self.start <= block.born < self.end and (block.died is None or block.died > self.end)
        )

    def peak_bytes(self, without: frozenset[int] = frozenset()) -> int:
        """Most bytes alive at once, above those alive when the window began.

        Storages allocated in the window that still live and whose keys are in `without` are left out.
        """
        changes: dict[int, int] = {}
        for key, block in self._blocks:
            if block.born >= self.end or (block.died is None and block.born >= self.start and key in without):
                continue
            if block.born >= self.start:
                changes[block.born] = changes.get(block.born, 0) + block.n_bytes
            if block.died is not None and self.start <= block.died <= self.end:
                changes[block.died] = changes.get(block.died, 0) - block.n_bytes
        live = peak = 0
        for time in sorted(changes):
            live += changes[time]
            peak = max(peak, live)
        return peak

    @property
    def _blocks(self) -> list[tuple[int, _Block]]:
        assert self.meter is not None
        return self.meter.blocks


class OperationMeter(TorchDispatchMode):
    """Counts while it is entered; `window` says what of it belongs together."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0
        self.blocks: list[tuple[int, _Block]] = []
        self._known: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self._windows: list[Window] = []

    @contextmanager
    def window(self) -> Iterator[Window]:
        """Count what the block of code does."""
        self.time += 1
        window = Window(start=self.time, meter=self)
        self._windows.append(window)
        try:
            yield window
        finally:
            self._windows.remove(window)
            self.time += 1
            window.end = self.time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as operations on its local tensors
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))  # how DTensor learns the shapes of whole tensors
        out = func(*args, **(kwargs or {}))
        self.time += 1
        name = func._schema.name.partition("::")[2]
        for window in self._windows:
            if func._overloadpacket in flop_registry:
                window.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
            if name in COLLECTIVES:
                given = [item for item in pytree.tree_leaves((args, out)) if isinstance(item, torch.Tensor)]
                window.sums_bytes += max(tensor.nbytes for tensor in given)
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._allocated(tensor)
        return out

    def _allocated(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if self._known.get(key) is not None:
            return
        self._known[key] = storage
        block = _Block(storage.nbytes(), self.time)
        self.blocks.append((key, block))
        weakref.finalize(storage, self._freed, block)

    def _freed(self, block: _Block) -> None:
        self.time += 1
        block.died = self.time
