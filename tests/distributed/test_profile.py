"""Traces of chosen steps have the named parts, and recording changes no number."""

import gzip
import json
from pathlib import Path

import pytest

from cellmill.config.run import Train
from tests.distributed import cases
from tests.distributed.conftest import options

PARTS = {"data", "prepare", "forward_backward", "clip", "optimizer"}


@pytest.mark.parametrize(("last", "recorded"), [(3, 2), (9, 3)], ids=["inside the run", "beyond its end"])
def test_a_trace_has_the_named_parts_of_each_requested_step(
    alone: None, corpus: str, tmp_path: Path, last: int, recorded: int
) -> None:
    first = cases.curve(corpus, options(train={"profile_steps": [2, last]}), str(tmp_path), steps=4)
    assert first == cases.curve(corpus, options(), str(tmp_path / "plain"), steps=4)
    with gzip.open(tmp_path / "profile" / "rank-0.trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    counts = dict.fromkeys(PARTS, 0)
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"] in counts:
            counts[event["name"]] += 1
    assert counts == dict.fromkeys(PARTS, recorded)
    assert any(event["name"] == "aten::linear" for event in events)


@pytest.mark.parametrize("steps", [[0, 3], [4, 3], [1], [1, 2, 3]])
def test_profile_steps_that_are_not_a_range_are_refused(steps: list[int]) -> None:
    with pytest.raises(ValueError, match="profile_steps"):
        Train.model_validate({"steps": 5, "profile_steps": steps})
