"""Names of perturbations: one name for each combination of genes.

A file may write a combination in any order and with any delimiter. `A+B`, `B+A` and `B_A` are the same
cells' biology. If they had two names, a split could put one into training and the other into test. A
name is split at a delimiter if every part is a gene of the file or of the gene tables, or a word for a
control, which is left out. The genes are sorted and joined by `+`. Names that are genes themselves
(`HLA-A`, `Y_RNA`) and names with a part that is none (`TP53_1`, a guide) stay as they are.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from cellmill.data.arrays import text_columns, text_values
from cellmill.data.genes.names import SEPARATOR
from cellmill.data.genes.tables import gene_id, gene_table
from cellmill.data.inputs.reader import CountsReader

DELIMITERS = (" || ", SEPARATOR, "|", ";", ",", "_")
"""Between the genes of a combination; the first at which a name can be split counts."""
OTHER_DELIMITERS = (" and ", " & ", " ", "::", ":", "//", *"/&", "--", *"-*^~=#@.")
"""Delimiters of names that look like combinations: the log names these, which stay as they are."""
CONTROL_WORD = re.compile(
    r"(ctrl|control|non[-_ ]?target(ing|ed)?|ntc?|neg(ative)?[-_ ]?(ctrl|control)|safe[-_ ]?target(ing)?"
    r"|scrambled?|intergenic|mock|untreated|unperturbed)[-_ ]?\d*",
    re.IGNORECASE,
)
"""Parts of a combination that stand for a control guide, besides the table's control values."""
GUIDE_NAME = re.compile(r"guide|grna|protospacer", re.IGNORECASE)  # in names of obs columns
# texts of a column of guides that mean none
NO_GUIDE = frozenset(
    ("", "none", "nan", "na", "no guide", "negative", "unassigned", "unknown", "no_guide", "0")
)
ONE_TARGET = 0.9  # share of perturbed cells whose guide, in a column of guides, has one target
ROLE = "perturbation"  # name of the column in preprocessed cells
# how many values of a column of perturbations, and which share of them, are genes; without controls
MIN_TARGETS = 2
MIN_TARGETS_FRAC = 0.5


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
        # numbers of rows or of Entrez would make a combination of the guide TP53_1
        return cls({name for name in map(str, names) if name and not name.isdecimal()}, organism)

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
        """Make entry `perturbations` of the QC report on cells with these texts.

        It is empty if no name was changed.
        """
        counted = pd.Series(texts, dtype=object).value_counts(sort=False).to_dict()
        sources: dict[str, dict[str, int]] = {}
        for text in sorted(counted):
            sources.setdefault(self.names[text], {})[text] = int(counted[text])
        merged = {name: texts for name, texts in sources.items() if list(texts) != [name]}
        undivided = {text: self.undivided[text] for text in self.undivided if text in counted}
        reordered = [group for group in self.reordered if len(counted.keys() & group) > 1]
        entries = {"merged": merged, "undivided": undivided, "reordered": reordered}
        return {key: value for key, value in entries.items() if value}


def merge_names(texts: Iterable[str], controls: Sequence[str], genes: TargetNames) -> Merged:
    """One name for each perturbation of a file; all `controls` get the name of the first."""
    unique = sorted({*texts})
    names = {}
    undivided = {}
    for text in unique:
        names[text] = text
        if text in controls:
            names[text] = controls[0]
            continue
        if genes.has(text):
            continue
        parts = _divide(text, DELIMITERS, controls, genes)
        if parts:
            names[text] = SEPARATOR.join(parts)
        elif parts is not None and controls:  # a combination of controls
            names[text] = controls[0]
        elif parts is None:
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
        delimiter = next((delimiter for delimiter in DELIMITERS if delimiter in text), None)
        if delimiter is not None:
            parts = sorted(split_at(text, delimiter, controls))
            groups.setdefault(tuple(parts), []).append(text)
    return [group for group in groups.values() if len(group) > 1]


def _divide(
    text: str, delimiters: Sequence[str], controls: Sequence[str], genes: TargetNames
) -> list[str] | None:
    """Genes of a combination, sorted, without controls; None if no delimiter makes one of `text`."""
    for delimiter in delimiters:
        parts = split_at(text, delimiter, controls)
        if len(parts) < 2:
            continue
        targets = set(parts) - {*controls}
        targets = {part for part in targets if not CONTROL_WORD.fullmatch(part)}
        # many other names have `_` and the delimiters that are not split at, and aliases are short
        is_gene = genes.has if delimiter in DELIMITERS[:-1] else genes.has_current
        if targets and all(map(is_gene, targets)):
            return sorted(targets)
        if {*parts} <= {*controls}:
            return []
    return None


def split_at(text: str, delimiter: str, controls: Sequence[str]) -> list[str]:
    """Split a name at delimiters.

    A word for a control is one part even if the delimiter is in it (`non_targeting`).
    """
    if delimiter not in text:
        return [text]
    longest_first = sorted(controls, key=len, reverse=True)
    words = "|".join([*map(re.escape, longest_first), CONTROL_WORD.pattern])
    between = re.escape(delimiter)
    token = rf"(?P<part>(?i:{words})|(?:(?!{between}).)*)(?:{between}|$)"
    parts = [match["part"].strip() for match in re.finditer(token, text, re.DOTALL)]
    return parts[:-1]  # the last match is the empty one at the end of the text


class PerturbationColumn(NamedTuple):
    """obs column of perturbations, with its values that stand for untreated cells."""

    column: str
    controls: list[str]


def find_perturbations(obs: pd.DataFrame, genes: TargetNames) -> PerturbationColumn | None:
    """The first obs column whose values are controls and mostly genes; None if there is none.

    Current symbols and Ensembl ids count as genes, and so do their combinations. A column without a
    word for a control does not count. A column called `perturbation` is taken or none is, because
    preprocess gives this name to the column of the table.
    """
    names = [ROLE] if ROLE in obs else [*obs]
    for name in names:
        values = obs[name]
        if values.dtype.kind in "biufcmM":
            continue
        texts = sorted(text for text in set(text_values(values)) if text)
        controls = [text for text in texts if CONTROL_WORD.fullmatch(text)]
        if not controls:
            continue
        others = [text for text in texts if text not in controls]
        n_targets = 0
        for text in others:
            is_target = genes.has_current(text) or _divide(text, DELIMITERS, controls, genes)
            n_targets += bool(is_target)
        if n_targets >= max(MIN_TARGETS, MIN_TARGETS_FRAC * len(others)):
            return PerturbationColumn(str(name), controls)
    return None


def find_guides(
    obs: pd.DataFrame, perturbation: np.ndarray, named: str | None
) -> tuple[str, np.ndarray] | None:
    """Find the column of guides and the guide of each cell, None for a cell without one.

    None if there is no such column. `named` is the column of the table. Without it, a column counts
    whose name says that it has guides, if nearly each of its values belongs to one value of
    `perturbation`, (cells,) with None for controls, and it has more values.
    """
    if named is not None:
        return named, _read_guides(obs[named])
    for name in obs:
        if not GUIDE_NAME.search(str(name)):
            continue
        guides = _read_guides(obs[name])
        pairs = pd.DataFrame({"guide": guides, "target": perturbation}).dropna()
        targets = pairs.groupby("guide")["target"].value_counts()
        share = targets.groupby("guide").max().sum() / max(len(pairs), 1)
        if share >= ONE_TARGET and pairs["guide"].nunique() > pairs["target"].nunique():
            return name, guides
    return None


def _read_guides(column: pd.Series) -> np.ndarray:
    guides = text_values(column)
    guides[[text.strip().lower() in NO_GUIDE for text in guides]] = None
    return guides


class Controls(NamedTuple):
    """Control cells of a file, with their depth and guides, by which a table may be wrong."""

    is_control: np.ndarray  # (cells,) bool
    is_perturbed: np.ndarray  # (cells,) bool; a cell may be neither
    value: np.ndarray  # (cells,) text of the file
    guides: tuple[str, np.ndarray] | None  # column and guide of each cell

    def report(self, cells: np.ndarray, depth: np.ndarray) -> dict[str, Any]:
        """Make entry `controls` of the QC report on the cells of mask `cells`.

        `depth` has the counts of all cells, (cells,) int.
        """
        control = cells & self.is_control
        perturbed = cells & self.is_perturbed
        report: dict[str, Any] = {
            "values": _count(self.value[control]),
            "n_controls": int(control.sum()),
            "n_perturbed": int(perturbed.sum()),
            "median_counts_controls": _median(depth[control]),
            "median_counts_perturbed": _median(depth[perturbed]),
        }
        if self.guides is not None:
            column, guides = self.guides
            has_guide = ~pd.isna(guides)
            is_targeting = pd.Series(guides).isin(guides[perturbed & has_guide]).to_numpy()
            report["guide_column"] = column
            report["controls_without_guide"] = int((control & ~has_guide).sum())
            report["controls_with_targeting_guide"] = _count(guides[control & is_targeting])
        return report


def _count(texts: np.ndarray) -> dict[str, int]:
    """Number of each text, the most frequent first."""
    return {str(text): int(n) for text, n in pd.Series(texts).value_counts().items()}


def _median(depth: np.ndarray) -> float | None:
    return float(np.median(depth)) if len(depth) else None
