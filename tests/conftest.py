"""What every kind of test may use."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root() -> Path:
    """Root of the repository."""
    return Path(__file__).resolve().parents[1]
