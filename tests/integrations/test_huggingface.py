"""Hugging Face's Trainer: FlatTraining and FlatnessCallback, against plain loops in float64."""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import SequentialSampler
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PretrainedConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from two_processes import BY_TORCHRUN, run_as_two

import saltflat
from saltflat.errors import ModelError, OptionError, SaltflatError, TrainingError, UnknownNameError
from saltflat.integrations import MonitorWarning
from saltflat.integrations import huggingface_callback as part
from saltflat.integrations.huggingface import FlatTraining
from saltflat.integrations.huggingface_callback import FlatnessCallback
from saltflat.training import SAM

pytestmark = pytest.mark.filterwarnings(
    "ignore:'pin_memory' argument is set as true but no accelerator",
    "ignore:Moving the following attributes in the config to the generation config",
    "ignore:.* is by the Gauss-Newton matrix",  # behind tanh
)

EXAMPLES, BATCH, CLASSES, RATE = 24, 6, 3, 0.3


class Small(nn.Module):
    """What the Trainer asks of a model, in a few lines."""

    def __init__(self, dtype: torch.dtype = torch.float64, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            middle = nn.BatchNorm1d(8) if norm else nn.Identity()
            layers = (nn.Linear(4, 8), middle, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES))
        self.net = nn.Sequential(*layers).to(dtype)
        self.config = PretrainedConfig()  # asked when labels are smoothed

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(inputs)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Counting(Small):
    """Divides by the number of labels of all micro-batches of a step, as language models do."""

    def forward(
        self, inputs: Tensor, labels: Tensor | None = None, num_items_in_batch: Any = None, **_: Any
    ) -> dict[str, Tensor]:
        found = super().forward(inputs, labels)
        if labels is not None and num_items_in_batch is not None:
            found["loss"] = found["loss"] * len(labels) / num_items_in_batch
        return found


def data(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(EXAMPLES, 4, generator=generator, dtype=torch.float64)
    return {"inputs": inputs.to(dtype), "labels": torch.randint(CLASSES, (EXAMPLES,), generator=generator)}


def rows(columns: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{key: value[n] for key, value in columns.items()} for n in range(len(columns["labels"]))]


class Flat(FlatTraining, Trainer):  # type: ignore[misc]
    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


class Printed(TrainerCallback):  # type: ignore[misc]
    """What the Trainer's reporters are told."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append({**logs, "step": state.global_step})


def trainer_for(
    model: nn.Module,
    folder: Path,
    columns: dict[str, Tensor] | None = None,
    callbacks: Sequence[Any] = (),
    flat: dict[str, Any] | None = None,
    **options: Any,
) -> Flat:
    usual: dict[str, Any] = {"per_device_train_batch_size": BATCH, "num_train_epochs": 2, "max_grad_norm": 0.0}
    usual |= {"optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant"}
    usual |= {"save_strategy": "no", "logging_strategy": "no", "report_to": "none", "disable_tqdm": True}
    usual |= {"use_cpu": True, "dataloader_pin_memory": False}
    dtype = next(model.parameters()).dtype
    return Flat(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **{**usual, **options}),
        train_dataset=rows(columns or data(dtype)),
        callbacks=list(callbacks),
        **(flat or {}),
    )


def trained(model: nn.Module, folder: Path, **options: Any) -> dict[str, Tensor]:
    trainer_for(model, folder, **options).train()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


Gradients = list[Tensor]
Rule = Callable[[nn.Module, Tensor, Tensor], Gradients]


def gradient(net: nn.Module, inputs: Tensor, labels: Tensor) -> Gradients:
    return list(torch.autograd.grad(F.cross_entropy(net(inputs), labels), list(net.parameters())))


def moved(net: nn.Module, by: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for p, each in zip(net.parameters(), by, strict=True):
            p.add_(each)


def by_hand(rule: Rule, epochs: int = 2) -> dict[str, Tensor]:
    """Gradient descent with a gradient of one's own, on batches of all that a step sees."""
    model, columns = Small(), data()
    for _ in range(epochs):
        for start in range(0, EXAMPLES, BATCH):
            inputs, labels = (columns[key][start : start + BATCH] for key in ("inputs", "labels"))
            moved(model.net, [-RATE * g for g in rule(model.net, inputs, labels)])
    return dict(model.state_dict())


def at(net: nn.Module, steps: Gradients, inputs: Tensor, labels: Tensor, of: Rule = gradient) -> Gradients:
    kept = [p.detach().clone() for p in net.parameters()]
    moved(net, steps)
    found = of(net, inputs, labels)
    with torch.no_grad():
        for p, k in zip(net.parameters(), kept, strict=True):
            p.copy_(k)
    return found


def sam(rho: float = 0.5, balance: float = 1.0, of: Rule = gradient) -> Rule:
    def rule(net: nn.Module, inputs: Tensor, labels: Tensor) -> Gradients:
        first = of(net, inputs, labels)
        length = torch.cat([g.flatten() for g in first]).norm()
        second = at(net, [rho * g / length for g in first], inputs, labels, of)
        return [(1 - balance) * a + balance * b for a, b in zip(first, second, strict=True)]

    return rule


def asam(net: nn.Module, inputs: Tensor, labels: Tensor) -> Gradients:
    first = gradient(net, inputs, labels)
    scales = [torch.ones_like(p) if "bias" in name else p.detach().abs() + 0.1 for name, p in net.named_parameters()]
    length = torch.cat([(t * g).flatten() for t, g in zip(scales, first, strict=True)]).norm()
    return at(net, [0.5 * t**2 * g / length for t, g in zip(scales, first, strict=True)], inputs, labels)


KINDS: dict[str, tuple[dict[str, Any], Rule]] = {
    "SAM": ({"rho": 0.5}, sam()),
    "ASAM": ({"kind": "asam", "rho": 0.5, "eta": 0.1}, asam),
    "gradient norm": ({"kind": "gradient_norm", "rho": 0.5, "balance": 0.3}, sam(balance=0.3)),
}


@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_micro_batches_step_as_one_large_batch_does_in_a_plain_loop(name: str, pieces: int, tmp_path: Path) -> None:
    options, rule = KINDS[name]
    sizes: dict[str, Any] = {"per_device_train_batch_size": BATCH // pieces, "gradient_accumulation_steps": pieces}
    model = Small()
    trainer = trainer_for(model, tmp_path, flat={"sam": options}, **sizes)
    trainer.train()
    torch.testing.assert_close(dict(model.state_dict()), by_hand(rule), rtol=1e-10, atol=1e-12)
    assert trainer.perturbed_steps == 8
    assert trainer.sam is not None
    assert not trainer.sam.is_shifted
    assert type(trainer.optimizer.optimizer) is torch.optim.SGD  # the Trainer's own


@pytest.mark.parametrize("bf16", [False, True])
def test_without_a_radius_it_is_the_plain_training_bit_for_bit(bf16: bool, tmp_path: Path) -> None:
    # Dropout: the same random numbers in both passes, and afterwards. BatchNorm: no statistics from the second pass.
    options: dict[str, Any] = {"optim": "adamw_torch", "bf16": bf16, "max_grad_norm": 1.0}
    options |= {"lr_scheduler_type": "linear", "gradient_accumulation_steps": 2}

    def run(flat: dict[str, Any]) -> dict[str, Tensor]:
        return trained(Small(torch.float32, dropout=0.4, norm=True), tmp_path, flat=flat, **options)

    plain = run({})
    torch.testing.assert_close(run({"sam": {"rho": 0.0}}), plain, rtol=0, atol=0)
    assert not torch.equal(run({"sam": {"rho": 0.5}})["net.0.weight"], plain["net.0.weight"])


def test_the_logged_loss_is_the_one_at_the_weights(tmp_path: Path) -> None:
    printed = {}
    for rho in (0.0, 0.5):
        told = Printed()
        options: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1, "max_steps": 1}
        trained(Small(), tmp_path, callbacks=[told], flat={"sam": {"rho": rho}}, **options)
        printed[rho] = told.logs[0]["loss"]
    assert printed[0.5] == printed[0.0]


def test_a_checkpoint_in_the_middle_goes_on_the_same_way(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optim": "adamw_torch", "lr_scheduler_type": "linear"}
    options |= {"save_strategy": "steps", "save_steps": 3, "flat": {"sam": {"rho": 0.5}}}
    whole, half = (trainer_for(Small(dropout=0.3), tmp_path, **options) for _ in range(2))
    whole.train()
    half.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    torch.testing.assert_close(half.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    assert (whole.perturbed_steps, half.perturbed_steps) == (8, 5)  # of this Trainer's own


def test_an_error_in_the_second_pass_leaves_the_weights(tmp_path: Path) -> None:
    class Breaks(Small):
        calls = 0

        def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            self.calls += 1
            if self.calls == 4:
                raise RuntimeError("out of luck")
            return super().forward(inputs, labels)

    model = Breaks()
    weight = model.net[0].get_parameter("weight").detach().clone()
    trainer = trainer_for(model, tmp_path, flat={"sam": True}, gradient_accumulation_steps=2)
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.train()
    torch.testing.assert_close(model.net[0].get_parameter("weight").detach(), weight, rtol=0, atol=0)
    assert not trainer._micro_batches
    assert trainer.sam is not None
    assert not trainer.sam.is_shifted


def test_a_gradient_is_taken_after_both_passes_only() -> None:
    model = Small()
    wrapped = SAM(model, torch.optim.SGD, lr=0.1)
    with pytest.raises(TrainingError, match=r"before first_step\(\)"):
        wrapped.take_gradient()


def penalised(parts: int, alpha: float, beta: float) -> Rule:
    """The loss's gradient and beta times the mean over parts of g_i - g_i(w - alpha g_i)."""

    def rule(net: nn.Module, inputs: Tensor, labels: Tensor) -> Gradients:
        total = gradient(net, inputs, labels)
        for x, y in zip(inputs.chunk(parts), labels.chunk(parts), strict=True):
            here = gradient(net, x, y)
            there = at(net, [-alpha * g for g in here], x, y)
            total = [t + beta / parts * (a - b) for t, a, b in zip(total, here, there, strict=True)]
        return total

    return rule


def test_the_fisher_penalty_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    fisher = {"parts": 2, "alpha": 0.01, "beta": 20.0}
    expected = by_hand(penalised(2, 0.01, 20.0))
    found = trained(Small(), tmp_path, flat={"fisher": fisher})
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    # Two micro-batches of one part each are one batch of two.
    sizes = {"per_device_train_batch_size": BATCH // 2, "gradient_accumulation_steps": 2}
    for model in (Small(), Counting()):
        again = trained(model, tmp_path, flat={"fisher": {**fisher, "parts": 1}}, **sizes)
        torch.testing.assert_close(again, found, rtol=1e-9, atol=1e-12)
    assert not torch.equal(found["net.0.weight"], trained(Small(), tmp_path)["net.0.weight"])


def test_the_fisher_penalty_waits_for_its_step_of_the_trainer(tmp_path: Path) -> None:
    fisher = {"parts": 2, "alpha": 0.01, "beta": 20.0, "start_step": 3}
    sizes = {"per_device_train_batch_size": BATCH // 2, "gradient_accumulation_steps": 2}
    first = {"max_steps": 3, "num_train_epochs": 1}
    plain = trained(Small(), tmp_path, **sizes, **first)
    torch.testing.assert_close(trained(Small(), tmp_path, flat={"fisher": fisher}, **sizes, **first), plain)
    later = {"max_steps": 4, "num_train_epochs": 1}
    with_penalty = trained(Small(), tmp_path, flat={"fisher": fisher}, **sizes, **later)
    assert not torch.allclose(
        with_penalty["net.0.weight"], trained(Small(), tmp_path, **sizes, **later)["net.0.weight"]
    )


def test_under_bf16_the_fisher_penalty_keeps_its_digits(tmp_path: Path) -> None:
    def run(beta: float, bf16: bool) -> Tensor:
        fisher = {"parts": 2, "alpha": 1e-4, "beta": beta, "whole": True}
        weights = trained(Small(torch.float32), tmp_path, flat={"fisher": fisher}, bf16=bf16, max_steps=1)
        return torch.cat([weights[key].flatten() for key in sorted(weights)])

    added, exact = (run(1000.0, bf16) - run(0.0, bf16) for bf16 in (True, False))
    assert float((added - exact).norm() / exact.norm()) < 1e-2  # a difference of bfloat16 gradients would be noise


def squared_gradients(net: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """fisher_trace by its definition: the mean over examples of |gradient|^2, with a graph."""
    total = torch.zeros((), dtype=torch.float64)
    for x, y in zip(inputs, labels, strict=True):
        loss = F.cross_entropy(net(x[None]), y[None])
        each = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        total = total + sum(g.square().sum() for g in each)
    return total / len(labels)


def with_squares(smoothing: float = 0.0) -> Rule:
    """The gradient of the loss and a quarter of fisher_trace."""

    def rule(net: nn.Module, inputs: Tensor, labels: Tensor) -> Gradients:
        loss = F.cross_entropy(net(inputs), labels, label_smoothing=smoothing)
        loss = loss + 0.25 * squared_gradients(net, inputs, labels)
        return list(torch.autograd.grad(loss, list(net.parameters())))

    return rule


@pytest.mark.parametrize(
    ("kind", "pieces", "smoothing"), [(Small, 1, 0.0), (Small, 2, 0.0), (Counting, 2, 0.0), (Small, 1, 0.1)]
)
def test_penalties_are_added_to_the_loss_that_is_trained_on(
    kind: type[Small], pieces: int, smoothing: float, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"per_device_train_batch_size": BATCH // pieces, "gradient_accumulation_steps": pieces}
    model = kind()
    trainer = trainer_for(
        *(model, tmp_path), flat={"penalties": {"fisher_trace": 0.25}}, label_smoothing_factor=smoothing, **sizes
    )
    with pytest.warns(MonitorWarning, match="smooths its labels by 0.1") if smoothing else nullcontext():
        trainer.train()
    exact: dict[str, Any] = (
        {"rtol": 1e-9, "atol": 1e-12} if not smoothing else {"rtol": 1e-6, "atol": 1e-8}
    )  # smoothed in float32
    torch.testing.assert_close(dict(model.state_dict()), by_hand(with_squares(smoothing)), **exact)

    # Evaluation knows nothing of it.
    columns = data()
    model.eval()
    loss, outputs = trainer.compute_loss(model, dict(columns), return_outputs=True)
    bare = F.cross_entropy(model.net(columns["inputs"]), columns["labels"], label_smoothing=smoothing)
    torch.testing.assert_close(loss, bare, **exact)
    torch.testing.assert_close(outputs["logits"], model.net(columns["inputs"]))
    model.train()
    more, _ = trainer.compute_loss(model, dict(columns), return_outputs=True)
    added = 0.25 * squared_gradients(model.net, columns["inputs"], columns["labels"])
    torch.testing.assert_close(more, bare + added, **exact)
    assert trainer.evaluate(rows(columns))["eval_loss"] == pytest.approx(float(bare.detach()), rel=1e-6)


def test_penalties_count_as_the_loss_does_where_a_model_ignores_the_number_of_labels(tmp_path: Path) -> None:
    class Ignoring(Small):
        def forward(self, inputs: Tensor, labels: Tensor | None = None, **_: Any) -> dict[str, Tensor]:
            return super().forward(inputs, labels)

    def twice(net: nn.Module, inputs: Tensor, labels: Tensor) -> Gradients:
        return [2 * g for g in with_squares()(net, inputs, labels)]  # the Trainer adds two means

    sizes = {"per_device_train_batch_size": BATCH // 2, "gradient_accumulation_steps": 2}
    found = trained(Ignoring(), tmp_path, flat={"penalties": {"fisher_trace": 0.25}}, **sizes)
    torch.testing.assert_close(found, by_hand(twice), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", ["auto", "loop"])
def test_sam_takes_penalties_along(way: str, tmp_path: Path) -> None:
    flat = {"sam": {"rho": 0.5}, "penalties": {"fisher_trace": {"strength": 0.25, "strategy": way}}}
    found = trained(Small(), tmp_path, flat=flat)
    torch.testing.assert_close(found, by_hand(sam(of=with_squares())), rtol=1e-9, atol=1e-12)


def language() -> tuple[GPT2LMHeadModel, dict[str, Tensor]]:
    torch.manual_seed(0)
    size = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    still = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    model = GPT2LMHeadModel(GPT2Config(**size, **still, bos_token_id=0, eos_token_id=0)).double()
    model.loss_type = "ForCausalLM"  # else the Trainer counts the first label, too, which is not predicted
    ids = torch.randint(11, (EXAMPLES, 6))
    labels = ids.clone()
    for n in range(EXAMPLES):
        labels[n, 1 + n % 5 + 1 :] = -100  # examples of different lengths
    return model, {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize(
    ("flat", "atol"),
    # The model takes its loss in float32: sums over other numbers of tokens are rounded differently.
    [({"sam": {"rho": 0.1}}, 1e-11), ({"fisher": {"beta": 0.0, "parts": 2}}, 1e-7)],
)
def test_a_language_models_tokens_all_weigh_the_same(flat: dict[str, Any], atol: float, tmp_path: Path) -> None:
    def run(pieces: int, flat: dict[str, Any]) -> dict[str, Tensor]:
        model, columns = language()
        sizes = {"per_device_train_batch_size": BATCH // pieces, "gradient_accumulation_steps": pieces}
        return trained(model, tmp_path, columns=columns, flat=flat, num_train_epochs=1, **sizes)

    one = run(1, flat)
    torch.testing.assert_close(run(3, flat), one, rtol=0, atol=atol)
    if "fisher" in flat:  # of strength 0
        torch.testing.assert_close(one, run(1, {}), rtol=0, atol=atol)


def classes(several: bool = False) -> tuple[BertForSequenceClassification, dict[str, Tensor]]:
    torch.manual_seed(0)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    still = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=11, max_position_embeddings=6, num_labels=CLASSES, **size, **still)
    labels = torch.randint(CLASSES, (EXAMPLES,))
    if several:
        labels = F.one_hot(labels, CLASSES).double()
        labels[:, 0] = 1.0
    return BertForSequenceClassification(config).double(), {
        "input_ids": torch.randint(11, (EXAMPLES, 6)),
        "labels": labels,
    }


def ragged() -> tuple[GPT2LMHeadModel, dict[str, Tensor]]:
    model, columns = language()
    model.loss_type = None  # so the Trainer counts labels in another way than the model
    return model, columns


@pytest.mark.parametrize("make", [classes, language, ragged])
def test_a_fisher_penalty_of_no_strength_is_the_plain_trainer(make: Callable[[], Any], tmp_path: Path) -> None:
    def run(flat: dict[str, Any]) -> dict[str, Tensor]:
        model, columns = make()
        sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
        return trained(model, tmp_path, columns=columns, flat=flat, num_train_epochs=1, **sizes)

    # One part of one piece: the same passes with the same random numbers.
    torch.testing.assert_close(run({"fisher": {"beta": 0.0, "parts": 1}}), run({}), rtol=0, atol=1e-7)


def test_a_probe_with_another_loss_than_the_models_own_is_refused_before_the_training(tmp_path: Path) -> None:
    def run(make: Callable[[], Any], probe: dict[str, Tensor] | None = None, **options: Any) -> None:
        model, columns = make()
        watch = FlatnessCallback(
            probe or columns, measures="squared_norm", every=1, cap=None, spectrum=False, **options
        )
        trainer_for(model, tmp_path, columns, callbacks=[watch], max_steps=1).train()
        assert [record.step for record in watch.history] == [1]

    _, columns = language()
    moved = torch.cat([columns["labels"][:, 1:], torch.full((EXAMPLES, 1), -100)], dim=1)
    run(classes)
    run(language, {**columns, "labels": moved})
    run(language)
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel itself.*shifting the labels"):
        run(language, loss=torch.nn.CrossEntropyLoss())
    run(lambda: classes(several=True), loss="bce_with_logits")
    with pytest.raises(ModelError, match=r"BertForSequenceClassification itself.*loss='bce_with_logits'"):
        run(lambda: classes(several=True))


def test_penalties_on_another_loss_than_the_models_own_are_refused(tmp_path: Path) -> None:
    model, columns = language()
    plain = {"strength": 0.1, "loss": torch.nn.CrossEntropyLoss()}
    with pytest.raises(
        TrainingError, match=r"Expected the penalty fisher_trace to use the model's own loss.*by the model itself"
    ):
        trained(model, tmp_path, columns=columns, flat={"penalties": {"fisher_trace": plain}})
    trained(model, tmp_path, columns=columns, flat={"penalties": {"fisher_trace": 0.1}})


def test_a_second_training_keeps_what_was_found_and_a_callback_is_added_once(tmp_path: Path) -> None:
    watch = FlatnessCallback(data(), every=4, cap=None, spectrum=False)
    trainer = trainer_for(Small(), tmp_path, callbacks=[watch], flat={"flatness": watch})
    for _ in range(2):
        trainer.train()
    assert [record.step for record in watch.history] == [4, 8, 4, 8]


def test_the_rate_is_that_of_the_step_just_taken(tmp_path: Path) -> None:
    watch = FlatnessCallback(data(), every=1, cap=None)
    trained(Small(), tmp_path, callbacks=[watch], lr_scheduler_type="linear")
    rates = [record.values["flatness/lr_lambda_max"] / record.values["flatness/lambda_max"] for record in watch.history]
    assert rates == pytest.approx([RATE * (1 - n / 8) for n in range(8)])


def test_reporters_that_fail_do_not_end_a_training_and_errors_close_loggers(tmp_path: Path) -> None:
    class Bad(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "flatness/loss" in logs:
                raise ConnectionError("gone")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 7:
                raise RuntimeError("out of luck")

    closed = []

    class Closes:
        def log(self, values: Any, step: int) -> None:
            pass

        def close(self) -> None:
            closed.append(True)

    flat = {"flatness": {"probe": data(), "every": 2, "cap": None, "spectrum": False, "loggers": Closes()}}
    trainer = trainer_for(Small(), tmp_path, callbacks=[Bad()], flat=flat)
    with pytest.warns(MonitorWarning, match="did not take the values .*gone") as told, pytest.raises(RuntimeError):
        trainer.train()
    assert sum("gone" in str(each.message) for each in told) == 1
    assert [record.step for record in trainer.flatness.history] == [2, 4, 6]
    assert closed


def test_the_callback_measures_after_steps_of_the_optimizer(tmp_path: Path) -> None:
    model, watch = Small(), FlatnessCallback(data(), measures=("hessian_trace", "fisher_trace"), every=2, cap=None)
    trainer = trainer_for(model, tmp_path, callbacks=[watch], gradient_accumulation_steps=2)
    trainer.train()
    assert [record.step for record in watch.history] == [2, 4]
    report = saltflat.measure(model, data(), measures=("hessian_trace", "fisher_trace"))
    told = [entry for entry in trainer.state.log_history if "flatness/hessian_trace" in entry]
    assert [(entry["step"], entry["epoch"]) for entry in told] == [(2, 1.0), (4, 2.0)]
    for name in ("hessian_trace", "fisher_trace"):
        assert told[-1][f"flatness/{name}"] == pytest.approx(report[name].value, rel=1e-9)
    assert told[-1]["flatness/lr_lambda_max"] == pytest.approx(RATE * told[-1]["flatness/lambda_max"], rel=1e-12)


def test_a_training_shorter_than_the_interval_is_measured_at_its_end(tmp_path: Path) -> None:
    model, watch = Small(), FlatnessCallback(data(), every=100, cap=None, spectrum=False)
    trainer = trainer_for(model, tmp_path, callbacks=[watch])
    trainer.train()
    assert [record.step for record in watch.history] == [8]
    (told,) = [entry for entry in trainer.state.log_history if "flatness/hessian_trace" in entry]
    trace = saltflat.measure(model, data(), measures="hessian_trace")["hessian_trace"].value
    assert (told["step"], told["flatness/hessian_trace"]) == (8, pytest.approx(trace, rel=1e-9))


@pytest.mark.parametrize(
    ("flat", "said"),
    [
        ({}, ""),
        ({"sam": True}, "SAM changes"),
        ({"fisher": {"parts": 2}}, "the Fisher penalty changes"),
        ({"penalties": {"fisher_trace": 0.1}}, "a penalty changes"),
    ],
)
def test_where_the_gradient_is_changed_there_is_no_threshold(flat: dict[str, Any], said: str, tmp_path: Path) -> None:
    flatness = {"probe": data(), "every": 8, "cap": None}
    trainer = trainer_for(Small(), tmp_path, flat={**flat, "flatness": flatness})
    trainer.train()
    (record,) = trainer.flatness.history
    assert ("flatness/lr_lambda_max_threshold" in record.values) == (not said)
    assert not said or any(said in note for note in record.notes)
    assert "flatness/lr_lambda_max" in record.values


def test_the_callback_measures_after_epochs_and_changes_nothing(tmp_path: Path) -> None:
    watch = FlatnessCallback(data(), every="1 epoch", cap=None, spectrum=False)
    watched = trained(Small(dropout=0.3, norm=True), tmp_path, callbacks=[watch])
    assert [(record.step, record.epoch) for record in watch.history] == [(4, 1), (8, 2)]
    torch.testing.assert_close(watched, trained(Small(dropout=0.3, norm=True), tmp_path), rtol=0, atol=0)


def test_through_the_mixin_reporters_see_it_and_miss_nothing(tmp_path: Path) -> None:
    told = Printed()
    flat = {"flatness": {"probe": data(), "every": 3, "cap": None, "spectrum": False}, "sam": True}
    trainer = trainer_for(*(Small(), tmp_path), callbacks=[told], flat=flat, logging_strategy="steps", logging_steps=1)
    trainer.train()
    assert [each["step"] for each in told.logs if "loss" in each] == list(range(1, 9))
    assert [each["step"] for each in told.logs if "flatness/hessian_trace" in each] == [3, 6]
    assert sum("flatness/hessian_trace" in entry for entry in trainer.state.log_history) == 2


def test_a_measurement_under_bf16_has_all_the_digits(tmp_path: Path) -> None:
    model, probe = Small(torch.float32), data(torch.float32)
    watch = FlatnessCallback(probe, every=8, cap=None, spectrum=False)
    trained(model, tmp_path, callbacks=[watch], bf16=True)
    copy = Small(torch.float32)
    copy.load_state_dict(model.state_dict())
    exact = saltflat.measure(copy, probe, measures="hessian_trace")["hessian_trace"].value
    assert watch.history[0].values["flatness/hessian_trace"] == pytest.approx(exact, rel=1e-5)
    assert "_original_forward" in vars(model)  # there was something to take off


@pytest.mark.parametrize(
    ("flat", "said"),
    [
        ({"sam": {"rhoo": 0.1}}, "option of sam 'rhoo'.*Try 'rho'"),
        ({"sam": {"kind": "asamm"}}, "kind of sam 'asamm'.*Try 'asam'"),
        ({"sam": {"eta": 0.1}}, "option of sam 'eta'"),
        ({"sam": {"rho": -1.0}}, "rho=-1.0"),
        ({"sam": 0.05}, "Expected a dict .*sam=0.05"),
        ({"fisher": {"parst": 2}}, "option of fisher 'parst'.*Try 'parts'"),
        ({"fisher": {"clip": 1.0}}, "max_grad_norm"),
        ({"fisher": True, "sam": True}, "fisher= and sam="),
        ({"fisher": True, "penalties": {"fisher_trace": 1.0}}, "fisher= and penalties="),
        ({"penalties": {"fisher_tracee": 1.0}}, "Try 'fisher_trace'"),
        ({"penalties": {"fisher_trace": {"strategy": "loop"}}}, "strength"),
        ({"penalties": ["fisher_trace"]}, "strengths"),
        ({"flatness": {"probe": None, "every": "often"}}, "every='often'"),
        ({"flatness": True}, "flatness=True without a probe"),
        ({"flatness": ["hessian_trace"]}, "flatness=list without a probe"),
        ({"flatness": {"every": 2}}, "without a probe"),
        ({"flatness": {"probe": data(), "spectrm": False}}, "Try 'spectrum'"),
    ],
)
def test_what_cannot_be_asked_is_said_before_training(flat: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(SaltflatError, match=f"(?s){said}"):
        trainer_for(Small(), tmp_path, flat=flat)


def test_a_name_that_is_not_known_is_a_lookup_error() -> None:
    with pytest.raises(UnknownNameError):
        Flat(sam={"rhoo": 1.0})


def test_the_mixin_comes_before_the_trainer() -> None:
    with pytest.raises(OptionError, match=r"class Wrong\(FlatTraining, Trainer\)"):

        class Wrong(Trainer, FlatTraining):  # type: ignore[misc]
            pass

    with pytest.raises(OptionError, match="as a mixin"):
        FlatTraining(sam=True)


def test_weights_spread_over_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_for(Small(), tmp_path, flat={"sam": True})
    monkeypatch.setattr(trainer, "is_fsdp_enabled", True)
    with pytest.raises(ModelError, match="whole on every process"):
        trainer._prepare_sam(trainer.model)
    spread = Small()
    vars(spread.net[0].get_parameter("weight"))["ds_id"] = 0  # as DeepSpeed marks what it has cut
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, epoch=0)
    with pytest.raises(ModelError, match=r"whole on every process.*net\.0\.weight"):
        FlatnessCallback(data()).on_train_begin(None, state, None, model=spread)


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install transformers accelerate\."):
        part.import_transformers()


TWO_PROCESSES = """
import os
import conftest
from test_huggingface import *

out = Path(sys.argv[1])
fisher = {"parts": 1, "alpha": 0.01, "beta": 20.0}
for name, flat in {"global": {"sam": {"rho": 0.5}}, "local": {"sam": {"rho": 0.5, "sync": "local"}},
                   "fisher": {"fisher": fisher}}.items():
    model = Small()
    flat["flatness"] = {"probe": data(), "every": 2, "cap": 0.5, "spectrum": False, "clock": lambda: 0.0}
    # Two processes with three micro-batches each: a step sees six examples, one by one.
    trainer = trainer_for(model, out, flat=flat, per_device_train_batch_size=BATCH // 6, gradient_accumulation_steps=3,
                          ddp_backend="gloo")
    trainer.train()
    told = [entry for entry in trainer.state.log_history if "flatness/hessian_trace" in entry]
    found = model.state_dict(), told, len(trainer.flatness.history)
    torch.save(found, out / f"{name}{trainer.args.process_index}.pt")
torch.distributed.barrier()
os._exit(0)  # at the end of an interpreter threads of gloo may abort the process, whatever it has done before
"""


def dealt(net: nn.Module, inputs: Tensor, labels: Tensor, rule: Callable[..., Gradients]) -> Gradients:
    """The mean over two processes, to which examples are dealt in turn."""
    both = [rule(net, inputs[rank::2], labels[rank::2]) for rank in range(2)]
    return [(a + b) / 2 for a, b in zip(*both, strict=True)]


def one_by_one(net: nn.Module, inputs: Tensor, labels: Tensor) -> Gradients:
    return penalised(len(labels), 0.01, 20.0)(net, inputs, labels)


def test_two_processes_step_together_and_know_what_the_first_measured(tmp_path: Path) -> None:
    run_as_two(TWO_PROCESSES, tmp_path, BY_TORCHRUN)
    expected = {
        "global": by_hand(sam()),
        "local": by_hand(lambda net, inputs, labels: dealt(net, inputs, labels, sam())),
        "fisher": by_hand(one_by_one),
    }
    for name, weights in expected.items():
        (first, told, measured), (second, told_too, others) = (
            torch.load(tmp_path / f"{name}{rank}.pt", weights_only=True) for rank in range(2)
        )
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        torch.testing.assert_close(dict(first), weights, rtol=1e-9, atol=1e-12)
        assert told == told_too
        assert (len(told) == measured > 0, others) == (True, 0)
