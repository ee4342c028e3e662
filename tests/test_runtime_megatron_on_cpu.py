from __future__ import annotations

import subprocess
import sys

import torch

from tests.helpers.alone import alone

_SCRIPT = """
import sys, warnings
import torch
before = {name: getattr(torch.cuda, name) for name in ("current_device", "current_stream")}
zeros, compile_ = torch.zeros, torch.compile
from mfsdp_cli.runtime import megatron_on_cpu
megatron_on_cpu.prepare(sys.argv[1])
import megatron.core.pipeline_parallel.schedules as schedules
same = torch.zeros is zeros and torch.compile is compile_ and all(
    getattr(torch.cuda, name) is value for name, value in before.items()
)
cuda = getattr(torch.Tensor.cuda, "__module__", None)
print(same, schedules.torch is torch, cuda, "torch._dynamo" in sys.modules)
"""


def _run(device: str) -> tuple[list[str], str]:
    result = subprocess.run(
        [sys.executable, "-c", _SCRIPT, device],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return result.stdout.split(), result.stderr


def test_on_the_cpu_only_megatrons_own_view_of_torch_changes_and_nothing_is_said() -> None:
    answer, said = _run("cpu")
    assert answer[:3] == ["True", "False", "mfsdp_cli.runtime.megatron_on_cpu"]
    assert answer[3] == "False", "torch.compile was set up for functions that run uncompiled"
    assert said == ""


def test_on_a_gpu_nothing_changes() -> None:
    answer, said = _run("cuda")
    assert answer[0] == "True"
    assert answer[1] == "True"
    assert answer[2] != "mfsdp_cli.runtime.megatron_on_cpu"
    assert said == ""


def test_megatron_sees_the_cpu_where_it_asks_for_cuda() -> None:
    alone()
    from megatron.core.pipeline_parallel import schedules

    seen = schedules.torch
    assert seen.cuda.current_device() == torch.device("cpu")
    assert seen.zeros(2, device="cuda").device == torch.device("cpu")
    assert seen.tensor([1.0], device=seen.cuda.current_device()).device == torch.device("cpu")
    assert seen.nn is torch.nn
    assert seen.distributed is torch.distributed
    seen.cuda.current_stream().wait_event(None)
    seen.cuda.synchronize()


def test_tensors_answer_for_cuda_by_name_and_stay_where_they_are() -> None:
    alone()
    value = torch.ones(2)
    assert value.cuda() is value
    assert value.type() == "torch.cuda.FloatTensor"
    assert value.bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert value.type(torch.int64).dtype == torch.int64
