"""What the tokens of a layer are like: how far a patch resembles its neighbours, the CLS token, and patches at large.

Conventions, stated once (source C names the first two and gives no formula: this is our reading). Tokens are compared
by the cosine of their angle, as a block leaves them, in float32. *Locality*: a patch with each of its neighbours in the
3 × 3 window around it, itself not counted, the window clipped at the border (eight neighbours inside, five at an edge,
three in a corner); the mean over its neighbours, then over patches, then over images. It is 1 as well where all tokens
have become one, so the mean over *all pairs* of an image's patches is given beside it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import Parameter, signature

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Grid = tuple[int, int]
CALLED = (
    "a model to measure is called as model(images, capture=True) and gives (logits [B,K], {'block0.attn': [B,H,T,T], "
    "'block0.out': [B,T,D], …}), what is to be measured of them; adapters.capture(model) makes that of timm's models"
)


@torch.no_grad()
def outputs(
    model: Callable, images: Tensor | Iterable[Tensor], *, capture: bool, batch: int = 64
) -> Iterator[Tensor | tuple[Tensor, dict[str, Tensor]]]:
    """What ``model(x, capture=…)`` gives for images in a stream: logits or, with ``capture``, (logits, intermediates).

    ``images``: normalised [n,3,rows,columns] or an iterable of such batches. A module runs in evaluation mode, in
    float32 without gradients, and has its modes back at the end.
    """
    known = signature(model.forward if isinstance(model, nn.Module) else model).parameters.values()
    if not any(p.name == "capture" or p.kind is Parameter.VAR_KEYWORD for p in known):
        raise ValueError(f"a {type(model).__name__} without an argument capture: {CALLED}")
    modes = [(module, module.training) for module in model.modules()] if isinstance(model, nn.Module) else []
    empty = True
    try:
        if modes:
            model.eval()
        for x in images.split(batch) if isinstance(images, Tensor) else images:
            if len(x):
                empty = False
                with torch.autocast(x.device.type, enabled=False):
                    result = model(x, capture=capture)
                pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)
                if capture and not (pair and isinstance(result[1], Mapping)):
                    raise ValueError(f"model(images, capture=True) gave a {type(result).__name__}: {CALLED}")
                yield result
                del result  # not to be kept beside the next
    finally:
        for module, mode in modes:
            module.training = mode
    if empty:
        raise ValueError("no images to measure; give at least one")


def places(model: Callable, grid: Grid | None = None, prefix: int | None = None) -> tuple[Grid, int]:
    """Grid (rows, columns) and tokens in front, the model's own unless given."""
    if (grid is None and not hasattr(model, "grid")) or (prefix is None and not hasattr(model, "prefix")):
        raise ValueError(
            f"the model, of type {type(model).__name__}, does not say its grid and prefix; wrap a timm model as "
            "adapters.capture(model), or give grid= and prefix="
        )
    grid = model.grid if grid is None else grid
    if not isinstance(grid, tuple | list) or len(grid) != 2:
        raise ValueError(f"grid={grid!r}: give rows and columns of patches, such as (8, 8)")
    return tuple(grid), model.prefix if prefix is None else prefix


def block_outputs(kept: dict[str, Tensor], grid: Grid, prefix: int) -> list[Tensor]:
    """The tokens [B,T,D] that each block leaves, first block first, from a model's intermediates."""
    blocks = [tokens for name, tokens in kept.items() if name.endswith(".out")]
    if not blocks:
        raise ValueError("the model gave no intermediate named '….out': it has no tokens to measure")
    for tokens in blocks:
        check_tokens(tokens, grid, prefix)
    return blocks


def check_tokens(tokens: Tensor, grid: Grid, prefix: int) -> None:
    """Raises ``ValueError`` unless ``tokens`` is [B,T,D], T = prefix + rows · columns."""
    if tokens.ndim == 4:
        raise ValueError(
            f"a feature map of shape {tuple(tokens.shape)}, not tokens [B,T,D]: of models of windows and of CNNs, "
            "heads or blocks can be measured, tokens cannot"
        )
    T = prefix + grid[0] * grid[1]
    if tokens.ndim != 3 or tokens.shape[1] != T:
        raise ValueError(
            f"tokens of shape {tuple(tokens.shape)} do not match the grid {tuple(grid)} with {prefix} in front, "
            f"[B, {T}, D]; give the model's own grid and prefix"
        )


def _units(tokens: Tensor) -> Tensor:
    return F.normalize(tokens.float(), dim=-1)


def patch_locality(tokens: Tensor, grid: Grid, prefix: int = 1) -> Tensor:
    """Mean cosine of a patch with its neighbours in the 3 × 3 window, for each image: [B,T,D] → [B]."""
    check_tokens(tokens, grid, prefix)
    if tuple(grid) == (1, 1):
        raise ValueError("a grid of (1, 1) has no neighbours; take smaller patches or a larger image")
    units = _units(tokens[:, prefix:]).unflatten(1, tuple(grid)).movedim(-1, 1)  # [B,D,rows,columns]
    # Cosines with all of a window sum to the product with the window's sum, so no pair is ever formed.
    ones = torch.ones(1, 1, *grid, device=tokens.device)
    window, size = (F.avg_pool2d(t, 3, stride=1, padding=1, divisor_override=1) for t in (units, ones))
    return ((units * (window - units)).sum(1) / (size[:, 0] - 1)).mean((1, 2))


def cls_similarity(tokens: Tensor, prefix: int = 1) -> Tensor:
    """Mean cosine of the patches with the CLS token of the same layer, for each image: [B,T,D] → [B]."""
    if prefix < 1:
        raise ValueError("prefix=0: a model without CLS has nothing to compare its patches with")
    units = _units(tokens)
    return (units[:, 0] * units[:, prefix:].mean(1)).sum(-1)


def pair_similarity(tokens: Tensor, prefix: int = 1) -> Tensor:
    """Mean cosine over all pairs of two patches, for each image: [B,T,D] → [B]."""
    units = _units(tokens[:, prefix:])
    N = units.shape[1]
    if N < 2:
        raise ValueError(f"{N} patches make no pair; take smaller patches or a larger image")
    return (units.sum(1).square().sum(-1) - units.square().sum((1, 2))) / (N * (N - 1))


def measure_tokens(
    model: Callable,
    images: Tensor | Iterable[Tensor],
    *,
    grid: Grid | None = None,
    prefix: int | None = None,
    batch: int = 64,
) -> pd.DataFrame:
    """Every layer of a model: locality, similarity with CLS (NaN without one) and over all pairs, before any norm.

    ``model``: called as ``model(images, capture=True) -> (logits, {"block0.out": [B,T,D], …})``; ``grid`` and
    ``prefix`` are the model's own unless given; ``images`` as in :func:`outputs`. Columns, a row a block: ``layer``;
    the means over images ``locality``, ``cls``, ``pairs`` and their standard errors ``locality_se``, ``cls_se``,
    ``pairs_se``, NaN of one image.
    """
    grid, prefix = places(model, grid, prefix)
    has_cls = prefix > 0 and getattr(model, "has_cls", True)
    parts = []
    for _, kept in outputs(model, images, capture=True, batch=batch):
        layers = [
            torch.stack(
                [
                    patch_locality(tokens, grid, prefix),
                    cls_similarity(tokens, prefix) if has_cls else tokens.new_full((len(tokens),), torch.nan),
                    pair_similarity(tokens, prefix),
                ]
            )
            for tokens in block_outputs(kept, grid, prefix)
        ]
        parts.append(torch.stack(layers).double())
    values = torch.cat(parts, -1).cpu()  # [layers,3,images]
    spread = (values.var(-1, correction=0) / (values.shape[-1] - 1)).sqrt()  # of one image: 0/0, NaN
    table = pd.DataFrame({"layer": range(len(values))})
    for i, name in enumerate(("locality", "cls", "pairs")):
        table[name], table[f"{name}_se"] = values[:, i].mean(-1).numpy(), spread[:, i].numpy()
    return table
