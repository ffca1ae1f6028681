"""How long a tier takes for so many bytes, learnt from what it took.

It does not know what is transferred.
"""

WEIGHT = 0.2  # of the newest observation
MOST = 1e11  # bytes per second; no memory is quicker, so two observations that say so are noise
LEAST = 1e-7  # seconds; a clock's grain must not make a rate infinite


class Estimate:
    """seconds = latency + bytes / rate, both exponentially weighted averages."""

    def __init__(self) -> None:
        self.latency = 0.0  # seconds
        self.rate = 0.0  # bytes per second; 0: nothing is known

    def begin(self, small: tuple[int, float], large: tuple[int, float]) -> None:
        """Start from two observations (bytes, seconds)."""
        self.rate = min(MOST, max(1.0, (large[0] - small[0]) / max(LEAST, large[1] - small[1])))
        self.latency = max(LEAST, small[1] - small[0] / self.rate)

    def observe(self, amount: int, seconds: float) -> None:
        """Learn: whichever of the two makes up most of the time takes the difference."""
        seconds = max(LEAST, seconds)
        moving = amount / self.rate if self.rate else seconds
        if moving >= self.latency:
            left = max(seconds - self.latency, seconds / 10)
            # Times are averaged, not rates: one quick reading out of a cache would outweigh many slow ones.
            self.rate = amount / (WEIGHT * left + (1 - WEIGHT) * moving) if amount else self.rate
        else:
            self.latency += WEIGHT * (max(LEAST, seconds - moving) - self.latency)

    def seconds(self, amount: int) -> float:
        """Time that so many bytes will take."""
        return self.latency + (amount / self.rate if self.rate else 0.0)

    def amount(self, seconds: float) -> int:
        """Bytes to move at once, at least 1, so that it takes about so long, or the latency is a fifth of it."""
        return max(1, int(self.rate * max(seconds - self.latency, 4 * self.latency)))
