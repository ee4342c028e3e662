"""Small expressions in Megatron's arguments, worked out without ``eval``."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from mfsdp_cli.model.validity import MAX_LAYERS

_LONGEST = 2_000
_LARGEST = 10**15
_SUMS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.FloorDiv: lambda a, b: int(a / b),
    ast.Mod: operator.mod,
}


def arithmetic(text: str) -> int | None:
    """The value of a shell sum such as ``3 + 58``; None where it is none."""
    node = _parse(text)
    return None if node is None else _sum(node)


def layer_pattern(text: str) -> list[int] | None:
    """A list expression such as ``[0]*3+[1]*58`` or ``([1]*3+[0])*2``; None where it is none.

    Lists longer than a model can have layers are none.
    """
    node = _parse(text)
    value = None if node is None else _pattern(node)
    return value if isinstance(value, list) else None


def _parse(text: str) -> ast.expr | None:
    if len(text) > _LONGEST:
        return None
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _sum(node: ast.expr) -> int | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value if abs(node.value) <= _LARGEST else None
    if isinstance(node, ast.BinOp) and type(node.op) in _SUMS:
        left, right = _sum(node.left), _sum(node.right)
        if left is None or right is None:
            return None
        try:
            value = _SUMS[type(node.op)](left, right)
        except ZeroDivisionError:
            return None
        return value if abs(value) <= _LARGEST else None
    return None


def _pattern(node: ast.expr) -> Any:
    if isinstance(node, ast.List):
        values = [item.value if isinstance(item, ast.Constant) else None for item in node.elts]
        return values if all(type(value) is int for value in values) else None
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _pattern(node.left), _pattern(node.right)
    if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right if len(left) + len(right) <= MAX_LAYERS else None
    if isinstance(node.op, ast.Mult):
        return _times(left, right)
    return None


def _times(left: Any, right: Any) -> list[int] | None:
    if isinstance(left, int) and isinstance(right, list):
        left, right = right, left
    if not isinstance(left, list) or not isinstance(right, int):
        return None
    return left * right if 0 <= len(left) * right <= MAX_LAYERS else None
