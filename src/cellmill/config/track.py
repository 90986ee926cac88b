"""Section `track`: trackers beside metrics.jsonl and the console. Torch-free."""

from functools import partial
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, SerializeAsAny

from cellmill.config.plugin import Plugin, by_name
from cellmill.config.section import Section


class TrackerConfig(Plugin):
    """Contract of a tracker's options; see `cellmill.track.tracker.Tracker` for its implementation."""

    kind: ClassVar[str] = "tracker"

    name: str


class Track(Section):
    """Trackers of a training, beside metrics.jsonl and the console."""

    to: Annotated[dict[str, SerializeAsAny[TrackerConfig]], BeforeValidator(partial(by_name, TrackerConfig))] = Field(
        default={}, description="Options, or null, of each installed tracker to use, by its name."
    )
