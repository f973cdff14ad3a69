#!/usr/bin/env bash
# Everything that is to be known on a GPU, by one command; records go to benchmark/results. Needs pip install -e ".[test,bench]".
#
#     bash benchmark/gpu.sh             # one GPU: tests, speed and memory, ratios in bf16, a whole sentiment-sized run
#     SMALL=1 bash benchmark/gpu.sh     # the same commands at sizes for two CPU cores, into a folder that is removed
set -euo pipefail
cd "$(dirname "$0")/.."
name() { python -c 'import torch; print(torch.cuda.get_device_name().replace(" ", "-").lower() if torch.cuda.is_available() else "cpu")'; }
gpu=$(name)
contenders=(ours-ppo ours-rloo plain-ppo plain-rloo)
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT
if [ -n "${SMALL:-}" ]; then
    shapes=(2x64) tests=(tests/test_ppo_math.py) sizes=(--batch_size 8 --micro_batch_size 8 --rounds 1 --repeats 1 --num_epochs 1)
    run=(--total_episodes 32 --batch_size 16 --eval_queries 4) ratios=(--models tiny --episodes 8 --lengths 8)
    cp benchmark/results/*.json "$runs/"  # put back at the end: a small run is no record
else
    shapes=(gpt2 36x1280 16x2048) tests=() sizes=(--batch_size 512 --micro_batch_size 512 --rounds 2 --repeats 3)
    run=(--total_episodes 1000000 --batch_size 512 --micro_batch_size 512 --checkpoint_every 200) ratios=(--models tiny gpt2)
fi

echo "== tests on $gpu"
python -m pytest -q "${tests[@]}"
for shape in "${shapes[@]}"; do # gpt2; the shapes of gpt2-large and of pythia-1b, with a small vocabulary
    echo "== an update of $shape in bf16"
    python benchmark/throughput.py --shape "$shape" --queries full --query_length 64 --dtype bf16 \
        --contenders "${contenders[@]}" "${sizes[@]}" --tag "$gpu-$shape-bf16"
    python benchmark/throughput.py --shape "$shape" --queries full --query_length 64 --dtype bf16 --memory \
        --contenders "${contenders[@]}" "${sizes[@]}" --tag "$gpu-$shape-bf16-memory"
done
echo "== the first ratio in bf16"
python benchmark/bf16_ratio.py "${ratios[@]}" --tag "$gpu"
echo "== whole runs on tiny/: the sentiment preset's number of episodes"
for script in ppo_rlhf.py rloo_rlhf.py; do
    start=$SECONDS
    python "$script" --reward_fn tiny.rewards:happy --dtype bf16 "${run[@]}" --output_dir "$runs/${script%.py}" 2> "$runs/log" \
        || { tail -n 5 "$runs/log"; exit 1; }
    echo "$script: $((SECONDS - start)) s, ${run[1]} episodes"
done
echo "== one process of NCCL or gloo, LoRA"
python -m accelerate.commands.launch --num_processes 1 ppo_rlhf.py --reward_fn tiny.rewards:happy --dtype bf16 --lora_rank 8 \
    --total_episodes 256 --output_dir "$runs/lora" 2> "$runs/log" || { tail -n 5 "$runs/log"; exit 1; }
if [ -n "${SMALL:-}" ]; then
    rm -f benchmark/results/*"$gpu"*bf16*.json "benchmark/results/bf16_ratio-$gpu.json"
    cp "$runs"/*.json benchmark/results/
fi
