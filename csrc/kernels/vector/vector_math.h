// exp and log of vectors, for float and double alike, to about an ulp.
#pragma once

#include "simd.h"

namespace tripletops {
namespace {

typedef int32_t Int32Vector __attribute__((vector_size(Isa::vector_bytes)));
typedef int64_t Int64Vector __attribute__((vector_size(Isa::vector_bytes)));

template <class T>
struct Format;
template <>
struct Format<float> {
  using Bits = Int32Vector;
  static constexpr int mantissa = 23, exp_terms = 7, log_terms = 5;
  static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  static constexpr float round = 0x1.8p23f, exp_floor = -87, exp_ceiling = 88;
  static constexpr int32_t root_half = 0x3f3504f3;
};
template <>
struct Format<double> {
  using Bits = Int64Vector;
  static constexpr int mantissa = 52, exp_terms = 13, log_terms = 12;
  static constexpr double ln2_high = 0x1.62e42fee00000p-1, ln2_low = 0x1.a39ef35793c76p-33;
  static constexpr double round = 0x1.8p52, exp_floor = -708, exp_ceiling = 709;
  static constexpr int64_t root_half = 0x3fe6a09e667f3bcd;
};

template <class T>
constexpr T kOneOverFactorial[] = {T(1.0),
                                   T(1.0),
                                   T(1.0 / 2),
                                   T(1.0 / 6),
                                   T(1.0 / 24),
                                   T(1.0 / 120),
                                   T(1.0 / 720),
                                   T(1.0 / 5040),
                                   T(1.0 / 40320),
                                   T(1.0 / 362880),
                                   T(1.0 / 3628800),
                                   T(1.0 / 39916800),
                                   T(1.0 / 479001600),
                                   T(1.0 / 6227020800)};

// 0 below exp_floor, where the result would be subnormal; the largest x that gives a finite result is
// exp_ceiling, which also stands for everything above.
template <class T>
TRIPLETOPS_INLINE Vector<T> exp_of(Vector<T> x) {
  using F = Format<T>;
  const Vector<T> kept = x < F::exp_ceiling ? x : broadcast<T>(F::exp_ceiling);
  // The low bits of `shifted` are the integer.
  const Vector<T> shifted =
      multiply_add(kept, broadcast<T>(T(1.44269504088896340736)), broadcast<T>(F::round));
  const Vector<T> whole = shifted - F::round;
  const Vector<T> high = multiply_add(whole, broadcast<T>(-F::ln2_high), kept);
  const Vector<T> rest = multiply_add(whole, broadcast<T>(-F::ln2_low), high);
  Vector<T> sum = broadcast<T>(kOneOverFactorial<T>[F::exp_terms]);
#pragma GCC unroll 16
  for (int term = F::exp_terms; term > 0; --term)
    sum = multiply_add(sum, rest, broadcast<T>(kOneOverFactorial<T>[term - 1]));
  const auto scaled = (typename F::Bits)sum + ((typename F::Bits)shifted << F::mantissa);
  return x >= F::exp_floor ? (Vector<T>)scaled : Vector<T>{};
}

// exponent * ln 2 + ln(1 + f), where 1 + f lies between the root of 1/2 and that of 2.
template <class T>
TRIPLETOPS_INLINE Vector<T> log_of_parts(Vector<T> exponent, Vector<T> f) {
  using F = Format<T>;
  const Vector<T> s = f / (f + T(2)), square = s * s;  // ln(1 + f) = 2 artanh(s)
  Vector<T> sum = broadcast<T>(T(1) / T(2 * F::log_terms + 1));
#pragma GCC unroll 16
  for (int term = F::log_terms - 1; term > 0; --term)
    sum = multiply_add(sum, square, broadcast<T>(T(1) / T(2 * term + 1)));
  // 2 s = f - s f, so that a small f stays as it is.
  const Vector<T> small = exponent * F::ln2_low + s * (T(2) * square * sum - f);
  return exponent * F::ln2_high + (f + small);
}

// Of positive normal numbers.
template <class T>
TRIPLETOPS_INLINE Vector<T> log_of(Vector<T> x) {
  using F = Format<T>;
  const auto bits = (typename F::Bits)x;
  const auto exponent = (bits - F::root_half) >> F::mantissa;
  const auto fraction = (Vector<T>)(bits - (exponent << F::mantissa));
  return log_of_parts<T>(__builtin_convertvector(exponent, Vector<T>), fraction - T(1));
}

// ln(1 + x) of x >= 0, with the digits of a small x.
template <class T>
TRIPLETOPS_INLINE Vector<T> log_of_one_plus(Vector<T> x) {
  const Vector<T> sum = x + T(1);
  return log_of<T>(sum) + (x - (sum - T(1))) / sum;
}

}  // namespace
}  // namespace tripletops
