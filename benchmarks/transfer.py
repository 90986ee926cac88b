"""Labels carried from one dataset to another: task `transfer`, by the workflow.

    python benchmarks/transfer.py FOLDER [--seeds 3] [--cores 2] [--out F]

FOLDER has cellbench.h5ad and merfish_mouse.h5ad. Each is cut into two datasets by an obs column (`PAIRS`): the model is
trained on the first one alone, all classifiers are fitted on its labels, and every cell of the second one is tested.
The table has the better one of both logistic regressions, and kNN, means over seeds of the training; below it stand the
verdicts of each seed, the embedding's best row against the best baseline with the interval over cells.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from quality import MODELS, all_cpu_seconds

ROOT = Path(__file__).resolve().parents[1]
PAIRS: dict[str, dict[str, Any]] = {
    "CellBench, CEL-seq2 to Drop-seq": {
        "file": "cellbench",
        "label": "cell_type",
        "parts": {"celseq2": "batch != 'sc_dropseq'", "dropseq": "batch == 'sc_dropseq'"},
        "sections": {"preprocess": {}},
        "tokens": {"max_tokens": 256},
    },
    "MERFISH, other regions to striatum, midbrain and hippocampus": {
        "file": "merfish_mouse",
        "label": "cell_type_ontology_term_id",
        "parts": {
            "others": "major_brain_region not in ['Striatum', 'Midbrain', 'Hippocampus']",
            "three": "major_brain_region in ['Striatum', 'Midbrain', 'Hippocampus']",
        },
        "sections": {"preprocess": {"organism": "mouse", "min_genes": 5}},
        "tokens": {"max_tokens": 512},
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


def write_config(folder: Path, data: Path, seeds: int) -> dict[str, list[Path]]:
    """Write config/; returns metrics.json of the runs of each pair."""
    (folder / "config").mkdir(parents=True, exist_ok=True)
    rows, corpora, runs, made = ["dataset\tpath\tcounts\tlabel\tfilter\n"], {}, {}, {}
    for title, pair in PAIRS.items():
        path, (first, second) = (data / pair["file"]).resolve(), pair["parts"]
        rows += [f"{name}\t{path}.h5ad\tX\t{pair['label']}\t{chosen}\n" for name, chosen in pair["parts"].items()]
        corpora[first] = {"table": "config/datasets.tsv", "datasets": [first], **pair["sections"]}
        tasks = {"transfer": {"fit_on": [first], "neighbors": 5}}
        evaluate = {"datasets": [first, second], "tasks": tasks}
        made[title] = [folder / f"results/runs/{first}-{seed}/evaluate/metrics.json" for seed in range(seeds)]
        for seed in range(seeds):
            model = MODELS["profile"]
            train = model["train"] | {"seed": seed, "steps": 400, "checkpoint_every_steps": 400}
            own = {"corpus": first, "tokens": pair["tokens"], "evaluate": evaluate}
            runs[f"{first}-{seed}"] = own | model | {"train": train}
    tree = {
        "corpora": corpora,
        "shard": {"val_frac": 0.1, "test_frac": 0.1},
        "tokens": {"tokenizer": "continuous"},
        "parallel": {"precision": "32-true"},  # a CPU emulates bfloat16
        "train": {"global_batch": 32, "token_budget": 32768, "warmup_steps": 20, "lr": 5e-3}
        | {"val_every_steps": 100, "val_cells": 100},
        "runs": runs,
    }
    (folder / "config" / "datasets.tsv").write_text("".join(rows))
    (folder / "config" / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return made


def snakemake(folder: Path, targets: list[str], cores: int) -> None:
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--quiet", "all"]
    command += ["--cores", str(cores), "--scheduler", "greedy"]
    command += ["--set-threads", "train=1", "plan=1", "embed=1", "evaluate=1", "--set-resources"]
    command += ["train:nproc_per_node=1", "train:cpus_per_task=1", "--"]
    log, environment = folder / "snakemake.log", os.environ | {"OMP_NUM_THREADS": "1"}
    with open(log, "w") as file:
        done = subprocess.run([*command, *targets], cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"the workflow failed; see {log}")


def table(
    results: Mapping[str, list[dict[str, Any]]], features: Mapping[str, str], columns: Iterable[str]
) -> list[str]:
    """Means over the runs of each data, by its title; empty where it has no such column. `features` are names of rows
    by the words of the table.
    """
    columns = list(columns)
    titles = [f"{column}: {classifier}" for column in columns for classifier in CLASSIFIERS]
    lines = [f"| data | features | {' | '.join(titles)} |", f"|{'---|' * (len(titles) + 2)}"]
    for title, runs in results.items():
        for words, name in features.items():
            cells = [_better(runs, name, names, column) for column in columns for names in CLASSIFIERS.values()]
            lines.append(f"| {title} | {words} | {' | '.join(cells)} |")
    return lines


def _better(runs: list[dict[str, Any]], features: str, classifiers: Iterable[str], column: str) -> str:
    of_runs = [[_mean(run, f"{features} + {name}", column) for run in runs] for name in classifiers]
    means = [statistics.mean(values) for values in of_runs if None not in values]
    return f"{max(means):.3f}" if means else ""


def _mean(run: dict[str, Any], name: str, column: str) -> Any:
    return next((row.get(f"{column}_mean") for row in run["rows"] if row["name"] == name), None)


def verdicts(runs: list[dict[str, Any]]) -> list[str]:
    """Sentences of each seed."""
    return [f"- seed {seed}: {sentence}" for seed, run in enumerate(runs) for sentence in run["sentences"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder, started = arguments.out or Path(tempfile.mkdtemp(prefix="transfer-")), time.monotonic()
    made = write_config(folder, arguments.data, arguments.seeds)
    snakemake(folder, [str(path.relative_to(folder)) for paths in made.values() for path in paths], arguments.cores)
    minutes, cpu_minutes = (time.monotonic() - started) / 60, all_cpu_seconds(folder) / 60
    print(f"{minutes:.0f} minutes; {cpu_minutes:.0f} CPU-minutes of all stages\n")
    results = {
        title: [
            json.loads(path.read_text())["datasets"][[*PAIRS[title]["parts"]][1]]["tasks"]["transfer"] for path in paths
        ]
        for title, paths in made.items()
    }
    print("\n".join(table(results, FEATURES, COLUMNS)))
    for title, runs in results.items():
        figures = runs[0]["figures"]
        names = ("n_fitted", "n_cells", "n_new_classes", "new_classes", "n_copies", "shared_genes")
        print(f"\n{title}: {', '.join(f'{name} {figures[name]}' for name in names)}")
        print("\n".join(verdicts(runs)))


if __name__ == "__main__":
    main()
