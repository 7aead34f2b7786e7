"""The feature extractor F: from images or ready-made embeddings to one vector of D = M * d dimensions.

:func:`build_backbone` makes any of them by name. Every backbone normalises its own input (ImageNet's mean and
deviation for images, fitted statistics for embeddings; both are buffers, saved with the weights), and ends in
one linear layer ``head`` to D. Intra-normalisation is not part of it (:mod:`gpq_faiss.nn.quantizer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from ..errors import DataError, UsageError
from ..plugins import Plugin, find_plugin, plugin_names
from .inputs import IMAGENET_MEAN, IMAGENET_STD, FeatureInput, ImageInput
from .joint import RowDropout
from .weights import first_line, imagenet_state, load_into, read_weights

Kind = Literal["images", "features"]
Tap = Literal["block", "pool"]

#: Names of the backbones, besides ``timm/NAME``.
BACKBONES = ("vgg", "alexnet", "cnnf", "mlp", "linear")
#: Default widths of the hidden layers of ``mlp``.
DEFAULT_HIDDEN = (512,)


@dataclass(frozen=True)
class BackboneSpec:
    """Description of an architecture, without weights.

    ``in_width`` is 0 for images, ``image_size`` is 0 for features. ``hidden`` and ``dropout``
    are only for ``mlp``, ``tap`` only for ``vgg``.
    """

    name: str
    kind: Kind
    out_width: int
    in_width: int = 0
    image_size: int = 0
    hidden: tuple[int, ...] = DEFAULT_HIDDEN
    dropout: float = 0.0
    tap: Tap = "block"


class Backbone(nn.Module):
    """Base of all backbones: input normalisation, a trunk, and the linear ``head`` to D.

    Attributes:
        spec: description from which it can be built again.
        input: :class:`ImageInput` or :class:`FeatureInput`.
        head: from the trunk's width to ``spec.out_width``: one linear layer, or :class:`~gpq_faiss.nn.heads.SubspaceHeads`.
    """

    head: nn.Module

    def __init__(self, spec: BackboneSpec, smallest: int = 1) -> None:
        super().__init__()
        self.spec = spec
        if spec.kind == "images" and spec.image_size < smallest:
            raise UsageError(
                f"backbone {spec.name} needs images of at least {smallest} pixels per side, "
                f"not {spec.image_size}: set a larger network.image_size, or another network.backbone"
            )
        self.input: ImageInput | FeatureInput
        self.input = ImageInput(smallest) if spec.kind == "images" else FeatureInput(spec.in_width)

    def trunk_features(self, x: Tensor) -> Tensor:
        """From normalised input to the vector before the head, float [B, trunk width]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """The network's output, float [B, D], not normalised.

        Args:
            x: images float [B, 3, S, S] in [0, 1], or features float [B, W].

        Raises:
            UsageError: another shape or an integer dtype.
        """
        return cast(Tensor, self.head(self.trunk_features(self.input(x))))

    def fit_standardisation(self, x: Tensor) -> None:
        """Set the input's mean and deviation from data float [N, W]; see :meth:`.inputs.FeatureInput.fit`.

        Raises:
            UsageError: an image backbone, or another width.
            DataError: no rows, or not finite.
        """
        if not isinstance(self.input, FeatureInput):
            raise UsageError(f"backbone {self.spec.name} takes images: ImageNet statistics normalise them")
        self.input.fit(x)


def _make_head(width: int, out_width: int) -> nn.Linear:
    head = nn.Linear(width, out_width)
    nn.init.xavier_uniform_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _initialise_convolutions(module: nn.Module) -> None:
    """He initialisation of every convolution."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


class VGG(Backbone):
    """The paper's modified VGG: 64-64-M-128-128-M-256-256-256-M-512-512-512 with batch norm.

    The global average pools of the last two blocks are concatenated, 256 + 512. The third block is averaged before its max
    pool, or with ``spec.tap = "pool"`` after it, as in the authors' code; the fourth has no max pool. Modules of ``features`` are
    numbered as in torchvision's ``vgg16_bn`` up to the ReLU after conv4_3, so its weights fit by name. Inputs of at least 16 pixels.
    """

    SMALLEST = 16
    """Minimum pixels per side."""

    _LAYERS = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512)
    _TAPS: Mapping[str, int] = {
        "block": 22,
        "pool": 23,
    }  # index in `features`: the ReLU after conv3_3; the max pool
    END_OF_BLOCK_4 = 32  # and after conv4_3, the last one

    def __init__(self, spec: BackboneSpec) -> None:
        super().__init__(spec, smallest=self.SMALLEST)
        if spec.tap not in self._TAPS:
            raise UsageError(f"tap {spec.tap!r} is not one of {', '.join(self._TAPS)}")
        layers: list[nn.Module] = []
        width = 3
        for item in self._LAYERS:
            if isinstance(item, int):
                layers += [nn.Conv2d(width, item, 3, padding=1), nn.BatchNorm2d(item), nn.ReLU(inplace=True)]
                width = item
            else:
                layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        _initialise_convolutions(self.features)
        self.head = _make_head(256 + 512, spec.out_width)

    def trunk_features(self, x: Tensor) -> Tensor:
        """Normalised images to [B, 768]."""
        pools = []
        for index, layer in enumerate(self.features):
            x = layer(x)
            if index in (self._TAPS[self.spec.tap], self.END_OF_BLOCK_4):
                pools.append(x.mean(dim=(2, 3)))
        return torch.cat(pools, dim=1)


class _Fc7(Backbone):
    """Convolutions, pooling to 6x6, and two layers of 4096 with dropout.

    For 224 pixels; other sizes from 63 on through the pooling, the identity at 224 in CNN-F.
    """

    features: nn.Sequential
    avgpool: nn.Module
    classifier: nn.Sequential

    def __init__(self, spec: BackboneSpec) -> None:
        super().__init__(spec, smallest=63)

    def trunk_features(self, x: Tensor) -> Tensor:
        """Normalised images to [B, 4096]."""
        return cast(Tensor, self.classifier(self.avgpool(self.features(x)).flatten(1)))


class AlexNet(_Fc7):
    """torchvision's AlexNet up to fc7 (4096 dimensions, after its ReLU), with its layer names."""

    def __init__(self, spec: BackboneSpec) -> None:
        super().__init__(spec)
        from torchvision.models import alexnet

        whole = alexnet(weights=None)
        self.features = whole.features
        self.avgpool = whole.avgpool
        self.classifier = nn.Sequential(
            *[RowDropout(x.p) if isinstance(x, nn.Dropout) else x for x in whole.classifier[:6]]
        )
        self.head = _make_head(4096, spec.out_width)


class CNNF(_Fc7):
    """CNN-F (also VGG-F) up to full7, of Chatfield et al., "Return of the Devil in the Details", BMVC 2014.

    conv 64x11x11 /4, LRN, pool; conv 256x5x5, LRN, pool; three conv 256x3x3, pool; two layers of 4096 with
    dropout 0.5. Pools are 3x3 /2 with rounding up (as in Caffe), so 224 pixels give 54, 27, 13 and 6. LRN is over 5 channels with k = 2,
    β = 0.75 and 1e-4 per channel (torch divides its α by the size, hence 5e-4).

    torchvision has no ImageNet weights of it; pass the path of a converted file with the names of this module
    (``features.0.weight`` ... ``classifier.3.bias``), for RGB in ImageNet's normalisation.
    """

    def __init__(self, spec: BackboneSpec) -> None:
        super().__init__(spec)

        def normalise() -> nn.Module:
            return nn.LocalResponseNorm(5, alpha=5e-4, beta=0.75, k=2.0)

        def pool() -> nn.Module:
            return nn.MaxPool2d(3, 2, ceil_mode=True)

        def relu() -> nn.Module:
            return nn.ReLU(inplace=True)

        self.features = nn.Sequential(
            *[nn.Conv2d(3, 64, 11, stride=4), relu(), normalise(), pool()],
            *[nn.Conv2d(64, 256, 5, padding=2), relu(), normalise(), pool()],
            *[nn.Conv2d(256, 256, 3, padding=1), relu()],
            *[nn.Conv2d(256, 256, 3, padding=1), relu()],
            *[nn.Conv2d(256, 256, 3, padding=1), relu(), pool()],
        )
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            *[nn.Linear(256 * 6 * 6, 4096), relu(), RowDropout(0.5)],
            *[nn.Linear(4096, 4096), relu(), RowDropout(0.5)],
        )
        _initialise_convolutions(self.features)
        self.head = _make_head(4096, spec.out_width)


class MLP(Backbone):
    """Hidden layers of (linear, ReLU, dropout), then the head; without hidden layers: ``linear``.

    Images are flattened, so they must have ``spec.image_size``.
    """

    def __init__(self, spec: BackboneSpec) -> None:
        super().__init__(spec)
        if not 0 <= spec.dropout < 1 or any(width < 1 for width in spec.hidden):
            raise UsageError(
                f"mlp with hidden {list(spec.hidden)} and dropout {spec.dropout}: "
                "widths start at 1, dropout is in [0, 1)"
            )
        width = self.flat_width = spec.in_width if spec.kind == "features" else 3 * spec.image_size**2
        layers: list[nn.Module] = []
        for hidden in spec.hidden if spec.name == "mlp" else ():
            linear = nn.Linear(width, hidden)
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
            nn.init.zeros_(linear.bias)
            layers += [linear, nn.ReLU()]
            if spec.dropout > 0:
                layers.append(RowDropout(spec.dropout))
            width = hidden
        self.layers = nn.Sequential(*layers)
        self.head = _make_head(width, spec.out_width)

    def trunk_features(self, x: Tensor) -> Tensor:
        """Normalised features or images to [B, last hidden width]."""
        x = x.flatten(1)
        if x.shape[1] != self.flat_width:
            size = self.spec.image_size
            raise UsageError(
                f"backbone {self.spec.name} was built for images of {size}x{size} pixels: resize to that"
            )
        return cast(Tensor, self.layers(x))


class Trunk(Backbone):
    """Wraps any module from normalised inputs, float [B, 3, S, S] or [B, W], to vectors [B, width]."""

    def __init__(self, spec: BackboneSpec, trunk: nn.Module) -> None:
        super().__init__(spec)
        self.trunk = trunk
        self.head = _make_head(self._measure_width(), spec.out_width)

    @torch.no_grad()
    def _measure_width(self) -> int:
        # Declared widths are not reliable in every model family, so run the network.
        spec = self.spec
        images = spec.kind == "images"
        shape = (3, spec.image_size, spec.image_size) if images else (spec.in_width,)
        what = (
            f"{spec.image_size}x{spec.image_size} pixels" if images else f"vectors of {spec.in_width} numbers"
        )
        self.trunk.eval()
        try:
            out = self.trunk(torch.zeros(1, *shape, device="cpu"))
        except Exception as error:
            raise UsageError(f"backbone {spec.name} does not take {what}: {first_line(error)}") from error
        self.trunk.train()
        if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != 1:
            found = f"a tensor of shape {list(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise UsageError(f"backbone {spec.name} gives {found}, not one vector per item")
        return int(out.shape[1])

    def trunk_features(self, x: Tensor) -> Tensor:
        """Normalised inputs to [B, width of the trunk]."""
        return cast(Tensor, self.trunk(x))


def _timm(spec: BackboneSpec, pretrained: bool) -> Trunk:
    """Any timm model without its classifier: ``timm/NAME``, with its timm normalisation.

    Raises:
        UsageError: timm is not installed, or has no model of that name.
        DataError: its ImageNet weights are not available.
    """
    try:
        import timm
    except ImportError:
        raise UsageError(
            f"backbone {spec.name} needs the package timm: pip install 'gpq-faiss[timm]'"
        ) from None
    name = spec.name.removeprefix("timm/")
    if not timm.is_model(name):
        raise UsageError(f"timm has no model '{name}': see timm.list_models()")
    options: dict[str, Any] = {"pretrained": pretrained, "num_classes": 0}
    try:
        # On the CPU even under the meta device: timm draws numbers while it builds.
        with torch.device("cpu"):
            try:
                trunk = timm.create_model(name, img_size=spec.image_size, **options)
            except TypeError:  # convolutional models have no img_size
                trunk = timm.create_model(name, **options)
    except Exception as error:  # hub, http and timm errors have no common base
        if not pretrained:
            raise UsageError(
                f"timm cannot build '{name}' for {spec.image_size} pixels: {first_line(error)}"
            ) from error
        raise DataError(
            f"cannot get timm's weights of '{name}' ({first_line(error)}): "
            "set network.weights to the path of the file, or to none"
        ) from error
    config = getattr(trunk, "pretrained_cfg", {})
    made = Trunk(spec, trunk)
    made.input = ImageInput(
        1, tuple(config.get("mean", IMAGENET_MEAN)), tuple(config.get("std", IMAGENET_STD))
    )
    return made


def _of_plugin(spec: BackboneSpec, plugin: Plugin) -> Trunk:
    """Build the plugin's module for ``spec``. Raises UsageError: it fails, or the module does not accept such inputs."""
    make = plugin.load()
    try:
        # As for timm: on the CPU even under the meta device.
        with torch.device("cpu"):
            trunk = make(spec)
    except Exception as error:
        raise plugin.error(f"cannot be built ({type(error).__name__}: {first_line(error)})") from error
    if not isinstance(trunk, nn.Module):
        raise plugin.error(f"returns a {type(trunk).__name__}: a torch.nn.Module is needed")
    return Trunk(spec, trunk)


def backbone_plugin(name: str) -> Plugin | None:
    """The plugin of a backbone; None if it is built in or unknown. Raises UsageError: as :func:`.find_plugin`."""
    return find_plugin("backbones", name, (*BACKBONES, "auto"))


_ImageNet = {"vgg": "vgg16_bn", "alexnet": "alexnet"}


def build_backbone(  # noqa: PLR0913
    name: str,
    *,
    kind: Kind,
    out_width: int,
    in_width: int = 0,
    image_size: int = 0,
    weights: str = "none",
    hidden: tuple[int, ...] = DEFAULT_HIDDEN,
    dropout: float = 0.0,
    tap: Tap = "block",
    seed: int | torch.Generator = 0,
) -> Backbone:
    """Build a feature extractor, on the CPU and in training mode.

    Args:
        name: ``vgg``, ``alexnet``, ``cnnf``, ``mlp``, ``linear``, ``timm/NAME``, or the name of a plugin.
        kind: ``"images"`` or ``"features"``; features need ``mlp`` or ``linear`` (which accept both), or a plugin.
        out_width: D = M * d, the width of the output.
        in_width: width of the features.
        image_size: side of the square images in pixels.
        weights: ``"none"`` (random), ``"imagenet"`` (vgg, alexnet, timm), or the path of a ``.pth`` or
            ``.safetensors`` file of this architecture, from torchvision (``vgg16_bn``, ``alexnet``) or timm.
        hidden: widths of the hidden layers of ``mlp``.
        dropout: after each hidden layer of ``mlp``, in [0, 1).
        tap: where ``vgg`` averages its third block: ``block`` (before its max pool) or ``pool`` (after it).
        seed: of the random initialisation, or the generator to draw it from; torch's global generators are unchanged.

    Returns:
        A module with the attribute ``spec``: float [B, 3, S, S] in [0, 1] or float [B, W] -> float [B, D].

    Raises:
        UsageError: an invalid name, size or combination.
        DataError: weights that are not available or do not fit.
    """
    is_timm, plugin = name.startswith("timm/"), backbone_plugin(name)
    if plugin is None and name not in BACKBONES and not is_timm:
        known = ", ".join([*BACKBONES, "timm/NAME", *plugin_names("backbones", BACKBONES)])
        raise UsageError(f"no backbone '{name}': choose one of {known}")
    if kind not in get_args(Kind):
        raise UsageError(f"no input kind {kind!r}: choose one of {', '.join(get_args(Kind))}")
    features = kind == "features"
    if features and plugin is None and name not in ("mlp", "linear"):
        raise UsageError(f"backbone {name} takes images, but the data are features: choose mlp or linear")
    size = in_width if features else image_size
    if size < 1 or out_width < 1:
        what = "in_width" if features else "image_size"
        raise UsageError(
            f"backbone {name} with {what} {size} and out_width {out_width}: both must be at least 1"
        )
    if weights == "imagenet" and name not in _ImageNet and not is_timm:
        raise UsageError(
            f"there are no ImageNet weights of backbone {name}: set network.weights to none, or to the path of a file"
        )
    spec = BackboneSpec(
        name, kind, out_width, size if features else 0, 0 if features else size, hidden, dropout, tap
    )
    if isinstance(seed, torch.Generator):
        seed = int(torch.randint(2**63 - 1, (), generator=seed, device=seed.device))
    # Layers draw from torch's global generator: seed a fork of it. (Not torch.manual_seed, which would also
    # reseed the devices.)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        backbone: Backbone
        if is_timm:
            backbone = _timm(spec, pretrained=weights == "imagenet")
        elif plugin is not None:
            backbone = _of_plugin(spec, plugin)
        else:
            classes: dict[str, type[VGG | AlexNet | CNNF | MLP]]
            classes = {"vgg": VGG, "alexnet": AlexNet, "cnnf": CNNF, "mlp": MLP, "linear": MLP}
            backbone = classes[name](spec)
    if weights == "imagenet" and name in _ImageNet:
        load_into(backbone, imagenet_state(_ImageNet[name]), f"ImageNet weights of {_ImageNet[name]}")
    elif weights not in ("none", "imagenet"):
        load_into(backbone, read_weights(weights), weights)
    return backbone
