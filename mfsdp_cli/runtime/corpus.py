"""Where tokens come from: text files as bytes, the standard library's source, Megatron's pairs.

A corpus is one stream of tokens. How it is cut into batches is :mod:`mfsdp_cli.runtime.data`.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mfsdp_cli.errors import MfsdpError

STANDARD_LIBRARY = "the Python standard library's source"
TOKENIZERS = ("bytes",)
_TEXT_LIMIT = 16 * 2**20
_NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_HASHED_WHOLE = 256 * 2**20
_PIECE = 2**20
_PIECES = 64

Tokens = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Corpus:
    """A stream of tokens and where it came from.

    Args:
        tokens: one dimension, an integer dtype; may be a memory map.
    """

    tokens: Tokens
    source: str

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


def load_corpus(paths: Sequence[str], tokenizer: str = "bytes") -> Corpus:
    """Read the tokens that ``--data`` names; none named: the standard library's source.

    Args:
        paths: text files and folders (read in this order, a folder's files sorted), or one prefix
            of a Megatron ``.bin``/``.idx`` pair.

    Raises:
        MfsdpError: MF503 where nothing can be read, MF504 for a broken Megatron pair.
    """
    if not paths:
        return Corpus(_bytes_of(_standard_library(), _TEXT_LIMIT), STANDARD_LIBRARY)
    prefixes = [prefix for path in paths if (prefix := megatron_prefix(path)) is not None]
    if prefixes and len(paths) > 1:
        raise MfsdpError(
            "MF503",
            f"{len(paths)} data sources were given and one is a Megatron pair: {prefixes[0]}",
            hint="give the one .bin/.idx prefix, or text files and folders",
        )
    if prefixes:
        return Corpus(_megatron_tokens(prefixes[0]), str(prefixes[0]))
    if tokenizer not in TOKENIZERS:
        raise MfsdpError(
            "MF503",
            f"unknown tokenizer {tokenizer!r}",
            where="--tokenizer",
            hint=f"one of {', '.join(TOKENIZERS)}; other tokenizers: prepare a Megatron .bin/.idx",
        )
    files = [file for path in paths for file in _text_files(Path(path))]
    return Corpus(_bytes_of(files, limit=None), ", ".join(paths))


def megatron_prefix(path: str) -> Path | None:
    """The prefix of a Megatron pair that a path names (with or without suffix); None: no pair."""
    prefix = Path(path[:-4] if path.endswith((".bin", ".idx")) else path)
    pair = [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")]
    if all(file.is_file() for file in pair):
        return prefix
    if path.endswith((".bin", ".idx")) and any(file.is_file() for file in pair):
        missing = next(file for file in pair if not file.is_file())
        raise MfsdpError(
            "MF504", f"half of a Megatron pair: {missing} is missing", where=f"--data {path}"
        )
    return None


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return [file for file in _walk(root) if file.suffix == ".py"]


def _text_files(path: Path) -> list[Path]:
    if path.is_dir():
        files = list(_walk(path))
        if not files:
            raise MfsdpError("MF503", f"no files in the folder {path}", where=f"--data {path}")
        return files
    if not path.is_file():
        raise MfsdpError("MF503", f"no such file or folder: {path}", where=f"--data {path}")
    return [path]


def _walk(root: Path) -> Iterator[Path]:
    """All files below a folder by relative path, without hidden ones, caches and tests."""
    found = []
    for folder, names, files in os.walk(root):
        names[:] = [n for n in names if n not in _NOT_SOURCE and not n.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    yield from sorted(found, key=lambda file: file.relative_to(root).parts)


def _bytes_of(files: Sequence[Path], limit: int | None) -> Tokens:
    """The bytes of the files one after another; whole files up to the limit."""
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
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def _megatron_tokens(prefix: Path) -> Tokens:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    where = f"--data {prefix}"
    try:
        index = IndexedDataset(str(prefix), mmap=True).index
        tokens = np.memmap(f"{prefix}.bin", dtype=index.dtype, mode="r")
        expected = int(index.sequence_lengths.astype(np.int64).sum())
    except (AssertionError, ValueError, struct.error, OSError, KeyError) as error:
        raise MfsdpError("MF504", f"not a Megatron .idx file: {error}", where=where) from error
    if tokens.size != expected:
        raise MfsdpError(
            "MF504",
            f"the .idx file speaks of {expected} tokens and the .bin file holds {tokens.size}",
            where=where,
        )
    if not np.issubdtype(tokens.dtype, np.integer):
        raise MfsdpError("MF504", f"tokens of type {tokens.dtype}, not integers", where=where)
    return tokens
