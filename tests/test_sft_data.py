"""Supervised data: what is read, what is refused, how it is packed."""

import json
from itertools import islice

import numpy as np
import pytest
from tiny import END, byte_tokenizer

from prl.config.errors import UserError
from prl.config.schema import SftConfig, SftDataConfig
from prl.models.text.chat import ChatRenderer
from prl.trainer.loops.sft_data import load_conversations, load_sft_data, to_messages


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return ChatRenderer(byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def write(path, rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n" for row in rows)
    )
    return path


def pairs(count, length=3):
    return [{"prompt": f"{i:03d}", "completion": "x" * (length + i % 4)} for i in range(count)]


def data_of(path, renderer, split="train", seed=0, seq_len=40, context=512, **changes):
    config = SftConfig(data=SftDataConfig(source=str(path), **changes), seq_len=seq_len)
    return load_sft_data(config, split, renderer, seed, context)


# --- reading ----------------------------------------------------------------------------------------------------------

PAIR = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "c"}]


@pytest.mark.parametrize(
    "row",
    [{"messages": PAIR}, {"prompt": "p", "completion": "c"}, {"prompt": PAIR[:1], "completion": PAIR[1:], "extra": 1}],
    ids=["messages", "strings", "message lists"],
)
def test_accepted_forms(row):
    assert to_messages(row) == PAIR


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "Expecting property name"),
        ("[1, 2]", "not an object"),
        ("3", "not an object"),
        ('{"prompt": "a"}', r"neither 'messages' nor .*\['prompt'\]"),
        ('{"prompt": 5, "completion": "a"}', "not a list of messages: 5"),
        ('{"messages": "hello"}', "not a list of messages"),
        ('{"messages": ["hello"]}', "without a role or a text content: hello"),
        ('{"messages": [{"role": "user", "content": null}]}', "without a role or a text content"),
        ('{"messages": [{"content": "a"}]}', "without a role"),
        ('{"messages": []}', "no messages"),
        ('{"messages": [{"role": "asistant", "content": "a"}]}', "of role 'asistant', which is none of system"),
        ('{"prompt": "\\ud800 x", "completion": "a"}', "half of a surrogate pair"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = tmp_path / "data.jsonl"
    rows = [json.dumps({"prompt": "a", "completion": "b"}), "", line]
    path.write_bytes("\n".join(rows).encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=rf"(?s){message}.*data\.jsonl:3.*each example is"):
        load_conversations(SftDataConfig(source=str(path)), "train")


@pytest.mark.parametrize("line", ['{"prompt": "é", "completion": "a"}'.encode("latin-1"), "{}".encode("utf-16")])
def test_other_encodings_are_told_as_that(tmp_path, line):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "a", "completion": "b"}\n' + line)
    with pytest.raises(UserError, match=r"(?s)not in UTF-8.*data\.jsonl:2.*decode.*iconv"):
        load_conversations(SftDataConfig(source=str(path)), "train")
    path.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "a", "completion": "b"}\n' * 2)  # the mark that some editors write
    assert len(load_conversations(SftDataConfig(source=str(path)), "train")) == 1


def test_a_missing_and_an_empty_file_are_explained(tmp_path):
    with pytest.raises(UserError, match=r"(?s)does not exist.*absent\.jsonl"):
        load_conversations(SftDataConfig(source=str(tmp_path / "absent.jsonl")), "train")
    with pytest.raises(UserError, match="the dataset is empty"):
        load_conversations(SftDataConfig(source=str(write(tmp_path / "empty.jsonl", ["", " "]))), "train")


def test_separators_that_are_no_line_ends_in_json(tmp_path):
    row = {"prompt": "a\u2028b\x85c\u2029", "completion": "d\x0be"}
    path = write(tmp_path / "data.jsonl", [row, row])
    (messages,) = load_conversations(SftDataConfig(source=str(path)), "train")
    assert [m["content"] for m in messages] == [row["prompt"], row["completion"]]


def test_windows_line_ends(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "a", "completion": "b"}\r\n' * 3 + b"\r\n")
    assert len(load_conversations(SftDataConfig(source=str(path)), "train")) == 2


def test_splits_share_nothing(tmp_path):
    path = write(tmp_path / "data.jsonl", pairs(50))
    config = SftDataConfig(source=str(path), val_fraction=0.1)
    train, held_out = (load_conversations(config, split) for split in ("train", "held_out"))
    assert (len(train), len(held_out)) == (45, 5)
    prompts = [c[0]["content"] for c in train + held_out]
    assert len(set(prompts)) == 50
    other = write(tmp_path / "val.jsonl", [{"prompt": "v", "completion": "w"}])
    with_own = config.model_copy(update={"val_source": str(other)})
    assert [c[0]["content"] for c in load_conversations(with_own, "held_out")] == ["v"]


def test_an_environments_demonstrations():
    config = SftDataConfig(source="env:reverse_text", args={"max_chars": 8})
    conversation = load_conversations(config, "held_out")[0]
    assert conversation[1]["content"] == conversation[0]["content"][::-1]


def test_a_hugging_face_dataset(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason='needs pip install -e ".[hf]"')
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = write(tmp_path / "rows.jsonl", pairs(20))
    config = SftDataConfig(source="json", args={"data_files": str(path)})
    assert len(load_conversations(config, "train")) == 19
    with pytest.raises(UserError, match=r"(?s)could not be loaded.*sft.data.source=json, sft.data.split=nonsense"):
        load_conversations(config.model_copy(update={"split": "nonsense"}), "train")
    bad = config.model_copy(update={"args": {"data_files": str(write(tmp_path / "bad.jsonl", [{"text": "a"}]))}})
    with pytest.raises(UserError, match="not a training example: neither"):
        load_conversations(bad, "train")


# --- tokens, rows -----------------------------------------------------------------------------------------------------


def test_only_completions_are_trained(tmp_path, renderer):
    data = data_of(write(tmp_path / "d.jsonl", [{"prompt": "ab", "completion": "c"}] * 2), renderer)
    (document,) = data.documents
    assert document.input_ids == [258, 97, 98, END, 259, 99, END]
    assert document.loss_mask == [False] * 5 + [True] * 2
    both = data_of(tmp_path / "d.jsonl", renderer, loss_roles=("user", "assistant"))
    assert sum(both.documents[0].loss_mask) == 3 + 2


def test_examples_that_are_too_long_are_left_out_and_counted(tmp_path, renderer):
    rows = pairs(20) + [{"prompt": "p" * 100, "completion": "c"}] * 10
    data = data_of(write(tmp_path / "d.jsonl", rows), renderer, val_fraction=0.01)
    assert len(data.documents) + data.dropped == 29  # one is held out
    assert data.dropped in (9, 10)
    with pytest.raises(UserError, match=r"(?s)no example of the train.*longer than seq_len=4\).*raise seq_len"):
        data_of(tmp_path / "d.jsonl", renderer, seq_len=4)


def test_examples_without_a_turn_to_train_are_left_out_and_told(tmp_path, renderer, caplog):
    path = write(tmp_path / "d.jsonl", pairs(20) + [{"messages": PAIR[:1]}] * 30)
    data = data_of(path, renderer, val_source=str(path))
    assert (len(data.documents), data.dropped) == (20, 30)
    assert "30 examples of the train split are left out: they have no turn of assistant" in caplog.text
    only = write(tmp_path / "only.jsonl", [{"messages": PAIR[:1]}] * 3)
    with pytest.raises(UserError, match="2 have no turn of assistant"):
        data_of(only, renderer)


@pytest.mark.parametrize(("rows", "changes"), [(1, {}), (5, {"val_fraction": 1.0})])
def test_where_all_is_held_out_that_is_said(tmp_path, renderer, rows, changes):
    path = write(tmp_path / "d.jsonl", pairs(rows))
    with pytest.raises(UserError, match=r"(?s)no example is left for the train split.*val_fraction.*val_source="):
        data_of(path, renderer, **changes)
    assert len(data_of(path, renderer, split="held_out", **changes).documents) == rows


def test_examples_longer_than_the_models_context_are_left_out_and_told(tmp_path, renderer, caplog):
    """Rows may be longer than documents."""
    path = write(tmp_path / "d.jsonl", pairs(20) + [{"prompt": "p" * 100, "completion": "c"}] * 10)
    every = data_of(path, renderer, seq_len=400)
    assert max(map(len, every.documents)) > 100
    assert not caplog.records
    data = data_of(path, renderer, seq_len=400, context=40)
    assert max(map(len, data.documents)) <= 40
    assert data.seq_len == 400
    assert (
        f"{data.dropped} documents of the train split are left out: they are longer than the model's context, 40"
        in caplog.text
    )
    with pytest.raises(UserError, match=r"(?s)longer than the model's context, 4\).*max_position_embeddings=400, if"):
        data_of(path, renderer, seq_len=400, context=4)


def test_a_file_to_validate_on_leaves_the_other_whole(tmp_path, renderer):
    train, held = write(tmp_path / "train.jsonl", pairs(10)), write(tmp_path / "held.jsonl", pairs(3, length=30))
    assert len(data_of(train, renderer, val_source=str(held)).documents) == 10
    assert len(data_of(train, renderer).documents) == 9
    with pytest.raises(UserError, match="of the held_out split") as caught:
        data_of(train, renderer, split="held_out", context=20, val_source=str(held))
    assert caught.value.where == f"sft.data.val_source={held}"


def documents_in(rows):
    """Each document's tokens, as text."""
    found = []
    for row in rows:
        ends = np.cumsum(row.doc_lens)
        found += [bytes(i for i in part if i < 256) for part in np.split(row.input_ids, ends[:-1])]
    return found


def rows_per_epoch(data):
    return len(data.one_epoch())


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_epoch_holds_every_document_once(tmp_path, renderer, shuffle):
    data = data_of(write(tmp_path / "d.jsonl", pairs(40)), renderer, shuffle=shuffle)
    expected = sorted(documents_in(data.one_epoch()))
    assert len(expected) == len(data.documents) == 38
    seen = documents_in(islice(data.rows(), 200))
    epochs = [seen[i : i + 38] for i in range(0, len(seen) - 38, 38)]
    assert len(epochs) >= 4
    assert all(sorted(epoch) == expected for epoch in epochs)
    assert (epochs[0] == epochs[1]) != shuffle
    assert all(row.num_tokens <= 40 for row in islice(data.rows(), 100))


@pytest.mark.parametrize("skip", [0, 1, 5, 13, 14, 50, 101])
def test_skipping_is_the_same_as_having_used(tmp_path, renderer, skip):
    path = write(tmp_path / "d.jsonl", pairs(40))
    used = data_of(path, renderer).rows()
    for _ in range(skip):
        next(used)
    resumed = data_of(path, renderer).rows(skip=skip)
    for _ in range(30):
        np.testing.assert_array_equal(next(used).input_ids, next(resumed).input_ids)


def test_seeds_give_other_orders(tmp_path, renderer):
    path = write(tmp_path / "d.jsonl", pairs(40))
    one, again, other = (documents_in(islice(data_of(path, renderer, seed=s).rows(), 10)) for s in (0, 0, 1))
    assert one == again != other


def test_validation_rows_are_not_shuffled(tmp_path, renderer):
    path = write(tmp_path / "d.jsonl", pairs(100))
    one, other = (data_of(path, renderer, split="held_out", seed=s).one_epoch() for s in (0, 1))
    assert documents_in(one) == documents_in(other)


def test_a_template_that_cannot_be_masked_is_explained(tmp_path):
    tokenizer = byte_tokenizer(tmp_path)
    tokenizer.chat_template = "{% for m in messages %}{{ loop.length ~ m['role'] ~ m['content'] }}{% endfor %}"
    with pytest.raises(UserError, match="chat template does not render"):
        data_of(write(tmp_path / "d.jsonl", pairs(4)), ChatRenderer(tokenizer))


def test_a_conversation_that_the_template_refuses_is_told(tmp_path):
    """As Gemma's refuses what a system says."""
    tokenizer = byte_tokenizer(tmp_path)
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    tokenizer.chat_template = refusing + tokenizer.chat_template
    odd = {"messages": [{"role": role, "content": "x"} for role in ("system", "user", "assistant")]}
    path = write(tmp_path / "d.jsonl", [*pairs(4), odd])
    with pytest.raises(UserError, match="refuses a conversation: no system role") as caught:
        data_of(path, ChatRenderer(tokenizer))
    assert str(path) in caught.value.where
    assert "of system, user, assistant begins" in caught.value.why
