"""The ViT against timm and against closed forms."""

import json
import math
import re
from dataclasses import asdict
from functools import partial

import pytest
import timm
import torch
from small import HAS_DIFF, SMALL, images, largest_difference, stir, timm_vit
from timm.layers import GluMlp, RmsNorm
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import ResPostBlock
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from vitbook.models.attention import Attention
from vitbook.models.vit import ViT, ViTConfig, from_timm

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
        pytest.param({"attn_layer": "diff", "num_heads": 2}, "attention class DiffAttention", marks=HAS_DIFF),
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
        message = f"images of shape {shape}, torch.float32, do not fit a ViT for [B, 3, (16, 16)]"
        with pytest.raises(ValueError, match=re.escape(message)):
            ViT(**SMALL)(torch.zeros(shape))


def test_config_survives_json():
    c = ViTConfig(image=(16, 32), patch=(4, 8))
    assert ViTConfig(**json.loads(json.dumps(asdict(c)))) == c and hash(c)
