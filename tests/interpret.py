"""Run every program of a Triton kernel as a process of its own under Triton's interpreter, so that waits, tickets and rings interleave on a
CPU.

TRITON_INTERPRET=1 must be set before triton is imported. What the kernel writes must lie in shared memory (tensor.share_memory_());
addresses stay valid because the processes are forked. The interpreter's atomics are the machine's.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import signal
import sys
import time
import traceback

import torch
from triton.runtime import interpreter


class Deadline(RuntimeError):
    """Some program did not end in time."""


def patch_once() -> None:
    """Make calls of functions within a kernel cheaper: the interpreter looks through all of triton.language in every one of them for what
    is to be patched; here in the first one of each module. A launch patches as before."""
    patched = set()

    def call(self, *args, **kwargs):
        if id(self.fn.__globals__) not in patched:
            patched.add(id(self.fn.__globals__))
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


def _run_program(kernel, grid: tuple[int, ...], program: int, arguments: dict[str, object]) -> None:
    names = list(inspect.getfullargspec(kernel.fn).args)
    arguments = {name: value for name, value in arguments.items() if name in names}
    executor = interpreter.GridExecutor(kernel.fn, names, grid)
    _, host = executor._init_args_hst([], arguments)
    interpreter._patch_lang(kernel.fn)
    bound = {name: value if name in executor.constexprs else interpreter._implicit_cvt(value) for name, value in host.items()}
    interpreter.interpreter_builder.set_grid_dim(*grid, *[1] * (3 - len(grid)))
    interpreter.interpreter_builder.set_grid_idx(program, 0, 0)
    kernel.fn(**bound)


def _disturb(max_delay_s: float, seed: int, lost: int | None) -> None:
    """Sleep for a random time before every atomic operation, in a slow program for longer than a task takes others, and there within
    tasks, too, before some of the copy engine's loads; and let additions to the address `lost` add nothing."""
    source, builder = random.Random(seed), interpreter.InterpreterBuilder
    slow = max_delay_s > 0 and source.random() < 1 / 3
    max_delay_s *= 8 if slow else 1
    original = builder.create_atomic_rmw

    def create_atomic_rmw(self, op, pointer, value, mask, sem, scope):
        if max_delay_s:
            time.sleep(source.random() ** 4 * max_delay_s)
        if lost is not None:
            value = interpreter.TensorHandle(value.data * (pointer.data != lost), value.dtype)
        return original(self, op, pointer, value, mask, sem, scope)

    builder.create_atomic_rmw = create_atomic_rmw
    load = builder.create_descriptor_load

    def create_descriptor_load(self, *args):
        if source.random() < 1 / 4:
            time.sleep(source.random() * max_delay_s)
        return load(self, *args)

    if slow:
        builder.create_descriptor_load = create_descriptor_load


def run_concurrently(
    kernel,
    programs: int,
    launches: list[dict[str, object]],
    deadline_s: float = 60.0,
    max_delay_s: float = 0.0,
    seed: int = 0,
    lost: int | None = None,
) -> None:
    """Run `programs` programs for each of the launches (the kernel's arguments by name, one launch per rank), all at the same time.

    max_delay_s: the longest of the random times that pass before atomic operations (`_disturb`).
    lost: the address of a signal that stays as it is.
    """
    children: list[int] = []
    for rank, arguments in enumerate(launches):
        for program in range(programs):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    torch.set_num_threads(1)
                    _disturb(max_delay_s, seed * 1000 + rank * 100 + program, lost)
                    _run_program(kernel, (programs,), program, arguments)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            children.append(child)
    failed, start = False, time.monotonic()
    try:
        while children and not failed:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child in children:
                children.remove(child)
                failed = status != 0
            elif time.monotonic() - start > deadline_s:
                raise Deadline(f"{len(children)} programs still run after {deadline_s} s: some wait was never met")
            else:
                time.sleep(0.002)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if failed:
        raise RuntimeError("a program failed; its traceback is above")


def run_cases(names: dict[str, object], chosen: list[str]) -> None:
    """Run the functions case_NAME of a module, all or the chosen ones, and print one JSON object {NAME: "" or traceback}."""
    results = {}
    patch_once()
    for name, case in list(names.items()):
        if name.startswith("case_") and callable(case) and (not chosen or name[5:] in chosen):
            start = time.monotonic()
            try:
                case()
                results[name[5:]] = ""
            except BaseException:
                results[name[5:]] = traceback.format_exc()
            print(f"{name[5:]}: {'ok' if not results[name[5:]] else 'FAILED'} {time.monotonic() - start:.1f} s", file=sys.stderr)
    print(json.dumps(results))
