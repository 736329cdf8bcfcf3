"""An emulator of the GPU's virtual machine: it runs the PTX that Triton compiles, and watches what it does.

`parser` reads PTX; `decoder` and `instructions/` make functions of it; `machine` runs them; `threads` are the
registers and masks; `memory` and `tensors` are what threads share, with the checks; `driver` stands behind
Triton's host code in place of a GPU's driver.
"""
