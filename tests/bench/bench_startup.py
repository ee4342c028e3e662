"""Wall time of commands that must answer at once, against an import of torch.

.venv/bin/python tests/bench/bench_startup.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

DEEPSEEK = ["plan", "deepseek-v3", "--pp", "16", "--vpp", "2", "--layout", "Et*3|(tt|)*29,m|L"]
COMMANDS = {
    "mfsdp --help": ["-m", "mfsdp_cli", "--help"],
    "mfsdp plan deepseek-v3 (no search)": ["-m", "mfsdp_cli", *DEEPSEEK],
    "mfsdp plan deepseek-v3 --json": ["-m", "mfsdp_cli", *DEEPSEEK, "--json"],
    "import torch": ["-c", "import torch"],
}


def seconds(arguments: list[str]) -> float:
    """Wall time of one run of this interpreter, as it runs where it is installed."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
        env=environment,
    )
    return time.perf_counter() - began


def main() -> None:
    """Measure all commands in turn and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    for arguments in COMMANDS.values():
        seconds(arguments)  # warm-up: byte code, file cache
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, arguments in COMMANDS.items():
            times[name].append(seconds(arguments))
    torch = statistics.median(times["import torch"])
    for name, measured in times.items():
        median = statistics.median(measured)
        print(
            f"{name:36} median {median:.3f} s (min {min(measured):.3f}, max {max(measured):.3f}), "
            f"{median / torch:.2f} of an import of torch"
        )


if __name__ == "__main__":
    main()
