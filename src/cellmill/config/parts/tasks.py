"""Options of evaluation tasks. Torch-free."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator

from cellmill.config.datasets import check_name
from cellmill.config.plugin import Plugin
from cellmill.config.section import EachOnce


class TaskConfig(Plugin):
    """Base of every task's options; `implementation` is a `cellmill.evaluate.task.Task`."""

    kind: ClassVar[str] = "task"
    reads_label: ClassVar[bool] = False  # runs once for each label of a dataset
    files: ClassVar[tuple[str, ...]] = ()  # options that name files, which the rule reads too

    name: str

    def paths(self) -> dict[str, str]:
        """Files that the options name, by option."""
        return {option: path for option in self.files if (path := getattr(self, option)) is not None}

    def packages(self) -> dict[str, str]:
        """Modules beside the core that the task imports, and the extra of cellmill that each comes with."""
        return {}


MOST_FOLDS = Field(
    10,
    ge=2,
    description="Maximum number of left-out groups: values are left out one at a time, or, if there are more values, "
    "in this many groups.",
)


class ProbeConfig(TaskConfig):
    """Classifiers of the label on embeddings, against baselines; skipped without a label."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.classify:Probe"
    reads_label: ClassVar[bool] = True

    name: Literal["probe"] = Field("probe", description="Name of the task.")
    neighbors: int = Field(15, ge=1, description="k of the kNN classifier.")
    seeds: int = Field(5, ge=1, description="Repetitions of the cross-validation, each with different folds.")


class ReconstructConfig(TaskConfig):
    """The training objective on the evaluated cells, against the gene statistics of training cells."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.reconstruct:Reconstruct"

    name: Literal["reconstruct"] = Field("reconstruct", description="Name of the task.")
    objective: dict[str, Any] = Field({})
    """Options of the training objective to override here, for instance `mask_frac`."""

    @field_validator("objective")
    @classmethod
    def _same_objective(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "name" in value:
            raise ValueError("`name` cannot change: the model is judged by the objective it was trained with")
        return value


class FewShotConfig(TaskConfig):
    """Few-shot classifiers of the label, trained on a few cells per class; skipped without a label."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.classify:FewShot"
    reads_label: ClassVar[bool] = True

    name: Literal["few_shot"] = Field("few_shot", description="Name of the task.")
    shots: Annotated[list[Annotated[int, Field(ge=1)]], EachOnce] = Field([5, 10, 20], min_length=1)
    """Numbers of training cells per class."""
    draws: int = Field(10, ge=2, description="Number of random draws of the training cells.")
    neighbors: int = Field(5, ge=1, description="k of the kNN classifier, at most the number of training cells.")


class LeaveOutConfig(TaskConfig):
    """Classifiers of the label tested on left-out donors or batches; skipped without a label."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.classify:LeaveOut"
    reads_label: ClassVar[bool] = True

    name: Literal["leave_out"] = Field("leave_out", description="Name of the task.")
    roles: Annotated[list[Literal["donor", "batch"]], EachOnce] = Field(["donor", "batch"], min_length=1)
    """Roles to leave out by value, such as donor or batch; roles that the dataset lacks are ignored."""
    most_folds: int = MOST_FOLDS
    neighbors: int = Field(15, ge=1, description="k of the kNN classifier.")


class DegradedConfig(TaskConfig):
    """Options of tasks that classify cells with removed counts or genes."""

    neighbors: int = Field(15, ge=1, description="k of the kNN classifier.")
    repeats: int = Field(3, ge=1)
    """Number of random draws of the removed counts or genes, each with different folds."""


class LowDepthConfig(DegradedConfig):
    """Classifiers of the label on cells with a fraction of their counts; skipped without a label."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.degraded:LowDepth"
    reads_label: ClassVar[bool] = True

    name: Literal["low_depth"] = Field("low_depth", description="Name of the task.")
    count_fracs: Annotated[list[Annotated[float, Field(gt=0, lt=1)]], EachOnce] = Field([0.3, 0.1], min_length=1)
    """Fractions of the counts to keep."""


class MissingGenesConfig(DegradedConfig):
    """Classifiers of the label on cells with few measured genes; skipped without a label."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.degraded:MissingGenes"
    reads_label: ClassVar[bool] = True

    name: Literal["missing_genes"] = Field("missing_genes", description="Name of the task.")
    genes: Annotated[list[Annotated[int, Field(ge=1)]], EachOnce] = Field([200, 75], min_length=1)
    """Numbers of genes to keep, drawn from the expressed ones."""


class PerturbationConfig(TaskConfig):
    """Expression changes under held-out perturbations, donors or batches; skipped without controls."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.perturbation:Perturbation"

    name: Literal["perturbation"] = Field("perturbation", description="Name of the task.")
    held_out: Annotated[list[Literal["perturbation", "label", "condition", "donor", "batch"]], EachOnce] = Field(
        ["perturbation", "donor", "batch"], min_length=1
    )
    """Roles to leave out by value: perturbations, or any other role that the dataset has; label stands for cell
    types."""
    min_cells: int = Field(20, ge=4)
    """Perturbations with fewer cells (per donor if donors are left out) are not used."""
    top_genes: int = Field(20, ge=1)
    """Number of genes with the largest measured change over which the predicted direction is scored."""
    seeds: int = Field(3, ge=1)
    """Repetitions of the cross-validation over perturbations, with `evaluate.folds` folds each."""
    most_folds: int = MOST_FOLDS
    neighbors: int = Field(5, ge=1)
    """k of the kNN average: perturbations of the genes with the most similar vectors."""
    priors: dict[Annotated[str, AfterValidator(check_name)], str] = Field({})
    """Files of gene vectors by name, such as of STRING or of a protein language model, in the formats of
    model.gene_vectors: new perturbations are predicted from the vectors of their genes."""

    def paths(self) -> dict[str, str]:
        return {f"priors.{name}": path for name, path in self.priors.items()}


class ImputationConfig(TaskConfig):
    """Imputation of hidden genes from the others; skipped without enough cells."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.imputation:Imputation"

    name: Literal["imputation"] = Field("imputation", description="Name of the task.")
    hidden_frac: float = Field(0.2, gt=0, le=0.9)
    """Fraction of the genes to hide: a seeded draw, the same for all cells."""
    genes: Annotated[list[str], EachOnce] | None = Field(None, min_length=1)
    """Genes to hide instead of a random fraction, by Ensembl id or symbol; null draws them."""
    max_genes: int = Field(500, ge=1, description="Maximum number of hidden genes.")
    min_cells: int = Field(10, ge=2, description="Genes expressed by fewer of the evaluated cells are not hidden.")
    neighbors: int = Field(15, ge=1, description="k of the kNN average.")
    seeds: int = Field(3, ge=1)
    """Repetitions of the cross-validation; one if the folds are donors or batches."""
    most_folds: int = MOST_FOLDS


class GeneEmbeddingConfig(TaskConfig):
    """Prediction of gene sets and transcription factors from gene embeddings; skipped for a model without any."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.gene_sets:GeneEmbedding"
    files: ClassVar[tuple[str, ...]] = ("gene_sets", "transcription_factors")

    name: Literal["gene_embedding"] = Field("gene_embedding", description="Name of the task.")
    gene_sets: str | None = None
    """GMT file of gene sets: per line a name, a description and the genes, tab-separated."""
    transcription_factors: str | None = None
    """File of transcription factors, one per line, by Ensembl id or symbol."""
    min_genes: int = Field(10, ge=2, description="Gene sets with fewer known genes are skipped, by name.")
    max_others: int = Field(2000, ge=50)
    """Maximum number of genes outside all sets: a seeded draw of those that training cells express."""
    seeds: int = Field(3, ge=1)
    """Repetitions of the cross-validation and of the draw, with `evaluate.folds` folds each."""

    def problems(self) -> Iterator[str]:
        if self.gene_sets is None and self.transcription_factors is None:
            yield "task gene_embedding: expected gene_sets or transcription_factors, got neither; name a file"


class GrnConfig(TaskConfig):
    """Gene similarity against known regulatory edges; an error if too few of them are among the model's genes."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.grn:Grn"
    files: ClassVar[tuple[str, ...]] = ("edges",)

    name: Literal["grn"] = Field("grn", description="Name of the task.")
    edges: str
    """File of edges: per line a transcription factor and a target, tab-separated, by Ensembl id or symbol; further
    columns are ignored."""
    min_edges: int = Field(20, ge=1)
    """Minimum number of edges between known genes; with fewer the task fails."""
    min_targets: int = Field(3, ge=1)
    """Transcription factors with fewer known targets are skipped, by name."""
    absolute: bool = False
    """Rank pairs by absolute similarity, so that negative similarities count equally."""


MIN_CELLS = Field(10, ge=2, description="Classes with fewer evaluated cells are skipped, by name.")


class ClusteringConfig(TaskConfig):
    """Leiden clustering of the embeddings against the label (extra `cluster`); skipped without a label."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.clustering:Clustering"
    reads_label: ClassVar[bool] = True

    name: Literal["clustering"] = Field("clustering", description="Name of the task.")
    neighbors: int = Field(15, ge=2, description="k of the neighbour graph.")
    resolution: float = Field(1.0, gt=0, description="Fixed Leiden resolution.")
    resolutions: Annotated[list[Annotated[float, Field(gt=0)]], EachOnce] = Field(
        [0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.4, 2.0], min_length=1
    )
    """Leiden resolutions; the best one for each feature set is chosen with the label."""
    seeds: int = Field(5, ge=1, description="Number of clusterings per resolution, with different seeds.")
    min_cells: int = MIN_CELLS

    def packages(self) -> dict[str, str]:
        return {"igraph": "cluster"}


class IntegrationConfig(TaskConfig):
    """Batch mixing and label separation of the embeddings, reported separately; skipped without a batch or a label."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.integration:Integration"
    reads_label: ClassVar[bool] = True

    name: Literal["integration"] = Field("integration", description="Name of the task.")
    neighbors: int = Field(90, ge=15, description="k of the neighbour graph; LISI's perplexity is a third of it.")
    harmony: bool = Field(False, description="Add a row for PCA50 corrected by Harmony (extra `integrate`).")
    min_cells: int = MIN_CELLS

    def packages(self) -> dict[str, str]:
        return {"harmonypy": "integrate"} if self.harmony else {}


class ThroughputConfig(TaskConfig):
    """Cells per second and peak memory of stage `embed` on the dataset, as it was run."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.reconstruct:Throughput"

    name: Literal["throughput"] = Field("throughput", description="Name of the task.")


class TransferConfig(TaskConfig):
    """Classifiers of the label, fitted on some datasets and tested on others; skipped without a label."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.transfer:Transfer"
    reads_label: ClassVar[bool] = True

    name: Literal["transfer"] = Field("transfer", description="Name of the task.")
    fit_on: Annotated[list[str], EachOnce] = Field(min_length=1)
    """Datasets whose labelled cells the classifiers are fitted on."""
    test_on: Annotated[list[str], EachOnce] | None = Field(None, min_length=1)
    """Datasets to test on; null means all other evaluated datasets."""
    neighbors: int = Field(15, ge=1, description="k of the kNN classifier.")
    ontology: bool = Field(True, description="Add Cell Ontology scores if the labels are its ids, such as CL:0000084.")

    def problems(self) -> Iterator[str]:
        if both := [name for name in self.test_on or () if name in self.fit_on]:
            yield f"test_on: {both[0]!r} is in fit_on too; take it out of one of them"
