"""Labels of batches that no classifier saw a cell of: task `leave_out`, by the workflow.

    python benchmarks/leave_out.py FOLDER [--seeds 3] [--cores 2] [--out F]

FOLDER has cellbench.h5ad and merfish_mouse.h5ad: five batches of two protocols, and one mouse whose brain regions are
taken as batches. Held-out cells of each batch (or of one of ten groups of regions) are labelled by classifiers that are
fitted on those of the others. The table has the better one of both logistic regressions, and kNN, means over seeds of
the training; below it stand the verdicts of each seed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import yaml
from quality import MODELS
from transfer import snakemake, table, verdicts

DATA: dict[str, dict[str, Any]] = {
    "cellbench": {"batch": "batch", "preprocess": {}, "tokens": {"max_tokens": 256}},
    "merfish_mouse": {
        "batch": "major_brain_region",
        "preprocess": {"organism": "mouse", "min_genes": 5},
        "tokens": {"max_tokens": 512},
    },
}
ROWS = ("all genes", "PCA50", "PCA50 of the training cells", "untrained", "embedding")
FEATURES = {name: name for name in ROWS}
COLUMNS = ("accuracy, new batch", "macro F1, new batch")


def write_config(folder: Path, data: Path, seeds: int) -> dict[str, list[Path]]:
    """Write config/; returns metrics.json of the runs of each dataset."""
    (folder / "config").mkdir(parents=True, exist_ok=True)
    rows, runs = ["dataset\tpath\tcounts\tlabel\tbatch\n"], {}
    model = MODELS["profile"]
    for name, of in DATA.items():
        rows.append(f"{name}\t{(data / name).resolve()}.h5ad\tX\tcell_type\t{of['batch']}\n")
        for seed in range(seeds):
            train = model["train"] | {"seed": seed, "steps": 400, "checkpoint_every_steps": 400}
            runs[f"{name}-{seed}"] = {"corpus": name, "tokens": of["tokens"]} | model | {"train": train}
    tree = {
        "corpora": {
            name: {"table": "config/datasets.tsv", "datasets": [name], "preprocess": of["preprocess"]}
            for name, of in DATA.items()
        },
        "shard": {"val_frac": 0.1, "test_frac": 0.3},
        "tokens": {"tokenizer": "continuous"},
        "parallel": {"precision": "32-true"},  # a CPU emulates bfloat16
        "train": {"global_batch": 32, "token_budget": 32768, "warmup_steps": 20, "lr": 5e-3}
        | {"val_every_steps": 100, "val_cells": 100},
        "evaluate": {"tasks": {"leave_out": {}}},
        "runs": runs,
    }
    (folder / "config" / "datasets.tsv").write_text("".join(rows))
    (folder / "config" / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return {
        name: [folder / f"results/runs/{name}-{seed}/evaluate/metrics.json" for seed in range(seeds)] for name in DATA
    }


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = given.out or Path(tempfile.mkdtemp(prefix="leave-out-"))
    made = write_config(folder, given.data, given.seeds)
    snakemake(folder, [str(path.relative_to(folder)) for paths in made.values() for path in paths], given.cores)
    results = {
        name: [json.loads(path.read_text())["datasets"][name]["tasks"]["leave_out"] for path in paths]
        for name, paths in made.items()
    }
    print("\n".join(table(results, FEATURES, COLUMNS)))
    for name, runs in results.items():
        print(f"\n{name}: {runs[0]['figures']}")
        print("\n".join(verdicts(runs)))


if __name__ == "__main__":
    main()
