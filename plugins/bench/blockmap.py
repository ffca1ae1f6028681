"""Draws a block map over time: a row for each block, a column for each step, a colour for what the block is to whom.

It does not know where the states come from.
"""

import colorsys
from pathlib import Path

import numpy as np

from antiphon.plugins.bench.figures import BenchError
from antiphon.plugins.bench.memory import ACTIVE, CACHED, FREE, MOVING, OTHER, QUARANTINED, BlockMap

SUFFIXES = (".png", ".svg")
NAMES = {FREE: ("free", "#f4f4f4"), CACHED: ("cached", "#b0b0b0"), MOVING: ("in transfer", "#f0c000"),
         QUARANTINED: ("quarantined", "#d00000"), OTHER: ("pinned or being moved", "#606060")}
HUES = 24  # colours of requests; then they come again
MOST_COLUMNS, MOST_ROWS = 1600, 1200  # more would not be seen


def ready(path: Path) -> None:
    """Raise BenchError if nothing can be drawn: better before measuring than after."""
    if path.suffix.lower() not in SUFFIXES:
        raise BenchError(f"--plot {path}: write a file name that ends in .png or .svg", 2)
    if not path.absolute().parent.is_dir():
        raise BenchError(f"--plot {path}: there is no directory {path.absolute().parent}", 2)
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as cause:
        raise BenchError(f"--plot needs matplotlib ({cause}): pip install 'antiphon[plot]'", 2) from None


def draw(block_map: BlockMap, path: Path) -> None:
    """Write the picture. Raises BenchError: the file cannot be written."""
    from matplotlib.colors import ListedColormap, to_hex
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    requests = [to_hex(colorsys.hls_to_rgb(i * 0.618034 % 1.0, 0.35 + 0.25 * (i % 3) / 2, 0.65)) for i in range(HUES)]
    colours = [NAMES[state][1] for state in range(ACTIVE)] + requests
    steps, blocks = block_map.states.shape
    shown = np.where(block_map.states < ACTIVE, block_map.states, ACTIVE + (block_map.states - ACTIVE) % HUES)
    shown = shown[::-(-steps // MOST_COLUMNS), ::-(-blocks // MOST_ROWS)].T
    figure = Figure(figsize=(12, 7), layout="constrained")
    axes = figure.subplots()
    axes.imshow(shown, aspect="auto", interpolation="nearest", origin="lower", cmap=ListedColormap(colours), vmin=0,
                vmax=len(colours) - 1, extent=(0, steps, 0, blocks))
    axes.set(xlabel="step", ylabel=f"block of {block_map.size} tokens", title="KV blocks over time")
    there = [state for state in NAMES if (block_map.states == state).any()]
    patches = [Patch(facecolor=NAMES[s][1], edgecolor="black", label=NAMES[s][0]) for s in there]
    patches.append(Patch(facecolor=requests[0], edgecolor="black", label="active, a colour for each request"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches))
    try:
        figure.savefig(path, dpi=130)
    except OSError as cause:
        raise BenchError(f"--plot {path}: {cause.strerror or cause}") from None
