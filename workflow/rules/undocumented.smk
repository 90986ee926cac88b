# What the workflow takes from Snakemake beyond its documentation, all of it; tests/workflow/test_undocumented.py holds
# that each still means this.
import inspect
import os
import sys
from contextlib import chdir
from pathlib import Path

import yaml
from snakemake.cli import parse_set_resources
from snakemake.persistence import PersistenceBase

from cellmill.config.load import read_yaml
from cellmill.errors import one_line
from cellmill.preflight.profile import Profile, read_command

is_main = workflow.is_main_process  # False in a job of a cluster, which parses the workflow again
# a variable for each cellmill among the modules of a workflow, which every process parses in the same order
workflow.cellmills = getattr(workflow, "cellmills", 0) + 1
submitted_variable = f"CELLMILL_SUBMITTED_{workflow.cellmills}"
submitted_file = Path(os.environ.get(submitted_variable, ""))
submitted = {} if is_main or not submitted_file.is_file() else yaml.safe_load(submitted_file.read_bytes())
checkout = Path(str(workflow.current_basedir)).parents[1]
checkout = checkout if checkout.is_dir() else Path()  # of a workflow at a URL: the working folder, for the image
own = [] if workflow.config_settings.replace_workflow_config else ["config/config.yaml"]
config_files = [*dict.fromkeys(map(os.path.relpath, [*workflow.configfiles, *filter(os.path.exists, own)]))]
given = ["--config"] if workflow.config_settings.config else []
words = sys.argv[1:] if is_main else []  # of the command, targets among them
config_source = " + ".join([*config_files, *given])  # in messages


SIZE_MB = "__import__('cellmill.config.job_files', fromlist=['size_mb']).size_mb(input)"


def typed_in():
    """The folder in which the command was typed. Snakemake has gone to that of `--directory`, and keeps the first in an object
    that only its functions know."""
    for entry in inspect.stack(0):
        handler = getattr(entry.frame.f_locals.get("self"), "_workdir_handler", None)
        if handler is not None and handler.olddir is not None:
            return handler.olddir
    return Path.cwd()


with one_line():
    # Snakemake's parser takes the last of two keys, names no line, waits for a FIFO without end, and ends in a traceback
    # where a file is nested too deeply
    for path in [] if submitted else config_files:
        read_yaml(Path(path))
    # `--set-resources train:nodes=2` replaces the whole set-resources of the profile: its keys for train and plan become
    # the defaults of these rules, those for others are set again, and only the command says which profile it is
    with chdir(typed_in()):  # profiles are found from there
        machines = read_command(words) if is_main else Profile()
    for rule, resources in machines.discarded.items():
        resources.update(workflow.resource_settings.overwrite_resources.get(rule, {}))
        workflow.resource_settings.overwrite_resources[rule] = resources
    # a profile's `input.size_mb` is nothing for folders and URLs, and is replaced by the size that the rules take
    for rule, resources in (workflow.resource_settings.overwrite_resources if is_main else {}).items():
        for name, resource in [*resources.items()]:
            if "input.size_mb" in str(resource.raw):
                expression = resource.raw.replace("input.size_mb", SIZE_MB)
                resources.update(parse_set_resources([f"{rule}:{name}={expression}"])[rule])


if not is_main:
    finished = PersistenceBase.finished

    async def finished_and_recorded(self, job):
        """Record how a job's outputs were made, as jobs of `--immediate-submit` do. Its snakemake, which records it too, may
        have been killed meanwhile, and a later change of options would rerun nothing."""
        settings = self.dag.workflow.remote_execution_settings
        given = settings.immediate_submit
        settings.immediate_submit = True
        try:
            await finished(self, job)
        finally:
            settings.immediate_submit = given

    PersistenceBase.finished = finished_and_recorded


def elsewhere():
    """True if an executor runs stages as jobs on other machines; known once all files are parsed."""
    return not workflow.local_exec


def executes():
    """True if jobs run, rather than being listed; likewise."""
    return workflow.executor_plugin is not None and not workflow.dryrun


def name_submitted(path):
    """Name the file of the submitted configuration to jobs: sbatch passes them the environment."""
    os.environ[submitted_variable] = str(path)


def is_locked():
    """True if a snakemake works in this folder, or was killed there; before this one takes the lock."""
    return any(Path(".snakemake/locks").glob("*.lock"))


def list_unrecorded():
    """List an output and the rule of each job with parameters, of which Snakemake has no record. It is taken as up to date,
    although nobody knows its parameters. The list is empty until the jobs are known."""
    dag = workflow.dag
    jobs = [] if dag is None else [job for job in dag.jobs if dag.reason(job).no_metadata and not dag.needrun(job)]
    return sorted((job.output[0], job.rule.name) for job in jobs if job.params)


def is_made(path):
    """True if a rule makes the file; of rules further below nothing is known."""
    return any(rule.is_producer(path) for rule in workflow.rules)
