"""Gates of section `evaluate`: what an evaluation has to reach. Torch-free."""

from pydantic import Field

from cellmill.config.section import Section


class BaselineGate(Section):
    """One condition: in a task, the model's best row against the best row of a baseline."""

    task: str = Field(description="Task of evaluate.tasks; for all labels of a dataset.")
    baseline: str = Field(description="Row to reach, or features, whose best classifier counts: `all genes`.")
    column: str | None = Field(None, description="Column to compare; null is that which ranks the task's rows.")
    margin: float = Field(0.0, description="The least difference of the means, model minus baseline.")
