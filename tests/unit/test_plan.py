"""A plan estimates a run, and refuses one that cannot work in one line; --suggest proposes layouts
that it accepts.
"""

import itertools
import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from small_corpus import stream_of, write_corpus

from cellmill.cli import main
from cellmill.config.checks import check_together
from cellmill.config.corpus import Shard
from cellmill.config.machine import Machine
from cellmill.config.options import PlanOptions
from cellmill.config.parallel import Layout, Parallel
from cellmill.config.run import Train
from cellmill.data.shards.manifest import Manifest
from cellmill.data.stream.batch_tokenizer import (
    count_detected_and_undetected_tokens,
    find_max_tokens_of_whole_cells,
)
from cellmill.errors import ConfigError
from cellmill.models.build import ModelSpec
from cellmill.planner.devices import find_device
from cellmill.planner.hardware import Hardware, find_hardware
from cellmill.planner.measure.cpu_speed import SIDE, measure_cpu
from cellmill.planner.measure.load import Load
from cellmill.planner.measure.size import measure_size
from cellmill.planner.memory import estimate_memory, find_overflow
from cellmill.planner.output.format import format_bytes, format_hours
from cellmill.planner.output.plan_file import format_line, format_plan
from cellmill.planner.remedies import find_max_fitting_token_budget, find_remedy
from cellmill.planner.step_counts import CorpusSize, count_detected_genes, count_steps
from cellmill.planner.suggest import (
    Suggestions,
    format_sections,
    format_suggestions,
    list_parallel_options,
    suggest_layouts,
)
from cellmill.stages import plan

N_CELLS = 250
SECTIONS: dict[str, Any] = {
    "tokens": {"max_tokens": 16},
    "stream": {"lanes": 8, "block_cells": 8, "window_blocks": 2},
    "model": {"family": "encoder", "hidden": 16, "layers": 2, "heads": 2},
    "objective": {"name": "masked_value"},
    "parallel": {},
    "plan": {},
    "finetune": {},
    "train": {"steps": 20, "global_batch": 32, "token_budget": 64},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return write_corpus(tmp_path_factory.mktemp("plan"), N_CELLS)


def _options(sections: dict[str, Any] = SECTIONS, **changes: dict[str, Any]) -> PlanOptions:
    return PlanOptions.model_validate(
        {name: value | changes.get(name, {}) for name, value in sections.items()}
    )


def _plan(
    corpus: Manifest,
    out: Path,
    *,
    nodes: int = 1,
    nproc: int = 1,
    device: str = "cpu",
    **changes: dict[str, Any],
) -> dict[str, Any]:
    plan.plan(
        options=_options(**changes),
        manifest=corpus.path,
        out=out / "plan.json",
        machine=Machine(nodes=str(nodes), nproc_per_node=nproc),
        device=device,
    )
    return json.loads((out / "plan.json").read_text())


def _refused(corpus: Manifest, out: Path, **what: Any) -> str:
    (out / "plan.json").unlink(missing_ok=True)
    with pytest.raises(ConfigError) as error:
        _plan(corpus, out, **what)
    assert not (out / "plan.json").exists()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_number_of_steps_equals_that_of_the_stream(
    corpus: Manifest, tmp_path: Path, world: int
) -> None:
    given: dict[str, Any] = {"tokens": _options().tokens, "token_budget": 64, "is_training": False}
    streams = [stream_of(corpus, rank, world, SECTIONS["stream"], **given) for rank in range(world)]
    steps = [list(stream) for stream in streams]
    batches = itertools.chain.from_iterable(itertools.chain(*steps))
    tokens = sum(len(batch.token_ids) for batch in batches)
    planned = _plan(corpus, tmp_path, nproc=world, train={"steps": None, "epochs": 3})
    assert planned["steps_per_epoch"] == streams[0].steps_per_epoch == 8
    assert (planned["cells"], planned["steps"], planned["cells_seen"]) == (N_CELLS, 24, 3 * N_CELLS)
    assert planned["tokens_seen"] == pytest.approx(3 * tokens)
    assert planned["tokens_per_cell"] == pytest.approx(tokens / N_CELLS)
    assert planned["tokens_per_step"] == pytest.approx(32 * tokens / N_CELLS)
    assert planned["micro_batches_per_step"] == pytest.approx(
        np.mean([len(step) for step in steps[0]]), rel=0.1
    )
    inside_an_epoch = _plan(corpus, tmp_path, nproc=world, train={"steps": 11})
    assert inside_an_epoch["cells_seen"] == N_CELLS + 3 * 32
    for stream in streams:
        stream.close()


def test_cells_that_are_read_more_often_count_as_often(tmp_path: Path) -> None:
    kinds = np.where(np.arange(N_CELLS) % 50, None, np.where(np.arange(N_CELLS) % 100, "a", "b"))
    labelled = write_corpus(tmp_path, N_CELLS, obs={"kind": kinds})
    read = SECTIONS["stream"] | {"weight_by": "kind", "labelled_frac": 1.0}
    stream = stream_of(labelled, options=read, tokens=_options().tokens, token_budget=64)
    steps = [*itertools.islice(stream, stream.steps_per_epoch)]
    tokens = sum(len(batch.token_ids) for batch in itertools.chain.from_iterable(steps))
    planned = _plan(labelled, tmp_path, stream=read, train={"token_budget": 64})
    assert planned["tokens_per_cell"] == tokens / N_CELLS
    micro_batches = [len(step) for step in steps]
    assert planned["micro_batches_per_step"] == pytest.approx(np.mean(micro_batches), rel=0.05)
    assert _plan(labelled, tmp_path)["tokens_per_cell"] != tokens / N_CELLS
    stream.close()


def test_the_plan_says_how_auto_chose_the_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    auto = Train.model_validate({"steps": "auto"})
    assert {n: auto.total_steps(n) for n in (1, 13, 533, 534, 3907)} == {
        1: 1600, 13: 1600, 533: 1600, 534: 1602, 3907: 11_721,
    }  # fmt: skip
    lines = []
    for cells in (250, 25_600):
        given: dict[str, Any] = {
            "machine": Machine(nodes="1", nproc_per_node=1),
            "device": "cpu",
            "cells": cells,
        }
        plan.plan(options=_options(train={"steps": "auto"}), manifest=None, out=None, **given)
        [line] = [
            line for line in capsys.readouterr().out.splitlines() if line.startswith("steps ")
        ]
        lines.append(line.rpartition(", ")[0])
    assert lines == [
        "steps       1,600 (8 per epoch; auto: 3 epochs are 24, raised to the minimum)",
        "steps       2,400 (800 per epoch; auto: 3 epochs)",
    ]


def test_parameters_and_flops_equal_those_of_the_model(corpus: Manifest, tmp_path: Path) -> None:
    options = _options()
    lengths = np.minimum(count_detected_genes(corpus), 16).astype(float)
    size = measure_size(ModelSpec.of(options, 40))
    per_cell = size.flops.count(Load(lengths.mean(), (lengths**2).mean(), 1))
    planned = _plan(corpus, tmp_path, device="h100", nproc=4)
    assert planned["parameters"] == size.parameters
    assert planned["memory"]["total_bytes"] == sum(planned["memory"]["parts_bytes"].values())
    assert planned["flops_per_step"] == pytest.approx(32 * per_cell)
    assert planned["step"]["compute_s"] == pytest.approx(32 / 4 * per_cell / (67e12 * 0.35))
    assert planned["hours"] == pytest.approx(planned["gpu_hours"] / 4)
    seconds = planned["step"]["step_s"] * planned["cells_seen"] / 32
    assert planned["hours"] == pytest.approx(seconds / 3600)
    train = {"replay_every_steps": 4}
    replayed = _plan(corpus, tmp_path, device="h100", nproc=4, train=train)
    assert replayed["hours"] == pytest.approx(1.25 * planned["hours"])
    assert planned["mfu"] == pytest.approx(
        0.35 * planned["step"]["compute_s"] / planned["step"]["step_s"]
    )

    low = _plan(corpus, tmp_path, device="h100", nproc=4, parallel={"precision": "bf16-mixed"})
    assert low["step"]["compute_s"] == pytest.approx(planned["step"]["compute_s"] * 67 / 989)
    on_cpu = _plan(corpus, tmp_path)
    assert (on_cpu["hours"], on_cpu["gpu_hours"]) == (None, None)


def test_the_plan_is_printed_as_a_table(
    corpus: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _plan(corpus, tmp_path, device="h100", nproc=4, train={"warmup_steps": 2, "lr": 2e-3})
    lines = capsys.readouterr().out.splitlines()
    assert [line[:12].rstrip() for line in lines] == [
        *("parameters", "cells", "steps", "step", "processes", "memory", "micro-batch", "traffic"),
        *("step time", "time", "not counted", "warning"),  # masked_value without renormalize
        *("", "        GPUs", "   1 x 1 = 1", "   1 x 2 = 2", "   1 x 4 = 4", "efficiency:"),
    ]
    assert lines[4] == "processes   4 x h100, HYBRID_SHARD (1 replica of 4 shards), 32-true"
    assert lines[10].startswith("not counted launches of kernels, which may take 10 ms: ")
    assert "of 72 GB per process: activations" in lines[5]


LEAK = (
    ".renormalize to yes in a new run; no, the default, repeats earlier runs: values of visible tokens are made with "
    "a cell's whole library size, so they leak the sum of the hidden counts"
)
SCALED = (
    "hint        train.lr 0.001 suits train.global_batch 256; scaled to 16 it is 0.00025 (square root, usual for "
    "AdamW) or 6.3e-05 (linear)"
)
PARTS = {"name": "sum", "parts": {"cell_decoding": {}, "masked_value": {}}}
TP = {"nproc": 4, "parallel": {"strategy": "ddp", "tp": 2}}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"device": "a100"},
            "assumed     a100 is planned with 80 GB; set device to a100-40gb if it has less",
        ),
        (TP, "processes   4 x cpu, ddp (2 replicas x tp 2), 32-true"),
        (
            {"train": {"warmup_steps": 20}},
            "warning     train.warmup_steps 20 leaves no step after the warm-up",
        ),
        ({"train": {"global_batch": 16, "warmup_steps": 2}}, SCALED),
        ({}, f"warning     set objective{LEAK}"),
        (
            {"finetune": {"method": "head_only"}},
            "upper bound finetune.method head_only freezes weights, so time, FLOPs and activations are lower than "
            "these estimates",
        ),
        (
            {"finetune": {"method": "partial", "last_blocks": 1}},
            "upper bound finetune.method partial freezes weights, so time, FLOPs and activations are lower than "
            "these estimates",
        ),
        (
            {"device": "h100", "train": {"optimizer": "muon"}},
            "not counted work of muon on matrices of the blocks, and their exchange",
        ),
        ({"objective": PARTS}, f"warning     set objective.parts.masked_value{LEAK}"),
    ],
    ids=str,
)
def test_assumptions_are_lines_of_the_plan(
    corpus: Manifest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    line: str,
) -> None:
    _plan(corpus, tmp_path, **changes)
    assert capsys.readouterr().out.splitlines().count(line) == 1
    quiet: dict[str, Any] = {
        "objective": {"renormalize": True},
        "train": {"global_batch": 256, "warmup_steps": 2},
    }
    _plan(corpus, tmp_path, device="a100-40gb", **quiet)
    assert not {"assumed", "hint", "warning"} & {
        line[:12].rstrip() for line in capsys.readouterr().out.splitlines()
    }


def test_a_long_name_is_apart_from_its_text() -> None:
    # an objective of a package may choose columns under any name
    assert format_line("label_column", "cell_type") == "label_column cell_type"
    assert format_line("batch", "donor") == "batch       donor"


def test_few_cut_cells_are_less_than_a_percent() -> None:
    corpus = plan._assume_corpus(_options(), Shard.model_validate({}), 100, 40)
    run_plan = plan._plan_run(corpus, Machine(), "h100")
    text = format_plan(replace(run_plan, cut_cells_frac=0.001))
    assert "tokens.max_tokens is too small for all genes of less than 1% of cells\n" in text


def test_tensor_parallel_ranks_share_the_cells_of_their_group(
    corpus: Manifest, tmp_path: Path
) -> None:
    one = _plan(corpus, tmp_path, nproc=2, parallel={"strategy": "ddp"})
    cut = _plan(corpus, tmp_path, nproc=4, parallel={"strategy": "ddp", "tp": 2})
    for same in (
        "parameters",
        "flops_per_step",
        "micro_batches_per_step",
        "tokens_per_step",
        "steps",
    ):
        assert cut[same] == one[same]
    assert cut["memory"]["total_bytes"] < one["memory"]["total_bytes"]


def test_cut_cells_are_reported(
    corpus: Manifest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = _plan(corpus, tmp_path, tokens={"max_tokens": 2})
    detected = count_detected_genes(corpus)
    assert planned["genes_per_cell"] == pytest.approx(detected.mean())
    assert planned["cut_cells_frac"] == pytest.approx((detected > 2).mean())
    said = (
        f"on average 2 tokens and {detected.mean():,.0f} genes; tokens.max_tokens is too small for all genes of "
        f"{planned['cut_cells_frac']:.0%} of cells\n"
    )
    assert said in capsys.readouterr().out
    # cells of a transformer cost what their tokens do
    assert "max_tokens" not in " ".join(planned["warnings"])
    monkeypatch.setitem(SECTIONS, "model", {"family": "profile", "hidden": 16})
    monkeypatch.setitem(SECTIONS, "objective", {"name": "cell_decoding"})
    every_gene: dict[str, Any] = {"tokens": {"max_tokens": detected.max()}}
    assert _plan(corpus, tmp_path, train={"warmup_steps": 2}, **every_gene)["warnings"] == []
    _plan(corpus, tmp_path, tokens={"max_tokens": 2})
    most = f"so that a cell keeps all its genes, at most {detected.max()}: family profile is more accurate with"
    hint = f"set tokens.max_tokens to {detected.max()}, {most}"
    assert f"warning     {hint}" in capsys.readouterr().out
    budget = int(detected.max()) - 1
    small = {"token_budget": budget, "global_batch": 16}
    _plan(corpus, tmp_path, tokens={"max_tokens": 2}, train=small)
    both = (
        f"set tokens.max_tokens to {budget + 1} and train.token_budget to {budget + 1} or more, so"
    )
    assert f"warning     {both}" in capsys.readouterr().out


@pytest.mark.parametrize("zero_frac", [0, 0.1, 0.3, 0.7, 0.8, 0.9, 0.95])
def test_the_advised_max_tokens_cuts_no_cell(zero_frac: float) -> None:
    tokens = _options(tokens={"zero_frac": zero_frac}).tokens

    def kept(n_genes: int, max_tokens: int) -> list[int]:
        limited = tokens.model_copy(update={"max_tokens": max_tokens})
        counts = count_detected_and_undetected_tokens(limited, np.array([n_genes]), 10**6)
        return [int(count[0]) for count in counts]

    for n_genes in range(1, 500):
        advised = find_max_tokens_of_whole_cells(tokens, n_genes)
        everything = kept(n_genes, 10**6)
        assert kept(n_genes, advised) == everything
        assert advised == 1 or kept(n_genes, advised - 1) != everything


def test_processes_share_the_memory_of_a_machine(corpus: Manifest, tmp_path: Path) -> None:
    one, two = (_plan(corpus, tmp_path, nproc=n)["memory"]["device_bytes"] for n in (1, 2))
    assert one == pytest.approx(2 * two, rel=1e-6)
    assert (
        _plan(corpus, tmp_path, nproc=2, plan={"memory_gb": 3})["memory"]["usable_bytes"]
        == 2_700_000_000
    )


@pytest.mark.parametrize(
    ("requested", "mb"),
    [
        ({"mem_mb": 6000}, 6000),
        ({"mem_mb_per_cpu": 2000, "cpus_per_task": 5}, 10_000),
        ({"mem_mb_per_cpu": 2000}, 8000),  # 2 cores per process
        ({"mem_mb_per_gpu": 3000, "gpus_per_node": "a100:4"}, 12_000),
        ({"mem_mb_per_gpu": 3000, "gres": "gpu:3,nvme:1"}, 9000),
        ({"mem_mb_per_gpu": 3000}, 6000),  # a GPU per process
    ],
    ids=str,
)
def test_processes_share_the_memory_that_a_profile_requests(
    requested: dict[str, Any], mb: int
) -> None:
    machine = Machine(nproc_per_node=2, **requested)
    assert machine.node_memory_bytes == mb << 20
    assert find_hardware(_options(), machine, "cpu").device_bytes == (mb << 20) // 2
    assert find_hardware(_options(), machine, "h100").device_bytes == 80_000_000_000


WIDE: dict[str, Any] = {
    "nodes": 64,
    "nproc": 8,
    "stream": {"lanes": 512},
    "train": {"global_batch": 512},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"nproc": 12, "parallel": {"tp": 2}},
            "stream.lanes 8 is not a multiple of 6 groups of tp 2; set nodes x nproc_per_node to 8",
        ),
        (WIDE, "512 processes for 250 training cells; lower nodes or nproc_per_node"),
        (
            {"device": "h10"},
            "unknown device 'h10'; set device (--device, or set-resources: plan in the profile) to one of: cpu, v100, ",
        ),
    ],
    ids=["lanes", "cells", "device"],
)
def test_impossible_options_are_refused(
    corpus: Manifest, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    assert _refused(corpus, tmp_path, **changes).startswith(message)


# 59 million parameters: under ddp 1.18 GB with moments, buckets and accumulated gradients, 0.23 GB
# of activations
BIG = {
    "model": {"hidden": 768, "layers": 8, "heads": 8},
    "train": {"token_budget": 512, "global_batch": 256},
}


def test_a_run_that_does_not_fit_is_refused_with_a_remedy(corpus: Manifest, tmp_path: Path) -> None:
    given: dict[str, Any] = {"nproc": 4, "parallel": {"strategy": "ddp"}, **BIG}
    whole = _plan(corpus, tmp_path, **given)["memory"]
    message = _refused(corpus, tmp_path, plan={"memory_gb": 1.5}, **given)
    assert message.startswith(f"needs {format_bytes(whole['total_bytes'])} per process, ")
    usable = "but cpu has 1.35 GB usable (90% of 1.5 GB): lower train.token_budget to 256"
    assert message.endswith(usable)


RECOMPUTE = "set parallel.activation_checkpointing to full and "
FULL_SHARD = "set parallel.strategy to fsdp and parallel.sharding_strategy to FULL_SHARD"
SHARD = RECOMPUTE + FULL_SHARD


@pytest.mark.parametrize(
    ("nodes", "nproc", "memory_gb", "optimizer", "remedy"),
    [
        pytest.param(
            1, 4, 1.251, "adamw", "lower train.token_budget to 128", marks=pytest.mark.full
        ),
        pytest.param(
            1,
            4,
            1.2285,
            "adamw",
            RECOMPUTE + "lower train.token_budget to 256",
            marks=pytest.mark.full,
        ),
        (1, 4, 0.594, "adamw", SHARD),
        (
            1,
            4,
            0.55,
            "adamw",
            SHARD + " and lower train.token_budget to 256",
        ),
        (4, 1, 0.55, "adamw", SHARD + " and lower train.token_budget to 256"),
        (
            4,
            1,
            0.2,
            "adamw",
            SHARD
            + " and set nodes to 16 in the profile and set stream.lanes to 16 (checkpoints of the "
            "run cannot continue with it: start a new run)",
        ),
        (1, 1, 0.9, "adamw", RECOMPUTE + "set parallel.cpu_offload to optimizer"),
        # muon cannot be offloaded; one process has nothing to shard, four have enough
        (1, 1, 0.9, "muon", RECOMPUTE + "set nodes to 4 in the profile and " + FULL_SHARD),
        (
            1,
            4,
            0.001,
            "muon",
            "use a device with more memory, or a smaller model",
        ),
    ],
)
def test_the_remedy_is_the_first_change_that_fits(
    nodes: int, nproc: int, memory_gb: float, optimizer: str, remedy: str
) -> None:
    options = _options(
        parallel={"strategy": "ddp"}, **BIG | {"train": BIG["train"] | {"optimizer": optimizer}}
    )
    cells = CorpusSize(np.full(4096, 16), 40)
    limit = int(memory_gb * 1e9)
    hardware = Hardware(nodes, nproc, "h100", limit, limit)
    assert estimate_memory(options, cells, hardware).total > limit
    assert find_remedy(options, cells, hardware) == remedy


def test_a_remedy_pins_no_more_than_the_profile_requests() -> None:
    options = _options(parallel={"strategy": "ddp"}, **BIG)
    cells = CorpusSize(np.full(4096, 16), 40)
    limit = int(0.9e9)
    remedies = [
        find_remedy(
            options, cells, Hardware(1, 1, "h100", limit, limit, requested_host_bytes=requested)
        )
        for requested in (0, 10**9)
    ]
    assert remedies == [
        RECOMPUTE + "set parallel.cpu_offload to optimizer",
        RECOMPUTE + "set nodes to 2 in the profile and " + FULL_SHARD,
    ]


def test_a_run_that_pins_too_much_requests_more_memory() -> None:
    options = _options(parallel={"strategy": "ddp"}, **BIG)
    cells = CorpusSize(np.full(4096, 16), 40)
    limit = int(0.9e9)
    # a copy of the checkpoint alone is larger than the request
    remedy = find_remedy(
        options, cells, Hardware(1, 1, "h100", limit, limit, requested_host_bytes=10**6)
    )
    assert remedy == (
        f"{RECOMPUTE}set parallel.cpu_offload to optimizer and request more memory per node (mem_mb, "
        "mem_mb_per_cpu or mem_mb_per_gpu)"
    )


def test_a_run_that_fits_nowhere_still_requests_more_memory() -> None:
    options = _options(parallel={"strategy": "ddp"}, **BIG)
    cells = CorpusSize(np.full(4096, 16), 40)
    remedy = find_remedy(options, cells, Hardware(1, 1, "h100", 1, 1, requested_host_bytes=1))
    assert remedy == (
        "use a device with more memory, or a smaller model, and request more memory per node "
        "(mem_mb, mem_mb_per_cpu or mem_mb_per_gpu)"
    )


def test_a_run_on_cpus_is_told_to_request_more_memory() -> None:
    options = _options(**BIG)
    corpus_size = CorpusSize(np.full(4096, 16), 40)
    this_machine = Hardware(1, 1, "cpu", 1, 1)
    requested = replace(this_machine, requested_host_bytes=1)
    # a training that ran out of memory does not know what its job requested
    for hardware in (requested, this_machine):
        assert find_remedy(options, corpus_size, hardware) == (
            "request more memory per node (mem_mb, mem_mb_per_cpu or mem_mb_per_gpu), or use a machine with more, or "
            "a smaller model"
        )
    limited = _options(**BIG, plan={"memory_gb": 0.01})
    assert find_remedy(limited, corpus_size, requested) == (
        "raise plan.memory_gb if the device has more, or use a smaller model"
    )


def test_the_ranks_of_a_pipeline_wait_for_each_other(corpus: Manifest, tmp_path: Path) -> None:
    layout: dict[str, Any] = {"pp": 2, "microbatches": 4}
    staged = _plan(corpus, tmp_path, nproc=2, nodes=4, device="h100", parallel=layout)
    assert staged["pipeline_idle_frac"] == pytest.approx(1 / 5)
    assert staged["step"]["idle_s"] == pytest.approx(staged["step"]["step_s"] / 5)


def test_one_plan_has_one_idle_fraction(corpus: Manifest, tmp_path: Path) -> None:
    train = {"token_budget": 16, "global_batch": 32}
    layout: dict[str, Any] = {"pp": 2, "microbatches": 4}
    given: dict[str, Any] = {"nproc": 2, "device": "h100", "parallel": layout}
    staged = _plan(corpus, tmp_path, train=train, **given)
    options = _options(parallel=layout, train=train)
    cells = CorpusSize(np.minimum(count_detected_genes(corpus), 16), 40)
    work = count_steps(options, cells, Layout(1, 1, pp=2))
    assert work.max_micro_batches_per_step > round(work.mean_micro_batches_per_step)
    idle_frac = staged["step"]["idle_s"] / staged["step"]["step_s"]
    assert staged["pipeline_idle_frac"] == pytest.approx(idle_frac)


def test_a_token_budget_of_one_cannot_be_lowered() -> None:
    options = _options(tokens={"max_tokens": 1}, train={"token_budget": 1})
    hardware = Hardware(1, 1, "h100", 1000, 1000)
    remedy = find_remedy(options, CorpusSize(np.full(64, 1), 40), hardware)
    assert remedy == "use a device with more memory, or a smaller model"


def test_the_largest_budget_that_fits_is_exactly_the_limit(
    corpus: Manifest, tmp_path: Path
) -> None:
    cells = CorpusSize(np.minimum(count_detected_genes(corpus), 16), 40)

    def needed(budget: int) -> int:
        options = _options(**BIG | {"train": BIG["train"] | {"token_budget": budget}})
        hardware = find_hardware(options, Machine(nodes="1", nproc_per_node=1), "cpu")
        return estimate_memory(options, cells, hardware).total

    limit = needed(1000) / 0.9e9  # 90 % of it are usable
    planned = _plan(corpus, tmp_path, plan={"memory_gb": limit}, **BIG)
    largest = planned["max_fitting_token_budget"]
    assert needed(largest) <= planned["memory"]["usable_bytes"] < needed(largest + 1)
    assert largest == pytest.approx(1000, abs=2)


def test_a_step_that_fits_into_one_micro_batch_limits_no_budget() -> None:
    options = _options(train={"token_budget": 64, "global_batch": 32})
    cells = CorpusSize(np.full(4096, 16), 40)
    whole_step = _options(train={"token_budget": 512, "global_batch": 32})
    usable_bytes = estimate_memory(whole_step, cells, Hardware(1, 1, "h100", 1, 1)).total
    hardware = Hardware(1, 1, "h100", usable_bytes, usable_bytes)
    assert find_max_fitting_token_budget(options, cells, hardware) == 1 << 24


def test_the_largest_budget_that_fits_includes_covariates() -> None:
    tokens = {"tokenizer": "continuous", "covariates": ["batch"]}
    options = _options(tokens=tokens, train={"global_batch": 4096})
    lengths = np.tile([10, 50], 4096)  # a micro-batch of short cells has the most covariates
    cells = CorpusSize(lengths, 60, levels={"batch": ["a", "b"]}, n_covariates=1)
    hardware = Hardware(1, 1, "cpu", 1, 1)
    half = _options(tokens=tokens, train={"global_batch": 4096, "token_budget": 4000})
    usable_bytes = estimate_memory(half, cells, hardware).total
    hardware = replace(hardware, usable_bytes=usable_bytes)
    budget = find_max_fitting_token_budget(options, cells, hardware)
    larger = _options(tokens=tokens, train={"global_batch": 4096, "token_budget": budget})
    assert find_overflow(larger, cells, hardware) is None


def test_a_warning_of_the_warm_up_is_stored(corpus: Manifest, tmp_path: Path) -> None:
    planned = _plan(corpus, tmp_path, train={"warmup_steps": 20})
    assert "train.warmup_steps 20 leaves no step after the warm-up" in planned["warnings"]


@pytest.mark.parametrize(("lengths", "is_warned"), [([10, 10, 40], True), ([20, 21], False)])
def test_a_family_that_pads_cells_gets_a_warning(lengths: list[int], is_warned: bool) -> None:
    model = {"family": "hf", "architecture": {"model_type": "bert"}, "weights": "random"}
    objective = {"name": "masked_gene", "cell_loss_weight": 0}
    tokens = {"tokenizer": "rank", "max_tokens": 40}
    options = PlanOptions.model_validate(
        SECTIONS | {"model": model, "objective": objective, "tokens": tokens}
    )
    genes = np.array(lengths)
    corpus = plan.PlannedCorpus(options, CorpusSize(genes, 60), genes, genes)
    warnings = [line for line in plan._list_warnings(corpus, 500) if "pads cells" in line]
    text = (
        "family hf pads cells to the longest of their micro-batch, which is not planned: activations, logits, FLOPs "
        "and time may be 2.0 times larger; if memory runs out, lower train.token_budget"
    )
    assert warnings == ([text] if is_warned else [])


def test_a_micro_batch_has_its_covariates_apart(
    printed: Callable[..., tuple[str, str]],
) -> None:
    tokens = {"tokenizer": "continuous", "covariates": ["batch"]}
    out, _ = printed("--device h100 --cells 5000", tokens=tokens)
    assert re.search(
        r"[\d,]+ tokens with those of covariates; (at least )?[\d,]+ without them would fit", out
    )


def test_a_budget_that_ends_the_search_is_a_lower_bound(
    corpus: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = _plan(corpus, tmp_path, device="h100", plan={"memory_gb": 1e6})
    assert planned["max_fitting_token_budget"] == 1 << 24
    assert "; at least 16,777,216 would fit (train.token_budget)\n" in capsys.readouterr().out
    # a given budget may be larger than all that are tried
    train = {"token_budget": 20_000_000}
    _plan(corpus, tmp_path, device="h100", plan={"memory_gb": 1e6}, train=train)
    assert "; at least 20,000,000 would fit (train.token_budget)\n" in capsys.readouterr().out


def test_the_memory_of_the_user_is_not_an_assumption(
    corpus: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _plan(corpus, tmp_path, device="a100", plan={"memory_gb": 80})
    assert "\nassumed " not in capsys.readouterr().out


LARGE: dict[str, Any] = {
    "tokens": {"max_tokens": 2048},
    "stream": {"lanes": 8},
    "model": {"family": "encoder", "hidden": 1024, "layers": 16, "heads": 16},
    "objective": {"name": "masked_value"},
    "parallel": {"precision": "bf16-mixed"},
    "plan": {},
    "train": {"epochs": 1, "global_batch": 512, "token_budget": 16384},
}
MACHINE = Machine(nodes="4", nproc_per_node=8)


def _suggest(
    nodes: int = 4, device: str = "h100", **changes: dict[str, Any]
) -> tuple[Suggestions, PlanOptions]:
    options = _options(LARGE, **changes)
    cells = CorpusSize(np.full(10_000, 2048), 20_000)
    return suggest_layouts(
        options, cells, Machine(nodes=str(nodes), nproc_per_node=8), device
    ), options


@pytest.mark.parametrize(
    "parallel",
    [
        {"tp": 4, "sequence_parallel": True, "activation_checkpointing": "full"},
        {"pp": 2, "schedule": "Interleaved1F1B", "microbatches": 32},
        {"sharding_strategy": "FULL_SHARD", "gradient_reduction": "micro_batch"},
    ],
    ids=str,
)
def test_the_suggested_section_may_be_merged_into_the_given_one(
    parallel: dict[str, Any],
) -> None:
    options = _options(LARGE, parallel=parallel)
    sections = options.model_dump()
    hardware = find_hardware(options, Machine(nodes="1", nproc_per_node=8), "h100")
    shown: set[str] = set()
    for chosen in list_parallel_options(options, hardware):
        suggested = options.model_copy(update={"parallel": chosen})
        section = yaml.safe_load(format_sections(suggested, options))["parallel"]
        for changed in (section, sections["parallel"] | section):
            assert PlanOptions.model_validate(sections | {"parallel": changed}) == suggested
        shown |= section.keys()
    assert shown >= parallel.keys()


def test_layouts_of_profile_have_no_sequence_parallelism() -> None:
    profile = {"family": "profile", "hidden": 1024, "layers": 2}
    objective = {"name": "cell_decoding"}
    options = _options(LARGE | {"model": profile, "objective": objective})
    layouts = [
        *list_parallel_options(
            options, find_hardware(options, Machine(nodes="1", nproc_per_node=8), "h100")
        )
    ]
    assert any(parallel.tp > 1 for parallel in layouts)
    for parallel in layouts:
        check_together(options.model_copy(update={"parallel": parallel}))


@pytest.mark.full
def test_a_suggested_layout_is_planned_with_the_same_numbers(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, 250)
    base = {
        "tokens": {"max_tokens": 16},
        "train": {"epochs": None, "steps": 20, "global_batch": 64, "token_budget": 64},
    }
    options = _options(LARGE, **base, model={"hidden": 64, "layers": 4, "heads": 4})
    cells = CorpusSize(np.minimum(count_detected_genes(corpus), 16), 40, corpus.splits["val"].n_obs)
    machine = Machine(nodes="2", nproc_per_node=4)
    suggestions = suggest_layouts(options, cells, machine, "h100")
    assert len(suggestions.fitting) > 10
    for suggestion in suggestions.fitting[:4]:
        tree = yaml.safe_load(format_sections(suggestion.options, options))
        changed = PlanOptions.model_validate({**options.model_dump(), "parallel": tree["parallel"]})
        if "stream" in tree:
            changed = changed.model_copy(
                update={"stream": changed.stream.model_copy(update=tree["stream"])}
            )
        assert changed == suggestion.options
        plan.plan(
            options=changed,
            manifest=corpus.path,
            out=tmp_path / "plan.json",
            machine=machine,
            device="h100",
        )
        planned = json.loads((tmp_path / "plan.json").read_text())
        assert planned["memory"]["total_bytes"] == suggestion.memory.total
        assert suggestion.time is not None
        assert planned["hours"] == pytest.approx(suggestion.time.hours)


def test_the_fastest_layouts_come_first() -> None:
    suggestions, options = _suggest(plan={"memory_gb": 12})
    hours = [suggestion.time.hours for suggestion in suggestions.fitting if suggestion.time]
    assert len(hours) == len(suggestions.fitting)
    assert all(after > 0.97 * before for before, after in itertools.pairwise(hours))
    assert all(suggestion.memory.total <= 0.9 * 12e9 for suggestion in suggestions.fitting)
    assert min(suggestions.needed_bytes_of_too_large) > 0.9 * 12e9
    lines = format_suggestions(suggestions, options, MACHINE, "h100").splitlines()
    assert lines[:2] == [
        "4 nodes x 8 h100; memory per process, bytes sent per process and step",
        "",
    ]
    assert lines[2].split() == ["memory", "time", "MFU", "intra-node", "inter-node", "layout"]
    assert lines[13] == ""
    assert lines[14] == f"layouts that fit: {len(suggestions.fitting)}"
    too_large = len(suggestions.needed_bytes_of_too_large)
    assert lines[15].startswith(f"too large: {too_large}; the smallest needs ")


def test_the_smallest_layout_is_reported_if_nothing_fits() -> None:
    suggestions, options = _suggest(nodes=1, plan={"memory_gb": 0.5})
    assert not suggestions.fitting
    one_node = Machine(nodes="1", nproc_per_node=8)
    lines = format_suggestions(suggestions, options, one_node, "h100").splitlines()
    assert lines[0].startswith("1 node x 8 h100; ")
    assert lines[2:4] == [
        "layouts that fit: 0",
        f"too large: {len(suggestions.needed_bytes_of_too_large)}; "
        f"the smallest needs {format_bytes(min(suggestions.needed_bytes_of_too_large))} of 450 MB usable",
    ]


def test_lanes_are_raised_to_a_number_that_all_ranks_can_share() -> None:
    suggestions, options = _suggest(nodes=8)
    best = suggestions.fitting[0].options
    assert best.stream.lanes == 64
    assert yaml.safe_load(format_sections(best, options))["stream"] == {"lanes": 64}
    printed = format_suggestions(suggestions, options, MACHINE, "h100")
    assert printed.endswith(
        "\n# other stream.lanes: checkpoints of the run cannot continue, start a new run"
    )


def test_the_schedule_of_the_run_is_tried() -> None:
    options = _options(LARGE, parallel={"pp": 2, "schedule": "DualPipeV"})
    hardware = find_hardware(options, Machine(nodes="1", nproc_per_node=8), "h100")
    tried = {each.schedule for each in list_parallel_options(options, hardware) if each.pp > 1}
    assert tried == {"1F1B", "Interleaved1F1B", "DualPipeV"}


def test_a_layout_that_cannot_be_formed_is_refused_once() -> None:
    # with one data-parallel rank no weights can be offloaded
    options = _options(LARGE, parallel={"cpu_offload": "full"})
    hardware = find_hardware(options, Machine(nodes="1", nproc_per_node=8), "h100")
    tried = list(list_parallel_options(options, hardware))
    impossible = [each for each in tried if each.tp * each.pp == 8]
    differences = {
        (each.tp, each.pp, each.schedule, each.activation_checkpointing) for each in impossible
    }
    assert len(differences) == len(impossible) > 0
    assert len(set(tried)) == len(tried)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """What `cellmill plan` of LARGE prints to stdout and stderr."""

    def of(words: str, code: int = 0, **changes: dict[str, Any]) -> tuple[str, str]:
        sections = {name: section | changes.get(name, {}) for name, section in LARGE.items()}
        assert main(["plan", "--options", json.dumps(sections), *words.split()]) == code
        return capsys.readouterr()

    return of


def test_runs_are_planned_without_a_corpus(
    printed: Callable[..., tuple[str, str]],
) -> None:
    out, _ = printed("--suggest --nodes 128 --nproc-per-node 8 --device a100 --cells 5000")
    assert out.startswith(
        "no --manifest given; assuming 5,000 training cells (--cells) of 2,048 tokens each, 20,000 genes (--genes), "
        "and 625 validation cells\n\n"
    )
    assert "# the best layout, for config.yaml\nparallel:\n  strategy: " in out
    # a range of nodes, as in an elastic profile, is planned for the fewest
    machine = "--nodes 2-4 --nproc-per-node 4 --cells 5e7"
    train = {"global_batch": 1536, "val_cells": 1000}
    with pytest.raises(SystemExit):
        printed(f"{machine} --genes 0")
    refused = "\ncellmill plan: the machine (flags, or set-resources in the profile): nodes: expected a number "
    assert refused in printed("--nodes 0", code=2)[1]
    out, _ = printed(f"{machine} --device H100", train=train, stream={"lanes": 96})
    assert "cells       50,000,000 for training, on average 2,048 tokens\n" in out
    assert "processes   8 x h100" in out
    assert "validation  163 times 1,000 cells, 0% of the time\n" in out


def test_a_step_of_all_assumed_cells_is_planned_whole(
    printed: Callable[..., tuple[str, str]],
) -> None:
    train = {"global_batch": 5_000_000}
    out, _ = printed("--device h100 --cells 5e6", train=train)
    # 8 cells of 2,048 tokens fit in a micro-batch
    assert "in 625000.0 micro-batches per process" in out


@pytest.mark.parametrize(
    ("max_tokens", "zero_frac", "detected"), [(2048, 0.25, 1536), (100, 0.29, 71)]
)
def test_undetected_genes_are_not_genes_of_an_assumed_cell(
    printed: Callable[..., tuple[str, str]],
    tmp_path: Path,
    max_tokens: int,
    zero_frac: float,
    detected: int,
) -> None:
    """100 * 0.29 is 28.999999999999996, and 29 genes of 100 are undetected."""
    out = tmp_path / "plan.json"
    tokens = {"max_tokens": max_tokens, "zero_frac": zero_frac}
    printed(f"--device h100 --cells 5000 --out {out}", tokens=tokens)
    planned = json.loads(out.read_text())
    assert (planned["tokens_per_cell"], planned["genes_per_cell"]) == (max_tokens, detected)


def test_a_plan_reads_the_shards_of_the_corpus_if_they_exist(
    corpus: Manifest, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("datasets.tsv").write_text("dataset\tpath\nsim\traw.h5ad\n")
    workflow: Any = {"corpora": {"a": {"table": "datasets.tsv"}}, "runs": {"one": {"corpus": "a"}}}
    Path("c.yaml").write_text(yaml.safe_dump(SECTIONS | workflow))
    command = ["plan", "--config", "c.yaml"]
    manifest = "results/corpora/a/shards/manifest.json"
    assert main(command) == 0
    assert capsys.readouterr().out.startswith(
        "corpus a has no shards yet, so the numbers below are of assumed cells; "
        f"`cellmill run -- {manifest} --configfile c.yaml` makes them\n"
        "no --manifest given; assuming 1,000,000 training cells (--cells) of 16 tokens each, 20,000 genes (--genes), "
        "and 125,000 validation cells\n"
    )
    workflow["shard"] = {"val_frac": 0.02, "test_frac": 0.3}
    Path("c.yaml").write_text(yaml.safe_dump(SECTIONS | workflow))
    assert main(command) == 0
    assert " (--genes), and 29,412 validation cells\n" in capsys.readouterr().out  # 0.02 / 0.68
    shutil.copytree(corpus.path.parent, Path(manifest).parent)
    assert main(command) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"shards of {manifest}\n\n")
    assert f"\ncells       {N_CELLS} for training, " in out
    assert main([*command, "--cells", "5000"]) == 0
    assert capsys.readouterr().out.startswith("no --manifest given; assuming 5,000 training cells ")


def test_pinned_host_memory_must_fit_into_the_job(
    printed: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    words = "--device h100 --cells 5000 --nproc-per-node 4"
    out = tmp_path / "plan.json"
    printed(f"{words} --mem-mb 0 --out {out}")
    needed = 4 * json.loads(out.read_text())["memory"]["staging_bytes"]
    printed(f"{words} --mem-mb {needed // 2**20 + 1}")
    per_gpu = needed // 2**20 // 2
    for given, requested in (
        (f"mem-mb {needed // 2**20}", f"mem_mb is {needed // 2**20}"),
        (
            f"mem-mb-per-gpu {per_gpu} --gpus-per-node h100:2",
            f"mem_mb_per_gpu is {per_gpu}, {format_bytes(2 * per_gpu << 20)} per node",
        ),
        (
            f"mem-mb-per-cpu {per_gpu} --cpus-per-task 2",
            f"mem_mb_per_cpu is {per_gpu}, {format_bytes(2 * per_gpu << 20)} per node",
        ),
    ):
        assert printed(f"{words} --{given}", code=2)[1] == (
            f"cellmill plan: a node's processes need {format_bytes(needed)} of host memory for checkpoints and "
            f"cpu_offload, but {requested}; raise it (0 is all of a node), or shard over more "
            "nodes (FULL_SHARD)\n"
        )


def test_memory_requested_for_cpus_is_shown_in_its_unit(
    printed: Callable[..., tuple[str, str]],
) -> None:
    assert printed("--mem-mb 100 --cells 5000", code=2)[1].endswith(
        "but cpu has 94.4 MB usable (90% of 105 MB; 100 MiB are requested per node): request more memory per node "
        "(mem_mb, mem_mb_per_cpu or mem_mb_per_gpu), or use a machine with more, or a smaller model\n"
    )


def test_fewer_nodes_that_pin_too_much_have_no_time(
    printed: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    words = "--device h100 --cells 5e5 --nodes 2 --nproc-per-node 2"
    sharded = {"sharding_strategy": "FULL_SHARD"}
    out = tmp_path / "plan.json"
    printed(f"{words} --out {out}", parallel=sharded)
    needed = 2 * json.loads(out.read_text())["memory"]["staging_bytes"]
    mem_mb = needed // 2**20 + 1
    table = printed(f"{words} --mem-mb {mem_mb}", parallel=sharded)[0].partition("efficiency\n")[2]
    refused = f"needs {format_bytes(2 * needed)} of {format_bytes(mem_mb << 20)} host memory"
    one, two, four = table.splitlines()[:3]
    assert (one, two) == (f"   1 x 1 = 1  {refused}", f"   1 x 2 = 2  {refused}")
    assert four.startswith("   2 x 2 = 4 ")
    assert four.endswith("%")


def test_suggested_layouts_pin_no_more_than_the_profile_requests(
    printed: Callable[..., tuple[str, str]],
) -> None:
    words = "--suggest --device h100 --cells 5000 --nproc-per-node 4 --mem-mb"
    every, some = (printed(f"{words} {mb}")[0] for mb in (0, 4000))
    reason = (
        r"\nrefused: \d+; processes need more host memory for checkpoints and cpu_offload than the profile requests "
        r"for a node\n"
    )
    assert (re.search(reason, every), bool(re.search(reason, some))) == (None, True)
    assert ("ddp (4 replicas" in every, "ddp (4 replicas" in some) == (True, False)


def test_a_large_share_of_validation_time_gets_a_hint(
    printed: Callable[..., tuple[str, str]],
) -> None:
    # 97,657 steps of 512 cells; 489 times 6,250,000 cells forward, a third of a step each
    seen = 489 * 6_250_000 / 3
    share = seen / (seen + 50_000_000)
    words = "--device h100 --cells 50000000"
    hint = f"{share:.0%} of the time; set train.val_cells to 34000 for 10%\n"
    assert f"validation  489 times 6,250,000 cells, {hint}" in printed(words)[0]
    on_cpu = printed("--cells 50000000")[0]
    assert re.search(rf"\nvalidation  .* cells, {hint}", on_cpu)
    capped = printed(words, train={"val_cells": 34_000})[0]
    assert "validation  489 times 34,000 cells, 10% of the time\n" in capped
    # each step of two cells is followed by the forward pass of one, which takes a sixth of a step
    often: dict[str, Any] = {"global_batch": 2, "val_every_steps": 1, "val_cells": 1}
    text = printed("--device h100 --cells 1000", train=often, stream={"lanes": 1})[0]
    assert re.search(r"1 cells, 14% of the time; raise train\.val_every_steps for 10%\n", text)


def _validation_s(tmp_path: Path, **changes: dict[str, Any]) -> float:
    """Planned seconds of all validations of a run on two nodes."""
    plan.plan(
        options=_options(**changes),
        manifest=None,
        out=tmp_path / "plan.json",
        machine=Machine(nodes="2", nproc_per_node=1),
        device="h100",
        cells=5000,
    )
    planned = json.loads((tmp_path / "plan.json").read_text())
    return 3600 * planned["hours"] * planned["validation_frac"]


def test_a_validation_is_planned_without_a_backward_pass(tmp_path: Path) -> None:
    plain = _validation_s(tmp_path)
    assert plain > 0
    slow_links = {"inter_node_gbs": 0.001}
    recomputed = {"activation_checkpointing": "full"}
    assert _validation_s(tmp_path, plan=slow_links, parallel=recomputed) == pytest.approx(plain)


def test_a_metric_of_hidden_genes_doubles_the_validation(tmp_path: Path) -> None:
    objective: dict[str, Any] = {"objective": {"name": "cell_decoding"}}
    train = {"best_metric": "val_hidden_genes", "best_mode": "max"}
    plain = _validation_s(tmp_path, **objective)
    assert _validation_s(tmp_path, **objective, train=train) == pytest.approx(2 * plain)


def hours_of(text: str) -> float:
    number, unit = text.replace(",", "").split()
    return float(number) / {"min": 60, "h": 1}[unit]


@pytest.mark.parametrize(
    ("hours", "text"),
    [
        (7e-5, "<0.1 min"),
        (0.0085, "0.51 min"),
        (0.0508, "3.05 min"),
        (0.999, "59.9 min"),
        (0.9992, "1 h"),
        (0.9999, "1 h"),
        (1, "1 h"),
        (12.34, "12.3 h"),
        (12345.6, "12,346 h"),
    ],
)
def test_times_below_an_hour_are_minutes(hours: float, text: str) -> None:
    assert format_hours(hours) == text


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (999, "999 bytes"),
        (999_400_000, "999 MB"),
        (999_600_000, "1 GB"),
        (12_340_000, "12.3 MB"),
        (1.23e15, "1,230 TB"),
    ],
)
def test_bytes_have_three_digits_and_no_exponent(n_bytes: float, text: str) -> None:
    assert format_bytes(n_bytes) == text


def test_one_table_has_the_time_on_each_number_of_gpus(
    printed: Callable[..., tuple[str, str]],
) -> None:
    words = "--device h100 --nproc-per-node 8 --cells 5e6"
    lanes = {"lanes": 128}
    table = (
        printed(f"{words} --nodes 16", stream=lanes)[0].partition("efficiency\n")[2].splitlines()
    )
    counts = [int(line[:12].rpartition("=")[2]) for line in table[:-1]]
    assert counts == [1, 2, 4, 8, 16, 32, 64, 128]
    times, gpu_times, shares = zip(*(re.split(r"\s\s+", line[14:].strip()) for line in table[:-1]))
    hours, gpu_hours = [[*map(hours_of, column)] for column in (times, gpu_times)]
    shares = [float(share.rstrip("%")) for share in shares]
    assert hours == sorted(hours, reverse=True)
    assert shares[0] == 100
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == pytest.approx(100 * gpu_hours[0] / gpu_hours[-1], rel=0.02)
    # the same as a plan of that number alone
    alone = printed(f"{words} --nodes 4", stream=lanes)[0]
    assert f"time        {times[5]} in all, GPU time {gpu_times[5]} at " in alone
    # a number that cannot work says why
    odd = printed(
        "--device h100 --nproc-per-node 6 --cells 5e6",
        stream={"lanes": 6},
        train={"global_batch": 1536},
    )
    assert "   1 x 4 = 4  stream.lanes 6 is not a multiple of " in odd[0]
    assert "GPU time  " not in printed("--device h100 --cells 5e6")[0], "one GPU needs no table"


def test_hours_on_cpu_cores_come_from_a_measured_rate(
    corpus: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = _plan(corpus, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    [line] = [line for line in lines if line.startswith(("time ", "step time"))]
    match = re.fullmatch(
        r"time        about (\d+) s in all, without start-up, at 35% \(plan.mfu_frac\) of ([\d,]+) GFLOP/s per "
        "process in 32-true, measured now on all CPU cores here; steps of a few ms take longer",
        line,
    )
    assert match is not None, line
    # at 35 % of the rate, which is printed in whole GFLOP/s
    flops = planned["flops_per_step"] * planned["steps"]
    rate = float(match[2].replace(",", "")) * 1e9
    seconds = max(1, flops / (0.35 * rate))
    assert float(match[1]) == pytest.approx(seconds, rel=0.6, abs=0.5)


def test_the_speed_of_cpu_cores_is_that_of_the_number_format(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product = torch.mm

    def slow_in_half(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if left.dtype != torch.float32:
            time.sleep(1)
            return left
        return product(left, right)

    monkeypatch.setattr(torch, "mm", slow_in_half)
    cpu = find_device("cpu")
    flops = 2 * SIDE**3
    for precision in ("bf16-mixed", "16-mixed"):
        parallel = Parallel(precision=precision)
        rate = measure_cpu(cpu, 1, precision).peak_flops_per_s(parallel)
        assert rate == pytest.approx(flops, rel=0.1)
    rate = measure_cpu(cpu, 1).peak_flops_per_s(Parallel())
    assert rate is not None
    assert rate > 5 * flops


def test_a_device_without_bfloat16_is_refused(
    printed: Callable[..., tuple[str, str]],
) -> None:
    line = "parallel.precision bf16-mixed: a v100 has no bfloat16; set it to 16-mixed\n"
    assert printed("--device v100", code=2)[1] == f"cellmill plan: {line}"
    out, error = printed("--device v100 --suggest --nproc-per-node 4", code=2)
    assert re.search(rf"\nrefused: \d+; {re.escape(line)}", out)
    assert error == "cellmill plan: no layout fits, for the reasons above\n"


def test_a_device_without_tf32_is_refused(printed: Callable[..., tuple[str, str]]) -> None:
    parallel: dict[str, Any] = {"precision": "32-true", "tf32": True}
    line = "cellmill plan: parallel.tf32: a v100 has no TF32; set it to no\n"
    assert printed("--device v100", code=2, parallel=parallel)[1] == line
    printed("--device v100", parallel=parallel | {"tf32": False})


def test_the_search_keeps_compile_and_offload() -> None:
    found, _ = _suggest(parallel={"compile": True, "cpu_offload": "optimizer"})
    suggested = [each.options.parallel for each in found.fitting]
    assert {(each.compile, each.cpu_offload) for each in suggested} == {(True, "optimizer")}
    assert {each.activation_checkpointing for each in suggested} == {None, "full"}
    plain = [each.options.parallel for each in _suggest()[0].fitting]
    assert {each.activation_checkpointing for each in plain} == {None, "selective", "full"}


def test_layouts_on_cpus_are_ranked_by_measured_speed(
    printed: Callable[..., tuple[str, str]],
) -> None:
    out, _ = printed("--suggest --cells 5000 --mem-mb 400000")
    layouts = out.partition("inter-node  layout\n")[2].partition("\n\n")[0].splitlines()
    assert [("recompute" in layout) for layout in layouts] == [False, True, True]
    assert all(re.search(r" (min|h) +\d+% ", layout) for layout in layouts)


def test_layouts_of_equal_speed_do_not_recompute(capsys: pytest.CaptureFixture[str]) -> None:
    sections = {
        "tokens": {"max_tokens": 20_000},
        "stream": {},
        "model": {"family": "profile", "hidden": 128, "layers": 1},
        "objective": {"name": "cell_decoding"},
        "parallel": {},
        "plan": {},
        "train": {"epochs": 1, "global_batch": 32, "token_budget": 262_144},
    }
    assert main(["plan", "--suggest", "--options", json.dumps(sections)]) == 0
    out = capsys.readouterr().out
    assert ", recompute full\n" in out
    assert out.endswith("# the best layout, for config.yaml\nparallel:\n  strategy: ddp\n")


def test_the_search_plans_the_speed_of_tf32() -> None:
    exact, _ = _suggest(parallel={"precision": "32-true"})
    fast, options = _suggest(parallel={"precision": "32-true", "tf32": True})
    assert yaml.safe_load(format_sections(fast.fitting[0].options, options))["parallel"]["tf32"]
    exact_s = {each.options.parallel: each.time for each in exact.fitting}
    assert len(exact_s) == len(fast.fitting)
    for each in fast.fitting:
        slow = exact_s[each.options.parallel.model_copy(update={"tf32": False})]
        assert each.time is not None
        assert slow is not None
        assert each.time.step.compute_s == pytest.approx(slow.step.compute_s * 67 / 494)


def test_the_search_keeps_options_in_layouts_that_allow_them() -> None:
    reduced = [
        each.options.parallel
        for each in _suggest(parallel={"gradient_reduction": "micro_batch"})[0].fitting
    ]
    assert {each.shards_gradients for each in reduced} == {True, False}
    assert all(each.reduces_each_micro_batch == each.shards_gradients for each in reduced)
    piped = [
        each.options.parallel
        for each in _suggest(parallel={"pp": 2, "microbatches": 32})[0].fitting
    ]
    assert {each.pp > 1 for each in piped} == {True, False}
    assert all(each.microbatches == (32 if each.pp > 1 else None) for each in piped)


def test_the_search_resets_the_size_of_sharding_groups() -> None:
    found, _ = _suggest(parallel={"shard_size": 2})
    assert {each.options.parallel.shard_size for each in found.fitting} == {None}
