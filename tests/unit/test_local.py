"""Agents on this machine: one that fails ends the others and gives the exit code; signals of their launcher."""

import os
import re
import signal
import subprocess
import sys

import pytest

from cellmill.launch.job import agent_environment, wait_for
from cellmill.launch.signals import requests


@pytest.mark.parametrize("victim", [0, 1])
def test_the_exit_code_is_that_of_the_agent_that_failed_first(victim: int) -> None:
    agents = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    agents[victim].kill()
    assert wait_for(agents, lambda: None) == -signal.SIGKILL
    assert agents[1 - victim].returncode == -signal.SIGTERM


def test_processes_share_the_cores_that_are_reserved_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(16))
    assert [agent_environment(2, cores)["OMP_NUM_THREADS"] for cores in (0, 6, 1)] == ["8", "3", "1"]


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with requests() as received:
            os.kill(os.getpid(), signal.SIGHUP)
            assert received.first is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert received.first == "cancel"
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, earlier)


def test_waiting_threads_yield_unless_the_user_wants_them_to_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("OMP_DISPLAY_ENV", "true")
    shown = subprocess.run(
        [sys.executable, "-c", "import torch"], env=agent_environment(1), capture_output=True, text=True, check=True
    ).stderr
    assert re.search(r"OMP_WAIT_POLICY\s*=\s*'PASSIVE'", shown), shown  # as torch's own OpenMP reads it
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert agent_environment(1)["OMP_WAIT_POLICY"] == "ACTIVE"
