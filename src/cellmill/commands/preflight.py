"""preflight: checks that a profile's machine can run the configuration, before anything is queued.

First the checks that need no job: the profile, SLURM, the configuration, the genes of its datasets. Then those that
only the nodes can answer, by one short job of the profile's launcher. Each check is a line: ok, no, or ? for a doubt.
Imports no torch.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cellmill.config import Workflow, check_options, load_config
from cellmill.config.checks import check_nodes
from cellmill.config.corpus import Preprocess
from cellmill.config.datasets import Dataset, is_url
from cellmill.config.machine import Machine
from cellmill.config.options import TrainOptions
from cellmill.config.parallel import layout
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.formats import open_dataset
from cellmill.data.prepare.obs import choose_obs
from cellmill.data.prepare.preprocess import name_genes
from cellmill.data.shards.manifest import Manifest
from cellmill.errors import ConfigError, UserError
from cellmill.files import write_json
from cellmill.planner.devices import device_named
from cellmill.preflight.checks import (
    TRAIN,
    Check,
    check_launcher,
    check_site,
    check_stages,
    doubt,
    gpu_request,
    no,
    of_named,
    ok,
)
from cellmill.preflight.nodes import NodeCheck
from cellmill.preflight.profile import Profile, of_machine, read_profile, snakemake_finds

CORPORA = Path("results/corpora")


@dataclass
class Shown:
    """Checks that were printed."""

    checks: list[Check] = field(default_factory=list)

    def show(self, checks: Iterable[Check], machine: str = "") -> bool:
        """Print each check as it is made; return True if none is a no. `machine` is the name of the one they are of."""
        before = len(self.checks)
        for check in checks:
            self.checks.append(of_named(check, machine) if machine else check)
            print(self.checks[-1], flush=True)
        return all(check.verdict != "no" for check in self.checks[before:])

    @property
    def reasons(self) -> int:
        return sum(check.verdict == "no" for check in self.checks)


def preflight(*, profile: str, config: Path, out: Path, no_job: bool, wait_min: float) -> None:
    """Print the checks and `go`, and write them to `out`/NAME.json. Raises UserError if it is no go."""
    if not wait_min > 0:
        raise UserError(f"--wait-min: expected a number of minutes above 0, got {wait_min:g}")
    parsed, shown = read_profile(profile), Shown()
    pipeline = _configuration(config)
    facts: dict[str, dict[str, Any]] = {}
    to_try: dict[str, NodeCheck | Check] = {}
    for name in _machines(pipeline):
        machine = _check_machine(shown, parsed, profile, name)
        if machine is None:
            continue
        facts[name] = {"machine": machine.model_dump(mode="json")}
        can_queue = shown.show(check_launcher(machine), name)
        if can_queue and machine.launcher == "slurm":
            can_queue = shown.show(check_site(machine), name)
        if isinstance(pipeline, Workflow):
            shown.show(_check_runs(machine, pipeline, name))
        if no_job:
            to_try[name] = doubt("job", "not tried (--no-job): the nodes were not checked")
        elif not can_queue:
            to_try[name] = doubt("job", "not tried: the profile has to change first")
        else:
            folder = out / of_machine(parsed.name, name)
            to_try[name] = NodeCheck(machine, parsed.device(name), folder, 60 * wait_min)
    if facts:
        shown.show(check_stages(parsed, _unused_stages(pipeline)))
        shown.show([pipeline] if isinstance(pipeline, Check) else check_genes(pipeline))
    for name, job in to_try.items():
        shown.show([job] if isinstance(job, Check) else job.run(), name)
        facts[name] |= {} if isinstance(job, Check) else job.facts
    answer = {
        "profile": parsed.name,
        "path": str(parsed.path),
        "checked_at": time.time(),
        "go": not shown.reasons,
        **facts.pop("", {"machine": None}),
        "machines": facts,
        "checks": [asdict(check) for check in shown.checks],
    }
    write_json(out / f"{parsed.name}.json", answer)
    if shown.reasons:
        raise UserError(f"no go: {shown.reasons} {'reason' if shown.reasons == 1 else 'reasons'}")
    print("go", flush=True)


def _configuration(config: Path) -> Workflow | Check:
    """The configuration, or what is wrong with it."""
    try:
        return load_config(config)
    except ConfigError as error:
        return no("configuration", str(error))


def _machines(pipeline: Workflow | Check) -> list[str]:
    """Names of the machines that runs are trained on; "" is that of runs that name none."""
    runs = {} if isinstance(pipeline, Check) else pipeline.runs
    return sorted({run.machine or "" for run in runs.values()} or {""})


def _check_machine(shown: Shown, profile: Profile, asked: str, name: str) -> Machine | None:
    """The machine of that name; None if it is wrong."""
    try:
        machine = profile.machine(name)
        device_named(profile.device(name))
    except ConfigError as error:
        shown.show([no("profile", str(error))], name)
        return None
    shown.show(check_profile(machine, profile, asked, name), name)
    return machine


def check_profile(machine: Machine, profile: Profile, asked: str, name: str = "") -> Iterator[Check]:
    """Checks of the profile by itself, and of what Snakemake makes of it."""
    processes = f"{machine.nodes} x {machine.nproc_per_node} processes"
    over = f", with {profile.over} over it" if profile.over else ""
    yield ok("profile", f"{profile.path}{over}: launcher {machine.launcher}, {processes}")
    if not name:
        yield from _check_file(profile, asked)
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


def _check_file(profile: Profile, asked: str) -> Iterator[Check]:
    """Checks that Snakemake finds this file, and that all of it reaches the training."""
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


def _unused_stages(pipeline: Workflow | Check) -> set[str]:
    """Stages that no run of the configuration can need."""
    sections = [run.evaluate for run in pipeline.runs.values()] if isinstance(pipeline, Workflow) else []
    needed = {
        "embed_external": any(section.external for section in sections),
        "predict_changes": any("perturbation" in section.tasks for section in sections),
    }
    return {stage for stage, is_needed in needed.items() if not is_needed}


def _check_runs(machine: Machine, pipeline: Workflow, name: str) -> Iterator[Check]:
    """Checks of the runs on that machine."""
    for run, options in pipeline.runs.items():
        if (options.machine or "") == name:
            yield _check_run(machine, pipeline, run)


def check_genes(pipeline: Workflow) -> Iterator[Check]:
    """Checks of the genes of every dataset that a run needs."""
    for corpus in dict.fromkeys(run.corpus for run in pipeline.runs.values()):
        yield from _check_genes(pipeline, corpus)


def _check_run(machine: Machine, pipeline: Workflow, name: str) -> Check:
    what = f"run {name}"
    options: TrainOptions = check_options(TrainOptions, pipeline.section("train", name), what)
    manifest = CORPORA / pipeline.runs[name].corpus / "shards" / "manifest.json"
    try:
        stored = Manifest.read(manifest).entry("train").n_obs if manifest.exists() else None
        cells = None if stored is None else options.stream.train_cells(stored)
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
    if is_url(dataset.path):
        return doubt(what, f"{dataset.path} is not fetched here; rule fetch does it")
    if not path.exists():
        return doubt(what, f"{path} does not exist yet")
    try:
        with open_dataset(path, dataset.counts) as reader:
            choose_obs(reader, options.keep_obs, dataset, options.organism if options.organism_column else None)
            if reader.ordered:
                kind, rows = ("ranks", "cells") if reader.ranked else ("sequences", "records")
                return ok(f"{kind} of {dataset.dataset}", f"{reader.n_obs:,} {rows}")
            genes = name_genes(reader, dataset.preprocess(options))
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
