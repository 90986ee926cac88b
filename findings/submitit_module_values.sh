#!/usr/bin/env bash
# submitit 1.5.4: a job sees values that the submitting program set in a module only if its function is defined in the script itself.
#
# Functions of `__main__` travel with the values of the globals that they read; functions of an imported module travel as a name, and
# the job imports the module anew, from the disk as it is when the job starts. So `settings.RATE = 0.5; executor.submit(train)` trains
# with the value in the file, although the same line works with cluster="debug", which runs in the submitting process.
#
# Seen, RATE 0.1 in the file and set to 0.5 before submit: function of the module: debug 0.5, local 0.1; of the script: 0.5, 0.5.
# Executor "local" starts a process as "slurm" does. Source: our own run. Guess before it: both functions see 0.5, as in debug.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check submitit==1.5.4
cd "$folder"
cat > training.py <<'PYTHON'
RATE = 0.1


def train():
    return RATE
PYTHON
cat > script.py <<'PYTHON'
from importlib.metadata import version

import submitit
import training

RATE = 0.1


def train():
    return RATE


if __name__ == "__main__":
    print("submitit", version("submitit"))
    RATE = training.RATE = 0.5
    found = {}
    for cluster in ("debug", "local"):
        executor = submitit.AutoExecutor(folder="logs", cluster=cluster)
        executor.update_parameters(timeout_min=2)
        found[cluster] = [executor.submit(function).result() for function in (training.train, train)]
        print(f"{cluster}: function of the module {found[cluster][0]}, of the script {found[cluster][1]}")
    assert found == {"debug": [0.5, 0.5], "local": [0.1, 0.5]}
PYTHON
PYTHONPATH=. "$folder/venv/bin/python" -W ignore script.py
