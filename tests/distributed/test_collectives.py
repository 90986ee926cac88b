"""Planned traffic agrees with what torch sends between real processes, over each link."""

from collections import Counter
from typing import Any

import pytest

from cellmill.config.options import TrainOptions
from cellmill.planner.memory import PlannedModel, traffic_of
from tests.distributed.conftest import options
from tests.distributed.pool import Pool
from tests.tiers import quick

WORLD, LOCAL_WORLD, N_GENES = 4, 2, 120
FEW_BYTES = 1024  # reductions of targets, norms and signals
MODEL = {"hidden": 64, "layers": 4, "dropout": 0.0}
ACCUMULATED = {"token_budget": 160}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "FULL_SHARD": {"sharding_strategy": "FULL_SHARD"},
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "HYBRID_SHARD": {"sharding_strategy": "HYBRID_SHARD"},
    "HYBRID_SHARD, each": {"sharding_strategy": "HYBRID_SHARD", "gradient_reduction": "micro_batch"},
    "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
    "FULL_SHARD x tp 2": {"sharding_strategy": "FULL_SHARD", "tp": 2},
    "sequence parallel": {"sharding_strategy": "FULL_SHARD", "tp": 2, "sequence_parallel": True},
    "pp 2 x FULL_SHARD": {"sharding_strategy": "FULL_SHARD", "pp": 2},
}
RECOMPUTED: dict[str, dict[str, Any]] = {
    f"{name}, recomputed": LAYOUTS[name] | {"activation_checkpointing": "full"}
    for name in ("FULL_SHARD x tp 2", "sequence parallel")
}
QUICK: list[Any] = [("HYBRID_SHARD", ACCUMULATED), ("sequence parallel", {}), ("pp 2 x FULL_SHARD", ACCUMULATED)]
MORE = [*((name, ACCUMULATED) for name in LAYOUTS), *((name, {}) for name in RECOMPUTED)]


@pytest.mark.parametrize(("name", "train"), quick([*QUICK, *(row for row in MORE if row not in QUICK)], QUICK))
def test_bytes_of_each_collective_and_axis_agree_with_the_plan(
    pool: Pool, corpus: str, name: str, train: dict[str, Any]
) -> None:
    given = options((LAYOUTS | RECOMPUTED)[name], model=MODEL, tokens={"max_tokens": 100}, train=train)
    parsed = TrainOptions.model_validate(given)
    model = PlannedModel.of(parsed, N_GENES, WORLD, LOCAL_WORLD)
    for rank, measured in enumerate(pool.run("measures.collectives", corpus=corpus, options=given)):
        assert measured["micro_batches"] > 1 or not train
        stage = rank // (WORLD // model.layout.pp)
        planned = traffic_of(model, stage, measured["tokens"], measured["micro_batches"])
        seen: Counter[tuple[str, int, int]] = Counter()
        calls: Counter[tuple[str, int, int]] = Counter()
        for kind, group, n_bytes in measured["seen"]:
            if n_bytes >= FEW_BYTES:
                seen[kind, len(group), _of_first_node(group)] += n_bytes
                calls[kind, len(group), _of_first_node(group)] += 1
        expected = {(part.kind, part.processes, part.in_a_node): part for part in planned}
        assert dict(seen) == pytest.approx({key: part.payload_bytes for key, part in expected.items()}, rel=0.03)
        assert dict(calls) == pytest.approx({key: part.calls for key, part in expected.items()}, abs=1), f"rank {rank}"


def _of_first_node(group: tuple[int, ...]) -> int:
    return sum(rank // LOCAL_WORLD == group[0] // LOCAL_WORLD for rank in group)
