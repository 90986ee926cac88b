"""Runs that go on from a checkpoint of another one have the numbers of runs of their own."""

from pathlib import Path
from typing import Any

import pytest

from cellmill.cli import main
from cellmill.runs.folder import TrainFolder, read_lines, training_seconds
from tests.distributed.command import words
from tests.distributed.conftest import options

BRANCH = 5
WSD: dict[str, Any] = {
    "schedule": "wsd",
    "decay_frac": 0.3,
    "warmup_steps": 2,
    "keep_checkpoints": 1,
    "ema_decay": 0.9,
    "checkpoint_every_steps": 100,
    "val_every_steps": 2,
    "log_every_steps": 1,
}


def _train(corpus: str, out: Path, trunk: Path | None = None, **train: Any) -> int:
    given = {} if trunk is None else {"trunk": trunk}
    return main(words(corpus, out, options(train=WSD | train), **given)[3:])


def _curve(folder: Path) -> list[dict[str, Any]]:
    kept = ("step", "loss", "lr", "grad_norm", "cells", "val_loss", "effective_rank")
    return [
        {key: line[key] for key in kept if key in line}
        for line in read_lines(folder / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def trunk(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 14 steps, which does not decay before step 9; its checkpoint of step 5."""
    folder = tmp_path_factory.mktemp("trunk") / "train"
    assert _train(corpus, folder, steps=14, keep_steps=[BRANCH]) == 0
    return folder / "checkpoints" / f"step-{BRANCH:08}"


@pytest.mark.parametrize("steps", [14, pytest.param(8, marks=pytest.mark.full)])
def test_a_branch_is_bitwise_the_run_of_its_length(
    corpus: str, trunk: Path, tmp_path: Path, steps: int
) -> None:
    alone = trunk.parents[1]
    branch = tmp_path / "branch"
    if steps != 14:
        alone = tmp_path / "alone"
        assert _train(corpus, alone, steps=steps) == 0
    assert _train(corpus, branch, trunk, steps=steps, keep_steps=[BRANCH]) == 0
    assert _curve(branch) == _curve(alone)
    assert {line["step"] for line in _curve(branch)} == set(range(1, steps + 1))
    own_s = training_seconds(branch)
    (branch / "branch.json").unlink()
    assert 0 < own_s < training_seconds(branch)
    ends = [TrainFolder(folder).checkpoints()[-1] for folder in (alone, branch)]
    for file in ends[0].path.glob("*.distcp"):
        assert (ends[1].path / file.name).read_bytes() == file.read_bytes()
    assert ends[1].best_step() == ends[0].best_step()
    assert ends[1].state()["options"]["train"]["steps"] == steps


@pytest.mark.full
def test_a_branch_that_has_begun_needs_no_trunk(corpus: str, trunk: Path, tmp_path: Path) -> None:
    assert _train(corpus, tmp_path / "branch", trunk, steps=8) == 0
    branch = TrainFolder(tmp_path / "branch").checkpoints()[-1]
    assert _train(corpus, tmp_path / "branch", trunk, steps=8) == 0  # done: nothing is copied again
    assert branch.path.exists()
    (tmp_path / "branch" / "status.json").unlink()
    assert (
        _train(corpus, tmp_path / "branch", tmp_path / "gone" / "checkpoints" / trunk.name, steps=9)
        == 0
    )


@pytest.mark.parametrize(
    ("at", "change", "message"),
    [
        (
            BRANCH,
            {"steps": 6},
            "step 5 has learning rate 0.00055, in its trunk 0.001: expected the same until step 5",
        ),
        (
            BRANCH,
            {"steps": 5},
            "goes on from step 5 of its trunk and has 5 steps in all; set train.steps above that",
        ),
        (
            BRANCH,
            {"steps": 8, "seed": 3},
            "of another configuration (train.seed 0 -> 3); make them equal, or set init",
        ),
        (3, {"steps": 8}, "no checkpoint of step 3; there are those of steps"),
    ],
)
def test_another_training_cannot_be_a_trunk(
    corpus: str,
    trunk: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    at: int,
    change: dict[str, Any],
    message: str,
) -> None:
    assert _train(corpus, tmp_path / "branch", trunk.with_name(f"step-{at:08}"), **change) == 2
    assert message in capsys.readouterr().err
    assert not TrainFolder(tmp_path / "branch").checkpoints()
