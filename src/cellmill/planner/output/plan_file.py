"""The plan of a run: its record in plan.json, and its lines of text."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from cellmill.config.run import AUTO_EPOCHS, Train
from cellmill.planner.cost import RunCost, RunTime
from cellmill.planner.devices import describe_assumption
from cellmill.planner.hardware import Hardware
from cellmill.planner.memory import estimate_host_bytes_per_process
from cellmill.planner.output.format import describe_layout, format_bytes, format_hours
from cellmill.planner.remedies import MAX_TRIED_BUDGET
from cellmill.planner.schedules import estimate_idle_frac
from cellmill.planner.step_counts import CorpusSize
from cellmill.planner.traffic import sum_link_bytes

# Milliseconds to launch the kernels of a micro-batch: about 1,500 kernels of 5 to 10 us each.
LAUNCH_MS_PER_MICRO_BATCH = 10
# The plan gives a hint if validation takes more than this fraction of the time.
LARGE_VALIDATION_FRAC = 0.1
# global batch, in cells, and learning rate of a run that sets neither
DEFAULT_BATCH = float(Train.model_fields["global_batch"].default)
DEFAULT_LR = float(Train.model_fields["lr"].default)

Line = tuple[str, str]  # name of a printed line, and its text


@dataclass(frozen=True)
class RunPlan:
    """Cost of a run on its corpus and processes. plan.json stores it, and `format_plan` prints it."""

    cost: RunCost
    corpus: CorpusSize
    hardware: Hardware
    max_fitting_token_budget: int  # largest train.token_budget that fits in memory
    genes_per_cell: float  # mean number of detected genes
    cut_cells_frac: float  # fraction of cells whose detected genes do not all become tokens
    fingerprint: str | None  # of the corpus; None if the corpus is assumed
    warnings: list[str]

    @property
    def tokens_per_step(self) -> float:
        return self.corpus.tokens_per_cell * self.cost.counts.max_cells_per_step

    @property
    def tokens_seen(self) -> float:
        """Tokens over all steps."""
        return self.corpus.tokens_per_cell * self.cost.counts.cells_seen

    def record(self) -> dict[str, Any]:
        """Make the content of plan.json."""
        cost = self.cost
        options = cost.options
        train = options.train
        counts = cost.counts
        time = cost.time
        hardware = self.hardware
        needed = estimate_host_bytes_per_process(cost.model)
        return {
            "parameters": cost.whole_size.parameters,
            # bytes of each process
            "memory": {
                "parts_bytes": asdict(cost.memory),  # by field of `planner.memory.Memory`
                "total_bytes": cost.memory.total,
                "usable_bytes": hardware.usable_bytes,  # `plan.memory_frac` of device_bytes
                "device_bytes": hardware.device_bytes,
                "offload_bytes": needed.offload,  # host memory for parallel.cpu_offload
                "staging_bytes": needed.staging,  # host memory for a copy of the checkpoint
            },
            # bytes of each process in a step
            "communication": {
                "link_bytes": asdict(sum_link_bytes(cost.traffic)),
                "collectives": [
                    asdict(collective) | {"link_bytes": asdict(sum_link_bytes([collective]))}
                    for collective in cost.traffic
                ],
            },
            # tokens, cells and steps
            "flops_per_step": cost.flops_per_step,  # over all processes, without recomputation
            "tokens_per_step": self.tokens_per_step,
            "tokens_per_cell": self.corpus.tokens_per_cell,
            "tokens_seen": self.tokens_seen,  # tokens over all steps
            "cells": self.corpus.n_cells,  # training cells
            "n_genes": self.corpus.n_genes,  # genes of the vocabulary
            "steps": counts.steps,
            "steps_per_epoch": counts.steps_per_epoch,
            "cells_seen": counts.cells_seen,  # cells over all steps
            "micro_batches_per_step": counts.mean_micro_batches_per_step,  # mean over the sampled first steps
            "validations": counts.validations,
            "val_cells": counts.val_cells,  # cells per validation
            "auto_steps": train.steps == "auto",
            "max_micro_batch_tokens": counts.max_micro_batch_tokens,
            # time: step, mfu, hours, validation_frac and gpu_hours are None if the device's speed is unknown
            "step": time and {**asdict(time.step), "step_s": time.step.step_s},
            "pipeline_idle_frac": estimate_idle_frac(
                options.parallel, counts.mean_micro_batches_per_step
            ),
            "mfu": time and time.mfu,  # fraction of the devices' peak that a step reaches
            "hours": time and time.hours,  # with validation
            "validation_frac": time and time.validation_frac,  # fraction of these hours
            "gpu_hours": time and time.gpu_hours,
            # processes and their layout
            "nodes": hardware.nodes,
            "nproc_per_node": hardware.nproc_per_node,
            "world_size": hardware.world_size,
            "device": hardware.device_name,
            # options of section `parallel`, and sizes of the mesh axes
            "layout": options.parallel.model_dump(mode="json") | asdict(cost.model.layout),
            # assumed fraction of the peak while a device computes, recomputation included
            "mfu_frac": options.plan.mfu_frac,
            # options of training, and what the options take from the corpus
            "warmup_steps": train.warmup_steps,
            "global_batch": train.global_batch,  # cells
            # train.lr for this batch, by the square-root rule and by the linear rule; None if it needs no hint
            "scaled_lr": _scale_lr(train),
            "choices": options.objective.choices(),  # obs columns that the objective takes, and why
            "warnings": self.warnings,
            # largest train.token_budget that fits; none above MAX_TRIED_BUDGET is tried
            "max_fitting_token_budget": self.max_fitting_token_budget,
            # the corpus
            "genes_per_cell": self.genes_per_cell,
            "cut_cells_frac": self.cut_cells_frac,
            "fingerprint": self.fingerprint,
        }


def _scale_lr(train: Train) -> tuple[float, float] | None:
    """Scale the default learning rate to the run's batch, by two rules.

    The ratio is the run's batch divided by the default batch. The first rate is scaled by the square root
    of this ratio (for Adam; Malladi et al. 2022), the second by the ratio itself (for SGD; Goyal et al.
    2017). Return None if the run has the default batch, or a rate that is not the default.
    """
    ratio = train.global_batch / DEFAULT_BATCH
    if train.lr != DEFAULT_LR or ratio == 1:
        return None
    return train.lr * math.sqrt(ratio), train.lr * ratio


def _suggest_val_cells(val_cells: int, validation_frac: float) -> int:
    """Find the number of cells per validation that take LARGE_VALIDATION_FRAC of the hours.

    With `val_cells` cells per validation, validations take `validation_frac` of the hours. The found
    number is rounded down to two digits. It is 0 if a single cell takes more.
    """
    # with this many cells per validation, all validations would take as long as all steps
    cells_at_equal_time = val_cells * (1 - validation_frac) / validation_frac
    cells = cells_at_equal_time * LARGE_VALIDATION_FRAC / (1 - LARGE_VALIDATION_FRAC)
    unit = 10 ** max(0, int(math.log10(max(cells, 1))) - 1)
    return int(cells) // unit * unit


def format_plan(plan: RunPlan, cpu_time: RunTime | None = None) -> str:
    """Format a plan as lines of text.

    `cpu_time` is the time of the run at the measured speed of CPUs: a plan for CPUs has no time itself.
    """
    lines = [
        *_format_steps(plan),
        *_format_memory(plan),
        *_format_time(plan.cost),
        *_format_hints(plan, cpu_time or plan.cost.time),
    ]
    return "\n".join(format_line(*line) for line in lines)


def format_line(name: str, text: str) -> str:
    """Format a line of the plan. Texts begin in one column, unless a name is long."""
    return f"{name:<11} {text}"


def _format_steps(plan: RunPlan) -> Iterator[Line]:
    """Format the lines on parameters, cells and steps."""
    cost = plan.cost
    counts = cost.counts
    yield "parameters", f"{cost.whole_size.parameters:,} over {plan.corpus.n_genes:,} genes"

    cells_text = f"{plan.corpus.n_cells:,} for training, on average {plan.corpus.tokens_per_cell:,.0f} tokens"
    if plan.cut_cells_frac:
        percent = "less than 1%" if plan.cut_cells_frac < 0.01 else f"{plan.cut_cells_frac:.0%}"
        cells_text += f" and {plan.genes_per_cell:,.0f} genes; "
        cells_text += f"tokens.max_tokens is too small for all genes of {percent} of cells"
    yield "cells", cells_text

    auto_text = ""
    if cost.options.train.steps == "auto":
        auto_text = f"; auto: {AUTO_EPOCHS} epochs"
        if AUTO_EPOCHS * counts.steps_per_epoch < counts.steps:
            auto_text += f" are {AUTO_EPOCHS * counts.steps_per_epoch:,}, raised to the minimum"
    yield (
        "steps",
        f"{counts.steps:,} ({counts.steps_per_epoch:,} per epoch{auto_text}), {plan.tokens_seen:,.0f} tokens in total",
    )
    yield (
        "step",
        f"{plan.tokens_per_step:,.0f} tokens in {counts.mean_micro_batches_per_step:.1f} micro-batches per process, "
        f"{cost.flops_per_step:.3g} FLOPs",
    )


def _format_memory(plan: RunPlan) -> Iterator[Line]:
    """Format the lines on processes, memory and micro-batches."""
    hardware = plan.hardware
    parallel = plan.cost.options.parallel
    layout = describe_layout(parallel, plan.cost.model.layout)
    yield (
        "processes",
        f"{hardware.world_size} x {hardware.device_name}, {layout}, {parallel.precision}",
    )

    parts = plan.cost.memory.list_by_size()
    memory_text = ", ".join(f"{name} {format_bytes(n_bytes)}" for name, n_bytes in parts)
    needed = estimate_host_bytes_per_process(plan.cost.model)
    for name, n_bytes in (
        ("parallel.cpu_offload", needed.offload),
        ("checkpoints", needed.staging),
    ):
        if n_bytes:
            memory_text += f"; {format_bytes(n_bytes)} of host memory for {name}"
    yield (
        "memory",
        f"{format_bytes(plan.cost.memory.total)} of {format_bytes(hardware.usable_bytes)} per process: {memory_text}",
    )

    assumption = describe_assumption(hardware.device_name)
    if assumption and not plan.cost.options.plan.memory_gb:
        yield "assumed", assumption

    # without a pipeline the number is a bound; with a pipeline it is the largest of a sample
    largest_text = "at most" if parallel.pp == 1 else "about"
    largest_text += f" {plan.cost.counts.max_micro_batch_tokens:,} tokens"
    budget_text = f"{plan.max_fitting_token_budget:,}"
    if plan.max_fitting_token_budget >= MAX_TRIED_BUDGET:
        budget_text = f"at least {budget_text}"
    if plan.corpus.n_covariates:  # the budget counts gene tokens only
        largest_text += " with those of covariates"
        budget_text += " without them"
    yield "micro-batch", f"{largest_text}; {budget_text} would fit (train.token_budget)"


def _format_time(cost: RunCost) -> Iterator[Line]:
    """Format the lines on traffic and time, and on what the times leave out."""
    sent = sum_link_bytes(cost.traffic)
    yield (
        "traffic",
        f"{format_bytes(sent.intra_node)} inside the node and {format_bytes(sent.inter_node)} to other nodes, "
        "per process and step",
    )
    size = cost.whole_size
    if sum(size.trained_by_block) < size.n_blocks * size.block.parameters:
        yield (
            "upper bound",
            f"finetune.method {cost.options.finetune.method} freezes weights, so time, FLOPs and activations are lower "
            "than these estimates",
        )

    optimizer = cost.options.train.optimizer
    if optimizer.matrix_state_names is not None:
        yield (
            "not counted",
            f"work of {optimizer.name} on matrices of the blocks, and their exchange",
        )

    time = cost.time
    if time is None:  # on CPUs: stage plan measures their speed, and prints their time itself
        return
    step = time.step
    yield (
        "step time",
        f"{step.step_s:.3g} s: compute {step.compute_s:.3g}, exposed communication {step.exposed_s:.3g}, "
        f"idle in the pipeline {step.idle_s:.3g}",
    )

    mfu_text = f"{time.mfu:.0%} of the peak"
    mfu_frac = cost.options.plan.mfu_frac
    if round(time.mfu, 2) < round(mfu_frac, 2):
        mfu_text += (
            f" over a step (plan.mfu_frac assumes {mfu_frac:.0%} without recomputation, padding, communication and "
            "idle time)"
        )
    yield (
        "time",
        f"{format_hours(time.hours)} in all, GPU time {format_hours(time.gpu_hours)} at {mfu_text}",
    )

    micro_batch_ms = 1e3 * step.compute_s / cost.counts.mean_micro_batches_per_step
    if micro_batch_ms < LAUNCH_MS_PER_MICRO_BATCH:
        yield (
            "not counted",
            f"launches of kernels, which may take {LAUNCH_MS_PER_MICRO_BATCH} ms: a micro-batch computes for "
            f"{micro_batch_ms:.2g} ms",
        )
    if cost.options.parallel.cpu_offload is not None:
        yield "not counted", "copies between host and device of cpu_offload, and AdamW on the host"


def _format_hints(plan: RunPlan, time: RunTime | None) -> Iterator[Line]:
    """Format the lines on validation and on the objective's choices, the warnings, and a hint."""
    options = plan.cost.options
    train = options.train
    counts = plan.cost.counts
    if counts.validations:
        validation_text = f"{counts.validations:,} times {counts.val_cells:,} cells"
        if time is not None:
            validation_text += f", {time.validation_frac:.0%} of the time"
            if time.validation_frac > LARGE_VALIDATION_FRAC:
                fewer = _suggest_val_cells(counts.val_cells, time.validation_frac)
                remedy = (
                    f"set train.val_cells to {fewer}" if fewer else "raise train.val_every_steps"
                )
                validation_text += f"; {remedy} for {LARGE_VALIDATION_FRAC:.0%}"
        yield "validation", validation_text
    yield from options.objective.choices().items()
    for warning in plan.warnings:
        yield "warning", warning

    scaled_lr = _scale_lr(train)
    if scaled_lr is not None:
        root, linear = scaled_lr
        yield (
            "hint",
            f"train.lr {DEFAULT_LR:g} suits train.global_batch {DEFAULT_BATCH:g}; scaled to {train.global_batch:,} it "
            f"is {root:.2g} (square root, usual for AdamW) or {linear:.2g} (linear)",
        )
