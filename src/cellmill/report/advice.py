"""Advice on what to change for a better model.

Each function `_advise_…` is a rule. A rule returns a sentence without its full stop, or None if it
has nothing to advise. `find_advice` returns the sentence of the first rule that has one.

Most rules follow from tables in docs/quality.md: "What to change first", "Steps and checkpoint" and
"Where a trained model is worth it". The rule on a collapsed embedding rests on experience. The rule
on weak objectives rests on an earlier table, which ACCURACY_DEFICITS cites.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from cellmill.config.checks import check_together
from cellmill.config.load import check_options, stored_options
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.run import auto_steps
from cellmill.errors import ConfigError
from cellmill.report.collect import ReportedRun
from cellmill.report.schemas import PlanSchema, StatusSchema
from cellmill.report.task_table import list_figures
from cellmill.report.text import with_noun
from cellmill.runs.collapse import advise_on_collapse


class Gain(NamedTuple):
    """A measured change of accuracy, with its 95 % interval. The interval contains 0."""

    change: float
    low: float  # lower end of the interval
    high: float  # upper end of the interval


ACCURACY_DEFICITS = {"masked_gene": "0.11 to 0.34", "masked_value": "0.12 to 0.33"}
"""How much lower the accuracy of each weak objective was than the accuracy of logistic regression.

The logistic regression was on all genes, and both accuracies are on whole cells. The ranges are over
three datasets: PBMC, MERFISH and CellBench. On the fourth dataset, Papalexi, both objectives were
above logistic regression. The numbers are from rows encoder2-masked-gene and encoder2-masked-value
of benchmarks/quality.tsv at commit 138e3a42.
"""
REPLACEMENT_OBJECTIVES = {
    "cell_decoding": {"name": "cell_decoding"},
    "{name: cell_decoding, view: drop}": {"name": "cell_decoding", "view": "drop"},
}
"""Objectives to train instead of a weak objective. A key is the YAML that a user writes.

A value is section `objective` of the options. The first replacement that the run's other options
accept is advised.
"""
GAINS = {"batch": Gain(0.006, -0.001, 0.013), "steps": Gain(0.013, -0.007, 0.034)}
"""Changes of accuracy by what was changed, from rows of "What to change first" in docs/quality.md.

`batch` is the choice of a batch column. `steps` is the increase from 400 to 1,600 training steps.
"""
# The advice on the learning rate was measured for family `profile` with `hidden` equal to MIN_WIDTH.
# A rate above MAX_LR lowered the accuracy there. Wider models get the same advice.
MIN_WIDTH = 512  # the rule applies to models with at least this `hidden`
MAX_LR = 0.0025  # the rule applies to learning rates above this
SAFE_LR = 0.001  # the learning rate that the rule advises


def find_advice(run: ReportedRun, outcomes: Sequence[str]) -> str:
    """Find the most urgent advice for a run. Return a sentence without its full stop.

    `outcomes` has one outcome (ahead, level, behind or undecided) for each comparison of the run
    with a best baseline, over all datasets and tasks.
    """
    advice = [_advise_on_collapse(run), _advise_on_objective(run), _advise_on_learning_rate(run)]
    # the next three rules were measured only on models that were trained without labels
    if not run.supervised_by:
        advice += [_advise_on_batches(run), _advise_on_steps(run), _advise_on_checkpoint(run)]
    advice += [_advise_on_baseline(outcomes), _advise_next_step(run, outcomes)]
    return next(filter(None, advice))


def _advise_on_collapse(run: ReportedRun) -> str | None:
    """Advice if the embedding of the run has collapsed to one direction.

    The advice is the same as in the log of the training. If this version of cellmill cannot read
    the options of the objective, the advice is "lower train.lr".
    """
    if not run.has_collapsed:
        return None
    change = "lower train.lr"
    with suppress(ConfigError):
        objective = check_options(ObjectiveConfig, run.options.objective.content, run.name)
        change = advise_on_collapse(objective)
    return f"{change}: the embedding has collapsed to one direction"


def _advise_on_objective(run: ReportedRun) -> str | None:
    """Advice if the objective is weak, and the run's other options accept a replacement for it."""
    objective = run.options.objective.name
    if objective not in ACCURACY_DEFICITS:
        return None
    for yaml_text, replacement in REPLACEMENT_OBJECTIVES.items():
        try:
            changed = run.options.content | {"objective": replacement}
            check_together(stored_options(changed, run.name))
        except ConfigError:
            continue
        return (
            f"set objective: {yaml_text}; on three of four datasets, two-layer encoders trained only with "
            f"{objective} scored {ACCURACY_DEFICITS[objective]} lower in accuracy than logistic regression on all genes"
        )
    return None


def _advise_on_learning_rate(run: ReportedRun) -> str | None:
    """Advice if a wide model of family `profile` has a high learning rate."""
    model = run.options.model
    lr = run.options.train.lr
    width = model.hidden if model.family == "profile" else None
    is_wide = isinstance(width, int) and width >= MIN_WIDTH
    if not is_wide or lr is None or lr <= MAX_LR:
        return None
    return (
        f"lower train.lr to {SAFE_LR:g}: at a width of {MIN_WIDTH}, the mean of three accuracies on two datasets was "
        f"0.007 to 0.011 lower with 0.005 or 0.01 than with {SAFE_LR:g}, in one seed"
    )


def _advise_on_batches(run: ReportedRun) -> str | None:
    """Advice if an evaluated dataset has several batches, but the run has no batch column.

    The rule applies only to objective `cell_decoding` with family `profile`, because nothing else
    was measured. The rule does not apply if `batch_column: auto` found no suitable column.
    """
    objective = run.options.objective
    is_measured = objective.name == "cell_decoding" and run.options.model.family == "profile"
    is_decided = objective.batch_column is not None or objective.batch_reason is not None
    if run.evaluation is None or is_decided or not is_measured:
        return None
    # Only task integration has the figure `n_batches`. The task has the figure even if it could
    # score nothing, because no label occurs in several batches.
    n_batches = [
        list_figures(result).get("n_batches", 0) for _, _, result in run.evaluation.results()
    ]
    if max(n_batches, default=0) < 2:
        return None
    return (
        "set objective.batch_column: auto, so that the embedding need not contain the batch: on CellBench, "
        f"batches then mixed better than with Harmony, and accuracy with 5 labels per class {_describe_gain('batch')}"
    )


def _describe_gain(change: str) -> str:
    """One of GAINS in words, such as "changed by +0.006, which may be chance (95 % interval …)"."""
    words = "changed by {:+.3f}, which may be chance (95 % interval {:+.3f} to {:+.3f})"
    return words.format(*GAINS[change])


def _advise_on_steps(run: ReportedRun) -> str | None:
    """Advice if the run is planned with fewer steps than `train.steps: auto` would give."""
    plan = run.plan or PlanSchema()
    if plan.steps is None or plan.steps_per_epoch is None:
        return None
    enough_steps = auto_steps(plan.steps_per_epoch)
    if plan.steps >= enough_steps:
        return None
    replaced = "" if run.options.train.epochs is None else " in place of train.epochs"
    return (
        f"set train.steps: auto{replaced}, which is {enough_steps:,} steps and not {plan.steps:,}, and train anew "
        f"(--restart); with 32 cells a step, from 400 to 1,600 steps, accuracy {_describe_gain('steps')}"
    )


def _advise_on_checkpoint(run: ReportedRun) -> str | None:
    """Advice if the validation loss chose the exported checkpoint, and training went on after it.

    The rule does not apply if another metric chose the checkpoint, or if the user did.
    """
    exported_step = run.evaluated_model.step
    status = run.status or StatusSchema()
    last_step = status.step
    is_chosen_by_loss = run.options.train.best_metric in (None, "val_loss")
    is_best = exported_step == status.best_step
    if not (is_chosen_by_loss and is_best) or exported_step is None or last_step is None:
        return None
    if exported_step >= last_step:
        return None
    return (
        f"set consolidate.checkpoint: last; the exported checkpoint is of step {exported_step:,} of {last_step:,}, "
        "and embeddings improve for longer than the validation loss"
    )


def _advise_on_baseline(outcomes: Sequence[str]) -> str | None:
    """Advice if the model is ahead in no comparison, and level or behind in at least one."""
    n_behind = outcomes.count("behind")
    if "ahead" in outcomes or not (n_behind or "level" in outcomes):
        return None
    return (
        f"take the best baseline, which costs less: of {with_noun(len(outcomes), 'comparison')} with it, the "
        f"model is ahead in none and behind in {n_behind or 'none'}; with few counts or few measured genes, "
        "models were ahead of baselines on two of four datasets, PBMC of few genes and MERFISH "
        "(docs/quality.md, Where a trained model is worth it)"
    )


def _advise_next_step(run: ReportedRun, outcomes: Sequence[str]) -> str:
    """The least urgent advice, which every run gets if no other rule applies.

    The advice is to finish the run, to name the columns that its tasks need, or to repeat the run
    with other seeds.
    """
    if run.evaluation is None:
        return "run the workflow to its end: the run has no result yet"
    if not outcomes:
        return "name the label, batch or other columns that its tasks need: no task compares it with a baseline"
    return "train it with other seeds, in a sweep over train.seed: the intervals do not cover them"
