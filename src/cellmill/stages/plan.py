"""plan: estimate memory, traffic and time of a run before any device is requested.

Reads no cell, only the row offsets of the shards. A run that cannot work is refused in one line
that names the memory it needs, the memory of the device, and the first change that helps.
"""

from pathlib import Path

import numpy as np

from cellmill.config.checks import check_nodes
from cellmill.config.machine import Machine
from cellmill.config.options import PlanOptions
from cellmill.data.stream.cell_tokenizer import count_kept_and_zeros
from cellmill.data.stream.repeats import read_repeats
from cellmill.errors import ConfigError
from cellmill.files import span, write_json
from cellmill.planner.cost import estimate_cost
from cellmill.planner.devices import check_precision, find_device
from cellmill.planner.hardware import find_hardware
from cellmill.planner.measure.cpu_speed import measure_cpu
from cellmill.planner.memory import format_bytes
from cellmill.planner.plan_file import RunPlan, format_line, format_plan
from cellmill.planner.remedies import check_memory, find_largest_micro_batch
from cellmill.planner.scaling import format_scaling
from cellmill.planner.suggest import format_suggestions, suggest_layouts
from cellmill.planner.work import CorpusSize, count_detected_genes
from cellmill.runs.identity import foresee_refusal
from cellmill.stages.training_inputs import open_corpus

SAMPLED_CELLS = 1 << 22  # all assumed cells have the same length
MB = 1 << 20  # SLURM's
ASSUMED_CELLS = 1_000_000
ASSUMED_GENES = 20_000
ASSUMED_LEVELS = 16  # levels of an obs column that the run reads


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
) -> None:
    """Print the plan, or the best layouts, and write `out`; without `manifest` for assumed cells.

    `train` is the run's folder of that stage, by default next to `out`: a training that it holds and
    that cannot continue with these options gets a warning.

    Raise ConfigError if the run cannot work.
    """
    device = device.lower()
    fingerprint: str | None = None
    if manifest is None:
        cells = cells or ASSUMED_CELLS
        genes = genes or ASSUMED_GENES
        # the defaults of val_frac and test_frac
        longest = min(options.tokens.max_tokens, genes)
        val = cells // 8
        print(
            f"no --manifest given; assuming {cells:,} cells of {longest:,} tokens each, {genes:,} genes, and {val:,} "
            "validation cells\n"
        )
        levels = dict.fromkeys(options.obs_columns(), tuple(map(str, range(ASSUMED_LEVELS))))
        detected = kept = np.full(min(cells, SAMPLED_CELLS), longest)
        corpus = CorpusSize(kept, genes, val, n_training=cells, levels=levels)
    else:
        chosen, shards, n_cells, fingerprint = open_corpus(options, manifest)
        options = options.model_copy(update={"objective": chosen.objective})
        detected = count_detected_genes(shards)[:n_cells]
        if options.stream.weight_by is not None:  # cells are not read equally often
            times_read = read_repeats(shards, "train", options.stream, n_cells).times_read(
                options.train.seed, 0, 0
            )
            detected = detected.repeat(times_read)
        kept, zeros = count_kept_and_zeros(options.tokens, detected, shards.n_genes)
        levels = shards.levels(options.obs_columns())
        corpus = CorpusSize(
            kept + zeros, shards.n_genes, n_validation=shards.splits["val"].n_obs, levels=levels
        )
    if suggest:
        suggestions = suggest_layouts(options, corpus, machine, device)
        print(format_suggestions(suggestions, options, machine, device), flush=True)
        if not suggestions.fitting:
            raise ConfigError("no layout fits, for the reasons above")
        return
    named_device = find_device(device)
    check_precision(options.parallel, device, named_device)
    check_nodes(options, machine.node_counts, machine.nproc_per_node, corpus.n_cells)
    hardware = find_hardware(options, machine, device)
    memory = check_memory(options, corpus, hardware)
    cost = estimate_cost(options, corpus, hardware, named_device, memory)
    cut_cells_frac = float((detected > kept).mean())
    warnings = options.objective.warnings()
    # the family's blocks compute rows of cells
    if cut_cells_frac and not options.model.sequence_parallel:
        warnings.append(
            f"set tokens.max_tokens to {detected.max()}, the most genes of a cell: family {options.model.family} is "
            "more accurate with all of them, at little more cost (docs/quality.md)"
        )
    plan = RunPlan(
        cost,
        corpus,
        hardware,
        largest_micro_batch=find_largest_micro_batch(options, corpus, hardware),
        genes_per_cell=float(detected.mean()),
        cut_cells_frac=cut_cells_frac,
        fingerprint=fingerprint,
        warnings=warnings,
    )
    # host memory that the processes of a node pin
    pinned = machine.nproc_per_node * sum(plan.host)
    if machine.mem_mb and pinned > machine.mem_mb * MB:
        raise ConfigError(
            f"the {machine.nproc_per_node} processes of a node pin {format_bytes(pinned)} of host memory for "
            f"checkpoints and cpu_offload, but mem_mb is {machine.mem_mb}; raise it for train in the profile (0 is all "
            "of a node), or use more nodes"
        )
    if out is not None:
        write_json(out, plan.record())
    lines = [format_plan(plan)]
    if device == "cpu":
        measured = measure_cpu(named_device, machine.nproc_per_node)
        estimated = estimate_cost(options, corpus, hardware, measured, memory).time
        assert estimated is not None, "the rate was measured"
        time = span(max(1.0, 3600 * estimated.hours))
        speed = f"{(measured.fp32_flops or 0) / 1e9:,.0f} GFLOP/s per process"
        text = (
            f"about {time} of training, without start-up, on CPU cores like these, measured now at {speed}; steps of a "
            "few ms take longer"
        )
        lines.append(format_line("time", text))
    if train is None and out is not None:
        train = out.parent / "train"
    if train is not None:
        steps = None if manifest is None else cost.work.steps
        refusal = foresee_refusal(train, options, steps)
        if refusal is not None:
            lines.append(format_line("warning", f"stage train will refuse this run: {refusal}"))
    lines += format_scaling(options, corpus, machine, device, named_device)
    print("\n".join(lines), flush=True)
