#!/usr/bin/env bash
# torch 2.13.0: a checkpoint of `torch.distributed.checkpoint` has one rank's values for all ranks, and may mix those of several.
#
# Each rank saves the state of its data loader: a position and a generator. What is no DTensor is taken for a copy
# that all ranks share. Numbers are rank 0's. A tensor is that of whichever rank has least to write so far, so one object comes back
# with rank 0's position and rank 1's generator, a state that no rank was in. Ranks whose values differ are not refused, and
# nothing warns. Then all ranks read and draw alike. Keys with the rank in them keep each rank's own.
#
# Seen, two ranks at the positions 100 and 101, with generators of the seeds 100 and 101: both come back at position 100 with the
# generator of seed 101. Under keys rank0 and rank1: 100 with 100, 101 with 101.
# Source: our own run, gloo. Guess before it: each rank gets its own values back, or values that differ are refused.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat > "$folder/script.py" <<'PYTHON'
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp


class Loader:
    """A position, and a generator seeded by it."""

    def __init__(self, position):
        self.position = position
        self.generator = torch.Generator().manual_seed(position)

    def state_dict(self):
        return {"position": self.position, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.position = state["position"]
        self.generator.set_state(state["generator"])


def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    lines = []
    for key in ("loader", f"rank{rank}"):
        dcp.save({key: Loader(100 + rank)}, checkpoint_id=f"{folder}/checkpoint-{len(lines)}")
        loader = Loader(0)
        dcp.load({key: loader}, checkpoint_id=f"{folder}/checkpoint-{len(lines)}")
        lines.append(f"{loader.position} {loader.generator.initial_seed()}")
    Path(folder, f"rank{rank}").write_text("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = sys.argv[1]
    mp.spawn(work, (folder,), 2)
    one_key, own_key = zip(*(Path(folder, f"rank{rank}").read_text().splitlines() for rank in range(2)))
    print("torch", torch.__version__)
    print("position and seed of ranks 0 and 1, one key:", *one_key, sep=" | ")
    print("a key of each rank:", *own_key, sep=" | ")
    assert one_key == ("100 101", "100 101")
    assert own_key == ("100 100", "101 101")
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/script.py" "$folder" 2> "$folder/log" || { cat "$folder/log"; exit 1; }
