"""Small traces written by hand or at random, and an executor that counts bytes the slow and plain way."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowtide.records import Call, Category, FunctionCall, Op, Phase, SavedTensor, StepTrace, Storage

MB = 1_000_000


@dataclass
class Writer:
    """Writes a trace op by op: ``born`` and ``freed`` are filled in as it goes."""

    ops: list[Op] = field(default_factory=list)
    storages: list[list] = field(default_factory=list)
    saved: list[list] = field(default_factory=list)
    calls: list[list] = field(default_factory=list)
    functions: list[FunctionCall] = field(default_factory=list)
    stack: list[int] = field(default_factory=list)

    def op(self, seconds: float = 1.0, workspace: int = 0, phase: Phase = Phase.FORWARD, reads=(), writes=()) -> int:
        call = self.stack[-1] if self.stack else None
        self.ops.append(Op("op", phase, call, "", seconds, workspace, False, tuple(reads), tuple(writes)))
        return len(self.ops) - 1

    def resident(self, size: int, category: Category = Category.PARAMETER) -> int:
        self.storages.append([size, category, 0, None, True])
        return len(self.storages) - 1

    def new(self, size: int, category: Category = Category.ACTIVATION) -> int:
        """Allocated by the last op."""
        self.storages.append([size, category, len(self.ops) - 1, None, False])
        return len(self.storages) - 1

    def free(self, storage: int) -> None:
        """Naturally gone after the last op."""
        if self.storages[storage][3] is None:
            self.storages[storage][3] = len(self.ops)

    def save(self, storage: int) -> int:
        """By the last op."""
        call = self.stack[-1] if self.stack else None
        self.saved.append([storage, self.storages[storage][0], call, len(self.ops), None, None])
        return len(self.saved) - 1

    def use(self, slot: int) -> None:
        """Backward asks for it before the next op."""
        if self.saved[slot][4] is None:
            self.saved[slot][4] = len(self.ops)

    def release(self, slot: int) -> None:
        """Autograd has let go of it after the last op."""
        self.saved[slot][5] = len(self.ops)

    def function(self, name: str, start: int, *outputs: int) -> None:
        """A function ran the ops since ``start`` and returned these storages."""
        self.functions.append(FunctionCall(name, self.stack[-1], start, len(self.ops), outputs))

    def enter(self, path: str, inputs=()) -> int:
        parent = self.stack[-1] if self.stack else None
        self.calls.append([path, parent, len(self.ops), None, tuple(inputs), ()])
        self.stack.append(len(self.calls) - 1)
        return self.stack[-1]

    def leave(self, outputs=()) -> None:
        call = self.calls[self.stack.pop()]
        call[3], call[5] = len(self.ops), tuple(outputs)

    def trace(self) -> StepTrace:
        n = len(self.ops)
        return StepTrace(
            ops=tuple(self.ops),
            storages=tuple(Storage(s, c, b, n if f is None else f, r) for s, c, b, f, r in self.storages),
            saved=tuple(SavedTensor(s, z, c, p, u, n if r is None else r, "Node", at_end=True) for s, z, c, p, u, r in self.saved),
            calls=tuple(Call(path, "Module", parent, a, b, i, o) for path, parent, a, b, i, o in self.calls),
            fingerprint="f",
            device="cpu",
            functions=tuple(self.functions),
        )


def chain(layers: int, size: int = 10 * MB, seconds: float = 1.0) -> StepTrace:
    """Layers ``0, 1, …`` in a row; each runs one op that saves its input and returns ``size`` bytes.

    Op i is layer i. Backward runs one op a layer, from the last; each makes a gradient of ``size`` bytes
    and frees the one before.
    """
    w = Writer()
    x = w.resident(size, Category.INPUT)
    slots = []
    for i in range(layers):
        w.enter(str(i), [x])
        w.op(seconds, reads=[x])
        y = w.new(size)
        slots.append(w.save(x))
        w.leave([y])
        w.free(x)
        x = y
    w.free(x)
    before = None
    for slot in reversed(slots):
        w.use(slot)
        w.op(seconds, phase=Phase.BACKWARD)
        gradient = w.new(size, Category.TEMPORARY)
        if before is not None:
            w.free(before)
        w.release(slot)
        before = gradient
    w.free(before)
    return w.trace()


def block_chain(blocks: int, inner: int = 3, size: int = 10 * MB, kept: int = 1) -> StepTrace:
    """Blocks ``b0, b1, …`` of ``inner`` ops; each op makes ``size`` bytes and saves its output."""
    w = Writer()
    x = w.resident(size, Category.INPUT)
    slots = []
    for b in range(blocks):
        w.enter(f"b{b}", [x])
        for j in range(inner):
            w.op(1.0, reads=[x])
            y = w.new(size)
            slots.append(w.save(y))
            if j or b:
                w.free(x)
            x = y
        w.leave([x])
    w.free(x)
    before = None
    for slot in reversed(slots):
        w.use(slot)
        w.op(1.0, phase=Phase.BACKWARD)
        gradient = w.new(size, Category.TEMPORARY)
        if before is not None:
            w.free(before)
        w.release(slot)
        before = gradient
    w.free(before)
    return w.trace()


# ------------------------------------------------------------------------------------------------ traces at random


@dataclass
class _Program:
    """A random model and step: nested calls, skips, shared modules, saved tensors of every kind."""

    random: object
    w: Writer = field(default_factory=Writer)
    skips: list[int] = field(default_factory=list)
    tape: list[list[int]] = field(default_factory=list)
    budget: int = 9
    functions: int = 0

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def size(self) -> int:
        return self.random.choice([1, 2, 3, 5, 8])

    def op(self, x: int) -> int:
        start = len(self.w.ops)
        self.w.op(self.random.choice([1.0, 2.0, 3.0]), self.random.choice([0, 0, 0, 4]), reads=[x])
        y = self.w.new(self.size())
        slots = [self.w.save(x)] if self.chance(0.5) else []
        slots += [self.w.save(y)] if self.chance(0.5) else []
        if self.chance(0.2):
            mask = self.w.new(self.size())
            slots.append(self.w.save(mask))
            self.w.free(mask)
        if self.w.stack and len(self.w.functions) < self.functions and self.chance(0.4):
            self.w.function(self.random.choice("fg"), start, y)
        if self.skips and self.chance(0.25):
            slots.append(self.w.save(self.random.choice(self.skips)))
        self.tape.append(slots)
        if self.chance(0.2):
            self.skips.append(x)
        elif x not in self.skips and not self.chance(0.1):
            self.w.free(x)
        return y

    def body(self, shape: list, x: int) -> int:
        for part in shape:
            x = self.op(x) if part is None else self.call(part, x)
        return x

    def call(self, part: tuple, x: int) -> int:
        path, shape = part
        inputs = [x, *([self.random.choice(self.skips)] if self.skips and self.chance(0.3) else [])]
        self.w.enter(path, inputs)
        y = self.body(shape, x)
        self.w.leave([y])
        return y

    def shape(self, path: str, depth: int) -> list:
        parts: list = []
        for i in range(self.random.randint(1 + (not path), 3 + (not path))):
            if self.budget <= 0:
                break
            if depth and self.chance(0.6):
                inner = f"{path}.{i}" if path else str(i)
                parts.append((inner, self.shape(inner, depth - 1)))
            else:
                self.budget -= 1
                parts.append(None)
        return parts

    def backward(self) -> None:
        gradient = None
        for slots in reversed(self.tape):
            used = [s for s in slots if not self.chance(0.05)]
            for slot in used:
                self.w.use(slot)
            if used or self.chance(0.7):
                self.w.op(1.0, self.random.choice([0, 0, 3]), phase=Phase.BACKWARD)
                before, gradient = gradient, self.w.new(self.size(), Category.GRADIENT)
                if before is not None:
                    self.w.free(before)
            for slot in used:
                if not self.chance(0.1):
                    self.w.release(slot)
        self.tape.clear()

    def step(self) -> StepTrace:
        shape = self.shape("", 2)
        shape = [p for p in shape for _ in range(2 if p is not None and self.chance(0.1) else 1)]
        shape = [("", shape)] if self.chance(0.3) else shape
        for _ in range(2 if self.chance(0.15) else 1):
            x = self.w.resident(self.size(), Category.INPUT)
            y = self.body(shape, x)
            if self.chance(0.8):
                self.w.free(y)
            self.backward()
        if not any(op.phase is Phase.BACKWARD for op in self.w.ops):
            self.w.op(1.0, phase=Phase.BACKWARD)
        return self.w.trace()


def random_trace(random: object, ops: int = 9, functions: int = 0) -> StepTrace:
    """Any step of about so many ops, of which at most ``functions`` are calls whose results can be kept."""
    return _Program(random, budget=ops, functions=functions).step()
