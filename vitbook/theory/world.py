"""The toy world of source D: patches that belong together in hidden sets, and labels that only a whole set gives away.

The patches 1…D are split into L = D / C sets of C. The label is the sign of f*(X) = Σ_ℓ φ(the patches of set ℓ). A set
may be a tile of the picture or scattered all over it: nothing else changes.

From the source (Sections 2 and 3): the split, one φ for all sets, one informative set among independent stray signs,
noise orthogonal to w*, a φ with a threshold, Gaussian patches as the counter-example. Ours, where we did not have the
paper's exact form: the sum and its sign, uniform draws of label and informative set, q as the chance of *any* stray
sign, noise of variance 1/d, the threshold 0.9 C, and for Gaussian patches φ = tanh.
"""

import math
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np
import torch
from torch import Generator, Tensor

THRESHOLD = 0.9  # of C: a set speaks when its signs sum to more than this


@dataclass(frozen=True, kw_only=True)
class PatchSets:
    """D ``patches`` in sets of C = ``set_size``, each patch a vector of ``dim`` d; what both laws share.

    The sets are tiles of the picture; with ``hidden`` the tiles' patches are moved to places drawn by ``seed``. The
    unit vector w* is one of d orthogonal directions drawn by ``seed``; ``feature`` says which, so two laws that differ
    in ``feature`` alone have the same sets and orthogonal features.
    """

    patches: int = 100
    set_size: int = 4
    dim: int = 16
    hidden: bool = False
    feature: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.set_size < self.patches or self.patches % self.set_size:
            raise ValueError(
                f"set_size={self.set_size}, patches={self.patches}: the patches are split into two or more sets of at "
                "least 2, without a rest; choose a divisor of patches"
            )
        if self.dim < 2:
            raise ValueError(f"dim={self.dim}: noise orthogonal to the feature needs at least 2 dimensions")
        if not 0 <= self.feature < self.dim:
            raise ValueError(f"feature={self.feature}: there are dim={self.dim} orthogonal ones, from 0")

    @property
    def set_count(self) -> int:
        """L, the number of sets."""
        return self.patches // self.set_size

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the picture, as near to a square as D allows."""
        rows = max(r for r in range(1, math.isqrt(self.patches) + 1) if self.patches % r == 0)
        return rows, self.patches // rows

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a set before it is hidden, as near to a square as C and the grid allow."""
        (rows, columns), size = self.grid, self.set_size
        sides = [(r, size // r) for r in range(1, size + 1) if size % r == 0]
        fits = [(r, c) for r, c in sides if rows % r == 0 and columns % c == 0]  # never empty: C divides rows · columns
        return min(fits, key=lambda side: abs(side[0] - side[1]))

    @cached_property
    def places(self) -> Tensor:
        """Where each patch of the tiled picture was moved to, int64 [D]; ``A[places][:, places]`` undoes the hiding."""
        if not self.hidden:
            return torch.arange(self.patches)
        return torch.randperm(self.patches, generator=Generator().manual_seed(self.seed))

    @cached_property
    def sets(self) -> Tensor:
        """The set of each patch, int64 [D], values 0…L - 1."""
        (rows, columns), (high, wide) = self.grid, self.tile
        across, down = torch.arange(columns) // wide, torch.arange(rows) // high
        tiles = (down[:, None] * (columns // wide) + across).flatten()
        return torch.empty_like(tiles).scatter_(0, self.places, tiles)

    @cached_property
    def w(self) -> Tensor:
        """The unit feature w*, float32 [d]."""
        directions = torch.randn(self.dim, self.dim, generator=Generator().manual_seed(self.seed), dtype=torch.float64)
        return torch.linalg.qr(directions).Q[:, self.feature].float()

    def features(self, x: Tensor) -> Tensor:
        """s_j = ⟨w*, X_j⟩ of every patch: [n,D,d] → [n,D]."""
        return x @ self.w

    def set_sums(self, s: Tensor) -> Tensor:
        """Σ_{j ∈ S_ℓ} s_j of every set: [n,D] → [n,L]."""
        return s.new_zeros(len(s), self.set_count).index_add_(1, self.sets, s)

    def _moved(self, values: Tensor) -> Tensor:
        """Values of the tiled picture, [n,D,…], at the places of this one."""
        return values[:, self.places.argsort()] if self.hidden else values


@dataclass(frozen=True, kw_only=True)
class PatchAssociationData(PatchSets):
    """The structured law (Section 3): one set carries the label on all its patches, the others carry stray signs.

    y = ±1 and the informative set ℓ are uniform. Patches of set ℓ are y w* + ξ_j; every other patch is δ_j w* + ξ_j
    with δ_j = ±1 with chance ``q`` / 2 each, else 0; ξ_j ~ N(0, (I - w* w*ᵀ) / d). So s_j = ⟨w*, X_j⟩ is -1, 0 or 1.
    """

    q: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.q <= 1:
            raise ValueError(f"q={self.q}: the chance of a stray sign lies in 0 to 1")

    def signs(self, n: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
        """``n`` samples without their noise: s float32 [n,D], labels y float32 [n], informative sets int64 [n]."""
        y = torch.randint(2, (n,), generator=generator) * 2.0 - 1
        informative = torch.randint(self.set_count, (n,), generator=generator)
        u = torch.rand(n, self.patches, generator=generator)
        stray = (u < self.q / 2).float() - (u >= 1 - self.q / 2).float()
        return torch.where(self.sets == informative[:, None], y[:, None], self._moved(stray)), y, informative

    def sample(self, n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """``n`` samples: x float32 [n,D,d] and labels y = ±1 float32 [n]."""
        s, y, _ = self.signs(n, generator)
        x = self._moved(torch.randn(n, self.patches, self.dim, generator=generator).mul_(self.dim**-0.5))
        return x.addcmul_((s - self.features(x))[..., None], self.w), y  # the noise's own part along w* goes out

    def label_function(self, s: Tensor) -> Tensor:
        """f* = Σ_ℓ Thr(Σ_{j ∈ S_ℓ} s_j), Thr(z) = z where |z| > 0.9 C, else 0: signs [n,D] → [n]."""
        sums = self.set_sums(s.round())  # exact signs, whatever float32 left of the noise
        return torch.where(sums.abs() > THRESHOLD * self.set_size, sums, 0).sum(1)

    def sum_rule_error(self, ties: float = 0.5) -> float:
        """How often the sign of Σ_j s_j, the best rule that treats all patches alike and weighs them linearly, errs.

        Exact, from the law of the stray signs' sum. ``ties`` is what a sum of zero counts: ½ for a coin, 1 for the
        source's Pr[f* g ≤ 0] (appendix J.1: at least 1/8 for any generalised linear model g).
        """
        one = np.array([self.q / 2, 1 - self.q, self.q / 2])
        law = reduce(np.convolve, [one] * (self.patches - self.set_size))  # of sums -(D - C)…D - C
        zero = self.patches - 2 * self.set_size  # where the stray signs cancel the set's C
        return float(law[:zero].sum() + ties * law[zero])


@dataclass(frozen=True, kw_only=True)
class GaussianPatchData(PatchSets):
    """The counter-example (Section 2): X_j ~ N(0, I), y the sign of f*(X) = Σ_ℓ tanh(``gain`` C^-½ Σ_{j ∈ S_ℓ} s_j).

    The sets decide the label here too, but at a small gain the sum over all patches does almost as well.
    """

    gain: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gain > 0:
            raise ValueError(f"gain={self.gain}: tanh needs a positive slope, or every label is 0")

    def sample(self, n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """``n`` samples: x float32 [n,D,d] and labels y = ±1 float32 [n]."""
        x = self._moved(torch.randn(n, self.patches, self.dim, generator=generator))
        return x, self.label_function(self.features(x)).sign()

    def label_function(self, s: Tensor) -> Tensor:
        """f*: features [n,D] → [n]."""
        return (self.gain * self.set_size**-0.5 * self.set_sums(s)).tanh().sum(1)
