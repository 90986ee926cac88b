"""A run whose patience is over is done, in every layout and after a resume; the best checkpoint is by its metric."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cellmill.cli import main
from cellmill.config.run import AUTO_MIN_STEPS
from cellmill.runs.folder import TrainFolder, read_lines
from tests.distributed import cases
from tests.distributed.command import Run
from tests.distributed.conftest import options
from tests.distributed.pool import Pool

PATIENCE = {"early_stop_patience": 2, "best_metric": "effective_rank"}
LAYOUTS: list[dict[str, Any]] = [{"strategy": "ddp"}, {"pp": 2, "schedule": "ZBV", "tp": 2}]


def _run(layout: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    # the effective rank grows: with the smallest as the best, the first validation stays it
    given = {"steps": 9, "lr": 1e-2, "schedule": "constant", "val_every_steps": 1, **PATIENCE, **train}
    return options(layout, train=given)


@pytest.mark.parametrize("layout", [LAYOUTS[0], pytest.param(LAYOUTS[1], marks=pytest.mark.full)], ids=str)
def test_all_ranks_end_at_the_same_validation_in_every_layout_and_after_a_resume(
    pool: Pool, alone: None, corpus: str, tmp_path: Path, layout: dict[str, Any]
) -> None:
    whole = cases.trained(corpus, _run(), str(tmp_path / "whole"), 9)["lines"]
    end = max(line["step"] for line in whole)
    assert end < 9
    given = {"corpus": corpus, "options": _run(layout), "folder": str(tmp_path / "spread")}
    halves = [pool.run("trained", steps=steps, load=steps > 2, **given)[0]["lines"] for steps in (2, 9)]
    for key in ("loss", "val_loss"):
        found, expected = ([line[key] for line in of if key in line] for of in ([*halves[0], *halves[1]], whole))
        np.testing.assert_allclose(found, expected, atol=1e-4)
    best, newest = (TrainFolder(tmp_path / "spread").best().step, TrainFolder(tmp_path / "spread").saved_step())
    assert (best, newest) == (TrainFolder(tmp_path / "whole").best().step, end)


@pytest.mark.full
def test_the_command_takes_it_for_done_and_goes_on_when_patience_is_raised(corpus: str, tmp_path: Path) -> None:
    run = Run(corpus, tmp_path / "train")
    said = "".join(run.train(_run(steps=50), nproc_per_node=2))
    status = run.read("status.json")
    assert (status["state"], status["steps"]) == ("done", 50)
    assert status["step"] - status["best_step"] == 2
    best = f"has not improved in 2 validations (best {status['best_value']:.6g}"
    assert f"step {status['step']}: effective_rank {best}" in said
    assert f"{run.out}: this run is already done" in run.train(_run(steps=50), nproc_per_node=2)[0]
    run.train(_run(steps=50, early_stop_patience=3))
    assert run.read("status.json")["step"] > status["step"]
    words = ["consolidate", "--train", str(run.out), "--vocabulary", f"{corpus}/vocabulary.tsv", "--out", str(tmp_path)]
    assert main([*words, "--options", '{"consolidate": {}}']) == 0
    assert json.loads((tmp_path / "config.json").read_text())["step"] == status["best_step"]


def test_auto_trains_as_many_steps_as_the_number_set_by_hand_and_continues_it(corpus: str, tmp_path: Path) -> None:
    runs = [Run(corpus, tmp_path / name) for name in ("auto", "number")]
    curves = []
    for run, steps in zip(runs, ("auto", AUTO_MIN_STEPS)):
        run.train(_run(steps=steps, schedule="cosine"))  # whose rate in each step depends on the number of steps
        assert run.read("status.json")["steps"] == AUTO_MIN_STEPS
        lines = [line for line in read_lines(run.out / "metrics.jsonl") if "loss" in line]
        curves.append([(line["loss"], line["grad_norm"], line["lr"]) for line in lines])
    assert curves[0] == curves[1]
    assert f"{runs[1].out}: this run is already done" in runs[1].train(_run(steps="auto", schedule="cosine"))[0]


def test_a_validation_that_a_stop_left_out_is_in_the_checkpoint_of_its_step(
    alone: None, corpus: str, tmp_path: Path
) -> None:
    saved = []
    for going_on in (False, True):
        made, _ = cases.trainer(corpus, _run(val_every_steps=2), str(tmp_path), 9, load=going_on)
        made.stop.received = "SIGTERM"  # asked to stop in its first step, and stopped after the second
        assert not made.run()
        made.close()
        states = [checkpoint.state()["progress"] for checkpoint in TrainFolder(tmp_path).checkpoints()]
        saved.append([(state["step"], state["val_step"]) for state in states])
    assert saved == [[(2, None)], [(2, 2), (4, 2)]]
