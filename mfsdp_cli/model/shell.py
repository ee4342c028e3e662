"""The words of a shell script, as far as Megatron's arguments need: no shell is run.

A launch script keeps its arguments in arrays, in strings or on a command line. Here every word of
all three is read, in the order of the file. Known to the reader: comments, quotes, continuation
lines, ``NAME=value``, ``NAME=(...)``, ``NAME+=(...)``, and in words ``$NAME``, ``${NAME}``,
``${NAME:-default}`` and ``$((sum))`` where the file itself assigns every name once. What only a
shell could work out stays as it is written, for the caller to name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.model.expressions import arithmetic

_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)\+?=")
_ARRAY = re.compile(r"^\$\{([A-Za-z_]\w*)\[[@*]\]\}$")
_PLAIN = re.compile(r"^\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})$")
_EXPANSION = re.compile(
    r"\$\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)"
    r"|\$(?P<name>[A-Za-z_]\w*)"
    r"|\$\{(?P<braced>[A-Za-z_]\w*)(?::?-(?P<default>[^{}]*))?\}"
)
_WHOLE = re.compile(r"^(?:\$(?:\w+|[@*]|\{[^{}]*\}|\(.*\))|`.*`)$", re.DOTALL)
_ARGUMENTS = re.compile(r"(ARGS|ARGUMENTS|OPTS|OPTIONS|FLAGS)$", re.IGNORECASE)
_CONDITIONS = frozenset(("if", "elif", "else", "for", "while", "until", "case"))
_MAX_WORDS = 100_000
_DEPTH = 20


@dataclass
class Script:
    """What a script says.

    Args:
        words: every word that may be an argument, in order, expanded where that was possible.
        arrays: names that the script assigns an array or a string of arguments.
        conditional: whether it has conditions or loops.
        defaults: place in ``words`` -> each ``${NAME:-default}`` whose default was taken there.
        loose: places in ``words`` of expansions that stand where arguments stand and may be some.
    """

    words: list[str] = field(default_factory=list)
    arrays: set[str] = field(default_factory=set)
    conditional: bool = False
    defaults: dict[int, list[str]] = field(default_factory=dict)
    loose: set[int] = field(default_factory=set)


def read_script(text: str, where: str) -> Script:
    """The words of a script or of a flat list of flags.

    Raises:
        MfsdpError: MF403 where a quote is not closed or there are too many words.
    """
    tokens = list(_tokens(text, where))
    values, arrays, words, loose = _assignments(tokens)
    script = Script(arrays=arrays, conditional=bool(_CONDITIONS & {t for t in tokens if t}))
    for index, word in enumerate(words):
        expander = _Expander(values)
        expanded = expander.expand(word)
        if expander.defaults:
            script.defaults[len(script.words)] = expander.defaults
        if index in loose and _WHOLE.match(expanded) and _referred(expanded) not in arrays:
            script.loose.add(len(script.words))
        script.words.extend(expanded.split() if _is_argument_text(expanded) else [expanded])
    return script


def _referred(word: str) -> str | None:
    """The name that a word which is one reference refers to."""
    match = _ARRAY.match(word) or _PLAIN.match(word)
    return None if match is None else next(filter(None, match.groups()))


def undefined_reference(word: str, script: Script) -> bool:
    """Whether a word stands for arguments that the script does not define.

    An array is always one; a plain variable where its name says so (``$MODEL_ARGS``): others are
    paths and programs more often than arguments.
    """
    if match := _ARRAY.match(word):
        return match[1] not in script.arrays
    if match := _PLAIN.match(word):
        name = match[1] or match[2]
        return name not in script.arrays and bool(_ARGUMENTS.search(name))
    return False


def _is_argument_text(word: str) -> bool:
    return word.lstrip().startswith("--") and any(sign.isspace() for sign in word.strip())


def _assignments(tokens: list[str]) -> tuple[dict[str, str], set[str], list[str], set[int]]:
    """Scalars assigned once, names of arrays (and argument strings), the remaining words, and the
    places among them of expansions that may be arguments.
    """
    values: dict[str, str] = {}
    again: set[str] = set()
    arrays: set[str] = set()
    words: list[str] = []
    groups = _Groups()
    for index, token in enumerate(tokens):
        match = _ASSIGNMENT.match(token)
        if match is None:
            groups.take(token, len(words))
            if token not in ("(", ")", ""):
                words.append(token)
            continue
        name, value = match[1], token[match.end() :]
        if not value and index + 1 < len(tokens) and tokens[index + 1] == "(":
            arrays.add(name)
        elif re.search(r"(^|\s)--\w", value):
            arrays.add(name)
            words.extend(word.strip("'\"") for word in value.split())
        elif values.get(name, value) != value:
            again.add(name)
        else:
            values[name] = value
    groups.take("", len(words))
    return {n: v for n, v in values.items() if n not in again}, arrays, words, groups.loose


class _Groups:
    """Follows commands and arrays, for the expansions that stand where arguments stand: in an
    array that holds a flag anywhere, in a command after its first flag.
    """

    def __init__(self) -> None:
        self.loose: set[int] = set()
        self._array = False
        self._flags = False
        self._waiting: set[int] = set()

    def take(self, token: str, place: int) -> None:
        if token in ("(", ")") or (token == "" and not self._array):
            self._array, self._flags, self._waiting = token == "(", False, set()
        elif token.startswith("--"):
            self._flags = True
            self.loose |= self._waiting if self._array else set()
        elif _WHOLE.match(token):
            (self.loose if self._flags else self._waiting).add(place)


class _Expander:
    """Puts values in the place of names; leaves a word alone where it cannot."""

    def __init__(self, values: dict[str, str]) -> None:
        self.values = values
        self.defaults: list[str] = []
        self.open: list[str] = []

    def expand(self, word: str) -> str:
        if "$" not in word or len(self.open) > _DEPTH:
            return word
        return _EXPANSION.sub(self._value, word)

    def _value(self, match: re.Match[str]) -> str:
        if (total := match["sum"]) is not None:
            return self._sum(match[0], total)
        name = match["name"] or match["braced"]
        if name in self.values and name not in self.open:
            self.open.append(name)
            value = self.expand(self.values[name])
            self.open.pop()
            return value
        if match["default"] is not None:
            self.defaults.append(f"{match[0]} taken as {match['default']}")
            return self.expand(match["default"].strip("'\""))
        return match[0]

    def _sum(self, written: str, total: str) -> str:
        known = re.sub(r"(?<![\w$])([A-Za-z_]\w*)", r"$\1", total)
        result = arithmetic(self.expand(known))
        return written if result is None else str(result)


def _tokens(text: str, where: str) -> Iterator[str]:
    """Words; ``(`` and ``)`` that open and close arrays are words of their own.

    An empty token ends a line or a command.
    """
    lexer = _Lexer(text, where)
    for number, token in enumerate(lexer.tokens()):
        if number > _MAX_WORDS:
            raise MfsdpError("MF403", f"the file has more than {_MAX_WORDS} words", where=where)
        yield token


class _Lexer:
    def __init__(self, text: str, where: str) -> None:
        self.text = text.replace("\r\n", "\n")
        self.where = where
        self.at = 0

    def tokens(self) -> Iterator[str]:
        while self.at < len(self.text):
            sign = self.text[self.at]
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif sign in "\n;&|<>":
                self.at += 1
                yield ""
            elif sign.isspace():
                self.at += 1
            elif sign == "#":
                self._skip_line()
            elif sign in "()" and not self.text.startswith("([", self.at):
                self.at += 1
                yield sign
            else:
                yield self._word()

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _word(self) -> str:
        """A word; ``|`` and brackets inside belong to it, as in a layout without quotes."""
        parts: list[str] = []
        while self.at < len(self.text):
            sign = self.text[self.at]
            if sign.isspace() or sign in ";&<>)":
                break
            if sign == "(" and _ASSIGNMENT.match("".join(parts)):
                break
            parts.append(self._piece(sign))
        return "".join(parts)

    def _piece(self, sign: str) -> str:
        if sign in "'\"":
            return self._quoted(sign)
        if sign == "\\":
            self.at += 2
            return self.text[self.at - 1 : self.at].replace("\n", "")
        if sign == "(":
            return self._bracketed(self.at, "(", ")")
        if sign == "$" and self.text[self.at + 1 : self.at + 2] in ("(", "{"):
            opening = self.text[self.at + 1]
            return self._bracketed(self.at, opening, ")" if opening == "(" else "}")
        if sign == "`":
            return self._quoted(sign)
        self.at += 1
        return sign

    def _quoted(self, quote: str) -> str:
        end = self.at + 1
        while end < len(self.text) and self.text[end] != quote:
            end += 2 if self.text[end] == "\\" and quote == '"' else 1
        if end >= len(self.text):
            raise self._open(quote)
        inside = self.text[self.at + 1 : end]
        self.at = end + 1
        return f"`{inside}`" if quote == "`" else inside

    def _bracketed(self, start: int, opening: str, closing: str) -> str:
        """From here over the matching bracket, as written."""
        depth = 0
        for end in range(start, len(self.text)):
            depth += (self.text[end] == opening) - (self.text[end] == closing)
            if depth == 0 and self.text[end] == closing:
                self.at = end + 1
                return self.text[start : self.at]
        raise self._open(opening)

    def _open(self, sign: str) -> MfsdpError:
        line = self.text.count("\n", 0, self.at) + 1
        return MfsdpError("MF403", f"{sign} is not closed", where=f"{self.where}, line {line}")
