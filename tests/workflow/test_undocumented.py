"""Undocumented names of Snakemake still mean what workflow/rules/undocumented.smk says.

`elsewhere` is held by test_a_training_on_the_login_node_is_refused, and what a command leaves of a
profile by test_a_command_changes_single_keys_of_a_machine (test_line.py).
"""

import re

import pytest

from tests.workflow.conftest import REPOSITORY, Project
from tests.workflow.test_modules import Outer

pytestmark = pytest.mark.xdist_group("workflow")

SEEN = """
include: "%s/workflow/rules/undocumented.smk"


configfile: "config/config.yaml"


rule made:
    output:
        "made.txt",
    params:
        seen=lambda wildcards: f"{is_main} {elsewhere()} {executes()} {config_source} {machines.trains} {words[-1]}",
        known=f"{is_made('made.txt')} {is_made('other.txt')} {checkout}",
    shell:
        "echo seen {params.seen:q} {params.known:q} made | tee {output:q}"


# known once it stands
rule asked:
    params:
        known=f"{is_made('made.txt')} {is_made('other.txt')} {checkout}",
    shell:
        "echo {params.known:q}"
"""


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (["-n"], "True False False config/config.yaml True asked"),
        ([], "True False True config/config.yaml True asked"),
        (
            ["-n", "--configfile", "other.yaml"],
            "True False False other.yaml + config/config.yaml True asked",
        ),
        (
            ["-n", "--configfile", "other.yaml", "--replace-workflow-config"],
            "True False False other.yaml True asked",
        ),
        (
            ["--config", "one=1", "two=2", "-n"],
            "True False False config/config.yaml + --config True asked",
        ),
    ],
    ids=["dry", "run", "more", "replaced", "command"],
)
def test_each_name_has_its_documented_meaning(
    project: Project, words: list[str], seen: str
) -> None:
    (project.folder / "Snakefile").write_text(SEEN % REPOSITORY)
    (project.folder / "other.yaml").write_text("{}")
    shown = Outer(project.folder).snakemake("-p", *words, "--", "made.txt", "asked", profile=None)
    assert shown.returncode == 0, shown.stdout
    assert f"echo seen {seen!r}".replace('"', "'") in shown.stdout.replace("'\"'\"'", "'").replace(
        '"', "'"
    )
    assert f"echo 'True False {REPOSITORY}'" in shown.stdout


def test_parameters_but_folders_and_machines_are_compared() -> None:
    """A changed parameter reruns a rule only if its function asks for nothing but wildcards."""
    files = [
        *REPOSITORY.glob("workflow/rules/*.smk"),
        REPOSITORY / "src/cellmill/config/job_files.py",
    ]
    asks_for_more = (
        r"lambda wildcards, .*|def \w+\(wildcards, .*|def \w+\(self, wildcards: Wildcards, .*"
    )
    found = {line for path in files for line in re.findall(asks_for_more, path.read_text())}
    assert found == {
        "lambda wildcards, output: Path(output[0]).parent,",
        "def train_machine(wildcards, resources):",
        "def plan_machine(wildcards, resources):",
    }


def test_nothing_else_is_taken_from_snakemake() -> None:
    files = [
        REPOSITORY / "Snakefile",
        *(REPOSITORY / "workflow").rglob("Snakefile"),
        *REPOSITORY.glob("workflow/*/*.smk"),
    ]
    for path in files:
        found = re.findall(
            r"workflow\.(?!source_path\b)\w+|sys\.argv|sys\.exit|warnings\.|os\.environ",
            path.read_text(),
        )
        assert not found or path.name == "undocumented.smk", f"{path}: {found}"
