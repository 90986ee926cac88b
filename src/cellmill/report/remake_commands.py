"""Snakemake commands that make the files of a run or corpus again, for the section on provenance."""

import os
import shlex
from pathlib import Path

STATUS_FILE = "train/status.json"
FILES_BY_KIND = {
    "runs": (
        "plan.json",
        STATUS_FILE,
        "model/model.safetensors",
        "embeddings/*.h5ad",
        "predictions/*.h5ad",
        "changes/*.h5ad",
        "evaluate/metrics.json",
        "steps/*/evaluate/metrics.json",
        "bridges/*.json",
    ),
    "corpora": ("cells/*.h5ad", "vocabulary.tsv", "shards/manifest.json"),
}
"""Outputs of rules in a folder of results/runs or results/corpora, in the order of the stages."""


def find_folder_name(folder: Path) -> str:
    """Name of a folder of results, which is the link's if the folder is one."""
    return os.path.basename(os.path.abspath(folder))


def list_remake_commands(kind: str, folder: Path) -> dict[str, str]:
    """Command by file of `folder`, which is in results/<kind>.

    With `--force` a stage runs again although its file exists. Training runs again only if its
    folder is gone. The command moves the folder to a name with the time, so no weights are lost.
    """
    results_folder = Path("results", kind, find_folder_name(folder))
    train = shlex.quote(f"{results_folder}/train")
    commands = {}
    for pattern in FILES_BY_KIND[kind]:
        for path in sorted(folder.glob(pattern)):
            file = path.relative_to(folder).as_posix()
            target = shlex.quote(f"{results_folder}/{file}")
            if file == STATUS_FILE:
                move = f"mv {train} {train}.$(date +%s)"
                commands[file] = f"{move} && snakemake --profile PROFILE {target}"
            else:
                commands[file] = f"snakemake --profile PROFILE --force {target}"
    return commands
