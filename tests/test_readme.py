"""What README.md shows runs as it stands there: snippets that name torchrun under torchrun, the others each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
LAUNCH = re.compile(r"# \S+: torchrun --nproc-per-node (\d+) (\S+)\n")
LAUNCHED = {found[2]: (int(found[1]), snippet) for snippet in SNIPPETS if (found := LAUNCH.match(snippet))}
PLAIN = [snippet for snippet in SNIPPETS if not LAUNCH.match(snippet)]


def run(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("name, ranks", [("expert_parallel.py", 2), ("fsdp.py", 4)])
def test_snippets_for_torchrun(tmp_path, name, ranks):
    """The loss falls, and nothing warns of ranks that start from other weights."""
    written, snippet = LAUNCHED[name]
    assert written == ranks
    (tmp_path / name).write_text(snippet)
    output = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(tmp_path / name))
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\S+)", output)]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2] and "generator stands" not in output, output


def test_all_other_snippets():
    assert len(PLAIN) == 3 and len(LAUNCHED) == 2
    assert ["virtual_ranks" in snippet for snippet in PLAIN] == [False, True, False] and "F.backward" in PLAIN[2]
    blocks = "".join(f"exec({snippet!r}, {{}})\n" for snippet in PLAIN)  # one process for all, as torch's import takes longest
    run("-c", blocks)
