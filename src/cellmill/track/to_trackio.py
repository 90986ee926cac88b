"""trackio: a run of a local project, which `trackio show` displays."""

from pathlib import Path
from typing import Any

import trackio

from cellmill.config.parts.trackers import TrackioConfig
from cellmill.track.run_config import list_digests


class TrackioTracker:
    """The run's name has the first digits of its id, by which it is resumed."""

    def __init__(self, options: TrackioConfig) -> None:
        self._project = options.project
        self._files: dict[str, Path] = {}

    def start(self, config: dict[str, Any], resume_step: int) -> None:
        self._name = f"{config['run']}-{config['id'][:8]}"
        options = {"options": config["options"], "steps": config["steps"], **list_digests(config)}
        self._run = trackio.init(
            self._project,
            name=self._name,
            config=options,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, scalars: dict[str, Any]) -> None:
        self._run.log(scalars, step=step)

    def artifact(self, name: str, path: Path) -> None:
        self._files[name] = path

    def finish(self, status: str) -> None:
        if self._files:
            files = trackio.Artifact(self._name, type="run", metadata={"status": status})
            for name, path in self._files.items():
                files.add_file(str(path), name=name)
            self._run.log_artifact(files)
        self._run.finish()
