"""A step through a pipeline: torch's schedules over the stages of `parallel.stages`.

All processes of a pipeline read the same cells, so each knows every micro-batch and only activations are sent. They
are sent as tensors of one shape, to which a step's micro-batches are padded; another step may have another. What the
first and the last stage both have is one parameter: its gradients are added up before they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor

from cellmill.config.run import Parallel
from cellmill.parallel.fsdp import LOW
from cellmill.parallel.mesh import Mesh
from cellmill.parallel.partition import process_of
from cellmill.parallel.pipeline_stages import Stages, tied_parameters

SCHEDULES = {"ZBV": "ZBVZeroBubble"}
"""Names of torch's schedules, where they differ from ours."""
ROUND = 64  # tokens: lengths of micro-batches are rounded up to so many, so that few of them differ


class PipelineModel(nn.Module):
    """What the loop calls in the place of `wrap.Replica` where the model is in stages.

    Parameters
    ----------
    stages
        Laid out, materialised and initialised.
    """

    def __init__(self, stages: Stages, parallel: Parallel, mesh: Mesh) -> None:
        super().__init__()
        self.stages, self.parallel = stages, parallel
        self.group = mesh.pp.get_group()
        self.device = mesh.device
        sharded = isinstance(stages.parts[0], FSDPModule)
        low = LOW.get(parallel.precision)
        # FSDP casts whatever goes in; autocast leaves the residual stream alone
        self.dtype = low if low is not None and sharded else torch.float32
        self.precision = parallel.precision
        self.low = None if sharded else low
        self.token_multiple = parallel.tp if parallel.sequence_parallel else 1
        for number, part in zip(stages.numbers, stages.parts):
            # a hook of FSDP runs around it, as around the forward that it replaces
            part.forward = _Forward(part, number, self)  # type: ignore[assignment]
        self.width = int(stages.parts[0].width)  # type: ignore[arg-type]
        self._schedules: dict[tuple[int, int], Any] = {}
        self._prepared: Sequence[Any] = ()
        self._factor: torch.Tensor | float = 1.0
        self._loss = torch.zeros((), dtype=torch.float64, device=self.device)

    def padded_lengths(self, tokens: Sequence[int]) -> list[int]:
        """To how many tokens each micro-batch of a step is padded: all to the same."""
        step = ROUND * self.token_multiple
        return [max(step, -(-max(tokens) // step) * step)] * len(tokens)

    def forward_backward(
        self, micro_batches: Sequence[Any], targets: torch.Tensor, factor: torch.Tensor | float = 1.0
    ) -> torch.Tensor:
        """As `Replica.forward_backward`. Processes without the last stage return 0, those with it as much more as
        processes share its cells. Collective: every rank.
        """
        self._begin(micro_batches)
        self._factor = factor / targets
        schedule = self._schedule(len(micro_batches), sum(micro_batches[0].lengths))
        schedule.step(target=torch.arange(len(micro_batches)), return_outputs=False)
        self._join_copies()
        return self._loss * self.parallel.pp / targets

    @torch.no_grad()
    def loss(self, micro_batches: Sequence[Any]) -> torch.Tensor:
        """As `Replica.loss`; what processes return is as in `forward_backward`. Collective: every rank.

        Forward alone: stage after stage, each with all micro-batches (torch's V-shaped schedules cannot).
        """
        self._begin(micro_batches)
        sent: list[dist.Work] = []
        own: list[torch.Tensor] = []
        for number, part in zip(self.stages.numbers, self.stages.parts):
            own, inputs = [], own
            for chunk in range(len(micro_batches)):
                part.forward.chunk = chunk  # type: ignore[union-attr]
                out = part(*self._received(number, chunk, inputs))
                if number == self.parallel.stages - 1:
                    continue
                if (peer := self._process_of(number + 1)) is None:
                    own.append(out)
                else:
                    sent.append(dist.isend(out, peer, group=self.group))
        for work in sent:
            work.wait()
        return self._loss * self.parallel.pp

    def _received(self, number: int, chunk: int, own: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What the stage before made of a micro-batch."""
        if number == 0:
            return ()
        peer = self._process_of(number - 1)
        if peer is None:
            return (own[chunk],)
        tokens = sum(self._prepared[chunk].lengths)
        x = torch.empty(tokens // self.token_multiple, self.width, dtype=self.dtype, device=self.device)
        dist.recv(x, peer, group=self.group)
        return (x,)

    def _process_of(self, stage: int) -> int | None:
        """Global rank of the process that has `stage`; None for this one."""
        rank = process_of(stage, self.parallel)
        return None if stage in self.stages.numbers else dist.get_global_rank(self.group, rank)

    def _begin(self, micro_batches: Sequence[Any]) -> None:
        self._prepared = micro_batches
        self._loss.zero_()

    def _schedule(self, micro_batches: int, tokens: int) -> Any:
        """torch's schedule for so many micro-batches of so many tokens: its buffers are of that shape."""
        key = (micro_batches, tokens)
        if key not in self._schedules:
            self._schedules.clear()  # one at a time: buffers are memory
            stages = [self._stage(number, part, tokens) for number, part in zip(self.stages.numbers, self.stages.parts)]
            kind = get_schedule_class(SCHEDULES.get(self.parallel.schedule, self.parallel.schedule))
            several = issubclass(kind, PipelineScheduleMulti)
            self._schedules[key] = kind(
                stages if several else stages[0],
                n_microbatches=micro_batches,
                loss_fn=lambda loss, _: loss.sum() * self._factor,
                scale_grads=False,  # the loss is a sum already divided by the targets of the step
            )
        return self._schedules[key]

    def _stage(self, number: int, part: nn.Module, tokens: int) -> PipelineStage:
        sent = torch.empty(
            tokens // self.token_multiple, self.width, dtype=self.dtype, device="meta", requires_grad=True
        )
        last = number == self.parallel.stages - 1
        return _Stage(
            part,
            number,
            self.parallel.stages,
            self.device,
            input_args=() if number == 0 else (sent,),
            output_args=(torch.empty(1, device="meta", requires_grad=True) if last else sent,),
            group=self.group,
            # one weight in several products, as the vocabulary in both losses, cannot be split from their inputs'
            # gradients: the last stage does both at once
            dw_builder=(lambda: _nothing) if last else None,
        )

    def _join_copies(self) -> None:
        """Adds up the gradients of what the first and the last stage both have; both then have the sum."""
        first, last = self.stages.first, self.stages.last
        if first is not None and last is not None:
            theirs = tied_parameters(last)
            for name, parameter in tied_parameters(first).items():
                total = _gradient(parameter).add_(_gradient(theirs[name]))
                _gradient(theirs[name]).copy_(total)
            return
        part = first or last
        if part is None:
            return
        peer = dist.get_global_rank(self.group, self.parallel.pp - 1 if part is first else 0)
        for _, parameter in sorted(tied_parameters(part).items()):
            own = _gradient(parameter)
            other = torch.empty_like(own)
            ops = [dist.P2POp(dist.isend, own, peer, self.group), dist.P2POp(dist.irecv, other, peer, self.group)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            own.add_(other)  # a + b is b + a to the last bit: the copies stay equal


def _nothing() -> None:
    pass


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """What this process has of it, zeros where no loss reached the parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad


class _Stage(PipelineStage):
    """Tells its module which micro-batch comes: all else than activations each process has already."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.submod.forward.chunk = fwd_chunk_id  # type: ignore[union-attr]
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)


class _Forward:
    """A stage's forward: (T, H) -> (T, H), from nothing in the first stage, to the loss, (1,), in the last."""

    def __init__(self, part: Any, number: int, pipeline: PipelineModel) -> None:
        # kept off the module: it would find itself among its children
        self.part, self.number, self.pipeline, self.chunk = part, number, pipeline, 0

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        pipeline, part = self.pipeline, self.part
        prepared = pipeline._prepared[self.chunk]
        with nullcontext() if pipeline.low is None else torch.autocast(pipeline.device.type, pipeline.low):
            x = args[0] if args else part.begin(prepared)
            x = part.through(x, prepared)
            if self.number < pipeline.parallel.stages - 1:
                return x
            loss = part.finish(x, prepared)
        pipeline._loss += loss.detach()
        return loss[None].clone()  # a view would lose FSDP's hook
