"""How many optimizer steps a model needs: datasets x widths x lengths, by the workflow.

    python benchmarks/lengths.py FOLDER [--checkpoint last] [--datasets pbmc68k] [--hidden 128] [--lengths 400 800 1600]
        [--lr 0.005] [--train-frac 1] [--seeds 3] [--out F]

FOLDER has one .h5ad for each entry of quality.py's `DATASETS`. Schedule wsd: the longest run is the trunk, and each
shorter one continues from its checkpoint at four fifths of its own length, so that all lengths cost the longest and
their tails. `--train-frac` trains on fewer cells of the same corpus, judged on the same held-out cells. `--checkpoint`
is consolidate.checkpoint: best by validation loss, or last. A cell of the table has three accuracies on held-out cells,
means over seeds, of the best classifier: whole cells, 5 cells per class, 75 genes (shifted), of each length and of two
baselines. `enough` is the shortest length whose mean over the three is within .005 of the best.

The second table is time to quality: CPU-seconds of stage train, start of Python included, of the shortest length whose
mean reaches that of each baseline, and is a point (.01) above both.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quality import COLUMNS, DATASETS, MODELS, TASKS, repetitions, tasks_of, train_seconds
from workflow_runs import SECTIONS, cpu_seconds, metrics_file, snakemake, write_config

LENGTHS = (400, 800, 1600)
DECAY = 0.2
SCORED = ("whole", "5 per class", "75 genes")
BASELINES = ("PCA50 of the training cells", "all genes")


def write_runs(
    folder: Path,
    data: Path,
    datasets: list[str],
    widths: list[int],
    seeds: int,
    lengths: Sequence[int] = LENGTHS,
    train_frac: float = 1.0,
    checkpoint: str = "last",
    lr: float = SECTIONS["train"]["lr"],
) -> None:
    """Write config/."""
    rows = [f"{name}\t{(data / name).resolve()}.h5ad\tX\t{DATASETS[name]['label']}" for name in datasets]
    corpora, runs = {}, {}
    for dataset in datasets:
        sections = {name: DATASETS[dataset].get(name, {}) for name in ("preprocess", "shard")}
        corpora[dataset] = {"table": "config/datasets.tsv", "datasets": [dataset], **sections}
        own = {name: DATASETS[dataset].get(name, {}) for name in ("tokens", "evaluate")}
        for width in widths:
            options = {"corpus": dataset, **own, **MODELS["profile"]}
            options["model"] = options["model"] | {"hidden": width}
            for seed in range(seeds):
                runs |= of_lengths(f"{dataset}-{width}", seed, lengths, options)
    table = ["dataset\tpath\tcounts\tlabel", *rows]
    tasks = {task: TASKS[task] for task, _ in (COLUMNS[column] for column in SCORED)}
    train = SECTIONS["train"] | {"schedule": "wsd", "decay_frac": DECAY, "val_every_steps": 200, "lr": lr}
    others = {
        "stream": {"train_frac": train_frac},
        "train": train,
        "consolidate": {"checkpoint": checkpoint},
        "evaluate": {"tasks": tasks},
    }
    write_config(folder, table, corpora=corpora, runs=runs, **others)


def of_lengths(name: str, seed: int, lengths: Sequence[int], options: dict[str, Any]) -> dict[str, Any]:
    """Runs of all lengths: the trunk, and those that leave it."""
    *shorter, longest = lengths
    leave = {steps: round((1 - DECAY) * steps) for steps in shorter}
    train = options["train"] | {"seed": seed}
    trunk = f"{name}-{longest}-{seed}"
    runs = {trunk: options | {"train": train | {"steps": longest, "keep_steps": [*leave.values()]}}}
    for steps, at in leave.items():
        branch = {"trunk": trunk, "trunk_step": at, "train": train | {"steps": steps}}
        runs[f"{name}-{steps}-{seed}"] = options | branch
    return runs


def best(folder: Path, dataset: str, runs: list[str], features: str) -> list[float]:
    """Accuracy in each of `SCORED` of the best classifier on some features."""
    tasks, scores = [tasks_of(folder, run, dataset) for run in runs], []
    for column in SCORED:
        values = repetitions(tasks, column)
        kept = [v.mean() for name, v in values.items() if name.startswith(f"{features} + ")]
        scores.append(max(kept, default=float("nan")))
    return scores


def seconds(folder: Path, runs: list[str], trunks: list[str], steps: int) -> float:
    """CPU-seconds of stage train of a run of `steps`, mean over seeds: its own, and its part of the trunk's."""
    own = statistics.fmean(train_seconds(folder, run) for run in runs)
    if runs == trunks:
        return own
    longest = int(trunks[0].rsplit("-", 2)[1])
    shared = statistics.fmean(train_seconds(folder, run) for run in trunks)
    return own + shared * round((1 - DECAY) * steps) / longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=list(DATASETS))
    parser.add_argument("--hidden", nargs="+", type=int, default=[128])
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--lr", type=float, default=SECTIONS["train"]["lr"])
    parser.add_argument("--train-frac", type=float, default=1.0)
    parser.add_argument("--checkpoint", choices=("best", "last"), default="last")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    lengths = sorted(given.lengths)
    folder = given.out or Path(tempfile.mkdtemp(prefix="lengths-"))
    chosen = given.hidden, given.seeds, lengths, given.train_frac, given.checkpoint, given.lr
    write_runs(folder, given.data, given.datasets, *chosen)
    runs = {
        (dataset, width, steps): [f"{dataset}-{width}-{steps}-{seed}" for seed in range(given.seeds)]
        for dataset in given.datasets
        for width in given.hidden
        for steps in lengths
    }
    snakemake(folder, [metrics_file(run) for names in runs.values() for run in names], given.cores)
    print(f"{cpu_seconds(folder) / 60:.0f} CPU-minutes of all stages\n")
    print(f"| data | hidden | {' | '.join(map(str, [*lengths, *BASELINES]))} | enough |")
    print("|---" * (len(lengths) + 5) + "|")
    lines = []
    for dataset in given.datasets:
        for width in given.hidden:
            names = {steps: runs[dataset, width, steps] for steps in lengths}
            scores = {steps: best(folder, dataset, names[steps], "embedding") for steps in lengths}
            bars = [best(folder, dataset, names[lengths[0]], features) for features in BASELINES]
            means = {steps: statistics.fmean(values) for steps, values in scores.items()}
            enough = next(steps for steps in lengths if means[steps] >= max(means.values()) - 0.005)
            cells = [" ".join(f"{value:.3f}" for value in values) for values in [*scores.values(), *bars]]
            print(f"| {dataset} | {width} | {' | '.join(cells)} | {enough} |", flush=True)
            cost = {steps: seconds(folder, names[steps], names[lengths[-1]], steps) for steps in lengths}
            goals = [statistics.fmean(bar) for bar in bars]
            reached = [
                next((f"{cost[steps]:.0f}" for steps in lengths if means[steps] >= goal), "not reached")
                for goal in [*goals, max(goals) + 0.01]
            ]
            lines.append(f"| {dataset} | {width} | {' | '.join(reached)} |")
    print("\n| data | hidden | PCA50 | all genes | one point above both |", "|---|---|---|---|---|", *lines, sep="\n")


if __name__ == "__main__":
    main()
