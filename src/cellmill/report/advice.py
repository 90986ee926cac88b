"""What to change for a better model, by rules that measured tables support.

The tables are in docs/quality.md: "What to change first", "Steps and checkpoint", "Where a trained
model is worth it".
"""

from collections.abc import Iterator, Sequence

from cellmill.config.run import AUTO_EPOCHS, AUTO_MIN_STEPS
from cellmill.report.collect import ReportedRun
from cellmill.report.forms import PlanForm
from cellmill.runs.folder import COLLAPSED

WEAK = ("masked_gene", "masked_value", "next_gene")
"""Objectives whose embeddings were behind the baselines almost everywhere (benchmarks/quality.tsv).
"""
GAINS = {
    "batch": "+.006 (-.001 to +.013) with 5 labels a class",
    "steps": "+.013 (-.007 to +.034)",
}
"""Gain of a change in accuracy, and its interval: rows of "What to change first" in docs/quality.md.
"""
# a model of family `profile` of this width or more lost accuracy at higher rates than this
WIDE = 512
WIDE_LR = 0.0025


def advise(run: ReportedRun, outcomes: Sequence[str]) -> Iterator[str]:
    """Advice for a run, the most urgent first, at least one sentence.

    `outcomes` (ahead, level, behind or undecided) are those of its comparisons with the best
    baselines, over all datasets and tasks.
    """
    if has_collapsed(run):
        yield "lower train.lr: the embedding has collapsed to one direction"
    objective = run.options.objective.name
    if objective in WEAK:
        yield (
            f"set objective: cell_decoding; models trained only by {objective} were behind the baselines almost "
            "everywhere"
        )
    model = run.options.model
    lr = run.options.train.lr
    is_wide = model.family == "profile" and model.hidden is not None and model.hidden >= WIDE
    if is_wide and lr is not None and lr > WIDE_LR:
        yield (
            f"lower train.lr to 0.001: from a width of {WIDE}, higher rates cost accuracy on whole cells"
        )
    if not run.supervised_by:  # batches and lengths of training were measured without labels
        if _has_unused_batches(run):
            yield (
                "set objective.batch_column: auto, so that the embedding need not contain the batch: batches then "
                f"mixed as well as with Harmony, and accuracy gained {GAINS['batch']}"
            )
        yield from _advise_steps(run)
    if outcomes and "ahead" not in outcomes:
        compared = "better than" if "behind" in outcomes else "as good as"
        yield (
            f"take the best baseline: it is {compared} the model on these cells and costs less; models were ahead of "
            "baselines only where few counts or few genes were measured, on two panels of five datasets"
        )
    if run.evaluation is None:
        yield "run the workflow to its end: the run has no result yet"
    elif not outcomes:
        yield "name the label, batch or other columns that its tasks need: no task compares it with a baseline"
    else:
        yield "train it with other seeds, in a sweep over train.seed: the intervals do not cover them"


def has_collapsed(run: ReportedRun) -> bool:
    """True if the embedding of a run without labels varies in one direction only.

    Two labels need no second direction, so models trained with labels count as not collapsed.
    """
    ranks = [line.effective_rank for line in run.logged if line.effective_rank is not None]
    return not run.supervised_by and bool(ranks) and ranks[-1] < COLLAPSED


def _has_unused_batches(run: ReportedRun) -> bool:
    """True if a model as measured was trained without a batch, and a scored dataset has several."""
    objective = run.options.objective
    is_measured = objective.name == "cell_decoding" and run.options.model.family == "profile"
    is_decided = objective.batch_column is not None or objective.batch_reason is not None
    if run.evaluation is None or is_decided or not is_measured:
        return False
    results = run.evaluation.results()
    return any(task == "integration" and not result.skipped for _, task, result in results)


def _advise_steps(run: ReportedRun) -> Iterator[str]:
    """Advice on the number of steps and the exported checkpoint."""
    plan = run.plan or PlanForm()
    enough = max(AUTO_EPOCHS * plan.steps_per_epoch, AUTO_MIN_STEPS)
    if plan.steps is not None and plan.steps < enough:
        yield (
            f"set train.steps: auto, which is {enough:,} steps and not {plan.steps:,}; with 32 cells a step, 1,600 in "
            f"place of 400 gained {GAINS['steps']}"
        )
    exported = run.evaluated_model.step
    last = (run.status and run.status.step) or 0
    if exported is not None and exported < last:
        yield (
            f"set consolidate.checkpoint: last; the exported checkpoint is of step {exported:,} of {last:,}, and "
            "embeddings improve for longer than the validation loss"
        )
