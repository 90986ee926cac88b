"""Names of plug-ins: built-ins first, and one line where an installed package is broken."""

from importlib.metadata import EntryPoint
from typing import Literal

import pytest
from pydantic import ValidationError

from cellmill.config import plugin
from cellmill.config.parts.tasks import TaskConfig
from cellmill.config.plugin import in_one_line
from cellmill.errors import ConfigError


class Good(TaskConfig):
    """Options of a task as a package has them."""

    implementation = "json:JSONDecoder"
    name: Literal["good"] = "good"


class Unset(TaskConfig):
    name: Literal["unset"] = "unset"


class Absent(Good):
    implementation = "cellmill.no_such_module:Task"
    name: Literal["absent"] = "absent"  # type: ignore[assignment]


NUMBER = 7


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {
        "good": "Good",
        "other": "Good",
        "unset": "Unset",
        "absent": "Absent",
        "number": "NUMBER",
    }
    values = {name: f"{__name__}:{value}" for name, value in here.items()}
    values |= {
        "contract": "cellmill.config.parts.tasks:TaskConfig",
        "broken": "no_such_package.options:Options",
    }
    points = [
        EntryPoint(name, value, "cellmill.task")
        for name, value in (values | {"probe": "elsewhere:X"}).items()
    ]
    points += [EntryPoint("twice", f"{module}:Task", "cellmill.task") for module in ("one", "two")]
    monkeypatch.setattr(
        plugin, "entry_points", lambda group: [p for p in points if p.group == group]
    )


def test_an_installed_package_replaces_no_built_in() -> None:
    assert plugin.names("task")[len(plugin.BUILT_IN["task"]) :][-3:] == ["broken", "twice", "twice"]
    assert plugin.load("task", "probe").__module__.startswith("cellmill.")
    assert TaskConfig.model_validate({"name": "good"}) == Good()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "number",
            "is no subclass of cellmill.config.parts.tasks.TaskConfig; repair or remove the package",
        ),
        ("contract", "is no subclass of cellmill.config.parts.tasks.TaskConfig; repair"),
        ("other", r"has options of another name: expected name: Literal\['other'\]; repair"),
        ("unset", "sets no `implementation`, expected 'package.module:Class'; repair"),
        (
            "absent",
            "has an implementation in cellmill.no_such_module, which does not exist; repair",
        ),
        (
            "twice",
            "task 'twice' is in one:Task of an installed package and two:Task of .*; remove one of the packages",
        ),
        (
            "broken",
            "task 'broken': no_such_package.options:Options of an installed package cannot be imported "
            r"\(ModuleNotFoundError: No module named 'no_such_package'\); repair or remove the package",
        ),
    ],
)
def test_options_that_break_their_contract_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TaskConfig.model_validate({"name": name})


def test_an_implementation_that_cannot_be_imported_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Good, "implementation", "json:Absent")
    with pytest.raises(
        ConfigError, match=r"^task 'good': json:Absent cannot be imported \(Attrib.*\); repair"
    ):
        Good().load()


def test_an_error_of_a_package_is_reported_in_one_line() -> None:
    assert in_one_line(RuntimeError("several\n\n lines")) == "RuntimeError: several lines"
    assert len(in_one_line(RuntimeError("x" * 1000))) == 300
