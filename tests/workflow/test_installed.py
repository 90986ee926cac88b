"""The workflow of an installed package: what a wheel carries, and a project that uses it."""

import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from cellmill.cli import main
from cellmill.config.shipped import find_shipped
from cellmill.errors import DataError
from tests.workflow.conftest import REPOSITORY, Project, jobs_in

pytestmark = pytest.mark.xdist_group("workflow")

SHIPPED = ("Snakefile", "workflow", "profiles", "config", "envs")
STAGES = "preprocess vocabulary shard plan train consolidate embed evaluate report".split()


class InstalledProject(Project):
    """A project that init wrote: its Snakefile and profile are in its own folder."""

    def words(self, *arguments: str, profile: str | None = "profiles/local") -> list[str]:
        return [*(["--profile", profile] if profile else []), *arguments]


def shipped_files() -> set[str]:
    """Every file of the shipped folders, without what running them leaves there."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *SHIPPED],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip(f"not a checkout of git: {listed.stderr.strip()}")
    return {*listed.stdout.split()}


def test_every_file_of_the_workflow_is_shipped() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    shared = set()
    for target, patterns in project["tool"]["setuptools"]["data-files"].items():
        for pattern in patterns:
            files = [path.relative_to(REPOSITORY) for path in REPOSITORY.glob(pattern)]
            assert {f"share/cellmill/{file.parent}".removesuffix("/.") for file in files} == {
                target
            }
            shared |= {str(file) for file in files}
    assert shipped_files() <= shared


def test_a_project_of_init_runs_every_stage(tmp_path: Path, cells: Path) -> None:
    folder = tmp_path / "a project"
    assert main(["init", str(folder), "--data", str(cells)]) == 0
    project = InstalledProject(folder)
    target = "results/runs/a-project/bridges/sim.scib-metrics.json"
    shown = project.ran("-n", "-p", "default", target)
    assert jobs_in(shown) == dict.fromkeys([*STAGES, "unpack", "scib_metrics"], 1)
    script = shlex.quote(str(REPOSITORY / "workflow/bridges/scib_bridge.py"))
    assert f"python {script} --cells" in shown


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the checkout, which stays as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in (*SHIPPED, "src", "pyproject.toml", "README.md", "LICENSE"):
        path = REPOSITORY / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("*.egg-info"))
        else:
            shutil.copy(path, source)
    pip(
        folder,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
        str(source),
    )
    [built] = folder.glob("*.whl")
    return built


def pip(folder: Path, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *words],
        cwd=folder,
        env=os.environ | {"PYTHONWARNINGS": ""},  # pip's own
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_a_wheel_has_the_workflow_and_no_more(wheel: Path) -> None:
    name = "-".join(wheel.name.split("-")[:2])
    prefix = f"{name}.data/data/share/cellmill/"
    with ZipFile(wheel) as opened:
        names = {path.removeprefix(prefix) for path in opened.namelist() if prefix in path}
    assert names == shipped_files()


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["target", "prefix"])
def test_a_project_uses_the_workflow_of_the_wheel(
    tmp_path: Path, wheel: Path, cells: Path, scheme: str
) -> None:
    installed = tmp_path / "in stalled"
    pip(
        tmp_path,
        "install",
        "--ignore-installed",
        "--no-deps",
        f"--{scheme}",
        str(installed),
        str(wheel),
    )
    [package] = installed.rglob("cellmill/__init__.py")
    environment = os.environ | {"PYTHONPATH": str(package.parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "cellmill.cli", "init", "my project", "--data", str(cells)]
    made = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.splitlines()[-1] == "cd 'my project' && cellmill check && cellmill run"
    project = InstalledProject(tmp_path / "my project")
    target = "results/runs/my-project/bridges/sim.scib-metrics.json"
    shown = project.snakemake(
        "--dry-run", "-p", "results/report/index.html", target, environment=environment
    )
    assert shown.returncode == 0, shown.stdout
    assert jobs_in(shown.stdout) == dict.fromkeys([*STAGES, "unpack", "scib_metrics"], 1)
    script = installed / "share/cellmill/workflow/bridges/scib_bridge.py"
    assert f"python {shlex.quote(str(script))} --cells" in shown.stdout
    assert script.is_file()


def test_a_missing_shipped_file_is_named() -> None:
    assert find_shipped("profiles/local") == REPOSITORY / "profiles/local"
    with pytest.raises(DataError, match=r"/profiles/none: no such file; install cellmill again"):
        find_shipped("profiles/none")


@pytest.mark.full
def test_run_makes_targets_and_ends_with_the_report(
    tmp_path: Path,
    cells: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "p", "--data", str(cells)]) == 0
    monkeypatch.chdir("p")
    assert main(["run", "results/corpora/p/vocabulary.tsv", "--", "--quiet", "rules"]) == 0
    assert Path("results/corpora/p/vocabulary.tsv").is_file()
    report = tmp_path / "p/results/report/index.html"
    report.parent.mkdir(parents=True)
    report.touch()
    capfd.readouterr()
    assert main(["run", "results/corpora/p/vocabulary.tsv"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == f"{report} (of an earlier run)"
    assert main(["run", "--", "nothing"]) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    command = "snakemake --profile profiles/local nothing"
    assert last == f"cellmill run: snakemake ended with exit code 1: {command}"
