"""Works PPO and RLOO out on one query of tiny/, for docs/ppo.md and docs/rloo.md.

    python benchmark/tools/worked_example.py           # write the numbers into the pages
    python benchmark/tools/worked_example.py --check   # exit 1 if a page is out of date

All numbers come from the scripts' own functions, and the lines of code on the pages from the
scripts' files. On a page they stand below a marker, up to the next blank line. The marker is
`<!-- numbers NAME -->` with the name of a part that ppo_parts or rloo_parts makes, or
`<!-- code FILE FUNCTION -->`. With ` | ` and two more texts, the lines are those of the function
from the first that begins with one text to the next that begins with the other.

So that the KL is not 0, the policy is the model of tiny/ after WARM_UP_UPDATES updates of PPO. The
score is the number of happy words, which a reader can count, in the place of a reward model.
"""

import ast
import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import ppo_rlhf
import rloo_rlhf
from benchmark import ours
from plumbing import data as data_module
from ppo_rlhf import make_optimizer, set_learning_rates
from tiny.rewards import happy

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tiny/model"
LENGTH = 10  # tokens of a response
WARM_UP_UPDATES = 4
WARM_UP_BATCH = 32
SETTINGS = {"response_length": LENGTH, "truncate_after": 3, "num_epochs": 1, "lr": 1e-3}
RLOO_LR = 5e-5  # a new optimizer makes larger steps
QUERY = 264  # the row of tiny/queries whose second sentence is the query
DRAWS = (100, 102, 101, 103)  # of uniform numbers, one for each of the four responses
NAMES = "ABCD"
OF_PPO = [0, 1]  # the responses on the page of PPO
MARKED = re.compile(r"^(<!-- (numbers|code) (.*?) -->\n)(?:.+\n)*", re.M)


# --- the two algorithms, on one query -------------------------------------------------------------
@dataclass
class Example:
    """A batch, and what an update makes of it. (B, R), but what RLOO has once per response (B,)."""

    tokens: list[list[str]]
    batch: Any
    raw_scores: Tensor  # (B,)
    kl: Tensor
    after: dict[str, Tensor]  # of the policy after one step: log-probabilities, losses, ratios


def read_queries(tokenizer: Any) -> list[Any]:
    """The second sentence of each text of tiny/queries."""
    queries = []
    for line in (ROOT / "tiny/queries/train.jsonl").read_text().splitlines():
        sentence = json.loads(line)["text"].split(".")[1]
        queries.append(ours.query(tokenizer(f" {sentence.strip()}.").input_ids))
    return queries


def make_policy(script: Any, args: Any) -> Any:
    """The model of tiny/ as the script's policy."""
    lm = AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="eager").eval()
    return ours.make_actor(script, lm, args)


def prepare(accelerator: Accelerator, policy: Any, args: Any) -> tuple[Any, Any]:
    """The policy and a new optimizer, whose learning rate stays."""
    optimizer = make_optimizer(policy, args)
    set_learning_rates(optimizer, 0, 0.0, args)
    return accelerator.prepare(policy, optimizer)


def in_order(num_rows: int) -> Tensor:
    """One epoch of one minibatch of all rows."""
    return torch.arange(num_rows).view(1, 1, -1)


def roll_out(
    policy: Any, ref: Any, queries: list[Any], u: Tensor, tokenizer: Any, args: Any
) -> Example:
    """Responses with their scores, KL and rewards or advantages: steps 1 to 3 of main."""
    end = data_module.token_id("truncate_token", args.truncate_token, tokenizer)
    batch = ours.rollout(policy, ref, queries, u, in_order(len(queries)), end, args)
    texts = tokenizer.batch_decode(ppo_rlhf.truncated(batch))
    raw_scores = torch.tensor(happy(texts), dtype=torch.float32)
    batch.scores = ppo_rlhf.penalize_missing_end(raw_scores, batch.found_end, args)
    ours.set_rewards(batch, batch.scores, args)
    kl = (batch.logprobs - batch.ref_logprobs) * batch.loss_mask
    tokens = [[tokenizer.decode(token) for token in row] for row in batch.responses.tolist()]
    return Example(tokens, batch, raw_scores, kl, {})


def choose(example: Example, rows: list[int]) -> Example:
    """The example with these of its responses."""
    batch = ppo_rlhf.select(example.batch, torch.tensor(rows))
    tokens = [example.tokens[row] for row in rows]
    return Example(tokens, batch, example.raw_scores[rows], example.kl[rows], {})


def work_out() -> tuple[Example, Example]:
    """PPO on two responses to the query, and RLOO on four."""
    accelerator = Accelerator(cpu=True)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    queries = read_queries(tokenizer)
    args = ppo_rlhf.Args(**SETTINGS)
    policy = make_policy(ppo_rlhf, args)
    ref = make_policy(ppo_rlhf, args)
    wrapped, optimizer = prepare(accelerator, policy, args)

    # a few updates on other queries
    warm_up = replace(args, num_epochs=4, batch_size=WARM_UP_BATCH)
    for update in range(WARM_UP_UPDATES):
        mine = queries[update * WARM_UP_BATCH :][:WARM_UP_BATCH]
        u = ppo_rlhf.uniforms(args.seed, update + 1, WARM_UP_BATCH, LENGTH)
        batch = roll_out(policy, ref, mine, u, tokenizer, args).batch
        epochs = ours.shuffle(warm_up, update)
        ours.update_policy(accelerator, wrapped, optimizer, batch, epochs, warm_up)

    u = torch.cat([ppo_rlhf.uniforms(args.seed, draw, 1, LENGTH) for draw in DRAWS])
    rloo_args = rloo_rlhf.Args(**SETTINGS | {"lr": RLOO_LR})
    actor = make_policy(rloo_rlhf, rloo_args)
    actor.lm.load_state_dict(policy.lm.state_dict())  # before PPO's step
    rloo_ref = make_policy(rloo_rlhf, rloo_args)
    same = [queries[QUERY]] * len(DRAWS)
    ppo = choose(roll_out(policy, ref, same, u, tokenizer, args), OF_PPO)
    make_step(accelerator, wrapped, optimizer, ppo, args)

    rloo = roll_out(actor, rloo_ref, same, u, tokenizer, rloo_args)
    wrapped, optimizer = prepare(accelerator, actor, rloo_args)
    make_step(accelerator, wrapped, optimizer, rloo, rloo_args)
    return ppo, rloo


def make_step(
    accelerator: Accelerator, policy: Any, optimizer: Any, example: Example, args: Any
) -> None:
    """One optimizer step, and the losses after it. ppo_update sets advantages in a copy of the
    rows, so here they are set once more."""
    batch = example.batch
    rows = in_order(len(example.tokens))
    ours.update_policy(accelerator, policy, optimizer, batch, rows, args)
    with torch.no_grad():
        _, new = ppo_rlhf.forward_response(policy, batch, args.temperature)
        if isinstance(batch, ppo_rlhf.Batch):
            ppo_rlhf.set_advantages(batch, args)
            predicted = (new["logprobs"], new["values"])
            policy_loss, value_loss, terms = ppo_rlhf.ppo_loss(*predicted, batch, args)
            example.after["value"] = value_loss
            example.after["error"] = terms["val/error"]
        else:
            policy_loss, terms = rloo_rlhf.rloo_loss(new["logprobs"], batch, args)
    ratio = terms["policy/ratio"]
    unclipped = -batch.advantages * ratio
    example.after |= new | {"ratio": ratio, "unclipped": unclipped, "policy": policy_loss}


# --- what stands on the pages ---------------------------------------------------------------------
def number(x: Any) -> str:
    """Three digits after the point, and no sign before 0."""
    text = f"{float(x):.3f}"
    return "0.000" if float(text) == 0 else text


def term(x: Any) -> str:
    """A number in a sum."""
    text = number(x)
    return f"({text})" if text.startswith("-") else text


def table(heads: list[str], rows: list[list[Any]]) -> str:
    """A table in Markdown; texts stand as they are."""
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        lines.append([x if isinstance(x, str) else number(x) for x in row])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def by_token(
    example: Example,
    response: int,
    heads: list[str],
    columns: list[Tensor],
    steps: tuple[int, ...] = tuple(range(LENGTH)),
) -> str:
    """A table with a row for each token of a response."""
    rows = []
    for t in steps:
        token = example.tokens[response][t]
        cells = [column[response, t] for column in columns]
        rows.append([str(t), f"`{token}`", *cells])
    return table(["t", "token", *heads], rows)


def by_response(heads: list[str], columns: tuple[Tensor, ...]) -> str:
    """A table with a row for each response."""
    rows = zip(NAMES, *columns, strict=True)
    return table(heads, [list(row) for row in rows])


def responses(example: Example) -> str:
    """What was sampled, up to the end and after it, and its score."""
    rows = []
    batch = example.batch
    for i, tokens in enumerate(example.tokens):
        length = int(batch.lengths[i])
        kept = "".join(tokens[:length])
        rest = "".join(tokens[length:])
        found = "yes" if batch.found_end[i] else "no"
        words = f"{example.raw_scores[i]:.0f}"
        score = f"{batch.scores[i]:.0f}"
        rows.append([NAMES[i], f"`{kept}`", f"`{rest}`" if rest else "", found, words, score])
    heads = [
        "",
        "response",
        "tokens after its end",
        "has an end",
        "happy words",
        "score",
    ]
    return table(heads, rows)


def moments_of(x: Tensor, name: str, mask: Tensor) -> str:
    """The mean and the deviation that whitening uses."""
    mean, variance = ppo_rlhf.moments(x, mask)
    return f"mean of {name} = {number(mean)}, standard deviation = {number(variance.sqrt())}"


def gae_by_hand(batch: Any, rewards: Tensor, advantages: Tensor, args: Any) -> str:
    """The first steps of GAE for response A, written out."""
    lines = []
    values = batch.values[0]
    for t in range(LENGTH - 1, LENGTH - 3, -1):
        is_last = t == LENGTH - 1
        following = 0.0 if is_last else values[t + 1]
        later = 0.0 if is_last else advantages[0, t + 1]
        delta = rewards[0, t] + args.gamma * following - values[t]
        terms = f"{number(rewards[0, t])} + {term(following)} - {term(values[t])}"
        lines.append(f"t = {t}:  delta = {terms} = {number(delta)}")
        terms = f"{number(delta)} + {args.gamma * args.lam:.2f} * {term(later)}"
        lines.append(f"        A     = {terms} = {number(advantages[0, t])}")
    return "\n".join(["```text", *lines, "```"])


def deltas(batch: Any, rewards: Tensor, args: Any) -> Tensor:
    """The temporal differences: advantages with lambda 0."""
    found, _ = ppo_rlhf.gae(batch.values, rewards, batch.loss_mask, args.gamma, 0.0)
    return found


def ppo_parts(example: Example) -> dict[str, str]:
    """The parts of docs/ppo.md."""
    args = ppo_rlhf.Args(**SETTINGS)
    batch = example.batch
    mask = batch.loss_mask
    paid = ppo_rlhf.at_last_token(batch.scores, mask)
    penalty = -args.kl_coef * example.kl
    whitened = ppo_rlhf.whiten(batch.rewards, mask, shift_mean=False)
    delta = deltas(batch, whitened, args)
    raw, _ = ppo_rlhf.gae(batch.values, whitened, mask, args.gamma, args.lam)
    after = example.after

    heads = ["log π", "log π_ref", "KL", "penalty", "score", "reward"]
    columns = [batch.logprobs, batch.ref_logprobs, example.kl, penalty, paid, batch.rewards]
    parts = {"responses": responses(example)}
    parts["rewards A"] = by_token(example, 0, heads, columns)
    parts["whiten"] = moments_of(batch.rewards, "the 20 rewards", mask)
    parts["gae by hand"] = gae_by_hand(batch, whitened, raw, args)
    heads = ["whitened reward", "V", "delta", "A", "return", "whitened A"]
    columns = [
        whitened,
        batch.values,
        delta,
        raw,
        batch.returns,
        batch.advantages,
    ]
    parts["advantages A"] = by_token(example, 0, heads, columns)
    ends = (0, LENGTH - 1)
    heads = ["reward", *heads]
    parts["advantages B"] = by_token(example, 1, heads, [batch.rewards, *columns], steps=ends)
    parts["whiten advantages"] = moments_of(raw, "the 20 advantages", mask)
    heads = ["new log π", "ratio", "-A * ratio", "policy loss", "new V", "error²", "value loss"]
    names = ("logprobs", "ratio", "unclipped", "policy", "values", "error", "value")
    columns = [after[name] for name in names]
    parts["losses A"] = by_token(example, 0, heads, columns, steps=(0, 1, 4, LENGTH - 1))

    policy_loss = after["policy"].mean()
    value_loss = after["value"].mean()
    total = policy_loss + args.vf_coef * value_loss
    parts["loss"] = (
        f"mean policy loss {number(policy_loss)} + {args.vf_coef} * mean value loss"
        f" {number(value_loss)} = {number(total)}"
    )
    kl = example.kl.sum(1)
    coefficient = ppo_rlhf.adapt_kl_coef(args.kl_coef, kl.mean().item(), args)
    parts["kl_coef"] = (
        f"KL of A {number(kl[0])}, of B {number(kl[1])}, mean {number(kl.mean())};"
        f" coefficient {args.kl_coef:.3f} -> {coefficient:.4f}"
    )
    return parts


def rloo_parts(example: Example) -> dict[str, str]:
    """The parts of docs/rloo.md."""
    batch = example.batch
    after = example.after
    kl = example.kl.sum(1)
    rewards = batch.scores - rloo_rlhf.Args().kl_coef * kl
    others = rewards - batch.advantages
    of_rewards = (batch.scores, kl, rewards, others, batch.advantages)
    of_losses = (batch.advantages, after["ratio"], after["unclipped"], after["policy"])
    heads = ["", "score", "KL", "reward", "mean of the other three", "advantage"]
    parts = {"responses": responses(example)}
    parts["advantages"] = by_response(heads, of_rewards)
    heads = ["", "advantage", "ratio", "-advantage * ratio", "loss"]
    parts["losses"] = by_response(heads, of_losses)
    parts["loss"] = f"mean loss = {number(after['policy'].mean())}"
    return parts


def line_with(lines: list[str], text: str) -> int:
    """The number of the first line that begins with the text."""
    return next(i for i, line in enumerate(lines) if line.strip().startswith(text))


def code_of(file: str, function: str, first: str = "", last: str = "") -> str:
    """A function without its docstring, or its lines between two that begin so."""
    source = (ROOT / file).read_text()
    lines = source.splitlines()
    nodes = ast.parse(source).body
    (node,) = [node for node in nodes if getattr(node, "name", "") == function]
    docstring = node.body[0]
    before = lines[node.lineno - 1 : docstring.lineno - 1]
    body = lines[docstring.end_lineno : node.end_lineno]
    if first:
        before = []
        start = line_with(body, first)
        end = line_with(body[start:], last) + start
        indent = len(body[start]) - len(body[start].lstrip())
        body = [line[indent:] for line in body[start : end + 1]]
    code = [line for line in before + body if line.strip()]
    return "\n".join(["```python", *code, "```"])


def written(page: str, parts: dict[str, str]) -> str:
    """The page with these parts, and the scripts' lines, between its markers."""

    def fill(match: re.Match) -> str:
        start, kind, name = match.groups()
        if kind == "numbers":
            content = parts[name]
        else:
            place, *limits = name.split(" | ")
            content = code_of(*place.split(), *limits)
        return f"{start}{content}\n"

    return MARKED.sub(fill, page)


def pages() -> dict[Path, str]:
    """Both pages as they should be."""
    ppo, rloo = work_out()
    parts = {"docs/ppo.md": ppo_parts(ppo), "docs/rloo.md": rloo_parts(rloo)}
    made = {}
    for name, own in parts.items():
        path = ROOT / name
        made[path] = written(path.read_text(), own)
    return made


def main() -> None:
    """Writes both pages, or compares them."""
    for path, text in pages().items():
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
        elif path.read_text() != text:
            raise SystemExit(f"{path} is out of date: python benchmark/tools/worked_example.py")


if __name__ == "__main__":
    main()
