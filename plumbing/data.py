"""Tables; their texts, chats and queries as token ids. Nothing here knows an algorithm."""

import functools
import json
import os
import re
from collections import Counter
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
from transformers import PreTrainedTokenizerBase

from plumbing.launch import UserError, blame, local_path, say

# Streams of random numbers, default_rng([seed, stream, ..]). The scripts have 1 and 4.
STREAM_QUERIES, STREAM_LABELS = 2, 3
KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


@dataclass
class Query:
    """A query in tokens, for its two readers."""

    for_reward: list[int]  # as the reward model reads it
    for_policy: list[int]  # as the policy reads it, with --query_prefix and --query_suffix
    columns: dict  # its row in the table, for a --reward_fn
    prompt: str | list = ""  # the text, chat or token ids that it was made from


# --- tables ---------------------------------------------------------------------------------------
def load_table(flag: str, name: str) -> dict[str, datasets.Dataset]:
    """The splits of a file, a folder or a data set on the hub. A folder or a hub id may end in
    :config, ::split or :config:split. If it names a split, only that is returned, as `train`."""
    name = local_path(name)
    what = f"--{flag} {name}"
    if os.path.isfile(name) and not os.path.getsize(name):
        raise UserError(f"{what} is empty")
    kind = None if os.path.isdir(name) else kind_of(name)
    if kind:
        split = ""
        source = {"path": kind, "data_files": escape(name)}
        if kind == "json":  # else datasets takes some tables of chats for logs of agents
            source["parse_agent_traces"] = False
    else:  # a folder, or a data set on the hub
        path, config, split = split_name(name.removeprefix("hf://datasets/"))
        path = local_path(path)
        source = {"path": path, "name": config or None}
        if os.path.isfile(path):
            raise UserError(f"{what}: a file must end in {[*KINDS]} (or .gz), and has no :split")
        if escape(path) != path:
            raise UserError(f"{what}: a folder's name must not have *, ? or [")
    with blame(what):
        splits = datasets.load_dataset(**source)
        options = keeping_texts(next(iter(splits.values())), name if kind else None)
        if options:  # the first reading shows which are needed
            splits = datasets.load_dataset(**source, **options)

    if not kind:  # datasets reads one kind of files in a folder, and ignores others silently
        files = [file for file in Path(path).rglob("*.*") if not file.match("dataset_info*")]
        kinds = {kind_of(file.name) for file in files} - {None}
        if len(kinds) > 1:
            raise UserError(f"{what} has files of several kinds, {[*kinds]}: name one of them")
        if (split or "train") not in splits:
            raise UserError(f"{what} has the splits {[*splits]}: name one, as in DATA::split")
    return {"train": splits[split]} if split else splits


def kind_of(name: str) -> str | None:
    """The kind of a file, from the end of its name."""
    return KINDS.get(Path(name.removesuffix(".gz")).suffix)


def split_name(name: str) -> tuple[str, str, str]:
    """Path, config and split, of which the last two may be ""."""
    if os.path.exists(name):  # its name may have a colon
        return name, "", ""
    path, _, rest = name.partition(":")
    config, _, split = rest.partition(":")
    return path, config, split


def keeping_texts(table: datasets.Dataset, file: str | None) -> dict[str, Any]:
    """Options with which datasets keeps this table's texts as they are in its files. By default, it
    makes "None" in a csv file an empty cell and 18 a number, and turns dates in JSON into times."""
    features = table.features
    if table.builder_name == "csv":
        # If rows have more cells than names, pandas takes the first for an index of this name.
        index = "__index_level_0__"
        if index in features and not (file and index in pd.read_csv(file, nrows=0)):
            raise UserError("rows have more cells than the first line has names")
        texts = dict.fromkeys(features, datasets.Value("string"))
        return {"na_filter": False, "features": datasets.Features(texts)}
    if table.builder_name == "json":
        times = r"Value\('(time|date)"  # also within messages
        dated = [name for name, feature in features.items() if re.search(times, str(feature))]
        if dated:
            return {"features": datasets.Features(features | dict.fromkeys(dated, datasets.Json()))}
    return {}


# The prompt is in the first of these columns that exists, if --prompt_column names no other.
PROMPTS = ("prompt", "messages", "query", "text")
# Their content may belong to the prompt. So a row that has some needs a --prompt_column.
UNREAD = ("system", "system_prompt", "history", "context", "passage", "image", "images", "tools")


def prompt_of(row: dict, column: str | None = None) -> str | list:
    """What is to be answered in this row: a text, token ids, or a chat (a list of messages) without
    its answer.

        column       chosen     what is returned
        text, ids    no chat    the column as it is
        chat         no chat    the chat, without a last message of the assistant
        text         chat       the longer of the text, as a user's message, and chosen[:-1]
        chat         chat       the longer of the chat, as above, and chosen[:-1]
        none         chat       chosen[:-1]
        any          empty      "", which is dropped
    """
    is_named = column is not None
    if not is_named:
        column = next((name for name in PROMPTS if name in row), None)
        unread = [name for name in UNREAD if row.get(name)]
        if unread:
            raise UserError(f"{unread} are not read: put them into the prompt, and name its column")
    chosen = row.get("chosen")
    if "chosen" in row and not chosen:  # an empty cell does not tell if it is a chat
        return ""
    before = chosen[:-1] if is_chat(chosen) else []
    if column not in row and (is_named or not before):
        raise UserError(f"--prompt_column must name the column of prompts, one of {list(row)}")
    prompt = row.get(column) or ""
    if not is_chat(prompt) and not is_chat(chosen):
        return prompt
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}] if prompt else []
    elif not is_chat(prompt):
        raise UserError(f"{column} must be a text or a chat, like `chosen`: {row}")
    elif prompt[-1].get("role") in ("assistant", "model", "bot"):
        prompt = prompt[:-1]
    texts = [message.get("content") for message in before]
    if prompt and before and prompt[-1].get("content") not in texts:
        raise UserError(f"the chat of `chosen` is not about the {column}: {row}")
    return max(prompt, before, key=len)


def is_chat(value: object) -> bool:
    """Whether this is a list of messages."""
    return isinstance(value, list) and value != [] and isinstance(value[0], dict)


# --- tokens ---------------------------------------------------------------------------------------
# Some templates write today's date. Labels and queries must have the same tokens on every day.
FIXED_DATE = "{%- macro strftime_now(format) -%}26 Jul 2024{%- endmacro %}\n"
# Who may speak last in a chat that is to be answered: others would be an answer.
ASKING = ("user", "human", "system", "developer", "tool", "function", "ipython")
PADDING = 50259  # pads the rows of token ids in OpenAI's label files; GPT-2 has no such token


def render(chat: list[dict], tokenizer: PreTrainedTokenizerBase, **options: bool) -> str:
    """The text of a chat, by the tokenizer's template. A content in parts is joined. UserError if
    the template leaves out what a message says."""
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
        text = tokenizer.apply_chat_template(
            messages,
            chat_template=FIXED_DATE + tokenizer.get_chat_template(),
            tokenize=False,
            # A template that can ask for thoughts shows none, in labels and in queries.
            enable_thinking=False,
            **options,
        )
    for message in messages:
        # Templates may cut spaces, and thoughts in earlier turns; a tool's words may be JSON.
        said = message["content"].rpartition("</think>")[2].strip()
        if said not in text and json.dumps(said, ensure_ascii=False)[1:-1] not in text:
            raise UserError(f"the chat template leaves out {message}: does it know this role?")
    return text


def encode(value: str | list, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids, without BOS, of a text, a chat that is to be answered, or a padded row of token
    ids. UserError for anything else, and for ids that the tokenizer does not have. Ids of another
    model that this tokenizer has, too, are not noticed, so read the first query and label, which
    are printed."""
    if is_chat(value):
        chat = value
        value = render(chat, tokenizer, add_generation_prompt=True)
        if chat[-1].get("role") not in ASKING:
            raise UserError(f"the last message must be by one of {ASKING}: {chat[-1]}")
    known = range(len(tokenizer))
    if isinstance(value, str):
        # A text file may start with a BOM.
        tokens = tokenizer(value.removeprefix("\ufeff"), add_special_tokens=False).input_ids
    elif isinstance(value, list) and all(
        type(x) is int and (x in known or x == PADDING) for x in value
    ):
        # 50259 is padding, unless this tokenizer has so many tokens.
        tokens = [token for token in value if token in known]
    else:
        raise UserError(f"neither text, nor chat, nor ids of this tokenizer: {value}")
    begin = bos(tokenizer)  # a chat template may have put it there
    return tokens[len(begin) :] if tokens[: len(begin)] == begin else tokens


@functools.cache
def bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens put before every text: one for Llama and Gemma, for others none."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    if 0 not in encoded.special_tokens_mask:
        raise UserError("--base_model has a tokenizer without tokens")
    return encoded.input_ids[: encoded.special_tokens_mask.index(0)]  # up to the `a`


def token_id(flag: str, text: str | None, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id of the flag's text, which must be one token (`eos`: the tokenizer's end)."""
    if text is None:
        return None
    ids = tokenizer.encode(text, add_special_tokens=False)
    named = tokenizer.get_vocab().get(text)
    # Llama 2's tokenizer adds a space in front: with `.` it is one token, with a line feed two.
    if text == "eos":
        ids = [tokenizer.eos_token_id]
    elif named is not None and tokenizer.decode([named]) == text:
        ids = [named]
    elif tokenizer.decode(ids[-1:]) == text:
        ids = ids[-1:]
    if len(ids) != 1 or ids[0] is None:
        raise UserError(f"--{flag} {text!r} must be one token, but is tokens {ids}")
    return ids[0]


# --- queries --------------------------------------------------------------------------------------
def load_queries(
    args: Any, tokenizer: PreTrainedTokenizerBase, num_held_out: int, num_queries: int
) -> tuple[list[Query], list[Query]]:
    """Up to `num_held_out` different queries of --query_dataset, and up to `num_queries` others (at
    least one), none like those, in an order drawn from --seed. Prints why rows were dropped."""
    begin = bos(tokenizer)
    prefix = encode(args.query_prefix or "", tokenizer)
    suffix = encode(args.query_suffix or "", tokenizer)
    start = token_id("start_text", args.start_text, tokenizer)
    end = token_id("end_text", args.end_text, tokenizer)
    long = args.long_queries or ("drop" if end is None else "keep_start")
    table = load_table("query_dataset", args.query_dataset)["train"]
    dropped = Counter()
    held_out = {}
    queries = []
    order = np.random.default_rng([args.seed, STREAM_QUERIES]).permutation(len(table))
    for i in order.tolist():
        with blame(f"--query_dataset {args.query_dataset}, row {i}", UnicodeError):
            with blame("cannot be read"):  # like a damaged picture
                row = table[i]
            prompt = prompt_of(row, args.prompt_column)
            if is_chat(prompt) and (start is not None or end is not None or long == "keep_start"):
                raise UserError(
                    "a chat must keep its end: --start_text none --end_text none, and "
                    "--long_queries drop or keep_end"
                )
            tokens = encode(prompt, tokenizer)
        query, cause = cut_query(tokens, args.query_length, start, end, long)
        context = begin + prefix + query + suffix
        candidate = Query(begin + query, context, row, prompt)
        if tuple(context) in held_out:
            cause = cause or "like one that is held out"
        if cause:
            dropped[cause] += 1
        elif len(held_out) < num_held_out:
            held_out[tuple(context)] = candidate
        else:
            queries.append(candidate)
            if len(queries) >= num_queries:
                break
    used = [*held_out.values(), *queries]
    if not queries:
        dropped["held out"] = len(held_out)
        raise UserError(f"--query_dataset: no query is left of {len(table)} rows: {dict(dropped)}")
    say(
        f"--query_dataset: {len(table)} rows, {len(used) + dropped.total()} read, {len(used)} used,"
        f" dropped {dict(dropped)}, first {tokenizer.decode(used[0].for_policy)!r}"
    )
    if dropped.total() > len(used):
        say("WARNING: more than half of the rows that were read are dropped")
    return list(held_out.values()), queries


def cut_query(
    tokens: list[int], length: int, start: int | None, end: int | None, long: str
) -> tuple[list[int], str]:
    """The query in these tokens and "", or [] and why there is none: 1. what comes after the first
    `start`, or all if `start` is the last token; 2. at most `length` of that, cut or dropped as
    `long` says; 3. cut back to the last `end`, which stays. See
    lm_human_preferences/language/datasets.py."""
    if not tokens:
        return [], "empty"
    if start is not None:
        if start not in tokens:
            return [], "without --start_text"
        tokens = tokens[tokens.index(start) + 1 :] or tokens
    if len(tokens) > length and long == "drop":
        return [], "longer than --query_length"
    tokens = tokens[-length:] if long == "keep_end" else tokens[:length]
    if end is not None:
        if end not in tokens:
            return [], "without --end_text"
        tokens = tokens[: len(tokens) - tokens[::-1].index(end)]
    return tokens, ""
