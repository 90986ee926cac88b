"""Seven real datasets, human and mouse, of 299 to 17,168 genes: one configuration, one report."""

import json
from pathlib import Path

import pytest
import yaml

from tests.unit.conftest import SHARED
from tests.workflow.conftest import REPOSITORY, Project

TABLE = """dataset\torganism\tmin_genes\tlabel\tbatch\tcondition\tperturbation\tcontrol\tpath
pbmc68k\t\t\tbulk_labels\t\t\t\t\tSHARED/pbmc68k.h5ad
pbmc_cite\t\t\t\tbatch\t\t\t\tSHARED/pbmc_cite.h5ad
cellbench\t\t\tcell_type\tbatch\t\t\t\tSHARED/cellbench.h5ad
papalexi\t\t20\t\tbatch\t\tperturbation\tnon-targeting\tSHARED/papalexi.h5ad
merfish_mouse\tmouse\t20\tcell_type|tissue\t\t\t\t\tSHARED/merfish_mouse.h5ad
kang_wide\t\t\tcondition\t\tcondition\t\tctrl\tSHARED/kang_wide.h5ad
pbmc_donor_a\t\t\t\t\t\t\t\tSHARED/pbmc_donor_a.h5ad
"""
CELLS = {
    "pbmc68k": 700,
    "pbmc_cite": 400,
    "cellbench": 1407,
    "papalexi": 20722,
    "merfish_mouse": 979,
}
CELLS |= {"kang_wide": 1994, "pbmc_donor_a": 2896}
SMALL = {
    "preprocess": {"reference_organism": "human", "min_genes": 50, "max_mito_frac": 0.5},
    "shard": {"val_frac": 0.05, "test_frac": 0.2},
    "tokens": {"max_tokens": 128},
    "model": {"family": "profile", "hidden": 16, "layers": 1},
    "train": {"steps": 5, "global_batch": 64, "warmup_steps": 1},
    "evaluate": {"tasks": {"reconstruct": {}}},
}


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_all_datasets_go_through_one_configuration_to_one_report(tmp_path: Path) -> None:
    absent = [name for name in CELLS if not (SHARED / f"{name}.h5ad").is_file()]
    if absent:
        pytest.skip(f"the real dataset {absent[0]} is not there: {SHARED} is absent")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "datasets.tsv").write_text(TABLE.replace("SHARED", str(SHARED)))
    config = yaml.safe_load(
        (REPOSITORY / "config" / "examples" / "human-and-mouse.yaml").read_text()
    )
    config["corpora"]["both"]["table"] = "config/datasets.tsv"
    (tmp_path / "config" / "config.yaml").write_text(yaml.safe_dump(config | SMALL))
    project = Project(tmp_path)
    project.ran()
    manifest = json.loads(
        (tmp_path / "results" / "corpora" / "both" / "shards" / "manifest.json").read_text()
    )
    assert sum(split["n_obs"] for split in manifest["splits"].values()) == sum(CELLS.values())
    metrics = json.loads(
        (tmp_path / "results" / "runs" / "both" / "evaluate" / "metrics.json").read_text()
    )
    assert {name: entry["n_cells"] for name, entry in metrics["datasets"].items()} == CELLS
    page = (tmp_path / "results" / "report" / "index.html").read_text()
    assert all(name in page for name in CELLS)
    assert project.jobs() == {}
