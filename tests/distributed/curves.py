"""Curves of a training in one process, and the check that layouts have the same, one after the other too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.distributed import cases
from tests.distributed.pool import Pool

TOLERANCE = 5e-6


def curves_of_one_process(
    corpus: str, options: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory, steps: int
) -> dict[str, np.ndarray]:
    """`cases.curve` of each of the named options, each in a folder of its own."""
    return {
        name: np.array(cases.curve(corpus, given, str(tmp_path_factory.mktemp("one")), steps))
        for name, given in options.items()
    }


def assert_curve_in_every_rank(pool: Pool, given: dict[str, Any], expected: np.ndarray) -> None:
    """Train with the arguments `given` of `cases.curve`: the curve is the expected one, and equal in every rank."""
    curves = pool.run("curve", **given)
    np.testing.assert_allclose(np.array(curves[0]), expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert all(curve == curves[0] for curve in curves), "ranks disagree about a number that is global"


def assert_curve_through_layouts(
    pool: Pool, given: dict[str, Any], through: list[dict[str, Any]], steps: int, expected: np.ndarray
) -> None:
    """Train `steps` steps with each of the options `through`, on from a checkpoint: the curve is the expected one."""
    for part, options in enumerate(through):
        last = len(expected) if options is through[-1] else steps * (part + 1)
        own = given | {"options": options, "steps": last, "load": part > 0}
        assert_curve_in_every_rank(pool, own, expected[steps * part : last])
