"""Antiphon: an LLM inference runtime of actors and plugins.

Importing this package loads neither torch nor numpy; the names below load what they need on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from antiphon.plugins.doors.client import AsyncClient
    from antiphon.plugins.doors.errors import AntiphonError, Disconnected, ProtocolMismatch, Refused, Timeout
    from antiphon.plugins.doors.llm import LLM
    from antiphon.plugins.doors.sync import Client

_HOME = {
    "AsyncClient": "client",
    "Client": "sync",
    "LLM": "llm",
    "AntiphonError": "errors",
    "Disconnected": "errors",
    "ProtocolMismatch": "errors",
    "Refused": "errors",
    "Timeout": "errors",
}

__all__ = [
    "LLM",
    "AntiphonError",
    "AsyncClient",
    "Client",
    "Disconnected",
    "ProtocolMismatch",
    "Refused",
    "Timeout",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load a public name from the module it lives in."""
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module 'antiphon' has no attribute {name!r}")
    return getattr(import_module(f"antiphon.plugins.doors.{_HOME[name]}"), name)
