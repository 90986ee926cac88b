# The checked configuration and functions that rules take from it. Nothing slow is imported: every job of a cluster parses
# this file again.
import json
import os
import re
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

from cellmill.config import check_config, check_options
from cellmill.config.checks import check_nodes
from cellmill.config.machine import Machine
from cellmill.errors import ConfigError
from cellmill.preflight.command_line import profile_resources

# find the cellmill of this Python even if its environment is not activated
os.environ.update(PATH=os.pathsep.join([str(Path(sys.executable).parent), *os.get_exec_path()]))

try:
    pipeline = check_config(config, " + ".join(os.path.relpath(path) for path in workflow.configfiles))
    datasets = {corpus: pipeline.datasets(corpus) for corpus in pipeline.corpora}
    # Defaults of the rules train and plan, so that `--set-resources train:nodes=2`, which replaces the profile's
    # set-resources, changes that one value and not the launcher.
    in_profile = profile_resources(sys.argv[1:]) if workflow.is_main_process else {"train": {}, "plan": {}}
except ConfigError as error:
    sys.exit(f"cellmill: {error}")  # a WorkflowError would add its place in this file


wildcard_constraints:
    corpus="|".join(map(re.escape, pipeline.corpora)),
    run="|".join(map(re.escape, pipeline.runs)),
    dataset="|".join(sorted({re.escape(name) for table in datasets.values() for name in table})),


def options(stage):
    """Function of the wildcards: the sections of the configuration that `stage` reads, as JSON."""

    def section(wildcards):
        name = wildcards.get("run") or wildcards.get("corpus")
        return json.dumps(pipeline.section(stage, name))

    return section


# the machine of a training: a resource of the rule and a flag of the command for each option
machine_defaults = {name: field.default for name, field in Machine.model_fields.items()} | in_profile["train"]
plan_defaults = in_profile["plan"]
machine_flags = " ".join(f"--{name.replace('_', '-')}={{resources.{name}:q}}" for name in Machine.model_fields)


def of_train(name):
    """Function of the wildcards: a resource of rule train, which plan takes over."""

    def resource(wildcards, attempt, threads):
        known = {"input": [], "attempt": attempt, "threads": threads, "rulename": "train", "async_run": None}
        return workflow.get_rule("train").resources[name].evaluate(wildcards=wildcards, **known).value

    return resource


def fits_processes(wildcards, resources):
    """True if the run can be laid out on the profile's processes; `snakemake -n` ends with an error if not."""
    run = pipeline.runs[wildcards.run]
    if getattr(resources, "launcher", None) == "local" and not workflow.local_exec:
        sys.exit(
            "cellmill: launcher local would train on this machine, although stages are jobs elsewhere (executor); set "
            "set-resources: train: launcher: slurm in the profile, or leave the executor out"
        )
    given = {name: getattr(resources, name) for name in ("nodes", "nproc_per_node")}
    given["launcher"] = getattr(resources, "launcher", "slurm")  # plan has none, and takes a range of nodes
    try:
        machine = check_options(Machine, given, "the profile's set-resources")
        check_nodes(run, machine.node_counts, machine.nproc_per_node)
    except ConfigError as error:
        sys.exit(f"cellmill: run {wildcards.run}: {error}")  # a WorkflowError would print a traceback
    return True


def dataset_of(wildcards):
    """Row of the dataset in the corpus's table."""
    table = datasets[wildcards.corpus]
    if wildcards.dataset not in table:
        raise WorkflowError(
            f"{pipeline.corpora[wildcards.corpus].table}: corpus {wildcards.corpus} has no dataset "
            f"{wildcards.dataset!r}; there are: {', '.join(table)}"
        )
    return table[wildcards.dataset]


def cells_of_corpus(wildcards):
    """Preprocessed cells of every dataset of the corpus."""
    return [f"results/corpora/{wildcards.corpus}/cells/{name}.h5ad" for name in pipeline.trained_on(wildcards.corpus)]


def corpus_of(wildcards):
    """Folder of the corpus of a run."""
    return f"results/corpora/{pipeline.runs[wildcards.run].corpus}"


def evaluated(pattern):
    """Function of the wildcards: `pattern` for each dataset the run is evaluated on."""

    def files(wildcards):
        names = pipeline.evaluated_on(wildcards.run)
        return [pattern.format(corpus=corpus_of(wildcards), run=wildcards.run, dataset=name) for name in names]

    return files


def label_columns(wildcards):
    """obs column of the label for each dataset the run is evaluated on; '-' for none."""
    table = datasets[pipeline.runs[wildcards.run].corpus]
    return [table[name].label or "-" for name in pipeline.evaluated_on(wildcards.run)]


def parent_model(wildcards):
    """Weights of the run that this one starts from; empty if it starts anew."""
    parent = pipeline.runs[wildcards.run].init_from
    return [] if parent is None else [f"results/runs/{parent}/model/model.safetensors"]


def parent_argument(wildcards):
    """The same as arguments of `cellmill train`."""
    return [word for path in parent_model(wildcards) for word in ("--init-from", str(Path(path).parent))]


def ancestor_manifests(wildcards):
    """Manifests of the runs that the initial weights came from: their cells are not held out either."""
    manifests, run = [], pipeline.runs[wildcards.run]
    while run.init_from is not None:
        run = pipeline.runs[run.init_from]
        manifests.append(f"results/corpora/{run.corpus}/shards/manifest.json")
    return manifests


def reported_corpora():
    """Corpora used by any run, in the order of the configuration."""
    used = {run.corpus for run in pipeline.runs.values()}
    return [corpus for corpus in pipeline.corpora if corpus in used]
