"""Responses to perturbations, and in batches, that were held out: task `perturbation` x seeds, by
the workflow.

    python benchmarks/perturbations.py FOLDER/papalexi.h5ad [--seeds 3] [--splits 0 1 2] [--settings controls]
        [--co_expression FOLDER/kang_wide.h5ad …] [--cores 2] [--out F]

Papalexi is a CRISPR screen of 25 perturbations and controls in three batches. Three settings
(`SETTINGS`):

- controls: a model of the controls alone, whose gene embeddings are features of perturbed genes for a ridge and for the
  nearest perturbations; all perturbations are tested, in folds. Priors are the co-expression of other datasets
  (`--co_expression`) and pathways from textbooks, chosen with the names of the screen in view: they show what a fitting
  prior gives, not what one of a user would. A seed is also that of folds and of halves of cells.
- response: objective perturbation_response trained on two thirds of the perturbations, tested on the others; one corpus
  for each of `--splits`.
- batch: the same objective trained in two batches, tested in the third; one corpus for each of `--splits`.

Figures are means over pretraining seeds, ± their standard deviation; below each table stand the
verdicts of each seed.
"""

import argparse
import csv
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anndata as ad
import numpy as np
import scipy.sparse as sp
from origin import commit, machine
from workflow_runs import metrics_file, result, seeded_runs, snakemake, tables, write_config

from cellmill.data.arrays import log_normalise
from cellmill.evaluate.features.components import pca
from cellmill.evaluate.features.gene_vectors import expression_statistics, scaled_loadings
from cellmill.runs.results import TaskResult

CONTROL = "non-targeting"
RESPONSE = {"name": "perturbation_response", "control": CONTROL, "batch_column": "batch"}
TABLE = "dataset\tpath\tcounts\tbatch\tperturbation\tcontrol\tfilter"
PREPROCESS = {"min_genes": 30, "max_mito_frac": 0.5}
SETTINGS = {
    "controls": "new perturbations, features of a model of the controls alone",
    "response": "new perturbations, response head",
    "batch": "a new batch, response head",
}
PATHWAYS = {
    "interferon gamma": "IFNGR1 IFNGR2 JAK2 STAT1 IRF1 IRF7",
    "interferon alpha": "STAT1 STAT2 IRF1 IRF7",
    "JAK-STAT": "IFNGR1 IFNGR2 JAK2 STAT1 STAT2 STAT3 STAT5A MYC",
    "transcription factors": "ATF2 ETV7 IRF1 IRF7 MYC POU2F2 SMAD4 SPI1 STAT1 STAT2 STAT3 STAT5A",
    "immune receptors and ligands": "CD86 PDCD1LG2 TNFRSF14 CMTM6",
    "ubiquitin": "CUL3 MARCH8 UBE2L6",
    "NF-kB": "NFKBIA",
    "chromatin": "BRD4 MYC",
    "TGF-beta": "SMAD4 ATF2",
    "caveolae": "CAV1",
}
MIN_CELLS = 10  # with a gene, of a dataset whose co-expression is a prior


def write_vectors(path: Path, names: list[str], vectors: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows(
            [name, *of_gene] for name, of_gene in zip(names, vectors.round(5))
        )


def write_priors(folder: Path, datasets: list[Path]) -> dict[str, str]:
    """Write tables of gene vectors: of pathways, and loadings of the correlation of genes over each
    dataset's cells.
    """
    genes = sorted({gene for members in PATHWAYS.values() for gene in members.split()})
    member = [[float(gene in members.split()) for members in PATHWAYS.values()] for gene in genes]
    write_vectors(folder / "priors" / "pathways.tsv", genes, np.array(member))
    for dataset in datasets:
        cells = ad.read_h5ad(dataset)
        profiles = log_normalise(sp.csr_matrix(cells.X))
        kept = np.flatnonzero(np.asarray((profiles > 0).sum(axis=0)).ravel() >= MIN_CELLS)
        standard = profiles[:, kept] @ sp.diags(1 / expression_statistics(profiles[:, kept])[:, 1])
        vectors = scaled_loadings(pca(standard.shape).fit(sp.csr_matrix(standard)))
        write_vectors(
            folder / "priors" / f"{dataset.stem}.tsv", cells.var_names[kept].tolist(), vectors
        )
    return {
        name: f"priors/{name}.tsv" for name in ("pathways", *(dataset.stem for dataset in datasets))
    }


def write_runs(
    folder: Path,
    data: Path,
    seeds: int,
    splits: list[int],
    settings: Collection[str] = tuple(SETTINGS),
    priors: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, dict[str, list[str]]]:
    """Write config/; returns the runs of each corpus, by setting."""
    line = f"{data.resolve()}\tX\tbatch\tperturbation\t{CONTROL}"
    table = [TABLE, f"screen\t{line}\t", f"controls\t{line}\tperturbation == '{CONTROL}'"]
    by_perturbation = {
        "split_by": "perturbation",
        "train_values": [CONTROL],
        "val_frac": 0.1,
        "test_frac": 0.3,
    }
    corpora: dict[str, Any] = {
        "controls": {"datasets": ["controls"], "shard": {"val_frac": 0.1, "test_frac": 0.1}}
    }
    made: dict[str, dict[str, list[str]]] = {setting: {} for setting in settings}
    for split in splits:
        corpora[f"response-{split}"] = {
            "datasets": ["screen"],
            "shard": by_perturbation | {"seed": split},
        }
        batch = {"split_by": "batch", "val_frac": 0.0, "test_frac": 0.3, "seed": split}
        corpora[f"batch-{split}"] = {"datasets": ["screen"], "shard": batch}
    runs: dict[str, Any] = {}
    corpora = {corpus: of for corpus, of in corpora.items() if corpus.partition("-")[0] in settings}
    for corpus, of in corpora.items():
        of["table"] = "config/datasets.tsv"
        setting = corpus.partition("-")[0]
        held_out = ["batch"] if setting == "batch" else ["perturbation"]
        task = {"held_out": held_out} | ({} if setting == "batch" else {"priors": dict(priors)})
        evaluate = {"datasets": ["screen"], "tasks": {"perturbation": task}}
        options = {"corpus": corpus, "evaluate": evaluate}
        options |= {} if setting == "controls" else {"objective": RESPONSE}
        of_corpus = seeded_runs(corpus, options, seeds)
        for seed, run in enumerate(of_corpus.values() if setting == "controls" else ()):
            run["evaluate"] = evaluate | {"seed": seed}
        made[setting][corpus] = [*of_corpus]
        runs |= of_corpus
    model = {"family": "profile", "hidden": 64, "layers": 1}
    train = {"epochs": 10, "global_batch": 64, "lr": 3e-3, "warmup_steps": 20}
    write_config(
        folder, table, corpora=corpora, preprocess=PREPROCESS, model=model, train=train, runs=runs
    )
    return made


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--splits", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=[*SETTINGS])
    parser.add_argument("--co_expression", type=Path, nargs="*", default=[])
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = given.out or Path(tempfile.mkdtemp(prefix="perturbations-"))
    priors = write_priors(folder, given.co_expression)
    made = write_runs(folder, given.data, given.seeds, given.splits, given.settings, priors)
    targets = [
        metrics_file(run) for corpora in made.values() for runs in corpora.values() for run in runs
    ]
    snakemake(folder, targets, given.cores)
    print(
        f"`python benchmarks/perturbations.py {' '.join(sys.argv[1:])}`, commit {commit()}, {machine()}"
    )
    for setting, corpora in made.items():
        results: dict[str, list[TaskResult]] = {
            corpus: [result(folder, run, "screen", "perturbation") for run in runs]
            for corpus, runs in corpora.items()
        }
        print(f"\n## {SETTINGS[setting]}\n")
        print("\n".join(tables(results)))


if __name__ == "__main__":
    main()
