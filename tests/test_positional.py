"""Attention that reads positions alone: the same for every image, and plain in all else."""

import math

import pytest
import torch
from small import SMALL, images, largest_difference, stir
from torch.utils.flop_counter import FlopCounterMode

from vitbook.measures.heads import measure_heads
from vitbook.models.attention import Positional
from vitbook.models.vit import ViT, ViTConfig


def positional(**fields) -> ViT:
    return stir(ViT(**SMALL, attention="positional", **fields), 0.3)


def test_the_parameters_are_those_of_plain_attention():
    shapes = [
        {name: p.shape for name, p in ViT(**SMALL, attention=a).named_parameters()} for a in ("plain", "positional")
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("fields", [{}, {"registers": 2, "pool": "mean"}, {"cls_token": False, "pool": "mean"}])
def test_the_maps_are_the_formula_and_the_same_for_every_image(fields):
    model, x = positional(**fields), images(5, 3, 16, 16)
    with torch.no_grad():
        logits, kept = model(x, capture=True)
        assert torch.equal(logits, model(x, fused=False))
        assert largest_difference(logits, model(x, fused=True)) <= 1e-5
        places = model.pos_embed[0]
        places = (places - places.mean(-1, keepdim=True)) / (places.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
        before = kept["embed"]
        for i, block in enumerate(model.blocks):
            q, k, _ = block.attn.qkv(places).view(-1, 3, 3, 8).permute(1, 2, 0, 3)
            maps = (q @ k.transpose(-2, -1) / math.sqrt(8)).softmax(-1)
            assert kept[f"block{i}.attn"].shape == (5, *maps.shape)
            assert torch.allclose(kept[f"block{i}.attn"], maps.expand(5, -1, -1, -1), atol=1e-6)
            v = block.attn.qkv(block.norm1(before)).unflatten(-1, (3, 3, 8))[:, :, 2].transpose(1, 2)
            mid = before + block.attn.proj((maps @ v).transpose(1, 2).flatten(2))
            assert torch.allclose(mid, kept[f"block{i}.mid"], atol=1e-5)
            before = kept[f"block{i}.out"]
    assert largest_difference(kept["block0.attn"][:, :, 0], kept["block1.attn"][:, :, 0]) > 1e-2  # each layer its own
    table = measure_heads(model, x)
    assert len(table) == 6 and (table.distance_se <= 1e-3).all()


@pytest.mark.parametrize("fused", [False, True])
def test_the_gradient_reaches_every_parameter(fused):
    model = positional().train()
    model(images(4, 3, 16, 16), fused=fused).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_moving_patches_with_their_positions_changes_no_logit():
    model = positional(registers=1)
    x, order = images(2, 3, 16, 16), torch.randperm(16, generator=torch.Generator().manual_seed(3))
    patches = x.unfold(2, 4, 4).unfold(3, 4, 4).flatten(2, 3)[:, :, order]
    moved = patches.unflatten(2, (4, 4)).permute(0, 1, 2, 4, 3, 5).reshape(x.shape)
    with torch.no_grad():
        logits = model(x)
        assert largest_difference(model(moved), logits) > 1e-3
        model.pos_embed.copy_(model.pos_embed[:, torch.cat([torch.tensor([0, 1]), 2 + order])])
        assert torch.allclose(model(moved), logits, atol=1e-5)


def test_flops():
    c = ViTConfig(**SMALL, attention="positional")
    with torch.no_grad(), torch.device("meta"), FlopCounterMode(display=False) as counter:
        c.build()(torch.empty(1, 3, 16, 16))
    assert c.flops() == counter.get_total_flops()


def test_positions_are_needed():
    with pytest.raises(ValueError, match="attention='positional' needs positions=True"):
        ViTConfig(attention="positional", positions=False)
    with pytest.raises(ValueError, match=r"give them as positions=, \[1,T,D\]"):
        Positional(8, 2)(torch.zeros(1, 5, 8))
