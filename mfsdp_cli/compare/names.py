"""What a logged name means: training loss, evaluation loss, or neither.

MTP losses, load balancing, perplexity, test sets and curves over samples are never taken for
one of the two losses.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a name stands for."""

    TRAIN = "train"
    EVAL = "eval"
    OTHER = "other"


EVAL_WORDS = frozenset({"val", "valid", "validation", "validate", "eval", "evaluation", "dev"})
TEST_WORDS = frozenset({"test", "testing"})
TRAIN_WORDS = frozenset({"train", "training"})

#: Words that make a loss another one than the language-model loss over steps.
_OTHER_WORDS = TEST_WORDS | {
    *("mtp", "aux", "auxiliary", "balance", "balancing", "router", "z", "scale", "scaler"),
    *("ppl", "perplexity", "vs", "max", "min", "std", "time", "count", "indexer", "number"),
}

#: Known names in the order in which they are believed. Written in the form of `normal`.
_TRAIN_NAMES = (
    *("lm loss", "train lm loss", "loss", "train loss", "training loss", "loss train"),
    *("reduced train loss", "loss metrics global avg loss"),
)
_EVAL_NAMES = (
    *("lm loss validation", "validation loss", "val loss", "eval loss", "valid loss"),
    *("evaluation loss", "dev loss", "loss validation", "loss val", "loss eval"),
    *("validation lm loss", "val lm loss", "eval lm loss", "validation metrics loss"),
)

GRAD_NORMS = frozenset({"grad norm", "gradient norm", "train grad norm", "global grad norm"})
STEPS = (
    *("global step", "train global step", "trainer global step", "global step max steps"),
    *("iteration", "iter", "train step", "current step", "step"),
)
SAMPLES = frozenset({"consumed samples", "consumed train samples", "samples", "num samples"})
TOKENS = frozenset({"tokens", "consumed tokens", "num tokens", "total tokens", "tokens seen"})
BATCH_SIZES = frozenset({"global batch size", "batch size", "gbs", "global train batch size"})

#: What `--metric` also takes, whatever the logger calls it.
_TRAIN_ALIASES = frozenset({"loss", "train", "training", "train loss", "training loss"})
_EVAL_ALIASES = frozenset({"validation", "eval", "val loss", "validation loss", "eval loss"})


@functools.lru_cache(maxsize=4096)
def normal(name: str) -> str:
    """The name in lower case, every separator one space: ``train/grad-norm`` is one with
    ``train_grad norm``."""
    return re.sub(r"[\W_]+", " ", name.lower()).strip()


@functools.lru_cache(maxsize=4096)
def role(name: str) -> Role:
    """What the name stands for, from its words."""
    words = normal(name).split()
    if "loss" not in words and not any(word.endswith("loss") for word in words):
        return Role.OTHER
    if _OTHER_WORDS.intersection(words):
        return Role.OTHER
    return Role.EVAL if EVAL_WORDS.intersection(words) else Role.TRAIN


@dataclass(frozen=True)
class Choice:
    """Which name was taken for a role; ``rivals`` where none could be preferred."""

    name: str | None = None
    rivals: tuple[str, ...] = ()


def choose(names: Iterable[str], wanted: Role) -> Choice:
    """The name to take for a role: the best known one, else the only one of that role."""
    known = _EVAL_NAMES if wanted is Role.EVAL else _TRAIN_NAMES
    candidates = [name for name in names if role(name) is wanted]
    ranked = [name for name in candidates if normal(name) in known]
    if ranked:
        return Choice(min(ranked, key=lambda name: known.index(normal(name))))
    if len(candidates) == 1:
        return Choice(candidates[0])
    return Choice(rivals=tuple(candidates))


def alias(metric: str) -> Role | None:
    """The role that a metric asked for means in every logger, or None."""
    if normal(metric) in _TRAIN_ALIASES:
        return Role.TRAIN
    return Role.EVAL if normal(metric) in _EVAL_ALIASES else None


def same_name(metric: str, names: Collection[str]) -> str | None:
    """The logged name that a metric asked for means: the exact one, else one but for separators."""
    if metric in names:
        return metric
    return next((name for name in sorted(names) if normal(name) == normal(metric)), None)
