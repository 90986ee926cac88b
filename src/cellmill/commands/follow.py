"""follow: sends a run to a tracker, while it trains or after the fact; from a machine that has a network.

Sends what the tracker does not have yet, under the run id of earlier sendings, and files that were written since, such
as the evaluation and the report. Changes nothing of the training.
"""

import time
from functools import partial
from pathlib import Path

from cellmill.commands.results import living_jobs, train_folder
from cellmill.config.load import stored_options
from cellmill.config.plugin import Plugin, by_name
from cellmill.config.track import TrackerConfig
from cellmill.errors import UserError
from cellmill.files import read_json
from cellmill.launch.queue import Queue
from cellmill.registry import in_one_line
from cellmill.runs.folder import TrainFolder
from cellmill.runs.lock import holder_of
from cellmill.track.follower import Follower, without_secrets
from cellmill.track.followers import POLL_S

QUEUE_S = 10.0  # between queries of jobs


def run(*, run: str, to: str, results: Path) -> None:
    """Send `run` to the tracker called `to` until it has ended. Raises UserError if the tracker fails."""
    train = train_folder(results, run)
    follower = Follower(train, options_of(train, to))
    try:
        follower.follow(partial(_ended, train, Queue(POLL_S)))
    except KeyboardInterrupt:
        print(f"\nno longer sending {run}; the same command goes on")
    except UserError:
        raise
    except Exception as error:  # of the tracker's library
        if isinstance(error, OSError) and error.filename is not None:  # of a file, and no ConnectionError
            raise
        raise UserError(without_secrets(f"tracker {to!r}: {in_one_line(error)}; the same command goes on")) from error
    print(f"{run}: sent {follower.n_lines} lines and {follower.n_artifacts} files to {to}")


def options_of(train: Path, name: str) -> Plugin:
    """Options of the tracker as the run was started with, or its defaults. Raises UserError for an unknown name."""
    options = stored_options(read_json(train / "run.json")["options"], str(train / "run.json"))
    if name in options.track.to:
        return options.track.to[name]
    try:
        chosen: Plugin = by_name(TrackerConfig, {name: None})[name]
    except ValueError as error:
        raise UserError(f"--to {error}") from None
    return chosen


def _ended(train: Path, queue: Queue) -> str:
    """The status of a training that has ended; empty, after a moment, while it is queued or runs."""
    if holder_of(train) is not None:
        time.sleep(POLL_S)
        return ""
    if living_jobs(train, queue):  # whose launcher left it
        time.sleep(QUEUE_S)
        return ""
    state = TrainFolder(train).state()
    return {"done": "done", "stopped": "stopped"}.get(state, "failed")
