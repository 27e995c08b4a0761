"""Grid shuffle: one permutation of cells, and what no shuffle of whole patches can change."""

import pytest
import torch
from small import SMALL, stir
from small import images as small_images
from tiny_runs import tiny
from torch.nn import functional as F

from vitbook.data import cell_order, grid_shuffle, load
from vitbook.models.vit import ViT
from vitbook.runs import training

pytestmark = pytest.mark.usefixtures("own_world")


@pytest.mark.parametrize(("size", "cell"), [((8, 8), 2), ((12, 8), 4), ((6, 9), 1), ((8, 8), 8)])
def test_every_place_shows_the_cell_of_the_order(size, cell):
    images = torch.rand(2, 3, *size)
    shuffled, order = grid_shuffle(images, cell), cell_order(size, cell)
    columns = size[1] // cell
    assert order.sort().values.tolist() == list(range(size[0] * size[1] // cell**2))
    for place, source in enumerate(order.tolist()):
        (r, c), (y, x) = divmod(place, columns), divmod(source, columns)
        want = images[..., y * cell : (y + 1) * cell, x * cell : (x + 1) * cell]
        assert torch.equal(shuffled[..., r * cell : (r + 1) * cell, c * cell : (c + 1) * cell], want)
    assert torch.equal(grid_shuffle(images, cell), shuffled)  # the same permutation every time
    if len(order) > 4:
        assert not torch.equal(grid_shuffle(images, cell, seed=1), shuffled)


def test_cells_that_do_not_fit_are_refused():
    for cell in (0, 3, 16):
        with pytest.raises(ValueError, match=f"8 × 8 pixels are not divisible into cells of {cell} pixels"):
            grid_shuffle(torch.rand(1, 3, 8, 8), cell)


@pytest.mark.parametrize("cell", [4, 8])
def test_cells_of_whole_patches_only_permute_the_positions(cell):
    """A ViT on shuffled images is the ViT on whole ones with its position embeddings permuted; also after steps."""
    model, twin = (stir(ViT(**SMALL), scale=0.3) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    patches = torch.arange(16.0).view(1, 1, 4, 4).repeat_interleave(4, 2).repeat_interleave(4, 3)
    moved = grid_shuffle(patches, cell)[0, 0, ::4, ::4].flatten().long()  # which patch each place shows
    with torch.no_grad():
        twin.pos_embed[:, 1 + moved] = model.pos_embed[:, 1:].clone()
    images, labels = small_images(8, 3, 16, 16), torch.arange(8) % 7
    assert (model(images) - model(grid_shuffle(images, cell))).abs().max() > 0.1
    for _ in range(4):
        logits, same = model(grid_shuffle(images, cell)), twin(images)
        assert (logits - same).abs().max() <= 1e-5
        for net, given in ((model, logits), (twin, same)):
            optimiser = torch.optim.SGD(net.parameters(), lr=0.05)
            optimiser.zero_grad()
            F.cross_entropy(given, labels).backward()
            optimiser.step()


def test_a_run_with_shuffle_trains_and_is_measured_on_shuffled_images(monkeypatch):
    run, seen = tiny(0, {"shuffle": 8, "recipe.epochs": 1}), []
    real = training.grid_shuffle
    monkeypatch.setattr(training, "grid_shuffle", lambda images, cell: seen.append(len(images)) or real(images, cell))
    result = training.fit(run)
    test = load("shapes", "test")
    model = training.rebuild(run, result["weights"])
    with torch.no_grad():
        right = model(real(test.normalise(test.images), 8)).argmax(1) == test.labels
    assert result["measures"][-1]["accuracy"] == pytest.approx(right.double().mean().item(), abs=1e-6)
    # 128 images of an epoch; at two milestones 500 for accuracy, 500 for the heads and 128 clean ones
    assert sum(seen) == 128 + 2 * (500 + 500 + 128)
    assert run.id != tiny(0, {"recipe.epochs": 1}).id


@pytest.mark.parametrize(("cell", "stay"), [(16, 0), (8, 0), (4, 0), (2, 1), (1, 2)])
def test_the_books_own_orders_move_nearly_every_cell(cell, stay):
    order = cell_order((32, 32), cell)
    assert (order == torch.arange(len(order))).sum() == stay
