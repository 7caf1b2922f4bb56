"""`ucudnn.frameworks.follow`: trainers in micro-batches train as on the whole batch."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ucudnn.config import Config
from ucudnn.errors import ConfigError
from ucudnn.execution.compiling import is_compiled
from ucudnn.frameworks import follow
from ucudnn.outcomes import Origin

BATCH, LEFT, IGNORED = 8, 5, -100
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        *("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
    ),
]


def network() -> nn.Module:
    """Its samples do not depend on each other."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Two batches, of which the second is smaller; some labels do not count."""
    torch.manual_seed(1)
    labels = torch.randint(4, (BATCH + LEFT,))
    labels[::3] = IGNORED
    return torch.randn(BATCH + LEFT, 3, 8, 8), labels


def counted(batch: Any) -> int:
    """Samples whose label counts."""
    labels = batch["labels"] if isinstance(batch, dict) else batch[1]
    return int((labels != IGNORED).sum())


@pytest.fixture
def plan(random_plan: Any) -> Any:
    """A plan with a loop over 3 samples."""
    found = random_plan(network(), torch.empty(BATCH, 3, 8, 8), random.Random(0))
    return replace(found, micro_batch=3)


def by_hand(accumulated: int = 1) -> dict[str, torch.Tensor]:
    """The weights after one epoch of plain torch on whole batches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [[one[:BATCH] for one in data()], [one[BATCH:] for one in data()]]
    for number, (images, labels) in enumerate(batches, 1):
        (cross_entropy(model(images), labels) / accumulated).backward()
        if number % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()
    return dict(model.state_dict())


def fitted(plan: Any, accumulated: int = 1) -> tuple[Any, list[tuple[int, bool]]]:
    """Lightning's trainer after one epoch, and of each step, its samples and if it is compiled."""
    lightning = pytest.importorskip("pytorch_lightning", reason="the extra `test` brings it")
    steps = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: Any, index: int) -> Any:
            steps.append((len(batch[0]), is_compiled(self.network)))
            loss = cross_entropy(self.network(batch[0]), batch[1])
            return loss if index else {"loss": loss}

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = dict.fromkeys(
        ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
    )
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", accumulate_grad_batches=accumulated, **quiet
    )
    follow(trainer, plan, counted)
    module = Module()
    trainer.fit(module, DataLoader(TensorDataset(*data()), BATCH))
    expected = by_hand(accumulated)
    for name, one in module.network.state_dict().items():
        torch.testing.assert_close(one, expected[name], rtol=1e-5, atol=1e-6)
    return trainer, steps


@pytest.mark.parametrize("accumulated", [1, 2])
def test_lightning(plan: Any, accumulated: int) -> None:
    trainer, steps = fitted(plan, accumulated)
    assert steps == [(size, False) for size in (3, 3, 2, 3, 2)]
    assert trainer.global_step == 2 // accumulated


def test_lightning_compiles_the_network_of_a_plan_that_only_compiles(
    plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", aot_eager_decomp_partition)
    compiles = replace(
        plan,
        kernels=(),
        segments=(),
        micro_batch=None,
        config=Config(),
        compiled=0.5,
        origin=Origin("Sequential"),
    )
    _, steps = fitted(compiles)
    assert steps == [(BATCH, True), (LEFT, True)]


def trainer_of(model: nn.Module, samples: list[dict[str, Any]], folder: Any) -> Any:
    """A trainer of Transformers that takes the samples in their order, by plain SGD."""
    transformers = pytest.importorskip("transformers", reason="the extra `test` brings it")
    settings = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, settings, train_dataset=samples)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(samples)
    return trainer


def test_transformers(plan: Any, tmp_path: Any) -> None:
    sizes = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, images: Any, labels: Any) -> Any:
            sizes.append(len(images))
            scores = self.network(images)
            return {"loss": cross_entropy(scores, labels), "logits": scores}

    samples = [{"images": x, "labels": y} for x, y in zip(*data(), strict=True)]
    model = Model()
    trainer = trainer_of(model, samples, tmp_path)
    follow(trainer, plan, counted)
    trainer.train()
    assert sizes == [3, 3, 2, 3, 2]
    assert trainer.state.global_step == 2
    expected = by_hand()
    for name, one in model.network.state_dict().items():
        torch.testing.assert_close(one, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("divides", [True, False])
def test_a_loss_may_be_divided_by_the_items_of_the_batch(
    plan: Any, tmp_path: Any, divides: bool
) -> None:
    """Transformers gives their number to every model that takes more arguments."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, images: Any, labels: Any, **kwargs: Any) -> Any:
            scores = self.network(images)
            if divides:
                total = cross_entropy(scores, labels, reduction="sum")
                return {"loss": total / kwargs["num_items_in_batch"]}
            return {"loss": cross_entropy(scores, labels)}

    images, labels = data()
    labels = labels.clamp(0)  # all count, so the mean is over samples
    samples = [{"images": x, "labels": y} for x, y in zip(images, labels, strict=True)]
    found = []
    for is_divided in (False, True):
        trainer = trainer_of(Model(), samples, tmp_path)
        if is_divided:
            follow(trainer, plan)
        trainer.train()
        found.append(trainer.model.network.state_dict())
    for name, one in found[0].items():
        torch.testing.assert_close(found[1][name], one, rtol=1e-5, atol=1e-6)


def test_a_trainer_of_another_model_is_refused(plan: Any, tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra `test` brings it")
    settings = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = transformers.Trainer(nn.Linear(2, 2), settings)
    with pytest.raises(ConfigError, match="the plan must be of Linear or of a module in it"):
        follow(trainer, plan)


def test_a_model_is_compiled_once(plan: Any, tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra `test` brings it")
    settings = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = transformers.Trainer(network(), settings)
    settings.torch_compile = True
    with pytest.raises(ConfigError, match="leave out torch_compile=True"):
        follow(trainer, replace(plan, compiled=0.5))
