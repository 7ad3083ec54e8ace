"""Compile the backward in MXFP8 that multiplies by scales for Blackwell without a GPU; the last line printed is JSON: {"case arch": facts}.

Run alone: python tests/compile_backward_mxfp8.py ["case arch" ...]
"""

from __future__ import annotations

import json
import sys

from compile_backward import FP32, INT32, PLAN, constants_of, facts_of

from mok.kernels.backward_mxfp8 import backward_mxfp8_kernel

CASES = {  # hidden, width, ranks, then flags
    "plain": (7168, 2048, 1, {}),
    "frozen": (7168, 2048, 2, dict(NEED_EXPERTS=False)),
    "everything": (4096, 1024, 4, dict(RECOMPUTE=True, CARRY=True, CLAMP=True)),
    "odd sizes added": (2880, 1424, 2, dict(ACCUMULATE=True, CARRY=True, RECOMPUTE=True)),
}
JOBS = (("plain", 100), ("frozen", 100), ("everything", 100), ("odd sizes added", 103))


def argument_type(name: str, constants: dict[str, object]) -> str:
    m, n, k = PLAN.block_m, PLAN.block_n, PLAN.block_k
    if name in constants:
        return "constexpr"
    if name.endswith("_scale_desc"):
        return f"tensordesc<u8[{2 if name.startswith(('gate_up', 'down_t')) else 1}, 1, 1, 2, 256]>"
    if name.endswith("_desc"):
        if name.endswith("weight_desc"):
            return f"tensordesc<bf16[{m}, {n if constants['RUN'] == 1 else n // 2}]>"
        if name.endswith("_n_desc"):
            return f"tensordesc<bf16[{k}, {n}]>"
        if name in ("wide_d_y_t_desc", "d_gate_t_desc", "d_up_t_desc"):
            return f"tensordesc<bf16[{k}, {m}]>"
        if name.startswith(("gate_up", "down_t")):
            return f"tensordesc<fp8e4nv[2, {m}, {m}]>"
        return f"tensordesc<fp8e4nv[{m}, {PLAN.slice if name.startswith('store_') else m}]>"
    if name.endswith("_ptrs"):
        return "*i64"
    if name.endswith("_ptr"):
        if name.endswith("_weight_ptr"):
            return "*fp32" if constants["ACCUMULATE"] else "*bf16"
        if "scale" in name or name in ("d_y_ptr", "x_ptr", "ring_d_y_ptr", "ring_x_ptr"):
            return "*u8"
        return "*fp32" if name in FP32 else "*i32" if name in INT32 else "*bf16"
    return "fp32" if name == "limit" else "i32"


def one(case: str, arch: int) -> dict[str, object]:
    hidden, width, ranks, flags = CASES[case]
    constants = constants_of(hidden, width, 0, ranks, flags) | dict(BLOCK_H=2 * PLAN.block_h)
    if not constants["RECOMPUTE"]:
        constants |= dict.fromkeys(("ring_x_desc", "x_scale_desc", "gate_up_desc", "gate_up_scale_desc"))
    return facts_of(backward_mxfp8_kernel, arch, constants, PLAN.num_warps, PLAN.num_stages, argument_type, enable_fp_fusion=False)


def main() -> None:
    asked = [(" ".join(job.split()[:-1]), int(job.split()[-1])) for job in sys.argv[1:]] or JOBS
    facts = {}
    for case, arch in asked:
        facts[f"{case} {arch}"] = one(case, arch)
        print(f"{case} {arch}", facts[f"{case} {arch}"], file=sys.stderr, flush=True)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
