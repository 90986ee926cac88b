"""Commands that make the files of a run or a corpus again, by Snakemake's target of each."""

import shlex
from collections.abc import Iterable
from pathlib import Path

OF_A_RUN = (
    "plan.json",
    "train/status.json",
    "model/model.safetensors",
    "embeddings/*.h5ad",
    "predictions/*.h5ad",
    "changes/*.h5ad",
    "evaluate/metrics.json",
    "steps/*/evaluate/metrics.json",
)
OF_A_CORPUS = ("cells/*.h5ad", "vocabulary.tsv", "shards/manifest.json")


def existing_files(folder: Path, patterns: Iterable[str]) -> list[str]:
    """Files of `folder` that match, in the order of the stages, relative to it."""
    return [file.relative_to(folder).as_posix() for pattern in patterns for file in sorted(folder.glob(pattern))]


def remake_commands(kind: str, name: str, files: Iterable[str]) -> dict[str, str]:
    """Command by file, for the folder `name` of results/<kind>. A stage runs again with `--force` though its file is
    there; a finished training only if its folder is gone, so that no trained weights are lost by a command alone.
    """
    commands = {}
    for file in files:
        target = shlex.quote(f"results/{kind}/{name}/{file}")
        commands[file] = f"snakemake --profile PROFILE --force {target}"
        if file == "train/status.json":
            trained = shlex.quote(f"results/{kind}/{name}/train")
            commands[file] = f"mv {trained} {trained}.old && snakemake --profile PROFILE {target}"
    return commands
