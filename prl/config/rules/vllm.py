"""Rules of inference.engine=vllm."""

from __future__ import annotations

from collections.abc import Iterator

from prl.config.errors import UserError
from prl.config.schema import RunConfig
from prl.config.world import has_engines

# arguments of `vllm serve` that have a key of their own, and that key
OWN_KEYS = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "served_model_name": "model.name",
    "dtype": "inference.dtype",
    "max_num_seqs": "inference.max_num_seqs",
    "max_model_len": "inference.max_model_len",
    "enable_prefix_caching": "inference.prefix_caching",
    "enable_return_routed_experts": "inference.return_routed_experts",
    "tensor_parallel_size": "inference.tp",
    "data_parallel_size": "inference.dp",
    "host": "inference.host",
    "port": "inference.port",
    "api_key": "inference.api_key_var",
    "seed": "seed",
}
# arguments without which a run does not work, or whose work the run does itself
OF_THE_RUN = (
    *("weight_transfer_config", "logprobs_mode", "enable_scale_out", "enable_server_load_tracking"),
    *("uds", "config", "headless", "grpc", "api_server_count"),
)


def vllm_keys_take_effect(config: RunConfig) -> Iterator[UserError]:
    inference = config.inference
    if inference.engine == "vllm":
        return
    for key, value, usual in (("tp", inference.tp, 1), ("dp", inference.dp, 1), ("vllm", inference.vllm, {})):
        if value != usual:
            yield UserError(
                f"inference.{key} has no effect.",
                where=f"inference.engine={inference.engine}, inference.{key}={value}",
                why="the built-in engine sits on one device and has no arguments of vLLM",
                fix=f"inference=vllm, or inference.{key}={usual}",
            )


def sleeping_fits_the_engine(config: RunConfig) -> Iterator[UserError]:
    if config.inference.sleep_level == 0 and config.inference.engine != "vllm":
        yield UserError(
            "The built-in engine hands its memory over when it sleeps.",
            where="inference.sleep_level=0, inference.engine=torch",
            fix="inference.sleep_level=1, or inference=vllm",
        )


def routed_experts_are_cached(config: RunConfig) -> Iterator[UserError]:
    inference = config.inference
    if inference.engine == "vllm" and inference.return_routed_experts and not inference.prefix_caching:
        yield UserError(
            "vLLM returns routed experts only with its prefix cache.",
            where="inference.return_routed_experts=true, inference.prefix_caching=false",
            why="it keeps them block by block under the keys of that cache",
            fix="inference.prefix_caching=true, or inference=torch",
        )


def vllm_arguments_are_free(config: RunConfig) -> Iterator[UserError]:
    for name in config.inference.vllm:
        if name in OWN_KEYS:
            yield UserError(
                f"vLLM's {name} has a key of its own here.",
                where=f"inference.vllm.{name}",
                why="what it says must hold for the orchestrator and the plan, too",
                fix=f"set {OWN_KEYS[name]} and remove inference.vllm.{name}",
            )
        elif name in OF_THE_RUN or not name.isidentifier():
            yield UserError(
                f"vLLM's {name} is not yours to set.",
                where=f"inference.vllm.{name}",
                why="the run depends on the value that it gives it" if name in OF_THE_RUN else "names are words with _",
                fix=f"remove inference.vllm.{name}",
            )


def engines_fill_their_devices(config: RunConfig) -> Iterator[UserError]:
    inference, deployment = config.inference, config.deployment
    width = inference.tp * inference.dp
    by_node = deployment.type == "multi_node" or deployment.num_infer_gpus > deployment.gpus_per_node
    key = "gpus_per_node" if by_node else "num_infer_gpus"
    devices = deployment.gpus_per_node if by_node else deployment.num_infer_gpus
    if has_engines(config) and devices % width:
        yield UserError(
            f"Engines of {width} devices do not fill {devices}.",
            where=f"inference.tp={inference.tp}, inference.dp={inference.dp}, deployment.{key}={devices}",
            why="each engine takes tp * dp devices of one node",
            fix=f"deployment.{key}={-(-devices // width) * width}, or inference.tp=1 inference.dp=1",
        )
