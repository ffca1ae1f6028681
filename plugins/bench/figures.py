"""Figures of a bench: values by metric, as JSON lines or as a table.

It does not know what is measured.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from typing import Any


class BenchError(Exception):
    """Seen by whoever runs ``antiphon bench``: nothing was measured, and why."""


class Figures:
    """Measured values by metric, in the order in which the metrics came."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self.labels: dict[str, dict[str, Any]] = {}

    def add(self, metric: str, value: float) -> None:
        """Add one run's value."""
        self.values.setdefault(metric, []).append(value)

    def take(self, metric: str, values: Sequence[float], **labels: Any) -> None:
        """Add the values of several runs; ``labels`` stand beside them in the JSON form."""
        self.values.setdefault(metric, []).extend(values)
        self.labels.setdefault(metric, {}).update(labels)

    def median(self, metric: str) -> float:
        """Median over the runs. Raises KeyError: nothing was measured under this name."""
        return statistics.median(self.values[metric])

    def lines(self, **labels: Any) -> Iterator[str]:
        """One JSON object a metric: ``{"metric", "median", "min", "max", "n"}`` and the labels."""
        for metric, values in self.values.items():
            row = {"metric": metric, "median": _short(statistics.median(values)), "min": _short(min(values)),
                   "max": _short(max(values)), "n": len(values)}
            yield json.dumps({**row, **self.labels.get(metric, {}), **labels})

    def table(self) -> Iterator[str]:
        """The same for people."""
        width = max((len(metric) for metric in self.values), default=0)
        yield f"{'':{width}}  {'median':>10}  {'min':>10}  {'max':>10}   n"
        for metric, values in self.values.items():
            numbers = (statistics.median(values), min(values), max(values))
            yield f"{metric:{width}}  {'  '.join(f'{_shown(n):>10}' for n in numbers)}  {len(values):>2}"


def _short(value: float) -> float:
    """Six digits: more would be noise."""
    return float(f"{value:.6g}")


def _shown(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.0f}"
