"""Laws of the Snakefile."""

import re
import subprocess
from pathlib import Path

import pytest

from cellmill.config.evaluate import PRESETS
from tests.house.rules import WORKFLOW, bridges, directive, rules, zoo

ROOT = Path(__file__).resolve().parents[2]
WORKING = {name: body for name, body in rules().items() if name != "all"}


@pytest.mark.parametrize("name", WORKING)
def test_the_rule_has_a_log_a_benchmark_and_an_environment(name: str) -> None:
    stage = name.removesuffix("_data")
    assert directive(WORKING[name], "log").strip().startswith(f'"logs/{stage}/')
    assert directive(WORKING[name], "benchmark").strip().startswith(f'"results/benchmarks/{stage}/')
    assert "envs/cellmill.yaml" in directive(WORKING[name], "conda")


@pytest.mark.parametrize("name", WORKING)
def test_the_rule_calls_its_sub_command_and_quotes_every_interpolation(name: str) -> None:
    shell = directive(WORKING[name], "shell")
    assert f"cellmill {name.removesuffix('_data')} " in shell
    assert not re.search(r"^    (run|script|notebook|wrapper):", WORKING[name], re.M)
    filled = re.findall(r"\{([^}]+)\}", shell)
    assert filled
    assert all(part.endswith(":q") for part in filled), filled
    assert "{log:q}" in shell


@pytest.mark.parametrize("name", bridges())
def test_a_bridge_has_a_log_an_environment_of_its_own_and_a_script_without_cellmill(name: str) -> None:
    body, package = bridges()[name], name.replace("_", "-")
    assert directive(body, "log").strip().startswith(f'"logs/{name}/')
    assert directive(body, "benchmark").strip().startswith(f'"results/benchmarks/{name}/')
    assert f"/bridges/{{dataset}}.{package}.json" in directive(body, "output")
    environment = (ROOT / "envs" / f"bridge-{package}.yaml").read_text(encoding="utf-8")
    assert f"envs/bridge-{package}.yaml" in directive(body, "conda")
    [file] = re.findall(r"\w+_bridge\.py", directive(body, "resources"))
    script = (WORKFLOW / "bridges" / file).read_text(encoding="utf-8")
    tested = re.search(r'end_without\("([\w-]+)", "([\d.]+)", error\)', script)
    assert tested is not None
    assert f"- {tested[1]}=={tested[2]}\n" in environment
    filled = re.findall(r"\{([^}]+)\}", directive(body, "shell"))
    assert filled
    assert all(part.endswith(":q") for part in filled), filled


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_a_pinned_environment_and_a_short_script(name: str) -> None:
    [body] = zoo().values()
    assert "envs/zoo-{preset}.yaml" in directive(body, "conda")
    assert "/zoo_{wildcards.preset}.py" in directive(body, "resources")
    assert all(part.endswith(":q") for part in re.findall(r"\{([^}]+)\}", directive(body, "shell")))
    script = (WORKFLOW / "bridges" / f"zoo_{name}.py").read_text(encoding="utf-8")
    assert len(script.splitlines()) <= 60
    tested = re.search(r'end_without\("([\w-]+)", "([\d.]+)", error, "(\w+)"\)', script)
    assert tested is not None
    assert tested[3] == name
    environment = (ROOT / "envs" / f"zoo-{name}.yaml").read_text(encoding="utf-8")
    assert f"- {tested[1]}=={tested[2]}\n" in environment
    assert all("==" in line for line in re.findall(r"^      - (.*)$", environment, re.M))


def test_bridges_import_nothing_of_cellmill() -> None:
    for path in (WORKFLOW / "bridges").glob("*.py"):
        assert not re.search(r"^\s*(from|import) cellmill", path.read_text(encoding="utf-8"), re.M), path.name


@pytest.mark.parametrize("name", WORKING)
def test_no_machine_is_in_the_parameters_of_the_rule(name: str) -> None:
    assert not re.search(r"nodes|nproc|device|partition|threads", directive(WORKING[name], "params"))


def test_training_declares_no_checkpoint_as_output() -> None:
    assert directive(WORKING["train"], "output").split() == ['"results/runs/{run}/train/status.json",']


def test_no_tracked_file_has_a_path_of_one_machine() -> None:
    pattern = r"(^|[^A-Za-z0-9_./-])/(work|farm|root|home)/[a-z]"
    command = ["git", "-C", str(ROOT), "grep", "-nIE", pattern, "--", ".", ":!tests/house/test_rules.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode > 1:
        pytest.skip("not a git checkout")
    assert done.stdout == ""
