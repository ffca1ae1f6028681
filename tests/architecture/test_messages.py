"""Messages: immutable data in closed unions, commands are verbs and replies participles, steps carry columns."""

import ast
import asyncio
import inspect
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

from antiphon.actors import protocol
from antiphon.runtime import cell, orders, post, root
from antiphon.runtime.actor import Actor
from antiphon.runtime.message import Buffer, Codec, Message, digest

ROOT = Path(__file__).parents[2]
IRREGULAR = {"Met": "Meet", "Report": "Inspect"}  # replies whose name is no regular participle
LOOSE = {"Report"}  # carries facts for an operator, whatever they are
PLAIN = (bytes, str, int, float, bool, NoneType, tuple, dict, Buffer, Union, UnionType, Literal, ...)
# What one step's actors say to each other, many times a second: DESIGN section 3.
STEP = ("Draft", "Reserve", "Page", "Execute", "Observe", "Verify", "Commit", "Fork", "Close")


def messages() -> dict[str, type[Message]]:
    """Every message of runtime and actors by name."""
    found: dict[str, type[Message]] = {}
    for module in (protocol, orders, post):
        for name, value in vars(module).items():
            if isinstance(value, type) and issubclass(value, Message) and value is not Message:
                assert found.setdefault(name, value) is value, f"two messages are called {name}"
    return found


MESSAGES = messages()
REPLIES = {m.reply.__name__: m for m in MESSAGES.values() if m.reply is not None}
ACTORS: list[type[Actor[Any]]] = [
    *(point.load() for point in entry_points(group="antiphon.actor") if point.value.startswith("antiphon.")),
    cell.Agent, root.Supervisor,
]


def inside(kind: Any) -> Iterator[Any]:
    """A type and all types it is made of, structs' fields included."""
    yield kind
    for argument in get_args(kind):
        yield from inside(argument)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for field in msgspec.structs.fields(kind):
            yield from inside(field.type)


def fields(message: type[Message]) -> Iterator[Any]:
    for field in msgspec.structs.fields(message):
        yield from inside(field.type)


def test_the_vocabulary_is_all_here() -> None:
    assert {"Generate", "Execute", "Committed", "Commit", "Halt"} & MESSAGES.keys() == {
        "Generate", "Execute", "Commit", "Halt"}
    assert len(MESSAGES) > 40
    defined = {
        node.name
        for folder in ("runtime", "actors") for path in (ROOT / folder).glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and any(isinstance(b, ast.Name) and b.id == "Message" for b in node.bases)
    }
    assert defined - {"PeerNews"} == MESSAGES.keys(), "messages stand in protocol.py, those of the runtime in orders.py"


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_a_message_is_frozen_tagged_with_its_name_and_refuses_what_it_does_not_know(name: str) -> None:
    config = MESSAGES[name].__struct_config__
    assert config.frozen
    assert config.tag == name
    assert config.array_like
    assert config.forbid_unknown_fields
    assert MESSAGES[name].__doc__


@pytest.mark.parametrize("name", sorted(MESSAGES.keys() - LOOSE))
def test_a_message_is_made_of_plain_data(name: str) -> None:
    """Nothing that changes in place (a direct delivery hands over the object itself) and nothing untyped."""
    for kind in fields(MESSAGES[name]):
        origin = get_origin(kind) or kind
        assert origin not in (Any, object, list, set, bytearray, memoryview), f"{name} holds {kind}"
        if isinstance(origin, type) and issubclass(origin, msgspec.Struct):
            assert origin.__struct_config__.frozen, f"{name} holds {kind}, which changes"
        else:
            assert isinstance(origin, str) or origin in PLAIN, f"{name} holds {kind}"


@pytest.mark.parametrize("name", STEP)
def test_steps_carry_columns_not_lists_of_objects(name: str) -> None:
    message = MESSAGES[name]
    for one in [message, *([message.reply] if message.reply is not None else [])]:
        for field in msgspec.structs.fields(one):
            for kind in inside(field.type):
                if get_origin(kind) is tuple:
                    assert get_args(kind)[0] in (str, Buffer), f"{one.__name__}.{field.name}: {kind}"
                assert not (get_origin(kind) is dict and get_args(kind)[1] is Any)


def test_replies_are_the_participles_of_what_they_answer() -> None:
    for name, asked in REPLIES.items():
        verb = asked.__name__
        participles = {verb + "ed", verb + "d", verb + verb[-1] + "ed", verb[:-1] + "ied"}
        assert name in participles or IRREGULAR.get(name) == verb, f"{verb} is answered by {name}"
    assert all(MESSAGES[name].reply is None for name in REPLIES), "an answer is not answered"

TOLD = {"Accepted", "Mounted", "Stored", "Arrived"}  # news of what was told, no answers to an ask


def test_commands_are_imperative() -> None:
    for name in MESSAGES.keys() - REPLIES.keys():
        told_to_root = name in vars(orders) and issubclass(MESSAGES[name], tuple(root.Supervisor.handlers))
        if name.endswith("ed") and not told_to_root and name != "Failed":
            assert name in TOLD, f"{name} answers nothing"


def test_every_message_has_a_receiver_and_every_reply_an_asker() -> None:
    handled = {message for actor in ACTORS for message in actor.handlers}
    assert {m.__name__ for m in MESSAGES.values()} - {m.__name__ for m in handled} == {*REPLIES, "Failed"}


@pytest.mark.parametrize("actor", ACTORS, ids=lambda actor: actor.__name__)
def test_an_actors_messages_form_a_closed_union(actor: type[Actor[Any]]) -> None:
    codec = Codec(actor.handlers)
    assert set(codec.types) == set(actor.handlers)
    assert digest(actor.handlers) == digest(reversed(list(actor.handlers)))


@pytest.mark.parametrize("actor", ACTORS, ids=lambda actor: actor.__name__)
def test_handlers_say_what_they_answer_and_never_await(actor: type[Actor[Any]]) -> None:
    for message, name in actor.handlers.items():
        handler = getattr(actor, name)
        assert not inspect.iscoroutinefunction(handler)
        answered = get_type_hints(handler)["return"]
        united = isinstance(answered, UnionType) or get_origin(answered) is Union
        now_or_later = set(get_args(answered)) if united else {answered}
        kinds = {get_args(kind)[0] if get_origin(kind) is asyncio.Future else kind for kind in now_or_later}
        assert {kind or NoneType for kind in kinds} == {message.reply or NoneType}, (
            f"{actor.__name__}.{name} returns {answered}")
