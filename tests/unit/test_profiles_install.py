"""`cellmill profiles install`, and Snakemake's lookup of the links."""

import subprocess
import sys
from pathlib import Path

import pytest

from cellmill.cli import main

NAMES = ["local", "slurm", "slurm-a100", "slurm-h100"]


def install(root: Path) -> int:
    return main(["profiles", "install", "--from", str(root / "profiles")])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path / ".config" / "snakemake"


def test_snakemake_finds_a_linked_profile_by_its_name(root: Path, home: Path, tmp_path: Path) -> None:
    assert install(root) == 0
    assert sorted(path.name for path in home.iterdir()) == NAMES
    code = "import sys; from snakemake.cli import get_profile_dir; print(get_profile_dir('slurm')[1])"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).resolve() == root / "profiles" / "slurm" / "config.yaml"
    assert install(root) == 0
    assert sorted(path.name for path in home.iterdir()) == NAMES, "again, which changes nothing"


@pytest.mark.parametrize("kind", ["folder", "another link", "dangling link"])
def test_existing_files_and_other_links_are_left_alone(
    root: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    home.mkdir(parents=True)
    if kind == "folder":
        (home / "slurm").mkdir()
    else:
        (home / "slurm").symlink_to(tmp_path if kind == "another link" else tmp_path / "nowhere")
    assert install(root) == 2
    assert capsys.readouterr().err.startswith(f"cellmill profiles: {home / 'slurm'}: exists and is ")
    assert [path.name for path in home.iterdir()] == ["slurm"], "others were linked before the refusal"


def test_the_checkouts_own_folder_is_not_linked_into_itself(root: Path, home: Path) -> None:
    home.parent.mkdir()
    home.symlink_to(root / "profiles")
    assert install(root) == 0
    assert not any(path.is_symlink() for path in (root / "profiles").iterdir())


def test_the_undo_command_works_with_a_space_in_the_path(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "my settings"))
    assert install(root) == 0
    undo = capsys.readouterr().out.splitlines()[-1].removeprefix("to undo: ")
    subprocess.run(["sh", "-c", undo], check=True)
    assert list((tmp_path / "my settings" / "snakemake").iterdir()) == []
    assert (root / "profiles" / "slurm" / "config.yaml").exists()


def test_a_profile_called_default_and_a_folder_without_profiles_are_refused_with_the_remedy(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profiles", "install", "--from", str(tmp_path)]) == 2
    remedy = "run this at the root of a checkout, or set --from FOLDER"
    assert capsys.readouterr().err == f"cellmill profiles: {tmp_path}: has no profiles; {remedy}\n"
    (tmp_path / "profiles" / "default").mkdir(parents=True)
    (tmp_path / "profiles" / "default" / "config.yaml").write_text("cores: 1\n")
    assert install(tmp_path) == 2
    assert capsys.readouterr().err == (
        f"cellmill profiles: {tmp_path}/profiles/default: Snakemake loads a profile of that name unasked, and it "
        "overrides --profile key by key; rename it\n"
    )
    assert not home.exists()
