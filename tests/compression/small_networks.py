"""Small networks with data on which they are made smaller."""

import torch

torch.set_num_threads(1)  # tiny layers: on a busy machine a second thread is only waited for
VOCABULARY, WIDTH = 50, 32


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tokens(torch.nn.Module):
    """An embedding that is also the head, a parameter of its own, and blocks."""

    def __init__(self, blocks=2):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.position = torch.nn.Parameter(torch.randn(8, WIDTH) / 4)
        self.blocks = torch.nn.ModuleList(Block(WIDTH) for _ in range(blocks))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x) / 4 + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Pictures(torch.nn.Module):
    """Convolutions, norms and a head."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, 3, padding=1, stride=2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
        )  # fmt: skip
        self.head = torch.nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.layers(x))


def token_loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), (batch * 7 % VOCABULARY).flatten())


def picture_loss(model, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y)


def train(model, loss, batches, steps):
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, batches[step % len(batches)]).backward()
        optimizer.step()
    return model


def tokens(steps=40):
    torch.manual_seed(0)
    data = [torch.randint(0, VOCABULARY, (8, 8)) for _ in range(3)]
    return train(Tokens(), token_loss, data, steps), token_loss, data


def pictures(steps=10):
    torch.manual_seed(0)
    data = [(torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))) for _ in range(3)]
    return train(Pictures(), picture_loss, data, steps), picture_loss, data


def encoder_loss(model, batch):
    return (model(batch) - batch.roll(1, 1)).square().mean()


def make_encoder():
    return torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 2)


def encoder(steps=5):
    torch.manual_seed(0)
    data = [torch.randn(4, 6, 32) for _ in range(3)]
    return train(make_encoder(), encoder_loss, data, steps), encoder_loss, data


NETWORKS = {"tokens": Tokens, "pictures": Pictures, "encoder": make_encoder}
