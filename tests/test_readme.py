"""The documents say what the code and the measured results say."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from fork_tools import PPO, REWARD, SCRIPTS, parse, plain
from run_tools import read_lines
from tiny_models import WORKING
from transformers import AutoTokenizer, DistilBertConfig, DistilBertForSequenceClassification

import train_reward
from benchmark import report
from benchmark.studies.films import report as films
from plumbing import labels as labels_module
from tiny import rewards


def pages(pattern):
    return [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob(pattern))]


STUDIES = [*pages("benchmark/studies/*/README.md"), "benchmark/speed/README.md", "docs/symptoms.md"]
DOCS = pages("docs/*.md")
PAGES = ("README.md", "benchmark/README.md", *STUDIES, *DOCS, "tiny/rewards.py")
SYSTEMS = "benchmark/systems/README.md"  # names flags of patches, and of former versions
DOCUMENTS = (*PAGES[:-1], SYSTEMS, "CHANGELOG.md")
PROGRAMS = {"help", "golden", "faults", "script", "num_processes", "multi_gpu", "cpu"}
PROGRAMS |= {"config_file", "check", "num_machines", "machine_rank", "main_process_ip"}
PROGRAMS |= {"script_flags", "signal", "main_process_port"}
# What the page calls the models that work, without what stands in brackets, and the tests.
MODELS = {
    "GPT-2": "gpt2",
    "GPT-NeoX": "gpt_neox",
    "OPT": "opt",
    "Bloom": "bloom",
    "Falcon": "falcon",
    "Llama": "llama",
    "SmolLM3": "smollm3",
    "Mistral": "mistral",
    "Mixtral": "mixtral",
    "Qwen 2": "qwen2",
    "Qwen 3": "qwen3",
    "Gemma 1 to 3": "gemma gemma2 gemma3",
    "Phi-3": "phi3",
    "OLMo 1 to 3": "olmo olmo2 olmo3",
    "GLM-4": "glm4",
    "Cohere": "cohere",
    "Granite": "granite",
    "StarCoder 2": "starcoder2",
    "StableLM": "stablelm",
    "DeepSeek-V3": "deepseek_v3",
    "gpt-oss": "gpt_oss",
    "GPT-Neo": "gpt_neo",
    "GPT-J": "gptj",
}
OF_COPIES = ("docs/trl.md", "docs/trl_fidelity.md")  # flags of patched copies, too


def read(page):
    return (ROOT / page).read_text()


def test_a_table_that_is_not_that_of_its_records_is_an_error():
    page = ROOT / "benchmark/studies/default_run/README.md"
    whole = page.read_text()
    for old, new in (("| PPO | 1 |", "| PPO | 9 |"), (">0.76<", ">0.67<")):
        changed = whole.replace(old, new, 1)
        assert changed != whole
        assert report.written(page, changed) == whole
    of_fields = report.BENCHMARK / "README.md"
    right = of_fields.read_text()
    wrong = right.replace("(+0.70 ± 0.10)", "(+0.70 ± 0.04)", 1)
    assert wrong != right
    assert report.written(of_fields, wrong) == right
    for end in ("<!-- /table -->", "<!-- / -->"):
        unclosed = end.join(whole.split(end)[:-1])
        with pytest.raises(SystemExit, match="marker that is not closed"):
            report.written(page, unclosed)


def test_tables_and_pictures_are_made_from_the_records(tmp_path):
    """Records that no table names change none. A page and pictures whose record has changed are
    found."""
    folder = shutil.copytree(ROOT / "benchmark", tmp_path / "benchmark")
    for file in [*folder.glob("studies/*/*.json"), *folder.glob("speed/*.json")]:
        file.with_stem(f"{file.stem}-mine").write_text("{}")
    command = [sys.executable, str(folder / "report.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = folder / "studies/optimum/enumerated.json"
    record.write_text(record.read_text().replace('"seed": 1', '"seed": 7', 1))
    done = subprocess.run([*command, "optimum"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("out of date")
    for name in ("README.md", "curves.png"):
        assert f"studies/optimum/{name}" in done.stderr
    assert done.stderr.count("/studies/") == 2


def test_every_table_of_the_measurements_is_made_from_records():
    """All tables of benchmark/README.md and of the studies stand between markers, but for the
    summary and the list of studies, and for that of symptoms, whose numbers do. They have eight
    columns at most. And every study is linked from there."""
    for name in ("benchmark/README.md", *STUDIES):
        text = read(name).partition("## The task")[2] or read(name)
        for line in re.findall(r"^\|.*$", text, re.M):
            assert len(re.sub("<!--.*?-->", "", line).strip("|").split(" | ")) <= 8, line
        for pattern in (report.TABLE, report.COPY):
            text = pattern.sub("", text)
        assert not re.search(r"^ *<!-- \S+\.json: ", text, re.M), "begins a block of HTML"
        text = re.sub(r"<!-- \S+\.json: .*?<!-- / -->", "", text)
        text = text.partition("## All studies")[0]
        for line in re.findall(r"^\|.*$", text, re.M):
            assert name == "docs/symptoms.md"
            _, _, healthy, ill, *_ = line.strip("|").split(" | ")
            assert not re.search(r"\d", healthy + ill), line
    known = {ROOT / page for page in ("benchmark/README.md", *STUDIES)}
    assert known == {report.page_of(folder) for folder in report.folders()}
    start = read("benchmark/README.md")
    for page in STUDIES:
        name = page.removeprefix("benchmark/").removesuffix("/README.md")
        assert f"]({name.replace('docs/', '../docs/')})" in start, page


def blocks_of(page):
    """The paragraphs and the items of lists of a page, without what is made from records, tables,
    headings, commands, pictures' words and links' targets."""
    text = read(page)
    for pattern in (report.TABLE, report.COPY):
        text = pattern.sub("\n\n", text)
    text = report.NUMBER.sub("", text)
    text = re.sub(r"^(?:[#|]|    ).*$", "", text, flags=re.M)
    text = re.sub(r"!?\[[^]]*\]\(.*?\)|`[^`]*`", "", text)
    return re.split(r"\n\n+|\n(?=- |\d+\. )", text)


@pytest.mark.parametrize("page", ["benchmark/README.md", *STUDIES])
def test_typed_numbers_name_their_records(page):
    """A paragraph with a decimal or a share that is typed has a comment which says what it is from:
    records, or a program where it is a setting."""
    for block in blocks_of(page):
        words = re.sub("<!--.*?-->", "", block)
        if not re.search(r"(?<![\w.:])\d+\.\d+(?![.\w])|\d%", words):
            continue
        origin = re.search(r"<!-- from ([^:]*?)(?:: .*?)? -->", block)
        assert origin, block
        names = origin[1].replace(", ", " ")
        folder = (ROOT / page).parent
        for name in report.expand(names):
            assert (folder / name).exists(), name


def test_the_numbers_of_the_summary_are_those_of_the_findings():
    summary, _, findings = read("benchmark/README.md").partition("## The task")
    rows = re.findall(r"^\| \[\d\. .*?\) \| (.*?) \|", summary, re.M)
    assert len(rows) == 5
    for row in rows:
        for number in re.findall(r"\d+(?:\.\d+)?", row):
            alone = rf"(?<![\d.]){re.escape(number)}(?!\d)"
            assert re.search(alone, findings), number


def test_every_picture_is_drawn_from_records(tmp_path):
    drawn = set()
    for folder in report.folders():
        for path, draw, records in report.pictures(folder):
            figure = draw(*map(report.load, records))
            figure.savefig(tmp_path / "picture.png", dpi=20)
            drawn.add(path)
    report.save(figure, tmp_path / "picture.png")
    assert drawn == {*ROOT.glob("benchmark/**/*.png"), *ROOT.glob("docs/*.png")}
    text = "".join(read(page) for page in ("benchmark/README.md", *STUDIES))
    for path in drawn:
        names = (f"]({path.name})", f"]({os.path.relpath(path, ROOT / 'benchmark')})")
        assert path.name == "readme.png" or any(name in text for name in names), path


def test_every_patch_is_listed():
    page = read(SYSTEMS)
    listed = re.findall(r"^\| \[(.*?)\]\(\1\.patch\) \|", page, re.M)
    patches = [path.stem for path in ROOT.glob("benchmark/systems/*.patch")]
    assert sorted(listed) == sorted(patches)


def test_the_first_command_finds_its_labels():
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")
    labels, held_out = labels_module.load_labels(train_reward.Args(), tokenizer)
    assert len(labels) == 4000
    assert len(held_out) == 512


def anchors(text):
    """The names by which a page's headings are linked to."""
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", DOCUMENTS)
def test_every_link_leads_to_a_file_and_to_a_part_of_it(page):
    links = re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", read(page))
    assert links
    for target, part in links:
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        if lines := re.fullmatch(r"L\d+-L(\d+)", part):
            assert int(lines[1]) <= len(path.read_text().splitlines()), (target, part)
        elif part:
            assert part in anchors(path.read_text()), (target, part)


def commands(page):
    """The words of every command that is shown and runs a script, from its name on."""
    found = []
    blocks = re.findall(r"```bash\n(.*?)```|^    (python .*)$", read(page), re.S | re.M)
    text = "\n".join(block or line for block, line in blocks)
    arrays = re.findall(r"^(\w+)=\((.*?)\)$", text, re.S | re.M)
    for name, values in arrays:
        words = " ".join(values.split())
        text = text.replace(f'"${{{name}[@]}}"', words)
    for line in text.replace("\\\n", " ").splitlines():
        recipe = re.search(r"\$\(sed 's/#\.\*//' (\S+)\)", line)
        if recipe:
            settings = re.sub("#.*", "", read(recipe[1]))
            line = line.replace(recipe[0], " ".join(settings.split()))
        for command in line.partition("  #")[0].strip(" `").split(" && "):
            words = shlex.split(command) if re.match("(python|accelerate) ", command) else []
            index = next((i for i, word in enumerate(words) if word in SCRIPTS), None)
            if index is not None:
                found.append(words[index:])
    return found


def test_every_command_that_is_shown_is_one_that_the_scripts_take(tmp_path, monkeypatch, capsys):
    shown = [words for page in PAGES for words in commands(page)]
    text = "".join(read(page) for page in ("README.md", *DOCS) if page not in OF_COPIES)
    for words in re.findall(r"`(--[^`]*)`", text):
        if " " in words and not re.search(r"golden|faults|script", words):
            shown.append([PPO, *shlex.split(words)])
    assert len(shown) > 10
    monkeypatch.chdir(tmp_path)
    for script, *words in shown:
        if "--help" in words:
            continue
        module = importlib.import_module(script[:-3])
        try:
            _, args = parse(module, words)
        except SystemExit:
            pytest.fail(f"{script} {words}: {capsys.readouterr().err}")
        if getattr(args, "reward_fn", None):
            name, _, function = args.reward_fn.partition(":")
            assert callable(getattr(importlib.import_module(name), function))


def test_every_flag_that_is_shown_exists():
    modules = [importlib.import_module(script[:-3]) for script in SCRIPTS]
    fields = {name for module in modules for name in vars(module.Args())}
    text = "".join(read(page) for page in PAGES)
    flags = set(re.findall(r"(?<![\w-])--(?:no[_-])?([a-z_]+)", text)) - PROGRAMS
    assert len(flags) > 20
    for patch in ROOT.glob("benchmark/systems/*.patch"):
        fields |= set(re.findall(r"^\+    ([a-z_]+): ", patch.read_text(), re.M))
    fields |= set(re.findall(r"^\+    ([a-z_]+): ", read("docs/changes.md"), re.M))
    programs = "".join(path.read_text() for path in (ROOT / "benchmark").glob("**/*.py"))
    words = set(re.findall(r"\w+", programs))
    assert flags - fields - words == set()


def listed_metrics():
    """The names in the tables of metrics, with their braces expanded."""
    listed = set()
    for cell in re.findall(r"^\| (`.*?) \|", read("docs/metrics.md"), re.M):
        for word in re.findall(r"`([^`]+)`", cell):
            first, _, rest = word.partition("{")
            middle, _, last = rest.partition("}")
            listed |= {first + x + last for x in middle.split(",")}
    return listed


def test_every_metric_that_a_run_logs_is_listed_and_no_other():
    logged = set()
    for script in SCRIPTS:
        logged |= set(read_lines(plain(script, 1) / "out/metrics.jsonl")[0])
    assert logged == listed_metrics()


def test_pages_are_short():
    lines = read("README.md").splitlines()
    assert len(lines) <= 140
    prose = [line for line in lines if line[:1] != "|" and "](" not in line]
    assert max(map(len, prose)) <= 120
    assert len(read("benchmark/README.md").encode()) <= 18_000
    _, *versions = read("CHANGELOG.md").split("\n## ")
    assert max(version.count("\n- ") for version in versions) <= 15


def test_the_readme_counts_details_and_wins_as_they_are():
    readme = " ".join(read("README.md").split())
    tables = re.findall(r"<!-- (\w+) -->\n(.*?)<!-- /\1 -->", read("docs/details.md"), re.S)
    rows = []
    for _, table in tables:
        rows += [line for line in table.splitlines()[2:] if line.startswith("| ")]
    recorded = [row for row in rows if "| **recording of OpenAI's code** |" in row]
    words = f"Of {len(rows)} [implementation details](docs/details.md), {len(recorded)} are"
    assert words in readme

    record = report.load(ROOT / "benchmark/studies/films/films.json")
    for name, row in zip(("PPO", "RLOO"), films.claims(record), strict=False):
        words = f"{name} wins {row['won']['mean']:.0%} and loses {row['lost']['mean']:.0%}"
        assert words in readme
        assert words in read("benchmark/README.md")


def test_what_the_page_calls_supported_is_tested():
    rows = re.findall(r"^\| (.*) \| work \|", read("docs/deviations.md"), re.M)
    named = re.sub(r" \(.*?\)", "", ", ".join(rows)).split(", ")
    assert named == [*MODELS]
    assert set(" ".join(MODELS.values()).split()) <= WORKING.keys()


def test_all_pages_name_one_version():
    version = re.search(r'^version = "(.*)"$', read("pyproject.toml"), re.M)[1]
    assert f"version = {{{version}}}" in read("README.md")
    assert f"\nversion: {version}\n" in read("CITATION.cff")
    assert re.search(r"^## \[(.*?)\]", read("CHANGELOG.md"), re.M)[1] == version


def test_samples_of_the_readme_are_those_of_the_record():
    head = "| opening | starting model | after PPO | after RLOO |\n| --- | --- | --- | --- |\n"
    (row, after) = read("README.md").partition(head)[2].splitlines()[:2]
    first = read("benchmark/studies/films/README.md").partition(head)[2].splitlines()[0]
    assert row == first
    assert after == ""  # one row, and not one that was chosen


def test_the_readme_has_the_commands_of_the_set_up_and_of_one_s_own_model():
    """Settings that two commands share reach both."""
    assert re.findall(r"^pip install.*$", read("README.md"), re.M) == [
        "pip install -e . && python train_reward.py && python ppo_rlhf.py",
        'pip install -e ".[test]" && pytest',
    ]
    shared = [words for words in commands("README.md") if "./my_sft" in words]
    assert [words[0] for words in shared] == [REWARD, PPO]
    for words in shared:
        assert "--truncate_token" in words


def test_the_loop_of_the_readme_is_the_script_s():
    """Its lines stand in main in the same order, with other comments and nothing between them."""
    (loop,) = re.findall(r"```python\n(for .*?)```", read("README.md"), re.S)
    (main,) = re.findall(r"^def main\(.*?^# --- ", read(PPO), re.S | re.M)

    rest = re.sub("  #.*", "", main)
    shown = re.sub("  #.*", "", loop).splitlines()
    assert len(shown) > 5
    for line in shown:
        _, is_there, rest = rest.partition(f" {line.strip()}\n")
        assert is_there, line


def test_the_entropy_bonus_of_the_readme_is_that_of_the_changes():
    """Which test_copies.py runs; the comments differ."""
    pattern = r"```diff\n(.*?policy_loss.*\n\+ +loss = loss - 0.01 .*?)  #"
    (of_readme,), (of_changes,) = (
        re.findall(pattern, read(page)) for page in ("README.md", "docs/changes.md")
    )
    assert of_readme == of_changes


def test_reward_functions_of_tiny_score_texts(tmp_path, monkeypatch):
    """As the scripts call them: with lists and a column that is not theirs."""
    prompts = ["He knelt down.", "She"]
    completions = [" He was proud, and full of joy and cheer.", " wept."]
    texts = {"prompts": prompts, "completions": completions, "query": prompts}
    assert rewards.happy(**texts) == [2.0, 0.0]

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny" / "model", pad_token="<|endoftext|>")
    sizes = {"dim": 16, "hidden_dim": 32, "n_layers": 1, "n_heads": 2, "vocab_size": len(tokenizer)}
    labels = {0: "NEGATIVE", 1: "POSITIVE"}
    config = DistilBertConfig(**sizes, pad_token_id=0, id2label=labels)
    model = DistilBertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(rewards, "MODEL", str(tmp_path))
    rewards.load.cache_clear()
    scores = rewards.classifier(**texts)
    rewards.load.cache_clear()
    logits = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([tokenizer(prompt + completion).input_ids])
        logits.append(model(ids).logits[0, 1])
    torch.testing.assert_close(torch.tensor(scores), torch.stack(logits))
