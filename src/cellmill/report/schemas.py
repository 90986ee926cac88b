"""Schemas of the JSON files that the page reads. A file is checked when it is read.

A schema has a field for each key that the page, or the card of a pushed model, reads by name. If
the file spells a key differently, the field's `alias` is the file's spelling. A file may have
further keys. A key may be absent if its field has a default. A default of None stands for an
unknown value, unless a comment says otherwise.
"""

from pathlib import Path
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from cellmill.config.section import error_line, explain
from cellmill.errors import DataError
from cellmill.files import read_own_json
from cellmill.runs.cost import Start
from cellmill.runs.results import Kind

JsonObject = dict[str, Any]
"""Values by key."""


class Schema(BaseModel):
    """A JSON object with the keys that the subclass names. The object may have further keys."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    @property
    def content(self) -> JsonObject:
        """The whole object as it was read, with the keys that have no field."""
        return self.model_dump(by_alias=True, exclude_unset=True)

    @classmethod
    def parse(cls, path: Path, value: Any, remedy: str = "make it again") -> Self:
        """Make an object from `value`, which was read from the file `path`.

        Raise DataError if `value` does not match the schema. The message ends in `remedy`.
        """
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise make_damage_error(path, error, remedy) from None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file `path`. Raise DataError if the file is absent or damaged."""
        return cls.parse(path, read_own_json(path))

    @classmethod
    def read_if_present(cls, path: Path) -> Self | None:
        """Read the file `path`. Return None if it is absent. Raise DataError if it is damaged."""
        return cls.read(path) if path.exists() else None


def make_damage_error(
    path: Path, error: ValidationError, remedy: str = "make it again"
) -> DataError:
    """Make a DataError from `error`. Its message is one line on the first problem of the file."""
    # `explain` needs a class only to name unknown keys, which schemas allow
    location, message = explain(error, Schema)
    return DataError(f"{path}: damaged: {error_line(location, message)}; {remedy}")


class PlannedMemorySchema(Schema):
    """Key `memory` of plan.json."""

    total_bytes: int  # planned peak memory of one process


class PlanSchema(Schema):
    """plan.json, the plan of a training."""

    parameters: int | None = None  # number of parameters of the model
    memory: PlannedMemorySchema | None = None
    steps: int | None = None
    steps_per_epoch: int | None = None
    hours: float | None = None  # estimated duration of training, validation included
    cells: int | None = None  # number of training cells
    cells_seen: int | None = None  # number of cells read in all steps, repeated cells included
    world_size: int | None = None  # number of processes


class StatusSchema(Schema):
    """State of a training, in train/status.json or train/state.json."""

    state: str = "not trained"
    step: int | None = None  # number of optimizer steps so far
    # number of cells read so far, repeated cells included
    cells_seen: int | None = Field(default=None, alias="cells")
    train_loss: float | None = None
    best_value: float | None = None  # best value so far of the metric `train.best_metric`
    best_step: int | None = None  # step with `best_value`
    wall_s: float | None = None  # wall time of the training in seconds
    # number of steps that were skipped because the loss or the gradient norm was not finite
    skipped_steps: int | None = None
    world_size: int | None = None  # number of processes


class ObjectiveOptionsSchema(Schema):
    """Section `objective` of resolved options."""

    name: str | None = None
    # Options of objective `cell_decoding`. Objectives of plug-ins may have options with these names
    # and with values of any type.
    batch_column: Any = None  # obs column of the batch; None if no column was chosen
    batch_reason: Any = None  # why `batch_column: auto` chose a column or none; None without auto


class ModelOptionsSchema(Schema):
    """Section `model` of resolved options."""

    family: str | None = None
    # width, an integer in family `profile`; families of plug-ins may have values of any type
    hidden: Any = None


class TrainOptionsSchema(Schema):
    """Section `train` of resolved options."""

    lr: float | None = None
    epochs: float | None = None  # length of the training; None if it is given in steps
    best_metric: str | None = None  # metric that chooses the best checkpoint; None if unknown


class OptionsSchema(Schema):
    """Resolved options of a run."""

    objective: ObjectiveOptionsSchema = ObjectiveOptionsSchema()
    model: ModelOptionsSchema = ModelOptionsSchema()
    train: TrainOptionsSchema = TrainOptionsSchema()


class TrainingDataSchema(Schema):
    """Training data of a model or run."""

    fingerprint: str | None = None  # digest of the training shards
    # obs columns of the labels that the model was trained with; empty without labels
    supervised_by: list[str] | None = None


class ModelSchema(TrainingDataSchema):
    """config.json of an exported model, and key `model` of metrics.json."""

    step: int | None = None  # step of the checkpoint that was exported
    digest: str | None = None  # digest of model.safetensors
    # models that the training started from, directly or through other models, if their training
    # cells are unknown
    ancestors_with_unknown_cells: list[str] = Field(default=[], alias="unknown_cells")


class RunRecordSchema(TrainingDataSchema):
    """train/run.json, the record of a training."""

    options: OptionsSchema = OptionsSchema()
    environment: JsonObject = {}  # such as versions of packages
    # the next fields are read only for the card of a pushed model
    manifest: str | None = None  # path of the manifest of the training shards
    init_from: str | None = None  # model from which the training started; None for random weights
    nodes: str | None = None  # number of nodes, or a range such as 1-2
    nproc_per_node: int | None = None  # number of processes on each node


class GeneCoverageSchema(Schema):
    """Key `genes` of a dataset in metrics.json."""

    n_present: int  # number of genes of the vocabulary that the dataset measures
    n_genes: int  # number of genes in the vocabulary
    # fraction of a training cell's expressed genes that the dataset measures, as the mean over
    # training cells
    expressed_frac: float


class BridgeValueSchema(Schema):
    """A value of one method in one metric, computed by another package."""

    name: str  # name of the method
    kind: Kind  # kind of the method's row
    metric: str
    value: float | None


class BridgeSchema(Schema):
    """bridges/DATASET.PACKAGE.json: values of another package for a run and its baselines."""

    package: str
    version: str  # version of the package
    dataset: str
    model_digest: str | None = None  # digest of the model that the package measured
    rows: list[BridgeValueSchema]


class CostSchema(Schema):
    """train/cost.json, the cost of a training."""

    model_config = ConfigDict(strict=False)  # a strict schema would refuse a dict for a Start

    source: str  # where the numbers come from, such as SLURM's accounting
    starts: list[Start] = Field(alias="jobs")
    totals: dict[str, float | None]  # total by quantity; None if unknown
    unknown: dict[str, str]  # by quantity, the reason why its total is unknown


class LoggedLineSchema(Schema):
    """A line of metrics.jsonl. A list has one value per rank."""

    model_config = ConfigDict(extra="ignore")

    step: int
    loss: float | None = None
    val_loss: float | None = None
    effective_rank: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    cells_per_s: float | None = None
    data_wait_frac: float | None = None
    mfu: float | None = None
    peak_allocated_gb: list[float] = []
    peak_resident_gb: list[float] = []
    gpu_busy_frac: list[float] = []
    gpu_power_w: list[float] = []
    # The next two are measured in validations. They are the share of the variance of log depth that
    # the embedding explains, and the share of the embedding's variance that the batch explains.
    depth_r2: float | None = None
    batch_r2: float | None = None


class SourceSchema(Schema):
    """Origin of a dataset."""

    file: str  # name of the input file or folder
    sha256: str  # hexadecimal SHA-256 of the input file
    counts: str  # place of the counts in the file, such as X
    source: str | None = None  # origin of the file, in the words of the dataset table
    licence: str | None = None
    counts_rule: str | None = None  # how fractional counts were rounded; None if there were none
    n_rounded: int = 0  # number of counts that were rounded


class BeforeAfterSchema(Schema):
    """Numbers of cells, or of genes, before and after quality control."""

    before: int = Field(alias="in")
    after: int = Field(alias="out")
    dropped: dict[str, int] = {}  # number of dropped cells or genes by reason


class EnsemblCoverageSchema(Schema):
    """Genes of a dataset that have an Ensembl id."""

    frac: float  # fraction of all genes that have an Ensembl id
    reference: str | None = None  # reference species of the orthologs; None without orthologs
    ortholog_frac: float = 0.0  # fraction of genes with an id that have an ortholog in `reference`
    notes: list[str] = []


class HistogramSchema(Schema):
    """Number of cells in each bin of a quantity, before and after quality control."""

    edges: list[float]  # (bins + 1,), edges of the bins
    before: list[int]  # (bins,), numbers of cells
    after: list[int]  # (bins,), numbers of cells

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if not 0 < len(self.edges) - 1 == len(self.before) == len(self.after):
            raise ValueError("expected one edge more than numbers before and after")
        return self


class LabelMapSchema(Schema):
    """Effect of a label map. Each field has the number of cells by original label."""

    renamed: dict[str, int]
    kept: dict[str, int]
    made_missing: dict[str, int]


class QcSchema(Schema):
    """cells/DATASET.json, the report of a dataset's quality control (QC)."""

    dataset: str
    source: SourceSchema
    cells: BeforeAfterSchema
    genes: BeforeAfterSchema
    coverage: EnsemblCoverageSchema
    histograms: dict[str, HistogramSchema]  # by quantity, such as n_genes
    labels: dict[str, LabelMapSchema] = {}  # by label column
    # by label column, the number of cells with each text that means "no label"
    no_label: dict[str, dict[str, int]] = {}
    notes: list[str] = []


class LevelsSchema(Schema):
    """Levels (distinct values) of an obs column."""

    levels: list[Any]


class VocabularySchema(Schema):
    """Vocabulary of the shards."""

    digest: str


class SplitSchema(Schema):
    """A split of the corpus, such as train."""

    n_obs: int  # number of cells
    nnz: int  # number of stored values of all cells together
    shards: list[Any]


class ManifestSchema(Schema):
    """shards/manifest.json, the contents of the shards."""

    fingerprint: str  # digest of the shards
    vocabulary: VocabularySchema
    splits: dict[str, SplitSchema]  # by name of the split
    obs_levels: dict[str, LevelsSchema] = {}  # by obs column
