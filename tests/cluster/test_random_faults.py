"""Faults of random kinds, places and times: every run ends with the curve of an undisturbed one."""

from pathlib import Path

import pytest

from tests.cluster.random_faults import run_all
from tests.cluster.rig import Rig

FAULTS = 20


@pytest.mark.full
def test_runs_come_through_random_faults_with_one_curve_and_never_two_jobs(
    rig: Rig, corpus: str, tmp_path: Path
) -> None:
    assert sum(len(run.done) for run in run_all(rig, corpus, tmp_path, FAULTS, seed=1)) == FAULTS
