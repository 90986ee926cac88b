"""Labels carried from one dataset to another: task `transfer`, by the workflow.

    python benchmarks/transfer.py FOLDER [--seeds 3] [--cores 2] [--out F]

FOLDER has cellbench.h5ad and merfish_mouse.h5ad. Each is cut into two datasets by an obs column
(`PAIRS`): the model is trained on the first one alone, all classifiers are fitted on its labels,
and every cell of the second one is tested. The table has the better one of both logistic
regressions, and kNN, means over seeds of the training; below it stand the verdicts of each seed,
the embedding's best row against the best baseline with the interval over cells.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quality import MODELS
from workflow_runs import (
    cpu_seconds,
    metrics_file,
    result,
    seeded_runs,
    snakemake,
    verdicts,
    write_config,
)

from cellmill.runs.results import TaskResult

PAIRS: dict[str, dict[str, Any]] = {
    "CellBench, CEL-seq2 to Drop-seq": {
        "file": "cellbench",
        "label": "cell_type",
        "parts": {"celseq2": "batch != 'sc_dropseq'", "dropseq": "batch == 'sc_dropseq'"},
        "sections": {"preprocess": {}},
    },
    "MERFISH, other regions to striatum, midbrain and hippocampus": {
        "file": "merfish_mouse",
        "label": "cell_type_ontology_term_id",
        "parts": {
            "others": "major_brain_region not in ['Striatum', 'Midbrain', 'Hippocampus']",
            "three": "major_brain_region in ['Striatum', 'Midbrain', 'Hippocampus']",
        },
        "sections": {"preprocess": {"organism": "mouse", "min_genes": 5}},
    },
}
FEATURES = {
    "all shared genes": "all shared genes",
    "PCA50 of the fitted cells": "PCA50 of the fitted cells",
    "PCA50, scaled genes": "PCA50 of the fitted cells, scaled genes",
    "PCA50 of the training cells": "PCA50 of the training cells",
    "profile, untrained": "untrained",
    "**profile**": "embedding",
}
COLUMNS = ("accuracy", "macro_f1", "nearness")
CLASSIFIERS = {"LR": ("logistic regression", "logistic regression, unscaled"), "kNN": ("kNN",)}


def write_runs(folder: Path, data: Path, seeds: int) -> dict[str, list[str]]:
    """Write config/; returns the runs of each pair."""
    rows = ["dataset\tpath\tcounts\tlabel\tfilter"]
    made = {}
    corpora: dict[str, Any] = {}
    runs: dict[str, Any] = {}
    for title, pair in PAIRS.items():
        path, (first, second) = (data / pair["file"]).resolve(), pair["parts"]
        rows += [
            f"{name}\t{path}.h5ad\tX\t{pair['label']}\t{chosen}"
            for name, chosen in pair["parts"].items()
        ]
        corpora[first] = {"table": "config/datasets.tsv", "datasets": [first], **pair["sections"]}
        tasks = {"transfer": {"fit_on": [first], "neighbors": 5}}
        evaluate = {"datasets": [first, second], "tasks": tasks}
        options = {"corpus": first, "evaluate": evaluate} | MODELS["profile"]
        of_pair = seeded_runs(first, options, seeds, steps=400, checkpoint_every_steps=400)
        made[title] = [*of_pair]
        runs |= of_pair
    write_config(
        folder, rows, corpora=corpora, shard={"val_frac": 0.1, "test_frac": 0.1}, runs=runs
    )
    return made


def table(
    results: Mapping[str, list[TaskResult]], features: Mapping[str, str], columns: Iterable[str]
) -> list[str]:
    """Means over the runs of each data, by its title; empty where it has no such column. `features`
    are names of rows by the words of the table.
    """
    columns = list(columns)
    titles = [f"{column}: {classifier}" for column in columns for classifier in CLASSIFIERS]
    lines = [f"| data | features | {' | '.join(titles)} |", f"|{'---|' * (len(titles) + 2)}"]
    for title, runs in results.items():
        for words, name in features.items():
            cells = [
                _better(runs, name, names, column)
                for column in columns
                for names in CLASSIFIERS.values()
            ]
            lines.append(f"| {title} | {words} | {' | '.join(cells)} |")
    return lines


def _better(runs: list[TaskResult], features: str, classifiers: Iterable[str], column: str) -> str:
    of_runs = [[_mean(run, features, name, column) for run in runs] for name in classifiers]
    means = [statistics.mean(values) for values in of_runs if None not in values]
    return f"{max(means):.3f}" if means else ""


def _mean(run: TaskResult, features: str, classifier: str, column: str) -> float | None:
    for row in run.rows:
        if (row.method.features, row.method.classifier) == (features, classifier):
            return row.value(column)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="transfer-"))
    started = time.monotonic()
    made = write_runs(folder, arguments.data, arguments.seeds)
    snakemake(
        folder, [metrics_file(run) for runs in made.values() for run in runs], arguments.cores
    )
    minutes = (time.monotonic() - started) / 60
    cpu_minutes = cpu_seconds(folder) / 60
    print(f"{minutes:.0f} minutes; {cpu_minutes:.0f} CPU-minutes of all stages\n")
    results = {
        title: [result(folder, run, [*PAIRS[title]["parts"]][1], "transfer") for run in runs]
        for title, runs in made.items()
    }
    print("\n".join(table(results, FEATURES, COLUMNS)))
    for title, runs in results.items():
        figures = runs[0].figures
        names = (
            "n_fitted",
            "n_cells",
            "n_cells_of_new_classes",
            "new_classes",
            "n_copies",
            "shared_genes",
        )
        print(f"\n{title}: {', '.join(f'{name} {figures[name]}' for name in names)}")
        print("\n".join(verdicts(runs)))


if __name__ == "__main__":
    main()
