"""Figures and the attention explorer: what is drawn, and the explorer's bytes, against what they were made from."""

import gzip

import numpy as np
import pandas as pd
import pytest
import traitlets

from vitbook.show import (
    Explorer,
    distance_entropy_plane,
    head_grid,
    heads_by_layer,
    house_style,
    layer_profile,
    over_epochs,
    tidy,
    training_curves,
)


def heads(layers: int = 3, per_layer: int = 4, shift: float = 0.0) -> pd.DataFrame:
    layer, head = np.divmod(np.arange(layers * per_layer), per_layer)
    return pd.DataFrame(
        {"layer": layer, "head": head, "distance": 10.0 * layer + head + shift, "entropy": 1 + 0.1 * head}
    )


def points(axes) -> np.ndarray:
    return np.concatenate([np.asarray(drawn.get_offsets()) for drawn in axes.collections])


def test_heads_by_layer_draws_each_head_the_means_and_the_uniform_value():
    table = heads()
    axes = heads_by_layer(table, uniform=16.5, label="distance (px)").axes[0]
    drawn = points(axes)
    assert len(drawn) == len(table) and (drawn[:, 1] == table["distance"]).all()
    assert (np.rint(drawn[:, 0]) == table["layer"]).all() and len(np.unique(drawn[:, 0])) == len(table)
    means, uniform = axes.lines
    assert list(means.get_ydata()) == [1.5, 11.5, 21.5] and set(uniform.get_ydata()) == {16.5}
    assert axes.get_ylabel() == "distance (px)" and axes.get_ylim()[0] == 0


def test_plane_draws_each_head_of_each_model():
    one = distance_entropy_plane(heads()).axes[0]
    assert (points(one) == heads()[["distance", "entropy"]].to_numpy()).all()
    panels = distance_entropy_plane({name: heads(shift=i) for i, name in enumerate("abcd")}, uniform=(16.5, 4.17)).axes
    shown = [axes for axes in panels if axes.get_title(loc="left") or axes.get_title()]
    assert [len(points(axes)) for axes in shown] == [12] * 4
    assert [points(axes)[0, 0] for axes in shown] == [0, 1, 2, 3]


def test_head_grid_has_a_map_a_head_and_prints_each_maximum():
    house_style()
    rng = np.random.default_rng(0)
    maps = rng.random((2, 3, 4, 5)) / 20
    maps[1, 2, 0, 0], rollout = 0.5, rng.random((2, 4, 5)) / 20
    figure = head_grid(rng.random((3, 32, 40)), maps, rollout=rollout, query=(1, 2))
    source, *cells = figure.axes
    assert len(cells) == 2 * (3 + 2) and source.images[0].get_array().shape == (32, 40, 3)
    columns = [*maps.transpose(1, 0, 2, 3), maps.mean(axis=1), rollout]
    expected = [column[layer] for column in columns for layer in range(2)]
    for axes, values in zip(cells, expected, strict=True):
        assert np.array_equal(axes.images[0].get_array(), values)
        assert axes.images[0].get_clim() == (0, values.max())
        assert axes.texts[0].get_text() == f"{values.max():#.2g}"
        assert axes.patches[0].get_xy() == (1.5, 0.5)  # column 2, row 1
    assert cells[5].texts[0].get_text() == "0.50"
    assert source.get_xlabel() == "query: patch (1, 2)"
    assert len(head_grid(rng.random((32, 40, 3)), maps, head_mean=False).axes) == 1 + 2 * 3


def test_lines_are_means_over_seeds_and_bands_their_range():
    seeds = [heads(shift=0), heads(shift=1), heads(shift=5)]
    axes = layer_profile({"several": seeds, "one": heads()}).axes[0]
    several, one = axes.lines
    assert list(several.get_ydata()) == [3.5, 13.5, 23.5] and list(one.get_ydata()) == [1.5, 11.5, 21.5]
    (band,) = axes.collections  # a single seed has none
    edge = band.get_paths()[0].vertices
    assert edge[edge[:, 0] == 0][:, 1].min() == 1.5 and edge[edge[:, 0] == 0][:, 1].max() == 6.5


def test_time_course_is_ordered_by_epoch():
    figure = over_epochs({20: heads(shift=2), 1: heads(), 5: [heads(shift=1), heads(shift=2)]}, uniform=16.5)
    *layers, uniform = figure.axes[0].lines
    assert [list(line.get_xdata()) for line in layers] == [[1, 5, 20]] * 3
    assert list(layers[1].get_ydata()) == [11.5, 13.0, 13.5] and uniform.get_ydata()[0] == 16.5
    by_head = over_epochs({1: heads(), 2: heads(shift=1)}, by="head").axes[0].lines
    assert len(by_head) == 4 and list(by_head[0].get_ydata()) == [10, 11]


def test_training_curves_follow_the_epochs():
    curve = pd.DataFrame({"epoch": [1, 2, 3], "accuracy": [10.0, 30.0, 40.0]})
    axes = training_curves(
        {"base": [curve, curve.assign(accuracy=curve["accuracy"] + 2)]}, "accuracy", label="test accuracy (%)"
    ).axes[0]
    assert list(axes.lines[0].get_xdata()) == [1, 2, 3] and list(axes.lines[0].get_ydata()) == [11, 31, 41]


def test_figures_refuse_what_they_cannot_draw():
    with pytest.raises(ValueError, match=r"lacks.*distance"):
        heads_by_layer(heads().drop(columns="distance"))
    with pytest.raises(ValueError, match="empty"):
        layer_profile({"a": heads().iloc[:0]})
    image, maps = np.zeros((8, 8, 3)), np.ones((1, 1, 4, 4))
    with pytest.raises(ValueError, match="layers, heads"):
        head_grid(image, maps[0])
    with pytest.raises(ValueError, match="rollout"):
        head_grid(image, maps, rollout=maps)
    with pytest.raises(ValueError, match="outside"):
        head_grid(image, maps, query=(4, 0))
    with pytest.raises(ValueError, match="negative or non-finite"):
        head_grid(image, -maps)
    with pytest.raises(ValueError, match="image"):
        head_grid(image[..., 0], maps)


# --- explorer


def attention(*shape: int, seed: int = 0) -> np.ndarray:
    logits = 3 * np.random.default_rng(seed).normal(size=shape)
    weights = np.exp(logits)
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def test_explorer_carries_the_maps_to_a_255th_of_each_rows_maximum():
    grid, prefix, tokens = (3, 4), 2, 14
    maps = {"one": attention(2, 3, 2, tokens, tokens), "two": attention(2, 3, 2, tokens, tokens, seed=1)}
    maps["two"][0, 0, 0, 5] = np.eye(tokens)[0]  # all weight on CLS: nothing is left for the patches
    maps["two"][0, 0, 0, 6] = np.r_[0.999, 0, 0.001 * np.full(12, 1 / 12)]  # nearly all: the patches keep their levels
    images = np.random.default_rng(2).integers(0, 256, (2, 6, 8, 3), dtype=np.uint8)
    explorer = Explorer.of(images, maps, grid, prefix=prefix, labels=["cat", "dog"], layer=1)

    raw = gzip.decompress(explorer.data)
    rows = 2 * 2 * 3 * 2 * tokens
    floats = np.frombuffer(raw, "<f4", count=rows * (1 + prefix))
    peaks = floats[:rows].reshape(2, 2, 3, 2, tokens)
    others = floats[rows:].reshape(2, 2, 3, 2, tokens, prefix)
    levels = np.frombuffer(raw, np.uint8, offset=floats.nbytes, count=rows * 12).reshape(2, 2, 3, 2, tokens, 12)
    assert raw[floats.nbytes + levels.nbytes :] == images.tobytes()
    source = np.stack([maps["one"], maps["two"]])
    assert np.array_equal(peaks, source[..., prefix:].max(-1)) and np.array_equal(others, source[..., :prefix])
    error = np.abs((levels / 255) ** 2 * peaks[..., None] - source[..., prefix:])
    assert (error <= peaks[..., None] / 255).all()
    assert (levels[1, 0, 0, 0, 5] == 0).all() and (levels[1, 0, 0, 0, 6] == 255).all()
    assert explorer.spec == {
        "models": ["one", "two"],
        "labels": ["cat", "dog"],
        "images": [2, 6, 8],
        "layers": 3,
        "heads": 2,
        "grid": [3, 4],
        "prefix": 2,
    }
    assert (explorer.layer, explorer.head, explorer.query) == (1, -1, 2 + 1 * 4 + 2)  # the patch at the centre


def test_explorer_fits_a_page():
    maps = {name: attention(6, 6, 4, 65, 65, seed=i) for i, name in enumerate(("plain", "CutMix"))}
    noise = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    assert len(Explorer.of(noise, maps, (8, 8)).data) * 4 / 3 < 2e6  # as base64


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(grid=(2, 3)), r"2 x 3 grid.*ask for"),
        (dict(prefix=0), "prefix 0"),
        (dict(images=np.zeros((1, 4, 4, 3), np.uint8)), "1 images"),
        (dict(images=np.zeros((2, 4, 4, 3))), "uint8"),
        (dict(labels=["one"]), "1 labels for 2 images"),
        (dict(maps={}), "no maps"),
        (dict(maps={"m": attention(2, 1, 1, 5, 5) - 1}), "'m' leave"),
        (dict(maps={"m": 1.1 * np.ones((2, 1, 1, 5, 5))}), "'m' leave"),
        (dict(maps={"m": np.full((2, 1, 1, 5, 5), np.nan)}), "'m' leave"),
        (dict(maps={"m": attention(2, 1, 1, 5, 5), "k": attention(2, 1, 2, 5, 5)}), "'k' have shape"),
    ],
)
def test_explorer_refuses_what_does_not_fit(change, named):
    given = dict(images=np.zeros((2, 4, 4, 3), np.uint8), maps={"m": attention(2, 1, 1, 5, 5)}, grid=(2, 2))
    with pytest.raises(ValueError, match=named):
        Explorer.of(**(given | change))


def test_explorer_refuses_a_choice_outside():
    explorer = Explorer.of(np.zeros((1, 4, 4, 3), np.uint8), {"m": attention(1, 1, 2, 5, 5)}, (2, 2))
    explorer.head, explorer.query = 1, 0
    for name, value in (("head", 2), ("head", -2), ("query", 5), ("layer", 1), ("image", -1)):
        with pytest.raises(traitlets.TraitError, match=f"{name} {value} lies outside"):
            setattr(explorer, name, value)


def test_a_tidy_table_has_one_number_of_decimals_a_column_and_dashes_for_what_is_missing():
    table = pd.DataFrame({"a": [0.3, 0.1906, np.nan], "b": [3.0, 12.0, np.nan], "c": [-0.0001, 1.25, 2.0]})
    table = table.assign(n=pd.array([1, None, 3], dtype="Int64"), word=["≈ 1", None, "no"], on=[True, False, True])
    written = tidy(table, 3)
    assert list(written["a"]) == ["0.300", "0.191", "–"] and list(written["b"]) == ["3", "12", "–"]
    assert list(written["c"]) == ["0.00", "1.25", "2.00"] and list(written["n"]) == ["1", "–", "3"]
    assert list(written["word"]) == ["≈ 1", "–", "no"] and list(written["on"]) == [True, False, True]
