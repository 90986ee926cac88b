"""Profiles and their page: every key is explained, and the page agrees with the code about the
machine.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cellmill.config import check_options
from cellmill.config.machine import Machine
from cellmill.config.section import description
from cellmill.preflight.stage_requests import DECLARED, DECLARED_THREADS
from tests.house.rules import RULES, ZOO, directive
from tools.shipped_profiles import shipped

ROOT = Path(__file__).resolve().parents[2]
# run where Snakemake runs
HERE = {"all", "demo_data", "fetch", "pull", "plan", "train", "report", "sweep"}
PROFILES = sorted((ROOT / "profiles").glob("*/config.yaml"))


def keys_in_tables() -> set[str]:
    text = (ROOT / "profiles" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+?`) \|", text.split("## Keys")[1], re.M)
    return {key for row in rows for key in re.findall(r"`([^`]+)`", row)}


def keys_of(text: str) -> set[str]:
    """Every key of a profile, including commented ones."""
    profile: dict[str, Any] = yaml.safe_load(text)
    found = set(profile) | set(profile.get("default-resources", {}))
    found |= set(re.findall(r"^ *# ([a-z][a-z_-]+): ", text, re.M)) - set(RULES)
    for resources in profile["set-resources"].values():
        found |= set(resources)
    return found


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.parent.name)
def test_snakemake_accepts_every_key_of_a_profile(path: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "config", tmp_path / "config")
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "-n"]
    done = subprocess.run(
        [*command, "--profile", str(path.parent)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    resources = re.findall(
        r"^(?:local)?rule train:\n(?:    .*\n)*?    resources: (.*)$", done.stdout, re.M
    )
    assert resources, done.stdout
    handed_on = dict(part.split("=", 1) for part in resources[0].split(", "))
    for key, value in yaml.safe_load(path.read_text(encoding="utf-8"))["set-resources"][
        "train"
    ].items():
        assert handed_on[key] == str(value), key


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.parent.name)
def test_a_profile_explains_every_key_of_its_machine(
    path: Path,
) -> None:
    text = path.read_text(encoding="utf-8")
    assert keys_of(text) <= keys_in_tables()
    assert text.count("#") > 8
    profile = yaml.safe_load(text)
    assert "software-env" not in profile["rerun-triggers"], (
        "another environment would train everything again"
    )
    assert not (ROOT / "profiles" / "default").exists(), (
        "it would load itself and win over --profile key by key"
    )
    if profile.get("executor") == "slurm":
        assert profile["slurm-status-command"] == "squeue", (
            "sacct is there without accounting too, and never answers"
        )
        assert profile["slurm-logdir"].startswith(".snakemake/"), (
            "the plugin deletes old logs under it"
        )
        assert len(text.splitlines()) <= 40, (
            "what a rule says, or profiles/README.md, is not said again"
        )
    stages = profile["set-resources"]
    assert set(stages) <= set(RULES)
    assert set(stages["plan"]) == {"device"}, "plan takes the rest from train"
    for stage, resources in stages.items():
        assert "gpu" not in resources or resources["tasks_per_gpu"] == 0, (
            f"{stage} would run once per GPU"
        )
    machine = check_options(Machine, stages["train"], str(path))
    assert machine.gpus in (0, machine.nproc_per_node)


def test_slurm_profiles_equal_what_their_writer_generates() -> None:
    texts = {
        path.parent.name: path.read_text(encoding="utf-8")
        for path in PROFILES
        if path.parent.name != "local"
    }
    assert texts == shipped(), "run python tools/shipped_profiles.py"


def test_the_page_documents_every_key_of_the_machine() -> None:
    text = (ROOT / "profiles" / "README.md").read_text(encoding="utf-8")
    for name, field in Machine.model_fields.items():
        default = "none" if field.default == "" else f"`{field.default}`"
        assert f"| `{name}` | {description(Machine, name)} Default: {default}. |" in text


def test_preflight_knows_the_resources_of_every_rule() -> None:
    declared = {}
    for name, body in (RULES | ZOO).items():
        if name not in HERE:
            resources = re.findall(
                r"(mem_mb|runtime)=sized\((\d+)(?:, (\d+))?\)", directive(body, "resources")
            )
            declared[name] = {
                key: (int(base), int(per) if per else None) for key, base, per in resources
            }
            [threads] = re.findall(r"^    threads: (\d+)", body, re.M) or [1]
            assert int(threads) == DECLARED_THREADS.get(name, 1), name
    assert declared == DECLARED
