"""``small-cnn``: two convolutions, for images of any size."""

from __future__ import annotations

from torch import nn

from gpq_faiss.nn.backbones import BackboneSpec


def small_cnn(spec: BackboneSpec) -> nn.Module:
    """From images float [B, 3, S, S], normalised as ImageNet's, to vectors [B, 64]; the linear
    layer to the code's width is added.
    """
    if spec.kind != "images":
        raise ValueError("it takes images")
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
