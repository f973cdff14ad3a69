#!/usr/bin/env bash
# Everything that is to be known on a GPU, by one command; records go to benchmark/results. Needs pip install -e ".[test,bench]".
#
#     bash benchmark/gpu.sh             # one GPU: tests, speed and memory, ratios in bf16, whole runs, a 7B shape with LoRA
#     SMALL=1 bash benchmark/gpu.sh     # the same commands at sizes for two CPU cores, into records that are removed
#
# TRL stands beside plain PyTorch where its releases are in benchmark/.trl (throughput.py puts them there, from a network).
set -euo pipefail
cd "$(dirname "$0")/.."
gpu=$(python -c 'import torch; print(torch.cuda.get_device_name().replace(" ", "-").lower() if torch.cuda.is_available() else "cpu")')
contenders=(ours-ppo ours-rloo plain-ppo plain-rloo)
[ ! -d benchmark/.trl ] || contenders+=(trl-ppo trl-rloo)
if [ -n "${SMALL:-}" ]; then
    gpu=small-$gpu shapes=(2x64) large=2x64 tests=(tests/test_ppo_math.py) episodes=64 batch=16 ratios=(--models tiny --episodes 8 --lengths 8)
    sizes=(--batch_size 8 --micro_batch_size 8 --rounds 1 --repeats 1 --num_epochs 1) lora=(--total_episodes 32 --batch_size 16)
    trap 'rm -f benchmark/results/*-small-*' EXIT
else
    shapes=(gpt2 36x1280 16x2048) large=llama-7b tests=() episodes=1000000 batch=512 ratios=(--models tiny gpt2)
    sizes=(--batch_size 512 --micro_batch_size 512 --rounds 2 --repeats 3) lora=(--total_episodes 256 --batch_size 64 --micro_batch_size 16)
fi
run() { python benchmark/whole_run.py "$@"; }

echo "== tests on $gpu"
python -m pytest -q "${tests[@]}"
for shape in "${shapes[@]}"; do # gpt2; the shapes of gpt2-large and of pythia-1b, with a small vocabulary
    echo "== an update of $shape in bf16, and its peak memory"
    same=(--shape "$shape" --queries full --query_length 64 --dtype bf16 --contenders "${contenders[@]}" "${sizes[@]}")
    python benchmark/throughput.py "${same[@]}" --tag "$gpu-$shape-bf16"
    python benchmark/throughput.py "${same[@]}" --tag "$gpu-$shape-bf16-memory" --memory
done
echo "== the first ratio in bf16"
python benchmark/bf16_ratio.py "${ratios[@]}" --tag "$gpu"
for script in ppo_rlhf.py rloo_rlhf.py; do
    echo "== a whole run of $script on the embedded default: the sentiment preset's number of episodes"
    run --tag "$gpu-tiny-${script%_rlhf.py}" -- "$script" --reward_fn tiny.rewards:happy --dtype bf16 --total_episodes "$episodes" \
        --batch_size "$batch" --micro_batch_size "$batch" --checkpoint_every 0 2> /dev/null
done
echo "== a 7B shape with LoRA"
run --tag "$gpu-7b-lora" --shape "$large" -- ppo_rlhf.py --reward_fn tiny.rewards:happy --dtype bf16 --lora_rank 16 "${lora[@]}" 2> /dev/null
echo "== one process of accelerate's launcher, NCCL or gloo"
out=$(mktemp -d)
python -m accelerate.commands.launch --num_processes 1 rloo_rlhf.py --reward_fn tiny.rewards:happy --dtype bf16 --total_episodes 256 \
    --output_dir "$out" 2> /dev/null
rm -r "$out"
