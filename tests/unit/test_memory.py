"""What each layout costs on a process; tests/distributed compares it with what processes allocate."""

from __future__ import annotations

from typing import Any

import pytest

from cellmill.config.parallel import Parallel, layout
from cellmill.config.tokens import Tokens
from cellmill.parallel.stage_assignment import stages_of
from cellmill.planner.memory import Memory, host_bytes_per_rank, memory_of, memory_per_rank
from cellmill.planner.size import measure
from cellmill.planner.stage_share import shares_of
from tests.models import spec

TOKENS = Tokens.model_validate({"max_tokens": 512})
SPEC = spec(2000, TOKENS, hidden=64, layers=6, heads=4, objective="masked_gene")
SIZE = measure(SPEC)
LONG, SHORT = 4096, 16


def _memory(world: int, tokens: int = LONG, micro_batches: int = 1, **options: Any) -> Memory:
    parallel = Parallel.model_validate(options)
    size = measure(SPEC, parallel.tp, parallel.sequence_parallel)
    return memory_per_rank(size, parallel, layout(parallel, world, world), tokens, micro_batches)


def _activations(of_block: float, recomputed: float = 0.0) -> float:
    """Elements kept per token where each block keeps `of_block`, and one more makes again `recomputed`."""
    outside = SIZE.begin.activations_per_token + SIZE.finish.activations_per_token
    return SIZE.blocks * of_block + recomputed + outside


def test_one_process_holds_weights_and_moments_in_float32_and_gradients_or_activations() -> None:
    parameters = SIZE.parameters
    begun, ended = _memory(1), _memory(1, tokens=SHORT)
    for found in (begun, ended):
        assert (found.parameters, found.optimizer) == (4 * parameters, 8 * parameters)
        assert (found.gathered, found.communication, found.pipeline) == (0, 0, 0)
    assert begun.gradients == 4 * SIZE.block.parameters
    assert begun.activations == pytest.approx(4 * _activations(SIZE.block.activations_per_token) * LONG, rel=0.1)
    assert ended.gradients == 4 * parameters
    assert ended.logits == 0 < begun.logits


def test_ddp_has_buckets_from_the_first_step_and_what_it_accumulates_beside_them() -> None:
    once, twice = (_memory(4, micro_batches=n, strategy="ddp") for n in (1, 2))
    assert (once.gradients, twice.gradients) == (4 * SIZE.parameters, 8 * SIZE.parameters)
    assert once.activations == _memory(1).activations


def test_full_shard_divides_what_is_kept_by_the_processes() -> None:
    for world in (2, 4, 8):
        found = _memory(world, sharding_strategy="FULL_SHARD")
        share = -(-SIZE.parameters // world)
        assert (found.parameters, found.optimizer) == (4 * share, 8 * share)
        assert found.gathered == 4 * (SIZE.outside_parameters + 2 * SIZE.block.parameters)
        ended = _memory(world, tokens=SHORT, sharding_strategy="FULL_SHARD")
        assert ended.gradients >= 4 * share
        assert ended.communication > 0


def test_tensor_parallel_divides_what_it_cuts_and_a_share_of_tokens_the_stream() -> None:
    whole, cut, shared = (
        _memory(4, strategy="ddp", **options) for options in ({}, {"tp": 4}, {"tp": 4, "sequence_parallel": True})
    )
    assert cut.parameters == shared.parameters < whole.parameters / 3.3  # all but norms, two biases and heads
    assert cut.logits == pytest.approx(whole.logits / 4, rel=0.15)  # but for the heads
    assert shared.activations < cut.activations < 0.7 * whole.activations


def test_strategies_are_ordered_by_what_they_spare() -> None:
    def total(strategy: str, **options: Any) -> int:
        return _memory(8, sharding_strategy=strategy, **options).total

    hybrid = total("HYBRID_SHARD", shard_size=4)
    assert total("FULL_SHARD") < hybrid < total("NO_SHARD")
    assert total("FULL_SHARD") < total("SHARD_GRAD_OP") < total("NO_SHARD")


def test_accumulated_gradients_are_whole_until_they_are_reduced() -> None:
    once, twice = (_memory(4, micro_batches=n, sharding_strategy="FULL_SHARD") for n in (1, 2))
    assert twice.total - once.total == 4 * SIZE.parameters


def test_bf16_halves_activations_and_gathered_weights_but_not_what_is_kept() -> None:
    exact, low = (
        _memory(4, sharding_strategy="FULL_SHARD", precision=precision) for precision in ("32-true", "bf16-mixed")
    )
    assert (low.parameters, low.optimizer, low.logits) == (exact.parameters, exact.optimizer, exact.logits)
    assert 2 * low.activations == exact.activations
    assert 2 * low.gathered == exact.gathered


def test_activation_checkpointing_keeps_one_block_and_the_inputs_of_all() -> None:
    kept, chosen, recomputed = (
        _memory(1, activation_checkpointing=how).activations for how in (None, "selective", "full")
    )
    assert 1.8 * recomputed < chosen < 0.8 * kept
    block, selective, width = SIZE.block.activations_per_token, SIZE.selective_per_token, SIZE.width
    assert chosen == pytest.approx(4 * _activations(selective, block - selective + width) * LONG, rel=0.15)
    assert recomputed < kept / 2.5
    assert recomputed == pytest.approx(4 * _activations(width, block - width) * LONG, rel=0.15)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV"])
def test_processes_of_a_pipeline_have_each_block_once_and_what_both_ends_read_twice(schedule: str) -> None:
    parallel = Parallel(pp=3, schedule=schedule)  # type: ignore[arg-type]
    shares = [share for rank in range(3) for share in shares_of(rank, parallel, SIZE.blocks)]
    assert sum(share.blocks for share in shares) == SIZE.blocks
    once_more = SIZE.tied.parameters
    assert sum(share.parameters(SIZE) for share in shares) == SIZE.parameters + once_more
    assert sum(share.flops(SIZE, 10, 100) for share in shares) == pytest.approx(
        10 * SIZE.flops_per_token + 100 * SIZE.flops_per_token_pair
    )
    assert sorted(stage for rank in range(3) for stage in stages_of(rank, parallel)) == list(range(parallel.stages))


def test_gpipe_keeps_all_micro_batches_and_1f1b_as_many_as_stages_follow() -> None:
    few, many = (_memory(4, micro_batches=n, pp=4, schedule="GPipe") for n in (4, 16))
    assert many.activations > 3.5 * few.activations
    few, many = (_memory(4, micro_batches=n, pp=4) for n in (4, 16))
    assert many.activations == few.activations
    assert many.pipeline == 4 * few.pipeline


def test_the_process_of_a_pipeline_that_needs_most_is_what_counts() -> None:
    parallel = Parallel(pp=3)
    sizes = layout(parallel, 3, 3)
    each = [memory_of(rank, SIZE, parallel, sizes, LONG, 6) for rank in range(3)]
    assert memory_per_rank(SIZE, parallel, sizes, LONG, 6) == max(each, key=lambda memory: memory.total)
    assert each[0].logits == each[1].logits == 0 < each[2].logits


def test_what_the_host_keeps_is_not_on_the_device() -> None:
    strategies: list[dict[str, Any]] = [
        {"sharding_strategy": "FULL_SHARD"},
        {"sharding_strategy": "FULL_SHARD", "pp": 2},
    ]
    for strategy in strategies:
        plain, moments, full = (
            _memory(4, tokens=SHORT, cpu_offload=how, **strategy) for how in (None, "optimizer", "full")
        )
        assert (moments.optimizer, full.optimizer, full.parameters) == (0, 0, 0)
        assert moments.total == plain.total - plain.optimizer
        assert full.total < moments.total - plain.parameters
        parallel = Parallel.model_validate(strategy | {"cpu_offload": "optimizer"})
        assert host_bytes_per_rank(SIZE, parallel, layout(parallel, 4, 4)) == pytest.approx(2 * plain.optimizer, abs=16)
        parallel = Parallel.model_validate(strategy)
        assert host_bytes_per_rank(SIZE, parallel, layout(parallel, 4, 4)) == 0
