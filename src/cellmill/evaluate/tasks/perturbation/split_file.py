"""A file that says which perturbations are for training, for validation and for test.

The file has one of these forms, which other packages and people use:

- `.toml`: the form of cell-load and State, with `[training]`, `[zeroshot]` and `[fewshot."DATASET.CONTEXT"]`
- `.json`: lists of perturbations by split, such as `set2conditions` and the subgroups of GEARS
- `.tsv`, `.csv`: a table with columns `perturbation`, `split` and, if contexts differ, `context`

A statement of the file without a perturbation is about all perturbations. A statement without a context
is about all contexts. If several statements are about the same unit, the first of these counts:

1. a statement with the perturbation and the context of the unit;
2. a statement with the perturbation alone;
3. a statement with the context alone;
4. a statement with neither.

A name in the file stands for the perturbation of the dataset that has the same name. If there is none,
the name stands for the perturbation that has the same parts. The order of the parts, the delimiter
between them, and words for a control make no difference: `B_A` and `A+B+ctrl` both stand for `A+B`.
"""

import csv
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, get_args

import numpy as np
from pydantic import BaseModel, TypeAdapter, ValidationError

from cellmill.config.corpus import IS_CONTROL
from cellmill.config.parts.tasks import ContextRole, PerturbationConfig
from cellmill.data.arrays import text_values
from cellmill.data.prepare.perturbations import CONTROL_WORD, DELIMITERS, split_at
from cellmill.errors import DataError, did_you_mean, require_known
from cellmill.evaluate.task import Context, Skipped
from cellmill.evaluate.tasks.perturbation.profiles import controlled_role
from cellmill.files import read_json, require_file

TRAIN = "train"
TEST = "test"
SPLITS = (TRAIN, "val", TEST)

# novelties: how a tested unit is new, compared with the fitted units
NEW = "new perturbation"  # its perturbation, which is no combination, was not fitted
FEW_SHOT = "few-shot"  # its context and its perturbation were fitted, but not together
ZERO_SHOT = "zero-shot"  # its context was not fitted
# novelty by the name that GEARS gives to a group of tested perturbations
GEARS_GROUPS = {"unseen_single": NEW} | {
    f"combo_seen{seen}": f"{seen} of 2 seen" for seen in range(3)
}

Parts = tuple[str, ...]
"""Names of the parts of a combination, such as (A, B) of `A+B`."""


class Statement(NamedTuple):
    """The split of a perturbation, or of all perturbations, in one context or in all contexts."""

    location: str  # where the statement is in the file, for messages
    perturbation: str  # as the file writes it; empty for all perturbations
    context: str  # empty for all contexts
    split: str  # one of SPLITS or of GEARS_GROUPS; not checked yet


class _CellLoad(BaseModel):
    """Form of a TOML file of cell-load: splits by DATASET, or by DATASET.CONTEXT."""

    training: dict[str, str] = {}
    zeroshot: dict[str, str] = {}
    fewshot: dict[str, dict[str, list[str]]] = {}


def find_names(context: Context, are_controls: bool) -> set[str]:
    """Names of the controls of a dataset, or of its perturbations."""
    is_control = context.roles[IS_CONTROL].fillna(False).to_numpy(bool)
    column = context.roles[controlled_role(context.roles)]
    return {*text_values(column[is_control == are_controls].dropna()).tolist()}


class NameDivider:
    """Divides the names of perturbations into parts. Parts that stand for a control are left out, and the
    other parts are sorted.
    """

    def __init__(self, context: Context, delimiter: str) -> None:
        self.controls = sorted(find_names(context, are_controls=True))
        self.delimiter = delimiter

    def divide(self, name: str, delimiter: str | None = None) -> Parts:
        """Parts of a combination. The name alone if it is not divided, and nothing for a control.

        `delimiter` is the delimiter of the dataset by default.
        """
        parts = split_at(name, delimiter or self.delimiter, self.controls)
        return tuple(sorted(part for part in parts if part and not self.is_control(part)))

    def divide_or_keep(self, name: str) -> Parts:
        """Parts of a perturbation of the dataset. A name that is a word for a control, such as gene CTRL,
        is kept as a whole.
        """
        return self.divide(name) or (name,)

    def is_control(self, part: str) -> bool:
        """True for a control of the dataset, and for a word for a control."""
        return part in self.controls or CONTROL_WORD.fullmatch(part) is not None

    def divide_in_all_ways(self, name: str) -> set[Parts]:
        """Parts of a name in the file, for each delimiter that the file may use."""
        return {self.divide(name, delimiter) for delimiter in (self.delimiter, *DELIMITERS)}

    def find_possible_combinations(self, names: Iterable[str]) -> list[str]:
        """Names that count as single perturbations, but may be combinations. At another delimiter than
        the delimiter of the dataset, all parts of such a name are names too.
        """
        all_names = {*names}
        return [
            name
            for name in sorted(all_names)
            if len(self.divide(name)) == 1
            and any(
                len(parts) > 1 and all_names.issuperset(parts)
                for parts in self.divide_in_all_ways(name)
            )
        ]


@dataclass(frozen=True)
class SplitFile:
    """What the file says about the perturbations of one dataset."""

    path: Path
    context_role: str | None  # role whose values are the contexts; None if the file has no contexts
    name_divider: NameDivider
    # split by perturbation, as the dataset writes it, and context; an empty name stands for all
    splits: Mapping[tuple[str, str], str]
    # novelty by perturbation, if the file states it: one of the novelties in GEARS_GROUPS
    novelty_in_file: Mapping[str, str]
    # perturbations of the dataset that may be combinations, see `NameDivider`
    possible_combinations: list[str]

    @classmethod
    def read(cls, config: PerturbationConfig, context: Context) -> Self:
        """Read the file of option `split_file`.

        Raises Skipped if a TOML file does not name the dataset. Raises DataError for a damaged file,
        and for a file with perturbations, contexts or splits that the dataset or the task does not have.
        """
        path = Path(str(config.split_file))
        statements = _read_statements(path, context.dataset)
        role = config.split_context if any(statement.context for statement in statements) else None
        contexts = set() if role is None else _find_contexts(path, statements, role, context)
        perturbations = find_names(context, are_controls=False)
        divider = NameDivider(context, config.combination_delimiter)
        find_perturbation = _make_finder(divider, perturbations)
        # a TOML file of cell-load may test perturbations that it also validates on
        may_overlap = path.suffix.lower() == ".toml"
        splits: dict[tuple[str, str], str] = {}
        novelty_in_file: dict[str, str] = {}
        for statement in statements:
            place = f"{path}, {statement.location}"
            if statement.split not in SPLITS and statement.split not in GEARS_GROUPS:
                expected = ", ".join((*SPLITS, *GEARS_GROUPS))
                raise DataError(f"{place}: expected a split ({expected}), got {statement.split!r}")
            if statement.context:
                fault = f"{place}: no cell of {context.dataset} has {role} {statement.context!r} (split_context)"
                require_known(statement.context, contexts, fault)
            perturbation = find_perturbation(place, statement.perturbation)
            if perturbation is None:  # a control
                continue
            key = (perturbation, statement.context)
            splits[key] = _join_splits(place, statement, splits.get(key), may_overlap)
            if statement.split in GEARS_GROUPS:
                novelty_in_file[perturbation] = GEARS_GROUPS[statement.split]
        possible = divider.find_possible_combinations(perturbations)
        return cls(path, role, divider, splits, novelty_in_file, possible)

    def assign_splits(self, perturbation: np.ndarray, unit_context: np.ndarray) -> np.ndarray:
        """(U,) text: split of each unit, and empty for a unit that no statement is about.

        `perturbation` and `unit_context`, both (U,), are the names of each unit's perturbation and
        context. Raises DataError if all units of a context are without a split, and if no unit is in
        split `train` or `test`.
        """
        assigned = []
        for name, context_name in zip(perturbation.tolist(), unit_context.tolist()):
            # the first statement counts, see the docstring of the module
            keys = ((name, context_name), (name, ""), ("", context_name), ("", ""))
            stated = [self.splits[key] for key in keys if key in self.splits]
            assigned.append(stated[0] if stated else "")
        splits = np.array(assigned, "U5")
        for context_name in np.unique(unit_context).tolist():
            if not splits[unit_context == context_name].any() and context_name:
                raise DataError(
                    f"{self.path}: expected a split for {self.context_role} {context_name!r}, got none; add a line for "
                    f"it, such as all its perturbations in {TRAIN}"
                )
        for split in (TRAIN, TEST):
            if split not in assigned:
                raise DataError(
                    f"{self.path}: split {split} is empty: none of its perturbations has enough cells (min_cells) and "
                    f"controls; the dataset has: {', '.join(np.unique(perturbation)[:8])}"
                )
        return splits

    def divide_by_novelty(
        self,
        tested: np.ndarray,
        fitted: np.ndarray,
        perturbation: np.ndarray,
        unit_context: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """The `tested` units (indices) by novelty. A novelty says in words how a unit is new, compared with
        the `fitted` units (indices). Each novelty is scored separately.

        The novelty of a combination counts the parts that are seen, such as `1 of 2 seen`. A part is
        seen if it is the whole perturbation of a fitted unit. `perturbation` and `unit_context`, both
        (U,), are the names of each unit's perturbation and context.
        """
        fitted_names = {*perturbation[fitted].tolist()}
        by_novelty: dict[str, list[int]] = {}
        for unit in tested.tolist():
            parts = self.name_divider.divide(perturbation[unit])
            if unit_context[unit] not in unit_context[fitted]:
                novelty = ZERO_SHOT
            elif perturbation[unit] in fitted_names:
                novelty = FEW_SHOT
            elif len(parts) > 1:
                n_seen = sum(part in fitted_names for part in parts)
                novelty = f"{n_seen} of {len(parts)} seen"
            else:
                novelty = NEW
            by_novelty.setdefault(novelty, []).append(unit)
        return {novelty: np.array(by_novelty[novelty]) for novelty in sorted(by_novelty)}


def _find_contexts(
    path: Path, statements: list[Statement], role: str, context: Context
) -> set[str]:
    """Values of the dataset's role of contexts. Raises DataError for a dataset without this role."""
    if role not in context.roles:
        roles = [other for other in get_args(ContextRole) if other in context.roles]
        example = next(statement.context for statement in statements if statement.context)
        raise DataError(
            f"{path}: it has contexts, such as {example!r}, but {context.dataset} has no column {role}; name one in "
            "the table of datasets, or set split_context of task perturbation to a role that it has "
            f"({', '.join(roles) or 'none'})"
        )
    return {*text_values(context.roles[role].dropna()).tolist()}


def _join_splits(
    place: str, statement: Statement, earlier_split: str | None, may_overlap: bool
) -> str:
    """The split of a perturbation and context that an earlier statement put into `earlier_split`; None
    if there is no earlier statement.

    If the two splits are validation and test, and `may_overlap` is True, the result is test. Raises
    DataError for any other two different splits.
    """
    split = TEST if statement.split in GEARS_GROUPS else statement.split
    if earlier_split in (None, split):
        return split
    if not may_overlap or TRAIN in (earlier_split, split):
        raise DataError(
            f"{place}: {statement.perturbation or statement.context!r} is in {split}, and in {earlier_split} above; "
            "leave it in one"
        )
    return TEST


def _make_finder(divider: NameDivider, perturbations: set[str]) -> Callable[[str, str], str | None]:
    """A function that finds the perturbation of the dataset that a name in the file stands for.

    Its arguments are the place of the name, for messages, and the name. It returns None for a control,
    and the empty name for the empty name. It raises DataError for a name that stands for no
    perturbation, or for more than one.
    """
    names_by_parts: dict[Parts, list[str]] = {}
    for perturbation in sorted(perturbations):
        names_by_parts.setdefault(divider.divide(perturbation), []).append(perturbation)

    def find_perturbation(place: str, name: str) -> str | None:
        if not name or name in perturbations:
            return name
        if divider.is_control(name):
            return None
        divisions = divider.divide_in_all_ways(name)
        matches = sorted({match for parts in divisions for match in names_by_parts.get(parts, [])})
        if len(matches) > 1:
            raise DataError(
                f"{place}: {name!r} may be {' or '.join(matches)}; write one of these names"
            )
        if matches:
            return matches[0]
        if () in divisions:  # all parts are controls
            return None
        raise DataError(
            f"{place}: no cell has the perturbation {name!r}; {did_you_mean(name, perturbations)}"
        )

    return find_perturbation


def _read_statements(path: Path, dataset: str) -> list[Statement]:
    """The statements of the file about a dataset. Raises DataError for a damaged file, or if the form of
    the file is not known.
    """
    suffix = path.suffix.lower()
    require_file(path)
    try:
        if suffix == ".toml":
            return [*_read_cell_load(path, dataset)]
        if suffix == ".json":
            return [*_read_lists(path)]
        if suffix in (".tsv", ".csv"):
            return [*_read_table(path, "\t" if suffix == ".tsv" else ",")]
    except ValidationError as error:
        problem = error.errors()[0]
        location = ".".join(map(str, problem["loc"]))
        raise DataError(
            f"{path}: {location}: {problem['msg']}, got {problem['input']!r}; a name with a dot needs quotes, as in "
            '[fewshot."DATASET.CONTEXT"]'
        ) from None
    except (csv.Error, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise DataError(f"{path}: not a valid {suffix} file ({error})") from None
    raise DataError(
        f"{path}: expected .toml, .json, .tsv or .csv, got {suffix!r}; a pickle is not read, because it can run code: "
        "write the lists in it with json.dump"
    )


def _read_cell_load(path: Path, dataset: str) -> Iterator[Statement]:
    """Statements of a TOML file about a dataset. Raises Skipped if the file does not name the dataset."""
    content = _CellLoad.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    keys = [*content.training, *content.zeroshot, *content.fewshot]
    datasets = dict.fromkeys(key.partition(".")[0] for key in keys)
    if dataset not in datasets:
        raise Skipped(f"{path}: no dataset {dataset!r}; there are: {', '.join(datasets) or 'none'}")
    if dataset in content.training:
        yield Statement("[training]", "", "", content.training[dataset])
    for key, split in content.zeroshot.items():
        name, _, context = key.partition(".")
        if name == dataset:
            yield Statement("[zeroshot]", "", context, split)
    for key, names_by_split in content.fewshot.items():
        name, _, context = key.partition(".")
        if name != dataset:
            continue
        location = f"[fewshot.{key!r}]"
        # perturbations of the context that the section does not list are for training
        yield Statement(location, "", context, TRAIN)
        for split, names in names_by_split.items():
            for perturbation in names:
                yield Statement(location, perturbation, context, split)


def _read_lists(path: Path) -> Iterator[Statement]:
    """Statements of a JSON file, which has a list of perturbations for each split."""
    form: TypeAdapter[dict[str, list[str]]] = TypeAdapter(dict[str, list[str]])
    for split, names in form.validate_python(read_json(path)).items():
        for name in names:
            yield Statement(f"list {split!r}", name, "", split)


def _read_table(path: Path, delimiter: str) -> Iterator[Statement]:
    """Statements of a table, one in each row. Column `context` may be missing."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, delimiter=delimiter, strict=True)
        header = rows.fieldnames or []
        for column in ("perturbation", "split"):
            require_known(column, header, f"{path}: no column {column!r}")
        for row in rows:
            values: dict[str, Any] = {"context": "", **row}
            location = f"line {rows.line_num}"
            # csv gives None as the value of a missing field, and as the name of surplus fields
            if None in values.values() or None in row:
                raise DataError(
                    f"{path}, {location}: expected {len(header)} values as in the header"
                )
            perturbation, context, split = (
                str(values[column]).strip() for column in ("perturbation", "context", "split")
            )
            if not perturbation and not context:
                raise DataError(
                    f"{path}, {location}: expected a perturbation or a context, got neither"
                )
            yield Statement(location, perturbation, context, split)
