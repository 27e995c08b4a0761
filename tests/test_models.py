"""The ViT against timm and closed forms; timm's own models through ``capture``."""

import json
import math
import re
from dataclasses import asdict
from functools import partial

import pytest
import timm
import torch
from timm.layers import GluMlp, RmsNorm
from timm.models.deit import VisionTransformerDistilled
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import ResPostBlock, VisionTransformer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from vitbook.measures.heads import attention_distance, measure_heads
from vitbook.models.adapters import TimmConfig, capture
from vitbook.models.attention import Attention
from vitbook.models.vit import ViT, ViTConfig, from_timm

SMALL = {"image": 16, "patch": 4, "dim": 24, "depth": 2, "heads": 3, "classes": 7}


def stir(model: nn.Module, scale: float = 0.1) -> nn.Module:
    """Every parameter moved at random, so that no bias, norm or position is at a value that hides a mistake."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(scale * torch.randn(p.shape, generator=generator))
    return model.eval()


def images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def timm_vit(**options) -> VisionTransformer:
    """A small timm ViT; ``options`` as timm names them."""
    small = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 7}
    return stir(VisionTransformer(**(small | options)))


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


# ---- parity with timm


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_parity_with_timm_at_224(size):
    theirs = timm.create_model(f"vit_{size}_patch16_224", depth=2).eval()
    x = images(2, 3, 224, 224)
    with torch.no_grad():
        expected = theirs(x)
        ours = from_timm(theirs)
        assert ours.config.depth == 2 and ours.grid == (14, 14) and ours.config.mlp_ratio == 4
        assert largest_difference(ours(x), expected) <= 1e-5
        # and back: our own weights in timm's model
        torch.manual_seed(1)
        fresh = ViT(**asdict(ours.config)).eval()
        theirs.load_state_dict(fresh.state_dict())
        assert largest_difference(theirs(x), fresh(x)) <= 1e-5
        assert largest_difference(fresh(x), expected) > 1e-2


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({}, {}),
        ({"reg_tokens": 3}, {"registers": 3}),
        ({"class_token": False, "global_pool": "avg"}, {"cls_token": False, "pool": "mean"}),
        ({"global_pool": "avg"}, {"pool": "mean"}),
        ({"global_pool": "avg", "reg_tokens": 2}, {"pool": "mean", "registers": 2}),
        ({"no_embed_class": True}, {}),
        ({"no_embed_class": True, "reg_tokens": 4}, {"registers": 4}),
        ({"img_size": (12, 24), "patch_size": (4, 8)}, {"image": (12, 24), "patch": (4, 8)}),
        ({"num_classes": 0}, {"classes": 0}),
        ({"drop_path_rate": 0.2, "depth": 3}, {"drop_path": 0.2, "depth": 3}),
        ({"embed_dim": 56, "num_heads": 2, "mlp_ratio": 61 / 56 + 1e-6}, {"dim": 56, "heads": 2, "mlp_ratio": 61 / 56}),
        ({"act_layer": "gelu", "dynamic_img_size": True}, {}),
    ],
)
def test_parity_with_timm_of_every_plain_shape(options, config):
    theirs = timm_vit(**options)
    ours = from_timm(theirs)
    wanted = asdict(ViTConfig(**({**SMALL, "image": (16, 16), "patch": (4, 4), "mlp_ratio": 4.0} | config)))
    assert {**wanted, "drop_path": pytest.approx(wanted["drop_path"])} == asdict(ours.config)
    x = images(3, 3, *ours.config.image)
    with torch.no_grad():
        assert largest_difference(ours(x), theirs(x)) <= 1e-5
        if not options.get("no_embed_class"):
            other = stir(ViT(**asdict(ours.config)), 0.2)
            theirs.load_state_dict(other.state_dict())
            assert largest_difference(theirs(x), other(x)) <= 1e-5


def test_from_timm_takes_a_name_and_keeps_the_mode():
    assert from_timm("vit_tiny_patch16_224").config.heads == 3
    assert from_timm(timm_vit().train()).training and not from_timm(timm_vit()).training


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"qk_norm": True}, "q/k norm"),
        ({"init_values": 1e-5}, "layer scale"),
        ({"qkv_bias": False}, "no qkv bias"),
        ({"proj_bias": False}, "no qkv bias"),
        ({"scale_attn_norm": True}, "a norm inside attention or MLP"),
        ({"scale_mlp_norm": True}, "a norm inside attention or MLP"),
        ({"act_layer": nn.ReLU}, "an MLP that is not fc1, GELU, fc2"),
        ({"act_layer": partial(nn.GELU, approximate="tanh")}, "an MLP that is not fc1, GELU, fc2"),
        ({"act_layer": "quick_gelu"}, "an MLP that is not fc1, GELU, fc2"),
        ({"mlp_layer": GluMlp}, "an MLP that is not fc1, GELU, fc2"),
        ({"norm_layer": RmsNorm}, "a norm that is not LayerNorm with eps 1e-6"),
        ({"norm_layer": partial(nn.LayerNorm, eps=1e-5)}, "a norm that is not LayerNorm with eps 1e-6"),
        ({"pre_norm": True}, "a norm before the blocks"),
        ({"in_chans": 1}, "a patch embedding that is not one convolution"),
        ({"pos_embed": "none"}, "no learned position embedding"),
        ({"global_pool": "map"}, "pooling 'map'"),
        ({"global_pool": "max"}, "pooling 'max'"),
        ({"global_pool": "avg", "pool_include_prefix": True}, "pooling over CLS and registers"),
        ({"fc_norm": True}, "the final norm at another place, or none"),
        ({"final_norm": False}, "the final norm at another place, or none"),
        ({"global_pool": "avg", "final_norm": False}, "the final norm at another place, or none"),
        ({"drop_rate": 0.1}, "dropout"),
        ({"attn_drop_rate": 0.1}, "dropout"),
        ({"pos_drop_rate": 0.1}, "dropout"),
        ({"patch_drop_rate": 0.1}, "dropout"),
        ({"attn_layer": "diff", "num_heads": 2}, "attention class DiffAttention"),
        ({"block_fn": ResPostBlock}, "block class ResPostBlock"),
    ],
)
def test_from_timm_refuses_by_name(options, reason):
    with pytest.raises(ValueError, match=f"it has .*{re.escape(reason)}.*adapters.capture"):
        from_timm(timm_vit(**options))


def test_from_timm_refuses_other_classes_by_name():
    for model in (
        nn.Linear(1, 1),
        timm.create_model("resnet18"),
        VisionTransformerDistilled(16, 4, embed_dim=24, depth=1),
    ):
        with pytest.raises(ValueError, match=f"class {type(model).__name__}"):
            from_timm(model)


# ---- sizes


@pytest.mark.parametrize(
    ("fields", "printed"),
    [
        ({}, 2_417_956),
        ({"classes": 10}, 2_400_586),
        ({"image": 64, "patch": 8, "classes": 200}, 2_464_904),
        ({"mlp_ratio": 4}, 3_600_676),
        ({"mlp_ratio": 1}, 1_826_596),
        ({"dim": 384, "depth": 7, "heads": 6, "mlp_ratio": 1, "classes": 10}, 6_268_810),
        ({"dim": 384, "depth": 7, "heads": 6, "mlp_ratio": 2, "classes": 10}, 8_335_882),
        ({"dim": 384, "depth": 7, "heads": 6, "mlp_ratio": 4, "classes": 10}, 12_470_026),
        ({"depth": 7, "heads": 6, "mlp_ratio": 2, "classes": 10}, 2_103_562),
        ({"depth": 7, "heads": 6, "mlp_ratio": 4, "classes": 10}, 3_138_442),
    ],
)
def test_parameter_counts(fields, printed):
    c = ViTConfig(**fields)
    L, D, r, p, K, N = c.depth, c.dim, c.mlp_ratio, c.patch, c.classes, c.grid[0] * c.grid[1]
    formula = L * (4 * D**2 + 4 * D + 2 * r * D**2 + r * D + D + 4 * D) + (3 * p**2 * D + D) + (N + 1) * D + D + 2 * D
    with torch.device("meta"):
        counted = sum(p.numel() for p in c.build().parameters())
    assert counted == formula + (D + 1) * K == printed


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {**SMALL, "image": (8, 16), "patch": (4, 8), "registers": 3, "mlp_ratio": 1.5},
        {**SMALL, "cls_token": False, "pool": "mean"},
        {**SMALL, "classes": 0},
    ],
)
def test_flops_are_those_of_the_matrix_products(fields):
    c = ViTConfig(**fields)
    size = (c.image, c.image) if isinstance(c.image, int) else c.image
    with torch.no_grad(), torch.device("meta"), FlopCounterMode(display=False) as counter:
        c.build()(torch.empty(1, 3, *size))
    assert c.flops() == counter.get_total_flops()


@pytest.mark.parametrize(
    ("dim", "depth", "mlp_ratio", "printed"),
    [(192, 8, 2, "0.166"), (384, 7, 4, "0.828"), (384, 7, 2, "0.559"), (192, 7, 4, "0.213"), (192, 7, 2, "0.146")],
)
def test_multiply_adds_of_the_blocks(dim, depth, mlp_ratio, printed):
    one, two = (ViTConfig(dim=dim, depth=n, heads=6, mlp_ratio=mlp_ratio).flops() for n in (1, 2))
    assert f"{depth * (two - one) / 2e9:.3f}" == printed


def test_multiply_adds_of_source_a():
    assert f"{ViTConfig().flops() / 2e9:.3f}" == "0.167"


# ---- forward


@pytest.mark.parametrize("attention", ["plain", "masked-diagonal"])
def test_explicit_and_fused_attention_give_equal_logits(attention):
    model = stir(ViT(image=32, patch=4, dim=48, depth=3, heads=4, attention=attention), 0.2)
    x = images(4, 3, 32, 32)
    with torch.no_grad():
        explicit, fused, (captured, _) = model(x, fused=False), model(x, fused=True), model(x, capture=True)
    assert largest_difference(explicit, fused) <= 1e-5
    assert torch.equal(explicit, captured)
    with pytest.raises(ValueError, match="fused=True keeps no attention maps"):
        model(x, capture=True, fused=True)


def test_maps_can_be_captured_on_cuda_where_the_fused_kernel_is_the_default():
    with FakeTensorMode(), torch.device("cuda"):  # shapes and devices only: needs no GPU
        attention, x = Attention(8, 2), torch.empty(1, 5, 8)
        assert attention(x, capture=True)[1].shape == (1, 2, 5, 5)
        assert attention(x)[1] is None


@pytest.mark.parametrize(("pool", "cls", "registers"), [("cls", True, 0), ("mean", True, 2), ("mean", False, 0)])
def test_captured_intermediates(pool, cls, registers):
    model = stir(ViT(**SMALL, pool=pool, cls_token=cls, registers=registers), 0.3)
    x, T = images(5, 3, 16, 16), 16 + cls + registers
    with torch.no_grad():
        logits, kept = model(x, capture=True)
        assert list(kept) == ["embed"] + [f"block{i}.{part}" for i in range(2) for part in ("attn", "mid", "out")]
        for name, t in kept.items():
            assert t.shape == ((5, 3, T, T) if name.endswith("attn") else (5, T, 24)) and t.dtype == torch.float32
            if name.endswith("attn"):
                assert (t > 0).all() and torch.allclose(t.sum(-1), torch.ones(5, 3, T), atol=1e-6)
        # Each block by the formulas of its docstring, from what was kept before it.
        before = kept["embed"]
        for i, block in enumerate(model.blocks):
            q, k, v = block.attn.qkv(block.norm1(before)).unflatten(-1, (3, 3, 8)).unbind(2)
            weights = (torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(8)).softmax(-1)
            assert torch.allclose(weights, kept[f"block{i}.attn"], atol=1e-6)
            mixed = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)
            mid = before + block.attn.proj(mixed)
            assert torch.allclose(mid, kept[f"block{i}.mid"], atol=1e-5)
            before = kept[f"block{i}.out"]
            assert torch.allclose(mid + block.mlp(block.norm2(mid)), before, atol=1e-5)
        read = model.norm(before)[:, 0] if pool == "cls" else model.fc_norm(before[:, cls + registers :].mean(1))
        assert torch.allclose(model.head(read), logits, atol=1e-5)


def test_moving_patches_with_their_positions_moves_the_intermediates():
    model = stir(ViT(**SMALL, registers=1), 0.3)
    x, order = images(2, 3, 16, 16), torch.randperm(16, generator=torch.Generator().manual_seed(3))
    patches = x.unfold(2, 4, 4).unfold(3, 4, 4).flatten(2, 3)[:, :, order]  # [B,3,N,4,4]
    moved = patches.unflatten(2, (4, 4)).permute(0, 1, 2, 4, 3, 5).reshape(x.shape)
    tokens = torch.cat([torch.tensor([0, 1]), 2 + order])
    with torch.no_grad():
        logits, kept = model(x, capture=True)
        model.pos_embed.copy_(model.pos_embed[:, tokens])
        moved_logits, moved_kept = model(moved, capture=True)
    assert torch.allclose(logits, moved_logits, atol=1e-5)
    for name, t in kept.items():
        expected = t[:, :, tokens][..., tokens] if name.endswith("attn") else t[:, tokens]
        assert torch.allclose(moved_kept[name], expected, atol=1e-5), name


def test_masked_diagonal_never_looks_at_itself():
    model = stir(ViT(**SMALL, attention="masked-diagonal"), 0.3)
    _, kept = model(images(2, 3, 16, 16), capture=True)
    for i in range(2):
        attn = kept[f"block{i}.attn"]
        assert (attn.diagonal(dim1=-2, dim2=-1) == 0).all()
        assert torch.allclose(attn.sum(-1), torch.ones(()), atol=1e-6)
    plain = ViT(**SMALL).eval()
    plain.load_state_dict(model.state_dict())
    _, free = plain(images(2, 3, 16, 16), capture=True)
    a = free["block0.attn"] * (1 - torch.eye(17))
    assert torch.allclose(kept["block0.attn"], a / a.sum(-1, keepdim=True), atol=1e-6)


@pytest.mark.parametrize("fields", [{}, {"pool": "mean", "registers": 2}, {"attention": "masked-diagonal"}])
@pytest.mark.parametrize("fused", [False, True])
def test_the_gradient_reaches_every_parameter(fields, fused):
    model = stir(ViT(**SMALL, **fields)).train()
    model(images(4, 3, 16, 16), fused=fused).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_drop_path_grows_with_depth_and_rests_in_evaluation():
    torch.manual_seed(0)
    model = ViT(**(SMALL | {"depth": 5}), drop_path=0.4)
    assert [b.drop_path.drop_prob for b in model.blocks] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    still = ViT(**(SMALL | {"depth": 5}))
    still.load_state_dict(model.state_dict())
    x = images(8, 3, 16, 16)
    assert torch.equal(model.eval()(x), still.eval()(x))
    assert not torch.equal(model.train()(x), model(x))


def test_start():
    torch.manual_seed(0)
    model = ViT()
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.03)
    assert model.blocks[3].mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))
    assert all((p == 1).all() for name, p in model.named_parameters() if "norm" in name and name.endswith("weight"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image": 30}, "image=30 is not divisible by patch=4"),
        ({"image": (32, 30)}, r"image=\(32, 30\) is not divisible by patch=4"),
        ({"patch": 0}, "patch=0"),
        ({"dim": 100}, "dim=100 is not divisible by heads=8"),
        ({"heads": 0}, "heads=0"),
        ({"pool": "max"}, "pool='max' is unknown"),
        ({"cls_token": False}, "pool='cls' needs cls_token=True"),
        ({"attention": "gaussian"}, "attention='gaussian' is unknown; choose one of plain"),
        ({"depth": 0}, "depth ≥ 1"),
        ({"registers": -1}, "registers ≥ 0"),
        ({"classes": -1}, "classes ≥ 0"),
        ({"drop_path": 1.0}, "drop_path < 1"),
    ],
)
def test_bad_shapes_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ViTConfig(**fields)


def test_images_of_another_shape_are_refused():
    for shape in ((2, 3, 16, 20), (2, 1, 16, 16), (3, 16, 16)):
        with pytest.raises(
            ValueError, match=re.escape(f"images of shape {shape} do not fit a ViT for [B, 3, (16, 16)]")
        ):
            ViT(**SMALL)(torch.zeros(shape))


def test_config_survives_json():
    c = ViTConfig(image=(16, 32), patch=(4, 8))
    assert ViTConfig(**json.loads(json.dumps(asdict(c)))) == c and hash(c)


# ---- capture


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
            expected = attention_distance(kept[f"block{layer}.attn"], (4, 4), 0)
            assert rows.distance.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
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
        (lambda: nn.Linear(1, 1), "capture cannot take a Linear; it takes timm's VisionTransformer"),
        (lambda: ViT(**SMALL), "capture cannot take a ViT;"),
        (lambda: timm.create_model("convnext_atto"), "capture cannot take a ConvNeXt;"),
        (lambda: timm_vit(attn_layer="diff", num_heads=2), r"the maps of DiffAttention \(block 0\)"),
        (lambda: timm.create_model("vit_base_patch16_xp_224", depth=1), "its block 0, a ParallelScalingBlock, has no"),
    ],
)
def test_capture_refuses_by_name(build, message):
    with pytest.raises(ValueError, match=message):
        capture(build())


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
