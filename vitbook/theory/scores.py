"""Has a model found the sets? Three numbers from its scores A, or from the similarities of position embeddings."""

import torch
from torch import Tensor


def association(scores: Tensor, sets: Tensor) -> dict[str, float]:
    """Patch association of scores A [D,D] with the partition ``sets`` int64 [D] (the set of each patch).

    The source's sense (Section 2): what row i looks at most is its own set. How it is counted is ours. Patch i itself
    belongs to its set whatever its score, so every row is judged on the C - 1 others:

    - ``recovery``: the share of rows whose C - 1 best others are exactly their set; a tie at the border is no recovery;
    - ``recall``: the mean share of the set among the C - 1 best others, ties shared out as chance would;
    - ``mass``: the mean softmax weight of the set among all others.

    Equal scores, as at initialisation, give recovery 0, and recall and mass at their chance, (C - 1) / (D - 1).
    """
    D = len(sets)
    if sets.ndim != 1 or scores.shape != (D, D):
        raise ValueError(
            f"scores of shape {tuple(scores.shape)} and sets of shape {tuple(sets.shape)}: give [D, D] and [D]"
        )
    itself = torch.eye(D, dtype=torch.bool)
    if not scores[~itself].isfinite().all():
        raise ValueError("scores hold NaN or infinite values: the training that made them diverged")
    own = (sets[:, None] == sets) & ~itself
    size = own.sum(1, keepdim=True)
    if (size < 1).any() or (size >= D - 1).any():
        raise ValueError("every set needs at least two patches, and there must be two sets; check the partition")
    others = scores.detach().double().masked_fill(itself, -torch.inf)
    border = others.sort(1, descending=True).values.gather(1, size - 1)  # the last score among the C - 1 best
    above, tied = others > border, others == border
    places = size - above.sum(1, keepdim=True)  # left to the tied
    among = (own & above).sum(1) + (places * (own & tied).sum(1, keepdim=True) / tied.sum(1, keepdim=True))[:, 0]
    worst, rival = others.masked_fill(~own, torch.inf).amin(1), others.masked_fill(own, -torch.inf).amax(1)
    return {
        "recovery": (worst > rival).double().mean().item(),
        "recall": (among / size[:, 0]).mean().item(),
        "mass": (others.softmax(1) * own).sum(1).mean().item(),
    }
