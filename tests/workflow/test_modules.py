"""The workflow outside its checkout: as a module, with another working folder, below a path with spaces."""

import re
from pathlib import Path

import pytest
import yaml

from tests.workflow.conftest import CASES, REPOSITORY, Project, jobs_in, make_project

pytestmark = pytest.mark.xdist_group("workflow")

OUTER = """
configfile: "config/config.yaml"


rule download:
    output:
        "data/sim.h5ad",
    shell:
        "cp -L {config[cells]:q} {output:q}"


module cellmill:
    snakefile:
        "%s"
    config:
        config["cellmill"]


use rule * from cellmill as cellmill_*


rule genes:
    default_target: True
    input:
        "results/corpora/sim/vocabulary.tsv",
    output:
        "genes.txt",
    shell:
        "wc -l < {input:q} > {output:q}"
"""


class Outer(Project):
    """A workflow of its own that uses the workflow as a module."""

    def words(self, *arguments: str, profile: str | None = None) -> list[str]:
        return ["--cores", "2", *(["--profile", str(REPOSITORY / profile)] if profile else []), *arguments]


@pytest.fixture
def spaced(tmp_path: Path) -> Path:
    """The checkout below a path with spaces."""
    (tmp_path / "my files").mkdir()
    (tmp_path / "my files" / "cell mill").symlink_to(REPOSITORY)
    return tmp_path / "my files" / "cell mill"


def make_outer(folder: Path, cells: Path, snakefile: Path) -> Outer:
    project = make_project(folder, cells)
    (folder / "data" / "sim.h5ad").unlink()
    config = folder / "config" / "config.yaml"
    config.write_text(yaml.safe_dump({"cells": str(cells), "cellmill": yaml.safe_load(config.read_text())}))
    (folder / "Snakefile").write_text(OUTER % snakefile)
    return Outer(project.folder)


def test_another_workflow_uses_it_as_a_module_with_its_own_input_and_target(
    tmp_path: Path, cells: Path, spaced: Path
) -> None:
    outer = make_outer(tmp_path / "outer project", cells, spaced / "workflow" / "Snakefile")
    made = outer.ran(profile=None)
    assert jobs_in(made) == dict.fromkeys(["download", "cellmill_preprocess", "cellmill_vocabulary", "genes"], 1)
    assert int((outer.folder / "genes.txt").read_text()) > 100
    assert outer.jobs(profile=None) == {}


@pytest.mark.parametrize("snakefile", ["Snakefile", "workflow/Snakefile"])
def test_a_module_has_every_rule_and_the_machine_of_the_profile(
    tmp_path: Path, cells: Path, spaced: Path, snakefile: str
) -> None:
    outer = make_outer(tmp_path / "outer", cells, spaced / snakefile)
    target = "results/runs/tiny/bridges/sim.scib-metrics.json"
    shown = outer.snakemake("-n", "-p", "results/report/index.html", target, profile="profiles/slurm").stdout
    stages = ["preprocess", "vocabulary", "shard", "plan", "train", "consolidate", "embed", "evaluate", "report"]
    expected = dict.fromkeys([f"cellmill_{stage}" for stage in [*stages, "scib_metrics"]], 1)
    assert jobs_in(shown) == expected | {"download": 1}
    assert re.search(r"cellmill train .*--launcher=slurm --gpus-per-node=1 --runtime=240 --mem-mb=64000", shown)
    assert f"python '{spaced}/workflow/bridges/scib_bridge.py' --cells" in shown
    (outer.folder / "config" / "config.yaml").write_text("cells: x\ncellmill: {trian: {}}\n")
    refused = outer.snakemake("-n", profile=None)
    assert refused.returncode == 1
    assert "cellmill: config/config.yaml: unknown key 'trian'; did you mean 'train'?" in refused.stdout


@pytest.mark.parametrize("case", ["pretrain", "finetune", "sweep"])
def test_every_case_runs_with_its_folder_as_the_working_folder(
    tmp_path: Path, cells: Path, spaced: Path, case: str
) -> None:
    folder = make_project(tmp_path / "a case", cells, case).folder
    elsewhere = Outer(tmp_path)
    words = ["--snakefile", str(spaced / "Snakefile"), "--directory", str(folder), "-n"]
    runs = {"pretrain": 1, "finetune": 2, "sweep": 3}[case]
    jobs = elsewhere.jobs(*words, profile=None)
    assert jobs == dict.fromkeys(["preprocess", "vocabulary", "shard", "report"], 1) | (
        dict.fromkeys(["plan", "train", "consolidate", "embed", "evaluate"], runs) | ({"sweep": 1} if runs == 3 else {})
    )
    assert (CASES / case / "config" / "datasets.tsv").is_file()
