"""`mok doctor`: what the facts of several machines mean, and what is found on this one."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from mok import cli, doctor
from mok.doctor import Facts, Gpu, collect, judge

H200 = Gpu("NVIDIA H200", (9, 0), 139.8, 132)
ONE = Facts(
    python="3.12.3", cores=16, torch="2.11.0+cu130", cuda="13.0", triton="3.6.0", driver="580.1", nccl=True, matplotlib=True, gpus=(H200,)
)
OFF = (("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"), ("NVSHMEM_DISABLE_NVLS", "1"))
B200 = replace(H200, name="NVIDIA B200", capability=(10, 0))
PAIRS = [(i, j) for i in range(8) for j in range(8) if i != j]


def rates(slow: float = 390.0, *pairs: tuple[int, int]) -> tuple[tuple[int, int, float], ...]:
    """Copies between every two of eight GPUs: slow ones between these pairs, or between all."""
    return tuple((*pair, slow if pair in (pairs or PAIRS) else 390.0) for pair in PAIRS)


EIGHT = replace(ONE, gpus=(H200,) * 8, copies=rates(), symmetric="", multicast=OFF)


def states(facts: Facts) -> dict[str, str]:
    return {finding.name: finding.state for finding in judge(facts)}


def text_of(facts: Facts, name: str) -> str:
    return next(finding.text for finding in judge(facts) if finding.name == name)


def test_a_node_of_eight():
    assert set(states(EIGHT).values()) == {"works"}
    assert "8 x NVIDIA H200, sm_90, 139.8 GiB, 132 multiprocessors" in text_of(EIGHT, "GPU")
    assert text_of(EIGHT, "NVLink").startswith("390 GB/s between every two of 8 GPUs")


def test_one_gpu_needs_nothing_of_several():
    several = ("peer access", "symmetric memory", "NVLink", "multicast")
    works = dict.fromkeys(("CPU", "GPU", "BF16", "blockwise FP8", "MXFP8", "driver", "Triton"), "works")
    assert states(ONE) == works | dict.fromkeys(("several ranks", *several), "note")
    assert {text_of(ONE, name) for name in several} == {"only one GPU: nothing to check"}
    none = states(replace(ONE, gpus=()))
    assert not {"several ranks", "BF16", *several} & set(none), "without a GPU its line says all"


@pytest.mark.parametrize("capability, state", [((9, 0), "works"), ((10, 0), "note"), ((10, 3), "note"), ((8, 0), ""), ((12, 0), "")])
def test_the_formats(capability, state):
    """What every format is multiplied in; what never ran is not said to work."""
    facts = replace(ONE, gpus=(replace(H200, capability=capability),))
    formats = {name: found for name, found in states(facts).items() if name in ("BF16", "blockwise FP8", "MXFP8")}
    assert formats == (dict.fromkeys(("BF16", "blockwise FP8", "MXFP8"), state) if state else {})
    if state == "works":
        assert "in bf16" not in text_of(facts, "GPU") and "multiplied in FP8" in text_of(facts, "blockwise FP8")
        assert "widened to BF16 and multiplied there, which is exact but for" in text_of(facts, "MXFP8")
    if state == "note":
        assert all("never run" in text_of(facts, name) for name in formats) and "take the scales themselves" in text_of(facts, "MXFP8")
    assert "experts also in blockwise FP8 and MXFP8" in text_of(facts, "CPU")


def test_the_formats_of_two_families():
    texts = [finding.text.partition(":")[0] for finding in judge(replace(EIGHT, gpus=(H200, H200, B200))) if finding.name == "MXFP8"]
    assert texts == ["on Hopper", "on Blackwell"]


def test_copies_between_every_two_gpus_or_neighbours():
    assert doctor.copied(1) == [] and doctor.copied(2) == [(0, 1), (1, 0)] and doctor.copied(8) == PAIRS
    many = doctor.copied(16)
    assert len(many) == 32 and set(many) == {(i, (i + 1) % 16) for i in range(16)} | {((i + 1) % 16, i) for i in range(16)}
    facts = replace(EIGHT, gpus=(H200,) * 16, copies=tuple((*pair, 380.0) for pair in many))
    assert text_of(facts, "NVLink").startswith("380 GB/s between neighbours of 16 GPUs")


WRONG = [
    (replace(ONE, gpus=(replace(H200, name="A100", capability=(8, 0)),)), "GPU", "fails", "does not have; use the CPU"),
    (replace(ONE, gpus=(replace(H200, name="B200", capability=(10, 0)),)), "GPU", "note", "never run on one"),
    (replace(ONE, gpus=(replace(H200, name="RTX", capability=(12, 0)),)), "GPU", "fails", "too little shared memory"),
    (replace(ONE, torch="2.9.1"), "torch", "fails", "2.9.1: 2.11 or newer"),
    (replace(ONE, triton=""), "Triton", "fails", "not installed"),
    (replace(ONE, triton="3.5.1"), "Triton", "fails", "3.5.1: the kernels need 3.6"),
    (replace(ONE, gpus=(), triton=""), "Triton", "note", "runs on the CPU only"),
    (replace(ONE, gpus=()), "GPU", "note", "driver 580.1 is here: is it too old for CUDA 13.0"),
    (replace(ONE, gpus=(), driver=""), "GPU", "note", "no NVIDIA driver was found"),
    (replace(ONE, gpus=(), cuda=""), "GPU", "note", "this build of torch has no CUDA"),
    (replace(ONE, matplotlib=False), "plots", "note", "--plot and --png are refused"),
    (replace(EIGHT, no_access=((0, 4), (4, 0))), "peer access", "fails", "missing between GPUs 0-4, 4-0: these cannot"),
    (replace(EIGHT, nccl=False), "NCCL", "fails", "ranks on GPUs cannot meet"),
    (replace(EIGHT, symmetric="CUDA error: not permitted"), "symmetric memory", "fails", "other's memory: CUDA error: not permitted"),
    (replace(EIGHT, symmetric=None), "symmetric memory", "note", "not tried"),
    (replace(EIGHT, copies=()), "NVLink", "note", "not tried"),
    (replace(EIGHT, copies=rates(45.5)), "NVLink", "note", "45.5 GB/s between every two of 8 GPUs, less than NVLink's (all of them)"),
    (replace(EIGHT, copies=rates(45.5, (3, 5), (5, 3))), "NVLink", "note", "45.5 to 390 GB/s"),
    (replace(EIGHT, copies=rates(45.5, (3, 5), (5, 3))), "NVLink", "note", "less than NVLink's (3-5, 5-3): dispatch and combine"),
    (replace(EIGHT, copies=rates(45.5, *PAIRS[:7])), "NVLink", "note", "(0-1, 0-2, 0-3, 0-4, 0-5, 0-6 and 1 more)"),
    (replace(EIGHT, multicast=OFF[1:]), "multicast", "note", "must be off: NCCL_NVLS_ENABLE=0;"),
]


@pytest.mark.parametrize("facts, name, state, text", WRONG)
def test_what_is_wrong_is_said(facts, name, state, text):
    assert states(facts)[name] == state
    assert text in text_of(facts, name)


def test_gpus_of_two_kinds():
    texts = [finding.text for finding in judge(replace(EIGHT, gpus=(H200, replace(H200, name="H100"))))]
    assert sum("1 x NVIDIA H" in text or "1 x H100" in text for text in texts) == 2 and any("not alike" in text for text in texts)


def test_this_machine_is_looked_at(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    facts = collect()
    assert facts.torch == torch.__version__ and len(facts.gpus) == torch.cuda.device_count()
    assert ("NCCL_NVLS_ENABLE", "0") in facts.multicast
    assert states(facts)["CPU"] == "works"


@pytest.mark.parametrize("count", [1, 3])
def test_several_gpus_are_looked_at_in_pairs(monkeypatch, count):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) != (2, 0))
    monkeypatch.setattr(doctor, "_gpu", lambda index: H200)
    monkeypatch.setattr(doctor, "_copy_gbs", lambda source, target: 100.0 * source + target)
    monkeypatch.setattr(doctor, "_probe", lambda size: asked.append(size) or "")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: True)
    facts, quick = collect(), collect(measure=False)
    every = ((0, 1, 1.0), (0, 2, 2.0), (1, 0, 100.0), (1, 2, 102.0), (2, 0, 200.0), (2, 1, 201.0))
    assert facts.copies == (every if count == 3 else ()) and quick.copies == () and asked == ([3] if count == 3 else [])
    assert facts.no_access == (((2, 0),) if count == 3 else ()) and facts.symmetric == ("" if count == 3 else None)
    assert states(facts)["NVLink"] == states(quick)["NVLink"] == "note"


def test_the_command(monkeypatch):
    monkeypatch.setattr(doctor, "collect", lambda measure: replace(EIGHT, symmetric="lost") if measure else EIGHT)
    result = CliRunner().invoke(cli.app, ["doctor", "--quick", "--json"])
    answer = json.loads(result.output)
    assert result.exit_code == 0 and answer["facts"]["gpus"][0]["name"] == "NVIDIA H200"
    assert [finding["state"] for finding in answer["findings"]] == ["works"] * len(answer["findings"])
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 1 and "each other's memory: lost" in result.output


def test_the_part_with_a_process_per_gpu_is_reported_by_its_error(monkeypatch):
    said = ["Traceback (most recent call last):", "torch.AcceleratorError: CUDA error: peer mapping", "", "[rank1] some warning"]
    answers = {0: "", 1: said[1], 3: "exit code 3"}
    for code, lines in ((0, said), (1, said), (3, [])):
        done = subprocess.CompletedProcess([], code, "", "\n".join(lines))
        monkeypatch.setattr(subprocess, "run", lambda *_, done=done, **__: done)
        assert doctor._probe(2) == answers[code]
