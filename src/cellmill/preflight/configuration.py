"""Checks of a profile and a configuration before a preflight's job: layouts of runs, genes of datasets.

They open the files of datasets, and read the counts of a few cells.
"""

import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from cellmill.config import Workflow, check_options
from cellmill.config.checks import check_nodes
from cellmill.config.corpus import Preprocess
from cellmill.config.datasets import Dataset, is_url
from cellmill.config.machine import Machine
from cellmill.config.options import TrainOptions
from cellmill.config.parallel import divide_processes
from cellmill.config.published import PublishedFolder
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.formats import open_dataset
from cellmill.data.prepare.naming import name_genes
from cellmill.data.prepare.obs import choose_obs
from cellmill.data.shards.manifest import Manifest
from cellmill.errors import ConfigError, UserError
from cellmill.preflight.check import TRAIN, Check, doubt, no, ok
from cellmill.preflight.profile import Profile, find_as_snakemake

CORPORA = Path("results/corpora")


def list_unused_stages(pipeline: Workflow | None) -> set[str]:
    """List the stages that a workflow does not run; without one, those that most do not run."""
    corpora = pipeline.corpora.values() if pipeline else ()
    runs = pipeline.runs.values() if pipeline else ()
    external = [*chain.from_iterable(run.evaluate.external.values() for run in runs)]
    sources = [run.init_from for run in runs] + [model.model for model in external]
    has_parts = any(corpus.shard.jobs > 1 for corpus in corpora)
    needed = {
        "divide": has_parts,
        "shard_part": has_parts,
        "embed_external": any(model.line for model in external),
        **dict.fromkeys(("unpack", "zoo"), any(model.preset for model in external)),
        "predict_changes": any("perturbation" in run.evaluate.tasks for run in runs),
        "import": any(PublishedFolder.named_by(source or "") for source in sources),
        "teach": any(run.teacher for run in runs),
    }
    return {stage for stage, is_needed in needed.items() if not is_needed}


def check_profile(
    machine: Machine, profile: Profile, argument: str, name: str = ""
) -> Iterator[Check]:
    """Check a profile, and whether Snakemake finds and reads all of it.

    `argument` is the profile as the user named it, `name` that of the machine.
    """
    override = f", with {profile.overriding} over it" if profile.overriding else ""
    processes = f"{machine.nodes} x {machine.nproc_per_node} processes"
    yield ok("profile", f"{profile.path}{override}: launcher {machine.launcher}, {processes}")
    if not name:
        yield from _check_reading(profile, argument)
    for key, value in (("nodes", machine.nodes), ("nproc_per_node", str(machine.nproc_per_node))):
        planned = str(profile.plan.get(key, value))
        if planned != value:
            yield no(
                f"plan's {key}",
                f"{planned}, but train has {value}",
                f"remove set-resources: plan: {key}",
            )
    gpus = machine.gpus
    n = machine.nproc_per_node
    remedy = f"{TRAIN} nproc_per_node: {gpus}"
    if gpus and n > gpus:
        yield no("processes", f"{n} on each node for {gpus} GPUs", remedy)
    elif gpus > n:
        yield doubt("processes", f"{n} on each node leave {gpus - n} of {gpus} GPUs idle", remedy)


def _check_reading(profile: Profile, argument: str) -> Iterator[Check]:
    """Check that `snakemake --profile` reads the same file, and that its defaults reach trainings."""
    path = find_as_snakemake(argument)
    folder = profile.path.parent
    if path is None:
        remedy = f"`cellmill profiles install` links it, or give {folder}"
        yield doubt("profile's name", f"snakemake --profile {argument} does not find it", remedy)
    elif path.resolve() != profile.path.resolve():
        yield doubt(
            "profile's name", f"snakemake --profile {argument} reads {path}", f"give {folder}"
        )
    unread = ", ".join(profile.unread)
    if unread:
        yield doubt(
            "default-resources",
            f"{unread} does not reach a training, whose rule declares its own",
            f"write it under {TRAIN[:-1]} too",
        )


def check_run(machine: Machine, pipeline: Workflow, name: str) -> Check:
    """Check that a run's layout fits every number of nodes of its machine."""
    what = f"run {name}"
    options: TrainOptions = check_options(TrainOptions, pipeline.section("train", name), what)
    manifest = CORPORA / pipeline.runs[name].corpus / "shards" / "manifest.json"
    cells = None
    try:
        if manifest.exists():
            stored = Manifest.read(manifest).entry("train").n_obs
            cells = options.stream.train_cells(stored)
        max_cells = sys.maxsize if cells is None else cells
        check_nodes(options, machine.node_counts, machine.nproc_per_node, max_cells)
    except UserError as error:
        remedy = f"{TRAIN} nodes, nproc_per_node" if isinstance(error, ConfigError) else ""
        return no(what, str(error), remedy)
    world = machine.node_counts[-1] * machine.nproc_per_node
    layout = divide_processes(options.parallel, world, machine.nproc_per_node)
    corpus = "cells not counted yet" if cells is None else f"{cells:,} training cells"
    processes = f"{world} {'process' if world == 1 else 'processes'}"
    return ok(what, f"fits {processes}: {layout.text}, {corpus}")


def check_genes(pipeline: Workflow) -> Iterator[Check]:
    """Check every dataset that a run needs: how many genes have a known name, and whether the
    first cells have counts, by the rules of stage preprocess.
    """
    for corpus in dict.fromkeys(run.corpus for run in pipeline.runs.values()):
        # the largest min_coverage_frac of the runs that evaluate a dataset
        thresholds = dict.fromkeys(pipeline.trained_on(corpus), 0.0)
        for name, run in pipeline.runs.items():
            if run.corpus != corpus:
                continue
            for dataset in pipeline.evaluated_on(name):
                thresholds[dataset] = max(thresholds.get(dataset, 0.0), run.embed.min_coverage_frac)
        file = CORPORA / corpus / "vocabulary.tsv"
        vocabulary = None
        try:
            vocabulary = Vocabulary.read(file) if file.exists() else None
        except UserError as error:
            yield no(
                f"vocabulary of {corpus}", str(error), "remove it: the rule vocabulary rebuilds it"
            )
        table = pipeline.datasets(corpus)
        options = pipeline.corpora[corpus].preprocess
        for name, threshold in thresholds.items():
            yield from _check_dataset(table[name], options, vocabulary, threshold)


def _check_dataset(
    dataset: Dataset, options: Preprocess, vocabulary: Vocabulary | None, threshold: float
) -> Iterator[Check]:
    """Check the genes of a dataset: those with a known name, and those of them in the vocabulary.

    Doubt if they are less than a fraction `threshold` of the vocabulary, or if the first cells may
    have no counts.
    """
    what = f"genes of {dataset.dataset}"
    path = Path(dataset.path)
    if is_url(dataset.path):
        yield doubt(what, f"{dataset.path} is not fetched here; rule fetch does it")
        return
    if not path.exists():
        yield doubt(what, f"{path} does not exist yet")
        return
    try:
        with open_dataset(path, dataset.counts) as reader:
            if dataset.gene_column is not None:
                reader.use_gene_column(dataset.gene_column)
            organism = options.organism if options.organism_column else None
            choose_obs(reader, options.keep_obs, dataset, organism)
            if reader.ordered:
                kind, rows = ("ranks", "cells") if reader.ranked else ("sequences", "records")
                yield ok(f"{kind} of {dataset.dataset}", f"{reader.n_obs:,} {rows}")
                return
            genes = name_genes(reader, dataset.preprocess(options))
            what = f"counts of {dataset.dataset}"
            reader.counts_rule = dataset.counts_rule
            reader.check_some()
            doubts = [*reader.doubts()]
    except UserError as error:
        yield no(what, str(error))
        return
    for fault in doubts:
        yield doubt(what, fault)
    what = f"genes of {dataset.dataset}"
    coverage = genes.coverage
    kind = "are taken for ids as they are"
    if coverage.organism:
        kind = f"have a {coverage.organism} Ensembl id"
    n_named = round(coverage.frac * coverage.n_genes)
    named = f"{n_named:,} of {coverage.n_genes:,} ({coverage.frac:.1%}) {kind}"
    if vocabulary is None:
        yield ok(what, named)
        return
    shared = int((vocabulary.rows_of(genes.gene_ids) >= 0).sum())
    frac = shared / max(1, vocabulary.n_genes)
    text = (
        f"{named}; it has {shared:,} ({frac:.1%}) of the vocabulary's {vocabulary.n_genes:,} genes"
    )
    if frac >= threshold:
        yield ok(what, text)
        return
    yield doubt(
        what,
        f"{text}; embed.min_coverage_frac is {threshold:g}, of counts, and checked when cells are embedded",
    )
