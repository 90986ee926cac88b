"""Laws of the Snakefile."""

import re
import subprocess
from pathlib import Path

import pytest

from cellmill.config.evaluate import PRESETS
from tests.house.rules import BRIDGES, RULES, WORKFLOW, ZOO, directive

ROOT = Path(__file__).resolve().parents[2]
WORKING = {name: body for name, body in RULES.items() if name != "all"}


def interpolated(body: str) -> list[str]:
    """Interpolations of the shell command of a rule, each of which has to be quoted."""
    filled = re.findall(r"\{([^}]+)\}", directive(body, "shell"))
    assert filled
    assert all(part.endswith(":q") for part in filled), filled
    return filled


def check_files(body: str, folder: str) -> None:
    """The rule has a log and a benchmark in the folder of its stage."""
    assert directive(body, "log").strip().startswith(f'"logs/{folder}/')
    assert directive(body, "benchmark").strip().startswith(f'"results/benchmarks/{folder}/')


def check_pinned(script: str, environment: str) -> re.Match[str]:
    """The script names its package and version as its environment does, and imports nothing of
    cellmill.
    """
    text = (WORKFLOW / "bridges" / script).read_text(encoding="utf-8")
    assert not re.search(r"^\s*(from|import) cellmill", text, re.M)
    tested = re.search(r'end_without\("([\w-]+)", "([\d.]+)", error(?:, "(\w+)")?\)', text)
    assert tested is not None
    assert f"- {tested[1]}=={tested[2]}\n" in (ROOT / "envs" / environment).read_text(
        encoding="utf-8"
    )
    return tested


@pytest.mark.parametrize("name", WORKING)
def test_a_rule_calls_its_sub_command_with_quoted_words(name: str) -> None:
    body = WORKING[name]
    stage = name.removesuffix("_data")
    check_files(body, stage)
    assert "envs/cellmill.yaml" in directive(body, "conda")
    assert f"cellmill {stage} " in directive(body, "shell")
    assert "log:q" in interpolated(body)
    assert not re.search(r"^    (run|script|notebook|wrapper):", body, re.M)
    assert not re.search(r"nodes|nproc|device|partition|threads", directive(body, "params")), (
        "of a machine"
    )


@pytest.mark.parametrize("name", BRIDGES)
def test_a_bridge_has_an_environment_without_cellmill(
    name: str,
) -> None:
    body = BRIDGES[name]
    package = name.replace("_", "-")
    check_files(body, name)
    assert f"/bridges/{{dataset}}.{package}.json" in directive(body, "output")
    assert f"envs/bridge-{package}.yaml" in directive(body, "conda")
    [script] = re.findall(r"\w+_bridge\.py", directive(body, "resources"))
    check_pinned(script, f"bridge-{package}.yaml")
    interpolated(body)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_a_pinned_environment(name: str) -> None:
    [body] = ZOO.values()
    assert "envs/zoo-{preset}.yaml" in directive(body, "conda")
    assert "zoo_{wildcards.preset}.py" in directive(body, "resources")
    interpolated(body)
    assert check_pinned(f"zoo_{name}.py", f"zoo-{name}.yaml")[3] == name
    assert (
        len((WORKFLOW / "bridges" / f"zoo_{name}.py").read_text(encoding="utf-8").splitlines())
        <= 60
    )
    packages = re.findall(
        r"^      - (.*)$", (ROOT / "envs" / f"zoo-{name}.yaml").read_text(encoding="utf-8"), re.M
    )
    assert all("==" in package for package in packages)


def test_training_declares_no_checkpoint_as_output() -> None:
    assert directive(WORKING["train"], "output").split() == [
        '"results/runs/{run}/train/status.json",'
    ]


def test_no_tracked_file_has_a_path_of_one_machine() -> None:
    pattern = r"(^|[^A-Za-z0-9_./-])/(work|farm|root|home)/[a-z]"
    command = [
        "git",
        "-C",
        str(ROOT),
        "grep",
        "-nIE",
        pattern,
        "--",
        ".",
        ":!tests/house/test_rules.py",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode > 1:
        pytest.skip("not a git checkout")
    assert done.stdout == ""
