"""The report in headless Chromium: every figure is drawn, nothing is an error, sorting, search and
theme sizes.
"""

import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reported import make_corpus, make_run

from cellmill.config.options import ReportOptions
from cellmill.report.drawing import page_charts
from cellmill.stages import report
from tests.distributed.command import wait_for

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not (shutil.which("chromedriver") and shutil.which("chromium")),
        reason="no chromium with chromedriver",
    ),
]
FLAGS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"),
    *("disable-background-networking", "disable-component-update", "hide-scrollbars"),
)


class Browser:
    """A session of chromedriver, by W3C WebDriver over HTTP."""

    def __init__(self, port: int, profile: Path) -> None:
        self._url = f"http://127.0.0.1:{port}"
        flags = [f"--{flag}" for flag in FLAGS] + [f"--user-data-dir={profile}"]
        options = {"args": flags, "binary": shutil.which("chromium")}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        made = self._post("/session", {"capabilities": {"alwaysMatch": wanted}})
        self._url += f"/session/{made['sessionId']}"

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path, width: int) -> None:
        self._post("/window/rect", {"width": width, "height": 900})
        self._post("/url", {"url": page.as_uri()})

    def run(self, script: str) -> Any:
        return self._post("/execute/sync", {"script": script, "args": []})

    def close(self) -> None:
        """End Chromium, which would outlive chromedriver."""
        urllib.request.urlopen(
            urllib.request.Request(self._url, method="DELETE"), timeout=60
        ).close()

    def errors(self) -> list[str]:
        """What the console said since the last call, at level SEVERE."""
        return [
            e["message"]
            for e in self._post("/se/log", {"type": "browser"})
            if e["level"] == "SEVERE"
        ]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL)
    try:
        session = wait_for(lambda: started(port, tmp_path_factory.mktemp("chromium")))
        yield session
        session.close()
    finally:
        process.terminate()
        process.wait()


def started(port: int, profile: Path) -> Browser | None:
    try:
        return Browser(port, profile)
    except urllib.error.HTTPError as error:
        pytest.fail(error.read().decode())
    except OSError:
        return None


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    runs = [make_run(folder / "runs" / "first"), make_run(folder / "runs" / "second")]
    options = ReportOptions.model_validate({"report": {}})
    with pytest.MonkeyPatch.context() as patch:
        # the script unpacks the deferred details
        patch.setattr(page_charts, "MAX_RUNS_OF_SMALL_PAGE", 1)
        report.report(
            options=options,
            runs=runs,
            corpora=[make_corpus(folder / "pbmc")],
            out=folder / "index.html",
        )
    return folder / "index.html"


@pytest.mark.parametrize("width", [1280, 500])  # Chromium makes no window narrower than 500
def test_every_figure_is_drawn_without_an_error(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width)
    n = browser.run("return document.querySelectorAll('figure.chart').length")
    assert n > 5
    for number in range(n):
        shown = f"const f = document.querySelectorAll('figure.chart')[{number}];"
        browser.run(f"{shown} f.scrollIntoView()")
        live = "f.classList.contains('drawn') && !!f.querySelector('.live svg, .live canvas')"
        wait_for(lambda s=f"{shown} return {live}": browser.run(s))
        widths = "[f, f.querySelector('.live svg, .live canvas')].map((e) => e.clientWidth)"
        figure_width, chart_width = browser.run(f"{shown} return {widths}")
        assert figure_width / 2 < chart_width <= figure_width
    assert browser.errors() == []
    assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
    cut = "return [...document.querySelectorAll('.wide')].filter((t) => t.scrollWidth > t.clientWidth).length"
    assert width < 1280 or browser.run(cut) == 0
    sections = browser.run(
        "return [...document.querySelectorAll('main > section')].map((s) => s.id)"
    )
    assert sections == ["overview", "training", "data", "evaluation", "cost", "provenance"]


def test_tables_can_be_sorted_and_searched(browser: Browser, page: Path) -> None:
    browser.open(page, 1280)
    assert "data-deferred" in page.read_text(encoding="utf-8")
    wait_for(lambda: browser.run("return !document.querySelector('[data-deferred]')"))
    shown = browser.run("return document.getElementById('provenance').textContent")
    assert "train.lr" in shown
    find = "const t = [...document.querySelectorAll('#evaluation table.sortable')].find((t) => t.rows.length > 3);"
    column = "[...t.tBodies[0].rows].map((r) => parseFloat(r.cells[1].textContent))"
    before = browser.run(f"{find} return {column}")
    assert before != sorted(before)
    down = browser.run(
        f"{find} t.tHead.rows[0].cells[1].querySelector('button').click(); return {column}"
    )
    up = browser.run(
        f"{find} t.tHead.rows[0].cells[1].querySelector('button').click(); return {column}"
    )
    assert (down, up) == (sorted(before, reverse=True), sorted(before))
    assert (
        browser.run(f"{find} return t.tHead.rows[0].cells[1].getAttribute('aria-sort')")
        == "ascending"
    )
    units = "return ['100 %', '95 %', '12 min', '40 s', '2.1 days', '0.9 ± 0.1', 'x', '1,200', '–'].sort("
    in_order = browser.run(f"{units}(a, b) => compareCells(a, b, false))")
    numbers = [text for text in in_order if text not in ("x", "–")]
    assert numbers == ["0.9 ± 0.1", "40 s", "95 %", "100 %", "12 min", "1,200", "2.1 days"]
    assert in_order[-1] == "–"
    assert in_order[-2] == "x"
    mixed = "return ['2', '1x', '–', '10'].sort((a, b) => compareCells(a, b, {}))"
    assert browser.run(mixed.format("false")) == ["2", "10", "1x", "–"]
    assert browser.run(mixed.format("true")) == ["10", "2", "1x", "–"]
    assert browser.run("return Number.isNaN(toNumber(''))")
    rows = "[...document.querySelectorAll('#overview tbody tr')].filter((r) => !r.hidden).map((r) => r.innerText)"
    type_in = "const s = document.getElementById('search'); s.value = 'second'; s.dispatchEvent(new Event('input'));"
    found = browser.run(f"{type_in} return {rows}")
    assert found
    assert all("second" in name for name in found)
    colour = "return getComputedStyle(document.body).backgroundColor"
    pressed = "return document.getElementById('theme').getAttribute('aria-pressed')"
    is_dark = browser.run("return matchMedia('(prefers-color-scheme: dark)').matches")
    assert browser.run(pressed) == ("true" if is_dark else "false")
    first = browser.run(colour)
    second = browser.run(f"document.getElementById('theme').click(); {colour}")
    assert first != second
    assert browser.run(pressed) == ("false" if is_dark else "true")
    assert browser.errors() == []


def test_tables_can_be_sorted_without_a_payload(
    browser: Browser, page: Path, tmp_path: Path
) -> None:
    html = page.read_text("utf-8")
    before, payload, after = re.split(r'(?<=id="payload">)(.*?)(?=</script>)', html)
    assert len(payload) > 1000
    damaged = tmp_path / "index.html"
    damaged.write_text(before + after, encoding="utf-8")
    browser.open(damaged, 1280)
    wait_for(lambda: browser.run("return !!document.querySelector('table.sortable th button')"))
    hidden = "return ['theme', 'search'].map((id) => document.getElementById(id).hidden)"
    assert browser.run(hidden) == [False, False]
    assert browser.errors() != []
