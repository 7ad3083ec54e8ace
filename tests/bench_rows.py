"""Under Triton's interpreter: every way of moving rows of `mok bench comm` moves the right rows; the last line printed is JSON.

Two ranks of one process: there is nothing to wait for in these kernels, so they run one after the other.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
from interpret import patch_once, run_concurrently

from mok.bench import comm, comm_kernels
from mok.fabric import Region
from mok.kernels import memory

T, H = 16, 2048
CPU = torch.device("cpu")


class OneProcess(comm.Link):
    def __init__(self, rank: int, views: list[memory.PeerMemory]) -> None:
        self.rank, self.size, self.peer, self.device, self.rows, self.hidden = rank, 2, 1 - rank, CPU, T, H
        self.memory, self.x, self.slots = views[rank], views[rank].own["x"], views[rank].own["slots"]
        self.peer_x, self.peer_slots = (views[self.peer].own[name] for name in ("x", "slots"))
        self.x.copy_(comm.make_rows(T, H, rank, CPU))
        self.out = torch.empty(T, H, dtype=torch.bfloat16)

    def meet(self) -> None: ...


def flags(remote: bool, ranks: list[int]) -> list[int]:
    """Both flags and the waits that were given up after three turns in which only these ranks take part."""
    words = [torch.zeros(1, dtype=torch.int32).share_memory_() for _ in range(3)]
    own = dict(
        flag_ptrs=torch.tensor([word.data_ptr() for word in words[:2]]), gave_up_ptr=words[2], base=0, count=3, REMOTE=remote,
        limit=1_000_000 if len(ranks) > 1 else 5,
    )  # fmt: skip
    run_concurrently(comm_kernels.ping_pong_kernel, 1, [{**own, "rank": rank, "peer": 1 - rank} for rank in ranks])
    return [int(word) for word in words]


def flags_within() -> list[int]:
    """The same of two programs of one rank."""
    flag, gave_up = torch.zeros(2 * comm.FLAG_WORDS, dtype=torch.int32).share_memory_(), torch.zeros(1, dtype=torch.int32).share_memory_()
    run_concurrently(
        comm_kernels.ping_pong_within_kernel, 2,
        [dict(flag_ptrs=torch.tensor([flag.data_ptr()]), gave_up_ptr=gave_up, base=0, count=3, limit=1_000_000, WORDS=comm.FLAG_WORDS)],
    )  # fmt: skip
    return [*flag.nonzero()[:, 0].tolist(), *flag[flag > 0].tolist(), int(gave_up)]


def main() -> None:
    patch_once()
    layout = [Region("control", (64,), torch.int32), Region("x", (T, H), torch.bfloat16), Region("slots", (2 * T, H), torch.bfloat16)]
    views = memory.virtual_memory(layout, 2, CPU)
    links = [OneProcess(rank, views) for rank in range(2)]
    found = {}
    kinds: set[tuple[str, object]] = set()
    for variant in (*comm.pull_variants(), *comm.push_variants()):
        kind = (variant.way, variant.constants.get("UNROLL"), variant.constants.get("STORE_BY_COPY_ENGINE"))
        if variant.way == "layer" and variant.constants["ROWS"] > T:
            continue  # the layer's rows come in whole tiles
        if kind not in kinds or variant.constants.get("LINES", 128) != 128:
            kinds.add(kind)
            for routing in (comm.Routing(0.5), comm.SKEWED[2], comm.SKEWED[3]) if variant.mixed else [comm.ALL_REMOTE]:
                runs = [link.runs(variant, routing, [2])["2"] for link in links]
                problems = [link.problem(variant, routing, lambda runs=runs: [run() for run in runs]) for link in links]
                found[f"{variant.name}, {routing.name}"] = problems
    broken = links[0].problem(comm.Variant("nothing", "ld", {}, 8, True), comm.ALL_REMOTE, lambda: None)
    turns = {f"{remote} {ranks}": flags(remote, ranks) for remote in (False, True) for ranks in ([0, 1], [0])}
    print(json.dumps(dict(found=found, broken=broken, turns=turns, within=flags_within())))


if __name__ == "__main__":
    main()
