"""Duration of a collective, what a step computes, and the cost of making a corpus."""

import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_corpus import random_counts, stream_of, write_corpus

from cellmill.cli import main
from cellmill.config.corpus import Shard
from cellmill.config.options import PlanOptions
from cellmill.config.parallel import divide_processes, min_microbatches, pipeline_tokens
from cellmill.config.parts.tokens import ContinuousTokens
from cellmill.data.stream.micro_batches import MicroBatchRule
from cellmill.planner.corpus_cost import (
    N_INDEX_FILES,
    VAR_BYTES_PER_SHARD,
    estimate_stage_costs,
)
from cellmill.planner.hardware import Hardware
from cellmill.planner.measure.load import Load
from cellmill.planner.measure.size import Flops
from cellmill.planner.planned_model import PlannedModel
from cellmill.planner.step_counts import (
    CorpusSize,
    count_detected_genes,
    count_micro_batches,
    count_steps,
)
from cellmill.planner.step_time import (
    NETWORK_FRAC,
    Network,
    estimate_latency,
    estimate_step_time,
)
from cellmill.planner.traffic import CollectiveTraffic, Kind


@pytest.mark.parametrize(
    ("kind", "processes", "processes_per_node", "microseconds"),
    [
        ("all-gather", 8, 8, 14 + 7 * 1.9),
        ("reduce-scatter", 16, 8, 14 + 14 * 1.9 + 4),
        ("all-gather", 1024, 8, 14 + 896 * 1.9 + 127 * 4),
        ("all-reduce", 2, 1, 14 + 2 * 4),  # a ring
        ("all-reduce", 128, 1, 14 + 2 * 7 * 8.5),  # a tree
        ("point to point", 2, 1, 14),
    ],
)
def test_latency_counts_each_hop(
    kind: Kind, processes: int, processes_per_node: int, microseconds: float
) -> None:
    collective = CollectiveTraffic(
        kind, "dp_shard", processes, processes_per_node, payload_bytes=0, calls=1
    )
    assert estimate_latency(collective) == pytest.approx(1e-6 * microseconds)


def test_bytes_add_up_over_the_slower_link() -> None:
    network = Network(intra_node_gb_per_s=100, inter_node_gb_per_s=10)
    collective = CollectiveTraffic("all-gather", "dp_shard", 16, 8, payload_bytes=1.6e9, calls=10)
    # 1.5 GB are sent; an eighth of them, over this process's share of the network, takes longer than the rest
    assert network.estimate_seconds(collective) == pytest.approx(
        1.5 / 8 / 10 / NETWORK_FRAC + 10 * estimate_latency(collective)
    )


@pytest.mark.parametrize("checkpointing", [None, "full"])
def test_reductions_overlap_with_recomputation(checkpointing: str | None) -> None:
    parallel = {"strategy": "fsdp", "activation_checkpointing": checkpointing}
    tree: dict[str, Any] = {"tokens": {"max_tokens": 16}, "stream": {"lanes": 4}, "model": {}}
    tree |= {"plan": {}, "train": {"steps": 4}, "parallel": parallel}
    options = PlanOptions.model_validate(tree)
    model = PlannedModel.measure(
        options, CorpusSize(np.full(64, 16), 40), Hardware(1, 4, "h100", 1, 1)
    )
    reduction = CollectiveTraffic("reduce-scatter", "dp_shard", 4, 4, payload_bytes=1e12, calls=1)
    network = Network(intra_node_gb_per_s=100, inter_node_gb_per_s=10)
    load = Load(tokens=1e6, pairs=1.6e7, cells=62_500)
    time = estimate_step_time(model, [reduction], network, 1e14, load, micro_batches=1)
    backward_s = time.compute_s - time.validation_s
    assert time.exposed_s == pytest.approx(network.estimate_seconds(reduction) - backward_s)


def test_a_forward_pass_of_a_coupled_loss_has_its_heads() -> None:
    tree: dict[str, Any] = {"tokens": {"max_tokens": 16}, "stream": {"lanes": 1}, "model": {}}
    tree |= {"plan": {}, "train": {"steps": 4}, "parallel": {}}
    model = PlannedModel.measure(
        PlanOptions.model_validate(tree),
        CorpusSize(np.full(64, 16), 40),
        Hardware(1, 1, "h100", 1, 1),
    )
    # two forward passes and a backward pass of all but the heads, and one of each of the heads
    network = Network(intra_node_gb_per_s=100, inter_node_gb_per_s=10)
    load = Load(1.0, 16.0, 1.0)
    for validation_passes in (1, 2):  # of a validation without the coupled loss, or with it
        flops = Flops(model.size.n_blocks, 2, validation_passes, 4.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0)
        coupled = replace(model, size=replace(model.size, flops=flops))
        time = estimate_step_time(coupled, [], network, 1.0, load, micro_batches=1)
        assert time.compute_s == 4 + 3
        assert time.validation_s == validation_passes * 4 / 4 + 3 / 3


@pytest.mark.parametrize(("tp", "budget"), [(1, 4096), (4, 4096), (1, 600)])
def test_the_plan_counts_what_a_pipeline_pads(tmp_path: Path, tp: int, budget: int) -> None:
    manifest = write_corpus(tmp_path, 400, n_vars=120)
    parallel = {"pp": 2, "tp": tp, "sequence_parallel": tp > 1, "strategy": "ddp"}
    tree: dict[str, Any] = {
        "tokens": {"max_tokens": 60},
        "stream": {"lanes": 4},
        "model": {},
        "plan": {},
    }
    train = {"global_batch": 100, "steps": 4, "token_budget": budget}
    options = PlanOptions.model_validate(tree | {"parallel": parallel, "train": train})
    detected = count_detected_genes(manifest)
    least = min_microbatches(options.parallel)
    # steps, ranks, cells
    padded = 0
    in_order = np.zeros((4, 2, 50), np.int64)
    for rank in range(2):
        sizes = {
            "global_batch": 100,
            "token_budget": budget,
            "min_per_step": least,
            "multiple_of": 2,
        }
        stream = stream_of(manifest, rank, 2, tokens=options.tokens, stream=options.stream, **sizes)
        for number, step in enumerate(islice(stream, 4)):
            padded += len(step) * pipeline_tokens(max(len(batch.token_ids) for batch in step), tp)
            in_order[number, rank] = np.concatenate([np.diff(batch.cu_seqlens) for batch in step])
        stream.close()
    # of the cells in the order of the stream exactly its own, of those in the order of the shards
    # an estimate
    rule = MicroBatchRule(budget, least, multiple_of=2)
    counted = count_micro_batches(
        CorpusSize(in_order.ravel(), manifest.n_genes), 100, 2, rule, token_multiple=tp
    )
    assert counted.padding_frac == pytest.approx(padded / in_order.sum() - 1)
    cells = CorpusSize(np.minimum(detected, 60), manifest.n_genes)
    work = count_steps(options, cells, divide_processes(options.parallel, 4 * tp, 4 * tp))
    assert work.padding_frac == pytest.approx(counted.padding_frac, abs=0.06)
    assert work.padding_frac > 0.1


@pytest.mark.parametrize("pp", [1, 2])
def test_the_plan_counts_tokens_of_covariates(tmp_path: Path, pp: int) -> None:
    manifest = write_corpus(tmp_path, 400, n_vars=120)
    least = 2 * pp if pp > 1 else 1
    rule = MicroBatchRule(1000, least, multiple_of=pp)
    sizes = {"global_batch": 80, "token_budget": 1000, "min_per_step": least, "multiple_of": pp}
    stream = stream_of(manifest, tokens=ContinuousTokens(max_tokens=60), **sizes)
    lengths = []
    largest = 0
    for step in islice(stream, 4):
        for batch in step:
            lengths.append(np.diff(batch.cu_seqlens))
            largest = max(largest, len(batch.token_ids) + 2 * len(batch.cell_ids))
    stream.close()
    corpus = CorpusSize(np.concatenate(lengths), manifest.n_genes, n_covariates=2)
    counted = count_micro_batches(corpus, 80, 1, rule, token_multiple=1)
    if pp > 1:
        assert counted.max_tokens == pipeline_tokens(largest)
    else:
        assert largest <= counted.max_tokens <= 1.1 * largest
    with_covariates = np.concatenate(lengths) + 2
    assert corpus.tokens_per_cell == pytest.approx(with_covariates.mean())
    assert corpus.pairs_per_cell == pytest.approx(np.square(with_covariates).mean())


@pytest.mark.parametrize(("n_cells", "counts"), [(1000, (2,)), (1536, (2, 2)), (760, (2,))])
def test_micro_batches_are_counted_in_full_steps(n_cells: int, counts: tuple[int, ...]) -> None:
    corpus = CorpusSize(np.full(n_cells, 10), n_genes=60)
    counted = count_micro_batches(corpus, 768, 8, MicroBatchRule(480), token_multiple=1)
    # a full step has 96 cells of each rank, of which 48 fit into a micro-batch
    assert counted.counts == counts


def test_covariates_of_later_steps_are_in_the_largest_batch() -> None:
    n_sampled = 64 * 10
    lengths = np.concatenate([np.full(n_sampled, 50), np.full(20, 10)])
    corpus = CorpusSize(lengths, n_genes=60, n_covariates=2)
    counted = count_micro_batches(corpus, 10, 1, MicroBatchRule(100), token_multiple=1)
    # ten cells of 10 tokens fit, and two of 50
    assert counted.max_tokens == 100 + 2 * 10
    # sequence parallelism pads each micro-batch
    padded = count_micro_batches(corpus, 10, 1, MicroBatchRule(100), token_multiple=16)
    assert padded.max_tokens == 128


def test_planned_files_equal_those_that_shard_writes(tmp_path: Path) -> None:
    counts = random_counts(3000, 4000)
    options = Shard(cells_per_shard=1000, val_frac=0, test_frac=0)
    manifest = write_corpus(tmp_path, counts, cells_per_shard=1000)
    planned = estimate_stage_costs([3000], counts.nnz / 3000, options)[-1]
    written = [manifest.path, *(manifest.shard_path(file) for file in manifest.files())]
    assert planned.files == pytest.approx(len(written), abs=6)  # empty splits and levels
    n_bytes = sum(path.stat().st_size for path in written)
    n_bytes += 3 * VAR_BYTES_PER_SHARD * (1 - 4_000 / 20_000)  # planned for 20,000 genes
    assert planned.disk_gb * 1e9 == pytest.approx(n_bytes, rel=0.2)
    # obs grows with the cells, not with the shards
    whole = options.model_copy(update={"cells_per_shard": 3000})
    one = estimate_stage_costs([3000], counts.nnz / 3000, whole)[-1]
    saved = 2 * VAR_BYTES_PER_SHARD
    assert (planned.disk_gb - one.disk_gb) * 1e9 == pytest.approx(saved)


def test_each_split_has_shards_of_its_own() -> None:
    shard = Shard(cells_per_shard=5000, val_frac=0.1, test_frac=0.1)
    # 9,600, 1,200 and 1,200 cells
    assert estimate_stage_costs([12_000], 1000, shard)[-1].files == 2 + 1 + 1 + N_INDEX_FILES
    jobs = shard.model_copy(update={"cells_per_shard": 16_384, "jobs": 4})
    part = estimate_stage_costs([12_000], 1000, jobs)[-2]
    assert part.files == 3
    # the job of the training cells is the longest
    assert part.hours == pytest.approx(0.8 * part.cpu_hours)


def test_a_job_that_does_all_starts_as_large_as_divide() -> None:
    one, many = (estimate_stage_costs([1, 1], 1, Shard(jobs=jobs)) for jobs in (1, 2))
    rss_mb = {cost.stage: cost.rss_mb for cost in many}
    assert one[-1].stage == "shard"
    assert one[-1].rss_mb == pytest.approx(rss_mb["divide"], abs=0.1)
    assert rss_mb["shard"] < rss_mb["divide"]


def test_more_jobs_leave_the_total_work_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, many = (estimate_stage_costs([10**8], 2000, Shard(jobs=jobs)) for jobs in (1, 100))
    assert [cost.stage for cost in many] == [
        "preprocess",
        "vocabulary",
        "divide",
        "shard_part",
        "shard",
    ]
    assert sum(cost.cpu_hours for cost in many) == pytest.approx(
        sum(cost.cpu_hours for cost in one)
    )
    assert many[3].hours == pytest.approx(many[3].cpu_hours / 100, rel=0.02)
    (tmp_path / "t.tsv").write_text("dataset\tpath\na\ta.h5ad\nb\tb.h5ad\n")
    (tmp_path / "c.yaml").write_text(
        f"corpora: {{c: {{table: {tmp_path}/t.tsv}}}}\nruns: {{r: {{corpus: c, train: {{steps: 1}}}}}}\n"
    )
    given = ["plan_corpus", "--config", str(tmp_path / "c.yaml"), "--corpus"]
    assert main([*given, "c", "--cells", "100000000"]) == 0
    told = capsys.readouterr().out
    assert "100,000,000 cells of 2,000 genes in 2 files" in told
    assert re.search(r"^shard +1 ", told, re.M)
    assert re.search(r"^preprocess .* 240\.0$", told, re.M)
    assert main([*given, "d"]) == 2
    assert "no corpus 'd'" in capsys.readouterr().err
