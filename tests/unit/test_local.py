"""Agents on this machine: one that fails ends the others, and is the one that is reported."""

from __future__ import annotations

import signal
import subprocess

import pytest

from cellmill.launch.local import _wait


@pytest.mark.parametrize("victim", [0, 1])
def test_the_code_is_that_of_the_agent_that_failed_first(victim: int) -> None:
    agents = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    agents[victim].kill()
    assert _wait(agents) == -signal.SIGKILL
    assert agents[1 - victim].returncode == -signal.SIGTERM
