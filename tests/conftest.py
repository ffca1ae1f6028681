"""How the tests run side by side; it knows none of them."""

import os

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # the others need the cores too: OpenMP's threads would wait for each other
    os.environ["OMP_NUM_THREADS"] = "1"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two tests at a time; those that measure or soak, and those that are named, one at a time."""
    alone = config.option.markexpr in ("bench", "soak", "slow") or any("::" in name for name in config.args)
    return 0 if alone or config.option.keyword else 2
