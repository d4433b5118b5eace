"""A head that config.json ties to the embedding, and that the files have all the same."""

import pytest
import torch
from families import family_card
from safetensors.torch import load_file, save_file
from tiny import random_model

from prl.config.errors import UserError
from prl.models.checkpoints.reading import load_checkpoint, load_model
from prl.models.checkpoints.writing import hf_tensors, save_checkpoint
from prl.models.families.hf_causal_lm import build_hf_model

CPU = torch.device("cpu")


def tied(path, family, head):
    """A checkpoint with `head` of its embedding."""
    card = family_card(family).model_copy(update={"tie_word_embeddings": True})
    save_checkpoint(hf_tensors(random_model(card)), path, card)
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if name.endswith(("embed_tokens.weight", "embeddings.weight")))
    tensors["lm_head.weight"] = head(tensors[name])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return card


def last_number(embedding):
    other = embedding.clone()
    other[-1, -1] += 1.0
    return other


@pytest.mark.parametrize("impl", ["custom", "hf"])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_another_head_than_the_embedding_is_refused(family, impl, tmp_path):
    for head in (torch.clone, last_number):
        card = tied(tmp_path / head.__name__, family, head)

        def load(path=tmp_path / head.__name__, card=card):
            if impl == "custom":
                load_model(path, card, torch.float32, CPU)
            else:
                load_checkpoint(build_hf_model(path, card).to_empty(device="cpu"), path)

        if head is torch.clone:
            load()
            continue
        with pytest.raises(UserError, match="other numbers than the embedding") as caught:
            load()
        assert "tie_word_embeddings=false" in caught.value.fix
