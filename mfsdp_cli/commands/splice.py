"""Give a command the flags of a plan as options of its own.

Typer reads a command's options from its signature; :func:`takes_plan_flags` writes the fields of
:class:`~mfsdp_cli.commands.flags.PlanFlags` into it, and hands them over as one object.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, get_type_hints

from mfsdp_cli.commands.flags import PlanFlags


def takes_plan_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter ``flags`` by the flags of :class:`PlanFlags`."""
    own = inspect.signature(command, eval_str=True)
    hints = get_type_hints(PlanFlags, include_extras=True)
    spliced = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hints[field.name]
        )
        for field in fields(PlanFlags)
    ]
    parameters = [p for name, p in own.parameters.items() if name != "flags"]
    kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]

    @wraps(command)
    def wrapper(**values: Any) -> None:
        flags = PlanFlags(**{field.name: values.pop(field.name) for field in fields(PlanFlags)})
        command(flags=flags, **values)

    joined = [*kept, *spliced]
    wrapper.__signature__ = inspect.Signature(joined)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in joined}
    # Typer resolves annotations of the wrapped function where it finds one.
    del wrapper.__wrapped__
    return wrapper
