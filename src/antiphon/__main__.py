"""The ``antiphon`` command: finds the verb, imports that one alone, prints what went wrong in plain lines.

It does not know any verb; each is an entry point in the group ``antiphon.command``.
"""

import argparse
import ast
import importlib.util
import os
import sys
import threading
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from antiphon import __version__

USAGE_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code."""
    for number in range(3):  # a closed standard stream's number would go to the next socket
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    arguments = list(sys.argv[1:] if argv is None else argv)
    points = {point.name: point for point in entry_points(group="antiphon.command")}
    try:
        if not arguments or arguments[0].startswith("-"):
            code = _outer(arguments, points)
        elif arguments[0] not in points:
            code = _unknown(arguments[0], points)
        else:
            code = _command(points[arguments[0]], arguments[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _at_once(INTERRUPTED)
    except BrokenPipeError:
        # The reader has gone. What is still buffered must not fail again when the interpreter flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as cause:  # a full disk behind stdout
        print(f"antiphon: {cause}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return _at_once(code)


def _at_once(code: int) -> int:
    """End now if native code may still run on a thread: taking the interpreter down under it aborts."""
    if any(thread.daemon and thread.name.startswith("device:") for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _command(point: EntryPoint, arguments: list[str]) -> int:
    from antiphon.runtime.errors import ConfigError, PluginError, RuntimeFault
    from antiphon.runtime.plugin import resource

    try:
        command = resource("command", point.name)()
        parser = argparse.ArgumentParser(prog=f"antiphon {point.name}", description=_sentence(command.help))
        command.configure(parser)
        parse = parser.parse_intermixed_args if command.intermixed else parser.parse_args
        return int(command.run(parse(arguments)))
    except SystemExit as stop:  # argparse has printed help or what is wrong
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except ConfigError as error:
        print(*error.problems, sep="\n", file=sys.stderr)
        return USAGE_ERROR
    except PluginError as error:
        print(error, file=sys.stderr)
        return USAGE_ERROR
    except RuntimeFault as error:
        print(f"antiphon {point.name}: {error}", file=sys.stderr)
        return 1


def _outer(arguments: list[str], points: dict[str, EntryPoint]) -> int:
    """``--help``, ``--version``, or nothing at all."""
    width = max((len(name) for name in points), default=0)
    verbs = "\n".join(f"  {name:{width}}  {summary(point)}" for name, point in sorted(points.items()))
    parser = argparse.ArgumentParser(
        prog="antiphon",
        usage="antiphon COMMAND [ARGUMENTS]",
        description="An LLM inference runtime of actors and plugins.",
        epilog=f"commands:\n{verbs}\n\n`antiphon COMMAND --help` tells more about one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"antiphon {__version__}")
    try:
        parser.parse_args(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    parser.print_help(sys.stderr)
    return USAGE_ERROR


def _unknown(name: str, points: dict[str, EntryPoint]) -> int:
    import difflib

    near = difflib.get_close_matches(name, points, n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    print(f"antiphon: no command {name!r}.{meant} Commands: {', '.join(sorted(points))}", file=sys.stderr)
    return USAGE_ERROR


def summary(point: EntryPoint) -> str:
    """A command's ``help`` line, read from its source: importing seven modules would make ``--help`` slow."""
    try:
        spec = importlib.util.find_spec(point.module)
        if spec is None or spec.origin is None:
            return ""
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    except (ImportError, OSError, SyntaxError, ValueError):
        return ""
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == point.attr):
        for node in cls.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            value = getattr(node, "value", None)
            if isinstance(target, ast.Name) and target.id == "help" and isinstance(value, ast.Constant):
                return str(value.value)
    return ""


def _sentence(line: str) -> str:
    return f"{line[:1].upper()}{line[1:]}." if line else ""


if __name__ == "__main__":
    sys.exit(main())
