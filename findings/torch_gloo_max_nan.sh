#!/usr/bin/env bash
# torch 2.13.0: `all_reduce` with MAX or MIN over gloo loses a NaN, depending on the rank that has it. SUM keeps it.
#
# Programs reduce a loss, a gradient norm or a flag with MAX to ask whether any process has NaN, or to log the worst one. With gloo the
# result is the other process's number if the NaN is on rank 1, and NaN if it is on rank 0: the check finds the fault of one rank only.
# `torch.max` of the gathered values is NaN in both cases.
#
# Seen, NaN and 1 on two processes: NaN on rank 0: MAX nan, MIN nan, SUM nan; NaN on rank 1: MAX 1, MIN 1, SUM nan; torch.max nan.
# Source: our own run, CPU. Guess before it: MAX of NaN and a number is NaN on every rank, as in torch.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat > "$folder/script.py" <<'PYTHON'
import math
import sys

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn


def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for carrier in (0, 1):
        value = torch.tensor([math.nan if rank == carrier else 1.0])
        found = {}
        for name in ("MAX", "MIN", "SUM"):
            reduced = value.clone()
            dist.all_reduce(reduced, getattr(dist.ReduceOp, name))
            found[name] = reduced.item()
        values = [torch.zeros(1), torch.zeros(1)]
        dist.all_gather(values, value)
        found["torch.max"] = torch.cat(values).max().item()
        if rank == 0:
            print(f"NaN on rank {carrier}: {found}", flush=True)
        assert math.isnan(found["SUM"]) and math.isnan(found["torch.max"])
        for name in ("MAX", "MIN"):
            assert math.isnan(found[name]) if carrier == 0 else found[name] == 1
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    spawn(run, (sys.argv[1],), nprocs=2)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/script.py" "$folder"
