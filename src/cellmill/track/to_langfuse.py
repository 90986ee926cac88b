"""Langfuse: a training is a trace, as are the uses of its model; other trackers draw curves."""

import os
from typing import Any

from langfuse import Langfuse

from cellmill.config.parts.trackers import LangfuseConfig
from cellmill.errors import ConfigError
from cellmill.track.run_config import list_digests

KEYS = ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY")


class LangfuseTracker:
    """Each line is an event of the trace; each process adds a span; the last losses are scores."""

    def __init__(self, options: LangfuseConfig) -> None:
        missing = [key for key in KEYS if not os.environ.get(key)]
        if missing:
            raise ConfigError(
                f"track.to.langfuse: {' and '.join(missing)} not set in the environment"
            )
        self._client = Langfuse(base_url=options.host)
        self._last: dict[str, float] = {}

    def start(self, config: dict[str, Any], resume_step: int) -> None:
        self._id = config["id"]
        self._span = self._client.start_observation(
            trace_context={"trace_id": self._id},
            name=config["run"],
            input={
                "options": config["options"],
                "steps": config["steps"],
                "resume_step": resume_step,
            },
            metadata=list_digests(config),
        )

    def log(self, step: int, scalars: dict[str, Any]) -> None:
        name = "validation" if "val_loss" in scalars else "step"
        self._span.create_event(name=name, input={"step": step}, output=scalars)
        self._last |= {key: value for key, value in scalars.items() if key in ("loss", "val_loss")}

    def finish(self, status: str) -> None:
        # one score of a name for each run: the id replaces an earlier one
        for name, value in self._last.items():
            self._client.create_score(
                trace_id=self._id, score_id=f"{self._id}-{name}", name=name, value=value
            )
        self._span.update(output={"status": status, **self._last})
        self._span.end()
        self._client.flush()
