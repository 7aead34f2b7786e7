"""The feature extractor F, from images or embeddings to one vector of D = M * d dimensions.

:func:`build_backbone` makes any of them by name. Every backbone normalises its own input, and ends
in one linear layer ``head`` to D. Intra-normalisation is not part of it
(:mod:`gpq_faiss.nn.quantizer`).
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ..config import Config
from ..data.base import Dataset, FeatureDataset
from ..errors import UsageError, one_line
from ..plugins import Plugin, find_plugin, plugin_names
from .weights import PUBLISHED, imagenet_state, load_into, read_weights

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
OUTLIER = 10.0
"""Distance of outliers from the centre, relative to that of nineteen items of twenty."""


class Normalisation(nn.Module):
    """Input normalisation, (x - mean) / std.

    Images, float [B, 3, S, S] in [0, 1], are normalised by channel. If ``width`` is not 0, the
    input is features, float [B, width], which have mean 0 and deviation 1 until :meth:`fit`, and
    outliers are shortened. The statistics are buffers, saved with the weights.

    Attributes:
        deviations: of each dimension of features, float32 [width], relative to that of all; 1 for
            constant ones.
    """

    def __init__(
        self,
        width: int,
        mean: tuple[float, ...] = IMAGENET_MEAN,
        std: tuple[float, ...] = IMAGENET_STD,
    ) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(width) if width else torch.tensor(mean).view(1, 3, 1, 1))
        self.std = nn.Buffer(torch.ones(width) if width else torch.tensor(std).view(1, 3, 1, 1))
        self.deviations = torch.ones(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return normalised items, shape as given."""
        x = (x - self.mean) / self.std
        if x.ndim == 2:
            x = x * (OUTLIER * x.shape[1] ** 0.5 / x.norm(dim=1, keepdim=True)).clamp(max=1)
        return x

    @torch.no_grad()
    def fit(self, x: Tensor) -> None:
        """Set the statistics from finite features float [N, W].

        They are the mean of each dimension, and one standard deviation for all: the root of the
        mean variance. Outliers are left out, as a few would decide them.
        """
        distance = (x - x[:: -(-len(x) // 1000)].median(dim=0).values).norm(dim=1)
        limit = OUTLIER * distance.quantile(0.95).item() or float("inf")
        variance, mean = torch.var_mean(x[distance <= limit].double(), dim=0, correction=0)
        self.mean.copy_(mean)
        level = variance.mean().clamp_min(1e-24)
        self.std.copy_(level.sqrt())
        self.deviations = (
            torch.where(variance > 1e-12 * level, variance / level, 1.0).sqrt().float()
        )


@dataclass(frozen=True)
class BackboneSpec:
    """Description of an architecture, without weights.

    Attributes:
        name, kind, out_width: name of the backbone, kind of its input, and width of its output.
        in_width: width of input features; 0 for images.
        image_size: side of input images; 0 for features.
        hidden, dropout: widths and dropout rate of the hidden layers of ``mlp``.
        tap: whether ``vgg`` averages its third block before its max pool or, as in the authors'
            code, after it.
    """

    name: str
    kind: Literal["images", "features"]
    out_width: int
    in_width: int = 0
    image_size: int = 0
    hidden: tuple[int, ...] = (512,)
    dropout: float = 0.0
    tap: Literal["block", "pool"] = "block"


class Backbone(nn.Module):
    """Base of all backbones: input normalisation, a trunk, and the linear ``head`` to D.

    Sub-classes add the head last.

    Attributes:
        SMALLEST: minimum pixels per side.
        head: from the trunk's width to ``spec.out_width``: one linear layer, or
            :class:`~gpq_faiss.nn.heads.SubspaceHeads`.
    """

    SMALLEST = 1
    head: nn.Module

    def __init__(self, spec: BackboneSpec) -> None:
        super().__init__()
        self.spec = spec
        self.input = Normalisation(spec.in_width)
        if spec.kind == "images" and spec.image_size < self.SMALLEST:
            raise UsageError(
                f"backbone {spec.name} needs images of at least {self.SMALLEST} pixels per side, "
                f"not {spec.image_size}: set a larger network.image_size, "
                "or another network.backbone"
            )

    def freeze(self) -> None:
        """Keep the first half of the trunk's parameters, and the statistics of batch norms among
        them.

        The first layers of a pretrained network fit other images as they are, and cost most.
        """
        trunk = [p for name, p in self.named_parameters() if not name.startswith("head.")]
        for parameter in trunk[: len(trunk) // 2]:
            parameter.requires_grad_(False)

    def train(self, mode: bool = True) -> Backbone:
        """Set the mode of all layers but the frozen ones, which stay in evaluation mode."""
        super().train(mode)
        for module in self.modules():
            weights = list(module.parameters(recurse=False))
            if weights and not any(weight.requires_grad for weight in weights):
                module.training = False  # not eval(), which also sets the layers below it
        return self

    def trunk_features(self, x: Tensor) -> Tensor:
        """Return the vectors before the head, float [B, trunk width], of normalised input."""
        raise NotImplementedError

    def forward(self, x: Tensor, normalised: bool = False) -> Tensor:
        """Return the network's output for items, float [B, D], not normalised.

        If ``normalised``, the items have passed the input normalisation.
        """
        return cast(Tensor, self.head(self.trunk_features(x if normalised else self.input(x))))


def make_head(width: int, out_width: int, generator: torch.Generator | None = None) -> nn.Linear:
    """Return a linear layer with Xavier's initial weights.

    They are drawn by ``generator``, and torch's global generator is then not used; by default, by
    the global one.
    """
    head = (
        nn.Linear(width, out_width, device="meta").to_empty(device="cpu")
        if generator
        else nn.Linear(width, out_width)
    )
    nn.init.xavier_uniform_(head.weight, generator=generator)
    nn.init.zeros_(head.bias)
    return head


def _he_initialised(layers: nn.Sequential) -> nn.Sequential:
    """Return the layers, with He's initial weights of the convolutions."""
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(cast(Tensor, layer.bias))
    return layers


class VGG(Backbone):
    """The paper's modified VGG: 64-64-M-128-128-M-256-256-256-M-512-512-512 with batch norm.

    The global average pools of the last two blocks are concatenated, 256 + 512; the fourth has no
    max pool. Modules of ``features`` are numbered as in torchvision's ``vgg16_bn`` up to the ReLU
    after conv4_3, so its weights fit by name.
    """

    SMALLEST = 16

    def __init__(self, spec: BackboneSpec) -> None:
        super().__init__(spec)
        from torchvision.models import vgg  # which takes a second

        self.features = _he_initialised(
            vgg.make_layers(
                [64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512], batch_norm=True
            )
        )
        self.head = make_head(256 + 512, spec.out_width)

    def trunk_features(self, x: Tensor) -> Tensor:
        # The third block ends with the ReLU after conv3_3, or with its max pool.
        end = 24 if self.spec.tap == "pool" else 23
        third = self.features[:end](x)
        fourth = self.features[end:](third)
        return torch.cat([third.mean(dim=(2, 3)), fourth.mean(dim=(2, 3))], dim=1)


class Trunk(Backbone):
    """Any module from normalised inputs, float [B, 3, S, S] or [B, W], to vectors [B, width]."""

    def __init__(self, spec: BackboneSpec, trunk: nn.Module) -> None:
        super().__init__(spec)
        if not isinstance(trunk, nn.Module):
            raise TypeError(f"a {type(trunk).__name__}: a torch.nn.Module is needed")
        shape = (3, spec.image_size, spec.image_size) if spec.image_size else (spec.in_width,)
        # Declared widths are not reliable: run the module.
        with torch.no_grad():
            out = trunk.eval()(torch.zeros(1, *shape))
        if not isinstance(out, Tensor) or out.ndim != 2:
            raise TypeError(f"it gives {type(out).__name__}, not one vector per item")
        self.trunk = trunk.train()
        self.head = make_head(int(out.shape[1]), spec.out_width)

    def trunk_features(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.trunk(x))


class CNNF(Trunk):
    """CNN-F (also VGG-F) up to full7, of Chatfield et al. (BMVC 2014).

    The paper is "Return of the Devil in the Details". Pools round up (as in Caffe), so 224 pixels
    give 54, 27, 13 and 6; other sizes are pooled to 6. LRN has 1e-4 per channel (torch divides its
    α by the size). There are no ImageNet weights to download: pass the path of a converted file
    with the names of this network (``features.0.weight`` ... ``classifier.3.bias``).
    """

    SMALLEST = 63

    def __init__(self, spec: BackboneSpec) -> None:
        lrn = nn.LocalResponseNorm(5, alpha=5e-4, beta=0.75, k=2.0)
        pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        relu = nn.ReLU(inplace=True)
        features = nn.Sequential(
            *(nn.Conv2d(3, 64, 11, stride=4), relu, lrn, pool),
            *(nn.Conv2d(64, 256, 5, padding=2), relu, lrn, pool),
            *(nn.Conv2d(256, 256, 3, padding=1), relu),
            *(nn.Conv2d(256, 256, 3, padding=1), relu),
            *(nn.Conv2d(256, 256, 3, padding=1), relu, pool),
        )
        classifier = nn.Sequential(
            *(nn.Linear(256 * 6 * 6, 4096), relu, nn.Dropout(0.5)),
            *(nn.Linear(4096, 4096), relu, nn.Dropout(0.5)),
        )
        # After the classifier has been drawn: the weights of a seed depend on the order.
        _he_initialised(features)
        trunk = OrderedDict[str, nn.Module](
            features=features,
            avgpool=nn.AdaptiveAvgPool2d(6),
            flatten=nn.Flatten(),
            classifier=classifier,
        )
        super().__init__(spec, nn.Sequential(trunk))


class AlexNet(Trunk):
    """AlexNet up to fc7, of torchvision (Krizhevsky, arXiv 1404.5997)."""

    SMALLEST = 63

    def __init__(self, spec: BackboneSpec) -> None:
        from torchvision.models import alexnet

        network = alexnet()
        network.classifier[-1] = nn.Identity()
        super().__init__(spec, network)


class MLP(Backbone):
    """Hidden layers of (linear, ReLU, dropout), then the head; the backbone ``linear`` has none.

    Images are flattened.

    Attributes:
        noise: standard deviation of Gaussian noise on the normalised input in training.
    """

    def __init__(self, spec: BackboneSpec) -> None:
        super().__init__(spec)
        self.noise, width = 0.0, spec.in_width or 3 * spec.image_size**2
        self.layers = nn.Sequential()
        for hidden in spec.hidden if spec.name == "mlp" else ():
            linear = nn.Linear(width, hidden)
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
            nn.init.zeros_(linear.bias)
            self.layers.extend([linear, nn.ReLU(), nn.Dropout(spec.dropout)])
            width = hidden
        self.head = make_head(width, spec.out_width)

    def trunk_features(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.training and self.noise:
            x = x + self.noise * torch.randn(x.shape, device=x.device, dtype=x.dtype)
        return cast(Tensor, self.layers(x))


def _timm(spec: BackboneSpec, pretrained: bool) -> Trunk:
    """Return a timm model without its classifier, with the input normalisation of timm."""
    import timm

    name = spec.name.removeprefix("timm/")
    create = functools.partial(timm.create_model, name, pretrained=pretrained, num_classes=0)
    try:
        try:
            backbone = Trunk(spec, create(img_size=spec.image_size))
        except TypeError:  # convolutional models have no img_size
            backbone = Trunk(spec, create())
    except Exception as error:  # hub, http and timm errors have no common base
        raise UsageError(
            f"cannot make timm's model '{name}' for {spec.image_size} pixels ({one_line(error)}): "
            "see timm.list_models(), or set network.weights to the path of its weights, or to none"
        ) from error
    config: Any = backbone.trunk.pretrained_cfg
    backbone.input = Normalisation(0, config["mean"], config["std"])
    return backbone


BACKBONES: dict[str, type[Backbone]] = {
    "vgg": VGG,
    "cnnf": CNNF,
    "alexnet": AlexNet,
    "mlp": MLP,
    "linear": MLP,
}
"""Backbones by name, besides ``timm/NAME`` and those of plugins."""


def backbone_plugin(name: str) -> Plugin | None:
    """Return the plugin of a backbone; None if it is built in or unknown.

    Raises:
        UsageError: as :func:`.find_plugin`.
    """
    return find_plugin("backbones", name, (*BACKBONES, "auto"))


def build_backbone(
    spec: BackboneSpec, weights: str = "none", *, generator: torch.Generator
) -> Backbone:
    """Build a feature extractor, on the CPU and in training mode.

    It maps float [B, 3, S, S] in [0, 1] or float [B, W] to float [B, D].

    Args:
        spec: its name is ``vgg``, ``cnnf``, ``alexnet``, ``mlp``, ``linear``, ``timm/NAME``, or
            that of a plugin.
        weights: ``"none"`` (random), ``"imagenet"`` (vgg, alexnet, timm), or the path of a ``.pth``
            or ``.safetensors`` file of this architecture, from torchvision (``vgg16_bn``,
            ``alexnet``) or timm.
        generator: the random initialisation is drawn from it; torch's global generators are
            unchanged.

    Raises:
        UsageError: an invalid name or combination.
        DataError: weights that are not available or do not fit.
        ModuleNotFoundError: torchvision or timm, which the backbone needs, is not installed.
    """
    name = spec.name
    plugin = backbone_plugin(name)
    is_timm = name.startswith("timm/")
    if plugin is None and not is_timm and name not in BACKBONES:
        names = [*BACKBONES, "timm/NAME", *plugin_names("backbones")]
        raise UsageError(f"no backbone '{name}': choose one of {', '.join(names)}")
    if spec.kind == "features" and plugin is None and BACKBONES.get(name) is not MLP:
        raise UsageError(
            f"backbone {name} takes images, but the data are features: choose mlp or linear"
        )
    if weights == "imagenet" and name not in PUBLISHED and not is_timm:
        raise UsageError(
            f"there are no ImageNet weights of backbone {name}: set network.weights to none, "
            "or to the path of a file"
        )
    seed = int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
    # Layers draw from torch's global generator: seed a fork of it. (Not torch.manual_seed, which
    # would also reseed the devices.)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if plugin is not None:
            with plugin.running("be built"):
                backbone: Backbone = Trunk(spec, plugin.load()(spec))
        else:
            backbone = _timm(spec, weights == "imagenet") if is_timm else BACKBONES[name](spec)
    if weights == "imagenet" and name in PUBLISHED:
        load_into(backbone, imagenet_state(name), f"ImageNet weights of {PUBLISHED[name]}")
    elif weights not in ("none", "imagenet"):
        load_into(backbone, read_weights(Path(weights)), weights)
    return backbone


def input_description(dataset: Dataset, image_size: int) -> dict[str, Any]:
    """Return the argument ``input_`` of :func:`build_extractor` for ``dataset``."""
    return (
        {"kind": "features", "width": dataset.matrix.shape[1]}
        if isinstance(dataset, FeatureDataset)
        else {"kind": "images", "image_size": image_size}
    )


def build_extractor(
    config: Config, input_: Mapping[str, Any], out_width: int, generator: torch.Generator
) -> Backbone:
    """Build the feature extractor F of all trained methods, with a linear layer to ``out_width``.

    ``input_`` is ``{"kind": "features", "width": W}`` or ``{"kind": "images", "image_size": S}``.
    """
    network = config.network
    image_size = input_.get("image_size", 0)
    # The last hidden layer of class networks is part of their head.
    hidden = network.hidden[:-1] if config.class_networks else network.hidden
    name = network.backbone
    if name == "auto" and image_size >= VGG.SMALLEST:
        name = "vgg"
    elif name == "auto":
        name = "mlp" if hidden else "linear"
    if not hidden and not config.class_networks:
        # A requested perceptron has a hidden layer; class networks have one of their own.
        hidden = BackboneSpec.hidden
    is_authors = config.method == "gpq-authors"
    spec = BackboneSpec(
        name=name,
        kind=input_["kind"],
        out_width=out_width,
        in_width=input_.get("width", 0),
        image_size=image_size,
        hidden=hidden,
        dropout=config.dropout,
        tap="pool" if is_authors else "block",
    )
    backbone = build_backbone(spec, network.weights, generator=generator)
    if isinstance(backbone, MLP):
        backbone.noise = 0.0 if config.class_networks else network.first_noise
    elif network.weights != "none" and not is_authors:
        backbone.freeze()
    return backbone
