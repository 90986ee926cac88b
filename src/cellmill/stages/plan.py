"""plan: estimate memory, traffic and time of a run before any device is requested.

No counts are read, only the row offsets of the shards and levels of obs columns. A run that cannot
work is refused with the reason. If it does not fit, the error gives the memory that it needs, the
memory of the device, and the first change that helps.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from cellmill.config.checks import check_nodes
from cellmill.config.corpus import Shard
from cellmill.config.machine import Machine
from cellmill.config.options import PlanOptions
from cellmill.data.stream.batch_tokenizer import (
    count_detected_and_undetected_tokens,
    find_max_tokens_of_whole_cells,
)
from cellmill.data.stream.level_sampler import read_level_sampler
from cellmill.errors import ConfigError
from cellmill.files import span, write_json
from cellmill.planner.cost import estimate_cost
from cellmill.planner.devices import check_precision, find_device
from cellmill.planner.hardware import find_hardware
from cellmill.planner.measure.cpu_speed import measure_cpu
from cellmill.planner.memory import estimate_host_bytes_per_node, find_overflow
from cellmill.planner.output.format import format_bytes
from cellmill.planner.output.plan_file import RunPlan, format_line, format_plan
from cellmill.planner.output.scaling import format_scaling
from cellmill.planner.planned_model import PlannedModel
from cellmill.planner.remedies import check_memory, find_max_fitting_token_budget
from cellmill.planner.step_counts import CorpusSize, count_detected_genes
from cellmill.planner.suggest import format_suggestions, suggest_layouts
from cellmill.runs.identity import foresee_refusal
from cellmill.stages.training_inputs import open_corpus

ASSUMED_CELLS = 1_000_000
# at most this many assumed cells are stored, or one step if that has more: they are all alike
MAX_STORED_CELLS = 1 << 22
ASSUMED_GENES = 20_000
LARGE_PADDING = 1.1  # padded tokens per token that get a warning
ASSUMED_LEVELS = 16  # levels of an obs column that the run reads


class PlannedCorpus(NamedTuple):
    """The corpus of a plan, read from shards or assumed."""

    options: PlanOptions  # with the obs columns that the objective takes from the corpus
    size: CorpusSize
    # of each cell that an epoch reads, in the order of `size.gene_tokens`
    detected_genes: np.ndarray  # number of detected genes, `(cells,)` int64
    kept_genes: np.ndarray  # number of those that become tokens, `(cells,)` int64
    fingerprint: str | None = None  # None if the corpus is assumed

    @property
    def cut_cells_frac(self) -> float:
        """Fraction of the cells that an epoch reads whose detected genes do not all become tokens."""
        return float((self.detected_genes > self.kept_genes).mean())


def plan(
    *,
    options: PlanOptions,
    manifest: Path | None,
    out: Path | None,
    machine: Machine,
    device: str,
    suggest: bool = False,
    cells: int | None = None,
    genes: int | None = None,
    train: Path | None = None,
    shard: Shard | None = None,
) -> None:
    """Print the plan of a run and write it to `out`; with `suggest`, only print the best layouts.

    Without `manifest` the corpus is assumed, with `cells` training cells, `genes` genes, and the
    validation cells that `shard` splits off. `train` is the folder of the run's training, by default
    next to `out`; the plan warns if that training cannot continue with these options.

    Raise ConfigError if the run cannot work, or if no layout fits.
    """
    device_name = device.lower()
    if train is None and out is not None:
        train = out.parent / "train"
    if manifest is None:
        shard = shard or Shard.model_validate({})
        corpus = _assume_corpus(options, shard, cells or ASSUMED_CELLS, genes or ASSUMED_GENES)
    else:
        corpus = _read_corpus(options, manifest, train)
    options = corpus.options
    if suggest:
        suggestions = suggest_layouts(options, corpus.size, machine, device_name)
        print(format_suggestions(suggestions, options, machine, device_name))
        if not suggestions.fitting:
            raise ConfigError("no layout fits, for the reasons above")
        return
    run_plan = _plan_run(corpus, machine, device_name)
    if out is not None:
        write_json(out, run_plan.record())
    if device_name == "cpu":
        lines = _format_cpu_plan(run_plan)
    else:
        lines = [format_plan(run_plan)]
    if train is not None:
        steps = None if manifest is None else run_plan.cost.counts.steps
        refusal = foresee_refusal(train, options, steps)
        if refusal is not None:
            # not stored in plan.json, since `restart` may move the old training away
            lines.append(format_line("warning", f"stage train will refuse this run: {refusal}"))
    lines += format_scaling(options, corpus.size, machine, device_name, find_device(device_name))
    print("\n".join(lines))


def _assume_corpus(options: PlanOptions, shard: Shard, n_cells: int, n_genes: int) -> PlannedCorpus:
    """Assume a corpus whose cells all have as many tokens as the run allows, and print its sizes."""
    n_tokens = min(options.tokens.max_tokens, n_genes)
    train_frac = 1 - shard.val_frac - shard.test_frac
    # the share of held-out values is unknown: take `val_frac` of the training cells
    if shard.train_values:
        train_frac = 1
    n_validation = round(n_cells * shard.val_frac / train_frac)
    print(
        f"no --manifest given; assuming {n_cells:,} training cells (--cells) of {n_tokens:,} tokens each, "
        f"{n_genes:,} genes (--genes), and {n_validation:,} validation cells\n"
    )
    levels = dict.fromkeys(options.obs_columns(), tuple(map(str, range(ASSUMED_LEVELS))))
    # a whole step of cells is needed to count its micro-batches
    n_stored = min(n_cells, max(MAX_STORED_CELLS, options.train.global_batch))
    tokens = np.full(n_stored, n_tokens)
    size = CorpusSize(
        tokens,
        n_genes,
        n_validation,
        n_training=n_cells,
        levels=levels,
        n_covariates=len(options.tokens.covariates),
    )
    # a vocabulary of fewer genes than `max_tokens` limits the tokens
    limited = options.tokens.model_copy(update={"max_tokens": n_tokens})
    genes, _ = count_detected_and_undetected_tokens(limited, tokens, n_genes)
    return PlannedCorpus(options, size, detected_genes=genes, kept_genes=genes)


def _read_corpus(options: PlanOptions, manifest: Path, train: Path | None) -> PlannedCorpus:
    """Count the genes and tokens of the training cells from the row offsets of the shards.

    `train` is the folder of the run's training.
    Raise ConfigError if the run cannot be trained on them, DataError for a damaged manifest.
    """
    # `chosen` differs in the columns that the objective takes from the corpus
    chosen, shards, n_cells, fingerprint = open_corpus(options, manifest, train)
    options = options.model_copy(update={"objective": chosen.objective})
    detected_genes = count_detected_genes(shards)[:n_cells]
    if options.stream.weight_by is not None:  # cells are not read equally often
        sampler = read_level_sampler(shards, "train", options.stream, n_cells)
        times_read = sampler.draw_times_read(options.train.seed, epoch=0, first_global_step=0)
        # training reads a cell again much later, so a sample of steps must not have it twice in a row
        generator = np.random.Generator(np.random.Philox(0))
        detected_genes = generator.permutation(detected_genes.repeat(times_read))
    kept_genes, undetected_genes = count_detected_and_undetected_tokens(
        options.tokens, detected_genes, shards.n_genes
    )
    size = CorpusSize(
        kept_genes + undetected_genes,
        shards.n_genes,
        n_validation=shards.splits["val"].n_obs,
        levels=shards.levels(options.obs_columns()),
        n_covariates=len(options.tokens.covariates),
    )
    return PlannedCorpus(options, size, detected_genes, kept_genes, fingerprint)


def _plan_run(corpus: PlannedCorpus, machine: Machine, device_name: str) -> RunPlan:
    """Check the run against the machine and estimate it. Raise ConfigError if it cannot work."""
    options = corpus.options
    device = find_device(device_name)
    check_precision(options.parallel, device_name, device)
    check_nodes(options, machine.node_counts, machine.nproc_per_node, corpus.size.n_cells)
    hardware = find_hardware(options, machine, device_name)
    check_memory(options, corpus.size, hardware)
    cost = estimate_cost(options, corpus.size, hardware, device)
    # the device's memory was checked above
    if find_overflow(options, corpus.size, hardware) == "host":
        raise _explain_host_memory(cost.model, machine)
    return RunPlan(
        cost,
        corpus.size,
        hardware,
        max_fitting_token_budget=find_max_fitting_token_budget(options, corpus.size, hardware),
        genes_per_cell=float(corpus.detected_genes.mean()),
        cut_cells_frac=corpus.cut_cells_frac,
        fingerprint=corpus.fingerprint,
        warnings=_list_warnings(corpus, cost.counts.steps),
    )


def _list_warnings(corpus: PlannedCorpus, steps: int) -> list[str]:
    """List the warnings for a run of `steps` steps that works, but not as well as it could."""
    options = corpus.options
    warnings = options.objective.warnings()
    warmup_steps = options.train.warmup_steps
    if warmup_steps >= steps:
        warnings.append(f"train.warmup_steps {warmup_steps} leaves no step after the warm-up")
    padded = corpus.size.gene_tokens.max() / corpus.size.gene_tokens.mean()
    if options.model.pads_cells and padded >= LARGE_PADDING:
        warnings.append(
            f"family {options.model.family} pads cells to the longest of their micro-batch, which is not planned: "
            f"activations, logits, FLOPs and time may be {padded:.1f} times larger; if memory runs out, lower "
            "train.token_budget"
        )
    # a family without sequence parallelism has no tokens to divide: its blocks compute on a row per cell
    blocks_compute_on_cells = not options.model.sequence_parallel
    if corpus.cut_cells_frac and blocks_compute_on_cells:  # more tokens cost little
        max_genes = int(corpus.detected_genes.max())
        max_tokens = find_max_tokens_of_whole_cells(options.tokens, max_genes)
        budget_text = ""
        if max_tokens > options.train.token_budget:
            budget_text = f" and train.token_budget to {max_tokens} or more"
        warnings.append(
            f"set tokens.max_tokens to {max_tokens}{budget_text}, so that a cell keeps all its genes, at most "
            f"{max_genes}: family {options.model.family} is more accurate with all of them, at little more cost "
            "(docs/quality.md)"
        )
    return warnings


def _explain_host_memory(model: PlannedModel, machine: Machine) -> ConfigError:
    """Make the error for a node whose processes need more host memory than its job requests."""
    needed = format_bytes(estimate_host_bytes_per_node(model))
    requested = f"{machine.memory_key} is {machine.memory_mb}"
    if machine.memory_key != "mem_mb":
        requested += f", {format_bytes(machine.node_memory_bytes)} per node"
    return ConfigError(
        f"a node's processes need {needed} of host memory for checkpoints and cpu_offload, but {requested}; "
        "raise it (0 is all of a node), or shard over more nodes (FULL_SHARD)"
    )


def _format_cpu_plan(run_plan: RunPlan) -> list[str]:
    """Format the plan, and its time at the speed that is measured on this machine's CPU cores."""
    cost = run_plan.cost
    hardware = run_plan.hardware
    precision = cost.options.parallel.precision
    cpu = measure_cpu(find_device("cpu"), hardware.nproc_per_node, precision)
    time = estimate_cost(cost.options, run_plan.corpus, hardware, cpu).time
    assert time is not None, "the rate was measured"
    duration = span(max(1.0, 3600 * time.hours))
    text = (
        f"about {duration} in all, without start-up, at {cost.options.plan.mfu_frac:.0%} (plan.mfu_frac) of "
        f"{(cpu.fp32_flops_per_s or 0) / 1e9:,.0f} GFLOP/s per process in {precision}, measured now on all CPU cores "
        "here; steps of a few ms take longer"
    )
    return [format_plan(run_plan, time), format_line("time", text)]
