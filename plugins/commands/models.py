"""``antiphon models``: lists the models that a name stands for, and fetches one.

It does not know where models come from; the catalogue does.
"""

import argparse
import json
import sys

from antiphon.plugins.commands.command import Command


class Models(Command):
    """List and fetch named models."""

    name = "models"
    help = "list the models that have a name here, or fetch one"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Nothing, or ``pull NAME``."""
        parser.add_argument("--json", action="store_true", help="print one JSON object a line")
        verbs = parser.add_subparsers(dest="verb", metavar="pull")
        pull = verbs.add_parser("pull", help="fetch a model, verify its SHA-256 and print where it lies")
        pull.add_argument("name", metavar="NAME")

    def run(self, args: argparse.Namespace) -> int:
        """Print a line a model, or the path of the fetched one."""
        from antiphon.plugins.catalogue.catalogue import CATALOGUE, facts, resolve
        from antiphon.plugins.catalogue.errors import CatalogueError

        if args.verb == "pull":
            try:
                # Any other path would resolve to itself: a mistyped name must not look like success.
                if args.name not in CATALOGUE:
                    raise CatalogueError(f"no model named {args.name!r}. Accepted: {', '.join(sorted(CATALOGUE))}")
                print(resolve(args.name))
            except CatalogueError as error:
                print(error, file=sys.stderr)
                return 2 if args.name not in CATALOGUE else 1
            return 0
        rows = facts()
        if args.json:
            for row in rows:
                print(json.dumps({**row, "path": str(row["path"]) if row["path"] else None}))
            return 0
        for row in rows:
            print(f"{row['name']}  {row['size'] / 1e6:.0f} MB, {row['licence']}, from {row['source']}")
            print(f"  {row['summary']}")
            print(f"  {row['path'] or 'not fetched: antiphon models pull ' + row['name']}")
        return 0
