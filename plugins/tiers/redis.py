"""The ``redis`` tier keeps records in a Redis or Valkey server, which other servers of the same model may share.

It does not know what records hold, nor when the store evicts them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from antiphon.actors.tier import Record, Tier, TierError, TierFull, TierOptions, Usage
from antiphon.runtime.plugin import Site
from antiphon.runtime.quantities import Seconds


class RedisOptions(TierOptions, frozen=True, kw_only=True):
    """``url``: redis://, rediss:// (TLS) or unix://, with user and password if any; ``prefix`` begins every key.

    ``ttl``: how long a record stays after it was written, 0 for ever (until the store evicts it); ``timeout`` is that
    of each answer. Whoever may write to the store is trusted with the text of those who read it.
    """

    url: str = "redis://127.0.0.1:6379/0"
    prefix: str = "antiphon:kv:"
    ttl: Seconds = 0.0
    timeout: Seconds = 1.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        there = parts.path if parts.scheme == "unix" else parts.hostname
        if parts.scheme not in ("redis", "rediss", "unix") or not there:
            raise ValueError("url must be redis://HOST:PORT/NUMBER, rediss://HOST:PORT/NUMBER or unix:///PATH")
        if not self.timeout:
            raise ValueError("timeout is 0, so no answer could come")


class Redis(Tier[RedisOptions]):
    """Records as strings of a Redis database."""

    def __init__(self, options: RedisOptions, site: Site):
        super().__init__(options, site)
        self._prefix = options.prefix.encode()
        self._client: Any = None

    def open(self) -> None:
        """Connect anew and see whether the server answers. A connection that breaks later is the tier's failure."""
        self.close()
        with _told():
            self._client = redis.Redis.from_url(
                self.options.url, socket_timeout=self.options.timeout, socket_connect_timeout=self.options.timeout,
                retry=Retry(NoBackoff(), 0), health_check_interval=0)
            self._client.ping()

    def put(self, records: Sequence[Record]) -> list[tuple[bytes, bytes | None]]:
        """Keep records; the server makes room by its own policy."""
        expires = int(self.options.ttl * 1000) or None
        with _told(), self._client.pipeline(transaction=False) as pipe:
            for key, record in records:
                pipe.set(self._prefix + key, record, px=expires)
            pipe.execute()
        return []

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Records."""
        with _told():
            found: list[bytes | None] = self._client.mget([self._prefix + key for key in keys]) if keys else []
            return found

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether they are there."""
        with _told(), self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.exists(self._prefix + key)
            return [bool(there) for there in pipe.execute()]

    def drop(self, keys: Sequence[bytes]) -> None:
        """Remove them; the server frees the memory beside its work."""
        if keys:
            with _told():
                self._client.unlink(*(self._prefix + key for key in keys))

    def usage(self) -> Usage:
        """Of the whole server, whoever fills it."""
        with _told():
            memory = self._client.info("memory")
            return Usage(int(memory["used_memory"]), int(self._client.dbsize()), int(memory.get("maxmemory", 0)))

    def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            self._client.close()
            self._client = None


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except redis.exceptions.OutOfMemoryError as cause:
        raise TierFull(f"the store's memory is full and its policy evicts nothing: {cause}") from cause
    except (redis.RedisError, OSError, ValueError) as cause:
        raise TierError(f"{type(cause).__name__}: {cause}") from cause
