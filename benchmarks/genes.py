"""What models know of genes: hidden expression, gene sets, regulation; datasets x models, by the workflow.

    python benchmarks/genes.py FOLDER [--datasets kang_wide] [--models profile] [--cores 1] [--out F]

FOLDER has one .h5ad for each entry of `DATASETS`. Gene sets, transcription factors and edges are made without a network
and are no more than that: families of gene names, and regulations of blood cells from textbooks. A table that was
interrupted goes on where it stopped, in `--out`. Every figure is of one pretraining seed, from metrics.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import anndata as ad
import yaml

ROOT = Path(__file__).resolve().parents[1]
DATASETS: dict[str, dict[str, str]] = {"pbmc_donor_a": {}, "kang_wide": {"condition": "condition"}}
PROFILE = {"family": "profile", "hidden": 128, "layers": 1}
ENCODER = {"family": "encoder", "hidden": 64, "layers": 2, "heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "profile": {"model": PROFILE, "objective": {"name": "cell_decoding"}, "train": {"optimizer": "adamw"}},
    "profile-query": {"model": PROFILE, "objective": {"name": "query_decoding"}, "train": {"optimizer": "adamw"}},
    "encoder-masked": {
        "model": ENCODER,
        "objective": {"name": "masked_value", "renormalize": True},
        "tokens": {"zero_frac": 0.3},
    },
}
FAMILIES = {
    "RPL": ("RPL",),
    "RPS": ("RPS",),
    "mitochondrial genome": ("MT-",),
    "HLA": ("HLA-",),
    "NADH dehydrogenase": ("NDUF",),
    "proteasome": ("PSMA", "PSMB", "PSMC", "PSMD"),
    "mitochondrial ribosome": ("MRPL", "MRPS"),
    "initiation factors": ("EIF",),
    "ubiquitin conjugation": ("UBE2",),
}
FACTORS = (
    "ZNF",
    "IRF",
    "STAT",
    "KLF",
    "FOX",
    "SOX",
    "GATA",
    "E2F",
    "TBX",
    "NFKB",
    "ETS",
    "ETV",
    "RUNX",
    "SMAD",
    "CEBP",
)
"""Beginnings of names of transcription factors."""
EDGES = {
    "CIITA": "HLA-DRA HLA-DRB1 HLA-DRB5 HLA-DPA1 HLA-DPB1 HLA-DQA1 HLA-DQB1 HLA-DMA HLA-DMB HLA-DOA CD74",
    "NLRC5": "HLA-A HLA-B HLA-C HLA-E HLA-F B2M TAP1 PSMB8 PSMB9",
    "STAT1": "ISG15 IFI6 IFI44 IFI44L IFIT1 IFIT2 IFIT3 MX1 MX2 OAS1 OAS2 OAS3 OASL IRF1 IRF7 GBP1 GBP2 TAP1 PSMB9",
    "IRF7": "ISG15 IFIT1 IFIT3 MX1 OAS1 IFI6 IFI35 IFITM1 IFITM3",
    "SPI1": "LYZ CST3 FCN1 CD14 FCER1G TYROBP CSF1R ITGAM CTSS AIF1 LST1 SERPINA1",
    "CEBPB": "S100A8 S100A9 S100A12 LYZ FCN1 IL1B CD14 VCAN",
    "PAX5": "CD79A CD79B CD19 MS4A1 BLK BLNK BANK1 CD22 TCL1A",
    "TBX21": "GZMB PRF1 IFNG NKG7 CCL5 GNLY FGFBP2 CST7",
    "TCF7": "CCR7 LEF1 IL7R SELL CD27 MAL",
}
TASKS = {
    "imputation": {},
    "gene_embedding": {"gene_sets": "sets.gmt", "transcription_factors": "factors.txt"},
    "grn": {"edges": "edges.tsv"},
}


def write_inputs(folder: Path, data: Path, datasets: list[str], models: list[str]) -> list[str]:
    """Write the gene files, of the genes of all datasets, and config/; returns the files that Snakemake has to make."""
    (folder / "config").mkdir(parents=True, exist_ok=True)
    symbols = sorted({str(gene) for name in DATASETS for gene in ad.read_h5ad(data / f"{name}.h5ad", "r").var_names})
    sets = {name: [gene for gene in symbols if gene.startswith(of)] for name, of in FAMILIES.items()}
    _write(folder / "sets.gmt", "".join("\t".join([name, "by name", *genes]) + "\n" for name, genes in sets.items()))
    _write(folder / "factors.txt", "".join(f"{gene}\n" for gene in symbols if gene.startswith(FACTORS)))
    edges = "".join(f"{factor}\t{gene}\n" for factor, targets in EDGES.items() for gene in targets.split())
    _write(folder / "edges.tsv", edges)
    rows = [f"{name}\t{(data / name).resolve()}.h5ad\tX\t{DATASETS[name].get('condition', '')}\n" for name in datasets]
    _write(folder / "config" / "datasets.tsv", "dataset\tpath\tcounts\tcondition\n" + "".join(rows))
    corpora = {name: {"table": "config/datasets.tsv", "datasets": [name]} for name in datasets}
    runs = {f"{dataset}-{model}": {"corpus": dataset} | MODELS[model] for dataset in datasets for model in models}
    train = {"global_batch": 32, "token_budget": 32768, "warmup_steps": 20, "optimizer": "muon", "lr": 5e-3}
    tree = {
        "corpora": corpora,
        "shard": {"val_frac": 0.1, "test_frac": 0.3},
        "tokens": {"tokenizer": "continuous", "max_tokens": 512},
        "parallel": {"precision": "32-true"},  # a CPU emulates bfloat16
        "train": train | {"steps": 400, "checkpoint_every_steps": 400, "val_every_steps": 100, "val_cells": 100},
        "evaluate": {"tasks": TASKS},
        "runs": runs,
    }
    _write(folder / "config" / "config.yaml", yaml.safe_dump(tree, sort_keys=False))
    return [f"results/runs/{run}/evaluate/metrics.json" for run in runs]


def _write(path: Path, text: str) -> None:
    """Write, unless the file has this text: a newer one would be evaluated again."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def lines(folder: Path, dataset: str, model: str) -> dict[str, list[str]]:
    """Rows of the table of each task."""
    metrics = json.loads((folder / f"results/runs/{dataset}-{model}/evaluate/metrics.json").read_text())
    made: dict[str, list[str]] = {}
    for task, result in metrics["datasets"][dataset]["tasks"].items():
        columns = [key for key in result["rows"][0] if not key.endswith(("_sd", "_repetitions", "name", "kind"))]
        made[task] = [f"| data | model | row | {' | '.join(key.removesuffix('_mean') for key in columns)} |"]
        made[task].append(f"|---|---|---|{'---:|' * len(columns)}")
        for row in result["rows"]:
            values = " | ".join("" if row.get(key) is None else f"{row[key]:.3f}" for key in columns)
            made[task].append(f"| {dataset} | {model} | {row['name']} | {values} |")
        made[task] += [f"- {dataset}, {model}: {sentence}" for sentence in result["sentences"]]
        made[task].append(f"- {dataset}, {model}: {result['figures']}")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=DATASETS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="genes-"))
    targets = write_inputs(folder, arguments.data, arguments.datasets, arguments.models)
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--quiet", "all"]
    command += ["--cores", str(arguments.cores), "--scheduler", "greedy", "--set-threads", "train=1", "plan=1"]
    command += ["embed=1", "evaluate=1", "--set-resources", "train:nproc_per_node=1", "train:cpus_per_task=1", "--"]
    log, environment = folder / "snakemake.log", os.environ | {"OMP_NUM_THREADS": "1"}
    with open(log, "w") as file:
        done = subprocess.run([*command, *targets], cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"the workflow failed; see {log}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    print(f"`python benchmarks/genes.py {' '.join(sys.argv[1:])}`, commit {commit.strip()}, {platform.machine()}\n")
    for task in TASKS:
        print(f"## {task}\n")
        for dataset in arguments.datasets:
            for model in arguments.models:
                print("\n".join(lines(folder, dataset, model)[task]), end="\n\n")


if __name__ == "__main__":
    main()
