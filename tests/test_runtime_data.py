from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.runtime.corpus import Corpus
from mfsdp_cli.runtime.data import Data

SEQUENCE = 4


def _data(**changes: Any) -> Data:
    # 1000 tokens of distinct values: 900 for training (224 windows), 100 for evaluation (24).
    values: dict[str, Any] = {
        "vocab_size": 1000,
        "seq_length": SEQUENCE,
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "seed": 5,
    }
    return Data(Corpus(np.arange(1000, dtype=np.int32), "here"), **{**values, **changes})


def _step(data: Data, step: int, kind: str = "training") -> list[int]:
    batches = [getattr(data, kind)(step, index) for index in range(data.microbatches)]
    return torch.cat([batch.tokens[:, 0] for batch in batches]).tolist()


def test_labels_are_the_next_tokens_and_positions_count() -> None:
    batch = _data(micro_batch_size=2).training(3, 1)
    assert batch.tokens.shape == batch.labels.shape == batch.position_ids.shape == (2, SEQUENCE)
    assert torch.equal(batch.labels, batch.tokens + 1)
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.tokens.dtype == torch.int64


def test_a_steps_global_batch_does_not_depend_on_the_micro_batch_size() -> None:
    for step in (1, 2, 40):
        assert _step(_data(), step) == _step(_data(micro_batch_size=4), step)


def test_an_epoch_holds_each_window_once_and_epochs_differ() -> None:
    data = _data()
    epochs = [
        sorted(token for step in range(1, 29) for token in _step(data, epoch * 28 + step))
        for epoch in range(2)
    ]
    assert epochs[0] == epochs[1] == [SEQUENCE * window for window in range(224)]
    assert _step(data, 1) != _step(data, 29)


def test_the_seed_decides_the_order_of_training_alone() -> None:
    assert _step(_data(), 1) != _step(_data(seed=6), 1)
    assert _step(_data(), 1, "evaluation") == _step(_data(seed=6), 1, "evaluation")


def test_evaluation_reads_the_last_tenth_and_training_never_does() -> None:
    data = _data()
    evaluated = [token for step in (1, 2, 3) for token in _step(data, step, "evaluation")]
    assert sorted(evaluated) == [900 + SEQUENCE * window for window in range(24)]
    trained = [data.training(step, i).labels.max() for step in range(1, 60) for i in range(8)]
    assert max(trained) <= 899


def test_evaluation_is_one_sequence_whatever_the_batch() -> None:
    small = _data(global_batch_size=2)
    tokens = [token for step in (1, 2, 3, 4) for token in _step(small, step, "evaluation")]
    assert tokens == _step(_data(), 1, "evaluation")


def test_a_token_beyond_the_vocabulary_is_refused_before_anything_runs() -> None:
    with pytest.raises(MfsdpError, match="token id 999"):
        _data(vocab_size=999)
