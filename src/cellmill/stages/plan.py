"""plan: what a run will take, by arithmetic alone, before a device is asked for.

Imports no torch and reads no cell, only where rows begin. A run that cannot work is refused here in one line, which
names what is needed, what there is and the first thing to change.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cellmill.config.machine import Machine
from cellmill.config.options import PlanOptions, TrainOptions
from cellmill.data.manifest import Manifest
from cellmill.errors import ConfigError
from cellmill.files import write_json
from cellmill.parallel.devices import device_named
from cellmill.stages import plan_suggest
from cellmill.stages.checks import check_run
from cellmill.stages.plan_cost import cost
from cellmill.stages.plan_fit import Place, check_memory, largest_micro_batch, memory_limit
from cellmill.stages.plan_table import describe, table
from cellmill.stages.plan_work import Cells, detected_genes


def run(
    *,
    options: PlanOptions,
    manifest: Path | None,
    out: Path | None,
    machine: Machine,
    device: str,
    suggest: bool = False,
    cells: int = 1_000_000,
    genes: int = 20_000,
) -> None:
    """Writes plan.json to `out` and prints it as a table. Raises ConfigError when the run cannot work.

    With `suggest` it prints the best layouts instead, without a `manifest` for an assumed corpus.
    """
    if suggest:
        known_cells = _assumed(options, cells, genes) if manifest is None else _cells(options, Manifest.read(manifest))
        print(plan_suggest.table(plan_suggest.suggest(options, known_cells, machine, device), options), flush=True)
        return
    if manifest is None or out is None:
        raise ConfigError("--manifest and --out are wanted; only --suggest does without")
    _plan(options, manifest, out, machine, device)


def _assumed(options: PlanOptions, cells: int, genes: int) -> Cells:
    longest = min(options.tokens.max_tokens, genes)
    print(f"no --manifest: assumed are {cells:,} cells of {longest:,} tokens each, {genes:,} genes\n")
    return Cells(np.full(cells, longest), genes)


def _cells(options: PlanOptions, manifest: Manifest) -> Cells:
    lengths = np.minimum(detected_genes(manifest), options.tokens.max_tokens)
    return Cells(lengths, int(manifest.vocabulary["n_genes"]))


def _plan(options: PlanOptions, manifest: Path, out: Path, machine: Machine, device: str) -> None:
    known = device_named(device)
    opened, nproc_per_node = Manifest.read(manifest), machine.nproc_per_node
    for nodes in machine.node_counts:
        check_run(_train_options(options), nodes, nproc_per_node, opened.splits["train"].n_obs)
    # of a range of nodes the fewest: a process then holds the most
    place = Place(machine.node_counts[0], nproc_per_node, device, memory_limit(options, known, nproc_per_node))
    detected = detected_genes(opened)
    lengths = np.minimum(detected, options.tokens.max_tokens)
    found = Cells(lengths, int(opened.vocabulary["n_genes"]))
    memory = check_memory(options, found, place)
    plan = describe(options, cost(options, found, place, known, memory), place)
    plan["largest_micro_batch"] = largest_micro_batch(options, found, place)
    plan["genes_per_cell"] = float(detected.mean())
    plan["cut_cells_frac"] = float((detected > lengths).mean())
    plan["fingerprint"] = opened.fingerprint
    write_json(out, plan)
    print(table(plan), flush=True)


def _train_options(options: PlanOptions) -> TrainOptions:
    return TrainOptions(**{name: getattr(options, name) for name in TrainOptions.model_fields})
