"""Checks for the author of a plug-in: the promises that cellmill keeps for its own parts.

def test_my_family_keeps_the_promises(tmp_path):
    model = {"family": "mine", "hidden": 16}
    check_plugin(tmp_path, {"model.hidden": 8}, model=model, objective={"name": "masked_value"})
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_origin

import anndata as ad
import numpy as np
from pydantic import BaseModel
from safetensors.numpy import load_file

from cellmill.cli import main
from cellmill.config.options import TrainOptions
from cellmill.runs.folder import read_lines

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"sharding_strategy": "FULL_SHARD"},
    "tp": {"tp": 2, "sequence_parallel": True},
    "pp": {"pp": 2},
}
"""Sections `parallel` of two processes, one for each axis."""
STEPS = 6
TOLERANCE = 5e-6
SECTIONS: dict[str, dict[str, Any]] = {
    "tokens": {"max_tokens": 48},
    "stream": {"lanes": 4, "block_cells": 8, "window_blocks": 4},
    "train": {
        "steps": STEPS,
        "global_batch": 16,
        "token_budget": 4096,
        "warmup_steps": 2,
        "schedule": "constant",
    }
    | {"log_every_steps": 1, "val_every_steps": STEPS},
}
CONFIG = """
corpora: {sim: {table: TABLE}}
preprocess: {min_genes: 5, min_cells: 1}
shard: {cells_per_shard: 100, val_frac: 0.15, test_frac: 0.15}
train: {steps: 1}
runs: {sim: {corpus: sim}}
"""


def check_plugin(
    folder: Path,
    changes: Mapping[str, Any],
    layouts: Mapping[str, dict[str, Any]] = LAYOUTS,
    **sections: Any,
) -> None:
    """Train small models on 240 simulated cells, on the CPU, and assert the promises.

    Columns of obs are cell_type (4 levels), batch (2) and donor (4); fraction_1 and fraction_2, shares
    of a cell's counts in two sets of genes, are numbers from 0 to 1. The promises:

    - each of `layouts` has the losses and gradient norms of one process,
    - a resumed run has the curve and the exported model of an uninterrupted run: to the bit in one
      process, and nearly so in the last of `layouts`,
    - every option that the plug-in adds to `sections` is read: its value in `changes` gives another
      curve.

    Args:
        folder: an empty folder, such as pytest's `tmp_path`
        changes: another value for each of these options, by path, such as `train.optimizer.decay`
        layouts: sections `parallel` of two processes that the plug-in supports; a family without
            pipelines, or whose blocks pass on cells, such as `profile`, leaves out `pp` and
            `sequence_parallel`
        sections: sections of the configuration that training reads (`model`, `objective`, `tokens`,
            `finetune`, `train`), which replace options of SECTIONS
    """
    unread = sorted(sections.keys() - TrainOptions.model_fields.keys())
    assert not unread, f"expected sections that training reads, got {unread}, which it does not"
    options = {
        name: SECTIONS.get(name, {}) | sections.get(name, {}) for name in TrainOptions.model_fields
    }
    missing = {*list_added_options(TrainOptions.model_validate(options))} - changes.keys()
    assert not missing, (
        f"expected another value of every option in `changes`, got none of {sorted(missing)}"
    )
    (folder / "corpus").mkdir(parents=True)
    run(
        folder / "corpus",
        "simulate --out @/raw.h5ad --cells 240 --genes 120 --types 4 --batches 2 --seed 1",
    )
    add_numbers(folder / "corpus" / "raw.h5ad")
    corpus = write_shards(folder / "corpus", "raw.h5ad")

    single = train(corpus, folder / "alone", options)
    assert len(single) == np.isfinite(single).all(1).sum() == STEPS, single
    for name, parallel in layouts.items():
        curve = train(corpus, folder / name, options | {"parallel": parallel}, processes=2)
        np.testing.assert_allclose(
            curve, single, rtol=TOLERANCE, err_msg=f"layout {name} trains another model"
        )
    expected = export(corpus, folder / "alone")
    train(corpus, folder / "half", change_option(options, "train.steps", STEPS // 2))
    last_layout = list(layouts.items())[-1:]
    for name, parallel in [("one process", {}), *last_layout]:
        resumed = shutil.copytree(folder / "half", folder / f"resumed, {name}")
        processes = 2 if parallel else 1
        tolerance = TOLERANCE if parallel else 0.0
        curve = train(corpus, resumed, options | {"parallel": parallel}, processes)
        np.testing.assert_allclose(
            curve, single, rtol=tolerance, err_msg=f"a run resumed in {name}"
        )
        tensors = export(corpus, resumed)
        assert tensors.keys() == expected.keys()
        vectors = tensors["embeddings"]
        np.testing.assert_allclose(vectors, expected["embeddings"], rtol=1e-3, atol=1e-4)
        if not parallel:
            for tensor, values in tensors.items():
                assert np.array_equal(values, expected[tensor]), (
                    f"the export of a resumed run has another {tensor}"
                )
    for path, value in changes.items():
        curve = train(corpus, folder / f"changed {path}", change_option(options, path, value))
        assert not np.array_equal(curve, single), (
            f"{path}: {value!r} changes no loss and no gradient norm"
        )


def list_added_options(section: BaseModel, path: str = "") -> Iterator[str]:
    """Yield paths of the options that other packages add, without the option that names a choice."""
    bases = [base for base in type(section).__mro__ if issubclass(base, BaseModel)]
    ours = next(base for base in bases if base.__module__.split(".")[0] in ("cellmill", "pydantic"))
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from list_added_options(value, f"{path}{name}.")
        elif name not in ours.model_fields and get_origin(field.annotation) is not Literal:
            yield path + name


def change_option(options: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy of `options` with another value at `path`."""
    name, _, rest = path.partition(".")
    return options | {name: change_option(options[name], rest, value) if rest else value}


def run(folder: Path, words: str) -> None:
    """Run a sub-command of cellmill in this process; `@` in its words is `folder`."""
    assert main([word.replace("@", str(folder)) for word in words.split()]) == 0, (
        f"cellmill {words} failed in {folder}"
    )


def add_numbers(path: Path) -> None:
    """Add fraction_1 and fraction_2 to obs: shares of counts in the first 30 genes and the next 30."""
    cells = ad.read_h5ad(path)
    total = cells.X.sum(1)
    cells.obs["fraction_1"] = cells.X[:, :30].sum(1) / total
    cells.obs["fraction_2"] = cells.X[:, 30:60].sum(1) / total
    cells.write_h5ad(path)


def write_shards(folder: Path, raw: str, config: str = CONFIG) -> Path:
    """Write sim.h5ad, vocabulary.tsv and shards/manifest.json of the file `raw`; return `folder`."""
    (folder / "datasets.tsv").write_text(f"dataset\tpath\nsim\t{raw}\n")
    (folder / "config.yaml").write_text(config.replace("TABLE", str(folder / "datasets.tsv")))
    given = "--config @/config.yaml --corpus sim"
    cells = "--cells @/sim.h5ad"
    run(
        folder,
        f"preprocess {given} --dataset sim --input @/{raw} --out @/sim.h5ad --report @/report.json",
    )
    run(folder, f"vocabulary {given} {cells} --out @/vocabulary.tsv")
    run(folder, f"shard {given} {cells} --vocabulary @/vocabulary.tsv --out @/shards/manifest.json")
    return folder


def train(corpus: Path, out: Path, options: dict[str, Any], processes: int = 1) -> np.ndarray:
    """Return loss and gradient norm of each step, (steps, 2), resuming a run that has begun in `out`."""
    words = ["--options", json.dumps(options), "--nproc-per-node", str(processes)]
    words += ["--manifest", f"{corpus}/shards/manifest.json"]
    words += ["--vocabulary", f"{corpus}/vocabulary.tsv", "--out", str(out)]
    command = [sys.executable, "-m", "cellmill.cli", "train", *words]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    lines = [line for line in read_lines(out / "metrics.jsonl") if "loss" in line]
    return np.array([[line["loss"], line["grad_norm"]] for line in lines])


def export(corpus: Path, out: Path) -> dict[str, np.ndarray]:
    """Return tensors of the exported last checkpoint, and embeddings of the corpus as `embeddings`."""
    model = out.with_name(f"{out.name}, model")
    last = '{"consolidate":{"checkpoint":"last"}}'
    consolidate = ["consolidate", "--options", last, "--vocabulary", f"{corpus}/vocabulary.tsv"]
    assert main([*consolidate, "--train", str(out), "--out", str(model)]) == 0
    embed = ["embed", "--options", '{"embed":{}}', "--model", str(model)]
    embed += ["--input", f"{corpus}/sim.h5ad", "--out", f"{model}/embedded.h5ad"]
    assert main(embed) == 0
    vectors = ad.read_h5ad(model / "embedded.h5ad").obsm["X_cellmill"]
    return load_file(model / "model.safetensors") | {"embeddings": vectors}
