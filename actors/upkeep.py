"""What callers and operators may do with KV memory: look at it, flush it, keep a prefix in it for some time.

It does not know clients or blocks. Nothing is remembered here: a pin's owner, told to the allocators, says whose it is,
so a gateway that comes back finds the pins of the one before.
"""

import asyncio
import hashlib
import re
from typing import Any, NamedTuple, TypeVar

import msgspec

from antiphon.actors.columns import unpack
from antiphon.actors.protocol import (
    Encode,
    Encoded,
    Flush,
    Flushed,
    Inspect,
    Pin,
    Pinned,
    Report,
    Survey,
    Surveyed,
    Unpin,
    Unpinned,
)
from antiphon.runtime.actor import Actor
from antiphon.runtime.errors import AskFailed
from antiphon.runtime.message import Message
from antiphon.runtime.plugin import Options
from antiphon.runtime.quantities import Seconds

R = TypeVar("R", bound=Message)
ANSWER = 5.0  # seconds in which an allocator or a pager has to answer, and the tokenizer to encode
MOST_TOP = 1000  # prefixes in one answer
OWNER = re.compile(r"(.*)/([0-9]+)/([0-9a-f]+): (.*)", re.DOTALL)  # in Surveyed: tenant, number, prefix, what it keeps


class Denied(Exception):
    """Seen by the door, which tells its client: kind, reason, seconds after which trying again may help."""

    def __init__(self, kind: str, reason: str, retry_after: float = 0.0):
        super().__init__(kind, reason, retry_after)


class UpkeepOptions(Options, frozen=True):
    """Limits of one tenant's pins."""

    max_pins: int = 64
    max_pin_tokens: int = 131072  # of each; the allocator's ``pin_share`` bounds the blocks of all together
    max_pin_seconds: Seconds = 86400.0


class _Pin(NamedTuple):
    """A door's pin as one allocator knows it."""

    allocator: str
    there: int  # its number there
    tenant: str
    number: int  # its number here, the same at every allocator
    prefix: str  # digest of the prompt
    keeps: str


class Upkeep:
    """Asks every allocator of the deployment in the name of a gateway's tenant."""

    def __init__(self, actor: Actor[Any], tenant: str, limits: UpkeepOptions, max_prompt: int):
        self._actor = actor
        self._tenant = tenant
        self._limits = limits
        self._max_prompt = max_prompt
        self._last = 0  # number given to a pin
        self._pinning = asyncio.Lock()  # counting pins and adding one is one step

    async def survey(self, top: int) -> dict[str, Any]:
        """What the allocators and the pagers say of themselves. Raises Denied."""
        surveys = await self._ask_all("allocator", Survey(max(0, min(top, MOST_TOP))), Surveyed)
        reports = await self._ask_all("pager", Inspect(), Report)
        pins = _pins(surveys)
        return {
            "allocators": {name: {
                "block_size": found.block_size, "pools": msgspec.to_builtins(found.pools), "counters": found.counters,
                "prefixes": msgspec.to_builtins(found.prefixes),
                "pins": [{"pin": p.number, "tenant": p.tenant, "keeps": p.keeps} for p in pins if p.allocator == name],
            } for name, found in surveys.items()},
            "pagers": {name: report.facts for name, report in reports.items()},
        }

    async def flush(self) -> dict[str, Any]:
        """Have all cached blocks that nobody holds forgotten. Raises Denied."""
        flushed = await self._ask_all("allocator", Flush(), Flushed)
        return {"blocks": sum(int(unpack(f.blocks).sum()) for f in flushed.values())}

    async def pin(self, text: str | None, ids: bytes | None, raw: bool, seconds: float) -> dict[str, Any]:
        """Keep what is cached of a prompt; pinned once more, the same prompt is kept from now on. Raises Denied."""
        limits = self._limits
        if not 0.0 < seconds <= limits.max_pin_seconds:  # NaN too
            raise Denied("invalid", f"seconds is {seconds:g}; a pin lasts more than 0 and at most "
                         f"{limits.max_pin_seconds:g} s")
        column = await self._ids(text, ids, raw)
        if len(column) // 4 > limits.max_pin_tokens:
            raise Denied("too_long", f"the prefix has {len(column) // 4} tokens; a pin may have "
                         f"{limits.max_pin_tokens}")
        prefix = hashlib.sha256(column).hexdigest()[:16]
        async with self._pinning:
            pins = _pins(await self._ask_all("allocator", Survey(0), Surveyed))
            mine = [p for p in pins if p.tenant == self._tenant]
            before = [p for p in mine if p.prefix == prefix]
            if not before and len({p.number for p in mine}) >= limits.max_pins:
                raise Denied("overloaded", f"{limits.max_pins} prefixes are pinned; unpin one first")
            self._last = max([self._last, *(p.number for p in pins)]) + (not before)
            number = before[0].number if before else self._last
            pinned = await self._ask_all(
                "allocator", Pin(f"{self._tenant}/{number}/{prefix}", self._tenant, column, seconds), Pinned)
            slots = max((p.slots for p in pinned.values()), default=0)
            if not slots:
                raise Denied("unavailable", "; ".join({p.problem for p in pinned.values()}) or "there is no allocator")
            for old in before:
                if pinned[old.allocator].slots:
                    await self._ask(old.allocator, Unpin(old.there), Unpinned)
        return {"pin": number, "slots": slots}

    async def unpin(self, number: int) -> dict[str, Any]:
        """Let one of the tenant's pins go. Raises Denied."""
        pins = _pins(await self._ask_all("allocator", Survey(0), Surveyed))
        let_go = [await self._ask(p.allocator, Unpin(p.there), Unpinned) for p in pins
                  if (p.tenant, p.number) == (self._tenant, number)]
        return {"found": any(u.found for u in let_go)}

    async def _ids(self, text: str | None, ids: bytes | None, raw: bool) -> bytes:
        """The prompt as packed ids."""
        if (text is None) == (ids is None):
            raise Denied("invalid", "give either text or token ids")
        length = len(text or "") + len(ids or b"")
        if length > self._max_prompt:
            raise Denied("too_long", f"the prefix has {length} bytes; at most {self._max_prompt} are taken")
        if ids is None:
            encoded = await self._ask(self._actor.peer("tokenizer"), Encode(text or "", raw), Encoded)
            if encoded.problem:
                raise Denied("invalid", encoded.problem)
            ids = encoded.ids
        if not ids or len(ids) % 4:
            raise Denied("invalid", "token ids are packed int32" if ids else "the prefix is empty")
        return ids

    async def _ask_all(self, kind: str, message: Message, reply: type[R]) -> dict[str, R]:
        """Answers by instance. Raises Denied: one has not answered."""
        kinds = self._actor.site.post.kinds
        instances = sorted(i for i, k in kinds.items() if k == kind)
        answers = await asyncio.gather(*(self._ask(i, message, reply) for i in instances))
        return dict(zip(instances, answers, strict=True))

    async def _ask(self, instance: str, message: Message, reply: type[R]) -> R:
        try:
            return await self._actor.ask(instance, message, reply, ANSWER)
        except AskFailed as cause:
            raise Denied("unavailable", str(cause), 1.0) from cause


def _pins(surveys: dict[str, Surveyed]) -> list[_Pin]:
    """The pins that doors have asked for."""
    return [_Pin(name, there, found[1], int(found[2]), found[3], found[4])
            for name, survey in surveys.items() for there, text in survey.pins.items()
            if (found := OWNER.fullmatch(text)) is not None]
