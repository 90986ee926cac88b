"""Functions that turn values and keys into text on the page."""

from collections.abc import Iterator, Mapping
from typing import Any

from cellmill.files import span
from cellmill.track.run_config import flatten_options

UNKNOWN = "–"  # text of a missing value; UNKNOWN in page.js has the same


def to_words(key: str) -> str:
    """The key with spaces in place of underscores."""
    return key.replace("_", " ")


def to_text(value: Any) -> str:
    """The value as text.

    - None and an empty mapping are a dash.
    - A boolean is yes or no.
    - Numbers have commas between thousands. Floats have four significant digits. From 10,000 on,
      floats are rounded to whole numbers.
    - A mapping is a list of its keys and values, such as "B cell 12, T cell 30".
    """
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        # four digits would round numbers from 9999.5 on to 1e+04
        return f"{value:,.0f}" if abs(value) >= 9999.5 else f"{value:,.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {to_text(item)}" for key, item in value.items()) or UNKNOWN
    return str(value)


def with_noun(n: int, noun: str, plural: str | None = None) -> str:
    """The number with its noun, such as "1 cell" or "1,200 cells".

    Without `plural`, the plural of the noun ends in s.
    """
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def to_duration(seconds: float | None) -> str:
    """A duration in words, such as "12 min". None is a dash."""
    return UNKNOWN if seconds is None else span(seconds)


def to_percent(frac: float | None) -> str:
    """A fraction in whole percent, such as "95 %". None is a dash."""
    return UNKNOWN if frac is None else f"{100 * frac:.0f} %"


def abbreviate_classifiers(text: str) -> str:
    """The text with "logistic regression" abbreviated to "LR"."""
    return text.replace("logistic regression", "LR")


def list_option_pairs(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(path, value) of each option in nested sections. A path is such as `train.lr`.

    The value of an option that is a list is a text, with commas between the items.
    """
    for path, value in flatten_options(tree).items():
        if isinstance(value, list):
            yield path, ", ".join(map(to_text, value)) or "none"
        else:
            yield path, value
