"""Section `track`: trackers and observers beside metrics.jsonl and the console. Torch-free.

Keys and passwords of services come from the environment alone: options are written to run.json and
to reports.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SerializeAsAny

from cellmill.config.plugin import Plugin, by_name
from cellmill.config.section import Section


class TrackerConfig(Plugin):
    """Base of every tracker's options; the tracker itself is a `cellmill.track.tracker.Tracker`."""

    kind = "tracker"

    name: str

    def problems(self) -> Iterator[str]:
        for key, value in self:
            if isinstance(value, str) and urlsplit(value).password is not None:
                yield f"{key}: has a password, which run.json would show; set it in the environment"


class ObserverConfig(Plugin):
    """Base of every observer's options; the observer itself is a `cellmill.track.tracker.Observer`."""

    kind = "observer"

    name: str


class TensorboardConfig(TrackerConfig):
    """Event files in `train/track/tensorboard` of the run, for `tensorboard --logdir results/runs`."""

    implementation = "cellmill.track.to_tensorboard:TensorboardTracker"
    name: Literal["tensorboard"] = "tensorboard"


class MlflowConfig(TrackerConfig):
    """A run of an MLflow experiment, on a server or in an SQLite file."""

    implementation = "cellmill.track.to_mlflow:MlflowTracker"
    name: Literal["mlflow"] = "mlflow"
    uri: str | None = None
    """Server or database, as `sqlite:///mlflow.db`; null is MLFLOW_TRACKING_URI, or MLflow's
    default.
    """
    experiment: str = Field("cellmill", min_length=1)
    """Name of the experiment."""


class WandbConfig(TrackerConfig):
    """A run of Weights & Biases; the key is WANDB_API_KEY or that of `wandb login`."""

    implementation = "cellmill.track.to_wandb:WandbTracker"
    name: Literal["wandb"] = "wandb"
    project: str | None = None
    """Project; null is WANDB_PROJECT, or `cellmill`."""
    entity: str | None = None
    """User or team; null is WANDB_ENTITY, or your default."""
    mode: Literal["online", "offline"] | None = None
    """offline: files in `train/track/wandb` of the run, for `wandb sync`. null is WANDB_MODE."""


class TrackioConfig(TrackerConfig):
    """A run of a trackio project, an SQLite file in TRACKIO_DIR or the user's cache folder."""

    implementation = "cellmill.track.to_trackio:TrackioTracker"
    name: Literal["trackio"] = "trackio"
    project: str = Field("cellmill", min_length=1)
    """Project."""


class CometConfig(TrackerConfig):
    """An experiment of Comet; the key is COMET_API_KEY or that of `comet login`."""

    implementation = "cellmill.track.to_comet:CometTracker"
    name: Literal["comet"] = "comet"
    project: str | None = None
    """Project; null is COMET_PROJECT_NAME, or Comet's default."""
    workspace: str | None = None
    """Workspace; null is COMET_WORKSPACE, or your default."""
    mode: Literal["online", "offline"] = "online"
    """offline: zip files in `train/track/comet` of the run, for `comet upload`."""


class LangfuseConfig(TrackerConfig):
    """A trace of a Langfuse project; the keys are LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY."""

    implementation = "cellmill.track.to_langfuse:LangfuseTracker"
    name: Literal["langfuse"] = "langfuse"
    host: str | None = None
    """Server, as `https://langfuse.example.org`; null is LANGFUSE_BASE_URL, or Langfuse's own."""


class Track(Section):
    """Trackers and observers of a training, beside metrics.jsonl and the console, each in a process
    of its own.
    """

    to: Annotated[
        dict[str, SerializeAsAny[TrackerConfig]], BeforeValidator(partial(by_name, TrackerConfig))
    ] = Field(default={})
    """Trackers to use, by name, each with its options or null."""
    observers: Annotated[
        dict[str, SerializeAsAny[ObserverConfig]], BeforeValidator(partial(by_name, ObserverConfig))
    ] = Field(default={})
    """Installed observers to use, by name, each with its options or null."""
