"""One batch over several processes: each has a share of the items, and whatever depends on all items is computed as in one process.

Every process computes the losses from the outputs of the joint batch (:meth:`Share.joint`), put together by torch's differentiable sum
over the processes, which multiplies gradients of outputs by their number; gradients of parameters are then averaged.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional

from ..errors import ProcessError, UsageError
from .quantizer import at_least_float32

log = logging.getLogger(__name__)

LABELLED, UNLABELLED = 0, 1
"""The two kinds of items of a batch."""


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Context for communication with other processes. Raises ProcessError: one of them has ended."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        log.debug("%s", error)
        raise ProcessError(
            "another process of this training failed or ended, so all end: run the same command with --resume to continue"
        ) from error


def add_up(x: Tensor) -> Tensor:
    """Sum of ``x`` over the processes, with gradients."""
    with connected():
        total: Tensor = all_reduce(x)  # type: ignore[no-untyped-call]
    return total


class Rows(NamedTuple):
    """Rows of a joint batch of ``total`` items that this process has: ``mine`` int64 [b]."""

    total: int
    mine: Tensor


class DrawsByRow(nn.Module):
    """A module that draws random numbers per item: for the whole joint batch, as one process would, of which it uses those of ``rows``,
    its current items (None: all)."""

    rows: Rows | None = None

    def drawn(self, draw: Callable[[list[int]], Tensor], shape: list[int], dim: int) -> Tensor:
        """``draw(shape)``, where ``shape[dim]`` is the number of current items."""
        if self.rows is None:
            return draw(shape)
        whole = draw([*shape[:dim], self.rows.total, *shape[dim + 1 :]])
        return whole.index_select(dim, self.rows.mine.to(whole.device))

    def normal(self, like: Tensor, shape: list[int], dim: int) -> Tensor:
        """Standard normal numbers of the type and device of ``like``."""
        return self.drawn(lambda size: torch.randn(size, device=like.device, dtype=like.dtype), shape, dim)


class RowDropout(nn.Dropout, DrawsByRow):
    """Dropout with items along the dimension ``dim``."""

    def __init__(self, p: float, dim: int = 0) -> None:
        super().__init__(p)
        self.dim = dim

    def forward(self, input: Tensor) -> Tensor:
        """The input after dropout."""
        if self.rows is None or not self.training:
            return super().forward(input)

        def scale(size: list[int]) -> Tensor:
            return functional.dropout(input.new_ones(size), self.p)

        return input * self.drawn(scale, list(input.shape), self.dim)


class RowNoise(DrawsByRow):
    """Gaussian noise on standardised embeddings or flattened pixels, only in training."""

    def __init__(self, deviation: float) -> None:
        super().__init__()
        self.deviation = deviation

    def forward(self, x: Tensor) -> Tensor:
        """The input with noise."""
        return x + self.deviation * self.normal(x, list(x.shape), dim=0) if self.training else x


@dataclass(frozen=True)
class Share:
    """This process' part of a joint batch, in which labelled items come before unlabelled ones, each in the order of the processes.

    Attributes:
        rank: of this process.
        counts: labelled and unlabelled items of every process, possibly 0.
        drawing: modules that draw random numbers per item.
    """

    rank: int
    counts: tuple[tuple[int, int], ...]
    drawing: tuple[DrawsByRow, ...] = ()

    def rows(self, kinds: tuple[int, ...] = (LABELLED, UNLABELLED)) -> Rows:
        """Rows of the own items of these kinds among all items of these kinds."""
        start, mine = 0, []
        for kind in kinds:
            before = start + sum(counts[kind] for counts in self.counts[: self.rank])
            mine.append(torch.arange(before, before + self.counts[self.rank][kind]))
            start += sum(counts[kind] for counts in self.counts)
        return Rows(start, torch.cat(mine))

    def joint(
        self,
        run: Callable[[Tensor], Tensor],
        x: Tensor,
        kinds: tuple[int, ...] = (LABELLED, UNLABELLED),
    ) -> Tensor:
        """Output of ``run`` for all items of these kinds, where each process runs its own; with gradients for these.

        Args:
            run: items [b, ...] to outputs float [b, E], independent per item except in :class:`JointBatchNorm`.
            x: the own items of both kinds, labelled ones first.
            kinds: kinds of items to run.

        Returns:
            float [B, E], at least float32, equal in every process.
        """
        rows = self.rows(kinds)
        first = 0 if LABELLED in kinds else self.counts[self.rank][LABELLED]
        for module in self.drawing:
            module.rows = rows
        try:
            out = at_least_float32(run(x[first : first + len(rows.mine)]))
        finally:
            for module in self.drawing:
                module.rows = None
        return add_up(out.new_zeros(rows.total, *out.shape[1:]).index_copy(0, rows.mine.to(out.device), out))


class JointBatchNorm(nn.SyncBatchNorm):
    """torch's batch norm over the joint batch, on the CPU too. A process may have no items."""

    def forward(self, input: Tensor) -> Tensor:
        """float [B, C, ...], shape as given."""
        if not self.training or input.device.type == "cuda":
            return super().forward(input)
        x = at_least_float32(input)
        over = [d for d in range(x.ndim) if d != 1]
        shape = [1, -1, *[1] * (x.ndim - 2)]
        sums = add_up(torch.cat([x.sum(over), x.new_tensor([x.numel() // x.shape[1]])]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        # In a second pass: E[x²] - E[x]² would lose precision.
        centred = x - mean.view(shape)
        var = add_up(centred.square().sum(over)) / count
        if self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            weight = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
            self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), weight)
            unbiased = var.detach() * count / (count - 1)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)
        out = centred * (var + self.eps).rsqrt().view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(input.dtype)


def join_batch_norm(network: nn.Module) -> None:
    """Make every batch norm of ``network`` use the joint batch; names, parameters and statistics are kept.

    Raises:
        UsageError: an unsupported kind of batch norm.
    """
    for module in list(network.modules()):
        for name, layer in list(module.named_children()):
            if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
                continue
            if type(layer) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
                raise UsageError(
                    f"this backbone has an unsupported kind of batch norm ({type(layer).__name__}) for several processes: "
                    "train it in one process, or choose another backbone"
                )
            made = JointBatchNorm(
                layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats
            )
            for key, value in [*layer.named_parameters(), *layer.named_buffers()]:
                setattr(made, key, value)
            setattr(module, name, made.train(layer.training))
