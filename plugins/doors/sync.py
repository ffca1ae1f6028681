"""The client for programs without an event loop: an AsyncClient on a thread of its own.

It does not know the wire.
"""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, Self, TypeVar

from antiphon.plugins.doors.answers import Pin
from antiphon.plugins.doors.asking import Prompt
from antiphon.plugins.doors.client import DEFAULT, AsyncClient, Completion, Delta
from antiphon.plugins.doors.errors import Disconnected

T = TypeVar("T")


class Client:
    """Talks to one server; see AsyncClient. Safe for several threads."""

    def __init__(self, address: str = DEFAULT, *, timeout: float = 120.0, patience: float = 30.0):
        self.address = address
        self._client = AsyncClient(address, timeout=timeout, patience=patience)
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="antiphon-client", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._run(self._client.connect())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """The whole answer; see AsyncClient.generate."""
        return self._run(self._client.generate(prompt, **options))

    def samples(self, prompt: Prompt, n: int, **options: Any) -> list[Completion]:
        """``n`` answers to one prompt; see AsyncClient.samples."""
        return self._run(self._client.samples(prompt, n, **options))

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Delta]:
        """Deltas as they come; leaving the loop cancels. See AsyncClient.stream."""
        deltas = self._client.stream(prompt, **options)
        try:
            while True:
                delta = self._run(_next(deltas))
                if delta is None:
                    return
                yield delta
        finally:
            if not self._closed:
                self._run(deltas.aclose())

    def cancel(self, request: bytes) -> None:
        """Cancel by id; idempotent."""
        self._loop.call_soon_threadsafe(self._client.cancel, request)

    def stats(self) -> dict[str, Any]:
        """Facts of every actor."""
        return self._run(self._client.stats())

    def health(self) -> dict[str, Any]:
        """``{"ready": bool, ...}``."""
        return self._run(self._client.health())

    def cache(self, top: int = 10) -> dict[str, Any]:
        """What is in KV memory; see AsyncClient.cache."""
        return self._run(self._client.cache(top))

    def pin(self, prompt: Prompt, *, seconds: float = 3600.0, raw: bool = False) -> Pin:
        """Keep what is cached of a prompt for some time; see AsyncClient.pin."""
        return self._run(self._client.pin(prompt, seconds=seconds, raw=raw))

    def unpin(self, pin: int | Pin) -> bool:
        """Let a pin go; see AsyncClient.unpin."""
        return self._run(self._client.unpin(pin))

    def flush(self) -> int:
        """Have cached blocks forgotten; see AsyncClient.flush."""
        return self._run(self._client.flush())

    def wait_ready(self, timeout: float = 300.0) -> None:
        """Wait until the server can serve."""
        self._run(self._client.wait_ready(timeout))

    def close(self) -> None:
        """Cancel what is open and end the thread."""
        if self._closed:
            return
        self._closed = True
        if self._pid == os.getpid():
            asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result(5)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            raise Disconnected("the client was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


async def _next(deltas: AsyncGenerator[Delta, None]) -> Delta | None:
    return await anext(deltas, None)
