"""Names of plug-ins: built-ins first, and one line where an installed package is broken."""

from importlib.metadata import EntryPoint
from typing import Any, ClassVar, Literal

import pytest
from pydantic import ValidationError

from cellmill.config import plugin
from cellmill.config.parts.tasks import TaskConfig
from cellmill.config.plugin import in_one_line
from cellmill.errors import ConfigError
from tests.checks import refused


class Good(TaskConfig):
    """Options of a task as a package has them."""

    implementation: ClassVar[str] = "json:JSONDecoder"

    name: Literal["good"] = "good"


class Unset(TaskConfig):
    name: Literal["unset"] = "unset"


class Absent(Good):
    implementation: ClassVar[str] = "cellmill.no_such_module:Task"

    name: Literal["absent"] = "absent"  # type: ignore[assignment]


NUMBER = 7


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"good": "Good", "other": "Good", "unset": "Unset", "absent": "Absent", "number": "NUMBER"}
    points = [EntryPoint(name, f"{__name__}:{value}", "cellmill.task") for name, value in here.items()]
    points.append(EntryPoint("contract", "cellmill.config.parts.tasks:TaskConfig", "cellmill.task"))
    points += [EntryPoint("twice", f"{module}:Task", "cellmill.task") for module in ("one", "two")]
    monkeypatch.setattr(plugin, "entry_points", lambda group: points)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("encoder", "elsewhere:Masked", "cellmill.family"),
        EntryPoint("broken", "no_such_package.options:Options", "cellmill.family"),
    ]
    monkeypatch.setattr(plugin, "entry_points", lambda group: [p for p in points if p.group == group])


def test_an_installed_package_adds_names_and_replaces_no_built_in(installed: Any) -> None:
    assert plugin.names("family") == [*plugin.BUILT_IN["family"], "broken"]
    assert plugin.load("family", "encoder").__module__.startswith("cellmill.")


def test_a_package_that_cannot_be_imported_is_named_in_one_line(installed: Any) -> None:
    with refused(
        "family 'broken': no_such_package.options:Options of an installed package cannot be imported "
        "(ModuleNotFoundError: No module named 'no_such_package'); repair or remove the package"
    ):
        plugin.load("family", "broken")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", "is no subclass of cellmill.config.parts.tasks.TaskConfig; repair or remove the package"),
        ("contract", "is no subclass of cellmill.config.parts.tasks.TaskConfig; repair"),
        ("other", r"has options of another name: expected name: Literal\['other'\]; repair"),
        ("unset", "sets no `implementation`, expected 'package.module:Class'; repair"),
        ("absent", "has an implementation in cellmill.no_such_module, which does not exist; repair"),
        (
            "twice",
            "task 'twice' is in one:Task of an installed package and two:Task of .*; remove one of the packages",
        ),
    ],
)
def test_options_that_do_not_fit_their_contract_are_refused(name: str, message: str, tasks: Any) -> None:
    assert TaskConfig.model_validate({"name": "good"}) == Good()
    with pytest.raises(ValidationError, match=message):
        TaskConfig.model_validate({"name": name})


def test_an_implementation_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Good, "implementation", "json:Absent")
    with pytest.raises(ConfigError, match=r"^task 'good': json:Absent cannot be imported \(Attrib.*\); repair"):
        Good().load()


def test_an_error_of_a_package_is_one_line() -> None:
    assert in_one_line(RuntimeError("several\n\n lines")) == "RuntimeError: several lines"
    assert len(in_one_line(RuntimeError("x" * 1000))) == 300
