"""The actor core: typed handlers, turns and the mailbox with two lanes.

It does not know sockets or processes: ``Post`` (post.py) carries what an actor sends.
"""

import asyncio
import inspect
import re
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, get_args, get_origin, get_type_hints

from antiphon.runtime import trace
from antiphon.runtime.errors import Overloaded
from antiphon.runtime.message import CONTROL, DATA, Message
from antiphon.runtime.plugin import O, Options, Plugin

if TYPE_CHECKING:
    from antiphon.runtime.post import Post

R = TypeVar("R", bound=Message)
TURNS = 256  # turns of one actor in a row before the loop gets one
MAILBOX = 65536  # directly delivered messages that may wait for an actor before their sender is told Overloaded


class Actor(Generic[O]):
    """One owner of state. Handlers ``on_<message>`` run one at a time, never await, and alone touch the state.

    A handler answers an ask by returning the reply, or a future of it. ``plugs`` are the kinds of plugin the
    actor hosts: the first is named by ``plugin`` in the config, each other by an option of its own name.
    ``provides`` and ``requires`` are cell services. An ``optional`` actor may be replaced by ``stand_in``.
    """

    kind: ClassVar[str]
    plugs: ClassVar[tuple[str, ...]] = ()
    uses: ClassVar[tuple[str, ...]] = ()  # kinds of actor it needs an edge to
    sections: ClassVar[tuple[str, ...]] = ()  # shared tables it reads
    provides: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar[tuple[str, ...]] = ()
    stand_in: ClassVar[str] = ""  # plugin that replaces a failing optional one; empty: not optional
    options_type: ClassVar[type[Options]] = Options
    handlers: ClassVar[dict[type[Message], str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in getattr(cls, "__orig_bases__", ()):
            if get_origin(base) is Actor and isinstance(get_args(base)[0], type):
                cls.options_type = get_args(base)[0]
        cls.handlers = dict(cls.handlers)
        for name in dir(cls):
            if name.startswith("on_") and inspect.iscoroutinefunction(getattr(cls, name)):
                raise TypeError(f"{cls.__name__}.{name} is async, but turns never await: return a future")
            if name.startswith("on_") and name != "on_peer":
                for message in _messages_of(cls, name):
                    cls.handlers[message] = name

    def __init__(self, options: O, site: "ActorSite"):
        self.options = options
        self.site = site
        self.log = site.log
        self.sender = ""  # instance that sent the message of the running turn

    async def start(self) -> None:
        """Prepare; the mailbox opens when this returns. May ask actors it uses."""

    async def stop(self, deadline: float) -> None:
        """Finish what is open until ``deadline`` (seconds from now) and release what is held."""

    def on_peer(self, instance: str, kind: str, up: bool) -> None:
        """Another actor's cell died (``up`` false) or a new incarnation is ready. A turn on the control lane.

        Once ``up`` is false nothing that the dead incarnation sent is handled any more.
        """

    @classmethod
    def crossing(cls, kind: str, options: dict[str, Any], sections: dict[str, Any]) -> str:
        """What an edge to an actor of ``kind`` carries once it leaves the cell; empty: nothing worth a word."""
        return ""

    @classmethod
    def needing(cls, options: dict[str, Any]) -> dict[str, tuple[str, ...]]:
        """Options that ask for capabilities, with those: the graph check looks whether something gives them."""
        return {}

    def facts(self) -> dict[str, Any]:
        """State worth showing to an operator: queue lengths, pools, counters."""
        return {}

    def tell(self, to: str, message: Message, lane: int = DATA) -> None:
        """Send to an instance; a failure of its handler is its own."""
        self.site.post.tell(self.site.instance, to, message, lane)

    async def ask(self, to: str, message: Message, reply: type[R], timeout: float = 30.0, lane: int = DATA) -> R:
        """Send and await the typed reply. Raises AskFailed with the cause, AskTimeout, PeerRestarted."""
        answer = await self.site.post.ask(self.site.instance, to, message, timeout, lane)
        if type(answer) is not reply:
            raise TypeError(f"{to} answered {type(message).__name__} with {type(answer).__name__}")
        return answer

    def peer(self, kind: str) -> str:
        """Name of the instance that this actor's edge of that kind leads to."""
        return self.site.edges[kind]

    def spawn(self, activity: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        """Run a declared activity; if it raises, the actor has failed."""
        return self.site.spawn(activity, name)


def _messages_of(cls: type, name: str) -> tuple[type[Message], ...]:
    """Message types a handler takes, from its annotation; its name must say which."""
    hints = get_type_hints(getattr(cls, name))
    hints.pop("return", None)
    annotation = next(iter(hints.values()), None)
    types = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    for kind in types:
        if not (isinstance(kind, type) and issubclass(kind, Message)):
            raise TypeError(f"{cls.__name__}.{name} must annotate the message it takes")
    if len(types) == 1 and snake(types[0].__name__) != name.removeprefix("on_"):
        raise TypeError(f"{cls.__name__}.{name} takes {types[0].__name__}; call it on_{snake(types[0].__name__)}")
    return types


def snake(name: str) -> str:
    """``ReserveBlocks`` -> ``reserve_blocks``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class ActorSite:
    """The place an actor and its plugin run in; satisfies ``plugin.Site``."""

    def __init__(self, instance: str, post: "Post", log: Any, edges: dict[str, str], failed: Callable[..., None]):
        self.instance = instance
        self.post = post
        self.log = log
        self.edges = edges
        self.sections: dict[str, Any] = {}
        self.services: dict[str, Any] = {}
        self.built: dict[str, Plugin[Any]] = {}
        self.builder: Callable[[str, Mapping[str, Any]], Any] | None = None
        self.keeper: Callable[[str], None] | None = None
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def section(self, name: str) -> Any:
        """Typed shared table of the deployment."""
        return self.sections[name]

    def service(self, name: str) -> Any:
        """Object that an actor of this cell provides."""
        if name not in self.services:
            raise LookupError(f"{self.instance}: nothing in this cell provides {name!r}")
        return self.services[name]

    def build(self, kind: str, use: Mapping[str, Any]) -> Any:
        """Make a nested plugin from ``{plugin = NAME, ...}``."""
        if self.builder is None:
            raise LookupError("this site builds no plugins")
        return self.builder(kind, use)

    def leaves(self, path: str) -> None:
        """A file that the actor makes (a socket of its door): removed when the cell ends, however it ends."""
        if self.keeper is not None:
            self.keeper(path)

    def plugin(self, kind: str) -> Any:
        """The actor's own plugin of a kind it hosts."""
        return self.built[kind]

    def spawn(self, activity: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        """Start a task that belongs to the actor."""
        task = asyncio.get_running_loop().create_task(activity, name=f"{self.instance}:{name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (cause := task.exception()) is not None:
            self._failed(self.instance, cause)

    async def cancel_tasks(self) -> None:
        """End every activity of the actor."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class PeerNews(Message, frozen=True):
    """An actor's cell died or is ready again. No wire carries it: the cell's agent puts it into mailboxes."""

    instance: str
    kind: str
    up: bool


class Envelope:
    """A message on its way to one actor. ``answer(reply, cause)``: it is an ask. ``cell``: a socket brought it."""

    __slots__ = ("answer", "cell", "message", "sender")

    def __init__(self, sender: str, message: Message, answer: "Callable[[Any, BaseException | None], None] | None",
                 cell: str = ""):
        self.sender = sender
        self.message = message
        self.answer = answer
        self.cell = cell


class Runner:
    """Runs one actor's turns: control lane first, FIFO within a lane, never two at once."""

    def __init__(self, actor: Actor[Any], failed: Callable[..., None]):
        self.actor = actor
        self.control: deque[Envelope] = deque()
        self.data: deque[Envelope] = deque()
        self.opened = False
        self.running = False  # a turn runs, or other code of the actor is sending
        self.turns = 0
        self.progress = time.monotonic()
        self.consumed: Callable[[str], None] | None = None  # told the cell whose counted message had its turn
        self._failed = failed
        self._handlers = {t: getattr(actor, name) for t, name in actor.handlers.items()}
        self._handlers[PeerNews] = lambda news: actor.on_peer(news.instance, news.kind, news.up)
        self._resuming: asyncio.Handle | None = None

    def open(self) -> None:
        """Let turns run, beginning with what has arrived meanwhile."""
        self.opened = True
        self.drain()

    def close(self) -> None:
        """Run no further turns; what arrives waits."""
        self.opened = False

    def takes(self, kind: type[Message]) -> bool:
        """Whether the actor has a handler for it."""
        return kind in self.actor.handlers

    def put(self, envelope: Envelope, lane: int) -> None:
        """Take a message; its turn comes with the next ``drain``."""
        (self.control if lane == CONTROL else self.data).append(envelope)

    def deliver(self, envelope: Envelope, lane: int) -> None:
        """Take a message; its turn runs now unless another one is running. Raises Overloaded."""
        if (self.running or not self.opened) and self.waiting() >= MAILBOX:
            raise Overloaded(f"{self.actor.site.instance} takes no messages: {MAILBOX} wait for it")
        self.put(envelope, lane)
        if self.opened and not self.running:
            self.drain()

    def waiting(self) -> int:
        """Messages that wait for their turn."""
        return len(self.control) + len(self.data)

    def forget(self, cell: str) -> None:
        """Drop what waits from a cell that is dead."""
        for lane in (self.control, self.data):
            if lane:
                kept = [envelope for envelope in lane if envelope.cell != cell]
                lane.clear()
                lane.extend(kept)

    def enter(self) -> bool:
        """The actor's code outside a turn begins to hand something over; false if a turn is running anyway.

        What comes back to the actor meanwhile waits as it would with a socket in between.
        """
        if self.running:
            return False
        self.running = True
        return True

    def leave(self) -> None:
        """That code goes on; what came meanwhile has its turn once the loop is back."""
        self.running = False
        self._resume_later()

    def drain(self) -> None:
        """Run the turns of what waits."""
        if self.running:
            return
        self.running = True
        try:
            for _ in range(TURNS):
                if not self.opened:
                    return
                if self.control:
                    self._turn(self.control.popleft())
                elif self.data:
                    self._turn(envelope := self.data.popleft())
                    if envelope.cell and self.consumed is not None:
                        self.consumed(envelope.cell)
                else:
                    return
        finally:
            self.running = False
        self._resume_later()

    def _resume_later(self) -> None:
        if self.opened and self._resuming is None and (self.control or self.data):
            self._resuming = asyncio.get_running_loop().call_soon(self._resume)

    def _resume(self) -> None:
        self._resuming = None
        self.drain()

    def _turn(self, envelope: Envelope) -> None:
        actor = self.actor
        actor.sender = envelope.sender
        self.turns += 1
        answer = envelope.answer
        began = trace.now() if trace.enabled else 0.0
        try:
            result = self._handlers[type(envelope.message)](envelope.message)
        # The one place where a handler's failure is judged; neither sys.exit nor a foreign cancellation ends the loop.
        except (Exception, SystemExit, asyncio.CancelledError) as cause:  # noqa: BLE001
            if answer is None:
                self._fail(cause)
            else:
                actor.log.error("handler failed", message_type=type(envelope.message).__name__, cause=repr(cause),
                                trace=traceback.format_exc())
                answer(None, cause)
        else:
            if isinstance(result, asyncio.Future) and result.done():
                if answer is None:
                    self._told_later(result)
                else:
                    self._answer_later(result, envelope.message, answer)
            elif isinstance(result, asyncio.Future):
                result.add_done_callback(self._told_later if answer is None else
                                         lambda future: self._answer_later(future, envelope.message, answer))
            elif answer is not None:
                self._answer(result, envelope.message, answer)
        self.progress = time.monotonic()
        if trace.enabled:
            trace.point(actor.site.instance, type(envelope.message).__name__, began)

    def _fail(self, cause: BaseException) -> None:
        # Its state is in doubt: no further turn, whatever still waits.
        self.close()
        self._failed(self.actor.site.instance, cause)

    def _told_later(self, future: "asyncio.Future[Any]") -> None:
        if not future.cancelled() and (cause := future.exception()) is not None:
            self._fail(cause)

    def _answer(self, result: Any, message: Message, answer: Callable[[Any, BaseException | None], None]) -> None:
        if type(result) is message.reply:
            answer(result, None)
            return
        wanted = message.reply.__name__ if message.reply is not None else "nothing"
        answer(None, TypeError(f"{self.actor.site.instance} answers {type(message).__name__} with "
                               f"{type(result).__name__}, not {wanted}"))

    def _answer_later(self, future: "asyncio.Future[Any]", message: Message,
                      answer: Callable[[Any, BaseException | None], None]) -> None:
        if future.cancelled():
            answer(None, RuntimeError("cancelled"))
        elif (cause := future.exception()) is not None:
            answer(None, cause)
        else:
            self._answer(future.result(), message, answer)
