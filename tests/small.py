"""Small models, images and maps with a fixed seed, for several test files."""

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

SMALL = {"image": 16, "patch": 4, "dim": 24, "depth": 2, "heads": 3, "classes": 7}


def where(there: bool, what: str) -> pytest.MarkDecorator:
    """For tests of what the oldest timm that the book takes has not yet."""
    return pytest.mark.skipif(not there, reason=f"timm {timm.__version__} has no {what} yet")


HAS_DIFF = where(hasattr(timm.layers, "DiffAttention"), "DiffAttention")


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


def random_attention(*shape: int, seed: int = 0, sharpness: float = 2.0) -> torch.Tensor:
    return (sharpness * torch.randn(*shape, shape[-1], generator=torch.Generator().manual_seed(seed))).softmax(-1)
