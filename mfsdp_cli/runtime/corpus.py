"""Where tokens come from: text files as bytes, the standard library's source, Megatron's pairs.

A corpus is one stream of tokens that knows where its documents end. How it is cut into batches is
:mod:`mfsdp_cli.runtime.data`.
Knows no torch.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mfsdp_cli.errors import MfsdpError

STANDARD_LIBRARY = "the Python standard library's source"
TOKENIZERS = ("bytes",)
_TEXT_LIMIT = 16 * 2**20
_NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
EVALUATION_SHARE = 10
_CHECKED_AT_ONCE = 64 * 2**20
_HASHED_WHOLE = 256 * 2**20
_PIECE = 2**20
_PIECES = 64

Tokens = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Corpus:
    """A stream of tokens and where it came from.

    Args:
        tokens: one dimension, an integer dtype; may be a memory map.
        document_ends: where the last token of each document is, ascending: of each file, or of
            each document of a Megatron pair (its end-of-document token, where it has one).
    """

    tokens: Tokens
    source: str
    document_ends: Tokens = field(default_factory=lambda: np.zeros(0, np.int64))

    @cached_property
    def digest(self) -> str:
        """sha256 of dtype, length and tokens; of 64 pieces of 1 MiB beyond 256 MiB."""
        digest = hashlib.sha256(f"{self.tokens.dtype.str}/{self.tokens.size}/".encode())
        raw = self.tokens.view(np.uint8)
        if raw.size <= _HASHED_WHOLE:
            digest.update(raw.data)
        else:
            for start in np.linspace(0, raw.size - _PIECE, _PIECES, dtype=np.int64):
                digest.update(raw[start : start + _PIECE].data)
        return digest.hexdigest()

    def largest_token(self) -> int:
        """The largest token id (reads everything once)."""
        return max(int(self.tokens[start : start + 2**24].max()) for start in self._starts())

    def _starts(self) -> range:
        return range(0, self.tokens.size, 2**24)

    @property
    def evaluation_start(self) -> int:
        """Where the tokens for evaluation begin."""
        return self.tokens.size - self.tokens.size // EVALUATION_SHARE

    @property
    def training(self) -> Tokens:
        """The tokens that are trained on."""
        return self.tokens[: self.evaluation_start]

    @property
    def evaluation(self) -> Tokens:
        """The last tenth, for evaluation only."""
        return self.tokens[self.evaluation_start :]

    def ends_within(self, start: int, stop: int) -> Tokens:
        """Which of the tokens ``start .. stop - 1`` end a document, counted from ``start``."""
        first, last = np.searchsorted(self.document_ends, [start, stop])
        return self.document_ends[first:last] - start

    def cut_at(self, token: int) -> Corpus:
        """The same tokens, with a document that ends at every occurrence of ``token``."""
        return replace(self, document_ends=np.flatnonzero(self.tokens == token))

    def check(self, *, vocab_size: int, seq_length: int) -> None:
        """Raise MF505 where it is too short for one sequence in each part, MF506 for a token
        beyond the vocabulary (a very large corpus is checked batch by batch instead)."""
        for part, name in ((self.training, "training"), (self.evaluation, "evaluation")):
            if part.size < seq_length + 1:
                raise MfsdpError(
                    "MF505",
                    f"{self.tokens.size} tokens are too few: {part.size} are for {name} and one"
                    f" sequence of --seq-length {seq_length} needs {seq_length + 1}",
                    where=f"--data {self.source}",
                    hint=f"give at least {(seq_length + 1) * EVALUATION_SHARE} tokens, or plan"
                    " with a smaller --seq-length",
                )
        if self.tokens.size <= _CHECKED_AT_ONCE:
            self.check_token(self.largest_token(), vocab_size)

    def check_token(self, token: int, vocab_size: int) -> None:
        """Raise MF506 where a token is outside the vocabulary."""
        if not 0 <= token < vocab_size:
            raise MfsdpError(
                "MF506",
                f"token id {token} is outside the model's vocabulary of {vocab_size}",
                where=f"--data {self.source}",
                hint="train on data made with the model's own tokenizer",
            )


def load_corpus(paths: Sequence[str], tokenizer: str = "bytes") -> Corpus:
    """Read the tokens that ``--data`` names; none named: the standard library's source.

    Args:
        paths: text files and folders (read in this order, a folder's files sorted), or one prefix
            of a Megatron ``.bin``/``.idx`` pair.

    Raises:
        MfsdpError: MF503 where nothing can be read, MF504 for a broken Megatron pair.
    """
    if tokenizer not in TOKENIZERS:
        raise MfsdpError(
            "MF503",
            f"unknown tokenizer {tokenizer!r}",
            where="--tokenizer",
            hint=f"one of {', '.join(TOKENIZERS)}; other tokenizers: prepare a Megatron .bin/.idx",
        )
    if not paths:
        return _text_corpus(_standard_library(), _TEXT_LIMIT, STANDARD_LIBRARY)
    prefixes = [prefix for path in paths if (prefix := megatron_prefix(path)) is not None]
    if prefixes and len(paths) > 1:
        raise MfsdpError(
            "MF503",
            f"{len(paths)} data sources were given and one is a Megatron pair: {prefixes[0]}",
            hint="give the one .bin/.idx prefix, or text files and folders",
        )
    if prefixes:
        return _megatron_corpus(prefixes[0])
    files = [file for path in paths for file in _text_files(path)]
    return _text_corpus(files, None, ", ".join(paths))


def megatron_prefix(path: str) -> Path | None:
    """The prefix of a Megatron pair that a path names (with or without suffix); None: no pair."""
    prefix = path[:-4] if path.endswith((".bin", ".idx")) else path
    pair = [prefix + suffix for suffix in (".bin", ".idx")]
    if all(os.path.isfile(file) for file in pair):
        return Path(prefix)
    if path.endswith((".bin", ".idx")) and any(os.path.isfile(file) for file in pair):
        missing = next(file for file in pair if not os.path.isfile(file))
        raise MfsdpError(
            "MF504", f"half of a Megatron pair: {missing} is missing", where=f"--data {path}"
        )
    return None


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return [file for file in _walk(root) if file.suffix == ".py"]


def _text_files(path: str) -> list[Path]:
    if os.path.isdir(path):
        files = list(_walk(Path(path)))
        if not files:
            raise MfsdpError("MF503", f"no files in the folder {path}", where=f"--data {path}")
        return files
    if not os.path.isfile(path):
        raise MfsdpError("MF503", f"no such file or folder: {path}", where=f"--data {path}")
    return [Path(path)]


def _walk(root: Path) -> Iterator[Path]:
    """All regular files below a folder by relative path, without hidden ones, caches and tests."""
    found: list[Path] = []
    for folder, names, files in os.walk(root):
        names[:] = [n for n in names if n not in _NOT_SOURCE and not n.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    found = [file for file in found if file.is_file()]  # a pipe would be waited for
    yield from sorted(found, key=lambda file: file.relative_to(root).parts)


def _text_corpus(files: Sequence[Path], limit: int | None, source: str) -> Corpus:
    """The bytes of the files one after another, each a document; whole files up to the limit."""
    parts: list[bytes] = []
    total = 0
    for file in files:
        try:
            part = file.read_bytes()
        except OSError as error:
            raise MfsdpError(
                "MF503", f"cannot read {file}: {error.strerror}", where=f"--data {file}"
            ) from error
        if limit is not None and total + len(part) > limit:
            break
        parts.append(part)
        total += len(part)
    tokens = np.frombuffer(b"".join(parts), dtype=np.uint8)
    return Corpus(tokens, source, _ends([len(part) for part in parts]))


def _ends(lengths: Sequence[int] | Tokens) -> Tokens:
    """The last token of each document, by the documents' lengths; empty ones have none."""
    sizes = np.asarray(lengths, np.int64)
    return np.cumsum(sizes)[sizes > 0] - 1


def _megatron_corpus(prefix: Path) -> Corpus:
    """Map the tokens of a Megatron pair: all its documents, one after another."""
    where = f"--data {prefix}"
    try:
        dtype, lengths = _read_index(Path(f"{prefix}.idx").read_bytes())
    except (ValueError, struct.error, OSError) as error:
        raise MfsdpError("MF504", f"not a Megatron .idx file: {error}", where=where) from error
    size, expected = Path(f"{prefix}.bin").stat().st_size, int(lengths.sum())
    if size != expected * dtype.itemsize:
        raise MfsdpError(
            "MF504",
            f"the .idx file speaks of {expected} tokens of {dtype.itemsize} bytes and the .bin"
            f" file holds {size} bytes",
            where=where,
        )
    if expected == 0:
        return Corpus(np.zeros(0, dtype), str(prefix))
    tokens = np.memmap(f"{prefix}.bin", dtype=dtype, mode="r")
    return Corpus(tokens, str(prefix), _ends(lengths))


def _read_index(raw: bytes) -> tuple[np.dtype[Any], Tokens]:
    """Token dtype of an index, and the number of tokens of each document.

    Megatron-Core's format (``megatron.core.datasets.indexed_dataset``): 9 bytes of magic, version
    (u64), dtype code (u8), sequences (u64), documents (u64), then lengths (i32 a sequence), where
    they are in the .bin file (i64 a sequence), and at which sequence each document begins (i64;
    the last of them is where the last one ends).
    """
    if raw[:9] != _INDEX_MAGIC:
        raise ValueError(f"it begins with {raw[:9]!r}, not {_INDEX_MAGIC!r}")
    version, code, sequences, documents = struct.unpack_from("<QBQQ", raw, 9)
    if version != 1:
        raise ValueError(f"version {version}, not 1")
    if code not in _INDEX_DTYPES:
        raise ValueError(f"token type {code} is not an integer type ({sorted(_INDEX_DTYPES)})")
    begins = 34 + (4 + 8) * sequences
    if begins + 8 * documents > len(raw):
        raise ValueError(
            f"{len(raw)} bytes are too few for {sequences} sequences and {documents} documents"
        )
    lengths = np.frombuffer(raw, np.int32, count=sequences, offset=34)
    firsts = np.frombuffer(raw, np.int64, count=documents, offset=begins)
    if documents and (firsts[0] != 0 or firsts[-1] != sequences or (np.diff(firsts) < 0).any()):
        raise ValueError(f"its documents do not divide its {sequences} sequences")
    before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return np.dtype(_INDEX_DTYPES[code]), np.diff(before[firsts] if documents else before)
