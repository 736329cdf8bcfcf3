// Rows that lie close to each other, in double: unpacked, measured and pulled several at a time.
#pragma once

#include "rows.h"

namespace tripletops {
namespace {

template <class T>
void unpack(const T* row, const Normaliser* unit, int64_t width, double* unpacked) {
  if (!unit) {
    for (int64_t d = 0; d < width; ++d) unpacked[d] = double(row[d]);
    return;
  }
  const double scale = unit->scale, norm = unit->norm;
  for (int64_t d = 0; d < width; ++d) unpacked[d] = double(row[d]) * scale / norm;
}

// As many others as a vector has lanes. Every sum is made in the order of sum_of_squares.
TRIPLETOPS_INLINE DoubleVector squares_of(const double* x, const double* const* others, int64_t width) {
  constexpr int lanes = kLanes<double>;
  DoubleVector even[lanes] = {}, odd[lanes] = {};
  int64_t d = 0;
  for (; d + 2 * lanes <= width; d += 2 * lanes) {
    const DoubleVector first = load_doubles(x + d), second = load_doubles(x + d + lanes);
#pragma GCC unroll 8
    for (int i = 0; i < lanes; ++i) {
      const DoubleVector a = first - load_doubles(others[i] + d);
      const DoubleVector b = second - load_doubles(others[i] + d + lanes);
      even[i] = multiply_add(a, a, even[i]);
      odd[i] = multiply_add(b, b, odd[i]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < lanes; ++i) even[i] += odd[i];
  transpose<double>(even);
  DoubleVector sum = even[0];
#pragma GCC unroll 8
  for (int lane = 1; lane < lanes; ++lane) sum += even[lane];
  for (; d < width; ++d)
    for (int i = 0; i < lanes; ++i) {
      const double value = x[d] - others[i][d];
      sum[i] += value * value;
    }
  return sum;
}

void squares(const double* x, const double* const* others, int32_t count, int64_t width, double* squares) {
  constexpr int lanes = kLanes<double>;
  int32_t i = 0;
  for (; i + lanes <= count; i += lanes) store_vector(squares_of(x, others + i, width), squares + i);
  if (i == count) return;
  const double* last[lanes];
  for (int lane = 0; lane < lanes; ++lane) last[lane] = others[i + lane < count ? i + lane : i];
  const DoubleVector rest = squares_of(x, last, width);
  for (int lane = 0; i + lane < count; ++lane) squares[i + lane] = rest[lane];
}

// The pulls of `vectors` whole vectors of elements.
template <int vectors>
TRIPLETOPS_INLINE void pulls_of(const double* x, const double* rows, int64_t stride, const int32_t* others,
                                const double* factors, int32_t count, double* pulls) {
  constexpr int lanes = kLanes<double>;
  DoubleVector own[vectors], sum[vectors] = {};
#pragma GCC unroll 4
  for (int v = 0; v < vectors; ++v) own[v] = load_doubles(x + v * lanes);
  for (int32_t k = 0; k < count; ++k) {
    const DoubleVector factor = broadcast<double>(factors[k]);
    const double* y = rows + others[k] * stride;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v)
      sum[v] = multiply_add(factor, own[v] - load_doubles(y + v * lanes), sum[v]);
  }
#pragma GCC unroll 4
  for (int v = 0; v < vectors; ++v) store_vector(sum[v], pulls + v * lanes);
}

template <class T>
void pull_all(const double* x, const double* rows, int64_t stride, const int32_t* others,
              const double* factors, int32_t count, int64_t width, T* sums) {
  constexpr int lanes = kLanes<double>, most = 4;
  double pulls[kPulledTogether];
  int64_t d = 0;
  for (; d + most * lanes <= width; d += most * lanes)
    pulls_of<most>(x + d, rows + d, stride, others, factors, count, pulls + d);
  for (; d + lanes <= width; d += lanes)
    pulls_of<1>(x + d, rows + d, stride, others, factors, count, pulls + d);
  for (; d < width; ++d) {
    pulls[d] = 0;
    for (int32_t k = 0; k < count; ++k) pulls[d] += factors[k] * (x[d] - rows[others[k] * stride + d]);
  }
  for (d = 0; d < width; ++d) sums[d] += T(pulls[d]);
}

}  // namespace
}  // namespace tripletops
