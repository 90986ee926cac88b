"""Branches: a run that continues from a checkpoint of another run, its trunk, as if it had made those steps itself.

A schedule such as wsd has the same learning rates at its beginning whatever the length, and so the same steps: runs of
several lengths share them (Hu et al. 2024, MiniCPM; Hägele et al. 2024). The trunk's checkpoint, with the state of the
optimizer and the place in the data, and its curve up to there become the branch's own: it then resumes like any run,
and its numbers are the same as for a run of its length from step 0. Torch-free.
"""

import re
import shutil
from pathlib import Path
from typing import Any

from cellmill.config.load import check_options, stored_options
from cellmill.config.options import TrainOptions
from cellmill.config.run import Train, learning_rate
from cellmill.config.workflow import Workflow
from cellmill.errors import ConfigError
from cellmill.files import read_json, write_json, write_text
from cellmill.runs.folder import DIGEST, Checkpoint, TrainFolder
from cellmill.runs.identity import LENGTH, changed_keys, check_data, identity
from cellmill.runs.progress import copy_until

RATE = frozenset({"train.schedule", "train.decay_frac", "train.min_lr_frac"})
"""Keys that may differ, like the length, where the learning rates up to the branch are the same."""


def begin_branch(folder: TrainFolder, trunk: Path, record: dict[str, Any], train: Train, steps: int) -> None:
    """Give `folder` the trunk's checkpoint and curve, unless it has reached that step.

    `trunk` is the folder of the checkpoint, `record` run.json of the branch, `steps` its number of optimizer steps.
    Raises ConfigError if the trunk is another training than the first steps of this one, DataError if its checkpoint is
    missing or damaged.
    """
    trunk, path = trunk.absolute(), str(folder.path)
    if (given := re.fullmatch(r"step-(\d{8,})", trunk.name)) is None:
        raise ConfigError(f"{trunk}: expected the folder of a checkpoint, such as checkpoints/step-00000480")
    if folder.saved_step() >= int(given[1]):
        return  # the trunk is not needed any more, and may be gone
    of_trunk = TrainFolder(trunk.parent.parent)
    checkpoint = of_trunk.of_step(int(given[1]))
    state, source = checkpoint.state(), str(checkpoint.path / "state.json")
    changes = changed_keys(state, record["identity"], source)
    if different := [f"{key} {change}" for key, change in changes.items() if key not in LENGTH | RATE]:
        raise ConfigError(
            f"{path}: it cannot continue {checkpoint.path}, which is of another configuration "
            f"({'; '.join(different)}); make them equal, or set init_from in place of trunk"
        )
    check_data(str(checkpoint.path), state["fingerprint"], record["fingerprint"])
    kept = {section: keys for section, keys in state["options"].items() if section != "track"}
    _check_rates(path, checkpoint.step, (stored_options(kept, source).train, state["steps"]), (train, steps))
    best = checkpoint.best_step()
    if best is not None and best != checkpoint.step:
        _copy(of_trunk.of_step(best), folder, record, steps, train)
    copy_until(of_trunk.metrics, folder.metrics, checkpoint.step)
    _copy(checkpoint, folder, record, steps, train)
    print(f"{path}: going on from step {checkpoint.step} of {of_trunk.path}", flush=True)


def check_branches(workflow: Workflow, source: str) -> None:
    """Raise ConfigError for a run of the configuration `source` that its trunk cannot be the beginning of. So it is
    said before the trunk trains. What depends on the data is seen when the branch begins."""
    for name, run in workflow.runs.items():
        if run.trunk is None or run.trunk_step is None:
            continue
        own, of_trunk = (
            check_options(TrainOptions, workflow.section("train", which), source) for which in (name, run.trunk)
        )
        now, before = identity(own, None), identity(of_trunk, None)
        for key in sorted((now.keys() & before.keys()) - LENGTH - RATE):
            # null may be what train takes from the data, and so equal
            if now[key] != before[key] and (key.startswith("train.") or None not in (now[key], before[key])):
                raise ConfigError(
                    f"{source}: runs.{name}.{key}: expected {before[key]}, as its trunk {run.trunk}, got {now[key]}; "
                    "make them equal, or set init_from in place of trunk"
                )
        steps = [options.train.steps for options in (of_trunk, own)]
        if isinstance(steps[0], int) and isinstance(steps[1], int):
            _check_rates(f"{source}: runs.{name}", run.trunk_step, (of_trunk.train, steps[0]), (own.train, steps[1]))


def _check_rates(run: str, last: int, before: tuple[Train, int], now: tuple[Train, int]) -> None:
    """Raise ConfigError naming `run` unless it and its trunk have the same learning rate in every step up to `last`.
    `before` and `now` are options and number of steps of the trunk and of the run."""
    if now[1] <= last:
        raise ConfigError(
            f"{run}: it goes on from step {last} of its trunk and has {now[1]} steps in all; set train.steps above that"
        )
    for step in range(last):
        given, own = (learning_rate(train, step, steps) for train, steps in (before, now))
        if given != own:
            raise ConfigError(
                f"{run}: step {step + 1} has learning rate {own:g}, in its trunk {given:g}: expected the same until "
                f"step {last}, the branch; set schedule wsd or constant for both, or a trunk_step of at "
                f"most {step}"
            )


def _copy(checkpoint: Checkpoint, folder: TrainFolder, record: dict[str, Any], steps: int, train: Train) -> None:
    """Copy a verified checkpoint as one of the branch."""
    path = folder.begin(checkpoint.step)
    digests = read_json(checkpoint.path / "manifest.json")["files"]
    for name, entry in digests.items():
        if name != "state.json":
            shutil.copyfile(checkpoint.path / name, path / name)
            write_text(path / (name + DIGEST), entry["sha256"])
    own = {key: record[key] for key in ("identity", "options", "init_from", "supervised_by")}
    write_json(path / "state.json", checkpoint.state() | own | {"steps": steps})
    folder.finish(path, train.keep_checkpoints, train.keep_steps)
