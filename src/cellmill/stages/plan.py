"""plan: what a run will take, by arithmetic alone, before a device is asked for.

Imports no torch and reads no cell, only where rows begin. A run that cannot work is refused here in one line, which
names what is needed, what there is and the first thing to change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cellmill.config.machine import Machine
from cellmill.config.options import PlanOptions
from cellmill.data.manifest import Manifest
from cellmill.errors import ConfigError
from cellmill.files import write_json
from cellmill.planner import layout_search
from cellmill.planner.checks import check_run
from cellmill.planner.cost import cost
from cellmill.planner.devices import check_precision, device_named
from cellmill.planner.fit import check_memory, largest_micro_batch, place_of
from cellmill.planner.table import describe, table
from cellmill.planner.work import Cells, detected_genes

SAMPLED_CELLS = 1 << 22  # more of one length would say no more


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
    """Prints the plan as a table and writes it to `out`, plan.json. Raises ConfigError when the run cannot work.

    With `suggest` it prints the best layouts instead. Without a `manifest` a corpus is assumed.
    """
    device = device.lower()
    if manifest is None:
        known_cells, detected, fingerprint = _assumed(options, cells, genes), None, None
    else:
        opened = Manifest.read(manifest)
        detected, fingerprint = detected_genes(opened), opened.fingerprint
        lengths = np.minimum(detected, options.tokens.max_tokens)
        known_cells = Cells(lengths, opened.n_genes, opened.splits["val"].n_obs)
    if suggest:
        found = layout_search.suggest(options, known_cells, machine, device)
        print(layout_search.table(found, options, machine, device), flush=True)
        if not found.fitting:
            raise ConfigError("no layout fits; why is above")
        return
    plan = _plan(options, known_cells, machine, device)
    lengths = known_cells.lengths
    plan["genes_per_cell"] = float((lengths if detected is None else detected).mean())
    plan["cut_cells_frac"] = 0.0 if detected is None else float((detected > lengths).mean())
    plan["fingerprint"] = fingerprint
    if out is not None:
        write_json(out, plan)
    print(table(plan), flush=True)


def _assumed(options: PlanOptions, cells: int, genes: int) -> Cells:
    longest, val = min(options.tokens.max_tokens, genes), cells // 8  # as shard.val_frac and test_frac have it
    print(
        f"no --manifest: assumed are {cells:,} cells of {longest:,} tokens each, {genes:,} genes, and {val:,} cells "
        "for validation\n"
    )
    return Cells(np.full(min(cells, SAMPLED_CELLS), longest), genes, val, number=cells)


def _plan(options: PlanOptions, cells: Cells, machine: Machine, device: str) -> dict[str, Any]:
    known = device_named(device)
    check_precision(options.parallel, device, known)
    for nodes in machine.node_counts:
        check_run(options, nodes, machine.nproc_per_node, cells.n)
    place = place_of(options, machine, device)
    memory = check_memory(options, cells, place)
    plan = describe(options, cost(options, cells, place, known, memory), place)
    plan["largest_micro_batch"] = largest_micro_batch(options, cells, place)
    return plan
