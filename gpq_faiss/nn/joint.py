"""One batch over several processes: each has a share of the items, and whatever depends on all items is computed as in one process.

Every process computes the losses from the outputs of the joint batch (:meth:`Share.joint`), so gradients of outputs are equal
everywhere, and each process backpropagates those of its own items. Gradients of parameters are then averaged over the processes, so
gradients of outputs are multiplied by the number of processes first.

The processes are those of torch.distributed's default group.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ProcessError, UsageError

log = logging.getLogger(__name__)

LABELLED, UNLABELLED = 0, 1
"""The two kinds of items of a batch."""


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Context for communication with other processes.

    Raises:
        ProcessError: one of them has ended.
    """
    try:
        yield
    except RuntimeError as error:
        log.debug("%s", error)
        raise ProcessError(
            "another process of this training failed or ended, so all end: run the same command with --resume to continue"
        ) from error


def add_up(x: Tensor) -> Tensor:
    """Sum of ``x`` over the processes, in place."""
    with connected():
        dist.all_reduce(x)
    return x


def collect(x: Tensor) -> list[Tensor]:
    """``x`` of every process, of equal shapes, in rank order."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    with connected():
        dist.all_gather(parts, x.contiguous())
    return parts


class Rows(NamedTuple):
    """Rows of a joint batch of ``total`` items that this process has: ``mine`` int64 [b]."""

    total: int
    mine: Tensor


class DrawsByRow(nn.Module):
    """A module that draws random numbers per item.

    Attributes:
        rows: rows of the current items in the joint batch; None: all. Numbers are drawn for the whole joint batch, as one process
            would, and those of the current items are used.
    """

    rows: Rows | None = None

    def drawn(self, draw: Callable[[list[int]], Tensor], shape: list[int], dim: int) -> Tensor:
        """``draw(shape)``, where ``shape[dim]`` is the number of current items."""
        if self.rows is None:
            return draw(shape)
        whole = draw([*shape[:dim], self.rows.total, *shape[dim + 1 :]])
        return whole.index_select(dim, self.rows.mine.to(whole.device))


class RowDropout(nn.Dropout, DrawsByRow):
    """Dropout with items along the dimension ``dim``."""

    def __init__(self, p: float, dim: int = 0) -> None:
        super().__init__(p)
        self.dim = dim

    def forward(self, input: Tensor) -> Tensor:
        """The input after dropout."""
        if self.rows is None or not self.training:
            return super().forward(input)

        def draw(shape: list[int]) -> Tensor:
            return functional.dropout(input.new_ones(shape), self.p)

        return input * self.drawn(draw, list(input.shape), self.dim)


class _Gather(torch.autograd.Function):
    """Gathers outputs of all processes; backward, the gradient of the own outputs times the number of processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: int, index: Tensor, mine: Tensor) -> Tensor:
        padded = functional.pad(x, (0, 0) * (x.ndim - 1) + (0, most - len(x)))
        ctx.mine = mine
        return torch.cat(collect(padded))[index]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        return grad_outputs[0][ctx.mine] * dist.get_world_size(), None, None, None


@dataclass(frozen=True)
class Share:
    """This process' part of a joint batch.

    Attributes:
        rank: of this process.
        counts: labelled and unlabelled items of every process, possibly 0. In the joint batch labelled items come before unlabelled
            ones, each in rank order.
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
        """Output of ``run`` for the joint batch, where each process runs its own items.

        Args:
            run: items [b, ...] to outputs float [b, E], independent per item except in :class:`JointBatchNorm`.
            x: the own items, labelled ones first.
            kinds: kinds of items to run.

        Returns:
            float [B, E], equal in every process, with gradients for the own items.
        """
        rows = self.rows(kinds)
        own = self.counts[self.rank]
        first = 0 if LABELLED in kinds else own[LABELLED]
        for module in self.drawing:
            module.rows = rows
        try:
            out = run(x[first : first + sum(own[kind] for kind in kinds)])
        finally:
            for module in self.drawing:
                module.rows = None
        each = [[counts[kind] for kind in kinds] for counts in self.counts]
        most = max(map(sum, each))
        index = torch.cat(
            [
                rank * most + sum(counts[:i]) + torch.arange(counts[i])
                for i in range(len(kinds))
                for rank, counts in enumerate(each)
            ]
        )
        mine = rows.mine.to(out.device)
        return cast(Tensor, _Gather.apply(out, most, index.to(out.device), mine))


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) with the statistics of all processes; also returns these."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        over = [d for d in range(x.ndim) if d != 1]
        shape = [1, -1, *[1] * (x.ndim - 2)]
        sums = torch.cat([x.sum(over), x.new_tensor([x.numel() // x.shape[1]])])
        add_up(sums)
        count = sums[-1].clone()
        mean = sums[:-1] / count
        # In a second pass: E[x²] - E[x]² would lose precision.
        centred = x - mean.view(shape)
        var = add_up(centred.square().sum(over)) / count
        scale = (var + eps).rsqrt()
        out = centred * scale.view(shape)
        ctx.save_for_backward(out, scale, count)
        ctx.mark_non_differentiable(mean, var, count)
        return out, mean, var, count

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        out, scale, count = ctx.saved_tensors
        gradient = grad_outputs[0]
        over = [d for d in range(out.ndim) if d != 1]
        shape = [1, -1, *[1] * (out.ndim - 2)]
        sums = add_up(torch.stack([gradient.sum(over), (gradient * out).sum(over)])) / count
        mean, along = sums[0].view(shape), sums[1].view(shape)
        return (gradient - mean - out * along) * scale.view(shape), None


class JointBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm over the joint batch, on any device (torch's SyncBatchNorm needs a GPU). A process may have no items."""

    def _check_input_dim(self, input: Tensor) -> None:
        del input

    def forward(self, input: Tensor) -> Tensor:
        """float [B, C, ...], shape as given."""
        if not self.training:
            return super().forward(input)
        x = input if input.dtype == torch.float64 else input.float()
        out, mean, var, count = cast(tuple[Tensor, ...], _Normalise.apply(x, self.eps))
        if self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            weight = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
            self.running_var.lerp_((var * count / (count - 1)).to(self.running_var.dtype), weight)
        shape = [1, -1, *[1] * (x.ndim - 2)]
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(input.dtype)


_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def join_batch_norm(network: nn.Module, device: torch.device) -> None:
    """Make every batch norm of ``network`` use the joint batch; names, parameters and statistics are kept.

    Raises:
        UsageError: an unsupported kind of batch norm.
    """
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if not isinstance(child, nn.modules.batchnorm._BatchNorm):
                continue
            if type(child) not in _PLAIN:
                raise UsageError(
                    f"this backbone has an unsupported kind of batch norm ({type(child).__name__}) for several processes: "
                    "train it in one process, or choose another backbone"
                )
            setattr(module, name, _joined(child, device))


def _joined(layer: nn.modules.batchnorm._BatchNorm, device: torch.device) -> nn.Module:
    made: nn.Module
    if device.type == "cuda":
        made = nn.SyncBatchNorm.convert_sync_batchnorm(layer)  # type: ignore[no-untyped-call]
        return made
    made = JointBatchNorm(
        layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats
    )
    for name, value in [*layer.named_parameters(), *layer.named_buffers()]:
        setattr(made, name, value)
    return made.train(layer.training)
