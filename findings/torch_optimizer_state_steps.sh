#!/usr/bin/env bash
# torch 2.13.0: get_optimizer_state_dict of an optimizer without a step makes it count one; AdamW's first update is then .74 as large.
#
# A checkpoint before the first step asks for a state that does not exist yet. The function sets gradients and rate to zero and
# calls `optimizer.step()`. Parameters stay as they are, but the optimizer now counts one step, and Adam corrects its
# moments by that count: its first update is no longer rate * sign(g). So a run that saves before its first step has another
# curve than one that does not.
#
# Seen, AdamW at rate 1e-3 without weight decay: step is 1 after asking; the first update of each weight is .00100 without
# asking and .00074 after it; 20 steps later weights differ by up to 6.0e-4.
# Source: our own run. Guess before it: step is set back to 0.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

print("torch", torch.__version__)
weights, updates, counted = {}, {}, {}
for asked in (False, True):
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, weight_decay=0)
    if asked:
        state = get_optimizer_state_dict(layer, optimizer)["state"]
        print("step in the state of a new optimizer:", state["weight"]["step"].item())
    before = layer.weight.detach().clone()
    for step in range(20):
        optimizer.zero_grad()
        (layer(torch.randn(8, 4)) ** 2).mean().backward()
        optimizer.step()
        if step == 0:
            updates[asked] = (layer.weight.detach() - before).abs()
    counted[asked] = optimizer.state[layer.weight]["step"].item()
    weights[asked] = layer.weight.detach()
    print(f"asked {asked}: first update {updates[asked].mean():.5f}, steps counted after 20: {counted[asked]:.0f}")
apart = (weights[True] - weights[False]).abs().max().item()
print(f"largest difference of a weight after 20 steps: {apart:.1e}")
assert counted == {False: 20, True: 21}
assert torch.allclose(updates[False], torch.full((1, 4), 1e-3), rtol=1e-3)
assert torch.allclose(updates[True], torch.full((1, 4), 0.744e-3), rtol=1e-2)
assert apart > 1e-5
PYTHON
