"""`python -m prl.bench.router_replay model.path=CHECKPOINT model.dtype=bfloat16 [inference=vllm] [overrides]`:
mismatch of engine and trainer with and without router replay (R3, arXiv:2510.11370).

An engine samples completions and its choice of experts is recorded; the trainer's forward pass then scores the same
tokens twice, once routing by itself and once with the engine's choice replayed. Tokens are called rerouted where the
trainer's own choice differs in some layer. vLLM runs one request at a time, its routers' choices taken down in this
process, so that it can be measured where it does not return them (on CPUs).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prl.bench.arguments import overrides_of, user_errors_told
from prl.config import compose
from prl.config.config_json import check_card
from prl.config.schema import RunConfig
from prl.envs.protocol import Environment
from prl.envs.reverse_text import ReverseText
from prl.inference.sampling import SamplingParams
from prl.inference.sequences import Request
from prl.inference.server import load_engine
from prl.models.checkpoints.reading import load_model
from prl.models.checkpoints.sources import resolve_model_path
from prl.models.device import pick_device
from prl.models.experts.routing import RoutingRecorder
from prl.models.layers.decoder import Decoder
from prl.models.layers.documents import attend_documents
from prl.models.text.chat import ChatRenderer
from prl.models.text.tokenizer import load_tokenizer
from prl.planning.vllm_arguments import config_overrides, cpu_arguments, cpu_environment
from prl.trainer.head.head import logprob_head
from prl.trainer.losses import mismatch_kl

COMPLETIONS, MAX_TOKENS = 256, 24


@dataclass
class Sampled:
    """A completion: tokens [T] of which num_prompt were given, logprobs of the others, experts [T - 1, L, K]."""

    token_ids: list[int]
    num_prompt: int
    logprobs: list[float]
    routed: np.ndarray


def prompts_of(env: Environment, renderer: ChatRenderer, count: int) -> list[list[int]]:
    tasks = env.tasks("held_out")
    return [renderer.encode(renderer.text(list(tasks[i % len(tasks)].prompt), True)) for i in range(count)]


def sample_builtin(config: RunConfig, prompts: list[list[int]]) -> list[Sampled]:
    engine, _ = load_engine(config, None)
    sequences = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(seed=i, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
        sequences += engine.prepare(Request(str(i), prompt, params, arrival=i))
    engine.submit(sequences)
    while engine.busy:
        engine.step()
    sampled = []
    for sequence in sequences:
        routed = sequence.routed_experts()
        assert routed is not None
        sampled.append(Sampled(sequence.token_ids, sequence.num_prompt, sequence.logprobs, routed))
    return sampled


def sample_vllm(config: RunConfig, path: Path, prompts: list[list[int]]) -> list[Sampled]:
    """One request after the other, so that the rows which a router sees are those of the tokens in order."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model in this process
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    import vllm
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    os.environ.update(cpu_environment(config) if on_cpu else {})
    arguments: dict[str, Any] = cpu_arguments(config, tp=1) if on_cpu else {"enforce_eager": True}
    if overrides := config_overrides(config):
        arguments["hf_overrides"] = overrides
    llm = vllm.LLM(
        model=str(path),
        dtype=config.model.dtype,
        max_num_seqs=1,
        max_model_len=config.inference.max_model_len,
        enable_prefix_caching=False,
        logprobs_mode="processed_logprobs",
        **arguments,
    )
    card = config.model.card
    seen: dict[int, list[Tensor]] = {layer: [] for layer in card.sparse_layers}
    llm.apply_model(partial(_listen, seen))
    sampled = []
    for i, prompt in enumerate(prompts):
        for rows in seen.values():
            rows.clear()
        params = vllm.SamplingParams(seed=i, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
        (result,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        output = result.outputs[0]
        ids = list(output.token_ids)
        logprobs = [position[token].logprob for position, token in zip(output.logprobs, ids, strict=True)]
        by_layer = {layer: torch.cat(rows) for layer, rows in seen.items()}
        none = torch.zeros_like(next(iter(by_layer.values())))  # of layers without experts
        routed = torch.stack([by_layer.get(i, none) for i in range(card.num_hidden_layers)], dim=1).numpy()
        assert len(routed) == len(prompt) + len(ids) - 1, f"{len(routed)} rows"
        sampled.append(Sampled(prompt + ids, len(prompt), logprobs, routed))
    return sampled


def _listen(seen: dict[int, list[Tensor]], model: torch.nn.Module) -> None:
    """Have the router of each layer with experts leave the experts [N, K] of every step in `seen`."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    runners = [module for module in model.modules() if isinstance(module, MoERunner)]
    assert sorted(runner.layer_id for runner in runners) == sorted(seen)
    for runner in runners:
        runner.router.set_capture_fn(partial(_keep, seen[runner.layer_id]))


def _keep(rows: list[Tensor], experts: Tensor) -> None:
    rows.append(experts.detach().cpu().long().clone())


@torch.no_grad()
def score(model: Decoder, sampled: list[Sampled], replay: bool) -> tuple[Tensor, Tensor]:
    """As the trainer does, all in one row: logprobs [M] of the sampled tokens, experts [M, L, K] before each."""
    device = next(model.parameters()).device
    lengths = [len(s.token_ids) for s in sampled]
    input_ids = torch.tensor([t for s in sampled for t in s.token_ids], device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    routed = torch.from_numpy(np.concatenate([np.concatenate([s.routed, s.routed[-1:]]) for s in sampled])).to(device)
    targets = torch.cat([torch.arange(len(s.token_ids)) >= s.num_prompt for s in sampled]).nonzero()[:, 0].to(device)
    recorder = RoutingRecorder(given=routed if replay else None)
    head = logprob_head(targets - 1, input_ids[targets], 1.0, "disabled")
    attend = attend_documents(model.card, lengths, device)
    logp, _ = model(input_ids, positions, attend, head=head, recorder=recorder)
    return logp.cpu(), recorder.stacked(model.card)[targets - 1].cpu()


def report(model: Decoder, sampled: list[Sampled]) -> dict[str, float]:
    logp_infer = torch.tensor([p for s in sampled for p in s.logprobs])
    (own, chosen), (replayed, theirs) = (score(model, sampled, replay) for replay in (False, True))
    other = chosen.sort(-1).values != theirs.sort(-1).values
    rerouted = other.any(-1).any(-1)
    without, with_replay = mismatch_kl(own, logp_infer), mismatch_kl(replayed, logp_infer)
    return {
        "tokens": len(own),
        "rerouted": float(rerouted.float().mean()),
        "KL without": float(without.mean()),
        "KL with": float(with_replay.mean()),
        "factor": float(without.mean() / with_replay.mean()),
        "KL without, rerouted": float(without[rerouted].mean()),
        "KL with, rerouted": float(with_replay[rerouted].mean()),
        "KL without, others": float(without[~rerouted].mean()),
        "KL with, others": float(with_replay[~rerouted].mean()),
        "largest KL without": float(without.max()),
        "largest KL with": float(with_replay.max()),
    }


def main() -> None:
    overrides = overrides_of(__doc__)
    with user_errors_told():
        config = compose(["inference.return_routed_experts=true", *overrides], config_name="inference")
        path = resolve_model_path(config.model, Path(config.cache_dir))
        check_card(path, config.model.card)
    torch.set_num_threads(config.debug.num_threads or 1)
    renderer = ChatRenderer(load_tokenizer(config.model, path))
    prompts = prompts_of(ReverseText(), renderer, COMPLETIONS)
    vllm = config.inference.engine == "vllm"
    sampled = sample_vllm(config, path, prompts) if vllm else sample_builtin(config, prompts)
    dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
    model = load_model(path, config.model.card, dtype, pick_device(config.deployment.device))
    for name, value in report(model, sampled).items():
        print(f"{name:>22}  {value:.4g}")


if __name__ == "__main__":
    main()
