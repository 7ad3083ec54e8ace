"""Compile the backward in blockwise FP8 for three chips without a GPU; the last line printed is JSON: {"case arch": facts}.

Run alone: python tests/compile_backward_fp8.py [case arch ...]
"""

from __future__ import annotations

import json
import sys

from compile_backward import FP32, INT32, PLAN, constants_of, facts_of

from mok.kernels.backward_fp8 import backward_fp8_kernel

BLOCK = 128
CASES = {  # hidden, width, ranks, then flags
    "plain": (7168, 2048, 1, {}),
    "runs": (7168, 2048, 1, dict(RUN=4)),
    "frozen": (7168, 2048, 2, dict(NEED_EXPERTS=False)),
    "quantized weight gradients": (7168, 2048, 1, dict(SNAP_COLUMNS=True, RUN=4)),
    "everything": (4096, 1024, 4, dict(RECOMPUTE=True, CARRY=True, CLAMP=True)),
    "odd sizes added": (2880, 1424, 2, dict(ACCUMULATE=True, CARRY=True, RECOMPUTE=True)),
}
JOBS = (("plain", 90), ("runs", 90), ("quantized weight gradients", 90), ("frozen", 90), ("everything", 90), ("odd sizes added", 90),
        ("everything", 100), ("everything", 103))  # fmt: skip


def argument_type(name: str, constants: dict[str, object]) -> str:
    m, n, k = PLAN.block_m, 2 * BLOCK, PLAN.block_k
    if name in constants:
        return "constexpr"
    if name.endswith("_desc"):
        if name.endswith("weight_desc"):
            return f"tensordesc<bf16[{m}, {n if constants['RUN'] == 1 else n // 2}]>"
        if name.endswith("_n_desc"):
            return f"tensordesc<bf16[{k}, {n}]>"
        if name.endswith("_t_desc") and name not in ("down_t_desc", "gate_up_t_desc"):
            return f"tensordesc<bf16[{k}, {m}]>"
        if name.startswith("store_"):
            return f"tensordesc<fp8e4nv[{m // 2 if 'half_' in name else m}, {BLOCK // 2}]>"
        return f"tensordesc<fp8e4nv[1, {m // 2 if name.startswith('half_') else m}, {BLOCK}]>"
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
    constants = constants_of(hidden, width, 0, ranks, flags) | dict(BLOCK=BLOCK, BLOCK_H=2 * PLAN.block_h)
    constants.setdefault("SNAP_COLUMNS", False)
    if constants["RECOMPUTE"]:
        for name in ("ring_x_desc", "gate_desc", "up_desc"):
            constants.pop(name, None)
    return facts_of(backward_fp8_kernel, arch, constants, PLAN.num_warps, PLAN.num_stages, argument_type, enable_fp_fusion=False)


def main() -> None:
    asked = [(" ".join(job.split()[:-1]), int(job.split()[-1])) for job in sys.argv[1:]] or JOBS
    facts = {}
    for case, arch in asked:
        facts[f"{case} {arch}"] = one(case, arch)
        print(f"{case} {arch}", facts[f"{case} {arch}"], file=sys.stderr, flush=True)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
