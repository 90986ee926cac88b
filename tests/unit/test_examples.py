"""Every run of every example does what its file says: a tiny copy of it, on simulated cells or
sequences.

A run begins with the exported model of the run that its `init_from` names; one with labels or
numbers predicts them.
"""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from cellmill.cli import main
from cellmill.config.load import load_config
from cellmill.config.options import TrainOptions
from cellmill.config.workflow import expand
from cellmill.data.shards.manifest import Manifest
from cellmill.stages.training_inputs import check_architecture, check_genes, fit_options
from cellmill.testing import write_shards
from tests.distributed import cases
from tests.distributed.pool import Pool

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = ("published-to-predictions",)
"""Names of the files that run whole in a test of their own: tests/workflow/test_published.py."""
EXAMPLES = sorted(
    path for path in (ROOT / "config" / "examples").glob("*.yaml") if path.stem not in ELSEWHERE
)
FILES = [ROOT / "config" / "config.yaml", *EXAMPLES]
SMALLER = {"hidden": 16, "layers": 2, "heads": 2, "latent": 8}
STEPS = {"steps": 2, "epochs": None, "global_batch": 16, "token_budget": 2048, "warmup_steps": 1}
QUICK = ("config", "autoregressive", "finetune-lora", "perturbation", "protein")
"""Names of the files whose runs are in `make test`."""
LEARNED = 60  # steps after which a tiny model is sure of some labels


def _runs() -> list[Any]:
    """Every run of every file; of a sweep, the first and the last."""
    found = []
    for path in FILES:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        names = list(tree.get("runs", {}))
        for swept in expand(tree.get("sweep", {}), {})[1].values():
            names += [next(iter(swept)), list(swept)[-1]]
        # in one worker: a run may start from another one
        quick = pytest.mark.xdist_group("examples")
        marks = (
            quick
            if path.stem in QUICK
            else [pytest.mark.full, pytest.mark.xdist_group("all examples")]
        )
        found += [pytest.param(path, run, id=f"{path.stem}-{run}", marks=marks) for run in names]
    return found


CONFIG = """
corpora: {sim: {table: TABLE}}
shard: {val_frac: 0.2}
tokens: {tokenizer: rank}
objective: {name: masked_gene}
runs: {a: {corpus: sim}}
train: {steps: 1}
"""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of a corpus of cells, of one of the same cells with half of their genes, and of one of
    sequences.
    """
    made = {kind: tmp_path_factory.mktemp(kind) for kind in ("cells", "panel", "sequences")}
    raw = made["cells"] / "raw.h5ad"
    assert main(f"simulate --out {raw} --cells 120 --genes 90 --perturbations 5".split()) == 0
    adata = ad.read_h5ad(raw)  # with the labels of the demo
    few = adata.obs["cell_type"].where(np.arange(len(adata)) % 3 == 0)
    adata.obs = adata.obs.assign(
        bulk_labels=adata.obs["cell_type"], cell_type=few, phase=adata.obs["batch"]
    )
    adata.write_h5ad(raw)
    shutil.copy(raw, made["panel"])
    assert main(f"simulate --out {made['sequences']}/raw.fasta --cells 120".split()) == 0
    write_shards(made["cells"], "raw.h5ad", CONFIG + "preprocess: {min_genes: 1}\n")
    write_shards(
        made["panel"],
        "raw.h5ad",
        CONFIG + "preprocess: {min_genes: 1}\nvocabulary: {max_genes: 45}\n",
    )
    write_shards(made["sequences"], "raw.fasta", CONFIG + "preprocess: {min_counts: 1}\n")
    return made


@pytest.fixture(scope="module")
def process() -> Iterator[Pool]:
    with closing(Pool(1, 1)) as pool:
        yield pool


@dataclass(frozen=True)
class Trained:
    """A tiny run that has ended."""

    folder: Path
    corpus: Path
    init_from: Path | None
    options: dict[str, Any]
    first: dict[str, np.ndarray]
    lines: list[dict[str, float]]

    @property
    def model(self) -> Path:
        """Folder of the exported model."""
        out = self.folder / "model"
        if not out.exists():
            (self.folder / "run.json").write_text(
                json.dumps({"manifest": f"{self.corpus}/shards/manifest.json"})
            )
            cases.exported(str(self.corpus), self.folder, out)
        return out


class Runs:
    """Tiny runs of examples, each trained once, after those that they start from."""

    def __init__(self, corpora: dict[str, Path], process: Pool, folder: Path) -> None:
        self.corpora = corpora
        self.process = process
        self.folder = folder
        self.trained: dict[tuple[Path, str], Trained] = {}

    def train(self, path: Path, run: str) -> Trained:
        if (path, run) not in self.trained:
            self.trained[path, run] = self._train(path, run)
        return self.trained[path, run]

    def _train(self, path: Path, run: str) -> Trained:
        if "family: hf" in path.read_text() and find_spec("transformers") is None:
            pytest.skip("the package transformers is not installed")
        config = load_config(path)
        entry = config.runs[run]
        options = config.section("train", run)
        few = config.section("vocabulary", entry.corpus)["vocabulary"]["max_genes"]
        kind = (
            "sequences"
            if options["tokens"]["tokenizer"] == "sequence"
            else "cells"
            if few is None
            else "panel"
        )
        corpus = self.corpora[kind]
        folder = self.folder / path.stem / run
        init_from = None if entry.init_from is None else self.train(path, entry.init_from).model
        steps = STEPS["steps"] if entry.predict.min_accuracy is None else LEARNED
        # what `train` takes from vocabulary, shards and first weights, which it checks
        vocabulary = corpus / "vocabulary.tsv"
        shards = Manifest.read(corpus / "shards" / "manifest.json")
        tiny = fit_options(TrainOptions.model_validate(_tiny(options, steps)), vocabulary, shards)
        if init_from is not None:
            check_architecture(tiny, init_from)
            check_genes(tiny, init_from, vocabulary)
        given = {
            "corpus": str(corpus),
            "options": tiny.model_dump(mode="json"),
            "folder": str(folder),
            "steps": steps,
        }
        [found] = self.process.run(
            "trained", init_from=None if init_from is None else str(init_from), **given
        )
        return Trained(
            folder, corpus, init_from, given["options"], dict(found["first"]), found["lines"]
        )


def _tiny(options: dict[str, Any], steps: int) -> dict[str, Any]:
    """Options of a run with few small steps, in one process."""
    changed = {
        "model": {key: value for key, value in SMALLER.items() if options["model"].get(key)},
        "stream": {"lanes": 2, "block_cells": 8, "window_blocks": 2},
        "finetune": {"head_steps": 1, "block_steps": 1}
        if options["finetune"].get("head_steps")
        else {},
        "tokens": {"max_tokens": min(48, options["tokens"]["max_tokens"])},
        "train": STEPS | {"steps": steps, "val_every_steps": steps},
    }
    return (
        options
        | {"parallel": {}}
        | {section: options[section] | keys for section, keys in changed.items()}
    )


@pytest.fixture(scope="module")
def runs(corpora: dict[str, Path], process: Pool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(corpora, process, tmp_path_factory.mktemp("runs"))


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # examples name their tables from there


@pytest.mark.parametrize(("path", "run"), _runs())
def test_the_example_predicts_with_a_trained_model(
    path: Path, run: str, runs: Runs, tmp_path: Path
) -> None:
    trained = runs.train(path, run)
    losses = [line["loss"] for line in trained.lines if "loss" in line]
    assert len(losses) >= 2
    assert losses[0] != losses[1]
    assert all(
        math.isfinite(value)
        for line in trained.lines
        for key, value in line.items()
        if "loss" in key
    )
    assert any("val_loss" in line for line in trained.lines)
    if trained.options["stream"]["weight_by"] == "cell_type":
        shares = [line["labelled_frac_classification"] for line in trained.lines if "loss" in line]
        assert shares == pytest.approx(len(shares) * [0.5], abs=0.25)
    if trained.init_from is not None:
        theirs = load_file(trained.init_from / "model.safetensors")
        same = [
            name
            for name in trained.first.keys() & theirs
            if trained.first[name].shape == theirs[name].shape
        ]
        assert any(name.startswith("blocks.") for name in same)
        for name in same:  # the others have rows of genes that the model lacks
            np.testing.assert_array_equal(trained.first[name], theirs[name], err_msg=name)
    objective = trained.options["objective"]
    names = {objective["name"], *objective.get("parts", {})}
    if names & {"classification", "regression"}:
        _check_predictions(
            trained, load_config(path).section("predict", run), names, tmp_path / "predicted.h5ad"
        )


def _check_predictions(
    trained: Trained, options: dict[str, Any], names: set[str], out: Path
) -> None:
    """`predict` writes labels, with their probabilities, or numbers of every cell."""
    cells = trained.corpus / "sim.h5ad"
    words = [
        "predict",
        "--options",
        json.dumps(options),
        "--model",
        str(trained.model),
        "--input",
        str(cells),
    ]
    assert main([*words, "--out", str(out)]) == 0
    found = ad.read_h5ad(out)
    assert len(found) == len(ad.read_h5ad(cells, backed="r"))
    if "regression" in names:
        assert np.isfinite(found.obs["cellmill_value"]).all()
    if "classification" in names:
        known = {*found.uns["cellmill_prediction"]["labels"]}
        assert {*found.obs["cellmill_label"].dropna()} <= known
        assert {*found.obs["cellmill_label"]} & known
        np.testing.assert_allclose(
            np.asarray(found.obsm["cellmill_probabilities"]).sum(1), 1, atol=1e-5
        )
