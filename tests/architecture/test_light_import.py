"""A caller's program does not pay for the server: no torch, no numpy behind the client."""

import subprocess
import sys


def test_the_client_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, antiphon; antiphon.Client, antiphon.AsyncClient, antiphon.Refused; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stdout.split())
    assert "antiphon.plugins.doors.client" in loaded
    assert not loaded & {"torch", "numpy", "tokenizers", "transformers", "uvloop"}


def test_every_public_name_resolves() -> None:
    import antiphon

    for name in antiphon.__all__:
        assert getattr(antiphon, name).__name__ == name
