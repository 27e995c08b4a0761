"""The idealised training of source D in three numbers: v = α w*, A = γ inside a set, ρ across sets, σ_A on itself.

On the population loss, symmetry keeps v and A in this form (Section 4.1, appendix I.1). With weights normalised so that
uniform attention is 1 (ours),

    Z = e^σ_A + (C - 1) e^γ + (D - C) e^ρ,    Λ = D e^σ_A / Z,    Γ = D e^γ / Z,    Ξ = D e^ρ / Z,
    O_i = α [Λ s_i + Γ (Σ_ℓ - s_i) + Ξ (T - Σ_ℓ)],    Σ_ℓ = Σ_{j ∈ S_ℓ} s_j,    T = Σ_j s_j,

F is a polynomial in (αΛ, αΓ, αΞ). Its coefficients, sums over patches of s_i^a (Σ_ℓ - s_i)^b (T - Σ_ℓ)^c, belong to
the sample alone: they are computed once, and a step of gradient descent is two products of a narrow matrix with a
vector, whatever d. Nor are patches ever drawn: a sample enters by how many of its sets are in which state, that is,
hold how many +1 and -1. Both labels are told by y = 1, since F is odd.

The updates are derived here from the model; that α and A have rates of their own is ours.
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.special import expit

from vitbook.theory.model import Diverged, check_readout, readout
from vitbook.theory.world import PatchAssociationData

TESTED = 5_000  # draws on which the process is judged


def set_states(size: int) -> np.ndarray:
    """The states of a set of C = ``size`` patches, int [K,2]: how many +1, how many -1. The last is (C, 0)."""
    return np.array([(signs - minus, minus) for signs in range(size + 1) for minus in range(signs, -1, -1)])


def draw_sets(data: PatchAssociationData, n: int, generator: np.random.Generator) -> np.ndarray:
    """How many sets are in which state, float64 [n,K], in ``n`` samples of the law with y = 1."""
    C, q = data.set_size, data.q
    plus, minus = set_states(C).T
    ways = np.array([math.comb(C, a) * math.comb(C - a, b) for a, b in zip(plus, minus, strict=True)])
    chances = ways * (q / 2) ** (plus + minus) * (1 - q) ** (C - plus - minus)
    counts = generator.multinomial(data.set_count - 1, chances, n)
    counts[:, -1] += 1  # the informative set
    return counts.astype(np.float64)


class Reduced:
    """The mean loss of samples with ``counts`` of set states [n,K], as a function of (α, γ, ρ).

    ``moments`` [n,k] are the coefficients of y F's monomials in (αΛ, αΓ, αΞ), and ``exponents`` [k,3] their powers.
    """

    def __init__(self, data: PatchAssociationData, counts: np.ndarray, power: int, nu: float, sigma_a: float):
        self.patches, self.set_size = data.patches, data.set_size
        self.power, self.nu, self.sigma_a = power, nu, sigma_a
        plus, minus = set_states(data.set_size).T
        self.total = counts @ (plus - minus)  # T [n]
        high, low = self._moments(counts, power), self._moments(counts, 1)
        self.moments = np.concatenate([high[0], nu * low[0]], 1)
        self.exponents = np.concatenate([high[1], low[1]])

    def _moments(self, counts: np.ndarray, degree: int) -> tuple[np.ndarray, np.ndarray]:
        """Coefficients and exponents of Σ_i O_i^degree."""
        plus, minus = set_states(self.set_size).T
        patches = np.stack([plus, minus, self.set_size - plus - minus], 1)  # of each sign, [K,3]
        sign, sums = np.array([1, -1, 0]), plus - minus  # s_i and Σ_ℓ
        moments, exponents = [], []
        weighted = counts  # times (T - Σ_ℓ)^c
        for c in range(degree + 1):
            powers = [(degree - c - b, b, c) for b in range(degree - c + 1)]
            ways = [math.factorial(degree) / math.prod(map(math.factorial, each)) for each in powers]
            table = [
                way * (patches * sign**a * (sums[:, None] - sign) ** b).sum(1)
                for way, (a, b, _) in zip(ways, powers, strict=True)
            ]
            moments.append(weighted @ np.stack(table, 1))
            exponents += powers
            weighted = weighted * (self.total[:, None] - sums)
        return np.concatenate(moments, 1), np.array(exponents)

    def shares(self, gamma: float, rho: float) -> np.ndarray:
        """Λ, Γ, Ξ: D times the attention to the patch itself, to one of its set, to one of another set."""
        e = np.exp([self.sigma_a, gamma, rho])
        return self.patches * e / (e @ [1, self.set_size - 1, self.patches - self.set_size])

    def output(self, alpha: float, gamma: float, rho: float) -> np.ndarray:
        """y F of each sample, [n]."""
        return self.moments @ self._monomials(alpha * self.shares(gamma, rho))

    def informative(self, alpha: float, gamma: float, rho: float) -> np.ndarray:
        """The part of y F that the informative set's rows give, [n]."""
        own, inside, across = alpha * self.shares(gamma, rho)
        o = own + (self.set_size - 1) * inside + across * (self.total - self.set_size)
        return self.set_size * readout(o, self.power, self.nu)

    def directions(self, alpha: float, gamma: float, rho: float) -> tuple[float, float, float]:
        """Minus the gradient of the loss log(1 + exp(-y F)) by α, by one entry of A inside a set, by one across."""
        D, C = self.patches, self.set_size
        shares = self.shares(gamma, rho)
        monomials = self._monomials(alpha * shares)
        r = expit(-self.moments @ monomials)
        pull = (r @ self.moments * monomials) @ self.exponents / len(r)  # by ln αΛ, ln αΓ, ln αΞ
        # What one score wins in the softmax all others lose, in proportion to their attention.
        _, inside, across = pull - shares * [1, C - 1, D - C] / D * pull.sum()
        return pull.sum() / alpha, inside / (D * (C - 1)), across / (D * (D - C))

    def _monomials(self, weights: np.ndarray) -> np.ndarray:
        return (weights**self.exponents).prod(1)


def reduced_dynamics(
    data: PatchAssociationData,
    *,
    power: int = 3,
    nu: float = 1e-6,
    sigma_a: float = 2.0,
    alpha: float | Sequence[float] | None = None,
    rates: tuple[float, float] = (3e-4, 40.0),
    steps: int = 2_500,
    samples: int = 5_000,
    fresh: bool = False,
    every: int = 10,
    seed: int = 0,
) -> pd.DataFrame:
    """Gradient descent on (α, γ, ρ) for the law ``data``, the population replaced by ``samples`` draws.

    The draws stay the same throughout, or with ``fresh`` are new in every step. γ and ρ begin at 0 and α at ``alpha``,
    by default at ν^(1/(p-1)), a threshold of the source's appendix E. If ``alpha`` is a whole path, steps + 1 values,
    then α is prescribed and A alone learns: the semi-idealised process that stands between realistic and idealised
    training (appendix E). ``rates`` are those of α and of *one entry* of A, as in
    :func:`~vitbook.theory.training.train` with plain descent. The draws follow from ``seed``.

    A row every ``every`` steps and at the last. Columns: ``step``, ``alpha``, ``gamma``, ``rho``; ``Lambda``,
    ``Gamma``, ``Xi``, ``Z``; ``signal`` = α (Λ + (C - 1) Γ), the effective signal of an informative row; ``loss`` on
    the step's draws; ``error`` on 5,000 others; and on these ``informative``, the mean part of y F that the informative
    set's rows give, and ``others``, the largest size of the part that all other rows give.
    """
    check_readout(power, nu)
    if min(samples, steps, every) < 1:
        raise ValueError(f"samples={samples}, steps={steps}, every={every}: each must be at least 1")
    prescribed = np.size(alpha) > 1
    if prescribed and np.size(alpha) != steps + 1:
        raise ValueError(f"alpha is a path of {np.size(alpha)} values; for steps={steps} it needs {steps + 1}")
    path = np.atleast_1d(nu ** (1 / (power - 1)) if alpha is None else alpha)
    if not (path > 0).all():
        raise ValueError(
            f"alpha reaches {path.min()}; nothing is learnt at 0, and below it the signs turn: keep it above"
        )
    generator = np.random.default_rng(seed)

    def draw(n: int) -> Reduced:
        return Reduced(data, draw_sets(data, n, generator), power, nu, sigma_a)

    test, sample = draw(TESTED), draw(samples)
    state = np.array([path[0], 0.0, 0.0])  # α, γ, ρ
    rates = np.array([rates[0], rates[1], rates[1]])
    rows = []
    for step in range(steps):
        if step % every == 0:
            rows.append({"step": step} | _judged(state, sample, test))
        state = state + rates * sample.directions(*state)
        if prescribed:
            state[0] = path[step + 1]
        if not (np.isfinite(state).all() and state[0] > 0):
            raise Diverged(f"step {step + 1} of {steps} led to α, γ, ρ = {state} at rates {rates[:2]}; lower them")
        if fresh:
            sample = draw(samples)
    rows.append({"step": steps} | _judged(state, sample, test))
    return pd.DataFrame(rows)


def _judged(state: np.ndarray, sample: Reduced, test: Reduced) -> dict[str, float]:
    """A row of the table, without its step."""
    row = dict(zip(("alpha", "gamma", "rho"), state, strict=True))
    own, inside, across = test.shares(*state[1:])
    F, informative = test.output(*state), test.informative(*state)
    return row | {
        "Lambda": own,
        "Gamma": inside,
        "Xi": across,
        "Z": test.patches * math.exp(test.sigma_a) / own,
        "signal": state[0] * (own + (test.set_size - 1) * inside),
        "loss": np.logaddexp(0, -sample.output(*state)).mean(),
        "error": (F <= 0).mean(),
        "informative": informative.mean(),
        "others": np.abs(F - informative).max(),
    }
