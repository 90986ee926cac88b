"""How many optimizer steps a model needs: datasets x widths x lengths, by the workflow.

    python benchmarks/lengths.py FOLDER [--checkpoint last] [--datasets pbmc68k] [--hidden 128] [--lengths 400 800 1600]
        [--lr 0.005] [--train-frac 1] [--seeds 3] [--out F]

FOLDER has one .h5ad for each entry of quality.py's `DATASETS`. Schedule wsd: the longest run is the
trunk, and each shorter one continues from its checkpoint at four fifths of its own length, so that
all lengths cost the longest and their tails. `--train-frac` trains on fewer cells of the same
corpus, judged on the same held-out cells. `--checkpoint` is consolidate.checkpoint: best by
validation loss, or last. A cell of the table has three accuracies on held-out cells, means over
seeds, of the best classifier: whole cells, 5 cells per class, 75 genes (shifted), of each length
and of two baselines. `enough` is the shortest length whose mean over the three is within .005 of
the best.

The second table is time to quality, as in quality.py.
"""

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from quality import (
    BARS,
    DATASETS,
    DECAY,
    MODELS,
    SCORED_TASKS,
    Lengths,
    best,
    shorter,
    time_to_quality,
    with_shorter,
)
from workflow_runs import SECTIONS, cpu_seconds, metrics_file, seeded_runs, snakemake, write_config

LENGTHS = (400, 800, 1600)


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
    rows = [
        f"{name}\t{(data / name).resolve()}.h5ad\tX\t{DATASETS[name]['label']}" for name in datasets
    ]
    corpora = {}
    runs = {}
    for dataset in datasets:
        sections = {name: DATASETS[dataset].get(name, {}) for name in ("preprocess", "shard")}
        corpora[dataset] = {"table": "config/datasets.tsv", "datasets": [dataset], **sections}
        own = {name: DATASETS[dataset].get(name, {}) for name in ("tokens", "evaluate")}
        for width in widths:
            options = {"corpus": dataset, **own, **MODELS["profile"]}
            options["model"] = options["model"] | {"hidden": width}
            for name, run in seeded_runs(
                f"{dataset}-{width}", options, seeds, steps=lengths[-1]
            ).items():
                runs |= with_shorter(name, run, lengths[:-1])
    table = ["dataset\tpath\tcounts\tlabel", *rows]
    train = SECTIONS["train"] | {
        "schedule": "wsd",
        "decay_frac": DECAY,
        "val_every_steps": 200,
        "lr": lr,
    }
    others = {
        "stream": {"train_frac": train_frac},
        "train": train,
        "consolidate": {"checkpoint": checkpoint},
        "evaluate": {"tasks": SCORED_TASKS},
    }
    write_config(folder, table, corpora=corpora, runs=runs, **others)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    runs: dict[tuple[str, int], Lengths] = {}
    for dataset, width in itertools.product(given.datasets, given.hidden):
        trunks = [f"{dataset}-{width}-{seed}" for seed in range(given.seeds)]
        runs[dataset, width] = shorter(trunks, lengths[:-1]) | {lengths[-1]: trunks}
    names = itertools.chain.from_iterable(
        run for of_seeds in runs.values() for run in of_seeds.values()
    )
    snakemake(folder, [metrics_file(run) for run in names], given.cores)
    print(f"{cpu_seconds(folder) / 60:.0f} CPU-minutes of all stages\n")
    print(f"| data | hidden | {' | '.join(map(str, [*lengths, *BARS]))} | enough |")
    print("|---" * (len(lengths) + 5) + "|")
    for (dataset, width), names in runs.items():
        scores = {steps: best(folder, dataset, names[steps], "embedding") for steps in lengths}
        bars = [best(folder, dataset, names[lengths[-1]], features) for features in BARS]
        means = {steps: statistics.fmean(values) for steps, values in scores.items()}
        enough = next(steps for steps in lengths if means[steps] >= max(means.values()) - 0.005)
        cells = [
            " ".join(f"{value:.3f}" for value in values) for values in [*scores.values(), *bars]
        ]
        print(f"| {dataset} | {width} | {' | '.join(cells)} | {enough} |", flush=True)
    print("\n| data | hidden | PCA50 | all genes | one point above both |\n|---|---|---|---|---|")
    for (dataset, width), names in runs.items():
        print(
            f"| {dataset} | {width} | {' | '.join(time_to_quality(folder, dataset, names))} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
