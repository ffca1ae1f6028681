"""Hours of use in minutes: what callers, operators and stores do, drawn from a seed; and what a deployment shows of it.

It does not know how a deployment is started, nor what it must show.
"""

import random
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

from tests.callers import Ask, owed

from antiphon.plugins.doors.llm import LLM

LONGEST = 300  # tokens of a prompt, after which a conversation begins anew


class Event(NamedTuple):
    """``at`` seconds after the round began. ``number``: tokens after which to leave, samples, seconds of a pin."""

    at: float
    kind: str  # "ask", "leave", "samples", "pin", "unpin", "flush", or a store's: "kill", "start", "stop", "cont"
    ask: Ask = Ask(())
    number: float = 0


class Life:
    """Conversations that go on through all rounds. Equal seeds give equal events, however quick the machine is."""

    def __init__(self, seed: int):
        self.draw = random.Random(seed)
        self.stems = [self._ids(self.draw.randint(20, 90)) for _ in range(5)]
        self.talks = [self._beginning() for _ in range(24)]

    def round(self, seconds: float) -> list[Event]:
        """Bursts of arrivals, and now and then an operator or a fault of the store, in the order of time."""
        draw, events, at = self.draw, list[Event](), 0.0
        while (at := at + draw.expovariate(3)) < seconds:
            events += [self._arrival(at) for _ in range(draw.choice((1, 2, 4, 8, 16, 24)))]
        for kind, most in (("flush", 2), ("pin", 5), ("unpin", 3)):
            for _ in range(draw.randint(0, most)):
                events.append(Event(draw.uniform(0, seconds), kind, self._ask(), draw.uniform(0.2, 2 * seconds)))
        begins = draw.uniform(0, seconds)
        for pair in draw.choice(((), ("kill", "start"), ("stop", "cont"), ("stop", "kill", "start"))):
            events.append(Event(begins, pair))
            begins += draw.uniform(0.1, seconds / 3)
        return sorted(events, key=lambda event: event.at)

    def _arrival(self, at: float) -> Event:
        kind = self.draw.choices(("ask", "leave", "samples"), (70, 20, 10))[0]
        ask = self._ask()
        if kind == "ask":
            self._go_on(ask)
        return Event(at, kind, ask, self.draw.randint(1, 20) if kind == "leave" else self.draw.randint(2, 4))

    def _ask(self) -> Ask:
        """The next turn of some conversation."""
        draw = self.draw
        ask = Ask(tuple(draw.choice(self.talks)), draw.randint(1, 60), priority=draw.choice((-1, 0, 0, 0, 1)),
                  cache=draw.random() > 0.05)
        if draw.random() < 0.5:
            ask = ask._replace(temperature=draw.choice((0.3, 1.0)), top_k=draw.choice((0, 20)),
                               seed=draw.getrandbits(60))
        return ask

    def _go_on(self, ask: Ask) -> None:
        talk = self.talks.index(list(ask.prompt))
        following = [*ask.prompt, *owed(ask).ids, *self._ids(self.draw.randint(1, 20))]
        self.talks[talk] = following if len(following) < LONGEST else self._beginning()

    def _beginning(self) -> list[int]:
        stem = self.draw.choice(self.stems)
        return [*stem[:self.draw.randint(1, len(stem))], *self._ids(self.draw.randint(1, 40))]

    def _ids(self, count: int) -> list[int]:
        return [self.draw.randrange(512) for _ in range(count)]


class Watch:
    """Looks at a deployment in this process all the time, from a thread of its own: the longest that anything stood."""

    def __init__(self, llm: LLM):
        self._llm = llm
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self.longest = 0.0  # seconds
        self.where = ""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(40)

    def _look(self) -> None:
        while not self._over.wait(0.2):
            began = time.monotonic()
            try:
                silent: dict[str, float] = self._llm.graph.call(_silences)
            except Exception as cause:  # the loop does not answer, or the deployment has failed
                silent = {f"the loop: {cause!r}": time.monotonic() - began}
            for where, seconds in (("the loop", time.monotonic() - began), *silent.items()):
                if seconds > self.longest:
                    self.longest, self.where = seconds, where


def _silences(cell: Any) -> dict[str, float]:
    """By actor: seconds since its last progress, if messages wait for it."""
    now = time.monotonic()
    return {name: now - r.progress for name, r in cell.runners.items() if r.waiting()}


def left(cell: Any) -> Iterator[str]:
    """What an idle deployment still keeps of those it has served."""
    actors = {name: runner.actor for name, runner in cell.runners.items()}
    allocator, pager = actors["allocator"], actors["pager"].pager
    for name, kept in {
        "contexts": allocator.contexts, "holds": allocator.ledger.holds, "loads": allocator.transfers.loads,
        "stores": allocator.transfers.stores, "waits": allocator.waits.waiting,
        "changes": allocator.prefixes.changes, "moves": allocator.prefixes.moves, "saves under way": pager.pending,
        "entries": actors["gateway"].entries, "texts": actors["tokenizer"].entries,
    }.items():
        if kept:
            yield f"{name}: {len(kept)}"
