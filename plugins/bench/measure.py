"""Runs workloads at a deployment and takes the figures that a caller sees, named and computed as for other engines.

It does not know how the deployment runs. Every clock starts when a prompt is sent and stops when its last token has
reached the caller; greedy, the end of sequence ignored, token ids in and out.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from antiphon.plugins.bench.figures import BenchError, Figures
from antiphon.plugins.bench.workloads import TOKENS, Prompt, Workloads
from antiphon.plugins.doors.client import AsyncClient, Completion
from antiphon.plugins.doors.errors import Refused
from antiphon.plugins.doors.sync import Client

HINT = ("; these prompts have ids up to {}: serve a model that has them, or bring others with --workloads. The null "
        "backend has as many as actors.executor.options.vocabulary says, the bytes tokenizer as "
        "actors.tokenizer.options.size")
NEWS = 600.0  # seconds without a token after which a request has failed: a whole group may be prefilled before it


class Answers(NamedTuple):
    """``seconds`` from the first prompt sent to the last token had."""

    seconds: float
    completions: list[Completion]


class Door(Protocol):
    """Where prompts go. ``name`` stands beside each figure."""

    name: str

    async def answer(self, prompts: Sequence[Prompt], tokens: int) -> Answers:
        """Ask all at once, greedy, for exactly ``tokens`` each."""

    async def forget(self) -> None:
        """Have cached prefixes forgotten."""


class OverZmq:
    """The default door: a client in this process, the deployment in others."""

    name = "zmq"

    def __init__(self, client: AsyncClient):
        self._client = client

    async def answer(self, prompts: Sequence[Prompt], tokens: int) -> Answers:
        """Ask all at once."""
        began = time.perf_counter()
        asked = (self._client.generate(prompt, max_tokens=tokens, ignore_eos=True) for prompt in prompts)
        completions = await asyncio.gather(*asked)
        return Answers(time.perf_counter() - began, list(completions))

    async def forget(self) -> None:
        """Have cached prefixes forgotten."""
        await self._client.flush()


class InThisProcess:
    """An ``LLM``, which programs with threads call."""

    name = "in-process"

    def __init__(self, llm: Client, at_once: int):
        self._llm = llm
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="caller")

    async def answer(self, prompts: Sequence[Prompt], tokens: int) -> Answers:
        """Ask all at once, each on a thread."""
        loop = asyncio.get_running_loop()

        def ask(prompt: Prompt) -> Completion:
            return self._llm.generate(prompt, max_tokens=tokens, ignore_eos=True)

        began = time.perf_counter()
        completions = await asyncio.gather(*(loop.run_in_executor(self._threads, ask, p) for p in prompts))
        return Answers(time.perf_counter() - began, list(completions))

    async def forget(self) -> None:
        """Have cached prefixes forgotten."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._llm.flush)


async def run_workloads(door: Door, workloads: Workloads, letters: Sequence[str], runs: int,
                        say: Callable[[str], None]) -> Figures:
    """Warm up, then measure each letter ``runs`` times. Raises BenchError, and AntiphonError of the client."""
    figures = Figures()
    say("warming up")
    await _warm_up(door, workloads, letters)
    for run in range(1, runs + 1):
        for letter in letters:
            say(f"run {run} of {runs}: {letter}")
            await _MEASURES[letter](door, workloads, run, figures)
    return figures


async def _warm_up(door: Door, workloads: Workloads, letters: Sequence[str]) -> None:
    """One short stream and one short batch."""
    if workloads.A:
        await _ask(door, [workloads.A[0]], 8)
    if workloads.C:
        await _ask(door, workloads.C[0], 4)
    if not workloads.A and not workloads.C:
        first = {"B": workloads.B[:1], "D": workloads.D[0].cold if workloads.D else [], "E": [workloads.E]}
        for letter in letters:
            await _ask(door, first[letter], 4)


async def _ask(door: Door, prompts: Sequence[Prompt], tokens: int) -> Answers:
    """Ask, and see that what came is what was asked for."""
    try:
        answers = await door.answer(prompts, tokens)
    except Refused as cause:
        hint = HINT.format(max(max(prompt) for prompt in prompts)) if "token id" in str(cause) else ""
        raise BenchError(f"a prompt was refused: {cause}{hint}") from cause
    for completion in answers.completions:
        if len(completion.ids) != tokens:
            raise BenchError(f"{tokens} tokens were asked for, {len(completion.ids)} came "
                             f"(finish reason {completion.finish_reason!r})")
    return answers


async def _one_stream(door: Door, workloads: Workloads, run: int, figures: Figures) -> None:
    prompt = workloads.A[workloads.variant(run, "A")]
    (completion,) = (await _ask(door, [prompt], TOKENS["A"])).completions
    figures.add("A ttft_ms", completion.ttft_s * 1e3)
    figures.add("A decode_tok_s", completion.decode_tok_s)


async def _prefill(door: Door, workloads: Workloads, run: int, figures: Figures) -> None:
    prompt = workloads.B[workloads.variant(run, "B")]
    (completion,) = (await _ask(door, [prompt], TOKENS["B"])).completions
    figures.add("B prefill_tok_s", len(prompt) / completion.total_s)


async def _many(door: Door, workloads: Workloads, run: int, figures: Figures) -> None:
    prompts = workloads.C[workloads.variant(run, "C")]
    answers = await _ask(door, prompts, TOKENS["C"])
    figures.add("C wall_s", answers.seconds)
    figures.add("C out_tok_s", len(prompts) * TOKENS["C"] / answers.seconds)


async def _shared_prefix(door: Door, workloads: Workloads, run: int, figures: Figures) -> None:
    pair = workloads.D[workloads.variant(run, "D")]
    await door.forget()  # a variant that was measured before would be cached
    for name, prompts in (("cold", pair.cold), ("warm", pair.warm)):
        answers = await _ask(door, prompts, TOKENS["D"])
        figures.add(f"D wall_s {name}-prefix", answers.seconds)
        figures.add(f"D ttft_ms {name}-prefix", statistics.median(c.ttft_s for c in answers.completions) * 1e3)


async def _repeating(door: Door, workloads: Workloads, run: int, figures: Figures) -> None:
    (completion,) = (await _ask(door, [workloads.E], TOKENS["E"])).completions
    figures.add("E tok_s", completion.decode_tok_s)


_MEASURES = {"A": _one_stream, "B": _prefill, "C": _many, "D": _shared_prefix, "E": _repeating}
