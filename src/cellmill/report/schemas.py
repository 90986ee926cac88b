"""Schemas of the JSON files that the page reads. A file is checked when it is read.

A schema has the keys that the page, or the card of a pushed model, reads by name. Where the key of
the file has another name, the field's `alias` is that. A file may have further keys. Keys with a
default may be absent.
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
    """A JSON object with the keys of its class; it may have further keys."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    @property
    def content(self) -> JsonObject:
        """The whole object as it was read, for tables of all its keys."""
        return self.model_dump(by_alias=True, exclude_unset=True)

    @classmethod
    def parse(cls, path: Path, value: Any, remedy: str = "make it again") -> Self:
        """Check `value`, which is from the file `path`. Raise DataError if it does not match.

        The error ends in `remedy`.
        """
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise make_damage_error(path, error, remedy) from None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file `path`. Raise DataError if it is damaged."""
        return cls.parse(path, read_own_json(path))

    @classmethod
    def read_if_present(cls, path: Path) -> Self | None:
        """Read the file `path`; None if it is absent. Raise DataError if it is damaged."""
        return cls.read(path) if path.exists() else None


def make_damage_error(
    path: Path, error: ValidationError, remedy: str = "make it again"
) -> DataError:
    """A DataError that names the file's first problem in one line."""
    location, message = explain(error, Schema)
    return DataError(f"{path}: damaged: {error_line(location, message)}; {remedy}")


class PlannedMemorySchema(Schema):
    """Key `memory` of plan.json."""

    total_bytes: int  # peak of one process


class PlanSchema(Schema):
    """plan.json."""

    parameters: int | None = None  # number of parameters of the model
    memory: PlannedMemorySchema | None = None
    steps: int | None = None
    steps_per_epoch: int | None = None
    hours: float | None = None  # estimated duration of training, validation included
    cells: int | None = None  # training cells
    cells_seen: int | None = None  # cells read in all steps together
    world_size: int | None = None


class StatusSchema(Schema):
    """train/status.json and train/state.json."""

    state: str = "not trained"
    step: int | None = None  # optimizer steps so far
    cells_seen: int | None = Field(default=None, alias="cells")
    train_loss: float | None = None
    best_value: float | None = None  # of `train.best_metric`
    best_step: int | None = None  # step of `best_value`
    wall_s: float | None = None
    skipped_steps: int | None = None
    world_size: int | None = None


class ObjectiveOptionsSchema(Schema):
    """Section `objective` of resolved options."""

    name: str | None = None
    batch_column: str | None = None
    batch_reason: str | None = None  # set if batch_column auto was resolved


class ModelOptionsSchema(Schema):
    """Section `model` of resolved options."""

    family: str | None = None
    hidden: int | None = None


class TrainOptionsSchema(Schema):
    """Section `train` of resolved options."""

    lr: float | None = None
    epochs: float | None = None  # set if the length is given in epochs
    best_metric: str | None = None  # chooses the best checkpoint; None if unknown


class OptionsSchema(Schema):
    """Resolved options of a run."""

    objective: ObjectiveOptionsSchema = ObjectiveOptionsSchema()
    model: ModelOptionsSchema = ModelOptionsSchema()
    train: TrainOptionsSchema = TrainOptionsSchema()


class TrainingDataSchema(Schema):
    """Training data of a model or run."""

    fingerprint: str | None = None  # digest of the training shards
    supervised_by: list[str] | None = None  # obs columns of the labels, if any


class ModelSchema(TrainingDataSchema):
    """config.json of an exported model, and key `model` of metrics.json."""

    step: int | None = None  # of the checkpoint that was exported
    digest: str | None = None  # of model.safetensors
    ancestors_with_unknown_cells: list[str] = Field(default=[], alias="unknown_cells")


class RunRecordSchema(TrainingDataSchema):
    """train/run.json."""

    options: OptionsSchema = OptionsSchema()
    environment: JsonObject = {}
    # for the card of a pushed model
    manifest: str | None = None
    init_from: str | None = None
    nodes: str | None = None
    nproc_per_node: int | None = None


class GeneCoverageSchema(Schema):
    """Key `genes` of a dataset in metrics.json."""

    n_present: int  # genes of the vocabulary that the dataset measures
    n_genes: int  # genes of the vocabulary
    # of the genes that a training cell expresses, the fraction that the dataset measures; mean
    # over training cells
    expressed_frac: float


class BridgeValueSchema(Schema):
    """A value of one method in one metric."""

    name: str
    kind: Kind
    metric: str
    value: float | None


class BridgeSchema(Schema):
    """bridges/DATASET.PACKAGE.json: metrics of another package on a run and its baselines."""

    package: str
    version: str
    dataset: str
    model_digest: str | None = None
    rows: list[BridgeValueSchema]


class CostSchema(Schema):
    """train/cost.json."""

    model_config = ConfigDict(strict=False)  # a strict schema refuses a dict for Start

    source: str
    starts: list[Start] = Field(alias="jobs")
    totals: dict[str, float | None]  # by quantity; None if unknown
    unknown: dict[str, str]  # reasons by quantity


class LoggedLineSchema(Schema):
    """A line of metrics.jsonl. Lists are over ranks."""

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
    depth_r2: float | None = None
    batch_r2: float | None = None


class SourceSchema(Schema):
    """Origin of a dataset."""

    file: str
    sha256: str
    counts: str  # where in the file the counts are, such as X
    source: str | None = None  # where the file comes from, in the words of the dataset table
    licence: str | None = None
    counts_rule: str | None = None  # how counts with fractions were rounded, if they were
    n_rounded: int = 0  # counts that were rounded


class BeforeAfterSchema(Schema):
    """Numbers of cells, or of genes, before and after quality control."""

    before: int = Field(alias="in")
    after: int = Field(alias="out")
    dropped: dict[str, int] = {}  # number by reason


class EnsemblCoverageSchema(Schema):
    """Genes of a dataset that have an Ensembl id."""

    frac: float  # of all genes, with an Ensembl id
    reference: str | None = None
    ortholog_frac: float = 0.0  # of genes with an id, with an ortholog in `reference`
    notes: list[str] = []


class HistogramSchema(Schema):
    """Numbers of cells in each bin before and after quality control."""

    edges: list[float]  # (bins + 1,)
    before: list[int]  # (bins,)
    after: list[int]  # (bins,)

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if not 0 < len(self.edges) - 1 == len(self.before) == len(self.after):
            raise ValueError("expected one edge more than numbers before and after")
        return self


class LabelMapSchema(Schema):
    """Effect of a label map: number of cells by original label."""

    renamed: dict[str, int]
    kept: dict[str, int]
    made_missing: dict[str, int]


class QcSchema(Schema):
    """QC report of a dataset."""

    dataset: str
    source: SourceSchema
    cells: BeforeAfterSchema
    genes: BeforeAfterSchema
    coverage: EnsemblCoverageSchema
    histograms: dict[str, HistogramSchema]
    labels: dict[str, LabelMapSchema] = {}
    # by label column, the number of cells with each text that means "no label"
    no_label: dict[str, dict[str, int]] = {}
    notes: list[str] = []


class LevelsSchema(Schema):
    """Levels of an obs column."""

    levels: list[Any]


class VocabularySchema(Schema):
    """Vocabulary of the shards."""

    digest: str


class SplitSchema(Schema):
    """A split of the cells, such as train."""

    n_obs: int
    nnz: int  # stored values of all cells
    shards: list[Any]


class ManifestSchema(Schema):
    """shards/manifest.json."""

    fingerprint: str
    vocabulary: VocabularySchema
    splits: dict[str, SplitSchema]
    obs_levels: dict[str, LevelsSchema] = {}  # by obs column
