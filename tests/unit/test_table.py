"""The table of datasets and configuration files: nothing vanishes, nothing ends in a traceback."""

import os
from pathlib import Path

import pytest
from limits import limited

from cellmill.cli import main
from cellmill.config.datasets import check_name, read_datasets
from cellmill.config.load import read_yaml
from cellmill.errors import ConfigError

ROW = "dataset\tpath\tlabel\n"


def test_excel_tables_with_trailing_empty_columns_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv"
    path.write_bytes(
        '\ufeffdataset\tpath\tfilter\tsource\r\na\tb.h5ad\t"x == ""10x"""\t7" chip\r\n\r\n'.encode()
    )
    (row,) = read_datasets(path).values()
    assert (row.dataset, row.filter, row.source) == ("a", 'x == "10x"', '7" chip')
    path.write_text("dataset\tpath\tlabel\t\t\na\tb.h5ad\tx\t\t\nc\td.h5ad\t\t\t\t\n")
    assert [(row.path, row.labels) for row in read_datasets(path).values()] == [
        ("b.h5ad", ["x"]),
        ("d.h5ad", []),
    ]
    path.write_text("dataset\tpath\na\tb.h5ad\t\n")
    (row,) = read_datasets(path).values()
    assert (row.dataset, row.label, row.counts) == ("a", None, "X")


@pytest.mark.parametrize(
    ("text", "value"), [("010", 8), ("0x10", 16), ("1:30", 90), ("0b11", 3), ("-017", -15)]
)
def test_integers_that_yaml_would_change_are_refused(tmp_path: Path, text: str, value: int) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"train:\n  steps: {text}\n")
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    message = f"line 2: {text} is {value} in YAML 1.1; write {value}, or '{text}' in quotes"
    assert str(caught.value) == f"{path}: {message}"
    path.write_text(
        f"a: '{text}'\nb: 1_000\nc: -7\nd: 0\ne: +3\nf: &f {{x: 1}}\ng: {{<<: *f, x: 2}}\n"
    )
    plain = {"a": text, "b": 1000, "c": -7, "d": 0, "e": 3}
    # keys that are merged may repeat
    assert read_yaml(path) == plain | {"f": {"x": 1}, "g": {"x": 2}}


TABLES = {
    "a quote over two rows": (
        f'{ROW}a\tb\t"c\nd\te\tf\ng\th\ti"\n',
        "line 2: unexpected end of data; save UTF-8 text",
    ),
    "text after a quote": (
        f'{ROW}a\tb\t"c"d\n',
        "line 2: '\\t' expected after '\"'; save UTF-8 text",
    ),
    "a cell of 200 kB": (
        f"{ROW}a\tb\t{'c' * 200_000}\n",
        "line 2: field larger than field limit (131072); save UTF-8",
    ),
    "a path of 100 kB": (
        f"{ROW}a\t{'{' * 100_000}\t\n",
        "line 2: path: string should match pattern",
    ),
    "a column twice": (
        "dataset\tpath\tpath\na\tb\tc\n",
        "two columns are called 'path'; remove one",
    ),
    "NUL": (f"{ROW}a\tb\tc\0\n", "line 2: a NUL character; save UTF-8 text with tabs"),
    "a column without a name": ("dataset\t\tpath\na\t\tb\n", "unknown column ''; there are: "),
    "a field too many": (f"{ROW}a\tb\tc\td\n", "line 2: more fields than columns in the header"),
    "spaces": (
        f"{ROW} d \tb\n",
        "line 2: dataset: ' d ' is no name; use letters, digits, '_', '.' and '-'",
    ),
    "a dot": (f"{ROW}.d\tb\n", "line 2: dataset: '.d' is no name; use letters, digits"),
    "an empty file": ("", "no datasets; add a header line and a row per .h5ad file"),
    "a header alone": ("dataset\tpath\n", "no datasets; add a row per .h5ad file"),
    "columns separated by spaces": (
        "dataset path\na b\n",
        "unknown column 'dataset path'; separate columns by tabs",
    ),
    "an unknown column": ("dataset\tpth\na\tb\n", "unknown column 'pth'; did you mean 'path'?"),
    "credentials": (
        "dataset\tpath\na\ts3://u:p@b/c\n",
        "line 2: path: s3://b/c: has credentials (a user before @), ",
    ),
    "a source with a token": (
        "dataset\tpath\tsource\na\tb\thttps://h/x?token=T\n",
        "line 2: source: https://h/x: has credentials (parameter token), ",
    ),
    "a blank path": (
        "dataset\tpath\na\t \n",
        "line 2: path: string should have at least 1 character",
    ),
    "no path": ("dataset\tpath\na\t\n", "line 2: path: is missing"),
    "not text": ("dataset\tpath\n\udcff\tb\n", "not UTF-8 text; save it as tab-separated UTF-8"),
    "twice": ("dataset\tpath\na\tb\na\tc\n", "line 3: dataset 'a' is a duplicate; rename it"),
    "a folder": (
        f"{ROW}a/b\tc\n",
        "line 2: dataset: 'a/b' is no name; use letters, digits, '_', '.' and '-'",
    ),
    "007": (f"{ROW}007\tb\n", "line 2: dataset: the name 007 is 7 in YAML; add a letter to it"),
    "a long name": (
        f"{ROW}{'a' * 300}\tb\n",
        "line 2: dataset: expected a name of at most 100 characters, got 300: a",
    ),
    "a filter": (
        "dataset\tpath\tfilter\na\tb\tx ==\n",
        "line 2: filter: cannot be read (invalid syntax); expected a",
    ),
    "a number": (
        "dataset\tpath\tmin_genes\na\tb\tmany\n",
        "line 2: min_genes: input should be a valid integer",
    ),
}


@pytest.mark.parametrize("case", TABLES)
def test_a_wrong_table_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    text, message = TABLES[case]
    path = tmp_path / "t.tsv"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError) as caught:
        read_datasets(path)
    assert str(caught.value).startswith((f"{path}, {message}", f"{path}: {message}"))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_blanks_around_a_path_are_removed(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("dataset\tpath\na\t data/b c.h5ad \n")
    assert read_datasets(tmp_path / "t.tsv")["a"].path == "data/b c.h5ad"


BASE = "corpora: {c: {}}\ntrain: {steps: 1}\n"


def test_a_missing_table_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"t\.tsv: No such file or directory; expected the table of datasets$"
    ):
        read_datasets(tmp_path / "t.tsv")
    os.mkfifo(tmp_path / "t.tsv")
    with (
        limited(),
        pytest.raises(ConfigError, match=r"t\.tsv: expected the table of datasets, got a FIFO$"),
    ):
        read_datasets(tmp_path / "t.tsv")


CONFIGS = {
    "a run called 007": (
        f"{BASE}runs: {{007: {{corpus: c}}}}",
        "runs: the name 7 is 7 in YAML; add a letter to it",
    ),
    "null in quotes": (
        f"{BASE}runs: {{'null': {{corpus: c}}}}",
        "runs: the name null is None in YAML",
    ),
    "a long name": (
        f"{BASE}runs: {{{'r' * 300}: {{corpus: c}}}}",
        "runs: expected a name of at most 100 characters",
    ),
    "a key twice inside": (
        f"{BASE}runs:\n  r: {{}}\n  r: {{corpus: c}}",
        "line 5: key 'r' is there twice; remove one",
    ),
    "deep mappings": (f"runs: {'{a: ' * 10_000}", "not valid YAML: nested too deeply"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_wrong_configuration_exits_with_code_2(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message = CONFIGS[case]
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert main(["plan", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"cellmill plan: {path}: {message}")
    assert error.count("\n") == 1
    assert len(error) < 500


def test_deeply_nested_options_exit_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = '{"preprocess": ' + "[" * 100_000 + "]" * 100_000 + "}"
    path = tmp_path / "options.json"
    path.write_text(deep)
    files = ["--dataset", "d", "--input", "i", "--out", "o", "--report", "r"]
    for options, name in ((deep, "--options"), (str(path), str(path))):
        assert main(["preprocess", *files, "--options", options]) == 2
        assert (
            capsys.readouterr().err
            == f"cellmill preprocess: {name}: not valid JSON (nested too deeply)\n"
        )


@pytest.mark.parametrize("name", ["pbmc68k", "1k", "2024-run", "e5", "a.b_c"])
def test_common_names_are_valid(name: str) -> None:
    assert check_name(name) == name
