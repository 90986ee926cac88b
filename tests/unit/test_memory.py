"""Planned memory of each layout (tests/distributed compares it with processes), and idle time of
pipelines.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.testing._internal.distributed.fake_pg import FakeStore

from cellmill.config.parallel import Parallel, divide_processes
from cellmill.config.parts.methods import MethodConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.parallel.mesh import list_stages
from cellmill.parallel.pipeline import SCHEDULES
from cellmill.planner.measure.load import Load, Rates
from cellmill.planner.measure.size import measure_size
from cellmill.planner.measure.workspace import Workspace
from cellmill.planner.memory import (
    AUTOCAST_BYTES,
    Memory,
    estimate_host_bytes_per_process,
    estimate_model_memory,
    estimate_rank_memory,
)
from cellmill.planner.planned_model import PlannedModel
from cellmill.planner.schedules import (
    count_in_flight,
    estimate_idle_frac,
    estimate_validation_idle_frac,
    list_splits,
)
from cellmill.planner.traffic import LinkBytes, list_traffic, sum_link_bytes
from tests.checks import quick
from tests.models import spec

TOKENS = Tokens.model_validate({"max_tokens": 512})
SPEC = spec(2000, TOKENS, hidden=64, layers=6, heads=4, objective="masked_gene")
SIZE = measure_size(SPEC)
LONG = 4096
SHORT = 16


def _model(world: int, **options: Any) -> PlannedModel:
    parallel = Parallel.model_validate(options)
    size = measure_size(SPEC, parallel.tp, parallel.sequence_parallel)
    return PlannedModel(size, parallel, divide_processes(parallel, world, world), world)


def _load(tokens: int) -> Load:
    return Load(tokens, pairs=0, cells=tokens / 128)


def _memory(world: int, tokens: int = LONG, micro_batches: int = 1, **options: Any) -> Memory:
    return estimate_model_memory(_model(world, **options), _load(tokens), micro_batches)


def _memory_at_the_end(world: int, **options: Any) -> Memory:
    """Memory of a step whose logits and few tokens need nothing: the peak is where gradients are."""
    model = _model(world, **options)
    no_workspace = Workspace(((1, 0.0), (2, 0.0)), Rates())
    size = replace(model.size, finish_workspace=no_workspace)
    return estimate_model_memory(replace(model, size=size), _load(SHORT), 1)


def _activations(of_block: float, recomputed: float = 0.0) -> float:
    """Elements kept per token if each block keeps `of_block`, and one block recomputes `recomputed`
    more.
    """
    outside = SIZE.begin.activations.per_token + SIZE.finish.activations.per_token
    return SIZE.n_blocks * of_block + recomputed + outside


def test_one_process_holds_weights_in_float32() -> None:
    parameters = SIZE.parameters
    begun = _memory(1)
    ended = _memory_at_the_end(1)
    for memory in (begun, ended):
        assert (memory.parameters, memory.optimizer) == (4 * parameters, 8 * parameters)
        assert (memory.gathered, memory.communication, memory.pipeline) == (0, 0, 0)
    assert begun.gradients == 4 * SIZE.block.parameters
    assert begun.activations == pytest.approx(
        4 * _activations(SIZE.block.activations.per_token) * LONG, rel=0.1
    )
    assert ended.gradients == 4 * parameters
    assert ended.logits == 0 < begun.logits


def test_ddp_holds_buckets_next_to_accumulated_gradients() -> None:
    once, twice = (_memory(4, micro_batches=n, strategy="ddp") for n in (1, 2))
    assert (once.gradients, twice.gradients) == (4 * SIZE.parameters, 8 * SIZE.parameters)
    assert once.activations == _memory(1).activations


@pytest.mark.parametrize("copies", [0, 3])
def test_a_step_of_the_optimizer_may_be_the_peak(copies: int) -> None:
    model = replace(_model(1), optimizer_copies=copies)
    no_workspace = Workspace(((1, 0.0), (2, 0.0)), Rates())
    model = replace(model, size=replace(SIZE, finish_workspace=no_workspace))
    memory = estimate_model_memory(model, _load(SHORT), 1)
    in_blocks = 4 * SIZE.n_blocks * SIZE.block.trained
    if copies:  # next to all weights, states and gradients
        assert memory.total == 4 * (4 * SIZE.parameters + SIZE.buffers) + copies * in_blocks
    assert memory.optimizer_step == copies * in_blocks


def test_full_shard_divides_weights_by_the_processes() -> None:
    for world in (2, 4, 8):
        memory = _memory(world, sharding_strategy="FULL_SHARD")
        share = -(-SIZE.parameters // world)
        assert (memory.parameters, memory.optimizer) == (4 * share, 8 * share)
        assert memory.gathered == 4 * (
            SIZE.parameters - (SIZE.n_blocks - 2) * SIZE.block.parameters
        )
        ended = _memory_at_the_end(world, sharding_strategy="FULL_SHARD")
        assert ended.gradients >= 4 * share
        assert ended.communication > 0
        # unsharded until they are reduced
        twice = _memory(world, micro_batches=2, sharding_strategy="FULL_SHARD")
        assert twice.total - memory.total == 4 * SIZE.parameters


def test_tensor_parallel_divides_matrices() -> None:
    whole, cut, shared = (
        _memory(4, strategy="ddp", **options)
        for options in ({}, {"tp": 4}, {"tp": 4, "sequence_parallel": True})
    )
    # all but norms, two biases and heads
    assert cut.parameters == shared.parameters < whole.parameters / 3.3
    # three quarters of what is cut: a chunk's logits of 15 % of the tokens, and two gradients of the
    # gene table, one by each loss. The gradient of the states and the heads' activations are whole
    # on each rank
    genes = SPEC.n_genes + 2
    assert whole.logits - cut.logits == pytest.approx(
        4 * 0.75 * genes * (0.15 * LONG + 2 * SIZE.block_input.per_token), rel=0.1
    )
    assert shared.activations < cut.activations < 0.7 * whole.activations


@pytest.mark.parametrize(
    ("tp", "objective"), [(1, "cell_decoding"), (1, "denoise"), (2, "cell_decoding")]
)
def test_the_plan_of_short_cells_is_that_of_a_run_of_such_cells(tp: int, objective: str) -> None:
    given: dict[str, Any] = {"family": "profile", "hidden": 64, "objective": objective}
    parallel = Parallel(strategy="ddp", tp=tp)
    layout = divide_processes(parallel, tp, tp)
    load = Load(tokens=20 * 200, pairs=0, cells=200)
    planned = []
    for max_tokens in (512, 20):
        size = measure_size(
            spec(20_000, Tokens.model_validate({"max_tokens": max_tokens}), **given), tp
        )
        model = PlannedModel(size, parallel, layout, tp)
        memory = estimate_model_memory(model, load, 1)
        sent = sum_link_bytes(list_traffic(model, 0, load, 1)).intra_node
        planned.append((memory.activations, memory.logits, sent))
    assert planned[0] == pytest.approx(planned[1], rel=0.05)


def test_bf16_halves_activations() -> None:
    exact, low = (
        _memory(4, sharding_strategy="FULL_SHARD", precision=precision)
        for precision in ("32-true", "bf16-mixed")
    )
    assert (low.parameters, low.optimizer, low.logits) == (
        exact.parameters,
        exact.optimizer,
        exact.logits,
    )
    assert low.activations == exact.activations // 2  # whole bytes
    assert 2 * low.gathered == exact.gathered


def test_checkpointing_keeps_only_inputs_of_blocks() -> None:
    kept, chosen, recomputed = (
        _memory(1, activation_checkpointing=how).activations for how in (None, "selective", "full")
    )
    assert 1.8 * recomputed < chosen < 0.8 * kept
    block = SIZE.block.activations.per_token
    selective = SIZE.selective_activations.per_token
    width = SIZE.block_input.per_token
    assert chosen == pytest.approx(
        4 * _activations(selective, block - selective + width) * LONG, rel=0.15
    )
    assert recomputed < kept / 2.5
    assert recomputed == pytest.approx(4 * _activations(width, block - width) * LONG, rel=0.15)


def test_autocast_keeps_inputs_of_blocks_in_float32() -> None:
    exact, low = (
        _memory(1, precision=precision, activation_checkpointing="full").activations
        for precision in ("32-true", "bf16-mixed")
    )
    # one block recomputes all its activations, so its input counts among their mean
    inputs = (SIZE.n_blocks - 1) * SIZE.block_input.per_token * LONG
    assert low == pytest.approx(4 * inputs + AUTOCAST_BYTES * (exact / 4 - inputs))


@pytest.mark.parametrize(("world", "n_bytes"), [(2, 4), (4, 2)])
def test_only_fsdp_sends_activations_in_16_bits(world: int, n_bytes: int) -> None:
    model = _model(world, pp=2, precision="bf16-mixed")
    memory = estimate_model_memory(model, _load(LONG), 4)
    assert memory.pipeline == n_bytes * 4 * SIZE.block_input.per_token * LONG
    [sent] = [
        calls for calls in list_traffic(model, 0, _load(LONG), 4) if calls.kind == "point to point"
    ]
    tied_bytes = 4 * SIZE.tied.trained / model.ranks_per_copy
    assert sent.payload_bytes == n_bytes * LONG * SIZE.block_input.per_token + tied_bytes


@pytest.mark.parametrize(
    "schedule", ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV"]
)
def test_a_pipeline_holds_each_block_once(schedule: str) -> None:
    model = _model(3, pp=3, schedule=schedule)
    parallel = model.parallel
    stages = [*chain.from_iterable(map(model.list_rank_stages, range(3)))]
    assert sum(len(stage.blocks) for stage in stages) == SIZE.n_blocks
    tied = SIZE.tied.parameters
    ranks = [model.sum_rank_totals(rank) for rank in range(3)]
    assert sum(rank.parameters for rank in ranks) == SIZE.parameters + tied
    assert [sum(rank.has_begin for rank in ranks), sum(rank.has_finish for rank in ranks)] == [1, 1]
    numbers = [*list_stages(0, parallel), *list_stages(1, parallel), *list_stages(2, parallel)]
    assert sorted(numbers) == list(range(parallel.n_stages))


def test_the_peak_belongs_to_the_largest_pipeline_rank() -> None:
    model = _model(3, pp=3)
    each = [estimate_rank_memory(model, rank, _load(LONG), 6) for rank in range(3)]
    assert estimate_model_memory(model, _load(LONG), 6) == max(
        each, key=lambda memory: memory.total
    )
    assert each[0].logits == each[1].logits == 0 < each[2].logits
    # 1F1B keeps one per following stage
    few, many = (_memory(4, micro_batches=n, pp=4) for n in (4, 16))
    assert (many.activations, many.pipeline) == (few.activations, 4 * few.pipeline)


def test_only_trained_tied_parameters_are_sent() -> None:
    model = _model(2, pp=2)
    frozen = replace(model, size=replace(SIZE, tied=replace(SIZE.tied, trained=0)))
    [sent] = list_traffic(model, 0, _load(LONG), 4)
    [sent_frozen] = list_traffic(frozen, 0, _load(LONG), 4)
    assert sent.payload_bytes - sent_frozen.payload_bytes == 4 * SIZE.tied.parameters > 0
    assert sent.calls - sent_frozen.calls == 1


def test_a_pipeline_rank_sends_over_its_own_card() -> None:
    model = replace(_model(4, pp=4), nproc_per_node=2)
    untied = replace(model, size=replace(SIZE, tied=replace(SIZE.tied, trained=0)))
    message_bytes = 4 * LONG * SIZE.block_input.per_token
    sent = [sum_link_bytes(list_traffic(untied, rank, _load(LONG), 8)) for rank in range(4)]
    end = LinkBytes(inter_node=0, intra_node=message_bytes)
    # ranks 1 and 2 are neighbours on different nodes
    middle = LinkBytes(inter_node=message_bytes, intra_node=message_bytes)
    assert sent == [end, middle, middle, end]


# nodes, processes of a node, layout; on 3 nodes, or in groups of 3, groups straddle two nodes
ON_NODES: list[tuple[int, int, dict[str, Any]]] = [
    (3, 8, {"pp": 4, "sharding_strategy": "FULL_SHARD"}),
    (3, 4, {"shard_size": 3}),
    (2, 3, {"pp": 2, "tp": 3, "schedule": "Interleaved1F1B"}),
    (4, 4, {"tp": 2}),
    (2, 4, {"pp": 2}),
    (3, 2, {"strategy": "ddp"}),
]


@pytest.mark.parametrize(("n_nodes", "nproc", "options"), ON_NODES, ids=str)
def test_bytes_to_other_nodes_are_those_of_each_process(
    n_nodes: int, nproc: int, options: dict[str, Any]
) -> None:
    parallel = Parallel.model_validate(options)
    layout = divide_processes(parallel, n_nodes * nproc, nproc)
    model = PlannedModel(SIZE, parallel, layout, nproc)
    sizes = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp)
    coordinates = [*product(*map(range, sizes))]
    node_of = {place: rank // nproc for rank, place in enumerate(coordinates)}
    for pp_rank in range(layout.pp):
        for sent in list_traffic(model, pp_rank, _load(LONG), 8):
            axis = ("pp", "dp_replicate", "dp_shard", "tp").index(sent.axis)
            fractions = []  # of its bytes that a process sends to other nodes
            for place in coordinates:
                if place[0] != pp_rank or sent.kind == "point to point":
                    continue
                group = [(*place[:axis], n, *place[axis + 1 :]) for n in range(sizes[axis])]
                nodes = [node_of[peer] for peer in group]
                leaves = len(set(nodes)) > 1
                fractions.append(leaves / nodes.count(node_of[place]))
            if fractions:
                assert sent.inter_node_bytes == pytest.approx(max(fractions) * sent.sent_bytes)


def test_a_message_leaves_the_node_if_that_of_any_process_does() -> None:
    parallel = Parallel.model_validate({"pp": 4, "sharding_strategy": "FULL_SHARD"})
    untied = replace(SIZE, tied=replace(SIZE.tied, trained=0))
    model = PlannedModel(untied, parallel, divide_processes(parallel, 24, 8), 8)
    leaves = []
    for pp_rank in range(4):
        messages = [
            sent for sent in list_traffic(model, pp_rank, _load(LONG), 8) if sent.axis == "pp"
        ]
        leaves.append(max(sent.inter_node_bytes for sent in messages) > 0)
    # of processes 0 to 5, which send to 6 to 11, those from 2 on send to the second node
    assert leaves == [True, True, True, True]


@pytest.mark.parametrize(
    ("options", "kind", "blocks", "tokens"),
    [
        ({"sharding_strategy": "FULL_SHARD"}, "all-gather", 1, 0),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, "all-gather", 0, 0),
        ({"pp": 2}, "point to point", 0, 1),
    ],
)
def test_a_coupled_loss_sends_another_forward_pass(
    options: dict[str, Any], kind: str, blocks: int, tokens: int
) -> None:
    plain = _model(2, **options)
    flops = replace(plain.size.flops, forward_passes=plain.size.flops.forward_passes + 1)
    coupled = replace(plain, size=replace(plain.size, flops=flops))
    sent, sent_coupled = (
        {collective.kind: collective for collective in list_traffic(model, 0, _load(LONG), 3)}[kind]
        for model in (plain, coupled)
    )
    more_elements = (
        3 * blocks * SIZE.n_blocks * SIZE.block.parameters
        + tokens * LONG * SIZE.block_input.per_token
    )
    assert sent_coupled.payload_bytes - sent.payload_bytes == 4 * more_elements
    assert sent_coupled.calls - sent.calls == 3 * (blocks * SIZE.n_blocks + tokens)


@pytest.mark.parametrize("pp", [1, 2])
def test_offloaded_parts_are_only_in_host_memory(pp: int) -> None:
    strategy: dict[str, Any] = {"sharding_strategy": "FULL_SHARD", "pp": pp}
    plain, moments, full = (
        _memory_at_the_end(4, cpu_offload=how, **strategy) for how in (None, "optimizer", "full")
    )
    assert (moments.optimizer, full.optimizer, full.parameters) == (0, 0, 0)
    assert moments.total == plain.total - plain.optimizer
    assert full.total < moments.total - plain.parameters
    assert estimate_host_bytes_per_process(
        _model(4, cpu_offload="optimizer", **strategy)
    ).offload == pytest.approx(2 * plain.optimizer, abs=16)
    assert estimate_host_bytes_per_process(_model(4, **strategy)).offload == 0


def test_offload_of_the_optimizer_pins_no_frozen_weights() -> None:
    model = _model(1, cpu_offload="optimizer")
    size = measure_size(SPEC, finetune=MethodConfig.model_validate({"method": "head_only"}))
    trained = replace(model, size=size).sum_rank_totals(0).trained
    assert trained < size.parameters / 2
    # weights, gradients and two moments
    assert estimate_host_bytes_per_process(replace(model, size=size)).offload == 4 * 4 * trained


def test_a_partly_frozen_model_is_planned_by_blocks_that_train() -> None:
    partial = MethodConfig.model_validate({"method": "partial", "last_blocks": 3})
    size = measure_size(SPEC, finetune=partial)
    assert size.block == SIZE.block
    assert size.block_workspace == SIZE.block_workspace
    model = replace(_model(2, pp=2), size=size)
    trained = [model.sum_rank_totals(rank).trained for rank in range(2)]
    assert trained[0] == 0
    assert trained[1] > 3 * SIZE.block.parameters


def test_a_model_without_blocks_is_measured() -> None:
    size = measure_size(spec(2000, TOKENS, hidden=64, layers=0, heads=4, objective="masked_gene"))
    assert size.trained_by_block == ()
    assert size.block.parameters == 0


def test_a_checkpoint_needs_twelve_bytes_per_parameter() -> None:
    sharded = estimate_host_bytes_per_process(_model(4, sharding_strategy="FULL_SHARD")).staging
    assert (estimate_host_bytes_per_process(_model(1)).staging, sharded) == (
        12 * SIZE.parameters,
        pytest.approx(3 * SIZE.parameters, abs=4),
    )


@pytest.mark.parametrize("how", [None, "optimizer", "full"])
def test_the_average_of_the_weights_is_where_the_weights_are(how: str | None) -> None:
    without = _model(4, sharding_strategy="FULL_SHARD", cpu_offload=how)
    model = replace(without, keeps_average=True)
    share = 4 * -(-without.sum_rank_totals(0).trained // 4)
    device, host = (0, share) if how == "full" else (share, 0)
    memory = estimate_model_memory(model, _load(SHORT), 1)
    assert (
        memory.average,
        memory.total - estimate_model_memory(without, _load(SHORT), 1).total,
    ) == (
        device,
        device,
    )
    pinned, staged = (
        after - before
        for after, before in zip(
            estimate_host_bytes_per_process(model), estimate_host_bytes_per_process(without)
        )
    )
    assert (pinned, staged) == (pytest.approx(host, abs=16), pytest.approx(share, abs=4))


SECONDS = {"FORWARD": 1.0, "FULL_BACKWARD": 2.0, "BACKWARD_INPUT": 1.0, "BACKWARD_WEIGHT": 1.0}
COMPUTED = SECONDS.keys() - {"BACKWARD_WEIGHT"}  # what another stage waits for
KEPT = {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_WEIGHT": -1}
# torch's table of 1F1B is not what it runs: it keeps one micro-batch too many
TABLED = ["GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV"]
QUICK = [*zip(TABLED, (1, 2, 1, 2, 2), (2, 4, 4, 2, 4))]


@pytest.fixture
def pp(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("schedule", "times", "pp"), quick(product(TABLED, (1, 2), (2, 4)), QUICK), indirect=["pp"]
)
def test_idle_time_agrees_with_the_schedule_table(pp: int, schedule: str, times: int) -> None:
    parallel = Parallel(pp=pp, schedule=schedule)
    micro_batches = times * parallel.n_stages
    table = _table(parallel, micro_batches)
    busy = 3.0 * micro_batches * parallel.n_stages / pp
    assert estimate_idle_frac(parallel, micro_batches) == pytest.approx(
        1 - busy / _play(table, parallel), abs=1e-9
    )
    for rank, actions in enumerate(table):
        at_peak = _splits_at_peak(actions, list_stages(rank, parallel))
        assert {sum(split) for split in at_peak} == {count_in_flight(parallel, rank, micro_batches)}
        splits = list_splits(parallel, rank, micro_batches)
        assert {*splits} == {max(at_peak), min(at_peak)}


@pytest.mark.parametrize("schedule", TABLED)
@pytest.mark.parametrize("pp", [1, 4])
def test_a_validation_waits_for_all_of_a_stage(pp: int, schedule: str) -> None:
    parallel = Parallel(pp=pp, schedule=schedule)
    micro_batches = 2 * parallel.n_stages
    ends: dict[tuple[int, int], int] = {}  # by stage and micro-batch
    free = [0] * pp  # by rank
    for stage in range(parallel.n_stages):
        [rank] = [rank for rank in range(pp) if stage in list_stages(rank, parallel)]
        for micro_batch in range(micro_batches):
            free[rank] = 1 + max(free[rank], ends.get((stage - 1, micro_batch), 0))
            ends[stage, micro_batch] = free[rank]
    busy = micro_batches * parallel.n_stages / pp
    assert estimate_validation_idle_frac(parallel, micro_batches) == pytest.approx(
        1 - busy / max(free)
    )


def test_idle_time_is_zero_without_a_pipeline() -> None:
    assert estimate_idle_frac(Parallel(), 5) == 0
    assert estimate_idle_frac(Parallel(pp=4), 8) == pytest.approx(3 / 11)
    assert [count_in_flight(Parallel(pp=4), rank, 8) for rank in range(4)] == [4, 3, 2, 1]


def _table(parallel: Parallel, micro_batches: int) -> list[list[Any]]:
    """Actions (stage_index, computation_type, microbatch_index) of each process, in order."""
    cpu = torch.device("cpu")
    stages = [
        PipelineStage(nn.Identity(), n, parallel.n_stages, cpu) for n in list_stages(0, parallel)
    ]
    kind: Any = get_schedule_class(SCHEDULES.get(parallel.schedule, parallel.schedule))
    made = kind(
        stages if len(stages) > 1 else stages[0],
        n_microbatches=micro_batches,
        loss_fn=lambda a, b: a,
    )
    order = made.pipeline_order
    table = []
    for rank in range(parallel.pp):
        actions = [action for action in order[rank] if action]
        table.append([action.sub_actions or (action,) for action in actions])
    return table


def _play(table: list[list[Any]], parallel: Parallel) -> float:
    """Return when the last process finishes, if each action waits for its inputs."""
    done: dict[tuple[bool, int, int], float] = {}
    clocks = [0.0] * len(table)
    queues = [deque(actions) for actions in table]
    while any(queues):
        ready = [
            rank
            for rank, queue in enumerate(queues)
            if queue and _needs(queue[0], parallel) <= done.keys()
        ]
        assert ready, "deadlock"
        for rank in ready:
            needs = _needs(queues[rank][0], parallel)
            parts = queues[rank].popleft()
            clocks[rank] = max([clocks[rank], *(done[need] for need in needs)])
            clocks[rank] += sum(SECONDS.get(part.computation_type.name, 0.0) for part in parts)
            for part in parts:
                if part.computation_type.name in COMPUTED:
                    forward = part.computation_type.name == "FORWARD"
                    done[forward, part.stage_index, part.microbatch_index] = clocks[rank]
    return max(clocks)


def _needs(parts: list[Any], parallel: Parallel) -> set[tuple[bool, int, int]]:
    """(Whether of a forward pass, stage, micro-batch) of the results that an action needs."""
    needs = set()
    for part in parts:
        stage = part.stage_index
        micro_batch = part.microbatch_index
        kind = part.computation_type.name
        if kind == "FORWARD" and stage > 0:
            needs.add((True, stage - 1, micro_batch))
        elif kind in COMPUTED and kind != "FORWARD" and stage < parallel.n_stages - 1:
            needs.add((False, stage + 1, micro_batch))
    return needs


def _splits_at_peak(actions: list[Any], stages: list[int]) -> set[tuple[int, ...]]:
    """Micro-batches that each stage keeps, whenever a process keeps the most in all."""
    kept = dict.fromkeys(stages, 0)
    seen = set()
    for parts in actions:
        for part in parts:
            kept[part.stage_index] += KEPT.get(part.computation_type.name, 0)
            seen.add(tuple(kept.values()))
    most = max(map(sum, seen))
    return {split for split in seen if sum(split) == most}
