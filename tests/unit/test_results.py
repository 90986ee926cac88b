"""metrics.json is read as what was written."""

import json
from pathlib import Path

import pytest
from reported import make_run

from cellmill.errors import DataError
from cellmill.runs import results


def test_metrics_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run") / "evaluate" / "metrics.json"
    evaluation = results.read(path)
    again = tmp_path / "again.json"
    results.write(again, evaluation)
    assert results.read(again) == evaluation
    [row, *_] = evaluation.datasets["pbmc"].tasks["probe"].rows
    assert (row.method.name, row.method.features) == (
        "embedding + logistic regression",
        "embedding",
    )
    assert (row.value("accuracy"), row.value("not_converged"), row.value("none")) == (0.8, 0, None)


@pytest.mark.parametrize("stored", [None, 1])
def test_results_of_another_format_are_one_line(tmp_path: Path, stored: int | None) -> None:
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps({"format": stored, "datasets": {}}))
    with pytest.raises(DataError, match=rf"^{path}: expected results of format 2, got {stored}: "):
        results.read(path)
