"""Steps that are computed twice, to find a GPU that computes wrongly without an error.

Every `train.replay_every_steps` steps, forward and backward run twice on the same ranks from the
same weights and batches; masks and dropout are keyed by seed, step and cell. Both must agree in
every bit. A wrong gradient reaches all ranks with its reduction, so each rank compares what it
computed before that: the losses of its micro-batches, the outputs of blocks and their gradients,
and its share of the gradients of parameters. Gradients after the reduction are compared last: if
only they differ, the network added them differently.

Instead of copies, the sum of each tensor's bit patterns is kept, as integers on the device, which
is exact in any order. The optimizer gets the second gradients. Both computations use deterministic
algorithms. Hochschild et al. 2021 (Cores that don't count) and Dixit et al. 2021 (Silent data
corruptions at scale) describe such devices.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cellmill.errors import DataError, UserError
from cellmill.launch.rendezvous import node_name
from cellmill.parallel.materialize import plain_name
from cellmill.parallel.mesh import gather_json, to_local
from cellmill.parallel.torch_private import tree_leaves

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_WORKSPACE = ":4096:8"  # value of that variable, 32 MiB on the GPU
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
REDUCED = "after its reduction"  # end of the names of such gradients
FACTOR = 31  # odd: multiplying by it modulo 2^64 loses no difference

Checksums = dict[str, Tensor]  # int64 scalars on the device, by tensor, in the order of computation


class Replay:
    """Comparison of repeated steps. Every rank makes one, and the same calls.

    `finish` completes the checkpoint that is being written, before a difference ends the run.
    """

    def __init__(
        self,
        model: nn.Module,
        every_steps: int | None,
        device: torch.device,
        finish: Callable[[], None],
    ) -> None:
        self.model = model
        self.every_steps = every_steps
        self.device = device
        self.finish = finish
        self._first = 0  # first step of this start

    def run(self, step: int, compute: Callable[[], Any]) -> Any:
        """Return the result of `compute`, a part of step `step` (from 1), run twice if it is due.

        The first step of a start runs once: after it, DistributedDataParallel adds gradients in
        another order. Collective. Raise UserError, the same on all ranks, if the two differ.
        """
        self._first = self._first or step
        if self.every_steps is None or step % self.every_steps or step == self._first:
            return compute()
        with deterministic():
            with checksums(self.model, self.device) as before:
                compute()
            self.model.zero_grad()
            with checksums(self.model, self.device) as after:
                result = compute()
        if after:
            since = max(step - self.every_steps, self._first - 1)
            self._compare(step, since, first_difference(before, after))
        return result

    def _compare(self, step: int, since: int, different: str | None) -> None:
        """Raise UserError if a tensor of any rank is `different`. Collective."""
        place = "CPU"
        if self.device.type == "cuda":
            place = f"GPU {os.environ.get('LOCAL_RANK', '?')}"
        rank_name = f"rank {dist.get_rank()} on {node_name()}"
        reports = gather_json([rank_name, place, different], self.device)
        changed = [report for report in reports if report[2] is not None]
        if not changed:
            return
        with suppress(DataError):
            self.finish()
        what = f"step {step}, computed twice from the same state (train.replay_every_steps)"
        unchecked = f"steps after {since} were not compared, so later checkpoints may be wrong"
        wrong = [report for report in changed if not report[2].endswith(REDUCED)]
        if not wrong:
            raise UserError(
                f"{what}: {changed[0][2]} differs, though no rank's part does: test the network between the nodes; "
                f"{unchecked}"
            )
        first, place, different = wrong[0]
        if len(wrong) > max(1, len(reports) // 2):
            raise UserError(
                f"{what}, differs on {len(wrong)} of {len(reports)} ranks, on {first} in {different}: either a part of "
                f"the model is not deterministic, or these ranks share a fault; {unchecked}"
            )
        others = "".join(f"; {other} differs too" for other, _, _ in wrong[1:])
        raise UserError(
            f"{first}: its {place} failed {what}: {different} differs{others}; {unchecked}"
        )


@contextmanager
def checksums(model: nn.Module, device: torch.device) -> Iterator[Checksums]:
    """Collect the checksums of what this rank computes inside the block, and of gradients after it."""
    sums: Checksums = {}
    hooked = set[int]()
    handles: list[Any] = []

    def add(name: str, tensor: Tensor) -> None:
        # gradients may be offloaded to the host
        sums[name] = FACTOR * sums.get(name, 0) + sum_bits(tensor).to(device)

    def enter(path: str, module: nn.Module, inputs: object) -> None:
        # FSDP2 has set the module's gathered parameters by now: leaves of their own
        for name, parameter in module.named_parameters(prefix=path):
            if parameter.requires_grad and id(parameter) not in hooked:
                hooked.add(id(parameter))
                note = partial(add, f"the gradient of {plain_name(name)}")
                handles.append(parameter.register_hook(note))

    def leave(what: str, module: nn.Module, inputs: object, output: object) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                add(what, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(partial(add, f"the gradient of {what}"))

    plan: Any = model.plan
    blocks = plan.blocks
    watched = [("", "the loss", model)]
    for name, block in model.get_submodule(blocks).named_children():
        watched.append((f"{blocks}.{name}", f"the output of {blocks}.{name}", block))
    try:
        for path, what, module in watched:
            handles.append(module.register_forward_pre_hook(partial(enter, path)))
            handles.append(module.register_forward_hook(partial(leave, what)))
        yield sums
    finally:
        for handle in handles:
            handle.remove()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            add(f"the gradient of {plain_name(name)} {REDUCED}", to_local(parameter.grad))


def sum_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bit patterns modulo 2^64, an int64 scalar on its device."""
    patterns = tensor.detach().contiguous().view(INTEGERS[tensor.element_size()])
    return patterns.sum(dtype=torch.int64)


def first_difference(before: Checksums, after: Checksums) -> str | None:
    """Return the name of the first tensor whose checksums differ, or None. Waits for the device."""
    expected = dict(zip(before, torch.stack([*before.values()]).tolist()))
    numbers = dict(zip(after, torch.stack([*after.values()]).tolist()))
    return next((name for name in expected if expected[name] != numbers.get(name)), None)


@contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms inside the block.

    Raise UserError naming an operation that has none.
    """
    # torch.use_deterministic_algorithms would import torch's compiler, seconds
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if WORKSPACE in text:
            raise UserError(
                f"train.replay_every_steps requires {WORKSPACE}={DETERMINISTIC_WORKSPACE}, got "
                f"{os.environ.get(WORKSPACE, 'none')}; unset it in the job's environment"
            ) from None
        if "deterministic implementation" in text:
            operation = text.partition(" does not have")[0]
            raise UserError(
                f"train.replay_every_steps: {operation} has no deterministic implementation; set it to null"
            ) from None
        raise
    finally:
        torch.set_deterministic_debug_mode("default")
