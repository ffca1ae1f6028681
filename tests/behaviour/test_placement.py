"""Moving an actor into a process of its own is one line; the tokens stay, and ``check`` says what it costs."""

from pathlib import Path

import pytest
from tests.callers import POOL, Ask, answered, asks, assert_owed, at_once
from tests.drafters import plugin
from tests.harness import NULL, Server, graph

from antiphon.__main__ import main
from antiphon.plugins.doors.client import Completion

SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 9}
LINES = {
    "tokenizer": ("actors.tokenizer.cell='text'", "text"),
    "drafter": ("actors.drafter.cell='drafts'", "drafts"),
    "verifier": ("actors.verifier.cell='verdicts'", "verdicts"),
}
DRAFTING = (plugin("Oracle"), "actors.drafter.options={shape='tree', temperature=0.8, top_k=40, top_p=0.95, seed=9}",
            "actors.scheduler.options.length={plugin='fixed', max=16}")
REQUESTS = [*asks(8, 61), *(Ask(a.prompt, a.max_tokens, **SAMPLED) for a in asks(8, 62))]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def together() -> list[Completion]:
    """What the deployment gives with every actor where the preset has it."""
    with graph(*DRAFTING, *POOL) as llm:
        found = at_once(llm.address, REQUESTS)
    assert_owed(REQUESTS, found)
    return found


@pytest.mark.feature("placement", "drafts", "trees", "sampling", "windows", "chunked-prefill", "direct-delivery")
@pytest.mark.parametrize(("actor", "name"), [
    ("tokenizer", "zmq"), ("drafter", "direct"), ("verifier", "zmq"), ("verifier", "direct"),
])
def test_one_line_moves_an_actor_and_the_tokens_stay(
        tmp_path: Path, together: list[Completion], actor: str, name: str) -> None:
    line, cell = LINES[actor]
    settings = (f"delivery={name!r}", "actors.scheduler.options.max_chunk=16", *DRAFTING, *POOL)
    with Server(tmp_path, line, *settings) as server:
        assert set(server.cells()) == {"front", "step", cell}
        moved = at_once(server.address, REQUESTS)
        with server.client() as client:
            assert client.stats()["scheduler"]["accepted"] > 0
        assert server.stop() == 0
    assert list(map(answered, moved)) == list(map(answered, together))


@pytest.mark.feature("placement", "one-ahead", "preemption", "direct-delivery")
def test_steps_go_ahead_and_sequences_give_way_beside_a_tokenizer_elsewhere(tmp_path: Path) -> None:
    small = ("actors.allocator.options.block_size=4", "actors.allocator.options.blocks=40")
    with Server(tmp_path, LINES["tokenizer"][0], "delivery='direct'", *small) as server:
        assert_owed(REQUESTS, at_once(server.address, REQUESTS))
        with server.client() as client:
            facts = client.stats()["scheduler"]
        assert facts["peak_flight"] == 2
        assert facts["preempted"] > 0
        assert server.stop() == 0


@pytest.mark.parametrize(("actor", "words"), [
    ("tokenizer", "gateway -> tokenizer: leaves cell front for text: per request: its text, then 4 bytes for each"),
    ("drafter", "scheduler -> drafter: leaves cell step for drafts: per sequence and step: 4 bytes for each committed"),
    ("verifier", "scheduler -> verifier: leaves cell step for verdicts: per verified row: 4 bytes for greedy; 8 bytes"),
])
def test_check_says_what_the_edge_then_costs(actor: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    def check(*settings: str) -> str:
        capsys.readouterr()
        command = ["check", "standard"]
        for setting in (*NULL, *settings):
            command += ["--set", setting]
        assert main(command) == 0
        return capsys.readouterr().out

    assert words in check(LINES[actor][0])
    assert "leaves cell" not in check()
