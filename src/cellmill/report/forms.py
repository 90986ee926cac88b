"""Forms of the JSON files that the page reads. A file is checked once, when it is read.

A form lists the keys that the page, or the card of a pushed model, reads by name; a file may have
more. Keys with a default may be absent.
"""

from pathlib import Path
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    model_validator,
)

from cellmill.config.section import error_line, explain
from cellmill.errors import DataError
from cellmill.files import read_json
from cellmill.runs.cost import Start
from cellmill.runs.results import Kind

JsonObject = dict[str, Any]
"""Values by key."""


class Form(BaseModel):
    """A JSON object that may have other keys than those of its class."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    @property
    def content(self) -> JsonObject:
        """The whole object as it was read, for tables of all its keys."""
        return self.model_dump(exclude_unset=True)

    @classmethod
    def parse(cls, path: Path, value: Any) -> Self:
        """`value`, from the file `path`. Raises DataError if it does not match the form."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise damage_error(path, error) from None

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The file `path`; None if it is absent. Raises DataError if it is damaged."""
        return cls.parse(path, read_json(path)) if path.exists() else None


def damage_error(path: Path, error: ValidationError) -> DataError:
    """A DataError that names the file's first problem in one line."""
    return DataError(f"{path}: damaged: {error_line(*explain(error, Form))}; make it again")


class PlannedMemoryForm(Form):
    total_bytes: int


class PlanForm(Form):
    """plan.json."""

    parameters: int | None = None
    memory: PlannedMemoryForm | None = None
    steps: int | None = None
    steps_per_epoch: int = 0
    hours: float | None = None
    cells: int | None = None
    cells_seen: int | None = None
    world_size: int | None = None


class StatusForm(Form):
    """train/status.json, and train/state.json."""

    state: str = "not trained"
    step: int | None = None
    cells: int | None = None
    train_loss: float | None = None
    best_val_loss: float | None = None
    best_step: int | None = None
    wall_s: float | None = None
    skipped_steps: int | None = None
    world_size: int | None = None


class ObjectiveOptionsForm(Form):
    name: str | None = None
    batch_column: str | None = None
    batch_reason: str | None = None  # set if batch_column auto was resolved


class ModelOptionsForm(Form):
    family: str | None = None
    hidden: int | None = None


class TrainOptionsForm(Form):
    lr: float | None = None


class OptionsForm(Form):
    """Resolved options of a run."""

    objective: ObjectiveOptionsForm = ObjectiveOptionsForm()
    model: ModelOptionsForm = ModelOptionsForm()
    train: TrainOptionsForm = TrainOptionsForm()


class TrainingDataForm(Form):
    """The data that a model was, or a run is, trained on."""

    fingerprint: str | None = None  # digest of the training shards
    supervised_by: list[str] | None = None  # obs columns of the labels, if any


class ModelForm(TrainingDataForm):
    """config.json of an exported model, and key `model` of metrics.json."""

    step: int | None = None


class RunRecordForm(TrainingDataForm):
    """train/run.json."""

    options: OptionsForm = OptionsForm()
    environment: JsonObject = {}
    # for the card of a pushed model
    manifest: str | None = None
    init_from: str | None = None
    nodes: str | None = None
    nproc_per_node: int | None = None


class MeasuredGenesForm(Form):
    """Key `genes` of a dataset in metrics.json."""

    n_present: int
    n_genes: int
    expressed_frac: float


class BridgeRowForm(Form):
    """A value of one method in one metric."""

    name: str
    kind: Kind
    metric: str
    value: FiniteFloat | None


class BridgeForm(Form):
    """bridges/DATASET.PACKAGE.json: metrics of another package on a run's predictions."""

    package: str
    version: str
    dataset: str
    model_digest: str | None = None
    rows: list[BridgeRowForm]


class CostForm(Form):
    """train/cost.json."""

    model_config = ConfigDict(strict=False)  # a strict form refuses a dict for Start

    source: str
    jobs: list[Start]
    totals: dict[str, FiniteFloat | None]  # by quantity; None if unknown
    unknown: dict[str, str]  # reasons by quantity


class LoggedLineForm(Form):
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


class SourceForm(Form):
    """Origin of a dataset."""

    file: str
    sha256: str
    counts: str
    source: str | None = None
    licence: str | None = None
    counts_rule: str | None = None
    n_rounded: int = 0


class KeptForm(Form):
    """Numbers of cells, or of genes, before and after quality control."""

    before: int = Field(alias="in")
    after: int = Field(alias="out")
    dropped: dict[str, int] = {}  # numbers by reason


class CoverageForm(Form):
    """Genes of a dataset that have an Ensembl id."""

    frac: float
    reference: str | None = None
    ortholog_frac: float = 0.0  # genes with an ortholog in organism `reference`
    notes: list[str] = []


class HistogramForm(Form):
    """Cells of each bin before and after quality control."""

    edges: list[float]  # (bins + 1,)
    before: list[int]
    after: list[int]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if not 0 < len(self.edges) - 1 == len(self.before) == len(self.after):
            raise ValueError("expected one edge more than numbers before and after")
        return self


class LabelMapForm(Form):
    """Effect of a label map: number of cells by the label that was renamed, kept or removed."""

    renamed: dict[str, int]
    kept: dict[str, int]
    made_missing: dict[str, int]


class QcForm(Form):
    """QC report of a dataset."""

    dataset: str
    source: SourceForm
    cells: KeptForm
    genes: KeptForm
    coverage: CoverageForm
    histograms: dict[str, HistogramForm]
    labels: dict[str, LabelMapForm] = {}
    # by label column, the number of cells with each text that means "no label"
    no_label: dict[str, dict[str, int]] = {}
    notes: list[str] = []


class LevelsForm(Form):
    levels: list[Any]


class VocabularyForm(Form):
    digest: str


class SplitForm(Form):
    n_obs: int
    nnz: int
    shards: list[Any]


class ManifestForm(Form):
    """shards/manifest.json."""

    fingerprint: str
    vocabulary: VocabularyForm
    splits: dict[str, SplitForm]
    obs_levels: dict[str, LevelsForm] = {}  # by obs column
