"""Memory, traffic and time of a run in one layout."""

from dataclasses import dataclass

from cellmill.config.options import PlanOptions
from cellmill.models.build import ModelSpec
from cellmill.planner.communication import Traffic, peak_traffic
from cellmill.planner.devices import Device
from cellmill.planner.fit import Hardware
from cellmill.planner.memory import Memory
from cellmill.planner.planned_model import PlannedModel
from cellmill.planner.size import ModelSize, measure
from cellmill.planner.step_time import Network, StepTime, step_time
from cellmill.planner.work import Cells, Work, measure_work


@dataclass(frozen=True)
class Cost:
    """Estimates of a run; the optional ones are None if the device's speed is unknown."""

    model: PlannedModel
    whole: ModelSize
    """Sizes of the whole model, without tensor parallelism."""
    work: Work
    memory: Memory
    flops_per_step: float
    """FLOPs of the model over all processes; recomputation is not counted."""
    traffic: list[Traffic]
    """Traffic of the rank that sends the most."""
    time: StepTime | None = None
    mfu: float | None = None
    hours: float | None = None
    """Hours including validation."""
    validation_frac: float | None = None
    """Fraction of the hours spent in validation."""
    gpu_hours: float | None = None


def cost(options: PlanOptions, cells: Cells, hardware: Hardware, device: Device, memory: Memory) -> Cost:
    """Estimate a run that needs `memory` per process."""
    model = hardware.model(options, cells.n_genes)
    work = measure_work(options, cells, model.layout)
    whole = measure(ModelSpec.of(options, cells.n_genes), finetune=options.finetune)
    per_cell = whole.flops_per_token * work.tokens_per_cell + whole.flops_per_token_pair * work.pairs_per_cell
    flops_per_step = per_cell * work.cells_per_step
    own_cells = work.cells_per_step / model.layout.dp
    tokens, pairs = own_cells * work.tokens_per_cell, own_cells * work.pairs_per_cell
    micro_batches = work.micro_batches_per_step
    traffic = peak_traffic(model, tokens, micro_batches)
    peak = device.bf16_flops if options.parallel.low else device.fp32_flops
    network = _network(options, device)
    if peak is None or network is None:
        return Cost(model, whole, work, memory, flops_per_step, traffic)
    time = step_time(model, traffic, network, peak * options.plan.mfu_frac, tokens, pairs, micro_batches)
    steps_s = time.step_s * work.cells_seen / work.cells_per_step
    # validation is a forward pass alone, a third of a step
    validations_s = time.step_s / 3 * work.validations * work.val_cells / work.cells_per_step
    hours = (steps_s + validations_s) / 3600
    mfu = flops_per_step / (time.step_s * peak * hardware.world)
    estimates = (time, mfu, hours, validations_s / 3600 / hours, hours * hardware.world)
    return Cost(model, whole, work, memory, flops_per_step, traffic, *estimates)


def _network(options: PlanOptions, device: Device) -> Network | None:
    inside, between = options.plan.intra_node_gbs, options.plan.inter_node_gbs
    inside = device.intra_node_gbs if inside is None else inside
    between = device.inter_node_gbs if between is None else between
    return None if inside is None or between is None else Network(inside, between)
