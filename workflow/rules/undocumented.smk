# What the workflow takes from Snakemake beyond its documentation, all of it; tests/workflow/test_undocumented.py holds
# that each still means this.
import os
import sys
from pathlib import Path

from cellmill.config.load import read_yaml
from cellmill.errors import one_line
from cellmill.preflight.profile import Profile, read_command

is_main = workflow.is_main_process  # False in a job of a cluster, which parses the workflow again
checkout = Path(str(workflow.current_basedir)).parents[1]
checkout = checkout if checkout.is_dir() else Path()  # of a workflow at a URL: the working folder, for the image
own = [] if workflow.config_settings.replace_workflow_config else ["config/config.yaml"]
config_files = [*dict.fromkeys(map(os.path.relpath, [*workflow.configfiles, *filter(os.path.exists, own)]))]
given = ["--config"] if workflow.config_settings.config else []
words = sys.argv[1:] if is_main else []  # of the command, targets among them
config_source = " + ".join([*config_files, *given])  # in messages

with one_line():
    # Snakemake's parser takes the last of two keys, names no line, waits for a FIFO without end, and ends in a traceback
    # where a file is nested too deeply
    for path in config_files:
        read_yaml(Path(path))
    # `--set-resources train:nodes=2` replaces the whole set-resources of the profile: its keys for train and plan become
    # the defaults of these rules, those for others are set again, and only the command says which profile it is
    machines = read_command(words) if is_main else Profile()
    for rule, resources in machines.discarded.items():
        resources.update(workflow.resource_settings.overwrite_resources.get(rule, {}))
        workflow.resource_settings.overwrite_resources[rule] = resources


def elsewhere():
    """True if an executor runs stages as jobs on other machines; known once all files are parsed."""
    return not workflow.local_exec


def executes():
    """True if jobs run, rather than being listed; likewise."""
    return workflow.executor_plugin is not None and not workflow.dryrun


def is_locked():
    """True if a snakemake works in this folder, or was killed there; before this one takes the lock."""
    return any(Path(".snakemake/locks").glob("*.lock"))


def is_made(path):
    """True if a rule makes the file; of rules further below nothing is known."""
    return any(rule.is_producer(path) for rule in workflow.rules)
