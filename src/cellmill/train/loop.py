"""The training loop: one optimizer step, validation, checkpoints, and stopping, the same in every layout.

A step is `global_batch` cells. Each rank takes its share in micro-batches; the loss of all of them is a sum divided
by the global count of targets, so unequal shares change nothing. What a step reports (loss, norm, a wish to stop) is
read one step late: by then it is there, and a GPU is never waited for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from cellmill.config.family import ModelSize
from cellmill.config.run import Train
from cellmill.data.stream import Stream
from cellmill.data.tokens import Batch
from cellmill.errors import UserError
from cellmill.models.batch import TensorBatch, on_device, padded, to_tensors
from cellmill.models.family import Model
from cellmill.parallel.clip import clip_grad_norm
from cellmill.parallel.mesh import Mesh
from cellmill.parallel.pipeline import Pipeline
from cellmill.parallel.stages import Stages
from cellmill.parallel.wrap import Replica
from cellmill.track.tracker import Tracker
from cellmill.train.checkpoint import Checkpoints
from cellmill.train.meter import Meter
from cellmill.train.occupancy import memory_bytes, memory_line
from cellmill.train.schedule import learning_rate
from cellmill.train.stop import StopFlag

VALIDATION = -1  # in the place of the step in the masks' key: the same masks at each validation, none of training


@dataclass
class Progress:
    """How far a run is; saved in every checkpoint."""

    step: int = 0
    cells: int = 0
    wall_s: float = 0.0
    train_loss: float | None = None
    val_loss: float | None = None
    best_val_loss: float | None = None
    best_step: int | None = None
    val_step: int | None = None


@dataclass
class Report:
    """What all ranks know of a step, still on the device.

    `values` holds [loss, processes that want to stop, checkpoint due, cells, tokens, FLOPs], summed over processes, and
    where it is logged the memory of each.
    """

    step: int
    values: torch.Tensor
    norm: torch.Tensor
    lr: float
    waited_s: float
    ended: float
    """When its last call returned, so that rates do not depend on when it is read."""


@dataclass
class Trainer:
    """Everything a training needs, and `run`. Collective: every rank makes one and calls it."""

    model: Model | Stages
    replica: Replica | Pipeline
    optimizer: torch.optim.Optimizer
    mesh: Mesh
    device: torch.device
    train: Train
    steps: int
    size: ModelSize
    train_stream: Stream
    val_stream: Stream | None
    checkpoints: Checkpoints
    trackers: list[Tracker]
    meter: Meter
    stop: StopFlag
    progress: Progress
    saved_with: dict[str, Any]
    """Identity and fingerprint, saved in every checkpoint."""

    def run(self) -> bool:
        """Trains to the last step. True when done, False when stopped by a signal; either way the state is saved."""
        self._clock = self._saved_at = time.perf_counter()
        if self._validation_is_owed():
            self._pause(save=False, validate=True)
        batches = iter(self.train_stream)
        pending: Report | None = None
        while self.progress.step < self.steps:
            report = self._step(batches)
            self.checkpoints.raise_if_failed()
            stop = due = False
            if pending is not None:
                stop, due = self._read(pending)
            pending = report
            step = self.progress.step
            boundary = step % self.train.val_every_steps == 0 or step % self.train.checkpoint_every_steps == 0
            if stop or due or boundary or step == self.steps:
                self._read(pending)
                pending = None
                self._pause(due or stop, validate=not stop or step == self.steps)
            if stop and step < self.steps:
                self.checkpoints.wait()
                return False
        self.checkpoints.wait()
        return True

    def _step(self, batches: Iterator[list[Batch]]) -> Report:
        """One optimizer step."""
        began = time.perf_counter()
        micro_batches = [to_tensors(batch) for batch in next(batches)]
        waited_s = time.perf_counter() - began
        step, lr = self.progress.step, learning_rate(self.train, self.progress.step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        prepared = self._prepare(micro_batches, step)
        targets = self.mesh.sum(torch.stack([p.n_targets for p in prepared]).sum())
        loss = self.replica.forward_backward(prepared, targets)
        norm = clip_grad_norm(self.model, self.train.clip_norm, self.mesh.pp)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        own = torch.tensor(
            [self.stop.received is not None, self._due(), *self._work(micro_batches)], dtype=torch.float64
        )
        own = torch.cat([own, self._memory(step + 1)])
        values = self.mesh.sum(torch.cat([loss[None], own.to(self.device)]))
        return Report(step + 1, values, norm.detach(), lr, waited_s, time.perf_counter())

    def _prepare(self, batches: list[TensorBatch], step: int) -> list[Any]:
        """Masks drawn on the CPU, where counting them makes nobody wait, then moved to the device."""
        lengths = self.replica.padded_lengths([len(batch.genes) for batch in batches])
        made = [padded(batch, length) for batch, length in zip(batches, lengths)]
        draw = self.model.prepare
        return [on_device(draw(batch, seed=self.train.seed, step=step), self.device) for batch in made]

    def _work(self, batches: list[TensorBatch]) -> tuple[int, int, float]:
        """Cells, tokens and FLOPs of this process's share of a step."""
        lengths = [length for batch in batches for length in batch.lengths]
        pairs = sum(length * length for length in lengths)
        flops = self.size.flops_per_token * sum(lengths) + self.size.flops_per_token_pair * pairs
        return len(lengths), sum(lengths), flops

    def _logged(self, step: int) -> bool:
        return step % self.train.log_every_steps == 0 or step in (1, self.steps)

    def _memory(self, step: int) -> torch.Tensor:
        """(2 * processes,) float64, to be summed: this process's peak and current bytes in its place. Empty where the
        step is not logged."""
        of_ranks = torch.zeros(self.meter.world if self._logged(step) else 0, 2, dtype=torch.float64)
        if len(of_ranks):
            # a sum counts processes that share their cells once
            of_ranks[dist.get_rank()] = self.mesh.sharers * torch.tensor(memory_bytes(self.device)).double()
        return of_ranks.flatten()

    def _due(self) -> bool:
        every = self.train.checkpoint_every_min
        return every is not None and self.mesh.dp_rank == 0 and time.perf_counter() - self._saved_at > 60 * every

    def _read(self, report: Report) -> tuple[bool, bool]:
        """Checks and logs a step; returns whether to stop and whether a checkpoint is due."""
        loss, stop, due, cells, tokens, flops, *memory = report.values.tolist()
        norm = float(report.norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise UserError(
                f"loss {loss:g} and gradient norm {norm:g} at step {report.step}: lower train.lr ({self.train.lr:g}) "
                "or raise train.warmup_steps; the checkpoints before it are untouched"
            )
        self.progress.train_loss = loss
        self.progress.cells += round(cells)
        self.meter.cells += round(cells)
        self.meter.tokens += round(tokens)
        self.meter.flops += flops
        self.meter.waited_s += report.waited_s
        if self._logged(report.step):
            line = {"step": report.step, "loss": loss, "lr": report.lr, "grad_norm": norm}
            of_ranks = [memory[at : at + 2] for at in range(0, len(memory), 2)]
            self._log(line | self.meter.read(report.ended) | memory_line(self.device.type, of_ranks))
        return stop > 0, due > 0

    def _pause(self, save: bool, validate: bool) -> None:
        """Between two steps: validates and saves where it is time to."""
        step = self.progress.step
        now = time.perf_counter()
        self.progress.wall_s += now - self._clock
        self._clock = now
        if validate and self._validation_is_owed():
            save |= self._validate(self.val_stream)
        if save or step == self.steps or step % self.train.checkpoint_every_steps == 0:
            state = {"progress": asdict(self.progress), **self.saved_with}
            self.checkpoints.save(self.model, self.optimizer, step, state)
            self._saved_at = time.perf_counter()
        self.meter.read(time.perf_counter())  # neither validation nor the copy of a checkpoint counts as training

    def _validation_is_owed(self) -> bool:
        # one that a stop left out is made up for on resume, so that the curve is that of a run left alone
        step = self.progress.step
        at_boundary = step > 0 and (step == self.steps or step % self.train.val_every_steps == 0)
        return self.val_stream is not None and at_boundary and self.progress.val_step != step

    @torch.no_grad()
    def _validate(self, stream: Stream | None) -> bool:
        """Mean loss over validation cells, with the same masks each time. True when it is the best so far."""
        assert stream is not None
        self.replica.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        for micro_batches in stream:
            prepared = self._prepare([to_tensors(batch) for batch in micro_batches], VALIDATION)
            totals[0] += self.replica.loss(prepared)
            totals[1] += torch.stack([p.n_targets for p in prepared]).sum()
        self.replica.train()
        loss_sum, targets = self.mesh.sum(totals).tolist()
        self.progress.val_loss, self.progress.val_step = loss_sum / targets, self.progress.step
        self._log({"step": self.progress.step, "val_loss": self.progress.val_loss})
        best = self.progress.best_val_loss
        if best is not None and self.progress.val_loss >= best:
            return False
        self.progress.best_val_loss, self.progress.best_step = self.progress.val_loss, self.progress.step
        return True

    def _log(self, line: dict[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.log(line)
