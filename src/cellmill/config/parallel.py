"""Section `parallel`, and the sizes of the mesh axes for it and a number of processes.

Torch-free arithmetic.
"""

from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field

from cellmill.config.section import Section
from cellmill.errors import ConfigError

ROUND = 64  # smallest difference of padded lengths in a pipeline
Style = Literal[
    "columns",  # a linear layer sharded by outputs: by whole heads, or by feed-forward width
    "rows",  # the linear layer after it, sharded by inputs; its outputs are summed over ranks
    # an embedding sharded by tokens of the vocabulary, to be read through `parallel.vocab_parallel`
    "vocabulary",
    # a replicated module between two sharded ones: with sequence parallel it sees this rank's
    # tokens
    "norm",
    # a module that returns its input, (tokens, …): with sequence parallel, this rank's share of the
    # tokens
    "enter",
    "leave",  # the first module that needs all tokens again
]
"""Sharding of one module."""


class Parallel(Section):
    """Layout of the model over processes; the profile sets how many processes there are."""

    strategy: Literal["ddp", "fsdp"] = "fsdp"
    """DistributedDataParallel or FSDP2."""
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = (
        "HYBRID_SHARD"
    )
    """What fsdp shards: parameters, gradients and optimizer over all processes (FULL_SHARD,
    ZeRO-3); the same with parameters kept gathered between forward and backward (SHARD_GRAD_OP,
    ZeRO-2); the same as FULL_SHARD inside groups of shard_size, replicated across groups
    (HYBRID_SHARD); or nothing. Ignored by ddp.
    """
    shard_size: int | None = Field(None, ge=1)
    """Processes in one HYBRID_SHARD group; null is the processes of one node, divided by tp."""
    tp: int = Field(1, ge=1)
    """Tensor-parallel size: processes that share matrices and cells, on one node."""
    sequence_parallel: bool = False
    """Tensor-parallel processes also split the tokens between matrix multiplications, to save
    memory.
    """
    pp: int = Field(1, ge=1)
    """Pipeline-parallel size: processes that each hold some blocks, across nodes."""
    schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV"
    ] = "1F1B"
    """Pipeline schedule; the last four have two pipeline stages per process."""
    microbatches: int | None = Field(None, ge=1)
    """Minimum number of micro-batches per step in a pipeline; more of them leave less idle time.
    null is twice the pipeline stages. train.token_budget may require more.
    """
    gradient_reduction: Literal["step", "micro_batch"] = "step"
    """When fsdp reduces the gradients of a step with several micro-batches. step: with the last
    one, keeping whole float32 gradients until then; micro_batch: with each, keeping only their
    shards.
    """
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    """Number format of forward and backward. 16-mixed scales the loss and skips steps that
    overflow.
    """
    tf32: bool = False
    """With precision 32-true, float32 matrix products of NVIDIA GPUs from Ampere on and of AMD MI300
    use TF32: several times faster, with three decimal digits. A plan for a V100 refuses it, and a
    CPU ignores it. Not tested on a GPU.
    """
    activation_checkpointing: Literal["full", "selective"] | None = None
    """full recomputes each block in the backward pass, to save memory; selective recomputes all but
    matrix products and attention; null keeps all activations.
    """
    compile: bool = False
    """torch.compile of each block, attention excluded: faster on a GPU after minutes of
    compilation, with less memory than planned. Needs a C++ compiler on the training machine.
    """
    cpu_offload: Literal["full", "optimizer"] | None = None
    """What is kept in host memory. optimizer: AdamW's moments, and its step runs on the CPU. full:
    also parameters and gradients, which needs strategy fsdp and at least two data-parallel
    processes.
    """

    @property
    def half_precision(self) -> bool:
        """True if forward and backward use a 16-bit format."""
        return self.precision != "32-true"

    @property
    def reshards_after_forward(self) -> bool:
        """True if FSDP2 frees a block's weights after its forward pass.

        Not in a pipeline, which needs them again.
        """
        reshards = self.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD")
        return self.strategy == "fsdp" and reshards and self.pp == 1

    @property
    def reduces_each_micro_batch(self) -> bool:
        return self.gradient_reduction == "micro_batch"

    @property
    def shards_gradients(self) -> bool:
        """True if fsdp shards gradients, outside a pipeline."""
        return self.strategy == "fsdp" and self.sharding_strategy != "NO_SHARD" and self.pp == 1

    @property
    def n_stages(self) -> int:
        """Pipeline stages over all processes."""
        if self.pp == 1 or self.schedule in ("GPipe", "1F1B"):
            return self.pp
        return 2 * self.pp

    def reset_without_effect(self) -> Self:
        """Reset options that this layout refuses because they would have no effect."""
        reset: dict[str, Any] = {}
        if not self.shards_gradients:
            reset["gradient_reduction"] = "step"
        if self.pp == 1:
            reset["microbatches"] = None
        return self.model_copy(update=reset)


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes; their product is the number of processes."""

    dp_replicate: int
    dp_shard: int
    tp: int = 1
    pp: int = 1

    @property
    def dp(self) -> int:
        """Data-parallel size: groups of processes that read different cells."""
        return self.dp_replicate * self.dp_shard

    @property
    def tp_pp_text(self) -> str:
        """Axes whose processes share the same cells, as text to append: ` x tp 2 x pp 4`, or empty."""
        tp = f" x tp {self.tp}" if self.tp > 1 else ""
        pp = f" x pp {self.pp}" if self.pp > 1 else ""
        return tp + pp

    @property
    def text(self) -> str:
        """Copies of the model as text: `1 replica`, `2 replicas of 4 shards x tp 2`."""
        replicas = "1 replica" if self.dp_replicate == 1 else f"{self.dp_replicate} replicas"
        shards = "" if self.dp_shard == 1 else f" of {self.dp_shard} shards"
        return f"{replicas}{shards}{self.tp_pp_text}"

    @property
    def dp_text(self) -> str:
        """The data-parallel groups as text: `8 processes`, `4 groups of tp 2`."""
        if self.tp_pp_text:
            return f"{self.dp} groups of{self.tp_pp_text[2:]}"
        return f"{self.dp} processes"


def divide_processes(parallel: Parallel, world: int, local_world: int) -> Layout:
    """Layout of `world` processes, `local_world` on each node.

    Raise ConfigError if they do not fit.
    """
    sharding = "strategy ddp" if parallel.strategy == "ddp" else parallel.sharding_strategy
    tp = parallel.tp
    pp = parallel.pp
    _check_divides("pp", pp, world, f"{world} processes")
    stage = world // pp
    processes = f"{world} processes"
    if pp > 1:
        processes = f"the {stage} processes of each of pp {pp}"
    _check_divides("tp", tp, stage, processes)
    data = stage // tp
    shards = data if sharding in ("FULL_SHARD", "SHARD_GRAD_OP") else 1
    if sharding == "HYBRID_SHARD":
        if parallel.shard_size is None and tp % local_world:
            _check_divides("tp", tp, local_world, f"the {local_world} processes of a node")
        # 1 if a tp group spans nodes
        shards = parallel.shard_size or min(max(1, local_world // tp), data)
        _check_divides("shard_size", shards, data, Layout(data, 1, tp, pp).dp_text)
    elif parallel.shard_size is not None:
        raise ConfigError(
            f"parallel.shard_size requires HYBRID_SHARD, got {sharding}; set it to null"
        )
    if parallel.cpu_offload == "full" and data == 1:
        raise ConfigError(
            "parallel.cpu_offload full requires two data-parallel processes, got one; set optimizer"
        )
    return Layout(data // shards, shards, tp, pp)


def min_microbatches(parallel: Parallel) -> int:
    """Fewest micro-batches of a step that fill the pipeline schedule: a multiple of `pp`."""
    if parallel.pp == 1:
        return 1
    number = 2 * parallel.n_stages
    if parallel.microbatches is not None:
        number = max(parallel.microbatches, parallel.n_stages)
    return -(-number // parallel.pp) * parallel.pp


def pipeline_tokens(tokens: int, multiple: int = 1) -> int:
    """Tokens to which a pipeline pads micro-batches of at most `tokens`: a multiple of `multiple`.

    One of few lengths, 16 in each doubling, so that steps share their shapes and buffers: at most
    1/16 is added to micro-batches of more than 1,024 tokens.
    """
    unit = ROUND * multiple
    while tokens > 32 * unit:
        unit *= 2
    return max(unit, -(-tokens // unit) * unit)


def nearest(wanted: int, possible: list[int]) -> int:
    """The number of `possible` that is nearest to `wanted`; the smaller one of a tie."""
    return min(possible, key=lambda n: (abs(n - wanted), n))


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _check_divides(name: str, size: int, number: int, what: str) -> None:
    if number % size:
        possible = nearest(size, divisors(number))
        raise ConfigError(
            f"parallel.{name} {size} does not divide {what}; use {possible}, or change the profile"
        )
