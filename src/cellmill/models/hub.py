"""Model folders on the Hugging Face hub, by the package huggingface_hub (extra `hub`).

Only the files in FILES go either way: JSON, text and safetensors. A token comes from the
environment only (HF_TOKEN), and HF_ENDPOINT names another hub.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cellmill.config.plugin import in_one_line
from cellmill.config.published import HUB_MODEL
from cellmill.errors import ConfigError, DataError, UserError
from cellmill.files import atomic_path
from cellmill.models.export import load_model

try:
    from huggingface_hub import (
        CommitOperationAdd,
        CommitOperationDelete,
        HfApi,
        snapshot_download,
    )
except ImportError:
    raise ConfigError(
        "the package huggingface_hub is not installed; pip install 'cellmill[hub]'"
    ) from None

FILES = (
    "README.md",
    "vocabulary.tsv",
    "model.safetensors",
    "ridge.safetensors",
    "metrics.json",
    "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors",
    "cells.digest",
    "config.json",  # written last
)
SCHEME = "hf://"


def push(folder: Path, repo: str, card: str, metrics: Path | None, private: bool) -> str:
    """Upload a model folder in one commit with README.md `card`, and return its URL.

    The folder is loaded first. Files of an earlier model are removed. Raise UserError.
    """
    name, revision = split_name(repo)
    token = _token()
    if not token:
        raise ConfigError(
            "HF_TOKEN is not set; set it to a token of the hub that may write (it is read from nowhere else)"
        )
    load_model(folder)
    contents: dict[str, str | bytes] = {
        file: str(folder / file) for file in FILES if (folder / file).is_file()
    }
    contents["README.md"] = card.encode()
    if metrics is not None:
        contents["metrics.json"] = str(metrics)
    changes: list[Any] = [CommitOperationAdd(file, content) for file, content in contents.items()]
    api = HfApi(token=token)
    with _name_errors(name):
        api.create_repo(name, private=private, exist_ok=True)
        if private and not api.model_info(name).private:
            raise ConfigError(
                f"{name} exists and is public; make it private on the hub, or leave out --private"
            )
        earlier = {*FILES} & {*api.list_repo_files(name, revision=revision)}
        changes += [CommitOperationDelete(file) for file in sorted(earlier - contents.keys())]
        done = api.create_commit(
            name, changes, commit_message="Model of cellmill", revision=revision
        )
    return str(done.commit_url)


def pull(repo: str, folder: Path) -> str:
    """Download a model to `folder`, config.json last, and return the commit.

    Files of an earlier model in `folder` are replaced or removed. Raise UserError if `repo` is not a
    model of cellmill.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        made = Path(temporary)
        name, revision = split_name(repo)
        with _name_errors(name):
            commit = HfApi(token=_token()).model_info(name, revision=revision).sha
            snapshot_download(
                name, revision=commit, allow_patterns=[*FILES], local_dir=made, token=_token()
            )
        if not (made / "config.json").is_file():
            raise DataError(
                f"{name}: it has no config.json; expected a model that `cellmill push` uploaded"
            )
        try:
            load_model(made)
        except UserError as error:
            raise DataError(
                f"{name}: it is not a model of cellmill: {str(error).replace(f'{made}/', '')}"
            ) from None
        had_model = (folder / "config.json").is_file()
        for file in FILES:
            if not (made / file).is_file():
                if had_model:
                    (folder / file).unlink(missing_ok=True)
                continue
            with atomic_path(folder / file) as path:
                os.replace(made / file, path)
    return str(commit)


def download(repo: str) -> Path:
    """Return the folder of a model in the hub's cache, downloaded if missing. Raise UserError."""
    name, revision = split_name(repo)
    with _name_errors(name):
        folder = snapshot_download(name, revision=revision, allow_patterns=[*FILES], token=_token())
    return Path(folder)


def split_name(repo: str) -> tuple[str, str | None]:
    """Return owner/name and revision of `[hf://]owner/name[@revision]`. Raise ConfigError."""
    model = repo.removeprefix(SCHEME)
    if not re.fullmatch(HUB_MODEL, model):
        raise ConfigError(
            f"{repo}: expected the name of a model on the hub, owner/name or owner/name@revision"
        )
    name, _, revision = model.partition("@")
    return name, revision or None


def _token() -> str | bool:
    """Return the token of the environment; False keeps a stored token from being sent."""
    # stripped: an error about a header with a line break would show the token
    return os.environ.get("HF_TOKEN", "").strip() or False


@contextmanager
def _name_errors(name: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the hub's, the network library's, and those of names and files
        raise DataError(
            f"{name}: the hub does not do it: {in_one_line(error.__cause__ or error)[:300]}"
        ) from None
