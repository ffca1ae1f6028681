"""``antiphon cache``: shows the KV memory of a running server, flushes its prefix cache, pins and unpins prefixes.

It does not know allocators; it is a client like any other.
"""

import argparse
import json
import re
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from antiphon.plugins.commands.command import Command

if TYPE_CHECKING:
    from antiphon.plugins.doors.sync import Client

USAGE = """\
antiphon cache [--address A] [--top N] [--json]
       antiphon cache [--address A] flush
       antiphon cache [--address A] pin (TEXT | --file FILE | --prompt-ids FILE) [--raw] [--seconds S]
       antiphon cache [--address A] unpin NUMBER"""
EPILOG = """\
Without an action it shows pools (in blocks; waste is what active blocks have and no sequence uses), how much of the
prompts was found, tiers, the prefixes used most, and pins. docs/counters.md explains the counters.
  flush   forgets all cached blocks that nobody holds; what runs or is pinned stays, tiers keep what they have
  pin     keeps what is cached of a prompt on the device: let a request compute it first; once more: from now on
  unpin   lets a pin go

examples:
  antiphon cache
  antiphon cache --address tcp://127.0.0.1:6000 --json
  antiphon cache pin --file system-prompt.txt --seconds 86400
Exit codes: 0 done, 1 refused or no server, 2 a mistake in the command line.
"""
SWITCH = ("the cache 'plain' keeps nothing; to keep prefixes start the server with\n"
          "  antiphon serve --set actors.allocator.plugin=hash     (or radix, which shares inside a block too)")
POOL = ("total", "free", "active", "cached", "transfer", "quarantined")
SIZES = ("bytes", "capacity")  # in names of facts
ORDER = ("tier", "state", "write", "bytes", "capacity", "records", "hits", "misses", "saved", "dropped", "corrupt",
         "errors")  # of a tier's facts; others follow


class Mistake(Exception):
    """Seen by whoever typed the command."""


class Cache(Command):
    """Look at a server's KV memory and tend it."""

    name = "cache"
    help = "show a running server's KV memory; flush its prefix cache, pin and unpin prefixes"
    intermixed = True

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Action, address, what to pin."""
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.usage, parser.epilog = USAGE, EPILOG
        parser.add_argument("words", nargs="*", metavar="ACTION", help="flush, pin TEXT or unpin NUMBER")
        parser.add_argument("--address", metavar="A", help="of the server (default: tcp://127.0.0.1:5777)")
        parser.add_argument("--top", type=int, default=10, metavar="N", help="prefixes to show (default: 10)")
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        pin = parser.add_argument_group("pin")
        pin.add_argument("--file", type=Path, metavar="FILE", help="the text to pin ('-': standard input)")
        pin.add_argument("--prompt-ids", type=Path, metavar="FILE", help="a JSON list of token ids to pin")
        pin.add_argument("--raw", action="store_true", help="take text as it is, without the chat template")
        pin.add_argument("--seconds", type=float, default=3600.0, metavar="S", help="how long (default: 3600)")

    def run(self, args: argparse.Namespace) -> int:
        """Do it and print; 1 if the server refuses or does not answer, 2 for a mistake of the command line."""
        from antiphon.plugins.doors.client import DEFAULT
        from antiphon.plugins.doors.errors import AntiphonError
        from antiphon.plugins.doors.sync import Client

        try:
            act = _action(list(args.words), args)
            with Client(args.address or DEFAULT, patience=PATIENCE) as client:
                facts, lines = act(client)
        except Mistake as cause:
            print(f"antiphon cache: {cause}", file=sys.stderr)
            return 2
        except AntiphonError as cause:
            print(f"antiphon cache: {cause}", file=sys.stderr)
            if "keeps no prefixes" in str(cause):
                print(SWITCH, file=sys.stderr)
            return 1
        print(json.dumps(facts) if args.json else "\n".join(lines))
        return 0


NUMBER = re.compile(r"|-|[0-9.e+]+( \S+)?")  # with a unit
WIDTH = 110  # of lines that go on
PATIENCE = 5.0  # seconds to reach the server
Done = tuple[dict[str, Any], list[str]]  # for machines, for people


def _action(words: list[str], args: argparse.Namespace) -> Callable[["Client"], Done]:
    """What to do with a client. Raises Mistake."""
    action = words.pop(0) if words else "show"
    sources = [*words, *(f for f in (args.file, args.prompt_ids) if f is not None)]
    if action == "pin":
        if len(sources) != 1:
            raise Mistake("give one prompt to pin: TEXT, --file FILE or --prompt-ids FILE")
        prompt = words[0] if words else _read(args)
        return lambda client: _pin(client, prompt, args.seconds, args.raw)
    if args.file is not None or args.prompt_ids is not None or args.raw:
        raise Mistake("--file, --prompt-ids and --raw go with 'pin'")
    if action == "unpin":
        if len(words) != 1 or not words[0].isdecimal():
            raise Mistake("give the number of one pin: unpin NUMBER; 'antiphon cache' shows them")
        return lambda client: _unpin(client, int(words[0]))
    if words or action not in ("show", "flush"):
        raise Mistake(f"found {' '.join([action, *words])!r}; the actions are flush, pin TEXT and unpin NUMBER; "
                      "a server's address goes behind --address")
    return _flush if action == "flush" else lambda client: _show(client, args.top)


def _read(args: argparse.Namespace) -> str | list[int]:
    """The prompt of a file. Raises Mistake."""
    path = args.file if args.file is not None else args.prompt_ids
    try:
        text: str = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        if args.file is not None:
            return text
        ids = json.loads(text)
    except (OSError, ValueError) as cause:
        raise Mistake(f"{path}: {cause}") from None
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise Mistake(f"{path}: expected one JSON list of token ids")
    return ids


def _show(client: "Client", top: int) -> Done:
    found = client.cache(top)
    lines: list[str] = []
    for name, memory in found["allocators"].items():
        lines += [*allocator(name, memory), ""]
    for name, facts in found["pagers"].items():
        lines += [*pager(name, facts), ""]
    return found, lines[:-1]


def _flush(client: "Client") -> Done:
    blocks = client.flush()
    return {"blocks": blocks}, [f"{blocks} cached blocks forgotten"]


def _pin(client: "Client", prompt: str | list[int], seconds: float, raw: bool) -> Done:
    pin = client.pin(prompt, seconds=seconds, raw=raw)
    return ({"pin": pin.number, "slots": pin.slots},
            [f"pin {pin.number}: {pin.slots} tokens are kept for {seconds:g} s"])


def _unpin(client: "Client", number: int) -> Done:
    if not client.unpin(number):
        from antiphon.plugins.doors.errors import Refused

        raise Refused("invalid", f"there is no pin {number}; 'antiphon cache' shows them")
    return {"unpinned": number}, [f"pin {number} has been let go"]


# ---- what people read


def allocator(name: str, memory: Mapping[str, Any]) -> list[str]:
    """One allocator's pools, hits, prefixes and pins."""
    size, counters = memory["block_size"], memory["counters"]
    pools = [[",".join(pool["groups"]), *(str(pool[state]) for state in POOL),
              _share(pool["waste"], pool["active"] * size)] for pool in memory["pools"]]
    lines = [f"{name}: blocks of {size} tokens",
             *table(["pool", *(s if s != "transfer" else "in transfer" for s in POOL), "waste"], pools), ""]
    queried = counters.get("queried_slots", 0)
    cached = any(pool["cached"] for pool in memory["pools"])
    if queried:
        device, tiers = counters.get("hit_slots", 0), counters.get("tier_slots", 0)
        lines.append(f"hits: of {queried} prompt tokens {device} found on the device ({_share(device, queried)}), "
                     f"{tiers} in tiers ({_share(tiers, queried)})")
    lines += _listed("counters", counters)
    if not queried and not cached:
        lines.append(f"nothing is cached: no prompt has been looked up yet, or {SWITCH}")
    if memory["prefixes"]:
        rows = [[p["key"], str(p["slots"]), str(p["hits"]), _ago(p["age"])] for p in memory["prefixes"]]
        lines += ["", *table(["prefix", "tokens", "hits", "last used"], rows)]
    if memory["pins"]:
        lines += ["", *table(["pin", "tenant", "keeps"],
                             [[str(p["pin"]), p["tenant"], p["keeps"]] for p in memory["pins"]])]
    return lines


def pager(name: str, facts: Mapping[str, Any]) -> list[str]:
    """One pager's tiers and counters."""
    tiers = [t for t in facts.get("tiers", ()) if isinstance(t, Mapping)]
    lines = _listed(name, {key: value for key, value in facts.items() if key != "tiers"})
    keys = dict.fromkeys(key for tier in tiers for key in tier)
    shown = [*(k for k in ORDER if k in keys), *(k for k in keys if k not in ORDER)]
    if tiers:
        lines += table(shown, [[_fact(k, tier.get(k, "")) for k in shown] for tier in tiers])
    return lines


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns, those of numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    right = [all(NUMBER.fullmatch(row[i]) for row in rows) for i in range(len(head))]
    return ["  " + "  ".join(f"{cell:>{w}}" if r else f"{cell:{w}}" for cell, w, r in
                             zip(row, widths, right, strict=True)).rstrip() for row in (head, *rows)]


def _listed(title: str, facts: Mapping[str, Any]) -> list[str]:
    text = ", ".join(f"{key} {_fact(key, value)}" for key, value in facts.items()) or "nothing to tell"
    return textwrap.wrap(f"{title}: {text}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit} ago"
    return f"{seconds:.1f} s ago"


def _fact(key: str, value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and any(s in key for s in SIZES):
        return _size(value) + ("/s" if key.endswith("per_s") else "")
    if key == "since" and isinstance(value, float):
        return _ago(max(0.0, time.time() - value))
    if key.endswith("_s") and not key.endswith("per_s") and isinstance(value, float):
        return f"{value * 1e3:.3g} ms"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _size(count: float) -> str:
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= length:
            return f"{count / length:.1f} {unit}"
    return f"{count:.0f} B"
