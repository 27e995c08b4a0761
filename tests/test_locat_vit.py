"""LocAt in our ViT and in Jumbo, and PRR: parameters, gradients, what a silent bias gives back, other sizes."""

import math
import re
from dataclasses import asdict

import pytest
import timm
import torch
from small import SMALL, images, largest_difference, stir
from timm.layers import resample_abs_pos_embed
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from vitbook.measures.heads import attention_distance, measure_heads
from vitbook.models.gaussian import BIASES
from vitbook.models.jumbo import Jumbo
from vitbook.models.locat import add_locat, refine
from vitbook.models.vit import ViT, ViTConfig, resized

COUNTS = {
    "gaug": 2340, "gaug-auto-scale": 1560, "gaug-no-scale": 1560, "gaug-isotropic": 1560, "gaug-fixed-width": 780,
    "gaug-from-input": 5412, "laplace": 2340, "inverse-distance": 2340,
}  # fmt: skip


def parameters(**fields) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in ViT(**fields).parameters())


@pytest.mark.parametrize(
    ("dim", "heads", "plain", "from_input"),
    [(192, 3, 5_717_416, 5412), (384, 6, 22_050_664, 12 * (770 + 65)), (768, 12, 86_567_656, 19_236)],
)
def test_parameter_counts(dim, heads, plain, from_input):
    size = {"image": 224, "patch": 16, "dim": dim, "depth": 12, "heads": heads, "mlp_ratio": 4, "classes": 1000}
    assert parameters(**size, refine=True) == plain
    assert COUNTS.keys() == BIASES.keys()
    for attention, count in (COUNTS | {"gaug-from-input": from_input}).items():
        assert parameters(**size, attention=attention) - plain == count, attention


# ---- PRR


def test_refine_is_timms_pool():
    if not hasattr(timm.layers, "AttentionPoolPrr"):
        pytest.skip("timm has it from 1.0.26 on")
    x = images(2, 7, 24)
    for pool, expected in (("token", refine(x, 3)[:, 0]), ("avg", refine(x, 3).mean(1))):
        assert torch.allclose(timm.layers.AttentionPoolPrr(24, num_heads=3, pool_type=pool)(x), expected, atol=1e-5)


def test_refine_is_the_definition():
    x = images(2, 7, 24)
    parts = []
    for head in x.split(8, dim=-1):
        weights = torch.einsum("bic,bjc->bij", head, head).div(math.sqrt(8)).softmax(-1)
        parts.append(torch.einsum("bij,bjc->bic", weights, head))
    assert torch.allclose(refine(x, 3), torch.cat(parts, -1), atol=1e-5)


def test_refine_leaves_equal_tokens_as_they_are():
    same = images(2, 1, 24).expand(2, 9, 24)
    assert torch.allclose(refine(same, 3), same, atol=1e-6)  # rows sum to one, and there is no residual


# ---- in our ViT


@pytest.mark.parametrize("attention", BIASES)
@pytest.mark.parametrize("fused", [False, True])
def test_every_bias_in_the_vit(attention, fused):
    fields = SMALL | {"image": (12, 20), "registers": 2, "attention": attention, "refine": True}
    model, x = stir(ViT(**fields), 0.3), images(3, 3, 12, 20)
    with torch.no_grad():
        logits, kept = model(x, capture=True)
        assert largest_difference(model(x, fused=fused), logits) <= 1e-5
        before = kept["embed"]
        for i, block in enumerate(model.blocks):
            normed = block.norm1(before)
            q, k, v = block.attn.qkv(normed).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
            S = block.attn.gaug(q, x=normed)
            assert S.abs().max() > 0.1
            weights = (q @ k.transpose(-2, -1) / math.sqrt(8) + S).softmax(-1)
            assert torch.allclose(weights, kept[f"block{i}.attn"], atol=1e-6)
            mid = before + block.attn.proj((weights @ v).transpose(1, 2).flatten(2))
            assert torch.allclose(mid, kept[f"block{i}.mid"], atol=1e-5)
            before = kept[f"block{i}.out"]
        assert torch.allclose(model.head(refine(model.norm(before), 3)[:, 0]), logits, atol=1e-5)
    table = measure_heads(model, x)
    expected = attention_distance(kept["block1.attn"], (3, 5), 3)
    assert table.distance[table.layer == 1].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    model.train()(x, fused=fused).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def last_gradient(**fields) -> dict[str, bool]:
    """Whether anything but exact zeros reaches the bias of the first and of the last block."""
    model = stir(ViT(**SMALL, attention="gaug", **fields)).train()
    F.cross_entropy(model(images(4, 3, 16, 16)), torch.arange(4)).backward()
    first, last = ([p.grad for p in b.attn.gaug.parameters()] for b in (model.blocks[0], model.blocks[-1]))
    return {"first": all(g.any() for g in first), "last": any(g is not None and g.any() for g in last)}


def test_the_last_bias_learns_nothing_from_cls_unless_tokens_are_refined():
    assert last_gradient() == {"first": True, "last": False}
    assert last_gradient(registers=2) == {"first": True, "last": False}
    assert last_gradient(refine=True) == {"first": True, "last": True}
    assert last_gradient(pool="mean") == {"first": True, "last": True}


@pytest.mark.parametrize("attention", [*BIASES, "plain"])
def test_flops_are_those_of_the_matrix_products(attention):
    c = ViTConfig(**SMALL, registers=1, attention=attention, refine=True, positions=False)
    with torch.no_grad(), torch.device("meta"), FlopCounterMode(display=False) as counter:
        c.build()(torch.empty(1, 3, 16, 16))
    assert c.flops() == counter.get_total_flops()


def test_without_positions_an_image_is_a_set_of_patches_unless_the_bias_says_where_they_are():
    x, order = images(2, 3, 16, 16), torch.randperm(16, generator=torch.Generator().manual_seed(3))
    patches = x.unfold(2, 4, 4).unfold(3, 4, 4).flatten(2, 3)[:, :, order]
    moved = patches.unflatten(2, (4, 4)).permute(0, 1, 2, 4, 3, 5).reshape(x.shape)
    for fields, same in (({}, True), ({"refine": True}, True), ({"attention": "gaug"}, False)):
        model = stir(ViT(**SMALL, positions=False, **fields), 0.3)
        assert "pos_embed" not in model.state_dict()
        with torch.no_grad():
            assert (largest_difference(model(x), model(moved)) <= 1e-5) == same
    with torch.no_grad():
        assert largest_difference(*(stir(ViT(**SMALL), 0.3)(i) for i in (x, moved))) > 1e-3


def silence(model: nn.Module) -> nn.Module:
    """α → 0 in every layer: softplus of −1000 is 0 in float32."""
    for name, p in model.named_parameters():
        if "log_alpha" in name:
            nn.init.constant_(p, 0.0 if name.endswith("weight") else -1e3)
    return model


def test_add_locat_to_ours_keeps_its_weights():
    torch.manual_seed(0)
    base = stir(ViT(**SMALL, registers=2), 0.3).train()
    new = add_locat(base)
    assert new.training and not base.config.refine and new.config == ViTConfig(
        **(asdict(base.config) | {"attention": "gaug", "refine": True})
    )  # fmt: skip
    assert all(torch.equal(new.state_dict()[name], value) for name, value in base.state_dict().items())
    assert set(new.state_dict()) - set(base.state_dict()) == {
        f"blocks.{i}.attn.gaug.{layer}.{part}" for i in range(2) for layer in ("log_var", "log_alpha")
        for part in ("weight", "bias")
    }  # fmt: skip
    x = images(2, 3, 16, 16)
    only = add_locat(base.eval(), refine=False)
    with torch.no_grad():
        assert largest_difference(only(x), base(x)) > 1e-3
        silence(only)
        assert torch.equal(only(x), base(x))
        prr = add_locat(base, attention="plain")
        silence(new.eval())
        assert torch.equal(prr(x), new(x))
        assert torch.equal(prr(x), base.head(refine(base.norm(base(x, capture=True)[1]["block1.out"]), 3)[:, 0]))


def test_resized():
    model = stir(ViT(**SMALL, attention="gaug", refine=True, registers=1), 0.3)
    larger = resized(model, (24, 32))
    assert larger.grid == (6, 8) and model.grid == (4, 4) and larger.pos_embed.shape == (1, 50, 24)
    assert torch.equal(larger.pos_embed[:, :2], model.pos_embed[:, :2])
    assert largest_difference(larger.pos_embed, resample_abs_pos_embed(model.pos_embed, (6, 8), (4, 4), 2)) <= 1e-6
    flat = stir(ViT(**SMALL | {"image": (8, 32)}))  # as many patches in another shape are other places
    assert largest_difference(resized(flat, 16).pos_embed, flat.pos_embed) > 0.01
    x = images(2, 3, 24, 32)
    with torch.no_grad():
        _, kept = larger(x, capture=True)
        block = model.blocks[0]
        q, k, _ = block.attn.project(block.norm1(kept["embed"]))
        S = block.attn.gaug(q, (6, 8))  # by the rule of another grid: the bound stays, Σ is half as large again
        assert torch.allclose((q @ k.transpose(-2, -1) / math.sqrt(8) + S).softmax(-1), kept["block0.attn"], atol=1e-5)
        back = resized(larger, 16)
    assert back.grid == (4, 4) and len(measure_heads(larger, x)) == 6
    with pytest.raises(ValueError, match=re.escape("image=(24, 30) is not divisible by patch=4")):
        resized(model, (24, 30))


# ---- Jumbo


@pytest.mark.parametrize(("dim", "heads", "plain", "extra"), [(192, 3, 17_348_776, 2724), (768, 12, 260_495_080, 3876)])
def test_jumbo_parameters(dim, heads, plain, extra):
    def count(**parts) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in Jumbo(dim=dim, heads=heads, **parts).parameters())

    assert count(attention="plain", refine=False) == plain
    assert count() == plain + extra


def test_jumbo():
    small = {"image": (16, 24), "patch": 4, "dim": 24, "depth": 2, "heads": 3, "classes": 7}
    torch.manual_seed(0)
    x = images(2, 3, 16, 24)
    fresh = Jumbo(**small)
    assert torch.allclose(fresh(x), torch.tensor(-math.log(7)))
    gains = torch.cat([getattr(block, f"ls{i}").gamma for block in fresh.blocks for i in (1, 2, 3)])
    assert torch.equal(gains, torch.full_like(gains, 1e-4))
    model, base = stir(fresh, 0.2), Jumbo(**small, attention="plain", refine=False).eval()
    base.load_state_dict({k: v for k, v in model.state_dict().items() if "gaug" not in k and "patch_norm" not in k})
    with torch.no_grad():
        logits, kept = model(x, capture=True)
        assert torch.equal(logits, model(x)) and kept["block1.attn"].shape == (2, 3, 30, 30)
        assert largest_difference(logits, base(x)) > 1e-3
        silence(model)
        silent, kept = model(x, capture=True)
        _, theirs = base(x, capture=True)
        assert torch.equal(kept["block1.out"], theirs["block1.out"])
        pieces = model.norm(kept["block1.out"][:, :6].flatten(1)).view(2, 6, 24)
        tokens = torch.cat([pieces, model.patch_norm(kept["block1.out"][:, 6:])], 1)
        assert torch.allclose(model.head(refine(tokens, 3)[:, :6].flatten(1)), silent, atol=1e-5)
        # A block by hand: patches have an MLP of their own, the six pieces one in common.
        block, mid, out = base.blocks[1], theirs["block1.mid"], theirs["block1.out"]
        wide = mid[:, :6].flatten(1)
        wide = wide + block.ls3.gamma * base.wide_mlp(block.norm3(wide))
        assert torch.allclose(out[:, :6].flatten(1), wide, atol=1e-5)
        assert torch.allclose(out[:, 6:], mid[:, 6:] + block.ls2.gamma * block.mlp(block.norm2(mid[:, 6:])), atol=1e-5)
    assert len(measure_heads(model, x)) == 6
    model = stir(Jumbo(**small), 0.2).train()
    model(x).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


# ---- bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: refine(torch.zeros(1, 2, 10), 3), r"\(1, 2, 10\) do not split into heads=3"),
        (lambda: refine(torch.zeros(1, 2, 2, 9), 3), r"do not split into heads=3; \[B, T, C\]"),
        (lambda: ViT(**SMALL, attention="gaug")(torch.zeros(1, 3, 16, 20)), r"do not fit a ViT for"),
        (lambda: add_locat(ViT(**SMALL), "masked-diagonal"), "'masked-diagonal' is no part of LocAt; choose one of"),
        (
            lambda: add_locat(ViT(**SMALL, refine=True)),
            "takes a plain ViT; this one has attention='plain', refine=True",
        ),
        (lambda: add_locat(ViT(**SMALL, attention="gaug")), "this one has attention='gaug'"),
        (lambda: Jumbo(attention="positional"), "attention='positional'"),
        (lambda: Jumbo(image=16, patch=4, depth=1)(torch.zeros(1, 3, 16, 20)), "do not fit a Jumbo for"),
    ],
)
def test_bad_input_is_refused_with_the_reason(call, message):
    with pytest.raises(ValueError, match=message):
        call()
