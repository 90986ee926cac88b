"""One classifier of two datasets whose labels have other columns and vocabularies, through Snakemake."""

import json

import anndata as ad
import pytest

from tests.workflow.conftest import Project

pytestmark = pytest.mark.xdist_group("workflow")


@pytest.mark.full
def test_two_datasets_of_other_labels_train_one_classifier_and_a_changed_map_reruns_what_reads_it(
    project: Project,
) -> None:
    folder = project.folder
    cells = ad.read_h5ad(folder / "data" / "sim.h5ad")
    names = sorted(set(cells.obs["cell_type"].astype(str)))
    for dataset, column, prefix in (("one", "kind", "1 "), ("two", "annotation", "")):
        own = (cells[:120] if dataset == "one" else cells[120:]).copy()
        own.obs[column] = [prefix + str(name) for name in own.obs.pop("cell_type")]
        own.write_h5ad(folder / "data" / f"{dataset}.h5ad")
    (folder / "config" / "one.tsv").write_text("from\tto\n" + "".join(f"1 {name}\t{name}\n" for name in names))
    (folder / "config" / "datasets.tsv").write_text(
        "dataset\tpath\tlabel\tlabel_name\tlabel_map\n"
        "one\tdata/one.h5ad\tkind\tcell_type\tconfig/one.tsv\n"
        "two\tdata/two.h5ad\tannotation\tcell_type\t\n"
    )
    project.write_config(
        model={"family": "encoder"},
        objective={"name": "classification", "label_column": "cell_type"},
        evaluate={"tasks": {"reconstruct": {}}},
    )
    target = "results/runs/tiny/evaluate/metrics.json"
    project.ran(target)
    config = json.loads((folder / "results/runs/tiny/model/config.json").read_text())
    assert config["classifier"]["labels"] == names
    for entry in json.loads((folder / target).read_text())["datasets"].values():
        assert entry["roles"]["label"] == "cell_type"
        figures = entry["tasks"]["reconstruct"]["figures"]
        assert figures["n_targets"] == figures["n_cells"] == entry["n_scored"] > 0
        assert "unknown_labels" not in figures
        assert 0 <= figures["calibration_error"] <= 1
    assert project.jobs(target) == {}
    (folder / "config" / "one.tsv").write_text("from\tto\n" + "".join(f"1 {name}\tone type\n" for name in names))
    jobs = project.jobs(target)
    assert jobs == {"preprocess": 1, "vocabulary": 1, "shard": 1, "plan": 1, "train": 1, "consolidate": 1} | {
        "embed": 2,
        "evaluate": 1,
    }
