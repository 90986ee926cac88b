"""Section `evaluate`, and the options of evaluation tasks. Torch-free.

External models of section `evaluate`: a command of another environment that writes embeddings. Torch-free.

Gates of section `evaluate`: what an evaluation has to reach. Torch-free.
"""

import re
import shlex
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

from cellmill.config.datasets import check_name
from cellmill.config.plugin import Plugin, by_name
from cellmill.config.section import EachOnce, Section
from cellmill.files import digest

PLACEHOLDERS = ("{cells}", "{out}")


class ExternalModel(Section):
    """One command, run for each dataset; its embedding is a row beside the model."""

    command: str = Field(
        description="Program and arguments, split like a shell would but run without one; {cells} is the input .h5ad, "
        "{out} the .h5ad to write."
    )
    files: list[str] = Field([], description="Files, such as its script; a change of one reruns the command.")

    @field_validator("command")
    @classmethod
    def _has_its_places(cls, value: str) -> str:
        try:
            words = shlex.split(value)
        except ValueError as error:
            raise ValueError(f"expected words as of a shell, got {value!r} ({error})") from None
        for place in PLACEHOLDERS:
            if not any(place in word for word in words):
                raise ValueError(f"expected {place} among its arguments, got {value!r}")
        return value

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the options: the same for all runs with the same command."""
        return digest(self.model_dump(mode="json"))

    @property
    def command_digest(self) -> str:
        """Hexadecimal SHA-256 of the command, which its embeddings carry."""
        return digest(self.command)


def command_words(command: str, cells: str, out: str) -> list[str]:
    """Program and arguments with the two paths in their places: split first, so that a path stays in one argument."""
    places = dict(zip(PLACEHOLDERS, (cells, out)))
    either = "|".join(map(re.escape, PLACEHOLDERS))
    return [re.sub(either, lambda found: places[found[0]], word) for word in shlex.split(command)]


class BaselineGate(Section):
    """One condition: in a task, the model's best row against the best row of a baseline."""

    task: str = Field(description="Task of evaluate.tasks; for all labels of a dataset.")
    baseline: str = Field(description="Row to reach, or features, whose best classifier counts: `all genes`.")
    column: str | None = Field(None, description="Column to compare; null is that which ranks the task's rows.")
    lower_is_better: bool = Field(False, description="Whether lower values of the column are better, as of MAE.")
    margin: float = Field(0.0, description="By how much the model has to be better than the baseline, at least.")


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
    objective: dict[str, Any] = Field(
        {}, description="Options of the training objective to override here, for instance `mask_frac`."
    )

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
    shots: Annotated[list[Annotated[int, Field(ge=1)]], EachOnce] = Field(
        [5, 10, 20], min_length=1, description="Numbers of training cells per class."
    )
    draws: int = Field(10, ge=2, description="Number of random draws of the training cells.")
    neighbors: int = Field(5, ge=1, description="k of the kNN classifier, at most the number of training cells.")


class LeaveOutConfig(TaskConfig):
    """Classifiers of the label tested on left-out donors or batches; skipped without a label."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.classify:LeaveOut"
    reads_label: ClassVar[bool] = True

    name: Literal["leave_out"] = Field("leave_out", description="Name of the task.")
    roles: Annotated[list[Literal["donor", "batch"]], EachOnce] = Field(
        ["donor", "batch"],
        min_length=1,
        description="Roles to leave out by value, such as donor or batch; roles that the dataset lacks are ignored.",
    )
    most_folds: int = Field(
        10,
        ge=2,
        description="Maximum number of left-out groups: values are left out one at a time, or, if there are more "
        "values, in this many groups.",
    )
    neighbors: int = Field(15, ge=1, description="k of the kNN classifier.")


class DegradedConfig(TaskConfig):
    """Options of tasks that classify cells with removed counts or genes."""

    neighbors: int = Field(15, ge=1, description="k of the kNN classifier.")
    repeats: int = Field(
        3, ge=1, description="Number of random draws of the removed counts or genes, each with different folds."
    )


class LowDepthConfig(DegradedConfig):
    """Classifiers of the label on cells with a fraction of their counts; skipped without a label."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.degraded:LowDepth"
    reads_label: ClassVar[bool] = True

    name: Literal["low_depth"] = Field("low_depth", description="Name of the task.")
    count_fracs: Annotated[list[Annotated[float, Field(gt=0, lt=1)]], EachOnce] = Field(
        [0.3, 0.1], min_length=1, description="Fractions of the counts to keep."
    )


class MissingGenesConfig(DegradedConfig):
    """Classifiers of the label on cells with few measured genes; skipped without a label."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.degraded:MissingGenes"
    reads_label: ClassVar[bool] = True

    name: Literal["missing_genes"] = Field("missing_genes", description="Name of the task.")
    genes: Annotated[list[Annotated[int, Field(ge=1)]], EachOnce] = Field(
        [200, 75], min_length=1, description="Numbers of genes to keep, drawn from the expressed ones."
    )


class PerturbationConfig(TaskConfig):
    """Expression changes under held-out perturbations, donors or batches; skipped without controls."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.perturbation:Perturbation"

    name: Literal["perturbation"] = Field("perturbation", description="Name of the task.")
    held_out: Annotated[list[Literal["perturbation", "label", "condition", "donor", "batch"]], EachOnce] = Field(
        ["perturbation", "donor", "batch"],
        min_length=1,
        description="Roles to leave out by value: perturbations, or any other role that the dataset has; label "
        "stands for cell types.",
    )
    min_cells: int = Field(
        20, ge=4, description="Perturbations with fewer cells (per donor if donors are left out) are not used."
    )
    top_genes: int = Field(
        20,
        ge=1,
        description="Number of genes with the largest measured change over which the predicted direction is scored.",
    )
    seeds: int = Field(
        3, ge=1, description="Repetitions of the cross-validation over perturbations, with `evaluate.folds` folds each."
    )
    most_folds: int = Field(
        10,
        ge=2,
        description="Maximum number of left-out groups of a role: values are left out one at a time, or, if there are "
        "more values, in this many groups.",
    )


_DEFAULT_TASKS: Any = {"probe": {}, "reconstruct": {}}


class Evaluate(Section):
    """Tasks that evaluate the exported model on held-out cells."""

    moved: ClassVar[dict[str, str]] = {
        "neighbors": "evaluate.tasks.probe.neighbors",
        "mask_frac": "evaluate.tasks.reconstruct.objective.mask_frac",
    }

    datasets: Annotated[list[str], EachOnce] | None = Field(
        None, description="Datasets to evaluate; null means those of the run's corpus."
    )
    cells: Literal["heldout", "all"] = Field(
        "heldout", description="heldout excludes every cell that the model was trained or validated on."
    )
    precision: Literal["32-true", "bf16-mixed"] = Field(
        "32-true",
        description="Number format of the model in tasks that run it again; set it as embed.precision.",
    )
    folds: int = Field(5, ge=2, description="Cross-validation folds of tasks that fit a model.")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Seed of folds, masks, the untrained model and the UMAP.")
    tasks: Annotated[dict[str, SerializeAsAny[TaskConfig]], BeforeValidator(partial(by_name, TaskConfig))] = Field(
        _DEFAULT_TASKS,
        min_length=1,
        description="Tasks to run, by name, each with its options; a run's tasks replace the default ones.",
    )
    gate: list[BaselineGate] = Field(
        [],
        description="Minimum results; the stage fails if one is missed. Each has `task`, `baseline` (a row, or "
        "features, whose best classifier counts), `column` (default: the one that ranks the rows) and `margin` "
        "(default 0): the minimum difference between the model's best row and the baseline's. Results are then in "
        "metrics.failed.json.",
    )

    external: dict[Annotated[str, AfterValidator(check_name)], ExternalModel] = Field(
        {},
        description="Models of other packages by name, each with `command` (run without a shell, with {cells} and "
        "{out} among its arguments) and `files` (a change of which reruns it): they add rows beside the model in the "
        "tasks that read only embeddings, but enter no verdict and no gate.",
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
