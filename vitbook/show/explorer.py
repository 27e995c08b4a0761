"""The attention explorer: a widget that is live in a notebook and, through its saved state, on the finished page."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path

import anywidget
import numpy as np
import traitlets


class Explorer(anywidget.AnyWidget):
    """Choose an image, a layer, a head and a query patch; see where each model looks. Build it with `Explorer.of`.

    `image`, `layer`, `head` (-1: mean over heads) and `query` (token index; below `prefix` are the tokens without a
    place, 0 being CLS) may be read and set from Python. `data` is one gzip stream, little endian, of, in this order,
    with M models, n images, L layers, H heads, T tokens, N patches:

        float32 [M, n, L, H, T]           largest weight of each query's row on a patch
        float32 [M, n, L, H, T, prefix]   weights on the tokens without a place
        uint8   [M, n, L, H, T, N]        square roots of the weights on the patches, 255 standing for the largest
        uint8   [n, height, width, 3]     images

    Rows are scaled one by one because a row that stares at CLS would otherwise leave its patches no levels; roots are
    kept because small weights, summed over neighbours, need finer levels than large ones. So each head's maximum is
    exact, every other weight within a 255th of its row's maximum.
    """

    _esm = Path(__file__).with_name("explorer.js")
    data = traitlets.Bytes().tag(sync=True)
    spec = traitlets.Dict().tag(sync=True)
    image = traitlets.Int(0).tag(sync=True)
    layer = traitlets.Int(0).tag(sync=True)
    head = traitlets.Int(-1).tag(sync=True)
    query = traitlets.Int(0).tag(sync=True)

    @traitlets.validate("image", "layer", "head", "query")
    def _within(self, proposal: dict) -> int:
        spec, name, value = self.spec, proposal["trait"].name, proposal["value"]
        tokens = spec["prefix"] + spec["grid"][0] * spec["grid"][1]
        sizes = {"image": spec["images"][0], "layer": spec["layers"], "head": spec["heads"], "query": tokens}
        low = -1 if name == "head" else 0
        if not low <= value < sizes[name]:
            raise traitlets.TraitError(f"{name} {value} lies outside {low} ... {sizes[name] - 1}")
        return value

    @classmethod
    def of(
        cls,
        images: np.ndarray,
        maps: Mapping[str, np.ndarray],
        grid: tuple[int, int],
        *,
        prefix: int = 1,
        labels: Sequence[str] = (),
        **start: int,
    ) -> Explorer:
        """An explorer of `images` uint8 [n, height, width, 3] and, by model name, `maps` [n, L, heads, T, T].

        Maps are attention probabilities, T = prefix + rows * cols of `grid`. `labels` name the images. `start` sets
        what is chosen first: `image`, `layer`, `head`, `query` (by default the patch at the centre). A page embeds the
        data: 6 images, 6 layers, 4 heads, 65 tokens, 2 models are about 1.4 MB.
        """
        images = np.asarray(images)
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3 or not len(images):
            raise ValueError(f"images are {images.dtype} of shape {images.shape}; give uint8 [n, height, width, 3]")
        if labels and len(labels) != len(images):
            raise ValueError(f"{len(labels)} labels for {len(images)} images; give one label an image, or none")
        if not maps:
            raise ValueError("no maps given; give at least one model's attention by name")
        stacks = {name: np.asarray(stack, dtype=np.float32) for name, stack in maps.items()}
        tokens = prefix + grid[0] * grid[1]
        shape = next(iter(stacks.values())).shape
        for name, stack in stacks.items():
            if stack.ndim != 5 or stack.shape[0] != len(images) or stack.shape[3:] != (tokens, tokens):
                raise ValueError(
                    f"maps of {name!r} have shape {stack.shape}; {len(images)} images, a {grid[0]} x {grid[1]} grid "
                    f"and prefix {prefix} ask for [{len(images)}, layers, heads, {tokens}, {tokens}]"
                )
            if stack.shape != shape:
                raise ValueError(f"maps of {name!r} have shape {stack.shape}, not the first model's {shape}")
            # Float32 softmax may round to a little over one.
            if not (np.isfinite(stack).all() and stack.min() >= 0 and stack.max() <= 1 + 1e-5):
                raise ValueError(f"maps of {name!r} leave [0, 1] or are not finite; give attention after the softmax")
        spec = {
            "models": list(stacks),
            "labels": [str(label) for label in labels],
            "images": list(images.shape[:3]),
            "layers": shape[1],
            "heads": shape[2],
            "grid": list(grid),
            "prefix": prefix,
        }
        centre = prefix + (grid[0] // 2) * grid[1] + grid[1] // 2
        data = _pack(images, np.stack(list(stacks.values())), prefix)
        return cls(data=data, spec=spec, **{"query": centre, **start})


def _pack(images: np.ndarray, maps: np.ndarray, prefix: int) -> bytes:
    patches = maps[..., prefix:]
    peaks = patches.max(axis=-1)
    levels = np.rint(255 * np.sqrt(patches / np.where(peaks > 0, peaks, 1)[..., None])).astype(np.uint8)
    parts = (peaks.astype("<f4"), maps[..., :prefix].astype("<f4"), levels, images)
    return gzip.compress(b"".join(part.tobytes() for part in parts), mtime=0)
