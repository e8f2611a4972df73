"""Every private part of torch that Outsize uses, behind names of our own.

In: torch, from the oldest version that works (`parts.FLOOR`) to the newest. Out: functions and classes that the rest of the
package calls. Torch may move or drop a private part in any version. So each is looked for when it is first used. If it
is missing, an `OutsizeError` names the version. No other module of the package calls a private part of torch or replaces one.

- `parts`: finds a private part of torch, and says which versions work.
- `dispatch`: modes, dispatch keys, operators, autograd's engine.
- `objects`: what tensors, modules, optimizers and the allocator keep under private names.
- `patches`: what is replaced in torch for a time.
- `fake_cuda`: `torch.cuda` and `torch.accelerator` of a card that is not there.
"""
