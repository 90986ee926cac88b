"""MLflow: a run of an experiment, found again by its tag `cellmill.id`."""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run
from mlflow.exceptions import MlflowException

from cellmill.config.parts.trackers import MlflowConfig
from cellmill.track.follow import digests, flat

TAG = "cellmill.id"
LONGEST_PARAM = 500
BATCH = 100  # most parameters of a request
SQLITE = "sqlite:///"
STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker:
    """Uses MLflow's client alone: nothing is global, and no code is patched."""

    def __init__(self, options: MlflowConfig) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._client, self._experiment = MlflowClient(tracking_uri=options.uri), options.experiment
        self._files = _folder_of_files(options.uri)

    def start(self, config: dict[str, Any], resume_step: int) -> None:
        name = self._experiment_id()
        runs = self._client.search_runs([name], f"tags.`{TAG}` = '{config['id']}'")
        run = runs[0] if runs else self._new(name, config)
        self._run = run.info.run_id
        self._client.update_run(self._run, status="RUNNING")

    def log(self, step: int, scalars: dict[str, Any]) -> None:
        now = int(1000 * time.time())
        metrics = [Metric(name, float(value), now, step) for name, value in scalars.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def artifact(self, name: str, path: Path) -> None:
        folder, _, _ = name.rpartition("/")
        self._client.log_artifact(self._run, str(path), folder or None)  # MLflow refuses the folder `.`

    def finish(self, status: str) -> None:
        self._client.set_terminated(self._run, STATUS[status])

    def _experiment_id(self) -> str:
        with suppress(MlflowException):  # it exists, or another run makes it at this moment
            return str(self._client.create_experiment(self._experiment, self._files))
        return str(self._client.get_experiment_by_name(self._experiment).experiment_id)

    def _new(self, experiment: str, config: dict[str, Any]) -> Run:
        of_run = digests(config)
        tags = {TAG: config["id"], "mlflow.source.name": "cellmill"} | of_run
        if "commit" in of_run:
            tags["mlflow.source.git.commit"] = of_run["commit"]
        run = self._client.create_run(experiment, run_name=config["run"], tags=tags)
        values = {"steps": config["steps"], "world_size": config["world_size"]} | flat(config["options"])
        params = [Param(name, str(value)[:LONGEST_PARAM]) for name, value in values.items()]
        for batch in _batches(params):  # of the first start: MLflow lets none change
            self._client.log_batch(run.info.run_id, params=batch)
        return run


def _folder_of_files(uri: str | None) -> str | None:
    """Folder beside an SQLite file; None leaves it to MLflow, which would take the working directory."""
    if uri is None or not uri.startswith(SQLITE):
        return None
    return str(Path(uri.removeprefix(SQLITE)).resolve().parent / "mlartifacts")


def _batches(params: Iterable[Param]) -> Iterator[list[Param]]:
    left = iter(params)
    while batch := list(islice(left, BATCH)):
        yield batch
