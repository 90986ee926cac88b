"""Laws of the Snakefile, and that every option is read by something."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from cellmill.config.dataset import Dataset
from cellmill.config.document import sections
from cellmill.config.pipeline import CORPUS_SECTIONS, RUN_SECTIONS, Corpus, Run
from tests.house.rules import directive, rules

ROOT = Path(__file__).resolve().parents[2]
WORKING = {name: body for name, body in rules().items() if name != "all"}


@pytest.mark.parametrize("name", WORKING)
def test_the_rule_has_a_log_a_benchmark_and_an_environment(name: str) -> None:
    stage = name.removesuffix("_data")
    assert directive(WORKING[name], "log").strip().startswith(f'"logs/{stage}/')
    assert directive(WORKING[name], "benchmark").strip().startswith(f'"results/benchmarks/{stage}/')
    assert "envs/cellmill.yaml" in directive(WORKING[name], "conda")


@pytest.mark.parametrize("name", WORKING)
def test_the_rule_calls_its_sub_command_and_quotes_what_it_fills_in(name: str) -> None:
    shell = directive(WORKING[name], "shell")
    assert f"cellmill {name.removesuffix('_data')} " in shell
    assert not re.search(r"^    (run|script|notebook|wrapper):", WORKING[name], re.M)
    filled = re.findall(r"\{([^}]+)\}", shell)
    assert filled
    assert all(part.endswith(":q") for part in filled), filled
    assert "{log:q}" in shell


@pytest.mark.parametrize("name", WORKING)
def test_no_machine_is_in_the_parameters_of_the_rule(name: str) -> None:
    assert not re.search(r"nodes|nproc|device|partition|threads", directive(WORKING[name], "params"))


def test_training_declares_no_checkpoint_as_output() -> None:
    assert directive(WORKING["train"], "output").split() == ['"results/runs/{run}/train/status.json",']


def attributes_read() -> set[str]:
    """Names read as an attribute outside the package's configuration, in Python, rules and the report's page."""
    found: set[str] = set()
    for path in (ROOT / "src" / "cellmill").rglob("*.py"):
        if "config" not in path.relative_to(ROOT / "src" / "cellmill").parts[:-1]:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    texts = [*(ROOT / "workflow").rglob("*.smk"), *(ROOT / "src").rglob("*.html")]
    config = ROOT / "src" / "cellmill" / "config"
    for path in [*texts, config / "pipeline.py", config / "layout.py"]:
        found |= set(re.findall(r"\.([a-z_]+)", path.read_text(encoding="utf-8")))
    return found


def test_every_option_has_a_reader() -> None:
    options = [f"{name}.{field}" for name, models in sections().items() for m in models for field in m.model_fields]
    options += [f"corpora.{field}" for field in Corpus.model_fields if field not in CORPUS_SECTIONS]
    options += [f"runs.{field}" for field in Run.model_fields if field not in RUN_SECTIONS]
    options += [f"table.{field}" for field in Dataset.model_fields]
    read = attributes_read()
    # `family` is read where the section is built, by the registry
    unread = [name for name in options if name.split(".")[1] not in {*read, "family"}]
    assert not unread, f"options that nothing reads: {unread}"


def test_no_tracked_file_has_a_path_of_one_machine() -> None:
    pattern = r"(^|[^A-Za-z0-9_./-])/(work|farm|root|home)/[a-z]"
    command = ["git", "-C", str(ROOT), "grep", "-nIE", pattern, "--", ".", ":!tests/house/test_rules.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode > 1:
        pytest.skip("not a git checkout")
    assert done.stdout == ""
