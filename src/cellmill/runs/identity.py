"""Identity of a run (the options that define its numbers, data and initial weights), and branches.

A run whose options or data changed is another run, and is refused in a folder that holds the
earlier one until `--restart` allows setting the earlier training aside: nobody's training of days
may start over by accident. Only its length may change: the run then continues from the newest
checkpoint, with the schedule of the new length. Options that affect only speed or frequency
(layout, token budget, checkpoints, logging) are not part of the identity and may change between
resumes.

A branch continues from a checkpoint of another run, its trunk, with the same numbers as a run from
step 0. A schedule such as wsd has the same learning rates at its beginning whatever the length:
runs of several lengths share these steps (Hu et al. 2024, MiniCPM; Hägele et al. 2024). The trunk's
checkpoint and its curve up to there become the branch's own. Torch-free.
"""

import re
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cellmill.config.load import Tree, check_options, stored_options
from cellmill.config.options import TrainOptions
from cellmill.config.parts.family import WEIGHTS_FORMAT
from cellmill.config.run import Train, learning_rate
from cellmill.config.workflow import Workflow
from cellmill.errors import ConfigError, UserError
from cellmill.files import read_json, write_json, write_text
from cellmill.runs.folder import BRANCH, DIGEST, Checkpoint, TrainFolder, cut_back, status

PATIENCE = "train.early_stop_patience"
LENGTH = frozenset({"train.steps", "train.epochs", PATIENCE})
"""Keys whose change leaves the steps taken so far as they are."""
RATE = frozenset({"train.schedule", "train.decay_frac", "train.min_lr_frac"})
"""Keys in which a branch may differ too, where the learning rates up to it are the same."""
FREE_SECTIONS = {"parallel", "track"}
FREE = {
    "finetune": {"min_known_frac", "leave_out"},
    "stream": {"io_threads", "stage_to", "stage_limit_gb"},
    "train": set(
        "token_budget max_bad_steps replay_every_steps timeout_s val_every_steps val_cells checkpoint_every_steps "
        "checkpoint_every_min keep_checkpoints keep_steps log_every_steps profile_steps".split()
    ),
}
"""Sections and keys that change no number of a run."""
UNFITTED = ("model", "stream", "train")
"""Sections in which a training keeps what the configuration says, whatever the corpus."""
TOKEN_ORDER = "order of tokens"
"""Key of identity for tokens that are sorted while they are read."""
ROUNDED_READS = "rounding of reads"
"""Key of identity for runs with stream.weight_by, which read levels a whole number of times."""
OF_EARLIER_VERSIONS = {TOKEN_ORDER: "as in the shards", ROUNDED_READS: "the same in each epoch"}
"""Values of keys that runs of earlier versions have not stored."""
REASONS: Any = {"objective": {"batch_reason": True, "parts": {"__all__": {"batch_reason"}}}}
"""Texts, which another version may word differently."""


def identity(options: TrainOptions, init_from: str | None, gene_vectors: str | None = None) -> Tree:
    """Return the options that define a run's numbers, as {section.key: value}.

    `init_from` is the SHA-256 of the initial weights, None for random weights; `gene_vectors` is
    the SHA-256 of the file `model.gene_vectors`, which it replaces.
    """
    values = Tree()
    for section, keys in options.model_dump(mode="json", exclude=REASONS).items():
        free = _free_keys(section, keys)
        values |= {f"{section}.{key}": value for key, value in keys.items() if key not in free}
    if gene_vectors is not None:
        values["model.gene_vectors"] = gene_vectors
    return values | {"init_from": init_from, "weights_format": WEIGHTS_FORMAT}


def _free_keys(section: str, keys: Collection[str]) -> Collection[str]:
    """Of the keys of a section, those that are not part of the identity."""
    return keys if section in FREE_SECTIONS else FREE.get(section, ())


def changed_keys(stored: Tree, now: Tree, source: str) -> dict[str, str]:
    """Return the options that differ between `stored` and `now`: {section.key: `before -> now`}.

    `now` is from `identity`, `stored` is run.json, or the state.json of a checkpoint. Stored
    options are validated by this version first, so an option added since then has its default and
    is no change. Raise ConfigError if they are not valid any more.
    """
    try:
        options = _trained_with(stored, source)
    except ConfigError as error:
        raise ConfigError(
            f"{error} (the options that this folder was trained with; install what they name, or move the folder away)"
        ) from None
    given = stored["identity"]
    before = identity(options, given["init_from"], given.get("model.gene_vectors"))
    before["weights_format"] = given.get("weights_format", 1)
    for key, value in OF_EARLIER_VERSIONS.items():
        if key in now:
            before[key] = given.get(key, value)

    def short(value: Any) -> str:
        return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1", str(value))  # a digest

    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    return {key: f"{short(before.get(key))} -> {short(now.get(key))}" for key in changed}


def changed_free_options(stored: Tree, now: Tree, source: str) -> dict[str, str]:
    """Return the options outside the identity that differ: {section.key: `before -> now`}.

    `stored` is run.json, `now` has the options by section. Trackers are not compared.
    """
    before = _trained_with(stored, source).model_dump(mode="json")
    changes = dict[str, str]()
    for section, values in now.items():
        free = () if section == "track" else _free_keys(section, values)
        for key, value in values.items():
            if key in free and before[section][key] != value:
                changes[f"{section}.{key}"] = f"{before[section][key]} -> {value}"
    return changes


def _trained_with(stored: Tree, source: str) -> TrainOptions:
    """The stored options without trackers, whose package may be gone."""
    options = {section: keys for section, keys in stored["options"].items() if section != "track"}
    return stored_options(options, source)


def check_data(folder: str, before: str, now: str) -> None:
    """Raise ConfigError naming `folder` unless the fingerprints of the data of its checkpoints
    (`before`) and of the shards (`now`) are equal.
    """
    if before != now:
        raise ConfigError(
            f"{folder}: its checkpoints were trained on data {before[:12]}, the shards are now {now[:12]}; "
            "restore the shards, or train on the new ones with `cellmill train --restart`, which sets these aside"
        )


def is_done(folder: TrainFolder, record: Tree, steps: int, restart: bool = False) -> bool:
    """Return True if nothing is left to do in `folder`; False also if it holds no checkpoint.

    `record` is run.json of the requested training, `steps` its optimizer steps. Raise ConfigError
    if the folder holds another training, unless `restart` is set, which sets that one aside. The
    same training is never set aside, so that a command with `restart` can be repeated until it is
    done.
    """
    checkpoint, damaged = folder.newest_whole(contents=False)
    if checkpoint is not None and checkpoint.step >= steps:
        # hashed in full: nothing reads it again before it counts as done
        checkpoint, damaged = folder.newest_whole()
    for line in damaged:
        print(f"warning: {line}; going on from the one before it", file=sys.stderr)
    if checkpoint is None:
        return False
    state = checkpoint.state()
    step = checkpoint.step
    if restart:
        changes = _list_changes(checkpoint, record)
        if state["fingerprint"] != record["fingerprint"]:
            changes["data"] = f"{state['fingerprint'][:12]} -> {record['fingerprint'][:12]}"
        if changes:
            print(
                f"restart ({_join(changes)}): the earlier training is now in {folder.set_aside()}",
            )
            return False
        print(
            f"{folder.path}: --restart changes nothing: the training in it has this configuration",
        )
    patience = record["identity"].get(PATIENCE)
    stale = state["progress"].get("stale_validations", 0)
    is_early = patience is not None and stale >= patience
    if step >= steps or is_early:  # it reads no more cells
        requested = {k: v for k, v in record["identity"].items() if k != ROUNDED_READS}
        _check_change(folder, checkpoint, record | {"identity": requested}, steps)
    else:
        _check_change(folder, checkpoint, record, steps)
    if step < steps and is_early:
        print(
            f"ended early at step {step}, after {stale} validations without an improvement; raise {PATIENCE} "
            f"({patience}) to continue",
        )
    if step >= steps or is_early:
        if not (folder.path / "status.json").exists():
            write_json(folder.path / "status.json", status("done", state))
        return True
    folder.set_damaged_aside(step)  # they are named once
    (folder.path / "status.json").unlink(missing_ok=True)
    if state["steps"] != steps:
        print(
            f"{folder.path}: going on from step {step} of {state['steps']}, now {steps}: from here the learning "
            "rate is that of a run of the new length",
        )
    return False


def _check_change(folder: TrainFolder, checkpoint: Checkpoint, record: Tree, steps: int) -> None:
    """Raise ConfigError if the training of `checkpoint` in `folder` cannot continue as `record`, of
    `steps` optimizer steps: options or data have changed, or it has too few steps.
    """
    _refuse_changes(folder, checkpoint, _list_changes(checkpoint, record))
    check_data(str(folder.path), checkpoint.state()["fingerprint"], record["fingerprint"])
    _check_length(folder, checkpoint, steps)


def foresee_refusal(train: Path, options: TrainOptions, steps: int | None) -> str | None:
    """Why the training in folder `train` cannot continue with `options` and as many optimizer steps,
    in a line; None if it can, or if there is none.

    `options` are not fitted to the corpus yet, so only sections that never are count. `steps` are
    None as long as cells are not counted.
    """
    folder = TrainFolder(train)
    try:
        checkpoint, _ = folder.newest_whole(contents=False)
        if checkpoint is None:
            return None
        changes = _list_changes(checkpoint, {"identity": identity(options, None)})
        for key in [*changes]:
            if key.partition(".")[0] not in UNFITTED or key == "model.gene_vectors":
                del changes[key]
        _refuse_changes(folder, checkpoint, changes)
        if steps is not None:
            _check_length(folder, checkpoint, steps)
    except UserError as error:
        return str(error)
    return None


def _refuse_changes(folder: TrainFolder, checkpoint: Checkpoint, changes: dict[str, str]) -> None:
    if changes.keys() - LENGTH:
        back = "change it back"
        if not changes.keys().isdisjoint(OF_EARLIER_VERSIONS):
            back = "finish it with the version of cellmill that began it"
        raise ConfigError(
            f"{folder.path}: it holds a training of {checkpoint.step} steps with another configuration "
            f"({_join(changes)}); {back}, or {_how_to_restart(folder)}"
        )


def _check_length(folder: TrainFolder, checkpoint: Checkpoint, steps: int) -> None:
    """Raise ConfigError if the training of `checkpoint` in `folder` has too many steps for `steps`."""
    step = checkpoint.step
    before = checkpoint.state()["steps"]
    if before != steps and steps <= step:
        raise ConfigError(
            f"{folder.path}: it holds a training of {step} steps, and {before} steps in all were lowered to "
            f"{steps}; set train.steps above {step}, or {_how_to_restart(folder)}"
        )


def _list_changes(checkpoint: Checkpoint, record: Tree) -> dict[str, str]:
    """`changed_keys` between a checkpoint and `record`, which is as run.json."""
    source = str(checkpoint.path / "state.json")
    return changed_keys(checkpoint.state(), record["identity"], source)


def _join(changes: dict[str, str]) -> str:
    return "; ".join(f"{key} {change}" for key, change in changes.items())


def _how_to_restart(folder: TrainFolder) -> str:
    return (
        "set that training aside and start afresh with `cellmill train --restart` (of a workflow: `cellmill run -- "
        f"--config restart={folder.path.resolve().parent.name}`)"
    )


def begin_branch(folder: TrainFolder, trunk: Path, record: Tree, train: Train, steps: int) -> None:
    """Give `folder` the trunk's checkpoint and curve, unless it has reached that step.

    `trunk` is the folder of the checkpoint, `record` run.json of the branch, `steps` its number of
    optimizer steps. Raise ConfigError if the trunk is another training than the first steps of
    this one, DataError if its checkpoint is missing or damaged.
    """
    trunk = trunk.absolute()
    path = str(folder.path)
    given = re.fullmatch(r"step-(\d{8,})", trunk.name)
    if given is None:
        raise ConfigError(
            f"{trunk}: expected the folder of a checkpoint, such as checkpoints/step-00000480"
        )
    if folder.saved_step() >= int(given[1]):
        return  # the trunk is not needed any more, and may be gone
    of_trunk = TrainFolder(trunk.parent.parent)
    checkpoint = of_trunk.find_checkpoint(int(given[1]))
    state = checkpoint.state()
    source = str(checkpoint.path / "state.json")
    changes = _list_changes(checkpoint, record)
    different = {key: change for key, change in changes.items() if key not in LENGTH | RATE}
    if different:
        raise ConfigError(
            f"{path}: it cannot continue {checkpoint.path}, which is of another configuration "
            f"({_join(different)}); make them equal, or set init_from in place of trunk"
        )
    check_data(str(checkpoint.path), state["fingerprint"], record["fingerprint"])
    _check_rates(
        path, checkpoint.step, (_trained_with(state, source).train, state["steps"]), (train, steps)
    )
    best = checkpoint.best_step()
    if best is not None and best != checkpoint.step:
        _copy(of_trunk.find_checkpoint(best), folder, record, steps, train)
    cut_back(of_trunk.metrics, checkpoint.step, folder.metrics)
    write_json(folder.path / BRANCH, {"step": checkpoint.step})
    _copy(checkpoint, folder, record, steps, train)
    print(f"{path}: going on from step {checkpoint.step} of {of_trunk.path}")


def check_branches(workflow: Workflow, source: str) -> None:
    """Raise ConfigError if a run of the configuration `source` cannot continue from its trunk.

    This is before the trunk trains; what depends on the data is checked when the branch begins.
    """
    for name, run in workflow.runs.items():
        if run.trunk is None or run.trunk_step is None:
            continue
        options = check_options(TrainOptions, workflow.section("train", name), source)
        of_trunk = check_options(TrainOptions, workflow.section("train", run.trunk), source)
        now = identity(options, None)
        before = identity(of_trunk, None)
        for key in sorted((now.keys() & before.keys()) - LENGTH - RATE):
            # null may be what train takes from the data, and so equal
            may_be_equal = not key.startswith("train.") and None in (now[key], before[key])
            if now[key] != before[key] and not may_be_equal:
                raise ConfigError(
                    f"{source}: runs.{name}.{key}: expected {before[key]}, as its trunk {run.trunk}, got {now[key]}; "
                    "make them equal, or set init_from in place of trunk"
                )
        steps = options.train.steps
        trunk_steps = of_trunk.train.steps
        if isinstance(steps, int) and isinstance(trunk_steps, int):
            _check_rates(
                f"{source}: runs.{name}",
                run.trunk_step,
                (of_trunk.train, trunk_steps),
                (options.train, steps),
            )


def _check_rates(run: str, last: int, before: tuple[Train, int], now: tuple[Train, int]) -> None:
    """Raise ConfigError naming `run` unless it and its trunk have the same learning rate in every
    step up to `last`. `before` and `now` are options and number of steps of the trunk and the run.
    """
    train, steps = now
    trunk_train, trunk_steps = before
    if steps <= last:
        raise ConfigError(
            f"{run}: it goes on from step {last} of its trunk and has {steps} steps in all; set train.steps above that"
        )
    for step in range(last):
        rate = learning_rate(train, step, steps)
        trunk_rate = learning_rate(trunk_train, step, trunk_steps)
        if rate != trunk_rate:
            raise ConfigError(
                f"{run}: step {step + 1} has learning rate {rate:g}, in its trunk {trunk_rate:g}: expected the same "
                f"until step {last}, the branch; set schedule wsd or constant for both, or a trunk_step of at most "
                f"{step}"
            )


def _copy(
    checkpoint: Checkpoint, folder: TrainFolder, record: Tree, steps: int, train: Train
) -> None:
    path = folder.begin(checkpoint.step)
    digests = read_json(checkpoint.path / "manifest.json")["files"]
    for name, entry in digests.items():
        if name != "state.json":
            shutil.copyfile(checkpoint.path / name, path / name)
            write_text(path / (name + DIGEST), entry["sha256"])
    new = {key: record[key] for key in ("identity", "options", "init_from", "supervised_by")}
    state = checkpoint.state()
    # the trunk validated on so many cells; the branch compares this with its own number
    val_cells = state["options"]["train"].get("val_cells")
    train_options = new["options"]["train"] | {"val_cells": val_cells}
    new["options"] = new["options"] | {"train": train_options}
    write_json(path / "state.json", state | new | {"steps": steps})
    folder.finish(path, train.keep_checkpoints, train.keep_steps)
