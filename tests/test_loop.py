"""docs/loop.sh makes whole rounds. Its scripts run in forked processes, which start faster."""

import os
import subprocess
import sys
import time

import fork_tools
import pytest
from conftest import ROOT
from fork_tools import PPO, REWARD, RLOO
from run_tools import read_lines

from tiny.rewards import happy

# Asks the test to run a script, and waits for its exit status; other programs run as usual.
STAND_IN = f"""#!/usr/bin/env bash
[ "$1" = - ] && exec {sys.executable} "$@"
printf '%s\\n' "$@" > asked.tmp
mv asked.tmp asked
while [ ! -e answered ]; do sleep 0.02; done
status=$(cat answered)
rm answered
exit "$status"
"""
SMALL = "--response_length 12 --truncate_after 3 --query_length 16 --batch_size 4"
SIZES = {
    "ROUNDS": "2",
    "QUERIES": "32",
    "EPISODES": "8",
    "REWARD_FLAGS": "--normalization_samples 8 --lr 1e-3",
    "PPO_FLAGS": "--eval_queries 2 --lr 1e-3",
}


@pytest.mark.long
def test_two_rounds_of_the_loop(tmp_path):
    """Each begins with the policy of the one before, and keeps its labels."""
    folder = tmp_path / "here"
    folder.mkdir()
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    env = os.environ | SIZES | {"PYTHONPATH": str(ROOT)}
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    ran = []
    command = ["bash", str(ROOT / "docs/loop.sh"), *SMALL.split()]
    with subprocess.Popen(command, cwd=folder, env=env) as loop:
        while loop.poll() is None:
            if (folder / "asked").exists():
                script, *words = (folder / "asked").read_text().splitlines()
                (folder / "asked").unlink()
                status, _, errors = fork_tools.run(script, words, folder)
                (folder / "answer").write_text(str(status))
                (folder / "answer").rename(folder / "answered")
                assert status == 0, errors
                ran.append((script, words))
            time.sleep(0.02)
    assert loop.returncode == 0
    assert [script for script, _ in ran] == [RLOO, REWARD, PPO] * 2
    for _, words in ran[3:]:
        assert words[words.index("--base_model") + 1] == "runs/loop/1/ppo/policy"
    for script, words in ran:
        assert ("1e-3" in words) == (script != RLOO)

    rounds = folder / "runs/loop"
    second = read_lines(rounds / "2/labels.jsonl")
    labels = read_lines(rounds / "2/all_labels.jsonl")
    assert second
    assert read_lines(rounds / "1/labels.jsonl") + second == labels
    for label in labels:
        scores = happy([label[f"sample{i}"] for i in range(4)])
        others = scores[: label["best"]] + scores[label["best"] + 1 :]
        assert scores[label["best"]] > max(others)
    assert (rounds / "2/ppo/samples.jsonl").exists()
