"""Remedies for a run that does not fit: whoever follows one gets a run that the checks accept."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import yaml

from cellmill.config.checks import check_nodes
from cellmill.config.options import PlanOptions
from cellmill.planner.hardware import Hardware
from cellmill.planner.memory import estimate_memory
from cellmill.planner.remedies import find_remedy, list_changes
from cellmill.planner.step_counts import CorpusSize

CORPUS = CorpusSize(np.full(4096, 16), 40)
SECTIONS: dict[str, Any] = {
    "tokens": {"max_tokens": 16},
    "stream": {"lanes": 8, "block_cells": 8, "window_blocks": 2},
    "model": {"family": "encoder", "hidden": 64, "layers": 4, "heads": 4},
    "objective": {"name": "masked_value"},
    "parallel": {},
    "plan": {},
    "finetune": {},
    "train": {"steps": 20, "global_batch": 256, "token_budget": 512},
}
RECOMPUTE = "set parallel.activation_checkpointing to full"
SHARD = "set parallel.strategy to fsdp and parallel.sharding_strategy to FULL_SHARD"
SHARD_OVER_ALL = "set parallel.sharding_strategy to FULL_SHARD and parallel.shard_size to null"
REDUCED = {"sharding_strategy": "FULL_SHARD", "gradient_reduction": "micro_batch"}
LANES = "set stream.lanes to 16 (checkpoints of the run cannot continue with it: start a new run)"
OFFLOADED = {"sharding_strategy": "FULL_SHARD", "cpu_offload": "full"}


def _sections(**changes: dict[str, Any]) -> dict[str, Any]:
    return {name: section | changes.get(name, {}) for name, section in SECTIONS.items()}


def _hardware(nodes: int, nproc: int, usable_bytes: int = 0) -> Hardware:
    return Hardware(nodes, nproc, "h100", usable_bytes, usable_bytes)


def _follow(
    sections: dict[str, Any], instructions: Sequence[str], nodes: int
) -> tuple[PlanOptions, int]:
    """Change the sections and the number of nodes as the instructions say, and nothing else."""
    changed = {name: dict(section) for name, section in sections.items()}
    for instruction in instructions:
        for section, key, value in re.findall(r"(\w+)\.(\w+) to (\w+)", instruction):
            changed[section][key] = yaml.safe_load(value)
        if match := re.fullmatch(r"set nodes to (\d+) in the profile", instruction):
            nodes = int(match[1])
    return PlanOptions.model_validate(changed), nodes


@pytest.mark.parametrize(
    ("nodes", "nproc", "changes"),
    [
        (1, 8, {"parallel": {"shard_size": 8}}),
        (4, 2, {"parallel": {"shard_size": 2}}),
        (4, 2, {"parallel": REDUCED}),
        (1, 2, {"parallel": OFFLOADED}),
        (1, 4, {"train": {"replay_every_steps": 4}}),
        (1, 1, {"parallel": {"strategy": "ddp"}, "stream": {"lanes": 1}}),
        (2, 3, {"stream": {"lanes": 6}, "train": {"global_batch": 96}}),
        # groups of 3 on 3 nodes would be groups of 4, which do not divide 6, on 6 nodes
        (3, 4, {"parallel": {"pp": 4}, "stream": {"lanes": 3}, "train": {"global_batch": 96}}),
    ],
    ids=str,
)
def test_instructions_give_a_run_that_the_checks_accept(
    nodes: int, nproc: int, changes: dict[str, Any]
) -> None:
    sections = _sections(**changes)
    options = PlanOptions.model_validate(sections)
    check_nodes(options, range(nodes, nodes + 1), nproc, CORPUS.n_cells)
    found = [*list_changes(options, CORPUS, _hardware(nodes, nproc))]
    assert found[-1].hardware.nodes > nodes
    for change in found:
        followed, new_nodes = _follow(sections, change.instructions, nodes)
        assert (followed, new_nodes) == (change.options, change.hardware.nodes)
        check_nodes(followed, range(new_nodes, new_nodes + 1), nproc, CORPUS.n_cells)


@pytest.mark.parametrize(
    ("nodes", "nproc", "changes", "instructions"),
    [
        (
            *(1, 8, {"parallel": {"shard_size": 8}}),
            [RECOMPUTE, SHARD_OVER_ALL, "set parallel.pp to 2"],
        ),
        (
            *(4, 2, {"parallel": REDUCED}),
            [RECOMPUTE, "set parallel.pp to 2", "set parallel.gradient_reduction to step"],
        ),
        (
            *(1, 8, {"parallel": {"strategy": "ddp"}}),
            [RECOMPUTE, SHARD, "set nodes to 2 in the profile", LANES],
        ),
        (
            *(1, 8, {"parallel": {"strategy": "ddp"}}),
            [RECOMPUTE, SHARD, "set parallel.gradient_reduction to micro_batch"],
        ),
    ],
    ids=str,
)
def test_a_remedy_names_every_option_that_it_changes(
    nodes: int, nproc: int, changes: dict[str, Any], instructions: list[str]
) -> None:
    options = PlanOptions.model_validate(_sections(**changes))
    found = [*list_changes(options, CORPUS, _hardware(nodes, nproc))]
    assert instructions in [change.instructions for change in found]


@pytest.mark.parametrize(
    ("parallel", "budgets"),
    [
        # a rank has 256 cells of 16 tokens in a step
        ({}, [2048, 1024]),
        # and a pipeline cuts them into 8 micro-batches of 512 tokens
        ({"pp": 2, "microbatches": 8}, [256, 128]),
    ],
    ids=str,
)
def test_smaller_budgets_make_smaller_micro_batches(
    parallel: dict[str, int], budgets: list[int]
) -> None:
    train = {"token_budget": 1_000_000}
    options = PlanOptions.model_validate(_sections(train=train, parallel=parallel))
    found = list_changes(options, CORPUS, _hardware(1, parallel.get("pp", 1)))
    first = [next(found).instructions for _ in budgets]
    assert first == [[f"lower train.token_budget to {budget}"] for budget in budgets]


def test_full_recomputation_follows_the_selective_one() -> None:
    sections = _sections(parallel={"activation_checkpointing": "selective"})
    found = list_changes(PlanOptions.model_validate(sections), CORPUS, _hardware(1, 1))
    assert [RECOMPUTE] in [change.instructions for change in found]


def test_remedies_suit_each_number_of_nodes_of_a_range() -> None:
    options = PlanOptions.model_validate(_sections(train={"global_batch": 240}))
    hardware = replace(_hardware(2, 1), max_nodes=3)
    for change in list_changes(options, CORPUS, hardware):
        check_nodes(change.options, change.hardware.node_counts, 1, CORPUS.n_cells)
        # two pipeline ranks do not divide three processes
        assert change.options.parallel.pp == 1 or change.hardware.nodes > 3


def test_layouts_that_another_option_excludes_are_no_remedies() -> None:
    options = PlanOptions.model_validate(_sections(train={"replay_every_steps": 4}))
    found = list_changes(options, CORPUS, _hardware(1, 4))
    assert {change.options.parallel.tp * change.options.parallel.pp for change in found} == {1}


def test_full_sharding_is_tried_with_smaller_budgets() -> None:
    given = _sections(parallel={"strategy": "ddp"}, train={"global_batch": 1024})
    options = PlanOptions.model_validate(given)
    instructions = [RECOMPUTE, SHARD, "lower train.token_budget to 256"]
    found = [*list_changes(options, CORPUS, _hardware(1, 8))]
    [needed] = [
        estimate_memory(change.options, CORPUS, change.hardware).total
        for change in found
        if change.instructions == instructions
    ]
    before = found[: [change.instructions for change in found].index(instructions)]
    for change in before:
        assert estimate_memory(change.options, CORPUS, change.hardware).total > needed
    assert find_remedy(options, CORPUS, _hardware(1, 8, needed)) == " and ".join(instructions)


def test_groups_of_all_processes_get_a_larger_layout() -> None:
    # one micro-batch of one cell, which cannot be smaller
    train = {"global_batch": 8, "token_budget": 16}
    parallel = {"activation_checkpointing": "full", "shard_size": 8}
    options = PlanOptions.model_validate(_sections(train=train, parallel=parallel))
    instructions = [
        SHARD_OVER_ALL,
        "set parallel.tp to 2 and parallel.sequence_parallel to true",
    ]
    [needed] = [
        estimate_memory(change.options, CORPUS, change.hardware).total
        for change in list_changes(options, CORPUS, _hardware(1, 8))
        if change.instructions == instructions
    ]
    assert needed < estimate_memory(options, CORPUS, _hardware(1, 8)).total
    assert find_remedy(options, CORPUS, _hardware(1, 8, needed)) == " and ".join(instructions)
