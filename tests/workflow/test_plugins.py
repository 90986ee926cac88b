"""The whole workflow with a toy plug-in of each kind, named in the configuration and found through
entry points.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from cellmill.cli import main
from tests.workflow.conftest import Project

CONFIG: dict[str, Any] = {
    "corpora": {"sim": {"table": "config/datasets.tsv"}},
    "preprocess": {"min_genes": 5, "min_cells": 1},
    "shard": {"cells_per_shard": 100, "val_frac": 0.15, "test_frac": 0.4},
    "tokens": {"tokenizer": "toy_genes", "max_tokens": 32},
    "stream": {"lanes": 4, "block_cells": 8, "window_blocks": 4},
    "model": {"family": "toy", "hidden": 16, "layers": 1, "heads": 2},
    "objective": {"name": "toy_next_gene", "skip": 1},
    "train": {"steps": 6, "global_batch": 16, "token_budget": 2048, "warmup_steps": 2}
    | {"log_every_steps": 2, "val_every_steps": 3},
    "track": {
        "to": {"toy_file": {"path": "tracked.jsonl"}},
        "observers": {"toy_steps": {"path": "observed.txt"}},
    },
    "evaluate": {
        "folds": 3,
        "classifiers": ["toy_centroid"],
        "tasks": {
            "probe": {"neighbors": 5, "seeds": 2},
            "reconstruct": {},
            "toy_norm": {"power": 1},
        },
    },
    "runs": {
        "base": {"corpus": "sim"},
        "tuned": {
            "corpus": "sim",
            "init_from": "base",
            "finetune": {"method": "toy_adapter", "rank": 2},
        },
    },
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "config").mkdir()
    (folder / "config" / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (folder / "config" / "datasets.tsv").write_text(
        "dataset\tpath\tlabel\nsim\tsim.h5ad\tcell_type\n"
    )
    words = f"simulate --out {folder / 'sim.h5ad'} --cells 240 --genes 120 --types 4 --batches 2 --seed 1"
    assert main(words.split()) == 0
    return Project(folder)


@pytest.fixture
def without_torch(plugins: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """An environment in which importing torch fails."""
    (tmp_path / "torch.py").write_text("raise ImportError('a dry run imports no torch')\n")
    return plugins | {"PYTHONPATH": os.pathsep.join([str(tmp_path), plugins["PYTHONPATH"]])}


def test_a_dry_run_accepts_the_options_of_plugins_without_torch(
    project: Project, without_torch: dict[str, str]
) -> None:
    done = project.snakemake("--dry-run", environment=without_torch)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (
            "objective={skip: -1}",
            "objective: skip: input should be greater than or equal to 0, got",
        ),
        (
            "tokens={tokenizer: continuous}",
            "tokens.tokenizer continuous has values of kind scalar, family toy embeds",
        ),
        (
            "evaluate={classifiers: [toy_centre]}",
            "unknown classifier 'toy_centre'; did you mean 'toy_centroid'?",
        ),
        (
            "track={to: {toy_file: {pth: x}}}",
            "track.to: toy_file: unknown key 'pth'; did you mean 'path'?",
        ),
    ],
)
def test_a_dry_run_refuses_wrong_options_of_plugins_in_one_line(
    project: Project, without_torch: dict[str, str], changed: str, line: str
) -> None:
    done = project.snakemake("--dry-run", "--config", changed, environment=without_torch)
    assert done.returncode != 0
    assert [said for said in done.stdout.splitlines() if line in said], done.stdout


@pytest.mark.full
def test_plugins_of_every_kind_run_from_cells_to_the_report(
    project: Project, plugins: dict[str, str]
) -> None:
    done = project.snakemake(environment=plugins)
    assert done.returncode == 0, done.stdout
    runs = project.folder / "results" / "runs"
    tracked = [
        json.loads(line) for line in (project.folder / "tracked.jsonl").read_text().splitlines()
    ]
    assert [line["start"] for line in tracked if "start" in line] == ["toy", "toy"]
    assert [line["finish"] for line in tracked if "finish" in line] == ["done", "done"]
    assert {line["step"] for line in tracked if "step" in line} >= {2, 3, 4, 6}
    observed = (project.folder / "observed.txt").read_text().splitlines()
    assert {"step 2", "validation 3", "step 6", "step-00000006"} <= {*observed}

    tasks = json.loads((runs / "base" / "evaluate" / "metrics.json").read_text())["datasets"][
        "sim"
    ]["tasks"]
    assert list(tasks) == ["probe", "reconstruct", "toy_norm"]
    assert tasks["reconstruct"]["figures"]["n_targets"] > 0
    accuracy = {row["name"]: row["scores"]["accuracy"]["mean"] for row in tasks["probe"]["rows"]}
    assert accuracy["all genes + toy_centroid"] > accuracy["majority"]
    assert [row["name"] for row in tasks["toy_norm"]["rows"]] == ["embedding", "zeros"]
    page = (project.folder / "results" / "report" / "index.html").read_text()
    assert "toy_norm" in page
    assert "next gene" in page

    base, tuned = (
        load_file(runs / run / "model" / "model.safetensors") for run in ("base", "tuned")
    )
    assert base.keys() == tuned.keys()  # the adapters are merged
    changed = {name for name in base if not np.array_equal(base[name], tuned[name])}
    assert changed == {"blocks.0.qkv.weight", "blocks.0.out.weight"}
