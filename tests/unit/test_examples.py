"""Every run of every example trains: a tiny copy of it, on simulated cells or sequences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anndata as ad
import pytest
import yaml

from cellmill.cli import main
from cellmill.config.load import load_config
from cellmill.config.sweep import expand
from tests.distributed.pool import Pool

ROOT = Path(__file__).resolve().parents[2]
FILES = [ROOT / "config" / "config.yaml", *sorted((ROOT / "config" / "examples").glob("*.yaml"))]
SMALLER = {"hidden": 16, "layers": 2, "heads": 2, "latent": 8}
STEPS = {"steps": 2, "epochs": None, "global_batch": 16, "token_budget": 2048, "warmup_steps": 1, "val_every_steps": 2}


def _runs() -> list[Any]:
    """Every run of every file; of a sweep, the first and the last."""
    trees = {path: yaml.safe_load(path.read_text(encoding="utf-8")) for path in FILES}
    runs = {path: list(tree.get("runs", {})) for path, tree in trees.items()}
    for path, tree in trees.items():
        for of_sweep in expand(tree.get("sweep", {}), {})[1].values():
            runs[path] += [next(iter(of_sweep)), list(of_sweep)[-1]]
    return [pytest.param(path, run, id=f"{path.stem}-{run}") for path, names in runs.items() for run in names]


def _tiny(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a run with few small steps, in one process."""
    model = options["model"] | {key: value for key, value in SMALLER.items() if options["model"].get(key)}
    changed = {"model": model, "parallel": {}, "stream": {"lanes": 2, "block_cells": 8, "window_blocks": 2}}
    changed["tokens"] = options["tokens"] | {"max_tokens": min(48, options["tokens"]["max_tokens"])}
    changed["train"] = options["train"] | STEPS
    return options | changed


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of a corpus of cells and of one of sequences."""
    made = {}
    for kind, suffix, keep in (("cells", "h5ad", "min_genes: 1"), ("sequences", "fasta", "min_counts: 1")):
        folder = made[kind] = tmp_path_factory.mktemp(kind)
        raw, cells, genes = (folder / name for name in (f"raw.{suffix}", "cells.h5ad", "vocabulary.tsv"))
        (folder / "table.tsv").write_text(f"dataset\tpath\nsim\t{raw}\n")
        config = folder / "config.yaml"
        config.write_text(
            f"corpora: {{sim: {{table: {folder}/table.tsv}}}}\npreprocess: {{{keep}}}\nshard: {{val_frac: 0.2}}\n"
            "tokens: {tokenizer: rank}\nobjective: {name: masked_gene}\nruns: {a: {corpus: sim}}\ntrain: {steps: 1}\n"
        )
        shared = f"--config {config} --corpus sim"
        assert (
            main(
                f"simulate --out {raw} --cells 120 {'--genes 90 --perturbations 5' if kind == 'cells' else ''}".split()
            )
            == 0
        )
        if kind == "cells":
            _with_labels_of_the_demo(raw)
        for command in (
            f"preprocess {shared} --input {raw} --dataset sim --out {cells} --report {folder}/qc.json",
            f"vocabulary {shared} --cells {cells} --out {genes}",
            f"shard {shared} --cells {cells} --vocabulary {genes} --out {folder}/shards/manifest.json",
        ):
            assert main(command.split()) == 0
    return made


def _with_labels_of_the_demo(raw: Path) -> None:
    adata = ad.read_h5ad(raw)
    adata.obs = adata.obs.rename(columns={"cell_type": "bulk_labels"})
    adata.write_h5ad(raw)


@pytest.fixture(scope="module")
def process() -> Iterator[Pool]:
    pool = Pool(1, 1)
    yield pool
    pool.close()


@pytest.mark.parametrize(("path", "run"), _runs())
def test_the_example_trains(
    path: Path, run: str, corpora: dict[str, Path], process: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # examples name their tables from there
    options = load_config(path).section("train", run)
    if options["model"]["family"] == "hf" and find_spec("transformers") is None:
        pytest.skip("the package transformers is not installed")
    kind = "sequences" if options["tokens"]["tokenizer"] == "sequence" else "cells"
    lines = process.run("logged", corpus=str(corpora[kind]), options=_tiny(options), folder=str(tmp_path), steps=2)[0]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 2
    assert losses[0] != losses[1]
    assert all(math.isfinite(value) for line in lines for key, value in line.items() if "loss" in key)
    assert any("val_loss" in line for line in lines)
