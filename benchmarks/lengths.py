"""How many optimizer steps a model needs: datasets x widths x lengths, by the workflow.

    python benchmarks/lengths.py FOLDER [--checkpoint last] [--datasets pbmc68k] [--hidden 128] [--lengths 400 800 1600]
        [--train-frac 1] [--seeds 3] [--out F]

FOLDER has one .h5ad for each entry of quality.py's `DATASETS`. Schedule wsd: the longest run is the trunk, and each
shorter one continues from its checkpoint at four fifths of its own length, so that all lengths cost the longest and
their tails. `--train-frac` trains on fewer cells of the same corpus, judged on the same held-out cells. `--checkpoint`
is consolidate.checkpoint: best by validation loss, or last. A cell of the table has three accuracies on held-out cells,
means over seeds, of the embedding's best classifier: whole cells, 5 cells per class, 75 genes (shifted). Then come
those of the best baseline, and the shortest length whose mean over the three is within .005 of the best.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quality import COLUMNS, DATASETS, MODELS, TASKS, repetitions, tasks_of
from workflow_runs import SECTIONS, all_cpu_seconds, metrics_file, snakemake, write_config

LENGTHS = (400, 800, 1600)
DECAY = 0.2
SCORED = ("whole", "5 per class", "75 genes")


def write_runs(
    folder: Path,
    data: Path,
    datasets: list[str],
    widths: list[int],
    seeds: int,
    lengths: Sequence[int] = LENGTHS,
    train_frac: float = 1.0,
    checkpoint: str = "last",
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
    train = SECTIONS["train"] | {"schedule": "wsd", "decay_frac": DECAY, "val_every_steps": 200}
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


def best(folder: Path, dataset: str, runs: list[str], own: bool) -> list[float]:
    """Accuracy in each of `SCORED` of the best classifier on the embedding, or of the best baseline."""
    tasks, scores = [tasks_of(folder, run, dataset) for run in runs], []
    for column in SCORED:
        values = repetitions(tasks, column)
        kept = [
            v.mean() for name, v in values.items() if name.startswith("embedding") == own and "untrained" not in name
        ]
        scores.append(max(kept, default=float("nan")))
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=list(DATASETS))
    parser.add_argument("--hidden", nargs="+", type=int, default=[128])
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--train-frac", type=float, default=1.0)
    parser.add_argument("--checkpoint", choices=("best", "last"), default="last")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    lengths = sorted(given.lengths)
    folder = given.out or Path(tempfile.mkdtemp(prefix="lengths-"))
    write_runs(
        folder, given.data, given.datasets, given.hidden, given.seeds, lengths, given.train_frac, given.checkpoint
    )
    runs = {
        (dataset, width, steps): [f"{dataset}-{width}-{steps}-{seed}" for seed in range(given.seeds)]
        for dataset in given.datasets
        for width in given.hidden
        for steps in lengths
    }
    snakemake(folder, [metrics_file(run) for names in runs.values() for run in names], given.cores)
    print(f"{all_cpu_seconds(folder) / 60:.0f} CPU-minutes of all stages\n")
    print(
        f"| data | hidden | {' | '.join(map(str, lengths))} | best baseline | enough |\n|{'---|' * (len(lengths) + 4)}"
    )
    for dataset in given.datasets:
        for width in given.hidden:
            scores = {steps: best(folder, dataset, runs[dataset, width, steps], own=True) for steps in lengths}
            means = {steps: statistics.fmean(values) for steps, values in scores.items()}
            enough = next(steps for steps in lengths if means[steps] >= max(means.values()) - 0.005)
            baseline = best(folder, dataset, runs[dataset, width, lengths[0]], own=False)
            cells = [" ".join(f"{value:.3f}" for value in values) for values in [*scores.values(), baseline]]
            print(f"| {dataset} | {width} | {' | '.join(cells)} | {enough} |", flush=True)


if __name__ == "__main__":
    main()
