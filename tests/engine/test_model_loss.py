"""Models that take their own loss: ours has to be the same, or there is no number."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BatchEncoding,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

import saltflat
import saltflat.training
from saltflat.errors import ModelError, OptionError

COUNT, LENGTH, WORDS = 6, 5, 11
pytestmark = pytest.mark.filterwarnings("ignore:.*generation config")


def bert(kind: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return kind(BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, initializer_range=0.5, **size, **options))


def gpt() -> Any:
    torch.manual_seed(0)
    size = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": LENGTH, "initializer_range": 0.5}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **size))


def tokens() -> Tensor:
    return torch.randint(WORDS, (COUNT, LENGTH), generator=torch.Generator().manual_seed(1))


def batch(labels: Tensor, ids: Tensor | None = None) -> BatchEncoding:
    ids = tokens() if ids is None else ids
    return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})


def next_tokens(labels: Tensor) -> Tensor:
    return F.pad(labels[:, 1:], (0, 1), value=-100)


def own_loss(model: nn.Module, given: Any) -> float:
    with torch.no_grad():
        return float(model.eval()(**given).loss)


def measured(model: nn.Module, given: Any, loss: Any = "cross_entropy") -> float:
    found = saltflat.compute_statistics(model, given, names="curvature_trace", loss=loss)
    assert float(sum(value.sum() for value in found["curvature_trace"].values())) > 0
    return found.loss


def refusal(model: nn.Module, given: Any, loss: Any = "cross_entropy", **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        saltflat.measure(model, given, loss, "hessian_trace", **options)
    message = str(caught.value)
    assert type(model).__name__ in message
    assert re.fullmatch(r"Expected .+, but got .+\. (Try|Check) .+\.", message, re.DOTALL), message
    return message


PLAIN = nn.CrossEntropyLoss()  # without a shift


def test_a_causal_language_model_is_measured_with_its_own_loss() -> None:
    model, ids = gpt(), tokens()
    given = batch(ids)
    for data in (given, [given], (ids, ids)):
        report = saltflat.measure(model, data, measures="hessian_trace")
        assert report.loss == pytest.approx(own_loss(model, given), rel=1e-6)
        assert any("compared with the label of the next position, as GPT2LMHeadModel" in note for note in report.notes)
    shifted = saltflat.measure(model, batch(next_tokens(ids)), measures="hessian_trace")
    assert not any("next position" in note for note in shifted.notes)
    assert report["hessian_trace"].value == pytest.approx(shifted["hessian_trace"].value, rel=1e-5)
    assert measured(model, given, "model") == pytest.approx(own_loss(model, given), rel=1e-6)


def test_a_causal_language_model_with_a_loss_that_is_not_shifted_is_refused() -> None:
    model, ids = gpt(), tokens()
    given = batch(ids)
    some = {name: value[:2] for name, value in given.items()}
    assert f"{own_loss(model, some):.6g}" in (message := refusal(model, given, PLAIN))
    assert "pad(labels[:, 1:], (0, 1), value=-100)" in message
    assert "loss='model'" in message
    assert refusal(model, [given], PLAIN)
    assert refusal(model, (ids, ids), PLAIN)
    assert refusal(model, given, PLAIN, logits="none", dtype=torch.float64)
    # As advised: the loss is the model's own.
    assert measured(model, batch(next_tokens(ids))) == pytest.approx(own_loss(model, given), rel=1e-5)
    # The next tokens without the last place, as other training loops have it.
    short = batch(ids[:, 1:], ids[:, :-1])
    assert measured(model, short) == pytest.approx(own_loss(model, given), rel=1e-5)


def test_labels_that_end_in_ignored_ones_are_not_taken_for_shifted_ones() -> None:
    model, ids = gpt(), tokens()
    padded = ids.clone()
    padded[:, -2:] = -100
    padded[:2] = -100  # the first examples have no labels at all
    assert "shifting the labels" in refusal(model, batch(padded), PLAIN)
    assert measured(model, batch(padded)) == pytest.approx(own_loss(model, batch(padded)), rel=1e-6)
    # Nor does the first batch.
    data = [{name: value[:2] for name, value in batch(padded).items()}, batch(padded)]
    assert measured(model, data) == pytest.approx(own_loss(model, batch(padded)), rel=1e-6)


def test_a_function_is_the_users_word() -> None:
    def shifted(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs[:, :-1].flatten(0, 1), targets[:, 1:].flatten())

    model, given = gpt(), batch(tokens())
    assert measured(model, given, shifted) == pytest.approx(own_loss(model, given), rel=1e-5)


def masked() -> Tensor:
    labels = tokens()
    labels[labels % 3 != 0] = -100
    return labels


def several() -> Tensor:
    return (tokens()[:, :3] % 2).float()


@pytest.mark.parametrize(
    ("make", "labels", "loss", "wrong", "says"),
    [
        (lambda: bert(BertForSequenceClassification, num_labels=3), tokens()[:, 0] % 3, "cross_entropy", None, ""),
        (lambda: bert(BertForTokenClassification, num_labels=3), tokens() % 3, "cross_entropy", None, ""),
        (lambda: bert(BertForMaskedLM), masked(), "cross_entropy", None, ""),
        (
            lambda: bert(BertForSequenceClassification, num_labels=3),
            several(),
            "bce_with_logits",
            "cross_entropy",
            "loss='bce_with_logits'",
        ),
        (
            lambda: bert(BertForSequenceClassification, num_labels=1),
            torch.randn(COUNT, 1, generator=torch.Generator().manual_seed(0)),
            "mse",
            None,
            "",
        ),
        (
            lambda: bert(BertForSequenceClassification, num_labels=1),
            torch.zeros(COUNT, dtype=torch.long),
            lambda outputs, targets: F.mse_loss(outputs.squeeze(1), targets.to(outputs)),
            "cross_entropy",
            "loss='mse', with labels of shape (N, 1)",
        ),
        (
            lambda: bert(BertForSequenceClassification, num_labels=3, problem_type="regression"),
            torch.randn(COUNT, 3, generator=torch.Generator().manual_seed(0)).abs(),
            "mse",
            "cross_entropy",
            "loss='mse'",
        ),
    ],
    ids=["classes", "tokens", "masked", "several labels", "regression", "whole numbers", "declared"],
)
def test_models_with_the_same_loss_are_measured_and_others_told_which_it_is(
    make: Callable[[], Any], labels: Tensor, loss: Any, wrong: Any, says: str
) -> None:
    model, given = make(), batch(labels)
    kind = model.config.problem_type
    assert measured(model, given, loss) == pytest.approx(own_loss(make(), given), rel=1e-5)
    assert model.config.problem_type == kind  # which transformers sets when it sees labels
    if says:
        assert says in refusal(model, given, wrong)
    if not callable(loss):
        model.forward = adding(model)
        assert "as a function" in refusal(model, given, loss)
    if labels.dim() == 2 and not labels.is_floating_point():
        # The same labels one place further are not the model's.
        model.forward = shifting(model)
        assert "shifting the labels" in refusal(model, given, PLAIN)
        assert measured(model, given) == pytest.approx(own_loss(model, given), rel=1e-5)


def adding(model: Any) -> Callable[..., Any]:
    plain = type(model).forward

    def forward(input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        found = plain(model, input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        found.loss = None if labels is None else found.loss + 0.01
        return found

    return forward


def shifting(model: Any) -> Callable[..., Any]:
    plain = type(model).forward

    def forward(input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        moved = None if labels is None else next_tokens(labels)
        return plain(model, input_ids=input_ids, attention_mask=attention_mask, labels=moved)

    return forward


class Wrapped(nn.Module):
    """Passes on whatever it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class Extra(nn.Module):
    """Adds something to its loss, as routers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        outputs = self.head(x)
        return {"logits": outputs} | ({} if labels is None else {"loss": F.cross_entropy(outputs, labels) + 0.01})


def average_by_example(model: Any) -> Callable[..., Any]:
    plain = type(model).forward

    def forward(input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        found = plain(model, input_ids=input_ids, attention_mask=attention_mask)
        if labels is not None:
            found.loss = torch.stack(list(map(F.cross_entropy, found.logits, labels))).mean()
        return found

    return forward


@pytest.mark.parametrize("loss", ["model", "cross_entropy"])
@pytest.mark.parametrize("ignored", [0, 4, COUNT - 1])
def test_a_loss_that_weighs_examples_otherwise_is_refused_wherever_the_first_batch_shows_it(
    loss: str, ignored: int
) -> None:
    model, labels = bert(BertForMaskedLM).double(), tokens()
    model.forward = average_by_example(model)
    assert measured(model, batch(labels), loss) == pytest.approx(own_loss(model, batch(labels)), rel=1e-6)
    labels[ignored, 2:] = -100
    given = batch(labels)
    message = refusal(model, given, loss)
    if ignored > 1:  # the first two examples do not show it
        assert f"for {COUNT} examples, while BertForMaskedLM itself computes {own_loss(model, given):.6g}" in message


def test_wrappers_are_looked_through_and_other_losses_named() -> None:
    assert "shifting the labels" in refusal(Wrapped(gpt()), batch(tokens()), PLAIN)
    assert measured(Wrapped(gpt()), batch(tokens())) == pytest.approx(own_loss(gpt(), batch(tokens())), rel=1e-6)
    data = {"x": torch.randn(COUNT, 4), "labels": torch.arange(COUNT) % 3}
    assert "as a function" in refusal(Extra(), data)
    # Smoothing and class weights are the user's choice.
    weight = torch.tensor([1.0, 2.0, 3.0])
    chosen = nn.CrossEntropyLoss(weight, label_smoothing=0.1)
    model = bert(BertForSequenceClassification, num_labels=3)
    assert measured(model, batch(tokens()[:, 0] % 3), chosen) > 0
    assert "shifting the labels" in refusal(gpt(), batch(tokens()), nn.CrossEntropyLoss(label_smoothing=0.1))


def spans() -> BatchEncoding:
    start = torch.arange(COUNT) % LENGTH
    given = batch(tokens())
    del given["labels"]
    return BatchEncoding({**given, "start_positions": start, "end_positions": (start + 1) % LENGTH})


def make_t5() -> Any:
    torch.manual_seed(0)
    size = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, decoder_start_token_id=0, **size))


def make_bart() -> Any:
    torch.manual_seed(0)
    sides = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sides |= {"encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 16, "d_model": 8}
    return BartForConditionalGeneration(BartConfig(vocab_size=WORDS, **sides))


numbers = torch.randn(COUNT, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("make", "given", "loss"),
    [
        (gpt, batch(masked()), "cross_entropy"),
        (lambda: bert(BertForMaskedLM), batch(masked()), "cross_entropy"),
        (lambda: bert(BertForTokenClassification, num_labels=3), batch(tokens() % 3), "cross_entropy"),
        (lambda: bert(BertForSequenceClassification, num_labels=3), batch(tokens()[:, 0] % 3), "cross_entropy"),
        (lambda: bert(BertForSequenceClassification, num_labels=3), batch(several()), "bce_with_logits"),
        (lambda: bert(BertForSequenceClassification, num_labels=1), batch(numbers), "mse"),
        (lambda: bert(BertForQuestionAnswering), spans(), "cross_entropy"),
        (make_t5, batch(tokens()), "cross_entropy"),
        (make_bart, batch(tokens()[:, :3].contiguous(), tokens()), "cross_entropy"),
    ],
    ids=["causal", "masked", "tokens", "sequence", "several", "regression", "spans", "t5", "bart"],
)
def test_the_models_own_loss_is_measured(make: Callable[[], Any], given: BatchEncoding, loss: str) -> None:
    model = make().double()
    own = own_loss(model, given)
    report = saltflat.measure(model, given, "model", "hessian_trace")
    assert report.loss == pytest.approx(own, rel=1e-6)  # transformers computes it in float32
    assert report.settings["loss"] == loss
    name, weight = next((n, p) for n, p in reversed(list(model.named_parameters())) if p.numel() > 1)
    found = saltflat.compute_statistics(model, given, names="mean_gradient", loss="model")["mean_gradient"][name]
    model.zero_grad()
    model(**given).loss.backward()
    assert torch.allclose(found.to(weight), weight.grad, rtol=1e-4, atol=1e-7)


def test_the_models_own_loss_is_refused_where_it_is_none_of_those_known() -> None:
    data = {"x": torch.randn(COUNT, 4), "labels": torch.arange(COUNT) % 3}
    assert "none of those known" in refusal(Extra(), data, "model")
    assert "does not accept labels" in refusal(nn.Linear(4, 3), (data["x"], data["labels"]), "model")
    silent = bert(BertForSequenceClassification, num_labels=3)
    silent.forward = adding(silent)
    assert "none of those known" in refusal(silent, batch(tokens()[:, 0] % 3), "model")
    assert "shifts them twice" in refusal(gpt(), batch(next_tokens(tokens())), "model")
    first = torch.where(torch.arange(tokens().shape[1]) == 0, tokens(), -100)  # no label is left after the shift
    assert "own loss is NaN" in refusal(gpt(), batch(first), "model")
    with pytest.raises(OptionError, match="loss='model'"):
        saltflat.training.FisherPenalty(gpt(), loss="model")
