"""A private deployment inside the caller's program that behaves like a client.

It does not know actors; it starts the graph that a config declares.
"""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.plugins.doors.errors import AntiphonError
from antiphon.plugins.doors.sync import Client
from antiphon.runtime import check
from antiphon.runtime.errors import CellFailed
from antiphon.runtime.inprocess import InProcess


class LLM(Client):
    """``with LLM(model="smollm2-135m-instruct") as llm: llm.generate("Why is the sky blue?")``.

    ``model``: catalogue name, HF directory or ``.gguf`` file. ``config``: preset name or file; ``settings`` are
    overrides as ``--set`` takes them ("actors.allocator.options.memory=1GiB").
    """

    def __init__(self, model: str | None = None, *, dtype: str | None = None, config: str = "standard",
                 settings: Sequence[str] = (), timeout: float = 120.0):
        self._home = Path(tempfile.mkdtemp(prefix="antiphon-llm-"))
        address = f"ipc://{self._home}/door"
        overrides = [f"actors.gateway.options.listen={address!r}", "log.level='warning'", *settings]
        if model is not None:
            overrides.append(f"model.path={_quoted(model)}")
        if dtype is not None:
            overrides.append(f"model.dtype={_quoted(dtype)}")
        try:
            plan, _ = check.examine(config, overrides)
            self._graph = InProcess(plan)
            try:
                self._graph.start()
            except CellFailed as cause:
                raise AntiphonError(f"the deployment did not start: {cause}") from cause
            except BaseException:
                self._graph.stop(0.5)
                raise
        except BaseException:
            shutil.rmtree(self._home, ignore_errors=True)
            raise
        super().__init__(address, timeout=timeout)

    def close(self) -> None:
        """Stop the graph; idempotent."""
        super().close()
        self._graph.stop()
        shutil.rmtree(self._home, ignore_errors=True)

    @property
    def graph(self) -> Any:
        """The deployment, for tests and benches that look inside."""
        return self._graph


def _quoted(text: str) -> str:
    """TOML literal of a string that may look like another value."""
    import json

    return json.dumps(text)
