"""Figures of a bench: values by metric, as JSON lines or as a table.

It does not know what is measured.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class BenchError(Exception):
    """Seen by whoever runs ``antiphon bench``: nothing was measured, and why. ``code``: 2 if the caller's mistake."""

    def __init__(self, reason: str, code: int = 1):
        super().__init__(reason)
        self.code = code


class Figures:
    """Measured values by metric, in the order in which the metrics came."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self.labels: dict[str, dict[str, Any]] = {}
        self._groups: dict[str, list[str]] = {}  # what was measured several times under other conditions -> names

    def add(self, metric: str, value: float) -> None:
        """Add one run's value."""
        self.values.setdefault(metric, []).append(value)

    def take(self, group: str, values: Mapping[str, Sequence[float]], **labels: Any) -> None:
        """Add metrics ``GROUP NAME``; ``labels`` stand beside them in the JSON form, groups side by side in a table."""
        self._groups[group] = list(values)
        for name, measured in values.items():
            self.values[f"{group} {name}"] = list(measured)
            self.labels[f"{group} {name}"] = labels

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
        """The same for people; of groups only the medians."""
        if self._groups:
            yield from self._side_by_side()
            return
        width = max((len(metric) for metric in self.values), default=0)
        yield f"{'':{width}}  {'median':>10}  {'min':>10}  {'max':>10}   n"
        for metric, values in self.values.items():
            numbers = (statistics.median(values), min(values), max(values))
            yield f"{metric:{width}}  {'  '.join(f'{_shown(n):>10}' for n in numbers)}  {len(values):>2}"


    def _side_by_side(self) -> Iterator[str]:
        names = list(dict.fromkeys(name for group in self._groups.values() for name in group))
        width, columns = max(map(len, names)), [max(10, len(group)) for group in self._groups]
        yield "  ".join([f"{'':{width}}", *(f"{g:>{c}}" for g, c in zip(self._groups, columns, strict=True))])
        for name in names:
            cells = [_shown(self.median(f"{group} {name}")) for group in self._groups]
            yield "  ".join([f"{name:{width}}", *(f"{v:>{c}}" for v, c in zip(cells, columns, strict=True))])


def _short(value: float) -> float:
    """Six digits: more would be noise."""
    return float(f"{value:.6g}")


def _shown(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
