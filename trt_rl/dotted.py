"""Things that are named by `module:name` and imported only when they are used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from trt_rl.errors import RecipeError, TrtRlError


def load_function(path: str, key: str) -> Callable:
    """The function named `module:name`.

    Raises:
        RecipeError: naming `key`, the path and what is wrong with it.
    """
    module, _, name = path.partition(":")
    if not name:
        raise RecipeError(f"{key} = {path!r} is not of the form module:name")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise RecipeError(f"{key} = {path!r} cannot be loaded: {error}") from error
    if not callable(function):
        raise RecipeError(f"{key} = {path!r} is {type(function).__name__}, not a function")
    return function


def load_registered(registry: dict[str, str], name: str, key: str, kinds: str, error: type[TrtRlError]) -> Any:
    """What `registry` holds under `name`, imported now.

    Args:
        key: of the recipe, e.g. `rollout.engine`.
        kinds: what the registry's names are, e.g. `engines`.

    Raises:
        error: the name is unknown, or its module cannot be imported here.
    """
    if name not in registry:
        raise error(f"{key} = {name!r} is unknown; {kinds}: {', '.join(registry)}")
    module, attribute = registry[name].split(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as cause:
        raise error(f"{key} = {name!r} cannot be imported here: {cause}") from cause
