"""Run one function on R ranks: virtual ranks (threads) or processes with a gloo group, each under a watchdog."""

from __future__ import annotations

import datetime
import faulthandler
import io
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from mok.fabric import run_virtual, virtual_ranks

KINDS = ("virtual", "processes")
WATCHDOG_S = 60.0

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed.tensor", "mok", "ranks"])


class RankFailed(AssertionError):
    """Some ranks raised; errors maps rank -> (type name, message, traceback)."""

    def __init__(self, errors: dict[int, tuple[str, str, str]]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, (_, _, text) in sorted(errors.items())))
        self.errors = errors


def _child(
    rank: int, size: int, store: str, function: Callable[..., Any], args: tuple[Any, ...], pipe: Connection, watchdog_s: float
) -> None:
    faulthandler.dump_traceback_later(watchdog_s, exit=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        timeout = datetime.timedelta(seconds=watchdog_s)
        dist.init_process_group("gloo", rank=rank, world_size=size, store=dist.FileStore(store, size), timeout=timeout)
        result = function(dist.group.WORLD, *args)
        buffer = io.BytesIO()
        torch.save(result, buffer)  # by value: the sender is gone when the receiver reads
        pipe.send(("result", buffer.getvalue()))
    except BaseException as error:
        pipe.send(("error", (type(error).__name__, str(error), traceback.format_exc())))
        pipe.close()
        os._exit(1)
    pipe.close()
    os._exit(0)  # no collective tear-down: a test that wants one does it itself


def run_processes(
    function: Callable[..., Any], size: int, *args: Any, watchdog_s: float = WATCHDOG_S, allow_exit: bool = False
) -> list[Any]:
    """function(group, *args) in `size` processes; results in rank order. A module-level function, as it is pickled.

    allow_exit: a process may end without a result; its place then holds ("exit", code).
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = _context.Pipe(duplex=False)
            child = _context.Process(target=_child, args=(rank, size, f"{folder}/store", function, args, theirs, watchdog_s), daemon=True)
            child.start()
            theirs.close()
            pipes.append(ours)
            processes.append(child)
        results: dict[int, Any] = {}
        errors: dict[int, tuple[str, str, str]] = {}
        open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
        deadline = time.monotonic() + watchdog_s
        while open_pipes and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(open_pipes), timeout=left):
                rank = open_pipes.pop(pipe)
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    processes[rank].join(5)
                    if allow_exit:
                        results[rank] = ("exit", processes[rank].exitcode)
                    else:
                        errors[rank] = ("Exit", "", f"ended with code {processes[rank].exitcode} and no result")
                    continue
                if kind == "result":
                    results[rank] = torch.load(io.BytesIO(value), weights_only=False)
                else:
                    errors[rank] = value
        for rank in open_pipes.values():
            errors[rank] = ("Hang", "", f"no result within {watchdog_s} s")
        for child in processes:
            child.join(2)
            if child.is_alive():
                child.kill()
    if errors:
        raise RankFailed(errors)
    return [results[rank] for rank in range(size)]


def run_ranks(kind: str, function: Callable[..., Any], size: int, *args: Any, watchdog_s: float = WATCHDOG_S) -> list[Any]:
    """function(group, *args) on `size` ranks of a kind of KINDS; results in rank order."""
    if kind == "processes":
        return run_processes(function, size, *args, watchdog_s=watchdog_s)
    return run_virtual(lambda fabric: function(fabric, *args), virtual_ranks(size))
