"""Checks across sections, of a run against its processes, and of a tokenizer against the cells.

`snakemake -n` and each stage that takes options call them once; after them the options are
asserted. All raise ConfigError. Torch-free.
"""

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

from cellmill.config import plugin
from cellmill.config.options import TrainOptions
from cellmill.config.parallel import Parallel, divide_processes, divisors, nearest
from cellmill.config.parts.family import FamilyConfig
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.errors import ConfigError

LARGER_IS_BETTER = ("val_accuracy", "val_pearson", "val_hidden_genes", "effective_rank")
"""Beginnings of metrics."""


def check_together(options: TrainOptions) -> None:
    """Refuse options of different sections that exclude each other, naming both."""
    layouts = _problems_of_layout(options.model, options.parallel)
    for problem in chain(_problems_of_objective(options), layouts, _problems_of_training(options)):
        raise ConfigError(problem)


def _problems_of_objective(options: TrainOptions) -> Iterator[str]:
    model = options.model
    objective = options.objective
    tokens = options.tokens
    parts = objective.named_parts()
    for where, part in parts.items():
        if part.name not in model.objectives and model.family not in part.families:
            suited = dict.fromkeys(model.objectives)
            for name, choice in plugin.BUILT_IN["objective"].items():
                if issubclass(choice, ObjectiveConfig) and model.family in choice.families:
                    suited[name] = None
            yield (
                f"{where}: family {model.family} cannot be trained with {part.name}, only with "
                f"{', '.join(suited) or 'none'}; choose one of these, or another model.family"
            )
    if tokens.value_kind not in model.value_kinds:
        yield (
            f"tokens.tokenizer {tokens.tokenizer} has values of kind {tokens.value_kind}, family {model.family} embeds "
            f"{', '.join(model.value_kinds) or 'none'}; choose another tokenizer or family"
        )
    if tokens.covariates and not model.covariates:
        yield f"tokens.covariates: family {model.family} has no tokens of obs columns; leave them out, or use encoder"
    without_zeros = [part.name for part in parts.values() if not part.reads_zeros]
    if tokens.zero_frac and without_zeros:
        yield f"tokens.zero_frac: objective {without_zeros[0]} has no use for genes without counts; set it to 0"
    if all(getattr(part, "adversarial_scale", None) for part in parts.values()):
        yield f"{next(iter(parts))}.adversarial_scale: expected a sum with a part that does not set it; add one"
    labels = sorted({*objective.supervised_by} & {*tokens.covariates})
    if labels:
        yield f"tokens.covariates: {labels[0]} is also the label that the model is trained to predict; leave it out"
    try:
        objective.check_tokens(tokens)
        model.check_with(objective, tokens)
    except ValueError as error:
        yield str(error)


def _problems_of_layout(model: FamilyConfig, parallel: Parallel) -> Iterator[str]:
    tp = parallel.tp
    pp = parallel.pp
    schedule = parallel.schedule
    stages = parallel.n_stages
    if parallel.sequence_parallel and tp == 1:
        yield "parallel.sequence_parallel requires parallel.tp > 1; set tp, or leave it out"
    if tp > 1 and not model.tp_sizes():
        yield f"parallel.tp {tp}: family {model.family} does not support tensor parallelism; set tp to 1"
    if parallel.sequence_parallel and not model.sequence_parallel:
        yield f"parallel.sequence_parallel: blocks of family {model.family} pass on cells, not tokens; set it to no"
    for name, size in model.tp_sizes().items():
        if size % tp:
            possible = divisors(math.gcd(*model.tp_sizes().values()))
            yield f"parallel.tp {tp} does not divide {name} {size}; use {nearest(tp, possible)}"
    if pp == 1:
        for name in ("schedule", "microbatches"):
            if getattr(parallel, name) != Parallel.model_fields[name].default:
                yield f"parallel.{name} requires parallel.pp > 1; set pp, or leave {name} out"
    if pp > 1 and not model.pp_sizes():
        yield f"parallel.pp {pp}: family {model.family} does not support pipelines; set pp to 1"
    for name, size in model.pp_sizes().items():
        if pp > 1 and size < stages:
            max_pp = size * pp // stages
            fewer = f"pp {max_pp}" if max_pp > 1 else "1F1B, or pp 1" if stages > pp else "pp 1"
            yield (
                f"parallel.pp {pp} with schedule {schedule} has {stages} pipeline stages for {name} {size}, and each "
                f"needs a block; use {fewer}"
            )
    if parallel.compile and not model.compiles:
        yield f"parallel.compile: family {model.family} is not compiled; set compile to no"
    if parallel.compile and parallel.activation_checkpointing == "selective":
        yield "parallel.activation_checkpointing selective has no effect with compile; set it to null or full"
    if parallel.compile and schedule in ("InterleavedZeroBubble", "ZBV", "DualPipeV"):
        yield f"parallel.schedule {schedule} splits the backward pass, which compile fuses; set compile to no"


def _problems_of_training(options: TrainOptions) -> Iterator[str]:
    tokens = options.tokens
    stream = options.stream
    parallel = options.parallel
    train = options.train
    # not a problem of the section: stored options of runs that were trained so are still read
    if train.best_mode == "min" and train.best_metric.startswith(LARGER_IS_BETTER):
        yield f"train.best_metric {train.best_metric}: larger is better; set train.best_mode to max"
    # the loss of an adversarial part is to be large
    adversarial = {
        f"val_loss_{option.rpartition('.')[2]}"
        for option, part in options.objective.named_parts().items()
        if getattr(part, "adversarial_scale", None) is not None
    }
    is_loss = train.best_metric.startswith("val_loss") and train.best_metric not in adversarial
    if train.best_mode == "max" and is_loss:
        yield f"train.best_metric {train.best_metric}: smaller is better; set train.best_mode to min"
    if parallel.tf32 and parallel.half_precision:
        yield f"parallel.tf32 has no effect with precision {parallel.precision}; set tf32 to no, or 32-true"
    if parallel.cpu_offload == "full" and parallel.strategy == "ddp":
        yield "parallel.cpu_offload full requires strategy fsdp, got ddp; set fsdp, or cpu_offload to optimizer"
    if parallel.reduces_each_micro_batch and not parallel.shards_gradients:
        yield (
            "parallel.gradient_reduction micro_batch requires fsdp with sharded gradients and no pipeline, got "
            f"{parallel.strategy}, {parallel.sharding_strategy} and pp {parallel.pp}; set it to step"
        )
    if parallel.cpu_offload is not None and train.optimizer.offloaded is None:
        yield f"parallel.cpu_offload requires train.optimizer adamw, got {train.optimizer.name}; set one of them"
    if train.replay_every_steps is not None and parallel.pp * parallel.tp > 1:
        yield (
            "train.replay_every_steps requires pp 1 and tp 1, since ranks that exchange activations share errors, got "
            f"pp {parallel.pp} and tp {parallel.tp}; set it to null"
        )
    if stream.labelled_frac is not None and stream.weight_by is None:
        yield "stream.labelled_frac requires stream.weight_by, an obs column of labels; set both, or neither"
    if tokens.max_tokens > train.token_budget:
        yield f"tokens.max_tokens {tokens.max_tokens} exceeds train.token_budget {train.token_budget}; lower max_tokens"
    batch = train.global_batch
    lanes = stream.lanes
    if batch % lanes:
        fitting = max(1, round(batch / lanes)) * lanes
        yield f"train.global_batch: expected a multiple of stream.lanes {lanes}, got {batch}; set {fitting}"


def check_nodes(
    options: TrainOptions, node_counts: range, nproc_per_node: int, train_cells: int | None = None
) -> None:
    """Refuse what `check_together` does, and processes that do not divide layout, lanes or cells."""
    check_together(options)
    layouts = [
        divide_processes(options.parallel, nodes * nproc_per_node, nproc_per_node)
        for nodes in node_counts
    ]
    groups = [sizes.dp for sizes in layouts]
    lanes = options.stream.lanes
    batch = options.train.global_batch
    if len(groups) > 1 and any(lanes % dp for dp in groups):
        raise ConfigError(
            f"stream.lanes {lanes} is not a multiple of {' and of '.join(map(str, groups))}, the numbers of "
            f"data-parallel processes on {node_counts[0]} to {node_counts[-1]} nodes; set "
            f"{_lanes_for(lanes, batch, math.lcm(*groups))}"
        )
    for sizes in layouts:
        if train_cells is not None and train_cells < sizes.dp:
            raise ConfigError(
                f"{sizes.dp_text} for {train_cells} training cells; lower nodes or nproc_per_node"
            )
        if lanes % sizes.dp:
            processes = nearest(sizes.dp, divisors(lanes)) * sizes.tp * sizes.pp
            raise ConfigError(
                f"stream.lanes {lanes} is not a multiple of {sizes.dp_text}; set nodes x nproc_per_node to "
                f"{processes}, or {_lanes_for(lanes, batch, sizes.dp)}"
            )


def _lanes_for(lanes: int, global_batch: int, dp: int) -> str:
    """Lanes nearest to `lanes` that `dp` divides, with another global batch if necessary."""
    dividing = [n for n in range(dp, global_batch + 1, dp) if global_batch % n == 0]
    if dividing:
        return f"stream.lanes {nearest(lanes, dividing)}"
    return f"stream.lanes {dp} with train.global_batch {max(1, round(global_batch / dp)) * dp}"


def check_rows(tokens: Tokens, rows: Any, source: str, counted: bool = False) -> None:
    """Refuse a tokenizer of other rows.

    Ranks also exclude a tokenizer or objective (`counted`) that needs counts.

    `rows` is a file or shards: `ordered` if sequences or genes in rank order, `ranked` if the
    latter, without counts.
    """
    if rows.ranked:
        have = "ranks without counts"
        choose = "rank"
        suits = tokens.value_kind in ("none", "place") and not tokens.sequences
    elif rows.ordered:
        have = "sequences"
        choose = "sequence"
        suits = tokens.sequences
    else:
        have = "cells"
        choose = "one of cells, such as rank"
        suits = not tokens.sequences
    if not suits:
        raise ConfigError(
            f"{source}: it has {have}, tokens.tokenizer is {tokens.tokenizer}; set {choose}"
        )
    if rows.ranked and counted:
        raise ConfigError(
            f"{source}: it has {have}, which the objective needs; set objective.name to masked_gene or next_gene"
        )
