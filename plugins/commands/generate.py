"""``antiphon generate``: answers prompts, in a private deployment or at a running server.

It does not know models; it is a client like any other.
"""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from antiphon.plugins.commands.command import Command

if TYPE_CHECKING:
    from antiphon.plugins.doors.client import AsyncClient, Completion

Prompt = str | list[int]
AT_ONCE = 256  # requests in flight


class Generate(Command):
    """Answer one or many prompts."""

    name = "generate"
    help = "answer prompts with a model, in a private deployment or at a running server"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Prompts, model, sampling, output."""
        parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="a prompt; several are answered at once")
        parser.add_argument("--file", type=Path, metavar="FILE", help="one prompt a line ('-': standard input)")
        parser.add_argument("--prompt-ids", type=Path, metavar="FILE", help="one JSON list of token ids a line")
        parser.add_argument("--raw", action="store_true", help="take text as it is, without the chat template")
        parser.add_argument("--model", help="catalogue name, HF directory or .gguf file (default: the config's)")
        parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], help="of the computation")
        parser.add_argument("--config", default="standard", help="deployment to start (default: standard)")
        parser.add_argument("--set", action="append", default=[], metavar="A.B.C=VALUE", dest="overrides",
                            help="override a key of the config; may be repeated")
        parser.add_argument("--address", help="ask the server at this address instead of starting a deployment")
        parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="most tokens (default: 256)")
        parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
        parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0: off (default)")
        parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1: off (default)")
        parser.add_argument("--seed", type=int, help="of the sampling; the same seed gives the same text")
        parser.add_argument("--stop-id", type=int, action="append", default=[], metavar="ID", help="a token that ends")
        parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
        parser.add_argument("--priority", type=int, default=0, metavar="P", help="-100..100, higher is served first")
        parser.add_argument("--no-cache", action="store_false", dest="cache", help="keep out of the prefix cache")
        parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds without news")
        parser.add_argument("--json", action="store_true", help="print one JSON object a line for each prompt")

    def run(self, args: argparse.Namespace) -> int:
        """Answer in the order of the prompts; 1 if one was refused."""
        from antiphon.plugins.doors.errors import AntiphonError

        given = [f"--{name}" for name in ("model", "dtype", "overrides") if getattr(args, name)]
        given += ["--config"] * (args.config != "standard")
        if args.address is not None and given:
            names = ', '.join(given).replace('overrides', 'set')
            print(f"antiphon generate: {names}: a server that runs has its own; leave it out or leave out "
                  "--address", file=sys.stderr)
            return 2
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _terminated)
        try:
            prompts = list(_prompts(args))
        except (OSError, ValueError) as cause:
            print(f"antiphon generate: {cause}", file=sys.stderr)
            return 2
        if not prompts:
            print("antiphon generate: no prompt; give PROMPT, --file or --prompt-ids", file=sys.stderr)
            return 2
        try:
            if args.address is not None:
                return asyncio.run(_answer(args.address, prompts, args))
            from antiphon.plugins.doors.llm import LLM

            with LLM(args.model, dtype=args.dtype, config=args.config, settings=args.overrides) as llm:
                return asyncio.run(_answer(llm.address, prompts, args))
        except AntiphonError as cause:
            print(f"antiphon generate: {cause}", file=sys.stderr)
            return 1


def _terminated(number: int, _frame: object) -> None:
    """Unwind, so that the private deployment is stopped and its files are removed."""
    raise SystemExit(128 + number)


def _prompts(args: argparse.Namespace) -> Iterator[Prompt]:
    yield from args.prompt
    if args.file is not None:
        try:
            text = sys.stdin.read() if str(args.file) == "-" else args.file.read_text(encoding="utf-8")
        except UnicodeDecodeError as cause:
            raise ValueError(f"{args.file} is no UTF-8 text: {cause}") from None
        yield from (line for line in text.splitlines() if line.strip())
    if args.prompt_ids is not None:
        for number, line in enumerate(args.prompt_ids.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip():
                continue
            try:
                ids = json.loads(line)
            except ValueError as cause:
                raise ValueError(f"{args.prompt_ids}, line {number}: not JSON: {cause}") from None
            if not isinstance(ids, list) or not all(type(i) is int for i in ids):
                raise ValueError(f"{args.prompt_ids}, line {number}: expected a JSON list of token ids")
            yield ids


async def _answer(address: str, prompts: list[Prompt], args: argparse.Namespace) -> int:
    from antiphon.plugins.doors.client import AsyncClient

    options: dict[str, Any] = {
        "max_tokens": args.max_tokens, "temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p,
        "seed": args.seed, "stop_ids": tuple(args.stop_id), "ignore_eos": args.ignore_eos, "raw": args.raw,
        "priority": args.priority, "cache": args.cache,
    }
    async with AsyncClient(address, timeout=args.timeout) as client:
        if len(prompts) == 1 and not args.json:
            await _stream(client, prompts[0], options)
            return 0
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(prompt: Prompt) -> "Completion | Exception":
            from antiphon.plugins.doors.errors import AntiphonError

            async with gate:
                try:
                    return await client.generate(prompt, **options)
                except AntiphonError as cause:
                    return cause

        answers = [asyncio.ensure_future(one(p)) for p in prompts]
        refused = 0
        for index, answer in enumerate(answers):
            result = await answer
            refused += isinstance(result, Exception)
            _show(index, prompts[index], result, args.json)
        return 1 if refused else 0


async def _stream(client: "AsyncClient", prompt: Prompt, options: dict[str, Any]) -> None:
    finish = ""
    async for delta in client.stream(prompt, **options):
        sys.stdout.write(delta.text)
        sys.stdout.flush()
        finish = delta.finish_reason
    sys.stdout.write("\n")
    if finish == "length":
        print(f"(stopped at --max-tokens {options['max_tokens']})", file=sys.stderr)


def _show(index: int, prompt: Prompt, result: "Completion | Exception", as_json: bool) -> None:
    if isinstance(result, Exception):
        print(json.dumps({"index": index, "error": str(result)}) if as_json else f"[{index}] {result}", flush=True)
    elif as_json:
        timing = {"ttft_s": result.ttft_s, "decode_tok_s": result.decode_tok_s, "total_s": result.total_s}
        print(json.dumps({
            "index": index, "prompt_tokens": len(result.prompt_ids), "tokens": result.ids, "text": result.text,
            "finish_reason": result.finish_reason, "timing": timing,
        }), flush=True)
    else:
        title = prompt if isinstance(prompt, str) else f"{len(prompt)} token ids"
        print(f"[{index}] {title}\n{result.text}\n", flush=True)
