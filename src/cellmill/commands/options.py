"""options: search every option of the configuration by its name, type, default and description.

The rows are also those of config/README.md, which tools/option_docs.py writes.
"""

import difflib
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cellmill.config.datasets import Dataset
from cellmill.config.load import top_level
from cellmill.config.plugin import Plugin, in_one_line, load, names
from cellmill.config.section import description, other_words
from cellmill.config.workflow import ENTRIES, Sweep, Workflow, sections_of
from cellmill.errors import ConfigError, NothingFound

WIDTH = 100  # characters of a line
MAX_PRINTED = 10  # options
MAX_SUGGESTED = 3  # names that resemble a word without a match
LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
TYPES = {"string": "text", "boolean": "yes/no", "object": "mapping"}


@dataclass(frozen=True)
class OptionRow:
    """Row of a table of options."""

    key: str
    kind: str  # type of its values, in words
    default: str
    text: str
    choices: str = ""  # choices with this key, if several share a table

    @property
    def same(self) -> tuple[str, str, str]:
        """Key that is equal for choices that share a row."""
        return self.key, self.kind, self.text


KEYS = [name for name in Workflow.model_fields if name not in {*sections_of(Workflow), *ENTRIES}]
"""Keys of the whole workflow other than sections, corpora and runs."""


class Option(NamedTuple):
    """An option of the configuration, or a column of the table of datasets."""

    path: str  # dotted; NAME stands for a name that the user chooses
    row: OptionRow

    def describe(self) -> str:
        """Describe the option with its type and default, and its text in lines below."""
        choices = f" of {self.row.choices}" if self.row.choices else ""
        head = f"{self.path}{choices}: {self.row.kind}; default {self.row.default}"
        text = textwrap.fill(self.row.text, WIDTH, initial_indent="    ", subsequent_indent="    ")
        return f"{head}\n{text}".replace("`", "").replace("\\|", "|")


def options(*, words: list[str]) -> None:
    """Print the first options that have all `words`, first those that have them in their name.

    Raise NothingFound if there are none.
    """
    wanted = [word.lower() for word in words]
    all_options = list_options(with_installed=True)
    matches = []
    for option in all_options:
        other_names = [
            name
            for name, ours in other_words("keys").items()
            if option.path in ours.replace(",", " ").split()
        ]
        searched = " ".join([option.path, *vars(option.row).values(), *other_names]).lower()
        if all(word in searched for word in wanted):
            matches.append(option)
    if not matches:
        keys = {option.row.key for option in all_options}
        close = difflib.get_close_matches("_".join(wanted), sorted(keys), MAX_SUGGESTED)
        hint = f"; similar names: {', '.join(close)}" if close else ""
        raise NothingFound(f"no option has {' and '.join(map(repr, words))}{hint}")
    named = [option for option in matches if all(word in option.path.lower() for word in wanted)]
    matches = [*named, *(option for option in matches if option not in named)]
    for option in matches[:MAX_PRINTED]:
        print(option.describe())
    n_more = len(matches) - MAX_PRINTED
    if n_more > 0:
        which = " whose help has the word" if len(named) <= MAX_PRINTED else ""
        print(f"… and {n_more} more{which}; `cellmill options WORD WORD` narrows")


def list_options(with_installed: bool = False) -> list[Option]:
    """List all options of cellmill, and of installed packages if `with_installed`.

    Choices that describe an option alike share it.
    """
    shared: dict[tuple[str, str, str], Option] = {}
    for path, row in _list_described(with_installed):
        key = (path, row.kind, row.text)
        if key in shared and row.choices:
            first = shared[key].row
            shared[key] = Option(path, replace(first, choices=f"{first.choices}, {row.choices}"))
        shared.setdefault(key, Option(path, row))
    return list(shared.values())


def _list_described(with_installed: bool) -> Iterator[Option]:
    """Yield the options of all tables, once for each choice that has them."""
    yield from _list_section(Dataset, "config/datasets.tsv: ")
    for name, owner in ENTRIES.items():
        for row in list_rows(owner, skip=list(sections_of(owner))):
            yield Option(f"{name}.NAME.{row.key}", row)
    for name, section in top_level().items():
        if section is None:
            continue
        if issubclass(section, Plugin):
            yield Option(f"{name}.{section.key}", _make_choice_row(section))
            yield from _list_choices(section, f"{name}.", with_installed)
            continue
        yield from _list_section(section, f"{name}.")
        named = named_parts(section)
        for field, contract in list_parts(section).items():
            yield from _list_choices(
                contract, f"{name}.{field}.", with_installed, is_named=field in named
            )
    yield from _list_section(Sweep, "sweep.NAME.")
    for row in list_rows(Workflow, KEYS):
        yield Option(row.key, row)


def _list_section(section: type[BaseModel], prefix: str) -> Iterator[Option]:
    """Yield the options of a section, with `prefix` before their names."""
    for row in list_rows(section):
        yield Option(prefix + row.key, row)


def _list_choices(
    contract: type[Plugin], prefix: str, with_installed: bool, is_named: bool = False
) -> Iterator[Option]:
    """Yield the options of each choice; `is_named` if a mapping has the choices by their names.

    A choice of an installed package that cannot be described is named on stderr and left out.
    """
    rows_by_choice = {
        name: list_rows(choice, skip=[contract.key]) for name, choice in contract.built_in().items()
    }
    if with_installed:
        rows_by_choice |= _list_installed(contract)
    for name, rows in rows_by_choice.items():
        for row in rows:
            if is_named:
                yield Option(f"{prefix}{name}.{row.key}", row)
            else:
                yield Option(prefix + row.key, replace(row, choices=name))


def _list_installed(contract: type[Plugin]) -> dict[str, list[OptionRow]]:
    """List the options of each choice that an installed package adds."""
    rows_by_choice = {}
    for name in names(contract.kind):
        if name in contract.built_in():
            continue
        try:
            choice = load(contract.kind, name, contract)
            rows_by_choice[name] = list_rows(choice, skip=[contract.key])
        except Exception as error:  # of the package
            cause = error if isinstance(error, ConfigError) else in_one_line(error)
            print(f"options of {contract.kind} {name!r} are not listed: {cause}", file=sys.stderr)
    return rows_by_choice


def _make_choice_row(contract: type[Plugin]) -> OptionRow:
    """Make the row of the key that chooses a part."""
    names = " or ".join(f"`{name}`" for name in contract.built_in())
    default = f"`{contract.default}`" if contract.default else "required"
    return OptionRow(contract.key, names, default, f"Chooses the {contract.kind}.")


def list_parts(section: type[BaseModel]) -> dict[str, type[Plugin]]:
    """List the fields with options of a contract's choices, and the contracts."""
    parts = {name: _find_part(field.annotation) for name, field in section.model_fields.items()}
    return {
        name: part
        for name, part in parts.items()
        if isinstance(part, type) and issubclass(part, Plugin)
    }


def _find_part(annotation: Any) -> Any:
    """Return X of a `dict[str, X]`, or the type itself; without pydantic's annotations."""
    if get_origin(annotation) is dict:
        annotation = get_args(annotation)[1]
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def named_parts(section: type[BaseModel]) -> dict[str, type[Plugin]]:
    """List the fields that map names of a contract's choices to their options."""
    return {
        name: part
        for name, part in list_parts(section).items()
        if section.model_fields[name].annotation is not part
    }


def list_rows(
    model: type[BaseModel], names: list[str] | None = None, skip: Sequence[str] = ()
) -> list[OptionRow]:
    """Make the rows of the fields of `model`, or of those in `names`, without those in `skip`."""
    properties = model.model_json_schema()["properties"]
    named = named_parts(model)
    rows = []
    for name in model.model_fields if names is None else names:
        if name in skip:
            continue
        kind = _describe_type(properties[name])
        if name in named:
            kind = f"mapping of {named[name].kind} names to options"
        text = description(model, name).replace("|", "\\|")
        default = _describe_default(model.model_fields[name], name in named)
        rows.append(OptionRow(name, kind, default, text))
    return rows


def _describe_default(field: FieldInfo, is_named: bool) -> str:
    """Describe the default of a field, of which only the names count if `is_named`."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if is_named:
        return ", ".join(f"`{name}`" for name in value) or "none"
    return f"`{value if isinstance(value, str) else json.dumps(value, default=str)}`"


def _describe_type(schema: dict[str, Any]) -> str:
    """Describe the type of a field by its JSON schema."""
    if "anyOf" in schema:
        kinds = [_describe_type(part) for part in schema["anyOf"]]
        return (", or " if "," in kinds[0] else " or ").join(kinds)
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if "$ref" in schema:  # a section in a list, whose keys the description names
        return "mapping"
    if schema["type"] == "array":
        return f"list of {_describe_type(schema['items'])}"
    limits = [f"{sign} {schema[limit]:g}" for limit, sign in LIMITS.items() if limit in schema]
    return ", ".join([TYPES.get(schema["type"], schema["type"]), *limits])
