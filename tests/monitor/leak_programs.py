"""Programs that lose memory, each in one line that ends in `# LEAK`, and programs that only look as if they did.

They know nothing of Outsize. Who runs them sets `STEPS`, and `pause`, which ends a step; those with torch end one with their
optimizer.
"""

import textwrap

from blind_programs import SECOND_CLEAN, SECOND_LEAKS, TESTED

_TORCH = """
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def batch():
    return torch.randn(64, 256), torch.randint(0, 10, (64,))
"""

_LEAKS = {
    "losses with graphs": _TORCH
    + """
losses = []
for step in range(STEPS):
    x, y = batch()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
    losses.append(loss)  # LEAK
    pause()
""",
    "a running sum with its graph": _TORCH
    + """
def train():
    total = 0.0
    for step in range(STEPS):
        x, y = batch()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
        total = total + loss  # LEAK
        pause()
train()
""",
    "hooks": _TORCH
    + """
def watch_activations(module, kept):
    def hook(module, inputs, output):
        kept.append(len(output))
    module.register_forward_hook(hook)  # LEAK
for step in range(STEPS):
    x, y = batch()
    watch_activations(model[0], [0] * 20000)
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    pause()
""",
    "a dict cache": """
import numpy as np
cache = {}
def features(key):
    if key not in cache:
        cache[key] = np.full(8192, key, dtype=np.float64)  # LEAK
    return cache[key]
for step in range(STEPS):
    features(step).sum()
    pause()
""",
    "an lru_cache without end": """
import functools
import numpy as np
@functools.lru_cache(maxsize=None)
def table(size, seed):
    return np.random.default_rng(seed).random(size)
for step in range(STEPS):
    table(8192, step).sum()  # LEAK
    pause()
""",
    "a list of arrays": """
import numpy as np
outputs = []
def evaluate(step):
    prediction = np.ones((64, 128)) * step
    outputs.append(prediction)  # LEAK
    return prediction.mean()
for step in range(STEPS):
    evaluate(step)
    pause()
""",
    "an attribute": """
import numpy as np
class Trainer:
    def __init__(self):
        self.history = []
    def step(self, number):
        output = np.full(8192, float(number))
        self.history.append({"number": number, "output": output})  # LEAK
def main():
    trainer = Trainer()
    for number in range(STEPS):
        trainer.step(number)
        pause()
main()
""",
    "closures": """
import numpy as np
class Bus:
    def __init__(self):
        self.listeners = []
    def subscribe(self, function):
        self.listeners.append(function)  # LEAK
bus = Bus()
def step(number):
    data = np.full(8192, float(number))
    bus.subscribe(lambda: data.sum())
for number in range(STEPS):
    step(number)
    pause()
""",
    "tracebacks": """
import numpy as np
errors = []
def work(number):
    data = np.full(8192, float(number))
    if data[0] >= 0:
        raise ValueError(f"step {number}")
for number in range(STEPS):
    try:
        work(number)
    except ValueError as error:
        errors.append(error)  # LEAK
    pause()
""",
    "threads": """
import threading
import numpy as np
never = threading.Event()
def wait_for(data):
    never.wait()
for number in range(STEPS):
    threading.Thread(target=wait_for, args=(np.full(8192, 1.0),), daemon=True).start()  # LEAK
    pause()
""",
    "cycles with the collector off": """
import gc
import numpy as np
gc.disable()
class Node:
    def __init__(self, number):
        self.data = np.full(8192, float(number))  # LEAK
        self.itself = self
for number in range(STEPS):
    Node(number)
    pause()
""",
    "an array that is appended to": """
import numpy as np
def collect():
    kept = np.zeros(0)
    for number in range(STEPS):
        kept = np.append(kept, np.full(8192, float(number)))  # LEAK
        pause()
collect()
""",
    "a queue that nobody empties": """
import queue
import numpy as np
class Pipeline:
    def __init__(self):
        self.waiting = queue.Queue()
pipeline = Pipeline()
def produce(number):
    pipeline.waiting.put(np.full(8192, float(number)))  # LEAK
for number in range(STEPS):
    produce(number)
    pause()
""",
    "a C library's memory": """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def decode(number):
    handle = libc.malloc(ctypes.c_size_t(65536))  # LEAK
    ctypes.memset(handle, number % 256, 65536)
for number in range(STEPS):
    decode(number)
    sum(range(20000))
    pause()
""",
    "shared memory": """
from multiprocessing import shared_memory, resource_tracker
def send(number):
    block = shared_memory.SharedMemory(create=True, size=65536)  # LEAK
    block.buf[:8] = bytes(8)
    block.close()
    made.append(block.name)
made = []
for number in range(STEPS):
    send(number)
    pause()
for name in made:
    block = shared_memory.SharedMemory(name=name)
    block.close()
    block.unlink()
""",
    "parts of a model": _TORCH
    + """
layers = torch.nn.ModuleList()
for step in range(STEPS):
    x, y = batch()
    layers.append(torch.nn.Linear(64, 64))  # LEAK
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    pause()
""",
    "log lines": """
class Logger:
    lines = ""
    def write(self, text):
        Logger.lines += text  # LEAK
logger = Logger()
for number in range(STEPS):
    logger.write("x" * 40000)
    pause()
""",
}

_CARD = {
    "losses on a card": """
import torch
weights = torch.ones(256, 1024, device="meta", requires_grad=True)
losses = []
for number in range(STEPS):
    losses.append(((weights * 2).sum(), bytes(9000)))  # LEAK
    take(1 << 20)
    pause()
""",
    "predictions on a card": """
import torch
class Results:
    def __init__(self):
        self.kept = {}
results = Results()
texts = []
for number in range(STEPS):
    results.kept[number] = torch.empty(256, 1024, device="meta")  # LEAK
    texts.append(bytes(40000))
    take(1 << 20)
    pause()
""",
    "a state on a card that is never detached": """
import torch
cell = torch.nn.GRUCell(32, 64, device="meta")
hidden = torch.zeros(16, 64, device="meta")
for number in range(STEPS):
    hidden = cell(torch.empty(16, 32, device="meta"), hidden)  # LEAK
    take(1 << 20)
    pause()
""",
}
"""Programs that lose memory of a card, whose tensors are without contents; the host grows beside it."""

_CLEAN = {
    "warm-up": """
import numpy as np
tables = [np.ones(65536) for _ in range(40)]
workspace = {}
for number in range(STEPS):
    if number < 12:
        workspace[number] = np.ones(65536)
    work = np.ones(65536) * number
    pause()
""",
    "growing page cache": """
import os, tempfile
with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
    for number in range(STEPS):
        with open(os.path.join(folder, str(number)), "wb") as file:
            file.write(bytes(300_000))
        pause()
""",
    "fragmentation": """
import random
rng = random.Random(0)
kept = [bytearray(rng.randrange(1000, 60000)) for _ in range(2000)]
for number in range(STEPS):
    for _ in range(20):
        kept[rng.randrange(len(kept))] = bytearray(rng.randrange(1000, 60000))
    pause()
""",
    "a pool of buffers": """
import numpy as np
import random
rng = random.Random(0)
free = []
for number in range(STEPS):
    taken = [free.pop() if free else np.empty(16384) for _ in range(rng.randrange(1, 12))]
    free.extend(taken)
    pause()
""",
    "gradient accumulation": _TORCH
    + """
for step in range(STEPS):
    x, y = batch()
    loss = torch.nn.functional.cross_entropy(model(x), y) / 4
    loss.backward()
    if step % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
    pause()
""",
    "evaluation phases": _TORCH
    + """
for step in range(STEPS):
    x, y = batch()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 24:
        with torch.no_grad():
            predictions = [model(batch()[0]) for _ in range(20)]
        best = torch.cat(predictions).mean().item()
    pause()
""",
    "lazily built cache that is bounded": """
import functools
import numpy as np
@functools.lru_cache(maxsize=400)
def table(number):
    return np.full(4096, float(number))
for number in range(STEPS):
    table(number)
    pause()
""",
    "a cache that fills up": """
import numpy as np
import random
rng = random.Random(1)
cache = {}
for number in range(STEPS):
    length = rng.randrange(30)
    if length not in cache:
        cache[length] = np.ones(8192)
    pause()
""",
    "variable sequence length": _TORCH
    + """
import random
rng = random.Random(0)
for step in range(STEPS):
    x = torch.randn(rng.randrange(8, 256), 256)
    loss = model(x).square().mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    pause()
""",
    "a history of numbers": _TORCH
    + """
history = []
for step in range(STEPS):
    x, y = batch()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
    pause()
""",
    "a ring of old batches": """
import collections
import numpy as np
recent = collections.deque(maxlen=300)
for number in range(STEPS):
    recent.append(np.full(8192, float(number)))
    pause()
""",
    "cycles that wait for the collector": """
import numpy as np
class Node:
    def __init__(self, number):
        self.data = np.full(4096, float(number))
        self.itself = self
for number in range(STEPS):
    Node(number)
    pause()
""",
    "epochs that start over": """
import numpy as np
seen = []
for number in range(STEPS):
    seen.append(np.full(8192, float(number)))
    if number % 15 == 14:
        seen.clear()
    pause()
""",
    "an optimizer with state": _TORCH.replace("torch.optim.SGD", "torch.optim.AdamW")
    + """
for step in range(STEPS):
    x, y = batch()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    pause()
""",
}


_BLIND_LEAKS = {
    "handlers of a logger": """
import logging
logger = logging.getLogger("train")
class Keeper(logging.Handler):
    def __init__(self):
        super().__init__()
        self.buffer = bytearray(40000)
def step(number):
    logger.addHandler(Keeper())  # LEAK
for number in range(STEPS):
    step(number)
    pause()
""",
    "lists in a defaultdict": """
import collections
import numpy as np
by_class = collections.defaultdict(list)
for number in range(STEPS):
    by_class[number % 3].append(np.full(8192, float(number)))  # LEAK
    pause()
""",
    "a registry in a class": """
class Model:
    instances = []
    def __init__(self, number):
        self.weights = bytearray(60000)
        Model.instances.append(self)  # LEAK
def search():
    for number in range(STEPS):
        Model(number)
        pause()
search()
""",
    "a state that is never detached": """
import torch
torch.set_num_threads(1)
cell = torch.nn.GRUCell(32, 64)
hidden = torch.zeros(16, 64)
for number in range(STEPS):
    hidden = cell(torch.randn(16, 32), hidden)  # LEAK
    pause()
""",
    "a cached method": """
import functools
class Loader:
    @functools.cache
    def decode(self, key):
        return bytearray(60000)
loader = Loader()
for number in range(STEPS):
    loader.decode(f"key {number}")  # LEAK
    pause()
""",
    "a linked list": """
class Node:
    def __init__(self, data, before):
        self.data, self.before = data, before
last = None
def remember(number):
    global last
    last = Node(bytearray(60000), last)  # LEAK
for number in range(STEPS):
    remember(number)
    pause()
""",
    "a buffer in memory": """
import io
buffer = io.BytesIO()
def save(number):
    buffer.write(bytes(60000))  # LEAK
for number in range(STEPS):
    save(number)
    pause()
""",
    "a leak in each epoch": """
import numpy as np
checkpoints = {}
def end_epoch(number):
    checkpoints[f"epoch {number}"] = np.ones(2**17)  # LEAK
for number in range(STEPS):
    if number % 10 == 9:
        end_epoch(number // 10)
    pause()
""",
    "a set of tuples": """
seen = set()
def note(number):
    seen.add((number, "x" * 50000 + str(number)))  # LEAK
for number in range(STEPS):
    note(number)
    pause()
""",
    "generators that are never finished": """
def rows(number):
    block = bytearray(60000)
    yield number
    yield block
streams = []
for number in range(STEPS):
    stream = rows(number)
    next(stream)
    streams.append(stream)  # LEAK
    pause()
""",
}

_BLIND_CLEAN = {
    "a replay buffer at its capacity": """
import random
import numpy as np
rng = random.Random(0)
buffer = [np.zeros(rng.randrange(1, 8192)) for _ in range(300)]
for number in range(STEPS):
    buffer[number % 300] = np.zeros(rng.randrange(1, 8192))
    pause()
""",
    "a text that is flushed": """
import io
text = io.StringIO()
for number in range(STEPS):
    text.write("x" * 20000)
    if number % 40 == 39:
        text.seek(0)
        text.truncate()
    pause()
""",
    "a slow saw": """
import numpy as np
window = []
for number in range(STEPS):
    window.append(np.ones(8192))
    if len(window) == 70:
        del window[:60]
    pause()
""",
    "batches of many sizes that stay until the next": """
import random
import numpy as np
rng = random.Random(2)
class Loop:
    batch = None
loop = Loop()
for number in range(STEPS):
    loop.batch = np.ones(int(rng.lognormvariate(12, 0.7)))
    pause()
""",
    "a list that is filled before the loop ends early": """
import numpy as np
prefetched = []
for number in range(STEPS):
    if number < STEPS // 8:
        prefetched.append(np.ones(8192))
    pause()
""",
}


def _prepare(code):
    return textwrap.dedent(code).strip() + "\n"


def _tested(programs):
    return {name: code for name, code in programs.items() if name in TESTED}


LEAKS = {name: _prepare(code) for name, code in (_LEAKS | _tested(SECOND_LEAKS)).items()}
CARD = {name: _prepare(code) for name, code in _CARD.items()}
CLEAN = {name: _prepare(code) for name, code in (_CLEAN | _tested(SECOND_CLEAN)).items()}
BLIND_LEAKS = {name: _prepare(code) for name, code in (_BLIND_LEAKS | SECOND_LEAKS).items()}
"""Written when the search was done, and tried once; only the benchmark runs them, but for a few."""
BLIND_CLEAN = {name: _prepare(code) for name, code in (_BLIND_CLEAN | SECOND_CLEAN).items()}


def leaking_line(code):
    """Number of the line that is marked."""
    return next(number for number, line in enumerate(code.splitlines(), 1) if "# LEAK" in line)
