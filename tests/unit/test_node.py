"""The task of a node, run as SLURM runs it: what it does when a process is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cellmill.launch.local import free_port
from cellmill.launch.node import NodeTask, write_task

DIES = """
import json, os, signal, sys
starts, state, saved, error = sys.argv[1:]
count = 1 + (len(open(starts).read()) if os.path.exists(starts) else 0)
open(starts, "a").write("x")
json.dump({"step": int(saved) * count}, open(state, "w"))
if error:
    open(error, "w").write("it says why")
if count < 3:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("restarts", "saves", "says_why", "starts", "printed"),
    [
        (2, True, False, 3, "restart 2 of 2"),
        (1, True, False, 2, "restart 1 of 1"),
        (2, False, False, 2, "lost again without a new checkpoint after step 0: not started again"),
        (2, True, True, 1, ""),
    ],
)
def test_lost_processes_are_started_again_where_that_can_help(
    tmp_path: Path, restarts: int, saves: bool, says_why: bool, starts: int, printed: str
) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    count, state = tmp_path / "starts", tmp_path / "state.json"
    error = str(tmp_path / "error.txt") if says_why else ""
    arguments = [str(count), str(state), "10" if saves else "0", error]
    task = NodeTask("dies", arguments, 1, 0, free_port(), "", str(tmp_path), restarts, str(state))
    write_task(task, tmp_path / "task.json")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}
    slurm |= {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_NODELIST": "127.0.0.1"}
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "cellmill.launch.node", str(tmp_path / "task.json")],
        env=os.environ | slurm | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert len(count.read_text()) == starts, done.stdout + done.stderr
    assert (done.returncode == 0) == (starts == 3)
    assert printed in done.stdout
    assert ("starting all again" in done.stdout) == (starts > 1)
    assert json.loads((tmp_path / "attempt-000.json").read_text())["exit_code"] == (0 if starts == 3 else 1)
