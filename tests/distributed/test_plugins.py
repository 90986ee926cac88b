"""The toys of tests/plugin pass the checks that an author of a plug-in calls, installed as a package is."""

import subprocess
import sys

import pytest

from tests.plugins import PLUGIN


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_toys_keep_the_promises_of_built_in_parts(plugins: dict[str, str]) -> None:
    words = [
        "-m",
        "pytest",
        "-q",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-o",
        "timeout=1800",
        str(PLUGIN / "checks.py"),
    ]
    done = subprocess.run([sys.executable, *words], env=plugins, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
