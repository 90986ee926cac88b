"""Gates of section `evaluate`: what an evaluation has to reach. Torch-free."""

from pydantic import Field

from cellmill.config.section import Section


class BaselineGate(Section):
    """One condition: in a task, the model's best row against the best row of a baseline."""

    task: str = Field(description="Task of evaluate.tasks; for all labels of a dataset.")
    baseline: str = Field(description="Row to reach, or features, whose best classifier counts: `all genes`.")
    column: str | None = Field(None, description="Column to compare; null is that which ranks the task's rows.")
    lower_is_better: bool = Field(False, description="Whether lower values of the column are better, as of MAE.")
    margin: float = Field(0.0, description="By how much the model has to be better than the baseline, at least.")
