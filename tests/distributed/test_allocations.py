"""The plan's memory is within 10 to 15 % of what tensors of real processes allocate, at tens of megabytes.

Sizes under tensor parallelism are measured here, so no test may use the fixture `alone`, which holds a group.
"""

from pathlib import Path
from typing import Any

import pytest

from cellmill.config.options import TrainOptions
from cellmill.planner.memory import PlannedModel, peak_memory
from tests.distributed.conftest import options
from tests.distributed.pool import Pool
from tests.tiers import quick

WORLD, LOCAL_WORLD, N_GENES = 4, 2, 120
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "FULL_SHARD": {"sharding_strategy": "FULL_SHARD"},
    "HYBRID_SHARD": {"sharding_strategy": "HYBRID_SHARD"},
    "HYBRID_SHARD, each": {"sharding_strategy": "HYBRID_SHARD", "gradient_reduction": "micro_batch"},
    "FULL_SHARD x tp 2": {"sharding_strategy": "FULL_SHARD", "tp": 2},
    "tp 4": {"tp": 4, "sequence_parallel": True},
    "pp 2 x FULL_SHARD": {"sharding_strategy": "FULL_SHARD", "pp": 2},
}
MODEL = {"hidden": 320, "layers": 4, "dropout": 0.0}
STEPS = {"one micro-batch": {"global_batch": 12}, "several": {"global_batch": 12, "token_budget": 128}}
QUICK = [("HYBRID_SHARD", "one micro-batch"), ("tp 4", "one micro-batch"), ("pp 2 x FULL_SHARD", "several")]
CASES = dict.fromkeys([*QUICK, *((name, "several") for name in LAYOUTS)])


@pytest.mark.parametrize(("name", "steps"), quick(CASES, QUICK))
def test_planned_memory_agrees_with_what_processes_allocate(pool: Pool, corpus: str, name: str, steps: str) -> None:
    given = options(LAYOUTS[name], model=MODEL, tokens={"max_tokens": 100}, train=STEPS[steps])
    parsed = TrainOptions.model_validate(given)
    model = PlannedModel.of(parsed, N_GENES, WORLD, LOCAL_WORLD)
    ranks = pool.run("measures.allocated", corpus=corpus, options=given)
    each = WORLD // model.layout.pp
    for stage in range(model.layout.pp):
        alike = ranks[stage * each : (stage + 1) * each]
        tokens, micro_batches = max(rank["tokens"] for rank in alike), alike[0]["micro_batches"]
        planned = peak_memory(model, tokens, micro_batches, [stage])
        # memory freed in another thread is not reported: the smallest of equal ranks is nearest the truth
        measured = min(rank["peak_bytes"] for rank in alike if rank["tokens"] == tokens)
        assert measured > 20e6
        # on a busy machine gloo's threads free more, unseen: up to 10.3 %, with a reduction in each micro-batch 27 %
        least = 0.7 if "each" in name else 0.85
        assert least * measured <= planned.total <= 1.1 * measured, f"stage {stage}: {planned}"


@pytest.mark.parametrize("name", quick(["HYBRID_SHARD", "FULL_SHARD x tp 2", "pp 2 x FULL_SHARD"], ["HYBRID_SHARD"]))
def test_memory_of_every_rank_is_logged(pool: Pool, corpus: str, tmp_path: Path, name: str) -> None:
    ranks = pool.run("measures.logged_memory", corpus=corpus, options=options(LAYOUTS[name]), folder=str(tmp_path))
    peaks = [peak for _, peak in ranks]
    for lines, _ in ranks:
        for line, first in zip(lines, ranks[0][0], strict=True):
            assert line["peak_resident_gb"] == first["peak_resident_gb"] == pytest.approx(peaks, rel=0.2)
            assert line["resident_gb"] == first["resident_gb"]
            assert all(0 < now <= peak for now, peak in zip(line["resident_gb"], line["peak_resident_gb"]))
