"""Which cases of a parametrized test `make test` has."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], chosen: Iterable[Any]) -> list[Any]:
    """Values of a parametrized test, of which those that are not chosen are only in `make test-all`."""
    return [pytest.param(value, marks=() if value in chosen else pytest.mark.full) for value in values]
