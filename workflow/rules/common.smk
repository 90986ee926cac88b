# The checked configuration and functions that rules take from it. Nothing slow is imported: every job of a cluster parses
# this file again.
import importlib
import json
import os
import re
import sys
import warnings
from pathlib import Path

from snakemake.exceptions import WorkflowError

from cellmill.config import check_config, check_options
from cellmill.config.checks import check_nodes
from cellmill.config.datasets import ObsColumns
from cellmill.config.datasets import is_url
from cellmill.config.machine import Machine
from cellmill.errors import ConfigError, UserError
from cellmill.files import digest, write_json
from cellmill.launch.queue import StageWatch, reasons_of_failed
from cellmill.preflight.profile import Profile, machines_of_command
from cellmill.runs.branch import check_branches

# find the cellmill of this Python even if its environment is not activated
os.environ.update(PATH=os.pathsep.join([str(Path(sys.executable).parent), *os.get_exec_path()]))

# runs that begin afresh although they hold a training of other options: --config restart=RUN, or restart=[RUN,RUN]
restarted = config.pop("restart", [])
restarted = list(map(str, restarted if isinstance(restarted, list) else [restarted]))

try:
    # --replace-workflow-config leaves the workflow's own file, a text here and no Path, unread
    replaced = "config/config.yaml" if workflow.config_settings.replace_workflow_config else None
    used = [path for path in workflow.configfiles if path != replaced] or workflow.configfiles
    source = " + ".join(map(os.path.relpath, used))
    pipeline = check_config(config, source)
    check_branches(pipeline, source)
    datasets = {corpus: pipeline.datasets(corpus) for corpus in pipeline.corpora}
    swept = pipeline.swept()  # values by axis of each run of each sweep
    # Defaults of the rules train and plan, so that `--set-resources train:nodes=2`, which replaces the profile's
    # set-resources, changes that one value and not the launcher.
    machines = machines_of_command(sys.argv[1:]) if workflow.is_main_process else Profile()
    if workflow.is_main_process:
        # imports h5py, which jobs of a cluster do without
        importlib.import_module("cellmill.data.prepare.check").check_datasets(pipeline)
except UserError as error:
    sys.exit(f"cellmill: {error}")  # a WorkflowError would add its place in this file
if unknown := [name for name in restarted if name not in pipeline.runs]:
    sys.exit(f"cellmill: restart: no run {unknown[0]!r}; there are: {', '.join(pipeline.runs)}")

# Snakemake 9 warns of a coroutine of its own when a profile names input.size_mb
warnings.filterwarnings("ignore", "coroutine 'InputFiles", RuntimeWarning)

if pipeline.private:
    os.umask(0o077)  # every command inherits it: a stage's job on a cluster reads this file too


bridge_folder = Path(str(workflow.current_basedir)).parent / "bridges"  # scripts, which import each other


wildcard_constraints:
    corpus="|".join(map(re.escape, pipeline.corpora)),
    run="|".join(map(re.escape, pipeline.runs)),
    at=r"(/steps/[1-9]\d*)?",
    model=r"[\w.-]+/[\w.-]+(@[\w./-]+)?",
    part=r"\d+-of-\d+",
    digest="[0-9a-f]{12}",
    external="|".join(sorted({re.escape(name) for run in pipeline.runs.values() for name in run.evaluate.external}))
    or "a^",
    sweep="|".join(map(re.escape, swept)) or "a^",  # nothing, without sweeps
    dataset="|".join(sorted({re.escape(name) for table in datasets.values() for name in table})),


def options(stage):
    """Function of the wildcards: the sections of the configuration that `stage` reads, as JSON."""
    return lambda wildcards: json.dumps(section_of(stage, wildcards))


def section_of(stage, wildcards):
    """Sections of the configuration that `stage` reads; with a dataset's own options where it preprocesses one."""
    name = wildcards.get("run") or wildcards.get("corpus")
    dataset = dataset_of(wildcards) if stage == "preprocess" else None
    section = pipeline.section(stage, name, dataset)
    if stage == "consolidate" and wildcards.at:
        section["consolidate"]["checkpoint"] = int(wildcards.at.rpartition("/")[2])
    return section


def options_file(stage):
    """Function of a job: the file with its options, which the command reads: an error prints the command twice.

    It is no reason to rerun, as it depends on resources; `options` is.
    """

    def file(wildcards, resources):
        return written(stage, wildcards.get("run") or wildcards.get("corpus"), section_of(stage, wildcards))

    return file


def swept_file(wildcards, resources):
    """The file with the values of a sweep's runs; as `options_file`."""
    return written("sweep", wildcards.sweep, swept[wildcards.sweep])


def written(stage, name, tree):
    """Path of a file of `tree`, which is written when jobs run.

    Another content is another file, so that a job that waits in a queue reads what it was submitted with.
    """
    path = Path("results/options", stage, f"{f'{name}.' if name else ''}{digest(tree)[:12]}.json")
    if workflow.executor_plugin is not None and not workflow.dryrun and not path.exists():
        try:
            write_json(path, tree)
        except OSError as error:  # the first file that a workflow writes
            sys.exit(
                f"cellmill: {error.filename or path}: {error.strerror}; the workflow writes to its working directory"
            )
    return str(path)


# the machine of a training: a resource of the rule for each option
machine_defaults = {name: field.default for name, field in Machine.model_fields.items()} | machines.train
plan_defaults = machines.plan


def machine_argument(wildcards, resources):
    """Flags of the command for what differs from its defaults: an error prints the command. No reason to rerun."""
    given = {name: (getattr(resources, name), field.default) for name, field in Machine.model_fields.items()}
    # as numbers and as text: a profile's numbers may be text, and 10 is the default 10.0
    changed = {
        name: value for name, (value, default) in given.items() if value != default and str(value) != str(default)
    }
    return [f"--{name.replace('_', '-')}={value}" for name, value in changed.items()]


def by_machine(rule):
    """Let the machine that a run names change resources of a rule, whatever the profile sets for all runs."""
    resources = workflow.get_rule(rule).resources
    resources.update({key: of_machine(rule, key, resources.get(key)) for key in machines.keys(rule)})


def of_machine(rule, key, otherwise):
    """Function of the wildcards: a resource of the run's machine, or the resource `otherwise`."""

    def resource(wildcards, attempt, threads):
        own = machines.resources(pipeline.runs[wildcards.run].machine, rule)
        return own[key] if key in own else value_of(otherwise, wildcards, attempt, threads)

    return resource


def value_of(resource, wildcards, attempt, threads):
    """Value of a resource for a job; None for no resource."""
    known = {"input": [], "attempt": attempt, "threads": threads, "rulename": "", "async_run": None}
    return None if resource is None else resource.evaluate(wildcards=wildcards, **known).value


def of_train(name):
    """Function of the wildcards: a resource of rule train, which plan takes over."""

    def resource(wildcards, attempt, threads):
        return value_of(workflow.get_rule("train").resources[name], wildcards, attempt, threads)

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
        if workflow.is_main_process and machines.trains and run.machine:
            machines.machine(run.machine)
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


def input_of(wildcards):
    """Input of the dataset: its path, or the record of its copy if it is a URL."""
    path = dataset_of(wildcards).path
    return "results/corpora/{corpus}/inputs/{dataset}.fetched.json".format(**wildcards) if is_url(path) else path


def sized(base, mb_per_unit):
    """Function of a job: a resource of `base`, one more for each `mb_per_unit` MB of input, times the attempt."""

    def resource(wildcards, input, attempt):
        # not input.size_mb, which warns, is unknown in a dry run, and is nothing for folders and URLs
        return int(base + sum(map(bytes_of, input)) / 2**20 / mb_per_unit) * attempt

    return resource


def bytes_of(path):
    """Bytes of an input: of a folder its files, of a fetched URL its copy."""
    if path.endswith(".fetched.json"):
        return json.loads(Path(path).read_text())["bytes"]
    if os.path.isdir(path):
        return sum(inner.stat().st_size for inner in Path(path).rglob("*") if inner.is_file())
    return os.path.getsize(path)


def parts_of(wildcards):
    """Parts of the shards that jobs of their own write; none if one job writes all."""
    jobs = pipeline.corpora[wildcards.corpus].shard.jobs
    folder = f"results/corpora/{wildcards.corpus}/shards/parts"
    return [f"{folder}/{number}-of-{jobs}.json" for number in range(1, jobs + 1)] if jobs > 1 else []


def column_arguments(wildcards):
    """What the table says of a dataset's obs and counts, as arguments of `cellmill preprocess`."""
    dataset = dataset_of(wildcards)
    given = {name: getattr(dataset, name) for name in ObsColumns.model_fields}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
    return words + ["--round-counts"] * dataset.round_counts


def label_maps_of(wildcards):
    """Files that rename labels of a dataset."""
    return list(dict.fromkeys(dataset_of(wildcards).label_maps.values()))


def file_of(section, key):
    """Function of the wildcards: the file that an option of a corpus names; empty if it names none."""

    def file(wildcards):
        path = getattr(getattr(pipeline.corpora[wildcards.corpus], section), key)
        return [] if path is None else [path]

    return file


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
        return [pattern.format(corpus=corpus_of(wildcards), dataset=name, **wildcards) for name in names]

    return files


def evaluated_steps():
    """Evaluations of kept checkpoints that runs ask for."""
    steps = [f"{name}/steps/{step}" for name, run in pipeline.runs.items() for step in run.evaluate_steps]
    return expand("results/runs/{step}/evaluate/metrics.json", step=steps)


def label_columns(wildcards):
    """obs columns of the labels for each dataset the run is evaluated on; '-' for none."""
    table = datasets[pipeline.runs[wildcards.run].corpus]
    return ["|".join(table[name].label_names) or "-" for name in pipeline.evaluated_on(wildcards.run)]


def bridged(pattern):
    """Function of the wildcards: `pattern`, if the run is evaluated on the dataset."""

    def file(wildcards):
        known = pipeline.evaluated_on(wildcards.run)
        if wildcards.dataset not in known:
            raise WorkflowError(
                f"run {wildcards.run} is not evaluated on dataset {wildcards.dataset!r}; it is on: {', '.join(known)}"
            )
        return pattern.format(corpus=corpus_of(wildcards), **wildcards)

    return file


def bridge_label(wildcards):
    """obs column of the first label of a dataset."""
    corpus = pipeline.runs[wildcards.run].corpus
    labels = datasets[corpus][wildcards.dataset].label_names
    if not labels:
        raise WorkflowError(
            f"{pipeline.corpora[corpus].table}: dataset {wildcards.dataset} has no label, which bridges read; name an "
            "obs column in column label"
        )
    return labels[0]


def bridge_script(package):
    """Interpreter and script of a bridge. Takes `resources`, so that it is no reason to rerun, as `fits_processes`."""

    def words(wildcards, resources):
        python = pipeline.bridges.get(package, "python")
        if "/" in python and not os.path.exists(python):
            sys.exit(f"cellmill: bridges.{package}: {python}: no such file")
        return [python, f"{bridge_folder}/{package.partition('-')[0]}_bridge.py"]

    return words


def parent_model(wildcards):
    """Weights of the run, or in the folder, that this one starts from; empty if it starts anew."""
    parent = pipeline.runs[wildcards.run].init_from
    if parent is None:
        return []
    if parent in pipeline.runs:
        return [f"results/runs/{parent}/model/model.safetensors"]
    folder = f"results/hub/{parent.removeprefix('hf://')}" if parent.startswith("hf://") else Path(parent)
    return [f"{folder}/model.safetensors"]


def gene_vectors(wildcards):
    """File of `model.gene_vectors`, whose path is among the options; empty without one."""
    path = getattr(pipeline.runs[wildcards.run].model, "gene_vectors", None)
    return [] if path is None else [path]


def task_files(wildcards):
    """Files that the options of the run's evaluation tasks name."""
    return [path for task in pipeline.runs[wildcards.run].evaluate.tasks.values() for path in task.paths().values()]


def external_embeddings(wildcards):
    """Embeddings by the models of `evaluate.external`: those of the first dataset, then of the next one."""
    models = pipeline.runs[wildcards.run].evaluate.external.items()
    return [
        f"{corpus_of(wildcards)}/external/{name}/{dataset}-{model.digest[:12]}.h5ad"
        for dataset in pipeline.evaluated_on(wildcards.run)
        for name, model in models
    ]


def external_model(wildcards):
    """The options of an external model, by its name and digest."""
    of_name = (run.evaluate.external.get(wildcards.external) for run in pipeline.runs.values())
    for model in of_name:
        if model is not None and model.digest.startswith(wildcards.digest):
            return model
    raise WorkflowError(f"no run has an evaluate.external.{wildcards.external} of digest {wildcards.digest}")


def parent_argument(wildcards):
    """The same as arguments of `cellmill train`."""
    words, run = [], pipeline.runs[wildcards.run]
    for path in parent_model(wildcards):
        words += ["--init-from", str(Path(path).parent)]
    if run.trunk is not None:
        words += ["--trunk", f"results/runs/{run.trunk}/train/checkpoints/step-{run.trunk_step:08}"]
    return words


def parent_files(wildcards):
    """What the run waits for: the model that it starts from, and its trunk's end."""
    trunk = pipeline.runs[wildcards.run].trunk
    return parent_model(wildcards) + ([] if trunk is None else [f"results/runs/{trunk}/train/status.json"])


def restart_argument(wildcards, resources):
    """`--restart` for a run of `restarted`. Takes `resources`, so that it is no reason to rerun, as `fits_processes`."""
    return ["--restart"] if wildcards.run in restarted else []


def ancestor_manifests(wildcards):
    """Manifests of the runs that the initial weights came from: their cells are not held out either."""
    manifests, run = [], pipeline.runs[wildcards.run]
    while run.init_from in pipeline.runs:  # not None, nor the path of a model folder
        run = pipeline.runs[run.init_from]
        manifests.append(f"results/corpora/{run.corpus}/shards/manifest.json")
    return manifests


def reported_corpora():
    """Corpora used by any run, in the order of the configuration."""
    used = {run.corpus for run in pipeline.runs.values()}
    return [corpus for corpus in pipeline.corpora if corpus in used]


def check_named_files():
    """End if a file that the configuration names is missing. Snakemake would take outputs without it as they are."""

    def is_made(path):
        return any(made.is_producer(path) for made in workflow.rules)

    try:
        gone = importlib.import_module("cellmill.data.prepare.check").check_inputs(pipeline, is_made)
    except UserError as error:
        sys.exit(f"cellmill: {error}")
    if gone is not None:
        print(f"cellmill: {gone}", file=sys.stderr)


def repeat_reasons(log):
    """Print why jobs failed below Snakemake's own blocks about them."""
    if not workflow.local_exec:
        for line in reasons_of_failed(log):
            print(line, file=sys.stderr, flush=True)


def watch_stages():
    """Say why stages wait in SLURM's queue; a training says so itself."""
    if not workflow.local_exec:
        StageWatch(Path.cwd(), lambda line: print(f"cellmill: {line}", file=sys.stderr, flush=True)).start()
