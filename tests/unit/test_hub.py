"""Models on a hub: a stand-in server on loopback that takes commits and downloads."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest

import cellmill
from cellmill.commands.hub_card import write_card
from tests.unit.exported import export_model, make_corpus
from tests.unit.reported import LOSS, make_run, write

if find_spec("huggingface_hub") is None:
    pytest.skip("the package huggingface_hub is not installed", allow_module_level=True)

pytestmark = pytest.mark.full
COMMIT = "c" * 40


class _Hub(BaseHTTPRequestHandler):
    """Repositories as {name: {path: bytes}}; tokens and requests of each call."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Stay silent."""

    def _answer(self, body: bytes | dict[str, Any], status: int = 200, **headers: str) -> None:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_POST(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server.tokens.append(self.headers.get("Authorization"))
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            server.repos.setdefault(name, {})
            server.private[name] = asked.get("visibility") == "private" or asked.get(
                "private", False
            )
            self._answer({"url": f"{server.url}/{name}", "name": name, "id": name})
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            files = [file["path"] for file in json.loads(body)["files"]]
            small = {"uploadMode": "regular", "shouldIgnore": False}
            self._answer({"files": [{"path": file} | small for file in files]})
        elif self.path.endswith("/commit/main"):
            name = "/".join(self.path.split("/")[3:5])
            for entry in map(json.loads, body.splitlines()):
                if entry["key"] == "file":
                    server.repos[name][entry["value"]["path"]] = base64.b64decode(
                        entry["value"]["content"]
                    )
                elif entry["key"] == "deletedFile":
                    del server.repos[name][entry["value"]["path"]]
            self._answer({"commitUrl": f"{server.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            self._answer({"error": self.path}, 404)

    def do_GET(self) -> None:
        server: Any = self.server
        server.tokens.append(self.headers.get("Authorization"))
        parts = self.path.split("?")[0].strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        repo = server.repos.get(name)
        if repo is None:
            self._answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        elif parts[0] == "api" and "tree" in parts:
            listed = [
                {"type": "file", "path": path, "size": len(repo[path]), "oid": "0" * 40}
                for path in repo
            ]
            self._answer(json.dumps(listed).encode())
        elif parts[0] == "api":
            siblings = [{"rfilename": path} for path in repo]
            private = server.private.get(name, False)
            self._answer({"id": name, "sha": COMMIT, "siblings": siblings, "private": private})
        else:
            path = "/".join(parts[4:])
            server.asked.append(path)
            data = repo[path]
            self._answer(data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=COMMIT)

    do_HEAD = do_GET


@pytest.fixture(scope="module")
def hub() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.repos = {}
    server.private = {}
    server.tokens = []
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, simulated: Path) -> Path:
    """A run with its model, and what evaluate and train wrote of it."""
    results = tmp_path_factory.mktemp("results")
    corpus = make_corpus(results / "corpora" / "sim", simulated)
    folder = make_run(results / "runs" / "one")
    export_model(folder / "model", corpus["vocabulary"])
    (folder / "model" / "README.md").write_text("---\nlibrary_name: cellmill\n---\n# A model\n")
    (folder / "model" / "run.pkl").write_bytes(b"never")
    (folder / "model" / "cells.digest").write_bytes(b"digests")
    record = {
        "manifest": str(corpus["manifest"]),
        "init_from": None,
        "nodes": "1",
        "nproc_per_node": 2,
    }
    record |= {
        "options": {"train": {"lr": 0.5}, "track": {"to": {}}},
        "environment": {"torch": "2.13"},
    }
    write(folder / "train/run.json", record)
    metrics = folder / "evaluate/metrics.json"
    weights = json.loads((folder / "model" / "config.json").read_text())["weights_sha256"]
    write(
        metrics,
        metrics.read_text()
        .replace("beef" * 16, weights)
        .replace('"all genes"', '"all|genes"')
        .replace("all genes +", "all|genes +"),
    )
    return folder


DRIVER = """
import contextlib, io, json, os, sys
from cellmill.cli import main
done = []
for words, token in json.loads(sys.argv[1]):
    os.environ.pop("HF_TOKEN", None)
    os.environ |= {"HF_TOKEN": token} if token else {}
    texts = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(texts[0]), contextlib.redirect_stderr(texts[1]):
        code = main(words)
    done.append([code, *(text.getvalue() for text in texts)])
print("DONE" + json.dumps(done))
"""


def _cellmill(hub: Any, home: Path, *calls: tuple[list[str], str | None]) -> list[Any]:
    """Exit code, stdout and stderr of commands, each with its token, in one process that knows this
    hub alone.
    """
    done = _python(hub, home, DRIVER, json.dumps(calls))
    return json.loads(done.partition("DONE")[2])


def _python(hub: Any, home: Path, *words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "*",
    }
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    # huggingface_hub 2.4 uploads by a deprecated argument of httpx
    environment.pop("PYTHONWARNINGS", None)
    command = [sys.executable, "-c", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_pushed_model_is_pulled_unchanged(hub: Any, run_folder: Path, tmp_path: Path) -> None:
    model = run_folder / "model"
    out = tmp_path / "pulled"
    push = [
        "push",
        "--model",
        str(model),
        "--repo",
        "me/sim",
        "--licence",
        "apache-2.0",
        "--private",
    ]
    pull = ["pull", "me/sim@main", "--out", str(out)]
    without, pushed, pulled = _cellmill(
        hub, tmp_path / "home", (push, None), (push, "hf_secret"), (pull, None)
    )
    assert (without[0], without[2].count("\n")) == (2, 1)
    assert "HF_TOKEN is not set" in without[2]
    assert pushed[0] == 0, pushed[2]
    assert {token for token in hub.tokens if token} == {"Bearer hf_secret"}
    assert hub.private == {"me/sim": True}
    taken = ("cells.digest", "config.json", "model.safetensors", "vocabulary.tsv")
    assert set(hub.repos["me/sim"]) == {"README.md", "metrics.json", *taken}
    card = hub.repos["me/sim"]["README.md"].decode()
    assert card.startswith("---\nlibrary_name: cellmill\nlicense: apache-2.0\n---\n# A model\n")
    assert "\npbmc: 95 cells (heldout).\n\n| probe | accuracy | macro_f1 |\n|---|---|---|\n" in card
    assert f"| all\\|genes + logistic regression | 0.840 | 0.740 |\n\n{LOSS}\n" in card
    assert re.search(
        r"^\| simulated \| not said \| not said \| `[0-9a-f]{64}` \| 600 \|$", card, re.M
    )
    assert "runs:\n  one:\n    corpus: sim\n    train:\n      lr: 0.5\n```\n" in card
    assert "secret" not in card + pushed[1] + pushed[2]

    assert pulled[:2] == [0, f"me/sim@main at {COMMIT[:12]} -> {out}\n"], pulled[2]
    assert hub.tokens[-1] is None
    for file in taken:
        assert (out / file).read_bytes() == (model / file).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["pulled"]


def test_a_model_of_the_hub_is_loaded_by_its_name(
    hub: Any, run_folder: Path, simulated: Path, tmp_path: Path
) -> None:
    hub.repos["me/named"] = {
        path.name: path.read_bytes() for path in (run_folder / "model").iterdir()
    }
    assert "run.pkl" in hub.repos["me/named"]
    code = (
        f"import anndata, cellmill, numpy; adata = anndata.read_h5ad({str(simulated)!r})[:9]\n"
        f"numpy.save({str(tmp_path / 'a.npy')!r}, cellmill.load('hf://me/named').embed(adata))"
    )
    _python(hub, tmp_path / "home", code)
    expected = cellmill.load(run_folder / "model").embed(ad.read_h5ad(simulated)[:9])
    assert (np.load(tmp_path / "a.npy") == expected).all()
    assert "model.safetensors" in hub.asked
    assert "run.pkl" not in hub.asked


def test_a_pulled_model_keeps_no_file_of_an_earlier_one(
    hub: Any, run_folder: Path, tmp_path: Path
) -> None:
    files = ("config.json", "model.safetensors", "vocabulary.tsv")
    model = run_folder / "model"
    hub.repos["me/plain"] = {name: (model / name).read_bytes() for name in files}
    over_model = tmp_path / "pulled"
    over_project = tmp_path / "project"
    own = [over_model / "notes.txt", over_project / "README.md"]
    earlier = [
        over_model / "config.json",
        over_model / "cells.digest",
        over_model / "adapter" / "adapter_model.safetensors",
    ]
    for path in (*own, *earlier):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("earlier")
    folders = (over_model, over_project)
    commands = [(["pull", "me/plain", "--out", str(out)], None) for out in folders]
    for done in _cellmill(hub, tmp_path / "home", *commands):
        assert done[0] == 0, done[2]
    left = {path for out in folders for path in out.rglob("*") if path.is_file()}
    assert left == {*own, *(out / name for out in folders for name in files)}


def test_a_pushed_model_keeps_no_file_of_an_earlier_one(
    hub: Any, run_folder: Path, tmp_path: Path
) -> None:
    own = {"notes.txt": b"mine", "adapter/notes.txt": b"mine"}
    earlier = ("adapter/adapter_model.safetensors", "ridge.safetensors", "config.json")
    hub.repos["me/again"] = own | dict.fromkeys(earlier, b"earlier")
    words = ["push", "--model", str(run_folder / "model"), "--repo", "me/again", "--licence", "mit"]
    [done] = _cellmill(hub, tmp_path / "home", (words, "hf_secret"))
    assert done[0] == 0, done[2]
    found = hub.repos["me/again"]
    assert {name: found[name] for name in own} == own
    assert b"earlier" not in found.values()
    taken = {"README.md", "metrics.json", "cells.digest", "config.json"}
    assert found.keys() - own.keys() == taken | {"model.safetensors", "vocabulary.tsv"}


def test_a_card_of_another_export_has_no_results(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "one"
    shutil.copytree(run_folder, folder)
    metrics = folder / "evaluate" / "metrics.json"
    assert write_card(folder / "model", "mit")[1] == metrics
    write(metrics, json.loads(metrics.read_text()) | {"model": {"digest": "beef" * 16}})
    card, results = write_card(folder / "model", "mit")
    assert results is None
    assert "\n## Results\nNot evaluated.\n" in card
    line = f"warning: {metrics} is of other weights than {folder / 'model'}: left out"
    assert line in capsys.readouterr().out


def test_a_card_has_its_data_from_any_working_directory(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    results = tmp_path / "project" / "results"
    shutil.copytree(run_folder.parents[1], results)
    run_json = results / "runs/one/train/run.json"
    record = json.loads(run_json.read_text())
    inside = Path(record["manifest"]).relative_to(run_folder.parents[1])
    write(run_json, record | {"manifest": str("results" / inside)})
    card, _ = write_card(results / "runs/one/model", "mit")
    assert "| simulated | not said | not said |" in card


def test_a_folder_without_a_model_leaves_nothing_on_the_hub(
    hub: Any, run_folder: Path, tmp_path: Path
) -> None:
    files = {path.name: path.read_bytes() for path in (run_folder / "model").iterdir()}
    hub.repos["me/empty"] = {"README.md": b"a"}
    damaged = bytearray(files["model.safetensors"])
    damaged[-3] ^= 1
    hub.repos["me/bad"] = files | {"model.safetensors": bytes(damaged)}
    wrong = {
        "me/none": r"me/none: the hub does not do it: .*404",
        "none": r"none: expected the name of a model on the hub, owner/name",
        "me/empty": r"me/empty: it has no config\.json; expected a model that `cellmill push` uploaded",
        "me/bad": r"me/bad: it is not a model of cellmill: model\.safetensors: its SHA-256 is \w+, config\.json has",
    }
    calls = [(["pull", name, "--out", str(tmp_path / "out")], None) for name in wrong]
    for (code, _, error), message in zip(_cellmill(hub, tmp_path / "home", *calls), wrong.values()):
        assert (code, error.count("\n")) == (2, 1), error
        assert re.match(f"cellmill pull: {message}", error), error
    assert {path.name for path in tmp_path.iterdir()} <= {"home"}
