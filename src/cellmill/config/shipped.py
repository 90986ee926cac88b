"""The files that come with the package: the workflow, profiles, examples and environments.

In a checkout, or an editable install of one, they are beside `src`. A wheel puts them in
`share/cellmill` of the environment, which is above the folder of its packages, or with `pip install
--target` in that folder.
"""

from pathlib import Path

from cellmill.errors import DataError

_MARK = "workflow/Snakefile"


def find_shipped(name: str = "") -> Path:
    """Absolute path of a shipped file or folder, such as `profiles/local`; by default their root.

    Raise DataError if it is missing.
    """
    package = Path(__file__).resolve().parents[1]
    roots = [folder / "share/cellmill" for folder in package.parents]
    if package.parent.name == "src":
        roots.insert(0, package.parents[1])
    root = next((root for root in roots if (root / _MARK).is_file()), roots[0])
    path = root / name
    if not path.exists():
        raise DataError(
            f"{path}: no such file; install cellmill again, from its wheel or a checkout"
        )
    return path
