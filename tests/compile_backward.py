"""Compile the backward's kernels for three chips without a GPU; the last line printed is JSON: {"case arch": facts}.

Run alone: python tests/compile_backward.py ["case arch" ...]
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from compile_kernels import facts_of
from triton.experimental.gluon.language import NVMMASharedLayout

from mok.kernels.backward import backward_kernel
from mok.kernels.backward_hopper import backward_hopper_kernel
from mok.kernels.groups import list_kernel, plan_kernel
from mok.kernels.launch_backward import OF_SHARED, BackwardPlan, Needs, count_tasks, loads_in_flight

PLAN = BackwardPlan(run=1)
INT32 = {
    "peer_rank_ptr", "peer_token_idx_ptr", "expert_tile_ptr", "table_ptr", "list_ptr", "signals_ptr", "trace_ptr",
    "tokens_per_expert_ptr", "tile_expert_ptr", "routes_per_expert_ptr",
}  # fmt: skip
FP32 = {"weights_ptr", "d_weights_ptr", "ring_weights_ptr", "partial_ptr", "carry_ptr"}
CASES = {  # hidden, width, shared width, ranks, then flags
    "plain": (7168, 2048, 0, 1, {}),
    "runs": (7168, 2048, 0, 1, dict(RUN=4)),
    "everything": (4096, 1024, 1024, 4, dict(RECOMPUTE=True, CARRY=True, CLAMP=True)),
    "odd sizes added": (2880, 1408, 0, 2, dict(ACCUMULATE=True, CARRY=True, RECOMPUTE=True)),
    "mxfp8": (7168, 2048, 0, 1, dict(MXFP8=True)),
    "mxfp8 everything": (4096, 1024, 1024, 4, dict(MXFP8=True, RECOMPUTE=True, CARRY=True, CLAMP=True)),
    "mxfp8 odd sizes added": (2880, 1424, 0, 2, dict(MXFP8=True, ACCUMULATE=True, CARRY=True, RECOMPUTE=True)),
    "hopper": (7168, 2048, 0, 1, {}),
    "hopper cut": (7168, 2048, 0, 1, dict(CARRY=True)),
    "hopper two ranks": (4096, 14336, 0, 2, dict(RECOMPUTE=True)),
    "hopper shared": (2048, 768, 2048, 1, {}),
    "hopper clamp": (2048, 768, 0, 1, dict(CLAMP=True, TRACE=True)),
    "hopper added cut shared": (7168, 2048, 2048, 1, dict(ACCUMULATE=True, CARRY=True)),
    "hopper everything": (7168, 2048, 2048, 2, dict(RECOMPUTE=True, CARRY=True, CLAMP=True)),
}
JOBS = (
    *((case, arch) for case in ("plain", "runs", "odd sizes added", "everything") for arch in (90, 100, 103)),
    ("mxfp8", 90), ("mxfp8 everything", 90), ("mxfp8 odd sizes added", 90), *((case, 90) for case in CASES if case.startswith("hopper")),
)  # fmt: skip


def constants_of(hidden: int, width: int, shared: int, ranks: int, flags: dict[str, bool]) -> dict[str, object]:
    tasks = count_tasks(PLAN, Needs(), hidden, width, shared, 2048)
    constants: dict[str, object] = dict(
        H=hidden, I=width, S=shared, K=8, R=ranks, CLAMP=False, RECOMPUTE=False, CARRY=False, ACCUMULATE=False,
        BY_COPY_ENGINE=not any(size % 128 for size in (hidden, width, shared)) and "ACCUMULATE" not in flags,
        NEED_WEIGHTS=True, NEED_EXPERTS=True, NEED_SHARED=shared > 0, RUN=PLAN.run, PARTS=tasks.parts,
        BLOCK_M=PLAN.block_m, BLOCK_N=PLAN.block_n, BLOCK_K=PLAN.block_k, SLICE=PLAN.slice, BLOCK_H=PLAN.block_h,
        THREADS=32 * PLAN.num_warps, HALF_TILES=True, MXFP8=False, TRACE=False,
        HIDDENS=tasks.hiddens, D_XS=tasks.d_xs, D_WEIGHTS=tasks.d_weights,
        SHARED_HIDDENS=tasks.shared_hiddens, SHARED_D_XS=tasks.shared_d_xs,
    )  # fmt: skip
    constants |= flags
    constants["GATE_UPS"] = tasks.gate_ups if constants["RECOMPUTE"] else 0
    unused = set(OF_SHARED) if not shared else set()
    unused |= {"ring_x_desc", "gate_desc", "up_desc"} if not constants["RECOMPUTE"] else set()
    constants |= dict.fromkeys(unused)
    return constants


def hopper_type(name: str, constants: dict[str, object]) -> str:
    """The type of an argument of `backward_hopper_kernel`."""
    if name in constants or not name.endswith("_desc"):
        return argument_type(name, constants)
    block = (1, 64, 256)
    if name.startswith(("half_", "store_", "gate_up_pair_")):
        block = (1, 64, 64) if name.startswith("half_") else (128, 128) if name.startswith("store_") else (2, 128, 64)
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(block))
    return f"tensordesc<bf16[{', '.join(map(str, block))}],{layout!r}>"


def hopper_constants(hidden: int, width: int, shared: int, ranks: int, flags: dict[str, bool]) -> dict[str, object]:
    constants = constants_of(hidden, width, shared, ranks, flags)
    if not shared:
        constants |= {name: None for name in backward_hopper_kernel.arg_names if "shared_" in name and name.endswith("_desc")}
    if not constants["RECOMPUTE"]:
        constants |= dict(half_x_desc=None, gate_up_pair_desc=None)
    if constants["ACCUMULATE"]:
        constants |= {name: None for name in backward_hopper_kernel.arg_names if name.startswith("store_")}
    return constants


def stages(constants: dict[str, object], arch: int) -> int:
    return loads_in_flight(PLAN, constants["RUN"], arch // 10)


def argument_type(name: str, constants: dict[str, object]) -> str:
    m, n, k, store = PLAN.block_m, PLAN.block_n, PLAN.block_k, PLAN.store
    if name in constants:
        return "constexpr"
    if name.endswith("_desc"):
        if name.endswith("weight_desc"):
            block = (m, PLAN.block_n if constants["RUN"] == 1 else store)
        elif name in ("gate_desc", "up_desc"):
            block = (store, k)
        elif name.endswith("_kn_desc"):
            block = (1, k, n)
        elif name.endswith("_n_desc"):
            block = (k, n)
        elif name in ("ring_d_y_desc", "ring_d_gate_up_desc", "shared_d_y_desc", "shared_d_gate_up_desc"):
            block = (1, m, k)
        elif name.startswith("half_"):
            block = (1, m // 2, k)
        else:
            block = (k, m) if name.endswith("_t_desc") else (m, k)
        return f"tensordesc<bf16[{', '.join(map(str, block))}]>"
    if name.endswith("_ptrs"):
        return "*i64"
    if name.endswith("_ptr"):
        if name.endswith("_weight_ptr"):
            return "*fp32" if constants["ACCUMULATE"] else "*bf16"
        if constants.get("MXFP8") and name in ("d_y_ptr", "d_y_scale_ptr", "x_ptr", "x_scale_ptr"):
            return "*u8"
        return "*fp32" if name in FP32 else "*i32" if name in INT32 else "*bf16"
    return "fp32" if name in ("limit", "shared_limit") else "i32"


def quantized_type(name: str, constants: dict[str, object]) -> str:
    """The type of what is no descriptor of E4M3 values or codes, for the backwards of quantized experts."""
    m, n, k = PLAN.block_m, PLAN.block_n, PLAN.block_k
    if name in constants:
        return "constexpr"
    if name.endswith("weight_desc"):
        return f"tensordesc<bf16[{m}, {n if constants['RUN'] == 1 else n // 2}]>"
    if name.endswith("_n_desc"):
        return f"tensordesc<bf16[{k}, {n}]>"
    if name.endswith("_t_desc"):
        return f"tensordesc<bf16[{k}, {m}]>"
    if name.endswith("_ptrs"):
        return "*i64"
    if name.endswith("_ptr"):
        if name.endswith("_weight_ptr"):
            return "*fp32" if constants["ACCUMULATE"] else "*bf16"
        if "scale" in name or name in ("d_y_ptr", "x_ptr", "ring_d_y_ptr", "ring_x_ptr"):
            return "*u8"
        return "*fp32" if name in FP32 else "*i32" if name in INT32 else "*bf16"
    return "fp32" if name == "limit" else "i32"


def run_jobs(one: Callable[[str, int], dict[str, object]], jobs: Sequence[tuple[str, int]]) -> None:
    """Compile what the command line names ("case arch" ...), or all jobs, one after the other, and print the facts."""
    facts = {}
    for case, arch in [(" ".join(job.split()[:-1]), int(job.split()[-1])) for job in sys.argv[1:]] or jobs:
        facts[f"{case} {arch}"] = one(case, arch)
        print(f"{case} {arch}", facts[f"{case} {arch}"], file=sys.stderr, flush=True)
    print(json.dumps(facts))


def compile_one(
    kernel, arch: int, constants: dict[str, object], num_warps: int, num_stages: int, types=argument_type, **options: object
) -> dict[str, object]:  # fmt: skip
    """types: the type of an argument, by its name and the constants."""
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: types(name, constants) for name in kernel.arg_names}
    return facts_of(kernel, arch, signature, constants, num_warps=num_warps, num_stages=num_stages, **options)


def one(case: str, arch: int) -> tuple[str, list[dict[str, object]]]:
    if case.startswith("hopper"):
        constants = hopper_constants(*CASES[case])
        facts = compile_one(backward_hopper_kernel, arch, constants, PLAN.num_warps, 1, hopper_type, enable_fp_fusion=False)
        return f"{case} {arch}", [facts]
    constants = constants_of(*CASES[case])
    return f"{case} {arch}", [
        compile_one(backward_kernel, arch, constants, PLAN.num_warps, stages(constants, arch), enable_fp_fusion=False),
        compile_one(plan_kernel, arch, constants, 1, 3),
        compile_one(list_kernel, arch, constants | dict(BLOCK=256, RUN_N=constants["RUN"] * PLAN.block_n), 4, 3),
    ]


def main() -> None:
    asked = [(" ".join(job.split()[:-1]), int(job.split()[-1])) for job in sys.argv[1:]] or JOBS
    with ProcessPoolExecutor(2) as pool:
        facts = dict(pool.map(one, *zip(*asked, strict=True)))
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
