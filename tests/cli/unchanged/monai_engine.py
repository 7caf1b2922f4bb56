"""An engine of MONAI, with its tensors."""

import torch
from ignite.engine import Events
from meter import STEPS, Meter
from monai.data import DataLoader, Dataset
from monai.engines import SupervisedTrainer
from monai.losses import DiceLoss
from monai.networks.nets import SegResNet
from monai.transforms import EnsureTyped
from monai.utils import set_determinism

if __name__ == "__main__":
    set_determinism(0)
    network, meter = (SegResNet(3, 8, 1, 2, blocks_down=(1, 2, 2), blocks_up=(1, 1)), Meter())
    volumes, masks = torch.randn(4, 1, 24, 24, 24), torch.randint(2, (4, 1, 24, 24, 24))
    samples = [{"image": x, "label": y} for x, y in zip(volumes, masks, strict=True)]
    data = Dataset(samples, EnsureTyped(["image", "label"], track_meta=True))
    trainer = SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=STEPS,
        train_data_loader=DataLoader(data, batch_size=4),
        network=network,
        optimizer=torch.optim.SGD(network.parameters(), 0.01, momentum=0.9),
        loss_function=DiceLoss(to_onehot_y=True, softmax=True),
    )
    trainer.add_event_handler(Events.ITERATION_STARTED, meter.step)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: print("loss", trainer.state.output[0]["loss"])
    )
    trainer.run()
    meter.end()
