"""Steps with a non-finite loss or gradient norm: skipped on all ranks, counted, and named in the
final error.

In float16 the loss is scaled, gradients are unscaled before use, and the scale halves after such a
step.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cellmill.runs.folder import TrainFolder
from cellmill.train import step_guard
from tests.checks import quick
from tests.distributed import cases
from tests.distributed.conformance import LAYOUTS, PIPELINES, PP, TP
from tests.distributed.conftest import options
from tests.distributed.pool import Pool

EACH = LAYOUTS | PIPELINES


@pytest.mark.parametrize(
    "layout", quick(["ddp", "HYBRID_SHARD", TP, PP, "pp 2, 1F1B x tp 2"], ["HYBRID_SHARD", PP])
)
def test_a_skipped_step_leaves_parameters_unchanged(
    pool: Pool, corpus: str, tmp_path: Path, layout: str
) -> None:
    run = options(EACH[layout], train={"schedule": "constant"})
    good = pool.run(
        "trained", corpus=corpus, options=run, folder=str(tmp_path / "2"), steps=2, bad=[]
    )
    skipped = pool.run(
        "trained", corpus=corpus, options=run, folder=str(tmp_path / "4"), steps=4, bad=[3, 4]
    )
    for before, after in zip(good, skipped):
        assert all(
            np.array_equal(a, b)
            for (_, a), (_, b) in zip(after["last"], before["last"], strict=True)
        )
        assert after["moments"] == before["moments"]
        assert (after["progress"]["skipped_steps"], after["progress"]["skipped_in_a_row"]) == (2, 2)
        assert after["progress"]["cells"] == 64
    assert [line for line in skipped[0]["lines"] if "skipped" in line] == [
        {"step": step, "skipped": "loss nan and gradient norm nan", "skipped_steps": step - 2}
        for step in (3, 4)
    ]


NAMED = [("ddp", 1, 4), (TP, 2, 8), (PP, 1, 8)]


@pytest.mark.parametrize(("layout", "rank", "cells"), quick(NAMED, NAMED[:1]))
def test_a_resumed_run_repeats_its_skipped_steps(
    pool: Pool, corpus: str, tmp_path: Path, layout: str, rank: int, cells: int
) -> None:
    run = options(EACH[layout], train={"steps": 9, "checkpoint_every_steps": 4, "max_bad_steps": 3})
    each = {"corpus": corpus, "options": run, "bad": [2, 4, 5, 6], "steps": 9}
    alone = pool.run("trained", folder=str(tmp_path / "alone"), **each)
    assert len({of_rank["error"] for of_rank in alone}) == 1, "ranks disagree"
    more = rf" and {cells - 4} more cells \(see the log\)" if cells > 4 else ""
    cell = r"sim:\S+ \(train-\S+\.h5ad row \d+\)"
    assert re.fullmatch(
        r"loss nan and gradient norm nan at step 6, the last of 3 bad steps in a row \(train\.max_bad_steps 3\): "
        r"lower train\.lr \(0\.001\) or raise train\.warmup_steps; earlier checkpoints are intact; "
        rf"rank {rank} had {cell}, {cell}, {cell}, {cell}{more}",
        alone[0]["error"],
    )
    shutil.copytree(tmp_path / "alone", tmp_path / "resumed")
    resumed = pool.run("trained", folder=str(tmp_path / "resumed"), load=True, **each)
    assert resumed[0]["lines"][0]["step"] == 5
    for key in ("error", "progress", "moments"):
        assert [of_rank[key] for of_rank in resumed] == [of_rank[key] for of_rank in alone], key


def test_training_continues_after_an_infinite_validation_loss(
    alone: None, corpus: str, tmp_path: Path
) -> None:
    found = cases.trained(
        corpus, options(train={"val_every_steps": 2}), str(tmp_path), 4, bad_validation=True
    )
    assert found["done"]
    told = [line for line in found["lines"] if "skipped" in line]
    assert told == [{"step": step, "skipped": "validation loss nan"} for step in (2, 4)]
    assert [found["progress"][key] for key in ("val_loss", "best_val_loss", "best_step")] == [
        None,
        None,
        None,
    ]


STEPS = 6
# small enough that nothing overflows by itself; at the initial scale of a run the first steps would
LOW = 2.0**8
HALF = {"precision": "16-mixed"}
MOST: dict[str, dict[str, Any]] = {
    "ddp": LAYOUTS["ddp"],
    "FULL_SHARD": LAYOUTS["FULL_SHARD"] | {"activation_checkpointing": "selective"},
    TP: LAYOUTS[TP],
    "pp 2": PIPELINES[PP],
    "full offload": LAYOUTS["FULL_SHARD"] | {"cpu_offload": "full"},
    "optimizer offload": LAYOUTS["ddp"] | {"cpu_offload": "optimizer"},
}


@pytest.fixture(scope="module")
def exact(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return np.array(cases.curve(corpus, options(), str(tmp_path_factory.mktemp("exact")), STEPS))


@pytest.fixture(scope="module")
def half(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    folder = str(tmp_path_factory.mktemp("half"))
    found = cases.overflow(corpus, options(HALF), folder, STEPS, at=-1, rank=0, initial=LOW)
    return np.array([line[:2] for line in found])


def test_norms_are_of_true_gradients(exact: np.ndarray, half: np.ndarray) -> None:
    assert not np.array_equal(half, exact), "16-mixed computed in float32"
    np.testing.assert_allclose(half, exact, rtol=1e-2)


def test_a_new_loss_scale_matches_the_scaler_of_torch() -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert step_guard.LossScale(torch.device("cpu")).read() == (scaler.get_scale(), 0)
    assert scaler.get_growth_interval() == step_guard.GROWTH_STEPS


@pytest.mark.parametrize("layout", quick(MOST, [TP]))
def test_an_overflow_on_one_process_is_skipped_by_all(
    pool: Pool, corpus: str, half: np.ndarray, tmp_path: Path, layout: str
) -> None:
    spread = options(MOST[layout] | HALF)
    found = pool.run(
        "overflow",
        corpus=corpus,
        options=spread,
        folder=str(tmp_path),
        steps=STEPS,
        at=4,
        rank=1,
        initial=LOW,
    )
    for rank in found:
        assert [line[3] for line in rank] == [True, True, True, False, True, True], (
            "a step is taken by all or by none"
        )
    lines = found[0]
    assert [line[2] for line in lines] == [LOW] * 3 + [LOW / 2] * 3
    assert [line[1] is None for line in lines] == [False] * 3 + [True] + [False] * 2
    # up to the overflow this is the run of one process
    np.testing.assert_allclose([line[0] for line in lines[:3]], half[:3, 0], rtol=5e-3)
    np.testing.assert_allclose([line[1] for line in lines[:3]], half[:3, 1], rtol=2e-2)


def test_the_loss_scale_follows_overflows(
    alone: None, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_guard, "GROWTH_STEPS", 2)
    found = cases.overflow(
        corpus,
        options(HALF, train={"steps": 20}),
        str(tmp_path),
        20,
        at=-1,
        rank=0,
        initial=2.0**24,
    )
    changed = [line[3] for line in found]
    scales = [line[2] for line in found]
    first = changed.index(True)
    assert first > 4
    assert scales[:first] == [2.0 ** (23 - step) for step in range(first)]
    assert scales[first : first + 2] == [scales[first - 1], 2 * scales[first - 1]]
    assert TrainFolder(tmp_path).newest_whole()[0].state()["progress"]["loss_scale"] == scales[-1]


def test_a_resumed_run_keeps_its_loss_scale(
    alone: None, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_guard, "GROWTH_STEPS", 4)
    monkeypatch.setattr(step_guard, "INITIAL_SCALE", LOW)
    train = {"checkpoint_every_steps": 3, "schedule": "constant"}
    whole = cases.curve(corpus, options(HALF, train=train), str(tmp_path / "whole"), STEPS)
    cases.curve(corpus, options(HALF, train=train), str(tmp_path / "halves"), 3)
    assert (
        cases.curve(corpus, options(HALF, train=train), str(tmp_path / "halves"), STEPS, load=True)
        == whole[3:]
    )
    for name in ("whole", "halves"):
        checkpoint, _ = TrainFolder(tmp_path / name).newest_whole()
        assert checkpoint is not None
        progress = checkpoint.state()["progress"]
        assert (progress["loss_scale"], progress["good_steps"]) == (2 * LOW, 2)
