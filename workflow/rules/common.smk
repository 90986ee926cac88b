# The checked configuration, and as `jobs` what rules take from it. Nothing slow is imported: every job of a cluster parses
# this file again. undocumented.smk has is_main, elsewhere, executes, is_locked, list_unrecorded, is_made, machines,
# config_source, words and one_line.
import atexit
import os
import re
import shlex

from cellmill.config.evaluate import PRESETS
from cellmill.config.job_files import JobFiles, sized
from cellmill.config.published import HUB_MODEL
from cellmill.errors import ConfigError
from cellmill.files import digest
from cellmill.launch.stage_jobs import StageWatch, reasons_of_failed
from cellmill.preflight.rule_flags import check_python, plan_arguments, plan_resources, train_arguments, train_resources
from cellmill.runs.identity import check_branches

# runs that begin afresh although they hold a training of other options: --config restart=RUN, or restart=[RUN,RUN]
restarted = config.pop("restart", [])
restarted = list(map(str, restarted if isinstance(restarted, list) else [restarted]))


def writes():
    """True if jobs run; those that wait in a queue run with the configuration as it is now."""
    if is_main and executes() and elsewhere():
        write_submitted(config, pipeline.corpora)
    return executes()


with one_line():
    pipeline = check_submitted(config, config_source)
    check_branches(pipeline, config_source)
    jobs = JobFiles(pipeline, writes=writes)
    if unknown := [name for name in restarted if name not in pipeline.runs]:
        raise ConfigError(f"restart: no run {unknown[0]!r}; there are: {', '.join(pipeline.runs)}")
    if is_main:
        jobs.check_targets(words)
        # imports h5py, which jobs of a cluster do without
        from cellmill.data.prepare.check import check_datasets, check_inputs

        check_datasets(pipeline)

# what a run prints of a job, besides why it runs; a dry run lists its inputs and resources
JOB_LINE = None if {"-n", "--dry-run", "--dryrun"} & {*words} else "{rule} -> {output}; log {log}"

SHOWN_FILES = 5  # in a line about files without a record

# the cellmill of this Python, where no activated environment has one
shell.prefix(f'set -euo pipefail; PATH="$PATH":{shlex.quote(os.path.dirname(sys.executable))}; ')

if pipeline.private:
    os.umask(0o077)  # for folders and benchmarks too, which Snakemake writes itself


wildcard_constraints:
    corpus="|".join(map(re.escape, pipeline.corpora)),
    run="|".join(map(re.escape, pipeline.runs)),
    at=r"(/steps/[1-9]\d*)?",
    model=HUB_MODEL,
    published="|".join(map(re.escape, jobs.published)) or "a^",
    part=r"\d+-of-\d+",
    digest="[0-9a-f]{12}",
    external="|".join(sorted({re.escape(name) for run in pipeline.runs.values() for name in run.evaluate.external}))
    or "a^",
    preset="|".join(PRESETS),
    sweep="|".join(map(re.escape, jobs.swept)) or "a^",  # nothing, without sweeps
    dataset="|".join(sorted({re.escape(name) for table in jobs.datasets.values() for name in table})),


def train_machine(wildcards, resources):
    """Flags of the machine of a run, no reason to rerun it: Snakemake does not compare what asks for `resources`."""
    with one_line():
        return train_arguments(machines, wildcards.run, pipeline.runs[wildcards.run], resources, elsewhere())


def plan_machine(wildcards, resources):
    """The same for `cellmill plan`, which refuses a run before anything is submitted."""
    with one_line():
        return plan_arguments(machines, wildcards.run, pipeline.runs[wildcards.run], resources)


def script(name):
    """Path of a script of workflow/bridges: in the checkout, or in Snakemake's cache, beside what scripts import."""
    if (bridges := checkout / "workflow" / "bridges").is_dir():
        return f"{bridges}/{name}"
    imported = ("bridge_result.py", "embedded_cells.py", "missing.py", "perturbed_cells.py", "zoo_cells.py")
    files = [workflow.source_path(f"../bridges/{each}") for each in (*imported, name)]
    if not files[-1].endswith(".py"):
        raise ConfigError(
            f"{name}: git+file:// renames scripts, which import each other; give the path of the checkout"
        )
    return files[-1]


def check_named_files():
    """End if a file that the configuration names is missing. Snakemake would take outputs without it as they are."""
    with one_line():
        lines = check_inputs(pipeline, is_made)
    for line in lines:
        print(f"cellmill: {line}", file=sys.stderr)


def repeat_reasons(log):
    """Print why jobs failed as the last lines, below what Snakemake prints about them as it ends."""
    if reasons := reasons_of_failed(log):
        atexit.register(print, *reasons, sep="\n", file=sys.stderr)


def tell_of_lock():
    """Print what to do about another snakemake in this folder, below Snakemake's own error."""
    if executes():
        print(
            "cellmill: another snakemake works in this folder (`cellmill status` shows its runs); if it was killed, run"
            " snakemake --unlock with the same --profile first",
            file=sys.stderr,
        )


def tell_of_unrecorded():
    """Print which files a changed option would not make again."""
    if unrecorded := list_unrecorded():
        files, rules = map(dict.fromkeys, zip(*unrecorded))
        shown = ", ".join([*files][:SHOWN_FILES]) + (", …" if len(files) > SHOWN_FILES else "")
        again = " ".join(files if len(files) <= SHOWN_FILES else rules)
        print(
            f"cellmill: nothing records which options made {shown}; other options do not make them again: if you changed"
            f" options since, add --forcerun {again}",
            file=sys.stderr,
        )


def watch_stages():
    """Say why stages wait in SLURM's queue; a training says so itself."""
    if elsewhere():
        with one_line():
            check_python(sys.executable)
        StageWatch(Path.cwd(), lambda line: print(f"cellmill: {line}", file=sys.stderr, flush=True)).start()
