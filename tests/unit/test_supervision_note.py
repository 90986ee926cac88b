"""The note "supervised by": which rows have it, and what it says in tasks without cells."""

from dataclasses import replace

from cellmill.evaluate.methods import EMBEDDING, FULL_PANEL, UNTRAINED, add_note
from cellmill.evaluate.task import Context, Task, run_task
from cellmill.evaluate.tasks.imputation.regressions import GENE_MEANS
from cellmill.runs.results import Row, ScoredMethod, TaskResult


class Listed(Task):
    """A task with a row for each method of a list."""

    config: list[ScoredMethod]

    def run(self, context: Context) -> TaskResult:
        return TaskResult([Row(method) for method in self.config])


class ListedGenes(Listed):
    """The same without the cells of a dataset."""

    reads_cells = False


def list_rows(task: Task, context: Context) -> list[str]:
    """Names of the rows of `task` if the model was trained with labels of the dataset."""
    config = context.model.config | {"supervised_by": ["cell_type"]}
    supervised = replace(context, model=replace(context.model, config=config))
    return [row.method.name for row in run_task(task, supervised).rows]


def test_only_rows_of_the_trained_model_are_marked_supervised(context: Context) -> None:
    of_the_model = [EMBEDDING, FULL_PANEL, ScoredMethod("embed", kind="model")]
    others = [UNTRAINED, GENE_MEANS, ScoredMethod("external: x", kind="external")]
    on_folds = [replace(add_note(method, ", folds"), kind="variant") for method in others]
    rows = list_rows(Listed([*of_the_model, *others, *on_folds]), context)
    note = "supervised by this label (cell_type)"
    marked = [f"{method.features}, {note}" for method in of_the_model]
    assert rows == marked + [method.name for method in others + on_folds]


def test_a_task_without_cells_names_no_label_of_a_dataset(context: Context) -> None:
    # its result is kept and read for every dataset, whatever the label of these
    rows = list_rows(ListedGenes([EMBEDDING]), context)
    assert rows == ["embedding, supervised by cell_type"]
