"""Batches from a corpus: which tokens a microbatch of a step holds.

The corpus is cut once: the first nine tenths are trained on, the last tenth is for evaluation
only. Both parts are cut into windows of ``seq_length`` tokens, each with the token after it as
the last label. Sample ``n`` of a run (counted from 0 over all steps) is window ``n`` of an order
that depends on the seed and the epoch alone, each window once an epoch::

    n = (step - 1) * global_batch_size + index * micro_batch_size + j
    index = microbatch * dp + dp_rank

so every layout sees the same global batch in a step. Evaluation reads a fixed order that depends
on nothing but the data, so losses of any two runs on it can be compared.

With ``eod_mask_loss`` a position does not count where its token ends a document: what follows is
the beginning of another one, which nothing before it foretells. It is Megatron's mask, which looks
for the end-of-document token, without the need to know which token that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from mfsdp_cli.runtime.corpus import Corpus, Tokens


@dataclass(frozen=True)
class Batch:
    """One microbatch: tokens, labels and positions, (micro_batch_size, seq_length), int64.

    Args:
        loss_mask: 1 where the loss of a position counts, else 0; the same shape, fp32.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    loss_mask: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The batch on a device; a GPU copies it while the host goes on."""
        tensors = (self.tokens, self.labels, self.position_ids, self.loss_mask)
        return Batch(*(_on(tensor, device) for tensor in tensors))


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        tensor = tensor.contiguous().pin_memory()  # else the host waits for the copy
    return tensor.to(device, non_blocking=True)


class Data:
    """The microbatches of a run.

    Args:
        vocab_size: token ids must stay below it.
        seed: decides the order of training windows.
        eod_mask_loss: leave positions at the end of a document out of the loss.

    Raises:
        MfsdpError: MF505 where the corpus is too short, MF506 for a token beyond the vocabulary.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        vocab_size: int,
        seq_length: int,
        micro_batch_size: int,
        global_batch_size: int,
        seed: int,
        eod_mask_loss: bool = False,
    ) -> None:
        self.corpus = corpus
        self.vocab_size = vocab_size
        self.seq_length = seq_length
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.eod_mask_loss = eod_mask_loss
        corpus.check(vocab_size=vocab_size, seq_length=seq_length)
        self._training = corpus.training
        self._evaluation = corpus.evaluation
        self._order = lru_cache(maxsize=2)(self._shuffled)

    @property
    def microbatches(self) -> int:
        """Microbatches of a global batch, all data-parallel ranks together."""
        return self.global_batch_size // self.micro_batch_size

    def training(self, step: int, index: int) -> Batch:
        """Microbatch ``index`` (microbatch * dp + dp_rank) of a step (counted from 1)."""
        first = (step - 1) * self.global_batch_size + index * self.micro_batch_size
        windows = self._windows(self._training)
        starts = []
        for sample in range(first, first + self.micro_batch_size):
            epoch, position = divmod(sample, windows)
            starts.append(int(self._order(windows, epoch)[position]) * self.seq_length)
        return self._batch(self._training, 0, starts)

    def evaluation(self, step: int, index: int) -> Batch:
        """Microbatch ``index`` of an evaluation step (counted from 1)."""
        first = (step - 1) * self.global_batch_size + index * self.micro_batch_size
        windows = self._windows(self._evaluation)
        order = self._evaluation_order(windows)
        samples = range(first, first + self.micro_batch_size)
        starts = [int(order[sample % windows]) * self.seq_length for sample in samples]
        return self._batch(self._evaluation, self.corpus.evaluation_start, starts)

    def _windows(self, tokens: Tokens) -> int:
        return (tokens.size - 1) // self.seq_length

    def _shuffled(self, windows: int, epoch: int) -> Tokens:
        return np.random.default_rng([self.seed, epoch]).permutation(windows)

    @staticmethod
    @lru_cache(maxsize=2)
    def _evaluation_order(windows: int) -> Tokens:
        return np.random.default_rng(0).permutation(windows)

    def _batch(self, part: Tokens, offset: int, starts: list[int]) -> Batch:
        """The windows of a part of the corpus, which begins at ``offset`` in it."""
        rows = np.stack([part[start : start + self.seq_length + 1] for start in starts])
        rows = rows.astype(np.int64)
        for token in (int(rows.min()), int(rows.max())):
            self.corpus.check_token(token, self.vocab_size)
        sequences = torch.from_numpy(rows)
        positions = torch.arange(self.seq_length).expand(len(starts), -1)
        mask = torch.ones(positions.shape)
        if self.eod_mask_loss:
            for row, start in enumerate(starts):
                first = offset + start
                ends = self.corpus.ends_within(first, first + self.seq_length)
                mask[row, torch.from_numpy(ends)] = 0.0
        return Batch(sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous(), positions, mask)
