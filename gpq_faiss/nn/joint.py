"""One batch over several processes: each has a share of the items, and whatever depends on all items is computed as in one process.

Every process computes the losses from the outputs of the joint batch (:meth:`Share.joint`), put together by torch's differentiable sum
over the processes, which multiplies gradients of outputs by their number; gradients of parameters are then averaged.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.nn import functional

from ..errors import ProcessError, UsageError
from .quantizer import at_least_float32

log = logging.getLogger(__name__)


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
        total: Tensor = wait_tensor(all_reduce(x, "sum", dist.group.WORLD))  # type: ignore[no-untyped-call,arg-type]
    return total


_SHARE: ContextVar[Share | None] = ContextVar("share", default=None)
"""What :meth:`Share.joint` runs; None: all items."""


class DrawsByRow(nn.Module):
    """A module that draws random numbers per item: for the whole joint batch, as one process would, of which it uses those of this
    process."""

    def drawn(self, draw: Callable[[list[int]], Tensor], shape: list[int], dim: int) -> Tensor:
        """``draw(shape)``, where ``shape[dim]`` is the number of current items."""
        share = _SHARE.get()
        if share is None:
            return draw(shape)
        whole = draw([*shape[:dim], share.total, *shape[dim + 1 :]])
        return whole.narrow(dim, share.start, shape[dim])

    def normal(self, like: Tensor, shape: list[int], dim: int) -> Tensor:
        """Standard normal numbers of the type and device of ``like``."""
        return self.drawn(lambda size: torch.randn(size, device=like.device, dtype=like.dtype), shape, dim)


class RowDropout(nn.Dropout, DrawsByRow):
    """Dropout with items along the first dimension."""

    def forward(self, input: Tensor) -> Tensor:
        """The input after dropout."""
        if not self.training:
            return input
        return input * self.drawn(
            lambda n: functional.dropout(input.new_ones(n), self.p), list(input.shape), 0
        )


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
    """This process' part of a joint batch of ``total`` items: those from ``start`` to ``stop``, possibly none."""

    start: int
    stop: int
    total: int

    def joint(
        self, run: Callable[[Tensor], Tensor], x: Tensor, first: int = 0, last: int | None = None
    ) -> Tensor:
        """Output of ``run`` for the items ``first`` to ``last`` (default: all) of the joint batch, where each process runs its own; float
        [B, E], at least float32, equal in every process, with gradients. ``run`` maps items [b, ...] to float [b, E], each by itself but
        for :class:`JointBatchNorm`."""
        last = self.total if last is None else last
        start, stop = (min(max(at, first), last) for at in (self.start, self.stop))
        part = Share(start - first, stop - first, last - first)
        running = _SHARE.set(part)
        try:
            out = at_least_float32(run(x[start - self.start : stop - self.start]))
        finally:
            _SHARE.reset(running)
        return add_up(functional.pad(out, (0, 0, part.start, part.total - part.stop)))


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
    """Make every batch norm of ``network`` use the joint batch. Raises UsageError: an unsupported kind."""
    for layer in network.modules():
        plain = type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and not plain:
            raise UsageError(
                f"this backbone has an unsupported kind of batch norm ({type(layer).__name__}) for several processes: "
                "train it in one process, or choose another backbone"
            )
    nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
    for layer in network.modules():
        if type(layer) is nn.SyncBatchNorm:
            layer.__class__ = JointBatchNorm
