#!/usr/bin/env bash
# Everything that is to be known on a GPU, by one command; records go to benchmark/speed. Needs
# pip install -e ".[test,bench]".
#
#     bash benchmark/speed/gpu.sh             # gpt2's shape in each dtype, tests, speed, memory, runs
#     SMALL=1 bash benchmark/speed/gpu.sh     # the same at sizes for two CPU cores; records are removed
#
# TRL stands beside plain PyTorch where its releases are in benchmark/speed/.trl: throughput.py puts them
# there, from a network.
set -euo pipefail
cd "$(dirname "$0")/../.."
gpu=$(python - <<'PYTHON'
import torch

name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
print(name.replace(" ", "-").lower())
PYTHON
)

out=$(mktemp -d)
records=benchmark/speed
trap 'rm -rf "$out"' EXIT

contenders=(ours-ppo ours-rloo plain-fast-ppo plain-fast-rloo plain-ppo plain-rloo)
if [ -d benchmark/speed/.trl ]; then
    contenders+=(ours-critic-ppo trl-ppo trl-rloo)
fi

tests=()
real=gpt2 # 12 layers, 768 wide: tiny/ is too small to show what TF32 and bf16 do to the checks
sentiment=(--query_length 64 --batch_size 512 --micro_batch_size 128 --total_episodes 5120)
shapes=(gpt2 36x1280 16x2048) # gpt2; gpt2-large and pythia-1b, with a small vocabulary
large=llama-7b
sizes=(--batch_size 512 --micro_batch_size 512 --rounds 2 --repeats 3)
whole=(--total_episodes 1000000 --batch_size 512 --micro_batch_size 512) # as the sentiment preset
lora=(--total_episodes 256 --batch_size 64 --micro_batch_size 16)
if [ -n "${SMALL:-}" ]; then
    gpu=small-$gpu
    records=$out/records
    tests=(tests/test_algorithm.py)
    real=2x64
    sentiment=(--query_length 64 --batch_size 16 --micro_batch_size 8 --total_episodes 32)
    shapes=(2x64)
    large=2x64
    sizes=(--batch_size 8 --micro_batch_size 8 --rounds 1 --repeats 1 --num_epochs 1)
    whole=(--total_episodes 64 --batch_size 16 --micro_batch_size 16)
    lora=(--total_episodes 32 --batch_size 16)
fi
reward=(--reward_fn tiny.rewards:happy --dtype bf16)
sentiment+=(--reward_fn tiny.rewards:happy --lr 1e-5 --eval_queries 16 --checkpoint_every 0)
gpus=$(python -c "import torch; print(max(1, torch.cuda.device_count()))")

PYTHONPATH=. python - "$real" "$out/model" <<'PYTHON'
import shutil
import sys

from benchmark import common

shape, to = sys.argv[1:]
with common.model_folder(shape) as folder:
    common.tokenizer().save_pretrained(folder)
    shutil.copytree(folder, to)
PYTHON

# docs/gpu.md has computed 42,700 launches and 108 waits for an update of PPO
for dtype in bf16 tf32 fp32; do
    echo "== $real in the shape of the preset sentiment, in $dtype: on one GPU, then on $gpus"
    for script in ppo_rlhf.py rloo_rlhf.py; do
        python benchmark/speed/whole_run.py --out "$records" --tag "$gpu-$real-${script%_rlhf.py}-$dtype" \
            --shape "$real" -- "$script" "${sentiment[@]}" --dtype "$dtype"
    done
    python -m accelerate.commands.launch --num_processes "$gpus" ppo_rlhf.py \
        "${sentiment[@]}" --base_model "$out/model" --dtype "$dtype" --output_dir "$out/$dtype"
    tail -n 1 "$out/$dtype/metrics.jsonl"
done

echo "== memory of a run, computed and measured"
python benchmark/speed/memory_table.py --check

for shape in "${shapes[@]}"; do
    echo "== an update of $shape in bf16, and its peak memory"
    same=(--shape "$shape" --queries full --query_length 64 --dtype bf16)
    same+=(--contenders "${contenders[@]}" "${sizes[@]}")
    python benchmark/speed/throughput.py --out "$records" "${same[@]}" --tag "$gpu-$shape-bf16"
    python benchmark/speed/throughput.py --out "$records" "${same[@]}" --tag "$gpu-$shape-bf16-memory" --memory
done

for script in ppo_rlhf.py rloo_rlhf.py; do
    echo "== a whole run of $script of the default task"
    python benchmark/speed/whole_run.py --out "$records" --tag "$gpu-tiny-${script%_rlhf.py}" -- \
        "$script" "${reward[@]}" "${whole[@]}" --checkpoint_every 0
done

echo "== a 7B shape with LoRA"
python benchmark/speed/whole_run.py --out "$records" --tag "$gpu-7b-lora" --shape "$large" -- \
    ppo_rlhf.py "${reward[@]}" --lora_rank 16 "${lora[@]}"

echo "== one process of accelerate's launcher, NCCL or gloo"
python -m accelerate.commands.launch --num_processes 1 rloo_rlhf.py "${reward[@]}" \
    --total_episodes 256 --output_dir "$out/run"

echo "== tests, which use no GPU, with the libraries of this machine"
python -m pytest -q "${tests[@]}"
