"""fetch: the input of a dataset that is at a URL, copied into the cache that jobs share."""

from pathlib import Path

from cellmill.config.input_url import redacted
from cellmill.data.fetch import fetch
from cellmill.files import write_json


def run(*, input: str, out: Path, cache: Path | None = None) -> None:
    """Copy the file or folder at the URL `input` into `cache`; write its path, SHA-256 and size to `out` (.json)."""
    found = fetch(input, cache)
    write_json(out, found.to_json())
    print(f"{redacted(input)}: {found.n_bytes:,} bytes, sha256 {found.sha256[:12]} -> {found.path}")
