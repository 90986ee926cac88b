"""Profiles and the page about them: every key is explained, and the page says of the machine what the code says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cellmill.config import check_options
from cellmill.config.machine import Machine
from tests.house.rules import rules

ROOT = Path(__file__).resolve().parents[2]
PROFILES = sorted((ROOT / "profiles").glob("*/config.yaml"))


def keys_in_tables() -> set[str]:
    text = (ROOT / "profiles" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+?`) \|", text.split("## Keys")[1], re.M)
    return {key for row in rows for key in re.findall(r"`([^`]+)`", row)}


def keys_of(profile: dict[str, Any]) -> set[str]:
    found = set(profile) | set(profile.get("default-resources", {}))
    for resources in profile["set-resources"].values():
        found |= set(resources)
    return found


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.parent.name)
def test_every_key_of_a_profile_is_explained_and_commented(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert keys_of(yaml.safe_load(text)) <= keys_in_tables()
    assert text.count("#") > 8


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.parent.name)
def test_a_profile_is_a_machine_and_its_plan_is_for_that_machine(path: Path) -> None:
    resources = yaml.safe_load(path.read_text(encoding="utf-8"))["set-resources"]
    assert set(resources) <= set(rules())
    machine = check_options(Machine, resources["train"], str(path))
    planned = {"nodes": 1} | {key: value for key, value in resources["plan"].items() if key != "device"}
    assert Machine(**planned) == Machine(nodes=machine.nodes, nproc_per_node=machine.nproc_per_node)
    if machine.gpus:
        assert machine.gpus == machine.nproc_per_node


def test_the_page_says_of_each_key_of_the_machine_what_the_code_says() -> None:
    text = (ROOT / "profiles" / "README.md").read_text(encoding="utf-8")
    for name, field in Machine.model_fields.items():
        default = "none" if field.default == "" else f"`{field.default}`"
        assert f"| `{name}` | {field.description} Default: {default}. |" in text
