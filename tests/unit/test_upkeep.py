"""Operations on KV memory where a deployment has several allocators, or one that does not answer."""

from typing import Any

import pytest

from antiphon.actors.columns import pack
from antiphon.actors.protocol import (
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
from antiphon.actors.upkeep import Denied, Upkeep, UpkeepOptions
from antiphon.runtime.errors import AskTimeout


class Allocator:
    """Pins what it is told to, if it has ``slots`` of it."""

    def __init__(self, slots: int):
        self.slots = slots
        self.pins: dict[int, str] = {}
        self.number = 0

    def answer(self, message: Any) -> Any:
        match message:
            case Survey():
                return Surveyed(16, (), {}, (), {n: f"{owner}: 2 blocks, 60 s left" for n, owner in self.pins.items()})
            case Flush():
                return Flushed(pack([1, 2]))
            case Pin():
                if not self.slots:
                    return Pinned(0, 0, "nothing here")
                self.number += 3
                self.pins[self.number] = message.owner
                return Pinned(self.number, self.slots)
            case Unpin():
                return Unpinned(self.pins.pop(message.pin, None) is not None)


class Gateway:
    """An actor that may ask, with a post that knows who there is."""

    def __init__(self, **allocators: Allocator):
        self.allocators = allocators
        self.site = self.post = self
        self.kinds = {"gateway": "gateway", "pager": "pager", **dict.fromkeys(allocators, "allocator")}
        self.silent: set[str] = set()

    async def ask(self, instance: str, message: Any, _reply: Any, _timeout: float) -> Any:
        if instance in self.silent:
            raise AskTimeout(f"{instance} has not answered")
        return Report({"tiers": []}) if isinstance(message, Inspect) else self.allocators[instance].answer(message)


def upkeep(gateway: Gateway, tenant: str = "local", **limits: Any) -> Upkeep:
    return Upkeep(gateway, tenant, UpkeepOptions(**limits), 1 << 20)  # type: ignore[arg-type]


async def test_a_pin_has_one_number_at_all_allocators() -> None:
    one, two, three = Allocator(32), Allocator(16), Allocator(0)
    keep = upkeep(Gateway(one=one, two=two, three=three))
    two.number = 100  # its own numbers are others
    assert await keep.pin(None, pack([1, 2]), False, 60.0) == {"pin": 1, "slots": 32}
    assert (len(one.pins), len(two.pins), len(three.pins)) == (1, 1, 0)
    assert await keep.pin(None, pack([3]), False, 60.0) == {"pin": 2, "slots": 32}
    found = await keep.survey(5)
    assert {name: [p["pin"] for p in a["pins"]] for name, a in found["allocators"].items()} == {
        "one": [1, 2], "two": [1, 2], "three": []}
    assert found["pagers"] == {"pager": {"tiers": []}}
    assert await keep.unpin(1) == {"found": True}
    assert await keep.unpin(1) == {"found": False}
    assert [len(a.pins) for a in (one, two, three)] == [1, 1, 0]
    assert await keep.flush() == {"blocks": 9}


async def test_to_pin_once_more_renews() -> None:
    one = Allocator(32)
    first, second = upkeep(gateway := Gateway(one=one)), upkeep(gateway)  # a gateway, and the one after it
    assert await first.pin(None, pack([1]), False, 60.0) == await second.pin(None, pack([1]), False, 60.0)
    assert list(one.pins) == [6]
    one.slots = 0  # what cannot be pinned anew keeps its old pin
    with pytest.raises(Denied, match="nothing here"):
        await second.pin(None, pack([1]), False, 60.0)
    assert list(one.pins) == [6]


async def test_limits_count_one_tenant_s_pins() -> None:
    gateway = Gateway(one=Allocator(32), two=Allocator(32))
    mine, other = upkeep(gateway, max_pins=1), upkeep(gateway, "a/7/b: c", max_pins=1)
    await mine.pin(None, pack([1]), False, 60.0)
    assert (await other.pin(None, pack([1]), False, 60.0))["pin"] == 2
    with pytest.raises(Denied, match="overloaded"):
        await mine.pin(None, pack([2]), False, 60.0)
    assert await mine.unpin(2) == {"found": False}
    assert await other.unpin(2) == {"found": True}


async def test_an_allocator_that_does_not_answer_is_named() -> None:
    gateway = Gateway(one=Allocator(32), two=Allocator(32))
    gateway.silent.add("two")
    for work in (upkeep(gateway).survey(1), upkeep(gateway).flush(), upkeep(gateway).unpin(1)):
        with pytest.raises(Denied, match="two has not answered") as caught:
            await work
        assert caught.value.args[0] == "unavailable"


async def test_a_deployment_without_allocators_pins_nothing() -> None:
    with pytest.raises(Denied, match="there is no allocator"):
        await upkeep(Gateway()).pin(None, pack([1]), False, 60.0)
