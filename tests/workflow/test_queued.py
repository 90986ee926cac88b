"""A stage's job that waits in SLURM's queue while its Snakemake ends or the configuration changes.

`sbatch` only keeps the job; the test runs it later, as SLURM would.
"""

import json
import os
import shutil
import subprocess

import pytest
import yaml

from tests.distributed.command import wait_for
from tests.workflow.conftest import ENVIRONMENT, REPOSITORY, Project

pytestmark = pytest.mark.xdist_group("workflow")

CELLS = "results/corpora/sim/cells/sim.h5ad"
PROGRAMS = {
    "sbatch": """export -p > job.env; for word; do :; done
        printf '%s' "${word#--wrap=}" > job.part; mv job.part job.sh; echo 1""",
    "squeue": "echo '1|RUNNING'",
    "sinfo": "exit 1",
    "scontrol": "exit 1",
    "scancel": "exit 0",
    "srun": 'while case $1 in -*) ;; *) false ;; esac; do shift; done; exec "$@"',
}


OWN = """
include: "%s/Snakefile"


rule own:
    output:
        expand("{run}-%%s.txt" %% config["preprocess"]["min_genes"], run=config["runs"]),
    shell:
        "touch {output:q}"
"""


class Queue:
    """A project whose stage preprocess was submitted by a Snakemake that was then killed.

    Its Snakefile has a rule of its own, as that of a project of `cellmill init` may have.
    """

    def __init__(self, project: Project) -> None:
        self.project = project
        folder = project.folder
        (folder / "bin").mkdir()
        for name, script in PROGRAMS.items():
            path = folder / "bin" / name
            path.write_text(f"#!/bin/bash\n{script}\n")
            path.chmod(0o755)
        profile = {"executor": "slurm", "jobs": 4, "slurm-status-command": "squeue"}
        profile |= {"default-resources": {"slurm_partition": "cpu", "mem_mb": 1000, "runtime": 5}}
        profile |= {"slurm-no-account": True}
        file = folder / "profiles" / "site" / "config.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(yaml.safe_dump(profile))
        # keys that are numbers, which JSON would make texts of
        sizes = {16: {"model.hidden": 16}, 32: {"model.hidden": 32}}
        project.write_config(sweep={"wide": {"run": {"corpus": "sim"}, "over": {"size": sizes}}})
        own = folder / "own.smk"
        own.write_text(OWN % REPOSITORY)
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        self.environment = os.environ | ENVIRONMENT | {"PATH": path}
        process = subprocess.Popen(
            project.command("--snakefile", str(own), CELLS, profile=str(file.parent)),
            cwd=folder,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for((folder / "job.sh").exists, within_s=100)
        process.kill()
        process.wait()
        project.ran("--unlock")

    def run_job(self) -> None:
        """Run the job, as a node would."""
        done = subprocess.run(
            ["bash", "-c", ". ./job.env; . ./job.sh"],
            cwd=self.project.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout

    def min_genes(self) -> list[int]:
        """`preprocess.min_genes` of the files of options."""
        files = (self.project.folder / "results/options/preprocess").glob("*.json")
        return [json.loads(file.read_text())["preprocess"]["min_genes"] for file in files]


@pytest.fixture
def queue(project: Project) -> Queue:
    return Queue(project)


def test_a_queued_job_keeps_configuration_and_table(queue: Queue) -> None:
    project = queue.project
    assert queue.min_genes() == [5]
    table = project.folder / "config" / "datasets.tsv"
    rows = table.read_text()
    table.write_text(rows.replace("sim\t", "other\t"))
    project.write_config(corpora={"other": {"table": "config/datasets.tsv"}}, runs={"other": {}})
    queue.run_job()
    assert queue.min_genes() == [5]
    table.write_text(rows)
    project.write_config()
    assert project.jobs(CELLS) == {}


def test_a_job_that_outlives_its_snakemake_is_recorded(queue: Queue) -> None:
    queue.run_job()
    project = queue.project
    assert "nothing records" not in project.ran("--dry-run", CELLS)
    assert project.jobs(CELLS) == {}
    project.write_config(preprocess={"min_genes": 7})
    assert project.jobs(CELLS) == {"preprocess": 1}


def test_files_without_a_record_are_named_in_every_run(queue: Queue) -> None:
    queue.run_job()
    project = queue.project
    shutil.rmtree(project.folder / ".snakemake" / "metadata")  # as versions before this one left it
    project.write_config(preprocess={"min_genes": 7})
    line = (
        f"cellmill: nothing records which options made {CELLS}; other options do not make them again: if you changed "
        f"options since, add --forcerun {CELLS}"
    )
    vocabulary = "results/corpora/sim/vocabulary.tsv"
    for words in (["--dry-run", CELLS], [CELLS], ["--dry-run", vocabulary], [vocabulary]):
        assert project.ran(*words).splitlines().count(line) == 1
    assert project.jobs("--forcerun", CELLS, "--", CELLS) == {"preprocess": 1}


def test_a_job_without_the_variable_reads_what_is_there(queue: Queue) -> None:
    environment = queue.project.folder / "job.env"
    environment.write_text(f"{environment.read_text()}\nunset CELLMILL_SUBMITTED_1\n")
    queue.project.write_config(preprocess={"min_genes": 7})
    queue.run_job()
    assert sorted(queue.min_genes()) == [5, 7]
