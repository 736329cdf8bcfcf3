"""What can go wrong: a program breaks a rule of the machine, or the machine does not know an instruction."""

from __future__ import annotations


class FaultError(Exception):
    """A rule that the program breaks. `where` is filled in by whoever knows the instruction."""

    def __init__(self, what: str, where: str = "") -> None:
        super().__init__(what, where)
        self.what, self.where = what, where

    def __str__(self) -> str:
        return f"{self.what}\n  at {self.where}" if self.where else self.what


class UnknownInstructionError(Exception):
    """An instruction, or a form of one, that the emulator does not have. It guesses nothing."""
