"""Step time of engine mfsdp over engine distopt: same model, batch, ranks, in turn.

    .venv/bin/python tests/bench/bench_engines.py [--rounds 5] [--steps 30] [PLAN FLAGS ...]

Each round trains both engines one after the other, so that a machine whose speed drifts slows
both. A round's figure is the median step time of a run without its first three steps; printed are
the rounds and the median ratio. Below 1 is faster than DistOpt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WARM_UP = 3
ENGINES = ("mfsdp", "distopt")
SIZES = ["--pp", "2", "--vpp", "2", "--world-size", "4", "--gbs", "8", "--seq", "128"]


def mfsdp(*arguments: str) -> None:
    """Run the command; its progress is not shown, its failure is."""
    command = [sys.executable, "-m", "mfsdp_cli", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"{' '.join(command)}\n{result.stderr}")


def measure(plan: Path, engine: str, steps: int, folder: Path) -> tuple[float, int]:
    """Median step time in seconds, and the largest peak memory of a rank in bytes."""
    run = folder / engine
    mfsdp(
        *("train", str(plan), "--engine", engine, "--steps", str(steps)),
        *("--run-dir", str(run), "--overwrite", "--no-tensorboard", "--no-progress"),
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"][WARM_UP:]
    return statistics.median(line["step_time_s"] for line in train), train[-1]["peak_bytes"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--model", default="deepseek-v3-proxy-tiny")
    options, flags = parser.parse_known_args()
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        plan = Path(name, "plan.json")
        mfsdp("plan", options.model, *SIZES, *flags, "--out", str(plan))
        for number in range(1, options.rounds + 1):
            order = ENGINES if number % 2 else ENGINES[::-1]
            figures = {e: measure(plan, e, options.steps, Path(name)) for e in order}
            (mine, mine_bytes), (other, other_bytes) = figures["mfsdp"], figures["distopt"]
            ratios.append(mine / other)
            print(
                f"round {number}: mfsdp {mine:.3f} s, distopt {other:.3f} s, "
                f"ratio {ratios[-1]:.3f}, peak memory ratio {mine_bytes / other_bytes:.3f}",
                flush=True,
            )
    print(f"median ratio of step times, mfsdp / distopt: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
