"""Private names of torch that cellmill uses: read this first when a new version of torch fails.

Public torch has no equal of these. Each has its reason and the tests that fail without it.
`tools/house.py` refuses private names of other packages everywhere else.
"""

from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

# shapes that DTensor infers with it are not counted by the planner: tests/unit/test_size.py
from torch._subclasses import FakeTensor as FakeTensor
from torch.distributed import distributed_c10d

# a gradient that is still being reduced: tests/distributed/test_step_guard.py
from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor

# recomputation of a module that keeps its names: tests/distributed/test_conformance.py
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl as CheckpointImpl,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper as checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh

# process group of the planner, which sends nothing: tests/unit/test_size.py
from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore

# the planner sees every operation and its tensors: tests/unit/test_size.py
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves

if TYPE_CHECKING:  # takes half a second to import; see is_dtensor
    import torch.distributed.tensor

# multiplies all tensors of a device in place, in one kernel: tests/distributed/test_step_guard.py
scale_all = torch._foreach_mul_
# moves tensors of a device by a share of the way to others, in place:
# tests/distributed/test_loop.py
move_all = torch._foreach_lerp_
# writes the allocations that `record_memory` recorded, for pytorch.org/memory_viz, to a path
write_memory_record = torch.cuda.memory._dump_snapshot


def is_dtensor(tensor: Tensor | None) -> "TypeGuard[torch.distributed.tensor.DTensor]":
    """True for a DTensor, known by its mesh: a process without one does not import the class."""
    return hasattr(tensor, "device_mesh")


def flash_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """(B, h, n, d) each -> (B, h, n, d) by this kernel, whatever torch would choose:
    tests/unit/test_size.py.
    """
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=is_causal)[
        0
    ]
    return out


def flatten_axes(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return all axes of `mesh` as one axis `name`: tests/distributed/test_conformance.py.
    Collective: every rank.
    """
    return mesh._flatten(name)


def set_group_timeouts(timeout: timedelta) -> None:
    """Set the timeout of every process group of this rank: tests/distributed/test_layouts.py.

    Groups of a mesh start with torch's default, and their list is private. torch 2.14 made the
    function public.
    """
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    for group in list(distributed_c10d._world.pg_map):
        if isinstance(group, dist.ProcessGroup):
            set_timeout(timeout, group)


def update_loss_scale(scale: Tensor, good_steps: Tensor, overflowed: Tensor, interval: int) -> None:
    """Double or halve the scale in place; the host waits for nothing:
    tests/distributed/test_step_guard.py.
    """
    torch._amp_update_scale_(scale, good_steps, overflowed, 2.0, 0.5, interval)


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Return True for a buffer that checkpoints keep: tests/distributed/test_conformance.py."""
    return buffer not in module._non_persistent_buffers_set


def version_of(tensor: Tensor) -> int:
    """Return the number of writes in place: tests/distributed/test_checkpoints.py."""
    return tensor._version


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return the identity of a storage, also without memory, where `data_ptr` is 0:
    tests/unit/test_size.py.
    """
    return storage._cdata


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, of the same storage; another tensor itself:
    tests/unit/test_size.py.
    """
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def operator_name(operator: Any) -> str:
    """Return the name of an operator, such as aten::mm, or "" for a function:
    tests/distributed/test_conformance.py.
    """
    schema = getattr(operator, "_schema", None)
    return "" if schema is None else schema.name


def overload_packet(operator: Any) -> Any:
    """Return the key of an operator in `flop_registry`: tests/unit/test_size.py."""
    return operator._overloadpacket


def record_memory(max_entries: int | None) -> None:
    """Record allocations on a GPU, or stop with None.

    torch documents it in spite of its name. No test has a GPU.
    """
    options: Any = {"enabled": None} if max_entries is None else {"max_entries": max_entries}
    torch.cuda.memory._record_memory_history(**options)
