"""A finished run and a corpus, as folders that the report reads; with text that must be escaped."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cellmill.runs.verdict import Closed, Verdict, sentence

EVIL = "<script>alert(1)&"
ROWS = [
    ("embedding + logistic regression", "model", 0.80),
    ("embedding + kNN", "model", 0.75),
    ("all genes + logistic regression", "baseline", 0.84),
]
SECOND = Verdict(
    "embedding + logistic regression",
    "all genes + logistic regression",
    "accuracy",
    -0.04,
    (-0.07, -0.01),
    "behind",
)
LOST = Verdict("embedding + kNN", "PCA50 + kNN", "accuracy", -0.09, (-0.12, -0.06), "behind")
CLOSED = (
    "closes 94 % (80 to 108) of the gap from majority (0.400) to all (0.825); "
    "the best baseline, all genes, closes 104 %"
)
LOSS = "embedding + kNN is behind PCA50 + kNN by 0.090 accuracy (-0.120 to -0.060)."


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def make_run(folder: Path) -> Path:
    rows = [
        {"name": name, "kind": kind, "accuracy_mean": a, "accuracy_sd": 0.02, "macro_f1_mean": a - 0.1,
         "macro_f1_sd": 0.03, "accuracy_folds": [a, a], "macro_f1_folds": [a, a], "not_converged": 0}
        for name, kind, a in ROWS
    ]  # fmt: skip
    figures = {
        "n_cells": 90, "classes": {EVIL: 50, "B $x_$": 40}, "dropped_classes": {"<b>few": 3}, "n_unlabelled": 2,
        "folds": 5,
    }  # fmt: skip
    result: dict[str, Any] = {
        "rows": [], "metric": None, "verdicts": [], "sentences": [], "figures": {}, "skipped": None,
    }  # fmt: skip
    confusion = {
        "row": "embedding + kNN",
        "classes": [EVIL, "B $x_$"],
        "counts": [[50, 0], [10, 30]],
    }
    gap = {"column": "accuracy", "words": CLOSED, "model": asdict(Closed(ROWS[0][0], 94, 80, 108))}
    lost = {
        "verdicts": [asdict(LOST), asdict(SECOND)],
        "sentences": [LOSS, sentence(SECOND)],
        "gaps": [gap | {"column": "macro_f1"}, gap],
    }
    probe = (
        result
        | {"rows": rows, "metric": "accuracy", "figures": figures, "confusion": confusion}
        | lost
    )
    skipped = result | {"skipped": "the dataset has no label column"}
    masked = result | {"figures": {"n_cells": 95, "r2_over_gene_mean": -0.012}}
    shared = {"n_cells": 300, "n_scored": 95, "cells": "heldout", "n_without_genes": 0}
    genes = {"n_present": 75, "n_genes": 765, "expressed_frac": 0.213, "absent": ["CD3D"]}
    datasets = {
        "pbmc": shared
        | {
            "genes": genes,
            "roles": {"label": "type"},
            "tasks": {"probe": probe, "reconstruct": masked},
        },
        "bare": shared | {"roles": {}, "tasks": {"probe": skipped, "reconstruct": masked}},
    }
    write(folder / "plan.json", {"parameters": 1234567, "steps": 200, "hours": 0.5})
    write(
        folder / "train/status.json",
        {"state": "done", "step": 199, "cells": 6368, "best_val_loss": 0.4321},
    )
    write(folder / "train/metrics.jsonl", '{"step": 1, "loss": 2.0, "peak_resident_gb": [0.5, 0.7123]}\n'
           '{"step": 2, "loss": 1.5, "peak_resident_gb": [0.6, 0.7]}\n'
           '{"step": 2, "val_loss": 1.6}\n{"step": 3, "lo')  # fmt: skip
    write(
        folder / "train/run.json",
        {"options": {"train": {"lr": 0.001}}, "environment": {"torch": "2.99.1"}},
    )
    write(folder / "model/config.json", {"vocabulary_digest": "cafe" * 16})
    write(
        folder / "evaluate/metrics.json", {"model": {"digest": "beef" * 16}, "datasets": datasets}
    )
    write(folder / "evaluate/umap.tsv", "dataset\tobs_name\tlabel\tx\ty\theldout\tbatch\n"
           f"pbmc\tc1\t{EVIL}\t0.5\t1\t1\t1\npbmc\tc2\tB $x_$\t1\t2\t0\t{EVIL}\npbmc\tc3\t\t2\t2\t0\t\n")  # fmt: skip
    return folder


def make_corpus(folder: Path) -> Path:
    bins = {"edges": [1.0, 10.0, 100.0], "before": [5, 300], "after": [0, 300]}
    write(folder / "cells/pbmc.json", {
        "dataset": EVIL, "source": {"file": "raw.h5ad", "sha256": "abcdef0123456789", "counts": "X"},
        "cells": {"in": 305, "out": 300, "dropped": {"min_genes": 5, "no counts": 0}},
        "genes": {"in": 1000, "out": 900}, "coverage": {"frac": 0.973},
        "histograms": {"n_genes": bins, "mito_frac": bins | {"edges": [0, 0.1, 0.2]}},
    })  # fmt: skip
    write(folder / "vocabulary.tsv", "token_id\tgene_id\tsymbol\tn_cells\tmedian\n0\t<pad>\t\t\t\n1\t<mask>\t\t\t\n"
           "2\tENSG1\tA\t3\t1\n")  # fmt: skip
    split = {"n_obs": 240, "nnz": 9999, "shards": [{"name": "train-0"}]}
    write(folder / "shards/manifest.json", {
        "fingerprint": "f00d" * 16, "vocabulary": {"digest": "cafe" * 16}, "splits": {"train": split},
    })  # fmt: skip
    return folder
