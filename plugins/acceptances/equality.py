"""Acceptance by equality: a draft stands while it is the token that the target chooses at its place.

It does not know how the target chooses.
"""

import numpy as np

from antiphon.actors.columns import I32
from antiphon.actors.verifier import Rows, Verdict
from antiphon.kernels import trees


def judge(rows: Rows, chosen: I32) -> Verdict:
    """Walk each sequence's drafts along the tokens ``chosen`` [L] at its rows."""
    offsets = rows.offsets
    if len(rows.tokens) == len(offsets) - 1:  # nothing was drafted
        none = np.zeros(len(offsets) - 1, np.int32)
        return Verdict(none + 1, chosen, none, none[:0], chosen)
    parents = rows.parents
    if parents is None:
        parents = np.arange(offsets[-1], dtype=np.int32) - np.repeat(offsets[:-1], np.diff(offsets)) - 1
    walked = trees.walk_columns(offsets, rows.tokens, parents, chosen)
    return Verdict(walked.counts, walked.ids, walked.counts - 1, walked.rows[walked.rows > 0], chosen)
