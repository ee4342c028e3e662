"""Megatron-Core on a machine without a GPU.

Megatron-Core asks for CUDA by name in a few places: it allocates on
``torch.cuda.current_device()``, writes ``device="cuda"``, calls ``tensor.cuda()``, asks for the
current stream and compares ``tensor.type()`` with ``"torch.cuda.FloatTensor"``. :func:`prepare`
answers for the CPU, and only there; on a GPU it changes nothing.

The fence: Megatron's modules get a copy of the ``torch`` namespace in which exactly these names
answer differently. ``torch`` itself, and so every other user of it, stays as it is but for two
methods that live on the tensor class, ``Tensor.cuda`` (the identity) and ``Tensor.type`` (called
without an argument, it says ``torch.cuda.FloatTensor`` for ``torch.FloatTensor``).

Recomputation keeps and restores the state of CUDA's random numbers, by two functions of
Megatron's own; here they keep an empty state and restore nothing. The CPU's own state Megatron
keeps beside it.

``torch.compile`` is left out of Megatron on the CPU: its fusers would call a C++ compiler for
every small function, once a process.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

_MODULES = (
    "megatron.core.parallel_state",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.transformer.multi_latent_attention",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.tensor_parallel.random",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.models.mimo.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.datasets.indexed_dataset",
)
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "as_tensor")
_LOGGERS = ("megatron", "torch.utils.cpp_extension", "torch.distributed.elastic")
# Megatron's own calls of older torch names, each step; nothing a user can act on.
_KNOWN_WARNINGS = (
    r"`torch\.distributed\.\w+` is deprecated",
    r"The \.grad attribute of a Tensor that is not a leaf",
)
_state = {"prepared": False}


def prepare(device_type: str) -> None:
    """Import Megatron-Core quietly and make it fit the device; call before building anything.

    Args:
        device_type: ``cpu`` or ``cuda``. A second call does nothing; a process stays on the kind
            of device that it began with.
    """
    if _state["prepared"]:
        return
    _state["prepared"] = True
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for pattern in _KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if device_type == "cpu":
            _prepare_for_cpu()
        else:
            _import_modules()


def _import_modules() -> None:
    for name in _MODULES:
        importlib.import_module(name)


def _prepare_for_cpu() -> None:
    if "megatron.core.jit" in sys.modules:
        torch.compiler.set_stance("force_eager")  # it was imported, and compiles, already
        _import_modules()
    else:
        with _without_compile():
            _import_modules()
    answer = _torch_for_cpu()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            setattr(module, "torch", answer)  # noqa: B010 (the type checker knows no such name)
    _leave_out_cuda_randomness()
    _answer_on_tensors()


@contextmanager
def _without_compile() -> Iterator[None]:
    """``torch.compile`` is the identity inside: it decorates functions at import time."""
    compile_ = torch.compile

    def identity(model: Any = None, **_: Any) -> Any:
        return (lambda function: function) if model is None else model

    torch.compile = identity
    try:
        yield
    finally:
        torch.compile = compile_


class _NoStream:
    """Stands for the current stream of a device that has none: everything is in order already."""

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...


def _copy_of(module: ModuleType, **answers: Any) -> ModuleType:
    """A namespace equal to a module's but for some names; lazy names still resolve."""
    copy = ModuleType(module.__name__)
    copy.__dict__.update(module.__dict__)
    copy.__dict__.update(answers)
    copy.__dict__["__getattr__"] = functools.partial(getattr, module)
    return copy


def _torch_for_cpu() -> ModuleType:
    cuda = _copy_of(
        torch.cuda,
        current_device=lambda: torch.device("cpu"),
        current_stream=lambda device=None: _NoStream(),
        synchronize=lambda device=None: None,
    )
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    return _copy_of(torch, cuda=cuda, **factories)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return call


def _leave_out_cuda_randomness() -> None:
    random = importlib.import_module("megatron.core.tensor_parallel.random")

    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_state(*_: Any, **__: Any) -> None:
        # torch would queue the call until CUDA is initialized: one more every time, for good.
        return None

    for name, answer in (("_get_cuda_rng_state", get_state), ("_set_cuda_rng_state", set_state)):
        assert hasattr(random, name), f"Megatron-Core has no {name} any more"
        setattr(random, name, answer)


def _answer_on_tensors() -> None:
    name_of = torch.Tensor.type

    def cuda(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return self

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return name_of(self, dtype, *args, **kwargs)
        return name_of(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.cuda = cuda  # type: ignore[method-assign, assignment]
    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]
