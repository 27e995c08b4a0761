"""Do position embeddings know which patches are neighbours? Their similarities, and a test against any other order.

The source (Jelassi 2022, Figures 1, 5 and 8) draws the similarities and gives no number: this is ours. The statistic is
the mean similarity of two patches that touch. Under the baseline, the same embeddings handed out to the patches in a
random order, its mean is that of all pairs, and its deviation is known in closed form (Mantel 1967).
"""

from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional as F

from vitbook.measures.heads import neighbours
from vitbook.measures.signals import Grid


def position_similarity(positions: Tensor, prefix: int = 1) -> Tensor:
    """Cosines of the patches' position embeddings: [1,T,D] or [T,D] → [N,N]; ``prefix`` tokens in front are left out.

    The source's PᵀP, with every embedding scaled to length one, so that all values lie in [−1, 1].
    """
    units = F.normalize(positions.detach().reshape(-1, positions.shape[-1])[prefix:].double(), dim=-1)
    return units @ units.T


def neighbour_similarity(similarity: Tensor, grid: Grid, draws: int = 2_000) -> dict[str, float]:
    """Are neighbours more alike than two patches taken at random? From a symmetric ``similarity`` [N,N].

    - ``neighbours``: its mean over pairs that touch, corners included;
    - ``pairs``: its mean over all pairs, the mean of ``neighbours`` when the patches are put in a random order;
    - ``sd``: the standard deviation of ``neighbours`` over all N! orders, exactly;
    - ``z`` = (neighbours − pairs) / sd, which grows with the number of patches: compare equal grids;
    - ``low``, ``high``: where 95 % of ``draws`` random orders lie, always the same ones.

    Raises ValueError where N is not the grid's or less than four, and where no order differs from another.
    """
    near = neighbours(grid)
    N = len(near)
    if similarity.shape != (N, N):
        raise ValueError(
            f"similarities of shape {tuple(similarity.shape)} do not belong to the grid {tuple(grid)}; "
            f"give [{N}, {N}], without the tokens in front"
        )
    if N < 4:
        raise ValueError(f"{N} patches are too few to be put in random orders; four are needed")
    itself = torch.eye(N, dtype=torch.bool)
    pairs = similarity.detach().double().cpu().masked_fill(itself, 0)
    count, mean = near.sum().item(), pairs.sum().item() / (N * (N - 1))
    centred = (pairs - mean).masked_fill(itself, 0)
    sd = sqrt(max(_variance(near.double(), centred), 0)) / count
    if sd <= 1e-9 * max(pairs.abs().max().item(), 1e-300):
        raise ValueError("no order of the patches differs from another: all pairs are equally similar, or all touch")
    first, second = near.triu().nonzero(as_tuple=True)
    generator = torch.Generator().manual_seed(0)
    orders = torch.stack([torch.randperm(N, generator=generator) for _ in range(draws)])
    null = pairs[orders[:, first], orders[:, second]].mean(1)
    low, high = null.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    found = pairs[near].mean().item()
    return {"neighbours": found, "pairs": mean, "sd": sd, "z": (found - mean) / sd, "low": low, "high": high}


def _variance(a: Tensor, b: Tensor) -> float:
    """Of Σ_ij a_ij b_π(i)π(j) over all orders π: symmetric [n,n], diagonals 0, the entries of ``b`` summing to 0.

    Two pairs of patches share both patches, one, or none; each case has its own mean (Mantel 1967).
    """
    n = len(a)

    def sums(m: Tensor) -> tuple[float, float, float]:
        both, one = m.square().sum().item(), m.sum(1).square().sum().item()
        return both, one - both, m.sum().item() ** 2 + 2 * both - 4 * one

    (both_a, one_a, none_a), (both_b, one_b, none_b) = sums(a), sums(b)
    falling = n * (n - 1)
    return (
        2 * both_a * both_b / falling
        + 4 * one_a * one_b / (falling * (n - 2))
        + none_a * none_b / (falling * (n - 2) * (n - 3))
    )
