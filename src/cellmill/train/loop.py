"""The training loop: steps, validation, checkpoints and stopping, the same in every layout.

A step is `global_batch` cells. Each rank takes its share in micro-batches; the loss is a sum
divided by the global number of targets, so unequal shares change nothing. Parts of a weighted loss
are each divided by their own number of targets. The report of a step (loss, norm, stop requests) is
read one step late, when its copy to the host is done: the loop never waits for a GPU. A stop signal
only sets a flag; all ranks save together at the end of a common step.
"""

import importlib
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from cellmill.config.options import TrainOptions
from cellmill.config.run import learning_rate
from cellmill.data.stream.batch import Batch
from cellmill.data.stream.cell_stream import CellStream
from cellmill.errors import UserError
from cellmill.files import write_json
from cellmill.finetune.method import group_rates, load_method
from cellmill.launch.signals import StopFlag
from cellmill.models.batch import copy_to_device, pad_batch, to_tensors
from cellmill.models.build import ModelSpec, build
from cellmill.models.family import Model
from cellmill.models.objective import HIDDEN_GENES_STEP, VALIDATION_STEP
from cellmill.parallel.materialize import plain_name
from cellmill.parallel.mesh import Mesh, PipelineStages, gather_json
from cellmill.parallel.replay import Replay
from cellmill.parallel.step import ParallelModel, StepModel, clip_grad_norm
from cellmill.planner.devices import find_peak_flops_per_s
from cellmill.planner.measure.load import Load
from cellmill.planner.measure.size import Flops
from cellmill.runs.folder import TrainFolder, is_training_step, status
from cellmill.track.tracker import Tracker
from cellmill.train.batch_rows import with_shares
from cellmill.train.checkpoint import Checkpoints
from cellmill.train.hang_watch import HangWatch
from cellmill.train.optimizer import WeightAverage, build_optimizer
from cellmill.train.step_guard import AsyncScalars, LossScale, name_cells, step_if, to_device
from cellmill.train.step_report import LossParts, StepReport, StepScalars
from cellmill.train.telemetry import Meter, StepProfile, TimeLeft, local_readings, readings_line
from cellmill.train.validation import VAL_LOSS, Monitor, Progress, cut_curve, read_progress, warn


class Trainer:
    """A training and its parts. Collective: every rank makes one, and calls `resume` and `run`.

    `model` is what this rank holds, after `materialize`; `spec` and `flops` are of the whole model.
    `streams` are the stream of training cells, of validation cells, and the obs column of the
    latter's batches. `saved_with` is in every checkpoint.
    """

    def __init__(
        self,
        options: TrainOptions,
        folder: TrainFolder,
        mesh: Mesh,
        model: Model | PipelineStages,
        spec: ModelSpec,
        flops: Flops,
        streams: tuple[CellStream, CellStream | None, str | None],
        saved_with: dict[str, Any],
        stop: StopFlag,
        watch: HangWatch,
    ) -> None:
        train = options.train
        device = mesh.device
        method = load_method(options.finetune)
        self.train = train
        self.folder = folder
        self.mesh = mesh
        self.device = device
        self.model = model
        self.flops = flops
        self.stop = stop
        self.watch = watch
        self.train_stream, self.val_stream, self.batch_column = streams
        self.steps = train.total_steps(self.train_stream.steps_per_epoch)
        self.saved_with = saved_with | {"steps": self.steps, "world_size": dist.get_world_size()}
        if spec.levels:
            self.saved_with["levels"] = spec.levels
        self.rates = group_rates(method, build(spec, method.transform))
        step_model: type[StepModel] = ParallelModel
        if isinstance(model, PipelineStages):
            # torch's pipelining imports its compiler: a fifth of the CPU time of a start
            step_model = importlib.import_module("cellmill.parallel.pipeline").PipelineModel
        self.parallel_model = step_model(model, options.parallel, mesh)
        self._with_shares = partial(
            with_shares, model, self.parallel_model, mesh, train.global_batch
        )
        self.optimizer = build_optimizer(model, train, options.parallel.cpu_offload, method.group)
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.first_steps = {name: method.first_step(plain_name(name)) for name in trained}
        self.average = None if train.ema_decay is None else WeightAverage(model, train.ema_decay)
        keep = train.keep_checkpoints
        self.checkpoints = Checkpoints(folder, keep, self.average, train.keep_steps)
        watch.saving = self.checkpoints.is_writing
        peak = None
        if device.type == "cuda":
            peak = find_peak_flops_per_s(torch.cuda.get_device_name(device), options.parallel)
        self.meter = Meter(peak, dist.get_world_size())
        profile_folder = folder.path / "profile"
        self.profile = StepProfile(profile_folder, train.profile_steps, dist.get_rank(), device)
        self.loss_parts = LossParts(model.objective, device)
        finish = self.checkpoints.wait
        self.replay = Replay(model, train.replay_every_steps, device, finish)
        self.progress = Progress()
        self.trackers: list[Tracker] = []
        self._stops = False  # a signal to a rank is known to all
        self._due = False  # a checkpoint, by train.checkpoint_every_min

    def resume(self) -> None:
        """Load the newest undamaged checkpoint, if any, and set stream and metrics back to it."""
        checkpoint, damaged = self.checkpoints.newest_whole()
        is_first_rank = dist.get_rank() == 0
        if is_first_rank:
            for line in damaged:
                warn(f"{line}; going on from the one before it")
            if damaged and checkpoint is not None:
                self.folder.set_damaged_aside(checkpoint.step)
        if checkpoint is not None:
            self.checkpoints.load(checkpoint, self.model, self.optimizer)
            n_val_cells = 0 if self.val_stream is None else self.val_stream.n_cells
            self.progress = read_progress(checkpoint.state(), self.train, n_val_cells)
        step = self.progress.step
        epoch, step_in_epoch = divmod(step, self.train_stream.steps_per_epoch)
        state = self.train_stream.state_dict()
        self.train_stream.load_state_dict(state | {"epoch": epoch, "step": step_in_epoch})
        if is_first_rank:
            cut_curve(self.folder.metrics, self.progress)
            print(f"going on from step {step}" if step else "starting at step 0", flush=True)
        dist.barrier()

    def write_state(self, name: str) -> None:
        """Write state.json on rank 0, and status.json when the run is done."""
        if dist.get_rank() == 0:
            value = status(name, {"progress": vars(self.progress), **self.saved_with})
            write_json(self.folder.path / "state.json", value)
            if name == "done":
                write_json(self.folder.path / "status.json", value)

    def close(self) -> None:
        for part in (self.profile, self.train_stream, self.val_stream):
            if part is not None:
                part.close()

    def run(self) -> bool:
        """Train to the last step, or until patience is over; False when a signal stopped it.

        Both save the state.
        """
        self._clock = time.perf_counter()
        self.meter.read(self._clock)  # the first line is about steps, not about the start
        self._saved_at = self._clock
        self._left = TimeLeft(self.steps, self.progress.step, self._clock)
        if self._validation_is_due():
            # saved again: its checkpoint came before this validation
            self.checkpoints.saved_step = None
            self._due = True
            self._pause(validate=True)
        begun = self.progress.step
        batches = iter(self.train_stream)
        pending: StepReport | None = None
        while not (self._stops or self._is_over()):
            with self.profile.record(self.progress.step + 1):
                report = self._step(batches)
            self.checkpoints.raise_if_failed()
            if pending is not None:
                self._read(pending)
            self.watch.warm = self.progress.step > begun + 1
            pending = report
            step = self.progress.step
            is_boundary = step % self.train.val_every_steps == 0 or self._is_saved(step)
            if self._stops or self._due or is_boundary or step == self.steps:
                self._read(pending)
                pending = None
                self._pause(validate=not self._stops or step == self.steps)
        self.checkpoints.wait()
        return self._is_over()

    def _is_over(self) -> bool:
        return self.progress.step >= self.steps or self.progress.patience_is_over(self.train)

    def _step(self, batches: Iterator[list[Batch]]) -> StepReport:
        began = time.perf_counter()
        with self._part("data", "data loading"):
            arrays = next(batches)
            micro_batches = [to_tensors(batch) for batch in arrays]
        waited_s = time.perf_counter() - began
        step = self.progress.step
        lr = learning_rate(self.train, step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        with self._part("prepare", "the sum of targets"):
            prepared = self._prepare(micro_batches, step)
            targets = self.mesh.sum(torch.stack([p.n_targets for p in prepared]).sum(0))
            # without a target, such as a labelled cell, the loss of a step is 0 and not 0 / 0
            divisors = targets.clamp(min=1)
        with self._part("forward_backward", "the gradient reduction"):
            scale = self._scale
            prepared = self.replay.run(step + 1, partial(self._with_shares, prepared))
            factor = self.loss_parts.weights * (1.0 if scale is None else scale.value)
            compute = partial(self.parallel_model.forward_backward, prepared, divisors, factor)
            losses = self.replay.run(step + 1, compute)
            loss = (losses * self.loss_parts.weights).sum()
            if scale is not None:
                scale.unscale(self.model)
            self._drop_early_gradients(step)
        with self._part("clip", "the gradient norm"):
            norm = clip_grad_norm(self.model, self.train.clip_norm, self.mesh.pp)
        with self._part("report", "the sum of losses"):
            lengths = list(chain.from_iterable(batch.lengths for batch in micro_batches))
            summed = self.mesh.sum(self._local_scalars(loss, norm, losses, lengths, began))
        with self._part("optimizer", "the optimizer"):
            is_applied = summed[0].isfinite() & (summed[1] == 0)
            step_if(is_applied, self.optimizer, self.train.optimizer.fused)
            if self.average is not None:
                self.average.update(step)
            next_scale = torch.zeros_like(loss) if scale is None else scale.adapt(is_applied)
            scalars = AsyncScalars(StepScalars.pack(norm, next_scale, summed, targets))
            self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        cells = [batch.cell_ids for batch in arrays]
        return StepReport(step + 1, scalars, lr, waited_s, time.perf_counter(), loss, cells)

    def _drop_early_gradients(self, step: int) -> None:
        """Drop gradients of parameters that train from a later step on.

        They are not frozen: ddp and FSDP2 record at the start what requires a gradient.
        """
        if step < max(self.first_steps.values(), default=0):
            for name, parameter in self.model.named_parameters():
                if self.first_steps.get(name, 0) > step:
                    parameter.grad = None

    def _local_scalars(
        self, loss: Tensor, norm: Tensor, losses: Tensor, lengths: list[int], began: float
    ) -> Tensor:
        """Return this rank's part of the numbers in `StepScalars` from the loss to the readings."""
        interval_min = self.train.checkpoint_every_min
        is_due = False
        if interval_min is not None and self.mesh.dp_rank == 0:
            is_due = began - self._saved_at > 60 * interval_min
        pairs = sum(length * length for length in lengths)
        flops = self.flops.count(Load(sum(lengths), pairs, len(lengths)))
        is_stopped = self.stop.received is not None
        counts = to_device([is_stopped, is_due, len(lengths), sum(lengths), flops], self.device)
        is_logged = self._is_logged(self.progress.step + 1)
        readings = local_readings(self.mesh) if is_logged else np.empty(0)
        checked = torch.stack([loss, (~norm.isfinite()).to(loss)])
        part_losses = losses.reshape(-1)[: len(self.loss_parts.names)]
        return torch.cat([checked, counts, part_losses, to_device(readings, self.device)])

    @cached_property
    def _scale(self) -> LossScale | None:
        # made at the first step, after the checkpoint's progress was loaded
        if self.parallel_model.precision != "16-mixed":
            return None
        return LossScale(self.device, self.progress.loss_scale, self.progress.good_steps)

    def _part(self, name: str, waits_for: str) -> AbstractContextManager[Any]:
        """Name a part of the step in profiles, at no cost without one, and to the hang watch."""
        self.watch.reach(f"{waits_for} of step {self.progress.step + 1}")
        return nullcontext() if self.profile.running is None else record_function(name)

    def _prepare(self, batches: list[Batch], step: int) -> list[Any]:
        """Draw views, pad them and draw masks on the CPU, and copy them to the device.

        Counting targets on the CPU never waits for the device.
        """
        keys = {"seed": self.train.seed, "step": step}
        views = [self.model.view(batch, **keys) for batch in batches]
        lengths = self.parallel_model.padded_lengths([len(view.token_ids) for view in views])
        prepared = []
        for view, length in zip(views, lengths):
            masked = self.model.prepare(pad_batch(view, length), **keys)
            prepared.append(copy_to_device(masked, self.device))
        if step < 0 and self.model.objective.validates_coupled_loss:
            return self._with_shares(prepared)
        return prepared

    def _is_logged(self, step: int) -> bool:
        return step % self.train.log_every_steps == 0 or step in (1, self.steps)

    def _is_saved(self, step: int) -> bool:
        return step % self.train.checkpoint_every_steps == 0 or step in self.train.keep_steps

    def _read(self, report: StepReport) -> None:
        """Check and log a step, and note whether to stop, and whether a checkpoint is due."""
        step = report.step
        progress = self.progress
        scalars = StepScalars.unpack(report.scalars.read(), len(self.loss_parts.names))
        scaled = {} if self._scale is None else {"loss_scale": scalars.loss_scale}
        cells = round(scalars.cells)
        progress.cells += cells
        self.meter.add(cells, round(scalars.tokens), scalars.flops, report.waited_s)
        self._stops |= scalars.stops > 0
        self._due |= scalars.checkpoints_due > 0
        if scalars.bad_norms or not math.isfinite(scalars.loss):
            self._count_skipped(report, scalars.loss, scalars.norm, scaled)
            return
        progress.train_loss = scalars.loss
        progress.skipped_in_a_row = 0
        if self._is_logged(step):
            line = {"step": step, "loss": scalars.loss, "lr": report.lr, "grad_norm": scalars.norm}
            for label, (scale, first_step) in self.rates.items():  # 0 for what does not train yet
                line[f"lr_{label}"] = report.lr * scale * (step > first_step)
            line |= self.loss_parts.name_losses("loss", scalars.part_losses)
            line |= self.loss_parts.labelled_fracs(scalars.targets, scalars.cells)
            line |= {"skipped_steps": progress.skipped_steps} | scaled
            line |= self.meter.read(report.ended) | self._left.line(step, report.ended)
            world = dist.get_world_size()
            self._log(line | readings_line(self.device.type, scalars.readings, world))

    def _count_skipped(
        self, report: StepReport, loss: float, norm: float, scaled: dict[str, float]
    ) -> None:
        """Count a step that was not applied. Raise UserError after train.max_bad_steps in a row."""
        progress = self.progress
        what = f"loss {loss:g} and gradient norm {norm:g}"
        progress.skipped_steps += 1
        line = {"step": report.step, "skipped": what, "skipped_steps": progress.skipped_steps}
        self._log(line | scaled)
        if math.isfinite(loss) and scaled.get("loss_scale", 0) >= 1:
            # float16 gradients overflowed: the scale is being found, nothing is wrong with the run
            return
        progress.skipped_in_a_row += 1
        if progress.skipped_in_a_row < self.train.max_bad_steps:
            return
        cells = np.concatenate(report.cells).tolist()
        is_finite = math.isfinite(report.local_loss.item())
        suspects = name_cells(self.mesh, is_finite, cells, self.train_stream.name_cells)
        raise UserError(
            f"{what} at step {report.step}, the last of {progress.skipped_in_a_row} bad steps in a row "
            f"(train.max_bad_steps {self.train.max_bad_steps}): lower train.lr ({self.train.lr:g}) or raise "
            f"train.warmup_steps; earlier checkpoints are intact; {suspects}"
        )

    def _pause(self, validate: bool) -> None:
        """Validate and save between two steps, if due."""
        step = self.progress.step
        now = time.perf_counter()
        self.progress.wall_s += now - self._clock
        self._clock = now
        save = self._due or self._is_saved(step)
        if validate and self._validation_is_due():
            save |= self._validate(self.val_stream) or self.progress.patience_is_over(self.train)
        if save or self._stops or step == self.steps:
            self.watch.reach(f"the checkpoint of step {step}")
            if self._scale is not None:
                self.progress.loss_scale, self.progress.good_steps = self._scale.read()
            state = {"progress": asdict(self.progress), **self.saved_with}
            self.checkpoints.save(self.model, self.optimizer, step, state)
            self._saved_at = time.perf_counter()
            self._due = False
        # validation and checkpoint copies do not count as training
        self.meter.read(time.perf_counter())
        self._left.pause(time.perf_counter() - self._clock)

    def _validation_is_due(self) -> bool:
        # a validation that a stop skipped is done on resume: the curve of an uninterrupted run
        step = self.progress.step
        at_boundary = step > 0 and (step == self.steps or step % self.train.val_every_steps == 0)
        return self.val_stream is not None and at_boundary and self.progress.val_step != step

    @torch.no_grad()
    def _validate(self, stream: CellStream | None) -> bool:
        """Log the mean loss over validation cells, and return whether it is the best.

        The masks are the same each time. A stop signal before the last step ends it: a resume
        repeats it.
        """
        assert stream is not None
        monitor = Monitor(self.model, stream.levels, self.batch_column, self.train.best_metric)
        totals: Any = 0  # this rank's losses and targets, (2,) or (2, parts)
        self.parallel_model.eval()
        with nullcontext() if self.average is None else self.average.in_model():
            for micro_batches in stream:
                self.watch.reach(f"the validation after step {self.progress.step}")
                signals = self.mesh.sum(to_device([self.stop.received is not None], self.device))
                if signals.item() and self.progress.step < self.steps:
                    self._stops = True
                    break
                batches = [to_tensors(batch) for batch in micro_batches]
                prepared = self._prepare(batches, VALIDATION_STEP)
                with monitor.watching(batches):
                    loss_sum = self.parallel_model.loss(prepared)
                if monitor.hiding:
                    with monitor.watching_hidden_genes():
                        self.parallel_model.loss(self._prepare(batches, HIDDEN_GENES_STEP))
                n_targets = torch.stack([p.n_targets for p in prepared]).sum(0)
                totals = totals + torch.stack([loss_sum, n_targets.double()])
        self.parallel_model.train()
        if self._stops and self.progress.step < self.steps:
            return False
        loss_sum, targets = self.mesh.sum(totals)
        losses = loss_sum / self.loss_parts.divisors(targets)
        loss = self.loss_parts.validation_loss(losses, targets)
        self.progress.val_step = self.progress.step
        if not math.isfinite(loss):  # may be only an overflow of float16: training continues
            self.progress.val_loss = None
            self._log({"step": self.progress.step, "skipped": f"validation loss {loss:g}"})
            return False
        self.progress.val_loss = loss
        part_losses = self.loss_parts.name_losses("val_loss", losses.reshape(-1).tolist())
        line = {VAL_LOSS: loss} | part_losses | monitor.line(self.mesh)
        self._log({"step": self.progress.step} | line)
        return self._is_best(line)

    def _is_best(self, line: dict[str, float]) -> bool:
        """Return whether a validation is the best, and print if the run ends by it. Collective."""
        train = self.train
        metric = train.best_metric
        progress = self.progress
        is_first_rank = dist.get_rank() == 0
        value = line.get(metric)
        if metric != VAL_LOSS:  # eigenvalues differ between ranks: all take those of rank 0
            value = gather_json(value, self.device)[0]
        if value is None or not math.isfinite(value):
            if is_first_rank:
                warn(f"step {progress.step}: the validation has no {metric} (train.best_metric)")
            return False
        is_best = progress.judge(value, train)
        if is_first_rank and progress.patience_is_over(train):
            print(progress.end_line(metric), flush=True)
        return is_best

    def _log(self, line: dict[str, Any]) -> None:
        self.progress.logged_steps += is_training_step(line)
        scalars = {name: value for name, value in line.items() if name != "step"}
        for tracker in self.trackers:
            tracker.log(line["step"], scalars)
