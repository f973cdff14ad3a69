"""The implementation details of docs/details.md: for each row a fault in its code, which the row's
test sees. Also the tour of ppo_rlhf.py in README.md.

    python tests/helpers/details.py    # checks the rows, writes their count and the tour

Rows are written on the page. FAULTS has the code of each and a fault. Code is found by its syntax,
wherever and however it stands in the script, and so is the fault put in its place: `pytest
tests/test_details.py --faults` does that for every row.
"""

import ast
import functools
import re
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "details.md"
PPO = "ppo_rlhf.py"
TABLE = re.compile(r"<!-- (\w+) -->\n\|.*\n\|.*\n((?:\|.*\n)+)<!-- /\1 -->")
ROW = re.compile(
    r"\| (?P<what>.+) \| \[(?P<function>.+)\]\(\.\./(?P<script>.+)\) \| (?P<against>.+) "
    r"\| \[(?P<name>\w+)(: (?P<setting>.+))?\]\(\.\./(?P<path>.+)\) \|"
)
# What tests compare with, and the file that has these tests.
OWN = "our second implementation"
AGAINST = {
    "**recording of OpenAI's code**": "tests/test_golden.py",
    "**recording of TensorFlow**": "tests/test_tf_adam.py",
    "**table in Huang et al.**": "tests/test_algorithm.py",
    OWN: "tests/test_reference.py",
    "a worked example": "tests/test_algorithm.py",
    "a property": "",  # any
}

# By the page's tables, in the order of their rows: an expression or a statement that stands in the
# script once; below it, indented, what is put in its place.
FAULTS = """
# optimizer
group["eps"] /= math.sqrt(1 - beta2 ** group["t"])
    group["eps"] /= 1
AdamTF if args.adam == "tf" else AdamW
    AdamW
set_learning_rates(optimizer, update, update / num_updates, args, **max_lrs(update, args))
    set_learning_rates(optimizer, update, 0.0, args, **max_lrs(update, args))
# queries
tokens.index(start) + 1
    tokens.index(start)
Query(begin + query, context, row, prompt)
    Query(begin + query + suffix, context, row, prompt)
(ids.clamp(min=0), ids >= 0)
    (ids.clamp(min=0), ids >= -1)
(mask.cumsum(1) - 1).clamp(min=0)
    (torch.ones_like(mask).cumsum(1) - 1).clamp(min=0)
# sampling
(logits / temperature)
    logits
np.random.default_rng([seed, STREAM_SAMPLES, draw])
    np.random.default_rng([seed, STREAM_ROWS, draw])
predicted.pop("logits").div_(temperature)
    predicted.pop("logits")
batch.responses[:, :-1]
    batch.responses[:, 1:]
trunk.forward = partial(run_in_bf16, trunk.forward)
    trunk.forward = trunk.forward
predicted["ref_logprobs"] = of_ref["logprobs"]
    predicted |= {"ref_logprobs": of_ref["logprobs"], "logprobs": micro.sampled_logprobs}
ratio_limit * args.response_length
    args.max_kl
# scores
is_end[:, :after] = False
    is_end[:, : after + 1] = False
torch.where(found_end, scores, args.penalty_reward_value)
    scores
states[:, -1]
    states[:, -2]
getattr(classifier.config, "reward_bias", 0.0)
    0.0
until_end if args.mask_truncated else torch.ones_like(until_end)
    until_end
mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    mask & (mask.cumsum(1) == 1)
# updates
whiten(rewards, mask, shift_mean=False)
    whiten(rewards, mask, shift_mean=True)
(x - mean) * torch.rsqrt(variance + 1e-8)
    (x - mean) * torch.rsqrt(variance)
next_value = 0.0
    next_value = values[:, -1]
whiten(batch.advantages, mask, shift_mean=True)
    batch.advantages
nn.init.zeros_(p)
    nn.init.ones_(p)
0.5 * torch.maximum(value_loss, value_loss_clipped)
    0.5 * value_loss
torch.maximum(policy_loss, policy_loss_clipped)
    policy_loss
accelerator.num_processes / reduce(mini.loss_weights.sum(), "sum")
    1 / mini.loss_mask.sum()
np.random.default_rng([args.seed, STREAM_ROWS, rank, update])
    np.random.default_rng([args.seed, STREAM_ROWS, 0, update])
error * args.batch_size / args.kl_horizon
    error * args.batch_size / 2 / args.kl_horizon
min(max(kl / args.adaptive_kl_target - 1, -0.2), 0.2)
    kl / args.adaptive_kl_target - 1
# reward_model
1 / math.sqrt(model.score.in_features + 1)
    0.02
losses.sum() / len(labels)
    losses.mean()
order[start : start + args.batch_size][rank::num_processes]
    order[start : start + args.batch_size][::num_processes]
start / len(labels)
    update / num_updates
rewards.std(correction=0)
    rewards.std()
# rloo
differences.sum(2) / (rewards.shape[1] - 1)
    differences.sum(2) / rewards.shape[1]
batch.scores - kl_coef * kl
    batch.scores
old.sum_tokens(logprobs - old.logprobs)
    ((logprobs - old.logprobs) * old.loss_mask).mean(1)
ids[:: self.k, :length]
    ids[: len(ids) // self.k, :length]
# options
args.whiten_advantages
    True
args.weight_decay if is_matrix else 0.0
    args.weight_decay
max_norm or math.inf
    False
(update + 1) / (args.lr_warmup + 1)
    update / (args.lr_warmup + 1)
args.lr if args.critic_lr is None else args.critic_lr
    args.lr
reward_head(critic)
    self.value_head
0.0 if update < args.critic_warmup else args.lr
    args.lr
args.lora_alpha
    1
ends_before == 0
    is_end.cumsum(1) == 0
"""


@dataclass
class Detail:
    """A row of the page, with a fault."""

    what: str
    function: str  # the function or class that has the code
    script: str
    against: str  # what the test compares with
    name: str  # of the test, without `test_`
    setting: str | None  # of the test
    path: str  # of the test's file
    code: str
    fault: str

    @property
    def node(self) -> str:
        """The test as pytest has it."""
        setting = f"[{self.setting}]" if self.setting else ""
        return f"{self.path}::test_{self.name}{setting}"

    def place(self) -> str:
        """The function or class that has the code. ValueError if it is not in the script once."""
        code = parse(self.code)
        places = [place for node, place in nodes_of(self.script) if is_same(node, code)]
        if len(places) != 1:
            raise ValueError(f"{self.script} has `{self.code}` in {places}")
        return places[0]

    def check(self) -> None:
        """ValueError if the page names another function, a test that is not there, or what this
        test does not compare with."""
        if self.place() != self.function:
            raise ValueError(f"`{self.code}` is in {self.place()}, not in {self.function}")
        if f"def test_{self.name}(" not in (ROOT / self.path).read_text():
            raise ValueError(f"{self.path} has no test_{self.name}")
        if AGAINST[self.against] not in ("", self.path):
            raise ValueError(f"{self.path} does not compare with {self.against}")

    def broken(self) -> str:
        """The script's source with the fault."""
        tree = ast.parse((ROOT / self.script).read_text())
        return ast.unparse(Fault(self).visit(tree))


class Fault(ast.NodeTransformer):
    """Puts a detail's fault in the place of its code."""

    def __init__(self, detail: Detail) -> None:
        self.code = parse(detail.code)
        self.fault = parse(detail.fault)

    def visit(self, node: ast.AST) -> ast.AST:
        if is_same(node, self.code):
            return self.fault
        return self.generic_visit(node)


def parse(code: str) -> ast.AST:
    """The expression or statement that the code is."""
    (statement,) = ast.parse(code).body
    return statement.value if isinstance(statement, ast.Expr) else statement


@functools.cache
def nodes_of(script: str) -> list[tuple[ast.AST, str]]:
    """All nodes of the script's syntax tree, with the names of the definitions around each."""
    found = []

    def walk(node: ast.AST, names: tuple[str, ...]) -> None:
        found.append((node, ".".join(names)))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = (*names, node.name)
        for child in ast.iter_child_nodes(node):
            walk(child, names)

    walk(ast.parse((ROOT / script).read_text()), ())
    return found


def is_same(one: ast.AST, other: ast.AST) -> bool:
    """Whether two pieces of code are the same but for comments and layout."""
    return type(one) is type(other) and ast.dump(one) == ast.dump(other)


def faults_of(table: str) -> list[tuple[str, str]]:
    """Code and fault of each row of a table."""
    found = FAULTS.partition(f"\n# {table}\n")[2].partition("\n#")[0]
    lines = found.strip().splitlines()
    return list(zip(lines[::2], lines[1::2], strict=True))


def read_page() -> list[Detail]:
    """The rows of the page, with their faults."""
    details = []
    for table, text in TABLE.findall(PAGE.read_text()):
        rows = text.splitlines()
        faults = faults_of(table)
        if len(rows) != len(faults):
            raise ValueError(f"{table} has {len(rows)} rows and {len(faults)} faults")
        for row, (code, fault) in zip(rows, faults, strict=True):
            cells = ROW.fullmatch(row)
            if cells is None:
                raise ValueError(f"not a row of {PAGE.name}: {row}")
            details.append(Detail(**cells.groupdict(), code=code, fault=fault.strip()))
    return details


DETAILS = read_page()


# The tour of ppo_rlhf.py: where a part begins, up to the next one, and what is there.
TOUR = [
    ('"""PPO from', "`Args` with all settings, the presets, and `Batch`: for reference"),
    ("def main(", "**`main`: start here.** Set-up, then the loop in numbered steps"),
    (
        "# --- the algorithm",
        "**The algorithm:** `score_responses`, `gae`, `ppo_loss`, `ppo_update`; metrics, checks",
    ),
    (
        "# --- rollout and scoring",
        "`sample` and `rollout`; the reward model; log-probabilities; `ActorCritic`",
    ),
    (
        "# --- models",
        "Loading of models, and the entry point. What is not about RLHF is in [plumbing](plumbing)",
    ),
]


def summary() -> str:
    """How many rows are compared with what: others' code or numbers first."""
    against = Counter(detail.against for detail in DETAILS).most_common()
    others = {name.strip("*"): count for name, count in against if name.startswith("**")}
    own = dict(against)[OWN]
    rest = len(DETAILS) - sum(others.values()) - own
    parts = ", ".join(f"{count} with a {name}" for name, count in others.items())
    text = (
        f"Of the {len(DETAILS)} rows below, {sum(others.values())} are compared with others' code "
        f"or numbers ({parts}), {own} with our second implementation, and {rest} with a worked "
        "example or a property."
    )
    return textwrap.fill(text, 120) + "\n"


def tour() -> str:
    """The parts of ppo_rlhf.py with their lines."""
    lines = (ROOT / PPO).read_text().splitlines()
    starts = []
    for begin, _ in TOUR:
        (number,) = [i for i, line in enumerate(lines, 1) if line.startswith(begin)]
        starts.append(number)
    ends = [start - 1 for start in starts[1:]] + [len(lines)]
    text = "| lines | contents |\n| --- | --- |\n"
    for start, end, (_, what) in zip(starts, ends, TOUR, strict=True):
        text += f"| [{start}-{end}]({PPO}#L{start}-L{end}) | {what} |\n"
    return text


def pages() -> dict[Path, dict[str, str]]:
    """What is written on each page."""
    return {PAGE: {"summary": summary()}, ROOT / "README.md": {"tour": tour()}}


def with_tables(page: str, tables: dict[str, str]) -> str:
    """The page with its tables made again."""
    for name, text in tables.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        page, count = re.subn(pattern, lambda m, x=text: m[1] + x + m[2], page, flags=re.S)
        if count != 1:
            raise ValueError(f"there are {count} places for the table `{name}`")
    return page


def main() -> None:
    for detail in DETAILS:
        detail.check()
    for path, tables in pages().items():
        path.write_text(with_tables(path.read_text(), tables))


if __name__ == "__main__":
    main()
