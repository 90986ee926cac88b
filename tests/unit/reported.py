"""A finished run and a corpus, as folders that the report reads; with text that must be escaped."""

import json
from pathlib import Path
from typing import Any

from cellmill.evaluate.methods import ALL_GENES, EMBEDDING
from cellmill.runs import results
from cellmill.runs.results import (
    Closed,
    Confusion,
    DatasetResult,
    Evaluation,
    Gap,
    Kind,
    Row,
    Score,
    ScoredMethod,
    TaskResult,
    Verdict,
)

EVIL = "<script>alert(1)&"
VALUES = [
    (EMBEDDING, "logistic regression", 0.80),
    (EMBEDDING, "kNN", 0.75),
    (ALL_GENES, "logistic regression", 0.84),
]
BEST = "embedding + logistic regression"
SECOND = Verdict(
    BEST, "all genes + logistic regression", "accuracy", -0.04, (-0.07, -0.01), "behind"
)
LOST = Verdict("embedding + kNN", "PCA50 + kNN", "accuracy", -0.09, (-0.12, -0.06), "behind")
CLOSED = (
    "closes 94 % (80 to 108) of the gap from majority (0.400) to all (0.825); "
    "the best baseline, all genes, closes 104 %"
)
LOSS = "embedding + kNN is behind PCA50 + kNN by 0.090 accuracy (-0.120 to -0.060)."


def make_method(features: str, classifier: str = "", kind: Kind | None = None) -> ScoredMethod:
    """A method whose kind is model for the embedding, baseline for all others."""
    if kind is None:
        kind = "model" if features == "embedding" else "baseline"
    network = {"embedding": "trained", "untrained": "untrained"}.get(features)
    return ScoredMethod(features, classifier, kind, network)  # type: ignore[arg-type]


def make_row(features: str, classifier: str = "", kind: Kind | None = None, **means: float) -> Row:
    """A row with these means; a column's underscores stay."""
    scores = {column: Score(mean) for column, mean in means.items()}
    return Row(make_method(features, classifier, kind), scores)


def make_dataset(**tasks: TaskResult) -> DatasetResult:
    return DatasetResult(90, 90, "all", 0, {}, tasks)


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def make_run(folder: Path) -> Path:
    rows = []
    for features, classifier, accuracy in VALUES:
        scores = {
            "accuracy": Score(accuracy, 0.02, [accuracy, accuracy]),
            "macro_f1": Score(accuracy - 0.1, 0.03),
        }
        method = make_method(features.features, classifier)
        rows.append(Row(method, scores, {"not_converged": 0}))
    figures = {
        "n_cells": 90, "classes": {EVIL: 50, "B $x_$": 40}, "dropped_classes": {"<b>few": 3}, "n_unlabelled": 2,
        "folds": 5,
    }  # fmt: skip
    gap = Gap(
        "accuracy",
        ("majority", 0.4),
        ("all", 0.825),
        Closed(BEST, 94, 80, 108),
        Closed("all genes", 104, 90, 120),
    )
    probe = TaskResult(
        rows=rows,
        metric="accuracy",
        verdicts=[LOST, SECOND],
        figures=figures,
        confusion=Confusion("embedding + kNN", [EVIL, "B $x_$"], [[50, 0], [10, 30]]),
        gaps=[gap],
    )
    skipped = TaskResult(skipped="the dataset has no label column")
    masked = TaskResult(figures={"n_cells": 95, "r2_over_gene_mean": -0.012})
    genes = {"n_present": 75, "n_genes": 765, "expressed_frac": 0.213, "absent": ["CD3D"]}
    label = {"label": "type"}
    tasks = {"probe": probe, "reconstruct": masked}
    pbmc = DatasetResult(300, 95, "heldout", 0, label, tasks, genes)
    bare = DatasetResult(300, 95, "heldout", 0, {}, tasks | {"probe": skipped})
    evaluation = Evaluation({"pbmc": pbmc, "bare": bare}, model={"digest": "beef" * 16})
    write(
        folder / "plan.json",
        {"parameters": 1234567, "steps": 200, "steps_per_epoch": 8, "hours": 0.5},
    )
    write(
        folder / "train/status.json",
        {"state": "done", "step": 199, "cells": 6368, "best_value": 0.4321, "best_step": 150},
    )
    write(folder / "train/metrics.jsonl", '{"step": 1, "loss": 2.0, "peak_resident_gb": [0.5, 0.7123]}\n'
           '{"step": 2, "loss": 1.5, "peak_resident_gb": [0.6, 0.7]}\n'
           '{"step": 2, "val_loss": 1.6}\n{"step": 3, "lo')  # fmt: skip
    write(
        folder / "train/run.json",
        {
            "options": {"train": {"lr": 0.001, "best_metric": "val_hidden_genes"}},
            "environment": {"torch": "2.99.1"},
        },
    )
    write(folder / "model/config.json", {"vocabulary_digest": "cafe" * 16})
    (folder / "evaluate").mkdir(parents=True, exist_ok=True)
    results.write(folder / "evaluate/metrics.json", evaluation)
    write(folder / "evaluate/umap.tsv", "dataset\tobs_name\tlabel\tx\ty\theldout\tbatch\n"
           f"pbmc\tc1\t{EVIL}\t0.5\t1\t1\t1\npbmc\tc2\tB $x_$\t1\t2\t0\t{EVIL}\npbmc\tc3\t\t2\t2\t0\t\n")  # fmt: skip
    return folder


def make_corpus(folder: Path) -> Path:
    bins = {"edges": [1.0, 10.0, 100.0], "before": [5, 300], "after": [0, 300]}
    write(folder / "cells/pbmc.json", {
        "dataset": EVIL, "source": {"file": "raw.h5ad", "sha256": "abcdef0123456789", "counts": "X"},
        "cells": {"in": 305, "out": 300, "dropped": {"min_genes": 5, "no counts": 0}},
        "genes": {"in": 1000, "out": 900},
        "coverage": {"frac": 0.973, "reference": "human", "ortholog_frac": 0.8},
        "histograms": {"n_genes": bins, "mito_frac": bins | {"edges": [0, 0.1, 0.2]}},
    })  # fmt: skip
    write(folder / "vocabulary.tsv", "token_id\tgene_id\tsymbol\tn_cells\tmedian\n0\t<pad>\t\t\t\n1\t<mask>\t\t\t\n"
           "2\tENSG1\tA\t3\t1\n")  # fmt: skip
    split = {"n_obs": 240, "nnz": 9999, "shards": [{"name": "train-0"}]}
    write(folder / "shards/manifest.json", {
        "fingerprint": "f00d" * 16, "vocabulary": {"digest": "cafe" * 16}, "splits": {"train": split},
    })  # fmt: skip
    return folder
