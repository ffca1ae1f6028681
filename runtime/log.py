"""Logging through structlog: a console for people, JSON lines for machines, prompts redacted by default.

It does not know what is logged; it hides the values of the keys that carry users' text.
"""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

PRIVATE = frozenset({"prompt", "text", "ids", "tokens", "messages"})
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure(level: str = "info", style: str = "auto", prompts: bool = False) -> None:
    """Set up the process's logging on stderr. ``style``: console, json, or auto (console on a terminal)."""
    json_lines = style == "json" or (style == "auto" and not sys.stderr.isatty())
    renderer: Any = structlog.processors.JSONRenderer() if json_lines else structlog.dev.ConsoleRenderer()
    chain: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if not prompts:
        chain.append(redact)
    structlog.configure(
        processors=[*chain, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS.get(level, logging.INFO)),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def redact(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace users' text by its length."""
    for key in PRIVATE & event.keys():
        value = event[key]
        event[key] = f"<{len(value)} hidden>" if hasattr(value, "__len__") else "<hidden>"
    return event


def logger(**bound: Any) -> Any:
    """Logger bound to a cell or an actor."""
    return structlog.get_logger().bind(**bound)
