"""Text of values and keys on the page."""

from collections.abc import Iterator, Mapping
from typing import Any

from cellmill.files import span
from cellmill.track.run_config import flatten_options

UNKNOWN = "–"


def to_words(key: str) -> str:
    """A key as words."""
    return key.replace("_", " ")


def to_text(value: Any) -> str:
    """A value as text.

    Numbers have commas between thousands. Floats have four significant digits, or no decimals from
    10,000. None is a dash, and a mapping is a list of its keys and values.
    """
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 9999.5 else f"{value:,.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {to_text(item)}" for key, item in value.items()) or UNKNOWN
    return str(value)


def with_noun(n: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun, such as "1 cell" or "1,200 cells"; `plural` is noun + s by default."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def to_duration(seconds: float | None) -> str:
    """Seconds in words such as "12 min"; a dash for None."""
    return UNKNOWN if seconds is None else span(seconds)


def to_percent(frac: float | None) -> str:
    """A fraction in whole percent; a dash for None."""
    return UNKNOWN if frac is None else f"{100 * frac:.0f} %"


def abbreviate_classifiers(text: str) -> str:
    """A text with "LR" for "logistic regression"."""
    return text.replace("logistic regression", "LR")


def list_option_pairs(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(path, value) of nested options, such as `train.lr`. Lists are joined by commas."""
    for path, value in flatten_options(tree).items():
        if isinstance(value, list):
            yield path, ", ".join(map(to_text, value)) or "none"
        else:
            yield path, value
