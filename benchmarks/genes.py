"""What models know of genes: hidden expression, gene sets, regulation; datasets x models, by the
workflow.

    python benchmarks/genes.py FOLDER [--datasets kang_wide] [--models profile] [--seeds 3] [--cores 2] [--out F]

FOLDER has one .h5ad for each entry of `DATASETS`. Gene sets, transcription factors and edges are
made without a network and are no more than that: families of gene names, and regulations of blood
cells from textbooks. A table that was interrupted goes on where it stopped, in `--out`. Figures are
means over pretraining seeds, ± their standard deviation; below each table stand the verdicts of
each seed.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import anndata as ad
import quality
from origin import commit, machine
from workflow_runs import (
    SECTIONS,
    metrics_file,
    result,
    seeded_runs,
    snakemake,
    tables,
    write,
    write_config,
)

DATASETS: dict[str, dict[str, str]] = {"pbmc_donor_a": {}, "kang_wide": {"condition": "condition"}}
MODELS: dict[str, dict[str, Any]] = {
    "profile": quality.MODELS["profile"],
    "profile-query": quality.MODELS["profile"] | {"objective": {"name": "query_decoding"}},
    "encoder-masked": {
        "model": quality.ENCODER,
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


def write_runs(
    folder: Path, data: Path, datasets: list[str], models: list[str], seeds: int
) -> dict[str, list[str]]:
    """Write the gene files, of the genes of all datasets, and config/; returns the runs of each
    dataset and model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    symbols = sorted(
        {
            str(gene)
            for name in DATASETS
            for gene in ad.read_h5ad(data / f"{name}.h5ad", "r").var_names
        }
    )
    sets = {
        name: [gene for gene in symbols if gene.startswith(of)] for name, of in FAMILIES.items()
    }
    write(
        folder / "sets.gmt",
        "".join("\t".join([name, "by name", *genes]) + "\n" for name, genes in sets.items()),
    )
    write(
        folder / "factors.txt", "".join(f"{gene}\n" for gene in symbols if gene.startswith(FACTORS))
    )
    edges = "".join(
        f"{factor}\t{gene}\n" for factor, targets in EDGES.items() for gene in targets.split()
    )
    write(folder / "edges.tsv", edges)
    rows = [
        f"{name}\t{(data / name).resolve()}.h5ad\tX\t{DATASETS[name].get('condition', '')}"
        for name in datasets
    ]
    corpora = {name: {"table": "config/datasets.tsv", "datasets": [name]} for name in datasets}
    made = {
        f"{dataset}, {model}": seeded_runs(
            f"{dataset}-{model}", {"corpus": dataset} | MODELS[model], seeds
        )
        for dataset in datasets
        for model in models
    }
    runs = {run: options for of in made.values() for run, options in of.items()}
    train = SECTIONS["train"] | {"optimizer": "muon", "steps": 400, "checkpoint_every_steps": 400}
    table = ["dataset\tpath\tcounts\tcondition", *rows]
    write_config(folder, table, corpora=corpora, train=train, evaluate={"tasks": TASKS}, runs=runs)
    return {title: [*of] for title, of in made.items()}


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=DATASETS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = given.out or Path(tempfile.mkdtemp(prefix="genes-"))
    made = write_runs(folder, given.data, given.datasets, given.models, given.seeds)
    snakemake(folder, [metrics_file(run) for runs in made.values() for run in runs], given.cores)
    print(f"`python benchmarks/genes.py {' '.join(sys.argv[1:])}`, commit {commit()}, {machine()}")
    for task in TASKS:
        results = {
            title: [result(folder, run, title.partition(",")[0], task) for run in runs]
            for title, runs in made.items()
        }
        print(f"\n## {task}\n")
        print("\n".join(tables(results)))


if __name__ == "__main__":
    main()
