#!/usr/bin/env bash
# What is to be known on a GPU, part by part. A part that fails does not stop the others. Records go to
# the folder $RECORDS, or to benchmark/speed. Needs pip install -e ".[test,bench]".
#
#     bash benchmark/speed/gpu.sh                     # all parts, in this order
#     bash benchmark/speed/gpu.sh dtypes engines      # only these
#     SMALL=1 bash benchmark/speed/gpu.sh             # at sizes for two CPU cores; records are removed
#
#     dtypes     gpt2's shape in bf16, TF32 and fp32: whole runs, with their speed and memory
#     engines    DDP and FSDP2 on all GPUs, NCCL also where there is only one; and a resumed run
#     lora       a 7B shape with LoRA, with and without gradient checkpointing
#     updates    an update of three shapes beside plain PyTorch: speed and peak memory. TRL is there, too,
#                where its releases are in benchmark/speed/.trl: throughput.py fetches them from a network
#     whole      whole runs of the default task
#     count      the count of memory, beside a run
#     tests      those of tests/, which use no GPU, with the libraries of this machine
set -uo pipefail
cd "$(dirname "$0")/../.."
gpu=$(python - <<'PYTHON'
import torch

name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
print(name.replace(" ", "-").lower())
PYTHON
)
gpus=$(python -c "import torch; print(max(1, torch.cuda.device_count()))")

out=$(mktemp -d)
records=${RECORDS:-benchmark/speed}
trap 'rm -rf "$out"' EXIT

test_files=()
real=gpt2 # 12 layers, 768 wide: tiny/ is too small to show what TF32 and bf16 do to the checks
sentiment=(--query_length 64 --batch_size 512 --micro_batch_size 128 --total_episodes 5120)
shapes=(gpt2 36x1280 16x2048) # gpt2; gpt2-large and pythia-1b, with a small vocabulary
large=llama-7b
# All contenders are on the GPU together. Plain PyTorch needs the most, by an estimate twice as much as ours.
sizes=(--batch_size 512 --micro_batch_size 64 --rounds 2 --repeats 3)
whole_flags=(--total_episodes 102400 --batch_size 512 --micro_batch_size 512)
lora_flags=(--total_episodes 256 --batch_size 64 --micro_batch_size 16)
engine_flags=(--batch_size 64)
engine_episodes=(256 512) # when it starts, and when it is resumed
if [ -n "${SMALL:-}" ]; then
    gpu=small-$gpu
    records=$out/records
    test_files=(tests/test_algorithm.py)
    real=2x64
    sentiment=(--query_length 64 --batch_size 16 --micro_batch_size 8 --total_episodes 32)
    shapes=(2x64)
    large=2x64
    sizes=(--batch_size 8 --micro_batch_size 8 --rounds 1 --repeats 1 --num_epochs 1)
    whole_flags=(--total_episodes 64 --batch_size 16 --micro_batch_size 16)
    lora_flags=(--total_episodes 32 --batch_size 16)
    engine_flags=(--batch_size 8 --eval_queries 8)
    engine_episodes=(16 32)
fi
reward=(--reward_fn tiny.rewards:happy)
sentiment+=("${reward[@]}" --lr 1e-5 --eval_queries 16 --checkpoint_every 0)
whole_run=(python benchmark/speed/whole_run.py --out "$records")
throughput=(python benchmark/speed/throughput.py --out "$records")

dtypes() {
    for dtype in bf16 tf32 fp32; do
        for script in ppo_rlhf.py rloo_rlhf.py; do
            "${whole_run[@]}" --tag "$gpu-$real-${script%_rlhf.py}-$dtype" --shape "$real" -- \
                "$script" "${sentiment[@]}" --dtype "$dtype"
        done
    done
}

engines() {
    run=(ppo_rlhf.py "${reward[@]}" --dtype bf16 "${engine_flags[@]}")
    ddp=(python -m torch.distributed.run --nproc_per_node "$gpus" "${run[@]}" --output_dir "$out/ddp")
    fsdp2=(python -m accelerate.commands.launch --config_file benchmark/accelerate/fsdp2.yaml)
    fsdp2+=(--num_processes "$gpus" "${run[@]}" --output_dir "$out/fsdp2")
    "${ddp[@]}" --total_episodes "${engine_episodes[0]}"
    "${ddp[@]}" --total_episodes "${engine_episodes[1]}" --resume
    "${fsdp2[@]}" --total_episodes "${engine_episodes[0]}"
    "${fsdp2[@]}" --total_episodes "${engine_episodes[1]}" --resume
    tail -n 1 "$out/ddp/metrics.jsonl" "$out/fsdp2/metrics.jsonl"
}

lora() {
    run=(ppo_rlhf.py "${reward[@]}" --dtype bf16 --lora_rank 16 "${lora_flags[@]}")
    "${whole_run[@]}" --tag "$gpu-7b-lora" --shape "$large" -- "${run[@]}"
    "${whole_run[@]}" --tag "$gpu-7b-lora-checkpointing" --shape "$large" -- \
        "${run[@]}" --gradient_checkpointing
}

updates() {
    for shape in "${shapes[@]}"; do
        for algorithm in ppo rloo; do
            contenders=("ours-$algorithm" "plain-fast-$algorithm" "plain-$algorithm")
            if [ -d benchmark/speed/.trl ]; then
                contenders+=("trl-$algorithm")
                [ "$algorithm" = rloo ] || contenders+=(ours-critic-ppo) # TRL's PPO has a critic, too
            fi
            same=(--shape "$shape" --queries full --query_length 64 --dtype bf16)
            same+=(--contenders "${contenders[@]}" "${sizes[@]}")
            "${throughput[@]}" "${same[@]}" --tag "$gpu-$shape-$algorithm-bf16"
            "${throughput[@]}" "${same[@]}" --tag "$gpu-$shape-$algorithm-bf16-memory" --memory
        done
    done
}

whole() {
    for script in ppo_rlhf.py rloo_rlhf.py; do
        "${whole_run[@]}" --tag "$gpu-tiny-${script%_rlhf.py}" -- \
            "$script" "${reward[@]}" --dtype bf16 "${whole_flags[@]}" --checkpoint_every 0
    done
}

count() {
    python benchmark/speed/memory_table.py --check
}

tests() {
    python -m pytest "${test_files[@]}"
}

parts=("$@")
if [ $# = 0 ]; then
    parts=(dtypes engines lora updates whole count tests)
fi
for part in "${parts[@]}"; do
    if ! declare -F "$part" > /dev/null; then
        echo "gpu.sh: there is no part $part: see the first lines of this file"
        exit 2
    fi
done
failed=()
for part in "${parts[@]}"; do
    echo "== $part"
    # Bash ignores `set -e` in a command whose status is asked for by `||` or `if`.
    (set -e; "$part")
    status=$?
    [ $status = 0 ] || failed+=("$part")
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
