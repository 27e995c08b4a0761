"""LocAt added to timm's models, against timm's own attention with the bias given as a mask."""

import copy

import pytest
import timm
import torch
from small import SMALL, images, largest_difference, stir, timm_vit
from test_locat_vit import silence
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import ParallelScalingBlock
from torch import nn
from torch.nn import functional as F

from vitbook.measures.heads import measure_heads
from vitbook.models.adapters import capture
from vitbook.models.locat import add_locat, refine
from vitbook.models.vit import ViT, from_timm


def rope(**options) -> nn.Module:
    small = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 7}
    return stir(timm.create_model("vit_small_patch16_rope_mixed_224", **(small | {"init_values": 0.1} | options)), 0.4)


def swin(**options) -> SwinTransformer:
    small = {"img_size": 32, "patch_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 3), "window_size": 4}
    return stir(SwinTransformer(**(small | {"num_classes": 7} | options)), 0.2)


WITH_MORE = {"global_pool": "avg", "qk_norm": True, "scale_attn_norm": True, "init_values": 0.1}
FAMILIES = {
    "vit": lambda **o: stir(timm_vit(**o), 0.3),
    "vit, 4 registers": lambda **o: stir(timm_vit(reg_tokens=4, **o), 0.3),
    "vit, mean": lambda **o: stir(timm_vit(**WITH_MORE, **o), 0.3),
    "rope": rope,
    "swin": swin,
}
SIZES = {"vit": (20, 28), "rope": (20, 28), "swin": (40, 64)}


def located(base: nn.Module, **parts) -> nn.Module:
    """With biases that are strong and differ from layer to layer."""
    model = add_locat(base, **parts)
    for i, layer in enumerate(m for name, m in model.named_modules() if name.endswith("gaug")):
        generator = torch.Generator().manual_seed(i)
        for p in layer.parameters():
            nn.init.normal_(p, std=0.5, generator=generator)
    return model


def set_fused(model: nn.Module, fused: bool) -> nn.Module:
    for m in model.modules():
        if hasattr(m, "fused_attn"):
            m.fused_attn = fused
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("other_size", [False, True])
def test_a_silent_bias_gives_the_models_logits_back(family, other_size):
    flexible = {"strict_img_size": False} if family == "swin" else {"dynamic_img_size": True}
    base = FAMILIES[family](**(flexible if other_size else {}))
    x = images(2, 3, *(SIZES[family.split(",")[0]] if other_size else base.patch_embed.img_size))
    weights = copy.deepcopy(base.state_dict())
    model = located(base, refine=False)
    with torch.no_grad():
        logits = base(x)
        assert largest_difference(model(x), logits) > 1e-2
        assert largest_difference(set_fused(model, False)(x), set_fused(model, True)(x)) <= 1e-5
        assert largest_difference(silence(model)(x), logits) <= 1e-5
        assert all(torch.equal(model.state_dict()[k], v) for k, v in weights.items())
        # The given model is as it was.
        assert type(base).__module__.startswith("timm") and base.state_dict().keys() == weights.keys()
        both = silence(add_locat(base))
        tokens = base.forward_features(x)
        refined = refine(tokens.flatten(1, -2), 3).view_as(tokens)
        assert torch.allclose(both(x), base.forward_head(refined), atol=1e-5)
        assert largest_difference(both(x), logits) > 1e-4
        assert torch.allclose(both.forward_features(x), tokens, atol=1e-5)  # dense features never see PRR


@pytest.mark.parametrize("attention", ["gaug", "gaug-from-input"])
@pytest.mark.parametrize("family", ["vit, 4 registers", "rope"])
def test_a_layer_is_timms_with_the_bias_as_a_mask(family, attention):
    base = FAMILIES[family](dynamic_img_size=True)
    model = located(base, attention=attention)
    prefix, x = model.num_prefix_tokens, images(2, 3, 20, 28)
    y = images(2, prefix + 35, 24, seed=3)
    with torch.no_grad():
        model(x)  # tells the layers this grid
        theirs, ours = base.blocks[1].attn, model.blocks[1].attn
        q = theirs.qkv(y).view(2, prefix + 35, 3, 3, 8)[:, :, 0].transpose(1, 2)
        S = ours.gaug(q, (5, 7), y)
        more = {"rope": base.rope.get_embed(shape=(5, 7))[1]} if family == "rope" else {}
        assert S.max() > 0.5
        assert torch.allclose(ours(y, **more), theirs(y, attn_mask=S, **more), atol=1e-5)
        assert largest_difference(ours(y, **more), theirs(y, **more)) > 1e-2
    with pytest.raises(ValueError, match="takes no mask"):
        ours(y, attn_mask=S, **more)


def test_capture_and_head_measures():
    for family, grid, prefix in (("vit, 4 registers", (4, 4), 5), ("vit, mean", (4, 4), 1), ("swin", (4, 4), 0)):
        base = FAMILIES[family]()
        model = located(base)
        x = images(2, 3, *base.patch_embed.img_size)
        with torch.no_grad():
            wrapped = capture(model)
            logits, _ = wrapped(x)
            assert largest_difference(logits, model(x)) <= 1e-5
        assert (wrapped.grid, wrapped.prefix) == (grid, prefix)
        table, plain = measure_heads(wrapped, x), measure_heads(capture(base), x)
        assert len(table) == len(plain) and table.distance.mean() < plain.distance.mean()


@pytest.mark.parametrize("fused", [False, True])
def test_a_shifted_window(fused):
    model = set_fused(located(swin()), fused)
    block = model.layers[0].blocks[1]
    assert block.shift_size == (2, 2)
    y = images(2 * 4, 16, 12, seed=4)  # two images of four windows
    with torch.no_grad():
        q, k, v = block.attn.qkv(y).view(8, 16, 3, 2, 6).permute(2, 0, 3, 1, 4)
        logits = q @ k.transpose(-2, -1) / 6**0.5 + block.attn.gaug(q)
        for i in range(16):
            for j in range(16):
                (ri, ci), (rj, cj) = divmod(i, 4), divmod(j, 4)
                logits[:, :, i, j] += block.attn.relative_position_bias_table[(ri - rj + 3) * 7 + (ci - cj + 3)]
        logits += block.attn_mask.repeat(2, 1, 1)[:, None]
        expected = block.attn.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
        assert torch.allclose(block.attn(y, mask=block.attn_mask), expected, atol=1e-5)


def test_a_window_of_another_size_widens_as_a_grid_does():
    model = add_locat(swin())
    model.set_input_size(img_size=(48, 48), window_size=6)
    layer = model.layers[0].blocks[0].attn
    var, _ = layer.gaug.predict(torch.zeros(1, 2, 36, 6), layer.window_size)
    assert torch.allclose(var, torch.tensor(1.5), atol=1e-5)
    assert torch.isfinite(model(images(1, 3, 48, 48))).all()


@pytest.mark.parametrize("family", ["vit, 4 registers", "rope"])
def test_set_input_size_reaches_the_layers(family):
    model = located(FAMILIES[family]())
    still = located(FAMILIES[family](dynamic_img_size=True))
    x = images(2, 3, 20, 28)
    still.load_state_dict(model.state_dict())
    model.set_input_size(img_size=(20, 28))
    with torch.no_grad():
        assert largest_difference(model(x), still(x)) <= 1e-5
        assert model.blocks[0].attn.gaug.grid == (4, 4) and model.blocks[0].attn.grid == (5, 7)


@pytest.mark.parametrize(
    ("options", "fields"), [({}, {}), ({"reg_tokens": 3, "global_pool": "avg"}, {"registers": 3, "pool": "mean"})]
)
def test_timms_and_ours_are_one_model(options, fields):
    theirs = located(timm_vit(**options))
    ours = ViT(**SMALL, mlp_ratio=4, attention="gaug", refine=True, **fields).eval()
    ours.load_state_dict(theirs.state_dict())
    x = images(3, 3, 16, 16)
    with torch.no_grad():
        assert largest_difference(ours(x), theirs(x)) <= 1e-5
        base = timm_vit(**options)
        again = add_locat(from_timm(base)).eval()
        again.load_state_dict(theirs.state_dict())
        assert torch.equal(again(x), ours(x))
    with pytest.raises(ValueError, match="from_timm cannot take this LocAtVisionTransformer"):
        from_timm(theirs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("refined", [False, True])
def test_gradients(family, refined):
    model = located(FAMILIES[family](), refine=refined).train()
    F.cross_entropy(model(images(4, 3, *model.patch_embed.img_size)), torch.arange(4)).backward()
    silent = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    starved = not refined and family in ("vit", "vit, 4 registers", "rope")  # CLS alone is read
    assert {name for name in silent if "gaug" in name} == {
        f"blocks.1.attn.gaug.{layer}.{part}" for layer in ("log_var", "log_alpha") for part in ("weight", "bias")
        if starved
    }  # fmt: skip


REAL = [
    ("vit_tiny_patch16_224", {}, 2340),
    ("vit_small_patch16_224", {}, 2340),
    ("vit_base_patch16_224", {}, 2340),
    ("vit_tiny_patch16_224", {"reg_tokens": 4}, 2340),
    ("vit_base_patch16_rope_mixed_224", {}, 2340),
    ("swin_tiny_patch4_window7_224", {}, 1188),
    ("swin_base_patch4_window7_224", {}, 2376),
]


@pytest.mark.parametrize(("name", "options", "count"), REAL)
def test_parameter_counts(name, options, count):
    try:
        with torch.device("meta"):
            base = timm.create_model(name, **options)
    except (RuntimeError, NotImplementedError):  # an older timm reads values while it builds
        base = timm.create_model(name, **options)
    model = add_locat(base)
    new = {k: p for k, p in model.named_parameters() if k not in dict(base.named_parameters())}
    assert sum(p.numel() for p in new.values()) == count
    depth = sum(len(stage.blocks) for stage in getattr(model, "layers", [model]))
    assert len(new) == 4 * depth and all(".attn.gaug.log_" in k for k in new)


@pytest.mark.parametrize(
    ("name", "options", "other"),
    [
        ("vit_tiny_patch16_224", {"depth": 1, "dynamic_img_size": True}, (160, 256)),
        ("vit_tiny_patch16_224", {"depth": 1, "reg_tokens": 4, "dynamic_img_size": True}, (160, 256)),
        (
            "vit_small_patch16_rope_mixed_224",
            {"embed_dim": 192, "num_heads": 3, "depth": 1, "dynamic_img_size": True},
            (160, 256),
        ),
        ("swin_tiny_patch4_window7_224", {"depths": (1, 1, 2, 1), "strict_img_size": False}, (160, 256)),
    ],
)
def test_real_sizes_run_forward_and_backward(name, options, other):
    model = add_locat(timm.create_model(name, num_classes=10, drop_path_rate=0.0, **options)).train()
    for size in ((224, 224), other):
        model.zero_grad()
        logits = model(images(1, 3, *size))
        assert logits.shape == (1, 10) and torch.isfinite(logits).all()
        F.cross_entropy(logits, torch.tensor([3])).backward()
        assert all(p.grad.isfinite().all() and p.grad.any() for k, p in model.named_parameters() if "gaug" in k)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: timm.create_model("resnet18"), "class ResNet (taken: VisionTransformer, Eva, SwinTransformer)"),
        (lambda: timm.create_model("gcvit_xxtiny"), "class GlobalContextVit"),
        (lambda: nn.Linear(1, 1), "class Linear"),
        (lambda: add_locat(timm_vit()), "class LocAtVisionTransformer"),
        (lambda: timm_vit(block_fn=ParallelScalingBlock), "attention class ParallelScalingBlock"),
        (lambda: rope(attn_type="eva"), "attention class EvaAttention (taken: AttentionRope)"),
        (lambda: rope(qkv_fused=False), "queries and keys that are projected apart"),
        (lambda: swin(head_dim=4), "heads that are not of width dim / heads"),
        (lambda: timm_vit(patch_drop_rate=0.1), "patch dropout"),
        (lambda: rope(patch_drop_rate=0.1), "patch dropout"),
        (lambda: timm_vit(global_pool="map"), "pooling 'map' (taken: 'token', 'avg')"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_name(build, reason):
    model = build()
    with pytest.raises(ValueError) as caught:
        add_locat(model)
    assert f"add_locat cannot take this {type(model).__name__}: it has " in str(caught.value)
    assert reason in str(caught.value)
