"""From instructions to functions: how operands are read and results written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from tests.ptx.faults import FaultError, UnknownInstructionError
from tests.ptx.parser import Address, Instruction, Kernel, Not, Number, Operand, Register, Symbol, Vector
from tests.ptx.threads import Threads
from tests.ptx.values import TYPES, UNSIGNED, Array, as_bits, bits_of

Action: TypeAlias = Callable[[Threads], None]
Reader: TypeAlias = Callable[[Threads], Array]
Writer: TypeAlias = Callable[[Threads, Array], None]


class Decoder:
    """Decodes one instruction of a kernel."""

    def __init__(self, kernel: Kernel, instruction: Instruction) -> None:
        self.kernel, self.instruction = kernel, instruction
        self.operands, self.modifiers = instruction.operands, instruction.modifiers

    def unknown(self, why: str = "") -> UnknownInstructionError:
        return UnknownInstructionError(f"{self.instruction}{why and ': '}{why}")

    def allow(self, *modifiers: str, types: int = 1) -> None:
        """Refuse modifiers that are not among these, but for the types at the end."""
        others = self.modifiers[: len(self.modifiers) - types]
        strange = [each for each in others if each not in modifiers]
        if strange or len(self.modifiers) < types:
            raise self.unknown(f"modifier {', '.join(strange)}")

    @property
    def type(self) -> str:
        """The last of the modifiers."""
        return self.modifiers[-1]

    def has(self, modifier: str) -> bool:
        return modifier in self.modifiers

    # Operands

    def read(self, operand: Operand | int, kind: str) -> Reader:
        """The bits of an operand; `kind` says how many of them. An integer is a place among the operands."""
        operand = self.operands[operand] if isinstance(operand, int) else operand
        bits = bits_of(kind)
        if isinstance(operand, Not):
            positive = self.read(operand.predicate, kind)
            return lambda threads: ~positive(threads)
        if isinstance(operand, Register):
            return self._register(operand, bits)
        if isinstance(operand, Number):
            return _constant(self._number(operand, bits), bits)
        if isinstance(operand, Symbol):
            return self._symbol(operand, bits)
        raise self.unknown(f"operand {operand}")

    def typed(self, operand: Operand | int, kind: str) -> Reader:
        """The same as numbers of that type."""
        bits, numbers = self.read(operand, kind), TYPES[kind]
        return bits if numbers in UNSIGNED.values() else lambda threads: bits(threads).view(numbers)

    def _register(self, register: Register, bits: int) -> Reader:
        index = register.index
        if register.bits < bits:
            raise self.unknown("a register that is narrower than the operation")

        def read(threads: Threads) -> Array:
            value = threads.registers[index]
            if value is None:
                raise FaultError("reads a register that nobody wrote")
            return value

        if register.bits == bits:
            return read
        narrow = UNSIGNED[bits]
        return lambda threads: read(threads).astype(narrow)

    def _number(self, number: Number, bits: int) -> int:
        if number.bits == 32 and bits == 64:  # a float where the operation has doubles
            return int(np.array(number.value, np.uint32).view(np.float32).astype(np.float64).view(np.uint64))
        if number.bits not in (0, bits):
            raise self.unknown("a floating-point number of another size")
        return number.value

    def _symbol(self, symbol: Symbol, bits: int) -> Reader:
        name = symbol.name
        if name in self.kernel.shared:
            return _constant(self.kernel.shared[name], bits)
        if not name.startswith("%"):
            raise self.unknown(f"operand {name}")
        wide = UNSIGNED[bits]

        def read(threads: Threads) -> Array:
            if name not in threads.special:
                raise self.unknown(f"register {name}")
            return threads.special[name].astype(wide)

        return read

    def predicate(self, operand: Operand | int) -> Reader:
        return self.read(operand, "pred")

    def parts(self, operand: Operand | int) -> tuple[Register | Number | Symbol, ...]:
        """Of a vector, or the one operand that is none."""
        operand = self.operands[operand] if isinstance(operand, int) else operand
        if isinstance(operand, Vector):
            return operand.parts
        assert isinstance(operand, Register | Number | Symbol), self.instruction
        return (operand,)

    def address(self, operand: Operand | int) -> Reader:
        operand = self.operands[operand] if isinstance(operand, int) else operand
        if not isinstance(operand, Address):
            raise self.unknown(f"{operand} is no address")
        bits = operand.base.bits if isinstance(operand.base, Register) else 64
        base, offset = self.read(operand.base, f"u{bits}"), operand.offset
        return lambda threads: base(threads).astype(np.int64) + offset

    # Results

    def write(self, operand: Operand | int, signed: bool = False) -> Writer:
        """Writes bits; those that a wider register has beyond them are zeros or, if signed, the sign."""
        operand = self.operands[operand] if isinstance(operand, int) else operand
        if isinstance(operand, Symbol) and operand.name == "_":
            return lambda threads, value: None
        if not isinstance(operand, Register):
            raise self.unknown(f"{operand} cannot be written")
        register, bits = operand, operand.bits
        if bits == 1:
            return lambda threads, value: threads.put(register, value)
        held = UNSIGNED[bits]

        def write(threads: Threads, value: Array) -> None:
            if value.dtype.itemsize * 8 != bits:
                if value.dtype.itemsize * 8 > bits:
                    raise self.unknown("a result that is wider than its register")
                value = value.view(f"i{value.dtype.itemsize}").astype(f"i{bits // 8}") if signed else value
                value = as_bits(value).astype(held)
            threads.put(register, as_bits(value))

        return write


def _constant(value: int, bits: int) -> Reader:
    if bits == 1:
        held = np.full((1, 1), value != 0)
    else:
        held = np.full((1, 1), value & (2**bits - 1), UNSIGNED[bits])
    return lambda threads: held
