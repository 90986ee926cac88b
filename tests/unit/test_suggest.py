"""plan --suggest proposes what a plan accepts, the best first, and says what it left out."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from small_corpus import write_corpus

from cellmill.cli import main
from cellmill.config.machine import Machine
from cellmill.config.options import PlanOptions
from cellmill.stages import plan
from cellmill.stages.plan_fit import amount
from cellmill.stages.plan_suggest import Suggestions, sections, suggest, table
from cellmill.stages.plan_work import Cells

SECTIONS: dict[str, Any] = {
    "tokens": {"max_tokens": 2048},
    "stream": {"lanes": 8},
    "model": {"family": "masked", "hidden": 1024, "layers": 16, "heads": 16},
    "parallel": {"precision": "bf16-mixed"},
    "plan": {},
    "train": {"epochs": 1, "global_batch": 512, "token_budget": 16384},
}


def _options(**changes: dict[str, Any]) -> PlanOptions:
    return PlanOptions.model_validate({name: value | changes.get(name, {}) for name, value in SECTIONS.items()})


def _suggest(nodes: int = 4, device: str = "h100", **changes: dict[str, Any]) -> tuple[Suggestions, PlanOptions]:
    options = _options(**changes)
    cells = Cells(np.full(10_000, 2048), 20_000)
    return suggest(options, cells, Machine(nodes=str(nodes), nproc_per_node=8), device), options


def test_what_is_suggested_is_planned_with_the_same_figures(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, 250)
    base = {
        "tokens": {"max_tokens": 16},
        "train": {"epochs": None, "steps": 20, "global_batch": 64, "token_budget": 64},
    }
    options = _options(**base, model={"hidden": 64, "layers": 4, "heads": 4})
    cells = plan._cells(options, corpus)
    machine = Machine(nodes="2", nproc_per_node=4)
    found = suggest(options, cells, machine, "h100")
    assert len(found.fitting) > 10
    for suggestion in found.fitting[:4]:
        tree = yaml.safe_load(sections(suggestion.options, options))
        changed = PlanOptions.model_validate({**options.model_dump(), "parallel": tree["parallel"]})
        if "stream" in tree:
            changed = changed.model_copy(update={"stream": changed.stream.model_copy(update=tree["stream"])})
        assert changed == suggestion.options
        plan.run(options=changed, manifest=corpus.path, out=tmp_path / "plan.json", machine=machine, device="h100")
        planned = json.loads((tmp_path / "plan.json").read_text())
        assert planned["memory"]["total_bytes"] == suggestion.cost.memory.total
        assert planned["hours"] == pytest.approx(suggestion.cost.hours)


def test_the_fastest_come_first_and_what_does_not_fit_is_counted() -> None:
    found, options = _suggest(plan={"memory_gb": 12})
    hours = [suggestion.cost.hours or 0 for suggestion in found.fitting]
    assert all(after > 0.97 * before for before, after in itertools.pairwise(hours))
    assert all(suggestion.cost.memory.total <= 0.9 * 12e9 for suggestion in found.fitting)
    assert found.too_large > 0
    assert found.smallest_bytes is not None
    assert found.smallest_bytes > 0.9 * 12e9
    lines = table(found, options).splitlines()
    assert lines[0].split() == ["memory", "hours", "MFU", "in", "node", "to", "others", "layout"]
    assert lines[11] == ""
    assert lines[12].startswith(f"{len(found.fitting)} layouts fit, {found.too_large} do not: the smallest")


def test_where_nothing_fits_it_is_said_how_much_is_missing() -> None:
    found, options = _suggest(nodes=1, plan={"memory_gb": 0.5})
    assert not found.fitting
    assert found.smallest_bytes is not None
    assert table(found, options).splitlines()[:3] == [
        "no layout fits",
        "",
        f"0 layouts fit, {found.too_large} do not: the smallest of them needs {amount(found.smallest_bytes)}",
    ]


def test_what_is_refused_is_given_with_its_reason() -> None:
    found, options = _suggest(train={"global_batch": 24})
    text = table(found, options)
    assert sum(found.refused.values()) > 0
    assert "refused: stream.lanes 8 is not a multiple of 32 processes" in text


def test_lanes_are_raised_to_what_the_processes_share() -> None:
    found, options = _suggest(nodes=8)
    best = found.fitting[0].options
    assert best.stream.lanes == 64
    assert yaml.safe_load(sections(best, options))["stream"] == {"lanes": 64}


def test_without_a_corpus_and_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--options", json.dumps(SECTIONS), "--suggest", "--nodes", "128", "--nproc-per-node", "8"]
    assert main([*words, "--device", "a100", "--cells", "5000"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no --manifest: assumed are 5,000 cells of 2,048 tokens each, 20,000 genes\n\n")
    assert "# the first, for config.yaml\nparallel:\n  strategy: " in out
    code = "import sys, cellmill.stages.plan_suggest; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_suggest_the_manifest_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--options", json.dumps(SECTIONS)]) == 2
    assert capsys.readouterr().err == "cellmill plan: --manifest and --out are wanted; only --suggest does without\n"
