"""Run the tasks of an evaluation on one dataset, and print a line for each task.

Tasks that finished in an earlier evaluation are not repeated. On CPU cores, several processes run the
remaining tasks.
"""

import json
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from cellmill.config.evaluate import Evaluate
from cellmill.config.plugin import in_one_line
from cellmill.data.prepare.qc_lines import list_first
from cellmill.errors import ConfigError, DataError, UserError
from cellmill.evaluate.evaluated_datasets import is_label
from cellmill.evaluate.finished import FinishedTasks
from cellmill.evaluate.seconds.planned import Planner, describe_plan
from cellmill.evaluate.task import Context, Task, run_task
from cellmill.files import progress, span, write_json
from cellmill.launch.signals import belong_to_parent, interrupted_later
from cellmill.runs.results import DatasetResult, Row, TaskResult

SHOWN_CLASSES = 3  # the line of a task names at most this many classes
# At most this many processes run tasks. It is the number of threads of rule evaluate, and it bounds
# memory: each process may hold the features of a dataset.
MAX_PROCESSES = 4


class RunOutput(NamedTuple):
    """Result of a task, with its CPU time and the predictions of baselines that the task computed."""

    result: TaskResult
    cpu_s: float  # CPU-seconds
    new_predictions: dict[str, np.ndarray]  # to be added to `PredictionCache.predictions`
    has_read_stored: bool  # True if the task read predictions of an earlier evaluation


@dataclass(frozen=True)
class _TaskRun:
    """A task on a dataset, with one of the dataset's labels."""

    name: str  # name of the task, or `TASK of LABEL` for a further label
    task_name: str  # name in `evaluate.tasks`
    task: Task
    context: Context
    path: Path  # of the result, as `FinishedTasks.path` returns it
    left_out: list[str] | None  # what effort fast leaves out of the task; None at effort full

    def run(self) -> RunOutput:
        """Run the task, and measure its time."""
        started = time.perf_counter()
        cpu_started = time.process_time()
        predictions = self.context.prediction_cache.predictions
        known_keys = set(predictions)
        n_reads_before = predictions.n_stored_reads
        result = run_task(self.task, self.context)
        seconds = round(time.perf_counter() - started, 2)
        cpu_s = time.process_time() - cpu_started

        # complete the result
        figures: dict[str, Any] = {"seconds": seconds}
        result = replace(result, task=self.task_name)
        if self.left_out is not None:
            left_out = ", ".join(self.left_out) or "nothing"
            result = result.mark_fast(left_out)
            figures |= {"effort": "fast", "left_out": left_out}
        result.figures.update(figures)
        # a NaN in the result raises here, where the error still belongs to this task
        json.dumps(result.to_json(), allow_nan=False)

        new = {key: value for key, value in predictions.items() if key not in known_keys}
        return RunOutput(result, cpu_s, new, predictions.n_stored_reads > n_reads_before)


# task runs of the current dataset, which forked worker processes inherit
_runs_of_workers: list[_TaskRun] = []


def check_packages(section: Evaluate) -> None:
    """Raise ConfigError if a task needs a package that is not installed. Call this before any task runs."""
    for name, config in section.tasks.items():
        for module, extra in config.packages().items():
            if find_spec(module) is None:
                raise ConfigError(
                    f"evaluate.tasks.{name} requires {module}, which is missing: pip install "
                    f"'cellmill[{extra}]', or take it out of evaluate.tasks"
                )


def run_tasks(
    tasks: dict[str, Task],
    context: Context,
    finished: FinishedTasks,
    left_out: Mapping[str, list[str]],
) -> dict[str, TaskResult]:
    """Run all tasks on a dataset, and return their results by name. A line is printed for each task.

    A task with a result in `finished` does not run again. `left_out` has, by the name of a task, what
    effort fast leaves out of the task.

    If a task fails, the other tasks still run, and their results are kept. Then the error is raised.
    """
    task_runs = [*_list_task_runs(tasks, context, finished, left_out)]
    dataset = context.dataset
    n_scored = int(context.scored.sum())
    print(
        f"{dataset}: {n_scored:,} of {context.reader.n_obs:,} cells are scored "
        f"({context.options.cells})",
        flush=True,
    )
    results = {}
    missing = []
    for task_run in task_runs:
        result = finished.read(task_run.path)
        if result is None:
            missing.append(task_run)
        else:
            results[task_run.name] = result
            print(f"{dataset}: {task_run.name}: finished earlier", flush=True)
    if missing:
        results |= _run_missing(missing, context, finished)
    return {task_run.name: results[task_run.name] for task_run in task_runs}


def _run_missing(
    task_runs: list[_TaskRun], context: Context, finished: FinishedTasks
) -> dict[str, TaskResult]:
    """Run the tasks without a kept result, and return their results by name of the task run.

    If task runs fail, the UserError of the first one is raised after all task runs have ended.
    """
    n_processes = _count_processes(task_runs, context)
    estimated_s = _estimate_and_print_plan(task_runs, context, finished.ratios.read(), n_processes)
    any_reads_label = any(context.options.tasks[each.task_name].reads_label for each in task_runs)
    if n_processes > 1 and any_reads_label and "label" in context.roles:
        # All processes share these components, so they are computed before the processes fork. One
        # thread computes them, as in `run_task`, so the components are always the same to the bit.
        with threadpool_limits(1):
            _ = context.model.components

    results = {}
    failures: list[UserError] = []
    waiting = [task_run.name for task_run in task_runs]
    with ExitStack() as stack:
        for task_run, get_output in progress(
            _submit(stack, task_runs, n_processes),
            f"evaluate {context.dataset}",
            len(task_runs),
            "tasks",
            now=lambda: ", ".join(waiting[:n_processes]),
        ):
            waiting.remove(task_run.name)
            try:
                output = _finish_task(task_run, get_output)
                results[task_run.name] = output.result
                # The ratio of measured to estimated time helps to plan the next dataset. A task that
                # read stored predictions was faster than it will be there.
                if output.result.skipped is None and not output.has_read_stored:
                    finished.ratios.learn(
                        task_run.task_name, estimated_s[task_run.name], output.cpu_s
                    )
            except UserError as error:
                failures.append(error)
                if waiting:
                    print(f"{error}; the other tasks go on", flush=True)
                elif len(failures) > 1:  # the first error is raised below, this one is printed
                    print(error, flush=True)
    if failures:
        raise failures[0]
    return results


def _estimate_and_print_plan(
    task_runs: list[_TaskRun], context: Context, ratios: Mapping[str, float], n_processes: int
) -> dict[str, float | None]:
    """Estimate the CPU-seconds of each task run, and print the planned time of the dataset.

    The result has the estimates by name of the task run; None if there is no estimate. A planned time is an
    estimate multiplied by the learned ratio of its task, from `ratios`.
    """
    planner = Planner(context)
    estimated_s = {}
    planned_s = {}
    for task_run in task_runs:
        seconds = planner.estimate(task_run.task_name, task_run.task, task_run.context)
        ratio = ratios.get(task_run.task_name, 1.0)
        estimated_s[task_run.name] = seconds
        planned_s[task_run.name] = None if seconds is None else ratio * seconds
    print(f"{context.dataset}: {describe_plan(planned_s, n_processes)}", flush=True)
    return estimated_s


def _list_task_runs(
    tasks: dict[str, Task],
    context: Context,
    finished: FinishedTasks,
    left_out: Mapping[str, list[str]],
) -> Iterator[_TaskRun]:
    """List a run of each task, and a run for each further label of each task that reads a label."""
    # contexts by what follows the task in the name of a run, such as ` of cell_type`
    context_by_suffix = {"": context}
    for role, column in context.roles.items():
        if is_label(role) and role != "label":
            roles = {**context.roles, "label": column}
            context_by_suffix[f" of {column.name}"] = replace(context, roles=roles)
    for suffix, labelled in context_by_suffix.items():
        for name, task in tasks.items():
            if suffix and not context.options.tasks[name].reads_label:
                continue
            omitted = left_out.get(name)
            path = finished.path(name, task, labelled, omitted)
            yield _TaskRun(name + suffix, name, task, labelled, path, omitted)


def _count_processes(task_runs: Sequence[_TaskRun], context: Context) -> int:
    """Return the number of processes for the task runs. It is 1 if the model is on a GPU."""
    on_gpu = next(context.model.network.parameters()).is_cuda
    return 1 if on_gpu else min(torch.get_num_threads(), len(task_runs), MAX_PROCESSES)


def _submit(
    stack: ExitStack, task_runs: list[_TaskRun], n_processes: int
) -> Iterable[tuple[_TaskRun, Callable[[], RunOutput]]]:
    """Return each task run, with a function that returns the output of the task run.

    With one process, the function runs the task. With several processes, workers run the tasks in
    parallel, and task runs come in the order in which they end. The end of `stack` ends the workers.
    """
    if n_processes <= 1:
        return ((task_run, task_run.run) for task_run in task_runs)
    _runs_of_workers[:] = task_runs
    stack.callback(_runs_of_workers.clear)
    pool = stack.enter_context(_open_workers(n_processes))
    with warnings.catch_warnings(), interrupted_later():
        # Python 3.12 warns of forking a process with threads; `_start_worker` says why it is safe
        warnings.simplefilter("ignore", DeprecationWarning)
        futures = {
            pool.submit(_run_in_worker, number): task_run
            for number, task_run in enumerate(task_runs)
        }
    return ((futures[future], future.result) for future in as_completed(futures))


@contextmanager
def _open_workers(n: int) -> Iterator[ProcessPoolExecutor]:
    """Open a pool of `n` workers.

    The workers are forked when the pool gets work. An error terminates them.
    """
    earlier_children = active_children()
    with ProcessPoolExecutor(n, get_context("fork"), _start_worker) as pool:
        try:
            yield pool
        except BaseException:
            for process in active_children():
                if process not in earlier_children:
                    process.terminate()
            raise


def _start_worker() -> None:
    """Let a worker end with its parent, and compute with one thread.

    A forked process has none of the threads of its parent, so it must not wait for them. Results do not
    depend on the number of threads.
    """
    belong_to_parent()
    torch.set_num_threads(1)


def _run_in_worker(number: int) -> RunOutput:
    return _runs_of_workers[number].run()


def _finish_task(task_run: _TaskRun, get_output: Callable[[], RunOutput]) -> RunOutput:
    """Get the output of a task run, write its result, and print a line about it.

    Raises DataError with the name of the task if the task failed without a message for users.
    """
    context = task_run.context
    try:
        output = get_output()
    except (UserError, BrokenProcessPool):
        # A UserError has a message for users. A BrokenProcessPool means that a process was killed:
        # `stages.evaluate` says what to do then.
        raise
    except Exception as error:
        traceback.print_exc()
        raise DataError(
            f"{context.dataset}: task {task_run.name!r} failed ({in_one_line(error)}); its "
            "traceback is above; repair or report it, or take the task out of evaluate.tasks"
        ) from None
    result = output.result
    context.prediction_cache.predictions.update(output.new_predictions)
    write_json(task_run.path, result.to_json())
    took = f"took {span(result.figures['seconds'])} ({output.cpu_s:.0f} CPU-s)"
    print(f"{context.dataset}: {task_run.name}: {describe_result(result)}; {took}", flush=True)
    return output


def describe_result(result: TaskResult) -> str:
    """Describe the result of a task in one line. Every comparison is in metrics.json and the report."""
    if result.skipped is not None:
        return f"skipped: {result.skipped}"
    parts = []
    best = result.best_row("model")
    if best is not None:
        parts.append(f"{result.metric} {_describe_row(result, best)}")
    baseline = result.best_baseline(result.metric or "")
    if baseline is not None:
        parts.append(f"best baseline {_describe_row(result, baseline)}")
    outcomes = Counter(verdict.outcome for verdict in result.best_verdicts())
    if outcomes:
        parts.append(", ".join(f"{outcome} in {n}" for outcome, n in sorted(outcomes.items())))
    figures = result.figures
    if figures.get("dropped_classes"):
        classes = [f"{name} {n:,}" for name, n in figures["dropped_classes"].items()]
        parts.append(f"classes of too few cells left out: {list_first(classes, SHOWN_CLASSES)}")
    if not parts:
        sentences = [sentence.removesuffix(".") for sentence in result.sentences]
        return "; ".join([*sentences[:1], "all numbers are in metrics.json"])
    return "; ".join(parts) + result.effort_mark


def _describe_row(result: TaskResult, row: Row) -> str:
    return f"{result.rank_value(row):.3f} ({row.method.name})"


def summarize(datasets: Mapping[str, DatasetResult]) -> str:
    """Say how many tasks scored the model, and why each of the other tasks was skipped."""
    skipped = []
    n_tasks = 0
    for name, dataset in datasets.items():
        n_tasks += len(dataset.tasks)
        for task, result in dataset.tasks.items():
            if result.skipped is not None:
                skipped.append(f"{name}, {task}: {result.skipped}")
    if not n_tasks:
        return "warning: nothing was scored, because no task is configured"
    reasons = "; ".join(skipped)
    if len(skipped) == n_tasks:
        return f"warning: nothing was scored, because every task was skipped ({reasons})"
    scored = f"{n_tasks - len(skipped)} of {n_tasks} tasks scored"
    return f"{scored}, skipped: {reasons}" if skipped else scored
