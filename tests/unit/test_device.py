"""The device: stages run in order on one thread, handles end with their step, failures reach whoever waits."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from antiphon.actors.device import Device, StaleHandle
from antiphon.actors.protocol import Handle


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device("cell", 3)
    yield made
    made.close()


async def test_stages_run_in_order_on_one_thread(device: Device) -> None:
    ran: list[tuple[int, str]] = []
    futures = [device.submit(lambda i=i: ran.append((i, threading.current_thread().name)), "work") for i in range(50)]
    await asyncio.gather(*futures)
    assert ran == [(i, "device:cell") for i in range(50)]
    assert device.stages == 50
    assert device.busy > 0


async def test_a_stage_s_failure_reaches_its_future_and_stops_nothing(device: Device) -> None:
    def fail() -> None:
        raise ZeroDivisionError("here")

    failing, after = device.submit(fail, "fail"), device.submit(lambda: 7, "work")
    with pytest.raises(ZeroDivisionError, match="here"):
        await failing
    assert await after == 7


async def test_a_handle_gives_its_value_until_its_step_ends(device: Device) -> None:
    handle = device.promise(1)
    await device.submit(lambda: device.fulfil(handle, "logits"), "execute")
    assert await device.submit(lambda: device.value(handle), "verify") == "logits"
    device.release(1)
    with pytest.raises(StaleHandle, match=r"no longer valid in cell\.3"):
        await device.submit(lambda: device.value(handle), "late")


async def test_release_waits_for_the_stages_that_were_queued_before(device: Device) -> None:
    handle = device.promise(1)
    gate = threading.Event()
    device.submit(gate.wait, "busy")
    device.submit(lambda: device.fulfil(handle, 5), "execute")
    read = device.submit(lambda: device.value(handle), "verify")
    device.release(1)
    gate.set()
    assert await read == 5


async def test_a_reused_slot_does_not_serve_an_old_handle(device: Device) -> None:
    old = device.promise(1)
    device.release(1)
    await device.submit(lambda: None, "next")
    new = device.promise(2)
    assert new.slot == old.slot
    await device.submit(lambda: device.fulfil(old, "wrong"), "late")
    await device.submit(lambda: device.fulfil(new, "right"), "execute")
    assert await device.submit(lambda: device.value(new), "verify") == "right"
    with pytest.raises(StaleHandle):
        await device.submit(lambda: device.value(old), "verify")


@pytest.mark.parametrize("handle", [Handle("other", 3, 0, 1), Handle("cell", 2, 0, 1), Handle("cell", 3, 9, 1)])
async def test_a_handle_of_another_cell_epoch_or_slot_is_stale(device: Device, handle: Handle) -> None:
    device.promise(1)
    with pytest.raises(StaleHandle):
        await device.submit(lambda: device.value(handle), "verify")


async def test_a_failed_stage_is_told_through_the_handles_it_was_to_fulfil(device: Device) -> None:
    handle = device.promise(1)
    await device.submit(lambda: device.fulfil(handle, ValueError("no logits")), "execute")
    with pytest.raises(ValueError, match="no logits"):
        await device.submit(lambda: device.value(handle), "verify")


async def test_a_closed_device_drops_what_has_not_begun(device: Device) -> None:
    gate, begun = threading.Event(), threading.Event()

    def busy() -> bool:
        begun.set()
        return gate.wait(5)

    device.submit(busy, "busy")
    dropped = device.submit(lambda: 1, "dropped")
    await asyncio.to_thread(begun.wait, 5)
    closing = asyncio.ensure_future(asyncio.to_thread(device.close))
    await asyncio.sleep(0.05)
    gate.set()
    await closing
    assert not dropped.done()


def test_a_stage_that_outlives_its_loop_harms_nobody() -> None:
    device, gate = Device("cell", 1), threading.Event()

    async def main() -> None:
        device.submit(gate.wait, "busy")

    asyncio.run(main())
    gate.set()
    device.close()


async def test_without_a_thread_stages_run_where_they_are_submitted() -> None:
    device = Device("cell", 1, thread=False)
    handle = device.promise(1)
    device.enqueue(lambda: device.fulfil(handle, threading.current_thread()), "execute")
    device.release(1)  # for the stages after this one
    with pytest.raises(StaleHandle):
        await device.submit(lambda: device.value(handle), "late")
    handle = device.promise(2)
    device.enqueue(lambda: device.fulfil(handle, threading.current_thread()), "execute")
    found = device.submit(lambda: device.value(handle), "verify")
    assert found.done()
    assert await found is threading.current_thread()
    device.close()
