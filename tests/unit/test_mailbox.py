"""Turns: one at a time, control before data, in order; what a handler may be, and what its failure does."""

import asyncio
from typing import Any

import pytest
from tests.recorders import Boom, Echo, Echoed, Misfit, Note, Recorder, Urge

from antiphon.runtime import actor as core
from antiphon.runtime import log
from antiphon.runtime.actor import Actor, ActorSite, Envelope, PeerNews, Runner
from antiphon.runtime.errors import Overloaded
from antiphon.runtime.message import CONTROL, DATA, Message
from antiphon.runtime.plugin import Options


class Box:
    """A runner whose actor's post is not used."""

    def __init__(self, opened: bool = True) -> None:
        self.failures: list[tuple[str, BaseException]] = []
        self.answers: list[tuple[Any, BaseException | None]] = []
        site = ActorSite("a", None, log.logger(), {}, self.failed)  # type: ignore[arg-type]
        self.actor = Recorder(Options(), site)
        self.runner = Runner(self.actor, self.failed)
        if opened:
            self.runner.open()

    def failed(self, instance: str, cause: BaseException) -> None:
        self.failures.append((instance, cause))

    def put(self, message: Message, lane: int = DATA, cell: str = "") -> None:
        self.runner.put(Envelope("b", message, None, cell), lane)

    def tell(self, message: Message, lane: int = DATA) -> None:
        self.runner.deliver(Envelope("b", message, None), lane)

    def ask(self, message: Message) -> None:
        self.runner.deliver(Envelope("b", message, lambda value, cause: self.answers.append((value, cause))), DATA)


async def test_messages_wait_until_the_mailbox_opens_and_control_goes_first() -> None:
    box = Box(opened=False)
    for i in range(3):
        box.tell(Note(f"data {i}"))
        box.tell(Urge(f"control {i}"), CONTROL)
    assert box.actor.heard == []
    assert box.runner.waiting() == 6
    box.runner.open()
    assert box.actor.heard == ["!control 0", "!control 1", "!control 2", "data 0", "data 1", "data 2"]


async def test_a_message_to_oneself_waits_for_the_end_of_the_turn() -> None:
    box = Box()
    heard = box.actor.heard

    def turn(text: str) -> None:
        assert not box.actor.inside
        box.actor.inside = True
        if text == "first":
            box.tell(Note("second"))
            box.tell(Urge("urgent"), CONTROL)
            assert heard == []
        heard.append(text)
        box.actor.inside = False

    box.actor.turn = turn  # type: ignore[method-assign]
    box.tell(Note("first"))
    assert heard == ["first", "!urgent", "second"]


async def test_a_closed_mailbox_keeps_what_arrives() -> None:
    box = Box()
    box.runner.close()
    box.tell(Note("later"))
    assert box.actor.heard == []
    box.runner.open()
    assert box.actor.heard == ["later"]


async def test_a_failed_tell_is_the_actors_failure_and_its_last_turn() -> None:
    box = Box(opened=False)
    for text in ("before", "fail", "after"):
        box.tell(Note(text))
    box.runner.open()
    assert box.actor.heard == ["before", "fail"]
    assert [(name, type(cause)) for name, cause in box.failures] == [("a", Boom)]
    box.tell(Note("much later"))
    assert box.actor.heard == ["before", "fail"], "its state is in doubt: no further turn"


async def test_a_failed_ask_is_the_askers_and_the_actor_goes_on() -> None:
    box = Box()
    box.ask(Echo("x", wrong="raise"))
    box.tell(Note("after"))
    assert isinstance(box.answers[0][1], Boom)
    assert box.failures == []
    assert box.actor.heard == ["x", "after"]


@pytest.mark.parametrize("raised", [SystemExit(3), asyncio.CancelledError()])
async def test_a_handler_that_raises_something_odd_ends_neither_loop_nor_turns(raised: BaseException) -> None:
    box = Box()

    def turn(text: str) -> None:
        if text == "odd":
            raise raised
        box.actor.heard.append(text)

    box.actor.turn = turn  # type: ignore[method-assign]
    box.ask(Echo("odd"))
    assert box.answers == [(None, raised)]
    box.tell(Note("still here"))
    assert box.actor.heard == ["still here"]
    box.tell(Note("odd"))
    assert box.failures == [("a", raised)]
    assert not box.runner.running


@pytest.mark.parametrize(("wrong", "found"), [("type", "Note"), ("none", "NoneType")])
async def test_an_answer_of_another_type_fails_the_ask_and_says_so(wrong: str, found: str) -> None:
    box = Box()
    box.ask(Echo("x", wrong=wrong))
    assert str(box.answers[0][1]) == f"a answers Echo with {found}, not Echoed"
    assert box.failures == []


async def test_an_answer_may_come_later() -> None:
    box = Box()
    for wrong in ("", "late raise", "cancel", "late type"):
        box.ask(Echo("x", later=0.001, wrong=wrong))
    box.tell(Note("meanwhile"))
    assert box.actor.heard[-1] == "meanwhile"
    while len(box.answers) < 4:
        await asyncio.sleep(0.001)
    values, causes = zip(*box.answers, strict=True)
    assert values == (Echoed("x"), None, None, None)
    assert [type(cause) for cause in causes[1:]] == [Boom, RuntimeError, TypeError]


async def test_a_future_that_a_tell_leaves_behind_fails_the_actor() -> None:
    box = Box()
    box.tell(Echo("x", later=0.001))
    box.tell(Echo("x", later=0.001, wrong="cancel"))
    await asyncio.sleep(0.01)
    assert box.failures == []
    box.tell(Echo("x", later=0.001, wrong="late raise"))
    await asyncio.sleep(0.01)
    assert [type(cause) for _, cause in box.failures] == [Boom]
    assert not box.runner.opened


async def test_an_activity_that_raises_fails_the_actor() -> None:
    box = Box()

    async def activity(fails: bool) -> None:
        await asyncio.sleep(0)
        if fails:
            raise Boom("activity")

    box.actor.spawn(activity(False), "good")
    await box.actor.spawn(activity(False), "good too")
    assert box.failures == []
    await asyncio.gather(box.actor.spawn(activity(True), "bad"), return_exceptions=True)
    await asyncio.sleep(0)
    assert [type(cause) for _, cause in box.failures] == [Boom]


async def test_activities_end_with_their_actor_and_that_is_no_failure() -> None:
    box = Box()
    task = box.actor.spawn(asyncio.sleep(1000), "long")
    await asyncio.sleep(0)
    await box.actor.site.cancel_tasks()
    assert task.cancelled()
    assert box.failures == []


async def test_news_of_a_peer_is_a_turn_and_waits_for_the_mailbox() -> None:
    box = Box(opened=False)
    box.put(Note("data"))
    box.put(PeerNews("b", "recorder", False), CONTROL)
    assert box.actor.heard == []
    box.runner.open()
    assert box.actor.heard == ["b down", "data"]


async def test_what_waits_from_a_dead_cell_is_forgotten() -> None:
    box = Box(opened=False)
    for cell in ("dead", "live", "dead"):
        box.put(Note(f"data of {cell}"), DATA, cell)
        box.put(Urge(f"control of {cell}"), CONTROL, cell)
    box.runner.forget("dead")
    box.runner.open()
    assert box.actor.heard == ["!control of live", "data of live"]


async def test_a_message_counts_as_consumed_when_its_turn_has_run() -> None:
    box = Box(opened=False)
    consumed: list[str] = []
    box.runner.consumed = consumed.append
    box.put(Note("data"), DATA, "there")
    box.put(Urge("control"), CONTROL, "there")  # never counted
    box.tell(Note("from here"))
    assert consumed == []
    box.runner.open()
    assert consumed == ["there"]


async def test_a_flood_lets_the_loop_have_turns_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "TURNS", 10)
    box = Box(opened=False)
    for i in range(35):
        box.tell(Note(str(i)))
    rounds = 0
    box.runner.open()
    while len(box.actor.heard) < 35:
        assert len(box.actor.heard) == 10 * (rounds + 1)
        rounds += 1
        await asyncio.sleep(0)
    assert rounds == 3
    assert box.actor.heard == [str(i) for i in range(35)]


async def test_a_mailbox_that_nobody_empties_refuses_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MAILBOX", 3)
    box = Box(opened=False)
    for _ in range(3):
        box.tell(Note("x"))
    with pytest.raises(Overloaded, match="a takes no messages"):
        box.tell(Note("x"))
    box.runner.open()
    box.tell(Note("x"))
    assert len(box.actor.heard) == 4


async def test_progress_is_noted_with_every_turn() -> None:
    box = Box()
    before = box.runner.progress
    box.tell(Note("x"))
    assert box.runner.progress > before
    assert box.runner.turns == 1


# ---- what an actor may look like


def test_a_handler_that_awaits_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(TypeError, match="on_note is async, but turns never await"):
        class _Waits(Actor[Options]):
            kind = "waits"

            async def on_note(self, message: Note) -> None: ...


def test_a_handlers_name_must_say_what_it_takes() -> None:
    with pytest.raises(TypeError, match="takes Note; call it on_note"):
        class _Misnamed(Actor[Options]):
            kind = "misnamed"

            def on_urge(self, message: Note) -> None: ...


def test_a_handler_must_annotate_a_message() -> None:
    for annotation in (int, None, Any):
        with pytest.raises(TypeError, match="on_note must annotate the message it takes"):
            type("Vague", (Actor,), {"kind": "vague", "on_note": _handler(annotation)})


def _handler(annotation: Any) -> Any:
    def on_note(self: Any, message: Any) -> None: ...

    on_note.__annotations__ = {"message": annotation} if annotation is not None else {}
    return on_note


def test_one_handler_may_take_several_messages_and_a_subclass_adds_its_own() -> None:
    class Both(Actor[Options]):
        kind = "both"

        def on_either(self, message: Note | Urge) -> None: ...

    class More(Both):
        kind = "more"

        def on_echo(self, message: Echo) -> None: ...

    assert set(Both.handlers) == {Note, Urge}
    assert set(More.handlers) == {Note, Urge, Echo}
    assert Misfit not in Recorder.handlers


def test_the_options_of_an_actor_come_from_its_base() -> None:
    class Wanted(Options, frozen=True):
        size: int = 1

    class Sized(Actor[Wanted]):
        kind = "sized"

    assert Sized.options_type is Wanted
    assert Recorder.options_type is Options
