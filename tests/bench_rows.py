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

from mok.bench import comm
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


def main() -> None:
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
            share = 0.5 if variant.mixed else 1.0
            runs = [link.runs(variant, share, [2])["2"] for link in links]
            found[variant.name] = [link.problem(variant, share, lambda runs=runs: [run() for run in runs]) for link in links]
    broken = links[0].problem(comm.Variant("nothing", "ld", {}, 8, True), 1.0, lambda: None)
    print(json.dumps(dict(found=found, broken=broken)))


if __name__ == "__main__":
    main()
