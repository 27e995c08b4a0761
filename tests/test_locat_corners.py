"""LocAt and the measures in corners: compiled without gradients, checkpointed, on another grid, in half precision."""

import math
from copy import deepcopy

import pytest
import timm
import torch
from small import SMALL, images, largest_difference, stir, timm_vit
from torch import nn

from vitbook.measures.dense import fit_decoder, segment
from vitbook.measures.probes import nearest
from vitbook.measures.signals import measure_tokens
from vitbook.models.adapters import capture
from vitbook.models.attention import refine
from vitbook.models.gaussian import AutoScale, FromInput, GaussianBias
from vitbook.models.jumbo import Jumbo
from vitbook.models.locat import add_locat
from vitbook.models.vit import ViT


def test_compiled_without_gradients_it_is_one_graph():
    graphs = []

    def counted(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model, x = stir(ViT(**SMALL, attention="gaug", refine=True)), images(2, 3, 16, 16)
    with torch.no_grad():
        expected = model(x)
        assert largest_difference(torch.compile(model, backend=counted, fullgraph=True)(x), expected) <= 1e-6
    assert len(graphs) == 1


def test_the_cap_of_coarse_training_is_in_patches():
    bias = GaussianBias(4, (32, 32), prefix=0).train()
    nn.init.constant_(bias.log_var.bias, 1e3)  # Σ = 32², as wide as it can be, times 2/32 on a grid of two rows
    with torch.no_grad():
        row = bias(torch.zeros(1, 1, 140, 4), (2, 70))[0, 0, 0].view(2, 70)[0]
    expected = [math.log(2) * math.exp(-0.5 * min(n // 2 * 2, 31) ** 2 / (64 + 0.2)) for n in range(70)]
    assert row.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_coarse_scale_is_that_of_the_mean_query():
    bias, q = AutoScale(8, (32, 32), prefix=0).train(), images(1, 1, 1024, 8)
    alpha = bias.predict(q)[1][0, 0, :, :, 0]
    cell = q[0, 0].view(32, 32, 8)[:2, :2].mean((0, 1))
    assert alpha[:2, :2].flatten().tolist() == pytest.approx([cell.square().mean().sqrt().item()] * 4, rel=1e-5)


def test_a_checkpointed_model_refuses_a_grid_that_it_would_forget():
    model = add_locat(timm_vit(dynamic_img_size=True)).train()
    model.set_grad_checkpointing()
    model(images(2, 3, 16, 16)).sum().backward()
    with pytest.raises(ValueError, match=r"patches with gradient checkpointing.*set_input_size"):
        model(images(2, 3, 24, 16))
    with torch.no_grad():
        assert model(images(2, 3, 24, 16)).shape == (2, 7)


def test_maps_of_a_checkpointed_model_have_gradients():
    model, x = timm_vit(), images(2, 3, 16, 16)
    plain = deepcopy(model)
    model.set_grad_checkpointing()
    for net in (model, plain):
        capture(net)(x)[1]["block1.attn"].square().sum().backward()
    assert model.grad_checkpointing
    assert largest_difference(model.blocks[0].attn.qkv.weight.grad, plain.blocks[0].attn.qkv.weight.grad) <= 1e-7


def test_our_vit_keeps_what_was_done_to_it():
    model = stir(ViT(**SMALL)).requires_grad_(False)
    model.head = nn.Identity()
    new = add_locat(model)
    assert {name.split(".")[-2] for name, p in new.named_parameters() if p.requires_grad} == {"log_var", "log_alpha"}
    assert new(images(2, 3, 16, 16)).shape == (2, 24)
    assert not hasattr(model.blocks[0].attn, "gaug") and model.config.attention == "plain"


def test_a_grid_of_as_many_patches_is_no_mistake_to_make():
    model, x = capture(timm_vit(dynamic_img_size=True)), images(2, 3, 8, 32)
    with pytest.raises(ValueError, match=r"images of 2 × 8 patches, as many as the model's 4 × 4"):
        measure_tokens(model, x)


def test_features_in_half_precision():
    torch.manual_seed(0)
    masks = torch.arange(8).ge(4).long().expand(2, 6, 8)
    features = torch.stack([masks[:, ::2, ::2] * 2.0 - 1, masks[:, ::2, ::2] * 0.0 + 1], -1)  # [2,3,4,2]
    decoder = fit_decoder(features.half(), masks, 2, iterations=200, batch=2, ignore=255)
    assert (segment(decoder, features.half(), (6, 8)) == masks).double().mean() >= 0.9


def test_neighbours_are_exact_under_autocast():
    q, k = images(50, 32), images(400, 32, seed=1)
    ((weights, which),) = nearest(q, k, 5, 0.02)
    with torch.autocast("cpu", torch.bfloat16):
        ((low, there),) = nearest(q, k, 5, 0.02)
    assert torch.equal(weights, low) and torch.equal(which, there)


def test_refinement_of_half_precision_tokens_does_not_overflow():
    tokens = torch.full((1, 17, 24), 200.0)  # 8 · 200² / √8 is beyond float16
    assert torch.equal(refine(tokens.half(), 3), tokens.half())  # alike tokens stay what they are


def test_a_layer_of_timm_knows_its_grid_before_the_model_is_called():
    base = timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=64).eval()
    torch.manual_seed(0)
    block, x = add_locat(base).eval().blocks[0], torch.randn(2, 17, 192)
    expected = x + block.attn(block.norm1(x))
    torch.testing.assert_close(block(x), expected + block.mlp(block.norm2(expected)))


def test_variance_from_input_names_an_input_that_does_not_fit():
    bias = FromInput(8, (4, 4), 1, 24)
    for wrong in (None, torch.zeros(2, 16, 24), torch.zeros(2, 17, 8)):
        with pytest.raises(ValueError, match=r"\[B, T, D\] = \[2, 17, 24\]"):
            bias(torch.zeros(2, 3, 17, 8), x=wrong)


def test_jumbo_wants_normalised_images():
    with pytest.raises(ValueError, match=r"uint8.*normalised \[B, 3, \(16, 16\)\]"):
        Jumbo(16, 4, 24, 1, 3, 5)(torch.zeros(1, 3, 16, 16, dtype=torch.uint8))


def test_void_of_minus_one_in_signed_bytes_is_refused():
    masks = torch.full((1, 2, 2), -1, dtype=torch.int8)  # of which 255, the void value given, is no member
    with pytest.raises(ValueError, match="masks hold -1, but classes=3 and ignore=255"):
        fit_decoder(torch.ones(1, 2, 2, 4), masks, 3, ignore=255)
