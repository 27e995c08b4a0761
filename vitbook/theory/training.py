"""Realistic training of the toy models on a finite sample, and what a trained A is worth on a new task.

The source has plain gradient descent on the logistic loss (Section 3). At the sizes of a laptop the gradients of v and
of an entry of A differ by some five orders of magnitude, so plain descent here has a rate for each, and Adam, which
scales each by itself, is the default. Both are ours, and so are batches, numbers of steps and all rates.
"""

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from vitbook.theory.model import Diverged, LinearModel, PositionalAttentionModel
from vitbook.theory.scores import association
from vitbook.theory.world import PatchSets

OPTIMIZERS = {"adam": torch.optim.Adam, "gd": torch.optim.SGD}
TESTED = 2_000  # fresh samples on which a model is judged


class History(NamedTuple):
    """What :func:`train` saw: a row of ``curves`` and a map of ``scores`` [k,D,D] for every recorded step.

    Columns: ``step``; ``loss`` (logistic) and ``accuracy`` on 2,000 fresh samples; ``train_accuracy`` on the first
    2,000 training samples. For a positional model also ``alpha`` = ⟨v, w*⟩ and ``rest`` = ‖v - α w*‖; the mean over
    entries of A, and their standard deviation, inside a set (``gamma``, ``gamma_sd``) and across sets (``rho``,
    ``rho_sd``), diagonal left out; and what :func:`association` counts.
    """

    curves: pd.DataFrame
    scores: Tensor


def train(
    model: PositionalAttentionModel | LinearModel,
    data: PatchSets,
    *,
    samples: int = 10_000,
    batch: int = 500,
    steps: int = 500,
    optimizer: str = "adam",
    rates: Sequence[float] = (0.002, 0.01),
    stages: Sequence[float] = (1.0,),
    every: int = 25,
    seed: int = 0,
) -> History:
    """Trains ``model`` in place on ``samples`` of ``data`` with the loss log(1 + exp(-y F)).

    Each step draws ``batch`` different samples (all of them, where there are fewer). ``optimizer`` is "adam" or "gd",
    plain gradient descent. ``rates`` are those of v and of the positions, A or P (which wants a smaller one, 0.003); a
    rate of 0 keeps that part as it is. ``stages`` cuts the steps into equal parts with the rates times these factors.
    Every ``every`` steps, and at the last, a row is recorded. The test and training samples and the batches follow from
    ``seed``.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r} is unknown; choose one of {', '.join(OPTIMIZERS)}")
    if min(samples, batch, steps, every) < 1:
        raise ValueError(f"samples={samples}, batch={batch}, steps={steps}, every={every}: each must be at least 1")
    generator = Generator().manual_seed(seed)
    test = data.sample(TESTED, generator)
    x, y = data.sample(samples, generator)
    groups = [{"params": [part], "lr": rate} for part, rate in zip(model.parameters(), rates, strict=False)]
    for group in groups:
        group["params"][0].requires_grad_(group["lr"] > 0)
    descent = OPTIMIZERS[optimizer]([group for group in groups if group["lr"] > 0], fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(descent, lambda t: stages[min(t, steps - 1) * len(stages) // steps])
    rows, scores = [], []
    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            rows.append({"step": step, **_measured(model, data, test, (x[:TESTED], y[:TESTED]))})
            if isinstance(model, PositionalAttentionModel):
                scores.append(model.scores().detach().clone())
        if step < steps:
            chosen = torch.randperm(samples, generator=generator)[:batch]
            loss = F.softplus(-y[chosen] * model(x.index_select(0, chosen))).mean()
            descent.zero_grad()
            loss.backward()
            descent.step()
            schedule.step()
            if not all(part.isfinite().all() for part in model.parameters()):
                raise Diverged(f"step {step + 1} of {steps} left the finite numbers, at rates {rates}; lower them")
    return History(pd.DataFrame(rows), torch.stack(scores) if scores else torch.empty(0))


@torch.no_grad()
def _measured(model: nn.Module, data: PatchSets, test: tuple, seen: tuple) -> dict[str, float]:
    """A row of the curves, without its step."""
    (x, y), (x_seen, y_seen) = test, seen
    margin = y * model(x)
    row = {
        "loss": F.softplus(-margin).mean().item(),
        "accuracy": (margin > 0).float().mean().item(),
        "train_accuracy": (y_seen * model(x_seen) > 0).float().mean().item(),
    }
    if isinstance(model, LinearModel):
        return row
    alpha, A = model.v @ data.w, model.scores()
    own = data.sets[:, None] == data.sets
    inside, across = A[own & ~model.itself], A[~own]
    row |= {"alpha": alpha.item(), "rest": (model.v - alpha * data.w).norm().item()}
    row |= {"gamma": inside.mean().item(), "gamma_sd": inside.std().item()}
    row |= {"rho": across.mean().item(), "rho_sd": across.std().item()}
    return row | association(A, data.sets)


def transfer(
    model: PositionalAttentionModel, data: PatchSets, sizes: Sequence[int], *, draws: int = 5, seed: int = 100
) -> pd.DataFrame:
    """What a trained A saves on another law with the same sets (Section 5): three ways to learn from few samples.

    ``model`` was trained on a law with the sets of ``data``, such as ``replace(data, feature=1)`` for an orthogonal
    feature. From every number of samples in ``sizes``, ``draws`` times, with a fresh v each: ``fixed`` keeps the
    model's A and trains v alone, as in the source's Theorem 5.1; ``scratch`` trains v and A from their start;
    ``uniform`` trains v alone with A at its start, the control. Adam throughout; 200 steps for v alone, 300 for both
    (ours). The draws follow from ``seed``, ``seed`` + 1, …: not from the seed that the model was trained with.

    Columns: ``samples``, ``draw``, ``arm``, and the last row of each training's curves.
    """
    if model.config["patches"] != data.patches:
        raise ValueError(f"the model has {model.config['patches']} patches and the law {data.patches}; they must agree")
    both = (0.002, 0.003 if model.factored else 0.01)
    arms = {"fixed": (True, 200, (0.002, 0.0)), "scratch": (False, 300, both), "uniform": (False, 200, (0.002, 0.0))}
    rows = []
    for samples in sizes:
        for draw in range(draws):
            for arm, (keep, steps, rates) in arms.items():
                fresh = PositionalAttentionModel(**model.config | {"dim": data.dim, "seed": seed + draw})
                if keep:
                    fresh.positions.data.copy_(model.positions)
                curves, _ = train(fresh, data, samples=samples, steps=steps, rates=rates, every=steps, seed=seed + draw)
                rows.append({"samples": samples, "draw": draw, "arm": arm, **curves.iloc[-1].drop("step")})
    return pd.DataFrame(rows)
