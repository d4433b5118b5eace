"""Checkpoints and data sets as the hub's client leaves them: every tensor read, whole runs, and what is amiss."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from families import family_card
from hub_layout import (
    HEAD_STORED_THOUGH_TIED,
    MODELS,
    TINY_SHARD_BYTES,
    card_overrides,
    data_set_of,
    experiment,
    make_data_set,
    make_model,
    model_config,
    tensor_shapes,
)
from runs import environment, finish, kill_root, rows, run, start, wait_for_checkpoint
from safetensors import safe_open

from prl.config import compose
from prl.config.cards import card_to_hf_config
from prl.config.config_json import check_card
from prl.config.errors import ConfigError, UserError
from prl.config.hub import repair
from prl.models.checkpoints.reading import check_files, load_checkpoint, load_model
from prl.models.checkpoints.writing import hf_tensors
from prl.models.families.build import build_decoder

DENSE, MOE = "math_qwen3_4b", "sft_qwen3_30b_a3b"
EXPERIMENTS = (DENSE, "lora_one_gpu", MOE)
TOTAL_SIZE = {  # bytes, as the index of the real checkpoint says
    "Qwen/Qwen3-1.7B": 4063479808,
    "Qwen/Qwen3-4B-Instruct-2507": 8044936192,
    "Qwen/Qwen3-30B-A3B": 61064245248,
}
ON_CPU = [
    *("deployment.device=cpu", "inference=torch", "weight_transport=filesystem", "logging=none", "max_steps=2"),
    *("deployment.num_infer_gpus=1", "deployment.num_train_gpus=1", "inference.sampling.max_tokens=16"),
    *(
        "algo.batch_size=64",
        "algo.group_size=8",
        "eval.num_tasks=8",
        "seq_len=1024",
        "inference.max_model_len=1024",
        "ckpt.interval=1",
    ),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """HF_HOME with what the experiments read, tiny."""
    folder = tmp_path_factory.mktemp("hf_home")
    for name in EXPERIMENTS:
        config = experiment(name)
        make_model(folder, config.model.path, model_config(config.model.path, "tiny"), TINY_SHARD_BYTES)
        make_data_set(folder, data_set_of(config), 120)
    return folder


def snapshot_of(home: Path, repo: str) -> Path:
    (path,) = (home / "hub" / f"models--{repo.replace('/', '--')}" / "snapshots").iterdir()
    return path


def copy_of(home: Path, target: Path) -> Path:
    """The 4B's snapshot in a cache of its own, to be damaged."""
    subprocess.run(["cp", "-a", f"{home}/.", str(target)], check=True)
    return snapshot_of(target, "Qwen/Qwen3-4B-Instruct-2507")


def tiny_overrides(name: str) -> list[str]:
    repo = experiment(name).model.path
    return [f"+experiment={name}", *card_overrides(repo, model_config(repo, "tiny"))]


def tiny_card(name: str):
    return compose(tiny_overrides(name), experiment(name).job).model.card


def offline(home: Path, **more: str) -> dict[str, str]:
    return {**environment(), "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", **more}


def file_tensors(path: Path) -> dict[str, torch.Tensor]:
    """By safetensors alone."""
    tensors = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


# --- cards and weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_card_describes_the_real_checkpoint(name, tmp_path):
    config = experiment(name)
    (tmp_path / "config.json").write_text(json.dumps(model_config(config.model.path)))
    check_card(tmp_path, config.model.card)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_model_of_the_card_has_the_tensors_of_the_real_checkpoint(name):
    """Names, shapes and their sum, at full size, without memory."""
    config = experiment(name)
    repo = str(config.model.path)
    there = dict(tensor_shapes(model_config(repo), repo in HEAD_STORED_THOUGH_TIED))
    assert 2 * sum(torch.Size(shape).numel() for shape in there.values()) == TOTAL_SIZE[repo]
    with torch.device("meta"):
        model = build_decoder(config.model.card)
    held = {key: tuple(t.shape) for name, p in model.named_parameters() for key, t in model.to_hf(name, p)}
    if repo in HEAD_STORED_THOUGH_TIED:
        del there["lm_head.weight"]
    assert held == there


@pytest.mark.parametrize("name", EXPERIMENTS, ids=["tied", "tied, head stored", "untied experts"])
def test_every_tensor_is_read_and_none_is_left(name, home):
    repo, card = str(experiment(name).model.path), tiny_card(name)
    path = snapshot_of(home, repo)
    check_card(path, card)
    stored = file_tensors(path)
    assert len(list(path.glob("model-*.safetensors"))) > 1
    model = build_decoder(card)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(torch.nan)
    load_checkpoint(model, path)
    held = dict(hf_tensors(model))
    assert set(stored) - set(held) == ({"lm_head.weight"} if repo in HEAD_STORED_THOUGH_TIED else set())
    assert all(torch.equal(tensor, stored[name].float()) for name, tensor in held.items())
    head = model.logits(torch.eye(card.hidden_size)).T.detach()
    assert torch.equal(head, stored["model.embed_tokens.weight"].float()) == MODELS[repo]["tie_word_embeddings"]


# --- what is amiss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["removed", "dangling", "unknown name in the index"])
def test_a_snapshot_that_lacks_a_shard_says_how_to_complete_it(how, home, tmp_path):
    path = copy_of(home, tmp_path)
    shard = sorted(path.glob("*.safetensors"))[1]
    name = shard.name
    if how == "removed":
        shard.unlink()
    elif how == "dangling":
        shard.resolve().unlink()
    else:
        name, index = "model-00009-of-00009.safetensors", path / "model.safetensors.index.json"
        index.write_text(index.read_text().replace(shard.name, name))
    with pytest.raises(UserError) as refused:
        check_files(path)
    assert str(refused.value).startswith(f"{name} is missing")
    assert refused.value.fix == f"fetch the file again: `hf download Qwen/Qwen3-4B-Instruct-2507 {name}`"
    with pytest.raises(UserError, match=f"{name} is missing"):
        load_model(path, tiny_card(DENSE), torch.float32, torch.device("cpu"))


def test_a_damaged_shard_is_to_be_fetched_by_force(home, tmp_path):
    path = copy_of(home, tmp_path)
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(UserError, match=f"{shard.name} is damaged") as refused:
        load_model(path, tiny_card(DENSE), torch.float32, torch.device("cpu"))
    assert refused.value.fix.endswith(f"`hf download Qwen/Qwen3-4B-Instruct-2507 {shard.name} --force-download`")
    assert repair(Path("/models/mine/model.safetensors")) == "fetch the file again"


def test_a_card_that_contradicts_the_checkpoint_names_the_overrides(home):
    card = tiny_card(DENSE).model_copy(update={"rope_theta": 10000.0, "tie_word_embeddings": False})
    with pytest.raises(UserError, match=r"rope_theta: card 10000\.0, checkpoint 5000000") as refused:
        check_card(snapshot_of(home, "Qwen/Qwen3-4B-Instruct-2507"), card)
    assert "model.card.tie_word_embeddings=true model.card.rope_theta=5000000" in refused.value.fix


FETCH = """
import sys
from prl.config.hub import fetch_checkpoint
from prl.config.errors import UserError
try:
    fetch_checkpoint(sys.argv[1])
except UserError as error:
    print(error)
"""
LOAD = """
import sys
from prl.envs.loading import load_env
from prl.config.errors import UserError
try:
    keys = {"question_key": "question"} if "gsm8k" in sys.argv[1] else {}
    load_args = {"name": sys.argv[2] if sys.argv[2:] else None}
    env = load_env("hf_math", {"dataset": sys.argv[1], "load_args": load_args, **keys})
    print(len(env.tasks("train")), len(env.tasks("held_out")))
except UserError as error:
    print(error)
"""


def told(program: str, env: dict[str, str], *args: str) -> str:
    done = subprocess.run([sys.executable, "-c", program, *args], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_what_is_not_in_the_cache_tells_the_command_that_fetches_it(tmp_path):
    said = told(FETCH, offline(tmp_path), "Qwen/Qwen3-4B-Instruct-2507")
    assert "model.path=Qwen/Qwen3-4B-Instruct-2507" in said
    assert f"HF_HUB_OFFLINE is set, and {tmp_path}/hub does not have it" in said
    assert "`hf download Qwen/Qwen3-4B-Instruct-2507` where there is network" in said
    said = told(FETCH, offline(tmp_path), "/models/of/mine")
    assert "there is no directory /models/of/mine" in said
    assert "hf download" not in said
    said = told(LOAD, offline(tmp_path), "agentica-org/DeepScaleR-Preview-Dataset")
    assert f"HF_HUB_OFFLINE is set, and {tmp_path}/hub does not have it" in said
    assert "`hf download --repo-type=dataset agentica-org/DeepScaleR-Preview-Dataset`" in said


@pytest.mark.slow
def test_data_sets_that_were_downloaded_are_found_without_network(home, tmp_path):
    assert told(LOAD, offline(home), "agentica-org/DeepScaleR-Preview-Dataset").split() == ["114", "6"]
    assert told(LOAD, offline(home), "openai/gsm8k", "socratic").split() == ["114", "6"]
    said = told(LOAD, offline(home), "agentica-org/DeepScaleR-Preview-Dataset", "main")
    assert "BuilderConfig 'main' not found" in said
    assert "hf download" not in said
    said = told(LOAD, offline(home, HF_DATASETS_CACHE="/proc/prl"), "openai/gsm8k", "socratic")
    assert "HF_DATASETS_CACHE=/a/directory/that/can/be/written" in said


class Gated(BaseHTTPRequestHandler):
    """A hub that wants to know who asks."""

    def do_GET(self) -> None:
        self.send_response(403)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("X-Error-Message", "Access to model is restricted.")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None: ...


@pytest.mark.slow
def test_a_gated_repository_asks_for_a_token(tmp_path):
    server = HTTPServer(("127.0.0.1", 0), Gated)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        env = {**environment(), "HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
        said = told(FETCH, {key: value for key, value in env.items() if key != "HF_HUB_OFFLINE"}, "owner/secret")
    finally:
        server.shutdown()
        server.server_close()
    assert "GatedRepoError" in said
    assert "accept its terms at https://huggingface.co/owner/secret, then `hf auth login`, or HF_TOKEN=" in said


# --- whole experiments ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_mathematics_from_the_hubs_cache_to_an_export_over_an_interruption(home, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_dir = tmp_path / "run"
    args = [*tiny_overrides(DENSE), *ON_CPU, f"output_dir={run_dir}"]
    process = start(args, tmp_path, env=offline(home))
    wait_for_checkpoint(process, run_dir, 1)
    kill_root(process)
    done = finish(start(args, tmp_path, env=offline(home)))
    assert done.code == 0, done.output
    orchestrator = rows(run_dir, "orchestrator")
    assert max(row.get("reward", 0.0) for row in orchestrator) > 0  # by math-verify: the tiny model likes 0 and 6
    assert {row["step"] for row in orchestrator if "eval/hf_math/avg@1" in row} >= {0, 2}
    assert max(row["grad_norm"] for row in rows(run_dir, "trainer.0")) > 1e-3
    _, told_by = AutoModelForCausalLM.from_pretrained(str(run_dir / "export"), output_loading_info=True)
    assert not any(told_by.values())
    stored = file_tensors(snapshot_of(home, "Qwen/Qwen3-4B-Instruct-2507"))
    exported = file_tensors(run_dir / "export")
    assert set(exported) == set(stored)
    assert 0 < max((exported[name] - stored[name].float()).abs().max() for name in stored) < 1e-4  # two steps of 1e-6
    tokenizer = AutoTokenizer.from_pretrained(str(run_dir / "export"))
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "2+3?"}], tokenize=False, add_generation_prompt=True)  # fmt: skip  # noqa: E501
    assert asked == "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.slow
def test_sharded_trainers_hold_the_numbers_of_the_files(home, tmp_path):
    """With next to no learning rate the export is what two ranks, each with half of the experts, have read."""
    args = [
        *tiny_overrides(MOE),
        "deployment=disaggregated",
        "deployment.num_train_nodes=1",
        "deployment.num_train_gpus=2",
    ]
    args += [
        "deployment.device=cpu",
        "parallelism.ep=2",
        "seq_len=256",
        "sft.batch_size=4",
        "max_steps=1",
        "logging=none",
        "optim.lr=1e-20",
    ]
    args += ["sft.val_interval=0", "ckpt=none", "ckpt.export_hf=true", f"output_dir={tmp_path / 'run'}"]
    done = run(args, tmp_path, "prl.sft", env=offline(home))
    assert done.code == 0, done.output
    stored = file_tensors(snapshot_of(home, "Qwen/Qwen3-30B-A3B"))
    exported = file_tensors(tmp_path / "run/export")
    assert set(exported) == set(stored)
    assert max((tensor - stored[name].float()).abs().max() for name, tensor in exported.items()) < 1e-18
    (row,) = rows(tmp_path / "run", "trainer.0")
    assert row["grad_norm"] > 0


def auto_of(tmp_path, config, *overrides):
    """Sentences and reasons of what is said of `model=auto` with this config.json."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        compose(["model=auto", f"model.path={tmp_path}", "model.tokenizer=byte", *overrides])
    return [f"{error.what} {error.why}" for error in caught.value.violations]


def test_a_family_that_contradicts_the_checkpoint_is_one_problem(tmp_path):
    config = card_to_hf_config(family_card("llama"))
    said = auto_of(tmp_path, config, "model.card.family=qwen3")
    assert len(said) == 1
    assert "family=llama, not qwen3" in said[0]


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("glm_moe_dsa", {"indexer_types": ["full"]}, "1 entries for 3 layers"),
        ("glm_moe_dsa", {"indexer_types": ["full", "what", "full"]}, "'what'"),
        ("nemotron_h", {"layers_block_type": ["mamba", "attn"]}, "layers_block_type has 'attn'"),
    ],
)
def test_lists_of_layers_that_cannot_be(tmp_path, family, changes, why):
    said = auto_of(tmp_path, card_to_hf_config(family_card(family)) | changes)
    assert len(said) == 1
    assert why in said[0]
    with pytest.raises(UserError, match="says what cannot be"):  # of a card that is not made from it
        check_card(tmp_path, family_card(family))


def test_a_config_json_that_is_no_object(tmp_path):
    said = auto_of(tmp_path, [])
    assert "it is a list" in said[0]
    assert "quantis" not in said[0]
