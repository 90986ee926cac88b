"""Errors that a user can fix: the message names the value, what is expected and where to change it."""

import difflib
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

_LISTED = 40


class UserError(Exception):
    """Printed as one line on stderr, with a non-zero exit code and no traceback."""

    exit_code = 2

    def __str__(self) -> str:
        """The message in one line: a name in it, such as that of a path, may have line breaks."""
        return "".join(
            letter if letter.isprintable() else repr(letter)[1:-1] for letter in super().__str__()
        )


class ConfigError(UserError, ValueError):
    """An unknown, malformed or impossible option.

    A ValueError too, as pydantic expects of a validator.
    """


class DataError(UserError):
    """A missing, damaged or unexpected file."""


class NothingFound(UserError):
    """A search without a result."""

    exit_code = 1


class Stopped(UserError):
    """A run that was asked to stop and saved its state: resumable, not done."""

    exit_code = 75  # EX_TEMPFAIL: try again later


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Hint for an unknown `name`: the closest of `known`, or the first of them."""
    known = list(known)
    same_letters = [candidate for candidate in known if candidate.lower() == name.lower()]
    close = same_letters or difflib.get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    more = f" and {len(known) - _LISTED:,} more" if len(known) > _LISTED else ""
    return f"there are: {', '.join(known[:_LISTED]) or 'none'}{more}"


def require_known(name: str, known: Collection[str], fault: str) -> None:
    """Raise DataError, of `fault` and a hint, unless `name` is one of `known`."""
    if name not in known:
        raise DataError(f"{fault}; {did_you_mean(name, known)}")


def as_yaml(value: object) -> str:
    """Text of an option's value as a configuration file has it."""
    words = {"None": "null", "True": "true", "False": "false"}
    return words.get(repr(value), str(value))


@contextmanager
def one_line() -> Iterator[None]:
    """End the process with `cellmill: ERROR` and exit code 1.

    Snakemake would add its place in the Snakefile.
    """
    try:
        yield
    except UserError as error:
        sys.exit(f"cellmill: {error}")
    except OSError as error:
        sys.exit(f"cellmill: {error.filename or 'a file'}: {error.strerror or error}")
