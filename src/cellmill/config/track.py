"""Section `track`: trackers beside metrics.jsonl and the console. Torch-free."""

from functools import partial
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, SerializeAsAny

from cellmill.config.plugin import Plugin, by_name
from cellmill.config.section import Section


class TrackerConfig(Plugin):
    """Base of every tracker's options; the tracker itself is a `cellmill.track.tracker.Tracker`."""

    kind: ClassVar[str] = "tracker"

    name: str


class Track(Section):
    """Trackers of a training, beside metrics.jsonl and the console."""

    to: Annotated[dict[str, SerializeAsAny[TrackerConfig]], BeforeValidator(partial(by_name, TrackerConfig))] = Field(
        default={}, description="Installed trackers to use, by name, each with its options or null."
    )
