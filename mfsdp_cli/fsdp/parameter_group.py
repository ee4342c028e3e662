"""The parameters of a unit that share dtype, gradient and mesh, in flat sharded buffers.

Persistent, a shard each:

============== ================= ====================================================
buffer         dtype             note
============== ================= ====================================================
model_weight   compute dtype     what is gathered
main_weight    optimizer dtype   the same storage as model_weight where dtypes agree
main_grad      gradient dtype    sum over microbatches of the mean over the mesh
============== ================= ====================================================

Transient: the gathered weights (``padded_numel`` elements in compute dtype) and the unsharded
gradient (``padded_numel`` in optimizer dtype). Gradients are always added up in the optimizer
dtype (fp32): where ``main_grad`` is bf16, a shard in optimizer dtype lives from a step's first
reduction to its last and is rounded once, after the replicas' sum.

[Note: storage, not views, comes and goes]
Every parameter is a view of the gathered buffer for its whole life. At rest the buffer's storage
has size zero. Autograd saves parameters for the backward pass; what it saved sees the storage
come back when the unit is gathered again, so nothing has to be swapped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from mfsdp_cli.fsdp.collectives import all_gather, all_reduce_sum, reduce_scatter_sum
from mfsdp_cli.fsdp.flat_buffer import FlatLayout, Range
from mfsdp_cli.fsdp.mesh import ShardMesh

DECAY = "decay"
NO_DECAY = "no_decay"


class ParameterGroup:
    """One flat buffer of parameters and its shards.

    Args:
        names: name of each parameter in its chunk.
        parameters: in buffer order, parameters of one optimizer class next to one another.
        optimizer_classes: the optimizer class of each parameter.
        compute_dtype: dtype of gathered weights; the parameters' own dtype is the optimizer's.
        gradient_dtype: dtype of ``main_grad``; None: the optimizer's.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        optimizer_classes: Sequence[str],
        mesh: ShardMesh,
        compute_dtype: torch.dtype | None,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self.optimizer_classes = tuple(optimizer_classes)
        self.mesh = mesh
        self.requires_grad = parameters[0].requires_grad
        self.layout = FlatLayout.of(parameters, mesh.size, mesh.rank)
        self.main_dtype = parameters[0].dtype
        self.compute_dtype = compute_dtype or self.main_dtype
        self.gradient_dtype = gradient_dtype or self.main_dtype
        self.device = parameters[0].device
        self.unsharded_grad: torch.Tensor | None = None
        self._accumulated: torch.Tensor | None = None
        self.awaits_last = False
        self._gathering: dist.Work | None = None
        self._make_buffers()

    def _make_buffers(self) -> None:
        layout = self.layout
        whole = torch.zeros(layout.padded_numel, dtype=self.main_dtype, device=self.device)
        with torch.no_grad():
            for view, parameter in zip(layout.views(whole), self.parameters, strict=True):
                view.copy_(parameter)
        start = self.layout.rank * layout.shard_numel
        self.main_weight = whole[start : start + layout.shard_numel].clone()
        self.model_weight = (
            self.main_weight
            if self.compute_dtype == self.main_dtype
            else self.main_weight.to(self.compute_dtype)
        )
        self.main_grad = (
            torch.zeros_like(self.main_weight, dtype=self.gradient_dtype)
            if self.requires_grad
            else None
        )
        self.gathered = self._gathered_buffer()
        for view, parameter in zip(layout.views(self.gathered), self.parameters, strict=True):
            parameter.data = view
            parameter.grad = None
        self.reshard()

    def _gathered_buffer(self) -> torch.Tensor:
        if self.mesh.size == 1:
            return self.model_weight  # the shard is the whole: nothing to gather, nothing to free
        return torch.empty(self.layout.padded_numel, dtype=self.compute_dtype, device=self.device)

    # -- weights ---------------------------------------------------------------------------

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered weights while they exist; 0 for a group of one."""
        return 0 if self.mesh.size == 1 else self.gathered.numel() * self.gathered.element_size()

    def start_gather(self) -> None:
        """Issue the all-gather of the weights; :meth:`finish_gather` waits for it."""
        if self.mesh.size == 1:
            return
        storage = self.gathered.untyped_storage()
        storage.resize_(self.gathered.numel() * self.gathered.element_size())
        self._gathering = all_gather(self.gathered, self.model_weight, self.mesh.gather)

    def finish_gather(self) -> None:
        """Make the current stream wait until the weights are there."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def reshard(self) -> None:
        """Free the gathered weights."""
        if self.mesh.size == 1:
            return
        self.finish_gather()
        self.gathered.untyped_storage().resize_(0)

    def refresh_model_weight(self) -> None:
        """Bring the optimizer's result into the weights that are gathered."""
        if self.model_weight is not self.main_weight:
            self.model_weight.copy_(self.main_weight)

    # -- gradients -------------------------------------------------------------------------

    def collect_gradients(self) -> None:
        """Move what autograd left in ``parameter.grad`` into the unsharded gradient.

        A parameter without gradient counts as zeros, so that every rank reduces the same bytes.
        """
        fresh = self.unsharded_grad is None
        if self.unsharded_grad is None:
            self.unsharded_grad = self._empty_gradient()
        views, gradients = [], []
        for view, parameter in zip(
            self.layout.views(self.unsharded_grad), self.parameters, strict=True
        ):
            if parameter.grad is not None:
                views.append(view)
                gradients.append(parameter.grad)
                parameter.grad = None
            elif fresh:
                view.zero_()
        if not views:
            return
        if fresh:
            torch._foreach_copy_(views, gradients)
        else:
            torch._foreach_add_(views, [grad.to(self.main_dtype) for grad in gradients])

    def _empty_gradient(self) -> torch.Tensor:
        """An unsharded gradient in which the padding alone has a value: what follows fills it."""
        layout = self.layout
        gradient = torch.empty(layout.padded_numel, dtype=self.main_dtype, device=self.device)
        gradient[layout.numel :].zero_()
        return gradient

    def forget_gradients(self) -> None:
        """Zero the sharded gradient and drop what was not reduced into it."""
        self.unsharded_grad = None
        self._accumulated = None
        self.awaits_last = False
        if self.main_grad is not None:
            self.main_grad.zero_()
            for parameter in self.parameters:
                parameter.grad = None

    def start_reduce(self, *, is_last: bool = True) -> Reduction:
        """Issue the reduce-scatter of the unsharded gradient, which is given up here.

        Args:
            is_last: no other reduction of this step follows; the replicas' sum is due.
        """
        unsharded, self.unsharded_grad = self.unsharded_grad, None
        if unsharded is None:
            raise RuntimeError(f"Expected an unsharded gradient of {self.names[0]}, got none")
        return Reduction(self, unsharded, is_last=is_last)

    @property
    def _adds_up_in_place(self) -> bool:
        """Whether ``main_grad`` itself takes one microbatch after another."""
        return self.gradient_dtype == self.main_dtype

    def accumulate(self, shard: torch.Tensor) -> None:
        """Add the mesh's mean of one reduction, in optimizer dtype.

        ``awaits_last`` is true from here to :meth:`complete_gradient` where more than this makes
        ``main_grad``.
        """
        self.awaits_last = self.mesh.replicas > 1 or not self._adds_up_in_place
        main_grad = self.main_grad
        assert main_grad is not None
        if self._adds_up_in_place:
            main_grad.add_(shard, alpha=1.0 / self.mesh.divisor)
        elif self._accumulated is None:
            self._accumulated = shard / self.mesh.divisor
        else:
            self._accumulated.add_(shard, alpha=1.0 / self.mesh.divisor)

    @property
    def accumulated(self) -> torch.Tensor:
        """What has been added up so far this step, in optimizer dtype."""
        buffer = self.main_grad if self._adds_up_in_place else self._accumulated
        assert buffer is not None
        return buffer

    def complete_gradient(self) -> None:
        """Bring what was added up into ``main_grad``, after the step's last reduction."""
        self.awaits_last = False
        if self._accumulated is not None and self.main_grad is not None:
            self.main_grad.copy_(self._accumulated)
            self._accumulated = None

    def shard_of(self, index: int, shard: torch.Tensor) -> torch.Tensor:
        """The part of a parameter that this rank owns, as a view of one of its shards."""
        return self.layout.owned_in_shard(index).within(shard)

    def class_range(self, optimizer_class: str) -> Range:
        """The part of this rank's shard that belongs to an optimizer class (one range)."""
        members = [i for i, c in enumerate(self.optimizer_classes) if c == optimizer_class]
        if not members:
            return Range(0, 0)
        shard = self.layout.shard()
        whole = Range(
            self.layout.parameter(members[0]).start, self.layout.parameter(members[-1]).stop
        )
        overlap = whole.overlap(shard)
        return overlap.shift(-shard.start) if overlap.numel else Range(0, 0)


class Reduction:
    """A reduction under way, in up to three moves.

    Reduce-scatter over the mesh (sum); then the mean is added to what earlier microbatches left;
    and with the step's last reduction the replicas' sums are added up, once.
    """

    def __init__(self, group: ParameterGroup, unsharded: torch.Tensor, *, is_last: bool) -> None:
        self.group = group
        self.is_last = is_last
        self._unsharded: torch.Tensor | None = unsharded  # alive until the collective has read it
        self.bytes = unsharded.numel() * unsharded.element_size()
        self._work: dist.Work | None = None
        if group.mesh.size == 1:
            self._shard = unsharded
        else:
            self._shard = torch.empty(
                group.layout.shard_numel, dtype=unsharded.dtype, device=unsharded.device
            )
            self._work = reduce_scatter_sum(self._shard, unsharded, group.mesh.reduce)

    @property
    def replicated_bytes(self) -> int:
        """Bytes of the shard that replicas add up after this reduction; 0: none."""
        if not self.is_last or self.group.mesh.replicas == 1:
            return 0
        return self._shard.numel() * self._shard.element_size()

    def finish_scatter(self) -> None:
        """Wait for the reduce-scatter, add up, and start the replicas' sum where it is due."""
        self._wait()
        self._unsharded = None
        self.group.accumulate(self._shard)
        if self.replicated_bytes:
            self._work = all_reduce_sum(self.group.accumulated, self.group.mesh.replicate)

    def finish(self) -> None:
        """After :meth:`finish_scatter`: the last reduction of a step leaves ``main_grad``."""
        self._wait()
        if self.is_last:
            self.group.complete_gradient()

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
