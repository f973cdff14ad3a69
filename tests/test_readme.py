"""The README says what the code and the measured results say."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_generated_tables_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "benchmark" / "readme_tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_link_leads_to_a_file() -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#L\d+)?\)", README)
    assert len(targets) > 30
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_flag_that_is_shown_exists() -> None:
    scripts = "".join((ROOT / f"{name}.py").read_text() for name in ("ppo_rlhf", "rloo_rlhf", "train_reward"))
    flags = set(re.findall(r"(?<![\w-])--([a-z_]+)", README)) - {
        "help",
        "golden",
        "num_processes",
        "multi_gpu",
        "cpu",
        "config_file",
    }  # of other programs
    assert len(flags) > 5
    assert [flag for flag in flags if not re.search(rf"^    {flag}: ", scripts, re.M)] == []


def test_the_stated_size_of_the_diff_is_right() -> None:
    done = subprocess.run(
        ["diff", "ppo_rlhf.py", "rloo_rlhf.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    changed = sum(line[:1] in ("<", ">") for line in done.stdout.splitlines())
    assert f"({changed} changed lines)" in README
