"""External models of section `evaluate`: a command of another environment that writes embeddings. Torch-free."""

import re
import shlex

from pydantic import Field, field_validator

from cellmill.config.section import Section
from cellmill.files import digest

PLACEHOLDERS = ("{cells}", "{out}")


class ExternalModel(Section):
    """One command, run for each dataset; its embedding is a row beside the model."""

    command: str = Field(
        description="Program and arguments, split like a shell would but run without one; {cells} is the input .h5ad, "
        "{out} the .h5ad to write."
    )
    files: list[str] = Field([], description="Files, such as its script; a change of one reruns the command.")

    @field_validator("command")
    @classmethod
    def _has_its_places(cls, value: str) -> str:
        try:
            words = shlex.split(value)
        except ValueError as error:
            raise ValueError(f"expected words as of a shell, got {value!r} ({error})") from None
        for place in PLACEHOLDERS:
            if not any(place in word for word in words):
                raise ValueError(f"expected {place} among its arguments, got {value!r}")
        return value

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the options: the same for all runs with the same command."""
        return digest(self.model_dump(mode="json"))

    @property
    def command_digest(self) -> str:
        """Hexadecimal SHA-256 of the command, which its embeddings carry."""
        return digest(self.command)


def command_words(command: str, cells: str, out: str) -> list[str]:
    """Program and arguments with the two paths in their places: split first, so that a path stays in one argument."""
    places = dict(zip(PLACEHOLDERS, (cells, out)))
    either = "|".join(map(re.escape, PLACEHOLDERS))
    return [re.sub(either, lambda found: places[found[0]], word) for word in shlex.split(command)]
