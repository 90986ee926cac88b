# The configuration, checked once, and what rules take from it. Nothing slow is imported: every job of a cluster
# parses this file again.
import json
import os
import re
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

from cellmill.config import check_config, check_options
from cellmill.config.layout import check_lanes, layout
from cellmill.config.machine import Machine
from cellmill.errors import ConfigError

# the cellmill of this Python, also where its environment is not activated
os.environ.update(PATH=os.pathsep.join([str(Path(sys.executable).parent), *os.get_exec_path()]))

try:
    pipeline = check_config(config, " + ".join(os.path.relpath(path) for path in workflow.configfiles))
    datasets = {corpus: pipeline.datasets(corpus) for corpus in pipeline.corpora}
except ConfigError as error:
    sys.exit(f"cellmill: {error}")  # a WorkflowError would add where in this file it was raised


wildcard_constraints:
    corpus="|".join(map(re.escape, pipeline.corpora)),
    run="|".join(map(re.escape, pipeline.runs)),
    dataset="|".join(sorted({re.escape(name) for table in datasets.values() for name in table})),


def options(stage):
    """A function of the wildcards that gives, as JSON, the sections of the configuration that `stage` reads."""

    def section(wildcards):
        name = wildcards.get("run") or wildcards.get("corpus")
        return json.dumps(pipeline.section(stage, name))

    return section


# the machine of a training: a resource of the rule and a flag of the command for each option
machine_defaults = {name: field.default for name, field in Machine.model_fields.items()}
machine_flags = " ".join(f"--{name.replace('_', '-')}={{resources.{name}:q}}" for name in Machine.model_fields)


def fits_processes(wildcards, resources):
    """True when the profile's processes can be laid out as the run asks: what cannot be is refused by `snakemake -n`."""
    run = pipeline.runs[wildcards.run]
    given = {name: getattr(resources, name) for name in ("nodes", "nproc_per_node")}
    given["launcher"] = getattr(resources, "launcher", "slurm")  # plan has none, and takes ranges
    try:
        machine = check_options(Machine, given, "the profile's set-resources")
        for nodes in machine.node_counts:
            sizes = layout(run.parallel, nodes * machine.nproc_per_node, machine.nproc_per_node)
            check_lanes(run.stream.lanes, run.train.global_batch, sizes)
    except ConfigError as error:
        sys.exit(f"cellmill: run {wildcards.run}: {error}")  # a WorkflowError would be told by a traceback
    return True


def dataset_of(wildcards):
    """The row of the corpus's table that a dataset has."""
    table = datasets[wildcards.corpus]
    if wildcards.dataset not in table:
        raise WorkflowError(
            f"{pipeline.corpora[wildcards.corpus].table}: corpus {wildcards.corpus} has no dataset "
            f"{wildcards.dataset!r}; there are: {', '.join(table)}"
        )
    return table[wildcards.dataset]


def cells_of_corpus(wildcards):
    """Preprocessed cells of every dataset the corpus is made of."""
    return [f"results/corpora/{wildcards.corpus}/cells/{name}.h5ad" for name in pipeline.trained_on(wildcards.corpus)]


def corpus_of(wildcards):
    """Folder of the corpus of a run."""
    return f"results/corpora/{pipeline.runs[wildcards.run].corpus}"


def evaluated(pattern):
    """A function of the wildcards that fills `pattern` with each dataset the run is evaluated on."""

    def files(wildcards):
        names = pipeline.evaluated_on(wildcards.run)
        return [pattern.format(corpus=corpus_of(wildcards), run=wildcards.run, dataset=name) for name in names]

    return files


def label_columns(wildcards):
    """obs column that holds the label of each dataset the run is evaluated on; '-' for none."""
    table = datasets[pipeline.runs[wildcards.run].corpus]
    return [table[name].label or "-" for name in pipeline.evaluated_on(wildcards.run)]


def parent_model(wildcards):
    """Weights of the run that this one starts from: none or one."""
    parent = pipeline.runs[wildcards.run].init_from
    return [] if parent is None else [f"results/runs/{parent}/model/model.safetensors"]


def parent_argument(wildcards):
    """The same as arguments of `cellmill train`."""
    return [word for path in parent_model(wildcards) for word in ("--init-from", str(Path(path).parent))]


def ancestor_manifests(wildcards):
    """Manifests of the runs that this one's first weights came from: their cells are not held out either."""
    manifests, run = [], pipeline.runs[wildcards.run]
    while run.init_from is not None:
        run = pipeline.runs[run.init_from]
        manifests.append(f"results/corpora/{run.corpus}/shards/manifest.json")
    return manifests


def reported_corpora():
    """Corpora that a run uses, in the order of the configuration."""
    used = {run.corpus for run in pipeline.runs.values()}
    return [corpus for corpus in pipeline.corpora if corpus in used]
