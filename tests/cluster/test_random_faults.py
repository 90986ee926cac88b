"""Each kind of fault at a random place and time: every run ends with the curve of an undisturbed
one.
"""

from pathlib import Path

import pytest

from tests.cluster.random_faults import FAULTS, run_all
from tests.cluster.rig import Rig


@pytest.mark.full
def test_the_curve_survives_random_faults(rig: Rig, corpus: str, tmp_path: Path) -> None:
    assert sum(len(run.done) for run in run_all(rig, corpus, tmp_path, len(FAULTS), seed=1)) == len(
        FAULTS
    )
