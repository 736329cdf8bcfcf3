"""Instructions against values worked by hand, most of them from the tables of the PTX ISA."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from tests.ptx.faults import UnknownInstructionError
from tests.ptx.machine import FAMILIES, Program
from tests.ptx.support import calculated, module

F16, F32, F64 = np.float16, np.float32, np.float64
S16, S32, S64 = np.int16, np.int32, np.int64
U16, U32, U64 = np.uint16, np.uint32, np.uint64
INFINITY, NAN = F32(math.inf), F32(math.nan)
EPS = F32(2.0**-23)
LANE = np.arange(32)

# The instruction, its operands, what comes out.
INTEGERS = [
    ("add.s32 {a}, {0}, {1};", (S32(2**31 - 1), S32(1)), S32(-(2**31))),
    ("add.s64 {a}, {0}, -32;", (S64(5),), S64(-27)),
    ("sub.s32 {a}, {0}, {1};", (S32(3), S32(5)), S32(-2)),
    ("add.u16 {a}, {0}, {1};", (U16(65535), U16(2)), U16(1)),
    ("neg.s32 {a}, {0};", (S32(7),), S32(-7)),
    ("abs.s32 {a}, {0};", (S32(-7),), S32(7)),
    ("mul.lo.s32 {a}, {0}, {1};", (S32(-3), S32(5)), S32(-15)),
    ("mul.hi.s32 {a}, {0}, {1};", (S32(-1), S32(1)), S32(-1)),
    ("mul.hi.u32 {a}, {0}, {1};", (U32(2**32 - 1), U32(2**32 - 1)), U32(2**32 - 2)),
    ("mul.hi.u64 {a}, {0}, {1};", (U64(2**64 - 1), U64(2**64 - 1)), U64(2**64 - 2)),
    ("mul.hi.u64 {a}, {0}, {1};", (U64(3 << 40), U64(5 << 40)), U64(15 << 16)),
    ("mul.hi.s64 {a}, {0}, {1};", (S64(-1), S64(1)), S64(-1)),
    ("mul.hi.s64 {a}, {0}, {1};", (S64(-(2**62)), S64(-8)), S64(2)),
    ("mul.wide.s32 {a}, {0}, {1};", (S32(-(2**31)), S32(2)), S64(-(2**32))),
    ("mul.wide.u32 {a}, {0}, {1};", (U32(2**31), U32(2)), U64(2**32)),
    ("mul.wide.s16 {a}, {0}, {1};", (S16(-300), S16(300)), S32(-90000)),
    ("mad.lo.s32 {a}, {0}, {1}, {2};", (S32(3), S32(-4), S32(5)), S32(-7)),
    ("mad.lo.s64 {a}, {0}, {1}, {2};", (S64(3), S64(-4), S64(5)), S64(-7)),
    ("mad.wide.s32 {a}, {0}, 8, {1};", (S32(-1), S64(2**40)), S64(2**40 - 8)),
    ("mad.wide.u32 {a}, {0}, 8, {1};", (U32(2**32 - 1), U64(1)), U64(2**35 - 7)),
    ("div.s32 {a}, {0}, {1};", (S32(-7), S32(2)), S32(-3)),
    ("div.u32 {a}, {0}, {1};", (U32(2**32 - 1), U32(2)), U32(2**31 - 1)),
    ("rem.s32 {a}, {0}, {1};", (S32(-7), S32(2)), S32(-1)),
    ("rem.u32 {a}, {0}, {1};", (U32(2**32 - 1), U32(16)), U32(15)),
    ("rem.s64 {a}, {0}, {1};", (S64(7), S64(-4)), S64(3)),
    ("min.s32 {a}, {0}, {1};", (S32(-1), S32(1)), S32(-1)),
    ("min.u32 {a}, {0}, {1};", (U32(2**32 - 1), U32(1)), U32(1)),
    ("max.s64 {a}, {0}, {1};", (S64(-1), S64(1)), S64(1)),
    ("max.u32 {a}, {0}, {1};", (U32(2**32 - 1), U32(1)), U32(2**32 - 1)),
]
BITS = [
    ("and.b32 {a}, {0}, {1};", (U32(0b1100), U32(0b1010)), U32(0b1000)),
    ("or.b64 {a}, {0}, {1};", (U64(1 << 40), U64(2)), U64((1 << 40) + 2)),
    ("xor.b16 {a}, {0}, -1;", (U16(0xF0F0),), U16(0x0F0F)),
    ("not.b32 {a}, {0};", (U32(1),), U32(2**32 - 2)),
    ("and.pred {a}, {0}, {1};", (np.bool_(True), np.bool_(False)), np.bool_(False)),
    ("or.pred {a}, {0}, {1};", (np.bool_(True), np.bool_(False)), np.bool_(True)),
    ("xor.pred {a}, {0}, {1};", (np.bool_(True), np.bool_(True)), np.bool_(False)),
    ("not.pred {a}, {0};", (np.bool_(True),), np.bool_(False)),
    # The table of a function is its value at 0xF0, 0xCC, 0xAA: here a ^ (b & ~c).
    ("lop3.b32 {a}, {0}, {1}, {2}, 0xb4;", (U32(0xF0), U32(0xCC), U32(0xAA)), U32(0xF0 ^ (0xCC & ~0xAA))),
    ("lop3.b32 {a}, {0}, {1}, {2}, 0;", (U32(1), U32(2), U32(3)), U32(0)),
    ("shl.b32 {a}, {0}, {1};", (U32(3), U32(31)), U32(2**31)),
    ("shl.b32 {a}, {0}, {1};", (U32(3), U32(32)), U32(0)),
    ("shl.b64 {a}, {0}, 40;", (U64(3),), U64(3 << 40)),
    ("shl.b16 {a}, {0}, 8;", (U16(0x0123),), U16(0x2300)),
    ("shr.u32 {a}, {0}, {1};", (U32(2**31), U32(31)), U32(1)),
    ("shr.u32 {a}, {0}, {1};", (U32(2**31), U32(99)), U32(0)),
    ("shr.s32 {a}, {0}, {1};", (S32(-8), U32(1)), S32(-4)),
    ("shr.s32 {a}, {0}, {1};", (S32(-8), U32(99)), S32(-1)),
    ("shr.s64 {a}, {0}, 3;", (S64(-8),), S64(-1)),
    ("shf.l.wrap.b32 {a}, {0}, {1}, {2};", (U32(0x80000001), U32(1), U32(1)), U32(3)),
    ("shf.r.wrap.b32 {a}, {0}, {1}, {2};", (U32(0x80000001), U32(1), U32(33)), U32(0xC0000000)),
    ("shf.l.clamp.b32 {a}, {0}, {1}, {2};", (U32(7), U32(1), U32(40)), U32(7)),
    ("shf.r.clamp.b32 {a}, {0}, {1}, {2};", (U32(7), U32(9), U32(40)), U32(9)),
    ("bfe.u32 {a}, {0}, 4, 8;", (U32(0x12345678),), U32(0x67)),
    ("bfe.s32 {a}, {0}, 4, 8;", (U32(0x00000F80),), S32(-8)),
    ("bfe.u32 {a}, {0}, 28, 8;", (U32(0xF2345678),), U32(0xF)),
    ("bfe.s32 {a}, {0}, 28, 8;", (U32(0x92345678),), S32(-7)),
    ("bfe.s32 {a}, {0}, 40, 8;", (U32(0x92345678),), S32(-1)),
    ("bfe.s32 {a}, {0}, 4, 0;", (U32(0xFFFFFFFF),), S32(0)),
    ("bfe.u64 {a}, {0}, 36, 4;", (U64(0xABC << 36),), U64(0xC)),
    ("bfi.b32 {a}, {0}, {1}, 8, 4;", (U32(0xFF), U32(0x12345678)), U32(0x12345F78)),
    ("bfi.b32 {a}, {0}, {1}, 8, 0;", (U32(0xFF), U32(0x12345678)), U32(0x12345678)),
    ("prmt.b32 {a}, {0}, {1}, 0x5410;", (U32(0x33221100), U32(0x77665544)), U32(0x55441100)),
    ("prmt.b32 {a}, {0}, {1}, 0x7632;", (U32(0x33221100), U32(0x77665544)), U32(0x77663322)),
    ("prmt.b32 {a}, {0}, {1}, 0x89AB;", (U32(0x80017F80), U32(0)), U32(0xFF0000FF)),
    ("popc.b32 {a}, {0};", (U32(0xF00F),), U32(8)),
    ("popc.b64 {a}, {0};", (U64(2**64 - 1),), U32(64)),
    ("clz.b32 {a}, {0};", (U32(1),), U32(31)),
    ("clz.b32 {a}, {0};", (U32(0),), U32(32)),
    ("brev.b32 {a}, {0};", (U32(1),), U32(2**31)),
    ("mov.b32 {a}, {{{0}, {1}}};", (U16(0x1234), U16(0x5678)), U32(0x56781234)),
    ("mov.b64 {a}, {{{0}, {1}}};", (U32(1), U32(2)), U64((2 << 32) + 1)),
    ("{{ .reg .b16 spare; mov.b32 {{{a}, spare}}, {0}; }}", (U32(0x56781234),), U16(0x1234)),
    ("mov.b32 {{_, {a}}}, {0};", (U32(0x56781234),), U16(0x5678)),
    ("selp.b32 {a}, {0}, {1}, {2};", (U32(1), U32(2), np.bool_(False)), U32(2)),
    ("selp.f64 {a}, {0}, 0d3FF0000000000000, {1};", (F64(7), np.bool_(False)), F64(1)),
]
# In binary, 1 + 2⁻²³ squared is 1 + 2⁻²² + 2⁻⁴⁶, whose last bit only a fused product keeps.
FLOATS = [
    ("add.f32 {a}, {0}, {1};", (F32(1), F32(2.0**-24)), F32(1)),
    ("add.f32 {a}, {0}, {1};", (F32(1), F32(2.0**-24 + 2.0**-40)), 1 + EPS),
    ("sub.f64 {a}, {0}, {1};", (F64(1), F64(3)), F64(-2)),
    ("mul.f32 {a}, {0}, {1};", (F32(1e30), F32(1e30)), INFINITY),
    ("mul.f32 {a}, {0}, {1};", (F32(2.0**-126), F32(0.5)), F32(2.0**-127)),
    ("mul.ftz.f32 {a}, {0}, {1};", (F32(-(2.0**-126)), F32(0.5)), F32(-0.0)),
    ("mul.ftz.f32 {a}, {0}, {1};", (F32(2.0**-127), F32(4)), F32(0)),
    ("fma.rn.f32 {a}, {0}, {1}, {2};", (1 + EPS, 1 + EPS, -(1 + 2 * EPS)), EPS * EPS),
    # 1 + 2⁻²⁴ + 2⁻⁶⁰: float64 would round it to the tie 1 + 2⁻²⁴, and that to 1.
    ("fma.rn.f32 {a}, {0}, {1}, {2};", (F32(2.0**-30), F32(2.0**-30), 1 + 2 * EPS), 1 + 2 * EPS),
    (
        "fma.rn.f32 {a}, {0}, {1}, {2};",
        (F32(1 + 2.0**-12), F32(1 + 2.0**-12), F32(2.0**-60)),
        F32(1 + 2.0**-11 + 2.0**-23),
    ),
    ("fma.rn.ftz.f32 {a}, {0}, {1}, {2};", (F32(2.0**-100), F32(2.0**-27), F32(0)), F32(0)),
    (
        "fma.rn.f64 {a}, {0}, {1}, {2};",
        (F64(1 + 2.0**-52), F64(1 + 2.0**-52), F64(-1 - 2.0**-51)),
        F64(2.0**-104),
    ),
    ("fma.rn.f64 {a}, {0}, {1}, {2};", (F64(2.0**600), F64(2.0**600), F64(-(2.0**1000))), F64(math.inf)),
    ("fma.rn.f64 {a}, {0}, {1}, {2};", (F64(3), F64(5), F64(math.inf)), F64(math.inf)),
    ("div.full.f32 {a}, {0}, {1};", (F32(1), F32(3)), F32(1) / F32(3)),
    ("div.rn.f64 {a}, {0}, {1};", (F64(1), F64(3)), F64(1) / F64(3)),
    ("sqrt.approx.ftz.f32 {a}, {0};", (F32(2),), np.sqrt(F32(2))),
    ("sqrt.rn.f64 {a}, {0};", (F64(2),), np.sqrt(F64(2))),
    ("sqrt.rn.f64 {a}, {0};", (F64(-2),), F64(math.nan)),
    ("rsqrt.approx.f32 {a}, {0};", (F32(4),), F32(0.5)),
    ("rcp.rn.f32 {a}, {0};", (F32(3),), F32(1) / F32(3)),
    ("rcp.approx.ftz.f64 {a}, {0};", (F64(4),), F64(0.25)),
    ("ex2.approx.f32 {a}, {0};", (F32(-3),), F32(0.125)),
    ("ex2.approx.ftz.f32 {a}, {0};", (F32(-140),), F32(0)),
    ("lg2.approx.f32 {a}, {0};", (F32(0.125),), F32(-3)),
    ("tanh.approx.f32 {a}, {0};", (F32(0),), F32(0)),
    ("sin.approx.f32 {a}, {0};", (F32(0),), F32(0)),
    ("cos.approx.f32 {a}, {0};", (F32(0),), F32(1)),
    ("set.lt.f32.s32 {a}, {0}, {1};", (S32(1), S32(2)), F32(1)),
    ("set.lt.u32.s32 {a}, {0}, {1};", (S32(1), S32(2)), U32(2**32 - 1)),
    ("neg.f32 {a}, {0};", (F32(0),), F32(-0.0)),
    ("abs.ftz.f32 {a}, {0};", (F32(-(2.0**-130)),), F32(0)),
    ("min.f32 {a}, {0}, {1};", (NAN, F32(1)), F32(1)),
    ("min.f32 {a}, {0}, {1};", (F32(0), F32(-0.0)), F32(-0.0)),
    ("max.f32 {a}, {0}, {1};", (F32(-0.0), F32(0)), F32(0)),
    ("max.f64 {a}, {0}, {1};", (F64(math.nan), F64(math.nan)), F64(math.nan)),
    ("max.NaN.f32 {a}, {0}, {1};", (NAN, F32(1)), NAN),
    ("copysign.f32 {a}, {0}, {1};", (F32(-1), F32(3)), F32(-3)),
    ("add.f16 {a}, {0}, {1};", (F16(2048), F16(1)), F16(2048)),
    (
        "fma.rn.f16 {a}, {0}, {1}, {2};",
        (F16(1 + 2.0**-10), F16(1 + 2.0**-10), F16(-1 - 2.0**-9)),
        F16(2.0**-20),
    ),
    ("add.f16x2 {a}, {0}, {1};", (U32(0x3C004000), U32(0x3C003C00)), U32(0x40004200)),  # 1 + 1, 2 + 1
    ("fma.rn.bf16 {a}, {0}, {1}, {2};", (U16(0x4040), U16(0x4000), U16(0x3F80)), U16(0x40E0)),  # 3 · 2 + 1
    ("fma.rn.bf16x2 {a}, {0}, {1}, {2};", (U32(0x40403F80), U32(0x40003F80), U32(0)), U32(0x40C03F80)),
]
CONVERSIONS = [
    ("cvt.u64.u32 {a}, {0};", (U32(2**32 - 1),), U64(2**32 - 1)),
    ("cvt.s64.s32 {a}, {0};", (S32(-1),), S64(-1)),
    ("cvt.u32.u64 {a}, {0};", (U64((7 << 32) + 5),), U32(5)),
    ("cvt.u32.u16 {a}, {0};", (U16(65535),), U32(65535)),
    ("cvt.s32.s16 {a}, {0};", (S16(-2),), S32(-2)),
    ("cvt.s32.s8 {a}, {0};", (U32(0xFF),), S32(-1)),
    ("cvt.sat.u16.s32 {a}, {0};", (S32(-1),), U16(0)),
    ("cvt.rn.f32.s32 {a}, {0};", (S32(2**24 + 1),), F32(2**24)),
    ("cvt.rn.f32.u32 {a}, {0};", (U32(2**32 - 1),), F32(2.0**32)),
    ("cvt.rn.f64.u32 {a}, {0};", (U32(2**32 - 1),), F64(2**32 - 1)),
    ("cvt.rn.f32.s64 {a}, {0};", (S64(-3),), F32(-3)),
    ("cvt.rzi.s32.f32 {a}, {0};", (F32(-2.9),), S32(-2)),
    ("cvt.rni.s32.f32 {a}, {0};", (F32(2.5),), S32(2)),
    ("cvt.rmi.s32.f32 {a}, {0};", (F32(-2.1),), S32(-3)),
    ("cvt.rpi.s32.f32 {a}, {0};", (F32(2.1),), S32(3)),
    ("cvt.rzi.s32.f32 {a}, {0};", (F32(1e20),), S32(2**31 - 1)),
    ("cvt.rzi.s32.f32 {a}, {0};", (NAN,), S32(0)),
    ("cvt.rzi.u32.f32 {a}, {0};", (F32(-5),), U32(0)),
    ("cvt.rzi.s64.f64 {a}, {0};", (F64(1e30),), S64(2**63 - 1)),
    ("cvt.rmi.f32.f32 {a}, {0};", (F32(-0.5),), F32(-1)),
    ("cvt.f64.f32 {a}, {0};", (F32(0.1),), F64(F32(0.1))),
    ("cvt.rn.f32.f64 {a}, {0};", (F64(1 + 2.0**-24),), F32(1)),
    ("cvt.rz.f32.f64 {a}, {0};", (F64(-1 - 2.0**-23 - 2.0**-24),), F32(-1 - 2.0**-23)),
    ("cvt.sat.f32.f32 {a}, {0};", (F32(7),), F32(1)),
    ("cvt.rn.f16.f32 {a}, {0};", (F32(2049),), F16(2048)),
    ("cvt.f32.f16 {a}, {0};", (F16(-1.5),), F32(-1.5)),
    ("cvt.rn.f16.f64 {a}, {0};", (F64(1 + 2.0**-11 + 2.0**-40),), F16(1 + 2.0**-10)),
    ("cvt.f32.bf16 {a}, {0};", (U16(0xBFC0),), F32(-1.5)),
    ("cvt.rn.bf16.f32 {a}, {0};", (F32(1 + 2.0**-8),), U16(0x3F80)),  # a tie, to even
    ("cvt.rn.bf16.f32 {a}, {0};", (F32(1 + 3 * 2.0**-8),), U16(0x3F82)),
    ("cvt.rn.bf16x2.f32 {a}, {0}, {1};", (F32(1), F32(-2)), U32(0x3F80C000)),
    ("cvt.rn.f16x2.f32 {a}, {0}, {1};", (F32(1), F32(-2)), U32(0x3C00C000)),
    ("cvt.rna.tf32.f32 {a}, {0};", (F32(1 + 2.0**-11),), F32(1 + 2.0**-10)),  # a tie, away from zero
    ("cvt.rna.tf32.f32 {a}, {0};", (F32(-1 - 2.0**-12),), F32(-1)),
    ("cvta.to.global.u64 {a}, {0};", (U64(4096),), U64(4096)),
]
# Whether it holds of (1, 2), (2, 2), (3, 2) and (NaN, 2).
COMPARISONS = {
    "eq": "0100", "ne": "1010", "lt": "1000", "le": "1100", "gt": "0010", "ge": "0110",
    "equ": "0101", "neu": "1011", "ltu": "1001", "leu": "1101", "gtu": "0011", "geu": "0111",
    "num": "1110", "nan": "0001",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "operands", "expected"), [*INTEGERS, *BITS, *FLOATS, *CONVERSIONS], ids=lambda value: str(value)
)
def test_by_hand(text, operands, expected):
    (found,) = calculated(text, *operands, results=(type(expected),))
    assert found.dtype == np.asarray(expected).dtype
    assert [each.tobytes() for each in found] == 32 * [expected.tobytes()] or (
        np.isnan(found).all() and np.isnan(expected)
    )


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("word", COMPARISONS)
def test_comparisons_of_floats(word, kind):
    numbers = {"f32": F32, "f64": F64}[kind]
    a = np.tile(np.array([1, 2, 3, math.nan], numbers), 8)
    (found,) = calculated(f"setp.{word}.{kind} {{a}}, {{0}}, {{1}};", a, numbers(2), results=(np.bool_,))
    assert found.tolist() == 8 * [letter == "1" for letter in COMPARISONS[word]]


def test_comparisons_of_integers():
    for word, expected in (
        ("lt.s32", True),
        ("lt.u32", False),
        ("lo.u32", False),
        ("hs.u32", True),
        ("ne.b32", True),
    ):
        (found,) = calculated(f"setp.{word} {{a}}, {{0}}, {{1}};", S32(-1), S32(1), results=(np.bool_,))
        assert found.all() == expected, word


def test_comparisons_with_two_results_and_a_third_predicate():
    text = "setp.lt.and.s32 {a}|{b}, {0}, {1}, {2};"
    for third in (True, False):
        first, second = calculated(text, S32(LANE), S32(9), np.bool_(third), results=(np.bool_, np.bool_))
        assert (first == ((LANE < 9) & third)).all()
        assert (second == ((LANE >= 9) & third)).all()


def test_guards_leave_the_other_lanes_alone():
    (found,) = calculated(
        "mov.b32 {a}, 1;\nsetp.lt.s32 %p9, {0}, 5;\n@%p9 mov.b32 {a}, 2;\n@!%p9 add.s32 {a}, {a}, 9;",
        S32(LANE),
        results=(S32,),
    )
    assert (found == np.where(LANE < 5, 2, 10)).all()


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("shfl.sync.bfly.b32 {a}, {0}, 3, 31, -1;", LANE ^ 3),
        ("shfl.sync.idx.b32 {a}, {0}, 7, 31, -1;", 7 + 0 * LANE),
        ("shfl.sync.up.b32 {a}, {0}, 4, 0, -1;", np.where(LANE >= 4, LANE - 4, LANE)),
        ("shfl.sync.down.b32 {a}, {0}, 4, 31, -1;", np.where(LANE < 28, LANE + 4, LANE)),
        # A segment of eight lanes: its mask is 0x18, in bits 8 and up.
        ("shfl.sync.idx.b32 {a}, {0}, 1, 0x181f, -1;", LANE // 8 * 8 + 1),
        ("shfl.sync.down.b32 {a}, {0}, 1, 0x181f, -1;", np.where(LANE % 8 < 7, LANE + 1, LANE)),
    ],
)
def test_shuffles(text, source):
    (found,) = calculated(text, S32(100 + LANE), results=(S32,))
    assert (found == 100 + source).all()


def test_a_shuffle_says_whether_there_was_a_lane():
    value, there = calculated("shfl.sync.up.b32 {a}|{b}, {0}, 1, 0, -1;", S32(LANE), results=(S32, np.bool_))
    assert (there == (LANE >= 1)).all()
    assert value.tolist() == [0, *range(31)]


def test_votes_and_reductions():
    even = LANE % 2 == 0
    assert (calculated("vote.sync.ballot.b32 {a}, {0}, -1;", even, results=(U32,))[0] == 0x55555555).all()
    assert calculated("vote.sync.any.pred {a}, {0}, -1;", even, results=(np.bool_,))[0].all()
    assert not calculated("vote.sync.all.pred {a}, {0}, -1;", even, results=(np.bool_,))[0].any()
    assert not calculated("vote.sync.uni.pred {a}, {0}, -1;", even, results=(np.bool_,))[0].any()
    for text, expected in (
        ("max.s32", 15),
        ("min.s32", -16),
        ("min.u32", 0),
        ("add.s32", -16),
        ("or.b32", -1),
    ):
        (found,) = calculated(f"redux.sync.{text} {{a}}, {{0}}, -1;", S32(LANE - 16), results=(S32,))
        assert (found == expected).all(), text


def test_which_lanes_are_active():
    text = "mov.b32 {a}, 0;\nsetp.lt.s32 %p9, {0}, 5;\n@%p9 activemask.b32 {a};"
    (found,) = calculated(text, S32(LANE), results=(U32,))
    assert (found == np.where(LANE < 5, 31, 0)).all()


def test_special_registers():
    found = calculated(
        "mov.u32 {a}, %laneid;\nmov.u32 {b}, %ntid.x;\nmov.u32 {c}, %ctaid.y;", results=(U32, U32, U32)
    )
    assert [each.tolist() for each in found] == [LANE.tolist(), 32 * [32], 32 * [0]]


# Tensor cores: the places of elements are those of the figures in "Matrix fragments for mma".


def packed(values: np.ndarray, kind: str) -> np.ndarray:
    """(32, n) numbers → (32, n / 2) registers of two."""
    if kind == "bf16":
        bits = (values.astype(F32).view(U32) >> 16).astype(U16)
    else:
        bits = values.astype(F16).view(U16)
    return np.ascontiguousarray(bits).view(U32)


def spread_over_lanes(matrix: np.ndarray, element) -> np.ndarray:
    """(32, count) what each lane holds; element(lane, i) is the place of its i-th number."""
    count = matrix.size // 32
    return np.array([[matrix[element(lane, i)] for i in range(count)] for lane in range(32)])


def products(shape: str, kind: str, depth: int, pack: bool) -> tuple[np.ndarray, np.ndarray]:
    """What the instruction makes of whole numbers, and what it should."""
    random = np.random.default_rng(0)
    a, b, c = (random.integers(-4, 5, size) for size in ((16, depth), (depth, 8), (16, 8)))
    half = 2 if pack else 1

    def of_a(lane: int, i: int) -> tuple[int, int]:
        part, inner = divmod(i, half)
        return lane // 4 + 8 * (part % 2), lane % 4 * half + inner + 4 * half * (part // 2)

    def of_b(lane: int, i: int) -> tuple[int, int]:
        part, inner = divmod(i, half)
        return lane % 4 * half + inner + 4 * half * part, lane // 4

    def of_c(lane: int, i: int) -> tuple[int, int]:
        return lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2

    held = [spread_over_lanes(a, of_a), spread_over_lanes(b, of_b)]
    held = [packed(each, kind) if pack else each.astype(F32) for each in held]
    held.append(spread_over_lanes(c, of_c).astype(F32))
    registers = np.concatenate([each.view(U32) for each in held], 1).T
    place, lists = 0, []
    for each in held:
        lists.append(", ".join(f"{{{place + i}}}" for i in range(each.shape[1])))
        place += each.shape[1]
    text = (
        f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 {{{{{{a}}, {{b}}, {{c}}, {{d}}}}}}, "
        + ", ".join(f"{{{{{each}}}}}" for each in lists)
    )
    found = np.stack(calculated(f"{text};", *registers, results=4 * (F32,)), 1)
    return found, spread_over_lanes(a @ b + c, of_c)


@pytest.mark.parametrize(
    ("shape", "kind", "depth", "pack"),
    [
        ("m16n8k4", "tf32", 4, False),
        ("m16n8k8", "tf32", 8, False),
        ("m16n8k8", "bf16", 8, True),
        ("m16n8k16", "bf16", 16, True),
        ("m16n8k16", "f16", 16, True),
    ],
)
def test_products_on_tensor_cores(shape, kind, depth, pack):
    found, expected = products(shape, kind, depth, pack)
    assert (found == expected).all()


def test_products_of_doubles():
    random = np.random.default_rng(1)
    a, b, c = (random.integers(-9, 10, size).astype(F64) for size in ((8, 4), (4, 8), (8, 8)))
    of_c = lambda lane, i: (lane // 4, 2 * (lane % 4) + i)  # noqa: E731
    sums = spread_over_lanes(c, of_c)
    found = calculated(
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {{{a}, {b}}}, {{{0}}}, {{{1}}}, {{{2}, {3}}};",
        a.reshape(-1), np.ascontiguousarray(b.T).reshape(-1), sums[:, 0], sums[:, 1], results=(F64, F64),
    )  # fmt: skip
    assert (np.stack(found, 1) == spread_over_lanes(a @ b + c, of_c)).all()


def test_tensor_cores_read_11_bits_and_round_towards_zero():
    one = np.zeros(32, F32)
    one[0] = 1  # a[0, 0] and b[0, 0] are the first register of lane 0, and so is c[0, 0]
    zero = np.zeros(32, F32)
    text = (
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{{a}, {b}, {c}, {d}}}, "
        "{{{0}, {1}, {1}, {1}}}, {{{2}, {1}}}, {{{3}, {1}, {1}, {1}}};"
    )
    for factor, sums, expected in (
        (1 + 2.0**-11, 0, 1),  # the operand's lower bits are not read
        (1 + 2.0**-10, 0, 1 + 2.0**-10),
        (2.0**-24 * 1.75, 1, 1),  # 1 + 1.75 · 2⁻²⁴ would be rounded up
        (-(2.0**-24) * 1.75, -1, -1),
    ):
        found = calculated(text, one * F32(factor), zero, one, one * F32(sums), results=4 * (F32,))
        assert found[0][0] == F32(expected), (factor, sums)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count, transposed):
    """Lane l gets row l // 4 and columns 2 (l % 4) and 1 more of each matrix; row r of matrix m begins where
    lane 8 m + r says."""
    words = 128
    # Word w holds the numbers 2 w and 2 w + 1.
    store = "\n".join(
        f"add.s32 %r30, {{0}}, {32 * i}; shl.b32 %r31, %r30, 2; mov.b32 %r32, room; add.s32 %r31, %r31, %r32;"
        "mad.lo.s32 %r33, %r30, 131074, 65536; st.shared.b32 [%r31], %r33;"
        for i in range(words // 32)
    )
    letters = ", ".join(f"{{{letter}}}" for letter in "abcd"[:count])
    load = (
        "shl.b32 %r31, {0}, 4; mov.b32 %r32, room; add.s32 %r31, %r31, %r32;"
        f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if transposed else ''}.shared.b16 "
        f"{{{{{letters}}}}}, [%r31];"
    )
    found = calculated(f"{store}\n{load}", S32(LANE), results=count * (U32,))
    memory = np.arange(2 * words, dtype=U16).reshape(4, 8, 8)  # number i is at byte 2 i
    for matrix, each in zip(memory, found, strict=False):
        seen = matrix.T if transposed else matrix
        pairs = np.ascontiguousarray(seen).reshape(32, 2)
        assert (each == pairs[:, 0] + (pairs[:, 1].astype(U32) << 16)).all()


# What is not known


@pytest.mark.parametrize(
    "text",
    [
        "frobnicate.b32 %r1, %r2;",
        "add.rz.f32 %r1, %r2, %r3;",
        "add.sat.s32 %r1, %r2, %r3;",
        "mul.s32 %r1, %r2, %r3;",
        "cvt.f32.s32 %r1, %r2;",
        "setp.almost.f32 %p1, %r2, %r3;",
        "shfl.b32 %r1, %r2, 1, 31;",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r1, %r2}, {%r1}, {%r1}, {%r1, %r2};",
        "cp.async.bulk.commit_group;",
        "ld.local.b32 %r1, [%rd1];",
        "atom.global.add.noftz.bf16 %rs1, [%rd1], %rs2;",
        "mov.b64 %rd1, %r1;",
        "wgmma.fence.sync.aligned;",
    ],
)
def test_an_unknown_form_is_refused_by_name(text):
    with pytest.raises(UnknownInstructionError) as error:
        Program(module(text, 0))
    assert text.rstrip(";") in str(error.value)


def test_every_instruction_is_tried():
    texts = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    tried = set(re.findall(r"\b([a-z]+\d?)(?=\.[a-z{]|;)", texts))
    assert not set(FAMILIES) - tried
