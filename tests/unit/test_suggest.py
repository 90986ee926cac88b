"""plan --suggest proposes layouts that a plan accepts, the best first, and reports the others."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from small_corpus import write_corpus

from cellmill.cli import main
from cellmill.config.machine import Machine
from cellmill.config.options import PlanOptions
from cellmill.planner.cost import amount
from cellmill.planner.search import Suggestions, sections, suggest, table
from cellmill.planner.work import Cells, detected_genes
from cellmill.stages import plan

SECTIONS: dict[str, Any] = {
    "tokens": {"max_tokens": 2048},
    "stream": {"lanes": 8},
    "model": {"family": "encoder", "hidden": 1024, "layers": 16, "heads": 16},
    "objective": {"name": "masked_value"},
    "parallel": {"precision": "bf16-mixed"},
    "plan": {},
    "train": {"epochs": 1, "global_batch": 512, "token_budget": 16384},
}


MACHINE = Machine(nodes="4", nproc_per_node=8)


def _options(**changes: dict[str, Any]) -> PlanOptions:
    return PlanOptions.model_validate({name: value | changes.get(name, {}) for name, value in SECTIONS.items()})


def _suggest(nodes: int = 4, device: str = "h100", **changes: dict[str, Any]) -> tuple[Suggestions, PlanOptions]:
    options = _options(**changes)
    cells = Cells(np.full(10_000, 2048), 20_000)
    return suggest(options, cells, Machine(nodes=str(nodes), nproc_per_node=8), device), options


@pytest.mark.full
def test_a_suggested_layout_is_planned_with_the_same_numbers(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, 250)
    base = {
        "tokens": {"max_tokens": 16},
        "train": {"epochs": None, "steps": 20, "global_batch": 64, "token_budget": 64},
    }
    options = _options(**base, model={"hidden": 64, "layers": 4, "heads": 4})
    cells = Cells(np.minimum(detected_genes(corpus), 16), 40, corpus.splits["val"].n_obs)
    machine = Machine(nodes="2", nproc_per_node=4)
    suggestions = suggest(options, cells, machine, "h100")
    assert len(suggestions.fitting) > 10
    for suggestion in suggestions.fitting[:4]:
        tree = yaml.safe_load(sections(suggestion.options, options))
        changed = PlanOptions.model_validate({**options.model_dump(), "parallel": tree["parallel"]})
        if "stream" in tree:
            changed = changed.model_copy(update={"stream": changed.stream.model_copy(update=tree["stream"])})
        assert changed == suggestion.options
        plan.plan(options=changed, manifest=corpus.path, out=tmp_path / "plan.json", machine=machine, device="h100")
        planned = json.loads((tmp_path / "plan.json").read_text())
        assert planned["memory"]["total_bytes"] == suggestion.cost.memory.total
        assert planned["hours"] == pytest.approx(suggestion.cost.hours)


def test_the_fastest_come_first_and_layouts_that_do_not_fit_are_counted() -> None:
    suggestions, options = _suggest(plan={"memory_gb": 12})
    hours = [suggestion.cost.hours or 0 for suggestion in suggestions.fitting]
    assert all(after > 0.97 * before for before, after in itertools.pairwise(hours))
    assert all(suggestion.cost.memory.total <= 0.9 * 12e9 for suggestion in suggestions.fitting)
    assert min(suggestions.too_large) > 0.9 * 12e9
    lines = table(suggestions, options, MACHINE, "h100").splitlines()
    assert lines[:2] == ["4 nodes x 8 h100; memory per process, bytes sent per process and step", ""]
    assert lines[2].split() == ["memory", "hours", "MFU", "intra-node", "inter-node", "layout"]
    assert lines[13] == ""
    fitting, too_large = len(suggestions.fitting), len(suggestions.too_large)
    assert lines[14].startswith(f"{fitting} layouts fit, {too_large} do not: the smallest")


def test_the_smallest_layout_is_reported_if_nothing_fits() -> None:
    suggestions, options = _suggest(nodes=1, plan={"memory_gb": 0.5})
    assert not suggestions.fitting
    assert table(suggestions, options, MACHINE, "h100").splitlines()[2:5] == [
        "no layout fits",
        "",
        f"0 layouts fit, {len(suggestions.too_large)} do not: the smallest needs {amount(min(suggestions.too_large))}",
    ]


def test_refused_layouts_are_listed_with_their_reason() -> None:
    suggestions, options = _suggest(train={"global_batch": 24})
    text = table(suggestions, options, MACHINE, "h100")
    assert sum(suggestions.refused.values()) > 0
    assert "refused: stream.lanes 8 is not a multiple of 32 processes" in text


def test_lanes_are_raised_to_a_number_that_all_ranks_can_share() -> None:
    suggestions, options = _suggest(nodes=8)
    best = suggestions.fitting[0].options
    assert best.stream.lanes == 64
    assert yaml.safe_load(sections(best, options))["stream"] == {"lanes": 64}


def test_layouts_are_suggested_without_a_corpus(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--options", json.dumps(SECTIONS), "--suggest", "--nodes", "128", "--nproc-per-node", "8"]
    assert main([*words, "--device", "a100", "--cells", "5000"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "no --manifest given; assuming 5,000 cells of 2,048 tokens each, 20,000 genes, and 625 validation cells\n\n"
    )
    assert "# the best layout, for config.yaml\nparallel:\n  strategy: " in out


def test_a_run_is_planned_without_a_corpus(capsys: pytest.CaptureFixture[str]) -> None:
    train = SECTIONS["train"] | {"global_batch": 1536, "val_cells": 1000}
    sections = json.dumps(SECTIONS | {"train": train, "stream": {"lanes": 96}})
    # a range of nodes, as in an elastic profile, is planned for the fewest
    words = ["plan", "--options", sections, "--nodes", "2-4", "--nproc-per-node", "4", "--cells", "5e7"]
    with pytest.raises(SystemExit):
        main([*words, "--genes", "0"])
    assert main([*words, "--device", "H100"]) == 0
    out = capsys.readouterr().out
    assert "cells       50,000,000 for training, 2,048 tokens each" in out
    assert "processes   8 x h100" in out
    assert "validation  163 times 1,000 cells, 0% of the hours\n" in out


def test_validation_time_is_counted_and_a_large_share_gets_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--options", json.dumps(SECTIONS), "--device", "h100", "--cells", "50000000"]) == 0
    # 97,657 steps of 512 cells; 489 times 6,250,000 cells forward, a third of a step each
    seen = 489 * 6_250_000 / 3
    share = seen / (seen + 50_000_000)
    assert (
        f"validation  489 times 6,250,000 cells, {share:.0%} of the hours: lower train.val_cells or raise "
        "train.val_every_steps\n"
    ) in capsys.readouterr().out


def test_a_device_without_bfloat16_is_refused_with_the_alternative(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--options", json.dumps(SECTIONS), "--device", "v100"]
    assert main(words) == 2
    line = "parallel.precision bf16-mixed: a v100 has no bfloat16; set it to 16-mixed\n"
    assert capsys.readouterr().err == f"cellmill plan: {line}"
    assert main([*words, "--suggest", "--nproc-per-node", "4"]) == 2
    captured = capsys.readouterr()
    assert f"refused: {line}" in captured.out
    assert captured.err == "cellmill plan: no layout fits, for the reasons above\n"


def test_compile_and_offload_of_the_configuration_stay() -> None:
    suggestions, _ = _suggest(parallel={"compile": True, "cpu_offload": "optimizer"})
    assert {(each.options.parallel.compile, each.options.parallel.cpu_offload) for each in suggestions.fitting} == {
        (True, "optimizer")
    }
    assert "selective" not in {each.options.parallel.activation_checkpointing for each in suggestions.fitting}
    plain, _ = _suggest()
    assert {each.options.parallel.activation_checkpointing for each in plain.fitting} == {None, "selective", "full"}
