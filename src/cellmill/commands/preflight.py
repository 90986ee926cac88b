"""preflight: checks that a profile's machine can run the configuration, before anything is queued.

First the checks that need no job: the profile, SLURM, the configuration, the genes of its datasets. Then those that
only the nodes can answer, by one short job of the profile's launcher. Each check is a line: ok, no, or ? for a doubt.
Imports no torch.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cellmill.config import Workflow, check_options, load_config
from cellmill.config.checks import check_nodes
from cellmill.config.corpus import Dataset, Preprocess
from cellmill.config.machine import Machine
from cellmill.config.options import TrainOptions
from cellmill.config.parallel import layout
from cellmill.data.fasta import open_dataset
from cellmill.data.manifest import Manifest
from cellmill.data.preprocess import name_genes
from cellmill.data.vocabulary import Vocabulary
from cellmill.errors import ConfigError, UserError
from cellmill.files import write_json
from cellmill.planner.devices import device_named
from cellmill.preflight.check import TRAIN, Check, doubt, no, ok
from cellmill.preflight.nodes import NodeCheck
from cellmill.preflight.profile import Profile, read_profile, snakemake_finds
from cellmill.preflight.site_checks import check_launcher, check_site, gpu_request

CORPORA = Path("results/corpora")


def run(*, profile: str, config: Path, out: Path, no_job: bool, wait_min: float) -> None:
    """Print the checks and `go`, and write them to `out`/NAME.json. Raises UserError if it is no go."""
    if not wait_min > 0:
        raise UserError(f"--wait-min: expected a number of minutes above 0, got {wait_min:g}")
    parsed = read_profile(profile)
    made: list[Check] = []

    def show(checks: Iterable[Check]) -> bool:
        """Print each check as it is made; return True if none is a no."""
        before = len(made)
        for check in checks:
            made.append(check)
            print(check, flush=True)
        return all(check.verdict != "no" for check in made[before:])

    facts: dict[str, Any] = {}
    machine: Machine | None = None
    device = str(parsed.plan.get("device", "cpu"))
    try:
        machine = parsed.machine()
        device_named(device)
    except ConfigError as error:
        show([no("profile", str(error))])
    if machine is not None:
        show(check_profile(machine, parsed, profile))
        can_queue = show(check_launcher(machine))
        if can_queue and machine.launcher == "slurm":
            can_queue = show(check_site(machine))
        show(check_configuration(machine, config))
        if no_job:
            show([doubt("job", "not tried (--no-job): the nodes were not checked")])
        elif not can_queue:
            show([doubt("job", "not tried: the profile has to change first")])
        else:
            nodes = NodeCheck(machine, device, out / parsed.name, 60 * wait_min)
            show(nodes.run())
            facts = nodes.facts
    reasons = sum(check.verdict == "no" for check in made)
    answer = {
        "profile": parsed.name,
        "path": str(parsed.path),
        "checked_at": time.time(),
        "go": not reasons,
        "machine": None if machine is None else machine.model_dump(mode="json"),
        "checks": [asdict(check) for check in made],
    }
    write_json(out / f"{parsed.name}.json", answer | facts)
    if reasons:
        raise UserError(f"no go: {reasons} {'reason' if reasons == 1 else 'reasons'}")
    print("go", flush=True)


def check_profile(machine: Machine, profile: Profile, asked: str) -> Iterator[Check]:
    """Checks of the profile by itself, and of what Snakemake makes of it."""
    processes = f"{machine.nodes} x {machine.nproc_per_node} processes"
    over = f", with {profile.over} over it" if profile.over else ""
    yield ok("profile", f"{profile.path}{over}: launcher {machine.launcher}, {processes}")
    reads = snakemake_finds(asked)
    if reads is None:
        yield doubt(
            "profile's name",
            f"snakemake --profile {asked} does not find it",
            f"`cellmill profiles install` links it, or give {profile.path.parent}",
        )
    elif reads.resolve() != profile.path.resolve():
        yield doubt("profile's name", f"snakemake --profile {asked} reads {reads}", f"give {profile.path.parent}")
    if unread := profile.unread:
        yield doubt(
            "default-resources",
            f"{', '.join(unread)} does not reach a training, whose rule declares its own",
            f"write it under {TRAIN[:-1]} too",
        )
    for key, trains in (("nodes", machine.nodes), ("nproc_per_node", str(machine.nproc_per_node))):
        plans = str(profile.plan.get(key, trains))
        if plans != trains:
            yield no(f"plan's {key}", f"{plans}, but train has {trains}", f"remove set-resources: plan: {key}")
    gpus, each = gpu_request(machine)[1], machine.nproc_per_node
    remedy = f"{TRAIN} nproc_per_node: {gpus}"
    if gpus and each > gpus:
        yield no("processes", f"{each} on each node for {gpus} GPUs", remedy)
    elif gpus > each:
        yield doubt("processes", f"{each} on each node leave {gpus - each} of {gpus} GPUs idle", remedy)


def check_configuration(machine: Machine, config: Path) -> Iterator[Check]:
    """Checks of every run of the configuration on this machine, and of the genes of its datasets."""
    try:
        pipeline = load_config(config)
    except ConfigError as error:
        yield no("configuration", str(error))
        return
    for name in pipeline.runs:
        yield _check_run(machine, pipeline, name)
    for corpus in dict.fromkeys(run.corpus for run in pipeline.runs.values()):
        yield from _check_genes(pipeline, corpus)


def _check_run(machine: Machine, pipeline: Workflow, name: str) -> Check:
    what = f"run {name}"
    options: TrainOptions = check_options(TrainOptions, pipeline.section("train", name), what)
    manifest = CORPORA / pipeline.runs[name].corpus / "shards" / "manifest.json"
    try:
        cells = Manifest.read(manifest).entry("train").n_obs if manifest.exists() else None
        check_nodes(options, machine.node_counts, machine.nproc_per_node, sys.maxsize if cells is None else cells)
    except ConfigError as error:
        return no(what, str(error), f"{TRAIN} nodes, nproc_per_node")
    except UserError as error:
        return no(what, str(error))
    world = machine.node_counts[-1] * machine.nproc_per_node
    sizes = layout(options.parallel, world, machine.nproc_per_node)
    known = "cells not counted yet" if cells is None else f"{cells:,} training cells"
    replicas = f"{sizes.dp_replicate} {'replica' if sizes.dp_replicate == 1 else 'replicas'}"
    shards = "" if sizes.dp_shard == 1 else f" of {sizes.dp_shard} shards"
    return ok(
        what,
        f"fits {world} {'process' if world == 1 else 'processes'}: {replicas}{shards}{sizes.tp_pp_text}, {known}",
    )


def _check_genes(pipeline: Workflow, corpus: str) -> Iterator[Check]:
    """Checks of the genes of every dataset that a run needs: how many have a known name. Reads no counts."""
    runs = {name: run for name, run in pipeline.runs.items() if run.corpus == corpus}
    thresholds = dict.fromkeys(pipeline.trained_on(corpus), 0.0)
    for name, run in runs.items():
        for dataset in pipeline.evaluated_on(name):
            thresholds[dataset] = max(thresholds.get(dataset, 0.0), run.embed.min_coverage_frac)
    file = CORPORA / corpus / "vocabulary.tsv"
    vocabulary = None
    if file.exists():
        try:
            vocabulary = Vocabulary.read(file)
        except UserError as error:
            yield no(f"vocabulary of {corpus}", str(error), "remove it: the rule vocabulary rebuilds it")
    table = pipeline.datasets(corpus)
    for name, threshold in thresholds.items():
        yield _check_dataset(table[name], pipeline.corpora[corpus].preprocess, vocabulary, threshold)


def _check_dataset(dataset: Dataset, options: Preprocess, vocabulary: Vocabulary | None, threshold: float) -> Check:
    what, path = f"genes of {dataset.dataset}", Path(dataset.path)
    if not path.exists():
        return doubt(what, f"{path} does not exist yet")
    try:
        with open_dataset(path, dataset.counts) as reader:
            if reader.ordered:
                return ok(f"sequences of {dataset.dataset}", f"{reader.n_obs:,} records")
            genes = name_genes(reader, options)
    except UserError as error:
        return no(what, str(error))
    coverage = genes.coverage
    named = round(coverage.frac * coverage.n_genes)
    kind = f"have a {coverage.organism} Ensembl id" if coverage.organism else "are taken for ids as they are"
    figure = f"{named:,} of {coverage.n_genes:,} ({coverage.frac:.1%}) {kind}"
    if vocabulary is None:
        return ok(what, figure)
    shared = int((vocabulary.rows_of(genes.gene_ids) >= 0).sum())
    frac = shared / max(1, vocabulary.n_genes)
    figure += f"; it has {shared:,} ({frac:.1%}) of the vocabulary's {vocabulary.n_genes:,} genes"
    if frac < threshold:
        return doubt(
            what, f"{figure}; embed.min_coverage_frac is {threshold:g}, of counts, and checked when cells are embedded"
        )
    return ok(what, figure)
