"""Grid shuffle (source D): the cells of every image change places, by one permutation for all images."""

import functools

import torch
from torch import Tensor


def cell_order(size: tuple[int, int], cell: int, seed: int = 3) -> Tensor:
    """Which cell each place shows, int64 [cells], cells and places counted row by row.

    ``size``: (rows, columns) of the image in pixels, which ``cell``, the side of a cell, divides. By this seed none of
    the 4 to 64 cells of a 32 px image that are 16 to 4 px large stays in its place; by most others some do.
    """
    if cell < 1 or any(side % cell for side in size):
        raise ValueError(f"images of {size[0]} × {size[1]} pixels are not divisible into cells of {cell} pixels")
    cells = size[0] // cell * (size[1] // cell)
    return torch.randperm(cells, generator=torch.Generator().manual_seed(seed))


def grid_shuffle(images: Tensor, cell: int, seed: int = 3) -> Tensor:
    """Images [...,rows,columns] with their cells in the places of :func:`cell_order`; a cell stays as it is."""
    return images.flatten(-2)[..., _pixels(images.shape[-2:], cell, seed, images.device)].view(images.shape)


@functools.cache
def _pixels(size: tuple[int, int], cell: int, seed: int, device: torch.device) -> Tensor:
    """For each pixel of a shuffled image, the number of the pixel it comes from."""
    order = cell_order(size, cell, seed)
    cells = torch.arange(size[0] * size[1]).view(size[0] // cell, cell, size[1] // cell, cell).transpose(1, 2)
    moved = cells.flatten(0, 1)[order].view_as(cells)
    return moved.transpose(1, 2).flatten().to(device)
