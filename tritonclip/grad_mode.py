"""Runs functions in a mode of autograd, and leaves no trace where one is interrupted."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def without_grad(function: Callable[P, R]) -> Callable[P, R]:
    """As the decorator `torch.no_grad()`, whose mode an interrupt cannot leave behind.

    An interrupt that comes while Python code of `torch.no_grad` enters or leaves its block leaves
    autograd turned off for the rest of the program. From Python 3.11 on, interrupts come only where
    a call begins or has returned; here, no call lies between the mode and the block.
    """
    switch, is_on = torch._C._set_grad_enabled, torch.is_grad_enabled

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        before = is_on()
        try:
            switch(False)
            return function(*args, **kwargs)
        finally:
            switch(before)

    return run


def outside_inference(function: Callable[P, R]) -> Callable[P, R]:
    """As the decorator `torch.inference_mode(False)`, with the promise of `without_grad`.

    For tensors that later calls write to, which an inference tensor would refuse.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        mode = torch._C._InferenceMode(False)
        try:
            mode.__enter__()
            return function(*args, **kwargs)
        finally:
            mode.__exit__(None, None, None)

    return run
