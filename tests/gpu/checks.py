"""What tests ask of a block of calls: that it runs the kernels it is meant to run, that it waits for nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from mok.kernels.launch import is_hopper

both_kernels = pytest.mark.parametrize("ahead", [False, True], ids=["ordinary", "hopper"])
"""For sizes of the ordinary kernels, and for sizes at which Hopper has kernels of its own (`runs_ahead`): `hopper_launches` says so."""


@contextlib.contextmanager
def hopper_launches(forwards: int, backwards: int = 0) -> Iterator[None]:
    """On a Hopper GPU the block must launch either kernel for it at least so often, and never where that is 0."""
    if not is_hopper(torch.device("cuda")):
        yield
        return
    from mok.kernels import backward_hopper, forward_hopper

    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for module in (forward_hopper, backward_hopper):
            found[module.__name__] = 0
            patch.setattr(module, "launch", _counting(module, found))
        yield
    for count, least in zip(found.values(), (forwards, backwards), strict=True):
        assert count >= least and (count == 0) == (least == 0), f"launched {found}, expected at least {forwards} and {backwards}"


def _counting(module: ModuleType, found: dict[str, int]):  # type: ignore[no-untyped-def]
    real = module.launch

    def launch(*arguments):  # type: ignore[no-untyped-def]
        found[module.__name__] += 1
        real(*arguments)

    return launch


@contextlib.contextmanager
def nothing_waits() -> Iterator[None]:
    """An error where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
