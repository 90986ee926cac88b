"""Lines for the log about labels, perturbations and controls in the QC report."""

from collections.abc import Mapping, Sequence
from typing import Any

SHOWN = 10  # names in a line
# a larger ratio of the median counts of controls and perturbed cells is more than noise
MAX_DEPTH_RATIO = 1.5


def list_first(texts: Sequence[str], max_shown: int = SHOWN, separator: str = ", ") -> str:
    """The first `max_shown` texts, and how many more there are."""
    shown = separator.join(texts[:max_shown])
    n_more = len(texts) - max_shown
    return f"{shown}{separator.strip(', ')} and {n_more:,} more" if n_more > 0 else shown


def list_counts(counts: Mapping[str, int], max_shown: int = SHOWN) -> str:
    return list_first([f"{text!r} {n:,}" for text, n in counts.items()], max_shown)


def describe_no_label(name: str, counts: dict[str, int], dataset: str) -> str:
    """Say which texts of a label mean no label."""
    return (
        f"label {name}: {sum(counts.values()):,} cells have a text that means no label, and get none: "
        f"{list_counts(counts)}; set no_label of dataset {dataset} in the table if these are classes"
    )


def describe_label_map(name: str, report: dict[str, Any]) -> str:
    """Say what a label map did to the kept cells."""
    line = f"label {name}: renamed {_count_cells(report['renamed'])}"
    kept = report["kept"]
    line += f"; left as they are {_count_cells(kept)}{_in_brackets(kept)}"
    made_missing = report["made_missing"]
    if made_missing:
        line += f"; without a label now {_count_cells(made_missing)}{_in_brackets(made_missing)}"
    return line


def _count_cells(counts: dict[str, int]) -> str:
    return f"{sum(counts.values()):,} cells of {len(counts):,} labels"


def _in_brackets(counts: dict[str, int]) -> str:
    return f" ({list_counts(counts, 2 * SHOWN)})" if counts else ""


def describe_merged(report: dict[str, Any]) -> list[str]:
    """Lines about an entry `perturbations` of the QC report."""
    lines = []
    merged = report.get("merged")
    if merged:
        n_cells = sum(sum(sources.values()) for sources in merged.values())
        texts = [f"{list_counts(merged[name], len(merged[name]))} as {name!r}" for name in merged]
        lines.append(
            f"perturbation: {n_cells:,} cells have one name for each combination: {list_first(texts, separator='; ')}"
        )
    undivided = report.get("undivided")
    if undivided:
        texts = [f"{text!r} ({delimiter!r})" for text, delimiter in undivided.items()]
        lines.append(
            f"warning: perturbation: {list_first(texts)} may be genes joined by a delimiter that is not known; the "
            "order of the genes then makes two perturbations of one: join them by +"
        )
    reordered = report.get("reordered")
    if reordered:
        texts = [" and ".join(map(repr, group)) for group in reordered]
        lines.append(
            f"warning: perturbation: {list_first(texts, separator='; ')} have the same parts in another order, not all "
            "of them genes: they stay different perturbations; give them one name if they are one"
        )
    return lines


def describe_controls(report: dict[str, Any]) -> list[str]:
    """Lines about an entry `controls` of the QC report."""
    control = report["median_counts_controls"]
    perturbed = report["median_counts_perturbed"]
    n_controls = f"{report['n_controls']:,}"
    lines = [
        f"controls: {n_controls} cells ({list_counts(report['values'])}), median counts {_depth(control)}; "
        f"perturbed: {report['n_perturbed']:,} cells, median counts {_depth(perturbed)}"
    ]
    if (
        control
        and perturbed
        and max(control, perturbed) > MAX_DEPTH_RATIO * min(control, perturbed)
    ):
        lines.append(
            f"warning: controls: their median counts are {control / perturbed:.2g} times the perturbed cells': "
            "measured changes include this difference"
        )
    column = report.get("guide_column")
    n_without = report.get("controls_without_guide")
    if n_without:
        lines.append(
            f"warning: controls: {n_without:,} of {n_controls} have no guide in obs column {column!r}: their "
            "perturbation is unknown; leave them out by the dataset's filter"
        )
    targeting = report.get("controls_with_targeting_guide")
    if targeting:
        lines.append(
            f"warning: controls: {sum(targeting.values()):,} of {n_controls} have a guide in obs column {column!r} "
            f"that perturbed cells have too: {list_counts(targeting)}; leave them out by the dataset's filter"
        )
    return lines


def _depth(median: float | None) -> str:
    return "unknown" if median is None else f"{median:,.0f}"
