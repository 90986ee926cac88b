"""Weights & Biases: a run that is resumed by its id, online or in folders for `wandb sync`."""

import os
import re
from pathlib import Path
from typing import Any

import wandb

from cellmill.config.parts.trackers import WandbConfig
from cellmill.track.run_config import list_digests


class WandbTracker:
    """Each line is a row of the history with its `step`; files are an artifact."""

    def __init__(self, options: WandbConfig) -> None:
        self._options = options
        self._files: dict[str, Path] = {}

    def start(self, config: dict[str, Any], resume_step: int) -> None:
        options = self._options
        self._artifact = re.sub(r"[^\w.-]", "-", f"{config['run']}-{config['id'][:8]}")
        self._run = wandb.init(
            project=options.project or os.environ.get("WANDB_PROJECT") or "cellmill",
            entity=options.entity,
            mode=options.mode,
            id=config["id"],
            name=config["run"],
            resume="allow",
            dir=config["folder"],
            config={"options": config["options"], "steps": config["steps"], **list_digests(config)},
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, x_disable_stats=True
            ),
        )
        # wandb's own step must grow from row to row
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: dict[str, Any]) -> None:
        self._run.log({"step": step} | scalars)

    def artifact(self, name: str, path: Path) -> None:
        self._files[name] = path

    def finish(self, status: str) -> None:
        if self._files:
            files = wandb.Artifact(self._artifact, type="run", metadata={"status": status})
            for name, path in self._files.items():
                files.add_file(str(path), name=name)
            self._run.log_artifact(files)
        self._run.summary["status"] = status
        self._run.finish(exit_code=int(status == "failed"))
        wandb.teardown()  # waits for wandb's own process, which may still write
