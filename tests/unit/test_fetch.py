"""Inputs at a URL: fetched once by many, whole or not at all, checked, and without credentials in
any message.
"""

import errno
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import fsspec
import pytest
import scipy.sparse as sp

from cellmill.cli import main
from cellmill.data.inputs import fetch
from cellmill.data.inputs.fetch import fetch_url, local_input, origin_of, state_of
from cellmill.data.inputs.formats import open_counts
from cellmill.errors import ConfigError, DataError
from tests.unit.test_inputs import h5ad, in_zarr, read


class Server(ThreadingHTTPServer):
    """Files by path; `asked` has every request, `slow_s` delays an answer, `missing` bytes are not
    sent.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = files
        self.asked = list[str]()
        self.slow_s = 0.0
        self.missing = 0

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Answer(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        content = self.server.files.get(self.path.partition("?")[0][1:])
        time.sleep(self.server.slow_s)
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        self.wfile.write((content or b"")[: len(content or b"") - self.server.missing])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def content(counts: sp.csr_matrix, tmp_path: Path) -> bytes:
    return h5ad(counts, tmp_path / "plain.h5ad").read_bytes()


@pytest.fixture
def server(content: bytes) -> Iterator[Server]:
    with Server({"cells.h5ad": content}) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server
        server.shutdown()


def test_a_url_of_each_protocol_is_read_as_the_file(
    counts: sp.csr_matrix, content: bytes, server: Server, tmp_path: Path
) -> None:
    with fsspec.open("memory://bucket/cells.h5ad", "wb") as file:
        file.write(content)
    stored = in_zarr(counts, tmp_path)
    memory = fsspec.filesystem("memory")
    memory.put(str(stored), "/bucket/", recursive=True)
    cache = tmp_path / "cache"
    for url in (
        server.url("cells.h5ad"),
        "memory://bucket/cells.h5ad",
        f"file://{tmp_path}/plain.h5ad",
        "memory://bucket/cells.zarr",
        f"file://{stored}",
    ):
        path = local_input(url, cache)
        assert (read(path) != counts).nnz == 0, url
        found = fetch_url(url, cache)
        assert origin_of(path) == {
            "file": path.name,
            "sha256": found.sha256,
            "bytes": found.n_bytes,
        }
    assert origin_of(tmp_path / "plain.h5ad")["sha256"] == hashlib.sha256(content).hexdigest()
    assert server.asked == ["/cells.h5ad"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of moto
def test_an_s3_bucket_uses_credentials_of_the_environment(
    counts: sp.csr_matrix, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3fs = pytest.importorskip("s3fs", reason="the extra s3 is not installed")
    moto = pytest.importorskip("moto.server", reason="moto, a local S3, is not installed")
    stored = in_zarr(counts, tmp_path)
    local = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    local.start()
    try:
        host, port = local.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ann")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
        bucket = s3fs.S3FileSystem(skip_instance_cache=True)
        bucket.mkdir("bucket")
        bucket.pipe("bucket/a/cells.h5ad", content)
        bucket.put(str(stored), "bucket/a/cells.zarr", recursive=True)
        cache = tmp_path / "cache"
        for name in ("cells.h5ad", "cells.zarr"):
            assert (read(local_input(f"s3://bucket/a/{name}", cache)) != counts).nnz == 0
        for missing in ("bucket/a/none.h5ad", "none/cells.h5ad"):
            with pytest.raises(DataError, match=rf"^s3://{missing}: no such file$"):
                fetch_url(f"s3://{missing}", cache)
        s3fs.S3FileSystem.clear_instance_cache()
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        with pytest.raises(
            DataError, match=r"^s3://bucket/b\.h5ad: cannot be fetched: "
        ) as refused:
            fetch_url("s3://bucket/b.h5ad", cache)
        assert "hunter2" not in str(refused.value)
    finally:
        local.stop()
        s3fs.S3FileSystem.clear_instance_cache()


def test_many_jobs_that_ask_at_once_fetch_once(
    server: Server, content: bytes, tmp_path: Path
) -> None:
    server.slow_s = 0.5
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: fetch_url(server.url("cells.h5ad"), tmp_path), range(6)))
    assert server.asked == ["/cells.h5ad"]
    assert len({one.path for one in found}) == 1
    assert found[0].path.read_bytes() == content


def test_a_copy_of_another_node_is_kept_without_locks(
    counts: sp.csr_matrix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its jobs may read it, and a Zarr folder without some of its chunks has zeros."""
    stored = in_zarr(counts, tmp_path)
    cache = tmp_path / "cache"
    download = fetch._download
    others = []

    def download_twice(address: str, copy: Path) -> None:
        download(address, copy)
        if not others:
            others.append(None)  # the other node's download is the plain one
            others[0] = state_of(fetch_url(address, cache).path)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr(fetch.fcntl, "flock", refuse)
    monkeypatch.setattr(fetch, "_download", download_twice)
    path = fetch_url(f"file://{stored}", cache).path
    assert others == [state_of(path)]
    assert sorted(file.name for file in path.parent.iterdir()) == [
        path.name,
        "fetched.json",
        "lock",
    ]


def test_a_killed_fetch_is_taken_over(server: Server, content: bytes, tmp_path: Path) -> None:
    first = fetch_url(server.url("cells.h5ad"), tmp_path).path
    folder = first.parent
    first.unlink()
    (folder / "fetched.json").unlink()
    killed = folder / ".incomplete-0badc0de" / "cells.h5ad"
    killed.parent.mkdir()
    killed.write_bytes(content[:1000])
    for left in (killed, killed.parent):
        os.utime(left, (time.time() - 7200,) * 2)
    assert fetch_url(server.url("cells.h5ad"), tmp_path).path.read_bytes() == content
    assert sorted(file.name for file in folder.iterdir()) == ["cells.h5ad", "fetched.json", "lock"]
    first.write_bytes(content[:1000])  # and a copy that was cut is not the file
    assert fetch_url(server.url("cells.h5ad"), tmp_path).path.read_bytes() == content


def test_an_incomplete_fetch_leaves_no_file(server: Server, content: bytes, tmp_path: Path) -> None:
    def message(url: str) -> str:
        with pytest.raises((DataError, ConfigError)) as error:
            fetch_url(url, tmp_path / "cache")
        assert [file for file in (tmp_path / "cache").rglob("*.h5ad*") if file.is_file()] == []
        assert "\n" not in str(error.value)
        return str(error.value)

    url, none = server.url("cells.h5ad"), server.url("none.h5ad")
    assert message(none) == f"{none}: cannot be fetched: HTTPError: HTTP Error 404: Not Found"
    server.missing = 100
    assert f"{url}: cannot be fetched: " in message(url)
    server.missing = 0
    wanted = "0" * 64
    got = hashlib.sha256(content).hexdigest()
    assert message(f"{url}#sha256={wanted}") == f"{url}: expected sha256 {wanted}, got {got}"
    assert "expected #sha256= and 64 hexadecimal digits" in message(f"{url}#sha256=12")
    assert message("memory://bucket/none.h5ad").endswith("none.h5ad: no such file")
    assert (
        message("gss://bucket/x.h5ad")
        == "gss://bucket/x.h5ad: unknown protocol 'gss'; did you mean 'gs'?"
    )
    if find_spec("s3fs") is None:
        missing = "a package for s3:// is missing: pip install 'cellmill[s3]'"
        assert message("s3://bucket/x.h5ad") == f"s3://bucket/x.h5ad: {missing}"
    assert fetch_url(f"{url}#sha256={got}", tmp_path / "other").path.read_bytes() == content


def test_an_input_is_the_same_under_another_inode(tmp_path: Path) -> None:
    """As file systems in user space number a file anew, which they forgot."""
    first, second = tmp_path / "a.h5ad", tmp_path / "b.h5ad"
    first.write_bytes(b"cells")
    shutil.copy2(first, second)
    before = state_of(first)
    second.replace(first)
    assert state_of(first) == before
    first.write_bytes(b"other")
    assert state_of(first) != before


def test_no_message_has_credentials(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = "example.org/cells.h5ad"
    files = ["--out", f"{tmp_path}/cells.fetched.json", "--cache", str(tmp_path)]
    for url in (
        f"ann:hunter2@{place}",
        f"{place}?X-Amz-Signature=hunter2&part=1",
        f"{place}?sig=hunter2",
    ):
        assert main(["fetch", "--input", f"https://{url}", *files]) == 2
        printed = capsys.readouterr().err
        assert f"https://{place}: has credentials (" in printed
        assert "hunter2" not in printed
    with pytest.raises(DataError) as failed:
        fetch_url(server.url("none.h5ad?part=hunter2"), tmp_path)
    assert "hunter2" not in str(failed.value)


def test_a_record_fetches_its_copy_again(
    server: Server, counts: sp.csr_matrix, content: bytes, tmp_path: Path
) -> None:
    record = tmp_path / "cells.fetched.json"
    cache = tmp_path / "cache"
    assert (
        main(
            [
                "fetch",
                "--input",
                server.url("cells.h5ad"),
                "--out",
                str(record),
                "--cache",
                str(cache),
            ]
        )
        == 0
    )
    path = local_input(record, cache)
    with open_counts(path) as reader:
        assert reader.n_obs == counts.shape[0]
    path.unlink()
    assert local_input(record, cache).read_bytes() == content
    path.unlink()
    server.files["cells.h5ad"] = content[:-1]
    with pytest.raises(DataError, match="is another file than when"):
        local_input(record, cache)
