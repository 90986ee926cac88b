"""Responses to perturbations, and in batches, that were held out: task `perturbation` x seeds, by the workflow.

    python benchmarks/perturbations.py FOLDER/papalexi.h5ad [--seeds 3] [--splits 0 1 2] [--cores 2] [--out F]

Papalexi is a CRISPR screen of 25 perturbations and controls in three batches. Three settings (`SETTINGS`):

- controls: a model of the controls alone, whose gene embeddings are features of perturbed genes for a ridge and for the
  nearest perturbation; all perturbations are tested, in folds.
- response: objective perturbation_response trained on two thirds of the perturbations, tested on the others; one corpus
  for each of `--splits`.
- batch: the same objective trained in two batches, tested in the third; one corpus for each of `--splits`.

Figures are means over pretraining seeds, ± their standard deviation; below each table stand the verdicts of each seed.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from origin import commit, machine
from workflow_runs import Result, metrics_file, result, seeded_runs, snakemake, tables, write_config

CONTROL = "non-targeting"
RESPONSE = {"name": "perturbation_response", "control": CONTROL, "batch_column": "batch"}
TABLE = "dataset\tpath\tcounts\tbatch\tperturbation\tcontrol\tfilter"
PREPROCESS = {"min_genes": 30, "max_mito_frac": 0.5}
SETTINGS = {
    "controls": "new perturbations, features of a model of the controls alone",
    "response": "new perturbations, response head",
    "batch": "a new batch, response head",
}


def write_runs(folder: Path, data: Path, seeds: int, splits: list[int]) -> dict[str, dict[str, list[str]]]:
    """Write config/; returns the runs of each corpus, by setting."""
    line = f"{data.resolve()}\tX\tbatch\tperturbation\t{CONTROL}"
    table = [TABLE, f"screen\t{line}\t", f"controls\t{line}\tperturbation == '{CONTROL}'"]
    by_perturbation = {"split_by": "perturbation", "train_values": [CONTROL], "val_frac": 0.1, "test_frac": 0.3}
    corpora: dict[str, Any] = {"controls": {"datasets": ["controls"], "shard": {"val_frac": 0.1, "test_frac": 0.1}}}
    made: dict[str, dict[str, list[str]]] = {setting: {} for setting in SETTINGS}
    for split in splits:
        corpora[f"response-{split}"] = {"datasets": ["screen"], "shard": by_perturbation | {"seed": split}}
        batch = {"split_by": "batch", "val_frac": 0.0, "test_frac": 0.3, "seed": split}
        corpora[f"batch-{split}"] = {"datasets": ["screen"], "shard": batch}
    runs: dict[str, Any] = {}
    for corpus, of in corpora.items():
        of["table"] = "config/datasets.tsv"
        setting = corpus.partition("-")[0]
        held_out = ["batch"] if setting == "batch" else ["perturbation"]
        evaluate = {"datasets": ["screen"], "tasks": {"perturbation": {"held_out": held_out}}}
        options = {"corpus": corpus, "evaluate": evaluate}
        options |= {} if setting == "controls" else {"objective": RESPONSE}
        of_corpus = seeded_runs(corpus, options, seeds)
        made[setting][corpus] = [*of_corpus]
        runs |= of_corpus
    model = {"family": "profile", "hidden": 64, "layers": 1}
    train = {"epochs": 10, "global_batch": 64, "lr": 3e-3, "warmup_steps": 20}
    write_config(folder, table, corpora=corpora, preprocess=PREPROCESS, model=model, train=train, runs=runs)
    return made


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--splits", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = given.out or Path(tempfile.mkdtemp(prefix="perturbations-"))
    made = write_runs(folder, given.data, given.seeds, given.splits)
    targets = [metrics_file(run) for corpora in made.values() for runs in corpora.values() for run in runs]
    snakemake(folder, targets, given.cores)
    print(f"`python benchmarks/perturbations.py {' '.join(sys.argv[1:])}`, commit {commit()}, {machine()}")
    for setting, corpora in made.items():
        results: dict[str, list[Result]] = {
            corpus: [result(folder, run, "screen", "perturbation") for run in runs] for corpus, runs in corpora.items()
        }
        print(f"\n## {SETTINGS[setting]}\n")
        print("\n".join(tables(results)))


if __name__ == "__main__":
    main()
