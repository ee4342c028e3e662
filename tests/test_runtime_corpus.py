from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.runtime.corpus import STANDARD_LIBRARY, Corpus, load_corpus


def _error(*paths: str, tokenizer: str = "bytes") -> MfsdpError:
    with pytest.raises(MfsdpError) as caught:
        load_corpus(paths, tokenizer)
    return caught.value


def _megatron_pair(prefix: Path, sequences: list[list[int]], dtype: type) -> None:
    from mfsdp_cli.runtime import megatron_on_cpu

    megatron_on_cpu.prepare("cpu")
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequence in sequences:
        builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def test_the_default_is_the_standard_library_without_its_tests() -> None:
    corpus = load_corpus([])
    assert corpus.source == STANDARD_LIBRARY
    assert corpus.tokens.dtype == np.uint8
    assert 2**20 < corpus.tokens.size <= 16 * 2**20
    assert corpus.digest == load_corpus([]).digest
    import tabnanny

    assert Path(tabnanny.__file__).read_bytes() in corpus.tokens.tobytes()


def test_files_are_bytes_in_the_order_given(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "a.txt").write_bytes(b"hello")
    corpus = load_corpus([str(tmp_path / "b.txt"), str(tmp_path / "a.txt")])
    assert corpus.tokens.tobytes() == b"\xff\xfe\x00hello"


def test_a_folder_is_read_in_sorted_order_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in (
        ("sub/z", b"3"),
        ("b", b"2"),
        ("a", b"1"),
        (".hidden", b"x"),
        (".git/c", b"y"),
    ):
        (tmp_path / name).write_bytes(text)
    assert load_corpus([str(tmp_path)]).tokens.tobytes() == b"123"


def test_what_is_no_regular_file_in_a_folder_is_left_out(tmp_path: Path) -> None:
    """Reading a pipe would wait for whoever writes to it."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (tmp_path / "text").write_bytes(b"text")
    assert load_corpus([str(tmp_path)]).tokens.tobytes() == b"text"


def test_what_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    error = _error(str(tmp_path / "absent"))
    assert error.finding.code == "MF503"
    assert "no such file or folder" in error.finding.message
    assert "no files in the folder" in _error(str(tmp_path / "empty")).finding.message
    for impossible in ("", "a" * 5000, "a\0b"):
        assert _error(impossible).finding.message.startswith("no such file or folder")
    assert "'gpt2'" in _error(tokenizer="gpt2").finding.message
    (tmp_path / "text").write_bytes(b"x")
    assert "'gpt2'" in _error(str(tmp_path / "text"), tokenizer="gpt2").finding.message


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_a_megatron_pair_is_one_stream(tmp_path: Path, suffix: str, dtype: type) -> None:
    _megatron_pair(tmp_path / "corpus", [[1, 2, 3], [4, 5], [6]], dtype)
    corpus = load_corpus([str(tmp_path / "corpus") + suffix])
    assert corpus.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert corpus.tokens.dtype == dtype


def test_broken_megatron_pairs_are_named(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    _megatron_pair(prefix, [[1, 2, 3]], np.int32)
    whole = Path(f"{prefix}.idx").read_bytes()
    cases = {
        b"": "begins with b''",
        b"rubbish" * 20: "not b'MMIDIDX",
        whole[:20]: "",
        whole[:9] + struct.pack("<Q", 2) + whole[17:]: "version 2",
        whole[:17] + b"\x06" + whole[18:]: "token type 6",
        whole[:18] + struct.pack("<Q", 10**9) + whole[26:]: "too few for 1000000000 sequences",
    }
    for raw, words in cases.items():
        Path(f"{prefix}.idx").write_bytes(raw)
        error = _error(str(prefix))
        assert error.finding.code == "MF504"
        assert words in error.finding.message
    Path(f"{prefix}.idx").write_bytes(whole)
    Path(f"{prefix}.bin").write_bytes(b"\0" * 8)
    assert "3 tokens of 4 bytes" in _error(str(prefix)).finding.message
    Path(f"{prefix}.bin").unlink()
    assert "corpus.bin is missing" in _error(f"{prefix}.idx").finding.message


def test_text_and_a_megatron_pair_do_not_mix(tmp_path: Path) -> None:
    _megatron_pair(tmp_path / "corpus", [[1]], np.int32)
    (tmp_path / "text").write_bytes(b"x")
    assert (
        "one is a Megatron pair"
        in _error(str(tmp_path / "corpus"), str(tmp_path / "text")).finding.message
    )


def test_the_last_tenth_is_for_evaluation() -> None:
    corpus = Corpus(np.arange(105, dtype=np.uint8), "here")
    assert corpus.training.tolist() == list(range(95))
    assert corpus.evaluation.tolist() == list(range(95, 105))


def test_a_corpus_too_short_for_evaluation_says_how_much_is_needed() -> None:
    corpus = Corpus(np.zeros(169, dtype=np.uint8), "here")
    with pytest.raises(MfsdpError) as caught:
        corpus.check(vocab_size=256, seq_length=16)
    assert caught.value.finding.code == "MF505"
    assert "169 tokens are too few: 16 are for evaluation" in caught.value.finding.message
    Corpus(np.zeros(170, dtype=np.uint8), "here").check(vocab_size=256, seq_length=16)
    with pytest.raises(MfsdpError, match="0 tokens are too few"):
        Corpus(np.zeros(0, dtype=np.uint8), "here").check(vocab_size=256, seq_length=16)


def test_a_token_beyond_the_vocabulary_is_refused() -> None:
    tokens = np.zeros(1000, dtype=np.int32)
    tokens[500] = 256
    with pytest.raises(MfsdpError, match="token id 256 is outside the model's vocabulary of 256"):
        Corpus(tokens, "here").check(vocab_size=256, seq_length=8)


def test_the_digest_is_that_of_dtype_length_and_tokens() -> None:
    tokens = np.array([1, 2], dtype=np.uint16)
    expected = hashlib.sha256(b"<u2/2/\x01\x00\x02\x00").hexdigest()
    assert Corpus(tokens, "here").digest == expected
    assert Corpus(tokens.astype(np.uint8), "here").digest != expected
