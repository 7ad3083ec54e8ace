"""First weights of virtual ranks: where their random numbers come from.

Virtual ranks are threads and share torch's default generator. Where each of them calls `torch.manual_seed(0)` and builds its layers, one
seeds while another one draws. So none of them draws weights there: each has a generator of its own, and the first rank that comes to the
group's n-th layer under a seed settles for all where that layer's numbers begin:

    n = 0                                                                where a generator begins after `torch.manual_seed(seed)`
    the default generator stands as just seeded, and no rank is behind   there again: somebody has called `torch.manual_seed(seed)` anew
    else                                                                 where the layer before ended

A rank that is behind (it has built fewer layers) may have seeded for the layers it has yet to build, which says nothing about this one.

Example, seed 0, two ranks with layers a and b each. In threads, rank 0 builds a, rank 1 seeds, rank 0 builds b: rank 1 is behind, so b
goes on where a ended. Had both run a in between and seeded again, neither is behind, and b has the weights of a.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mok.fabric import HostFabric, VirtualFabric


@dataclass
class _Rank:
    seed: int
    layers: int = 0
    generator: torch.Generator = field(default_factory=lambda: torch.Generator("cpu"))


@dataclass
class _Group:
    ranks: dict[int, _Rank] = field(default_factory=dict)
    begins: dict[tuple[int, int], tuple[Tensor, set[int]]] = field(default_factory=dict)
    """(seed, n) -> the state that layer n begins with, and the ranks that have yet to build it."""


_groups: weakref.WeakKeyDictionary[HostFabric, _Group] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def generator_of(fabric: VirtualFabric) -> torch.Generator:
    """The generator of this virtual rank, where its next layer begins; the layer draws from it and from nowhere else."""
    with _lock:
        group = _groups.setdefault(fabric._board[0], _Group())
        seed = torch.initial_seed()
        if fabric.rank not in group.ranks or group.ranks[fabric.rank].seed != seed:
            group.ranks[fabric.rank] = _Rank(seed)
        mine = group.ranks[fabric.rank]
        n, start = mine.layers, torch.Generator("cpu").manual_seed(seed).get_state()
        if (seed, n) not in group.begins:
            behind = any(r not in group.ranks or group.ranks[r].seed != seed or group.ranks[r].layers < n for r in range(fabric.size))
            again = n == 0 or (not behind and torch.equal(torch.get_rng_state(), start))
            group.begins[seed, n] = (start if again else mine.generator.get_state(), set(range(fabric.size)))
        state, others = group.begins[seed, n]
        others.discard(fabric.rank)
        if not others:
            del group.begins[seed, n]
        mine.layers += 1
        mine.generator.set_state(state)
        torch.rand((), device="cpu")  # the default generator stands as just seeded no more
        return mine.generator
