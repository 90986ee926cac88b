"""A project in its own folder: a case of .test/ with a few hundred simulated cells and a tiny
model.
"""

import atexit
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from cellmill.cli import main

REPOSITORY = Path(__file__).resolve().parents[2]
CASES = REPOSITORY / ".test"
KEPT = [4, 8]
"""Steps of the checkpoints that runs of the cases keep, beside the last ones."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


PIPED: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


@cache
def server() -> subprocess.Popen[str]:
    """snakemake_server.py, which ends with this process."""
    words = [sys.executable, str(Path(__file__).with_name("snakemake_server.py"))]
    return subprocess.Popen(words, env=os.environ | ENVIRONMENT, **PIPED)


@cache
def stages() -> tuple[subprocess.Popen[str], str]:
    """stage_server.py, which ends with this process, and a folder for PATH: its `cellmill` asks it."""
    folder = Path(tempfile.mkdtemp(prefix="cellmill-stages-"))
    here = Path(__file__).parent
    words = [sys.executable, str(here / "stage_server.py"), str(folder / "socket")]
    running = subprocess.Popen(words, env=os.environ | ENVIRONMENT, **PIPED)
    assert running.stdout is not None
    assert running.stdout.readline() == "listening\n"
    client = [sys.executable, "-IS", str(here / "stage_client.py"), str(folder / "socket")]
    (folder / "cellmill").write_text(f'#!/bin/sh\nexec {shlex.join(client)} "$@"\n')
    (folder / "cellmill").chmod(0o755)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return running, str(folder)


@dataclass
class Project:
    """A folder with config/ and data/, and the snakemake of this Python."""

    folder: Path

    def words(self, *arguments: str, profile: str | None = "profiles/local") -> list[str]:
        words = ["--snakefile", str(REPOSITORY / "Snakefile")]
        words += ["--profile", str(REPOSITORY / profile)] if profile else ["--cores", "2"]
        return [*words, *arguments]

    def command(self, *arguments: str, profile: str | None = "profiles/local") -> list[str]:
        return [sys.executable, "-m", "snakemake", *self.words(*arguments, profile=profile)]

    def snakemake(
        self,
        *arguments: str,
        profile: str | None = "profiles/local",
        environment: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run `snakemake`: without an `environment` of its own in a fork of the server, and its
        stages in forks of theirs.

        `stdout` is all that a user sees.
        """
        if environment is None:
            words = self.words(*arguments, profile=profile)
            out = self.folder.with_name("said.txt")
            environment = os.environ | ENVIRONMENT
            if not {"-n", "--dry-run"} & {*arguments}:
                environment["PATH"] = os.pathsep.join([stages()[1], environment["PATH"]])
            running = server()
            assert running.stdin is not None
            assert running.stdout is not None
            asked = {"folder": str(self.folder), "words": words, "out": str(out)}
            running.stdin.write(json.dumps(asked | {"environment": environment}) + "\n")
            running.stdin.flush()
            code = int(running.stdout.readline())
            return subprocess.CompletedProcess(words, code, out.read_text())
        return subprocess.run(
            self.command(*arguments, profile=profile),
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=1200,  # a limit for hangs; a busy machine takes 300 s for what takes 60
        )

    def ran(
        self,
        *arguments: str,
        profile: str | None = "profiles/local",
        environment: dict[str, str] | None = None,
    ) -> str:
        """All that a user sees of a `snakemake` that ends well."""
        done = self.snakemake(*arguments, profile=profile, environment=environment)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def jobs(self, *arguments: str, profile: str | None = "profiles/local") -> dict[str, int]:
        """Number of jobs of each rule that would run, except `all`."""
        return jobs_in(self.ran("--dry-run", *arguments, profile=profile))

    def write_config(self, name: str = "config.yaml", **sections: Any) -> str:
        """Write config/`name`: the configuration of .test/pretrain with keys of some sections
        changed.
        """
        tree = yaml.safe_load((CASES / "pretrain" / "config" / "config.yaml").read_text())
        for section, values in sections.items():
            tree[section] = tree.get(section, {}) | values
        path = self.folder / "config" / name
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        return f"config/{name}"


def jobs_in(printed: str) -> dict[str, int]:
    """Number of jobs of each rule, except the targets, that a dry run has printed."""
    if "Job stats:" not in printed:
        assert "Nothing to be done" in printed, printed
        return {}
    table = printed.split("Job stats:")[1].split("total")[0]
    return {
        name: int(n)
        for name, n in re.findall(r"^(\w+) +(\d+)$", table, re.M)
        if name not in ("all", "default")
    }


@pytest.fixture(scope="session")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 simulated cells x 150 genes of 3 types."""
    path = tmp_path_factory.mktemp("cells") / "sim.h5ad"
    assert (
        main(
            f"simulate --out {path} --cells 240 --genes 150 --types 3 --batches 2 --seed 1".split()
        )
        == 0
    )
    return path


def make_project(folder: Path, cells: Path, case: str = "pretrain") -> Project:
    shutil.copytree(CASES / case / "config", folder / "config")
    (folder / "data").mkdir()
    (folder / "data" / "sim.h5ad").symlink_to(cells)
    return Project(folder)


@pytest.fixture
def project(tmp_path: Path, cells: Path) -> Project:
    """A fresh project."""
    return make_project(tmp_path / "project", cells)


@pytest.fixture(scope="session")
def done(tmp_path_factory: pytest.TempPathFactory, cells: Path) -> tuple[Project, str]:
    """A project in which everything has run, and the output of that run, whose stages are processes
    of their own. Tests do not change it.
    """
    project = make_project(tmp_path_factory.mktemp("done") / "project", cells)
    given = os.environ | ENVIRONMENT
    return project, project.ran("--set-resources", "train:nproc_per_node=2", environment=given)


@pytest.fixture
def finished(done: tuple[Project, str], tmp_path: Path) -> Project:
    """A copy of the project in which everything has run, for tests that go on from there."""
    shutil.copytree(done[0].folder, tmp_path / "project", symlinks=True)
    return Project(tmp_path / "project")
