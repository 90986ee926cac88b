"""MLflow: a run of an experiment, found again by its tag `cellmill.id`."""

import os
import time
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run
from mlflow.exceptions import MlflowException

from cellmill.config.parts.trackers import MlflowConfig
from cellmill.track.run_config import flatten_options, list_digests

TAG = "cellmill.id"
LONGEST_PARAM = 500
BATCH = 100  # most parameters of a request
SQLITE = "sqlite:///"
STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker:
    """Uses only MLflow's client: nothing is global, and no code is patched."""

    def __init__(self, options: MlflowConfig) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._client = MlflowClient(tracking_uri=options.uri)
        self._experiment = options.experiment
        self._files = None  # MLflow chooses the folder
        # next to the database, not in the working directory
        if options.uri is not None and options.uri.startswith(SQLITE):
            database = Path(options.uri.removeprefix(SQLITE)).resolve()
            self._files = str(database.parent / "mlartifacts")

    def start(self, config: dict[str, Any], resume_step: int) -> None:
        try:
            created = self._client.create_experiment(self._experiment, self._files)
        except MlflowException:  # it exists, or another run makes it at this moment
            created = self._client.get_experiment_by_name(self._experiment).experiment_id
        experiment = str(created)
        runs = self._client.search_runs([experiment], f"tags.`{TAG}` = '{config['id']}'")
        run = runs[0] if runs else self._create_run(experiment, config)
        self._run = run.info.run_id
        self._client.update_run(self._run, status="RUNNING")

    def log(self, step: int, scalars: dict[str, Any]) -> None:
        now = int(1000 * time.time())
        metrics = [Metric(name, float(value), now, step) for name, value in scalars.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def artifact(self, name: str, path: Path) -> None:
        folder, _, _ = name.rpartition("/")
        # MLflow refuses the folder `.`
        self._client.log_artifact(self._run, str(path), folder or None)

    def finish(self, status: str) -> None:
        self._client.set_terminated(self._run, STATUS[status])

    def _create_run(self, experiment: str, config: dict[str, Any]) -> Run:
        tags = {TAG: config["id"], "mlflow.source.name": "cellmill"} | list_digests(config)
        if "commit" in tags:
            tags["mlflow.source.git.commit"] = tags["commit"]
        run = self._client.create_run(experiment, run_name=config["run"], tags=tags)
        values = {"steps": config["steps"], "world_size": config["world_size"]}
        values |= flatten_options(config["options"])
        params = [Param(name, str(value)[:LONGEST_PARAM]) for name, value in values.items()]
        for first in range(0, len(params), BATCH):  # at the first start: MLflow lets none change
            self._client.log_batch(run.info.run_id, params=params[first : first + BATCH])
        return run
