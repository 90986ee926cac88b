"""Results of finished tasks, which are kept in folder `finished` next to metrics.json.

An evaluation may run again after a kill, a failed task, or a changed option of a task. Then only the
tasks without a kept result run. The name of a result's file is the SHA-256 of everything that the result
depends on.

The folder also has seconds.json, which `seconds/planned.py` describes. And it has a copy of metrics.json,
which is written even if a gate fails. The copy is not an output of the workflow: Snakemake deletes the
outputs of a rule before it runs the rule again.
"""

import hashlib
import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from itertools import chain
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from cellmill.config.plugin import declaring_packages, load
from cellmill.errors import DataError
from cellmill.evaluate.evaluated_datasets import EvaluatedDatasets
from cellmill.evaluate.seconds.planned import LearnedRatios
from cellmill.evaluate.task import Context, Task, depends_on_dataset
from cellmill.files import digest, read_json, sha256_file
from cellmill.runs import results
from cellmill.runs.results import TaskResult

# Options of section `evaluate` that change no result of a task. They say which tasks and datasets there
# are, and which gates.
NOT_READ = {"tasks", "datasets", "gate"}
_task_result_adapter = TypeAdapter(TaskResult)


class FinishedTasks:
    """The folder of kept results of an evaluation."""

    def __init__(self, folder: Path, datasets: EvaluatedDatasets) -> None:
        self._folder = folder
        self.metrics_path = folder / "metrics.json"
        self.ratios = LearnedRatios(folder / "seconds.json")
        # digests of the files of each dataset, and its label columns; a task may read several datasets
        self._datasets: dict[str, list[str]] = {}
        for name, dataset in datasets.files.items():
            paths = [dataset.cells, dataset.embedding, *dataset.external]
            digests = [sha256_file(path) for path in paths]
            self._datasets[name] = [*digests, *dataset.labels]
        self._packages = sorted(f"{each.name} {each.version}" for each in metadata.distributions())
        self._weights = datasets.digest

    def path(self, name: str, task: Task, context: Context, left_out: Sequence[str] | None) -> Path:
        """Return the path of the result of `task` on the dataset of `context`.

        `name` is the name of the task in `evaluate.tasks`. `left_out` names what effort fast leaves out of
        the task, and None stands for effort full. The options in `context` are already reduced.
        """
        config = context.options.tasks[name]
        model = context.model
        dependencies = {
            "format": results.FORMAT,
            "packages": self._packages,
            "code": [_digest_files(package) for package in _list_packages(task, context)],
            "model": [self._weights, model.vocabulary.digest, model.config],
            "device": next(model.network.parameters()).device.type,
            "corpus": model.manifest.fingerprint,
            "shared options": context.options.model_dump(mode="json", exclude=NOT_READ),
            "options": config.model_dump(mode="json"),
            "left out": left_out,
            "files": [sha256_file(Path(path)) for path in config.paths().values()],
        }
        if depends_on_dataset(task):
            columns = {role: str(column.name) for role, column in context.roles.items()}
            # the held-out cells depend on the corpora of the model and of its ancestors
            scored = hashlib.sha256(context.scored.tobytes()).hexdigest()
            models = [*context.external]  # names of the models of other packages
            dependencies["cells"] = [context.dataset, columns, scored, self._datasets, models]
        return self._folder / f"{digest(dependencies)}.task.json"

    @staticmethod
    def read(path: Path) -> TaskResult | None:
        """Read the result in a file; None if the file is missing or damaged."""
        if not path.exists():
            return None
        try:
            result = _task_result_adapter.validate_python(read_json(path))
        except (DataError, ValidationError):
            return None  # the task runs again
        # An empty JSON object would be a valid result. But every finished task has written its seconds.
        return result if "seconds" in result.figures else None


def _list_packages(task: Task, context: Context) -> list[str]:
    """Names of the packages that a result depends on: cellmill, and packages with parts that are used.

    Such parts are the task, the model with its tokenizer and objectives, and the classifiers.
    """
    model = context.model
    objectives = [part.load() for part in model.network.objective.config.all_parts()]
    parts = [type(task), type(model.network), model.tokens.load(), *objectives]
    classifiers = [load("classifier", name) for name in context.options.classifiers]
    modules = [part.__module__ for part in (*parts, *classifiers)]
    packages = {module.partition(".")[0] for module in modules}
    # a package may declare a classifier that is an object of another library: both packages count
    packages |= {*declaring_packages("classifier", context.options.classifiers)}
    return sorted(packages | {"cellmill"})


@cache
def _digest_files(package: str) -> str:
    """SHA-256 of all files of an imported package, such as source files and gene tables."""
    module = sys.modules[package]
    folders = getattr(module, "__path__", [])
    found = sorted(chain.from_iterable(Path(folder).rglob("*") for folder in folders))
    paths = [path for path in found if path.is_file() and "__pycache__" not in path.parts]
    return digest([sha256_file(path) for path in paths or [Path(str(module.__file__))]])
