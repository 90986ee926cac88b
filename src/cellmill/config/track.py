"""Section `track`: trackers beside metrics.jsonl and the console. Torch-free."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, SerializeAsAny, field_validator

from cellmill.config.plugin import Plugin, by_name
from cellmill.config.section import Section


class TrackerConfig(Plugin):
    """Contract of a tracker's options; see `cellmill.track.tracker.Tracker` for its implementation."""

    kind: ClassVar[str] = "tracker"

    name: str


class Track(Section):
    """Trackers of a training, beside metrics.jsonl and the console."""

    to: dict[str, SerializeAsAny[TrackerConfig]] = Field(
        default={}, description="Options, or null, of each installed tracker to use, by its name."
    )

    @field_validator("to", mode="before")
    @classmethod
    def _options_of_each(cls, value: Any) -> Any:
        return by_name(TrackerConfig, value)
