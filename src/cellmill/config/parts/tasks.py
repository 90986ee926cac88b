"""Options of evaluation tasks. Torch-free."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field

from cellmill.config.datasets import check_name
from cellmill.config.plugin import Plugin
from cellmill.config.section import Counts, EachOnce, Names

MOST_FOLDS = Field(
    10,
    ge=2,
    description="Values are left out one at a time, or in this many groups if there are more.",
)
# with more levels or repeats of a degradation, two of its random draws would be equal
ContextRole = Literal["label", "condition", "donor", "batch"]
MAX_LEVELS = 100
MAX_REPEATS = 1000
MIN_CELLS = Field(10, ge=2, description="Classes with fewer evaluated cells are skipped, by name.")


class TaskConfig(Plugin):
    """Base of every task's options; `implementation` is a `cellmill.evaluate.task.Task`."""

    kind = "task"
    reads_label: ClassVar[bool] = False  # runs once for each label of a dataset
    files: ClassVar[tuple[str, ...]] = ()  # options that name files, which the rule reads too
    # most of an option, or of the values in its list, at effort fast
    fast: ClassVar[Mapping[str, int]] = {}

    name: str

    def reduce_effort(self) -> tuple[Self, list[str]]:
        """The options at effort fast, and what they leave out."""
        reduced: dict[str, Any] = {}
        left_out = []
        for option, limit in self.fast.items():
            value = getattr(self, option)
            size = len(value) if isinstance(value, list) else value
            if size > limit:
                reduced[option] = value[:limit] if isinstance(value, list) else limit
                left_out.append(f"{size - limit} of {size} {option}")
        return self.model_copy(update=reduced), left_out

    def levels(self) -> list[str]:
        """Names of the levels that the options add to the table: parts of names of columns."""
        return []

    def paths(self) -> dict[str, str]:
        """Files that the options name, by option."""
        paths = {option: getattr(self, option) for option in self.files}
        return {option: path for option, path in paths.items() if path is not None}

    def missing_role(self, roles: Collection[str]) -> str | None:
        """Column of the table without which the task is skipped, if a dataset with `roles` lacks it.

        Roles are label, control, and those of obs columns.
        """
        if self.reads_label and "label" not in roles:
            return "label"
        needed = self.needed_roles()
        return None if {*needed} & {*roles} else " or ".join(needed) or None

    def needed_roles(self) -> Sequence[str]:
        """Columns of the table, beside label, of which a dataset must have one."""
        return ()

    def packages(self) -> dict[str, str]:
        """Modules beside the core that the task imports, and the extra of cellmill that each comes
        with.
        """
        return {}


class LabelTaskConfig(TaskConfig):
    """Base of tasks that classify cells by each label of a dataset."""

    reads_label = True

    neighbors: int = Field(15, ge=1)
    """k of the kNN classifier."""


class ProbeConfig(LabelTaskConfig):
    """Classifiers of the label on embeddings, against baselines; skipped without a label."""

    implementation = "cellmill.evaluate.tasks.classification.probe:Probe"
    fast: ClassVar[Mapping[str, int]] = {"seeds": 1}
    name: Literal["probe"] = "probe"
    seeds: int = Field(5, ge=1)
    """Repetitions of the cross-validation, each with different folds."""


class ReconstructConfig(TaskConfig):
    """The training objective on the evaluated cells, against the gene statistics of training cells."""

    implementation = "cellmill.evaluate.tasks.reconstruct:Reconstruct"
    name: Literal["reconstruct"] = "reconstruct"
    objective: dict[str, Any] = Field({})
    """Options of the training objective to override, as `mask_frac`."""

    def problems(self) -> Iterator[str]:
        if "name" in self.objective:
            yield "objective: `name` cannot change: the model is judged by the objective it was trained with"


class FewShotConfig(LabelTaskConfig):
    """Few-shot classifiers of the label, trained on a few cells per class; skipped without a label."""

    implementation = "cellmill.evaluate.tasks.classification.few_shot:FewShot"
    fast: ClassVar[Mapping[str, int]] = {"draws": 3}
    name: Literal["few_shot"] = "few_shot"
    shots: Counts = Field([5, 10, 20], min_length=1)
    """Numbers of training cells per class."""
    draws: int = Field(10, ge=2)
    """Number of random draws of the training cells."""
    neighbors: int = Field(5, ge=1)
    """k of the kNN classifier, at most the number of training cells."""


class LeaveOutConfig(LabelTaskConfig):
    """Classifiers of the label tested on left-out donors or batches; skipped without a label."""

    implementation = "cellmill.evaluate.tasks.classification.leave_out:LeaveOut"
    name: Literal["leave_out"] = "leave_out"
    roles: Annotated[list[Literal["donor", "batch"]], EachOnce] = Field(
        ["donor", "batch"], min_length=1
    )
    """Roles to leave out by value, such as donor or batch; roles that the dataset lacks are
    ignored.
    """
    most_folds: int = MOST_FOLDS

    def needed_roles(self) -> Sequence[str]:
        return self.roles


class DegradedConfig(LabelTaskConfig):
    """Options of tasks that classify cells with removed counts or genes."""

    repeats: int = Field(3, ge=1, le=MAX_REPEATS)
    """Random draws of the removed counts or genes, each with other folds."""


class LowDepthConfig(DegradedConfig):
    """Classifiers of the label on cells with a fraction of their counts; skipped without a label."""

    implementation = "cellmill.evaluate.tasks.classification.low_depth:LowDepth"
    fast: ClassVar[Mapping[str, int]] = {"repeats": 1, "count_fracs": 1}
    name: Literal["low_depth"] = "low_depth"
    count_fracs: Annotated[list[Annotated[float, Field(gt=0, lt=1)]], EachOnce] = Field(
        [0.3, 0.1], min_length=1, max_length=MAX_LEVELS
    )
    """Fractions of the counts to keep."""

    def problems(self) -> Iterator[str]:
        if len({*self.levels()}) < len(self.count_fracs):
            yield f"count_fracs: expected fractions that differ in 6 digits, got {self.count_fracs}; leave one out"

    def levels(self) -> list[str]:
        return [f"{100 * frac:g} % of counts" for frac in self.count_fracs]


class MissingGenesConfig(DegradedConfig):
    """Classifiers of the label on cells with few measured genes; skipped without a label."""

    implementation = "cellmill.evaluate.tasks.classification.missing_genes:MissingGenes"
    fast: ClassVar[Mapping[str, int]] = {"repeats": 1, "genes": 1}
    name: Literal["missing_genes"] = "missing_genes"
    genes: Counts = Field([200, 75], min_length=1, max_length=MAX_LEVELS)
    """Numbers of genes to keep, drawn from the expressed ones."""

    def levels(self) -> list[str]:
        return [f"{n:,} genes" for n in self.genes]


class PerturbationConfig(TaskConfig):
    """Expression changes under held-out perturbations, donors or batches; skipped without controls."""

    implementation = "cellmill.evaluate.tasks.perturbation.task:Perturbation"
    files = ("split_file",)
    fast: ClassVar[Mapping[str, int]] = {"seeds": 1}
    name: Literal["perturbation"] = "perturbation"
    held_out: Annotated[
        list[Literal["perturbation", "label", "condition", "donor", "batch"]], EachOnce
    ] = Field(["perturbation", "donor", "batch"], min_length=1)
    """Roles to leave out by value, of those that the dataset has; label stands for cell types."""
    min_cells: int = Field(20, ge=4)
    """Perturbations with fewer cells (per left-out donor) are not used."""
    top_genes: int = Field(20, ge=1)
    """Number of genes with the largest measured change over which the predicted direction is
    scored.
    """
    seeds: int = Field(3, ge=1)
    """Repetitions of the cross-validation over perturbations."""
    most_folds: int = MOST_FOLDS
    neighbors: int = Field(5, ge=1)
    """k of the kNN average over perturbations of similar genes."""
    priors: dict[Annotated[str, AfterValidator(check_name)], str] = Field({})
    """Files of gene vectors by name, in the formats of model.gene_vectors, such as of STRING or of a protein language
    model: new perturbations are predicted from the vectors of their genes.
    """
    split_file: str | None = None
    """File of perturbations to train and to test on, instead of held_out: TOML of cell-load, JSON lists by split as of
    GEARS, or a table with columns perturbation, split and perhaps context. Each group of tested perturbations, such as
    few-shot or 1 of 2 seen, has scores of its own.
    """
    split_context: ContextRole = "label"
    """Role whose values are the contexts of split_file; label stands for cell types and cell lines."""
    combination_delimiter: str = Field("+", min_length=1)
    """Text between the parts of a combination in the dataset's perturbations; preprocess writes genes with +.
    Training and `cellmill perturb` divide at + only."""
    doses: Literal["column", "names"] | None = None
    """Hold out single doses too, and fit curves to the others: doses of the dataset's column, or at the end of names,
    as in drug_0.1uM.
    """
    dose_unit: Literal["pM", "nM", "uM", "mM", "M", "ng/ml", "ug/ml", "mg/ml"] | None = None
    """Unit of the column of doses, and of names without one; names with a unit keep theirs."""
    probe_noise: float = Field(0.5, gt=0)
    """Noise in the rows `probe: …` that test the metrics, in standard deviations of the predicted change."""

    def needed_roles(self) -> Sequence[str]:
        return ("control",)

    def problems(self) -> Iterator[str]:
        if self.doses is not None and self.split_file is not None:
            yield f"doses: expected null next to split_file, got {self.doses}; split the doses in the file, as names"
        if self.doses is None and self.dose_unit is not None:
            yield f"dose_unit: expected doses next to {self.dose_unit}, got null; set doses to column or names"

    def paths(self) -> dict[str, str]:
        priors = {f"priors.{name}": path for name, path in self.priors.items()}
        return super().paths() | priors


class ImputationConfig(TaskConfig):
    """Imputation of hidden genes from the others; skipped without enough cells."""

    implementation = "cellmill.evaluate.tasks.imputation.task:Imputation"
    fast: ClassVar[Mapping[str, int]] = {"seeds": 1}
    name: Literal["imputation"] = "imputation"
    hidden_frac: float = Field(0.2, gt=0, le=0.9)
    """Fraction of the genes to hide, the same for all cells."""
    genes: Names | None = Field(None, min_length=1)
    """Genes to hide instead of a random fraction, by Ensembl id or symbol; null draws them."""
    max_genes: int = Field(500, ge=1)
    """Maximum number of hidden genes."""
    min_cells: int = Field(10, ge=2)
    """Genes expressed by fewer of the evaluated cells are not hidden."""
    neighbors: int = Field(15, ge=1)
    """k of the kNN average."""
    seeds: int = Field(3, ge=1)
    """Repetitions of the cross-validation; 1 if folds are donors or batches."""
    most_folds: int = MOST_FOLDS


class GeneEmbeddingConfig(TaskConfig):
    """Prediction of gene sets and transcription factors from gene embeddings; skipped for a model
    without any.
    """

    implementation = "cellmill.evaluate.tasks.gene_embedding:GeneEmbedding"
    files = ("gene_sets", "transcription_factors")
    fast: ClassVar[Mapping[str, int]] = {"seeds": 1}
    name: Literal["gene_embedding"] = "gene_embedding"
    gene_sets: str | None = None
    """GMT file: per line a set's name, a description and its genes."""
    transcription_factors: str | None = None
    """File of transcription factors, one per line, by Ensembl id or symbol."""
    min_genes: int = Field(10, ge=2)
    """Gene sets with fewer known genes are skipped, by name."""
    max_others: int = Field(2000, ge=50)
    """Maximum number of genes outside all sets: a seeded draw of those that training cells express.
    """
    seeds: int = Field(3, ge=1)
    """Repetitions of the cross-validation and of the draw."""

    def problems(self) -> Iterator[str]:
        if self.gene_sets is None and self.transcription_factors is None:
            yield "task gene_embedding: expected gene_sets or transcription_factors, got neither; name a file"


class GrnConfig(TaskConfig):
    """Gene similarity against known regulatory edges; an error if too few of them are among the
    model's genes.
    """

    implementation = "cellmill.evaluate.tasks.grn:Grn"
    files = ("edges",)
    name: Literal["grn"] = "grn"
    edges: str
    """Tab-separated file of edges: per line a transcription factor and a target, by Ensembl id or
    symbol.
    """
    min_edges: int = Field(20, ge=1)
    """Minimum number of edges between known genes, else the task fails."""
    min_targets: int = Field(3, ge=1)
    """Transcription factors with fewer known targets are skipped."""
    absolute: bool = False
    """Rank pairs by absolute similarity: negative ones count equally."""


class ClusteringConfig(LabelTaskConfig):
    """Leiden clustering of the embeddings against the label (extra `cluster`); skipped without a
    label.
    """

    implementation = "cellmill.evaluate.tasks.clustering:Clustering"
    fast: ClassVar[Mapping[str, int]] = {"seeds": 1}
    name: Literal["clustering"] = "clustering"
    neighbors: int = Field(15, ge=2)
    """k of the neighbour graph."""
    resolution: float = Field(1.0, gt=0)
    """Fixed Leiden resolution."""
    resolutions: Annotated[list[Annotated[float, Field(gt=0)]], EachOnce] = Field(
        [0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.4, 2.0], min_length=1
    )
    """Leiden resolutions; the best one for each feature set is chosen with the label."""
    seeds: int = Field(5, ge=1)
    """Number of clusterings per resolution, with different seeds."""
    min_cells: int = MIN_CELLS

    def packages(self) -> dict[str, str]:
        return {"igraph": "cluster"}

    def levels(self) -> list[str]:
        fixed = f"resolution {self.resolution:g}"
        return [fixed] if self.resolutions == [self.resolution] else ["best resolution", fixed]

    def reduce_effort(self) -> tuple[Self, list[str]]:
        reduced, left_out = super().reduce_effort()
        if self.resolutions == [self.resolution]:
            return reduced, left_out
        left_out.append("all resolutions but the fixed one")
        return reduced.model_copy(update={"resolutions": [self.resolution]}), left_out


class IntegrationConfig(LabelTaskConfig):
    """Batch mixing and label separation of the embeddings, reported separately; skipped without a
    batch or a label.
    """

    implementation = "cellmill.evaluate.tasks.integration.task:Integration"
    name: Literal["integration"] = "integration"
    neighbors: int = Field(90, ge=15)
    """k of the neighbour graph; LISI's perplexity is a third of it."""
    harmony: bool = False
    """Add a row for PCA50 corrected by Harmony (extra `integrate`)."""
    min_cells: int = MIN_CELLS

    def needed_roles(self) -> Sequence[str]:
        return ("batch",)

    def packages(self) -> dict[str, str]:
        return {"harmonypy": "integrate"} if self.harmony else {}


class ThroughputConfig(TaskConfig):
    """Cells per second and peak memory of stage `embed` on the dataset, as it was run."""

    implementation = "cellmill.evaluate.tasks.throughput:Throughput"
    name: Literal["throughput"] = "throughput"


class TransferConfig(LabelTaskConfig):
    """Classifiers of the label, fitted on some datasets and tested on others; skipped without a
    label.
    """

    implementation = "cellmill.evaluate.tasks.classification.transfer:Transfer"
    name: Literal["transfer"] = "transfer"
    fit_on: Names = Field(min_length=1)
    """Datasets to fit the classifiers on."""
    test_on: Names | None = Field(None, min_length=1)
    """Datasets to test on; null: all others evaluated."""
    ontology: bool = True
    """Add Cell Ontology scores if the labels are its ids, such as CL:0000084."""

    def problems(self) -> Iterator[str]:
        both = [name for name in self.test_on or () if name in self.fit_on]
        if both:
            yield f"test_on: {both[0]!r} is in fit_on too; take it out of one of them"


class MapConfig(TaskConfig):
    """Labels of new donors' cells, and refusal of cell types that are left out, by an atlas of the other
    cells, against baselines that refuse as often; skipped without a label, or donors or batches.
    """

    implementation = "cellmill.evaluate.tasks.classification.map:MapCells"
    reads_label = True
    name: Literal["map"] = "map"
    neighbors: int = Field(15, ge=1)
    """Neighbours that vote on a cell."""
    refuse_frac: float = Field(0.05, gt=0, lt=1)
    """Share of the atlas's own cells that would be refused if their donor were left out."""
    max_types: int = Field(5, ge=1)
    """Cell types that are left out, one at a time: the largest."""
    min_cells: int = MIN_CELLS
    most_folds: int = MOST_FOLDS

    def needed_roles(self) -> Sequence[str]:
        return ("donor", "batch")
