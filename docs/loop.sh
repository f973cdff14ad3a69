# Rounds of RLHF: sample from the policy, label the samples, train a reward model on all labels so
# far, train the policy, and begin again with the new policy. The labels of a round are about what
# the policy writes by then, as in the "online" data of Ziegler et al. 2019.
#
#   bash docs/loop.sh                                     # in the project's folder: on tiny/
#   ROUNDS=5 EPISODES=6400 bash docs/loop.sh --dtype bf16 # these flags go to all three scripts
#   REWARD_FLAGS="--lr 1e-4" PPO_FLAGS="--lr 3e-5" POLICY=./my_sft bash docs/loop.sh ...
#
# In place of people, tiny.rewards:happy labels here: put your own way to choose at steps 1 and 2.
# Queries must be texts, not chats, since samples.jsonl has them as texts. The KL of a round is
# measured from the policy that the round began with, not from the first one.
set -eo pipefail
rounds=${ROUNDS:-3}
queries=${QUERIES:-2000}  # asked in each round, all at once and four times: fewer for large models
episodes=${EPISODES:-2560}  # of PPO in each round
out=${OUT:-runs/loop}
policy=${POLICY:-tiny/model}
read -ra reward_flags <<< "${REWARD_FLAGS:-}"
read -ra ppo_flags <<< "${PPO_FLAGS:-}"

for round in $(seq 1 "$rounds"); do
    folder=$out/$round

    # 1. Four responses to each query. Held-out queries are sampled before the training, and with
    # --lr 0 the training changes nothing. (They are sampled once more after it.)
    python rloo_rlhf.py "$@" --base_model "$policy" --reward_fn tiny.rewards:happy \
        --eval_queries "$queries" --rloo_k 4 --lr 0 --num_epochs 1 --batch_size 4 \
        --total_episodes 4 --seed "$round" --output_dir "$folder/samples"

    # 2. Label them: which response is the best. Queries without a single best one are left out.
    python - "$folder" <<'END'
import json
import sys

from tiny.rewards import happy

folder = sys.argv[1]
responses = {}
with open(f"{folder}/samples/samples.jsonl") as file:
    for line in file:
        row = json.loads(line)
        responses.setdefault(row["query"], []).append(row["response"])
with open(f"{folder}/labels.jsonl", "w") as file:
    for query, texts in responses.items():
        texts = texts[:4]  # a query that is asked twice has eight
        scores = happy(texts)
        if scores.count(max(scores)) == 1:
            label = {"query": query, "best": scores.index(max(scores))}
            label |= {f"sample{i}": text for i, text in enumerate(texts)}
            file.write(json.dumps(label) + "\n")
END
    cat "$out"/*/labels.jsonl > "$folder/all_labels.jsonl"

    # 3. A reward model from the newest policy, on the labels of all rounds
    python train_reward.py "$@" "${reward_flags[@]}" --base_model "$policy" \
        --label_dataset "$folder/all_labels.jsonl" --seed "$round" --output_dir "$folder/reward"

    # 4. PPO; the next round begins with its policy
    python ppo_rlhf.py "$@" "${ppo_flags[@]}" --base_model "$policy" \
        --reward_model "$folder/reward/reward_model" --total_episodes "$episodes" \
        --seed "$round" --output_dir "$folder/ppo"
    policy=$folder/ppo/policy
done
echo "the last policy: $policy"
