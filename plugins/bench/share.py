"""The runtime's share of a step, with the deployment in processes of its own and every stream read in this one.

It does not know what the rest is spent on. Definitions, all over a window of steps in steady state, in which every
stream decodes (``execute`` and ``verify`` are the stages that the device thread runs for each step):

- ``step_ms``: wall time from plan to Commit. With two steps in flight the intervals from a step's plan to its Commit
  overlap and leave no gap, so their union between two Commits N steps apart is the wall time between these Commits.
  The executor notes time and stage seconds as each Commit arrives, so both are read at the same moment.
- ``device_ms``: seconds the device thread spends in stages, over N. A stage that waits for the GIL counts as busy;
  what the runtime takes from the device in that way shows beside ``alone_ms``.
- ``runtime_share``: 1 - device_ms / step_ms.
- ``alone_ms``: the same stages with no actors around them, in this process after the deployment has ended: ``execute``
  by plugins/backends/alone.py on the same prompts, at the same lengths, and ``verify`` on logits of the same shape.
"""

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from antiphon.actors.rows import SequenceParams
from antiphon.actors.verifier import Rows
from antiphon.plugins.bench.deployment import Deployment
from antiphon.plugins.bench.figures import BenchError, Figures
from antiphon.plugins.bench.measure import NEWS
from antiphon.plugins.bench.workloads import Prompt, Workloads
from antiphon.plugins.doors.client import AsyncClient
from antiphon.runtime import check
from antiphon.runtime.assembly import actor_class
from antiphon.runtime.options import divide, typed_sections
from antiphon.runtime.plan import Plan
from antiphon.runtime.plugin import resource
from antiphon.runtime.tables import Findings

Found = dict[int, defaultdict[str, list[float]]]  # by batch and name, a value a run
SETTLE = 16  # tokens that every stream has before a window begins
SLACK = 512  # tokens beyond the window that a stream may give while the notes are read
CHUNK = 512  # rows of a prefill step alone


class Work(NamedTuple):
    """What to measure."""

    config: str
    settings: Sequence[str]
    workloads: Workloads
    batches: Sequence[int]
    steps: int
    runs: int

    def prompts(self, batch: int, run: int) -> list[Prompt]:
        """The first ``batch`` prompts of a variant of workload C, over again if it has fewer."""
        group = self.workloads.C[self.workloads.variant(run, "C")]
        return [group[i % len(group)] for i in range(batch)]


class Streams:
    """Streams of this process, each followed by a task of its own; counts what has come."""

    def __init__(self, client: AsyncClient, prompts: Sequence[Prompt], tokens: int):
        self._counts = [0] * len(prompts)
        self._goal = 0
        self._behind: set[int] = set()
        self._reached = asyncio.Event()
        self._tasks = [asyncio.ensure_future(self._follow(client, i, p, tokens)) for i, p in enumerate(prompts)]

    async def reach(self, goal: int) -> None:
        """Wait until every stream has ``goal`` tokens. Raises BenchError: one ended before."""
        self._goal, self._behind = goal, {i for i, count in enumerate(self._counts) if count < goal}
        self._reached.clear()
        waiting = asyncio.ensure_future(self._reached.wait())
        try:
            if self._behind:
                await asyncio.wait([waiting, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        self.check()

    def check(self) -> None:
        """Raise BenchError if a stream has ended."""
        for task in self._tasks:
            if task.done():
                raise BenchError(f"a stream ended before the window was over: {task.exception() or 'it is complete'}")

    async def close(self) -> None:
        """Cancel them, here and at the server."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, client: AsyncClient, number: int, prompt: Prompt, tokens: int) -> None:
        async for delta in client.stream(prompt, max_tokens=tokens, ignore_eos=True):
            self._counts[number] += len(delta.ids)
            if self._counts[number] >= self._goal and self._behind:
                self._behind.discard(number)
                if not self._behind:
                    self._reached.set()


class Commits(NamedTuple):
    """The executor's notes at a Commit: how many there were, when the last came, seconds in stages by then."""

    number: int
    at: float
    stages: dict[str, float]


async def commits(client: AsyncClient) -> Commits:
    """The executor's notes now."""
    for facts in (await client.stats()).values():
        if isinstance(facts, dict) and "commits" in facts:
            return Commits(facts["commits"], facts["committed_at"], facts["committed_stages_s"])
    raise BenchError("no executor of this deployment tells when its steps were committed")


async def window(client: AsyncClient, prompts: Sequence[Prompt], steps: int) -> dict[str, float]:
    """One window of at least ``steps`` steps; figures by name."""
    streams = Streams(client, prompts, tokens=SETTLE + 2 * steps + SLACK)
    try:
        await streams.reach(SETTLE)
        begin = await commits(client)
        await streams.reach(SETTLE + steps + 4)  # reading the notes has taken a step or two
        end = await commits(client)
        streams.check()
    finally:
        await streams.close()
    await _idle(client)
    return figures_of(begin, end)


async def _idle(client: AsyncClient) -> None:
    """Wait until what was cancelled has ended: the next window begins with nothing running."""
    ends = time.monotonic() + 30.0
    while any(facts.get("open") for facts in (await client.stats()).values() if isinstance(facts, dict)):
        if time.monotonic() > ends:
            raise BenchError("cancelled streams did not end within 30 s")
        await asyncio.sleep(0.02)


def figures_of(begin: Commits, end: Commits) -> dict[str, float]:
    """Figures by name of what lies between two Commits."""
    count = end.number - begin.number
    stages = {name: (s - begin.stages.get(name, 0.0)) / count * 1e3 for name, s in end.stages.items()}
    step, device = (end.at - begin.at) / count * 1e3, sum(stages.values())
    return {"runtime_share": 1 - device / step, "step_ms": step, "device_ms": device,
            "execute_ms": stages.get("execute", 0.0), "verify_ms": stages.get("verify", 0.0)}


def share(work: Work, say: Callable[[str], None]) -> Figures:
    """Measure in the deployment, then alone. Raises BenchError, and AntiphonError of the client."""
    found: Found = {batch: defaultdict(list) for batch in work.batches}
    with Deployment(work.config, work.settings) as deployment:
        asyncio.run(_windows(deployment, work, found, say))
    _alone(work, found, say)
    figures = Figures()
    for batch, values in found.items():
        figures.take(f"share {batch}", values, batch=batch)
    return figures


async def _windows(deployment: Deployment, work: Work, found: Found, say: Callable[[str], None]) -> None:
    async with await deployment.connect(NEWS) as client:
        for batch in work.batches:
            for run in range(work.runs + 1):
                say(f"batch {batch}: {f'run {run} of {work.runs}' if run else 'warming up'}")
                prompts, steps = work.prompts(batch, run or 1), work.steps if run else SETTLE
                figures = await deployment.watched(window(client, prompts, steps))
                for name, value in figures.items() if run else ():
                    found[batch][name].append(value)


# ---- the stages alone


def _alone(work: Work, found: Found, say: Callable[[str], None]) -> None:
    """Only now is the backend loaded here: before, it would have taken memory and caches from the deployment."""
    from antiphon.plugins.backends.alone import pools, run_alone

    plan, _ = check.examine(work.config, work.settings)
    backend, rule = (_plugin(plan, kind) for kind in ("executor", "verifier"))
    facts = backend.facts()
    longest = max(len(p) for b in work.batches for r in range(1, work.runs + 1) for p in work.prompts(b, r))
    tokens = SETTLE + work.steps
    layout = pools(facts, max(work.batches) * -(-(longest + tokens) // 16))
    backend.load(layout)
    for batch in work.batches:
        for run in range(1, work.runs + 1):
            say(f"batch {batch}: run {run} of {work.runs} alone")
            steps = run_alone(backend, layout, work.prompts(batch, run), tokens, CHUNK).steps[SETTLE:]
            execute, verify = statistics.mean(steps) * 1e3, _verify_alone(rule, batch, facts.vocabulary) * 1e3
            for name, value in (("alone_ms", execute + verify), ("alone_execute_ms", execute),
                                ("alone_verify_ms", verify)):
                found[batch][name].append(value)


def _plugin(plan: Plan, kind: str) -> Any:
    """The first plugin of an actor, made outside any cell."""
    from antiphon.plugins.backends.alone import Bare

    instance = next(name for name, actor in plan.actors.items() if actor.kind == kind)
    findings = Findings(plan.file, plan.origins)
    use = next(iter(divide(actor_class(plan, instance), plan.actors[instance], findings).uses.values()))
    sections = typed_sections(plan, {"model": resource("section", "model")}, findings)
    findings.raise_any()
    return Bare(sections["model"]).build(use.kind, {"plugin": use.name, **use.options})


def _verify_alone(rule: Any, batch: int, vocabulary: int, times: int = 20) -> float:
    """Mean seconds of a greedy verdict on ``batch`` rows."""
    logits = np.random.default_rng(0).standard_normal((batch, vocabulary), dtype=np.float32)
    indexes = np.zeros(batch, np.int32)
    params = SequenceParams().rows(indexes, indexes)
    rows = Rows(logits, (), params, np.arange(batch + 1, dtype=np.int32), indexes, None)
    began = time.perf_counter()
    for _ in range(times):
        rule.verify(rows)
    return (time.perf_counter() - began) / times


