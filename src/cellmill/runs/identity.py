"""Identity of a run: the options that define its numbers, its data and its initial weights.

A run whose options or data changed is another run, and is refused in a folder that holds the earlier one until
`--restart` allows setting the earlier training aside: nobody's training of days may start over by accident. Only
its length may change: the run then continues from the newest checkpoint, with the schedule of the new length. Options
that affect only speed or frequency (layout, token budget, checkpoints, logging) are not part of the identity and may
change between resumes.
"""

import re
import sys
from typing import Any

from cellmill.config.load import stored_options
from cellmill.config.options import TrainOptions
from cellmill.config.parts.family import WEIGHTS_FORMAT
from cellmill.errors import ConfigError
from cellmill.files import write_json
from cellmill.runs.folder import TrainFolder
from cellmill.runs.progress import status

PATIENCE = "train.early_stop_patience"
LENGTH = frozenset({"train.steps", "train.epochs", PATIENCE})
"""Keys whose change leaves the steps taken so far as they are."""
FREE_SECTIONS = {"parallel", "track"}
FREE = {
    "finetune": {"min_known_frac"},
    "stream": {"io_threads", "stage_to", "stage_limit_gb"},
    "train": {
        *("token_budget", "max_bad_steps", "timeout_s", "val_every_steps", "val_cells", "checkpoint_every_steps"),
        *("checkpoint_every_min", "keep_checkpoints", "keep_steps", "log_every_steps", "profile_steps"),
    },
}


def identity(options: TrainOptions, init_from: str | None, gene_vectors: str | None = None) -> dict[str, Any]:
    """Return the options that define a run's numbers, as {section.key: value}. `init_from` is the SHA-256 of the
    initial weights, None for random ones; `gene_vectors` that of the file `model.gene_vectors`, which it replaces."""
    values = {
        f"{section}.{key}": value
        for section, keys in options.model_dump(mode="json").items()
        if section not in FREE_SECTIONS
        for key, value in keys.items()
        if key not in FREE.get(section, ())
    }
    if gene_vectors is not None:
        values["model.gene_vectors"] = gene_vectors
    return values | {"init_from": init_from, "weights_format": WEIGHTS_FORMAT}


def changed_keys(stored: dict[str, Any], now: dict[str, Any], source: str) -> dict[str, str]:
    """Return {section.key: `before -> now`}, sorted, of the options that differ between `stored` and `now`.

    `now` is from `identity`, `stored` is run.json, or the state.json of a checkpoint. Stored options are validated by
    this version first, so an option added since then has its default and is no change. Raises ConfigError if they are
    not valid any more.
    """
    # trackers are not part of the identity, and their package may be gone
    kept = {section: keys for section, keys in stored["options"].items() if section != "track"}
    try:
        options = stored_options(kept, source)
    except ConfigError as error:
        raise ConfigError(
            f"{error} (the options that this folder was trained with; install what they name, or move the folder away)"
        ) from None
    given = stored["identity"]
    before = identity(options, given["init_from"], given.get("model.gene_vectors"))
    before["weights_format"] = given.get("weights_format", 1)

    def short(value: Any) -> str:
        return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1", str(value))  # a digest

    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    return {key: f"{short(before.get(key))} -> {short(now.get(key))}" for key in changed}


def check_data(folder: str, before: str, now: str) -> None:
    """Raises ConfigError naming both fingerprints if the checkpoints were trained on other shards."""
    if before != now:
        raise ConfigError(
            f"{folder}: its checkpoints were trained on data {before[:12]}, the shards are now {now[:12]}; "
            "restore the shards, or train on the new ones with `cellmill train --restart`, which sets these aside"
        )


def is_done(folder: TrainFolder, record: dict[str, Any], steps: int, restart: bool = False) -> bool:
    """Return whether nothing is left to do in `folder`; False also if it holds no checkpoint.

    `record` is run.json of the requested training, `steps` its optimizer steps. Raises ConfigError if the folder holds
    another training, unless `restart` is set, which sets that one aside. The same training is never set aside, so that
    a command with `restart` can be repeated until it is done.
    """
    checkpoint, damaged = folder.newest_whole(contents=False)
    if checkpoint is not None and checkpoint.step >= steps:
        checkpoint, damaged = folder.newest_whole()  # hashed in full: nothing reads it again before it counts as done
    for line in damaged:
        print(f"warning: {line}; going on from the one before it", file=sys.stderr, flush=True)
    if checkpoint is None:
        return False
    state, step, data = checkpoint.state(), checkpoint.step, record["fingerprint"]
    changes = changed_keys(state, record["identity"], str(checkpoint.path / "state.json"))
    different = [f"{key} {change}" for key, change in changes.items()]
    afresh = (
        "set that training aside and start afresh with `cellmill train --restart` (of a workflow: `snakemake --config "
        f"restart={folder.path.resolve().parent.name}`)"
    )
    if restart:
        if state["fingerprint"] != data:
            different.append(f"data {state['fingerprint'][:12]} -> {data[:12]}")
        if different:
            print(f"restart ({'; '.join(different)}): the earlier training is now in {folder.set_aside()}", flush=True)
            return False
        print(f"{folder.path}: --restart changes nothing, its training has this configuration; it goes on", flush=True)
    elif changes.keys() - LENGTH:
        raise ConfigError(
            f"{folder.path}: it holds a training of {step} steps with another configuration ({'; '.join(different)}); "
            f"change it back, or {afresh}"
        )
    check_data(str(folder.path), state["fingerprint"], data)
    if state["steps"] != steps and steps <= step:
        raise ConfigError(
            f"{folder.path}: it holds a training of {step} steps, and {state['steps']} steps in all were lowered to "
            f"{steps}; set train.steps above {step}, or {afresh}"
        )
    patience, stale = record["identity"].get(PATIENCE), state["progress"].get("stale_validations", 0)
    is_early = patience is not None and stale >= patience
    if step < steps and is_early:
        print(
            f"ended early at step {step}, after {stale} validations without an improvement; raise {PATIENCE} "
            f"({patience}) to go on",
            flush=True,
        )
    if step >= steps or is_early:
        if not (folder.path / "status.json").exists():
            write_json(folder.path / "status.json", status("done", state))
        return True
    (folder.path / "status.json").unlink(missing_ok=True)
    if state["steps"] != steps:
        print(
            f"{folder.path}: going on from step {step} of {state['steps']}, now {steps}: from here the learning "
            "rate is that of a run of the new length",
            flush=True,
        )
    return False
