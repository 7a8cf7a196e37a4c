"""Functions that a recipe names by `module:name`: data sources and rewards."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from trt_rl.errors import RecipeError


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
