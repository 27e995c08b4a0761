"""Where an attention head looks: distance, entropy and the masses on itself, on CLS and on its eight neighbours.

Conventions, stated once (A is one head's attention, T = prefix + N tokens, row = query i, column = key j, Δ_ij the
distance of the patches' centres). Only patches are queries. A patch's own place counts, at distance 0. For the
distance, keys without a place (CLS, registers) are dropped and each row is divided by what is left
(``renormalise=True``); with ``renormalise=False``, the *leaky* convention, it is not, and a head that parks its weight
on CLS reads as near. Entropy and masses count every key.
"""

from collections.abc import Callable, Iterable
from math import isfinite

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from vitbook.measures.signals import Grid, outputs, places


def patch_distances(grid: Grid, unit: str = "patch", patch: int | tuple[int, int] | None = None) -> Tensor:
    """Distances Δ_ij between the patches' centres, [N,N] float64.

    ``unit``: ``"patch"``; ``"px"`` (give ``patch``, a side or (rows, columns) in pixels); ``"max"``, divided by the
    largest distance.
    """
    if unit not in ("patch", "px", "max"):
        raise ValueError(f"unit={unit!r} is unknown; choose 'patch', 'px' or 'max'")
    if (unit == "px") != (patch is not None):
        raise ValueError(f"unit={unit!r}, patch={patch}: the patch side in pixels goes with unit='px', and only there")
    side = torch.tensor((patch, patch) if isinstance(patch, int) else patch or (1, 1), dtype=torch.float64)
    places = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float64) for n in grid)) * side
    d = torch.linalg.vector_norm(places.view(-1, 1, 2) - places.view(1, -1, 2), dim=-1)
    return d / d.max() if unit == "max" else d


def neighbours(grid: Grid) -> Tensor:
    """Which patches touch, corners included, [N,N] bool; a patch is no neighbour of itself."""
    d = patch_distances(grid)
    return (d > 0) & (d < 1.5)


def check_attention(attn: Tensor, grid: Grid, prefix: int = 1, leaky: bool = False) -> None:
    """Raises ``ValueError`` unless ``attn`` is [B,H,T,T] probabilities over T = prefix + rows · columns tokens.

    Rows must sum to one; with ``leaky`` they may sum to less.
    """
    T = prefix + grid[0] * grid[1]
    if attn.ndim != 4 or attn.shape[-2:] != (T, T):
        remedy = "a batch of one is attn[None]" if attn.ndim == 3 else "give the grid of these images and the prefix"
        raise ValueError(
            f"attention of shape {tuple(attn.shape)} does not match the grid {tuple(grid)} with {prefix} tokens in "
            f"front, [B, H, {T}, {T}]; {remedy}"
        )
    total = attn.sum(-1)
    low, high, least = total.amin().item(), total.amax().item(), attn.amin().item()
    if not (isfinite(low) and isfinite(high)):
        raise ValueError("attention holds NaN or infinite values; the model's weights or inputs are broken")
    if least < 0:
        raise ValueError(f"attention holds {least:.3g}: probabilities are not negative; pass them after the softmax")
    if high > 1 + 1e-3 or (low < 1 - 1e-3 and not leaky):
        hint = "" if high > 1 + 1e-3 else "; rows below one are taken only by name: renormalise=False"
        raise ValueError(f"attention rows sum to {low:.4f}…{high:.4f}, not to one{hint}")


def _row_distance(attn: Tensor, d: Tensor, prefix: int, renormalise: bool, count_self: bool = True) -> Tensor:
    """Attention-weighted distance of every patch query, [B,H,N]; NaN where nothing is left to divide by."""
    rows = attn[:, :, prefix:, prefix:]
    far = torch.linalg.vecdot(rows, d)
    if not renormalise:
        return far
    kept = rows.sum(-1)
    if not count_self:
        kept = kept - rows.diagonal(dim1=-2, dim2=-1)
    return far / torch.where(kept > 0, kept, torch.nan)


def attention_distance(
    attn: Tensor,
    grid: Grid,
    prefix: int = 1,
    unit: str = "patch",
    patch: int | tuple[int, int] | None = None,
    *,
    renormalise: bool = True,
    count_self: bool = True,
) -> Tensor:
    """Mean attention distance of each head, [H], over images and patch queries (MAD of sources A and B).

    ``attn`` [B,H,T,T] probabilities; ``unit`` as in :func:`patch_distances`. ``renormalise=False`` is the leaky
    convention and takes rows that sum to less than one; ``count_self=False`` leaves the query's own patch out of the
    average.
    """
    check_attention(attn, grid, prefix, leaky=not renormalise)
    if not renormalise and not count_self:
        raise ValueError("count_self=False needs renormalise=True: undivided, a pair at distance 0 changes nothing")
    d = patch_distances(grid, unit, patch).to(attn.device, torch.float32)
    return _row_distance(attn.float(), d, prefix, renormalise, count_self).nanmean((0, 2))


def _entropy(rows: Tensor, logarithms: Tensor | None = None) -> Tensor:
    """−Σ_j A_ij ln A_ij over the last axis, in nats; ``logarithms``, of the same shape, is overwritten."""
    # 0 ln 0 = 0 by a summand far below float32's resolution of any row: several times faster than torch.special.entr
    return -torch.linalg.vecdot(rows, torch.add(rows, 1e-30, out=logarithms).log_())


def attention_entropy(attn: Tensor, prefix: int = 1) -> Tensor:
    """Mean entropy −Σ_j A_ij ln A_ij of each head's patch rows, [H], in nats; every key counts, so at most ln T."""
    check_attention(attn, (1, attn.shape[-1] - prefix), prefix)
    return _entropy(attn[:, :, prefix:].float()).mean((0, 2))


def rollout(attns: list[Tensor]) -> Tensor:
    """Attention rollout (Abnar & Zuidema 2020): R = M_L … M_1 with M = ½ mean_h(A) + ½ I, [B,T,T]; rows sum to one.

    ``attns``: one [B,H,T,T] a layer, first layer first. Later layers multiply from the left. A part of the list gives
    the rollout up to that layer. Row 0 without the prefix columns is the CLS map.
    """
    if isinstance(attns, Tensor) or not attns:
        raise ValueError("rollout of no layers, or of one alone; give a list with one [B,H,T,T] a layer")
    T = attns[0].shape[-1]
    for attn in attns:
        check_attention(attn, (1, T), 0)
    result = torch.eye(T, device=attns[0].device).expand(len(attns[0]), T, T)
    for attn in attns:
        result = 0.5 * (attn.float().mean(1) @ result + result)
    return result


def cls_maps(attn: Tensor, grid: Grid, prefix: int = 1) -> Tensor:
    """What CLS looks at: [B,H,T,T] (or [B,T,T], a rollout) → [B,H,rows,columns] (or [B,rows,columns])."""
    if prefix < 1:
        raise ValueError("prefix=0: a model without CLS has no CLS map; choose a patch as the query")
    if attn.shape[-1] != prefix + grid[0] * grid[1]:
        raise ValueError(
            f"maps over {attn.shape[-1]} tokens are not a grid {tuple(grid)} with {prefix} tokens in front"
        )
    return attn[..., 0, prefix:].unflatten(-1, tuple(grid))


def reference_heads(grid: Grid) -> dict[str, Tensor]:
    """Made-up heads with known numbers, name → [N,N] attention over patches (windows are clipped at the border)."""
    d = patch_distances(grid)
    rows, cols = grid
    place = torch.cartesian_prod(torch.arange(rows), torch.arange(cols))
    reach = (place[:, None] - place[None]).abs().amax(-1)  # Chebyshev distance: a (2r+1)×(2r+1) window is reach ≤ r
    N, eye, near = len(d), torch.eye(len(d), dtype=d.dtype), neighbours(grid).to(d.dtype)
    cross = (d == 1).to(d.dtype)

    def one_key(key: int) -> Tensor:
        return torch.zeros_like(d).index_fill_(1, torch.tensor(key), 1.0)

    heads = {
        "self only": eye,
        "4 neighbours, no self": cross,
        "self + 4 neighbours": eye + cross,
        "8 neighbours, no self": near,
        **{f"{2 * r + 1}×{2 * r + 1} window": (reach <= r).to(d.dtype) for r in (1, 2, 3)},
        **{f"Gaussian σ = {s}": torch.exp(-(d**2) / (2 * s**2)) for s in (0.5, 1, 2)},
        "uniform": torch.ones_like(d),
        "one near-centre key": one_key(((rows - 1) // 2) * cols + (cols - 1) // 2),
        "one corner key": one_key(0),
        "point-mirrored patch": eye.flip(1),
        "92 % self, 8 % on 4 neighbours": 0.92 * eye + 0.08 * cross / cross.sum(1, keepdim=True),
    }
    return {name: a / a.sum(1, keepdim=True) for name, a in heads.items() if N > 1}


@torch.no_grad()
def measure_heads(
    model: Callable,
    images: Tensor | Iterable[Tensor],
    *,
    grid: Grid | None = None,
    prefix: int | None = None,
    unit: str = "patch",
    patch: int | tuple[int, int] | None = None,
    batch: int = 32,
) -> pd.DataFrame:
    """Every head of a model, measured over images in a stream: memory does not grow with their number.

    ``model``: called as ``model(images, capture=True) -> (logits, {"block0.attn": [B,H,T,T], …})``, such as our ViT or
    ``adapters.capture(timm_model)``; ``grid`` and ``prefix`` are the model's own unless given. A model of windows gives
    [B·windows,H,T,T], an image's windows together. ``images``: normalised [n,3,H,W] or an iterable of such batches. A
    module is measured in evaluation mode, in float32.

    Columns, a row a head (means over images and patch queries): ``layer``, ``head``; ``distance`` (renormalised, in
    ``unit``, as in :func:`patch_distances`) and its standard error over images ``distance_se``, NaN of one; ``leaky``;
    ``entropy`` in nats and ``effective`` = e^entropy tokens; the masses ``self``, ``cls``, ``neighbours`` (of the whole
    row, so ≤ 1); ``cls_entropy``, of the CLS query.
    """
    grid, prefix = places(model, grid, prefix)
    has_cls = prefix > 0 and getattr(model, "has_cls", True)
    # What is linear in a row of A: its distance and mass on patches, on neighbours; one product a query for all heads.
    N = grid[0] * grid[1]
    weights = torch.zeros(prefix + N, prefix + N, 3)
    weights[prefix:, prefix:] = torch.stack([patch_distances(grid, unit, patch), torch.ones(N, N), neighbours(grid)], 2)
    sums: list[Tensor] = []
    count = 0
    logarithms = None
    for logits, kept in outputs(model, images, capture=True, batch=batch):
        attns = [a for name, a in kept.items() if name.endswith(".attn")]
        if not attns:
            raise ValueError("the model gave no intermediate named '….attn': it has no attention maps to measure")
        for layer, attn in enumerate(attns):
            check_attention(attn, grid, prefix)
            weights = weights.to(attn)
            read = torch.bmm(attn.flatten(0, 1).transpose(0, 1), weights)[prefix:].unflatten(1, attn.shape[:2])
            far, kept_mass, near = read.unbind(-1)  # [N,B,H]
            if logarithms is None or logarithms.shape != attn.shape:
                logarithms = torch.empty_like(attn)
            entropy = _entropy(attn, logarithms)  # [B,H,T]
            nothing = torch.full_like(near[0], torch.nan)
            per_image = torch.stack(
                [
                    (far / torch.where(kept_mass > 0, kept_mass, torch.nan)).nanmean(0),
                    far.mean(0),
                    entropy[:, :, prefix:].mean(-1),
                    entropy[:, :, 0] if has_cls else nothing,
                    attn.diagonal(dim1=-2, dim2=-1)[:, :, prefix:].mean(-1),
                    attn[:, :, prefix:, 0].mean(-1) if has_cls else torch.zeros_like(nothing),
                    near.mean(0),
                ]
            ).double()  # [7,B,H], or [7,B·windows,H]
            per_image = per_image.unflatten(1, (len(logits), -1)).nanmean(2)  # [7,B,H]
            far = per_image[:1]  # NaN in an image where the head looks at no patch at all, which is left out
            total = torch.cat([far.nansum(1), per_image[1:].sum(1), far.square().nansum(1), far.isfinite().sum(1)])
            if layer == len(sums):
                sums.append(total)
            else:
                sums[layer] += total
        count += len(logits)
        del kept, attns, attn  # the next batch finds their memory free
    return _table(sums, count)


def _table(sums: list[Tensor], count: int) -> pd.DataFrame:
    """Sums over ``count`` images, [9,H] a layer, as the rows of :func:`measure_heads`."""
    parts = []
    for layer, total in enumerate(total.cpu().numpy() for total in sums):
        leaky, entropy, cls_entropy, own, cls, near_mass = total[1:7] / count
        distance, squares = total[[0, 7]] / total[8]
        with np.errstate(invalid="ignore"):  # of one image there is no spread, of none no distance: NaN
            spread = (squares - distance**2).clip(min=0) / (total[8] - 1)
        columns = {"distance": distance, "distance_se": spread**0.5, "leaky": leaky, "entropy": entropy, "self": own}
        part = pd.DataFrame(columns | {"cls": cls, "neighbours": near_mass, "cls_entropy": cls_entropy})
        part.insert(0, "layer", layer)
        part.insert(1, "head", range(len(part)))
        part["effective"] = np.exp(part.entropy)
        parts.append(part)
    return pd.concat(parts, ignore_index=True)
