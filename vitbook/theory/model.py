"""One layer that looks by position alone, and the linear models that cannot do its work.

    S_ij = softmax_j(A_ij),    O_i = D Σ_j S_ij ⟨v, X_j⟩,    F(X) = Σ_i σ(O_i),    σ(o) = o^p + ν o,    ŷ = sign F

From the source (Section 3): the logits A depend on positions alone, their diagonal is held at σ_A and only the rest is
trained, the values are one vector v, p is odd and at least 3. Ours: the numbers p, ν, σ_A and ω, and A = P Pᵀ as the
second way to train it.
"""

import math

import torch
from torch import Generator, Tensor, nn

from vitbook.theory.world import PatchSets


class PositionalAttentionModel(nn.Module):
    """The simplified ViT over D ``patches`` of ``dim`` d: x [n,D,d] → F [n].

    ``power`` p and ``nu`` ν shape σ; ``sigma_a`` σ_A is the score of a patch with itself. v ~ N(0, ``omega``² I), drawn
    by ``seed``. ``positions`` is A itself, which starts at 0, or with ``factored`` the position embeddings P [D,D] of
    A = P Pᵀ, which start at √σ_A I. The diagonal of A is σ_A throughout.
    """

    def __init__(
        self,
        patches: int = 100,
        dim: int = 16,
        *,
        power: int = 3,
        nu: float = 0.01,
        sigma_a: float = 3.0,
        factored: bool = False,
        omega: float = 0.01,
        seed: int = 0,
    ):
        super().__init__()
        check_readout(power, nu)
        if factored and sigma_a <= 0:
            raise ValueError(
                f"sigma_a={sigma_a}: P starts at √σ_A I, and from P = 0 it never moves; give a positive one"
            )
        self.config = {"patches": patches, "dim": dim, "power": power, "nu": nu, "sigma_a": sigma_a}
        self.config |= {"factored": factored, "omega": omega, "seed": seed}
        self.power, self.nu, self.sigma_a, self.factored = power, nu, sigma_a, factored
        self.v = nn.Parameter(omega * torch.randn(dim, generator=Generator().manual_seed(seed)))
        eye = torch.eye(patches)
        self.positions = nn.Parameter(math.sqrt(sigma_a) * eye if factored else torch.zeros_like(eye))
        self.register_buffer("itself", eye.bool(), persistent=False)

    def scores(self) -> Tensor:
        """A [D,D], its diagonal σ_A."""
        A = self.positions @ self.positions.T if self.factored else self.positions
        return A.masked_fill(self.itself, self.sigma_a)

    def attention(self) -> Tensor:
        """S [D,D], rows sum to one: the same for every input."""
        return self.scores().softmax(1)

    def forward(self, x: Tensor) -> Tensor:
        o = len(self.itself) * (x @ self.v) @ self.attention().T  # [n,D]
        return readout(o, self.power, self.nu).sum(1)


class Diverged(RuntimeError):
    """Descent that left the finite numbers: its rates are too large."""


def readout(o: Tensor, power: int, nu: float) -> Tensor:
    """σ(o) = o^p + ν o."""
    return o**power + nu * o


def check_readout(power: int, nu: float) -> None:
    """Raises ``ValueError`` unless p is odd and at least 3 and ν not negative."""
    if power < 3 or power % 2 == 0:
        raise ValueError(f"power={power}: σ(o) = o^p + ν o must be odd, and steeper than linear; choose 3, 5, …")
    if nu < 0:
        raise ValueError(f"nu={nu}: the linear part must not pull backwards; choose 0 or a small positive number")


class LinearModel(nn.Module):
    """A generalised linear model's score, Σ_j ⟨v_j, X_j⟩: x [n,D,d] → [n]; one v for all patches with ``shared``.

    Its link function is left out, since an increasing one does not change the sign (appendix J.1; the form is ours).
    """

    def __init__(self, patches: int = 100, dim: int = 16, *, shared: bool = True):
        super().__init__()
        self.v = nn.Parameter(torch.zeros(dim) if shared else torch.zeros(patches, dim))

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1) @ self.v if self.v.ndim == 1 else x.flatten(1) @ self.v.flatten()


@torch.no_grad()
def generaliser(
    data: PatchSets, shift: int = 1, *, alpha: float = 0.02, score: float = 8.0
) -> PositionalAttentionModel:
    """A model written down, not trained: v = α w*, and every row of set ℓ attends to the patches of set ℓ + ``shift``.

    With ``shift`` 0 it attends to its own set; with any other it sees, row by row, the same sums in another order, and
    so generalises as well without any patch association (our construction, in the spirit of appendix J.2).
    """
    model = PositionalAttentionModel(data.patches, data.dim, sigma_a=0.0 if shift % data.set_count else score)
    model.v.copy_(alpha * data.w)
    model.positions.copy_(score * (data.sets == (data.sets[:, None] + shift) % data.set_count))
    return model
