"""The command `mok`: what it refuses, and how."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from mok import cli, train
from mok.model import LanguageModel


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    """An empty working folder, no launcher, and nothing that could start."""
    monkeypatch.chdir(tmp_path)
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    started = []
    monkeypatch.setattr(train, "train", lambda options, run, resume: started.append((options, run, resume)) or 0)
    return started


def call(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["train", *arguments])
    return result.exit_code, result.output


BAD = {
    "--steps=0": "--steps=0: must be at least 1",
    "--batch=0": "--batch=0: must be at least 1",
    "--batch=6": "--batch=6: must be a multiple of --slices=4",
    "--sequence=1": "--sequence=1: must be at least 2",
    "--layers=1": "--layers=1: must be at least 2",
    "--hidden=100": "--hidden=100: must be a multiple of 32",
    "--hidden=0": "--hidden=0: must be at least 32",
    "--dense=-1": "--dense=-1: must be at least 0",
    "--dense=4": "--layers=4: must be at least 5",
    "--heads=0": "--heads=0: must be at least 1",
    "--head-width=33": "--head-width=33: must be even",
    "--width=0": "--width=0: must be at least 1",
    "--experts=0": "--experts=0: must be at least 1",
    "--experts=2": "--top-k=4: must be at most --experts=2",
    "--top-k=17": "--top-k=17: must be at most --experts=16",
    "--top-k=0": "--top-k=0: must be at least 1",
    "--lr=0": "--lr=0.0: must be finite and above 0",
    "--lr=nan": "--lr=nan: must be finite and above 0",
    "--seed=-1": "--seed=-1: must be from 0",
    "--slices=0": "--slices=0: must be at least 1",
    "--ranks=0": "--ranks=0: must be at least 1",
    "--ranks=3": "--ranks=3: must divide --slices=4",
    "--threads=0": "--threads=0: must be at least 1",
    "--minibatch=100": "--minibatch=100: must be a multiple of 128",
    "--macrobatch=5000": "--macrobatch=5000: must be a multiple of minibatch=4096",
    "--saved-rows=-1": "--saved-rows=-1: must be at least 0",
    "--checkpoint-every=-1": "--checkpoint-every=-1: must be at least 0",
    "--eval-every=0": "--eval-every=0: must be at least 1",
    "--size=big": "--size=big: must be one of small, 400m",
    "--device=tpu": "--device=tpu: must be cpu or cuda",
    "--device=cuda --dtype=float32": "--dtype=float32: must be bfloat16 with --device=cuda",
    "--device=cuda --width=100": "--width=100: must be a multiple of 16 with --device=cuda",
    "--device=cuda --hidden=2056": "--hidden=2056: must be a multiple of 16 with --device=cuda",
    "--device=cuda --head-width=36": "--head-width=36: must be a multiple of 8 with --device=cuda",
    "--dtype=float16": "--dtype=float16: must be float32 or bfloat16",
    "--moe=best": "--moe=best: must be one of mok, torch, torch-compiled",
    "--moe=torch": "--moe=torch: needs --dtype=bfloat16",
    "--moe=torch --dtype=bfloat16 --ranks=2": "--moe=torch: runs on one rank, not on --ranks=2",
    "--against=mok": "--against=mok: must be another layer than --moe",
    "--against=mok --moe=torch --dtype=bfloat16 --ranks=2": "--moe=torch: runs on one rank",
    "--against=torch --dtype=bfloat16 --ranks=2": "--against=torch: runs on one rank, not on --ranks=2",
    "--text=missing": "no such file or folder",
    "--name=a/b": "--name=a/b: must be a plain name",
    "--name=..": "--name=..: must be a plain name",
    "--resume=nothing": "--resume=nothing: neither a run",
}


@pytest.mark.parametrize("argument", BAD)
def test_a_bad_option_is_named_before_anything_starts(argument, _folder, tmp_path):
    code, output = call(*argument.split())
    assert code == 1, output
    assert BAD[argument] in output
    assert "Traceback" not in output
    assert not _folder
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("argument", ["--steps=many", "--lr=fast", "--no-such-option"])
def test_what_is_not_a_number_or_an_option_is_named(argument, _folder):
    code, output = call(argument)
    assert code == 2
    assert argument.split("=")[0] in output
    assert not _folder


def test_more_ranks_than_experts():
    assert "--ranks=4: must be at most --experts=2" in call("--ranks=4", "--experts=2", "--top-k=1")[1]


def test_defaults_and_given_options(_folder):
    assert call("--steps=5", "--name=x", "--saved-rows=0", "--ranks=4")[0] == 0
    (options, run, resume) = _folder.pop()
    assert (options.steps, options.saved_rows, options.ranks, str(run), resume) == (5, 0, 4, "runs/x", False)
    assert call()[0] == 0
    assert _folder.pop()[0] == train.Options(ranks=train.default_ranks(4, 16)), "the command and Options have the same defaults"


def test_a_gpu_and_a_size_choose_other_defaults(_folder):
    assert call("--device=cuda")[0] == 0
    large = _folder.pop()[0]
    assert large == train.Options(**train.SIZES["400m"], device="cuda")
    assert (large.ranks, large.dtype, large.experts) == (1, "bfloat16", 64)
    assert call("--device=cuda", "--size=small", "--ranks=2")[0] == 0
    assert _folder.pop()[0] == train.Options(device="cuda", dtype="bfloat16", ranks=2)
    assert call("--size=400m", "--batch=4", "--ranks=1")[0] == 0
    assert _folder.pop()[0] == train.Options(**{**train.SIZES["400m"], "batch": 4})
    assert call("--dtype=bfloat16", "--moe=torch")[0] == 0
    assert _folder.pop()[0].ranks == 1, "torch's layer runs on one rank"


def test_sizes_are_what_the_help_says():
    for size, parameters in {"small": 1.7e6, "400m": 414e6}.items():
        with torch.device("meta"):
            config = train.Options(**train.SIZES[size]).model()
            model = LanguageModel(config, device="meta", layer="torch")
        count = sum(p.numel() for p in (*model.trunk.parameters(), *model.experts().values()))
        assert count == pytest.approx(parameters, rel=0.01)


def test_resume_takes_a_name_or_a_folder_and_the_runs_options(_folder, tmp_path):
    for folder in (tmp_path / "runs" / "x", tmp_path / "elsewhere"):
        folder.mkdir(parents=True)
        options = {**vars(train.Options(steps=7, ranks=2))}
        (folder / "config.json").write_text(json.dumps({"options": options}))
    for given in ("x", str(tmp_path / "elsewhere")):
        assert call("--resume", given, "--minibatch=128", "--macrobatch=256")[0] == 0
        options, _, resume = _folder.pop()
        assert (options.steps, options.ranks, options.minibatch, resume) == (7, 2, 128, True)
    assert "--steps=9: the run was started with 7" in call("--resume=x", "--steps=9")[1]
    assert "--name=y: a run that is resumed keeps its name" in call("--resume=x", "--name=y")[1]
    assert "--size=400m: a run that is resumed keeps its size" in call("--resume=x", "--size=400m")[1]
    (tmp_path / "elsewhere" / "config.json").write_text("{")
    assert "is not a config of mok train" in call("--resume", str(tmp_path / "elsewhere"))[1]


def test_a_launchers_ranks(_folder, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert call()[0] == 0
    assert _folder.pop()[0].ranks == 4
    assert "--ranks=2: the launcher started 4" in call("--ranks=2")[1]


def test_a_name_is_used_once(_folder, monkeypatch, tmp_path):
    (tmp_path / "runs" / "x").mkdir(parents=True)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    code, output = call("--name=x")
    assert code == 1
    assert "--name=x: runs/x exists; choose another name, or go on with it: --resume x" in output


def test_a_folder_for_runs_that_cannot_be_made(_folder, monkeypatch, tmp_path):
    (tmp_path / "runs").touch()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    code, output = call("--name=x")
    assert code == 1 and "Traceback" not in output
    assert "error: runs/x: cannot be made (Not a directory); a run is kept in runs/ of the working directory" in output


def test_help():
    line = [sys.executable, "-m", "mok", "train", "--help"]
    result = subprocess.run(line, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "200"})
    assert result.returncode == 0, result.stderr
    for option in ("--size", "--steps", "--ranks", "--saved-rows", "--resume", "--text", "--device", "--moe", "350, 200 for 400m"):
        assert option in result.stdout
