"""MixUp, CutMix, and the controls that take CutMix apart; each image's partner is its neighbour in the batch.

============ ================================= ======================= =====================================
``cut``      what fills the box                the target              what it leaves out of CutMix
============ ================================= ======================= =====================================
``paste``    the partner's pixels there        λ' own, 1 - λ' partner  nothing: CutMix (Yun et al. 2019)
``major``    the partner's pixels there        the larger part's       a mixed label
``labels``   the image itself                  λ' own, 1 - λ' partner  a change of pixels
``erase``    the set's mean colour             own                     a second image and its label (Cutout)
``shuffle``  its whole patches, in new places  own                     the same; but nothing goes missing
============ ================================= ======================= =====================================

The box is torchvision's, λ' = 1 - box pixels / HW. Draws come from torch's default generator on the CPU.
"""

import torch
from torch import Tensor
from torchvision.transforms import v2

CUTS = ("paste", "major", "labels", "erase", "shuffle")
GRID = 8  # patches a side of ``shuffle``, as the book's models have


def blend(images: Tensor, targets: Tensor, alpha: float, per_image: bool) -> tuple[Tensor, Tensor]:
    """MixUp (Zhang et al. 2018) of float [B,3,H,W] and [B,K]; one λ ~ Beta(α, α) a batch, or an image."""
    law = v2.MixUp(alpha=alpha)
    weights = torch.tensor([law.make_params([])["lam"] for _ in range(len(images) if per_image else 1)])
    own = weights.to(images.device, non_blocking=True)
    return _weighed(images, own[:, None, None, None]), _weighed(targets, own[:, None])


def cut(images: Tensor, targets: Tensor, alpha: float, kind: str, per_image: bool) -> tuple[Tensor, Tensor]:
    """CutMix or a control of it, by the table above; one box a batch, or an image."""
    h, w = images.shape[-2:]
    law = v2.CutMix(alpha=alpha)
    boxes = [law.make_params([images])["box"] for _ in range(len(images) if per_image else 1)]
    x1, y1, x2, y2 = torch.tensor(boxes).T[..., None]  # each [1 or B, 1]
    rows, columns = torch.arange(h), torch.arange(w)
    inside = ((rows >= y1) & (rows < y2))[:, :, None] & ((columns >= x1) & (columns < x2))[:, None]
    own = 1 - inside.float().mean((1, 2))[:, None].to(images.device, non_blocking=True)
    if kind == "shuffle":
        images = _shuffled(images, inside)
    elif kind != "labels":
        filling = torch.zeros_like(images) if kind == "erase" else images.roll(1, 0)  # normalised: the mean is zero
        images = torch.where(inside[:, None].to(images.device, non_blocking=True), filling, images)
    if kind == "major":
        targets = torch.where(own >= 0.5, targets, targets.roll(1, 0))
    elif kind in ("paste", "labels"):
        targets = _weighed(targets, own)
    return images, targets


def _weighed(values: Tensor, own: Tensor) -> Tensor:
    return values * own + values.roll(1, 0) * (1 - own)


def _shuffled(images: Tensor, inside: Tensor) -> Tensor:
    """The patches that lie wholly inside the box (``inside`` [1 or B,H,W]), in random order among their places."""
    b, c, h, w = images.shape
    p, q = h // GRID, w // GRID
    whole = inside.view(-1, GRID, p, GRID, q).all(4).all(2).flatten(1)
    # Sorted so that those inside come first: in their own order where they go, in random order where they come from.
    places = (~whole).int().argsort(dim=1, stable=True)
    sources = torch.rand(whole.shape).masked_fill(~whole, 2.0).argsort(dim=1, stable=True)
    order = torch.empty_like(places).scatter(1, places, sources).to(images.device, non_blocking=True)
    patches = images.view(b, c, GRID, p, GRID, q).permute(0, 2, 4, 1, 3, 5).reshape(b, GRID * GRID, -1)
    patches = patches.gather(1, order[..., None].expand_as(patches))
    return patches.view(b, GRID, GRID, c, p, q).permute(0, 3, 1, 4, 2, 5).reshape(b, c, h, w)
