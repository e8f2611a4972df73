"""Networks, optimizers and runners with tiny rings, for the tests of hosted steps."""

import dataclasses

import networks as nets
import torch
from torch import nn

from outsize.model.fitting.choice import UPDATES, Choice
from outsize.model.fitting.move.pinned_blocks import State, Weights, state_bytes
from outsize.model.fitting.move.scratch_file import FileMover, ScratchFile
from outsize.model.fitting.move.units import cut_model, sizeof
from outsize.model.fitting.move.visits import HostSource
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.run.hosted import open_hosted
from outsize.model.fitting.run.runner import Work


class Recurrent(nn.Module):
    """A recurrent layer, whose weights are kept in a list too, and a parameter of its own."""

    def __init__(self, width=16):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.layer = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 5)

    def forward(self, image):
        return self.head(self.layer(image.flatten(1, 2)[..., :16] * self.scale)[0].mean(1))


def freeze_some(model):
    """The model with its second block and every bias of the last frozen."""
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.bias.requires_grad_(False)
    return model


NETS = {
    "language": (lambda: nets.Language(), nets.language_loss, nets.make_tokens),
    "shared": (lambda: nets.Language(shared=True), nets.language_loss, nets.make_tokens),
    "dropout": (lambda: nets.Language(dropout=0.2), nets.language_loss, nets.make_tokens),
    "frozen": (lambda: freeze_some(nets.Language()), nets.language_loss, nets.make_tokens),
    "vision": (lambda: nets.Vision(), nets.vision_loss, nets.make_images),
    "batch norm": (lambda: nets.Vision(norm="batch"), nets.vision_loss, nets.make_images),
    "patches": (lambda: nets.Patches(), nets.vision_loss, nets.make_images),
    "recurrent": (lambda: Recurrent(), nets.vision_loss, nets.make_images),
}
OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, 1e-3, weight_decay=0.1),
    "SGD": lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9),
    "plain SGD": lambda ps: torch.optim.SGD(ps, 0.05),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, 0.01),
    **({"Adafactor": lambda ps: torch.optim.Adafactor(ps, 0.01)} if hasattr(torch.optim, "Adafactor") else {}),
}


def open_runner(
    model, loss, optimizer, batch, lane, *, clip=None, scaler=None, later=False, disk=None, folder=None, **options
):
    """A runner with the smallest rings that a choice allows; `disk`: what is in a scratch file in `folder`, by kind."""
    work = Work(model=model, loss=loss, optimizer=optimizer, clip=clip, scaler=scaler)
    names = {"limit": "unit_bytes", "inputs": "inputs_away"}
    options = UPDATES[options.pop("update")] | {names.get(name, name): value for name, value in options.items()}
    if disk is not None:
        options |= {"disk": disk, "transfer_bytes": 8192}
    stage = Stage(work, batch, device=lane.device)
    layout = stage.layout()
    choice = Choice(small_bytes=4096, **options)
    held, order, written = (), list(cut_model(model, choice.unit_bytes).units), {}
    for _ in range(4):
        cut = cut_model(model, choice.unit_bytes, held, order)
        ring = 2 * cut.largest
        state = max([3 * 2**14, *(state_bytes(shapes) for shapes in layout.values())])
        if choice.update == "host":
            state = 2 * max(sizeof(p) + 512 for p in model.parameters())
        choice = Choice(ring=ring, small_bytes=4096, state_ring=state, held=held, **options)
        sketch = stage.project(choice, work=dataclasses.replace(work, written=written), layout=layout, order=order)
        known = (held, order, written)
        held, order, written = tuple(dict.fromkeys((*held, *sketch.outside))), list(sketch.order), sketch.written
        if known == (held, order, written):
            break
    cut = cut_model(model, choice.unit_bytes, held, order)
    work.written = written
    shelf, filed = None, {"state": set(), "weights": set()}
    if disk is not None:
        shelf = ScratchFile(str(folder), 8192)
        sizes = {"state": lambda p: state_bytes(layout.get(id(p), [])), "weights": sizeof, "gradients": sizeof}
        filed = {
            kind: {id(place.parameter) for place in cut.places() if place.name in disk.get(kind, ())} for kind in sizes
        }
        known = {id(place.parameter): place.parameter for place in cut.places()}
        shelf.reserve({(kind, key): sizes[kind](known[key]) for kind, keys in filed.items() for key in keys})
        lane = FileMover(lane, shelf)
    weights = Weights(cut, None, filed["weights"], shelf)
    state = State(cut, layout, filed["state"], shelf) if choice.update == "card" or later else None
    source = HostSource(weights, lane)
    return open_hosted(work, choice, cut, lane, source, order, weights=weights, state=state, scratch=shelf), sketch
