"""timm's own models through ``capture``, and as configurations."""

import json
import math
from dataclasses import asdict

import pytest
import timm
import torch
from small import HAS_DIFF, SMALL, images, largest_difference, stir, timm_vit, where
from timm.models.deit import VisionTransformerDistilled
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import ResPostBlock
from torch import nn

from vitbook.measures.heads import attention_distance, measure_heads
from vitbook.models.adapters import TimmConfig, capture
from vitbook.models.vit import ViT, ViTConfig, from_timm


def no_trace(model: nn.Module) -> bool:
    """No hook is left, and attention that can be fused is fused again."""
    hooks = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return not hooks and all(m.fused_attn for m in model.modules() if hasattr(m, "fused_attn"))


def fused(model: nn.Module) -> nn.Module:
    """Fused attention wherever timm has it (Swin's is off by default)."""
    for m in model.modules():
        if hasattr(m, "fused_attn"):
            m.fused_attn = True
    return model


def test_capture_of_a_plain_vit_equals_ours():
    theirs, x = timm_vit(reg_tokens=2), images(3, 3, 16, 16)
    wrapped, ours = capture(theirs), from_timm(theirs)
    with torch.no_grad():
        logits, kept = wrapped(x)
        expected_logits, expected = ours(x, capture=True)
        assert largest_difference(logits, theirs(x)) <= 1e-6 and torch.equal(wrapped(x, capture=False), theirs(x))
    assert largest_difference(logits, expected_logits) <= 1e-5
    assert list(kept) == list(expected)
    for name in kept:
        assert largest_difference(kept[name], expected[name]) <= 1e-5, name
    assert (
        (wrapped.grid, wrapped.prefix, wrapped.has_cls) == (ours.grid, ours.prefix, ours.has_cls) == ((4, 4), 3, True)
    )
    assert (measure_heads(wrapped, x) - measure_heads(ours, x)).abs().max().max() <= 1e-5
    assert no_trace(theirs)


def tiny(name: str, **options) -> nn.Module:
    return stir(timm.create_model(name, embed_dim=32, depth=2, num_heads=2, num_classes=5, **options))


@pytest.mark.parametrize(
    ("build", "prefix", "has_cls"),
    [
        (lambda: tiny("vit_small_patch14_reg4_dinov2", img_size=56), 5, True),
        (lambda: tiny("vit_small_patch14_dinov2", img_size=56), 1, True),
        (lambda: tiny("vit_base_patch32_clip_quickgelu_224", img_size=128), 1, True),
        (lambda: tiny("vit_base_patch16_siglip_224", img_size=64), 0, False),
        (lambda: timm_vit(qk_norm=True, class_token=False, global_pool="avg", reg_tokens=2), 2, False),
        (lambda: timm_vit(block_fn=ResPostBlock, init_values=0.1, dynamic_img_size=True), 1, True),
        (lambda: stir(VisionTransformerDistilled(16, 4, embed_dim=24, depth=2, num_heads=3)), 2, True),
    ],
)
def test_capture_of_vits_that_from_timm_refuses(build, prefix, has_cls):
    model = build()
    with pytest.raises(ValueError, match="from_timm cannot take this"):
        from_timm(model)
    x = images(3, 3, *model.patch_embed.img_size)
    wrapped = capture(model)
    with torch.no_grad():
        logits, kept = wrapped(x)
        assert largest_difference(logits, model(x)) <= 1e-6 * max(1, logits.abs().max().item())
        features = model.forward_features(x)
    assert (wrapped.grid, wrapped.prefix, wrapped.has_cls) == ((4, 4), prefix, has_cls)
    heads, T = model.blocks[0].attn.num_heads, 16 + prefix
    for i in range(2):
        attn = kept[f"block{i}.attn"]
        assert attn.shape == (3, heads, T, T)
        assert torch.allclose(attn.sum(-1), torch.ones(3, heads, T), atol=1e-5)
    assert torch.allclose(model.norm(kept["block1.out"]), features, atol=1e-4)
    assert torch.allclose(model.blocks[0](kept["embed"]), kept["block0.out"], atol=1e-4)
    table = measure_heads(wrapped, x)
    assert len(table) == 2 * heads
    expected = attention_distance(kept["block1.attn"], (4, 4), prefix)
    assert table.distance[table.layer == 1].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert table.cls_entropy.notna().all() == has_cls and (table.cls > 0).all() == has_cls
    assert no_trace(model)


DINOV3 = where(timm.is_model("vit_small_patch16_dinov3"), "DINOv3")


@pytest.mark.parametrize(
    ("name", "options", "prefix", "has_cls", "mid"),
    [
        pytest.param("vit_small_patch16_dinov3", {"img_size": 64}, 5, True, True, marks=DINOV3),
        ("eva02_tiny_patch14_224", {"img_size": 56}, 1, True, True),
        ("eva_giant_patch14_224", {"img_size": 56, "mlp_ratio": 2}, 1, True, True),
        ("vit_small_patch16_rope_mixed_224", {"img_size": 64}, 1, True, True),
        ("vit_pe_spatial_tiny_patch16_512", {"img_size": 64}, 1, True, True),
        ("eva02_tiny_patch14_224", {"img_size": 56, "use_post_norm": True}, 1, True, False),
    ],
)
def test_capture_of_rotary_vits(name, options, prefix, has_cls, mid):
    model = fused(tiny(name, **options))
    x = images(3, 3, *model.patch_embed.img_size)
    wrapped = capture(model)
    with torch.no_grad():
        logits, kept = wrapped(x)
        assert largest_difference(logits, model(x)) <= 1e-5 * max(1, logits.abs().max().item())
        if mid:
            block, inner = model.blocks[1], kept["block1.mid"]
            change = block.mlp(block.norm2(inner))
            left = inner + (change if block.gamma_2 is None else block.gamma_2 * change)
            assert torch.allclose(left, kept["block1.out"], atol=1e-5)
    assert ("block0.mid" in kept) == mid
    assert (wrapped.grid, wrapped.prefix, wrapped.has_cls) == ((4, 4), prefix, has_cls)
    T = 16 + prefix
    for i in range(2):
        attn = kept[f"block{i}.attn"]
        assert attn.shape == (3, 2, T, T) and attn.dtype == torch.float32
        assert torch.allclose(attn.sum(-1), torch.ones(3, 2, T), atol=1e-5)
    table = measure_heads(wrapped, x)
    expected = attention_distance(kept["block1.attn"], (4, 4), prefix)
    assert table.distance[table.layer == 1].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert no_trace(model)


def swin(**options) -> SwinTransformer:
    small = {"img_size": 32, "patch_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 3), "window_size": 4}
    return fused(stir(SwinTransformer(**(small | {"num_classes": 5} | options)), 0.2))


def test_capture_of_swin():
    model, x = swin(), images(3, 3, 32, 32)
    wrapped = capture(model)
    with torch.no_grad():
        logits, kept = wrapped(x)
        assert largest_difference(logits, model(x)) <= 1e-5
        assert largest_difference(model.norm(kept["block3.out"]), model.forward_features(x)) <= 1e-5
    shapes = {name: tuple(t.shape) for name, t in kept.items()}
    assert shapes == {
        "embed": (3, 8, 8, 12),
        **{"block0.attn": (12, 2, 16, 16), "block0.out": (3, 8, 8, 12)},
        **{"block1.attn": (12, 2, 16, 16), "block1.out": (3, 8, 8, 12)},
        **{"block2.attn": (3, 3, 16, 16), "block2.out": (3, 4, 4, 24)},
        **{"block3.attn": (3, 3, 16, 16), "block3.out": (3, 4, 4, 24)},
    }
    for i in range(4):
        assert torch.allclose(kept[f"block{i}.attn"].sum(-1), torch.ones(()), atol=1e-5)
    assert (wrapped.grid, wrapped.prefix, wrapped.has_cls) == ((4, 4), 0, False)
    for batch in (1, 2, 3):
        table = measure_heads(wrapped, x, batch=batch)
        for layer, rows in table.groupby("layer"):
            attn = kept[f"block{layer}.attn"]
            expected = attention_distance(attn, (4, 4), 0)
            assert rows.distance.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
            # The error counts images, not windows: an image's windows are averaged first.
            each = torch.stack([attention_distance(a, (4, 4), 0) for a in attn.chunk(3)])
            assert rows.distance_se.tolist() == pytest.approx((each.std(0) / 3**0.5).tolist(), abs=1e-5)
    assert no_trace(model)


def test_a_shifted_window_by_hand():
    model = swin()
    block = model.layers[0].blocks[1]
    assert block.shift_size == (2, 2)
    with torch.no_grad():
        _, kept = capture(model)(images(2, 3, 32, 32))
        x = block.norm1(kept["block0.out"])[1]  # second image, [8,8,12]
        q, k, _ = block.attn.qkv(x).unflatten(-1, (3, 2, 6)).unbind(2)
        for number, (top, left) in enumerate([(0, 0), (0, 4), (4, 0), (4, 4)]):
            # A window of the map rolled by two: places run past the border and in again on the other side.
            places = [(top + r + 2, left + c + 2) for r in range(4) for c in range(4)]
            rows = torch.tensor([[r % 8, c % 8] for r, c in places])
            logits = torch.einsum("ihd,jhd->hij", *(t[rows[:, 0], rows[:, 1]] for t in (q, k))) / math.sqrt(6)
            for i, (ri, ci) in enumerate(places):
                for j, (rj, cj) in enumerate(places):
                    logits[:, i, j] += block.attn.relative_position_bias_table[(ri - rj + 3) * 7 + (ci - cj + 3)]
                    if (ri >= 8) != (rj >= 8) or (ci >= 8) != (cj >= 8):  # neighbours only because of the roll
                        logits[:, i, j] = -math.inf
            assert torch.allclose(kept["block1.attn"][4 + number], logits.softmax(-1), atol=1e-5)


def test_swin_windows_that_are_not_one_grid_are_refused():
    shrunk = capture(swin(img_size=24, window_size=4))  # 6×6 patches, then 3×3
    with pytest.raises(ValueError, match=r"windows of several sizes, \[\(4, 4\), \(3, 3\)\]"):
        measure_heads(shrunk, images(1, 3, 24, 24))
    padded = capture(swin(img_size=48, window_size=4))  # 12×12, then 6×6: not whole windows
    with pytest.raises(ValueError, match=r"feature maps of \[\(6, 6\)\] are not whole windows of \(4, 4\)"):
        measure_heads(padded, images(1, 3, 48, 48))
    with torch.no_grad():  # the maps themselves can be had
        assert shrunk(images(1, 3, 24, 24))[1]["block2.attn"].shape == (1, 3, 9, 9)


def test_capture_of_resnet():
    model = stir(TimmConfig("resnet18", image=32, options={"channels": (8, 16, 24, 32)}).build(), 0.05)
    x = images(2, 3, 32, 32)
    with torch.no_grad():
        logits, kept = capture(model)(x)
        assert torch.equal(logits, model(x))
        assert torch.equal(kept["block7.out"], model.forward_features(x))
        assert torch.equal(kept["stem"], model.maxpool(model.act1(model.bn1(model.conv1(x)))))
        assert torch.equal(model.layer3(kept["block3.out"]), kept["block5.out"])
    assert list(kept) == ["stem"] + [f"block{i}.out" for i in range(8)]
    assert [t.shape[1] for t in kept.values()] == [64, 8, 8, 16, 16, 24, 24, 32, 32]
    with pytest.raises(ValueError, match="ResNet has no tokens"):
        measure_heads(capture(model), x)
    with pytest.raises(ValueError, match="no attention maps to measure"):
        measure_heads(capture(model), x, grid=(8, 8))
    assert no_trace(model)


def test_capture_leaves_no_trace_after_an_error():
    model = timm_vit(drop_path_rate=0.5).train()
    model.blocks[0].eval()  # a part in another mode than the whole
    modes = [m.training for m in model.modules()]
    wrapped = capture(model)
    x = images(2, 3, 16, 16)
    assert torch.equal(wrapped(x)[0], wrapped(x)[0])  # measured in evaluation mode, without drop path
    assert [m.training for m in model.modules()] == modes and no_trace(model)

    model.blocks[1].mlp.register_forward_hook(lambda *_: 1 / 0, prepend=True)
    with pytest.raises(ZeroDivisionError):
        wrapped(x)
    assert [m.training for m in model.modules()] == modes
    model.blocks[1].mlp._forward_hooks.clear()
    assert no_trace(model)
    model.blocks[0].attn.fused_attn = False
    wrapped(x)
    assert not model.blocks[0].attn.fused_attn and model.blocks[1].attn.fused_attn


def test_captured_maps_carry_gradients_and_float32():
    model = timm_vit().half().float()
    _, kept = capture(model)(images(1, 3, 16, 16))
    kept["block1.attn"].square().sum().backward()
    assert model.blocks[0].attn.qkv.weight.grad.any()
    _, kept = capture(model.bfloat16())(images(1, 3, 16, 16).bfloat16())
    assert kept["block1.attn"].dtype == torch.float32 and kept["block1.out"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(1, 1), r"take a torch\.nn\.modules\.linear\.Linear; it takes timm's VisionTr"),
        (lambda: ViT(**SMALL), r"capture cannot take a vitbook\.models\.vit\.ViT;"),
        (lambda: timm.create_model("convnext_atto"), r"take a timm\.models\.convnext\.ConvNeXt;"),
        pytest.param(
            *(lambda: timm_vit(attn_layer="diff", num_heads=2), r"the maps of DiffAttention \(block 0\)"),
            marks=HAS_DIFF,
        ),
        (lambda: timm.create_model("vit_base_patch16_xp_224", depth=1), "its block 0, a ParallelScalingBlock, has no"),
    ],
)
def test_capture_refuses_by_name(build, message):
    with pytest.raises(ValueError, match=message):
        capture(build())


@pytest.mark.parametrize("x", [torch.zeros(2, 3, 16, 16, dtype=torch.uint8), torch.zeros(3, 16, 16)])
def test_raw_or_single_images_are_refused(x):
    with pytest.raises(ValueError, match="normalised floats"):
        capture(timm_vit())(x)
    with pytest.raises(ValueError, match="normalised floats"):
        ViT(**SMALL)(x)


def test_attention_that_hides_its_maps_is_reported():
    model = timm_vit()
    model.blocks[1].attn.forward = lambda x, **_: x
    with pytest.raises(ValueError, match="block 1: Attention passed no probabilities through attn_drop"):
        capture(model)(images(1, 3, 16, 16))
    assert no_trace(model)


# ---- TimmConfig


def test_timm_config_of_the_books_cnn():
    c = TimmConfig("resnet18", image=32, options={"channels": [16, 32, 64, 128]})
    model = c.build().eval()
    assert sum(p.numel() for p in model.parameters()) == 730_116
    assert model(images(1, 3, 32, 32)).shape == (1, 100)
    # By hand: stem 7×7 of 3 → 64 at 16², then 3×3 convolutions at 8², 4², 2², 1², shortcuts 1×1, classifier.
    mac = 49 * 3 * 64 * 256 + 9 * (64 * 16 + 3 * 16 * 16) * 64 + 64 * 16 * 64
    mac += sum((9 * (c * 2 * c + 3 * (2 * c) ** 2) + c * 2 * c) * s * s for c, s in ((16, 4), (32, 2), (64, 1)))
    assert c.flops() == 2 * (mac + 128 * 100)


def test_timm_config_is_pure_data():
    c = TimmConfig("resnet18", options={"stem_width": 8, "channels": [16, 32, 64, 128]})
    assert c.options == (("channels", (16, 32, 64, 128)), ("stem_width", 8))
    again = TimmConfig(**json.loads(json.dumps(asdict(c))))
    assert again == c and hash(again) == hash(c)
    assert c == TimmConfig("resnet18", options=(("stem_width", 8), ("channels", (16, 32, 64, 128))))


def test_timm_config_of_a_vit_counts_as_ours():
    options = {"patch_size": 4, "embed_dim": 192, "depth": 8, "num_heads": 8, "mlp_ratio": 2}
    c = TimmConfig("vit_tiny_patch16_224", image=32, options=options)
    assert c.flops() == ViTConfig().flops()
    assert from_timm(c.build()).config == ViTConfig(image=(32, 32), patch=(4, 4), mlp_ratio=2.0)


def test_timm_config_without_an_image_uses_timms_own():
    assert f"{TimmConfig('resnet18', classes=1000).flops() / 2e9:.2f}" == "1.81"  # He et al. 2016: 1.8 GMAC at 224 px


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "resnet19"}, "timm has no model 'resnet19'; did you mean resnet1"),
        ({"name": "a model of mine"}, r"timm has no model 'a model of mine'; timm.list_models\(\)"),
        ({"name": "resnet18", "classes": -1}, "classes=-1"),
        ({"name": "resnet18", "image": 0}, "image=0"),
        ({"name": "resnet18", "options": {"act_layer": nn.ReLU}}, "is not JSON"),
        ({"name": "resnet18", "options": {"pretrained": True}}, r"options hold \['pretrained'\]"),
        ({"name": "resnet18", "options": {"num_classes": 3}}, r"options hold \['num_classes'\]"),
    ],
)
def test_timm_config_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        TimmConfig(**fields)
