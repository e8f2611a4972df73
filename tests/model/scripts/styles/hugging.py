"""A Trainer of transformers with a model from a configuration."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(0, 500, (32,))
        return {"input_ids": ids, "labels": ids}


model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=500, n_positions=64))
args = TrainingArguments(
    output_dir="trained", per_device_train_batch_size=8, num_train_epochs=10, bf16=True, report_to=[], logging_steps=1,
    dataloader_num_workers=2,
)  # fmt: skip
Trainer(model=model, args=args, train_dataset=Rows()).train()
