"""Fake only: the decorator that releases keep at different places."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import contextmanager

import ray

from tensorrt_llm import _family


@contextmanager
def unwrap_ray_errors():
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        raise error.as_instanceof_cause() from error


def _wrap(function: Callable, drain: bool) -> Callable:
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        with self.engine.control_action(drain=drain):
            return function(self, *args, **kwargs)

    return wrapper


if _family.DRAIN_ARGUMENT:

    def control_action_decorator(func: Callable | None = None, *, drain: bool = True) -> Callable:
        return (lambda function: _wrap(function, drain)) if func is None else _wrap(func, drain)

else:

    def control_action_decorator(func: Callable) -> Callable:
        return _wrap(func, True)
