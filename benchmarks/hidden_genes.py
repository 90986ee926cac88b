"""Hidden genes: the decoder, the ridge regression of the export, and their mean, on seven datasets.

    python benchmarks/hidden_genes.py FOLDER [--checkpoint last] [--datasets pbmc68k] [--seeds 1] [--cores 2] [--out F]

FOLDER has one .h5ad for each entry of `DATASETS`. Runs are those of model `profile` in quality.py,
evaluated by task imputation alone. Figures are correlations of hidden genes over held-out cells,
means over seeds; the weight is the decoder's, as validation cells chose it in each seed. The
difference is `decoder + ridge` minus the best baseline, the ridge of the export among them, with
the 95 % interval of quality.py over seeds and genes. CPU-s are those of stages train and
consolidate.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import quality
from origin import commit
from workflow_runs import SECTIONS, cpu_seconds, metrics_file, seeded_runs, snakemake, write_config

# without labels: a sample of a CITE-seq experiment, and a donor
DATASETS: dict[str, dict[str, Any]] = quality.DATASETS | {
    "pbmc_cite": {"label": "", "preprocess": {}},
    "pbmc_donor_a": {"label": "", "preprocess": {}},
}
ROWS = ("embedding + decoder", "PCA50 of all genes + ridge", "embedding + decoder + ridge")


def write_runs(
    folder: Path, data: Path, datasets: list[str], seeds: int, checkpoint: str
) -> list[str]:
    """Write config/; returns the files that Snakemake has to make."""
    table = ["dataset\tpath\tcounts\tlabel"]
    corpora: dict[str, Any] = {}
    runs: dict[str, Any] = {}
    for name in datasets:
        dataset = DATASETS[name]
        table.append(f"{name}\t{(data / name).resolve()}.h5ad\tX\t{dataset['label']}")
        sections = {key: dataset.get(key, {}) for key in ("preprocess", "shard")}
        corpora[name] = {"table": "config/datasets.tsv", "datasets": [name], **sections}
        options = {"corpus": name, "evaluate": dataset.get("evaluate", {})}
        options |= quality.MODELS["profile"]
        runs |= seeded_runs(f"{name}-profile", options, seeds, steps="auto")
    train = {"optimizer": "muon", "schedule": "wsd", "decay_frac": quality.DECAY}
    train |= {"checkpoint_every_steps": 10_000, "val_every_steps": 400}
    if checkpoint == "best":
        train |= quality.CHOSEN
    write_config(
        folder,
        table,
        corpora=corpora,
        runs=runs,
        train=SECTIONS["train"] | train,
        consolidate={"checkpoint": checkpoint},
        evaluate={"tasks": {"imputation": quality.TASKS["imputation"]}},
    )
    return [metrics_file(run) for run in runs]


def row(folder: Path, dataset: str, seeds: int) -> str:
    runs = [f"{dataset}-profile-{seed}" for seed in range(seeds)]
    tasks = [quality.tasks_of(folder, run, dataset) for run in runs]
    figures = {
        method.name: values.mean()
        for method, values in quality.repetitions(tasks, "hidden genes").items()
    }
    same_cells = max(
        value for name, value in figures.items() if name.startswith("PCA50 of visible genes +")
    )
    weights = []
    steps = []
    for run in runs:
        config = json.loads((folder / f"results/runs/{run}/model/config.json").read_text())
        weights.append(f"{config['ridge']['decoder_weight']:.1f}")
        steps.append(str(config["step"]))
    seconds = [
        statistics.median(cpu_seconds(folder, stage, f"results/runs/{run}/{out}") for run in runs)
        for stage, out in (("train", "train"), ("consolidate", "model"))
    ]
    difference = quality.difference(dataset, "profile", tasks, "hidden genes").split(" | ")[4:]
    cells = [dataset, f"{same_cells:.3f}", *(f"{figures[name]:.3f}" for name in ROWS)]
    cells += [", ".join(steps), ", ".join(weights), *(f"{value:.0f}" for value in seconds)]
    return f"| {' | '.join([*cells, *difference])}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=list(DATASETS))
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="hidden-genes-"))
    chosen = arguments.seeds, arguments.checkpoint
    targets = write_runs(folder, arguments.data, arguments.datasets, *chosen)
    snakemake(folder, targets, arguments.cores)
    print(f"`python benchmarks/hidden_genes.py {' '.join(sys.argv[1:])}`, commit {commit()}\n")
    titles = "data | ridge on PCA50 | decoder | ridge of the export | decoder + ridge"
    titles += " | step | weight | train, CPU-s | consolidate, CPU-s | best baseline | difference"
    print(f"| {titles} | |\n|{'---|' * 12}")
    for dataset in arguments.datasets:
        print(row(folder, dataset, arguments.seeds), flush=True)


if __name__ == "__main__":
    main()
