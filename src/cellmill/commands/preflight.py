"""preflight: tries the machine of a profile with the configuration.

First come the checks that need no job: the profile, SLURM, the configuration, the genes of its
datasets. Then those that only the nodes can answer, by one short job of the profile's launcher.
Each check is a line: ok, no, or ? for a doubt. Imports no torch.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

from cellmill.config import Workflow, check_options, load_config
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
from cellmill.files import write_json
from cellmill.launch.bad_nodes import HOW_TO_LIFT, BadNodes
from cellmill.launch.queue import Queue
from cellmill.planner.devices import find_device
from cellmill.preflight.check import TRAIN, Check, doubt, no, ok
from cellmill.preflight.job_request import check_launcher, check_slurm, check_training
from cellmill.preflight.node_job import check_job
from cellmill.preflight.profile import (
    Profile,
    find_as_snakemake,
    name_entry,
    read_profile,
)
from cellmill.preflight.rule_flags import check_python
from cellmill.preflight.site import ask_slurm
from cellmill.preflight.stage_requests import check_stages

CORPORA = Path("results/corpora")


def preflight(
    *,
    profile: str,
    config: Path,
    out: Path,
    no_job: bool,
    wait_min: float,
    node: str,
    results: Path,
) -> None:
    """Print the checks and `go`, and write them to `out`/NAME.json. Raise UserError if it is no go.

    With `node`, only test that node.
    """
    if not wait_min > 0:
        raise UserError(f"--wait-min: expected a number of minutes above 0, got {wait_min:g}")
    shown: list[Check] = []

    def show(checks: Iterable[Check], machine: str = "") -> bool:
        """Print each check as it is made; return True if none is a no.

        `machine` is the name of the machine checked.
        """
        fits = True
        for check in checks:
            if machine:
                check = check.for_machine(machine)
            fits = fits and check.verdict != "no"
            shown.append(check)
            print(check, flush=True)
        return fits

    parsed = read_profile(profile)
    ask = cache(ask_slurm)
    pipeline: Workflow | None = None
    problem = ""
    try:
        pipeline = load_config(config)
    except ConfigError as error:
        problem = str(error)
    runs = pipeline.runs if pipeline else {}
    names = sorted({run.machine or "" for run in runs.values()} or {""})
    if node:
        test_node(node, parsed, names, out, 60 * wait_min, BadNodes(results))
        return
    bad_nodes = BadNodes(results)
    facts: dict[str, dict[str, Any]] = {}
    jobs: dict[str, Iterable[Check]] = {}
    # "" for runs that name none
    for name in names:
        try:
            machine = parsed.machine(name)
            find_device(parsed.device(name))
        except ConfigError as error:
            show([no("profile", str(error))], name)
            continue
        facts[name] = {"machine": machine.model_dump(mode="json")}
        show(check_profile(machine, parsed, profile, name), name)
        can_queue = show([check_launcher(machine)], name)
        if can_queue and machine.launcher == "slurm":
            can_queue = show(
                check_slurm(partial(ask, machine.slurm_cluster), partial(check_training, machine)),
                name,
            )
        if pipeline:
            runs_here = [run for run, options in runs.items() if (options.machine or "") == name]
            show((_check_run(machine, pipeline, run) for run in runs_here), name)
        if no_job:
            jobs[name] = [doubt("job", "not tried (--no-job): the nodes were not checked")]
        elif not can_queue:
            jobs[name] = [doubt("job", "not tried: the profile has to change first")]
        else:  # begins when its checks are shown
            folder = out / name_entry(parsed.name, name)
            jobs[name] = check_job(machine, parsed.device(name), folder, 60 * wait_min, facts[name])
    if facts:
        if parsed.options.get("executor") == "slurm":
            unused = _unused_stages(pipeline)
            cluster = next(iter(facts.values()))["machine"]["slurm_cluster"]
            show(check_slurm(partial(ask, cluster), partial(check_stages, parsed, unused)))
            try:
                check_python(sys.executable)
            except ConfigError as error:
                show([no("stages' Python", str(error))])
        show(check_genes(pipeline) if pipeline else [no("configuration", problem)])
    for name, job in jobs.items():
        begin = len(shown)
        show(job, name)
        machine = parsed.machine(name)
        for check in shown[begin:]:
            # if more are bad, the cause is elsewhere
            if machine.launcher == "slurm" and 2 * len(check.nodes) <= machine.node_counts[-1]:
                for bad in check.nodes:
                    bad_nodes.add(bad, f"preflight: {check.found}")
                    print(f"excluding {bad} from new jobs; {HOW_TO_LIFT}", flush=True)
    reasons = len([check for check in shown if check.verdict == "no"])
    answer = {
        "profile": parsed.name,
        "path": str(parsed.path),
        "checked_at": time.time(),
        "go": not reasons,
        **facts.pop("", {"machine": None}),
        "machines": facts,
        "checks": [asdict(check) for check in shown],
    }
    write_json(out / f"{parsed.name}.json", answer)
    if reasons:
        raise UserError(f"no go: {reasons} {'reason' if reasons == 1 else 'reasons'}")
    print("go", flush=True)


def node_states(machine: Machine) -> dict[str, str]:
    """SLURM's states of the nodes of the machine's partition."""
    return Queue(machine.poll_s, machine.slurm_cluster).node_states(machine.slurm_partition)


def test_node(
    node: str, profile: Profile, names: list[str], out: Path, wait_s: float, bad_nodes: BadNodes
) -> None:
    """Test a node by a job of the first of the profile's machines `names` whose partition has it.

    A node that passes is removed from `bad_nodes`. One that fails is added, and raises UserError.
    """
    for name in names:
        machine = profile.machine(name)
        if machine.launcher != "slurm" or node not in node_states(machine):
            continue
        words = f"{machine.sbatch_options} nodelist={node}"
        single = machine.model_copy(update={"nodes": "1", "sbatch_options": words})
        record: dict[str, Any] = {}
        folder = out / name_entry(profile.name, name)
        failed = ""
        for check in check_job(single, profile.device(name), folder, wait_s, record):
            print(check, flush=True)
            if check.verdict == "no":
                failed = failed or check.found
        if not failed:
            bad_nodes.lift(node)
            print(f"{node} passes: new jobs may use it", flush=True)
            return
        if "job" not in record:
            raise UserError(f"{node} was not tested: {failed}")
        bad_nodes.add(node, f"preflight: {failed}")
        raise UserError(f"{node} fails: excluded from new jobs")
    raise UserError(f"--node {node}: profile {profile.name} has no partition with this node")


def _unused_stages(pipeline: Workflow | None) -> set[str]:
    """Stages that the workflow does not run; without one, those that most do not."""
    corpora = pipeline.corpora.values() if pipeline else ()
    runs = pipeline.runs.values() if pipeline else ()
    models = [*chain.from_iterable(run.evaluate.external.values() for run in runs)]
    sources = [run.init_from for run in runs] + [model.model for model in models]
    has_parts = any(corpus.shard.jobs > 1 for corpus in corpora)
    needed = {
        "divide": has_parts,
        "shard_part": has_parts,
        "embed_external": any(model.line for model in models),
        **dict.fromkeys(("unpack", "zoo"), any(model.preset for model in models)),
        "predict_changes": any("perturbation" in run.evaluate.tasks for run in runs),
        "import": any(PublishedFolder.named_by(source or "") for source in sources),
        "teach": any(run.teacher for run in runs),
    }
    return {stage for stage, is_needed in needed.items() if not is_needed}


def check_profile(
    machine: Machine, profile: Profile, typed: str, name: str = ""
) -> Iterator[Check]:
    """Checks of the profile itself, and of whether Snakemake finds and reads all of it."""
    over = f", with {profile.overriding} over it" if profile.overriding else ""
    processes = f"{machine.nodes} x {machine.nproc_per_node} processes"
    yield ok("profile", f"{profile.path}{over}: launcher {machine.launcher}, {processes}")
    if not name:
        reads = find_as_snakemake(typed)
        folder = profile.path.parent
        if reads is None:
            remedy = f"`cellmill profiles install` links it, or give {folder}"
            yield doubt("profile's name", f"snakemake --profile {typed} does not find it", remedy)
        elif reads.resolve() != profile.path.resolve():
            yield doubt(
                "profile's name", f"snakemake --profile {typed} reads {reads}", f"give {folder}"
            )
        unread = ", ".join(profile.unread)
        if unread:
            yield doubt(
                "default-resources",
                f"{unread} does not reach a training, whose rule declares its own",
                f"write it under {TRAIN[:-1]} too",
            )
    for key, trains in (("nodes", machine.nodes), ("nproc_per_node", str(machine.nproc_per_node))):
        plans = str(profile.plan.get(key, trains))
        if plans != trains:
            yield no(
                f"plan's {key}",
                f"{plans}, but train has {trains}",
                f"remove set-resources: plan: {key}",
            )
    gpus = machine.gpus
    n = machine.nproc_per_node
    remedy = f"{TRAIN} nproc_per_node: {gpus}"
    if gpus and n > gpus:
        yield no("processes", f"{n} on each node for {gpus} GPUs", remedy)
    elif gpus > n:
        yield doubt("processes", f"{n} on each node leave {gpus - n} of {gpus} GPUs idle", remedy)


def _check_run(machine: Machine, pipeline: Workflow, name: str) -> Check:
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
    sizes = divide_processes(options.parallel, world, machine.nproc_per_node)
    known = "cells not counted yet" if cells is None else f"{cells:,} training cells"
    processes = f"{world} {'process' if world == 1 else 'processes'}"
    replicas = f"{sizes.dp_replicate} {'replica' if sizes.dp_replicate == 1 else 'replicas'}"
    shards = "" if sizes.dp_shard == 1 else f" of {sizes.dp_shard} shards"
    return ok(what, f"fits {processes}: {replicas}{shards}{sizes.tp_pp_text}, {known}")


def check_genes(pipeline: Workflow) -> Iterator[Check]:
    """Checks of the genes of every dataset that a run needs: how many have a known name.

    Reads no counts.
    """
    for corpus in dict.fromkeys(run.corpus for run in pipeline.runs.values()):
        thresholds = dict.fromkeys(pipeline.trained_on(corpus), 0.0)
        for name, run in pipeline.runs.items():
            for dataset in pipeline.evaluated_on(name) if run.corpus == corpus else ():
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
            yield _check_dataset(table[name], options, vocabulary, threshold)


def _check_dataset(
    dataset: Dataset, options: Preprocess, vocabulary: Vocabulary | None, threshold: float
) -> Check:
    what = f"genes of {dataset.dataset}"
    path = Path(dataset.path)
    if is_url(dataset.path):
        return doubt(what, f"{dataset.path} is not fetched here; rule fetch does it")
    if not path.exists():
        return doubt(what, f"{path} does not exist yet")
    try:
        with open_dataset(path, dataset.counts) as reader:
            if dataset.gene_column is not None:
                reader.use_gene_column(dataset.gene_column)
            organism = options.organism if options.organism_column else None
            choose_obs(reader, options.keep_obs, dataset, organism)
            if reader.ordered:
                kind, rows = ("ranks", "cells") if reader.ranked else ("sequences", "records")
                return ok(f"{kind} of {dataset.dataset}", f"{reader.n_obs:,} {rows}")
            genes = name_genes(reader, dataset.preprocess(options))
    except UserError as error:
        return no(what, str(error))
    coverage = genes.coverage
    kind = "are taken for ids as they are"
    if coverage.organism:
        kind = f"have a {coverage.organism} Ensembl id"
    n_named = round(coverage.frac * coverage.n_genes)
    named = f"{n_named:,} of {coverage.n_genes:,} ({coverage.frac:.1%}) {kind}"
    if vocabulary is None:
        return ok(what, named)
    shared = int((vocabulary.rows_of(genes.gene_ids) >= 0).sum())
    frac = shared / max(1, vocabulary.n_genes)
    text = (
        f"{named}; it has {shared:,} ({frac:.1%}) of the vocabulary's {vocabulary.n_genes:,} genes"
    )
    if frac >= threshold:
        return ok(what, text)
    return doubt(
        what,
        f"{text}; embed.min_coverage_frac is {threshold:g}, of counts, and checked when cells are embedded",
    )
