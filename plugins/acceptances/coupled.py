"""The coupled rule: the target's own choice at every position, keyed by seed, sample, position and token.

It does not know drafters: given equal logits, the text of a seed is the same with any drafter or none.
"""

import numpy as np

from antiphon.actors.rows import RowParams
from antiphon.actors.verifier import Acceptance, Rows, Verdict
from antiphon.kernels import reduction, sampling
from antiphon.plugins.acceptances.equality import judge
from antiphon.runtime.plugin import Options


class Coupled(Acceptance[Options]):
    """Gumbel-max sampling with counter-based noise; temperature 0 is greedy.

    The token at a position is the argmax over the surviving tokens of processed log-probability plus Gumbel noise;
    a draft is accepted while it equals that token. Exact for sampling, and the same text with or without drafts.
    """

    def verify(self, rows: Rows) -> Verdict:
        """Choose at every row, then walk the drafts."""
        params = parameters(rows.params)
        if rows.logits is None:
            return judge(rows, reduction.choose_from_frames(rows.reduced, params))
        return judge(rows, sampling.choose(np.asarray(rows.logits), params))


def parameters(params: RowParams) -> sampling.Sampling:
    """The kernels' form of a step's row parameters; the door has checked their ranges."""
    return sampling.Sampling(params.temperature, params.top_k, params.top_p, params.seed,
                             params.sample.astype(np.int64), params.position.astype(np.int64))
