"""A Jinja environment in which a template can neither run long nor grow large.

It does not know chats or tokens. Time: a trace function of the rendering thread raises past the deadline, in CPU
seconds of that thread, since a signal reaches only the main thread and a thread cannot be stopped from outside.
Size: every way to build text in one step (joining, ``~``, ``+``, ``*``, ``%``, wide padding) is checked before or
while it builds, so that nothing long happens between two lines that are traced.
"""

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_TEMPLATE_FILE = "<template>"  # the file name that Jinja gives to code compiled from a string


class TooLong(Exception):
    """Seen by the renderer only: the template ran past its time or built too large a text."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise TooLong in this thread once the body has used ``seconds`` of CPU time, between two lines of Python."""
    end = time.thread_time() + seconds

    def check(frame: FrameType, _event: str, _argument: Any) -> Any:
        if time.thread_time() > end:
            raise TooLong(f"it ran for more than {seconds:g} s")
        # Jinja's own frames are short; following only the template's lines keeps tracing cheap.
        return check if frame.f_code.co_filename == _TEMPLATE_FILE else None

    before = sys.gettrace()  # a debugger's or coverage's
    sys.settrace(check)
    try:
        yield
    finally:
        sys.settrace(before)


class _Generator(CodeGenerator):
    """Compiles ``a ~ b`` into the environment's checked join instead of an unchecked one."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - the name Jinja calls
        self.write("concat(map(str, (")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")))")


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; for us it is a plain block."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it for the instance

    def parse(self, parser: Parser) -> nodes.Node:
        """The body in a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Sandbox whose templates build no text or list longer than ``limit`` (characters, elements) in one step."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, limit: int):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.limit = limit
        self.concat = self.join  # type: ignore[method-assign]  # what compiled templates join their output with
        del self.globals["lipsum"]  # made to write text without end
        for name in ("center", "indent", "wordwrap", "batch", "slice", "format", "replace"):
            self.filters[name] = self._bounded(name, self.filters[name])

    def join(self, parts: Iterable[str]) -> str:
        """``"".join(parts)`` that stops at the limit."""
        kept, size = [], 0
        for part in parts:
            size += len(part)
            self._allow(size)
            kept.append(part)
        return "".join(kept)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operators that can build something large from small operands."""
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self._allow(len(left) + len(right))
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(times, int) and hasattr(sequence, "__len__"):
                    self._allow(len(sequence) * times)
            if isinstance(left, int) and isinstance(right, int):
                self._allow(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._allow(left.bit_length() * right)
        elif operator == "%" and isinstance(left, str):
            self._allow_call("format", (left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, PYI063 - Jinja's
        """Calls; those of a text's methods are checked first."""
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            __self._allow_call(getattr(method, "__name__", ""), (owner, *args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # keeps the marks by which Jinja knows what to pass
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._allow_call(name, (*args, *kwargs.values()))
            return function(*args, **kwargs)

        return bounded

    def _allow_call(self, name: str, arguments: tuple[Any, ...]) -> None:
        """No width past the limit, as an argument or inside a format, and no replacement that grows past it."""
        for argument in arguments:
            for number in argument if isinstance(argument, tuple) else (argument,):
                self._allow(number if isinstance(number, int) else 0)
        texts = [argument for argument in arguments if isinstance(argument, str)]
        if name in ("format", "format_map") and texts:
            self._allow(max((int(digits[-9:]) for digits in re.findall("[0-9]+", texts[0])), default=0))
        if name == "replace" and len(texts) == 3:
            text, old, new = texts
            self._allow(len(text) + text.count(old) * len(new))

    def _allow(self, size: int) -> None:
        if size > self.limit:
            raise TooLong(f"it builds more than {self.limit} characters")
