"""Forms of the JSON files that the page reads: what each must hold, checked once when it is read.

A form lists every key that the page reads by name; a file may have more. Keys with a default may be
absent.
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

Object = dict[str, Any]
Count = int | None
Number = float | None
Text = str | None


class Form(BaseModel):
    """A JSON object."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    @property
    def content(self) -> Object:
        """All keys of the object and their values, for a listing."""
        return self.model_dump(exclude_unset=True)

    @classmethod
    def parse(cls, path: Path, value: Any) -> Self:
        """`value`, from the file `path`. Raises DataError if it does not match the form."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise damaged(path, error) from None

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The file `path`; None if it is absent. Raises DataError if it is damaged."""
        return cls.parse(path, read_json(path)) if path.exists() else None


class PlannedMemory(Form):
    total_bytes: int


class PlanForm(Form):
    """plan.json."""

    parameters: Count = None
    memory: PlannedMemory | None = None
    steps: Count = None
    steps_per_epoch: int = 0
    hours: Number = None
    cells: Count = None
    cells_seen: Count = None
    world_size: Count = None


class StatusForm(Form):
    """train/status.json, and train/state.json."""

    state: str = "not trained"
    step: Count = None
    cells: Count = None
    train_loss: Number = None
    best_val_loss: Number = None
    best_step: Count = None
    wall_s: Number = None
    skipped_steps: Count = None
    world_size: Count = None


class ObjectiveOptionsForm(Form):
    name: Text = None
    batch_column: Text = None
    batch_reason: Text = None  # set if batch_column auto was resolved


class ModelOptionsForm(Form):
    family: Text = None
    hidden: Count = None


class TrainOptionsForm(Form):
    lr: Number = None


class OptionsForm(Form):
    """Resolved options of a run."""

    objective: ObjectiveOptionsForm = ObjectiveOptionsForm()
    model: ModelOptionsForm = ModelOptionsForm()
    train: TrainOptionsForm = TrainOptionsForm()


class ModelForm(Form):
    """config.json of an exported model, and `model` of metrics.json."""

    step: Count = None
    fingerprint: Text = None  # of the training shards
    supervised_by: list[str] | None = None  # obs columns


class RunRecordForm(ModelForm):
    """train/run.json."""

    options: OptionsForm = OptionsForm()
    environment: Object = {}
    manifest: Text = None
    init_from: Text = None
    nodes: Text = None
    nproc_per_node: Count = None


class MeasuredGenesForm(Form):
    """`genes` of a dataset of metrics.json."""

    n_present: int
    n_genes: int
    expressed_frac: float


class BridgeRow(Form):
    name: str
    kind: Kind
    metric: str
    value: FiniteFloat | None


class BridgeForm(Form):
    """bridges/DATASET.PACKAGE.json: metrics of another package on a run's predictions."""

    package: str
    version: str
    dataset: str
    model_digest: Text = None
    rows: list[BridgeRow]


class CostForm(Form):
    """train/cost.json."""

    model_config = ConfigDict(strict=False)  # a strict form would expect objects of class Start

    source: str
    jobs: list[Start]
    totals: dict[str, FiniteFloat | None]  # None: unknown
    unknown: dict[str, str]


class LoggedLine(Form):
    """A line of metrics.jsonl. Lists are over ranks."""

    model_config = ConfigDict(extra="ignore")

    step: int
    loss: Number = None
    val_loss: Number = None
    effective_rank: Number = None
    lr: Number = None
    grad_norm: Number = None
    cells_per_s: Number = None
    data_wait_frac: Number = None
    mfu: Number = None
    peak_allocated_gb: list[float] = []
    peak_resident_gb: list[float] = []
    gpu_busy_frac: list[float] = []
    gpu_power_w: list[float] = []
    depth_r2: Number = None
    batch_r2: Number = None


class SourceForm(Form):
    """Origin of a dataset."""

    file: str
    sha256: str
    counts: str
    source: Text = None
    licence: Text = None
    counts_rule: Text = None
    n_rounded: int = 0


class KeptForm(Form):
    """Numbers of cells, or of genes, before and after quality control."""

    before: int = Field(alias="in")
    after: int = Field(alias="out")
    dropped: dict[str, int] = {}  # by reason


class CoverageForm(Form):
    """Genes of a dataset that have an Ensembl id."""

    frac: float
    reference: Text = None
    ortholog_frac: float = 0.0  # in organism `reference`
    notes: list[str] = []


class HistogramForm(Form):
    """Cells of each bin before and after quality control."""

    edges: list[float]  # one more than bins
    before: list[int]
    after: list[int]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if not 0 < len(self.edges) - 1 == len(self.before) == len(self.after):
            raise ValueError("expected one edge more than numbers before and after")
        return self


class LabelMapForm(Form):
    """Cells by label: renamed, left as they are, and without a label now."""

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
    no_label: dict[str, dict[str, int]] = {}  # cells by text that means no label, by label
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


def damaged(path: Path, error: ValidationError) -> DataError:
    """The first problem of a file in one line."""
    return DataError(f"{path}: damaged: {error_line(*explain(error, Form))}; make it again")
