"""R processes over torch's symmetric memory: each with a GPU of its own where there are as many, else all on one, taking turns."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _child(rank: int, ranks: int, port: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    gpus = torch.cuda.device_count()
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    if gpus < ranks:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(rank % gpus)
    torch.manual_seed(0)
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.save(function(dist.group.WORLD, *args), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_processes(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """function(group, *args) in every process, a function of a module; the results (tensors on the CPU) in rank order."""
    store = dist.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)  # a free port that stays its own
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_child, args=(ranks, store.port, folder, function, args), nprocs=ranks)
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(ranks)]
