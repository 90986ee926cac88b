"""profiles install: links a checkout's profiles to where Snakemake looks for names, so that
`snakemake --profile slurm` works as written. Existing files and other links are never touched.
"""

import os
import shlex
from pathlib import Path

from cellmill.errors import DataError


def run(*, source: Path) -> None:
    """Link every profile in `source`. Raises DataError, before anything is linked, if a name is taken."""
    profiles = sorted(path.parent.resolve() for path in source.glob("*/config.yaml"))
    if not profiles:
        raise DataError(f"{source}: has no profiles; run this at the root of a checkout, or set --from FOLDER")
    if any(profile.name == "default" for profile in profiles):
        raise DataError(
            f"{source}/default: Snakemake loads a profile of that name unasked, and it overrides --profile key by key; "
            "rename it"
        )
    target = user_profiles()
    links = {target / profile.name: profile for profile in profiles}
    for link, profile in links.items():
        if os.path.lexists(link) and link.resolve() != profile:
            where = f"a link to {link.resolve()}" if link.is_symlink() else "not a link"
            raise DataError(f"{link}: exists and is {where}; remove it, or use --profile {source}/{profile.name}")
    target.mkdir(parents=True, exist_ok=True)
    for link, profile in links.items():
        if not os.path.lexists(link):
            link.symlink_to(profile)
        print(f"snakemake --profile {profile.name}   {link} -> {profile}")
    print(f"to undo: rm {shlex.join(map(str, links))}")


def user_profiles() -> Path:
    """Folder in which Snakemake looks for a user's profiles on Linux (XDG base directories)."""
    base = os.environ.get("XDG_CONFIG_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".config") / "snakemake"
