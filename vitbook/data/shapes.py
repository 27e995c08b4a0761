"""`shapes`: a synthetic set that can be learned in seconds, for when real images cannot be had.

Ten classes of 32 × 32 pictures. Five differ in local texture, and in how much of the ground it covers, which gives
learning a foothold: a patch alone tells them apart. Five differ in the arrangement of the same two discs: no patch
alone tells them apart. Mirroring keeps every class. Everything is whole-number arithmetic, so the pixels are the same
on every machine.
"""

import numpy as np

CLASSES = (
    "horizontal stripes", "vertical stripes", "diagonal stripes", "chequers", "dots",
    "side by side", "one above the other", "on a diagonal", "centre and corner", "touching",
)  # fmt: skip
SIDE = 32
SPLITS = {"train": (2_000, 1), "test": (500, 2)}  # images, seed

GROUND = np.array([[24, 30, 66], [58, 24, 62], [16, 58, 64], [70, 34, 26], [34, 52, 28], [48, 48, 56]], np.int16)
INK = np.array(
    [[244, 208, 63], [240, 128, 128], [125, 206, 160], [133, 193, 233], [245, 176, 65], [215, 189, 226]], np.int16
)
# centres (row, column) of the two discs, one line per arrangement; each keeps its class when mirrored
DISCS = np.array(
    [
        [[16, 8], [16, 24]],
        [[8, 16], [24, 16]],
        [[8, 8], [24, 24]],
        [[16, 16], [6, 6]],
        [[16, 12], [16, 20]],
    ],
    np.int16,
)


def draw(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [N,32,32,3] and labels int64 [N] of the split "train" (2,000) or "test" (500)."""
    n, seed = SPLITS[split]
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % len(CLASSES)

    def each(low: int, high: int, *shape: int) -> np.ndarray:  # one draw an image, high excluded
        return rng.integers(low, high, (n, *shape), np.int16)[..., None, None]

    y, x = np.mgrid[:SIDE, :SIDE].astype(np.int16)
    width = each(2, 4)
    pitch = 2 * width  # of every texture, in pixels
    rows, columns = y + each(0, 12), x + each(0, 12)
    lean = 1 - 2 * each(0, 2)
    across, down, slant = rows % pitch < width - 1, columns % pitch < width, (rows + lean * columns) % pitch <= width
    chequers = (rows % pitch < width) ^ (columns % pitch < width)
    dots = (rows % pitch - width) ** 2 + (columns % pitch - width) ** 2 <= 1
    centres = DISCS[labels % len(DISCS)][..., None, None] + each(-2, 3, 1, 2) + each(-1, 2, 2, 2)
    centres[:, :, 1] = np.where(each(0, 2, 1), SIDE - 1 - centres[:, :, 1], centres[:, :, 1])  # mirrored or not
    apart = (y - centres[:, :, 0]) ** 2 + (x - centres[:, :, 1]) ** 2  # [N, 2, 32, 32], squared pixels
    discs = (apart <= each(4, 6, 1) ** 2).any(1)

    kinds = (across, down, slant, chequers, dots, *([discs] * len(DISCS)))
    inked = np.choose(labels[:, None, None], kinds)[..., None]
    ground, ink = (palette[rng.integers(len(palette), size=n)][:, None, None] for palette in (GROUND, INK))
    noise = rng.integers(-10, 11, (n, SIDE, SIDE, 3), np.int16)
    return np.clip(np.where(inked, ink, ground) + noise, 0, 255).astype(np.uint8), labels
