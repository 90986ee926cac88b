"""Section `evaluate`, and the options of evaluation tasks. Torch-free."""

from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from cellmill.config.external import ExternalModel
from cellmill.config.gate import BaselineGate
from cellmill.config.plugin import Plugin, by_name
from cellmill.config.section import EachOnce, Section
from cellmill.config.table import check_name


class TaskConfig(Plugin):
    """Base of every task's options; `implementation` is a `cellmill.evaluate.task.Task`."""

    kind: ClassVar[str] = "task"
    reads_label: ClassVar[bool] = False  # runs once for each label of a dataset
    files: ClassVar[tuple[str, ...]] = ()  # options that name files, which the rule reads too

    name: str

    def paths(self) -> dict[str, str]:
        """Files that the options name, by option."""
        return {option: path for option in self.files if (path := getattr(self, option)) is not None}


class ProbeConfig(TaskConfig):
    """Classifiers of the label on embeddings, against baselines; skipped without a label."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.probe:Probe"
    reads_label: ClassVar[bool] = True

    name: Literal["probe"] = Field("probe", description="Name of the task.")
    neighbors: int = Field(15, ge=1, description="k of the kNN classifier.")
    seeds: int = Field(5, ge=1, description="Repetitions of the cross-validation, each with folds of its own.")


class ReconstructConfig(TaskConfig):
    """The training objective on the scored cells, against the gene statistics of training cells."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.reconstruct:Reconstruct"

    name: Literal["reconstruct"] = Field("reconstruct", description="Name of the task.")
    objective: dict[str, Any] = Field(
        {}, description="Options of the training objective to change here, for instance `mask_frac`."
    )

    @field_validator("objective")
    @classmethod
    def _same_objective(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "name" in value:
            raise ValueError("`name` cannot change: the model is judged by the objective it was trained with")
        return value


class FewShotConfig(TaskConfig):
    """Classifiers of the label that are trained on a few cells of each class; skipped without a label."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.few_shot:FewShot"
    reads_label: ClassVar[bool] = True

    name: Literal["few_shot"] = Field("few_shot", description="Name of the task.")
    shots: Annotated[list[Annotated[int, Field(ge=1)]], EachOnce] = Field(
        [5, 10, 20], min_length=1, description="Numbers of training cells of each class."
    )
    draws: int = Field(10, ge=2, description="Draws of the training cells.")
    neighbors: int = Field(5, ge=1, description="k of the kNN classifier, at most the number of training cells.")


class LeaveOutConfig(TaskConfig):
    """Classifiers of the label for donors or batches left out of their training; skipped without a label."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.leave_out:LeaveOut"
    reads_label: ClassVar[bool] = True

    name: Literal["leave_out"] = Field("leave_out", description="Name of the task.")
    roles: Annotated[list[Literal["donor", "batch"]], EachOnce] = Field(
        ["donor", "batch"],
        min_length=1,
        description="Roles whose values are left out whole; of those, the ones that the dataset has.",
    )
    most_folds: int = Field(
        10, ge=2, description="One value after another is left out, or of more values, so many groups of them."
    )
    neighbors: int = Field(15, ge=1, description="k of the kNN classifier.")


class DegradedConfig(TaskConfig):
    """Options of tasks that classify cells which lost something."""

    neighbors: int = Field(15, ge=1, description="k of the kNN classifier.")
    repeats: int = Field(3, ge=1, description="Draws of what is lost, each with folds of its own.")


class LowDepthConfig(DegradedConfig):
    """Classifiers of the label on cells with a fraction of their counts; skipped without a label."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.low_depth:LowDepth"
    reads_label: ClassVar[bool] = True

    name: Literal["low_depth"] = Field("low_depth", description="Name of the task.")
    count_fracs: Annotated[list[Annotated[float, Field(gt=0, lt=1)]], EachOnce] = Field(
        [0.3, 0.1], min_length=1, description="Fractions of the counts that are kept."
    )


class MissingGenesConfig(DegradedConfig):
    """Classifiers of the label on cells of which a few genes were measured; skipped without a label."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.missing_genes:MissingGenes"
    reads_label: ClassVar[bool] = True

    name: Literal["missing_genes"] = Field("missing_genes", description="Name of the task.")
    genes: Annotated[list[Annotated[int, Field(ge=1)]], EachOnce] = Field(
        [200, 75], min_length=1, description="Numbers of genes that are kept, drawn from the expressed ones."
    )


class PerturbationConfig(TaskConfig):
    """Changes of expression under perturbations, donors or batches that were left out; skipped without controls."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.perturbation:Perturbation"

    name: Literal["perturbation"] = Field("perturbation", description="Name of the task.")
    held_out: Annotated[list[Literal["perturbation", "label", "condition", "donor", "batch"]], EachOnce] = Field(
        ["perturbation", "donor", "batch"],
        min_length=1,
        description="What is left out whole: perturbations, or values of a role, of those that the dataset has; label "
        "is for cell types.",
    )
    min_cells: int = Field(
        20, ge=4, description="Perturbations with fewer cells (in a donor, where donors are left out) are not used."
    )
    top_genes: int = Field(20, ge=1, description="Genes of largest seen change whose predicted direction counts.")
    seeds: int = Field(3, ge=1, description="Repetitions of the folds of perturbations; `evaluate.folds` of them each.")
    most_folds: int = Field(
        10,
        ge=2,
        description="One value of a role after another is left out, or of more values, so many groups of them.",
    )


_DEFAULT_TASKS: Any = {"probe": {}, "reconstruct": {}}


class Evaluate(Section):
    """Tasks that judge the exported model on held-out cells."""

    moved: ClassVar[dict[str, str]] = {
        "neighbors": "evaluate.tasks.probe.neighbors",
        "mask_frac": "evaluate.tasks.reconstruct.objective.mask_frac",
    }

    datasets: Annotated[list[str], EachOnce] | None = Field(
        None, description="Datasets to evaluate; null is those of the run's corpus."
    )
    cells: Literal["heldout", "all"] = Field(
        "heldout", description="heldout leaves out every cell that the model was trained or validated on."
    )
    precision: Literal["32-true", "bf16-mixed"] = Field(
        "32-true",
        description="Number format of the model in tasks that run it again; set it as embed.precision.",
    )
    folds: int = Field(5, ge=2, description="Cross-validation folds of tasks that fit something.")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Seed of folds, masks, the untrained model and the UMAP.")
    tasks: Annotated[dict[str, SerializeAsAny[TaskConfig]], BeforeValidator(partial(by_name, TaskConfig))] = Field(
        _DEFAULT_TASKS,
        min_length=1,
        description="Tasks to run, by name, each with its options; a run's tasks replace the default ones.",
    )
    gate: list[BaselineGate] = Field(
        [],
        description="Conditions without which the stage fails, each with `task`, `baseline` (a row, or features, whose "
        "best classifier counts), `column` (default: the one that ranks the rows) and `margin` (default 0): the least "
        "difference of the model's best row and the baseline's. Results are then in metrics.failed.json.",
    )

    external: dict[Annotated[str, AfterValidator(check_name)], ExternalModel] = Field(
        {},
        description="Models of other packages by name, each with `command` (run without a shell, with {cells} and "
        "{out} among its arguments) and `files` (whose change runs it again): rows beside the model in the tasks that "
        "read embeddings alone, in no verdict and no gate.",
    )

    @model_validator(mode="after")
    def _gates_of_tasks(self) -> Self:
        if unknown := [gate.task for gate in self.gate if gate.task not in self.tasks]:
            raise ValueError(f"gate: task {unknown[0]!r} is not in evaluate.tasks, which are: {', '.join(self.tasks)}")
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Options without `gate` and `external` where there are none: earlier evaluations stay as they are."""
        tree: dict[str, Any] = handler(self)
        return {key: value for key, value in tree.items() if value or key not in ("gate", "external")}
