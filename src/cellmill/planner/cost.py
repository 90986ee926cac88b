"""Cost of a whole run: its steps, memory, FLOPs and traffic, and its hours on devices of known speed."""

from dataclasses import dataclass

from cellmill.config.options import PlanOptions
from cellmill.models.batch import PAD_CELL
from cellmill.models.build import ModelSpec
from cellmill.planner.devices import Device
from cellmill.planner.hardware import Hardware
from cellmill.planner.measure.load import Load
from cellmill.planner.measure.size import ModelSize, measure_size
from cellmill.planner.memory import Memory, estimate_memory
from cellmill.planner.planned_model import PlannedModel
from cellmill.planner.step_counts import CorpusSize, StepCounts, count_steps
from cellmill.planner.step_time import Network, StepTime, estimate_step_time
from cellmill.planner.traffic import CollectiveTraffic, list_traffic, sum_link_bytes


@dataclass(frozen=True)
class RunTime:
    """Time of a run on devices of known speed."""

    step: StepTime
    mfu: float  # fraction of the devices' peak that a step reaches
    hours: float  # all steps and validations
    validation_frac: float  # fraction of these hours that validations take
    gpu_hours: float  # hours times processes, also on CPUs


@dataclass(frozen=True)
class RunCost:
    """Steps, memory, FLOPs, traffic and time of a run in its layout."""

    options: PlanOptions
    model: PlannedModel
    whole_size: ModelSize  # of the whole model; `model.size` is on one tensor-parallel rank
    counts: StepCounts
    memory: Memory  # of the process that needs the most
    # of the model over all processes: all passes of a coupled loss count, recomputation does not
    flops_per_step: float
    traffic: list[CollectiveTraffic]  # of the rank that sends the most to other nodes
    time: RunTime | None  # None if the device's speed is unknown


def estimate_cost(
    options: PlanOptions, corpus: CorpusSize, hardware: Hardware, device: Device
) -> RunCost:
    """Estimate steps, memory, FLOPs, traffic and time of a run."""
    memory = estimate_memory(options, corpus, hardware)
    model = PlannedModel.measure(options, corpus, hardware)
    counts = count_steps(options, corpus, model.layout)

    # FLOPs of the whole model, in a step of mean cells
    whole_size = measure_size(
        ModelSpec.of(options, corpus.n_genes, corpus.levels), finetune=options.finetune
    )
    mean_cell = Load(corpus.tokens_per_cell, corpus.pairs_per_cell, cells=1)
    flops_per_step = whole_size.flops.count(mean_cell) * counts.max_cells_per_step

    # traffic of the pipeline rank that sends the most
    load = _find_rank_load(corpus, counts, model.layout.dp)
    traffic_by_rank = [
        list_traffic(model, pp_rank, load, counts.mean_micro_batches_per_step)
        for pp_rank in range(model.layout.pp)
    ]
    max_traffic = max(traffic_by_rank, key=sum_link_bytes)

    time = None
    peak_flops_per_s = device.peak_flops_per_s(options.parallel)
    network = _find_network(options, device)
    if peak_flops_per_s is not None and network is not None:
        flops_per_s = peak_flops_per_s * options.plan.mfu_frac
        step = estimate_step_time(
            model, max_traffic, network, flops_per_s, load, counts.mean_micro_batches_per_step
        )
        mfu = flops_per_step / (step.step_s * peak_flops_per_s * hardware.world_size)
        time = _sum_run_time(options, counts, step, mfu, hardware.world_size)
    return RunCost(options, model, whole_size, counts, memory, flops_per_step, max_traffic, time)


def _find_network(options: PlanOptions, device: Device) -> Network | None:
    """Find the rates of the links, in section `plan` or else of the device. None if one is unknown."""
    intra_gb_per_s = options.plan.intra_node_gbs or device.intra_node_gb_per_s
    inter_gb_per_s = options.plan.inter_node_gbs or device.inter_node_gb_per_s
    if intra_gb_per_s is None or inter_gb_per_s is None:
        return None
    return Network(intra_gb_per_s, inter_gb_per_s)


def _sum_run_time(
    options: PlanOptions, counts: StepCounts, step: StepTime, mfu: float, world_size: int
) -> RunTime:
    """Add up the time of all steps and validations.

    A validation is a forward pass over its cells, or two if it takes a coupled loss. A metric of hidden
    genes doubles the passes. Communication of a validation is not counted.
    """
    # a step with fewer cells than the largest takes less time in proportion
    steps_s = step.step_s * counts.cells_seen / counts.max_cells_per_step
    if options.train.replay_every_steps is not None:
        # one of `replay_every_steps` steps is computed twice
        steps_s *= 1 + 1 / options.train.replay_every_steps
    views_per_cell = 2 if options.train.best_metric.startswith("val_hidden_genes") else 1
    validated_cells = views_per_cell * counts.validations * counts.val_cells
    # `step.validation_s` is the time to validate as many cells as the largest step has
    validations_s = step.validation_s * validated_cells / counts.max_cells_per_step
    hours = (steps_s + validations_s) / 3600
    return RunTime(
        step=step,
        mfu=mfu,
        hours=hours,
        validation_frac=validations_s / 3600 / hours,
        gpu_hours=hours * world_size,
    )


def _find_rank_load(corpus: CorpusSize, counts: StepCounts, dp: int) -> Load:
    """Find the mean load of one of `dp` data-parallel ranks in the largest step.

    A pipeline pads its micro-batches. A rank computes the padding like other tokens, in cells of PAD_CELL
    tokens each.
    """
    n_cells = counts.max_cells_per_step / dp
    tokens = n_cells * corpus.tokens_per_cell
    padding = counts.padding_frac * tokens
    return Load(
        tokens=tokens + padding,
        pairs=n_cells * corpus.pairs_per_cell + PAD_CELL * padding,
        cells=n_cells + padding / PAD_CELL,
    )
