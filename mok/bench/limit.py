"""Seconds that measuring may take: past them it ends, what was made is shown, and what was not is named.

Nothing is asked between calls, so that timed loops do nothing else. An alarm raises Over wherever Python is. Where Python does not get to
it, as within one long product, the process shows what it has and ends GRACE_S later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

Point = TypeVar("Point")
GRACE_S = 3.0


class Over(BaseException):
    """The limit is over. Not an Exception: what ends a plan or a library that fails must not take it for that."""


class Limit:
    """seconds: from now on. left_out: names of what is not measured yet, or never was."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.start = seconds, time.monotonic()
        self.left_out: list[str] = []

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.start)

    def each(self, points: Mapping[str, Point]) -> Iterator[tuple[str, Point]]:
        """The points one after the other, as long as there is time."""
        self.left_out = list(points)

        def in_time() -> Iterator[tuple[str, Point]]:
            for name, point in points.items():
                if self.left() <= 0:
                    return
                yield name, point
                self.left_out.remove(name)

        return in_time()

    def missing(self) -> dict[str, str]:
        """What was left out, and why."""
        return {name: f"left out: the limit of {self.seconds:g} seconds was over" for name in self.left_out}

    @contextlib.contextmanager
    def held(self, show: Callable[[], object]) -> Iterator[None]:
        """What runs within ends at the limit. show: called on another thread before the process ends where that takes too long."""

        def end() -> None:
            try:
                show()
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(1)

        def raise_over(*_: object) -> None:
            raise Over

        if self.seconds > threading.TIMEOUT_MAX - GRACE_S:  # none at all
            yield
            return
        left = max(self.left(), 1e-3)
        watchdog = threading.Timer(left + GRACE_S, end)
        watchdog.daemon = True
        here = threading.current_thread() is threading.main_thread()  # which alone hears of an alarm
        previous = signal.signal(signal.SIGALRM, raise_over) if here else None
        try:
            watchdog.start()
            try:
                if here:
                    signal.setitimer(signal.ITIMER_REAL, left)
                yield
            finally:
                if here:
                    signal.setitimer(signal.ITIMER_REAL, 0)
        except Over:
            pass
        finally:
            watchdog.cancel()
            watchdog.join()  # one that has begun ends the process
            if here:
                signal.signal(signal.SIGALRM, previous)
