"""Fine-tuning methods against training from scratch, frozen vectors and all-genes regression, by
labels per class.

    python benchmarks/finetune.py FOLDER/pbmc68k.h5ad [--label bulk_labels] [--pretrain FILE …] [--shots 5 20 all]
        [--seeds 3] [--methods METHOD …] [--family profile] [--epochs 40] [--steps 200] [--cores 2] [--out FOLDER]

A stratified part of the cells is the test; no model sees them. Of the other cells, `shots` of each class keep their
label, drawn anew for each seed, the same for all rows of the table; classes of fewer cells keep all. The model is
pretrained with cell_decoding on these cells without labels, and on the files of `--pretrain`, once. A run for every
method, number of labels and seed is given to Snakemake, whose rule predict labels the test cells, so a table that was
interrupted goes on where it stopped. Every run makes the same number of optimizer steps, and its last checkpoint is
judged: there is no validation, as labels are few. Batches hold labelled cells alone, the default of classification, but
for the rows `every cell in turn` and `unlabelled cells too`, in which half of them are labelled and cell_decoding is
trained on all. Regression is logistic, on log1p of counts per 10,000 of all genes,
on 50 principal components of them that are fitted to the training cells, and on the pretrained model's vectors, each
standardised and as it is, the better one by test accuracy, which flatters them.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
import yaml
from quality import ALL_GENES, ENCODER, PROFILE
from sklearn.decomposition import PCA
from sklearn.metrics import f1_score
from workflow_runs import SECTIONS, snakemake

from cellmill.evaluate.classifiers.fitted import make_classifiers
from cellmill.evaluate.prediction_cache import fit

TEST_FRAC = 0.3
FULL = {"method": "full", "trunk_lr_frac": 0.1, "layer_decay": 0.8}
METHODS: dict[str, dict[str, Any]] = {
    "from scratch": {"init_from": None},
    "head_only": {"finetune": {"method": "head_only"}, "train": {"lr": 1e-2}},
    "partial": {
        "finetune": {"method": "partial", "last_blocks": 1, "trunk_lr_frac": 0.1},
        "train": {"lr": 1e-2},
    },
    "lora": {"finetune": {"method": "lora", "trunk_lr_frac": 0.5}, "train": {"lr": 1e-2}},
    "full": {"finetune": FULL, "train": {"lr": 1e-2}},
    "full, every cell in turn": {
        "finetune": FULL,
        "train": {"lr": 1e-2},
        "stream": {"weight_by": None},
    },
    "full, unlabelled cells too": {"finetune": FULL, "train": {"lr": 1e-2}, "decodes": True},
    "full, gradual": {
        "finetune": FULL | {"head_steps": 40, "block_steps": 20},
        "train": {"lr": 1e-2},
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "profile": {"model": PROFILE, "tokens": SECTIONS["tokens"] | ALL_GENES},
    # all genes of a cell cost attention too much
    "encoder": {"model": ENCODER, "tokens": SECTIONS["tokens"]},
}
REGRESSIONS = (
    "frozen vectors, logistic regression",
    "all genes, logistic regression",
    "PCA50, logistic regression",
)
AGAINST = REGRESSIONS[1]
Labels = np.ndarray[Any, Any]


def run_name(method: str, shots: str, seed: int) -> str:
    """Name of a run."""
    return f"{method.replace(', ', '-').replace(' ', '-')}.{shots}.{seed}"


def draw(labels: pd.Series, shots: str, seed: int) -> pd.Series:
    """The labels with those of all but `shots` cells of each class removed."""
    if shots == "all":
        return labels
    order = np.random.default_rng([seed, 1]).permutation(len(labels))
    rank = (
        labels.iloc[order]
        .groupby(labels.iloc[order], observed=True)
        .cumcount()
        .reindex(labels.index)
    )
    return labels.where(rank < int(shots))


def split(source: Path, label: str, shots: list[str], seeds: int, folder: Path) -> None:
    """Write train.h5ad, with a column of labels for each number of labels and seed, and test.h5ad."""
    adata = ad.read_h5ad(source)
    adata.obs_names_make_unique()
    labels = adata.obs[label].astype(object)
    adata = adata[labels.notna().to_numpy()].copy()
    labels = adata.obs[label].astype(str)
    order = np.random.default_rng(0).permutation(adata.n_obs)
    place = labels.iloc[order].groupby(labels.iloc[order]).cumcount().reindex(labels.index)
    is_test = (place < TEST_FRAC * labels.map(labels.value_counts())).to_numpy()
    train = adata[~is_test].copy()
    test = adata[is_test].copy()
    test.obs = pd.DataFrame({"true": labels[is_test]})
    known = labels[~is_test]
    drawn = {f"label_{k}_{seed}": draw(known, k, seed) for k in shots for seed in range(seeds)}
    train.obs = pd.DataFrame(
        {name: column.astype("category") for name, column in drawn.items()}, index=known.index
    )
    folder.mkdir(parents=True, exist_ok=True)
    train.write_h5ad(folder / "train.h5ad")
    test.write_h5ad(folder / "test.h5ad")


def write_config(folder: Path, given: argparse.Namespace) -> list[str]:
    """Write config/; returns the files that Snakemake has to make."""
    files = {"train": folder / "train.h5ad", "test": folder / "test.h5ad"}
    files |= {f"other{i}": path.resolve() for i, path in enumerate(given.pretrain)}
    (folder / "config").mkdir(exist_ok=True)
    rows = [f"{name}\t{path}\n" for name, path in files.items()]
    (folder / "config" / "datasets.tsv").write_text("dataset\tpath\n" + "".join(rows))
    table = {"table": "config/datasets.tsv"}
    runs: dict[str, Any] = {
        "pretrained": {"corpus": "wide", "train": {"epochs": given.epochs, "lr": 3e-3}}
    }
    if given.pretrain:  # what differs between datasets is for the decoder to know
        runs["pretrained"]["objective"] = {"name": "cell_decoding", "batch_column": "dataset"}
    for k in given.shots:
        for seed in range(given.seeds):
            label = f"label_{k}_{seed}"
            for method in given.methods:
                options = METHODS[method] | {
                    "objective": {"name": "classification", "label_column": label}
                }
                if options.pop("decodes", False):
                    parts = {"classification": {"label_column": label}, "cell_decoding": {}}
                    options["objective"] = {"name": "sum", "parts": parts}
                    options["stream"] = {"weight_by": label, "labelled_frac": 0.5}
                own = {"corpus": "labelled", "init_from": "pretrained"} | options
                own["train"] = {"steps": given.steps, "lr": 1e-3, "seed": seed} | options.get(
                    "train", {}
                )
                runs[run_name(method, k, seed)] = own
    tree = {
        "corpora": {
            "wide": table | {"datasets": [name for name in files if name != "test"]},
            "labelled": table | {"datasets": ["train"]},
        },
        "preprocess": {
            "organism": given.organism,
            "min_genes": 0,
            "min_cells": 1,
            "max_mito_frac": 1,
        },
        "shard": {"val_frac": 0.0, "test_frac": 0.0},
        **MODELS[given.family],
        "parallel": {"precision": "32-true"},  # a CPU emulates bfloat16
        "train": {
            "global_batch": 32,
            "token_budget": 2**20,
            "warmup_steps": 20,
            "checkpoint_every_steps": 10**6,
        },
        "consolidate": {"checkpoint": "last"},
        "embed": {"min_coverage_frac": 0, "min_expressed_frac": 0},
        "runs": runs,
    }
    (folder / "config" / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    targets = [
        f"results/runs/{name}/predictions/test.h5ad" for name in runs if name != "pretrained"
    ]
    return [
        *targets,
        *(f"results/runs/pretrained/embeddings/{name}.h5ad" for name in ("train", "test")),
    ]


def predicted(folder: Path, run: str, truth: pd.Series) -> Labels:
    """A run's labels of the test cells; a cell that got none is wrong."""
    obs = ad.read_h5ad(folder / "results" / "runs" / run / "predictions" / "test.h5ad").obs
    return obs["cellmill_label"].astype(object).reindex(truth.index).fillna("none").to_numpy(str)


def regressed(train: Any, test: Any, labels: pd.Series, truth: pd.Series) -> Labels:
    """Labels of the test cells by the better logistic regression on features of the train cells."""
    known = labels.notna().to_numpy()
    found = []
    for name, classifier in make_classifiers(1).items():
        if name.startswith("logistic"):
            fit(name, classifier, train[known], labels[known].astype(str).to_numpy())
            found.append(classifier.predict(test))
    return max(found, key=lambda labels: score(truth, labels))


def score(truth: pd.Series, labels: Labels) -> tuple[float, float]:
    """Accuracy and macro-F1."""
    return float(np.mean(truth.to_numpy() == labels)), float(
        f1_score(truth, labels, average="macro")
    )


def features(folder: Path, kind: str) -> list[Any]:
    """Features of the train and the test cells, in the order of their files."""
    found = []
    for name in ("train", "test"):
        adata = ad.read_h5ad(folder / f"{name}.h5ad")
        if kind == REGRESSIONS[0]:
            embedded = ad.read_h5ad(
                folder / "results" / "runs" / "pretrained" / "embeddings" / f"{name}.h5ad"
            )
            rows = embedded.obs_names.get_indexer(adata.obs_names)
            assert (rows >= 0).all(), "cells were dropped by preprocess"
            found.append(np.nan_to_num(np.asarray(embedded.obsm["X_cellmill"])[rows]))
            continue
        counts = sp.csr_matrix(adata.X, dtype=np.float64)
        scaled = sp.diags(1e4 / np.maximum(np.asarray(counts.sum(1)).ravel(), 1)) @ counts
        found.append(scaled.log1p().tocsr())
    if kind == REGRESSIONS[2]:
        components = PCA(50, random_state=0).fit(found[0].toarray())
        found = [components.transform(each.toarray()) for each in found]
    return found


def labelled(
    folder: Path, given: argparse.Namespace, truth: pd.Series
) -> dict[tuple[str, str], list[Labels]]:
    """Labels of the test cells of each seed, by row and number of labels."""
    columns = ad.read_h5ad(folder / "train.h5ad").obs
    made = {kind: features(folder, kind) for kind in REGRESSIONS}
    return {
        (name, k): [
            regressed(made[name][0], made[name][1], columns[f"label_{k}_{seed}"], truth)
            if name in REGRESSIONS
            else predicted(folder, run_name(name, k, seed), truth)
            for seed in range(given.seeds)
        ]
        for name in (*given.methods, *REGRESSIONS)
        for k in given.shots
    }


def scores(found: list[Labels], truth: pd.Series) -> str:
    """Mean and standard deviation over seeds of accuracy, and mean macro-F1."""
    accuracy, f1 = np.array([score(truth, labels) for labels in found]).T
    spread = f" ± {accuracy.std(ddof=1):.3f}" if len(found) > 1 else ""
    return f"{accuracy.mean():.3f}{spread} / {f1.mean():.3f}"


def difference(own: list[Labels], other: list[Labels], truth: pd.Series) -> str:
    """Accuracy of `own` less that of `other`, with the 95 % interval by bootstrap over seeds and
    cells.
    """
    true = truth.to_numpy()
    draw = np.random.default_rng(0)
    less = (np.array(own) == true).astype(float) - (np.array(other) == true)
    seeds, cells = less.shape
    drawn = [
        less[draw.integers(0, seeds, seeds)][:, draw.integers(0, cells, cells)].mean()
        for _ in range(4000)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return f"{less.mean():+.3f} ({low:+.3f} to {high:+.3f})"


def lines(folder: Path, given: argparse.Namespace) -> list[str]:
    """The table of scores, and that of differences from all genes."""
    truth = ad.read_h5ad(folder / "test.h5ad").obs["true"].astype(str)
    found = labelled(folder, given, truth)
    head = [
        "| | " + " | ".join(f"{k} labels a class" for k in given.shots) + " |",
        "|---" * (1 + len(given.shots)) + "|",
    ]

    def row(name: str, entries: list[str]) -> str:
        return f"| {name} | {' | '.join(entries)} |"

    names = (*given.methods, *REGRESSIONS)
    table = [row(name, [scores(found[name, k], truth) for k in given.shots]) for name in names]
    paired = [
        row(name, [difference(found[name, k], found[AGAINST, k], truth) for k in given.shots])
        for name in names
        if name != AGAINST
    ]
    n_train = len(ad.read_h5ad(folder / "train.h5ad", backed="r").obs)
    about = f"{n_train:,} training cells, {len(truth):,} test cells; accuracy / macro-F1"
    return [
        about,
        "",
        *head,
        *table,
        "",
        f"Accuracy less that of {AGAINST}, 95 % interval",
        "",
        *head,
        *paired,
    ]


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("source", type=Path, help=".h5ad with counts in X")
    parser.add_argument("--label", default="bulk_labels")
    parser.add_argument(
        "--pretrain", type=Path, nargs="*", default=[], help="more .h5ad files, without labels"
    )
    parser.add_argument("--shots", nargs="+", default=["5", "20", "all"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=[*METHODS], help="rows besides regression"
    )
    parser.add_argument("--organism", choices=("human", "mouse"), default="human")
    parser.add_argument("--family", choices=MODELS, default="profile")
    parser.add_argument("--epochs", type=int, default=40, help="of the pretraining")
    parser.add_argument("--steps", type=int, default=200, help="of each run with labels")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder to work in (default: a temporary one)")
    given = parser.parse_args()
    folder = (given.out or Path(tempfile.mkdtemp(prefix="finetune-"))).resolve()
    if not (folder / "test.h5ad").exists():
        split(given.source, given.label, given.shots, given.seeds, folder)
    targets = write_config(folder, given)
    snakemake(folder, targets, given.cores)
    print("\n".join(lines(folder, given)))


if __name__ == "__main__":
    main()
