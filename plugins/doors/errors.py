"""What callers catch: one tree of errors, each with what to do about it.

It does not know how errors travel.
"""


class AntiphonError(Exception):
    """Root of everything the client raises."""


class Refused(AntiphonError):
    """The server will not serve the request. ``kind`` is machine-readable; ``retry_after`` seconds, 0: do not retry.

    Kinds: "invalid", "too_long", "overloaded", "duplicate", "poison", "shutting_down", "cancelled", "unavailable".
    """

    def __init__(self, kind: str, reason: str, retry_after: float = 0.0):
        super().__init__(f"{kind}: {reason}" + (f" (try again in {retry_after:g} s)" if retry_after else ""))
        self.kind = kind
        self.reason = reason
        self.retry_after = retry_after


class Timeout(AntiphonError, TimeoutError):
    """Nothing came within the deadline the caller gave."""


class Disconnected(AntiphonError, ConnectionError):
    """The server cannot be reached, or was gone for longer than the client's patience."""


class ProtocolMismatch(AntiphonError):
    """Client and server speak incompatible versions of the door."""
