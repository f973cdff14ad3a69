"""Where labels and rewards come from: tables, folders of models, functions of users. Nothing here
knows an algorithm."""

import copy
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import datasets
import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from plumbing.data import (
    PROMPTS,
    STREAM_LABELS,
    Query,
    bos,
    cut_query,
    encode,
    is_chat,
    load_table,
    prompt_of,
    render,
    token_id,
)
from plumbing.launch import UserError, blame, say
from plumbing.models import TokenRows


@dataclass
class Comparison:
    """A label: which of N responses to a query people liked best. A pair has N = 2."""

    query: list[int]
    responses: TokenRows  # N rows of token ids, not padded
    best: int  # index of the one that people liked best
    is_from_chat: bool = False  # whether a chat template made the query
    row: dict | None = None  # its row in the table


# --- labels ---------------------------------------------------------------------------------------
def end_token_id(args: Any, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id of --truncate_token, which ends a response at index --truncate_after or later."""
    if args.truncate_token and args.truncate_after >= args.response_length:
        raise UserError(
            f"--truncate_after {args.truncate_after} must be below "
            f"--response_length {args.response_length}"
        )
    return token_id("truncate_token", args.truncate_token, tokenizer)


def load_labels(
    args: Any, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Comparison], list[Comparison]]:
    """Labels to train on, the first --num_labels of `train`, and held-out ones: the first
    --eval_labels of the split `test`, or else of the rest of `train`."""
    splits = load_table("label_dataset", args.label_dataset)
    table = splits["train"]
    count = args.num_labels or len(table)
    if count > len(table):
        raise UserError(f"--num_labels {count}: --label_dataset has {len(table)} rows")
    labels = read_labels(table, range(count), tokenizer, args)
    if len(labels) < args.batch_size:
        raise UserError(
            f"--label_dataset has {len(labels)} labels for --batch_size {args.batch_size}"
        )
    rest = range(count, len(table))
    if "test" in splits:
        table = splits["test"]
        rest = range(len(table))
    held_out = read_labels(table, rest[: args.eval_labels], tokenizer, args)
    first = tokenizer.batch_decode([labels[0].query, *labels[0].responses])
    say(f"--label_dataset: {len(labels)}, first {first}, best is {labels[0].best}")
    return labels, held_out


def read_labels(
    table: datasets.Dataset, rows: range, tokenizer: PreTrainedTokenizerBase, args: Any
) -> list[Comparison]:
    """The labels in these rows, in either format. Those of no use are left out and counted;
    UserError if they are more than a tenth. A coin decides whether the chosen response comes first:
    argmax takes the first of equal rewards, so otherwise a constant model would count as right."""
    coins = np.random.default_rng([args.seed, STREAM_LABELS]).integers(0, 2, len(rows)).tolist()
    end = end_token_id(args, tokenizer)
    counts = Counter()
    labels = []
    for i, coin in zip(rows, coins, strict=True):
        with blame(f"--label_dataset {args.label_dataset}, row {i}", UnicodeError):
            with blame("cannot be read"):  # like a damaged picture
                row = table[i]
            label = read_label(row, coin, end, counts, tokenizer, args)
        if not label.query or not all(label.responses):
            counts["left out, for an empty or long prompt, an empty answer, or unlike chats"] += 1
        elif all(response == label.responses[0] for response in label.responses):
            counts["left out, for equal answers"] += 1
        else:
            label.query = bos(tokenizer) + label.query
            labels.append(label)
    if rows:
        say(f"--label_dataset: {len(labels)} of {len(rows)} rows", dict(counts))
    if len(labels) < 0.9 * len(rows):
        raise UserError(
            f"--label_dataset: {len(labels)} of {len(rows)} labels are of use: {dict(counts)}"
        )
    return labels


def read_label(
    row: dict,
    coin: int,
    end: int | None,
    counts: Counter,
    tokenizer: PreTrainedTokenizerBase,
    args: Any,
) -> Comparison:
    """The label in a row of either format, without BOS. A label of no use has an empty query or an
    empty response. `coin` is the index of the chosen one. Adds to what read_labels prints."""
    column = args.prompt_column if args.prompt_column in row else None  # it may be the queries'
    if "chosen" not in row or "rejected" not in row:
        return read_samples(row, column, tokenizer)
    prompt, *answers = read_preference(row, column, tokenizer)
    if all(answers) and isinstance(prompt, str) and answers[0] != row["chosen"]:
        counts["with a prompt that both answers began with"] += 1
    if is_chat(prompt) and args.long_queries == "keep_start":
        raise UserError("a chat must keep its end: --long_queries drop or keep_end")
    long = args.long_queries or "drop"  # --start_text and --end_text are not used
    query, _ = cut_query(encode(prompt, tokenizer), args.query_length, None, None, long)
    responses = [cut_answer(encode(answer, tokenizer), end, args) for answer in answers]
    for answer in responses:
        if answer and end is not None and end not in answer[args.truncate_after :]:
            counts["answers without --truncate_token"] += 1
    if coin:  # chosen comes second
        responses.reverse()
    return Comparison(query, responses, coin, is_chat(prompt), row)


def read_samples(row: dict, column: str | None, tokenizer: PreTrainedTokenizerBase) -> Comparison:
    """The label in a row of OpenAI's format: query, sample0, .., and the number `best`."""
    samples = [row[f"sample{n}"] or "" for n in range(100) if f"sample{n}" in row]
    best = row.get("best")
    if isinstance(best, str) and best.isdigit():  # in a csv file
        best = int(best)
    if best not in range(len(samples)):
        raise UserError(f"neither query, sample0, .., best, nor chosen, rejected: {row}")
    if any(map(is_chat, samples)):
        raise UserError(f"samples must be texts or token ids, not chats: {row}")
    prompt = prompt_of(row, column)
    query, *responses = [encode(x, tokenizer) for x in (prompt, *samples)]
    return Comparison(query, responses, int(best), is_chat(prompt), row)


def read_preference(row: dict, column: str | None, tokenizer: PreTrainedTokenizerBase) -> list:
    """Prompt, chosen and rejected; empty ones if they are of no use. In a chat, an answer is what
    the template adds to the prompt. Examples of texts, where _ is a space:

        prompt    chosen         rejected      read as
        Hello     , you.         there         Hello | , you. | there
        Why?      Why? Because   Why? So       Why? | _Because | _So
        none      Why? Because   Why? So       Why? | _Because | _So
    """
    answers = [row["chosen"], row["rejected"]]
    are_chats = all(map(is_chat, answers))
    if not all(answers) or (are_chats and not answer_one_turn(answers)):  # an empty cell is null
        return ["", "", ""]
    if not are_chats and not all(isinstance(x, str) for x in answers):
        raise UserError(f"chosen and rejected must be two texts or two chats: {answers}")
    texts = [value for value in row.values() if isinstance(value, str) or is_chat(value)]
    if column or set(PROMPTS) & set(row) or are_chats or len(texts) > 2:
        # Texts in unknown columns are an error: one of them may be the prompt.
        prompt = prompt_of(row, column)
    else:
        # The common beginning without its last word, which may be a piece, and the space before.
        shared = os.path.commonprefix(answers)
        prompt = re.sub(r"(\s|\A)\S*\Z", "", shared)
        if shared in answers:  # one of them has nothing more
            prompt = ""
    if not prompt:
        return ["", "", ""]
    begin = prompt
    if is_chat(prompt):
        begin = render(prompt, tokenizer, add_generation_prompt=True)
        answers = [render_answer(answer, prompt, tokenizer) for answer in answers]
    if isinstance(begin, str) and all(answer.startswith(begin) for answer in answers):
        answers = [answer.removeprefix(begin) for answer in answers]
    elif is_chat(prompt):
        raise UserError(f"an answer's chat does not continue {begin!r}: {answers}")
    return [prompt, *answers]


def answer_one_turn(chats: list[list[dict]]) -> bool:
    """Whether two chats differ in their last messages alone, and neither of these is empty. A chat
    of one message is an answer alone: it may stand beside any other."""
    contents = []
    for chat in chats:
        contents.append([turn.get("content") or turn.get("tool_calls") for turn in chat])
    if not all(turns[-1] for turns in contents):
        return False
    earlier, other = [turns[:-1] for turns in contents]
    return not earlier or not other or earlier == other


def render_answer(answer: str | list, prompt: list, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of the whole chat with an answer to this prompt: a text, or a chat with the prompt
    or without it."""
    chat = answer if is_chat(answer) else [{"role": "assistant", "content": answer}]
    if len(chat) == 1:  # the answer alone
        chat = prompt + chat
    return render(chat, tokenizer)


def cut_answer(tokens: list[int], end: int | None, args: Any) -> list[int]:
    """An answer up to its first `end` at index --truncate_after or later, as in PPO. Without one,
    --truncate_token eos adds it, unless the last token is an eos. Cut to --response_length."""
    after = args.truncate_after
    if end in tokens[after:]:
        tokens = tokens[: tokens.index(end, after) + 1]
    elif tokens and args.truncate_token == "eos" and tokens[-1] != end:
        tokens = [*tokens, end]
    return tokens[: args.response_length]


# --- reward models and functions ------------------------------------------------------------------
def newest_reward_model(preset: str) -> str:
    """The folder of the newest reward model that train_reward.py has finished for this preset, in
    the current folder's runs/. UserError if there is none."""
    finished = Path.cwd().glob(f"runs/train_reward-{preset}-[0-9]*-20??????-??????/samples.jsonl")
    newest = max(finished, key=lambda path: path.parent.name[-15:], default=None)  # by time
    (newest,) = broadcast_object_list([newest])  # what the first process sees
    if not newest:
        raise UserError(f"--reward_model None: `python train_reward.py {preset}` makes one")
    folder = str(newest.with_name("reward_model"))
    say(f"--reward_model {folder}")
    return folder


def load_reward_fn(name: str, tokenizer: PreTrainedTokenizerBase) -> Callable:
    """The function `module:function` as one from queries and rows of token ids to scores (B,)."""
    sys.path.insert(0, os.getcwd())
    with blame(f"--reward_fn {name}"), torch.enable_grad():  # the module may switch it off
        function = resolve_name(name)
    if not callable(function):
        raise UserError(f"--reward_fn {name} is not a function, but {function!r}")
    return partial(call_reward_fn, function, tokenizer)


def call_reward_fn(
    function: Callable,
    tokenizer: PreTrainedTokenizerBase,
    queries: list[Query],
    responses: TokenRows,
) -> Tensor:
    """Scores (B,) of a --reward_fn, called as TRL calls its reward functions: function(prompts=..,
    completions=.., **columns). Both are lists of texts; where a prompt is a chat, of chats. The
    table's other columns are lists, too. It returns one finite float for each completion."""
    columns = {}
    for name in queries[0].columns:
        if name != "prompt":
            columns[name] = [query.columns.get(name) for query in queries]
    prompts = []
    completions = []
    begin = len(bos(tokenizer))
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    for query, text in zip(queries, texts, strict=True):
        if is_chat(query.prompt):
            prompts.append(query.prompt)
            completions.append([{"role": "assistant", "content": text}])
        else:
            prompts.append(tokenizer.decode(query.for_reward[begin:]))
            completions.append(text)
    named = columns | {"prompts": prompts, "completions": completions}
    try:
        # On a copy, which it may change; what it does to torch's switch of gradients ends here.
        with torch.enable_grad():
            rewards = function(**copy.deepcopy(named))
    except Exception as error:
        error.add_note("This error comes from the function of --reward_fn.")
        raise
    with blame("--reward_fn must return a list, array or tensor of floats"):
        scores = torch.as_tensor(rewards, dtype=torch.float32, device=PartialState().device)
    if scores.shape != (len(queries),) or not scores.isfinite().all():
        raise UserError(f"--reward_fn must return {len(queries)} finite floats, not {rewards}")
    return scores.detach()
