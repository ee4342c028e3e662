"""``fully_shard``: turn a module into a unit of the surrounding context.

Parameters of modules that are wrapped already stay with those; the rest become this unit's. Wrap
from the inside out: layers first, the chunk last.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn

from mfsdp_cli.fsdp.context import Context, current_context
from mfsdp_cli.fsdp.mesh import ShardMesh
from mfsdp_cli.fsdp.parameter_group import DECAY, NO_DECAY, ParameterGroup
from mfsdp_cli.fsdp.unit import Unit, tensors_in

OptimizerClass = Callable[[str, nn.Parameter], str]
_ATTRIBUTE = "_mfsdp_unit"
_CONTEXT = "_mfsdp_context"


def megatron_optimizer_class(name: str, parameter: nn.Parameter) -> str:
    """Megatron-Core's rule: no weight decay on one-dimensional parameters and biases."""
    return NO_DECAY if parameter.ndim == 1 or name.endswith(".bias") else DECAY


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that wraps a module, if any."""
    return getattr(module, _ATTRIBUTE, None)


def context_of(module: nn.Module) -> Context | None:
    """The context in which a module was wrapped; None where it was not."""
    return getattr(module, _CONTEXT, None)


def fully_shard(
    module: nn.Module,
    mesh: ShardMesh,
    *,
    name: str = "",
    optimizer_class: OptimizerClass = megatron_optimizer_class,
    compute_dtype: torch.dtype | None = None,
    gradient_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Shard the module's own parameters over the mesh and gather them around its calls.

    Args:
        module: changed in place and returned; its parameters live on the context's device.
        name: how the unit is called in events and errors (default: the class name).
        optimizer_class: which optimizer setting a parameter takes, by name within the module:
            ``decay`` or ``no_decay``.
        compute_dtype: dtype of the gathered weights; default: the parameters' own.
        gradient_dtype: dtype in which sharded gradients are kept; default: the parameters' own.
            They are added up over microbatches in the parameters' dtype whatever it is.

    Raises:
        RuntimeError: outside of a :func:`fully_shard_context` scope.
        ValueError: the module is wrapped already, a parameter is on another device, has no
            known optimizer setting, or belongs to a unit beside this module.
    """
    context = current_context()
    name = name or type(module).__name__
    if unit_of(module) is not None:
        raise ValueError(f"Expected {name} to be wrapped once, got a second fully_shard of it")
    groups = [
        _make_group(members, mesh, optimizer_class, (compute_dtype, gradient_dtype), context)
        for members in _by_kind(_own_parameters(module, name, context))
    ]
    unit = Unit(context.next_index(), name, module, groups)
    setattr(module, _ATTRIBUTE, unit)
    setattr(module, _CONTEXT, context)
    context.add(unit)
    _hook_module(module, unit, context)
    _hook_gradients(unit, context)
    return module


def _own_parameters(
    module: nn.Module, unit_name: str, context: Context
) -> list[tuple[str, nn.Parameter]]:
    """Parameters below the module that no wrapped module below it has taken, each once."""
    below = [unit for part in module.modules() if (unit := unit_of(part)) is not None]
    taken = _parameters_of(below)
    own = [(name, p) for name, p in module.named_parameters() if id(p) not in taken]
    elsewhere = _parameters_of(context.units)
    for name, parameter in own:
        if id(parameter) in elsewhere:
            raise ValueError(
                f"Expected parameter {name} of {unit_name} in one unit, but another holds it; "
                "leave it to a module that contains both users"
            )
    return own


def _parameters_of(units: Iterable[Unit]) -> set[int]:
    return {id(p) for unit in units for group in unit.groups for p in group.parameters}


def _by_kind(
    parameters: Iterable[tuple[str, nn.Parameter]],
) -> list[list[tuple[str, nn.Parameter]]]:
    kinds: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.requires_grad), []).append((name, parameter))
    return list(kinds.values())


def _make_group(
    members: list[tuple[str, nn.Parameter]],
    mesh: ShardMesh,
    optimizer_class: OptimizerClass,
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
    context: Context,
) -> ParameterGroup:
    for name, parameter in members:
        if parameter.device.type != context.device.type:
            raise ValueError(
                f"Expected parameter {name} on {context.device}, got {parameter.device}"
            )
    classes = {name: optimizer_class(name, parameter) for name, parameter in members}
    for name, kind in classes.items():
        if kind not in (DECAY, NO_DECAY):
            raise ValueError(
                f"Expected {DECAY!r} or {NO_DECAY!r} as the class of {name}, got {kind!r}"
            )
    # One optimizer class next to the other, so that each is one slice of every shard.
    members = sorted(members, key=lambda member: classes[member[0]])
    return ParameterGroup(
        names=[name for name, _ in members],
        parameters=[parameter for _, parameter in members],
        optimizer_classes=[classes[name] for name, _ in members],
        mesh=mesh,
        compute_dtype=dtypes[0],
        gradient_dtype=dtypes[1],
    )


def _hook_module(module: nn.Module, unit: Unit, context: Context) -> None:
    unit_ref = weakref.ref(unit)

    def before(_module: nn.Module, _args: object, _kwargs: object) -> None:
        if (alive := unit_ref()) is not None:
            context.before_forward(alive)

    def after(_module: nn.Module, _args: object, output: object) -> None:
        if (alive := unit_ref()) is None:
            return
        context.after_forward(alive)
        if torch.is_grad_enabled():
            _hook_outputs(output, alive, context)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def _hook_outputs(output: object, unit: Unit, context: Context) -> None:
    # The hook sits on the tensor, not on the module: a module's full-backward hook would turn the
    # output into a view, and a pipeline stage that frees its output would free nothing.
    unit_ref = weakref.ref(unit)

    def before_backward(_gradient: torch.Tensor) -> None:
        if (alive := unit_ref()) is not None:
            context.before_backward(alive)

    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(before_backward)


def _hook_gradients(unit: Unit, context: Context) -> None:
    unit_ref = weakref.ref(unit)

    def arrived(_parameter: torch.Tensor) -> None:
        if (alive := unit_ref()) is not None:
            context.gradient_arrived(alive)

    for group in unit.groups:
        if group.requires_grad:
            for parameter in group.parameters:
                parameter.register_post_accumulate_grad_hook(arrived)
