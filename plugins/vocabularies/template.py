"""Renders a conversation with the model's own chat template.

It does not know tokens: the result is text, and who wrote which part of it is the encoder's concern.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template
from jinja2.exceptions import TemplateError as JinjaError

from antiphon.actors.tokenizer import TemplateError
from antiphon.plugins.vocabularies.sandbox import BoundedEnvironment, TooLong, deadline

_COMPILE_SECONDS = 10.0
_DEPTH = 64  # levels of lists and objects in a message


class ChatTemplate:
    """The templates of one model. Rendering may run on several threads at once."""

    def __init__(self, sources: Mapping[str, str], names: Mapping[str, str], seconds: float, limit: int):
        self.names, self.seconds = dict(names), seconds
        self.environment = BoundedEnvironment(limit)
        self.environment.filters["tojson"] = _tojson
        self.environment.globals["raise_exception"] = _raise
        self.environment.globals["strftime_now"] = _now
        self.templates: dict[str, Template | TemplateError] = {n: self._compile(s) for n, s in sources.items()}

    def __bool__(self) -> bool:
        return bool(self.templates)

    def render(self, messages: Sequence[Any], tools: Sequence[Any]) -> str:
        """Text of the conversation, ready for the assistant's answer.

        Raises TemplateError: there is no template, it fails, or it runs past its time or size limit.
        """
        if not messages:
            raise TemplateError("a conversation needs at least one message")
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        template = self.templates.get(name)
        if template is None:
            raise TemplateError("this model has no chat template; send plain text with raw set, or token ids")
        if isinstance(template, TemplateError):
            raise template
        for message in messages:
            if not isinstance(message, dict):
                raise TemplateError(f"a message must be an object, found {type(message).__name__}")
        # Absent and null are the same to callers; templates print a null as "None".
        shown = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            with deadline(self.seconds):
                return template.render(
                    **self.names, messages=shown, tools=list(tools) or None, documents=None, add_generation_prompt=True
                )
        except JinjaError as cause:
            raise TemplateError(f"the model's chat template refuses these messages: {cause.message}") from cause
        except TooLong as cause:
            raise TemplateError(f"the model's chat template was stopped: {cause}") from cause
        except Exception as cause:  # whatever an expression of the template raises
            raise TemplateError(f"the model's chat template fails on these messages: {cause!r}") from cause

    def _compile(self, source: str) -> Template | TemplateError:
        """The template, or the error that each use of it raises: a model without chat still completes text."""
        try:
            with deadline(_COMPILE_SECONDS):
                return self.environment.from_string(source)
        except JinjaError as cause:
            return TemplateError(f"the model's chat template does not compile: {cause}")
        except Exception as cause:  # noqa: BLE001 - deep nesting, huge numbers: all found while compiling
            return TemplateError(f"the model's chat template does not compile: {cause!r}")


def plain(value: Any, depth: int = _DEPTH) -> Any:
    """Copy of a message as JSON types only, so that a template can reach no method of ours.

    Raises TemplateError: another type, or nested too deep.
    """
    if depth == 0:
        raise TemplateError(f"a message nests deeper than {_DEPTH} levels")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TemplateError("the keys of a message must be texts")
        return {str(key): plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, depth - 1) for item in value]
    raise TemplateError(f"a message holds a {type(value).__name__}; it may hold texts, numbers, lists and objects")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as models were trained on it: Jinja's own filter writes ``<`` as an escape, for use inside HTML."""
    if isinstance(indent, int) and indent > _DEPTH:
        raise TooLong(f"tojson indents by {indent}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise JinjaError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
