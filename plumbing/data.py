"""Tables of queries and labels in the layouts that people have, as token ids; and reward functions.
Nothing here knows an algorithm."""

import copy
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import torch
from accelerate import PartialState
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from plumbing.models import TokenRows, local_path
from plumbing.run import UserError, blame, say

# Streams of random numbers, default_rng([seed, stream, ..]). The scripts have 1 and 4.
QUERIES, LABELS = 2, 3


@dataclass
class Query:
    """A query in tokens, for its two readers, and its row in the table."""

    input_ids: list[int]  # as the reward model reads it
    context: list[int]  # as the policy reads it, with --query_prefix and --query_suffix
    columns: dict  # its row in the table, for PPO's and RLOO's --reward_fn


KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


def load_table(flag: str, args: Any) -> dict[str, datasets.Dataset]:
    """The splits of a file, a folder or a data set on the hub. A folder or a hub id may end in
    :config, ::split or :config:split. If it names a split, only that is returned, as `train`."""
    name = local_path(getattr(args, flag))
    kind = KINDS.get(Path(name.removesuffix(".gz")).suffix)
    path, _, rest = name.partition(":")  # path:config:split
    if os.path.exists(name):  # its name may have a colon
        path = name
        rest = ""
    config, _, split = rest.partition(":")
    path = local_path(path)
    files = [file for file in Path(path).rglob("*.*") if not file.match("dataset_info*")]
    kinds = {KINDS.get(file.suffix) for file in files} - {None}
    with blame(f"--{flag} {name}"):
        if kind:
            return datasets.load_dataset(kind, data_files=escape(name))
        splits = datasets.load_dataset(path, config or None)
    if len(kinds) > 1 or (split or "train") not in splits:
        raise UserError(f"--{flag} {name} has {[*kinds, *splits]}: name a file, or DATA::split")
    return {"train": splits[split]} if split else splits


def load_queries(
    flag: str, args: Any, tokenizer: PreTrainedTokenizerBase, num_queries: int
) -> list[Query]:
    """Up to `num_queries` queries (at least one) of the flag's table, in an order drawn from
    --seed."""
    begin = bos(tokenizer)
    prefix = encode(args.query_prefix or "", tokenizer)
    suffix = encode(args.query_suffix or "", tokenizer)
    start = token_id("start_text", tokenizer, args)
    end = token_id("end_text", tokenizer, args)
    long = args.long_queries
    if long is None:
        long = "drop" if end is None else "keep_start"
    table = load_table(flag, args)["train"]
    queries = []
    for i in np.random.default_rng([args.seed, QUERIES]).permutation(len(table)).tolist():
        with blame(f"--{flag} {getattr(args, flag)}, row {i}", UnicodeError):
            row = table[i]
            prompt = prompt_of(row)
            if is_chat(prompt) and (start is not None or end is not None or long == "keep_start"):
                raise UserError(
                    "a chat must keep its end: --start_text none --end_text none, and "
                    "--long_queries drop or keep_end"
                )
            tokens = encode(prompt, tokenizer)
        query = cut_query(tokens, args.query_length, start, end, long)
        if query:
            queries.append(Query(begin + query, begin + prefix + query + suffix, row))
            if len(queries) >= num_queries:
                break
    if not queries:
        raise UserError(f"--{flag}: no query is left: see --query_length, --start_text, --end_text")
    say(
        f"--{flag}: {len(queries)} of {len(table)} rows, first "
        f"{tokenizer.decode(queries[0].context)!r}"
    )
    return queries


def hold_out(queries: list[Query], count: int) -> tuple[list[Query], list[Query]]:
    """The first `count` queries, held out, and all that differ from them."""
    held_out = queries[:count]
    contexts = [query.context for query in held_out]
    others = [query for query in queries if query.context not in contexts]
    if not others:
        raise UserError(f"--eval_queries {count}: no query is left to train on")
    return held_out, others


# The prompt is in the first of these columns that exists: a chat says more than its last question.
PROMPTS = """
    messages query prompt question problem instruction conversations conversation text article
    content
""".split()


# A row with content in one of these is refused: without it the prompt would be another.
NOT_READ = "system system_prompt history context passage image images tools".split()


def prompt_of(row: dict) -> str | list:
    """What is to be answered in this row: a text, token ids, or a chat, which is a list of messages
    without the answer. If `chosen` is a chat, this is the longer of two: the prompt column, or all
    messages of `chosen` but the last."""
    column = next((name for name in PROMPTS if name in row), "chosen")
    chosen = row.get("chosen")
    if column not in row or (column == "chosen" and isinstance(chosen, str)):
        raise UserError(f"a row needs one of the columns {PROMPTS}, or a chat in `chosen`: {row}")
    if any(map(row.get, NOT_READ)):
        raise UserError(f"{NOT_READ} are not read, put them into messages: {row}")
    if "chosen" in row and not chosen:  # an empty cell does not tell if it is a chat
        return ""
    prompt = row[column] or ""
    if column == "instruction" and row.get("input"):
        prompt = f"{prompt}\n{row['input']}"
    if not is_chat(prompt) and not is_chat(chosen):
        return prompt
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}] if prompt else []
    elif not is_chat(prompt):
        raise UserError(f"{column} must be a text or a chat, like `chosen`: {row}")
    elif prompt[-1].get("role") in ("assistant", "model", "bot"):
        prompt = prompt[:-1]
    before = chosen[:-1] if is_chat(chosen) else []
    texts = [message.get("content") for message in before]
    if prompt and before and prompt[-1].get("content") not in texts:
        raise UserError(f"the chat of `chosen` is not about the {column}: {row}")
    return max(prompt, before, key=len)


def is_chat(value: object) -> bool:
    """Whether this is a list of messages."""
    return isinstance(value, list) and value != [] and isinstance(value[0], dict)


# Some templates write today's date. Labels and queries must have the same tokens on every day.
FIXED_DATE = "{%- macro strftime_now(format) -%}26 Jul 2024{%- endmacro %}\n"


def render(chat: list[dict], tokenizer: PreTrainedTokenizerBase, **options: bool) -> str:
    """The text of a chat, by the tokenizer's template. A content in parts is joined."""
    messages = []
    for message in chat:
        content = message.get("content")
        if is_chat(content) and all(part.get("text") for part in content):
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str) or message.get("tool_calls"):
            raise UserError(f"a message must be a role and a text, and no more: {message}")
        given = {name: value for name, value in message.items() if value}  # a key may be null
        messages.append(given | {"content": content})
    with blame("chat template"):
        template = FIXED_DATE + tokenizer.get_chat_template()
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, **options
        )


def cut_query(
    tokens: list[int], length: int, start: int | None, end: int | None, long: str
) -> list[int]:
    """The query in these tokens, or [] if there is none: 1. what comes after the first `start`, or
    all if `start` is the last token; 2. at most `length` of that, cut or dropped as `long` says; 3.
    cut back to the last `end`, which stays. See lm_human_preferences/language/datasets.py."""
    if start is not None:
        if start not in tokens:
            return []
        tokens = tokens[tokens.index(start) + 1 :] or tokens
    if len(tokens) > length:
        if long == "drop":
            return []
        tokens = tokens[:length] if long == "keep_start" else tokens[-length:]
    if end is not None:
        if end not in tokens:
            return []
        tokens = tokens[: len(tokens) - tokens[::-1].index(end)]
    return tokens


def token_id(flag: str, tokenizer: PreTrainedTokenizerBase, args: Any) -> int | None:
    """The id of the flag's text, which must be one token (`eos`: the tokenizer's end)."""
    text = getattr(args, flag)
    if text is None:
        return None
    ids = tokenizer.encode(text, add_special_tokens=False)
    # Llama 2's tokenizer encodes `.` with a space before it, which is another token.
    named = tokenizer.get_vocab().get(text)
    if text == "eos":
        ids = [tokenizer.eos_token_id]
    elif named is not None and tokenizer.decode([named]) == text:
        ids = [named]
    elif tokenizer.decode(ids[-1:]) == text:  # a line feed has a space before it, too
        ids = ids[-1:]
    if len(ids) != 1 or ids[0] is None:
        raise UserError(f"--{flag} {text!r} must be one token, but is tokens {ids}")
    return ids[0]


def bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens put before every text: one for Llama and Gemma, for others none."""
    first = tokenizer("a", add_special_tokens=False).input_ids[:1]
    if not first:
        raise UserError("--base_model has a tokenizer without tokens")
    tokens = tokenizer("a").input_ids  # not of "": then an EOS at the end would look like it
    return tokens[: tokens.index(first[0])]


PADDING = 50259  # pads the rows of token ids in OpenAI's label files; GPT-2 has no such token


def encode(value: str | list, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids, without BOS, of a text, a chat that is to be answered, or a padded row of token
    ids. UserError for anything else, and for ids that the tokenizer does not have. Ids of another
    model that this tokenizer has, too, are not noticed, so read the first query and label, which
    are printed."""
    if is_chat(value):
        value = render(value, tokenizer, add_generation_prompt=True)
    known = range(len(tokenizer))
    if isinstance(value, str):
        tokens = tokenizer(value, add_special_tokens=False).input_ids
    elif isinstance(value, list) and all(x in known or x == PADDING for x in value):
        # 50259 is padding, unless this tokenizer has so many tokens.
        tokens = [token for token in value if token in known]
    else:
        raise UserError(f"neither text, nor chat, nor ids of this tokenizer: {value}")
    begin = bos(tokenizer)  # a chat template may have put it there
    return tokens[len(begin) :] if tokens[: len(begin)] == begin else tokens


@dataclass
class Comparison:
    """A label: which of N responses to a query people liked best. A pair has N = 2."""

    query: list[int]
    responses: TokenRows  # N rows of token ids, not padded
    best: int  # index of the one that people liked best
    is_from_chat: bool = False  # whether a chat template made the query
    row: dict = field(default_factory=dict)  # its row in the table


def load_labels(
    flag: str, args: Any, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Comparison], list[Comparison]]:
    """Labels to train on, the first --num_labels of `train`, and held-out ones: the first
    --eval_labels of the split `test`, or else of the rest of `train`."""
    splits = load_table(flag, args)
    table = splits["train"]
    count = args.num_labels or len(table)
    if count > len(table):
        raise UserError(f"--num_labels {count}: --{flag} has {len(table)} rows")
    labels = read_labels(flag, table, range(count), tokenizer, args)
    if len(labels) < args.batch_size:
        raise UserError(f"--{flag} has {len(labels)} labels for --batch_size {args.batch_size}")
    held_out = splits.get("test", table)
    rest = range(0 if "test" in splits else count, len(held_out))[: args.eval_labels]
    held_out = read_labels(flag, held_out, rest, tokenizer, args)
    first = tokenizer.batch_decode([labels[0].query, *labels[0].responses])
    say(f"--{flag}: {len(labels)}, first {first}, best is {labels[0].best}")
    return labels, held_out


def read_labels(
    flag: str, table: datasets.Dataset, rows: range, tokenizer: PreTrainedTokenizerBase, args: Any
) -> list[Comparison]:
    """The labels in these rows, in either format. Those of no use are left out and counted;
    UserError if they are more than a tenth. A coin decides whether the chosen response comes first:
    argmax takes the first of equal rewards, so otherwise a constant model would count as right."""
    coins = np.random.default_rng([args.seed, LABELS]).integers(0, 2, len(rows)).tolist()
    end = token_id("truncate_token", tokenizer, args)
    counts = Counter()
    labels = []
    for i, coin in zip(rows, coins, strict=True):
        with blame(f"--{flag} {getattr(args, flag)}, row {i}", UnicodeError):
            row = table[i]
            samples = [row[f"sample{n}"] or "" for n in range(100) if f"sample{n}" in row]
            if "chosen" in row and "rejected" in row:
                query, *responses = read_preference(row, end, counts, tokenizer, args)
                best = coin
                if coin:  # chosen comes second
                    responses.reverse()
            elif "query" in row and row.get("best") in range(len(samples)):
                if any(map(is_chat, samples)):
                    raise UserError(f"samples must be texts or token ids, not chats: {row}")
                query, *responses = [encode(x, tokenizer) for x in (prompt_of(row), *samples)]
                best = int(row["best"])
            else:
                raise UserError(f"neither query, sample0, .., best, nor chosen, rejected: {row}")
        if not query or not all(responses):
            counts["left out, for an empty or long prompt, an empty answer, or unlike chats"] += 1
        elif all(response == responses[0] for response in responses):
            counts["left out, for equal answers"] += 1
        else:
            labels.append(Comparison(bos(tokenizer) + query, responses, best, has_chat(row), row))
    if rows:
        say(f"--{flag}: {len(labels)} of {len(rows)} rows", dict(counts))
    if len(labels) < 0.9 * len(rows):
        raise UserError(f"--{flag}: {len(labels)} of {len(rows)} labels are of use: {dict(counts)}")
    return labels


def read_preference(
    row: dict, end: int | None, counts: Counter, tokenizer: PreTrainedTokenizerBase, args: Any
) -> tuple[list[int], list[int], list[int]]:
    """Token ids of prompt, chosen and rejected; a dropped prompt is []. As in PPO, an answer ends
    after its first truncate token at index --truncate_after or later; with `eos`, one is added if
    there is none. Then it is cut to --response_length. A prompt longer than --query_length is
    dropped or cut, as --long_queries says (None: dropped); --start_text and --end_text are not
    used. In a chat, an answer is what the template adds to the prompt. Examples of texts, where _
    is a space:

        prompt    chosen         rejected      read as
        Hello     , you.         there         Hello | , you. | there
        Why?      Why? Because   Why? So       Why? | _Because | _So
        none      Why? Because   Why? So       Why? | _Because | _So
    """
    answers = [row["chosen"], row["rejected"]]
    if not all(answers):  # an empty cell is null
        return [], [], []
    if not (all(isinstance(x, str) for x in answers) or all(is_chat(x) for x in answers)):
        raise UserError(f"chosen and rejected must be two texts or two chats: {answers}")
    if is_chat(answers[0]):
        *before, chosen = contents(answers[0])
        *before_rejected, rejected = contents(answers[1])
        if not chosen or not rejected:
            return [], [], []
        if before and before_rejected and before != before_rejected:  # they answer different turns
            return [], [], []
    texts = [value for value in row.values() if isinstance(value, str) or is_chat(value)]
    if set(PROMPTS) & set(row) or is_chat(answers[0]) or len(texts) > 2:
        # Texts in unknown columns are an error: one of them may be the prompt.
        prompt = prompt_of(row)
    else:
        # The common beginning may end within a word: that piece is left to the answers.
        prompt = re.sub(r"(\s|\A)\S*\Z", "", os.path.commonprefix(answers))
    if is_chat(prompt):
        begin = render(prompt, tokenizer, add_generation_prompt=True)
        chats = [x if is_chat(x) else [{"role": "assistant", "content": x}] for x in answers]
        answers = []
        for chat in chats:
            if len(chat) == 1:  # the answer alone
                chat = prompt + chat
            whole = render(chat, tokenizer)
            if not whole.startswith(begin):
                raise UserError(f"an answer's chat is {whole!r}, and does not continue {begin!r}")
            answers.append(whole.removeprefix(begin))
    elif isinstance(prompt, str) and all(answer.startswith(prompt) for answer in answers):
        answers = [answer.removeprefix(prompt) for answer in answers]

    if is_chat(prompt) and args.long_queries == "keep_start":
        raise UserError("a chat must keep its end: --long_queries drop or keep_end")
    query = encode(prompt, tokenizer)
    parts = [cut_query(query, args.query_length, None, None, args.long_queries or "drop")]
    for answer in answers:
        tokens = encode(answer, tokenizer)
        ends = [i for i, x in enumerate(tokens) if x == end and i >= args.truncate_after]
        if ends:
            tokens = tokens[: ends[0] + 1]
        elif tokens and end is not None:
            counts["answers without --truncate_token"] += 1
            if args.truncate_token == "eos" and tokens[-1] != end:
                tokens.append(end)
        parts.append(tokens[: args.response_length])
    return tuple(parts)


def has_chat(row: dict) -> bool:
    """Whether what is asked in this row is a chat, not a text."""
    return any(is_chat(row.get(name)) for name in ["chosen", *PROMPTS])


def contents(chat: list[dict]) -> list:
    """What its messages say: texts, lists of parts, or calls of tools."""
    return [message.get("content") or message.get("tool_calls") for message in chat]


def call_reward_fn(
    function: Callable,
    tokenizer: PreTrainedTokenizerBase,
    queries: list[Query],
    responses: TokenRows,
) -> Tensor:
    """Scores (B,) of a --reward_fn, called as TRL calls its reward functions: function(prompts=..,
    completions=.., **columns). Both are lists of texts, or of chats if the first prompt is one. The
    table's other columns are lists, too. It returns one finite float for each completion."""
    rows = [query.columns for query in queries]
    named = pd.DataFrame(rows, dtype=object).to_dict("list")
    named.pop("prompt", None)
    prompts = [prompt_of(row) for row in rows]
    completions = tokenizer.batch_decode(responses, skip_special_tokens=True)
    if is_chat(prompts[0]):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    else:
        begin = len(bos(tokenizer))
        prompts = tokenizer.batch_decode([query.input_ids[begin:] for query in queries])
    named |= {"prompts": prompts, "completions": completions}
    try:
        rewards = function(**copy.deepcopy(named))  # the function may change what it gets
    except Exception as error:
        error.add_note("This error comes from the function of --reward_fn.")
        raise
    with blame("--reward_fn must return a list, array or tensor of floats"):
        scores = torch.as_tensor(rewards, dtype=torch.float32, device=PartialState().device)
    if scores.shape != (len(queries),) or not scores.isfinite().all():
        raise UserError(f"--reward_fn must return {len(queries)} finite floats, not {rewards}")
    return scores.detach()
