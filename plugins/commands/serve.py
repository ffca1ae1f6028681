"""``antiphon serve``: runs a deployment until it is told to stop.

It does not know cells; runtime/root.py starts and watches them.
"""

import argparse
import sys

from antiphon.plugins.commands.command import Command, add_config


class Serve(Command):
    """Run a deployment."""

    name = "serve"
    help = "run a deployment until SIGTERM or Ctrl-C"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """CONFIG and --set."""
        add_config(parser)
        parser.epilog = ("SIGTERM and Ctrl-C let open requests finish until deadlines.stop (10 s), then exit 0. "
                         "Exit codes: 0 stopped, 2 config, 70 a part did not start or died more often than "
                         "[supervision] allows.")

    def run(self, args: argparse.Namespace) -> int:
        """Check, start, supervise; the exit code."""
        from antiphon.runtime.check import examine
        from antiphon.runtime.root import deploy

        plan, notes = examine(args.config, args.overrides)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        return deploy(plan)
