"""Names of plug-ins: built-ins first, and one line where an installed package is broken."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from cellmill import registry
from cellmill.errors import ConfigError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("masked", "elsewhere:Masked", "cellmill.family"),
        EntryPoint("broken", "no_such_package.options:Options", "cellmill.family"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: [p for p in points if p.group == group])


def test_an_installed_package_adds_names_and_replaces_no_built_in(installed: Any) -> None:
    assert registry.names("family") == ["masked", "broken"]
    assert registry.load("family", "masked").__module__.startswith("cellmill.")


def test_a_package_that_cannot_be_imported_is_named_in_one_line(installed: Any) -> None:
    with pytest.raises(ConfigError) as error:
        registry.load("family", "broken")
    assert str(error.value) == (
        "family 'broken': no_such_package.options:Options of an installed package cannot be imported "
        "(ModuleNotFoundError: No module named 'no_such_package'); repair or remove the package"
    )


def test_an_unknown_name_lists_the_nearest_or_all(installed: Any) -> None:
    with pytest.raises(ConfigError, match=r"^unknown family 'mask'; did you mean 'masked'\?$"):
        registry.load("family", "mask")
