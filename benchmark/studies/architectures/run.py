"""Which causal architectures of transformers are right in the scripts, which are refused.

    python benchmark/studies/architectures/run.py                   # all
    python benchmark/studies/architectures/run.py --models gpt2 llama

Every architecture is made small, with random weights: numbers of its config are shrunk by their
names. Those that transformers itself cannot run like that are left out, and so are those that read
more than texts. The scripts load the rest, and refuse a model or take it. Of one that they take,
log-probabilities from sampling (padded, token by token through a cache) and from the update's pass
are compared with what transformers gives for each text alone: in PPO, and in RLOO, whose responses
share a query's cache. Writes <tag>.json.
"""

import re
import signal
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers import PreTrainedModel as Model
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmark import common, ours
from plumbing import models as models_module

VOCABULARY = 50
TOKENIZER: Any = SimpleNamespace(  # suits every model
    get_vocab=lambda: {"last": VOCABULARY - 1},
    get_added_vocab=dict,
    chat_template=None,
    eos_token=None,
    bos_token=None,
    save_pretrained=lambda folder: None,
)
TEMPERATURE = 0.7
RESPONSE = 6
LENGTHS = (3, 7, 5)
TOLERANCE = 1e-3
SECONDS = 20
SMALL = {  # a name in a config that has one of these words gets this number; the first counts
    r"token_id": 0,
    r"vocab": VOCABULARY,
    r"position|max_seq|n_ctx|context_length|max_length": 64,
    r"n_group|topk_group": 1,
    r"key_value_heads|kv_heads": 2,
    r"heads|n_head": 4,
    r"head_dim|qk_|v_head": 8,
    r"rank": 16,
    r"experts_per|top_k|num_experts_tok": 2,
    r"experts": 2,
    r"layers|n_layer|num_blocks": 2,
    r"intermediate|ffn_dim|n_inner|d_ff|ffn_hidden": 64,
    r"hidden_size|d_model|n_embd|embed_dim|embedding_size": 32,
    r"window": 32,
    r"state_size|d_state|d_conv|conv_kernel": 4,
}
OTHER_HEADS = (2, 4, 1)  # of keys and values: some want as many as of queries, some want one


def shrink(config: PretrainedConfig, kv_heads: int) -> dict[str, Any]:
    """Values for a small model, by the names that the config has."""
    values = {"pad_token_id": None}
    for name, value in config.to_dict().items():
        if isinstance(value, bool) or not isinstance(value, int) or name in values:
            continue
        for words, number in SMALL.items():
            if re.search(words, name):
                values[name] = kv_heads if "kv_heads" in words else number
                break
    return values


def build(kind: str, kv_heads: int) -> Model:
    """A small model of this kind, with random weights, whose norms and biases do something."""
    config_class = CONFIG_MAPPING[kind]
    torch.manual_seed(0)
    config = config_class(**shrink(config_class(), kv_heads))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for x in model.state_dict().values():
        if x.is_floating_point():
            x += 0.1 * torch.randn_like(x)
    return model


def logprobs_alone(model: Model, context: list[int], response: list[int]) -> torch.Tensor:
    """What transformers gives for one text, without padding and without a cache."""
    with torch.no_grad():
        logits = model(torch.tensor([context + response]), use_cache=False).logits[0]
    logits = logits[len(context) - 1 : -1].float() / TEMPERATURE
    return logits.log_softmax(-1).gather(1, torch.tensor(response).unsqueeze(1)).squeeze(1)


def error_of(script: Any, lm: Model, plain: Model, args: Any) -> float:
    """The largest difference of the script's log-probabilities from `plain`'s."""
    k = ours.responses_per_query(args)
    policy = ours.make_actor(script, lm, args)
    generator = torch.Generator().manual_seed(1)
    contexts = []
    for length in LENGTHS:
        row = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        contexts += [row] * k
    u = torch.rand(len(contexts), RESPONSE, generator=generator)
    cache = models_module.Cache(config=lm.config)
    responses, sampled = script.sample(policy, cache, contexts, u, TEMPERATURE)
    batch = ours.make_batch(script, contexts, responses)
    with torch.no_grad():
        trained = script.forward_response(policy, batch, TEMPERATURE)[1]["logprobs"]
    worst = 0.0
    for i, context in enumerate(contexts):
        alone = logprobs_alone(plain, context, responses[i].tolist())
        for found in (sampled[i], trained[i]):
            worst = max(worst, (found - alone).abs().max().item())
    return worst


def judge(kind: str) -> dict[str, Any]:
    """One architecture: left out, refused, right or wrong; and why."""
    row = {"model": kind, "result": "left out", "ppo": None, "rloo": None, "why": ""}
    if CONFIG_MAPPING[kind].sub_configs:
        return row | {"why": "has parts beside the one that reads texts"}
    with tempfile.TemporaryDirectory() as folder:
        for kv_heads in OTHER_HEADS:
            try:
                build(kind, kv_heads).save_pretrained(folder)
                plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
                logprobs_alone(plain, [1, 2, 3], [4, 5])
                break
            except TimeoutError:
                raise
            except Exception as error:  # noqa: BLE001
                row["why"] = f"{type(error).__name__}: {error}"[:200]
        else:
            return row
        row["why"] = ""
        for name, script in ours.SCRIPTS.items():
            args = script.Args(base_model=folder)
            longest = max(LENGTHS) + RESPONSE
            try:
                load = ours.loader(TOKENIZER, longest, args)
                lm = load("base_model", folder, AutoModelForCausalLM)
            except script.UserError as error:
                text = str(error).replace(folder, "MODEL")
                return row | {"result": "refused", "why": text[:200]}
            try:
                row[name] = error_of(script, lm, plain, args)
            except Exception as error:  # noqa: BLE001
                return row | {"result": "fails", "why": f"{name}: {error}"[:200]}
        is_right = max(row["ppo"], row["rloo"]) < TOLERANCE
        return row | {"result": "right" if is_right else "WRONG"}


def out_of_time(*_: object) -> None:
    raise TimeoutError(f"{SECONDS} s")


def main() -> None:
    parser = common.make_parser(__doc__, __file__)
    parser.add_argument("--tag", default="causal", help="name of the record")
    parser.add_argument("--models", nargs="+", default=sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    args = parser.parse_args()
    common.new_accelerator()
    signal.signal(signal.SIGALRM, out_of_time)
    rows = []
    for kind in args.models:
        signal.alarm(SECONDS)
        try:
            rows.append(judge(kind))
        except TimeoutError as error:
            rows.append({"model": kind, "result": "left out", "why": str(error)})
        signal.alarm(0)
        sys.stderr.write(f"{kind}: {rows[-1]['result']} {rows[-1]['why']}\n")
    path = common.write(args, rows)
    results = [row["result"] for row in rows]
    counts = [{"result": name, "count": results.count(name)} for name in sorted(set(results))]
    common.show_rows(counts, path.name)


if __name__ == "__main__":
    main()
