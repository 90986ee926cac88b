"""The line for a package that the interpreter of a bridge lacks. The standard library alone."""

import sys
from typing import NoReturn


def end_without(package: str, tested: str, error: ImportError, key: str | None = None) -> NoReturn:
    """End the process with a line that names the package, the tested version and where to set the interpreter.

    `key` is that of `bridges`, if it is not the package.
    """
    sys.exit(
        f"cellmill: {package} cannot be imported by {sys.executable} ({error}); install {package} (tested: {tested}) "
        f"in an environment of its own and set bridges: {{{key or package}: PATH_OF_ITS_PYTHON}}, or run snakemake "
        "with --sdm conda"
    )
