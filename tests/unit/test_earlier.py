"""A training folder of which another length, other options or other data are asked for."""

import json
from pathlib import Path
from typing import Any

import pytest

from cellmill.config.load import stored_options
from cellmill.errors import ConfigError
from cellmill.files import write_json
from cellmill.runs.folder import TrainFolder
from cellmill.runs.identity import identity, is_done
from tests.unit.test_train_folder import TREE


def options(**train: Any) -> Any:
    length = {"steps": None} if "epochs" in train else {}
    return stored_options(TREE | {"train": TREE["train"] | length | train}, "test")


def wanted(total: int, data: str = "aaaa", **train: Any) -> tuple[dict[str, Any], int]:
    """run.json and `total` steps of a requested training."""
    given = train if "epochs" in train else {"steps": total} | train
    return {"identity": identity(options(**given), None), "fingerprint": data}, total


def trained(path: Path, step: int, given: Any = None, **progress: int) -> TrainFolder:
    """A run of 10 steps, of the options `given`, that has a checkpoint at `step`, with more of its progress."""
    given = options() if given is None else given
    folder = TrainFolder(path / "run" / "train")
    saved = folder.begin(step)
    progress = {"step": step, "best_step": step, **progress}
    state = {"progress": progress, "steps": 10, "world_size": 1, "fingerprint": "aaaa"}
    stored = {"options": given.model_dump(mode="json"), "identity": identity(given, None)}
    write_json(saved / "state.json", state | stored)
    folder.finish(saved, keep=2)
    if step == 10:
        write_json(folder.path / "status.json", {"state": "done"})
    return folder


@pytest.mark.parametrize(("step", "steps"), [(6, 20), (10, 20)])
def test_another_length_goes_on_and_a_finished_run_is_not_done_any_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int, steps: int
) -> None:
    folder = trained(tmp_path, step)
    assert not is_done(folder, *wanted(steps))
    assert capsys.readouterr().out == (
        f"{folder.path}: going on from step {step} of 10, now {steps}: from here the learning rate is that of a run of "
        "the new length\n"
    )
    assert not (folder.path / "status.json").exists()
    assert folder.saved_step() == step


def test_a_run_that_ended_early_is_done_at_any_length_until_its_patience_is_raised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(tmp_path, 6, stale_validations=3)
    for steps in (10, 20):
        assert is_done(folder, *wanted(steps, early_stop_patience=3))
    assert "ended early at step 6, after 3 validations without an improvement; raise train.early_stop_patience (3)" in (
        capsys.readouterr().out
    )
    assert json.loads((folder.path / "status.json").read_text())["state"] == "done"
    assert not is_done(folder, *wanted(10, early_stop_patience=4))
    assert not (folder.path / "status.json").exists()


@pytest.mark.parametrize("length", [{"epochs": 2.0}, {"steps": "auto"}], ids=str)
def test_the_same_number_of_steps_written_as_epochs_or_auto_is_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], length: dict[str, Any]
) -> None:
    assert is_done(trained(tmp_path / "a", 10), *wanted(10, **length))
    assert not is_done(trained(tmp_path / "b", 6), *wanted(10, **length))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("step", "steps"), [(6, 6), (10, 9)])
def test_a_length_that_ends_before_the_step_reached_is_refused(tmp_path: Path, step: int, steps: int) -> None:
    folder = trained(tmp_path, step)
    with pytest.raises(ConfigError) as error:
        is_done(folder, *wanted(steps))
    assert str(error.value) == (
        f"{folder.path}: it holds a training of {step} steps, and 10 steps in all were lowered to {steps}; set "
        f"train.steps above {step}, or set that training aside and start afresh with `cellmill train --restart` (of a "
        "workflow: `snakemake --config restart=run`)"
    )
    assert (folder.path / "status.json").exists() == (step == 10)


@pytest.mark.parametrize("step", [6, 10])
def test_other_data_are_refused_unless_a_restart_is_asked_for(tmp_path: Path, step: int) -> None:
    folder = trained(tmp_path, step)
    for steps in (10, 20):
        with pytest.raises(ConfigError, match=r"trained on data aaaa, the shards are now bbbb; .* --restart`"):
            is_done(folder, *wanted(steps, "bbbb"))
    assert not is_done(folder, *wanted(10, "bbbb"), restart=True)
    assert (folder.saved_step(), (folder.path / "status.json").exists()) == (0, False)


def test_a_restart_of_the_same_run_is_no_restart_and_of_another_length_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(tmp_path, 6)
    assert not is_done(folder, *wanted(10), restart=True)
    assert folder.saved_step() == 6
    assert "--restart changes nothing" in capsys.readouterr().out
    assert not is_done(folder, *wanted(20), restart=True)
    assert capsys.readouterr().out == (
        f"restart (train.steps 10 -> 20): the earlier training is now in {folder.path}/superseded-001\n"
    )
    saved = folder.path / "superseded-001" / "checkpoints" / "step-00000006" / "state.json"
    assert json.loads(saved.read_text())["steps"] == 10
