"""Sections of a run from stream to evaluation, and of the report.

The learning-rate schedule is a pure function of the step: resuming needs no scheduler state.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from cellmill.config.parts.methods import Optimizer
from cellmill.config.section import Counts, Names, Section, leaving_out, one_message


class Stream(Section):
    """Which cells are read from shards, how often, and in which order. By default an epoch reads
    every training cell once.
    """

    lanes: int = Field(8, ge=1)
    """Independent streams of cells: a multiple of all data-parallel sizes of the run, for equal
    global batches.
    """
    block_cells: int = Field(64, ge=1)
    """Contiguous cells per read. With weight_by, a read is a run of neighbouring chosen cells,
    and usually has fewer.
    """
    window_blocks: int = Field(16, ge=1)
    """Blocks of one lane whose cells are shuffled together."""
    equal_steps: bool = False
    """Spread the cells of an epoch evenly over its steps, without changing their number. Otherwise
    the last step has the remaining cells, which may be a handful. yes is recommended for new runs;
    no reproduces earlier runs.
    """
    train_frac: float = Field(1.0, gt=0, le=1)
    """Fraction of the training cells that the run reads, sampled evenly over the corpus. A smaller
    fraction is a subset of a larger one. The validation and test cells are always the same.
    """
    weight_by: str | None = None
    """obs column, such as a label, or `dataset`, for weighted sampling: cells of rare values are
    read more often, and those of frequent values less often. An epoch then repeats some cells and
    omits others. null reads each cell once. If it is left out and the only objective is
    classification, weight_by is its label_column and labelled_frac is 1.
    """
    labelled_frac: float | None = Field(None, gt=0, le=1)
    """Fraction of an epoch's cells that have a value of weight_by. The weights then apply to these
    cells; cells without a value fill the rest, each equally often. null treats a missing value like
    any other value.
    """
    weight_exponent: float = Field(1.0, ge=0, le=1)
    """Cells of a value with n cells weigh n ** -weight_exponent: 1 reads all values equally often,
    0 all cells.
    """
    max_repeats: float = Field(10.0, ge=1, le=1000)
    """Maximum number of times that a cell is read per epoch, as a mean over the cells with the same
    value. With labelled_frac, it is a multiple of the mean over all cells with a value.
    """
    weight_warmup_steps: int = Field(0, ge=0)
    """Steps over which the weights, not the exponent, go linearly from weight_start_exponent to
    weight_exponent. Each epoch has the weights of its first step. 0 uses weight_exponent from the start.
    """
    weight_start_exponent: float = Field(0.0, ge=0, le=1)
    """weight_exponent at step 0 of the warm-up: 0 starts with each cell once, 1 with all values
    equally.
    """
    io_threads: int = Field(4, ge=1)
    """Reader threads: the number of reads that a process has in flight. block_cells
    says how many cells a read has.
    """
    stage_to: str | None = Field(None, min_length=1)
    """Folder on each node's local disk, such as $TMPDIR, to which one process per node copies the
    shards that it reads while the training runs. A shard is read from the shared folder until its
    copy matches the manifest's SHA-256. A failure gives one warning; copies are removed at the end.
    null copies nothing. Variables are expanded on the node.
    """
    stage_limit_gb: float | None = Field(None, gt=0)
    """Maximum GB of shards that a node copies. In any case, also with null, 5 % of its disk stays
    free.
    """

    _dump = leaving_out("labelled_frac")

    def train_cells(self, n: int) -> int:
        """Number of the corpus's `n` training cells that the run reads: the first ones, as shards
        are shuffled.
        """
        return max(1, round(self.train_frac * n)) if n else 0

    def problems(self) -> Iterator[str]:
        if self.weight_start_exponent and not self.weight_warmup_steps:
            yield "weight_start_exponent requires weight_warmup_steps, got 0; set both, or neither"

    def weights_column(self) -> dict[str, str]:
        """obs column by which cells are weighted, and the option that names it.

        Empty without weights.
        """
        return {} if self.weight_by is None else {self.weight_by: "stream.weight_by"}


class Plan(Section):
    """Assumptions of the plan about the machine."""

    memory_gb: float | None = Field(None, gt=0)
    """Memory of a process; null: of the profile's device, or on CPUs its share of the profile's
    mem_mb (0: of the memory of the machine that plans).
    """
    memory_frac: float = Field(0.9, gt=0, le=1)
    """Fraction of that memory a run may use."""
    mfu_frac: float = Field(0.35, gt=0, le=1)
    """Assumed fraction of the device's peak FLOP/s; communication and idle time are added."""
    intra_node_gbs: float | None = Field(None, gt=0)
    """GB/s one process can send within its node; null takes it from the profile's device."""
    inter_node_gbs: float | None = Field(None, gt=0)
    """GB/s one process can send to other nodes; null takes it from the profile's device."""


AUTO_EPOCHS = 3
AUTO_MIN_STEPS = 1600
"""Length of `train.steps: auto`, from benchmarks/lengths.py: docs/quality.md has its table.
Larger numbers continue finished runs, smaller ones refuse them.
"""


def auto_steps(steps_per_epoch: int) -> int:
    """Steps of a run with steps: auto."""
    return max(AUTO_MIN_STEPS, AUTO_EPOCHS * steps_per_epoch)


class Train(Section):
    """Optimisation, validation and checkpoints."""

    steps: Annotated[
        Annotated[int, Field(ge=1, le=10**9)] | Literal["auto"] | None,
        one_message("a number of steps from 1 to 1,000,000,000, auto or null"),
    ] = Field(
        None,
        description=f"Optimizer steps; exactly one of steps and epochs is set. auto: {AUTO_EPOCHS} epochs, at least "
        f"{AUTO_MIN_STEPS:,} steps. A run whose length is changed continues.",
    )
    epochs: float | None = Field(None, gt=0, le=10**6)
    """Passes over the training cells."""
    global_batch: int = Field(256, ge=1, le=10**7)
    """Cells per optimizer step over all processes."""
    token_budget: int = Field(16_384, ge=1)
    """Maximum tokens of a micro-batch, without those of tokens.covariates; a process accumulates
    gradients over as many as its share needs.
    """
    optimizer: Optimizer = Field(  # type: ignore[assignment]  # the default is validated, too
        "adamw",
        description="Optimizer: its name, or a mapping of name and further options. muon: orthogonalised momentum for "
        "the matrices of the blocks, AdamW for the rest, with one learning rate (Jordan et al. 2024).",
    )
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Learning-rate schedule after warm-up. wsd: constant, then linear decay, so longer runs begin
    the same.
    """
    decay_frac: float = Field(0.2, gt=0, le=1)
    """Fraction of the steps, at the end, in which wsd decays."""
    warmup_steps: int = Field(100, ge=0)
    """Steps of linear warm-up from 0 to lr."""
    min_lr_frac: float = Field(0.1, ge=0, le=1)
    """Learning rate at the last step, as a fraction of lr."""
    weight_decay: float = Field(0.1, ge=0)
    """Weight decay of matrices; norms, biases, embeddings have none."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW decay rate of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW decay rate of the second moment."""
    clip_norm: float | None = Field(1.0, gt=0)
    """Maximum global gradient norm; null disables clipping."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Decay per step of an exponential moving average of the trained weights; after t steps at most
    (1 + t) / (10 + t). Validation, and so the best checkpoint, and the exported model use the
    average. null keeps none.
    """
    max_bad_steps: int = Field(5, ge=1)
    """Consecutive steps with a non-finite loss or gradient norm that end the training; each is
    skipped.
    """
    replay_every_steps: int | None = Field(None, ge=1)
    """Steps between steps whose forward and backward are computed twice and compared bit for bit,
    to find a GPU that computes wrongly: 1,000 costs 0.1 % of the training. Requires pp 1 and tp 1.
    null compares none. Not tested on a GPU.
    """
    timeout_s: float = Field(600, gt=0)
    """Seconds without progress after which a hanging process ends the training; five times as long
    during the first steps, and at least a minute until all have joined.
    """
    seed: int = Field(0, ge=0, le=2**31 - 1)
    """Seed of weights, shuffling, masks and dropout."""
    val_every_steps: int = Field(200, ge=1)
    """Steps between validations; the last step always validates."""
    val_cells: int | None = Field(None, ge=1)
    """Validation cells used; null uses all."""
    best_metric: str = "val_loss"
    """Validation metric that chooses the best checkpoint and stops early, by its name in
    metrics.jsonl: val_loss, val_accuracy of classification, val_pearson of regression,
    val_hidden_genes of cell_decoding, effective_rank, depth_r2 or batch_r2; of a part of objective
    sum val_loss_PART, val_accuracy_PART, val_pearson_PART or val_hidden_genes_PART. val_hidden_genes
    is logged only if it is chosen: a fifth of the genes is hidden from validation cells, and each is
    correlated with its prediction over cells; the mean over genes.
    """
    best_mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger best_metric is better."""
    early_stop_patience: int | None = Field(None, ge=1)
    """Validations in a row without a better best_metric after which the run ends; a higher value
    continues it. null trains to the last step.
    """
    early_stop_min_delta: float = Field(0.0, ge=0)
    """Minimum improvement that resets the patience; the best checkpoint is the best regardless."""
    checkpoint_every_steps: int = Field(500, ge=1)
    """Steps between checkpoints."""
    checkpoint_every_min: float | None = Field(None, gt=0)
    """Minutes between more checkpoints; null: none."""
    keep_checkpoints: int = Field(2, ge=1)
    """Number of newest checkpoints kept in addition to the best."""
    keep_steps: Counts = Field([])
    """Steps whose checkpoints are written and kept permanently, whatever checkpoint_every_steps and
    keep_checkpoints say, such as those from which other runs branch (trunk_step).
    """
    log_every_steps: int = Field(10, ge=1)
    """Steps between logged metrics."""
    profile_steps: list[int] | None = Field(None, min_length=2, max_length=2)
    """First and last step (from 1) to profile: a torch profiler trace, and on a GPU a memory
    snapshot, in train/profile/ of the run; null profiles none.
    """

    @classmethod
    def override(cls, defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """A length given by the run replaces the one at the top."""
        if own.get("steps") is not None or own.get("epochs") is not None:
            length = ("steps", "epochs")
            defaults = {key: value for key, value in defaults.items() if key not in length}
        return defaults | own

    def total_steps(self, steps_per_epoch: int) -> int:
        if self.steps == "auto":
            return auto_steps(steps_per_epoch)
        return self.steps or max(1, round((self.epochs or 0) * steps_per_epoch))

    def problems(self) -> Iterator[str]:
        if (self.steps is None) == (self.epochs is None):
            both = "both" if self.steps is not None else "neither"
            yield f"expected one of steps and epochs, got {both}; set one of them, and the other to null"
        first, last = self.profile_steps or (1, 1)
        if not 1 <= first <= last:
            yield f"profile_steps: expected [first, last] with 1 <= first <= last, got {self.profile_steps}"


class Consolidate(Section):
    """Export of a checkpoint."""

    checkpoint: Annotated[
        Literal["best", "last"] | Annotated[int, Field(ge=1)],
        one_message("best, last or a step of train.keep_steps"),
    ] = "best"
    """Checkpoint with the best train.best_metric, the last one, or one of train.keep_steps."""
    cell_digests: bool = True
    """Whether the model folder has digests of the training and validation cells, by which `cellmill
    seen` recognises them anywhere; whoever has a cell can then find out that it was among them.
    """
    hidden_genes: Literal["decoder", "ensemble"] = "ensemble"
    """Prediction of genes that were not measured, by family profile with cell_decoding. ensemble: weighted mean of
    the decoder and a ridge regression on 50 components of the training cells; validation cells choose its
    penalty and the weight. decoder: no regression is exported.
    """

    _dump = leaving_out("cell_digests", "hidden_genes")


class Embed(Section):
    """Embedding of cells with the exported model."""

    token_budget: int = Field(16_384, ge=1)
    """Maximum tokens of one forward pass."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """Number format of the forward pass. bf16-mixed is for a GPU, where attention in float32 is one
    call per cell length; embeddings then have two to three decimal digits. Not tested on a GPU.
    """
    min_coverage_frac: float = Field(0.3, ge=0, le=1)
    """Minimum fraction of a dataset's counts in genes of the model's vocabulary."""
    # a panel of 1,000 genes in a corpus of whole transcriptomes has .03, and is not a mistake
    min_expressed_frac: float = Field(0.01, ge=0, le=1)
    """Minimum fraction of the model's genes that a dataset measures, each weighted by the number of
    training cells that express it; below one half there is a warning.
    """


class Predict(Section):
    """Labels of cells by the exported model of a run with objective classification."""

    min_probability: float | None = Field(None, gt=0, lt=1)
    """Minimum calibrated probability of a cell's predicted label; cells below it get none."""
    min_accuracy: float | None = Field(None, gt=0, le=1)
    """Minimum accuracy among the validation cells that get a label: min_probability is then the
    lowest value that reaches it. null, with min_probability null too, labels every cell.
    """

    def problems(self) -> Iterator[str]:
        if self.min_probability is not None and self.min_accuracy is not None:
            yield "expected one of min_probability and min_accuracy, got both; set one of them to null"


class Atlas(Section):
    """Atlas of the model: an index of the embeddings of the corpus's cells."""

    neighbors: int = Field(15, ge=1, le=1000)
    """Neighbours of a cell that vote on its label, and whose mean distance says how new it is."""
    donor_columns: Names = Field(["donor", "batch"])
    """obs columns of the donors: the first that a dataset has counts. All cells of a dataset without
    one are of one donor.
    """


class Map(Section):
    """Labels of cells by the atlas of the model."""

    refuse_frac: float = Field(0.05, gt=0, lt=1)
    """Share of the atlas's own cells that would be refused if their donor were left out. Cells at
    larger distances get no label.
    """
    certainty: float = Field(0.8, gt=0.5, le=1)
    """Minimum share of the votes of a label. If labels are terms of the Cell Ontology, a label is
    the most specific term that has it; other labels ignore it.
    """


class KnockOut(Section):
    """In-silico knock-out: shifts of embeddings when the counts of one gene are removed."""

    genes: list[str] | None = Field(None, min_length=1)
    """Ids or symbols; null removes each gene that min_cells of the cells express."""
    cells: int = Field(1000, ge=1)
    """Cells drawn from the dataset at most."""
    min_cells: int = Field(20, ge=1)
    """Minimum number of drawn cells that express a gene."""
    null_genes: int = Field(100, ge=1)
    """Other genes of the most similar expression, each removed too, that a gene is compared with.
    """
    seed: int = Field(0, ge=0, le=2**31 - 1)
    """Seed of the draw of cells."""


class Report(Section):
    """The report page over all runs."""

    title: str = "cellmill report"
    """Heading of the page."""


def learning_rate(train: Train, step: int, steps: int) -> float:
    """Return the rate of optimizer step `step` (from 0) out of `steps`: linear warm-up, then the
    schedule's decay.

    The last step of a schedule that decays has `lr * min_lr_frac`. A wsd schedule (warm-up, stable,
    decay; Hu et al. 2024, MiniCPM) decays linearly over the last `decay_frac` of the steps, and
    never before the end of the warm-up.
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return train.lr
    decayed = steps - train.warmup_steps
    if train.schedule == "wsd":
        decayed = min(decayed, math.ceil(train.decay_frac * steps))
    done = min(1.0, max(0.0, (step + 1 - steps + decayed) / max(1, decayed)))
    left = 0.5 * (1 + math.cos(math.pi * done)) if train.schedule == "cosine" else 1 - done
    return train.lr * (train.min_lr_frac + (1 - train.min_lr_frac) * left)
