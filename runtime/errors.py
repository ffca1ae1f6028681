"""Every error of the microkernel, and who sees it.

It does not know the errors of actors and plugins: those live beside what raises them.
"""


class RuntimeFault(Exception):
    """Root of the microkernel's errors."""


class ConfigError(RuntimeFault):
    """Seen by the operator before anything starts. One or more problems, each naming file, key and remedy."""

    def __init__(self, *problems: "Problem"):
        self.problems = problems
        super().__init__("\n".join(str(p) for p in problems))


class Problem:
    """One mistake in a deployment: where it is, what was found, what would be accepted."""

    __slots__ = ("file", "found", "key", "remedy")

    def __init__(self, file: str, key: str, found: str, remedy: str):
        self.file, self.key, self.found, self.remedy = file, key, found, remedy

    def __str__(self) -> str:
        where = f"{self.file}: {self.key}" if self.key else self.file
        return f"{where}: {self.found.rstrip('.')}. {self.remedy}".rstrip()


class PluginError(RuntimeFault):
    """Seen by the operator: a plugin cannot be found, fails to load, or speaks another API version."""


class AskFailed(RuntimeFault):
    """Seen by the asking actor: the receiver's handler raised; carries the cause as text."""


class AskTimeout(AskFailed):
    """Seen by the asking actor: no reply within the deadline."""


class PeerRestarted(AskFailed):
    """Seen by the asking actor: the receiver's cell died or restarted while the ask was in flight."""


class Overloaded(AskFailed):
    """Seen by the sender: the peer takes no more messages (credits and outbox are used up)."""


class Oversized(AskFailed):
    """Seen by the sender: a message whose frames are too many or too long to travel."""


class BadFrame(RuntimeFault):
    """Seen in counters and the log only: a frame that does not decode costs that frame."""


class CellFailed(RuntimeFault):
    """Seen by whoever runs a cell (the root, an embedding program): it could not start or has ended by itself.

    Names the actor and the cause where known.
    """


class Escalated(RuntimeFault):
    """Seen by the operator as a non-zero exit: a cell died more often than its supervision allows."""
