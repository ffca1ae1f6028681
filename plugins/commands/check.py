"""``antiphon check``: says everything that is wrong with a deployment, or what its edges cost.

It does not know the rules; runtime/check.py has them.
"""

import argparse
import json
import sys

from antiphon.plugins.commands.command import Command, add_config
from antiphon.runtime.check import examine
from antiphon.runtime.errors import ConfigError


class Check(Command):
    """Check a deployment without starting it."""

    name = "check"
    help = "explain every mistake in a deployment's config, or what will run where"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """CONFIG, --set, --json."""
        add_config(parser)
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def run(self, args: argparse.Namespace) -> int:
        """Print problems and return 2, or print cells and notes and return 0."""
        try:
            plan, notes = examine(args.config, args.overrides)
        except ConfigError as error:
            if args.json:
                found = [{"file": p.file, "key": p.key, "found": p.found, "remedy": p.remedy} for p in error.problems]
                print(json.dumps({"ok": False, "problems": found}))
            else:
                print(*error.problems, sep="\n")
                count = len(error.problems)
                print(f"{count} problem{'s' * (count > 1)}", file=sys.stderr)
            return 2
        if args.json:
            print(json.dumps({
                "ok": True,
                "file": plan.file,
                "cells": {name: cell.actors for name, cell in plan.cells.items()},
                "notes": [{"key": note.key, "text": note.text} for note in notes],
            }))
            return 0
        print(f"ok: {plan.file}")
        for name, cell in plan.cells.items():
            print(f"cell {name}: {', '.join(cell.actors)}")
        for note in notes:
            print(f"note: {note}")
        return 0
