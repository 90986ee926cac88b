"""Base class of every configuration section: frozen, no unknown keys, a description for each field.

Snakemake's YAML loads `3e-4` as text, so numbers are accepted as text, and "null" where null is
allowed. A boolean is not accepted as a number. Error messages also recognise the option names of
scModelForge, Molfun, AxonML and PyTorch Lightning, and name ours.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_serializer,
    model_validator,
)

from cellmill.errors import did_you_mean


@cache
def other_words(kind: Literal["keys", "values"]) -> dict[str, str]:
    """Our name by the name in other tools of what does the same (other_words.yaml)."""
    text = Path(__file__).with_name("other_words.yaml").read_text(encoding="utf-8")
    words: dict[str, str] = {}
    for ours, names in yaml.safe_load(text)[kind].items():
        words |= dict.fromkeys(names, ours)
    return words


def _each_once(values: list[Any]) -> list[Any]:
    repeated = [value for index, value in enumerate(values) if value in values[:index]]
    if repeated:
        raise ValueError(f"expected each value once, got {repeated[0]} twice; leave one out")
    return values


EachOnce = AfterValidator(_each_once)  # annotation of a list that names nothing twice
Names = Annotated[list[str], EachOnce]
Counts = Annotated[list[Annotated[int, Field(ge=1)]], EachOnce]


def one_message(expected: str) -> WrapValidator:
    """Annotation of numbers and words, with one message on what is `expected` instead of one each."""

    def check(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        if not isinstance(value, bool):
            with suppress(ValidationError):
                return handler(value)
        raise ValueError(f"expected {expected}, got {value!r}")

    return WrapValidator(check)


def leaving_out(*names: str) -> Any:
    """Serializer that drops these options if empty or the default.

    Results written before the options existed stay valid.
    """

    def dump(self: BaseModel, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        values = handler(self)
        for name in names:
            value = getattr(self, name)
            is_empty = not value and value is not False
            if is_empty or value == fields[name].default:
                values.pop(name, None)
        return values

    return model_serializer(mode="wrap")(dump)


@cache
def _texts_below(module: str) -> dict[tuple[str, str], str]:
    """(class, field): the text below the field."""
    texts = {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    for section in (part for part in tree.body if isinstance(part, ast.ClassDef)):
        for pair in pairwise(section.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(text))
                ):
                    texts[section.name, name] = " ".join(text.split())
    return texts


def summary(section: type[BaseModel]) -> str:
    """First paragraph of the docstring."""
    return " ".join((section.__doc__ or "").split("\n\n")[0].split())


def description(section: type[BaseModel], name: str) -> str:
    """Meaning, unit and default of a field: its `description`, or the text below it.

    The name of a part has its class's.

    The text below is read only for help and documents; pydantic would read it at each start, in
    0.2 s.
    """
    if name == getattr(section, "key", None):
        return summary(section)
    given = section.model_fields[name].description
    if given is not None:
        return given
    for base in section.__mro__:
        if name in vars(base).get("__annotations__", ()):
            return _texts_below(base.__module__).get((base.__name__, name), "")
    raise AssertionError(f"no class of {section.__name__} declares {name}")


class Section(BaseModel):
    """Options of one section; a field's description, or the text below it, gives meaning, unit and
    default.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, defer_build=True
    )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name, field in schema.get("properties", {}).items():
            text = description(cls, name)
            if text:
                field["description"] = text
        return schema

    @classmethod
    def override(cls, defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """The section of a run or corpus: its own keys over those of the section at the top."""
        return defaults | own

    def problems(self) -> Iterator[str]:
        """Messages about options that do not fit together. A class does not yield its bases'."""
        yield from ()

    @model_validator(mode="after")
    def _no_problems(self) -> Self:
        for base in reversed(type(self).__mro__):
            for problem in vars(base).get("problems", Section.problems)(self):
                raise ValueError(problem)
        return self

    @field_validator("*", mode="before")
    @classmethod
    def _one_kind_of_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and annotation in (int, float, int | None, float | None):
            raise ValueError("expected a number, got a boolean")
        if isinstance(value, list) and any(isinstance(item, bool) for item in value):
            raise ValueError("expected a list of numbers or words, got a boolean in it")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"expected an integer of 64 bits, got {shown(value)}")
        if value == "null" and type(None) in get_args(annotation):
            return None  # `--config 'train={clip_norm: null}'` of Snakemake
        return value


def explain(error: ValidationError, model: type[BaseModel]) -> tuple[list[str], str]:
    """Location and one-line message of the first problem of `error`, raised for `model`."""
    # a misspelled key is also a missing one; the misspelled one is what to correct
    errors = error.errors()
    unknown = [problem for problem in errors if problem["type"] == "extra_forbidden"]
    first = (unknown or errors)[0]
    where = [str(part) for part in first["loc"]]
    if unknown:
        *sections, key = where
        owner: Any = model
        for part in sections:
            owner = (
                get_args(owner)[-1] if get_origin(owner) else owner.model_fields[part].annotation
            )
        kind = getattr(owner, "kind", None)
        return sections, unknown_key(key, owner.model_fields, kind, model)
    if first["type"] == "missing":
        return where, "is missing"
    message = first["msg"].removeprefix("Value error, ")
    given = first["input"]
    if first["type"] != "value_error" and not isinstance(given, dict):
        message += f", got {shown(given)}"
        if first["type"] == "list_type" and isinstance(given, int | float):
            message += f"; write [{given}]"
        ours = other_words("values").get(str(given).lower())
        if ours is not None and repr(ours) in first["msg"]:
            message += f"; {given} is {ours} here"
        if first["type"] == "string_type" and (meaning := _meaning(where, model)):
            message += f"; expected {meaning[0].lower()}{meaning[1:]}"
    return where, message[0].lower() + message[1:]


def _meaning(where: list[str], model: type[BaseModel]) -> str | None:
    """First part of the description of the option at `where`; None for a part of a value."""
    owner: Any = model
    text = ""
    for part in where:
        if get_origin(owner) is dict:
            owner = get_args(owner)[-1]
        elif part in getattr(owner, "model_fields", {}):
            with suppress(OSError, TypeError):  # a part of a package without source text
                text = description(owner, part)
            owner = owner.model_fields[part].annotation
        else:
            return None
    return re.split(r"[.;:](?:\s|$)", text)[0]


def _sections_with(key: str, owner: type[BaseModel]) -> Iterator[str]:
    """Sections of `owner`, at any depth, that have the key."""
    for name, field in owner.model_fields.items():
        part = field.annotation
        if get_origin(part) is dict:
            part = get_args(part)[-1]
        if isinstance(part, type) and issubclass(part, BaseModel):
            yield from [name] if key in part.model_fields else _sections_with(key, part)


def shown(value: Any) -> str:
    """A value in at most 100 characters: a cell of a table may have many thousands."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:80]}... ({len(text):,} characters)"


def error_line(where: list[str], message: str) -> str:
    """The line of a message about the option at `where`."""
    return f"{'.'.join(where)}: {message}" if where else message


def unknown_key(
    key: str, known: Iterable[str], kind: str | None = None, whole: type[BaseModel] | None = None
) -> str:
    """Message for a key that a section, or a `kind` of parts, does not have.

    It names the sections of `whole` that have the key, our word for a word of another tool, or the
    nearest name.
    """
    owners = dict.fromkeys(_sections_with(key, whole)) if whole is not None else {}
    if owners:
        return f"unknown key {key!r}; it is an option of {' and of '.join(owners)}"
    ours = other_words("keys").get(key)
    hint = f"set {ours}" if ours and ours != f"{kind}.{key}" else did_you_mean(key, known)
    return f"unknown key {key!r}; {hint}"
