"""``antiphon bench``: speed as a caller sees it, the null step taken apart, the runtime's share, what paging saves.

It does not know how anything is measured; plugins/bench does.
"""

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from antiphon.plugins.commands.command import Command

if TYPE_CHECKING:
    from antiphon.plugins.bench.figures import Figures

LETTERS = "ABCDE"
SWEEP = [10, 30, 100, 300, 1000]  # MB/s
# What each mode takes beside --json, --runs, --config and --set; anything else given with it is an error.
TAKES = {
    "workload": {"workload", "workloads", "model", "dtype", "in_process", "address"},
    "null": {"null", "batch", "steps", "delivery"},
    "share": {"share", "batch", "steps", "workloads", "model", "dtype"},
    "memory": {"memory", "plot", "requests"},
    "sessions": {"sessions", "conversations", "tokens", "sweep", "model", "dtype"},
}
RUNS = {"workload": 3, "null": 3, "share": 5, "memory": 1, "sessions": 1}
EPILOG = """\
workloads (greedy, end of sequence ignored, token ids in and out; --workloads FILE brings other prompts):
  A  one stream, 128 in, 128 out                  A ttft_ms, A decode_tok_s
  B  prefill, 2048 in, 1 out                      B prefill_tok_s
  C  32 at once, 256 in, 64 out each              C wall_s, C out_tok_s
  D  32 at once, 1024 shared and 32 own in, 32 out D wall_s cold-prefix, D wall_s warm-prefix, D ttft_ms of both;
                                                  first the server's cached prefixes are forgotten
  E  a chat prompt that asks to repeat, 256 out   E tok_s
--null takes the step of the null backend apart, in one process; all but steps_per_s in microseconds per step:
  us_per_step, us_null (its computation), us_without_null (the rest), us_cpu (processor time of the rest);
  us_hollow (a step that computes nothing) = us_hops + us_scheduling + us_hand_over + us_stages + us_front + us_rest;
  us_without_front (without tokenizer, gateway and door, which stand in a process of their own by default)
--share: runtime_share = 1 - device_ms / step_ms, decoding in steady state with the streams read in another process;
  device_ms is execute_ms and verify_ms, beside alone_ms, the same stages with no runtime around them
--memory: requests of mixed lengths on the null backend, in paged KV memory and in as much of it with blocks as long as
  a sequence may be: waste_pct (slots taken and not used; waste_pct_window in the window's table), at_once (sequences
  that run while others wait), at_once_peak, at_once_ratio; means over steps, about the same on any machine
--plot FILE: --memory, and a picture of what each block was to whom at each step (needs matplotlib: antiphon[plot])
--sessions: conversations that want four times the device's KV pool come back: ttft_ms of their second turns without
  tiers (recompute), with RAM and with a disk (as warm as the system keeps its files), as speedup; then RAM behind lines
  of --sweep MB/s, with loading forced, recomputing forced and chosen (auto): break_even_MB_s by time, switch_MB_s by
  choice; brought is the share of second turns' tokens that came from the tier

examples:
  antiphon bench --workload ABCDE --runs 3 --json
  antiphon bench --workload A --model model.gguf --dtype float32 --in-process
  antiphon bench --null --batch 32 --delivery direct
  antiphon bench --share --batch 1,32
  antiphon bench --memory --plot blocks.png
  antiphon bench --sessions --runs 1 --conversations 16 --tokens 512
Measure alone: another busy program on the machine changes every figure. Progress goes to standard error.
Exit codes: 0 measured, 1 nothing could be measured, 2 a mistake in the command line, the config or the prompts' file.
"""


class Bench(Command):
    """Measure."""

    name = "bench"
    help = "measure: workloads A-E, the null backend's step, the runtime's share of a real one, or memory"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Modes and their arguments."""
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = EPILOG
        mode = parser.add_mutually_exclusive_group()
        mode.add_argument("--workload", type=_letters, metavar="ABCDE", help="workloads to run (default: all five)")
        mode.add_argument("--null", action="store_true", default=None, help="the null backend's step, taken apart")
        mode.add_argument("--share", action="store_true", default=None, help="the runtime's share of a real step")
        mode.add_argument("--memory", action="store_true", default=None, help="what paging KV memory saves")
        mode.add_argument("--sessions", action="store_true", default=None, help="second turns whose KV was paged out")
        parser.add_argument("--runs", type=_count, metavar="N", help="times each figure is measured (default: 3; "
                            "--share: 5, --memory and --sessions: 1)")
        parser.add_argument("--json", action="store_true", help="print one JSON object a line for each metric: "
                            "metric, median, min, max, n, and the command that made it")
        parser.add_argument("--config", default="standard", metavar="CONFIG", help="deployment to start: a TOML file "
                            "or a preset's name (default: standard)")
        parser.add_argument("--set", action="append", default=[], metavar="A.B.C=VALUE", dest="overrides",
                            help="override a key of the config; may be repeated")
        model = parser.add_argument_group("--workload and --share")
        model.add_argument("--workloads", type=Path, metavar="FILE", help="other prompts, in the format of "
                           "plugins/bench/workloads.json; --share takes the prompts of its workload C")
        model.add_argument("--model", help="catalogue name, HF directory or .gguf file (default: the config's)")
        model.add_argument("--dtype", choices=["auto", "float32", "bfloat16"],
                           help="of the computation (default: the config's; --share: bfloat16)")
        talk = parser.add_argument_group("--sessions")
        talk.add_argument("--conversations", type=_count, metavar="N", help="at least 4 (default: 16)")
        talk.add_argument("--tokens", type=_count, metavar="N", help="of a first turn's prompt (default: 512)")
        talk.add_argument("--sweep", type=_counts, metavar="MB/s,...", help="rising (default: 10,30,100,300,1000)")
        door = parser.add_argument_group("--workload").add_mutually_exclusive_group()
        door.add_argument("--in-process", action="store_true", default=None,
                          help="measure with LLM in this process instead of a deployment in processes of its own")
        door.add_argument("--address", help="measure the server at this address instead of starting a deployment")
        step = parser.add_argument_group("--null and --share")
        step.add_argument("--batch", type=_counts, metavar="N,N", help="streams at once (default: 1,32,256; "
                          "--share: 1,32)")
        step.add_argument("--steps", type=_count, metavar="N", help="steps of a window (default: 200)")
        parser.add_argument_group("--null").add_argument(
            "--delivery", type=_deliveries, metavar="zmq,direct", help="how messages go (default: both)")

        memory = parser.add_argument_group("--memory")
        memory.add_argument("--requests", type=_count, metavar="N", help="asked at once (default: 96)")
        memory.add_argument("--plot", type=Path, metavar="FILE", help="draw the block map, as .png or .svg")

    def run(self, args: argparse.Namespace) -> int:
        """Measure and print; 1 if nothing could be measured, 2 for a mistake of the command line."""
        from antiphon.plugins.bench.figures import BenchError
        from antiphon.plugins.doors.errors import AntiphonError

        args.memory = args.memory or (args.plot is not None and not (args.null or args.share or args.workload)) or None
        mode = next((m for m in ("null", "share", "memory", "sessions") if getattr(args, m)), "workload")
        if problem := _unused(args, mode):
            print(f"antiphon bench: {problem}", file=sys.stderr)
            return 2
        args.runs = args.runs or RUNS[mode]
        args.dtype = args.dtype or ("bfloat16" if mode == "share" else None)
        labels = {"command": _command(args, mode)}
        try:
            if mode == "workload":
                labels["door"] = "in-process" if args.in_process else "zmq"
                figures = _workload(args)
            else:
                figures = {"null": _null, "share": _share, "memory": _memory, "sessions": _sessions}[mode](args)
        except (AntiphonError, BenchError) as cause:
            print(f"antiphon bench: {cause}", file=sys.stderr)
            return getattr(cause, "code", 1)
        for line in figures.lines(**labels) if args.json else _readable(figures, labels):
            print(line, flush=True)
        return 0


def _workload(args: argparse.Namespace) -> "Figures":
    from antiphon.plugins.bench.deployment import Deployment
    from antiphon.plugins.bench.measure import NEWS, InThisProcess, OverZmq, run_workloads
    from antiphon.plugins.bench.workloads import read
    from antiphon.plugins.doors.client import AsyncClient

    letters = args.workload or LETTERS
    workloads = read(args.workloads, letters)

    async def at_address() -> "Figures":
        async with AsyncClient(args.address, timeout=NEWS) as client:
            return await run_workloads(OverZmq(client), workloads, letters, args.runs, _say)

    async def at(deployment: Deployment) -> "Figures":
        async with await deployment.connect(NEWS) as client:
            return await deployment.watched(run_workloads(OverZmq(client), workloads, letters, args.runs, _say))

    if args.address is not None:
        return asyncio.run(at_address())
    if not args.in_process:
        with Deployment(args.config, _settings(args)) as deployment:
            return asyncio.run(at(deployment))
    from antiphon.plugins.doors.llm import LLM

    with LLM(args.model, dtype=args.dtype, config=args.config, settings=args.overrides, timeout=NEWS) as llm:
        at_once = max(len(group) for group in workloads.groups())
        return asyncio.run(run_workloads(InThisProcess(llm, at_once), workloads, letters, args.runs, _say))


def _null(args: argparse.Namespace) -> "Figures":
    from antiphon.plugins.bench.null_steps import DELIVERIES, Work, null_steps

    return null_steps(Work(args.config, args.overrides, args.batch or [1, 32, 256], args.delivery or DELIVERIES,
                           args.steps or 200, args.runs), _say)


def _share(args: argparse.Namespace) -> "Figures":
    from antiphon.plugins.bench.share import Work, share
    from antiphon.plugins.bench.workloads import read

    return share(Work(args.config, _settings(args), read(args.workloads, "C"), args.batch or [1, 32],
                      args.steps or 200, args.runs), _say)


def _memory(args: argparse.Namespace) -> "Figures":
    from antiphon.plugins.bench import blockmap
    from antiphon.plugins.bench.memory import Work, memory

    if args.plot is not None:
        blockmap.ready(args.plot)
    figures, block_map = memory(Work(args.config, args.overrides, args.requests or 96, args.runs), _say,
                                mapped=args.plot is not None)
    if block_map is not None:
        blockmap.draw(block_map, args.plot)
        _say(f"the block map is in {args.plot}")
    return figures


def _sessions(args: argparse.Namespace) -> "Figures":
    from antiphon.plugins.bench.sessions import Work, sessions

    sweep = sorted(args.sweep) if args.sweep else SWEEP
    return sessions(Work(args.config, _settings(args), args.conversations or 16, args.tokens or 512, sweep, args.runs),
                    _say)


def _settings(args: argparse.Namespace) -> list[str]:
    """Overrides of the config; strings are quoted as TOML quotes them."""
    named = {"model.path": args.model, "model.dtype": args.dtype}
    return [*args.overrides, *(f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None)]


def _unused(args: argparse.Namespace, mode: str) -> str:
    """What is wrong with the arguments together, or nothing."""
    everything = {name for names in TAKES.values() for name in names}
    for name in sorted(everything - TAKES[mode]):
        if getattr(args, name) is not None:
            return f"--{name.replace('_', '-')} does not go with --{mode}"
    if args.address is not None and (args.overrides or args.config != "standard" or args.model or args.dtype):
        return "--address measures a server that runs already: --config, --set, --model and --dtype say nothing to it"
    return ""


def _command(args: argparse.Namespace, mode: str) -> str:
    """The command line that measures the same."""
    parts = ["antiphon", "bench", f"--{mode}", *([args.workload or LETTERS] if mode == "workload" else [])]
    parts += ["--runs", str(args.runs)]
    for name in ("conversations", "tokens"):
        parts += [f"--{name}", str(getattr(args, name))] if getattr(args, name) else []
    for name in ("batch", "delivery", "sweep"):
        parts += [f"--{name}", ",".join(map(str, getattr(args, name)))] if getattr(args, name) else []
    for name in ("steps", "workloads", "model", "dtype", "address", "requests", "plot"):
        parts += [f"--{name}", str(getattr(args, name))] if getattr(args, name) else []
    parts += ["--config", args.config] if args.config != "standard" else []
    for setting in args.overrides:
        parts += ["--set", setting]
    return shlex.join([*parts, *(["--in-process"] if args.in_process else []), *(["--json"] if args.json else [])])


def _readable(figures: "Figures", labels: dict[str, Any]) -> Iterator[str]:
    yield f"# {labels['command']}"
    yield from figures.table()


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def _letters(text: str) -> str:
    letters = text.upper().replace(",", "")
    if not letters or set(letters) - set(LETTERS) or len(set(letters)) < len(letters):
        raise argparse.ArgumentTypeError(f"found {text!r}; write each workload once, of {LETTERS}")
    return letters


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; write a whole number from 1")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part.strip()) for part in text.split(",")]


def _deliveries(text: str) -> list[str]:
    found = [part.strip() for part in text.split(",")]
    if set(found) - {"zmq", "direct"}:
        raise argparse.ArgumentTypeError(f"found {text!r}; write zmq, direct, or both with a comma")
    return found
