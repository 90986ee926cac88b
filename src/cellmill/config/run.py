"""Sections of a run from its stream to its embeddings, and of the report."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from cellmill.config.family import FamilyConfig
from cellmill.config.objective import ObjectiveConfig
from cellmill.config.section import Section
from cellmill.config.tokens import Tokens


class Stream(Section):
    """How shards are read: none of it changes which cells an epoch holds, all of it their order."""

    lanes: int = Field(
        8,
        ge=1,
        description="Independent streams of cells; a multiple of every data-parallel world size the run may use, "
        "so that a global batch is the same cells in each.",
    )
    block_cells: int = Field(64, ge=1, description="Contiguous cells read at once.")
    window_blocks: int = Field(16, ge=1, description="Blocks of one lane among which its cells are shuffled.")
    io_threads: int = Field(4, ge=1, description="Threads that read blocks.")


class Parallel(Section):
    """How a model is laid out over processes; how many there are is the profile's business."""

    strategy: Literal["ddp", "fsdp"] = Field("fsdp", description="DistributedDataParallel, or FSDP2.")
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = Field(
        "HYBRID_SHARD",
        description="What fsdp shards: all over all (ZeRO-3), gradients and optimizer (ZeRO-2), "
        "all inside a group of shard_size and replicas between groups, or nothing. Not read by ddp.",
    )
    shard_size: int | None = Field(
        None,
        ge=1,
        description="Processes in one HYBRID_SHARD group; null is the processes of one node, divided by tp.",
    )
    tp: int = Field(
        1, ge=1, description="Tensor parallel: processes that share each matrix and the cells; best inside a node."
    )
    sequence_parallel: bool = Field(
        False, description="Tensor-parallel processes also share the tokens between matrices, for memory."
    )
    pp: int = Field(
        1, ge=1, description="Pipeline parallel: processes that hold some of the blocks each; best between nodes."
    )
    schedule: Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV"] = Field(
        "1F1B",
        description="Order in which a pipeline takes its micro-batches; the last four give each process two stages.",
    )
    microbatches: int | None = Field(
        None,
        ge=1,
        description="Fewest micro-batches a pipeline is filled with each step, for a smaller share of idle time; null "
        "is twice the stages. train.token_budget may ask for more.",
    )
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = Field(
        "32-true",
        description="Number format of forward and backward; 16-mixed, for GPUs without bfloat16, scales the loss "
        "and skips steps whose gradients overflow.",
    )
    activation_checkpointing: Literal["full", "selective"] | None = Field(
        None,
        description="full recomputes each block in the backward pass, for memory; selective only what is cheap: all "
        "but products of matrices and attention; null keeps activations.",
    )
    compile: bool = Field(
        False,
        description="torch.compile of each block around its attention: faster on a GPU after minutes of compiling, and "
        "less memory than planned. It needs a C++ compiler where training runs.",
    )
    cpu_offload: Literal["full", "optimizer"] | None = Field(
        None,
        description="What is kept in the host's memory: optimizer, AdamW's moments, and its step is the CPU's; full, "
        "parameters and gradients too, which needs strategy fsdp and two data-parallel processes or more.",
    )

    @property
    def low(self) -> bool:
        """Whether forward and backward are in a format of 16 bits."""
        return self.precision != "32-true"

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.pp * (1 if self.pp == 1 or self.schedule in ("GPipe", "1F1B") else 2)


class Plan(Section):
    """What is assumed of the machine before it is asked for."""

    memory_gb: float | None = Field(
        None, gt=0, description="Memory of one process's device; null looks the profile's device up."
    )
    memory_frac: float = Field(0.9, gt=0, le=1, description="Fraction of it a run may use.")
    mfu_frac: float = Field(
        0.35,
        gt=0,
        le=1,
        description="Fraction of the device's peak assumed while it computes; communication and idle time come on top.",
    )
    intra_node_gbs: float | None = Field(
        None, gt=0, description="GB/s one process sends inside its node; null looks the profile's device up."
    )
    inter_node_gbs: float | None = Field(
        None, gt=0, description="GB/s one process sends to other nodes; null looks the profile's device up."
    )


class Train(Section):
    """Optimisation, validation and checkpoints."""

    steps: int | None = Field(
        None, ge=1, le=10**9, description="Optimizer steps; exactly one of steps and epochs is set."
    )
    epochs: float | None = Field(None, gt=0, le=10**6, description="Passes over the training cells.")
    global_batch: int = Field(256, ge=1, le=10**7, description="Cells per optimizer step, over all processes.")
    token_budget: int = Field(
        16_384, ge=1, description="Most tokens one process takes at once; a larger share of the batch is accumulated."
    )
    lr: float = Field(1e-3, gt=0, description="Peak learning rate.")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="Course of lr after the warm-up.")
    warmup_steps: int = Field(100, ge=0, description="Steps over which lr rises from 0.")
    min_lr_frac: float = Field(0.1, ge=0, le=1, description="Fraction of lr that is left at the last step.")
    weight_decay: float = Field(
        0.1, ge=0, description="AdamW decay of matrices; norms, biases and embeddings have none."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW decay of the first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW decay of the second moment.")
    clip_norm: float | None = Field(1.0, gt=0, description="Largest global gradient norm; null does not clip.")
    max_bad_steps: int = Field(
        5,
        ge=1,
        description="Steps whose loss or gradient norm is not finite are skipped and counted; so many in a row end the "
        "training.",
    )
    timeout_s: float = Field(
        600,
        gt=0,
        description="Seconds that processes wait for one that hangs before all end; five times as long until the first "
        "steps are done.",
    )
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Seed of weights, order, masks and dropout.")
    val_every_steps: int = Field(200, ge=1, description="Steps between validations; the last step always validates.")
    val_cells: int | None = Field(None, ge=1, description="Validation cells used; null uses all.")
    checkpoint_every_steps: int = Field(500, ge=1, description="Steps between checkpoints.")
    checkpoint_every_min: float | None = Field(None, gt=0, description="Also a checkpoint after so many minutes.")
    keep_checkpoints: int = Field(2, ge=1, description="Newest checkpoints kept, beside the best.")
    log_every_steps: int = Field(10, ge=1, description="Steps between lines of metrics.jsonl.")
    profile_steps: list[int] | None = Field(
        None,
        min_length=2,
        max_length=2,
        description="First and last optimizer step, from 1, to record: a trace of torch's profiler, and on a GPU a "
        "snapshot of its memory, in the run's train/profile/; null records none.",
    )

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole run."""
        return self.steps or max(1, round((self.epochs or 0) * steps_per_epoch))

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            both = "both" if self.steps is not None else "neither"
            raise ValueError(f"set one of steps and epochs and the other to null, not {both}")
        return self

    @model_validator(mode="after")
    def _steps_in_order(self) -> Self:
        if self.profile_steps is not None and not 1 <= self.profile_steps[0] <= self.profile_steps[1]:
            raise ValueError(f"profile_steps: {self.profile_steps} is not [first, last] with 1 <= first <= last")
        return self


class Consolidate(Section):
    """Which checkpoint is exported."""

    checkpoint: Literal["best", "last"] = Field("best", description="best by validation loss, or the last one.")


class Embed(Section):
    """Cells through the exported model."""

    token_budget: int = Field(16_384, ge=1, description="Most tokens in one forward pass.")
    min_coverage_frac: float = Field(
        0.3, ge=0, le=1, description="Smallest fraction of a dataset's counts that must fall on genes the model knows."
    )


class Report(Section):
    """The page at the end."""

    title: str = Field("cellmill report", description="Its heading.")


def check_together(
    tokens: Tokens, stream: Stream, model: FamilyConfig, objective: ObjectiveConfig, parallel: Parallel, train: Train
) -> None:
    """Options of different sections that exclude each other. Raises ValueError naming both."""
    if objective.name not in model.objectives and model.family not in objective.families:
        raise ValueError(
            f"objective.name {objective.name}: the family {model.family} serves "
            f"{', '.join(model.objectives) or 'none'}; choose one of these, or another model.family"
        )
    if tokens.value_kind not in model.value_kinds:
        raise ValueError(
            f"tokens.tokenizer {tokens.tokenizer} gives values of kind {tokens.value_kind}, the family {model.family} "
            f"embeds {', '.join(model.value_kinds) or 'none'}; choose another tokenizer or family"
        )
    objective.check_tokens(tokens)
    _check_tensor_parallel(model, parallel)
    _check_pipeline(model, parallel)
    if parallel.cpu_offload == "full" and parallel.strategy == "ddp":
        raise ValueError("parallel.cpu_offload full is FSDP2's, not strategy ddp's: set strategy to fsdp, or optimizer")
    if parallel.compile and parallel.activation_checkpointing == "selective":
        raise ValueError(
            "parallel.activation_checkpointing selective is what compile does by itself: set it to null, or to full"
        )
    if parallel.compile and parallel.schedule in ("InterleavedZeroBubble", "ZBV", "DualPipeV"):
        raise ValueError(
            f"parallel.schedule {parallel.schedule} takes a backward pass apart, which compile makes one: set "
            "compile to no, or schedule to Interleaved1F1B"
        )
    if tokens.max_tokens > train.token_budget:
        raise ValueError(
            f"tokens.max_tokens {tokens.max_tokens} is more than train.token_budget {train.token_budget}: "
            "one cell would not fit; raise the budget or cut cells earlier"
        )
    if train.global_batch % stream.lanes:
        raise ValueError(
            f"train.global_batch {train.global_batch} is not a multiple of stream.lanes {stream.lanes}: "
            "each lane gives an equal share"
        )


def _check_tensor_parallel(model: FamilyConfig, parallel: Parallel) -> None:
    tp = parallel.tp
    if tp == 1:
        if parallel.sequence_parallel:
            raise ValueError("parallel.sequence_parallel is read with tensor parallel alone: set parallel.tp, or no")
        return
    cut = model.cut_by_tp()
    if not cut:
        raise ValueError(
            f"parallel.tp {tp}: the family {model.family} does not say what tensor parallel may cut; set it to 1"
        )
    possible = [n for n in range(1, min(cut.values()) + 1) if not any(size % n for size in cut.values())]
    for name, size in cut.items():
        if size % tp:
            raise ValueError(f"parallel.tp {tp} does not divide {name} {size}; {nearest(tp, possible)} does")


def _check_pipeline(model: FamilyConfig, parallel: Parallel) -> None:
    if parallel.pp == 1:
        for name in ("schedule", "microbatches"):
            if getattr(parallel, name) != Parallel.model_fields[name].default:
                raise ValueError(f"parallel.{name} is read with a pipeline alone: set parallel.pp, or leave it out")
        return
    blocks = model.cut_by_pp()
    if not blocks:
        raise ValueError(
            f"parallel.pp {parallel.pp}: the family {model.family} does not say where a pipeline may cut it; "
            "set it to 1"
        )
    for name, size in blocks.items():
        if size < parallel.stages:
            most = size * parallel.pp // parallel.stages
            raise ValueError(
                f"parallel.pp {parallel.pp} with schedule {parallel.schedule} makes {parallel.stages} stages of {name} "
                f"{size}: each needs one; " + (f"pp {most} fits" if most > 1 else "1F1B makes fewer, or set pp to 1")
            )


def nearest(wanted: int, possible: list[int]) -> int:
    """The number of `possible` that is nearest to `wanted`; of two, the smaller."""
    return min(possible, key=lambda n: (abs(n - wanted), n))
