"""What to change for a better model, by rules that measured tables support.

The tables are in docs/quality.md: "Steps and checkpoint", "Where a trained model is worth it".
"""

from collections.abc import Iterator, Sequence

from cellmill.config.run import AUTO_EPOCHS, AUTO_MIN_STEPS
from cellmill.report.collect import ReportedRun
from cellmill.runs.folder import COLLAPSED

WEAK = ("masked_gene", "masked_value", "next_gene")
"""Objectives whose embeddings were behind the baselines almost everywhere (benchmarks/quality.tsv).
"""
# a model of family `profile` of this width or more lost accuracy at higher rates than this
WIDE = 512
WIDE_LR = 0.0025


def advise(run: ReportedRun, outcomes: Sequence[str]) -> Iterator[str]:
    """Sentences for a run, the most urgent first, each naming an option; the page shows the first.

    `outcomes` (ahead, level or behind) are those from comparisons with the best baselines, over all
    datasets and tasks.
    """
    options = (run.run_record or {}).get("options", {})
    objective = options.get("objective", {}).get("name")
    if objective in WEAK:
        yield f"set objective: cell_decoding; {objective} alone was behind the baselines almost everywhere"
    model = options.get("model", {})
    is_wide = model.get("family") == "profile" and model["hidden"] >= WIDE
    if is_wide and options["train"]["lr"] > WIDE_LR:
        yield f"lower train.lr to 0.001: at a width of {WIDE}, higher rates cost accuracy on whole cells"
    if not run.supervised_by:
        yield from _advise_steps(run)
        ranks = [
            line["effective_rank"]
            for line in run.metric_lines
            if line.get("effective_rank") is not None
        ]
        # not for models trained with labels: two labels need no second direction
        if ranks and ranks[-1] < COLLAPSED:
            yield "lower train.lr: the embedding has collapsed to one direction"
    if any(outcomes) and "ahead" not in outcomes:
        better = "is better" if "behind" in outcomes else "is as good"
        yield (
            f"take the best baseline: it {better} on these cells and costs less; models were ahead where few counts or "
            "genes were measured, on two panels of five datasets"
        )


def _advise_steps(run: ReportedRun) -> Iterator[str]:
    """Advice on the number of steps and the exported checkpoint."""
    plan = run.plan or {}
    enough = max(AUTO_EPOCHS * plan.get("steps_per_epoch", 0), AUTO_MIN_STEPS)
    steps = plan.get("steps", enough)
    if steps < enough:
        yield (
            f"set train.steps: auto, {enough:,} in place of {steps:,}: at 32 cells a step it added up to 0.06 with "
            "few genes, and up to 0.03 on whole cells"
        )
    exported = run.evaluation.model.get("step") if run.evaluation else None
    last = (run.status or {}).get("step", 0)
    if exported is not None and exported < last:
        yield (
            f"set consolidate.checkpoint: last: the exported one is of step {exported:,} of {last:,}, and "
            "embeddings improve for longer than the validation loss"
        )
