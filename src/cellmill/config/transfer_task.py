"""Options of task `transfer`. Torch-free."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from cellmill.config.evaluate import Evaluate, TaskConfig
from cellmill.config.section import EachOnce
from cellmill.errors import ConfigError


class TransferConfig(TaskConfig):
    """Classifiers of the label, fitted on some datasets and tested on others; skipped without a label."""

    implementation: ClassVar[str] = "cellmill.evaluate.tasks.transfer:Transfer"
    reads_label: ClassVar[bool] = True

    name: Literal["transfer"] = Field("transfer", description="Name of the task.")
    fit_on: Annotated[list[str], EachOnce] = Field(
        min_length=1, description="Datasets whose labelled cells the classifiers are fitted on."
    )
    test_on: Annotated[list[str], EachOnce] | None = Field(
        None, min_length=1, description="Datasets to test on; null means all other evaluated datasets."
    )
    neighbors: int = Field(15, ge=1, description="k of the kNN classifier.")
    ontology: bool = Field(True, description="Add Cell Ontology scores if the labels are its ids, such as CL:0000084.")

    @model_validator(mode="after")
    def _tested_are_not_fitted(self) -> Self:
        if both := [name for name in self.test_on or () if name in self.fit_on]:
            raise ValueError(f"test_on: {both[0]!r} is in fit_on too; take it out of one of them")
        return self


def check_transfer(evaluate: Evaluate, evaluated: list[str], where: str) -> None:
    """Raise ConfigError for a dataset of task `transfer` that is not among the `evaluated` ones."""
    task = evaluate.tasks.get("transfer")
    if not isinstance(task, TransferConfig):
        return
    for option, names in (("fit_on", task.fit_on), ("test_on", task.test_on or [])):
        for name in names:
            if name not in evaluated:
                raise ConfigError(
                    f"{where}.tasks.transfer.{option}: {name!r} is not evaluated, only {', '.join(evaluated)}; "
                    "name one of them, or add it to evaluate.datasets"
                )
