"""Which cases of a parametrized test `make test` has."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], chosen: Iterable[Any]) -> list[Any]:
    """Values or rows of a parametrized test, of which those that are not chosen are only in `make test-all`."""
    rows = [(value if isinstance(value, tuple) else (value,), value in chosen) for value in values]
    return [pytest.param(*row, marks=() if is_quick else pytest.mark.full) for row, is_quick in rows]
