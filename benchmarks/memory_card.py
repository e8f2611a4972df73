"""What `outsize memory` says on a machine with a card, while another process holds part of it.

    python benchmarks/memory_card.py [result.txt]

A child takes 2 GiB of card 0 and waits; the reading must name the card, its total and free bytes, and the child's pid with
what it holds. Prints the screen and whether each of these is there; needs torch with CUDA and nvidia-ml-py.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

import outsize

HOLD = """
import sys, torch
x = torch.zeros(2 * 2**30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print(*torch.cuda.mem_get_info(), torch.cuda.get_device_name(), sep="|", flush=True)
sys.stdin.read()
"""


def main() -> int:
    child = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    free, total, name = child.stdout.readline().strip().split("|")
    reading = outsize.memory()
    child.communicate("")
    card = reading.devices[0]
    holder = next((holder for holder in card.holders if holder.pid == child.pid), None)
    checks = {
        f"the card is named: {card.name}": card.name == name,
        f"total {card.total:,} is torch's {int(total):,} and the driver's share": 0
        <= card.total - int(total)
        < card.total // 50,
        f"available {card.available:,} is torch's free {int(free):,} within 64 MiB": abs(card.available - int(free))
        < 2**26,
        f"the holder {child.pid} is found with {holder.bytes if holder else None} bytes": holder is not None
        and (holder.bytes or 0) >= 2 * 2**30,
    }
    text = "\n".join([str(reading), "", *(f"{'ok' if good else 'WRONG'}: {what}" for what, good in checks.items())])
    print(text)
    if len(sys.argv) > 1:
        pathlib.Path(sys.argv[1]).write_text(text + "\n")
    return 0 if all(checks.values()) else 1


sys.exit(main())
