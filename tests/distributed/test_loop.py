"""What the loop does beside steps: it ends when patience is over, averages the weights, and records
traces of steps.
"""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cellmill.cli import main
from cellmill.config.run import AUTO_MIN_STEPS, Train
from cellmill.data.shards import manifest as manifests
from cellmill.data.shards.manifest import Manifest
from cellmill.errors import DataError
from cellmill.launch.signals import StopFlag
from cellmill.runs.folder import Checkpoint, TrainFolder, read_lines
from cellmill.stages.export import model_card
from cellmill.track.tracker import JsonlTracker
from cellmill.train import staging
from cellmill.train.checkpoint import CheckpointReader, load_tensors
from cellmill.train.staging import verify_shards
from tests.checks import quick
from tests.distributed import cases
from tests.distributed.command import Run
from tests.distributed.conftest import options
from tests.distributed.pool import Pool

PATIENCE = {"early_stop_patience": 2, "best_metric": "effective_rank", "best_mode": "max"}
LAYOUTS: list[dict[str, Any]] = [{"strategy": "ddp"}, {"pp": 2, "schedule": "ZBV", "tp": 2}]


def _run(layout: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    # the effective rank falls: the first validation stays the best
    given = {
        "steps": 9,
        "lr": 1e-2,
        "schedule": "constant",
        "val_every_steps": 1,
        **PATIENCE,
        **train,
    }
    return options(layout, train=given)


@pytest.mark.parametrize("layout", quick(LAYOUTS, LAYOUTS[:1]), ids=str)
def test_all_ranks_stop_at_the_same_validation(
    pool: Pool, alone: None, corpus: str, tmp_path: Path, layout: dict[str, Any]
) -> None:
    whole = cases.trained(corpus, _run(), str(tmp_path / "whole"), 9)["lines"]
    end = max(line["step"] for line in whole)
    assert end < 9
    given = {"corpus": corpus, "options": _run(layout), "folder": str(tmp_path / "spread")}
    halves = [
        pool.run("trained", steps=steps, load=steps > 2, **given)[0]["lines"] for steps in (2, 9)
    ]
    for key in ("loss", "val_loss"):
        found = [line[key] for line in (*halves[0], *halves[1]) if key in line]
        expected = [line[key] for line in whole if key in line]
        np.testing.assert_allclose(found, expected, atol=1e-4)
    best = TrainFolder(tmp_path / "spread").best().step
    newest = TrainFolder(tmp_path / "spread").saved_step()
    assert (best, newest) == (TrainFolder(tmp_path / "whole").best().step, end)


@pytest.mark.full
def test_a_finished_run_continues_if_patience_is_raised(corpus: str, tmp_path: Path) -> None:
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
    words = [
        "consolidate",
        "--train",
        str(run.out),
        "--vocabulary",
        f"{corpus}/vocabulary.tsv",
        "--out",
        str(tmp_path),
    ]
    assert main([*words, "--options", '{"consolidate": {}}']) == 0
    assert json.loads((tmp_path / "config.json").read_text())["step"] == status["best_step"]


def test_auto_trains_the_same_steps_as_the_explicit_number(corpus: str, tmp_path: Path) -> None:
    runs = [Run(corpus, tmp_path / name) for name in ("auto", "number")]
    curves = []
    for run, steps in zip(runs, ("auto", AUTO_MIN_STEPS)):
        # whose rate in each step depends on the number of steps
        run.train(_run(steps=steps, schedule="cosine"))
        assert run.read("status.json")["steps"] == AUTO_MIN_STEPS
        lines = [line for line in read_lines(run.out / "metrics.jsonl") if "loss" in line]
        curves.append([(line["loss"], line["grad_norm"], line["lr"]) for line in lines])
    assert curves[0] == curves[1]
    assert (
        f"{runs[1].out}: this run is already done"
        in runs[1].train(_run(steps="auto", schedule="cosine"))[0]
    )


class _Stopped(StopFlag):
    """A flag that is set when it has been asked `times` times, at each step and validation batch."""

    def __init__(self, times: int) -> None:
        self.times = times

    @property
    def received(self) -> str | None:  # type: ignore[override]
        self.times -= 1
        return "SIGTERM" if self.times < 0 else None


@pytest.mark.parametrize(
    "every", [{"val_every_steps": 1}, {"checkpoint_every_steps": 1}, {"val_every_steps": 50}]
)
def test_a_stop_is_honoured_at_the_next_step(
    alone: None, corpus: str, tmp_path: Path, every: dict[str, int]
) -> None:
    given = _run(**{"val_every_steps": 50, "early_stop_patience": None, **every})
    made, _ = cases.trainer(corpus, given, str(tmp_path), 9)
    made.val_stream = made.val_stream if every.get("val_every_steps") == 50 else None
    made.stop = _Stopped(1)  # in the second step
    assert not made.run()
    made.close()
    assert made.progress.step == TrainFolder(tmp_path).saved_step()
    assert made.progress.step == 2 + (every.get("val_every_steps") == 50)
    assert made.watch.warm


def test_a_stop_ends_a_validation_that_a_resume_repeats(
    alone: None, corpus: str, tmp_path: Path
) -> None:
    given = _run(val_every_steps=2, early_stop_patience=None)
    whole = cases.trained(corpus, given, str(tmp_path / "whole"), 4)["lines"]
    lines = []
    for load, times in ((False, 3), (True, 0), (True, 10**6)):
        made, logged = cases.trainer(corpus, given, str(tmp_path / "cut"), 4, load=load)
        # in the second batch of the first validation, then in the first batch of the resumed one
        made.stop = _Stopped(times)
        assert made.run() == (times > 9)
        made.close()
        lines += cases.of_training(logged)
        state = TrainFolder(tmp_path / "cut").checkpoints()[-1].state()["progress"]
        saved = (4, 4) if times > 9 else (2, None)
        assert (state["step"], state["val_step"]) == saved
    assert lines == whole


def test_validations_of_other_cells_are_not_compared(
    alone: None, corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # the effective rank falls: the first validation stays the best
    cases.trained(corpus, _run(early_stop_patience=9), str(tmp_path), 3)
    for val_cells, best_step in ((None, 1), (10**6, 1), (8, None)):
        given = _run(early_stop_patience=9, val_cells=val_cells)
        made, _ = cases.trainer(corpus, given, str(tmp_path), 4, load=True)
        assert made.progress.best_step == best_step
    assert "train.val_cells is 8, and was None up to step 3: " in capsys.readouterr().err
    assert made.run()
    made.close()
    assert (made.progress.best_step, made.progress.stale_validations) == (4, 0)


def test_an_export_has_the_validation_loss_of_its_step(
    alone: None, corpus: str, tmp_path: Path
) -> None:
    train = tmp_path / "train"
    given = _run(val_every_steps=2, keep_steps=[2, 3], early_stop_patience=None)
    lines = cases.trained(corpus, given, str(train), 4)["lines"]
    losses = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}
    assert losses.keys() == {2, 4}
    vocabulary = f"{corpus}/vocabulary.tsv"
    for step in (2, 3, 4):
        chosen = json.dumps({"consolidate": {"checkpoint": step, "cell_digests": False}})
        words = ["consolidate", "--options", chosen, "--train", str(train), "--out", str(tmp_path)]
        assert main([*words, "--vocabulary", vocabulary]) == 0
        config = json.loads((tmp_path / "config.json").read_text())
        assert (config["step"], config["val_loss"]) == (step, losses.get(step))
    card = model_card(config | {"val_loss": None}, 1)
    assert "| validation loss | not validated |" in card


def test_hashed_shards_are_recorded_group_by_group(
    alone: None, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(f"{corpus}/shards", tmp_path / "shards")
    record = tmp_path / "shards" / "verified.json"
    record.unlink(missing_ok=True)
    manifest = Manifest.read(tmp_path / "shards" / "manifest.json")
    names = [file.name for file in manifest.files(("train", "val"))]
    groups = [names[first : first + 2] for first in range(0, len(names), 2)]
    assert len(groups) > 2
    last = tmp_path / "shards" / groups[-1][0]
    whole = last.read_bytes()
    last.write_bytes(b"damaged")
    monkeypatch.setattr(staging, "HASHED_AT_ONCE", 2)
    reached: list[str] = []
    with pytest.raises(DataError, match=last.name):
        verify_shards(manifest, torch.device("cpu"), reached.append)
    assert reached == [f"the hashes of shards from {group[0]} on" for group in groups]
    assert [*json.loads(record.read_text())["files"]] == names[: 2 * len(groups) - 2]
    last.write_bytes(whole)
    hashed: list[str] = []
    real = manifests.sha256_file
    monkeypatch.setattr(
        manifests, "sha256_file", lambda path: hashed.append(path.name) or real(path)
    )
    verify_shards(manifest, torch.device("cpu"))
    assert sorted(hashed) == sorted(groups[-1])
    assert json.loads(record.read_text())["files"].keys() == {*names}


def test_a_skipped_validation_is_in_the_checkpoint_of_its_step(
    alone: None, corpus: str, tmp_path: Path
) -> None:
    saved = []
    for going_on in (False, True):
        made, _ = cases.trainer(corpus, _run(val_every_steps=2), str(tmp_path), 9, load=going_on)
        # asked to stop in its first step, and stopped after the second
        made.stop = _Stopped(made.val_stream.steps_per_epoch * going_on)
        assert not made.run()
        made.close()
        states = [
            checkpoint.state()["progress"] for checkpoint in TrainFolder(tmp_path).checkpoints()
        ]
        saved.append([(state["step"], state["val_step"]) for state in states])
    assert saved == [[(2, None)], [(2, 2), (4, 2)]]


def test_steps_lost_from_a_damaged_curve_are_counted(
    alone: None, corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "metrics.jsonl"
    folder = str(tmp_path)
    for steps, every in ((4, 2), (6, 1)):  # another interval is no damage
        made, _ = cases.trainer(
            corpus, options(train={"log_every_steps": every}), folder, steps, load=steps == 6
        )
        made.trackers = [JsonlTracker(file)]
        made.trackers[0].start({}, 0)
        made.run()
        made.close()
    whole = file.read_bytes()
    lines = [line["step"] for line in read_lines(file) if "loss" in line]
    assert lines == [1, 2, 4, 5, 6]
    capsys.readouterr()
    for damaged, missing in (
        (whole, 0),
        (whole.replace(b"loss", b"\xffoss", 1), 1),
        (whole[: len(whole) // 2], 3),
        (b"", 5),
    ):
        file.write_bytes(damaged)
        cases.trainer(corpus, options(), folder, 6, load=True)[0].close()
        expected = (
            f"warning: {file}: expected 5 logged steps up to step 6, {missing} are missing "
            "(damaged or deleted); "
        )
        error = capsys.readouterr().err
        assert (error.count("\n"), error.startswith(expected)) == (
            (1, True) if missing else (0, False)
        )


# after the warm-up, (1 + t) / (10 + t), of the first three steps
DECAY = 0.3
STEPS = 6


def read(checkpoint: Checkpoint, part: str) -> dict[str, torch.Tensor]:
    known = CheckpointReader(checkpoint.path).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(known[name].size) for name in known if name.startswith(part)}
    load_tensors(checkpoint.path, tensors)
    return {name.removeprefix(part): tensor for name, tensor in tensors.items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_average_of_weights_follows_its_formula(
    alone: None, corpus: str, tmp_path: Path
) -> None:
    def lines_of(name: str, **more: Any) -> list[dict[str, Any]]:
        train = {
            "lr": 1e-2,
            "schedule": "constant",
            "val_every_steps": 1,
            "keep_checkpoints": 9,
        } | more
        given = options(train=train, model={"layers": 4})
        return cases.trained(corpus, given, str(tmp_path / name), STEPS)["lines"]

    lines = lines_of("train", ema_decay=DECAY, checkpoint_every_steps=1)
    plain = lines_of("plain")
    same = lines_of("same", ema_decay=1e-9)
    assert [line["loss"] for line in lines if "loss" in line] == [
        line["loss"] for line in plain if "loss" in line
    ]
    validated = [line["val_loss"] for line in lines if "val_loss" in line]
    at_end = [line["val_loss"] for line in plain if "val_loss" in line]
    assert [line["val_loss"] for line in same if "val_loss" in line] == pytest.approx(
        at_end, abs=1e-6
    )
    assert np.abs(np.array(validated) - at_end).min() > 1e-5, "validation is of the weights"
    checkpoints = TrainFolder(tmp_path / "train").checkpoints()
    expected: dict[str, torch.Tensor] = {}
    # that of step 1 has the average after step 0
    for at, checkpoint in enumerate(checkpoints[1:], start=1):
        before = read(checkpoints[at - 1], "average.")
        decay = min(DECAY, (1 + at) / (10 + at))
        expected = {
            k: decay * before[k] + (1 - decay) * v for k, v in read(checkpoint, "model.").items()
        }
        torch.testing.assert_close(read(checkpoint, "average."), expected, atol=1e-7, rtol=1e-6)
    assert not read(TrainFolder(tmp_path / "plain").checkpoints()[-1], "average.")
    exported = cases.exported(corpus, tmp_path / "train", tmp_path / "model")
    assert (
        "| step | 6, weights averaged with decay 0.3 |"
        in (tmp_path / "model" / "README.md").read_text()
    )
    assert exported.keys() == expected.keys()
    torch.testing.assert_close(exported, read(checkpoints[-1], "average."), atol=0, rtol=0)


PARTS = {"data", "prepare", "forward_backward", "clip", "optimizer"}


@pytest.mark.parametrize(
    ("last", "recorded"), [(3, 2), (9, 3)], ids=["inside the run", "beyond its end"]
)
def test_a_trace_has_the_named_parts_of_each_requested_step(
    alone: None, corpus: str, tmp_path: Path, last: int, recorded: int
) -> None:
    first = cases.curve(corpus, options(train={"profile_steps": [2, last]}), str(tmp_path), steps=4)
    assert first == cases.curve(corpus, options(), str(tmp_path / "plain"), steps=4)
    with gzip.open(tmp_path / "profile" / "rank-0.trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    counts = dict.fromkeys(PARTS, 0)
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"] in counts:
            counts[event["name"]] += 1
    assert counts == dict.fromkeys(PARTS, recorded)
    assert any(event["name"] == "aten::linear" for event in events)


@pytest.mark.parametrize("steps", [[0, 3], [4, 3], [1], [1, 2, 3]])
def test_profile_steps_that_are_not_a_range_are_refused(steps: list[int]) -> None:
    with pytest.raises(ValueError, match="profile_steps"):
        Train.model_validate({"steps": 5, "profile_steps": steps})
