"""The book's recurring figures. Each takes plain tables or arrays and returns a matplotlib `Figure`.

A *table of heads* is a DataFrame with one row a head: the columns `layer` and `head` (counted from 0) and one column a
measure. Where a function takes a list of tables, each is one seed: lines are means over seeds, bands reach from
the lowest to the highest seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.patheffects as effects
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from vitbook.show.style import INK, PALETTE, QUIET, WIDTH, layer_colours

Tables = pd.DataFrame | Sequence[pd.DataFrame]

LABELS = {
    "distance": "mean attention distance",
    "entropy": "attention entropy (nats)",
    "self": "weight on the patch itself",
    "cls": "weight on CLS",
    "neighbours": "weight on the 8 neighbours",
    "effective": "effective tokens",
}


def heads_by_layer(
    table: pd.DataFrame, value: str = "distance", *, uniform: float | None = None, label: str | None = None
) -> Figure:
    """One dot a head over its layer, a line through the layers' means, a dashed line at the `uniform` head's value.

    `label` names the measure and its unit: a table does not know whether its distances are in pixels or patches.
    """
    _need(table, "layer", "head", value)
    figure = new_figure(3.2)
    axes = figure.add_subplot()
    heads = sorted(table["head"].unique())
    # Heads of a layer stand side by side in their order, so that equal values stay visible.
    offset = (table["head"].map(heads.index) - (len(heads) - 1) / 2) * (0.4 / max(len(heads) - 1, 1))
    axes.scatter(table["layer"] + offset, table[value], s=26, alpha=0.75, linewidth=0, label="one head")
    means = table.groupby("layer")[value].mean()
    axes.plot(means.index, means, color=PALETTE[1], marker="_", markersize=14, label="mean of the layer")
    _uniform_line(axes, uniform)
    _layer_axis(axes, value, label)
    _legend(axes)
    return figure


def distance_entropy_plane(
    tables: pd.DataFrame | Mapping[str, pd.DataFrame],
    *,
    uniform: tuple[float, float] | None = None,
    label: str | None = None,
) -> Figure:
    """Every head as a point: distance to the right, entropy upwards, colour by layer; a mapping draws a panel a model,
    at most four in a row.

    `uniform` is the (distance, entropy) of the uniform head, drawn as a cross. Panels share their axes.
    """
    panels = {"": tables} if isinstance(tables, pd.DataFrame) else dict(tables)
    if not panels:
        raise ValueError("no table to draw: give one table of heads, or a mapping of names to tables")
    for table in panels.values():
        _need(table, "layer", "distance", "entropy")
    rows = -(-len(panels) // 4)
    columns = -(-len(panels) // rows)
    figure = new_figure(3.4 if columns == 1 else 2.6 * rows + 0.2, 4.8 if columns == 1 else WIDTH)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    depth = 1 + max(int(table["layer"].max()) for table in panels.values())
    for axes, (name, table) in zip(grid.flat, panels.items(), strict=False):
        points = axes.scatter(
            table["distance"],
            table["entropy"],
            c=table["layer"],
            cmap=layer_colours(depth),
            vmin=-0.5,
            vmax=depth - 0.5,
            s=28,
            alpha=0.9,
            linewidth=0,
        )
        if uniform is not None:
            axes.plot(*uniform, marker="+", markersize=11, color=INK, linestyle="none", label="uniform head")
        axes.set_title(name)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        axes.set_ylabel(LABELS["entropy"])
    for index in range(len(panels) - columns, len(panels)):  # the lowest panel of each column
        grid.flat[index].set_xlabel(label or LABELS["distance"])
        grid.flat[index].xaxis.set_tick_params(labelbottom=True)
    if uniform is not None:
        grid[0, 0].legend(loc="lower right")
    ticks = MaxNLocator(nbins=12, integer=True)
    figure.colorbar(points, ax=grid, label="layer", ticks=ticks, shrink=0.9, aspect=28).outline.set_visible(False)
    return figure


def head_grid(
    image: np.ndarray,
    maps: np.ndarray,
    *,
    head_mean: bool = True,
    rollout: np.ndarray | None = None,
    query: tuple[int, int] | None = None,
) -> Figure:
    """One image and where every head looks from one query: rows are layers, columns heads, then head mean and rollout.

    `image` [H, W, 3] or [3, H, W], uint8 or in [0, 1]; `maps` [L, heads, rows, cols] and `rollout` [L, rows, cols] hold
    probabilities. Every map is scaled to its own maximum, printed on it. `query` (row, col) is outlined; None stands
    for CLS.
    """
    image, maps = _picture(image), np.asarray(maps, dtype=float)
    if maps.ndim != 4:
        raise ValueError(f"maps have shape {maps.shape}; give [layers, heads, rows, cols], one map for each head")
    layers, heads, rows, cols = maps.shape
    columns = [(f"head {head}", maps[:, head]) for head in range(heads)]
    if head_mean:
        columns.append(("head mean", maps.mean(axis=1)))
    if rollout is not None:
        rollout = np.asarray(rollout, dtype=float)
        if rollout.shape != (layers, rows, cols):
            raise ValueError(f"rollout has shape {rollout.shape}; the maps ask for {(layers, rows, cols)}")
        columns.append(("rollout", rollout))
    if not all(np.isfinite(stack).all() and (stack >= 0).all() for _, stack in columns):
        raise ValueError("maps hold negative or non-finite values; give attention probabilities")
    if query is not None and not (0 <= query[0] < rows and 0 <= query[1] < cols):
        raise ValueError(f"query {query} lies outside the {rows} x {cols} grid of patches")

    source = 1.7  # the image's column, in widths of a map
    cell = WIDTH / (len(columns) + source)
    figure = new_figure(cell * rows / cols * layers + 0.35)
    figure.get_layout_engine().set(w_pad=0.015, h_pad=0.015, wspace=0, hspace=0)
    spec = figure.add_gridspec(layers, len(columns) + 1, width_ratios=[source] + [1] * len(columns))
    axes = figure.add_subplot(spec[: min(2, layers), 0])
    axes.imshow(image, extent=(-0.5, cols - 0.5, rows - 0.5, -0.5), aspect=_pixel_aspect(image, rows, cols))
    axes.set_anchor("NW")
    axes.set_title("image", fontsize=7.5)
    _frame(axes, query)
    axes.set_xlabel("query: CLS" if query is None else f"query: patch ({query[0]}, {query[1]})", fontsize=7.5)
    for column, (name, stack) in enumerate(columns, start=1):
        for layer in range(layers):
            axes = figure.add_subplot(spec[layer, column])
            top = stack[layer].max()
            axes.imshow(stack[layer], vmin=0, vmax=top or 1, aspect=_pixel_aspect(image, rows, cols))
            _frame(axes, query)
            outline = [effects.withStroke(linewidth=1.6, foreground="black")]
            axes.text(0.04, 0.04, f"{top:#.2g}", transform=axes.transAxes, fontsize=6.5, color="white",
                      path_effects=outline)  # fmt: skip
            if layer == 0:
                axes.set_title(name, fontsize=7.5, loc="center")
            if column == 1:
                axes.set_ylabel(f"layer {layer}", fontsize=7.5)
    return figure


def over_epochs(
    tables: Mapping[int, Tables],
    value: str = "distance",
    *,
    by: str = "layer",
    uniform: float | None = None,
    label: str | None = None,
) -> Figure:
    """Means over heads as training goes on: one line a layer (or a head, `by="head"`); `tables` is keyed by epoch."""
    epochs = sorted(tables)
    seeds = {epoch: _means(tables[epoch], by, value) for epoch in epochs}
    groups = list(seeds[epochs[-1]].columns)
    figure = new_figure(3.2)
    axes = figure.add_subplot()
    for group, colour in zip(groups, layer_colours(len(groups)).colors, strict=True):
        _line(axes, epochs, [seeds[epoch][group] for epoch in epochs], label=f"{by} {group}", color=colour)
    _uniform_line(axes, uniform)
    axes.set_xlabel("epoch")
    axes.set_ylabel(label or LABELS.get(value, value))
    _legend(axes)
    return figure


def training_curves(curves: Mapping[str, Tables], value: str, *, label: str | None = None) -> Figure:
    """One line a configuration: the column `value` of tables that have a column `epoch`."""
    figure = new_figure(3.0)
    axes = figure.add_subplot()
    for name, tables in curves.items():
        seeds = _means(tables, "epoch", value)
        _line(axes, list(seeds.columns), [seeds[epoch] for epoch in seeds], label=name)
    axes.set_xlabel("epoch")
    axes.set_ylabel(label or value)
    _legend(axes)
    return figure


def layer_profile(
    tables: Mapping[str, Tables],
    value: str = "distance",
    *,
    uniform: float | None = None,
    label: str | None = None,
) -> Figure:
    """Layer means by depth, one line a configuration, so that recipes can be compared."""
    figure = new_figure(3.2)
    axes = figure.add_subplot()
    for name, given in tables.items():
        seeds = _means(given, "layer", value)
        _line(axes, list(seeds.columns), [seeds[layer] for layer in seeds], label=name)
    _uniform_line(axes, uniform)
    _layer_axis(axes, value, label)
    _legend(axes)
    return figure


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """An empty figure, sizes in inches, for what a chapter draws itself; a notebook shows it as a cell's value.

    (A bare `matplotlib.figure.Figure` is shown as text until pyplot has opened a figure.)
    """
    figure = plt.figure(figsize=(width, height), layout="constrained")
    plt.close(figure)  # else a notebook shows it twice: as an open figure and as the cell's value
    return figure


def _need(table: pd.DataFrame, *columns: str) -> None:
    missing = [column for column in columns if column not in table]
    if missing:
        raise ValueError(f"the table lacks {missing}; it has the columns {list(table.columns)}")
    if table.empty:
        raise ValueError("the table is empty: there is nothing to draw")


def _means(tables: Tables, by: str, value: str) -> pd.DataFrame:
    """Means of `value` in each group: one row a seed, one column a group."""
    seeds = [tables] if isinstance(tables, pd.DataFrame) else list(tables)
    for table in seeds:
        _need(table, by, value)
    return pd.DataFrame([table.groupby(by)[value].mean() for table in seeds])


def _line(axes: Axes, x: Sequence[float], seeds: Sequence[pd.Series], **style: object) -> None:
    """Mean over seeds at each x, with a light band from the lowest to the highest seed when there are several."""
    (line,) = axes.plot(x, [values.mean() for values in seeds], marker="o", markersize=3.5, **style)
    if max(len(values) for values in seeds) > 1:
        low, high = [values.min() for values in seeds], [values.max() for values in seeds]
        axes.fill_between(x, low, high, color=line.get_color(), alpha=0.18, linewidth=0)


def _uniform_line(axes: Axes, uniform: float | None) -> None:
    if uniform is not None:
        axes.axhline(uniform, color=QUIET, linestyle=(0, (4, 3)), linewidth=1, zorder=0, label="uniform head")


def _layer_axis(axes: Axes, value: str, label: str | None) -> None:
    axes.set_xlabel("layer")
    axes.set_ylabel(label or LABELS.get(value, value))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axes.dataLim.y0 >= 0:
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # else a nearly uniform model looks as varied as a local one


def _legend(axes: Axes) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _picture(image: np.ndarray) -> np.ndarray:
    image = np.asarray(image)
    if image.ndim == 3 and image.shape[0] == 3 and image.shape[2] != 3:
        image = image.transpose(1, 2, 0)
    if image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"the image has shape {image.shape}; give [height, width, 3] or [3, height, width]")
    return image


def _pixel_aspect(image: np.ndarray, rows: int, cols: int) -> float:
    """Height of a patch over its width, so that maps keep the image's shape."""
    return (image.shape[0] / rows) / (image.shape[1] / cols)


def _frame(axes: Axes, query: tuple[int, int] | None) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    if query is not None:
        corner = (query[1] - 0.5, query[0] - 0.5)
        for colour, width in (("black", 1.8), ("white", 0.9)):
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=colour, linewidth=width))
