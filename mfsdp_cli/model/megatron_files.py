"""Files of Megatron arguments and Megatron YAML, as :class:`Options`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.model.expressions import layer_pattern
from mfsdp_cli.model.megatron_options import (
    SWITCHES,
    UNSUPPORTED,
    VALUES,
    Options,
    spelling_of,
)
from mfsdp_cli.model.shell import Script, read_script, undefined_reference

_PASSED_OVER = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "split")
"""Options of several values, none of which can be an argument of ours."""
_NOTHING = ("", "None", "none", "null", "~")
_LAYER_SIGNS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_MAX_DEPTH = 12
_MAX_KEYS = 20_000


def read_arguments(text: str, where: str) -> Options:
    """The options of a launch script or of a flat list of flags.

    Raises:
        MfsdpError: MF409 naming an argument that only a shell could expand, MF410 naming one
            without its value, MF405 one whose value is of the wrong kind, MF408 one that is not
            supported.
    """
    script = read_script(text, where)
    options = Options(where)
    words = script.words
    passing_over = False
    for index, word in enumerate(words):
        if word.startswith("--") and len(word) > 2:
            following = words[index + 1] if index + 1 < len(words) else None
            _note_defaults(options, script, index)
            if _take_flag(options, word, following):
                _note_defaults(options, script, index + 1)
            passing_over = spelling_of(word.partition("=")[0]) in _PASSED_OVER
        elif not passing_over and undefined_reference(word, script):
            raise _unexpanded(word, "these arguments are not in the file", where)
        elif not passing_over and index in script.loose:
            _warn_of_loose(options, word, words[index - 1] if index else "")
    _note_script(options, script)
    return options


def read_yaml(document: dict[Any, Any], where: str) -> Options:
    """The options of a Megatron YAML: configuration names or flags, in sections or flat.

    Raises:
        MfsdpError: MF405 naming a key whose value is of the wrong kind, MF407 two sections that
            disagree, MF408 an option that is not supported, MF409 a variable that was not
            expanded.
    """
    options = Options(where)
    for path, value in _leaves(document, where):
        spelling = spelling_of(path.rpartition(".")[2])
        options.refuse_unsupported(spelling, value, path)
        if spelling in VALUES and value is not None:
            name, kind = VALUES[spelling]
            if (typed := _typed(value, kind, path, where)) is not None:
                _set_once(options, name, typed, path)
        elif spelling in SWITCHES and value is not None:
            _set_switch(options, spelling, value, path)
    return options


def _take_flag(options: Options, word: str, following: str | None) -> bool:
    """Read one flag; whether its value counts."""
    flag, equals, attached = word.partition("=")
    spelling = spelling_of(flag)
    if spelling in SWITCHES and not (spelling in VALUES and following):
        name, value = SWITCHES[spelling]
        options.set(name, value, flag)
        return False
    if spelling in UNSUPPORTED:
        value = attached if equals else _value_or_true(following)
        options.refuse_unsupported(spelling, value, flag)
    if spelling not in VALUES:
        return False
    text = attached if equals else following
    if text is None or text.startswith("--"):
        raise MfsdpError("MF410", f"{flag} has no value", where=options.where)
    name, kind = VALUES[spelling]
    value = _typed(text, kind, flag, options.where)
    if value is not None:
        options.set(name, value, flag)
    return True


def _value_or_true(following: str | None) -> str | bool:
    return True if following is None or following.startswith("--") else following


def _set_switch(options: Options, spelling: str, value: Any, path: str) -> None:
    if not isinstance(value, bool):
        raise _wrong(path, "true or false", value, options.where)
    name, says = SWITCHES[spelling]
    if value:
        _set_once(options, name, says, path)
    elif isinstance(says, bool):
        _set_once(options, name, not says, path)


def _set_once(options: Options, name: str, value: Any, path: str) -> None:
    if name in options.values and options.values[name] != value:
        raise MfsdpError(
            "MF407",
            f"{options.origins[name]} is {options.values[name]!r}, but {path} is {value!r}",
            where=options.where,
        )
    options.values[name] = value
    options.origins[name] = path


def _typed(value: Any, kind: str, origin: str, where: str) -> Any:
    """A value in its kind; None where it says nothing. Texts are read as Megatron reads them."""
    if isinstance(value, str):
        if value.strip() in _NOTHING and not (kind == "choice" and value.strip() == "none"):
            return None
        if any(sign in value for sign in "$`"):
            raise _unexpanded(value, f"the value of {origin}", where)
    reader = {
        "int": _integer,
        "float": _number,
        "text": _text,
        "choice": _text,
        "pattern": _pattern,
        "layout": _layout,
    }[kind]
    return reader(value, origin, where)


def _integer(value: Any, origin: str, where: str) -> int:
    if isinstance(value, str) and value.strip().isascii() and len(value) < 20:
        try:
            return int(value)
        except ValueError:
            pass
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(origin, "a whole number", value, where)
    return value


def _number(value: Any, origin: str, where: str) -> float:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise _wrong(origin, "a number", value, where) from None


def _text(value: Any, origin: str, where: str) -> str:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        raise _wrong(origin, "a text", value, where)
    return value.strip()


def _pattern(value: Any, origin: str, where: str) -> int | list[int]:
    """``--moe-layer-freq``: every how many layers, or a list of 0 and 1 as an expression."""
    if isinstance(value, str):
        text = value.strip()
        value = layer_pattern(text) if "[" in text else _integer(text, origin, where)
    if isinstance(value, list) and all(kind in (0, 1) for kind in value):
        return [int(kind) for kind in value]
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise _wrong(origin, "a number of layers or a list of 0 and 1", value, where)


def _layout(value: Any, origin: str, where: str) -> str:
    """A layout string; in YAML also a list of stages such as ``[[embedding, decoder], [loss]]``."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(stage, list) for stage in value):
        raise _wrong(origin, "a layout string or a list of stages", value, where)
    unknown = [part for stage in value for part in stage if part not in _LAYER_SIGNS]
    if unknown:
        raise _wrong(origin, f"made of {', '.join(_LAYER_SIGNS)}", unknown[0], where)
    return "|".join("".join(_LAYER_SIGNS[part] for part in stage) for stage in value)


def _leaves(document: dict[Any, Any], where: str) -> Iterator[tuple[str, Any]]:
    """All keys that hold no section, as dotted paths; sections may repeat, but not without end."""
    open_sections: list[tuple[str, dict[Any, Any], int]] = [("", document, 0)]
    seen = 0
    while open_sections:
        prefix, section, depth = open_sections.pop()
        for key, value in section.items():
            seen += 1
            if seen > _MAX_KEYS or depth > _MAX_DEPTH:
                raise MfsdpError("MF403", "the YAML has too many keys or levels", where=where)
            path = f"{prefix}{key}"
            if isinstance(value, dict):
                open_sections.append((f"{path}.", value, depth + 1))
            else:
                yield path, value


def _warn_of_loose(options: Options, word: str, before: str) -> None:
    """An expansion that may be more arguments, unless it is the value of the flag before it."""
    if not before.startswith("--") or spelling_of(before) in SWITCHES:
        options.warn(
            "MF424",
            f"{word} stands among the arguments, but the file does not say what it holds: "
            "nothing was read from it",
        )


def _note_script(options: Options, script: Script) -> None:
    if script.conditional and options.values:
        options.warn(
            "MF422",
            "the script has conditions or loops, which are not followed: all its flags count",
        )


def _note_defaults(options: Options, script: Script, *places: int) -> None:
    for place in places:
        for default in script.defaults.get(place, ()):
            options.warn("MF423", f"{default}, for the file does not assign it")


def _unexpanded(text: str, what: str, where: str) -> MfsdpError:
    return MfsdpError(
        "MF409",
        f"{text} was not expanded: {what}",
        where=where,
        hint="write the value out, or save the arguments as the shell expands them",
    )


def _wrong(origin: str, expected: str, value: Any, where: str) -> MfsdpError:
    shown = repr(value)
    shown = shown if len(shown) < 80 else f"{shown[:80]}..."
    return MfsdpError("MF405", f"{origin} must be {expected}, got {shown}", where=where)
