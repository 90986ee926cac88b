"""URLs of inputs: told apart from paths, and redacted for logs."""

import re
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from cellmill.errors import ConfigError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SECRET = re.compile(
    r"(signature|token|secret|passw|credential|api_?key|access_?key|bearer|hmac|^auth|^(sig|key|pwd|jwt)$)", re.I
)


def is_url(text: str) -> bool:
    """True if an input is a URL, such as `s3://bucket/cells.h5ad`."""
    return _URL.match(text) is not None


def input_path(text: str) -> Path | str:
    """A URL as it is, anything else as a path, which would lose a slash of `s3://`."""
    return text if is_url(text) else Path(text)


def redacted(url: str) -> str:
    """The URL without user, password, query and fragment, for messages."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def check_url(url: str) -> None:
    """Raise ConfigError for a URL that has credentials, which commands and logs would show, or chains protocols."""
    parts = urlsplit(url)
    named = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True) if _SECRET.search(name)]
    user = parts.netloc.rpartition("@")[0]
    is_container = parts.scheme in ("abfs", "abfss") and user and ":" not in user  # abfss://CONTAINER@ACCOUNT…
    if (user and not is_container) or named:
        where = f"parameter {named[0]}" if named else "a user before @"
        raise ConfigError(
            f"{redacted(url)}: has credentials ({where}), which logs would show; give them by the environment, as the "
            "protocol's package reads them, and leave them out of the URL"
        )
    if "::" in url:
        raise ConfigError(f"{redacted(url)}: chains protocols with '::'; expected one, as in s3://bucket/cells.h5ad")
