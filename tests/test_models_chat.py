"""The byte tokenizer, and supervised masks by role."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import END, byte_tokenizer, moe_card
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prl.config.errors import UserError
from prl.config.schema import ModelConfig
from prl.models.text import tokenizer as tokenizer_module
from prl.models.text.chat import ChatRenderer, mask_by_role
from prl.models.text.tokenizer import SPECIAL_TOKENS, check_template, eos_of, load_tokenizer
from prl.orchestrator.neighbours import load_renderer

SYSTEM, USER, ASSISTANT, TOOL = range(257, 261)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def renderer(tokenizer):
    return ChatRenderer(tokenizer)


@settings(max_examples=200, deadline=None)
@given(st.text().filter(lambda t: "<|" not in t))
def test_text_is_its_utf8_bytes_and_comes_back(tokenizer, text):
    renderer = ChatRenderer(tokenizer)
    ids = renderer.encode(text)
    assert ids == list(text.encode())
    assert renderer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("text", ["naïve – 日本語 😀", "a  b .  ,c 's n't", "\t\n\r\x00\x7f", " leading", "trailing "])
def test_text_that_other_tokenizers_clean_up(renderer, text):
    assert renderer.decode(renderer.encode(text), skip_special_tokens=False) == text


def test_every_byte_is_its_own_token(tokenizer):
    assert [tokenizer.convert_tokens_to_ids(t) for t in SPECIAL_TOKENS] == list(range(256, 262))
    assert tokenizer.eos_token_id == END
    assert len(tokenizer) == 262
    assert tokenizer.encode("é", add_special_tokens=False) == [0xC3, 0xA9]


def test_special_tokens_are_one_token_each(renderer):
    text = "<|user|>a<|end|><|assistant|>"
    assert renderer.encode(text) == [USER, ord("a"), END, ASSISTANT]
    assert renderer.decode([USER, 97, END], skip_special_tokens=True) == "a"
    assert renderer.decode([USER, 97, END], skip_special_tokens=False) == "<|user|>a<|end|>"


def test_invalid_utf8_decodes_to_replacement_characters(renderer):
    assert renderer.decode([0xFF, 97, 0xC3], skip_special_tokens=True) == "\ufffda\ufffd"


def test_a_tokenizer_of_its_own_is_loaded_from_where_it_is_named(tmp_path):
    byte_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "weights").mkdir()
    config = ModelConfig(name="m", tokenizer=str(tmp_path / "tokenizer"), card=moe_card())
    assert load_tokenizer(config, tmp_path / "weights").encode("a", add_special_tokens=False) == [97]


def test_bytes_are_for_checkpoints_that_bring_no_tokenizer(tmp_path, caplog):
    """Where one is there it is used, and that is said."""
    config = ModelConfig(name="m", path=str(tmp_path), tokenizer="byte", card=moe_card())
    assert load_tokenizer(config, tmp_path).encode("a<|end|>", add_special_tokens=False) == [97, 256]
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="no tokenizer to be had"):
        load_tokenizer(config.model_copy(update={"tokenizer": None}), tmp_path)
    narrow = moe_card().model_copy(update={"vocab_size": 200})
    with pytest.raises(UserError, match="a token 261"):
        load_tokenizer(config.model_copy(update={"card": narrow}), tmp_path)
    assert not caplog.records
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(str(tmp_path))
    assert load_tokenizer(config, tmp_path).encode("a b", add_special_tokens=False) == [0, 1]
    assert f"used is the one beside the weights: {tmp_path}" in caplog.text


def changed(path, name, **fields):
    said = json.loads((path / name).read_text()) if (path / name).exists() else {}
    (path / name).write_text(json.dumps(said | fields))


FILES_OF_EOS = {
    "as saved": ({}, {}, 256),
    "an object": ({"eos_token": {"__type": "AddedToken", "content": "<|pad|>", "lstrip": False}}, {}, 261),
    "another": ({"eos_token": "<|user|>"}, {}, 258),
    "none": ({"eos_token": None}, {}, None),
    "said in the older file": ({}, {"eos_token": "<|tool|>"}, 260),
    "a class of its own": ({"tokenizer_class": "GPT2Tokenizer"}, {}, 256),
}


@pytest.mark.parametrize(("said", "older", "eos"), FILES_OF_EOS.values(), ids=FILES_OF_EOS)
def test_the_eos_of_files_is_that_of_transformers(tmp_path, monkeypatch, said, older, eos):
    byte_tokenizer(tmp_path).save_pretrained(tmp_path)
    changed(tmp_path, "tokenizer_config.json", **said)
    if older:
        changed(tmp_path, "special_tokens_map.json", **older)
    config = ModelConfig(name="m", path=str(tmp_path), tokenizer="byte", card=moe_card())
    named = config.model_copy(update={"tokenizer": str(tmp_path)})
    for asked, place in ((config, tmp_path), (named, tmp_path / "weights")):
        assert eos_of(asked, place) == load_tokenizer(asked, place).eos_token_id == eos
    if "tokenizer_class" not in said and not older and eos is not None:
        monkeypatch.setattr(tokenizer_module, "load_tokenizer", None)  # it was not asked
        assert eos_of(config, tmp_path) == eos


def test_the_eos_of_bytes_and_of_damaged_files(tmp_path):
    config = ModelConfig(name="m", path=str(tmp_path), tokenizer="byte", card=moe_card())
    assert eos_of(config, tmp_path) == load_tokenizer(config, tmp_path).eos_token_id == END
    byte_tokenizer(tmp_path).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(UserError, match="no tokenizer to be had"):
            eos_of(config, tmp_path)
        (tmp_path / name).write_bytes(whole)


def test_a_tokenizer_is_loaded_when_first_wanted(tokenizer):
    asked = []
    renderer = ChatRenderer.later(lambda: asked.append(1) or tokenizer)
    assert not asked
    assert renderer.encode("a") == ChatRenderer(tokenizer).encode("a")
    assert renderer.decode([97], skip_special_tokens=True) == "a"
    assert asked == [1]


# --- masks ------------------------------------------------------------------------------------------------------------

TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "call"},
    {"role": "tool", "content": "t"},
    {"role": "assistant", "content": "ok"},
]


def trained_text(renderer, sequence):
    pieces, run = [], []
    for token, mask in zip(sequence.input_ids, sequence.loss_mask, strict=True):
        if mask:
            run.append(token)
        elif run:
            pieces, run = [*pieces, renderer.decode(run, False)], []
    return [*pieces, renderer.decode(run, False)] if run else pieces


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (("assistant",), ["call<|end|>", "ok<|end|>"]),
        (("user",), ["<|user|>u<|end|>"]),
        (("assistant", "tool"), ["call<|end|><|tool|>t<|end|>", "ok<|end|>"]),
        (("system",), ["s<|end|>"]),  # nothing precedes the first token
    ],
)
def test_only_turns_of_the_chosen_roles_are_trained(renderer, roles, expected):
    (sequence,) = mask_by_role(renderer, TALK, roles)
    assert renderer.decode(sequence.input_ids, False) == renderer.text(TALK, False)
    assert trained_text(renderer, sequence) == expected


def test_nothing_to_train_gives_no_sequence(renderer):
    assert mask_by_role(renderer, TALK[:2], ("assistant",)) == []


def test_a_template_that_rewrites_history_gives_pieces(tmp_path):
    tokenizer = byte_tokenizer(tmp_path)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' and not loop.last %}"
        "{{ '<|assistant|>' + m['content'].split(']')[-1] + '<|end|>' }}"
        "{% else %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    renderer = ChatRenderer(tokenizer)
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "[think]one"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "[more]two"},
    ]
    sequences = mask_by_role(renderer, talk, ("assistant",))
    assert [renderer.decode(s.input_ids, False) for s in sequences] == [
        "<|user|>a<|end|><|assistant|>[think]one<|end|>",
        "<|user|>a<|end|><|assistant|>one<|end|><|user|>b<|end|><|assistant|>[more]two<|end|>",
    ]
    assert [trained_text(renderer, s) for s in sequences] == [["[think]one<|end|>"], ["[more]two<|end|>"]]


@given(ids=st.lists(st.integers(0, 261), max_size=40), skip=st.booleans())
@settings(deadline=None)
def test_decoding_is_that_of_transformers(ids, skip, tmp_path_factory):
    """Halves of characters and special tokens among them; of a class with a `decode` of its own, it is that one."""
    tokenizer = byte_tokenizer(tmp_path_factory.getbasetemp())
    renderer = ChatRenderer(tokenizer)
    assert renderer.backend is not None
    expected = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert renderer.decode(ids, skip) == expected
    own = type("Own", (type(tokenizer),), {"decode": lambda self, *args, **kwargs: "own"})
    tokenizer.__class__ = own
    assert ChatRenderer(tokenizer).decode(ids, skip) == "own"


def test_a_tokenizer_without_a_chat_template_is_told_before_anything_is_sampled(tmp_path):
    config = ModelConfig(name="tiny", path=str(tmp_path), card=moe_card())
    tokenizer = byte_tokenizer(tmp_path)
    check_template(tokenizer, config, tmp_path)
    tokenizer.chat_template = "{{ raise_exception('begin with a system turn') }}"
    check_template(tokenizer, config, tmp_path)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    plan = SimpleNamespace(config=SimpleNamespace(model=config, cache_dir=str(tmp_path)))
    with pytest.raises(UserError, match="no chat template") as caught:
        load_renderer(SimpleNamespace(plan=plan, init_model_path=None, resume_step=0))
    assert caught.value.where == str(tmp_path)


@pytest.mark.parametrize(("vocab", "token"), [(200, 255), (257, 259)])
def test_tokens_that_the_model_has_no_embeddings_for_are_told_before_anything_is_sampled(vocab, token, tmp_path):
    """Of text, and of the template alone: published tokenizers may have added tokens that no text has."""
    byte_tokenizer(tmp_path)
    config = ModelConfig(name="tiny", path=str(tmp_path), card=moe_card().model_copy(update={"vocab_size": vocab}))
    plan = SimpleNamespace(config=SimpleNamespace(model=config, cache_dir=str(tmp_path)))
    with pytest.raises(UserError, match=f"a token {token}, and the model {vocab} tokens") as caught:
        load_renderer(SimpleNamespace(plan=plan, init_model_path=None, resume_step=0))
    assert str(tmp_path) in caught.value.where


def test_the_prompt_of_a_group_is_rendered_and_tokenised_once(renderer, monkeypatch):
    asked, encoded = [], []
    text, encode = renderer.tokenizer.apply_chat_template, renderer.tokenizer.encode
    monkeypatch.setattr(renderer.tokenizer, "apply_chat_template", lambda *a, **k: asked.append(1) or text(*a, **k))
    monkeypatch.setattr(renderer.tokenizer, "encode", lambda *a, **k: encoded.append(1) or encode(*a, **k))
    fresh = ChatRenderer(renderer.tokenizer)
    for content in ("one", "one", "two", "one"):
        said = fresh.beginning([{"role": "user", "content": content}], [])
        assert said == fresh.text([{"role": "user", "content": content}], True)
        ids = fresh.encode(said)
        assert ids == encode(said, add_special_tokens=False)
        ids.clear()  # who gets them may change them
    assert len(asked) - 4 == len(encoded) == 2
