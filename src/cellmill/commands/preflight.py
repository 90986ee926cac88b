"""Commands on profiles: install links them, new writes one, preflight tries its machine with the
configuration.

First come the checks that need no job: the profile, SLURM, the configuration, the genes of its
datasets. Then those that only the nodes can answer, by one short job of the profile's launcher.
Each check is a line: ok, no, or ? for a doubt. Imports no torch.
"""

import os
import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from cellmill.config import Workflow, check_options, load_config
from cellmill.config.checks import check_nodes
from cellmill.config.corpus import Preprocess
from cellmill.config.datasets import Dataset, is_url
from cellmill.config.machine import Machine
from cellmill.config.options import TrainOptions
from cellmill.config.parallel import layout
from cellmill.config.published import PublishedFolder
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.formats import open_dataset
from cellmill.data.prepare.naming import name_genes
from cellmill.data.prepare.obs import choose_obs
from cellmill.data.shards.manifest import Manifest
from cellmill.errors import ConfigError, DataError, UserError
from cellmill.files import atomic_path, write_json
from cellmill.planner.devices import device_named
from cellmill.preflight.checks import (
    TRAIN,
    Check,
    check_launcher,
    check_slurm,
    check_stages,
    check_training,
    doubt,
    no,
    ok,
)
from cellmill.preflight.new_profile import choose_values
from cellmill.preflight.nodes import check_job
from cellmill.preflight.partitions import Request
from cellmill.preflight.profile import (
    Profile,
    check_python,
    of_machine,
    read_profile,
    snakemake_finds,
)
from cellmill.preflight.profile_text import render
from cellmill.preflight.site import ask_slurm

CORPORA = Path("results/corpora")


def preflight(*, profile: str, config: Path, out: Path, no_job: bool, wait_min: float) -> None:
    """Print the checks and `go`, and write them to `out`/NAME.json. Raises UserError if it is no
    go.
    """
    if not wait_min > 0:
        raise UserError(f"--wait-min: expected a number of minutes above 0, got {wait_min:g}")
    shown: list[Check] = []

    def show(checks: Iterable[Check], machine: str = "") -> bool:
        """Print each check as it is made; return True if none is a no. `machine` is the name of the
        one checked.
        """
        before = len(shown)
        for check in checks:
            shown.append(check.renamed(f"machine {machine}", machine) if machine else check)
            print(shown[-1], flush=True)
        return all(check.verdict != "no" for check in shown[before:])

    parsed = read_profile(profile)
    ask = cache(ask_slurm)
    pipeline: Workflow | Check
    try:
        pipeline = load_config(config)
        runs = pipeline.runs
    except ConfigError as error:
        pipeline = no("configuration", str(error))
        runs = {}
    facts: dict[str, dict[str, Any]] = {}
    jobs: dict[str, Iterable[Check]] = {}
    # "" for runs that name none
    for name in sorted({run.machine or "" for run in runs.values()} or {""}):
        try:
            machine = parsed.machine(name)
            device_named(parsed.device(name))
        except ConfigError as error:
            show([no("profile", str(error))], name)
            continue
        facts[name] = {"machine": machine.model_dump(mode="json")}
        show(check_profile(machine, parsed, profile, name), name)
        can_queue = show([check_launcher(machine)], name)
        if can_queue and machine.launcher == "slurm":
            can_queue = show(check_slurm(ask, partial(check_training, machine)), name)
        if isinstance(pipeline, Workflow):
            on_it = (run for run, options in runs.items() if (options.machine or "") == name)
            show((_check_run(machine, pipeline, run) for run in on_it), name)
        if no_job:
            jobs[name] = [doubt("job", "not tried (--no-job): the nodes were not checked")]
        elif not can_queue:
            jobs[name] = [doubt("job", "not tried: the profile has to change first")]
        else:  # begins when its checks are shown
            folder = out / of_machine(parsed.name, name)
            jobs[name] = check_job(machine, parsed.device(name), folder, 60 * wait_min, facts[name])
    if facts:
        if parsed.options.get("executor") == "slurm":
            models = [model for run in runs.values() for model in run.evaluate.external.values()]
            given = [*(run.init_from for run in runs.values()), *(model.model for model in models)]
            corpora = pipeline.corpora.values() if isinstance(pipeline, Workflow) else ()
            needed = {
                **dict.fromkeys(
                    ("divide", "shard_part"), any(corpus.shard.jobs > 1 for corpus in corpora)
                ),
                "embed_external": any(model.line for model in models),
                "zoo": any(model.preset for model in models),
                "predict_changes": any(
                    "perturbation" in run.evaluate.tasks for run in runs.values()
                ),
                "import": any(PublishedFolder.named_by(name or "") for name in given),
                "teach": any(run.teacher for run in runs.values()),
            }
            unused = {stage for stage, is_needed in needed.items() if not is_needed}
            show(check_slurm(ask, partial(check_stages, parsed, unused)))
            try:
                check_python(sys.executable)
            except ConfigError as error:
                show([no("stages' Python", str(error))])
        show([pipeline] if isinstance(pipeline, Check) else check_genes(pipeline))
    for name, job in jobs.items():
        show(job, name)
    reasons = sum(check.verdict == "no" for check in shown)
    answer = {
        "profile": parsed.name,
        "path": str(parsed.path),
        "checked_at": time.time(),
        "go": not reasons,
    }
    answer |= {
        **facts.pop("", {"machine": None}),
        "machines": facts,
        "checks": [asdict(check) for check in shown],
    }
    write_json(out / f"{parsed.name}.json", answer)
    if reasons:
        raise UserError(f"no go: {reasons} {'reason' if reasons == 1 else 'reasons'}")
    print("go", flush=True)


def check_profile(
    machine: Machine, profile: Profile, typed: str, name: str = ""
) -> Iterator[Check]:
    """Checks of the profile by itself, and that Snakemake finds the one that the user typed and
    reads all of it.
    """
    over = f", with {profile.over} over it" if profile.over else ""
    processes = f"{machine.nodes} x {machine.nproc_per_node} processes"
    yield ok("profile", f"{profile.path}{over}: launcher {machine.launcher}, {processes}")
    if not name:
        reads = snakemake_finds(typed)
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
    each = machine.nproc_per_node
    remedy = f"{TRAIN} nproc_per_node: {gpus}"
    if gpus and each > gpus:
        yield no("processes", f"{each} on each node for {gpus} GPUs", remedy)
    elif gpus > each:
        yield doubt(
            "processes", f"{each} on each node leave {gpus - each} of {gpus} GPUs idle", remedy
        )


def _check_run(machine: Machine, pipeline: Workflow, name: str) -> Check:
    """Check that a run's layout fits every number of nodes of its machine."""
    what = f"run {name}"
    options: TrainOptions = check_options(TrainOptions, pipeline.section("train", name), what)
    manifest = CORPORA / pipeline.runs[name].corpus / "shards" / "manifest.json"
    try:
        stored = Manifest.read(manifest).entry("train").n_obs if manifest.exists() else None
        cells = None if stored is None else options.stream.train_cells(stored)
        check_nodes(
            options,
            machine.node_counts,
            machine.nproc_per_node,
            sys.maxsize if cells is None else cells,
        )
    except UserError as error:
        return no(
            what,
            str(error),
            f"{TRAIN} nodes, nproc_per_node" if isinstance(error, ConfigError) else "",
        )
    world = machine.node_counts[-1] * machine.nproc_per_node
    sizes = layout(options.parallel, world, machine.nproc_per_node)
    known = "cells not counted yet" if cells is None else f"{cells:,} training cells"
    processes = f"{world} {'process' if world == 1 else 'processes'}"
    replicas = f"{sizes.dp_replicate} {'replica' if sizes.dp_replicate == 1 else 'replicas'}"
    shards = "" if sizes.dp_shard == 1 else f" of {sizes.dp_shard} shards"
    return ok(what, f"fits {processes}: {replicas}{shards}{sizes.tp_pp_text}, {known}")


def check_genes(pipeline: Workflow) -> Iterator[Check]:
    """Checks of the genes of every dataset that a run needs: how many have a known name. Reads no
    counts.
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
            choose_obs(
                reader,
                options.keep_obs,
                dataset,
                options.organism if options.organism_column else None,
            )
            if reader.ordered:
                kind, rows = ("ranks", "cells") if reader.ranked else ("sequences", "records")
                return ok(f"{kind} of {dataset.dataset}", f"{reader.n_obs:,} {rows}")
            genes = name_genes(reader, dataset.preprocess(options))
    except UserError as error:
        return no(what, str(error))
    coverage = genes.coverage
    kind = (
        f"have a {coverage.organism} Ensembl id"
        if coverage.organism
        else "are taken for ids as they are"
    )
    named = f"{round(coverage.frac * coverage.n_genes):,} of {coverage.n_genes:,} ({coverage.frac:.1%}) {kind}"
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


def profiles_install(*, source: Path) -> None:
    """Link every profile in `source`. Raises DataError, before anything is linked, if a name is
    taken.
    """
    profiles = sorted(path.parent.resolve() for path in source.glob("*/config.yaml"))
    if not profiles:
        raise DataError(
            f"{source}: has no profiles; run this at the root of a checkout, or set --from FOLDER"
        )
    if any(profile.name == "default" for profile in profiles):
        raise DataError(
            f"{source}/default: Snakemake loads a profile of that name unasked, and it overrides --profile key by key; "
            "rename it"
        )
    base = os.environ.get("XDG_CONFIG_HOME", "").strip()  # as Snakemake looks for a user's profiles
    target = (Path(base) if base else Path.home() / ".config") / "snakemake"
    links = {target / profile.name: profile for profile in profiles}
    for link, profile in links.items():
        if os.path.lexists(link) and link.resolve() != profile:
            where = f"a link to {link.resolve()}" if link.is_symlink() else "not a link"
            raise DataError(
                f"{link}: exists and is {where}; remove it, or use --profile {source}/{profile.name}"
            )
    target.mkdir(parents=True, exist_ok=True)
    for link, profile in links.items():
        if not os.path.lexists(link):
            link.symlink_to(profile)
        print(f"snakemake --profile {profile.name}   {link} -> {profile}")
    print(f"to undo: rm {shlex.join(map(str, links))}")


def profiles_new(
    *, name: str, partition: str, nodes: str, gpus: int | None, account: str, qos: str, into: Path
) -> None:
    """Write `into`/NAME/config.yaml. Raises UserError if it exists, or SLURM has no such machine."""
    folder = into / name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise UserError(f"NAME: expected letters, digits, '.', '_' and '-', got {name!r}")
    if name == "default":
        raise UserError(
            "NAME default: Snakemake loads a profile of that name unasked; choose another"
        )
    if folder.exists() and (existing := snakemake_finds(str(folder))) is not None:
        raise UserError(f"{existing}: exists; choose another NAME, or remove it")
    match = re.fullmatch(r"([1-9]\d{0,5})(?:-([1-9]\d{0,5}))?", nodes or "1")
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise UserError(
            f"--nodes: expected a number such as 2 or a range such as 2-4, got {nodes!r}"
        )
    if gpus is not None and gpus < 0:
        raise UserError(f"--gpus: expected a number of GPUs per node, 0 for none, got {gpus}")
    site = choose_values(ask_slurm(), Request(partition, nodes, gpus, account, qos), name)
    file = folder / "config.yaml"
    with atomic_path(file) as temporary:
        temporary.write_text(render(site), encoding="utf-8")
        written = read_profile(str(temporary))
        # Snakemake reads what was meant; profiles/default may override it
        assert written.over or (written.machine(), written.device()) == (
            site.machine,
            site.device,
        ), written
    machine = site.machine
    why = site.why
    shown_gpus = f"GPUs {named}, " if (named := machine.gpus_per_node or machine.gres) else ""
    processes = (
        f"{machine.nproc_per_node} {'process' if machine.nproc_per_node == 1 else 'processes'}"
    )
    memory = f"{machine.mem_mb} MB" if machine.mem_mb else "all memory"
    print(f"wrote {file}")
    print(f"  train     partition {machine.slurm_partition}: {why['slurm_partition']}")
    print(
        f"            nodes {machine.nodes}, on each {shown_gpus}{processes}, "
        f"{machine.cpus_per_task} CPU cores, {memory}; {machine.runtime} min per job"
    )
    print(f"  stages    partition {site.stages.partition}: {why['stages_partition']}")
    print(f"  plan      device {site.device}{f': {reason}' if (reason := why['device']) else ''}")
    print(f"  account   {machine.slurm_account or 'none'}: {why['slurm_account']}")
    print(f"  status    {site.status_command}: {why['status_command']}")
    source, profile = (
        ("", name)
        if into == Path("profiles")
        else (f" --from {shlex.quote(str(into))}", str(folder))
    )
    print(f"next: cellmill profiles install{source}")
    print(f"      cellmill preflight --profile {shlex.quote(profile)}")
