"""Compile the backward in MXFP8 that multiplies by scales for Blackwell without a GPU; the last line printed is JSON: {"case arch": facts}.

Run alone: python tests/compile_backward_mxfp8.py ["case arch" ...]
"""

from __future__ import annotations

from compile_backward import PLAN, compile_one, constants_of, quantized_type, run_jobs, stages

from mok.kernels.backward_mxfp8 import backward_mxfp8_kernel

CASES = {  # hidden, width, ranks, then flags
    "plain": (7168, 2048, 1, {}),
    "runs": (7168, 2048, 1, dict(RUN=4)),
    "frozen": (7168, 2048, 2, dict(NEED_EXPERTS=False)),
    "everything": (4096, 1024, 4, dict(RECOMPUTE=True, CARRY=True, CLAMP=True)),
    "odd sizes added": (2880, 1424, 2, dict(ACCUMULATE=True, CARRY=True, RECOMPUTE=True)),
}
JOBS = (("plain", 100), ("runs", 100), ("frozen", 100), ("everything", 100), ("odd sizes added", 103))


def argument_type(name: str, constants: dict[str, object]) -> str:
    m = PLAN.block_m
    if name.endswith("_desc") and name not in constants:
        if name.endswith("_scale_desc"):
            return f"tensordesc<u8[{2 if name.startswith(('gate_up', 'down_t')) else 1}, 1, 1, 2, 256]>"
        if name.startswith(("gate_up", "down_t")):
            return f"tensordesc<fp8e4nv[2, {m}, {m}]>"
        if not name.endswith(("weight_desc", "_n_desc")) and name not in ("wide_d_y_t_desc", "d_gate_t_desc", "d_up_t_desc"):
            return f"tensordesc<fp8e4nv[{m}, {PLAN.slice if name.startswith('store_') else m}]>"
    return quantized_type(name, constants)


def one(case: str, arch: int) -> dict[str, object]:
    hidden, width, ranks, flags = CASES[case]
    constants = constants_of(hidden, width, 0, ranks, flags) | dict(BLOCK_H=2 * PLAN.block_h)
    if not constants["RECOMPUTE"]:
        constants |= dict.fromkeys(("ring_x_desc", "x_scale_desc", "gate_up_desc", "gate_up_scale_desc"))
    num_stages = stages(constants, arch)
    return compile_one(backward_mxfp8_kernel, arch, constants, PLAN.num_warps, num_stages, argument_type, enable_fp_fusion=False)


if __name__ == "__main__":
    run_jobs(one, JOBS)
