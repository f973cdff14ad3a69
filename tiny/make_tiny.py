"""Makes the tiny world: a story grammar, a small GPT-2 trained on it, queries, mock labels.

python tiny/make_tiny.py                    # everything, into the folder this file stands in
python tiny/make_tiny.py --out /some/where  # into another folder
"""

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from grammar import Story
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

END = "<|endoftext|>"
N_POSITIONS = 128
QUERY_LENGTH = 32
RESPONSE_LENGTH = 24
TEMPERATURE = 0.7
QUERY_PAD = 50259  # what OpenAI's label files pad queries with; no token of this vocabulary
CORPUS_TONES = (0.3, 0.4, 0.3)
QUERY_TONES = (0.1, 0.8, 0.1)  # mostly neutral queries, so that a continuation can go either way


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=2816)
    parser.add_argument(
        "--corpus-size", type=int, default=70_000, help="passages for tokenizer and pre-training"
    )
    parser.add_argument("--steps", type=int, default=2100, help="pre-training updates")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="pre-train with bfloat16 matrix products",
    )
    parser.add_argument("--train-queries", type=int, default=6000)
    parser.add_argument("--test-queries", type=int, default=512)
    parser.add_argument("--train-labels", type=int, default=4000)
    parser.add_argument("--test-labels", type=int, default=512)
    parser.add_argument(
        "--label-noise", type=float, default=0.1, help="std of the noise on the labeller's scores"
    )
    return parser.parse_args()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# --- Corpus ---------------------------------------------------------------------------------------


def make_corpus(rng: random.Random, size: int) -> list[str]:
    """Long passages, so that an end of text lies far beyond any query and continuation."""
    return [" ".join(Story(rng, CORPUS_TONES).passage(rng.randint(12, 16))) for _ in range(size)]


def make_passages(rng: random.Random, size: int) -> list[str]:
    """Short passages of three to five sentences, from which queries are cut."""
    return [" ".join(Story(rng, QUERY_TONES).passage(rng.randint(3, 5))) for _ in range(size)]


# --- Tokenizer ------------------------------------------------------------------------------------


def train_tokenizer(corpus: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which a full stop is always one token: queries and responses end on it."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\."), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        unk_token=END,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    tokenizer.model_max_length = N_POSITIONS  # set only now, for the corpus holds longer texts
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = (
        "PreTrainedTokenizerFast"  # the one name that every version of transformers knows
    )
    path.write_text(json.dumps(config, indent=2) + "\n")


# --- Pre-training ---------------------------------------------------------------------------------


def make_model(tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=N_POSITIONS,
        n_embd=128,
        n_layer=4,
        n_head=4,
        activation_function="gelu_new",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return GPT2LMHeadModel(config)


def make_rows(
    tokenizer: PreTrainedTokenizerFast, corpus: list[str], rng: random.Random
) -> torch.Tensor:
    """One training row per passage; -1 fills what lies behind its end.

    A row begins with the first sentence or, as a query does, right after the full stop of one of
    the first three.
    """
    stop = tokenizer.convert_tokens_to_ids(".")
    rows = torch.full((len(corpus), N_POSITIONS + 1), -1, dtype=torch.int16)
    for row, text in zip(rows, tokenizer(corpus)["input_ids"], strict=True):
        ids = [tokenizer.bos_token_id, *text, tokenizer.eos_token_id]
        for _ in range(rng.randint(0, 3)):
            ids = ids[ids.index(stop) + 1 :]
        ids = ids[: N_POSITIONS + 1]
        row[: len(ids)] = torch.tensor(ids, dtype=torch.int16)
    return rows


def loss_on(model: GPT2LMHeadModel, rows: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood per token."""
    rows = rows.long()
    logits = model(rows[:, :-1].clamp(min=0)).logits.float()
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), rows[:, 1:].flatten(), ignore_index=-1
    )


def pretrain(
    model: GPT2LMHeadModel, rows: torch.Tensor, steps: int, batch_size: int, lr: float, bf16: bool
) -> None:
    """AdamW with a short warm-up and a linear decay; no dropout, since no passage is seen often."""
    model.eval()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [dict(params=decayed, weight_decay=0.01), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))
    warmup = 60
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, max(0.0, (steps - step) / max(1, steps - warmup))),
    )
    order = torch.cat(
        [torch.randperm(len(rows)) for _ in range(math.ceil(steps * batch_size / len(rows)))]
    )
    start = time.time()
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = loss_on(model, rows[order[step * batch_size : (step + 1) * batch_size]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 100 == 0 or step == steps - 1:
            say(f"step {step:5d}  loss {loss.item():.3f}  {time.time() - start:.0f} s")


# --- Queries and continuations --------------------------------------------------------------------


def cut_query(ids: list[int], stop: int) -> list[int]:
    """What lm-human-preferences makes of a text: from the first full stop to the last in reach."""
    ids = ids[ids.index(stop) + 1 :][:QUERY_LENGTH]
    return ids[: len(ids) - ids[::-1].index(stop)] if stop in ids else []


def cut_queries(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    stop = tokenizer.convert_tokens_to_ids(".")
    return [cut_query(ids, stop) for ids in tokenizer(texts)["input_ids"]]


def usable_passages(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, sizes: list[int]
) -> list[list[str]]:
    """Groups of passages that all leave a query; no two passages anywhere are the same."""
    kept: dict[str, None] = {}
    while len(kept) < sum(sizes):
        texts = make_passages(rng, 1000)
        kept.update(
            (text, None)
            for text, query in zip(texts, cut_queries(tokenizer, texts), strict=True)
            if query
        )
    everything = iter(kept)
    return [[next(everything) for _ in range(size)] for size in sizes]


@torch.no_grad()
def sample(model: GPT2LMHeadModel, queries: list[list[int]], batch_size: int = 512) -> torch.Tensor:
    """One continuation per query; queries of one length are sampled together, without padding."""
    model.eval()
    responses = torch.zeros(len(queries), RESPONSE_LENGTH, dtype=torch.long)
    for length in sorted({len(query) for query in queries}):
        indices = [i for i, query in enumerate(queries) if len(query) == length]
        for first in range(0, len(indices), batch_size):
            chunk = indices[first : first + batch_size]
            responses[chunk] = sample_batch(model, torch.tensor([queries[i] for i in chunk]))
    return responses


def sample_batch(model: GPT2LMHeadModel, ids: torch.Tensor) -> torch.Tensor:
    tokens, cache = [], None
    for _ in range(RESPONSE_LENGTH):
        output = model(ids, past_key_values=cache, use_cache=True)
        ids = torch.multinomial((output.logits[:, -1] / TEMPERATURE).softmax(-1), 1)
        cache = output.past_key_values
        tokens.append(ids)
    return torch.cat(tokens, 1)


# --- Labels ---------------------------------------------------------------------------------------


def compounds(texts: list[str]) -> torch.Tensor:
    """VADER's compound sentiment, from -1 to 1."""
    analyzer = SentimentIntensityAnalyzer()
    return torch.tensor([analyzer.polarity_scores(text)["compound"] for text in texts])


def label(
    model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, texts: list[str], noise: float
) -> tuple[dict[str, list], torch.Tensor]:
    """Four continuations per query, which one a noisy reader of sentiment likes best, and scores
    without the noise."""
    queries = cut_queries(tokenizer, texts)
    samples = sample(model, [query for query in queries for _ in range(4)])
    scores = compounds(tokenizer.batch_decode(samples)).view(-1, 4)
    samples = samples.view(-1, 4, RESPONSE_LENGTH)
    columns = {"query": [query + [QUERY_PAD] * (QUERY_LENGTH - len(query)) for query in queries]}
    columns |= {f"sample{i}": samples[:, i].tolist() for i in range(4)}
    columns["best"] = (scores + noise * torch.randn_like(scores)).argmax(1).tolist()
    return columns, scores


def save_labels(columns: dict[str, list], path: Path) -> None:
    types = {name: pa.int32() if name == "best" else pa.list_(pa.int32()) for name in columns}
    pq.write_table(pa.table(columns, schema=pa.schema(types)), path, compression="zstd")


# --- Figures --------------------------------------------------------------------------------------


@torch.no_grad()
def perplexities(
    model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> dict[str, float]:
    """The model's perplexity on unseen passages, and the grammar's own from its choices' surprise.

    The latter is an upper bound: it also counts choices that leave no trace in the text.
    """
    model_nats = grammar_nats = n_tokens = 0.0
    for _ in range(400):
        story = Story(rng, CORPUS_TONES)
        ids = tokenizer(" ".join(story.passage(8)))["input_ids"]
        row = torch.tensor([[tokenizer.bos_token_id, *ids]])
        if len(ids) < N_POSITIONS:
            model_nats += loss_on(model, row).item() * len(ids)
            grammar_nats += story.nats
            n_tokens += len(ids)
    return {
        "model_perplexity": math.exp(model_nats / n_tokens),
        "grammar_perplexity_upper_bound": math.exp(grammar_nats / n_tokens),
        "tokens_per_sentence": n_tokens / (8 * 400),
    }


def sample_figures(
    model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> dict:
    """What continuations of the test queries are like before any fine-tuning."""
    queries = cut_queries(tokenizer, texts)
    samples = sample(model, queries)
    scores = compounds(tokenizer.batch_decode(samples))
    stop = tokenizer.convert_tokens_to_ids(".")
    same = sample(model, queries[:1] * 64)
    many = compounds(
        tokenizer.batch_decode(sample(model, [query for query in queries[:64] for _ in range(64)]))
    )
    return {
        "reference_compound_mean": scores.mean().item(),
        "reference_compound_std": scores.std().item(),
        "reference_share_above_0.5": (scores > 0.5).float().mean().item(),
        "reference_share_below_-0.5": (scores < -0.5).float().mean().item(),
        "best_of_64_compound_mean": many.view(64, 64).amax(1).mean().item(),
        "distinct_share_of_512_queries": len(samples.unique(dim=0)) / len(samples),
        "distinct_share_of_64_for_one_query": len(same.unique(dim=0)) / 64,
        "share_with_full_stop_at_16_to_23": (samples[:, 16:] == stop).any(1).float().mean().item(),
        "share_with_end_of_text": (samples == tokenizer.eos_token_id).any(1).float().mean().item(),
        "samples": [
            {
                "query": tokenizer.decode(query).strip(),
                "continuation": tokenizer.decode(response).strip(),
            }
            for query, response in zip(queries[:8], samples[:8].tolist(), strict=True)
        ],
    }


def label_figures(columns: dict[str, list], scores: torch.Tensor) -> dict[str, float]:
    best = torch.tensor(columns["best"])
    return {
        "best_is_noiseless_argmax": (best == scores.argmax(1)).float().mean().item(),
        "best_constant_accuracy": best.bincount(minlength=4).max().item() / len(best),
        "compound_of_best": scores.gather(1, best[:, None]).mean().item(),
        "compound_of_all_four": scores.mean().item(),
    }


def rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return round(value, 3) if isinstance(value, float) else value


# --------------------------------------------------------------------------------------------------


def main() -> None:
    args = parse_args()
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    start = time.time()

    corpus = make_corpus(rng, args.corpus_size)
    tokenizer = train_tokenizer(corpus, args.vocab_size)
    model = make_model(tokenizer)
    say(f"{len(corpus)} passages, {len(tokenizer)} tokens, {model.num_parameters():,} parameters")
    pretrain(
        model, make_rows(tokenizer, corpus, rng), args.steps, args.batch_size, args.lr, args.bf16
    )
    model.save_pretrained(args.out / "model")
    save_tokenizer(tokenizer, args.out / "model")

    names = [
        "queries/train.jsonl",
        "queries/test.jsonl",
        "labels/train.parquet",
        "labels/test.parquet",
    ]
    sizes = [args.train_queries, args.test_queries, args.train_labels, args.test_labels]
    groups = dict(zip(names, usable_passages(tokenizer, rng, sizes), strict=True))
    figures: dict = {"parameters": model.num_parameters(), "vocabulary": len(tokenizer)}
    figures |= perplexities(model, tokenizer, rng)
    for name in names:
        (args.out / name).parent.mkdir(parents=True, exist_ok=True)
    for name in names[:2]:
        (args.out / name).write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in groups[name])
        )
        cut = {tuple(query) for query in cut_queries(tokenizer, groups[name])}
        figures[name] = {
            "rows": len(groups[name]),
            "distinct_queries": len(cut) / len(groups[name]),
        }
    for name in names[2:]:
        columns, scores = label(model, tokenizer, groups[name], args.label_noise)
        save_labels(columns, args.out / name)
        figures[name] = {"rows": len(groups[name]), **label_figures(columns, scores)}
    figures |= sample_figures(model, tokenizer, groups[names[1]])
    made = [*names, "model/model.safetensors", "model/tokenizer.json"]
    figures["bytes"] = {name: (args.out / name).stat().st_size for name in made}
    (args.out / "figures.json").write_text(json.dumps(rounded(figures), indent=2) + "\n")
    say(json.dumps(rounded(figures), indent=2) + f"\n{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
