"""Names of perturbations: one for each combination of genes, whatever order and delimiter a file
writes it in.

`A+B`, `B+A` and `B_A` are the same cells' biology. If they had two names, a split could put one
into training and the other into test. A name is split at a delimiter if every part is a gene of the
file or of the gene tables, or a word for a control, which is left out. The genes are sorted and
joined by `+`. Names that are genes themselves (`HLA-A`, `Y_RNA`) and names with a part that is none
(`TP53_1`, a guide) stay as they are.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from cellmill.data.arrays import text_values
from cellmill.data.genes.columns import text_columns
from cellmill.data.genes.names import SEPARATOR
from cellmill.data.genes.tables import gene_id, gene_table
from cellmill.data.inputs.reader import CountsReader

DELIMITERS = (" || ", SEPARATOR, "|", ";", ",", "_")
"""Between the genes of a combination; the first at which a name can be split counts."""
OTHER_DELIMITERS = (
    " and ",
    " & ",
    " ",
    "::",
    ":",
    "//",
    "/",
    "&",
    "--",
    "-",
    "*",
    "^",
    "~",
    "=",
    "#",
    "@",
    ".",
)
"""Delimiters of names that look like combinations and are named in the log, but are left as they
are.
"""
CONTROL_WORD = re.compile(
    r"(ctrl|control|non[-_ ]?target(ing|ed)?|ntc?|neg(ative)?[-_ ]?(ctrl|control)|safe[-_ ]?target(ing)?"
    r"|scrambled?|intergenic|mock|untreated|unperturbed)[-_ ]?\d*",
    re.IGNORECASE,
)
"""Parts of a combination that stand for a control guide, besides the table's control values."""
SHOWN = 10  # names in a line of the log
GUIDE_NAME = re.compile(r"guide|grna|protospacer", re.IGNORECASE)  # in names of obs columns
NO_GUIDE = (
    "",
    "none",
    "nan",
    "na",
    "no guide",
    "negative",
    "unassigned",
    "unknown",
    "no_guide",
    "0",
)
# share of perturbed cells whose guide stands for one perturbation, in a column of guides
ONE_TARGET = 0.9
# ratio of median counts above which controls and perturbed cells differ by more than noise
DEEPER = 1.5


class TargetNames:
    """Names that count as genes: those of a file, and the names in the tables of its organism."""

    def __init__(self, of_file: Collection[str], organism: str | None) -> None:
        self._of_file = frozenset(of_file)
        self._organism = organism
        self._tables = gene_table(organism).ids if organism is not None else {}

    @classmethod
    def read(cls, reader: CountsReader, organism: str | None) -> "TargetNames":
        names = [*reader.var_names]
        for texts in text_columns(reader.var).values():
            if len({*texts}) > len(texts) / 2:  # names of genes, not their chromosomes or types
                names += texts
        return cls({str(name) for name in names if name}, organism)

    def has_current(self, name: str) -> bool:
        """True for a name in the file, a current symbol, or an Ensembl id."""
        if name in self._of_file or name in self._tables.get("symbol", ()):
            return True
        return self._organism is not None and bool(gene_id(name, self._organism))

    def has(self, name: str) -> bool:
        """True also for a previous symbol or an alias."""
        return self.has_current(name) or any(name in names for names in self._tables.values())


class Merged(NamedTuple):
    """Names of perturbations by the texts of a file."""

    names: dict[str, str]  # canonical name by text, of all texts
    # delimiter by text that looks like a combination of genes, but is left as it is
    undivided: dict[str, str]
    # texts of the same parts in other orders, not all of them genes, left as they are
    reordered: list[list[str]]

    def report(self, texts: np.ndarray) -> dict[str, Any]:
        """Entry `perturbations` of the QC report on cells with these texts; empty if no name was
        changed.
        """
        counted = pd.Series(texts, dtype=object).value_counts(sort=False).to_dict()
        sources: dict[str, dict[str, int]] = {}
        for text in sorted(counted):
            sources.setdefault(self.names[text], {})[text] = int(counted[text])
        changed = {name: of for name, of in sources.items() if list(of) != [name]}
        undivided = {
            text: delimiter for text, delimiter in self.undivided.items() if text in counted
        }
        reordered = [
            texts for texts in self.reordered if sum(text in counted for text in texts) > 1
        ]
        entries = {"merged": changed, "undivided": undivided, "reordered": reordered}
        return {key: value for key, value in entries.items() if value}


def merge_names(texts: Iterable[str], controls: Sequence[str], genes: TargetNames) -> Merged:
    """One name for each perturbation of a file; all `controls` get the name of the first."""
    unique = sorted({*texts})
    names = {}
    undivided = {}
    for text in unique:
        if text in controls:
            names[text] = controls[0]
        elif genes.has(text):
            names[text] = text
        elif (parts := _divide(text, DELIMITERS, controls, genes)) is not None:
            names[text] = SEPARATOR.join(parts) or (controls[0] if controls else text)
        else:
            names[text] = text
            for delimiter in OTHER_DELIMITERS:
                if _divide(text, [delimiter], controls, genes):
                    undivided[text] = delimiter
                    break
    whole = [text for text in unique if names[text] == text and text not in controls]
    return Merged(names, undivided, _find_reordered(whole, controls))


def _find_reordered(texts: Iterable[str], controls: Sequence[str]) -> list[list[str]]:
    """Groups of texts that have the same parts in different orders."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for text in texts:
        delimiter = next((each for each in DELIMITERS if each in text), None)
        if delimiter is not None:
            groups.setdefault(tuple(sorted(_split(text, delimiter, controls))), []).append(text)
    return [group for group in groups.values() if len(group) > 1]


def _divide(
    text: str, delimiters: Sequence[str], controls: Sequence[str], genes: TargetNames
) -> list[str] | None:
    """Genes of a combination, sorted, without controls; None if `text` is none at any of the
    delimiters.
    """
    for delimiter in delimiters:
        parts = _split(text, delimiter, controls)
        if len(parts) < 2:
            continue
        found = [
            part for part in parts if part not in controls and not CONTROL_WORD.fullmatch(part)
        ]
        # `_` and the delimiters that are not split at are in many other names, and aliases are
        # short
        is_gene = genes.has if delimiter in DELIMITERS[:-1] else genes.has_current
        if found and all(map(is_gene, found)):
            return sorted({*found})
        if not found and all(part in controls for part in parts):
            return []
    return None


def _split(text: str, delimiter: str, controls: Sequence[str]) -> list[str]:
    """Parts between delimiters. A word for a control is one part even if the delimiter is in it
    (`non_targeting`).
    """
    if delimiter not in text:
        return [text]
    words = [re.escape(control) for control in sorted(controls, key=len, reverse=True)] + [
        CONTROL_WORD.pattern
    ]
    between = re.escape(delimiter)
    token = rf"(?P<part>(?i:{'|'.join(words)})|(?:(?!{between}).)*)(?:{between}|$)"
    parts = [match["part"].strip() for match in re.finditer(token, text, re.DOTALL)]
    return parts[:-1]  # the last match is the empty one at the end of the text


def describe_merged(report: dict[str, Any]) -> list[str]:
    """Lines for the log about an entry `perturbations` of the QC report."""
    lines = []
    merged = report.get("merged")
    if merged:
        n_cells = sum(sum(sources.values()) for sources in merged.values())
        shown = [
            f"{', '.join(f'{text!r} {n:,}' for text, n in sources.items())} as {name!r}"
            for name, sources in [*merged.items()][:SHOWN]
        ]
        more = f"; and {len(merged) - SHOWN:,} more" if len(merged) > SHOWN else ""
        lines.append(
            f"perturbation: {n_cells:,} cells have one name for each combination: {'; '.join(shown)}{more}"
        )
    undivided = report.get("undivided")
    if undivided:
        named = ", ".join(
            f"{text!r} ({delimiter!r})" for text, delimiter in [*undivided.items()][:SHOWN]
        )
        more = f" and {len(undivided) - SHOWN:,} more" if len(undivided) > SHOWN else ""
        lines.append(
            f"warning: perturbation: {named}{more} may be genes joined by a delimiter that is not known; the order of "
            "the genes then makes two perturbations of one: join them by +"
        )
    reordered = report.get("reordered")
    if reordered:
        named = "; ".join(" and ".join(map(repr, texts)) for texts in reordered[:SHOWN])
        more = f"; and {len(reordered) - SHOWN:,} more" if len(reordered) > SHOWN else ""
        lines.append(
            f"warning: perturbation: {named}{more} have the same parts in another order, not all of them genes: they "
            "stay different perturbations; give them one name if they are one"
        )
    return lines


def find_guides(
    obs: pd.DataFrame, perturbation: np.ndarray, named: str | None
) -> tuple[str, np.ndarray] | None:
    """Name of the column of guides, and the guide of each cell, None without one; None if there is
    no such column.

    `named` is the column of the table. Else a column of text counts whose name says that it has
    guides, if nearly each of its values belongs to one value of `perturbation`, (cells,) with None
    for controls, and it has more values.
    """
    candidates = (
        [named] if named is not None else [name for name in obs if GUIDE_NAME.search(str(name))]
    )
    perturbed = ~pd.isna(perturbation)
    for name in candidates:
        guides = text_values(obs[name])
        guides[[text.strip().lower() in NO_GUIDE for text in guides]] = None
        if named is not None:
            return name, guides
        pairs = pd.DataFrame(
            {"guide": guides[perturbed], "target": perturbation[perturbed]}
        ).dropna()
        targets = pairs.groupby("guide")["target"].value_counts()
        share = targets.groupby("guide").max().sum() / max(len(pairs), 1)
        if share >= ONE_TARGET and pairs["guide"].nunique() > pairs["target"].nunique():
            return name, guides
    return None


class Controls(NamedTuple):
    """Control cells of a file, and what a table's word does not tell about them."""

    is_control: np.ndarray  # (cells,) bool
    is_perturbed: np.ndarray  # (cells,) bool; a cell may be neither
    value: np.ndarray  # (cells,) text of the file
    guides: tuple[str, np.ndarray] | None  # column and guide of each cell

    def report(self, cells: np.ndarray, depth: np.ndarray) -> dict[str, Any]:
        """Entry `controls` of the QC report on the cells of mask `cells`; `depth` are counts,
        (cells,) int.
        """
        control = cells & self.is_control
        perturbed = cells & self.is_perturbed
        report: dict[str, Any] = {
            "values": {
                str(value): int(n)
                for value, n in pd.Series(self.value[control]).value_counts().items()
            },
            "n_controls": int(control.sum()),
            "n_perturbed": int(perturbed.sum()),
        }
        for name, mask in (
            ("median_counts_controls", control),
            ("median_counts_perturbed", perturbed),
        ):
            report[name] = float(np.median(depth[mask])) if mask.any() else None
        if self.guides is not None:
            column, guides = self.guides
            has_guide = ~pd.isna(guides)
            targeting = (
                np.isin(guides.astype(str), guides[perturbed & has_guide].astype(str)) & has_guide
            )
            report["guide_column"] = column
            report["controls_without_guide"] = int((control & ~has_guide).sum())
            counted = pd.Series(guides[control & targeting]).value_counts()
            report["controls_with_targeting_guide"] = {
                str(guide): int(n) for guide, n in counted.items()
            }
        return report


def describe_controls(report: dict[str, Any]) -> list[str]:
    """Lines for the log about an entry `controls` of the QC report."""
    control = report["median_counts_controls"]
    perturbed = report["median_counts_perturbed"]
    values = ", ".join(f"{value!r} {n:,}" for value, n in [*report["values"].items()][:SHOWN])
    lines = [
        f"controls: {report['n_controls']:,} cells ({values}), median counts {_depth(control)}; perturbed: "
        f"{report['n_perturbed']:,} cells, median counts {_depth(perturbed)}"
    ]
    if control and perturbed and max(control, perturbed) > DEEPER * min(control, perturbed):
        lines.append(
            f"warning: controls: their median counts are {control / perturbed:.2g} times the perturbed cells': "
            "measured changes include this difference"
        )
    column = report.get("guide_column")
    n = report.get("controls_without_guide")
    if n:
        lines.append(
            f"warning: controls: {n:,} of {report['n_controls']:,} have no guide in obs column {column!r}: their "
            "perturbation is unknown; leave them out by the dataset's filter"
        )
    targeting = report.get("controls_with_targeting_guide")
    if targeting:
        shown = ", ".join(f"{guide!r} {n:,}" for guide, n in [*targeting.items()][:SHOWN])
        lines.append(
            f"warning: controls: {sum(targeting.values()):,} of {report['n_controls']:,} have a guide in obs column "
            f"{column!r} that perturbed cells have too: {shown}; leave them out by the dataset's filter"
        )
    return lines


def _depth(median: float | None) -> str:
    return "unknown" if median is None else f"{median:,.0f}"
