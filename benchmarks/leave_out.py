"""Labels of batches that no classifier saw a cell of: task `leave_out`, by the workflow.

    python benchmarks/leave_out.py FOLDER [--seeds 3] [--cores 2] [--out F]

FOLDER has cellbench.h5ad and merfish_mouse.h5ad: five batches of two protocols, and one mouse whose
brain regions are taken as batches. Held-out cells of each batch (or of one of ten groups of
regions) are labelled by classifiers that are fitted on those of the others. The table has the
better one of both logistic regressions, and kNN, means over seeds of the training; below it stand
the verdicts of each seed.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from quality import MODELS
from transfer import table
from workflow_runs import metrics_file, result, seeded_runs, snakemake, verdicts, write_config

DATA: dict[str, dict[str, Any]] = {
    "cellbench": {"batch": "batch", "preprocess": {}},
    "merfish_mouse": {
        "batch": "major_brain_region",
        "preprocess": {"organism": "mouse", "min_genes": 5},
    },
}
ROWS = ("all genes", "PCA50", "PCA50 of the training cells", "untrained", "embedding")
FEATURES = {name: name for name in ROWS}
COLUMNS = ("accuracy, new batch", "macro F1, new batch")


def write_runs(folder: Path, data: Path, seeds: int) -> dict[str, list[str]]:
    """Write config/; returns the runs of each dataset."""
    rows = ["dataset\tpath\tcounts\tlabel\tbatch"]
    made = {}
    for name, of in DATA.items():
        rows.append(f"{name}\t{(data / name).resolve()}.h5ad\tX\tcell_type\t{of['batch']}")
        options = {"corpus": name} | MODELS["profile"]
        made[name] = seeded_runs(name, options, seeds, steps=400, checkpoint_every_steps=400)
    corpora = {
        name: {"table": "config/datasets.tsv", "datasets": [name], "preprocess": of["preprocess"]}
        for name, of in DATA.items()
    }
    runs = {run: options for of in made.values() for run, options in of.items()}
    write_config(folder, rows, corpora=corpora, evaluate={"tasks": {"leave_out": {}}}, runs=runs)
    return {name: [*of] for name, of in made.items()}


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = given.out or Path(tempfile.mkdtemp(prefix="leave-out-"))
    made = write_runs(folder, given.data, given.seeds)
    snakemake(folder, [metrics_file(run) for runs in made.values() for run in runs], given.cores)
    results = {
        name: [result(folder, run, name, "leave_out") for run in runs]
        for name, runs in made.items()
    }
    print("\n".join(table(results, FEATURES, COLUMNS)))
    for name, runs in results.items():
        print(f"\n{name}: {runs[0].figures}")
        print("\n".join(verdicts(runs)))


if __name__ == "__main__":
    main()
