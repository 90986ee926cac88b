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

# time to launch the kernels of a micro-batch: about 1,500, 5 to 10 us each
LAUNCHES_MS = 10
LARGE_FRAC = 0.1  # validation above this fraction of the time gets a hint
DEFAULT_BATCH = float(Train.model_fields["global_batch"].default)
DEFAULT_LR = float(Train.model_fields["lr"].default)

Line = tuple[str, str]  # name and text


@dataclass(frozen=True)
class RunPlan:
    """Cost of a run on its corpus and processes: plan.json stores it, `format_plan` prints it."""

    cost: RunCost
    corpus: CorpusSize
    hardware: Hardware
    max_fitting_token_budget: int  # largest train.token_budget that fits in memory
    genes_per_cell: float  # mean number of detected genes
    cut_cells_frac: float  # fraction of cells with genes that do not become tokens
    fingerprint: str | None  # of the corpus; None for an assumed one
    warnings: list[str]

    @property
    def tokens_per_step(self) -> float:
        return self.corpus.tokens_per_cell * self.cost.counts.max_cells_per_step

    @property
    def tokens_seen(self) -> float:
        """Tokens over all steps."""
        return self.corpus.tokens_per_cell * self.cost.counts.cells_seen

    def record(self) -> dict[str, Any]:
        """Make the content of plan.json. Values that need the device's speed are None if it is unknown."""
        cost = self.cost
        options = cost.options
        train = options.train
        counts = cost.counts
        time = cost.time
        hardware = self.hardware
        needed = estimate_host_bytes_per_process(cost.model)
        return {
            "parameters": cost.whole_size.parameters,
            "memory": {
                "parts_bytes": asdict(cost.memory),  # by field of `planner.memory.Memory`
                "total_bytes": cost.memory.total,
                "usable_bytes": hardware.usable_bytes,  # `plan.memory_frac` of device_bytes
                "device_bytes": hardware.device_bytes,
                "offload_bytes": needed.offload,  # host memory for parallel.cpu_offload
                "staging_bytes": needed.staging,  # host memory for a copy of the checkpoint
            },
            "communication": {
                "link_bytes": asdict(sum_link_bytes(cost.traffic)),
                "collectives": [
                    asdict(collective) | {"link_bytes": asdict(sum_link_bytes([collective]))}
                    for collective in cost.traffic
                ],
            },
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
            "step": time and {**asdict(time.step), "step_s": time.step.step_s},
            "pipeline_idle_frac": estimate_idle_frac(
                options.parallel, counts.mean_micro_batches_per_step
            ),
            "mfu": time and time.mfu,  # fraction of the device's peak over a step
            "hours": time and time.hours,  # with validation
            "validation_frac": time and time.validation_frac,  # fraction of the hours
            "gpu_hours": time and time.gpu_hours,
            "nodes": hardware.nodes,
            "nproc_per_node": hardware.nproc_per_node,
            "world_size": hardware.world_size,
            "device": hardware.device_name,
            # options of section `parallel`, and sizes of the mesh axes
            "layout": options.parallel.model_dump(mode="json") | asdict(cost.model.layout),
            # fraction of the peak that is assumed without communication and idle time
            "mfu_frac": options.plan.mfu_frac,
            "warmup_steps": train.warmup_steps,
            "global_batch": train.global_batch,  # cells
            # by the square root of the batch sizes' ratio, and by the ratio
            "scaled_lr": _scale_lr(train),
            "choices": options.objective.choices(),  # what options take from the corpus, and why
            "warnings": self.warnings,
            # largest train.token_budget that fits: train.token_budget itself, or up to MAX_TRIED_BUDGET
            "max_fitting_token_budget": self.max_fitting_token_budget,
            "genes_per_cell": self.genes_per_cell,
            "cut_cells_frac": self.cut_cells_frac,
            "fingerprint": self.fingerprint,
        }


def _scale_lr(train: Train) -> tuple[float, float] | None:
    """Scale the default learning rate to the run's batch.

    Return it scaled by the square root of the ratio of batch sizes (Adam; Malladi et al. 2022), and by
    the ratio (SGD; Goyal et al. 2017). None if the run has the default batch or another rate.
    """
    ratio = train.global_batch / DEFAULT_BATCH
    if train.lr != DEFAULT_LR or ratio == 1:
        return None
    return train.lr * math.sqrt(ratio), train.lr * ratio


def _suggest_val_cells(val_cells: int, validation_frac: float) -> int:
    """Find how many validation cells take LARGE_FRAC of the hours, if `val_cells` take `validation_frac`.

    The number is rounded down to two digits.
    """
    # cells per validation if all validations together took as long as training
    cells_at_equal_time = val_cells * (1 - validation_frac) / validation_frac
    cells = cells_at_equal_time * LARGE_FRAC / (1 - LARGE_FRAC)
    unit = 10 ** max(0, int(math.log10(max(cells, 1))) - 1)
    return max(1, int(cells) // unit * unit)


def format_plan(plan: RunPlan, cpu_time: RunTime | None = None) -> str:
    """Format a plan as lines of text; `cpu_time` is its time on CPUs of measured speed."""
    lines = [
        *_format_steps(plan),
        *_format_memory(plan),
        *_format_time(plan.cost),
        *_format_hints(plan, cpu_time or plan.cost.time),
    ]
    return "\n".join(format_line(*line) for line in lines)


def format_line(name: str, text: str) -> str:
    return f"{name:<12}{text}"


def _format_steps(plan: RunPlan) -> Iterator[Line]:
    cost = plan.cost
    counts = cost.counts
    yield "parameters", f"{cost.whole_size.parameters:,} over {plan.corpus.n_genes:,} genes"
    genes_text = ""
    if plan.cut_cells_frac:
        genes_text = f" of {plan.genes_per_cell:,.0f} genes: tokens.max_tokens cuts {plan.cut_cells_frac:.0%} of cells"
    yield (
        "cells",
        f"{plan.corpus.n_cells:,} for training, on average {plan.corpus.tokens_per_cell:,.0f} tokens{genes_text}",
    )
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
    hardware = plan.hardware
    parallel = plan.cost.options.parallel
    layout = describe_layout(parallel, plan.cost.model.layout)
    yield (
        "processes",
        f"{hardware.world_size} x {hardware.device_name}, {layout}, {parallel.precision}",
    )
    text = ", ".join(f"{name} {format_bytes(n)}" for name, n in plan.cost.memory.list_by_size())
    needed = estimate_host_bytes_per_process(plan.cost.model)
    for name, n_bytes in (
        ("parallel.cpu_offload", needed.offload),
        ("checkpoints", needed.staging),
    ):
        if n_bytes:
            text += f"; {format_bytes(n_bytes)} of host memory for {name}"
    yield (
        "memory",
        f"{format_bytes(plan.cost.memory.total)} of {format_bytes(hardware.usable_bytes)} per process: {text}",
    )
    assumption = describe_assumption(hardware.device_name)
    if assumption and not plan.cost.options.plan.memory_gb:
        yield "assumed", assumption
    # without a pipeline the number is a bound, with one the largest of a sample
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
    time = cost.time
    if time is None:  # on CPUs, whose speed stage plan measures
        return
    step = time.step
    yield (
        "step time",
        f"{step.step_s:.3g} s: compute {step.compute_s:.3g}, exposed communication {step.exposed_s:.3g}, "
        f"idle in the pipeline {step.idle_s:.3g}",
    )
    peak = f"{time.mfu:.0%} of the peak"
    mfu_frac = cost.options.plan.mfu_frac
    if round(time.mfu, 2) < round(mfu_frac, 2):
        peak += f" over a step (plan.mfu_frac assumes {mfu_frac:.0%} without communication and idle time)"
    yield (
        "time",
        f"{format_hours(time.hours)} in all, GPU time {format_hours(time.gpu_hours)} at {peak}",
    )
    micro_batch_ms = 1e3 * step.compute_s / cost.counts.mean_micro_batches_per_step
    if micro_batch_ms < LAUNCHES_MS:
        yield (
            "not counted",
            f"launches of kernels, which may take {LAUNCHES_MS} ms: a micro-batch computes for {micro_batch_ms:.2g} ms",
        )
    if cost.options.parallel.cpu_offload is not None:
        yield "not counted", "copies between host and device of cpu_offload, and AdamW on the host"
    optimizer = cost.options.train.optimizer
    if optimizer.matrix_state_names is not None:
        yield (
            "not counted",
            f"work of {optimizer.name} on matrices of the blocks, and their exchange",
        )


def _format_hints(plan: RunPlan, time: RunTime | None) -> Iterator[Line]:
    options = plan.cost.options
    train = options.train
    counts = plan.cost.counts
    if counts.validations:
        text = f"{counts.validations:,} times {counts.val_cells:,} cells"
        if time is not None:
            text += f", {time.validation_frac:.0%} of the time"
            if time.validation_frac > LARGE_FRAC:
                fewer = _suggest_val_cells(counts.val_cells, time.validation_frac)
                text += f"; train.val_cells: {fewer} takes {LARGE_FRAC:.0%}"
        yield "validation", text
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
