"""The folder of a training run: its files, and the checkpoints that a resume may start from.

    status.json     written once, after the last step: the output the workflow waits for
    state.json      running, stopped or done, and the step: rewritten during training
    run.json        resolved options, digests and environment of the latest start
    metrics.jsonl   the loss curve: a JSON object per line. A resume truncates it to its checkpoint's step, so that each
                    step is in it once however often the run was killed
    checkpoints/step-00000100/    DCP files, index.json, state.json; manifest.json has the size and SHA-256 of all
    jobs/           submissions to a cluster, see runs/jobs.py
    track/          what each tracker and observer was sent, see track/follower.py
    branch.json     of a run that continues a trunk: the last step that is the trunk's
    superseded-…/   files of an earlier configuration; never deleted here

A checkpoint is written to `….incomplete`, its manifest last, and then renamed. Torch-free, so that
a launcher can refuse a run before it asks for a GPU.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cellmill.errors import DataError
from cellmill.files import fsync, progress, read_json, sha256_file, write_json, write_text
from cellmill.runs.lock import locked, user_name

INCOMPLETE = ".incomplete"
DAMAGED = ".damaged"
REPLACED = ".replaced"
BRANCH = "branch.json"
DIGEST = ".sha256"  # suffix of the digest of a file that its rank has hashed
# files that are hashed even if hashing the tensors would take too long
SMALL = ("state.json", "index.json", ".metadata")
TAIL_BYTES = 1 << 16  # end of a curve or a log, enough for status and attach


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int

    def state(self) -> dict[str, Any]:
        """Progress, identity, options and data fingerprint saved with the tensors."""
        return read_json(self.path / "state.json")

    def best_step(self) -> int | None:
        """Step with the best `train.best_metric` when it was saved.

        None if there was none, or if it is unreadable.
        """
        with suppress(DataError, KeyError, TypeError):
            return self.state()["progress"]["best_step"]
        return None

    def damage(self, contents: bool = True, share: tuple[int, int] = (0, 1)) -> str | None:
        """The first missing, truncated or changed file, as an error; None if there is none.

        Tensors are hashed only with `contents`. `share` is rank and number of ranks, each of which
        checks its share of the files.
        """
        manifest = self.path / "manifest.json"
        rank, world = share
        try:
            entries = list(read_json(manifest)["files"].items())[rank::world]
            files = [(name, entry["bytes"], entry["sha256"]) for name, entry in entries]
            megabytes = sum(size for _, size, _ in files) / 1e6
        except DataError as error:
            return f"{error}; the checkpoint is damaged"
        except (KeyError, TypeError, AttributeError):
            return f"{manifest}: not a checkpoint's manifest; the checkpoint is damaged"
        for name, size, sha256 in progress(
            files, "hashing a checkpoint", megabytes, "MB", lambda file: file[1] / 1e6
        ):
            file = self.path / name
            if not file.is_file():
                return f"{file}: missing; the checkpoint is damaged"
            stored = file.stat().st_size
            if stored != size:
                return f"{file}: expected {size} bytes, got {stored}; the checkpoint is damaged"
            if (contents or name in SMALL) and sha256_file(file) != sha256:
                return f"{file}: changed since it was written (SHA-256 differs); the checkpoint is damaged"
        return None


class TrainFolder:
    """The files of one training run under `path`."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint_folder = self.path / "checkpoints"

    def state(self) -> str:
        """running, stopped or done, from state.json; empty if that file is missing or damaged."""
        with suppress(DataError, KeyError, TypeError):
            return str(read_json(self.path / "state.json")["state"])
        return ""

    def _last_step(self) -> int | None:
        """Step at which the run ended; None if it has not ended, or status.json is missing or damaged."""
        with suppress(DataError, KeyError, TypeError):
            return int(read_json(self.path / "status.json")["step"])
        return None

    def saved_step(self) -> int:
        """Step of the newest checkpoint; 0 if there is none."""
        return max((checkpoint.step for checkpoint in self.checkpoints()), default=0)

    def checkpoints(self) -> list[Checkpoint]:
        """Checkpoints that were completed, oldest first; any may be damaged since."""
        found: dict[int, Checkpoint] = {}
        # a kill between the two renames of `finish` leaves only the replaced one of a step
        for path in sorted(self.checkpoint_folder.glob("step-*"), reverse=True):
            if re.fullmatch(rf"step-\d{{8,}}({REPLACED})?", path.name):
                checkpoint = self.checkpoint(path.name)
                found[checkpoint.step] = checkpoint
        return [found[step] for step in sorted(found)]

    def checkpoint(self, name: str) -> Checkpoint:
        """The checkpoint of that name, such as step-00000100."""
        step = name.removeprefix("step-").removesuffix(REPLACED)
        return Checkpoint(self.checkpoint_folder / name, int(step))

    def set_damaged_aside(self, step: int) -> None:
        """Rename checkpoints later than `step`, which are damaged, so that they do not count."""
        for checkpoint in self.checkpoints():
            if checkpoint.step > step:
                path = checkpoint.path
                aside = path.with_name(path.name + DAMAGED)
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)

    def newest_whole(
        self,
        contents: bool = True,
        checkpoints: Sequence[Checkpoint] | None = None,
        damage: Callable[[Checkpoint], str | None] | None = None,
    ) -> tuple[Checkpoint | None, list[str]]:
        """The newest undamaged checkpoint, or None, and a line for each newer, damaged checkpoint.

        `checkpoints`, oldest first, are all of the folder by default; `damage` describes the damage
        of one. Raise DataError if all of them are damaged: training never restarts at step 0
        unasked.
        """
        damage = damage or (lambda checkpoint: checkpoint.damage(contents))
        damaged: list[str] = []
        for checkpoint in reversed(self.checkpoints() if checkpoints is None else checkpoints):
            line = damage(checkpoint)
            if line is None:
                return checkpoint, damaged
            damaged.append(line)
        if damaged:
            raise DataError(
                f"{self.checkpoint_folder}: every checkpoint is damaged ({damaged[0]}); "
                "restore one, or move the folder away to start again at step 0"
            )
        return None, []

    def best(self) -> Checkpoint:
        """The checkpoint with the best `train.best_metric`.

        The newest one if there was no validation.
        """
        newest, _ = self.newest_whole()
        if newest is None:
            raise DataError(f"{self.checkpoint_folder}: no checkpoint; train the run first")
        best_step = newest.state()["progress"]["best_step"]
        if best_step in (None, newest.step):
            return newest
        return self.find_checkpoint(
            best_step, "the best checkpoint is missing; set consolidate.checkpoint: last"
        )

    def find_checkpoint(
        self, step: int, remedy: str = "list the step in train.keep_steps, and train it anew"
    ) -> Checkpoint:
        """The undamaged checkpoint of a step. Raise DataError if there is none."""
        checkpoints = {checkpoint.step: checkpoint for checkpoint in self.checkpoints()}
        if step not in checkpoints:
            last = self._last_step()
            if last is not None and step > last:
                remedy = (
                    f"the run ended at step {last}, before it; choose an earlier step, or train longer "
                    "(train.steps, train.epochs, train.early_stop_patience)"
                )
            raise DataError(
                f"{self.checkpoint_folder}: no checkpoint of step {step}; there are those of steps "
                f"{', '.join(map(str, checkpoints)) or 'none'}; {remedy}"
            )
        line = checkpoints[step].damage()
        if line:
            raise DataError(line)
        return checkpoints[step]

    def begin(self, step: int) -> Path:
        """Create an empty folder for the checkpoint of `step`, and remove what earlier writes left."""
        self.remove_incomplete()
        path = self.checkpoint_folder / f"step-{step:08}{INCOMPLETE}"
        path.mkdir(parents=True)
        return path

    def remove_incomplete(self) -> None:
        """Remove what is left of checkpoints whose write failed or was killed."""
        for path in self.checkpoint_folder.glob(f"step-*{INCOMPLETE}"):
            shutil.rmtree(path, ignore_errors=True)

    def finish(self, path: Path, keep: int, keep_steps: Sequence[int] = ()) -> None:
        """Make the checkpoint in `path` (from `begin`) final.

        Remove all but the `keep` newest, `keep_steps` and the best. Hashes files that have no file
        with their digest.
        """
        entries = {}
        for file in sorted(path.iterdir()):
            if file.name == "manifest.json" or file.suffix == DIGEST:
                continue
            digest = file.with_name(file.name + DIGEST)
            sha256 = digest.read_text(encoding="utf-8") if digest.exists() else sha256_file(file)
            entries[file.name] = {"bytes": file.stat().st_size, "sha256": sha256}
            digest.unlink(missing_ok=True)
        # last: it marks the checkpoint complete
        write_json(path / "manifest.json", {"files": entries})
        final = path.with_name(path.name.removesuffix(INCOMPLETE))
        earlier = final.with_name(final.name + REPLACED)  # the same step from before a resume
        if final.exists():
            shutil.rmtree(earlier, ignore_errors=True)
            # at once: removing it takes a while, in which there would be none
            final.rename(earlier)
        path.rename(final)
        fsync(final.parent)
        shutil.rmtree(earlier, ignore_errors=True)
        complete = self.checkpoints()
        kept = set[int | None](keep_steps)
        kept |= {checkpoint.step for checkpoint in complete[-keep:]}
        # a run resumed from any of them takes its best step for the run's best
        chosen = [checkpoint for checkpoint in complete if checkpoint.step in kept]
        kept |= {checkpoint.best_step() for checkpoint in chosen}
        for checkpoint in complete:
            if checkpoint.step in kept:
                continue
            try:
                if checkpoint.path.is_dir():
                    shutil.rmtree(checkpoint.path)
                else:  # a damaged one
                    checkpoint.path.unlink()
            except OSError as error:  # a reader on NFS has it open, or it is protected
                print(
                    f"warning: {checkpoint.path} is not needed any more and cannot be removed ({error.strerror}); "
                    "the next checkpoint tries it again",
                    file=sys.stderr,
                )

    def set_aside(self) -> Path:
        """Move checkpoints, curve and status into a new `superseded-…` folder, and return it."""
        numbers = [path.name.removeprefix("superseded-") for path in self.path.glob("superseded-*")]
        number = 1 + max((int(text) for text in numbers if text.isdecimal()), default=0)
        aside = self.path / f"superseded-{number:03}"
        aside.mkdir()
        for (
            name
        ) in f"status.json state.json run.json metrics.jsonl checkpoints track {BRANCH}".split():
            if (self.path / name).exists():
                (self.path / name).rename(aside / name)
        return aside

    @contextmanager
    def locked(self, wait_s: float = 60.0, follows: bool = False) -> Iterator[int]:
        """Hold this folder's lock, as `runs.lock.locked` does. Raise DataError naming another owner.

        Creates the folder, only for this user: a resume trusts its files.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        owner = self.path.stat().st_uid
        if owner != os.getuid():
            raise DataError(
                f"{self.path}: this run belongs to {user_name(owner)}; give yours another name, or use a checkout of "
                "your own"
            )
        self.path.chmod(0o700)
        busy = "another training is running here ({holder}); end it first, or give this run another name"
        with locked(self.path, busy, wait_s, follows) as descriptor:
            yield descriptor


def cut_back(path: Path, step: int, copy: Path | None = None) -> int:
    """Drop lines of steps after `step`, and a last line that a kill truncated; in `copy` if given.
    Return the number of training steps that it has then; lines of validations are not counted.
    """
    lines = [line for line in read_lines(path) if line["step"] <= step]
    write_text(copy or path, "".join(json.dumps(line) + "\n" for line in lines))
    return len({line["step"] for line in lines if is_training_step(line)})


def is_training_step(line: Mapping[str, Any]) -> bool:
    """True for a line of metrics.jsonl about a training step, False for a validation."""
    return "skipped_steps" in line


def read_lines(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Complete lines with a step in order, of the whole file or of its last bytes.

    Empty if there is none.
    """
    with suppress(FileNotFoundError), open(path, "rb") as file:
        start = 0 if last_bytes is None else max(0, file.seek(0, 2) - last_bytes)
        file.seek(start)
        texts = file.read().split(b"\n")
        return parse_lines(texts[1:] if start else texts)  # the first is incomplete
    return []


def parse_lines(texts: Iterable[bytes]) -> list[dict[str, Any]]:
    """The JSON objects with a step, without truncated, unfinished or damaged lines."""
    lines = []
    for text in texts:
        with suppress(ValueError, RecursionError):
            lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict) and isinstance(line.get("step"), int)]


def read_progress(train: Path) -> dict[str, Any]:
    """Step, cells and steps by state.json or the last checkpoint, whichever is newer.

    Empty before the first start.
    """
    file = train / "state.json"
    known = dict[str, Any]()
    if file.exists():
        known = read_json(file)
        if not isinstance(known, dict):
            raise DataError(f"{file}: not a run's state; start the run again: it rewrites the file")
    checkpoints = TrainFolder(train).checkpoints()
    if checkpoints and checkpoints[-1].step > known.get("step", 0):
        saved = checkpoints[-1].state()
        known = {**known, "steps": saved["steps"], **saved["progress"]}
    return known


def training_seconds(train: Path) -> float | None:
    """Seconds spent on the steps of the curve; None without a curve.

    Each line of metrics.jsonl has the rate since the line before it: the sum of (steps between
    them) x (cells per step) / (cells per second). Waiting for data is included; validation and
    checkpoints are not. Steps that were lost with a job and repeated are in the curve once. Those of
    a branch begin after its trunk's.
    """
    lines = [line for line in read_lines(train / "metrics.jsonl") if line.get("cells_per_s")]
    if not lines:
        return None
    known = read_progress(train)
    record = train / "run.json"
    if known.get("step") and known.get("cells"):
        cells = known["cells"] / known["step"]
    elif record.exists():  # before the first checkpoint
        cells = read_json(record)["options"]["train"]["global_batch"]
    else:
        return None
    total_s = 0.0
    branch = train / BRANCH
    last = read_json(branch)["step"] if branch.exists() else 0
    for line in lines:
        total_s += max(0, line["step"] - last) * cells / line["cells_per_s"]
        last = max(last, line["step"])
    return total_s


def status(name: str, state: dict[str, Any]) -> dict[str, Any]:
    """Contents of status.json and state.json."""
    return {
        "state": name,
        "steps": state["steps"],
        "world_size": state["world_size"],
        **state["progress"],
    }
