"""Logging: JSON for machines, a console for people, and no prompt in either unless it is asked for."""

import io
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from antiphon.runtime import log

SECRET = "my password is swordfish"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    before = dict(log._setup)
    theirs = structlog.get_config()
    yield
    log._setup.clear()
    log._setup.update(before)
    structlog.configure(**theirs)


class Captured:
    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self.capsys = capsys
        self.text = ""

    def getvalue(self) -> str:
        self.text += self.capsys.readouterr().err
        return self.text


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> Captured:
    return Captured(capsys)


def lines(stderr: Captured) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stderr.getvalue().splitlines()]


def test_machines_get_one_json_object_a_line(stderr: Captured) -> None:
    log.configure("info", "json")
    logger = log.logger(cell="front")
    logger.info("listening", address="tcp://127.0.0.1:1")
    logger.bind(actor="gateway").warning("odd", value=b"\xff", kind=int)
    first, second = lines(stderr)
    assert (first["event"], first["level"], first["cell"], first["address"]) == (
        "listening", "info", "front", "tcp://127.0.0.1:1")
    assert first["timestamp"].endswith("Z")
    assert (second["actor"], second["value"]) == ("gateway", "b'\\xff'")


def test_a_message_of_many_lines_stays_on_one(stderr: Captured) -> None:
    log.configure("info", "json")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.logger().error("failed", exc_info=True)
    assert "ValueError: two" in lines(stderr)[0]["exception"]


def test_people_get_a_console(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    log.configure()
    log.logger(cell="front").info("listening", text=SECRET)
    assert "listening" in terminal.getvalue()
    assert "\x1b[" in terminal.getvalue(), "colours on a terminal"
    assert SECRET not in terminal.getvalue()
    with pytest.raises(json.JSONDecodeError):
        json.loads(terminal.getvalue())


def test_a_console_in_a_file_has_no_colours(stderr: Captured) -> None:
    log.configure("info", "console")
    log.logger().info("listening")
    assert "\x1b[" not in stderr.getvalue()


def test_auto_is_json_where_nobody_looks(stderr: Captured) -> None:
    log.configure("info", "auto")
    log.logger().info("listening")
    assert lines(stderr)[0]["event"] == "listening"


def test_levels_below_the_wanted_one_cost_nothing_and_say_nothing(stderr: Captured) -> None:
    log.configure("warning", "json")
    logger = log.logger()
    logger.debug("a")
    logger.info("b")
    logger.warning("c")
    logger.error("d")
    assert [line["event"] for line in lines(stderr)] == ["c", "d"]


@pytest.mark.parametrize("key", sorted(log.PRIVATE))
@pytest.mark.parametrize("style", ["json", "console"])
def test_users_text_is_hidden_by_default(stderr: Captured, key: str, style: str) -> None:
    log.configure("debug", style)
    logger = log.logger()
    logger.info("plain", **{key: SECRET})
    logger.bind(**{key: [SECRET]}).info("bound")
    logger.info("nested", facts={"request": [{key: SECRET}]}, pair=({key: {"x": SECRET}},))
    logger.info("packed", **{key: SECRET.encode()})
    assert "swordfish" not in stderr.getvalue()
    assert "24 hidden" in stderr.getvalue()


def test_counts_are_shown(stderr: Captured) -> None:
    log.configure("info", "json")
    log.logger().info("done", tokens=12, ids=None, text=0.5)
    assert (lines(stderr)[0]["tokens"], lines(stderr)[0]["ids"], lines(stderr)[0]["text"]) == (12, None, 0.5)


def test_what_lies_too_deep_to_be_looked_at_is_hidden(stderr: Captured) -> None:
    log.configure("info", "json")
    value: Any = {"text": SECRET}
    for _ in range(20):
        value = {"a": [value]}
    log.logger().info("deep", value=value)
    assert "swordfish" not in stderr.getvalue()


def test_prompts_are_logged_when_asked_for(stderr: Captured) -> None:
    log.configure("info", "json", prompts=True)
    log.logger().info("x", text=SECRET)
    assert lines(stderr)[0]["text"] == SECRET


def test_redaction_does_not_change_what_was_logged(stderr: Captured) -> None:
    log.configure("info", "json")
    facts = {"text": SECRET, "inner": [{"ids": [1, 2]}]}
    log.logger().info("x", facts=facts)
    assert facts == {"text": SECRET, "inner": [{"ids": [1, 2]}]}


def test_an_embedding_programs_settings_stay_as_they_are(stderr: Captured) -> None:
    before = structlog.get_config()
    log.configure("error", "json")
    log.logger().error("ours")
    assert structlog.get_config() == before


def test_in_a_process_of_ours_plugins_that_use_structlog_are_redacted_too(stderr: Captured) -> None:
    log.configure("info", "json", everywhere=True)
    structlog.get_logger("a plugin").info("theirs", prompt=SECRET)
    assert lines(stderr)[0]["prompt"] == "<24 hidden>"


def test_a_logger_follows_stderr(monkeypatch: pytest.MonkeyPatch, stderr: Captured) -> None:
    log.configure("info", "json")
    logger = log.logger()
    logger.info("one")
    later = io.StringIO()
    monkeypatch.setattr(sys, "stderr", later)
    logger.info("two")
    assert "two" not in stderr.getvalue()
    assert "two" in later.getvalue()


@pytest.mark.parametrize("gone", ["closed", "none", "broken"])
def test_a_log_that_nobody_reads_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    log.configure("info", "json")
    logger = log.logger()
    stream: io.StringIO | None = Broken() if gone == "broken" else io.StringIO()
    if gone == "closed" and stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stderr", None if gone == "none" else stream)
    logger.info("lost")
    log.configure()
    log.logger().error("lost too")


def test_a_logger_works_before_anybody_has_configured(stderr: Captured) -> None:
    log._setup.clear()
    log.logger().info("early", text=SECRET)
    assert "early" in stderr.getvalue()
    assert "swordfish" not in stderr.getvalue()


def test_lines_of_several_processes_do_not_mix() -> None:
    """A line leaves in one write: this is what keeps the lines of cells apart that share a stderr."""
    writes: list[bytes] = []

    class Raw(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            writes.append(bytes(data))
            return len(data)

    before, sys.stderr = sys.stderr, io.TextIOWrapper(io.BufferedWriter(Raw()), line_buffering=True)
    try:
        log.configure("info", "json")
        log.logger().info("x" * 500)
    finally:
        sys.stderr = before
    assert len(writes) == 1
    assert writes[0].endswith(os.linesep.encode())
