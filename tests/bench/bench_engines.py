"""Engine mfsdp beside Megatron's distributed optimizer and torch's FSDP2: tokens/s and memory.

    .venv/bin/python tests/bench/bench_engines.py [--rounds 5] [--steps N] [--model M] [--json]

The same Megatron model, initial weights, batches and optimizer settings on 4 gloo ranks, PP 2,
VPP 2, DP 2, fp32. All contenders live at once and take turns, forward and backward through the
list, a few steps a turn, so that a machine whose speed drifts slows all of them; a figure is the
median of the rounds' ratios to DistOpt. Before anything is timed, the losses and norms of the
first steps must agree.

============= ====================================================================================
contender     what it is
============= ====================================================================================
mfsdp         the plan's defaults: two resident chunks, gradients reduced every microbatch
mfsdp-once    gradients reduced once a step, as the two below do
mfsdp-lean    one resident chunk
distopt       Megatron-Core's DistributedDataParallel, distributed optimizer and schedule (ZeRO-1)
torch         fully_shard (ZeRO-3) under torch.distributed.pipelining's ScheduleInterleaved1F1B
============= ====================================================================================

Memory a rank: resident memory at its highest since the engine was built, beyond what the process
had before (activations, transient buffers and the allocator's holes included); and the bytes of
weights, gradients and optimizer state that live between steps, counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contender import Contender, Report

from mfsdp_cli.planning.build import build_plan
from mfsdp_cli.planning.request import PlanRequest

#: Engine and plan settings of each contender.
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mfsdp": ("mfsdp", {}),
    "mfsdp-once": ("mfsdp", {"gradient_reduction": "last"}),
    "mfsdp-lean": ("mfsdp", {"resident_chunks": 1}),
    "distopt": ("distopt", {}),
    "torch": ("torch", {}),
}
BASE = "distopt"
WORLD = 4
CHECKED_STEPS = 3
#: DistOpt sums its norm in fp32; the other engines agree to 1e-7.
TOLERANCE = 1e-5
#: A wider llama-tiny: most of its time is arithmetic, most of llama-tiny's is overhead.
LLAMA_WIDE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 8,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
MODELS = ("llama-wide", "deepseek-v3-proxy-tiny")


@dataclass(frozen=True)
class Batch:
    """Sizes of a step."""

    global_batch_size: int
    micro_batch_size: int
    seq_length: int

    @property
    def tokens(self) -> int:
        return self.global_batch_size * self.seq_length


@dataclass(frozen=True)
class Result:
    """One contender on one model; ratios are medians over rounds against DistOpt."""

    contender: str
    tokens_per_s: float
    speed: float
    slowest: float
    fastest: float
    cpu: float
    peak_bytes: int
    peak: float
    persistent_bytes: int
    persistent: float


def write_plan(model: str, batch: Batch, settings: dict[str, Any], folder: Path) -> Path:
    """The plan of a contender, in a file of its own."""
    if model == "llama-wide":
        config = folder / "config.json"
        config.write_text(json.dumps(LLAMA_WIDE))
        model = str(config)
    sizes = {
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
        "world_size": WORLD,
        **asdict(batch),
    }
    plan = build_plan(PlanRequest(model, sizes=sizes, settings=settings))
    path = folder / f"{'-'.join(['plan', *map(str, settings.values())])}.json"
    path.write_text(json.dumps(plan.document))
    return path


def check(first: dict[str, list[Report]]) -> None:
    """Refuse to time engines that do not compute the same."""
    expected = first[BASE][0]
    for name, reports in first.items():
        for kind in ("losses", "norms"):
            pairs = zip(getattr(reports[0], kind), getattr(expected, kind), strict=True)
            worst = max(abs(mine - other) / other for mine, other in pairs)
            if worst > TOLERANCE:
                sys.exit(f"{name}: {kind} of the first steps differ from {BASE}'s by {worst:.1e}")


def measure(
    contenders: dict[str, Contender], rounds: int, steps: int
) -> dict[str, list[list[Report]]]:
    """Reports by contender, round and rank; every other round goes backwards."""
    turns: dict[str, list[list[Report]]] = {name: [] for name in contenders}
    for number in range(rounds):
        order = list(contenders)[:: -1 if number % 2 else 1]
        for name in order:
            turns[name].append(contenders[name].run(steps))
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return turns


def judge(turns: dict[str, list[list[Report]]], step_tokens: int, steps: int) -> list[Result]:
    """The figures of every contender."""
    seconds = {name: [of[0].seconds for of in rounds] for name, rounds in turns.items()}
    cpu = {
        name: [sum(r.cpu_seconds for r in of) for of in rounds] for name, rounds in turns.items()
    }
    peak = {name: max(r.peak_bytes for r in rounds[-1]) for name, rounds in turns.items()}
    counted = {name: max(r.persistent_bytes for r in rounds[-1]) for name, rounds in turns.items()}

    def ratios(of: dict[str, list[float]], name: str) -> list[float]:
        return [a / b for a, b in zip(of[name], of[BASE], strict=True)]

    return [
        Result(
            contender=name,
            tokens_per_s=steps * step_tokens / statistics.median(seconds[name]),
            speed=1 / statistics.median(ratios(seconds, name)),
            slowest=1 / max(ratios(seconds, name)),
            fastest=1 / min(ratios(seconds, name)),
            cpu=statistics.median(ratios(cpu, name)),
            peak_bytes=peak[name],
            peak=peak[name] / peak[BASE],
            persistent_bytes=counted[name],
            persistent=counted[name] / counted[BASE],
        )
        for name in turns
    ]


def table(results: list[Result]) -> str:
    """The figures as text, ratios to DistOpt."""
    lines = [
        f"{'contender':12} {'tokens/s':>9} {'ratio':>6} {'(rounds)':>14} {'cpu':>6} "
        f"{'peak MiB':>9} {'ratio':>6} {'kept MiB':>9} {'ratio':>6}"
    ]
    for r in results:
        rounds = f"({r.slowest:.2f} - {r.fastest:.2f})"
        lines.append(
            f"{r.contender:12} {r.tokens_per_s:9.0f} {r.speed:6.3f} {rounds:>14} {r.cpu:6.3f} "
            f"{r.peak_bytes / 2**20:9.1f} {r.peak:6.3f} "
            f"{r.persistent_bytes / 2**20:9.1f} {r.persistent:6.3f}"
        )
    return "\n".join(lines)


def bench(model: str, batch: Batch, names: list[str], rounds: int, steps: int) -> list[Result]:
    """Start all contenders on a model, check them, and let them take turns."""
    contenders: dict[str, Contender] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                engine, settings = CONTENDERS[name]
                plan = write_plan(model, batch, settings, Path(folder))
                contenders[name] = Contender(engine, plan, WORLD)
        check({name: contender.run(CHECKED_STEPS) for name, contender in contenders.items()})
        return judge(measure(contenders, rounds, steps), batch.tokens, steps)
    finally:
        for contender in contenders.values():
            contender.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", action="append", help=f"a preset or {MODELS[0]}; may be repeated"
    )
    parser.add_argument("--contender", action="append", choices=CONTENDERS, help=f"beside {BASE}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    parser.add_argument("--gbs", type=int, default=8)
    parser.add_argument("--mbs", type=int, default=1)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    batch = Batch(options.gbs, options.mbs, options.seq)
    names = [n for n in CONTENDERS if n == BASE or n in (options.contender or CONTENDERS)]
    measured = {
        model: bench(model, batch, names, options.rounds, options.steps)
        for model in options.model or MODELS
    }
    load = os.getloadavg()[1]
    if options.json:
        document = {model: [asdict(r) for r in results] for model, results in measured.items()}
        print(json.dumps({"load": load, "batch": asdict(batch), "models": document}, indent=1))
        return
    for model, results in measured.items():
        print(f"{model}: {batch.global_batch_size} x {batch.seq_length} tokens a step")
        print(table(results), end="\n\n")
    print(
        f"ratios: medians of {options.rounds} rounds to {BASE}; the machine's load was {load:.1f}"
    )


if __name__ == "__main__":
    main()
