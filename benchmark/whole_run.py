"""A whole run of a script, as a user starts it: seconds in all and per update, episodes per second, peak memory.

    python benchmark/whole_run.py --tag tiny-ppo -- ppo_rlhf.py --reward_fn tiny.rewards:happy
    python benchmark/whole_run.py --tag 7b --shape llama-7b -- ppo_rlhf.py --dtype bf16 --lora_rank 16 --batch_size 64

Seconds per update are those between the first and the last line of metrics.jsonl; `whole` has loading, evaluation and
saving too, not the imports. --shape names a model of random weights that --base_model then is: see common.model_folder,
or llama-7b, whose 6.5 billion weights (tiny's vocabulary) are made in bf16. Writes results/whole_run-<tag>.json.
"""

import argparse
import contextlib
import json
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import torch
import transformers


@contextlib.contextmanager
def base_model(shape: str | None) -> Iterator[list[str]]:
    """The flag that names a model of this shape, which comes with tiny's tokenizer."""
    if shape is None:
        yield []
    elif shape != "llama-7b":
        with common.model_folder(shape) as folder:
            common.tokenizer().save_pretrained(folder)
            yield ["--base_model", folder]
    else:
        tokenizer = common.tokenizer()
        sizes = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11_008, "num_attention_heads": 32}
        config = transformers.LlamaConfig(**sizes, vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0)
        with tempfile.TemporaryDirectory() as folder, torch.device(common.device()):
            transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            yield ["--base_model", folder]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", required=True, help="name of the record")
    parser.add_argument("--shape", default=None, help="a model of random weights (default: what the flags say)")
    parser.add_argument("command", nargs="+", metavar="script flags", help="after --")
    options, times = parser.parse_args(), []
    os.chdir(common.ROOT)
    before, (script, *flags) = common.baseline(common.device()), options.command
    with tempfile.TemporaryDirectory() as folder, base_model(options.shape) as more:
        dump, out = json.dumps, Path(folder) / "out"

        def timed(x: Any, *args: Any, **kwargs: Any) -> str:  # the scripts write a line of metrics per update
            if isinstance(x, dict) and "ppo/episode" in x:
                times.append(time.perf_counter())
            return dump(x, *args, **kwargs)

        json.dumps, sys.argv = timed, [script, *more, *flags, "--output_dir", str(out)]
        start = time.perf_counter()
        runpy.run_path(str(common.ROOT / script), run_name="__main__")
        whole, json.dumps = time.perf_counter() - start, dump
        metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    row: dict[str, Any] = {"script": script, "updates": len(metrics), "episodes": metrics[-1]["ppo/episode"]}
    row |= {"whole_seconds": whole} | common.used(common.device(), before)
    row |= {name: metrics[-1][f"objective/{name}"] for name in ("scores", "kl")} | {
        "first_ratio_error": max(x["first_ratio_error"] for x in metrics)
    }
    if len(times) > 1:
        row["seconds_per_update"] = (times[-1] - times[0]) / (len(times) - 1)
        row["episodes_per_second"] = metrics[0]["ppo/episode"] / row["seconds_per_update"]
    path = common.write("whole_run", options.tag, options, [row])
    common.show(
        ["figure", "value"], [[name, f"{x:.4g}" if isinstance(x, float) else x] for name, x in row.items()], path
    )


if __name__ == "__main__":
    main()
