"""Checks across sections, of a run against the processes it gets, and of a tokenizer against the cells. Torch-free.

`snakemake -n` and each stage that takes options call them once; behind them the options are asserted. All raise
ConfigError.
"""

import math
from typing import Protocol

from cellmill.config.options import TrainOptions
from cellmill.config.parallel import Parallel, divisors, layout, nearest
from cellmill.config.parts.family import FamilyConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.errors import ConfigError


def check_together(options: TrainOptions) -> None:
    """Refuse options of different sections that exclude each other, naming both."""
    _check_objective(options)
    _check_tensor_parallel(options.model, options.parallel)
    _check_pipeline(options.model, options.parallel)
    if options.parallel.compile and not options.model.compiles:
        raise ConfigError(f"parallel.compile: family {options.model.family} is not compiled; set compile to no")
    if options.parallel.compile:
        _check_compile(options.parallel)
    if options.parallel.tf32 and options.parallel.half_precision:
        raise ConfigError(
            f"parallel.tf32 has no effect with precision {options.parallel.precision}; set tf32 to no, or precision to "
            "32-true"
        )
    if options.parallel.cpu_offload == "full" and options.parallel.strategy == "ddp":
        raise ConfigError(
            "parallel.cpu_offload full requires strategy fsdp, got ddp; set strategy to fsdp, or cpu_offload to "
            "optimizer"
        )
    if options.parallel.reduces_each_micro_batch and not options.parallel.shards_gradients:
        raise ConfigError(
            "parallel.gradient_reduction micro_batch requires strategy fsdp with sharded gradients and without a "
            f"pipeline, got strategy {options.parallel.strategy}, sharding_strategy "
            f"{options.parallel.sharding_strategy}, pp {options.parallel.pp}; set gradient_reduction to step"
        )
    if options.parallel.cpu_offload is not None and options.train.optimizer.offloaded is None:
        raise ConfigError(
            f"parallel.cpu_offload {options.parallel.cpu_offload} requires train.optimizer adamw, got "
            f"{options.train.optimizer.name}; set cpu_offload to null, or optimizer to adamw"
        )
    if options.stream.labelled_frac is not None and options.stream.weight_by is None:
        raise ConfigError(
            f"stream.labelled_frac {options.stream.labelled_frac:g} requires stream.weight_by; set it to an obs column "
            "of labels, or leave labelled_frac out"
        )
    if options.tokens.max_tokens > options.train.token_budget:
        raise ConfigError(
            f"tokens.max_tokens {options.tokens.max_tokens} exceeds train.token_budget {options.train.token_budget}: "
            "one cell would not fit; raise the budget or lower max_tokens"
        )
    batch, lanes = options.train.global_batch, options.stream.lanes
    if batch % lanes:
        raise ConfigError(
            f"train.global_batch: expected a multiple of stream.lanes {lanes}, got {batch}; set "
            f"{max(1, round(batch / lanes)) * lanes}"
        )


def check_nodes(options: TrainOptions, node_counts: range, nproc_per_node: int, train_cells: int | None = None) -> None:
    """Refuse what `check_together` refuses, and processes that layout, lanes or cells do not divide over."""
    check_together(options)
    layouts = [layout(options.parallel, nodes * nproc_per_node, nproc_per_node) for nodes in node_counts]
    groups, lanes, batch = [sizes.dp for sizes in layouts], options.stream.lanes, options.train.global_batch
    if len(groups) > 1 and any(lanes % dp for dp in groups):
        raise ConfigError(
            f"stream.lanes {lanes} is not a multiple of {' and of '.join(map(str, groups))}, the numbers of "
            f"data-parallel processes on {node_counts[0]} to {node_counts[-1]} nodes; set "
            f"{_lanes_for(lanes, batch, math.lcm(*groups))}"
        )
    for sizes in layouts:
        if train_cells is not None and train_cells < sizes.dp:
            raise ConfigError(f"{sizes.dp_text} for {train_cells} training cells; set fewer processes in the profile")
        if lanes % sizes.dp:
            raise ConfigError(
                f"stream.lanes {lanes} is not a multiple of {sizes.dp_text}; set {nearest(sizes.dp, divisors(lanes))} "
                f"in the profile, or {_lanes_for(lanes, batch, sizes.dp)}"
            )


def _lanes_for(lanes: int, global_batch: int, dp: int) -> str:
    """The number of lanes nearest to `lanes` that `dp` divides, with another global batch if that needs one."""
    dividing = [n for n in range(dp, global_batch + 1, dp) if global_batch % n == 0]
    if dividing:
        return f"stream.lanes {nearest(lanes, dividing)}"
    return f"stream.lanes {dp} with train.global_batch {max(1, round(global_batch / dp)) * dp}"


class Rows(Protocol):
    """Kind of the rows of a file or of shards."""

    @property
    def ordered(self) -> bool:
        """Sequences, or genes in rank order."""

    @property
    def ranked(self) -> bool:
        """Genes in rank order, without counts."""


def check_rows(tokens: Tokens, rows: Rows, source: str, counted: bool = False) -> None:
    """Refuse a tokenizer of other rows; for ranks also one, or an objective (`counted`), that needs counts."""
    if rows.ranked:
        choose = None if tokens.value_kind in ("none", "place") and not tokens.sequences else "rank"
        if choose is not None:
            raise ConfigError(
                f"{source}: its cells are ranks without counts, tokens.tokenizer is {tokens.tokenizer}; set {choose}"
            )
        if counted:
            raise ConfigError(
                f"{source}: its cells are ranks without counts, which the objective needs; set objective.name to "
                "masked_gene or next_gene"
            )
        return
    if tokens.sequences == rows.ordered:
        return
    have, choose = ("sequences", "sequence") if rows.ordered else ("cells", "one of cells, such as rank")
    raise ConfigError(f"{source}: it has {have}, tokens.tokenizer is {tokens.tokenizer}; set {choose}")


def _check_objective(options: TrainOptions) -> None:
    model, objective, tokens = options.model, options.objective, options.tokens
    for part in objective.each():
        if part.name in model.objectives or model.family in part.families:
            continue
        key = f"objective.name {part.name}" if part is objective else f"objective.parts.{part.name}"
        raise ConfigError(
            f"{key}: family {model.family} serves {', '.join(model.objectives) or 'none'}; "
            "choose one of these, or another model.family"
        )
    if tokens.value_kind not in model.value_kinds:
        raise ConfigError(
            f"tokens.tokenizer {tokens.tokenizer} has values of kind {tokens.value_kind}, family {model.family} embeds "
            f"{', '.join(model.value_kinds) or 'none'}; choose another tokenizer or family"
        )
    if tokens.covariates and not model.covariates:
        raise ConfigError(
            f"tokens.covariates: family {model.family} has no tokens of obs columns; leave them out, or choose "
            "model.family encoder"
        )
    if tokens.zero_frac:
        for part in objective.each():
            if not part.reads_zeros:
                raise ConfigError(
                    f"tokens.zero_frac: objective {part.name} has no use for genes without counts; set it to 0, or "
                    "choose masked_value or masked_gene"
                )
    if all(getattr(part, "adversarial_scale", None) for part in objective.each()):
        raise ConfigError(
            "objective.adversarial_scale: expected another objective beside it, got a model that learns to hide a "
            "label and nothing else; make it a part of objective sum"
        )
    if labels := sorted({*objective.supervised_by} & {*tokens.covariates}):
        raise ConfigError(
            f"tokens.covariates: {labels[0]} is also objective.label_column, and the model would read the label that "
            "it is trained to tell; leave it out of covariates"
        )
    try:
        objective.check_tokens(tokens)
        model.check_with(objective, tokens)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_tensor_parallel(model: FamilyConfig, parallel: Parallel) -> None:
    tp = parallel.tp
    if tp == 1:
        if parallel.sequence_parallel:
            raise ConfigError("parallel.sequence_parallel requires parallel.tp > 1; set tp, or sequence_parallel to no")
        return
    cut = model.tp_sizes()
    if not cut:
        raise ConfigError(f"parallel.tp {tp}: family {model.family} does not support tensor parallelism; set tp to 1")
    if parallel.sequence_parallel and not model.sequence_parallel:
        raise ConfigError(
            f"parallel.sequence_parallel: rows between the blocks of family {model.family} are cells, not tokens; set "
            "sequence_parallel to no"
        )
    possible = divisors(math.gcd(*cut.values()))
    for name, size in cut.items():
        if size % tp:
            raise ConfigError(f"parallel.tp {tp} does not divide {name} {size}; use {nearest(tp, possible)}")


def _check_pipeline(model: FamilyConfig, parallel: Parallel) -> None:
    pp, schedule, stages = parallel.pp, parallel.schedule, parallel.stages
    if pp == 1:
        for name in ("schedule", "microbatches"):
            if getattr(parallel, name) != Parallel.model_fields[name].default:
                raise ConfigError(f"parallel.{name} requires parallel.pp > 1; set pp, or leave {name} out")
        return
    blocks = model.pp_sizes()
    if not blocks:
        raise ConfigError(f"parallel.pp {pp}: family {model.family} does not support pipelines; set pp to 1")
    for name, size in blocks.items():
        if size < stages:
            most = size * pp // stages
            fewer = "use schedule 1F1B, or set pp to 1" if stages > pp else "set pp to 1"
            raise ConfigError(
                f"parallel.pp {pp} with schedule {schedule} has {stages} pipeline stages for {name} {size}, and each "
                f"needs a block; {f'use pp {most}' if most > 1 else fewer}"
            )


def _check_compile(parallel: Parallel) -> None:
    if parallel.activation_checkpointing == "selective":
        raise ConfigError(
            "parallel.activation_checkpointing selective has no effect with compile, which selects what to recompute "
            "by itself; set it to null or full"
        )
    if parallel.schedule in ("InterleavedZeroBubble", "ZBV", "DualPipeV"):
        raise ConfigError(
            f"parallel.schedule {parallel.schedule} splits the backward pass, which compile fuses; set compile to no, "
            "or schedule to Interleaved1F1B"
        )
