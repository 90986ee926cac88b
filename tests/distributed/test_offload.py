"""CPU offload in one process; `test_conformance` has it in layouts, and resumes with and without it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.distributed import cases
from tests.distributed.conftest import options

STEPS = 6


def test_offload_in_one_process_changes_no_bit(alone: None, corpus: str, tmp_path: Path) -> None:
    plain, offloaded = (
        cases.curve(corpus, options(layout), str(tmp_path / str(len(layout))), STEPS)
        for layout in ({}, {"cpu_offload": "optimizer"})
    )
    assert np.array_equal(offloaded, plain)
