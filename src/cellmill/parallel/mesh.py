"""The device mesh, and the pipeline stages of a model: what each rank holds.

The mesh has four axes, `pp, dp_replicate, dp_shard, tp`, for every strategy; unused axes have size
1. The data-parallel coordinate `(dp_replicate, dp_shard)`, not the global rank, decides which cells
a rank reads: tp and pp peers read the same cells. Small values of all ranks are exchanged as JSON:
unpickling could run another's code.

Parameters of a stage keep the names of the whole model, so checkpoints, initial weights and exports
do not depend on stages. Source: Megatron-LM, Narayanan et al. 2021, section 2.2 (interleaved
stages); zero bubble, Qi et al. 2024, section 6 (V shape: the first and the last stage share a
rank).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cellmill.config.parallel import Parallel, divide_processes
from cellmill.parallel.materialize import plain_name
from cellmill.parallel.torch_private import flatten_axes, is_dtensor

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
V_SHAPED = ("ZBV", "DualPipeV")


@dataclass(frozen=True)
class Mesh:
    """The device mesh and this rank's coordinates in it."""

    devices: DeviceMesh
    dp_rank: int  # data-parallel coordinate of this rank, 0 to dp_world - 1
    dp_world: int
    dp_group: dist.ProcessGroup  # ranks that read different cells of the same step
    model_parallel_size: int  # number of ranks that read the same cells: tp * pp

    @property
    def device(self) -> torch.device:
        """Compute device of this rank, also where its parameters are offloaded."""
        kind = self.devices.device_type
        if kind == "cuda":
            return torch.device(kind, torch.cuda.current_device())
        return torch.device(kind)

    @cached_property
    def pp(self) -> DeviceMesh:
        """Ranks of this rank's pipeline, in the order of its stages."""
        return self.devices["pp"]

    @property
    def fsdp(self) -> DeviceMesh:
        """Mesh for FSDP2: 2-D (replicate, shard) when there are replicas, else 1-D (shard)."""
        if self.devices["dp_replicate"].size() > 1:
            return self.devices["dp_replicate", "dp_shard"]
        return self.devices["dp_shard"]

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` in place over all ranks, counting model-parallel peers once. Collective.

        The reduction runs over all ranks, not only over ranks that read different cells: every rank
        must get the same number to the last bit and see a signal that only one of them received, or
        their control flow diverges.
        """
        if self.dp_world * self.model_parallel_size > 1:
            dist.all_reduce(tensor)
        peers = self.model_parallel_size
        if peers > 1:
            tensor.div_(peers) if tensor.is_floating_point() else tensor.floor_divide_(peers)
        return tensor


def build_mesh(parallel: Parallel, local_world: int, device_type: str) -> Mesh:
    """Return the mesh over all ranks. Collective.

    Raise ConfigError if their number does not fit strategy, tp or pp.
    """
    world = dist.get_world_size()
    sizes = divide_processes(parallel, world, local_world)
    shape = (sizes.pp, sizes.dp_replicate, sizes.dp_shard, sizes.tp)
    devices = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
    if sizes.tp > 1:
        # DTensor then reduces a norm over both axes at once
        flatten_axes(devices["dp_shard", "tp"], "shard_tp")
    flat = flatten_axes(devices["dp_replicate", "dp_shard"], "dp")
    return Mesh(devices, flat.get_local_rank(), flat.size(), flat.get_group(), sizes.tp * sizes.pp)


def get_mesh(tensor: Tensor) -> DeviceMesh | None:
    """Return the mesh of a DTensor, None for a plain tensor."""
    return tensor.device_mesh if is_dtensor(tensor) else None


def to_local(tensor: Tensor | None) -> Tensor:
    """Return this rank's part of a DTensor, or a plain tensor.

    Do not keep it: FSDP2 moves it before its first pass.
    """
    assert tensor is not None
    return tensor.to_local() if is_dtensor(tensor) else tensor


def gather_json(
    value: Any, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[Any]:
    """Return every rank's JSON-able `value`, by rank.

    Collective over `group` (None: all ranks), which uses `device`.
    """

    def gather(tensor: Tensor) -> list[Tensor]:
        # not into one tensor: torch renamed that function in 2.13
        tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(tensors, tensor, group=group)
        return tensors

    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    lengths = [int(length) for length in gather(torch.tensor([len(text)], device=device))]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(text)] = text
    values = []
    for rank_text, length in zip(gather(padded), lengths):
        values.append(json.loads(bytes(rank_text[:length].cpu().numpy())))
    return values


def set_tf32(enabled: bool, device: torch.device) -> None:
    """Let float32 products on a GPU use TF32 (10 bits of mantissa), or not.

    On a CPU the setting would mean bfloat16, so it is left alone.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if enabled else "highest")


def list_stages(rank: int, parallel: Parallel) -> list[int]:
    """Return the pipeline stages of pipeline rank `rank`, ascending."""
    if parallel.n_stages == parallel.pp:
        return [rank]
    second = parallel.n_stages - 1 - rank if parallel.schedule in V_SHAPED else rank + parallel.pp
    return [rank, second]


def list_blocks(stage: int, stages: int, blocks: int) -> range:
    """Return the blocks of a stage.

    The remainder goes to the middle: the ends hold the embedding and the loss.
    """
    quotient, remainder = divmod(blocks, stages)
    sizes = [quotient + (1 <= number <= remainder) for number in range(stages)]
    first = sum(sizes[:stage])
    return range(first, first + sizes[stage])


class PipelineStages(nn.Module):
    """The pipeline stages of this rank by number, of `stages` in all.

    Each part is a model without the modules of other stages.
    """

    def __init__(self, parts: Mapping[int, nn.Module], stages: int) -> None:
        super().__init__()
        self.numbers = list(parts)
        self.parts = nn.ModuleList(parts.values())
        self.first = parts.get(0)
        self.last = parts.get(stages - 1)
        tied = {} if self.last is None else tied_parameters(self.last)
        self.tied = frozenset(id(parameter) for parameter in tied.values())
        """Identities of the last stage's copies of tied parameters: norms count the first stage's."""

    @property
    def objective(self) -> Any:
        return self.parts[0].objective

    def view(self, batch: object, *, seed: int, step: int) -> Any:
        return any_part(self).view(batch, seed=seed, step=step)

    def prepare(self, batch: object, *, seed: int, step: int) -> Any:
        """Call `Model.prepare`, which reads no parameters: every stage draws the same."""
        return any_part(self).prepare(batch, seed=seed, step=step)


def any_part(model: nn.Module) -> Any:
    """Return a part of the model that this rank holds: each has the plan and the objective."""
    return model.parts[0] if isinstance(model, PipelineStages) else model


def last_part(model: nn.Module) -> Any:
    """Return the part that computes the loss; None on other ranks of a pipeline."""
    return model.last if isinstance(model, PipelineStages) else model


def keep_stage(model: nn.Module, stage: int, stages: int) -> None:
    """Remove from the whole `model` what other stages hold. In place, on the meta device."""
    plan: Any = model.plan
    blocks = model.get_submodule(plan.blocks)
    names = [name for name, _ in blocks.named_children()]
    stage_blocks = list_blocks(stage, stages, len(names))
    for name in names:
        if int(name) not in stage_blocks:
            delattr(blocks, name)  # del blocks[i] would renumber the others
    removed = {*plan.begin, *plan.finish}
    if stage == 0:
        removed -= {*plan.begin}
    if stage == stages - 1:
        removed -= {*plan.finish}
    for name in removed:
        if hasattr(model, name):
            delattr(model, name)


def tied_parameters(part: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of one end of the pipeline that both ends hold, by plain name."""
    plan: Any = part.plan
    shared = {*plan.begin} & {*plan.finish}
    return {
        plain_name(name): parameter
        for name, parameter in part.named_parameters()
        if name.split(".")[0] in shared
    }
