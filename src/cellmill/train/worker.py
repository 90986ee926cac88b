"""One rank of a training: data, model, layout and loop put together.

It is started by torchrun, or by `launch/job.py` as a single process. Its arguments are the folder of
the run, whose run.json has everything else, a file for the error line, and the device that the
profile wants (`Machine.wanted_device`).
"""

import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from cellmill.imports import importing

with importing():
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    from cellmill.config.corpus import DATASET
    from cellmill.config.load import stored_options
    from cellmill.config.options import TrainOptions
    from cellmill.config.parallel import min_microbatches
    from cellmill.data.genes.vocabulary import Vocabulary
    from cellmill.data.shards.local_copies import LocalCopies
    from cellmill.data.shards.manifest import Manifest
    from cellmill.data.stream.batch_maker import BatchFields
    from cellmill.data.stream.cell_stream import CellStream, SplitSource
    from cellmill.data.stream.micro_batches import MicroBatchRule
    from cellmill.data.stream.order import DataRank, OrderOptions
    from cellmill.errors import UserError
    from cellmill.files import read_json
    from cellmill.finetune.method import check_trains, load_method, make_is_trained
    from cellmill.launch.signals import StopFlag, die_with_parent
    from cellmill.models.build import ModelSpec, build
    from cellmill.models.export import (
        check_kept,
        initial_tensors,
        mean_gene_rows,
        scale_vectors,
    )
    from cellmill.models.family import Model
    from cellmill.models.gene_vectors import TABLE, read_gene_vectors
    from cellmill.parallel.apply import parallelize
    from cellmill.parallel.materialize import materialize, plain_name
    from cellmill.parallel.mesh import Mesh, PipelineStages, build_mesh, list_stages, set_tf32
    from cellmill.parallel.replay import DETERMINISTIC_WORKSPACE, WORKSPACE
    from cellmill.parallel.torch_private import set_group_timeouts
    from cellmill.planner.measure.size import Flops, measure_flops
    from cellmill.runs.folder import TrainFolder
    from cellmill.runs.jobs import HANG
    from cellmill.track.tracker import ConsoleTracker, JsonlTracker
    from cellmill.train.failure import give_up, leave_reason, trace_file
    from cellmill.train.hang_watch import START_FACTOR, HangWatch
    from cellmill.train.loop import Trainer
    from cellmill.train.staging import Staging, agree, verify_shards
    from cellmill.train.validation import check_best_metric

DUMP_S = 60.0  # longest wait for NCCL's record of a timeout

Levels = Mapping[str, Sequence[str]]


def main(path: Path, error_file: Path, wanted_device: str) -> None:
    """Train in the folder of the run, `path`. Collective: every process of the job."""
    stop = StopFlag()
    watch = HangWatch()
    record = read_json(path / "run.json")
    options = stored_options(record["options"], "run.json")

    def end_hung(line: str) -> None:
        # a hang may pass, so the training is started again; a rank that never joined is an error
        give_up(error_file.with_name(HANG) if watch.passed else error_file, line)

    watch.start(options.train.timeout_s, end_hung)
    # torch's own timeout is longer than the hang watch's, whose line names the hung rank
    timeout = timedelta(seconds=2 * START_FACTOR * options.train.timeout_s)
    device = _join(options, timeout, wanted_device)
    watch.reach("the start")
    mesh = build_mesh(options.parallel, int(os.environ["LOCAL_WORLD_SIZE"]), device.type)
    verify_shards(Manifest.read(Path(record["manifest"])), device, watch.reach)
    watch.reach("the first weights")
    staging = Staging(options.stream, mesh)
    trainer = build_trainer(TrainFolder(path), record, options, mesh, stop, watch, staging.copies)
    set_group_timeouts(timeout)
    watch.reach("the newest checkpoint")
    trainer.resume()
    watch.reach("the first step")
    staging.start([trainer.train_stream, trainer.val_stream], trainer.progress.step, trainer.steps)
    if dist.get_rank() == 0:  # other trackers follow metrics.jsonl
        trainer.trackers = [JsonlTracker(trainer.folder.metrics), ConsoleTracker()]
    for tracker in trainer.trackers:
        tracker.start(
            {"run": path.resolve().parent.name, **trainer.saved_with}, trainer.progress.step
        )
    trainer.write_state("running")
    ended = "failed"
    try:
        ended = "done" if trainer.run() else "stopped"
        trainer.close()
        trainer.write_state(ended)
    finally:
        for tracker in trainer.trackers:
            with suppress(OSError):  # a full disk, again
                tracker.finish(ended)
    dist.barrier()  # no rank leaves while another still needs it
    staging.close()
    watch.close()


def build_trainer(
    folder: TrainFolder,
    record: dict[str, Any],
    options: TrainOptions,
    mesh: Mesh,
    stop: StopFlag,
    watch: HangWatch,
    copies: LocalCopies | None = None,
    flops: Flops | None = None,
) -> Trainer:
    """Return the trainer of a run.json's content; `flops` are measured if None. Collective."""
    vocabulary = Vocabulary.read(Path(record["vocabulary"]))
    manifest = Manifest.read(Path(record["manifest"]))
    levels = manifest.levels(options.obs_columns())
    spec = ModelSpec.of(options, vocabulary.n_genes, levels)
    model = build_model(options, vocabulary, record["init_from"], mesh, levels)
    check_best_metric(model.objective, options.train.best_metric)
    return Trainer(
        options,
        folder,
        mesh,
        model,
        spec,
        measure_flops(spec, options.finetune) if flops is None else flops,
        build_streams(options, manifest, mesh, copies, record.get("teacher")),
        {
            "identity": record["identity"],
            "fingerprint": record["fingerprint"],
            "vocabulary_digest": vocabulary.digest,
            "options": record["options"],
            "init_from": record["init_from"],
            "supervised_by": record.get("supervised_by", []),
        },
        stop,
        watch,
    )


def _join(options: TrainOptions, timeout: timedelta, wanted_device: str) -> torch.device:
    """Join the process group and return this rank's device. Raise UserError if GPUs are missing."""
    torch.manual_seed(0)  # unused: random numbers here are keyed by seed and position
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    store = next(rendezvous("env://", timeout=timeout))[0] if world > 1 else dist.HashStore()
    store.set_timeout(timeout)
    device = agree(wanted_device, store)
    group: dict[str, Any] = {
        "store": dist.PrefixStore("group", store),
        "rank": rank,
        "world_size": world,
    }
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # NCCL's own watchdogs end a rank without a line, so they must be slower than the hang watch
        dump_ms = str(round(1000 * min(options.train.timeout_s, DUMP_S)))
        os.environ.setdefault(
            "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(round(timeout.total_seconds()))
        )
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", dump_ms)
        if options.train.replay_every_steps is not None:
            os.environ.setdefault(WORKSPACE, DETERMINISTIC_WORKSPACE)
        set_tf32(options.parallel.tf32, device)
        # the norm of offloaded gradients is reduced on the CPU
        backend = "cpu:gloo,cuda:nccl" if options.parallel.cpu_offload == "full" else "nccl"
        group["device_id"] = device
    dist.init_process_group(backend, timeout=timeout, **group)
    return device


def build_model(
    options: TrainOptions, vocabulary: Vocabulary, init_from: str | None, mesh: Mesh, levels: Levels
) -> Model | PipelineStages:
    """Return the model with its initial weights, laid out over `mesh`.

    In a pipeline it has the stages of this rank.
    """
    weights = None if init_from is None else Path(init_from)
    spec = ModelSpec.of(options, vocabulary.n_genes, levels)
    parallel = options.parallel
    mean_rows = {}
    if weights is not None:
        check_kept(spec, weights, options.finetune.leave_out)
        if dist.get_rank() == 0:
            genes = vocabulary.known_by(Vocabulary.read(weights / "vocabulary.tsv"))
            print(f"initial weights from {weights}, which has {genes}", flush=True)
        if options.finetune.new_genes == "mean":
            mean_rows = mean_gene_rows(spec, weights, mesh.device)
    parts: dict[int, Model] = {}
    frozen_rows: set[str] = set()
    for stage in list_stages(mesh.pp.get_local_rank(), parallel):
        method = load_method(options.finetune)
        part = build(spec, method.transform)
        parts[stage] = part
        check_trains(method, (plain_name(name) for name, _ in part.named_parameters()))
        is_trained = make_is_trained(method, part)
        parallelize(part, parallel, mesh, stage=stage, trains=is_trained)
        frozen_rows |= {name for name in part.gene_rows - {TABLE} if not is_trained(name)}
    is_random = weights is not None and options.finetune.new_genes == "random"
    if is_random and dist.get_rank() == 0 and frozen_rows and genes.n_known < genes.n_genes:
        print(
            f"warning: finetune.method {options.finetune.method} never trains the random vectors of the genes that "
            f"{weights} lacks, {1 - genes.expressed_frac:.1%} of those that a cell expresses; set "
            "finetune.new_genes to mean, or another method",
            flush=True,
        )
    fixed = {}
    path = getattr(options.model, "gene_vectors", None)
    if path is not None:
        table, n_found = read_gene_vectors(Path(path), vocabulary, options.model.gene_vector_dim)  # type: ignore[attr-defined]
        fixed = {TABLE: table if weights is None else scale_vectors(table, weights, vocabulary)}
        if dist.get_rank() == 0:
            print(
                f"gene vectors from {path}, which has {n_found:,} of {vocabulary.n_genes:,} genes; the others have "
                "only their learned embedding",
                flush=True,
            )
    parameter_device = torch.device("cpu") if parallel.cpu_offload == "full" else mesh.device
    for part in parts.values():
        tensors = initial_tensors(
            part, options.train.seed, weights, vocabulary, fixed=fixed, new_genes=mean_rows
        )
        materialize(part, parameter_device, tensors, buffer_device=mesh.device)
    return parts[0] if parallel.pp == 1 else PipelineStages(parts, parallel.n_stages)


def build_streams(
    options: TrainOptions,
    manifest: Manifest,
    mesh: Mesh,
    copies: LocalCopies | None = None,
    teacher: str | None = None,
) -> tuple[CellStream, CellStream | None, str | None]:
    """Return the endless stream of training cells, the stream of validation cells, and their column.

    Without validation cells, stream and obs column of their batches are None.
    """
    order = OrderOptions(options.stream, options.train.global_batch, options.train.seed)
    micro_batch_rule = MicroBatchRule(
        options.train.token_budget,
        min_per_step=min_microbatches(options.parallel),
        multiple_of=options.parallel.pp,
    )
    data_rank = DataRank(mesh.dp_rank, mesh.dp_world)
    columns = options.obs_columns()
    fields = BatchFields(options.objective.needs_counts, columns, options.number_columns(), teacher)
    train = CellStream(
        SplitSource(manifest.path, "train", copies=copies),
        order,
        options.tokens,
        micro_batch_rule,
        fields=fields,
        data_rank=data_rank,
        in_rank_order=options.model.reads_token_order,
    )
    if manifest.splits["val"].n_obs == 0:
        return train, None, None
    batches = batch_column(options, manifest)
    if batches is not None:
        # after the columns that the model reads
        columns = columns | {batches: columns.get(batches, "validation")}
        fields = replace(fields, level_columns=columns)
    val = CellStream(
        SplitSource(manifest.path, "val", options.train.val_cells, copies),
        replace(order, is_training=False),
        options.tokens,
        micro_batch_rule,
        fields=fields,
        data_rank=data_rank,
        in_rank_order=options.model.reads_token_order,
    )
    return train, val, batches


def batch_column(options: TrainOptions, manifest: Manifest) -> str | None:
    """Return the column that validation takes for the batch.

    It is the objective's, or `dataset` if the corpus has several datasets.
    """
    objective = options.objective
    for name in objective.columns().levels:
        if name not in objective.supervised_by:
            return name
    datasets = manifest.obs_levels.get(DATASET, {"levels": ()})["levels"]
    return DATASET if len(datasets) > 1 else None


if __name__ == "__main__":
    # without an agent, which turns the end of its parent into SIGTERM, that end is a signal to save
    die_with_parent(signal.SIGKILL if dist.is_torchelastic_launched() else signal.SIGTERM)
    run_folder = Path(sys.argv[1])
    error_file = Path(sys.argv[2])
    try:
        main(run_folder, error_file, sys.argv[3])
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # Python's shutdown restores default handlers, and a second signal would kill
    except BaseException as error:
        expected = isinstance(error, UserError | OSError)
        if not expected:
            with suppress(OSError), trace_file() as file:  # a full disk
                traceback.print_exc(file=file)
        leave_reason(error_file, error, run_folder)
        # no shutdown: other ranks may be in a collective that this one never joins
        os._exit(2 if expected else 1)
