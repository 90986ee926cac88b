"""The workflow outside its checkout: as a module, with another working folder, below a path with
spaces.
"""

import os
import re
import shutil
import subprocess
import sys
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
        %s
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
        return [
            "--cores",
            "2",
            *(["--profile", str(REPOSITORY / profile)] if profile else []),
            *arguments,
        ]


@pytest.fixture
def spaced(tmp_path: Path) -> Path:
    """The checkout below a path with spaces."""
    (tmp_path / "my files").mkdir()
    (tmp_path / "my files" / "cell mill").symlink_to(REPOSITORY)
    return tmp_path / "my files" / "cell mill"


def make_outer(folder: Path, cells: Path, snakefile: str) -> Outer:
    """A workflow with the module at `snakefile`, a Python expression."""
    project = make_project(folder, cells)
    (folder / "data" / "sim.h5ad").unlink()
    config = folder / "config" / "config.yaml"
    config.write_text(
        yaml.safe_dump({"cells": str(cells), "cellmill": yaml.safe_load(config.read_text())})
    )
    (folder / "Snakefile").write_text(OUTER % snakefile)
    return Outer(project.folder)


def test_another_workflow_uses_it_as_a_module(tmp_path: Path, cells: Path, spaced: Path) -> None:
    outer = make_outer(tmp_path / "outer project", cells, repr(f"{spaced}/workflow/Snakefile"))
    made = outer.ran(profile=None)
    assert jobs_in(made) == dict.fromkeys(
        ["download", "cellmill_preprocess", "cellmill_vocabulary", "genes"], 1
    )
    assert int((outer.folder / "genes.txt").read_text()) > 100
    assert outer.jobs(profile=None) == {}


@pytest.mark.parametrize("snakefile", ["Snakefile", "workflow/Snakefile"])
def test_a_module_has_every_rule(tmp_path: Path, cells: Path, spaced: Path, snakefile: str) -> None:
    outer = make_outer(tmp_path / "outer", cells, repr(f"{spaced}/{snakefile}"))
    target = "results/runs/tiny/bridges/sim.scib-metrics.json"
    shown = outer.snakemake(
        "-n", "-p", "results/report/index.html", target, profile="profiles/slurm"
    ).stdout
    stages = [
        "preprocess",
        "vocabulary",
        "shard",
        "plan",
        "train",
        "consolidate",
        "embed",
        "evaluate",
        "report",
    ]
    added = ["unpack", "scib_metrics"]
    expected = dict.fromkeys([f"cellmill_{stage}" for stage in [*stages, *added]], 1)
    assert jobs_in(shown) == expected | {"download": 1}
    assert re.search(
        r"cellmill train .*--launcher=slurm --gpus-per-node=1 --runtime=240 --mem-mb=64000", shown
    )
    assert f"python '{spaced}/workflow/bridges/scib_bridge.py' --cells" in shown
    (outer.folder / "config" / "config.yaml").write_text("cells: x\ncellmill: {trian: {}}\n")
    refused = outer.snakemake("-n", profile=None)
    assert refused.returncode == 1
    assert (
        "cellmill: config/config.yaml: unknown key 'trian'; did you mean 'train'?" in refused.stdout
    )


OVERRIDDEN = """

use rule vocabulary from cellmill as cellmill_vocabulary with:
    benchmark:
        "benchmarks/{corpus}.tsv"
"""


@pytest.fixture
def hosted(tmp_path: Path) -> dict[str, str]:
    """The environment of a Snakemake whose git finds this workflow, at tag v1, as
    github.com/owner/cellmill.
    """
    repository = tmp_path / "repository"
    for name in ("workflow", "envs"):
        shutil.copytree(REPOSITORY / name, repository / name)
    shutil.copy(REPOSITORY / "Snakefile", repository)
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "all"], ["tag", "v1"]):
        subprocess.run(["git", *words], cwd=repository, check=True)
    redirected = {"GIT_CONFIG_KEY_0": f"url.file://{repository}.insteadOf", "GIT_CONFIG_COUNT": "1"}
    redirected["GIT_CONFIG_VALUE_0"] = "https://github.com/owner/cellmill"
    return (
        os.environ
        | redirected
        | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "GITHUB_TOKEN": "", "OMP_NUM_THREADS": "1"}
    )


def test_a_module_from_github_runs(tmp_path: Path, cells: Path, hosted: dict[str, str]) -> None:
    outer = make_outer(
        tmp_path / "outer", cells, 'github("owner/cellmill", path="workflow/Snakefile", tag="v1")'
    )
    with open(outer.folder / "Snakefile", "a") as file:
        file.write(OVERRIDDEN)
    done = outer.snakemake(profile=None, environment=hosted)
    assert done.returncode == 0, done.stdout
    assert jobs_in(done.stdout) == dict.fromkeys(
        ["download", "cellmill_preprocess", "cellmill_vocabulary", "genes"], 1
    )
    assert int((outer.folder / "genes.txt").read_text()) > 100
    assert (outer.folder / "benchmarks" / "sim.tsv").is_file()
    assert not (outer.folder / "results" / "benchmarks" / "vocabulary").exists()
    of_run = [
        f"results/runs/tiny/bridges/sim.{package}.json"
        for package in ("scib-metrics", "cz-benchmarks")
    ]
    of_corpus = [f"results/corpora/sim/zoo/{preset}/sim.h5ad" for preset in ("scvi", "harmony")]
    shown = outer.snakemake(
        "-n", "-p", *of_run, *of_corpus, profile=None, environment=hosted
    ).stdout
    scripts = re.findall(r"^Shell command: python (?:-W ignore )?(/\S+\.py) ", shown, re.M)
    assert {Path(script).stem for script in scripts} == {
        "zoo_scvi",
        "zoo_harmony",
        "scib_bridge",
        "cz_bridge",
    }, shown
    beside = {path.name for path in Path(scripts[0]).parent.iterdir()}
    assert beside | {"cell_bridge.py", "cell2_bridge.py"} == {
        path.name for path in (REPOSITORY / "workflow" / "bridges").glob("*.py")
    }
    for script in scripts:  # which end for want of their package, or of arguments
        said = subprocess.run([sys.executable, script], capture_output=True, text=True).stderr
        assert re.search(
            r"cannot be imported by .*No module named '(scvi|harmonypy|scib_metrics|czb)|required: ",
            said,
        )


def test_scripts_of_a_local_git_module_are_refused(
    tmp_path: Path, cells: Path, hosted: dict[str, str]
) -> None:
    outer = make_outer(
        tmp_path / "outer", cells, repr(f"git+file://{tmp_path}/repository/workflow/Snakefile@v1")
    )
    assert outer.snakemake("-n", profile=None, environment=hosted).returncode == 0
    target = "results/corpora/sim/zoo/scvi/sim.h5ad"
    refused = outer.snakemake("-n", target, profile=None, environment=hosted)
    assert refused.returncode == 1
    line = (
        "ConfigError: zoo_scvi.py: git+file:// renames scripts, which import each other; "
        "give the path of the checkout"
    )
    assert line in refused.stdout


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
        dict.fromkeys(["plan", "train", "consolidate", "embed", "evaluate"], runs)
        | ({"sweep": 1} if runs == 3 else {})
    )
    assert (CASES / case / "config" / "datasets.tsv").is_file()
