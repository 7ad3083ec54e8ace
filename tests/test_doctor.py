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
EIGHT = replace(ONE, gpus=(H200,) * 8, copy_gbs=(390.0,) * 7, symmetric="", multicast=OFF)


def states(facts: Facts) -> dict[str, str]:
    return {finding.name: finding.state for finding in judge(facts)}


def text_of(facts: Facts, name: str) -> str:
    return next(finding.text for finding in judge(facts) if finding.name == name)


def test_a_node_of_eight():
    assert set(states(EIGHT).values()) == {"works"}
    assert "8 x NVIDIA H200, sm_90, 139.8 GiB, 132 multiprocessors" in text_of(EIGHT, "GPU")
    assert "NVLink: 390 GB/s" in text_of(EIGHT, "link")


def test_one_gpu_needs_nothing_of_several():
    assert states(ONE) == {"CPU": "works", "GPU": "works", "driver": "works", "Triton": "works", "several ranks": "note"}


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
    (replace(EIGHT, copy_gbs=(390.0, 45.5)), "link", "note", "45.5 to 390 GB/s to GPU 0"),
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
