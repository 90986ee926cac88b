"""Machine that the profiles of a snakemake command describe, whatever else the command sets.

Options of a command replace a profile's whole entry: with `--set-resources train:nodes=2` nothing is left of the
profile's `set-resources`. What the profile gave the rules train and plan becomes their default instead.
"""

from collections.abc import Sequence
from typing import Any

from snakemake.cli import get_argument_parser

from cellmill.config.machine import Machine
from cellmill.preflight.profile import read_profile, snakemake_finds, workflow_profile


def profile_resources(arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Resources of the rules train and plan in the profiles of a command line (without `snakemake`).

    Of several profiles the last one that sets resources counts, as in Snakemake. Raises ConfigError naming the file
    and what is wrong.
    """
    options, _ = get_argument_parser().parse_known_args(list(arguments))
    names = [name for name in options.profile or [] if name != "none"]
    rules: dict[str, dict[str, Any]] = {"train": {}, "plan": {}}
    last = options.workflow_profile or "default"
    for path in [*map(snakemake_finds, names), None if last == "none" else workflow_profile(last)]:
        if path is None:
            continue
        profile = read_profile(str(path))
        if profile.train or profile.plan:
            rules = {"train": profile.train, "plan": profile.plan}
    return {
        "train": {name: value for name, value in rules["train"].items() if name in Machine.model_fields},
        "plan": rules["plan"],
    }
