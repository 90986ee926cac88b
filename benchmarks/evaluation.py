"""CPU-seconds of the tasks of an evaluation on whole transcriptomes.

Simulated cells with about 2,000 of 20,000 genes, 8 labels and 4 batches, and a small model after a
few steps. Each task runs in an evaluation of its own, on one thread; the same evaluation with only
`throughput`, which has the imports, the training cells and the UMAP, is subtracted.

    python benchmarks/evaluation.py --cells 4989 --tasks probe few_shot
    python benchmarks/evaluation.py --cells 10000 --tasks integration clustering
    python benchmarks/evaluation.py --tasks "probe{seeds: 1}"         # options of a task
    python benchmarks/evaluation.py --raw cells.h5ad --label cell_type  # real cells
    python benchmarks/evaluation.py --beside CHECKOUT    # also with the cellmill of another checkout
    python benchmarks/evaluation.py --parts              # what folds of `probe` do with all genes
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from origin import commit, machine
from prepare import cpu_seconds
from threadpoolctl import threadpool_limits

from cellmill.data.arrays import log_normalise
from cellmill.data.inputs.formats import open_dataset
from cellmill.evaluate.classifiers.fitted import make_classifiers, precompute_folds
from cellmill.evaluate.features.chosen_genes import RankScores
from cellmill.evaluate.features.components import COMPONENTS, pca, project_on_fitted
from cellmill.evaluate.features.products import FeatureCache
from cellmill.evaluate.methods import KNN, REGRESSION, UNSCALED_REGRESSION
from cellmill.evaluate.splits import Fold
from cellmill.runs import results

CONFIG = """
corpora: {cells: {table: datasets.tsv}}
preprocess: {min_genes: 1, max_mito_frac: 1}
model: {family: profile, hidden: 64}
train: {steps: 20, global_batch: 64}
evaluate: {cells: all}
runs: {cells: {corpus: cells}}
"""
OVERHEAD = "throughput"
# a process starts with the peak memory of the one that forked it, so a small one has to
MEASURE = """
import os, sys
pid = os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
_, status, usage = os.wait4(pid, 0)
print(status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cells", type=int, default=4_989, help="(default: %(default)s)")
    parser.add_argument("--genes", type=int, default=20_000, help="(default: %(default)s)")
    parser.add_argument("--tasks", nargs="+", default=["probe", "few_shot"], help="(default: two)")
    parser.add_argument("--repeats", type=int, default=1, help="turns (default: %(default)s)")
    parser.add_argument("--raw", type=Path, help="cells (.h5ad) instead of simulated ones")
    parser.add_argument("--label", default="cell_type", help="(default: %(default)s)")
    parser.add_argument("--beside", type=Path, help="another checkout, whose build takes turns")
    parser.add_argument("--parts", action="store_true", help="parts of folds, instead of tasks")
    parser.add_argument("--folder", type=Path, help="keep the files here, and use those that exist")
    arguments = parser.parse_args()
    sources = {"now": Path(results.__file__).parents[2]}
    if arguments.beside:
        sources = {"before": arguments.beside.resolve() / "src"} | sources
    with tempfile.TemporaryDirectory(prefix="cellmill-evaluation-") as name:
        folder = arguments.folder or Path(name)
        prepare(folder, arguments.cells, arguments.genes, arguments.raw, arguments.label)
        if arguments.parts:
            print(f"{machine()}; commit {commit()}; `{shlex.join(['python', *sys.argv])}`\n")
            print_parts(folder)
            return
        spent: dict[tuple[str, str], list[float]] = {}
        peaks: dict[tuple[str, str], float] = {}
        for _ in range(arguments.repeats):
            for build, source in sources.items():
                overhead, _ = evaluate(folder, source, OVERHEAD, build, arguments.label)
                spent.setdefault((build, OVERHEAD), []).append(overhead)
                for task in arguments.tasks:
                    cpu_s, peak = evaluate(folder, source, task, build, arguments.label)
                    spent.setdefault((build, task), []).append(cpu_s - overhead)
                    peaks[build, task] = peak
        print(f"{machine()}; commit {commit()}; `{shlex.join(['python', *sys.argv])}`")
        with open_dataset(folder / "sim.h5ad") as reader:
            print(f"\n{reader.n_obs:,} cells x {reader.n_vars:,} genes\n")
        print("| task | build | CPU-seconds (range) | over plan | peak GB | largest difference |")
        print("|---|---|---:|---:|---:|---:|")
        for (build, task), seconds in spent.items():
            peak_gb = peaks.get((build, task), 0) / 1e6
            difference = largest_difference(folder, task) if arguments.beside else 0.0
            middle = statistics.median(seconds)
            numbers = f"{middle:.1f} ({min(seconds):.1f} to {max(seconds):.1f})"
            ratio = read_ratio(folder, build, task)
            print(f"| {task} | {build} | {numbers} | {ratio} | {peak_gb:.1f} | {difference:.1e} |")


def prepare(folder: Path, cells: int, genes: int, raw: Path | None, label: str) -> None:
    """Write the cells, simulated or of `raw`, a model and its embedding, unless they exist."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "embedding.h5ad").exists():
        return
    (folder / "config.yaml").write_text(CONFIG)
    columns = "dataset\tpath\tlabel\tbatch\n"
    (folder / "datasets.tsv").write_text(f"{columns}sim\traw.h5ad\t{label}\tbatch\n")
    source = Path(results.__file__).parents[2]
    corpus = "--config config.yaml --corpus cells"
    run = "--config config.yaml --run cells"
    if raw is not None:
        shutil.copy(raw, folder / "raw.h5ad")
    else:
        simulation = f"simulate --out raw.h5ad --cells {cells} --genes {genes} --batches 4"
        measure(folder, source, simulation.split())
    for line in (
        f"preprocess {corpus} --input raw.h5ad --dataset sim --label {label} --batch batch"
        " --out sim.h5ad --report sim.json",
        f"vocabulary {corpus} --cells sim.h5ad --out vocabulary.tsv",
        f"shard {corpus} --cells sim.h5ad --vocabulary vocabulary.tsv --out shards/manifest.json",
        f"train {run} --manifest shards/manifest.json --vocabulary vocabulary.tsv --out train",
        f"consolidate {run} --train train --vocabulary vocabulary.tsv --out model",
        f"embed {run} --model model --input sim.h5ad --out embedding.h5ad",
    ):
        measure(folder, source, line.split())


def evaluate(folder: Path, source: Path, task: str, build: str, label: str) -> tuple[float, float]:
    """CPU-seconds and peak memory (kB) of an evaluation with one task, `NAME` or `NAME{OPTIONS}`."""
    name, _, options = task.partition("{")
    config = (folder / "config.yaml").read_text()
    tasks = f"evaluate: {{cells: all, tasks: {{{name}: {{{options or '}'}}}}}"
    (folder / "task.yaml").write_text(config.replace("evaluate: {cells: all}", tasks))
    shutil.rmtree(folder / f"{build}-{name}", ignore_errors=True)  # or its results are kept
    words = (
        "evaluate --config task.yaml --run cells --model model --manifest shards/manifest.json"
        f" --cells sim.h5ad --embeddings embedding.h5ad --labels {label}"
        f" --out {build}-{name}/metrics.json"
    )
    return measure(folder, source, words.split())


def measure(folder: Path, source: Path, words: list[str]) -> tuple[float, float]:
    """CPU-seconds and peak memory (kB) of a stage; exits with its log if it fails."""
    environment = os.environ | {
        "PYTHONPATH": str(source),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "cellmill.cli", *words]
    measured = [sys.executable, "-S", "-c", MEASURE, *command]
    log = subprocess.run(measured, cwd=folder, env=environment, capture_output=True, text=True)
    lines = log.stdout.splitlines()
    status, cpu_s, peak = map(float, lines[-1].split())
    if status:
        sys.exit("\n".join([f"{words[0]} failed:", *lines[-20:], log.stderr]))
    return cpu_s, peak


def read_ratio(folder: Path, build: str, task: str) -> str:
    """CPU-seconds of a task over the planned ones; empty for less than a second, and if not known."""
    name = task.partition("{")[0]
    path = folder / f"{build}-{name}" / "finished" / "seconds.json"
    ratios = json.loads(path.read_text()) if path.exists() else {}
    return f"{ratios[name]:.1f}" if name in ratios else ""


def print_parts(folder: Path) -> None:
    """CPU-seconds of what `probe` does with all genes, on one thread: one fold from the genes
    themselves, and five folds from products that all of them share.
    """
    with open_dataset(folder / "sim.h5ad") as reader:
        labels = reader.obs["cell_type"].to_numpy().astype(str)
        counts = sp.vstack([*reader.rows(4096)], format="csr")
    profiles = log_normalise(counts)
    cells = np.arange(len(labels))
    splits = [Fold(0, cells[cells % 5 != fold], cells[cells % 5 == fold]) for fold in range(5)]
    train, test = splits[0].fitted, splits[0].tested
    shared = FeatureCache().share(profiles)
    classifiers = make_classifiers(15)

    def fit(features: Any, name: str, folds: list[Fold]) -> None:
        for split in folds:
            classifiers[name].fit(features[split.fitted], labels[split.fitted])
            classifiers[name].predict(features[split.tested])

    def fit_components() -> None:
        components = pca((len(train), profiles.shape[1])).fit(profiles[train])
        components.transform(profiles)

    def project_folds() -> None:
        for split in splits:
            project_on_fitted(shared.products(shared), split.fitted, COMPONENTS)

    once: dict[str, Callable[[], object]] = {
        "ranks of genes": lambda: RankScores(profiles),
        "products": lambda: shared.source.plain,
        "scaled products": lambda: shared.source.scaled,
    }
    parts: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "PCA of all genes": (fit_components, project_folds),
        KNN: (partial(fit, profiles, KNN, splits[:1]), partial(fit, shared, KNN, splits)),
    }
    for name in (REGRESSION, UNSCALED_REGRESSION):
        parts[name] = (
            partial(fit, profiles, name, splits[:1]),
            partial(precompute_folds, shared, labels, splits, {}, [name]),
        )
    print(f"{len(train):,} cells are fitted, {len(test):,} tested\n")
    print("| part | CPU-seconds, once |\n|---|---:|")
    with threadpool_limits(1):
        for name, work in once.items():
            print(f"| {name} | {cpu_seconds(work):.1f} |", flush=True)
        print("\n| part | one fold from genes | five folds from shared products |\n|---|---:|---:|")
        for name, both in parts.items():
            plain, faster = map(cpu_seconds, both)
            print(f"| {name} | {plain:.2f} | {faster:.2f} |", flush=True)


def largest_difference(folder: Path, task: str) -> float:
    """Largest difference of a score between both builds, over all rows and columns of a task."""
    name = task.partition("{")[0]
    before = results.read(folder / f"before-{name}" / "metrics.json").datasets["sim"]
    now = results.read(folder / f"now-{name}" / "metrics.json").datasets["sim"]
    largest = 0.0
    for name, result in before.tasks.items():
        rows = {row.method: row for row in now.tasks[name].rows}
        for row in result.rows:
            columns = [*row.scores] + ([] if task == OVERHEAD else [*row.numbers])
            for column in columns:
                was = row.value(column)
                value = rows[row.method].value(column)
                if was is not None and value is not None:
                    largest = max(largest, abs(value - was))
    return largest


if __name__ == "__main__":
    main()
