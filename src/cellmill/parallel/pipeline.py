"""Forward and backward of one optimizer step through a pipeline, by torch's schedules.

All ranks of a pipeline read the same cells, so each knows every micro-batch and only activations
are sent. These have one shape within a step, to which its micro-batches are padded. A parameter
tied between the first and the last stage is one parameter: the gradients of both copies are summed
before use.

There is one torch schedule for each number and length of micro-batches, which fix the shapes of its
buffers. A new schedule exchanges shapes between all stages by point-to-point messages before its
first step. The schedules of a run are therefore kept, and lengths come from a small set
(`config.parallel.pipeline_tokens`). Only the schedule in use has receive buffers, which are its
memory; another length allocates its buffers again when it is used. From torch 2.15 on a schedule
keeps no buffers between steps, and this frees nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor

from cellmill.config.parallel import Parallel, pipeline_tokens
from cellmill.errors import ConfigError
from cellmill.parallel.apply import COMPUTE_DTYPE, reshard
from cellmill.parallel.mesh import V_SHAPED, Mesh, PipelineStages, list_stages, tied_parameters
from cellmill.parallel.step import StepModel

SCHEDULES = {"ZBV": "ZBVZeroBubble"}  # torch's names of schedules, where they differ from ours


class PipelineModel(StepModel):
    """Step of a model in pipeline stages, after `parallelize` and `materialize`."""

    def __init__(self, stages: PipelineStages, parallel: Parallel, mesh: Mesh) -> None:
        super().__init__(stages.parts[0], parallel, mesh)
        self.stages = stages
        self.parallel = parallel
        self.group = mesh.pp.get_group()
        is_gloo = dist.get_backend(self.group) == "gloo"
        if parallel.schedule in V_SHAPED and torch.__version__ < "2.12" and is_gloo:
            raise ConfigError(  # a process sends to its own next stage, which gloo refuses
                f"parallel.schedule {parallel.schedule} requires torch 2.12 between CPUs, this is {torch.__version__}; "
                "install a later one, or set schedule to InterleavedZeroBubble"
            )
        self.dtype = torch.float32  # dtype of activations between stages
        if isinstance(stages.parts[0], FSDPModule):
            self.dtype = COMPUTE_DTYPE.get(parallel.precision, torch.float32)
        for number, part in zip(stages.numbers, stages.parts):
            # hooks of FSDP2 run around it, as around the forward that it replaces
            part.forward = _Forward(part, number, self)
        self.width = int(stages.parts[0].width)  # type: ignore[arg-type]
        self.schedules: dict[tuple[int, int], _Schedule] = {}
        """By number of micro-batches, and tokens of each: the same on all ranks of the pipeline."""
        self._in_use: _Schedule | None = None
        self._prepared: Sequence[Any] = ()
        self._factor: Tensor | float = 1.0
        self._loss = torch.zeros((), dtype=torch.float64, device=self.device)

    def padded_lengths(self, tokens: Sequence[int]) -> list[int]:
        return [pipeline_tokens(max(tokens), self.token_multiple)] * len(tokens)

    def forward_backward(
        self,
        micro_batches: Sequence[Any],
        targets: Tensor,
        factor: Tensor | float = 1.0,
    ) -> Tensor:
        """Accumulate gradients, and return `pp` times the loss on the last stage, otherwise 0.

        `Mesh.sum` divides by `pp`.
        """
        self._begin(micro_batches)
        self._factor = factor / targets
        schedule = self.schedule_of(len(micro_batches), sum(micro_batches[0].lengths))
        schedule.step(target=torch.arange(len(micro_batches)), return_outputs=False)
        self._sum_tied_gradients()
        return self._loss * self.parallel.pp / targets

    @torch.no_grad()
    def loss(self, micro_batches: Sequence[Any]) -> Tensor:
        """Return the sum over micro-batches, scaled as in `forward_backward`.

        The forward pass runs stage after stage, each with all micro-batches: torch's V-shaped
        schedules have no mode without a backward pass.
        """
        self._begin(micro_batches)
        sending: list[dist.Work] = []
        outputs: list[Tensor] = []  # outputs of the previous stage, if this rank has it
        for number, part in zip(self.stages.numbers, self.stages.parts):
            sender = self._find_process(number - 1)
            receiver = self._find_process(number + 1)
            inputs = outputs
            outputs = []
            for chunk, prepared in enumerate(micro_batches):
                cast(_Forward, part.forward).chunk = chunk
                if number == 0:
                    out = part()
                elif sender is None:
                    out = part(inputs[chunk])
                else:
                    shape = self._shape(sum(prepared.lengths))
                    x = torch.empty(shape, dtype=self.dtype, device=self.device)
                    dist.recv(x, sender, group=self.group)
                    out = part(x)
                if number == self.parallel.n_stages - 1:
                    continue
                if receiver is None:
                    outputs.append(out)
                else:
                    work = dist.isend(out, receiver, group=self.group)
                    sending.append(cast(dist.Work, work))
        for work in sending:
            work.wait()
        # As after a backward pass. A new schedule of torch does so too, and a rank needs one when
        # its lengths change: without this, data-parallel peers that differ in that would not gather
        # alike in the next step, and would wait for each other forever
        reshard(self.stages)
        return self._loss * self.parallel.pp

    def _find_process(self, stage: int) -> int | None:
        """Return the other process that holds a stage; None if this one does, or none."""
        if stage not in self.stages.numbers:
            for rank in range(self.parallel.pp):
                if stage in list_stages(rank, self.parallel):
                    return dist.get_global_rank(self.group, rank)
        return None

    def _shape(self, tokens: int) -> tuple[int, int]:
        return tokens // self.token_multiple, self.width

    def _begin(self, micro_batches: Sequence[Any]) -> None:
        self._prepared = micro_batches
        # a loss for each part
        self._loss = torch.zeros_like(micro_batches[0].n_targets, dtype=torch.float64)

    def schedule_of(self, micro_batches: int, tokens: int) -> Any:
        """Return torch's schedule for this number of micro-batches, of `tokens` tokens each."""
        key = (micro_batches, tokens)
        schedule = self.schedules.get(key)
        if schedule is None or schedule is not self._in_use:
            if self._in_use is not None:
                self._in_use.release()
            if schedule is None:
                schedule = self.new_schedule(micro_batches, tokens)
                self.schedules[key] = schedule
            schedule.restore(self.device)
            self._in_use = schedule
        return schedule.schedule

    def new_schedule(self, micro_batches: int, tokens: int) -> "_Schedule":
        sent = torch.empty(self._shape(tokens), dtype=self.dtype, device="meta", requires_grad=True)
        losses = torch.empty(self._loss.numel(), device="meta", requires_grad=True)
        stages = []
        for number, part in zip(self.stages.numbers, self.stages.parts):
            is_last = number == self.parallel.n_stages - 1
            stage = _Stage(
                part,
                number,
                self.parallel.n_stages,
                self.device,
                input_args=() if number == 0 else (sent,),
                output_args=(losses if is_last else sent,),
                group=self.group,
                # torch cannot split off the gradient of a weight that is used in several products,
                # such as the vocabulary in both losses: the last stage computes input and weight
                # gradients together
                dw_builder=(lambda: lambda: None) if is_last else None,
            )
            stages.append(stage)
        name = self.parallel.schedule
        kind = get_schedule_class(SCHEDULES.get(name, name))
        schedule: Any = kind(
            stages if issubclass(kind, PipelineScheduleMulti) else stages[0],
            n_microbatches=micro_batches,
            loss_fn=lambda loss, _: (loss * self._factor).sum(),
            scale_grads=False,  # the loss is a sum, divided by the step's targets already
        )
        return _Schedule(schedule, stages)

    def _sum_tied_gradients(self) -> None:
        """Sum the gradients of tied parameters over the first and the last stage, into both copies."""
        first = self.stages.first
        last = self.stages.last
        if first is not None and last is not None:
            copies = tied_parameters(last)
            for name, parameter in _sort_trained(tied_parameters(first)):
                total = _gradient(parameter).add_(_gradient(copies[name]))
                _gradient(copies[name]).copy_(total)
            return
        part = first or last
        if part is None:
            return
        peer = dist.get_global_rank(self.group, self.parallel.pp - 1 if part is first else 0)
        for _, parameter in _sort_trained(tied_parameters(part)):
            gradient = _gradient(parameter)
            received = torch.empty_like(gradient)
            ops = [
                dist.P2POp(dist.isend, gradient, peer, self.group),
                dist.P2POp(dist.irecv, received, peer, self.group),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            gradient.add_(received)  # a + b equals b + a bitwise: the copies stay equal


def _sort_trained(parameters: dict[str, nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    """Return trained parameters in the order of names: the same on both ends of the pipeline."""
    trained = [item for item in parameters.items() if item[1].requires_grad]
    return sorted(trained, key=lambda item: item[0])


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of the gradient, zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad


class _Stage(PipelineStage):
    """torch's stage, which tells its module the next micro-batch.

    Every rank has all inputs except activations.
    """

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        cast(_Forward, self.submod.forward).chunk = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)


class _Forward:
    """Forward pass of a stage: (T, H) -> (T, H).

    The first stage takes no input; the last returns the loss, (1,) or (parts,).
    """

    def __init__(self, part: Any, number: int, pipeline: PipelineModel) -> None:
        # not an attribute of the module, which would register its own parent as a child
        self.part = part
        self.number = number
        self.pipeline = pipeline
        self.chunk = 0

    def __call__(self, *args: Tensor) -> Tensor:
        pipeline = self.pipeline
        part = self.part
        prepared = pipeline._prepared[self.chunk]
        with pipeline.autocast():
            x = args[0] if args else part.begin(prepared)
            x = part.through(x, prepared)
            if self.number < pipeline.parallel.n_stages - 1:
                return x
            loss = part.finish(x, prepared)
        pipeline._loss += loss.detach()
        return loss.reshape(-1).clone()  # a view would lose the hook of FSDP2


@dataclass
class _Schedule:
    """A schedule and the stages of this rank in it."""

    schedule: Any
    stages: Sequence[PipelineStage]
    shapes: list[tuple[Any, Tensor]] = field(default_factory=list)
    """While it is not in use: messages that had a receive buffer, and its like on the meta device."""

    def release(self) -> None:
        for message in self.received():
            buffer = message.buffer
            like = buffer.detach().to("meta").requires_grad_(buffer.requires_grad)
            self.shapes.append((message, like))
            message.buffer = None

    def restore(self, device: torch.device) -> None:
        for message, like in self.shapes:
            # torch 2.11 marks the buffer of an activation when the schedule is made, later versions
            # in each step
            buffer = torch.empty_like(like, device=device)
            message.buffer = buffer.requires_grad_(like.requires_grad)
        self.shapes.clear()

    def received(self) -> Iterator[Any]:
        """Yield torch's messages that have a receive buffer."""
        for stage in self.stages:
            for messages in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
                for message in messages:
                    if getattr(message, "buffer", None) is not None:
                        yield message
