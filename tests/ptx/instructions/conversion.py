"""From one type to another: `cvt`, and addresses of one kind of memory as those of another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.ptx.decoder import Action, Decoder
from tests.ptx.instructions.arithmetic import bits_of_floats, floats_of, is_float
from tests.ptx.threads import Threads
from tests.ptx.values import TYPES, Array, as_bits, flushed, saturated, to_tf32, towards_zero

# To a whole number.
WHOLE: dict[str, Callable[[Array], Array]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}
Conversion = Callable[[Array], Array]  # from bits to bits


def _cvt(decoder: Decoder) -> Action:
    target, source = decoder.modifiers[-2:]
    if target.endswith("x2"):
        return _packed(decoder)
    decoder.allow("rn", "rz", "rna", "ftz", "sat", "satfinite", *WHOLE, types=2)
    if decoder.has("satfinite"):
        raise decoder.unknown("saturation")
    convert = _conversion(decoder, target, source)
    read = decoder.read(1, source)
    write = decoder.write(0, signed=target.startswith("s"))
    return lambda threads: write(threads, convert(read(threads)))


def _conversion(decoder: Decoder, target: str, source: str) -> Conversion:
    if target == "tf32":
        if source != "f32" or not decoder.has("rna"):
            raise decoder.unknown("rounding")
        return to_tf32
    if is_float(source):
        numbers = _rounded_numbers(decoder, source)
        if is_float(target):
            return _to_float(decoder, numbers, target)
        return lambda bits: as_bits(saturated(numbers(bits), TYPES[target]))
    integers = TYPES[source]
    if is_float(target):
        if not decoder.has("rn"):
            raise decoder.unknown("rounding")
        return lambda bits: bits_of_floats(target, bits.view(integers).astype(TYPES[target]))
    if decoder.has("sat"):
        limits = np.iinfo(TYPES[target])
        return lambda bits: as_bits(_clamped(bits.view(integers), limits).astype(TYPES[target]))
    return lambda bits: as_bits(bits.view(integers).astype(TYPES[target]))


def _clamped(values: Array, limits: np.iinfo) -> Array:
    own = np.iinfo(values.dtype)
    return np.clip(values, max(limits.min, own.min), min(limits.max, own.max))


def _rounded_numbers(decoder: Decoder, source: str) -> Conversion:
    """Bits → numbers, whole ones if that is asked for."""
    whole = next((WHOLE[each] for each in decoder.modifiers if each in WHOLE), None)
    flushes = decoder.has("ftz") and source == "f32"

    def numbers(bits: Array) -> Array:
        values = floats_of(source, bits)
        values = flushed(values) if flushes else values
        return values if whole is None else whole(values)

    return numbers


def _to_float(decoder: Decoder, numbers: Conversion, target: str) -> Conversion:
    saturates, flushes = decoder.has("sat"), decoder.has("ftz") and target == "f32"
    if decoder.has("rz") and target == "bf16":
        raise decoder.unknown("rounding")

    def convert(bits: Array) -> Array:
        values = numbers(bits)
        if decoder.has("rz"):
            values = towards_zero(values.astype(np.float64), TYPES[target])
        if saturates:  # NaN becomes 0
            values = np.clip(np.where(np.isnan(values), 0, values), 0, 1)
        if flushes:
            values = flushed(values.astype(np.float32))
        return bits_of_floats(target, values)

    return convert


def _packed(decoder: Decoder) -> Action:
    """Two numbers of float32 in one register, the first one in the upper half."""
    decoder.allow("rn", types=2)
    target = decoder.modifiers[-2].removesuffix("x2")
    if decoder.type != "f32" or not decoder.has("rn"):
        raise decoder.unknown("conversion")
    high, low, write = decoder.read(1, "f32"), decoder.read(2, "f32"), decoder.write(0)

    def run(threads: Threads) -> None:
        upper, lower = (
            bits_of_floats(target, floats_of("f32", read(threads))).astype(np.uint32) for read in (high, low)
        )
        write(threads, upper << np.uint32(16) | lower)

    return run


def _cvta(decoder: Decoder) -> Action:
    """Here addresses are the same in whatever way they are said: the instruction names the space."""
    decoder.allow("to", "global", "shared")
    read, write = decoder.read(1, decoder.type), decoder.write(0)
    return lambda threads: write(threads, read(threads))


FAMILY: dict[str, Callable[[Decoder], Action]] = {"cvt": _cvt, "cvta": _cvta}
