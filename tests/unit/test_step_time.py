"""Duration of a collective: bytes over links, and hops; and what a step computes."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_corpus import write_corpus

from cellmill.config.options import PlanOptions
from cellmill.config.parallel import layout, min_microbatches, pipeline_tokens
from cellmill.data.stream.cell_stream import CellStream
from cellmill.planner.cost import NETWORK_FRAC, Network, latency
from cellmill.planner.memory import Kind, Traffic
from cellmill.planner.work import Cells, count_micro_batches, detected_genes, measure_work


@pytest.mark.parametrize(
    ("kind", "processes", "in_a_node", "microseconds"),
    [
        ("all-gather", 8, 8, 14 + 7 * 1.9),
        ("reduce-scatter", 16, 8, 14 + 14 * 1.9 + 4),
        ("all-gather", 1024, 8, 14 + 896 * 1.9 + 127 * 4),
        ("all-reduce", 2, 1, 14 + 2 * 4),  # a ring
        ("all-reduce", 128, 1, 14 + 2 * 7 * 8.5),  # a tree
        ("point to point", 4, 1, 14),
    ],
)
def test_latency_counts_each_hop(kind: Kind, processes: int, in_a_node: int, microseconds: float) -> None:
    traffic = Traffic(kind, "dp_shard", processes, in_a_node, payload_bytes=0, calls=1)
    assert latency(traffic) == pytest.approx(1e-6 * microseconds)


def test_bytes_and_hops_add_up_over_the_slower_link() -> None:
    network = Network(intra_node_gbs=100, inter_node_gbs=10)
    traffic = Traffic("all-gather", "dp_shard", 16, 8, payload_bytes=1.6e9, calls=10)
    # 1.5 GB are sent; an eighth of them, over this process's share of the network, takes longer than the rest
    assert network.seconds(traffic) == pytest.approx(1.5 / 8 / 10 / NETWORK_FRAC + 10 * latency(traffic))


@pytest.mark.parametrize(("tp", "budget"), [(1, 4096), (4, 4096), (1, 600)])
def test_the_plan_counts_what_a_pipeline_pads(tmp_path: Path, tp: int, budget: int) -> None:
    manifest = write_corpus(tmp_path, 400, n_vars=120)
    parallel = {"pp": 2, "tp": tp, "sequence_parallel": tp > 1, "strategy": "ddp"}
    tree: dict[str, Any] = {"tokens": {"max_tokens": 60}, "stream": {"lanes": 4}, "model": {}, "plan": {}}
    train = {"global_batch": 100, "steps": 4, "token_budget": budget}
    options = PlanOptions.model_validate(tree | {"parallel": parallel, "train": train})
    detected, least = detected_genes(manifest), min_microbatches(options.parallel)
    padded, in_order = 0, np.zeros((4, 2, 50), np.int64)  # steps, ranks, cells
    for rank in range(2):
        stream = CellStream(
            manifest.path, "train", options.tokens, options.stream, global_batch=100, token_budget=budget, seed=0,
            rank=rank, world=2, min_microbatches=least, microbatch_multiple=2,
        )  # fmt: skip
        for number, step in enumerate(islice(stream, 4)):
            padded += len(step) * pipeline_tokens(max(len(batch.genes) for batch in step), tp)
            in_order[number, rank] = np.concatenate([np.diff(batch.cu_seqlens) for batch in step])
        stream.close()
    # of the cells in the order of the stream exactly its own, of those in the order of the shards an estimate
    counted = count_micro_batches(in_order.ravel(), 100, budget, 2, least, 2, tp)
    assert counted[2] == pytest.approx(padded / in_order.sum() - 1)
    cells = Cells(np.minimum(detected, 60), manifest.n_genes)
    work = measure_work(options, cells, layout(options.parallel, 4 * tp, 4 * tp))
    assert work.padding == pytest.approx(counted[2], abs=0.06)
    assert work.padding > 0.1
