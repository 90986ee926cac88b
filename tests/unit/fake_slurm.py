#!/usr/bin/env python3
"""sbatch, squeue, sacct and scancel for machines without SLURM: each answers what
$FAKE_SLURM/answers.json scripts.

{"squeue": [[exit code, stdout, stderr], …]}: one answer for each call, the last for all that
follow. `{name}` in an answer is the name of the job submitted last, `{name 3}` that of the third
submitted; {"sleep": seconds} in the place of an exit code answers too late.
"""

import fcntl
import json
import os
import re
import sys
import time
from pathlib import Path

folder = Path(os.environ["FAKE_SLURM"])
program = Path(sys.argv[0]).name
with open(folder / "lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    with open(folder / "calls", "a") as calls:
        calls.write(f"{program} {' '.join(sys.argv[1:])}\n")
    if program == "sbatch":
        script = Path(sys.argv[-1]).read_text()
        submitted_name = re.findall(r"#SBATCH --job-name=(\S+)", script)[0]
        (folder / "name").write_text(submitted_name)
        with open(folder / "names", "a") as names:
            names.write(f"{submitted_name}\n")
        (folder / "script.sh").write_text(script)
    answers = json.loads((folder / "answers.json").read_text())
    queue = answers.get(program, [[1, "", f"{program}: not scripted"]])
    code, out, err = queue[0]
    if len(queue) > 1:
        answers[program] = queue[1:]
        (folder / "answers.json").write_text(json.dumps(answers))
if "{name}" in out and not (folder / "name").exists():
    (folder / "too_early").write_text(f"{program} was to answer {out!r} before a job was submitted")
name = (folder / "name").read_text() if (folder / "name").exists() else ""
names_file = folder / "names"
names_so_far = names_file.read_text().split() if names_file.exists() else []
for number, earlier_name in enumerate(names_so_far, start=1):
    out = out.replace(f"{{name {number}}}", earlier_name)
if isinstance(code, dict):
    time.sleep(code["sleep"])
    code = 0
print(out.replace("{name}", name), end="")
print(err, end="", file=sys.stderr)
sys.exit(code)
