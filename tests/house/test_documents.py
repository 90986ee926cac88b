"""Documents agree with the code: generated files, examples, commands, targets, the tree."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
import yaml

from cellmill.arguments import new_parser
from cellmill.cli import MODULES
from cellmill.config import load_config
from cellmill.config import plugin as registry
from tests.checks import quick
from tests.house.documents import DOCUMENTS, ROOT, documentation, read
from tests.house.rules import RULES, outputs
from tools.house import LAYERS
from tools.option_docs import SCHEMA, main
from tools.rule_graph import draw, read_edges

CONFIGS = [ROOT / "config" / "config.yaml", *sorted((ROOT / "config" / "examples").glob("*.yaml"))]


def lines_of_code(text: str) -> list[str]:
    """Lines of fenced blocks, continued ones joined, and text between backticks in the prose."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.M | re.S)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return [*"".join(blocks).replace("\\\n", " ").splitlines(), *re.findall(r"`([^`\n]+)`", prose)]


def documented(program: str) -> list[tuple[str, list[str]]]:
    """Every documented command of a program, as (document, words)."""
    commands = []
    for name in DOCUMENTS:
        commands += [
            (name, line) for line in lines_of_code(read(name)) if line.split()[:1] == [program]
        ]
    for path in CONFIGS[1:]:
        text = path.read_text(encoding="utf-8")
        joined = re.sub(r"\\\n#", " ", text)
        commands += [
            (path.name, line) for line in re.findall(rf"^#\s+({program} .*)$", joined, re.M)
        ]
    # as in a shell, # begins a comment only after a blank
    return [(name, shlex.split(re.sub(r"\s#.*", "", line))) for name, line in commands]


def test_generated_files_are_up_to_date() -> None:
    assert main(["--root", str(ROOT), "--check"]) == 0


def test_no_option_is_described_twice_in_a_section() -> None:
    sections = re.split(r"^## ", read("config/README.md"), flags=re.M)
    assert len(sections) > 15
    for section in sections:
        rows = re.findall(r"^\| (`\w+`) \|.* \| (.+) \|$", section, re.M)  # key and description
        repeated = {row for row in rows if rows.count(row) > 1}
        assert repeated == set(), section.partition("\n")[0]


@pytest.mark.parametrize("path", quick(CONFIGS, CONFIGS[:2]), ids=lambda path: path.name)
def test_the_program_accepts_what_the_schema_accepts(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "family: hf" in path.read_text() and find_spec("transformers") is None:
        pytest.skip("the package transformers is not installed")
    monkeypatch.chdir(ROOT)
    load_config(path.relative_to(ROOT))
    schema = json.loads(read(SCHEMA))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(path.read_text()), schema)


@pytest.mark.parametrize(
    ("page", "run", "init_from"), [("finetune", "tuned", "./models/pbmc"), ("data", "first", None)]
)
def test_the_complete_configuration_of_a_page_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, run: str, init_from: str | None
) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/datasets.tsv").write_text(
        "dataset\tpath\tcounts\tlabel\nblood\tblood.h5ad\tX\tcell_type\n"
    )
    monkeypatch.chdir(ROOT if page == "finetune" else tmp_path)
    blocks = re.findall(r"^```yaml\n(.*?)^```", read(f"docs/{page}.md"), re.M | re.S)
    [whole] = [block for block in blocks if "corpora:" in block]
    (tmp_path / "whole.yaml").write_text(whole)
    assert load_config(tmp_path / "whole.yaml").runs[run].init_from == init_from


def test_the_schema_refuses_what_the_program_refuses() -> None:
    schema = json.loads(read(SCHEMA))
    good = yaml.safe_load(read("config/config.yaml"))
    bins = {"tokens": {"tokenizer": "rank", "bins": 9}}
    task = {"evaluate": {"tasks": {"probe": {"seed": 1}}}}
    installed = {
        "evaluate": {"tasks": {"installed": {"any": 1}}},
        "model": {"family": "installed", "any": 1},
    }
    jsonschema.validate(good | installed, schema)  # a package may have more than the schema knows
    for wrong in ({"trian": {}}, {"train": {"lrr": 1}}, {"train": {"lr": 0}}, bins, task):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(good | wrong, schema)


def test_every_documented_cellmill_command_parses() -> None:
    commands = [(name, words[1:]) for name, words in documented("cellmill") if len(words) > 2]
    assert len(commands) > 4
    for name, words in commands:
        assert parses(words), f"{name}: cellmill {' '.join(words)}"


def parses(words: list[str]) -> bool:
    try:
        new_parser("").parse_args(words)
    except SystemExit as ended:
        return ended.code == 0
    return True


def test_every_documented_target_is_the_output_of_a_rule() -> None:
    kept = r"(/steps/[^/]+)?"  # of the wildcard `at`
    written = [re.escape(output).replace(re.escape("{at}"), kept) for output in outputs()]
    patterns = [re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", output)) for output in written]
    targets = []
    for name in DOCUMENTS:
        code = " ".join(lines_of_code(read(name)))
        targets += [
            (name, path) for path in re.findall(r"(?<!--report )\bresults/[^\s`]+\.\w+", code)
        ]
    assert len(targets) > 8
    # beside the output of train
    patterns.append(re.compile(r"results/runs/[^/]+/train/cost\.json"))
    for name, target in targets:
        assert any(pattern.fullmatch(target) for pattern in patterns), f"{name}: {target}"


def test_documented_profiles_and_make_targets_exist() -> None:
    written = {
        words[3]
        for _, words in documented("cellmill")
        if words[1:3] == ["profiles", "new"] and len(words) > 3
    }
    for name, words in documented("snakemake"):
        for flag in ("--profile", "--configfile"):
            for value in [words[i + 1] for i, word in enumerate(words[:-1]) if word == flag]:
                linked = flag == "--profile" and (
                    value.removeprefix("profiles/") in written
                    or (ROOT / "profiles" / value).exists()
                )
                assert value == "FILE" or linked or (ROOT / value).exists(), (
                    f"{name}: {flag} {value}"
                )
    targets = re.findall(r"^([a-z-]+):", read("Makefile"), re.M)
    for name, words in documented("make"):
        assert set(words[1:2]) <= {*targets, "PYTHON=python3.12"}, f"{name}: {' '.join(words)}"


def test_every_stage_is_a_rule_with_a_documented_command() -> None:
    text = documentation()
    parsers = next(a for a in new_parser("")._actions if isinstance(a, argparse._SubParsersAction))
    stages = set(RULES) - {"all", "demo_data"}
    commands = {
        name
        for module, names in MODULES.items()
        if module.startswith("commands")
        for name in names.split()
    }
    commands |= {"export", "profiles"}
    assert stages == set(parsers.choices) - {"demo", "simulate", "generate"} - commands
    for stage in stages:
        assert re.search(rf"^\| {stage} \|", text, re.M), f"docs/stages.md has no row for {stage}"


def test_every_file_that_the_documentation_names_exists() -> None:
    named = set(re.findall(r"`(?:src/cellmill/)?((?:[a-z_]+/)+[a-z_]+\.py)`", documentation()))
    assert len(named) > 40
    there = [ROOT, ROOT / "src/cellmill", ROOT / "tests/plugin/cellmill_toy"]
    assert [
        path for path in sorted(named) if not any((folder / path).exists() for folder in there)
    ] == []


def test_every_file_that_the_source_names_exists() -> None:
    folders = ("src", "workflow", "tests", "benchmarks", "docs", "tools")
    files = [path.as_posix() for folder in folders for path in (ROOT / folder).rglob("*.*")]
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for name in re.findall(r"`([a-z][\w/]*\.(?:py|smk|md))`", path.read_text(encoding="utf-8"))
        if not any(file.endswith(f"/{name}") for file in files)
    ]
    assert missing == []


def test_the_documentation_lists_the_layers() -> None:
    text = " ".join(documentation().split())
    assert (
        f"Layers import to the right only: {', '.join(' and '.join(names) for names in LAYERS)}."
        in text
    )


def anchors(path: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub and mkdocs make them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    plain = (
        re.sub(r"[^\w\s-]", "", heading).strip().lower()
        for heading in re.findall(r"^#+ (.*)$", text, re.M)
    )
    return {re.sub(r"[\s-]+", "-", heading) for heading in plain}


def test_the_picture_shows_the_rules_of_the_demo(tmp_path: Path) -> None:
    (tmp_path / "config").symlink_to(ROOT / "config")
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--snakefile",
        str(ROOT / "Snakefile"),
        "--rulegraph",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    picture = draw(read_edges(done.stdout))
    ElementTree.fromstring(picture)
    same = read("docs/rules.svg") == picture
    assert same, "run: snakemake --rulegraph | python tools/rule_graph.py > docs/rules.svg"


def test_links_of_documents_exist() -> None:
    count = 0
    for name in [*DOCUMENTS, "benchmarks/README.md", "CHANGELOG.md"]:
        text = read(name)
        for link, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
            if "://" in link:
                continue
            path = (ROOT / name).parent / link if link else ROOT / name
            assert path.exists(), f"{name}: {link}"
            assert not anchor or anchor in anchors(path), f"{name}: {link}#{anchor}"
            count += 1
    assert count > 30


def test_every_page_can_be_reached_from_the_readme() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages == set(re.findall(r"\]\(docs/([\w-]+\.md)\)", read("README.md")))
    assert pages == set(re.findall(r"\]\(([\w-]+\.md)\)", read("docs/index.md")))
    navigation = str(yaml.safe_load(read("mkdocs.yml"))["nav"])
    assert pages == set(re.findall(r"'([\w-]+\.md)'", navigation)) - {"index.md"}


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(DOCUMENTS)
    for page in pages:
        tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text(encoding="utf-8"))
        remote = [tag for tag in tags if re.search(r"\b(?:src|href)=[\"']?(?:https?:)?//", tag)]
        assert not remote, f"{page.name}: {remote}"


def test_the_contracts_of_contributing_exist() -> None:
    row = r"^\| \w+ \| `(.+?)` `(\w+)` \| `(.+?)` `(\w+)` \| .+? \| `(\w+\.py)`"
    rows = re.findall(row, read("CONTRIBUTING.md"), re.M)
    assert len(rows) == len(registry.BUILT_IN)
    for options, contract, module, implementation, toy in rows:
        for path, name in ((options, contract), (module, implementation)):
            source = (ROOT / "src" / "cellmill" / path).read_text(encoding="utf-8")
            assert re.search(rf"^(class|def) {name}\b", source, re.M), f"{path} has no {name}"
        assert (ROOT / "tests" / "plugin" / "cellmill_toy" / toy).exists()


@pytest.mark.parametrize("kind", sorted(registry.BUILT_IN))
def test_every_built_in_part_stands_on_the_page_of_parts(kind: str) -> None:
    [row] = [
        line for line in read("docs/parts.md").splitlines() if f"| `cellmill.{kind}` |" in line
    ]
    missing = [name for name in registry.BUILT_IN[kind] if not re.search(rf"\b{name}\b", row)]
    assert missing == []


def test_every_test_named_in_the_documentation_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", documentation()))
    sources = " ".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    assert len(named) > 10
    assert not [name for name in named if f"def {name}(" not in sources]


def table_rows(path: str) -> list[list[str]]:
    """Cells of every table row of a document, without bold."""
    lines = [line for line in read(path).splitlines() if line.startswith("| ")]
    return [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]


def test_figures_of_a_digest_match_their_source() -> None:
    names = ("pbmc68k", "merfish_mouse", "cellbench")
    source: dict[str, list[str]] = {}
    for data, model, *figures in (
        line.split("\t") for line in read("benchmarks/quality.tsv").splitlines()
    ):
        if data in names:  # whole cells, 10 % of the counts and 75 genes, each by two classifiers
            best = [max(figures[at : at + 2]).removeprefix("0") for at in (0, 4, 8)]
            source[model] = [*source.get(model, []), *best, figures[-1]]
    digest = [row for row in table_rows("docs/quality.md") if len(row) == 12][1:]
    assert len(digest) == 10
    for model, *figures in digest:
        pbmc, merfish, cellbench = (source[model][at : at + 4] for at in (0, 4, 8))
        assert figures == [*pbmc[:3], *merfish[:3], *cellbench[:3], pbmc[3], cellbench[3]], model

    best_of: dict[str, list[str]] = {}
    for name, *figures in (row for row in table_rows("docs/report.md") if len(row) == 8):
        if " + " in name:
            # over the genes of a panel as well, where there are few genes
            features = name.split(" + ")[0]
            features = {"PCA50 of the panel": "PCA50 of the training cells"}.get(features, features)
            features = features.removesuffix(" of the panel")
            shown = [figures[at] for at in (0, 2, 3, 5)]
            best_of[features] = [
                max(pair) for pair in zip(shown, best_of.get(features, shown), strict=True)
            ]
    words = {
        "embedding of the untrained model": "untrained",
        "PCA of the training cells": "PCA50 of the training cells",
    }
    short = [row for row in table_rows("README.md") if len(row) == 5][1:]
    assert len(short) == 7
    shares = {
        row[0]: [row[at] for at in (1, 3, 4, 6)]
        for row in table_rows("docs/report.md")
        if len(row) == 8
    }
    for name, *figures in short:
        assert figures == (
            shares[name] if name.startswith("gap") else best_of[words.get(name, name)]
        ), name
