"""A process that has imported Snakemake, and runs each command in a fork: most of a dry run's time
are imports.

A command is a line of JSON on stdin: `folder`, `words`, `environment`, and `out`, the file that gets
all output. Its exit code is a line on stdout.
"""

import json
import os
import sys
from pathlib import Path

import snakemake.api
import snakemake.cli
import snakemake.dag
import snakemake.utils
import snakemake.workflow

import cellmill.config.checks
import cellmill.launch.stage_jobs
import cellmill.preflight.rule_flags
import cellmill.runs.identity  # noqa: F401


def run(folder: str, words: list[str], out: str, environment: dict[str, str]) -> None:
    """Never returns: Snakemake ends its process."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = [str(Path(sys.executable).with_name("snakemake")), *words]
    sys.exit(snakemake.cli.main(words))


for line in sys.stdin:
    child = os.fork()
    if not child:
        run(**json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
