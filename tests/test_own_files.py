"""Files, directories and lines of the user's own that Hydra would lose or refuse in words that name no file: what is
wrong, where, why, and what to type.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from prl.config import compose
from prl.config.composing import compose_yaml, know_command
from prl.config.errors import ConfigError, UserError
from prl.config.overrides import parse
from prl.config.search_path import directories, use_directories
from prl.entry import parse_command_line

HEADER = "# @package _global_\n"
FIRST_LINE = "write `# @package _global_` as its first line"


@pytest.fixture
def own(tmp_path: Path):
    """Writes files of a directory of the user's own, which is searched."""
    (tmp_path / "overlay").mkdir()
    (tmp_path / "overlay/good.yaml").write_text(f"{HEADER}seed: 3\n")
    use_directories(str(tmp_path), [])

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    yield write
    use_directories(None, [])


def refusal(overrides: list[str], job: str = "rl") -> UserError:
    """The only problem with them."""
    with pytest.raises(ConfigError) as refused:
        compose(overrides, job)
    (violation,) = refused.value.violations
    assert violation.where
    assert violation.fix
    return violation


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("seed: 5\n", "puts its keys under `overlay.`", FIRST_LINE),
        ("", "is empty", "write keys into it"),
        ("# seed: 5\n", "is empty", "write keys into it"),
        (f"\ufeff{HEADER}seed: 5\n", "puts its keys under `overlay.`", "without that mark: sed -i"),
        (f"# what this is for\n{HEADER}seed: 5\n", "puts its keys under `overlay.`", FIRST_LINE),
        ("# @pakage _global_\nseed: 5\n", "puts its keys under `overlay.`", FIRST_LINE),
        ("# @package _global\nseed: 5\n", "puts its keys under `_global.`", FIRST_LINE),
        ("# @package\nseed: 5\n", "has a header that Hydra cannot read", FIRST_LINE),
        ("- a\n- b\n", "is no configuration", "the lines `key: value`"),
        (f"{HEADER}hello\n", "is no configuration", "the lines `key: value`"),
        ("5\n", "is no configuration", "the lines `key: value`"),
        (f"{HEADER}5: 3\n", "has the key 5", "the lines `key: value`"),
        (f"{HEADER}seed: ${{oops\n", "seed: ${oops", "seed: VALUE"),
        (f"{HEADER}defaults: sync\n", "has no list in `defaults`", "override /GROUP: CHOICE"),
        (f"{HEADER}defaults: [5]\n", "has 5 in its defaults list", "- override /GROUP: CHOICE"),
        (f"{HEADER}defaults:\n  - a: b\n    c: d\n", "in its defaults list", "- override /GROUP: CHOICE"),
        (f"{HEADER}defaults: [_self_, _self_]\n", "`_self_` twice", "leave one out"),
        (f"{HEADER}defaults: [mine]\n", "chooses itself", "`_self_` stands for"),
        (f"{HEADER}defaults:\n  - /algo: sync\n", "chooses algo without `override`", "- override /algo: sync"),
        (f"{HEADER}defaults:\n  - /memory: tight\n", "chooses memory without", "- override /memory: tight"),
        (f"{HEADER}defaults:\n  - algo: sync\n", "means the group algo", "- override /algo: sync"),
        (f"{HEADER}defaults:\n  - override algo: sync\n", "means the group algo", "- override /algo: sync"),
        (f"{HEADER}defaults:\n  - override hydra/launcher: slurm\n", "means the group", "/hydra/launcher: slurm"),
        (f"{HEADER}defaults:\n  - override /algoo: sync\n", "in a group that there is not", "- override /algo: sync"),
        (f"{HEADER}defaults:\n  - override /algo: synk\n", "chooses algo/synk, which", "sync in its place"),
        (f"{HEADER}defaults: [goood]\n", "chooses overlay/goood, which", "good in its place"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_told_with_its_name(own, text, what, fix):
    path = own("overlay/mine.yaml", text)
    told = refusal(["+overlay=mine"])
    assert told.what.startswith("mine.yaml ")
    assert what in told.what
    assert told.where.startswith(str(path))
    assert fix in told.fix


@pytest.mark.parametrize(
    ("name", "text", "override"),
    [
        ("overlay/mine.yaml", f"\n{HEADER}seed: 5\n", "+overlay=mine"),
        ("overlay/mine.yaml", "# @package optim\nlr: 1e-4\n", "+overlay=mine"),
        ("overlay/mine.yaml", "seed: 5\n", "+overlay@_global_=mine"),
        ("overlay/mine.yaml", f"{HEADER}defaults: [good, optional no: x, override /algo: sync]\n", "+overlay=mine"),
        ("overlay/mine.yaml", f"{HEADER}defaults: [/experiment/lora_one_gpu, _self_]\n", "+overlay=mine"),
        ("inference/vllm/mine.yaml", "max_num_seqs: 4\n", "+inference/vllm=mine"),  # at inference.vllm, which takes it
        ("model/mine.yaml", "defaults: [tiny_qwen3, _self_]\ninit_seed: 2\n", "model=mine"),
        ("memory_recipe/mine.yaml", "defaults: [tight, _self_]\n", "memory=mine"),
        ("local/default.yaml", f"{HEADER}seed: 5\n", "seed=1"),  # which every job composes
    ],
)  # fmt: skip
def test_what_composes_is_not_refused(own, name, text, override):
    own(name, text)
    compose_yaml([override])


def test_a_circle_over_two_files_is_told(own):
    own("overlay/mine.yaml", f"{HEADER}defaults: [other]\n")
    own("overlay/other.yaml", f"{HEADER}defaults: [mine]\n")
    assert refusal(["+overlay=mine"]).why == "mine.yaml -> other.yaml -> mine.yaml"


def test_all_files_are_told_at_once(own):
    own("overlay/mine.yaml", "- 1\n")
    own("model/ours.yaml", "- 1\n")
    with pytest.raises(ConfigError) as refused:
        compose(["+overlay=mine", "model=ours", "+lab=x"])
    assert [error.what.split()[0] for error in refused.value.violations] == ["mine.yaml", "ours.yaml", "There"]


def test_a_group_that_no_directory_has_is_told_with_those_that_were_searched(own, tmp_path):
    told = refusal(["+lab=x"])
    assert "no group of that name" in told.what
    assert str(tmp_path) in told.why
    assert "x.yaml in DIRECTORY/lab/" in told.fix
    use_directories(None, [])
    assert "none of your own" in refusal(["+overlay=good"]).why


def test_a_file_with_another_ending_is_told(own, tmp_path):
    own("overlay/mine.yml", HEADER)
    assert refusal(["+overlay=mine"]).fix == f"mv {tmp_path}/overlay/mine.yml {tmp_path}/overlay/mine.yaml"


@pytest.mark.parametrize(
    ("lines", "fix"),
    [
        (["+model=tiny_qwen3"], "model=tiny_qwen3"),
        (["++model=tiny_qwen3"], "model=tiny_qwen3"),
        (["model@x=tiny_qwen3"], "model=tiny_qwen3"),
        (["+optim.lr=0.1"], "optim.lr=0.1"),
        (["~optim.lr=3"], "~optim.lr"),
        (["+experiment@x=math_qwen3_4b"], "+experiment=math_qwen3_4b"),
        (["+experiment=math_qwen3_4b", "+experiment=lora_one_gpu"], "+experiment=[math_qwen3_4b,lora_one_gpu]"),
    ],
)
def test_a_line_that_cannot_be_applied_is_told_with_one_that_can(lines, fix):
    told = refusal(lines)
    assert (told.where, told.fix) == (" ".join(lines), fix)
    compose([fix])


@pytest.mark.parametrize("job", ["sft", "inference"])
def test_a_sites_choice_in_a_group_that_the_job_has_not_is_told_with_the_file(own, job):
    path = own("local/default.yaml", f"{HEADER}defaults:\n  - override /algo: sync\n")
    told = refusal(["max_steps=1"], job)
    assert (told.where, f"{job} has not" in told.what) == (str(path), True)
    assert "algo=sync on the command line" in told.fix


def test_a_wrong_key_is_told_with_its_file_and_line(own):
    path = own("overlay/mine.yaml", f"{HEADER}seed: 1\nmax_step: 2\n")
    told = refusal(["+overlay=mine"])
    assert (told.where, told.fix) == (f"{path}, line 3", "rename it there: max_steps")


def test_guesses_are_no_worse_than_none():
    assert refusal(["optim.learning_rate=1"]).fix == "optim.lr=..."
    assert refusal(["optim.name2=1"]).fix.startswith("see all keys")


@pytest.mark.parametrize(("name", "line"), [("overlay/upper.YAML", "+overlay=upper"), ("local/default.yml", "seed=1")])
def test_a_file_that_is_not_read_is_told_with_a_command_for_a_shell(own, tmp_path, name, line):
    path = own(f"of us/{name}", HEADER)
    use_directories(str(tmp_path / "of us"), [])
    told = refusal([line])
    assert shlex.split(told.fix) == ["mv", str(path), str(path.with_suffix(".yaml"))]


def test_only_jobs_with_all_groups_of_an_experiment_are_offered():
    assert refusal(["+experiment=math_qwen3_30b_a3b"], "sft").fix == "python -m prl.rl or python -m prl.bench"
    know_command(True, [])
    try:
        assert refusal(["+experiment=math_qwen3_30b_a3b"], "sft").fix == "-cn rl or -cn bench, in this command"
    finally:
        know_command(False, [])


def test_a_quotation_mark_is_told_with_the_line_as_a_shell_takes_it():
    with pytest.raises(UserError) as refused:
        compose(["name=A_b c'd"])
    (line,) = shlex.split(refused.value.fix)
    assert parse([line])[0].value() == "A_b c'd"


def test_hydras_refusals_have_a_remedy():
    assert refusal(["hydra/nope=x"]).fix == "leave hydra/nope out"
    with pytest.raises(UserError, match="it has no key"):
        compose(["=3"])


def test_an_experiment_of_another_job_is_told_by_the_name_that_was_typed():
    told = refusal(["+experiment=math_qwen3_30b_a3b"], "sft")
    assert told.where.startswith("+experiment=math_qwen3_30b_a3b")
    assert "python -m prl.rl" in told.fix


@pytest.mark.parametrize("job", ["rl", "sft", "inference", "bench", "eval"])
def test_the_keys_that_are_shown_are_those_of_the_job(job):
    for line in ("zzz=3", "+zzz=3"):
        assert refusal([line], job).fix == f"see all keys: python -m prl.{job} --cfg job"


def test_a_job_that_there_is_not_is_told():
    with pytest.raises(UserError, match=r"There is no job 'sf'(.|\n)*--config-name=sft"):
        compose([], "sf")


# --- directories and the command line ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("hydra.searchpath=overlay", r"is no list(.|\n)*'hydra.searchpath=\[file://{cwd}/overlay\]'"),
        ("hydra.searchpath=[nothing]", "There is no directory {cwd}/nothing"),
        ("hydra.searchpath=[pkg://nothing]", "There is no Python package nothing"),
        ("hydra.searchpath=[pkg://nothing.inside]", "There is no Python package nothing.inside"),
        ("hydra.searchpath=[s3://nothing]", "no reader of s3://"),
    ],
)
def test_directories_that_cannot_be_searched_are_told(tmp_path, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message.replace("{cwd}", str(tmp_path))):
        use_directories(None, parse([line]))


@pytest.mark.parametrize("entry", ["overlays", "file://overlays"])
def test_directories_may_be_relative(tmp_path, monkeypatch, entry):
    (tmp_path / "overlays").mkdir()
    monkeypatch.chdir(tmp_path)
    use_directories(None, parse([f"+hydra.searchpath=[{entry}]"]))
    assert directories() == (tmp_path / "overlays",)
    use_directories(None, [])


def test_options_may_stand_among_overrides(monkeypatch):
    words = ["seed=1", "--config-dir", "here", "-m", "max_steps=2", "-cn", "sft"]
    monkeypatch.setattr(sys, "argv", ["rl.py", *words])
    args = parse_command_line()
    assert (args.overrides, args.config_dir, args.config_name, args.multirun) == (
        ["seed=1", "max_steps=2"],
        "here",
        "sft",
        True,
    )
    assert sys.argv == ["rl.py", "seed=1", "max_steps=2", "--config-dir", "here", "-m", "-cn", "sft"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ('hydra.launcher.setup=[echo "hi" && export A="b"]', 'hydra.launcher.setup=[\'echo "hi" && export A="b"\']'),
        ("slurm.setup=[it's, module load x]", 'slurm.setup=["it\'s","module load x"]'),
        ("name=it's", 'name="it\'s"'),
        ("output_dir=/tmp/Übung", 'output_dir="/tmp/Übung"'),
        ("hydra.searchpath=[/a/ü,/b]", 'hydra.searchpath=["/a/ü","/b"]'),
    ],
)
def test_quotation_marks_within_words_are_told_with_what_to_type(typed: str, meant: str) -> None:
    with pytest.raises(UserError, match="Cannot read the override") as refused:
        parse([typed])
    assert shlex.split(refused.value.fix) == [meant]
    parse([meant])
