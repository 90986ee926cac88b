"""What a run in one layout takes: memory, traffic, time. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cellmill.config.options import PlanOptions
from cellmill.config.parallel import Layout
from cellmill.models.build import ModelSpec
from cellmill.planner.communication import Traffic, traffic_per_rank
from cellmill.planner.devices import Device
from cellmill.planner.fit import Hardware
from cellmill.planner.memory import Memory
from cellmill.planner.size import measure, size_of
from cellmill.planner.step_time import Network, StepTime, step_time
from cellmill.planner.work import Cells, Work, measure_work


@dataclass(frozen=True)
class Cost:
    """Of a run that fits."""

    sizes: Layout
    work: Work
    memory: Memory
    flops_per_step: float
    """Of the model, over all processes; what is computed twice counts once."""
    traffic: list[Traffic]
    """Of the process that sends most."""
    time: StepTime | None
    """None where the device's speed is not known."""
    mfu: float | None
    hours: float | None
    """Validations included."""
    validation_frac: float | None
    """Of the hours."""
    gpu_hours: float | None


def cost(options: PlanOptions, cells: Cells, place: Hardware, device: Device, memory: Memory) -> Cost:
    """What a run takes that needs so much `memory`."""
    parallel = options.parallel
    sizes = place.layout(parallel)
    work = measure_work(options, cells, sizes)
    size, whole = (
        size_of(options, cells.n_genes),
        measure(ModelSpec.of(options, cells.n_genes), finetune=options.finetune),
    )
    of_cell = whole.flops_per_token * work.tokens_per_cell + whole.flops_per_token_pair * work.pairs_per_cell
    flops_per_step = of_cell * work.cells_per_step
    own_cells = work.cells_per_step / sizes.dp
    tokens, pairs = own_cells * work.tokens_per_cell, own_cells * work.pairs_per_cell
    micro_batches = work.micro_batches_per_step
    traffic = traffic_per_rank(size, parallel, sizes, place.nproc_per_node, tokens, micro_batches)
    peak = device.bf16_flops if parallel.low else device.fp32_flops
    network = _network(options, device)
    if peak is None or network is None:
        return Cost(sizes, work, memory, flops_per_step, traffic, None, None, None, None, None)
    reached = peak * options.plan.mfu_frac
    time = step_time(size, parallel, sizes, traffic, network, reached, tokens, pairs, micro_batches)
    steps_s = time.step_s * work.cells_seen / work.cells_per_step
    # forward alone, which is a third of a step
    validations_s = time.step_s / 3 * work.validations * work.val_cells / work.cells_per_step
    hours = (steps_s + validations_s) / 3600
    mfu = flops_per_step / (time.step_s * peak * place.world)
    return Cost(
        sizes,
        work,
        memory,
        flops_per_step,
        traffic,
        time,
        mfu,
        hours,
        validations_s / 3600 / hours,
        hours * place.world,
    )


def links(traffic: Sequence[Traffic]) -> dict[str, float]:
    """Bytes a process sends in a step over each kind of link."""
    return {
        "intra_node": sum(part.intra_node_bytes for part in traffic),
        "inter_node": sum(part.inter_node_bytes for part in traffic),
    }


def describe_traffic(traffic: Sequence[Traffic]) -> list[dict[str, Any]]:
    """For plan.json: each kind of collective over each axis."""
    return [
        {**asdict(part), "intra_node_bytes": part.intra_node_bytes, "inter_node_bytes": part.inter_node_bytes}
        for part in traffic
    ]


def _network(options: PlanOptions, device: Device) -> Network | None:
    inside, between = options.plan.intra_node_gbs, options.plan.inter_node_gbs
    inside = device.intra_node_gbs if inside is None else inside
    between = device.inter_node_gbs if between is None else between
    return None if inside is None or between is None else Network(inside, between)
