"""Planned memory equals the tensor memory of real processes within 10 %, for tensors of tens of megabytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cellmill.config.options import TrainOptions
from cellmill.config.parallel import layout
from cellmill.planner.memory import memory_of
from cellmill.planner.size import size_of
from tests.distributed.conftest import options
from tests.distributed.pool import Pool

WORLD, LOCAL_WORLD, N_GENES = 4, 2, 120
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "FULL_SHARD": {"sharding_strategy": "FULL_SHARD"},
    "HYBRID_SHARD": {"sharding_strategy": "HYBRID_SHARD"},
    "FULL_SHARD x tp 2": {"sharding_strategy": "FULL_SHARD", "tp": 2},
    "pp 2 x FULL_SHARD": {"sharding_strategy": "FULL_SHARD", "pp": 2},
}
MODEL = {"hidden": 320, "layers": 4, "dropout": 0.0}
STEPS = {
    "one micro-batch": {"global_batch": 12},
    "several": {"global_batch": 12, "token_budget": 128},
}


@pytest.mark.parametrize("train", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_of_the_plan_is_what_processes_allocate(
    pool: Pool, corpus: str, name: str, train: dict[str, Any]
) -> None:
    given = options(LAYOUTS[name], model=MODEL, tokens={"max_tokens": 100}, train=train)
    parsed = TrainOptions.model_validate(given)
    parallel = parsed.parallel
    size = size_of(parsed, N_GENES)
    found = pool.run("measures.allocated", corpus=corpus, options=given)
    each = WORLD // parallel.pp
    for stage in range(parallel.pp):
        alike = found[stage * each : (stage + 1) * each]
        tokens, micro_batches = max(rank["tokens"] for rank in alike), alike[0]["micro_batches"]
        sizes = layout(parallel, WORLD, LOCAL_WORLD)
        planned = memory_of(stage, size, parallel, sizes, tokens, micro_batches)
        # frees in other threads are not reported: the smallest peak of ranks with equal needs is the most accurate
        measured = min(rank["peak_bytes"] for rank in alike if rank["tokens"] == tokens)
        assert measured > 20e6
        assert planned.total == pytest.approx(measured, rel=0.1), f"stage {stage}: {planned}"


@pytest.mark.parametrize("name", ["HYBRID_SHARD", "FULL_SHARD x tp 2", "pp 2 x FULL_SHARD"])
def test_memory_of_every_rank_is_logged(pool: Pool, corpus: str, tmp_path: Path, name: str) -> None:
    found = pool.run("measures.logged_memory", corpus=corpus, options=options(LAYOUTS[name]), folder=str(tmp_path))
    peaks = [peak for _, peak in found]
    for lines, _ in found:
        for line, first in zip(lines, found[0][0], strict=True):
            assert line["peak_resident_gb"] == first["peak_resident_gb"] == pytest.approx(peaks, rel=0.2)
            assert line["resident_gb"] == first["resident_gb"]
            assert all(0 < now <= peak for now, peak in zip(line["resident_gb"], line["peak_resident_gb"]))
