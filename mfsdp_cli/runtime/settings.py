"""What a training run is told, whatever its engine. Knows no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TrainSettings:
    """The settings of a run; defaults are the contract's.

    Args:
        steps: optimizer steps.
        eval_interval: evaluate after every so many steps; 0: never.
        eval_steps: global batches of an evaluation.
        seed: weights and the order of samples.
        lr: learning rate after warm-up; it stays constant.
        lr_warmup_steps: steps of linear warm-up; 0: none.
        clip_grad: largest norm of the gradient; 0: no clipping.
        precision: ``fp32``, or ``bf16`` for compute with fp32 main weights and gradients.
        calculate_per_token_loss: weigh microbatches by their valid tokens, not all alike.
        eod_mask_loss: leave positions at the end of a document out of the loss.
        trace: record what is executed.
        keep_gradients: keep a step's gradients as they are before clipping, for
            ``named_gradients`` (numeric validation; costs a copy).
        observe: record what every layer takes and gives, for ``observed``.
    """

    steps: int = 100
    eval_interval: int = 0
    eval_steps: int = 8
    seed: int = 1234
    lr: float = 1e-3
    lr_warmup_steps: int = 10
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    precision: str = "fp32"
    calculate_per_token_loss: bool = False
    eod_mask_loss: bool = False
    trace: bool = False
    keep_gradients: bool = False
    observe: bool = False

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step (counted from 1); the same formula in every engine."""
        if self.lr_warmup_steps == 0:
            return self.lr
        return self.lr * min(1.0, step / self.lr_warmup_steps)

    def clip_coefficient(self, norm: float) -> float:
        """What gradients are multiplied with, Megatron-Core's formula; 1 where nothing is cut."""
        if self.clip_grad <= 0:
            return 1.0
        return min(1.0, self.clip_grad / (norm + 1e-6))

    def decays(self, name: str, dimensions: int) -> bool:
        """Whether weight decay applies to a parameter: not to biases, not to one dimension."""
        return dimensions > 1 and not name.endswith(".bias")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
