"""Small faults planted in the source, one at a time: `make test` has to fail on each.

    python -m tests.mutations              plant each, run the tests that should fail, print a row for it
    python -m tests.mutations 3 17         some of them
    python -m tests.mutations --list       all of them

Each fault is planted in a copy of the repository; only tests of `make test` run, of the named
files.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

LONGEST_S = 600  # of the tests of one fault
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Fault:
    """A line of the source with `before` replaced by `after`."""

    what: str
    file: str
    before: str
    after: str
    tests: str
    """Files of tests, below tests/, that may notice it."""


FAULTS = [
    Fault("no fsync of the parent folder", "files.py", "            fsync(final.parent)\n", "", "unit/test_files.py"),
    Fault("no fsync of the file", "files.py", "            fsync(temporary)  #", "            #", "unit/test_files.py"),
    Fault("loss scale begins at 2^15", "train/step_guard.py", "= 2.0**16", "= 2.0**15", "distributed/test_step_guard.py"),
    Fault("a value at a bin's edge falls below it", "data/stream/builtin_tokenizers.py", 'edges, values, side="right"', 'edges, values, side="left"', "unit/test_tokens.py"),
    Fault("a cap of repeats counts as zero", "data/stream/level_sampler.py", "max_weight * sizes[is_capped]", "0 * sizes[is_capped]", "unit/test_repeats.py"),
    Fault("each epoch rounds reads up for the same levels", "data/stream/level_sampler.py", "READS_OF_LEVELS, epoch)", "READS_OF_LEVELS, 0)", "unit/test_repeats.py"),
    Fault("gradient norm without the squares of other pipeline stages", "parallel/step.py", "total = squares.sqrt()", "total = total", "distributed/test_conformance.py"),
    Fault("sums count model-parallel peers twice", "parallel/mesh.py", "        peers = self.model_parallel_size\n", "        peers = 0\n", "distributed/test_conformance.py"),
    Fault("warm-up of the average is off by one", "train/optimizer.py", "(1 + step) / (10 + step)", "step / (10 + step)", "distributed/test_loop.py"),
    Fault("first step has a rate of 0", "config/run.py", "(step + 1) / train.warmup_steps", "step / train.warmup_steps", "unit/test_optimizers.py"),
    Fault("wsd's decay is rounded down", "config/run.py", "math.ceil(", "math.floor(", "unit/test_optimizers.py"),
    Fault("val and test overlap", "data/split.py", "uniform < test_frac + val_frac", "uniform < val_frac", "unit/test_shards.py"),
    Fault("equal steps are off by one cell", "data/stream/order.py", "self.n_lanes + lane + 1", "self.n_lanes + lane", "unit/test_stream.py"),
    Fault("shown and hidden counts are swapped", "models/objectives/shared/views.py", "shown * ~is_hidden", "shown * is_hidden", "unit/test_views.py"),
    Fault("variance of a paired difference without the repetitions", "evaluate/intervals.py", "units_variance + repetitions_variance", "units_variance", "unit/test_paired.py"),
    Fault("a validation equal to the best is the best", "train/validation.py", "sign * value >= sign * self.best_value", "sign * value > sign * self.best_value", "unit/test_validation.py"),
    Fault("an improvement of exactly min_delta resets the patience", "train/validation.py", "value) > train.early", "value) >= train.early", "unit/test_validation.py"),
    Fault("adapters are scaled by rank / alpha", "finetune/lora.py", "self.config.alpha / self.config.rank", "self.config.rank / self.config.alpha", "unit/test_methods_of_families.py distributed/test_methods.py"),
    Fault("SHA-256 of a checkpoint's file is not compared", "runs/folder.py", "(contents or name in SMALL) and", "False and", "unit/test_train_folder.py distributed/test_checkpoints.py"),
    Fault("a class needs one cell more", "evaluate/tasks/classification/few_shot.py", "n >= shots + MIN_TESTED", "n > shots + MIN_TESTED", "unit/test_classifying_tasks.py"),
    Fault("the adversary's gradient is not reversed", "models/blocks.py", "-ctx.scale * grad", "ctx.scale * grad", "unit/test_cell_decoding.py"),
    Fault("covariance of VICReg divided by n", "models/objectives/shared/vicreg.py", "(n_cells - 1).clamp(min=1)", "divisor", "unit/test_views.py"),
    Fault("mean state divides by all tokens of a cell with covariates", "models/cell_encoder.py", "lengths = segment_sum(", "_ = segment_sum(", "unit/test_cell_encoder.py"),
    Fault("a claim is never silent for too long", "runs/lock.py", "(modified_ns == first_ns and silent_s >= LEASE_S)", "False", "unit/test_jobs.py"),
    Fault("another job's claim is not noticed", "runs/lock.py", "if newest is not None and newest != self.file:", "if False:", "unit/test_jobs.py"),
    Fault("last node of a range is lost", "launch/queue.py", "int(high or low) + 1", "int(high or low)", "unit/test_node.py"),
    Fault("a causal cell sees what follows", "models/blocks.py", "is_causal=causal", "is_causal=False", "unit/test_attention.py"),
    Fault("the plan counts one moment of AdamW", "planner/memory.py", "model.optimizer_states * FLOAT32_BYTES * trained_shard", "1 * FLOAT32_BYTES * trained_shard", "unit/test_memory.py"),
    Fault("the mask may take no gene of a cell", "models/objectives/shared/masking.py", "| (draws == lowest[token_cells])", "", "unit/test_masked_model.py"),
    Fault("genes in fewer than min_cells cells are kept", "data/prepare/preprocess.py", "cells.detected >= max(options.min_cells, 1)", "cells.detected >= 1", "unit/test_preprocess.py"),
    Fault("damaged sums of a killed process are used", "data/saved_work.py", 'if _checksum(arrays) != about["checksum"]:', "if not arrays:", "unit/test_embed_resumed.py"),
]  # fmt: skip


def is_noticed(fault: Fault) -> bool:
    """Plant the fault in a copy of the repository and run its tests; True if one fails."""
    with tempfile.TemporaryDirectory(prefix="cellmill-fault-") as folder:
        copy = Path(folder) / "cellmill"
        shutil.copytree(
            ROOT,
            copy,
            ignore=shutil.ignore_patterns(".git", ".venv", "results", ".*_cache", ".matrix"),
        )
        file = copy / "src" / "cellmill" / fault.file
        source = file.read_text(encoding="utf-8")
        assert source.count(fault.before) == 1, f"{fault.file} has no {fault.before!r}"
        file.write_text(source.replace(fault.before, fault.after), encoding="utf-8")
        tests = [f"tests/{name}" for name in fault.tests.split()]
        try:
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "pytest",
                    "-q",
                    "-x",
                    "-m",
                    "not full",
                    "-p",
                    "no:cacheprovider",
                    *tests,
                ],
                cwd=copy,
                env=os.environ | {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LONGEST_S,
            )
        except subprocess.TimeoutExpired:  # a loop without end
            return True
    assert done.returncode in (0, 1), done.stdout
    return done.returncode == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("numbers", nargs="*", type=int, help="of faults, from 1")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    survived = 0
    for number, fault in enumerate(FAULTS, 1):
        if given.numbers and number not in given.numbers:
            continue
        row = f"| {number} | {fault.what} | `{fault.file}` |"
        if not given.list:
            noticed = is_noticed(fault)
            survived += not noticed
            row += " noticed |" if noticed else " **survived** |"
        print(row, flush=True)
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
