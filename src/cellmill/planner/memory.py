"""Peak memory of a training process, by what takes it.

Stored weights, the gradients of a whole step and the optimizer's state are float32 in every
precision. In a precision of 16 bits, FSDP2 computes with activations, gathered weights and gradients of
2 bytes per element. Without FSDP2, autocast keeps some activations and all gradients in float32.

The peak is at one of four moments of a step:

1. The backward pass begins. All activations are allocated, and the gradients of one block.
2. The backward pass has reached the first block. The gradients of all blocks are allocated.
3. FSDP2 reduces the last gradients.
4. The optimizer makes its step. muon has copies of all matrices of the blocks then; adamw has none.

Two cases never have their peak at moment 2, so it leaves them out. In a pipeline, the second
micro-batch's backward pass begins with all gradients and with more activations. Several micro-batches, or
the buckets of DistributedDataParallel, need a second copy of all gradients, which is allocated already at
moment 1.

The framework's own memory is not counted: about 1 GB with CUDA and NCCL. It fits into the fraction of
memory that `plan.memory_frac` leaves free.
"""

from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from cellmill.config.options import PlanOptions
from cellmill.planner.hardware import Hardware
from cellmill.planner.measure.load import Load, Rates
from cellmill.planner.planned_model import PlannedModel
from cellmill.planner.schedules import list_splits
from cellmill.planner.step_counts import CorpusSize, count_steps
from cellmill.planner.units import FLOAT32_BYTES, HALF_BYTES

# Mean bytes of an element that autocast keeps for the backward pass. It is above 2, since the residual
# stream and the inputs of norms stay float32. 2.3 bytes were measured on a CPU; the rest is a margin.
AUTOCAST_BYTES = 2.5
# printed names of those fields of `Memory` that are not printed by their own name
PRINTED_NAMES = {
    "optimizer": "optimizer state",
    "average": "average of the weights",
    "gathered": "gathered or cast weights",
    "communication": "reduction buffers",
    "optimizer_step": "optimizer step",
    "pipeline": "pipeline buffers",
}


@dataclass(frozen=True)
class Memory:
    """Bytes of one process at its peak, by what takes them."""

    parameters: int = 0  # this rank's shard of the weights, and all buffers
    # this rank's shard of the gradients, gradients that several micro-batches accumulate, and gradients
    # that the backward pass is computing
    gradients: int = 0
    optimizer: int = 0  # state of the optimizer, such as both moments of AdamW
    average: int = 0  # average of the trained weights, with train.ema_decay
    gathered: int = 0  # full weights, gathered for a forward or backward pass, or cast by autocast
    communication: int = 0  # gradients in a reduce-scatter
    optimizer_step: int = 0  # copies of matrices that the optimizer's step allocates
    pipeline: int = 0  # receive buffers of a pipeline for all micro-batches of a step
    # activations that are kept for the backward pass, and the workspace of one block's backward pass
    activations: int = 0
    # workspace of the part after the blocks: mostly logits and their gradient, and with a chunked loss
    # the gradient of the output table
    logits: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def list_by_size(self) -> list[tuple[str, int]]:
        """List the printed name and the bytes of each field, the largest first. Leave out fields of 0."""
        largest_first = sorted(asdict(self).items(), key=lambda field: -field[1])
        return [
            (PRINTED_NAMES.get(name, name), n_bytes) for name, n_bytes in largest_first if n_bytes
        ]


def estimate_memory(options: PlanOptions, corpus: CorpusSize, hardware: Hardware) -> Memory:
    """Estimate the peak memory of the process that needs the most, in a step of large micro-batches."""
    model = PlannedModel.measure(options, corpus, hardware)
    counts = count_steps(options, corpus, model.layout)
    return estimate_model_memory(model, counts.max_micro_batch, counts.max_micro_batches_per_step)


def estimate_model_memory(model: PlannedModel, micro_batch: Load, micro_batches: int) -> Memory:
    """Estimate the peak memory of a process of the pipeline rank that needs the most.

    Its step has `micro_batches` micro-batches, each of load `micro_batch`.
    """
    peaks = [
        estimate_rank_memory(model, pp_rank, micro_batch, micro_batches)
        for pp_rank in range(model.layout.pp)
    ]
    return max(peaks, key=lambda peak: peak.total)


def estimate_rank_memory(
    model: PlannedModel, pp_rank: int, micro_batch: Load, micro_batches: int
) -> Memory:
    """Estimate the peak memory of a process of pipeline rank `pp_rank`.

    Its step has `micro_batches` micro-batches, each of load `micro_batch`.
    """
    moments = _RankMemory(model, pp_rank, micro_batch, micro_batches)
    peaks = [moments.at_backward_start()]
    if model.layout.pp == 1:
        peaks.append(moments.at_first_block())
    if model.uses_fsdp:
        peaks.append(moments.at_last_reduction())
    peaks.append(moments.at_optimizer_step())
    return max(peaks, key=lambda peak: peak.total)


class _RankMemory:
    """Memory of a process of pipeline rank `pp_rank` at the four moments of a step."""

    def __init__(
        self, model: PlannedModel, pp_rank: int, micro_batch: Load, micro_batches: int
    ) -> None:
        self.model = model
        self.parallel = model.parallel
        self.totals = model.sum_rank_totals(pp_rank)
        self.stages = model.list_rank_stages(pp_rank)
        self.micro_batch = micro_batch
        self.micro_batches = micro_batches
        self.splits = list_splits(self.parallel, pp_rank, micro_batches)
        self.persistent = self._estimate_persistent()

    def at_backward_start(self) -> Memory:
        """Estimate the memory when the backward pass begins."""
        model = self.model
        block = model.size.block
        logits_bytes = 0.0
        if self.totals.has_finish:  # float32 in every precision
            logits_bytes = FLOAT32_BYTES * model.size.finish_workspace.estimate(self.micro_batch)
        communication_bytes = 0
        if model.uses_fsdp and self.micro_batches > 1 and self.parallel.reduces_each_micro_batch:
            # the full gradient of a block, and the shard that a reduce-scatter makes of it; the shards of
            # earlier micro-batches are allocated at the same time
            shard = model.divide_by_shards(block.trained)
            communication_bytes = FLOAT32_BYTES * (block.trained + shard)
        return replace(
            self.persistent,
            activations=round(self._kept_bytes + self._block_workspace_bytes),
            logits=round(logits_bytes),
            gathered=self._gathered_bytes,
            gradients=self._gradient_bytes_at_backward_start,
            communication=communication_bytes,
        )

    def at_first_block(self) -> Memory:
        """Estimate the memory when the backward pass has reached the first block.

        Only the activations of this block and of the part before it are still allocated.
        """
        model = self.model
        size = model.size
        block = size.block
        totals = self.totals
        activation_bytes = (
            self._count_activation_bytes(block.activations)
            + self._count_activation_bytes(size.begin.activations)
            + self._count_activation_bytes(size.block_workspace)
        )
        memory = replace(self.persistent, activations=round(activation_bytes))
        if not model.uses_fsdp:
            gradient_bytes = FLOAT32_BYTES * totals.trained
            return replace(memory, gradients=gradient_bytes, gathered=self._gathered_bytes)
        # gradients of one block are reduced, in float32, while gradients of the part before it are computed
        n_computed = totals.outside_trained + block.trained
        return replace(
            memory,
            gradients=self._shard_gradient_bytes + model.element_bytes * n_computed,
            gathered=model.element_bytes * (totals.outside_parameters + block.parameters),
            communication=FLOAT32_BYTES * block.trained,
        )

    def at_last_reduction(self) -> Memory:
        """Estimate the memory when FSDP2 reduces the last gradients.

        Without a pipeline, they belong to the parts outside the blocks. With a pipeline, they belong to
        the parts outside the blocks or to one block, whichever has more gradients.
        """
        totals = self.totals
        if self.parallel.pp > 1:  # the gradients of a stage are reduced after its last micro-batch
            return replace(
                self.persistent,
                gradients=self._accumulated_bytes + self._shard_gradient_bytes,
                gathered=self._gathered_bytes,
                communication=FLOAT32_BYTES
                * max(self.model.size.block.trained, totals.outside_trained),
            )
        element_bytes = self.model.element_bytes
        return replace(
            self.persistent,
            gradients=self._shard_gradient_bytes + element_bytes * totals.outside_trained,
            gathered=element_bytes * totals.outside_parameters,
            communication=FLOAT32_BYTES * totals.outside_trained,
        )

    def at_optimizer_step(self) -> Memory:
        """Estimate the memory in a step of the optimizer, when all gradients are reduced.

        All trained weights of the blocks count as matrices, since the other weights have few elements.
        """
        totals = self.totals
        n_matrix_elements = self.model.divide_by_shards(totals.trained - totals.outside_trained)
        return replace(
            self.persistent,
            gradients=self._shard_gradient_bytes,
            optimizer_step=self.model.optimizer_copies * FLOAT32_BYTES * n_matrix_elements,
        )

    def _estimate_persistent(self) -> Memory:
        """Estimate the memory that stays allocated for the whole step."""
        model = self.model
        size = model.size
        totals = self.totals
        offload = self.parallel.cpu_offload
        trained_shard = model.divide_by_shards(totals.trained)
        parameters_shard = model.divide_by_shards(totals.parameters)
        if offload == "full":
            parameters_shard = 0
        average_bytes = 0
        if model.keeps_average and offload != "full":
            average_bytes = FLOAT32_BYTES * trained_shard

        pipeline_bytes = 0
        if self.parallel.pp > 1:
            # For each micro-batch, a stage receives activations and gradients. The first stage of the
            # model receives no activations, and the last no gradients.
            messages = 2 * len(self.stages) - int(totals.has_begin) - int(totals.has_finish)
            message_bytes = model.count_block_input_bytes(self.micro_batch)
            pipeline_bytes = round(messages * self.micro_batches * message_bytes)

        return Memory(
            parameters=FLOAT32_BYTES * (size.buffers + parameters_shard),
            optimizer=0 if offload else model.optimizer_states * FLOAT32_BYTES * trained_shard,
            average=average_bytes,
            pipeline=pipeline_bytes,
        )

    @property
    def _gradient_bytes_at_backward_start(self) -> int:
        """Bytes of all gradients that are allocated when the backward pass begins."""
        block_trained = self.model.size.block.trained
        if self.model.uses_fsdp:
            return self._accumulated_bytes + self.model.element_bytes * block_trained
        # The buckets of DistributedDataParallel are a copy of all gradients, which persists. Gradients that
        # earlier micro-batches have accumulated are another copy, since only the last micro-batch fills the
        # buckets.
        copies = int(self.model.layout.dp > 1) + int(self.micro_batches > 1)
        if copies == 0:  # only the block in its backward pass has gradients
            return FLOAT32_BYTES * block_trained
        return copies * FLOAT32_BYTES * self.totals.trained

    @property
    def _accumulated_bytes(self) -> int:
        """Bytes of the gradients that FSDP2 keeps from one micro-batch to the next.

        If FSDP2 reduces gradients in each micro-batch, it keeps only this rank's shard. Otherwise it keeps
        the full gradients.
        """
        if self.micro_batches == 1:
            return 0
        if self.parallel.reduces_each_micro_batch:
            return self._shard_gradient_bytes
        return FLOAT32_BYTES * self.totals.trained

    @property
    def _shard_gradient_bytes(self) -> int:
        """Bytes of the float32 gradients of this rank's shard. Full offload keeps them on the host."""
        if self.parallel.cpu_offload == "full":
            return 0
        return FLOAT32_BYTES * self.model.divide_by_shards(self.totals.trained)

    @property
    def _gathered_bytes(self) -> int:
        """Bytes of full weights in a forward pass: FSDP2 gathers them, or autocast casts them."""
        totals = self.totals
        size = self.model.size
        if not self.model.uses_fsdp:
            return HALF_BYTES * totals.parameters if self.parallel.half_precision else 0
        n_gathered = totals.parameters
        if self.parallel.reshards_after_forward:
            # two blocks at most: the next block is gathered while one computes
            n_gathered = totals.outside_parameters + min(2, size.n_blocks) * size.block.parameters
        return self.model.element_bytes * n_gathered

    @property
    def _kept_bytes(self) -> float:
        """Bytes of all activations that are kept when the backward pass begins."""
        size = self.model.size
        bytes_by_stage = []  # for one micro-batch
        for stage in self.stages:
            stage_bytes = len(stage.blocks) * self._kept_block_bytes
            if stage.has_begin:
                stage_bytes += self._count_activation_bytes(size.begin.activations)
            if stage.has_finish:
                stage_bytes += self._count_activation_bytes(size.finish.activations)
            bytes_by_stage.append(stage_bytes)
        # of the moments at which the rank holds the most micro-batches, the one with the most bytes
        return max(float(np.dot(split, bytes_by_stage)) for split in self.splits)

    @property
    def _kept_block_bytes(self) -> float:
        """Bytes that one block keeps of a micro-batch for its backward pass."""
        size = self.model.size
        checkpointing = self.parallel.activation_checkpointing
        if checkpointing == "full":  # the block keeps only its input
            return self.model.count_block_input_bytes(self.micro_batch)
        return self._count_activation_bytes(
            size.selective_activations if checkpointing else size.block.activations
        )

    @property
    def _block_workspace_bytes(self) -> float:
        """Bytes that the last block's backward pass needs besides the kept activations."""
        size = self.model.size
        # before its backward pass, a block recomputes the activations that it has not kept
        recomputed_bytes = (
            self._count_activation_bytes(size.block.activations) - self._kept_block_bytes
        )
        workspace_bytes = self._count_activation_bytes(size.block_workspace) + recomputed_bytes
        # When the last block's backward pass begins, the activations of `finish` are free. `_kept_bytes`
        # counts them all the same.
        if self.totals.has_finish:
            workspace_bytes -= self._count_activation_bytes(size.finish.activations)
        return max(workspace_bytes, 0)

    def _count_activation_bytes(self, activations: Rates) -> float:
        """Count the bytes of a micro-batch's activations."""
        return self._bytes_per_activation * activations.total(self.micro_batch)

    @property
    def _bytes_per_activation(self) -> float:
        """Mean bytes of an activation that is kept for the backward pass."""
        if self.parallel.half_precision and not self.model.uses_fsdp:
            return AUTOCAST_BYTES
        return self.model.element_bytes


class HostBytes(NamedTuple):
    """Host memory of one process that works on a GPU, in bytes."""

    offload: int  # for parallel.cpu_offload
    staging: int  # for a copy of the checkpoint, from which it is written


def estimate_host_bytes_per_process(model: PlannedModel) -> HostBytes:
    """Estimate the host memory of one process that works on a GPU, by use.

    Offload keeps gradients and the optimizer's state on the host. `optimizer` also keeps the trained
    weights on the host, `full` all weights and the average. A checkpoint is copied to the host before it
    is written: weights, optimizer's state and average.
    """
    if not model.pins_memory:
        return HostBytes(offload=0, staging=0)
    offload = model.parallel.cpu_offload
    # elements of the pipeline rank that has the most
    offloaded = 0
    staged = 0
    for pp_rank in range(model.layout.pp):
        totals = model.sum_rank_totals(pp_rank)
        checkpoint = (
            totals.parameters + (model.optimizer_states + model.keeps_average) * totals.trained
        )
        staged = max(staged, checkpoint)
        if offload == "full":
            # what a checkpoint has, and gradients
            offloaded = max(offloaded, checkpoint + totals.trained)
        elif offload == "optimizer":
            # trained weights, their gradients, and the optimizer's state
            offloaded = max(offloaded, (2 + model.optimizer_states) * totals.trained)
    return HostBytes(
        offload=FLOAT32_BYTES * model.divide_by_shards(offloaded),
        staging=FLOAT32_BYTES * model.divide_by_shards(staged),
    )


def estimate_host_bytes_per_node(model: PlannedModel) -> int:
    """Estimate the host memory that all processes of a node need for offload and checkpoints."""
    return model.nproc_per_node * sum(estimate_host_bytes_per_process(model))


def exceeds_host_memory(model: PlannedModel, hardware: Hardware) -> bool:
    """True if the processes of a node need more host memory than their job requests.

    False if the requested memory is unknown.
    """
    return 0 < hardware.requested_host_bytes < estimate_host_bytes_per_node(model)


def find_overflow(
    options: PlanOptions, corpus: CorpusSize, hardware: Hardware
) -> Literal["device", "host"] | None:
    """Find the memory that a run exceeds: of a device, or of the host. None if the run fits.

    Host memory is the memory that a job requests per node. Offload and checkpoints pin some of it.
    """
    if estimate_memory(options, corpus, hardware).total > hardware.usable_bytes:
        return "device"
    model = PlannedModel.measure(options, corpus, hardware)
    return "host" if exceeds_host_memory(model, hardware) else None
