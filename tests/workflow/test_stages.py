"""The case of every stage, which `make newest` runs: it has every rule, in a dry run."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from cellmill.cli import main
from tests.workflow.conftest import REPOSITORY, make_project

ELSEWHERE = {"all", "demo_data", "fetch", "pull", "import", "unpack", "zoo", "embed_external"}
"""Rules that need a network, another package's model or the demo: the demo, examples and the zoo
have tests.
"""


def matrix() -> ModuleType:
    """The module of tools/matrix.py."""
    spec = importlib.util.spec_from_file_location("matrix", REPOSITORY / "tools" / "matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_case_of_every_stage_has_every_rule(tmp_path: Path) -> None:
    pytest.importorskip("igraph")  # of the extra cluster
    tool = matrix()
    cells = tmp_path / "sim.h5ad"
    words = tool.CELLS.split()
    assert main([*words[1:3], str(cells), *words[4:]]) == 0
    project = make_project(tmp_path / "project", cells, "stages")
    jobs = project.jobs("--", *tool.TARGETS, *tool.BRIDGES.values(), profile=None)
    text = "".join(path.read_text() for path in (REPOSITORY / "workflow" / "rules").glob("*.smk"))
    rules = {*re.findall(r"^rule (\w+):", text, re.MULTILINE)}
    assert rules - ELSEWHERE <= {*jobs}
