"""Packing: a model computes for documents in a row what it computes for each document alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ftrain as ft
from ftrain import data
from ftrain.errors import BatchError, DataError, OptionError

DOCUMENTS = st.lists(st.lists(st.integers(1, 9), max_size=10), max_size=12)


def split(batch):
    """Return the documents of packed rows: (tokens, labels, positions) of each."""
    result = []
    for tokens, labels, positions, documents in zip(*(batch[n] for n in FIELDS), strict=True):
        for number in range(int(documents.max()) + 1):
            mask = documents == number
            result.append((tokens[mask].tolist(), labels[mask].tolist(), positions[mask].tolist()))
    return result


FIELDS = "tokens", "labels", "positions", "documents"


@given(DOCUMENTS, st.integers(10, 20), st.booleans())
def test_rows_have_all_documents_in_order(documents, length, spare_rows):
    expected = data.pack(documents, length)
    rows = len(expected["tokens"]) + 2 if spare_rows else None
    batch = data.pack(documents, length, rows=rows, pad=77)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in batch.items()} == dict.fromkeys(
        FIELDS, ((rows or len(expected["tokens"]), length), torch.int64)
    )
    non_empty = [document for document in documents if document]
    assert split(batch) == [(document, [*document[1:], -100], list(range(len(document)))) for document in non_empty]
    empty = batch["documents"] == -1
    assert int(empty.sum()) == empty.numel() - sum(map(len, non_empty))
    assert (batch["tokens"][empty] == 77).all()
    assert (batch["labels"][empty] == -100).all()
    # A document starts a row only where it does not fit into the one before.
    for before, after in zip(expected["documents"], expected["documents"][1:], strict=False):
        assert int((before == -1).sum()) < int((after == 0).sum())


def test_documents_may_have_labels():
    batch = data.pack(
        [{"text": [1, 2, 3], "labels": [-100, 3, 4]}, {"text": torch.tensor([5]), "labels": [6]}], 5, field="text"
    )
    assert batch["tokens"].tolist() == [[1, 2, 3, 5, 0]]
    assert batch["labels"].tolist() == [[-100, 3, 4, 6, -100]]


def test_long_documents_are_cut_only_with_cut():
    with pytest.raises(DataError, match="document 1 of the batch has 5 tokens, and a row 2; pass cut=True"):
        data.pack([[1], [1, 2, 3, 4, 5]], 2)
    batch = data.pack([[1, 2, 3, 4, 5], [6]], 2, cut=True)
    assert batch["tokens"].tolist() == [[1, 2], [3, 4], [5, 6]]
    # The token after the cut is known, and predicted.
    assert batch["labels"].tolist() == [[2, 3], [4, 5], [-100, -100]]
    assert batch["positions"].tolist() == [[0, 1], [0, 1], [0, 0]]


def test_no_document():
    assert data.pack([], 3)["tokens"].shape == (0, 3)
    assert data.pack([[], []], 3, rows=1)["documents"].tolist() == [[-1, -1, -1]]


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[0.5]], r"document 0 of the batch.*float32"),
        ([[[1]]], r"document 0 of the batch.*\(1, 1\)"),
        ([{"text": [1]}], "document 0 of the batch has no 'tokens', but text; pass field="),
        ([[1], {"tokens": [1, 2], "labels": [1]}], "document 1 of the batch has 2 tokens and 1 labels"),
        ([[1], "two"], "tokens of document 1 of the batch are a str"),
        ([[1, 2], [3], [4, 5]], "fill 3 rows of 2 tokens, and rows=2"),
    ],
)
def test_documents_that_cannot_be_packed_are_errors_that_name_them(documents, message):
    with pytest.raises(DataError, match=message):
        data.pack(documents, 2, rows=2)


@pytest.mark.parametrize(
    ("field", "length", "message"),
    [
        ("input_ids", 3, r"no 'tokens', but input_ids; pass field=, to a loader as collate=ft\.data\.packed\("),
        ("tokens", 1, r"fill 4 rows of 4 tokens, and rows=1; .* lengths= are not those of the documents"),
    ],
)
def test_a_loader_says_what_to_change_where_documents_cannot_be_packed(field, length, message):
    documents = [{field: [1, 2, 3]}] * 8
    with pytest.raises(DataError, match=message) as caught:
        next(iter(data.loader(documents, 1, lengths=[length] * 8, pack=4)))
    assert "ft.data.pad" not in str(caught.value)


def test_a_padding_token_that_is_no_integer_is_an_error():
    with pytest.raises(OptionError, match="packed: pad is '<pad>', needs a whole number"):
        data.packed(4, pad="<pad>")
    with pytest.raises(OptionError, match=r"pack: pad is 0\.5, needs a whole number"):
        data.pack([[1]], 4, pad=0.5)
    assert data.pack([[1]], 2, pad=-1)["tokens"].tolist() == [[1, -1]]


@pytest.mark.parametrize("options", [{"length": 0}, {"length": 4, "rows": 0}])
def test_wrong_options_are_errors_that_name_them(options):
    with pytest.raises(OptionError, match=r"pack: .* is 0"):
        data.pack([[1]], **options)
    with pytest.raises(OptionError, match=r"packed: .* is 0"):
        data.packed(**options)


def test_packed_is_pack_as_a_collate_function():
    batch = data.packed(4, rows=2, pad=9)([[1, 2, 3], [4]])
    assert batch["tokens"].tolist() == [[1, 2, 3, 4], [9, 9, 9, 9]]


# The mask


def test_a_token_attends_to_earlier_tokens_of_its_document():
    documents = torch.tensor([[0, 0, 1, 1, -1, -1]])
    mask = data.block_mask(documents)
    assert mask.shape == (1, 1, 6, 6)
    assert mask.dtype == torch.bool
    for query in range(6):
        for key in range(6):
            assert mask[0, 0, query, key] == (key <= query and documents[0, query] == documents[0, key])
    assert mask.any(-1).all()


def test_a_mask_needs_documents_of_two_axes():
    with pytest.raises(BatchError, match=r"block_mask: documents have shape \(3,\)"):
        data.block_mask(torch.zeros(3))


class Attention(nn.Module):
    """A small language model: embeddings of tokens and positions, two layers of attention."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(10, 8), nn.Embedding(16, 8)
        self.qkv = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))
        self.head = nn.Linear(8, 10)

    def forward(self, batch):
        x = self.embed(batch["tokens"]) + self.place(batch["positions"])
        mask = data.block_mask(batch["documents"])
        for qkv in self.qkv:
            q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in qkv(x).chunk(3, -1))
            x = x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return self.head(x)


def criterion(model, batch):
    return ft.losses.cross_entropy(model(batch), batch["labels"]), {"padding": data.padding(batch)}


@given(st.lists(st.lists(st.integers(1, 9), min_size=0, max_size=12), min_size=1, max_size=8))
def test_the_loss_of_packed_rows_is_that_of_the_documents_alone(documents):
    torch.manual_seed(0)
    model = Attention().double()
    packed_loss, _ = criterion(model, data.pack(documents, 12, rows=len(documents)))
    packed_loss.total.backward()
    grads = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    total, weight = torch.zeros((), dtype=torch.float64), 0
    for document in filter(None, documents):
        loss_alone, _ = criterion(model, data.pack([document], len(document)))
        total, weight = total + loss_alone.total, weight + float(loss_alone.weight)
    assert float(packed_loss.weight) == weight == sum(max(len(document) - 1, 0) for document in documents)
    torch.testing.assert_close(packed_loss.total, total, rtol=1e-12, atol=1e-12)
    if weight:
        total.backward()
        torch.testing.assert_close(grads, [param.grad for param in model.parameters()], rtol=1e-10, atol=1e-12)


def test_a_model_is_trained_on_packed_rows_and_padding_is_a_metric(tmp_path):
    data.write_tokens(tmp_path / "text.npy", [[1 + i % 9] * (i % 9 + 1) for i in range(64)])
    documents = data.TokenDocuments(tmp_path / "text.npy")
    loader = data.loader(documents, 4, lengths=documents.lengths, pack=16)
    model = Attention()
    step = ft.train_step(ft.from_module(model, criterion), ft.optim.adamw(0.01))
    _, history = ft.fit(step, step.init(), loader, steps=30, progress=False)
    assert history["loss"][-1] < history["loss"][0]
    assert all(0 <= padding < 0.8 for padding in history["padding"])
    assert min(history["padding"]) < 0.1


@pytest.mark.parametrize(("attention", "window"), [("sdpa", None), ("eager", None), ("eager", 4)])
def test_models_of_transformers_give_the_same_logits_for_packed_documents_as_for_each_alone(attention, window):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": window}
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, **heads, initializer_range=1.0))
    model.set_attn_implementation(attention)
    documents = [torch.randint(20, (length,)) for length in (9, 3, 5)]
    batch = data.pack(documents, 12)
    inputs = {"input_ids": batch["tokens"], "position_ids": batch["positions"], "use_cache": False}
    if window is None:
        inputs["attention_mask"] = torch.where(data.block_mask(batch["documents"]), 0.0, -torch.inf)
    with torch.no_grad():
        packed = model(**inputs).logits[batch["documents"] >= 0]
        alone = torch.cat([model(input_ids=tokens[None]).logits[0] for tokens in documents])
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)
