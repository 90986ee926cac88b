"""Section `evaluate`: tasks, gates that an evaluation has to reach, models of other environments.
Torch-free.
"""

import re
import shlex
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny

from cellmill.config.datasets import check_name
from cellmill.config.parts.tasks import TaskConfig, TransferConfig
from cellmill.config.plugin import by_name, names, unknown
from cellmill.config.published import model_folder_of
from cellmill.config.section import Names, Section, leaving_out
from cellmill.errors import ConfigError, did_you_mean
from cellmill.files import digest

PLACEHOLDERS = ("{cells}", "{out}")
PRESETS = {"scvi": "fitted on training cells", "harmony": "transductive"}
"""What the rows of a preset say of it, by name; its script is workflow/bridges/zoo_NAME.py."""
AS_IS = "unknown: may have seen these cells"
"""What the rows of a model say that is used as it is, and has no digests of its training cells."""
_DEFAULT_TASKS: Any = {"probe": {}, "reconstruct": {}}


class ExternalModel(Section):
    """A preset, a model or a command, run for each dataset; its embedding is a row beside the
    model.
    """

    preset: str | None = None
    """scvi: fitted on the dataset's training cells. harmony: principal components of these,
    corrected over all cells by column `batch` of the table. The package is in the environment of
    `--sdm conda`, or the Python of `bridges`.
    """
    model: str | None = None
    """A model that is used as it is: a model folder, or as in `init_from` hf://owner/name,
    geneformer:FOLDER or scgpt:FOLDER. Its rows say whether it has seen the scored cells, or that this is not known.
    """
    command: str | None = None
    """Program and arguments, split as by a shell but run without one; {cells} is the input .h5ad,
    {out} the output.
    """
    files: list[str] = Field([])
    """Files, such as its script; a change of one reruns the command."""

    _dump = leaving_out("preset", "model", "command")

    def problems(self) -> Iterator[str]:
        given = [key for key in ("preset", "model", "command") if getattr(self, key) is not None]
        if len(given) != 1:
            yield f"expected preset, model or command, got {' and '.join(given) or 'none'}; set one of them"
        if self.command is None and self.files:
            yield "files: expected none without a command; leave them out"
        if self.preset and self.preset not in PRESETS:
            yield f"preset: no preset {self.preset!r}; {did_you_mean(self.preset, PRESETS)}"
        if self.command is not None:
            try:
                words = shlex.split(self.command)
            except ValueError as error:
                yield f"command: expected words as of a shell, got {self.command!r} ({error})"
            for placeholder in PLACEHOLDERS:
                if not any(placeholder in word for word in words):
                    yield f"command: expected {placeholder} among its arguments, got {self.command!r}"

    @property
    def note(self) -> str:
        """End of its name in tables."""
        if self.preset:
            return f" ({PRESETS[self.preset]})"
        return f" ({AS_IS})" if self.model else ""

    @property
    def line(self) -> str | None:
        """The command that embeds a dataset: of a model, that of stage embed."""
        if self.model is None:
            return self.command
        return f"cellmill embed --model {shlex.quote(model_folder_of(self.model))} --input {{cells}} --out {{out}}"

    @property
    def read_files(self) -> list[str]:
        """Files whose change reruns it."""
        if self.model is None:
            return self.files
        return [f"{model_folder_of(self.model)}/model.safetensors"]

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the options: the same for all runs with the same command."""
        return digest(self.model_dump(mode="json"))

    @property
    def command_digest(self) -> str:
        """Hexadecimal SHA-256 of the command, or name of the preset, which its embeddings carry."""
        return self.preset or digest(self.line)


def command_words(command: str, cells: str, out: str) -> list[str]:
    """Program and arguments with the two paths in place of the placeholders.

    The command is split first, so that a path stays in one argument.
    """
    paths = dict(zip(PLACEHOLDERS, (cells, out)))
    either = "|".join(map(re.escape, PLACEHOLDERS))
    words = []
    for word in shlex.split(command):
        words.append(re.sub(either, lambda match: paths[match[0]], word))
    return words


class BaselineGate(Section):
    """One condition: in a task, the model's best row against the best row of a baseline."""

    task: str
    """Task of evaluate.tasks; for all labels of a dataset."""
    baseline: str
    """Row to reach, or features, whose best classifier counts: `all genes`."""
    column: str | None = None
    """Column to compare; null is that which ranks the task's rows."""
    lower_is_better: bool = False
    """Whether lower values are better of a column that the task does not mark as an error."""
    margin: float = 0.0
    """By how much the model has to be better than the baseline, at least."""


class Evaluate(Section):
    """Tasks that evaluate the exported model on held-out cells."""

    datasets: Names | None = None
    """Datasets to evaluate; null means those of the run's corpus."""
    cells: Literal["heldout", "all"] = "heldout"
    """heldout excludes every cell that the model was trained or validated on."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """Number format of the model in tasks that run it again; set it as embed.precision."""
    folds: int = Field(5, ge=2)
    """Cross-validation folds of tasks that fit a model."""
    seed: int = Field(0, ge=0, le=2**31 - 1)
    """Seed of folds, masks, the untrained model and the UMAP."""
    effort: Literal["fast", "full"] = "full"
    """fast has fewer repetitions and levels, one resolution and no UMAP; each result and verdict
    says so.
    """
    tasks: Annotated[
        dict[str, SerializeAsAny[TaskConfig]], BeforeValidator(partial(by_name, TaskConfig))
    ] = Field(_DEFAULT_TASKS, min_length=1)
    """Tasks to run, by name, each with its options; a run's tasks replace the default ones."""
    classifiers: Names = Field([])
    """Classifiers of installed packages that tasks fit to labels beside logistic regression and
    kNN.
    """
    gate: list[BaselineGate] = Field([])
    """Minimum results; the stage fails if one is missed. Each has `task`, `baseline` (a row, or
    features, whose best classifier counts), `column` (default: the one that ranks the rows),
    `lower_is_better` (set it for a column such as seconds; errors are known) and `margin` (default 0): the
    minimum difference between the model's best row and the baseline's.
    Results are then in finished/metrics.json.
    """

    external: dict[Annotated[str, AfterValidator(check_name)], ExternalModel] = Field({})
    """Other models by name, each with `preset` (scvi or harmony), `model` (used as it is), or
    `command` (run without a shell, with {cells} and {out} among its arguments) and `files` (a
    change of which reruns it): they add rows beside the model in the tasks that read only
    embeddings, but enter no verdict and no gate.
    """

    _dump = leaving_out("effort", "classifiers", "gate", "external")

    def reduce_effort(self) -> tuple[Self, dict[str, list[str]]]:
        """The options that are evaluated, and what effort fast leaves out of each task; nothing at
        effort full.
        """
        if self.effort == "full":
            return self, {}
        tasks = {}
        left_out = {}
        for name, config in self.tasks.items():
            tasks[name], left_out[name] = config.reduce_effort()
        return self.model_copy(update={"tasks": tasks}), left_out

    def problems(self) -> Iterator[str]:
        for name in self.classifiers:
            if name not in names("classifier"):
                raise unknown("classifier", name)
        missing = [gate.task for gate in self.gate if gate.task not in self.tasks]
        if missing:
            yield f"gate: task {missing[0]!r} is not in evaluate.tasks, which are: {', '.join(self.tasks)}"
            return
        reduced = self.reduce_effort()[0].tasks
        for gate in self.gate:
            kept = reduced[gate.task].levels()
            left_out = {*self.tasks[gate.task].levels()} - {*kept}
            if left_out & {*(gate.column or "").split(", ")}:
                yield (
                    f"gate: effort fast leaves out column {gate.column!r} of task {gate.task}; set effort: full, or a "
                    f"column of {' or '.join(kept)}"
                )


def check_transfer(evaluate: Evaluate, evaluated: list[str], where: str) -> None:
    """Raise ConfigError for a dataset of task `transfer` that is not among the `evaluated` ones."""
    task = evaluate.tasks.get("transfer")
    if not isinstance(task, TransferConfig):
        return
    for option, datasets in (("fit_on", task.fit_on), ("test_on", task.test_on or [])):
        for name in datasets:
            if name not in evaluated:
                problem = f"{where}.tasks.transfer.{option}: {name!r} is not evaluated"
                raise ConfigError(
                    f"{problem}; name one of {', '.join(evaluated)}, or add it to evaluate.datasets"
                )
