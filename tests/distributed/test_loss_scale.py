"""float16: the loss is scaled, gradients are unscaled before use, and all ranks skip a step that overflows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cellmill.runs.folder import TrainFolder
from cellmill.train import step_guard
from tests.distributed import cases
from tests.distributed.conformance import LAYOUTS, PIPELINES, PP, TP
from tests.distributed.conftest import options
from tests.distributed.pool import Pool
from tests.tiers import quick

STEPS = 6
LOW = 2.0**8  # small enough that nothing overflows by itself; at the initial scale of a run the first steps would
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


def test_a_new_run_begins_with_the_scale_of_torchs_scaler_and_grows_as_often() -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert step_guard.LossScale(torch.device("cpu")).read() == (scaler.get_scale(), 0)
    assert scaler.get_growth_interval() == step_guard.GROWTH_STEPS


@pytest.mark.parametrize("layout", quick(MOST, [TP]))
def test_an_overflow_on_one_process_is_skipped_by_all_and_halves_the_scale(
    pool: Pool, corpus: str, half: np.ndarray, tmp_path: Path, layout: str
) -> None:
    spread = options(MOST[layout] | HALF)
    found = pool.run(
        "overflow", corpus=corpus, options=spread, folder=str(tmp_path), steps=STEPS, at=4, rank=1, initial=LOW
    )
    for rank in found:
        assert [line[3] for line in rank] == [True, True, True, False, True, True], "a step is taken by all or by none"
    lines = found[0]
    assert [line[2] for line in lines] == [LOW] * 3 + [LOW / 2] * 3
    assert [line[1] is None for line in lines] == [False] * 3 + [True] + [False] * 2
    # up to the overflow this is the run of one process
    np.testing.assert_allclose([line[0] for line in lines[:3]], half[:3, 0], rtol=5e-3)
    np.testing.assert_allclose([line[1] for line in lines[:3]], half[:3, 1], rtol=2e-2)


def test_the_loss_scale_falls_after_overflows_and_grows_after_good_steps(
    alone: None, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_guard, "GROWTH_STEPS", 2)
    found = cases.overflow(
        corpus, options(HALF, train={"steps": 20}), str(tmp_path), 20, at=-1, rank=0, initial=2.0**24
    )
    changed, scales = [line[3] for line in found], [line[2] for line in found]
    first = changed.index(True)
    assert first > 4
    assert scales[:first] == [2.0 ** (23 - step) for step in range(first)]
    assert scales[first : first + 2] == [scales[first - 1], 2 * scales[first - 1]]
    assert TrainFolder(tmp_path).newest_whole()[0].state()["progress"]["loss_scale"] == scales[-1]  # type: ignore[union-attr]


def test_a_resumed_run_keeps_its_loss_scale(
    alone: None, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_guard, "GROWTH_STEPS", 4)
    monkeypatch.setattr(step_guard, "INITIAL_SCALE", LOW)
    train = {"checkpoint_every_steps": 3, "schedule": "constant"}
    whole = cases.curve(corpus, options(HALF, train=train), str(tmp_path / "whole"), STEPS)
    cases.curve(corpus, options(HALF, train=train), str(tmp_path / "halves"), 3)
    assert cases.curve(corpus, options(HALF, train=train), str(tmp_path / "halves"), STEPS, load=True) == whole[3:]
    for name in ("whole", "halves"):
        checkpoint, _ = TrainFolder(tmp_path / name).newest_whole()
        assert checkpoint is not None
        progress = checkpoint.state()["progress"]
        assert (progress["loss_scale"], progress["good_steps"]) == (2 * LOW, 2)
