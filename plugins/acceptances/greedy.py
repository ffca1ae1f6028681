"""The greedy rule: the most probable token at every position, whatever temperature a request names.

It does not know drafters.
"""

import numpy as np

from antiphon.actors.verifier import Acceptance, Rows, Verdict
from antiphon.kernels import reduction, sampling
from antiphon.plugins.acceptances.equality import judge
from antiphon.runtime.plugin import Options


class Greedy(Acceptance[Options]):
    """Argmax with ties to the smaller id. A deployment with this rule never samples."""

    def verify(self, rows: Rows) -> Verdict:
        """Choose at every row, then walk the drafts."""
        greedy = sampling.sampling(len(rows.params.position))
        if rows.logits is None:
            return judge(rows, reduction.choose_from_frames(rows.reduced, greedy))
        return judge(rows, sampling.choose(np.asarray(rows.logits), greedy))
