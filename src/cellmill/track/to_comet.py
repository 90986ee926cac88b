"""Comet: an experiment that is resumed by its key, online or in zip files for `comet upload`."""

from pathlib import Path
from typing import Any

import comet_ml

from cellmill.config.parts.trackers import CometConfig
from cellmill.track.run_config import flatten_options, list_digests

NOTHING_ELSE = {
    "display_summary_level": 0,
    "log_code": False,
    "log_graph": False,
    "log_git_metadata": False,
    "log_git_patch": False,
    "log_env_details": False,
    "parse_args": False,
    "auto_output_logging": False,
    "auto_param_logging": False,
    "auto_metric_logging": False,
    "auto_histogram_weight_logging": False,
}
"""Settings without which Comet would describe the follower's process, not the training."""


class CometTracker:
    """Lines are metrics with their step; files are assets."""

    def __init__(self, options: CometConfig) -> None:
        self._options = options

    def start(self, config: dict[str, Any], resume_step: int) -> None:
        options = self._options
        settings = comet_ml.ExperimentConfig(
            name=config["run"], offline_directory=config["folder"], **NOTHING_ELSE
        )
        self._experiment = comet_ml.start(
            project_name=options.project,
            workspace=options.workspace,
            online=options.mode != "offline",
            mode="get_or_create",
            experiment_key=config["id"],
            experiment_config=settings,
        )
        self._experiment.log_parameters(
            flatten_options(config["options"]) | {"steps": config["steps"]}
        )
        self._experiment.log_others(list_digests(config))

    def log(self, step: int, scalars: dict[str, Any]) -> None:
        self._experiment.log_metrics(scalars, step=step)

    def artifact(self, name: str, path: Path) -> None:
        self._experiment.log_asset(str(path), file_name=name, overwrite=True, copy_to_tmp=True)

    def finish(self, status: str) -> None:
        self._experiment.log_other("status", status)
        self._experiment.end()
