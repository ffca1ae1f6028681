"""The contract of a command line verb.

It does not know any verb; ``antiphon`` finds each by its entry point and imports only the chosen one.
"""

import argparse
from typing import ClassVar


class Command:
    """One verb. ``name`` and ``help`` must be plain string literals: ``antiphon --help`` reads, not imports, them.

    A module that holds a command imports nothing heavy at its top; ``run`` may.
    """

    name: ClassVar[str] = ""
    help: ClassVar[str] = ""  # one line, no full stop
    intermixed: ClassVar[bool] = False  # options may stand between the positional arguments

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Declare arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the work; the exit code. ConfigError and PluginError may be raised: the caller prints them."""
        raise NotImplementedError


def add_config(parser: argparse.ArgumentParser) -> None:
    """The arguments of every verb that reads a deployment: CONFIG and --set."""
    parser.add_argument("config", nargs="?", default="standard", metavar="CONFIG",
                        help="a TOML file or a preset's name (default: standard)")
    parser.add_argument("--set", action="append", default=[], metavar="A.B.C=VALUE", dest="overrides",
                        help="override a key, e.g. --set actors.executor.plugin=null; may be repeated")
