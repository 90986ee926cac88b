"""TensorBoard: scalars, and configuration and tables as text, in event files in the run's folder."""

import json
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from cellmill.config.parts.trackers import TensorboardConfig

TEXTS = {".json": "json", ".md": ""}  # files that are shown as text, and their language in Markdown
LONGEST = 100_000


class TensorboardTracker:
    """One event file a process; TensorBoard joins them."""

    def __init__(self, options: TensorboardConfig) -> None:
        self._step = 0

    def start(self, config: dict[str, Any], resume_step: int) -> None:
        self._writer = EventFileWriter(config["folder"])
        self._step = resume_step
        if resume_step:  # hides what a killed process wrote and did not note
            start = SessionLog(status=SessionLog.START)
            event = Event(wall_time=time.time(), step=resume_step + 1, session_log=start)
            self._writer.add_event(event)
        self._text("config", f"```json\n{json.dumps(config, indent=2)}\n```")

    def log(self, step: int, scalars: dict[str, Any]) -> None:
        self._step = step
        self._add([Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()])

    def artifact(self, name: str, path: Path) -> None:
        if path.suffix in TEXTS and path.stat().st_size <= LONGEST:
            text = path.read_text(encoding="utf-8")
            language = TEXTS[path.suffix]
            self._text(name, f"```{language}\n{text}\n```" if language else text)

    def finish(self, status: str) -> None:
        self._text("status", status)
        self._writer.close()

    def _text(self, tag: str, text: str) -> None:
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
        metadata = create_summary_metadata(tag, "")
        self._add([Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])

    def _add(self, values: list[Any]) -> None:
        summary = Summary(value=values)
        self._writer.add_event(Event(wall_time=time.time(), step=self._step, summary=summary))
        self._writer.flush()
