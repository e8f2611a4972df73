"""Examples under every verb's --help: lines that can be typed as they stand, with your own file names."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "compute": (
        'outsize compute "(x - x.mean(axis=0)) / x.std(axis=0)" --in x=x.npy --out z.npy --budget 1GiB',
        'outsize compute "a @ b" --in a=a.npy --in b=b.npy --out c.npy --plan',
        'outsize compute "m = x.mean(axis=0)" "z = x - m" --in x=x.npy --out m=m.npy --out z=z.npy --explain',
    ),
    "shrink": (
        "outsize shrink train:make --to 50% --plan",
        "outsize shrink train:make small.safetensors --to 25% --within 0.05",
    ),
    "convert": (
        "outsize convert x.npy y.zarr --dtype float16",
        "outsize convert x.npy --dtype float16 --check",
        "outsize convert x.bin x.npy --shape 1000,512 --raw-dtype float32",
    ),
    "decompose": (
        "outsize decompose x.npy x.tucker --error 0.01 --budget 512MiB",
        "outsize decompose x.npy --plan",
    ),
    "show": ("outsize show x.npy", "outsize show model.safetensors --json"),
    "memory": ("outsize memory", "outsize memory --json"),
    "size": (
        "outsize size 1,256,1024,1021",
        "outsize size 3075200,512 --dtype float16 --budget 4GiB",
        "outsize size 4096,4096 --optimizer adamw --card rtx4090",
        "outsize size x.npy",
    ),
    "estimate": (
        "outsize estimate --card rtx4090 train.py --epochs 1",
        "outsize estimate train:make --batch 32 --card h100",
        "outsize estimate --hf config.json --batch 8 --seq 2048 --card 3090",
    ),
    "explain": (
        'outsize explain "CUDA out of memory. Tried to allocate 20.00 MiB"',
        "outsize explain error.txt",
        "outsize explain oom.pickle",
        "python train.py 2>&1 | outsize explain -",
    ),
    "run": ("outsize run train.py --epochs 3", "outsize run --watch train.py", "outsize run -m mypackage.train"),
    "report": ("outsize report oom.pickle", "outsize report answer.json"),
    "watch": ("outsize watch", "outsize watch -- train.py", "outsize watch --record run.watch -- train.py"),
    "tour": ("outsize tour",),
    "completion": ('eval "$(outsize completion bash)"', "outsize completion fish > ~/.config/fish/completions/outsize.fish"),
}  # fmt: skip
"""Verb -> lines to type."""


def show_examples(verb: str) -> str:
    """The end of a verb's help."""
    lines = EXAMPLES.get(verb, ())
    return "\n".join(["examples:", *(f"  {line}" for line in lines)]) if lines else ""
