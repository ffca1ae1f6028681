"""Found by people who used it or tried to break it: what they met must not come back."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.callers import POOL, Ask, Raw, owed
from tests.harness import NULL, Server, graph, until

from antiphon.plugins.doors import wire

GENERATE = [sys.executable, "-P", "-m", "antiphon", "generate"]
FREE = [argument for setting in (*NULL, *POOL) for argument in ("--set", setting)]


def test_a_file_at_the_listen_path_is_not_touched(tmp_path: Path) -> None:
    precious = tmp_path / "door"
    precious.write_text("precious")
    with Server(tmp_path, *POOL, wait=False) as server:
        assert server.process.wait(60) == 70
        assert "a file is there" in server.text()
    assert precious.read_text() == "precious"


def test_a_second_server_on_an_ipc_address_leaves_the_first_alone(tmp_path: Path) -> None:
    ask = Ask((1, 2, 3), 5)
    with Server(tmp_path, *POOL) as first:
        with Server(tmp_path, *POOL, wait=False) as second:
            assert second.process.wait(60) == 70
        assert "another server is running there" in first.text()  # both write the same log
        with first.client() as client:
            assert client.generate(ask.prompt, **ask.options()).ids == owed(ask).ids


def test_a_killed_server_s_socket_is_no_obstacle(tmp_path: Path) -> None:
    with Server(tmp_path, *POOL) as server:
        server.kill("front")
        until(lambda: "front" in server.cells(), what="the front cell's return")
        with server.client() as client:
            client.wait_ready(30)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_reason_to_abort(closed: str) -> None:
    command = f'exec "$@" {closed}'
    done = subprocess.run(["bash", "-c", command, "x", *GENERATE, *FREE, "--max-tokens", "3", "hi"],
                          capture_output=True, timeout=60, check=False)
    assert done.returncode == 0


def test_a_full_disk_is_told_in_a_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*GENERATE, *FREE, "--max-tokens", "3", "hi"], stdout=full, stderr=subprocess.PIPE,
                              text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_private_generation_and_leaves_nothing(tmp_path: Path, number: int, code: int) -> None:
    slow = ["--set", "actors.executor.options.step_seconds=0.02"]
    process = subprocess.Popen([*GENERATE, *FREE, *slow, "--max-tokens", "4000", "hi"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(number)
    assert process.wait(30) == code
    process.communicate()
    assert list(tmp_path.iterdir()) == []


def test_options_of_a_deployment_are_refused_beside_an_address() -> None:
    done = subprocess.run([*GENERATE, "--address", "tcp://127.0.0.1:1", "--dtype", "float32", "hi"],
                          capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--dtype" in done.stderr


def test_resumes_that_lie_leave_nothing_behind() -> None:
    draw = random.Random(1)
    ask = Ask((1, 2, 3), 300, ignore_eos=True)
    settings = ("actors.executor.options.step_seconds=0.002", "actors.executor.options.context=512", *POOL)
    with graph(*settings) as llm, Raw(llm.address) as raw:
        ids = [raw.generate(ask) for _ in range(20)]
        for _ in range(10):
            for request in ids:
                raw.resume(request, ask, [draw.randrange(512) for _ in range(draw.randrange(30))])
                if draw.random() < 0.3:
                    raw.send(wire.Cancel(request))
        time.sleep(0.5)
        for request in ids:
            raw.send(wire.Cancel(request))

        def over() -> bool:
            while raw.socket.poll(0):
                if isinstance(raw.receive(), wire.Deltas):
                    raw.send(wire.Grant(1))
            facts = llm.stats()
            return not (facts["gateway"]["open"] or facts["tokenizer"]["requests"] or facts["scheduler"]["running"])

        until(over, 20, "the end of every request")
