"""Logging through structlog: a console for people, JSON lines for machines, prompts redacted by default.

It does not know what is logged; it hides the values of the keys that carry users' text.
"""

import contextlib
import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import structlog

PRIVATE = frozenset({
    "prompt", "prompts", "text", "texts", "ids", "prompt_ids", "tokens", "messages", "content", "output", "completion",
})
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
DEEPEST = 6  # levels of nested values that are looked through; what lies deeper is hidden


def configure(level: str = "info", style: str = "auto", prompts: bool = False, everywhere: bool = False) -> None:
    """Set up the loggers made from now on, on stderr. ``style``: console, json, or auto (console on a terminal).

    ``everywhere``: also structlog's own defaults, in a process that is ours: what plugins log is redacted too.
    """
    json_lines = style == "json" or (style == "auto" and not _terminal())
    chain: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if not prompts:
        chain.append(redact)
    if json_lines:
        chain += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=repr)]
    else:
        chain.append(structlog.dev.ConsoleRenderer(colors=_terminal()))
    wrapper = structlog.make_filtering_bound_logger(LEVELS.get(level, logging.INFO))
    _setup.update(processors=chain, wrapper_class=wrapper)
    if everywhere:
        structlog.configure(logger_factory=lambda *_: structlog.WriteLogger(_STDERR), cache_logger_on_first_use=False,
                            **_setup)


def redact(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace users' text by its length, at any depth. Numbers stay: a count of tokens tells nobody's secret."""
    for key, value in event.items():
        event[key] = _hidden(value) if key in PRIVATE else _within(value, DEEPEST)
    return event


def logger(**bound: Any) -> Any:
    """Logger bound to a cell or an actor. The embedding program's own structlog settings stay as they are."""
    if not _setup:
        configure()
    return structlog.wrap_logger(structlog.WriteLogger(_STDERR), **_setup).bind(**bound)


def _terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (ValueError, AttributeError):
        return False


def _within(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        if not depth:
            return "<hidden>"
        return {k: _hidden(v) if k in PRIVATE else _within(v, depth - 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_within(v, depth - 1) for v in value] if depth else "<hidden>"
    return value


def _hidden(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    return f"<{len(value)} hidden>" if hasattr(value, "__len__") else "<hidden>"


class _Stderr:
    """The stderr of the moment: a program, or a test, may put another in its place.

    A log that nobody reads any more (a closed pipe, a full disk) is no reason to fail.
    """

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # AttributeError: it is None in a daemon
            return sys.stderr.write(text)
        return 0

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()


_STDERR: Any = _Stderr()
_setup: dict[str, Any] = {}
