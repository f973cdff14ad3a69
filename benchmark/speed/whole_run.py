"""Whole runs of a script, as a user starts them: seconds per update and in all, and peak memory.

    python benchmark/speed/whole_run.py --tag tiny -- ppo_rlhf.py --reward_fn tiny.rewards:happy
    python benchmark/speed/whole_run.py --tag 7b --shape llama-7b -- ppo_rlhf.py --lora_rank 16 ..

Seconds per update are those between the first and the last line of metrics.jsonl, so that the first
update warms up. `whole` has the script's imports, loading, evaluation and saving too. Peak memory
is that of the whole run beyond common.baseline.

--shape names a model of random weights that --base_model then is: see common.model_folder, or
llama-7b, whose 6.5 billion weights (tiny's vocabulary) are made in bf16, or chat: tiny's shape,
whose every token ends a response with the same probability. Writes whole_run-<tag>.json.
"""

import argparse
import contextlib
import json
import math
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers

from benchmark import common

LLAMA_7B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_attention_heads": 32,
}
# Answers of hh-rlhf (harmless, test) have a mean of 35 words, about 46 tokens, and nearly the
# quantiles of a geometric distribution: 5, 50 and 95 % have 4, 24 and 101 words.
CHAT_MEAN = 46
TEMPERATURE = 0.7


def let_all_tokens_end(folder: str) -> None:
    """Gives the token 0, which is the eos, the same probability everywhere: one in CHAT_MEAN, up to
    rounding of the other tokens' share. What a layer norm gives has no mean, so only its bias meets
    a row of equal weights."""
    lm = transformers.GPT2LMHeadModel.from_pretrained(folder)
    size, width = lm.lm_head.weight.shape
    with torch.no_grad():
        others = (lm.lm_head.weight[1:].std() * width**0.5 / TEMPERATURE).square() / 2
        logit = TEMPERATURE * (math.log((size - 1) / (CHAT_MEAN - 1)) + others)
        lm.transformer.ln_f.bias.fill_(1 / width**0.5)
        lm.lm_head.weight[0] = logit / width**0.5
    lm.save_pretrained(folder)


# --- one run --------------------------------------------------------------------------------------
@contextlib.contextmanager
def base_model(shape: str | None) -> Iterator[list[str]]:
    """The flag that names a model of this shape, which comes with tiny's tokenizer."""
    if shape is None:
        yield []
    elif shape == "chat":
        with common.model_folder("4x128") as folder:
            let_all_tokens_end(folder)
            common.tokenizer().save_pretrained(folder)
            yield ["--base_model", folder]
    elif shape != "llama-7b":
        with common.model_folder(shape) as folder:
            common.tokenizer().save_pretrained(folder)
            yield ["--base_model", folder]
    else:
        tokenizer = common.tokenizer()
        config = transformers.LlamaConfig(
            vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, **LLAMA_7B
        )
        with tempfile.TemporaryDirectory() as folder:
            with torch.device(common.device()):
                lm = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
            lm.save_pretrained(folder)
            del lm
            torch.cuda.empty_cache()  # the run, another process, is to have it
            tokenizer.save_pretrained(folder)
            yield ["--base_model", folder]


def run(script: str, flags: list[str]) -> dict[str, Any]:
    """Runs a script in this process, which is to have run nothing else."""
    device = common.device()
    before = common.baseline(device)
    os.chdir(common.ROOT)
    times = []
    dump = json.dumps

    def timed(x: Any, *args: Any, **kwargs: Any) -> str:
        """The scripts write a line of metrics per update."""
        if isinstance(x, dict) and "episode" in x:
            times.append(time.perf_counter())
        return dump(x, *args, **kwargs)

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        json.dumps = timed
        sys.argv = [script, *flags, "--output_dir", str(out)]
        start = time.perf_counter()
        runpy.run_path(str(common.ROOT / script), run_name="__main__")
        whole = time.perf_counter() - start
        json.dumps = dump
        metrics = common.read_lines(out / "metrics.jsonl")
    last = metrics[-1]
    row = {
        "updates": len(metrics),
        "episodes": last["episode"],
        "whole_seconds": whole,
        "scores": last["objective/scores"],
        "first_ratio_error": max(x["first_ratio_error"] for x in metrics),
    }
    row |= common.used(device, before)
    if len(times) > 1:
        row["seconds_per_update"] = (times[-1] - times[0]) / (len(times) - 1)
        row["episodes_per_second"] = metrics[0]["episode"] / row["seconds_per_update"]
    return row


def run_in_child(script: str, flags: list[str]) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--run", json.dumps([script, flags])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script} has failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = common.make_parser(__doc__, __file__)
    add = parser.add_argument
    add("--tag", help="name of the record")
    add("--shape", default=None, help="a model of random weights (default: what the flags say)")
    # A script and its flags: what this file starts itself for.
    add("--run", type=json.loads, default=None, help=argparse.SUPPRESS)
    add("command", nargs="*", metavar="script flags", help="after --")
    options = parser.parse_args()
    given = vars(options).pop("run")
    if given is not None:
        with common.private_stdout() as answers:
            answers.write(json.dumps(run(*given)) + "\n")
        return
    if options.tag is None or not options.command:
        parser.error("give --tag, and a script with its flags after --")
    script, *flags = options.command
    with base_model(options.shape) as model_flags:
        row = run_in_child(script, [*model_flags, *flags])
    path = common.write(options, [{"script": script} | row], "whole_run")
    common.show_rows([row], path.name)


if __name__ == "__main__":
    main()
