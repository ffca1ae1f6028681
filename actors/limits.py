"""What a single request may ask for: the checks that need nothing but the request.

It does not know what else is open, nor the model; the scheduler checks what depends on the model.
"""

from antiphon.actors.protocol import Sampling

Problem = tuple[str, str, float]  # kind, reason, seconds after which trying again may help

MOST_STOP_IDS = 1024
MOST_PRIORITY = 100
MOST_TOKENS = 1 << 24  # beyond any context; keeps sums of lengths far inside an int32
_INT32 = 1 << 31


def problem(request: bytes, text: str | None, ids: bytes | None, sampling: Sampling, seed: int,
            max_prompt: int, sample: int = 0) -> Problem | None:
    """Why a request is refused; None: it is well formed. ``max_prompt`` counts bytes of text or packed ids."""
    length = len(text or "") + len(ids or b"")
    checks: tuple[tuple[bool, str, str], ...] = (
        (len(request) != 16, "invalid", "a request id is 16 random bytes"),
        ((text is None) == (ids is None), "invalid", "give either text or token ids"),
        (not length, "invalid", "the prompt is empty"),
        (length > max_prompt, "too_long", f"the prompt has {length} bytes; at most {max_prompt} are taken"),
        (len(ids or b"") % 4 != 0, "invalid", "token ids are packed int32"),
        (sampling.max_tokens < 1, "invalid", f"max_tokens is {sampling.max_tokens}; it must be at least 1"),
        (sampling.max_tokens > MOST_TOKENS, "too_long", f"max_tokens is {sampling.max_tokens}, beyond any context"),
        # Written so that NaN fails them.
        (not 0.0 <= sampling.temperature <= 100.0, "invalid",
         f"temperature is {sampling.temperature}; it must lie in 0..100 (0 is greedy)"),
        (not 0.0 < sampling.top_p <= 1.0, "invalid",
         f"top_p is {sampling.top_p}; it must lie above 0 and at most at 1 (off)"),
        (not 0 <= sampling.top_k < _INT32, "invalid",
         f"top_k is {sampling.top_k}; it must be 0 (off) or more, below 2**31"),
        (not 0 <= sample < _INT32, "invalid", f"sample is {sample}; it must lie in 0..2**31 - 1"),
        (not 0 <= seed < 1 << 64, "invalid", f"seed is {seed}; it must lie in 0..2**64 - 1"),
        (abs(sampling.priority) > MOST_PRIORITY, "invalid",
         f"priority is {sampling.priority}; it must lie in -{MOST_PRIORITY}..{MOST_PRIORITY}"),
        (len(sampling.stop_ids) > MOST_STOP_IDS, "invalid",
         f"{len(sampling.stop_ids)} stop ids; at most {MOST_STOP_IDS} are taken"),
    )
    return next(((kind, reason, 0.0) for wrong, kind, reason in checks if wrong), None)
