"""Writes the patches of this folder again, each for the script as it is now.

    python benchmark/systems/make.py                # all, after a change of the scripts
    python benchmark/systems/make.py grpo grpo.py   # one, from a copy that was edited

The text above a patch is kept. A patch that does not fit any more, even with the lines around its
changes ignored, is named: then apply what fits with `patch -o`, mend the copy, and name it here.
"""

import difflib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SYSTEMS = Path(__file__).resolve().parent
ROOT = SYSTEMS.parent.parent


def base_of(patch: str) -> str:
    """The script that a patch is for."""
    return re.search(r"^--- (\w+\.py)$", patch, re.M).group(1)


def patched(name: str, path: Path, fuzz: int = 0, script: str = "") -> Path:
    """Writes the patch's script, or another one, with the system's patch to `path`."""
    file = SYSTEMS / f"{name}.patch"
    script = ROOT / (script or base_of(file.read_text()))
    command = ["patch", f"--fuzz={fuzz}", "--reject-file=-", "--no-backup-if-mismatch"]
    command += ["-o", str(path), str(script), str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(f"{file.name} does not apply:\n{done.stdout}")
    return path


def write_patch(name: str, edited: str) -> None:
    """NAME.patch becomes the difference of the edited text from its script, below its old head."""
    file = SYSTEMS / f"{name}.patch"
    text = file.read_text()
    script = base_of(text)
    head = text[: text.index(f"--- {script}\n")]
    lines = [(ROOT / script).read_text().splitlines(True), edited.splitlines(True)]
    file.write_text(head + "".join(difflib.unified_diff(*lines, script, f"{name}.py", n=1)))


def main() -> None:
    if sys.argv[1:]:
        name, edited = sys.argv[1:]
        write_patch(name, Path(edited).read_text())
        return
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        for file in sorted(SYSTEMS.glob("*.patch")):
            try:
                path = patched(file.stem, Path(folder) / f"{file.stem}.py", fuzz=3)
                write_patch(file.stem, path.read_text())
            except ValueError as error:
                errors.append(str(error))
    if errors:
        raise SystemExit("\n".join(errors))


if __name__ == "__main__":
    main()
