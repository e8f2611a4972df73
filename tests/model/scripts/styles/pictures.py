"""Pictures in the style of a tutorial: argparse, loaders with workers, an epoch of training, then an evaluation, then a file."""

import argparse
import logging
import os
import pathlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, index):
        return torch.rand(1, 28, 28), index % 10


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(torch.flatten(x, 1)))), dim=1)


def train(args, model, device, loader, optimizer, epoch):
    model.train()
    for number, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if number % 10 == 0:
            print(f"Train Epoch: {epoch} [{number * len(data)}/{len(loader.dataset)}] Loss: {loss.item():.6f}")


def test(model, device, loader):
    model.eval()
    lost = correct = 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            lost += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1).eq(target).sum().item()
    logging.warning("Accuracy: %d/%d", correct, len(loader.dataset))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--batch-size", type=int, default=40)
    parser.add_argument("--save-model", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given = {"num_workers": 2, "pin_memory": True} if device.type == "cuda" else {}
    train_loader = DataLoader(Pictures(), batch_size=args.batch_size, shuffle=True, **given)
    test_loader = DataLoader(Pictures(), batch_size=60, **given)
    model = Net().to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(args.epochs):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()
        if args.save_model:
            os.makedirs("saved", exist_ok=True)
            torch.save(model.state_dict(), "saved/pictures.pt")
            model.load_state_dict(torch.load("saved/pictures.pt", map_location=device))
            with open("saved/log.txt", "a") as log:
                log.write(f"{epoch} {os.listdir('saved')}\n")
            print(pathlib.Path("saved/log.txt").read_text())


if __name__ == "__main__":
    main()
