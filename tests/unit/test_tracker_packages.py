"""Trackers with the real packages: what each has of a run that was stopped and resumed is read
back.
"""

import gzip
import json
import struct
import zipfile
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from cellmill.config.parts.trackers import Track
from cellmill.runs.folder import cut_back
from cellmill.track.follower import Follower
from tests.unit.tracked import tracked_run

pytestmark = pytest.mark.full
EXAMPLE = Path(__file__).resolve().parents[2] / "config" / "examples" / "tracking-mlflow.yaml"
SCORES = "/api/public/scores"
LOSSES = [(1, 1.0), (2, 0.5), (3, 0.25), (4, 0.125)]
CURVES = {"loss": LOSSES, "val_loss": [(4, 0.75)]}


def curves(rows: Iterable[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of the losses in rows of scalars with their step."""
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in CURVES}
    for row in rows:
        for name, points in found.items():
            if name in row:
                points.append((row["step"], row[name]))
    return found


def package(name: str, extra: str) -> Any:
    return pytest.importorskip(
        name, reason=f"{name} is not installed: pip install 'cellmill[{extra}]'"
    )


def send(folder: Path, name: str, **options: Any) -> Path:
    """Send a training that was stopped after step 3, went on from step 2 and is done; return its
    training folder.
    """
    train = tracked_run(folder)
    (train.parent / "plan.json").write_text("{}")  # a file at the top of the run's folder
    tracker = Track.model_validate({"to": {name: options}}).to[name]
    for lines, status in ((LOSSES[:3], "stopped"), (LOSSES[2:], "done")):
        with open(train / "metrics.jsonl", "a") as file:
            for step, loss in lines:
                file.write(
                    json.dumps({"step": step, "loss": loss, "resident_gb": [1.0, 4.0, 2.0]}) + "\n"
                )
            if status == "done":
                file.write(json.dumps({"step": 4, "val_loss": 0.75}) + "\n")
        Follower(train, tracker).follow(lambda status=status: status)
        if status == "stopped":
            cut_back(train / "metrics.jsonl", 2)
    return train


def test_tensorboard_has_what_was_written(tmp_path: Path) -> None:
    package("tensorboard", "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train = send(tmp_path, "tensorboard")
    read = EventAccumulator(str(train / "track" / "tensorboard"), {"tensors": 0}).Reload()
    for name, points in CURVES.items():
        assert [(event.step, event.value) for event in read.Scalars(name)] == points
    assert {event.value for event in read.Scalars("resident_gb")} == {4.0}
    texts = {
        tag: read.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        for tag in read.Tags()["tensors"]
    }
    assert json.loads(texts["config"].strip("`json\n"))["fingerprint"] == "f" * 64
    assert '"commit"' in texts["train/run.json"]
    assert texts["status"] == "done"


def test_mlflow_has_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the options of the example."""
    mlflow = package("mlflow", "mlflow")
    package("alembic", "mlflow")
    options = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))["track"]["to"]["mlflow"]
    monkeypatch.chdir(tmp_path)
    train = send(tmp_path, "mlflow", **options)
    uri = f"sqlite:///{tmp_path}/results/mlflow.db"
    client = mlflow.MlflowClient(tracking_uri=uri)
    [run] = client.search_runs([client.get_experiment_by_name("pbmc").experiment_id])
    for name, points in CURVES.items():
        history = client.get_metric_history(run.info.run_id, name)
        assert [(line.step, line.value) for line in history] == points
    assert (run.info.run_name, run.info.status) == ("one", "FINISHED")
    assert {"train.lr": "0.001", "steps": "20"}.items() <= run.data.params.items()
    assert {
        "fingerprint": "f" * 64,
        "mlflow.source.git.commit": "c" * 40,
    }.items() <= run.data.tags.items()
    assert (tmp_path / "results" / "mlartifacts").is_dir()
    kept = Path(client.download_artifacts(run.info.run_id, "train"))
    assert {path.name for path in kept.iterdir()} == {"run.json", "metrics.jsonl"}
    assert (kept / "metrics.jsonl").read_text() == (train / "metrics.jsonl").read_text()
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["plan.json", "train"]


def test_wandb_has_what_was_written(tmp_path: Path) -> None:
    package("wandb", "wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    train = send(tmp_path, "wandb", mode="offline")
    files = sorted((train / "track" / "wandb" / "wandb").glob("offline-run-*/*.wandb"))
    records = []
    for file in files:
        records += [Record.FromString(data) for data in leveldb_records(file)]
    runs = [record.run for record in records if record.HasField("run")]
    assert {(run.run_id, run.display_name, run.project) for run in runs} == {
        (file_id(train), "one", "cellmill")
    }
    rows = []
    for record in records:
        row = {}
        for item in record.history.item:
            row["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
        rows.append(row)
    assert curves(rows) == CURVES
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert (config["commit"], config["options"]["train"]["lr"]) == ("c" * 40, 1e-3)
    kept = [record.artifact for record in records if record.HasField("artifact")]
    kept += [r.request.log_artifact.artifact for r in records if r.request.HasField("log_artifact")]
    names = set()
    for artifact in kept:
        names |= {entry.path for entry in artifact.manifest.contents}
    assert names == {"plan.json", "train/run.json", "train/metrics.jsonl"}


def file_id(train: Path) -> str:
    """Id of the run at its tracker."""
    [record] = (train / "track").glob("*/sent.json")
    return str(json.loads(record.read_text())["id"])


def leveldb_records(path: Path) -> Iterator[bytes]:
    """Records of a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    data = path.read_bytes()
    at = 7
    whole = b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            yield whole
            whole = b""


def test_comet_has_what_was_written(tmp_path: Path) -> None:
    package("comet_ml", "comet")
    train = send(tmp_path, "comet", mode="offline", project="cells")
    files = sorted(
        (train / "track" / "comet").glob("*.zip"), key=lambda path: path.stat().st_mtime_ns
    )
    archives = [zipfile.ZipFile(file) for file in files]
    described = [json.loads(archive.read("experiment.json")) for archive in archives]
    assert {(one["offline_id"], one["project_name"]) for one in described} == {
        (file_id(train), "cells")
    }
    messages = []
    for archive in archives:
        for line in archive.read("messages.json").splitlines():
            messages.append(json.loads(line)["payload"])
    metrics = [message["metric"] for message in messages if "metric" in message]
    assert curves({"step": m["step"], m["metricName"]: m["metricValue"]} for m in metrics) == CURVES
    parameters = [message["param"] for message in messages if "param" in message]
    assert {"train.lr": 1e-3} in [{each["paramName"]: each["paramValue"]} for each in parameters]
    others = [message for message in messages if message.get("key") == "commit"]
    assert [message["value"] for message in others] == ["c" * 40] * 2
    names = [message.get("additional_params", {}).get("fileName") for message in messages]
    assert {name for name in names if name} == {
        "plan.json",
        "train/run.json",
        "train/metrics.jsonl",
    }


def test_langfuse_has_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in server on loopback takes what the package sends: spans by OpenTelemetry, scores as
    JSON.
    """
    package("langfuse", "langfuse")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    posted: list[tuple[str, bytes]] = []

    class StandIn(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            packed = self.headers.get("Content-Encoding") == "gzip"
            posted.append((self.path, gzip.decompress(body) if packed else body))
            answer = b'{"message": "Accepted"}' if self.path == SCORES else b""
            self.send_response(202 if self.path == SCORES else 200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", "pk-one")
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk-two")
    try:
        train = send(tmp_path, "langfuse", host=f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
    sent = [
        ExportTraceServiceRequest.FromString(body)
        for path, body in posted
        if path.endswith("/traces")
    ]
    told = []
    resources = chain.from_iterable(request.resource_spans for request in sent)
    scopes = chain.from_iterable(resource.scope_spans for resource in resources)
    for span in chain.from_iterable(scope.spans for scope in scopes):
        assert span.trace_id.hex() == file_id(train)
        attributes = {item.key: item.value.string_value for item in span.attributes}
        told.append((span.name, attributes))
    lines = [
        (
            json.loads(values["langfuse.observation.input"])["step"],
            json.loads(values["langfuse.observation.output"]),
        )
        for name, values in told
        if name in ("step", "validation")
    ]
    assert (
        curves(sorted(({"step": step} | line for step, line in lines), key=lambda row: row["step"]))
        == CURVES
    )
    runs = [values for name, values in told if name == "one"]
    assert [json.loads(run["langfuse.observation.output"])["status"] for run in runs] == [
        "stopped",
        "done",
    ]
    assert json.loads(runs[0]["langfuse.observation.input"])["options"]["train"]["lr"] == 1e-3
    scores = []
    for path, body in posted:
        if path == SCORES:
            scores += json.loads(body)
    assert {(score["name"], score["value"]) for score in scores} == {
        ("loss", 0.25),
        ("loss", 0.125),
        ("val_loss", 0.75),
    }
    assert len({score["id"] for score in scores}) == 2  # the later one replaces the earlier


def test_trackio_has_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    trackio = package("trackio", "trackio")
    train = send(tmp_path, "trackio", project="cells")
    [run] = trackio.Api().runs("cells")
    rows = trackio.SQLiteStorage.get_logs("cells", run.name)
    assert curves(rows) == CURVES
    assert run.name == f"one-{file_id(train)[:8]}"
    assert run.config["options"]["train"]["lr"] == 1e-3
    assert run.config["fingerprint"] == "f" * 64
