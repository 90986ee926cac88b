"""Snakemake commands that make the files of a run or corpus again.

The page shows these commands in the section on provenance.
"""

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
"""Files that rules of the workflow write, by kind of the folder and in the order of the stages.

A run has its folder in results/runs, a corpus in results/corpora. A path is relative to this folder,
and may be a pattern.
"""


def find_folder_name(folder: Path) -> str:
    """Find the name of a folder of results. Of a symbolic link, it is the name of the link."""
    # `Path.resolve` would follow the link
    return os.path.basename(os.path.abspath(folder))


def list_remake_commands(kind: str, folder: Path) -> dict[str, str]:
    """List the command that makes each file of `folder` again, by file.

    `kind` is a key of FILES_BY_KIND. The workflow has the folder in results/<kind>.

    With `--force`, Snakemake runs a stage again although its file exists. But a training runs again
    only if its folder is gone. So the command for a training first renames the folder. The new name
    ends in the time, so no weights are lost.
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
