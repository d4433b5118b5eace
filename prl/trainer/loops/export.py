"""What a run leaves behind: its policy as a Hugging Face checkpoint, and with LoRA as an adapter of PEFT."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from prl.config.errors import UserError
from prl.config.schema import RunConfig
from prl.models.adapters.peft import export_adapter
from prl.models.checkpoints.writing import export_checkpoint, hf_tensors
from prl.models.text.tokenizer import BYTE, brings_none, load_tokenizer
from prl.trainer.policy import Policy

log = logging.getLogger("prl.trainer")
ADAPTER = "adapter"  # in a directory of its own: transformers takes an adapter_config.json beside a model for its own


def export_policy(policy: Policy, source: Path, target: Path) -> None:
    """Write the policy and its tokenizer to `target`, adapters to `target`/adapter: a collective, rank 0 writes.

    source: the checkpoint that training started from; what it has and the policy has not (layers that predict further
    tokens, tokenizer) is copied from there. With LoRA the whole model, adapters added in, is there unless
    `memory_recipe.lora.export_merged` is false.
    """
    config, model, lora = policy.config, policy.model, policy.config.memory_recipe.lora
    if lora.rank:
        base = base_name(config, source)
        export_adapter(model, model.card, lora, target / ADAPTER, base, write=policy.world.is_main)
        if not lora.export_merged:
            return
    dtype = getattr(torch, config.ckpt.export_dtype)
    tensors = hf_tensors(model, dtype)
    if not policy.world.is_main:
        for _ in tensors:  # take part in the gathers
            pass
        return
    export_checkpoint(model, tensors, source, target, config.model.card, dtype=dtype)
    wanted = config.model.tokenizer
    if wanted is not None and (wanted != BYTE or brings_none(target)):  # not the one beside the weights
        try:
            load_tokenizer(config.model, source).save_pretrained(str(target))
        except (UserError, OSError) as error:  # it was there when the run began; the weights are what matters
            log.warning("%s is without the tokenizer %s: %s", target, wanted, error)


def base_name(config: RunConfig, source: Path) -> str:
    """Under which anybody finds the model that adapters belong to: its hub id, or the directory it was read from."""
    path = config.model.path
    from_hub = path is not None and not Path(path).is_dir() and config.warm_start is None
    return str(path) if from_hub else str(source.resolve())
