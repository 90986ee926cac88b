"""Base class of every configuration section: frozen, no unknown keys, a description for each field.

Snakemake's YAML loads `3e-4` as text, so numbers are accepted as text, and "null" where null is
allowed. A boolean is not accepted as a number. Error messages also recognise the option names of
scModelForge, Molfun, AxonML and PyTorch Lightning, and name ours.
"""

import ast
import inspect
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
    """Names in other tools, and what does the same here (other_words.yaml)."""
    text = Path(__file__).with_name("other_words.yaml").read_text(encoding="utf-8")
    return {name: here for here, names in yaml.safe_load(text)[kind].items() for name in names}


def _each_once(values: list[Any]) -> list[Any]:
    repeated = [value for index, value in enumerate(values) if value in values[:index]]
    if repeated:
        raise ValueError(f"expected each value once, got {repeated[0]} twice; leave one out")
    return values


EachOnce = AfterValidator(_each_once)  # annotation of a list that names nothing twice
Names = Annotated[list[str], EachOnce]
Counts = Annotated[list[Annotated[int, Field(ge=1)]], EachOnce]


def one_message(expected: str) -> WrapValidator:
    """Annotation of numbers and words: one message that says what is `expected`, instead of one for
    each of them.
    """

    def check(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        if not isinstance(value, bool):
            with suppress(ValidationError):
                return handler(value)
        raise ValueError(f"expected {expected}, got {value!r}")

    return WrapValidator(check)


def leaving_out(*names: str) -> Any:
    """Serializer without these options where they are empty or the default: results from before
    there were such options stay valid.
    """

    def dump(self: BaseModel, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        is_new = {
            name
            for name in names
            if not getattr(self, name) or getattr(self, name) == fields[name].default
        }
        return {name: value for name, value in handler(self).items() if name not in is_new}

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
    """Meaning, unit and default of a field: its `description`, or the text below it; of a part's
    name, its class's.

    That text is read for help and documents alone; pydantic would read it at each start, in .2 s.
    """
    if name == getattr(section, "key", None):
        return summary(section)
    given = section.model_fields[name].description
    if given is not None:
        return given
    owner = next(base for base in section.__mro__ if name in vars(base).get("__annotations__", ()))
    return _texts_below(owner.__module__).get((owner.__name__, name), "")


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
        for name, of_field in schema.get("properties", {}).items():
            of_field |= {"description": text} if (text := description(cls, name)) else {}
        return schema

    @classmethod
    def override(cls, defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """The section as a run or corpus has it: keys of its `own`, then keys of the section at the
        top.
        """
        return defaults | own

    def problems(self) -> Iterator[str]:
        """Messages about options that do not fit together. Each class yields those on its own, and
        no base class's.
        """
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
        if isinstance(value, list) and any(isinstance(one, bool) for one in value):
            raise ValueError("expected a list of numbers or words, got a boolean in it")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"expected an integer of 64 bits, got {shown(value)}")
        if value == "null" and type(None) in get_args(annotation):
            return None  # `--config 'train={clip_norm: null}'` of Snakemake
        return value


def explain(error: ValidationError, model: type[BaseModel]) -> tuple[list[str], str]:
    """Location and one-line message of the first problem of `error`, raised when validating
    `model`.
    """
    # a misspelled key is also a missing one; the misspelled one is what to correct
    errors = error.errors()
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    where = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        section: Any = model
        for part in where[:-1]:
            section = (
                get_args(section)[-1]
                if get_origin(section)
                else section.model_fields[part].annotation
            )
        return where[:-1], unknown_key(
            where[-1], section.model_fields, getattr(section, "kind", None), model
        )
    if first["type"] == "missing":
        return where, "is missing"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] != "value_error" and not isinstance(first["input"], dict):
        here = other_words("values").get(str(first["input"]).lower())
        hint = (
            f"; {first['input']} is {here} here"
            if here is not None and repr(here) in message
            else ""
        )
        message += f", got {shown(first['input'])}{hint}"
    return where, message[0].lower() + message[1:]


def _sections_with(key: str, owner: type[BaseModel]) -> Iterator[str]:
    for name, field in owner.model_fields.items():
        part = (
            get_args(field.annotation)[-1]
            if get_origin(field.annotation) is dict
            else field.annotation
        )
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
    """Message for a key that does not exist, of a section or of a `kind` of parts: the sections of
    `whole` that have it, ours for a word of another tool, or the nearest name.
    """
    if whole is not None and (owners := dict.fromkeys(_sections_with(key, whole))):
        return f"unknown key {key!r}; it is an option of {' and of '.join(owners)}"
    here = other_words("keys").get(key)
    hint = f"set {here}" if here and here != f"{kind}.{key}" else did_you_mean(key, known)
    return f"unknown key {key!r}; {hint}"
