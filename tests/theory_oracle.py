"""The reduced dynamics once more, as directly as they are written, and a race against them.

`F = Σ_ℓ Σ_s n_ℓ^s σ(α [(Λ - Γ) s + (Γ - Ξ) Σ_ℓ + Ξ T])` is summed over sets and signs in every step, and so are the
gradients by α, γ and ρ. `vitbook.theory` keeps the moments of the sample instead.
"""

import math
import time
import tracemalloc

import numpy as np
import torch

from vitbook.theory import PatchAssociationData, reduced_dynamics
from vitbook.theory.dynamics import TESTED, draw_sets, set_states

RACE = {"power": 5, "nu": 1e-9, "sigma_a": 3.0, "rates": (2e-5, 200.0)}


def lay_out(counts: np.ndarray, size: int) -> torch.Tensor:
    """Counts of set states [n,K] as signs float64 [n,L,C], the sets one after another."""
    patterns = np.array([[1] * a + [-1] * b + [0] * (size - a - b) for a, b in set_states(size)])
    return torch.tensor(np.stack([np.repeat(patterns, row.astype(int), axis=0) for row in counts])).double()


def draws(data: PatchAssociationData, n: int, seed: int) -> torch.Tensor:
    """The signs [n,L,C] that ``reduced_dynamics(samples=n, seed=seed)`` descends on."""
    generator = np.random.default_rng(seed)
    draw_sets(data, TESTED, generator)
    return lay_out(draw_sets(data, n, generator), data.set_size)


class Direct:
    """α, γ, ρ and their descent on signs [n,L,C] with y = 1."""

    def __init__(self, signs: torch.Tensor, power: int, nu: float, sigma_a: float, dtype=torch.float64):
        _, self.L, self.C = signs.shape
        self.D, self.power, self.nu, self.sigma_a = self.L * self.C, power, nu, sigma_a
        self.s = torch.tensor([-1, 0, 1], dtype=dtype)
        self.n = torch.stack([(signs == s).sum(2) for s in (-1, 0, 1)], 2).to(dtype)  # [n,L,3]
        self.sums = signs.sum(2)[..., None].to(dtype)  # [n,L,1]
        self.total = self.sums.sum(1, keepdim=True)  # [n,1,1]

    def directions(self, alpha: float, gamma: float, rho: float) -> tuple[float, float, float]:
        C, D, p = self.C, self.D, self.power
        Z = math.exp(self.sigma_a) + (C - 1) * math.exp(gamma) + (D - C) * math.exp(rho)
        own, inside, across = (D * math.exp(score) / Z for score in (self.sigma_a, gamma, rho))
        seen = (own - inside) * self.s + (inside - across) * self.sums + across * self.total  # O / α, [n,L,3]
        o = alpha * seen
        F = (self.n * (o**p + self.nu * o)).sum((1, 2))
        r = torch.sigmoid(-F)[:, None, None]
        slope = r * self.n * (p * o ** (p - 1) + self.nu)
        by_inside = (self.sums - self.s) - (C - 1) * seen / D
        by_across = (self.total - self.sums) - (D - C) * seen / D
        return tuple(
            scale * (slope * part).sum((1, 2)).mean().item()
            for scale, part in (
                (1, seen),
                (inside * alpha / (D * (C - 1)), by_inside),
                (across * alpha / (D * (D - C)), by_across),
            )
        )

    def descend(self, alpha: float, rates: tuple[float, float], steps: int) -> tuple[float, float, float]:
        gamma = rho = 0.0
        for _ in range(steps):
            by_alpha, by_gamma, by_rho = self.directions(alpha, gamma, rho)
            alpha, gamma, rho = alpha + rates[0] * by_alpha, gamma + rates[1] * by_gamma, rho + rates[1] * by_rho
        return alpha, gamma, rho


def race(steps: int = 2_000, samples: int = 1_500) -> tuple[float, float]:
    """Seconds of ours, and of the direct way in float32, at (512, 8, .12), p = 5; each with the draws of its sample."""
    data = PatchAssociationData(patches=512, set_size=8, q=0.12)
    options = {name: RACE[name] for name in ("power", "nu", "sigma_a")}
    start = time.perf_counter()
    reduced_dynamics(data, **RACE, steps=steps, samples=samples, every=steps)
    ours = time.perf_counter() - start
    start = time.perf_counter()
    direct = Direct(draws(data, samples, 0), **options, dtype=torch.float32)
    direct.descend(RACE["nu"] ** (1 / (RACE["power"] - 1)), RACE["rates"], steps)
    return ours, time.perf_counter() - start


def peak_memory(dim: int, steps: int = 20) -> int:
    """The most bytes that ours holds at a time on patches of ``dim`` numbers."""
    data = PatchAssociationData(patches=512, set_size=8, q=0.12, dim=dim)
    tracemalloc.start()
    reduced_dynamics(data, **RACE, steps=steps, samples=1_500)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak
