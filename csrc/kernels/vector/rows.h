// Work on single rows: unpacking half precision, the survey before packing, packing, exact distances and
// gradients.
#pragma once

#include <utility>

#include "../hash.h"
#include "tile.h"

namespace tripletops {
namespace {

TRIPLETOPS_INLINE float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

TRIPLETOPS_INLINE uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

TRIPLETOPS_INLINE float from_bfloat16(uint16_t half) { return from_bits(uint32_t(half) << 16); }

TRIPLETOPS_INLINE float from_float16(uint16_t half) {
  const uint32_t magnitude = uint32_t(half & 0x7fff) << 13;
  const float finite = from_bits(magnitude) * 0x1p112f;  // moves the exponent; subnormals become normal
  const uint32_t special = magnitude >= 0x0f800000 ? 0x7f800000 : 0;
  return from_bits(to_bits(finite) | special | uint32_t(half & 0x8000) << 16);
}

TRIPLETOPS_INLINE uint16_t to_bfloat16(float value) {
  const uint32_t bits = to_bits(value);
  if (value != value) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

TRIPLETOPS_INLINE uint16_t to_float16(float value) {
  const uint32_t bits = to_bits(value);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // 65520 and beyond round to infinity
  // Adding 1/2 lines the last bit of a subnormal half up with the float's, which rounds it.
  if (magnitude < 0x38800000) return uint16_t(sign | (to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000));
  return uint16_t(sign | (magnitude + 0xc8000fff + (magnitude >> 13 & 1)) >> 13);
}

template <class T>
const T* load_row(const Matrix& rows, int64_t row, T* buffer) {
  const int64_t at = row * rows.stride;
  if constexpr (sizeof(T) == sizeof(double)) {
    return static_cast<const double*>(rows.data) + at;
  } else {
    if (rows.storage == Storage::float32) return static_cast<const float*>(rows.data) + at;
    const uint16_t* halves = static_cast<const uint16_t*>(rows.data) + at;
    if (rows.storage == Storage::float16)
      for (int64_t d = 0; d < rows.width; ++d) buffer[d] = from_float16(halves[d]);
    else
      for (int64_t d = 0; d < rows.width; ++d) buffer[d] = from_bfloat16(halves[d]);
    return buffer;
  }
}

template <class T>
void store_row(const T* values, int64_t width, Storage storage, void* row) {
  switch (storage) {
    case Storage::float64:
    case Storage::float32:
      std::memcpy(row, values, size_t(width) * sizeof(T));
      break;
    case Storage::float16:
      for (int64_t d = 0; d < width; ++d) static_cast<uint16_t*>(row)[d] = to_float16(float(values[d]));
      break;
    case Storage::bfloat16:
      for (int64_t d = 0; d < width; ++d) static_cast<uint16_t*>(row)[d] = to_bfloat16(float(values[d]));
      break;
  }
}

// Sum of the squares of term(x[d], y[d]) in double; `term` takes vectors and scalars alike.
template <class T, class Term>
TRIPLETOPS_INLINE double sum_of_squares(const T* x, const T* y, int64_t width, Term term) {
  constexpr int lanes = kLanes<double>;
  DoubleVector even = {}, odd = {};
  const auto step = [&](int64_t d, DoubleVector& squares) {
    const DoubleVector value = term(load_doubles(x + d), load_doubles(y + d));
    squares = multiply_add(value, value, squares);
  };
  int64_t d = 0;
  for (; d + 2 * lanes <= width; d += 2 * lanes) step(d, even), step(d + lanes, odd);
  even += odd;
  double sum = 0;
  for (int lane = 0; lane < lanes; ++lane) sum += even[lane];
  for (; d < width; ++d) {
    const double value = term(double(x[d]), double(y[d]));
    sum += value * value;
  }
  return sum;
}

template <class T>
TRIPLETOPS_INLINE double largest_magnitude(const T* row, int64_t width) {
  T largest = 0;
  for (int64_t d = 0; d < width; ++d) {
    const T magnitude = row[d] < 0 ? -row[d] : row[d];
    largest = magnitude > largest ? magnitude : largest;
  }
  return double(largest);
}

// A power of two that brings `magnitude` near 1.
TRIPLETOPS_INLINE double power_of_two_for(double magnitude) {
  int exponent = magnitude > 0 ? __builtin_ilogb(magnitude) : 0;
  exponent = exponent > 1000 ? 1000 : exponent < -1000 ? -1000 : exponent;
  return __builtin_ldexp(1.0, -exponent);
}

TRIPLETOPS_INLINE bool is_zero_row(const Normaliser& unit) { return unit.norm == __builtin_inf(); }

template <class T>
Normaliser normalise(const T* row, int64_t width) {
  Normaliser unit;
  double square = sum_of_squares(row, row, width, [](auto a, auto) { return a; });
  if (!(square > 0x1p-900 && square < 0x1p900)) {
    unit.scale = power_of_two_for(largest_magnitude(row, width));
    const double scale = unit.scale;
    square = sum_of_squares(row, row, width, [&](auto a, auto) { return a * scale; });
  }
  unit.norm = square > 0 ? __builtin_sqrt(square) : __builtin_inf();
  constexpr double tiny = 0x1p-60;
  if (unit.norm < tiny * unit.scale) unit.lift = unit.scale * tiny * power_of_two_for(unit.norm);
  return unit;
}

template <class T>
bool all_finite(const T* values, int64_t width) {
  int outside = 0;
  for (int64_t d = 0; d < width; ++d) outside |= !(values[d] <= kLargest<T> && values[d] >= -kLargest<T>);
  return !outside;
}

template <bool high, class V, size_t... i>
TRIPLETOPS_INLINE V interleave(V a, V b, std::index_sequence<i...>) {
  constexpr int lanes = sizeof...(i), from = high ? lanes / 2 : 0;
  return __builtin_shufflevector(a, b, (i % 2 * lanes + i / 2 + from)...);
}

// Interleaving row i with row i + lanes / 2, log2(lanes) times over, transposes the square.
template <class T>
TRIPLETOPS_INLINE void transpose(Vector<T> (&square)[kLanes<T>]) {
  constexpr int lanes = kLanes<T>;
  constexpr auto all = std::make_index_sequence<lanes>{};
#pragma GCC unroll 4
  for (int round = 1; round < lanes; round *= 2) {
    Vector<T> next[lanes];
#pragma GCC unroll 8
    for (int i = 0; i < lanes / 2; ++i) {
      next[2 * i] = interleave<false>(square[i], square[i + lanes / 2], all);
      next[2 * i + 1] = interleave<true>(square[i], square[i + lanes / 2], all);
    }
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) square[i] = next[i];
  }
}

// to[i] = the largest of all lanes of -least[i].
template <class T>
TRIPLETOPS_INLINE void store_largest(Vector<T> (&least)[kLanes<T>], int32_t count, T* to) {
  transpose<T>(least);
  for (int i = 1; i < kLanes<T>; ++i) least[0] = keep_least(least[i], least[0]);
  for (int32_t i = 0; i < count; ++i) to[i] = -least[0][i];
}

template <class T>
void survey(const Matrix& rows, const int32_t* index, int32_t begin, int32_t end, const T* origin, T shrink,
            Normaliser* units, const double* unit_origin, T* sums, T* largest, T* buffer) {
  constexpr int lanes = kLanes<T>;
  const int64_t width = rows.width;
  // By row, minus the largest deviation: one operation keeps the least, and no NaN.
  Vector<T> least[lanes] = {};
  for (int32_t i = begin; i < end; ++i) {
    const T* row = load_row(rows, index[i], buffer);
    if (units) {
      const Normaliser unit = units[index[i]] = normalise(row, width);
      for (int64_t d = 0; d < width; ++d)
        buffer[d] = T(double(row[d]) * unit.scale / unit.norm - unit_origin[d]);
      row = buffer;
    }
    Vector<T> own = Vector<T>{};
    int64_t d = 0;
    for (; d + lanes <= width; d += lanes) {
      const Vector<T> deviation = load_vector<T>(row + d) * shrink - load_vector<T>(origin + d) * shrink;
      store_vector(load_vector<T>(sums + d) + deviation, sums + d);
      own = keep_least(deviation < 0 ? deviation : -deviation, own);
    }
    for (; d < width; ++d) {
      const T deviation = row[d] * shrink - origin[d] * shrink;
      sums[d] += deviation;
      const T below = deviation < 0 ? deviation : -deviation;
      own[0] = below < own[0] ? below : own[0];
    }
    const int32_t at = (i - begin) % lanes;
    least[at] = own;
    if (at == lanes - 1 || i == end - 1) store_largest<T>(least, at + 1, largest + (i - begin - at));
  }
}

// packed[d * lanes + lane] = rows[lane * width + d]. Rows up to the next whole vector are read, and up to a
// vector is written behind the end.
template <int lanes, class T>
TRIPLETOPS_INLINE void interleave_rows(const T* rows, int64_t width, T* packed) {
  constexpr int w = kLanes<T>, blocks = (lanes + w - 1) / w;
  int64_t d = 0;
  for (; d + w <= width; d += w) {
    Vector<T> square[blocks][w];
#pragma GCC unroll 2
    for (int block = 0; block < blocks; ++block) {
#pragma GCC unroll 16
      for (int r = 0; r < w; ++r) square[block][r] = load_vector<T>(rows + (block * w + r) * width + d);
      transpose<T>(square[block]);
    }
    // In ascending order: what a partial vector spills over is overwritten by the next store.
#pragma GCC unroll 16
    for (int k = 0; k < w; ++k)
#pragma GCC unroll 2
      for (int block = 0; block < blocks; ++block)
        store_vector(square[block][k], packed + (d + k) * lanes + block * w);
  }
  for (; d < width; ++d)
    for (int lane = 0; lane < lanes; ++lane) packed[d * lanes + lane] = rows[lane * width + d];
}

// The row as the Gram product takes it, and half its squared norm. `row` may be `framed`.
template <class T>
T frame_row(const T* row, const Frame<T>& frame, const Normaliser* unit, int64_t width, T* framed) {
  if (unit) {
    for (int64_t d = 0; d < width; ++d)
      framed[d] = T(double(row[d]) * unit->scale / unit->norm - frame.unit_centre[d]);
    row = framed;
  }
  constexpr int lanes = kLanes<T>;
  Vector<T> even = {}, odd = {};
  const auto step = [&](int64_t d, Vector<T>& squares) {
    const Vector<T> value = load_vector<T>(row + d) * frame.scale - load_vector<T>(frame.centre + d);
    store_vector(value, framed + d);
    squares = multiply_add(value, value, squares);
  };
  int64_t d = 0;
  for (; d + 2 * lanes <= width; d += 2 * lanes) step(d, even), step(d + lanes, odd);
  double square = 0;
  for (; d < width; ++d) {
    framed[d] = row[d] * frame.scale - frame.centre[d];
    square += double(framed[d]) * double(framed[d]);
  }
  T parts[2][lanes];
  store_vector(even, parts[0]), store_vector(odd, parts[1]);
  double sums[lanes];
  for (int lane = 0; lane < lanes; lane += kLanes<double>)
    store_vector(load_doubles(parts[0] + lane) + load_doubles(parts[1] + lane), sums + lane);
  for (int lane = 0; lane < lanes; ++lane) square += sums[lane];
  // S = 0 of a zero row with everything: 1/2 added on its side makes 1 - S come out of the Gram arithmetic.
  return T(0.5 * square + (unit && width > 0 && is_zero_row(*unit) ? 0.5 : 0));
}

template <class T>
void pack(const Matrix& rows, const Frame<T>& frame, const Normaliser* units, const Side<T>& side,
          int32_t lanes, int32_t panel, T* packed, T* half_norms, int32_t* first, T* buffer) {
  const int64_t width = rows.width;
  const int32_t begin = panel * lanes;
  int32_t smallest = kNobody;
  for (int lane = 0; lane < lanes; ++lane) {
    T* framed = buffer + int64_t(lane) * width;
    if (begin + lane >= side.count) {
      for (int64_t d = 0; d < width; ++d) framed[d] = 0;
      half_norms[lane] = T(__builtin_nan(""));
      continue;
    }
    const int32_t index = side.index[begin + lane];
    if (index < smallest) smallest = index;
    half_norms[lane] =
        frame_row(load_row(rows, index, framed), frame, units ? units + index : nullptr, width, framed);
  }
  *first = smallest;
  if (lanes == kPanelColumns<T>) {
    interleave_rows<kPanelColumns<T>>(buffer, width, packed);
  } else {
    T* spilling = buffer + (kTileRows + kLanes<T>)*width;
    interleave_rows<kTileRows>(buffer, width, spilling);
    std::memcpy(packed, spilling, size_t(kTileRows * width) * sizeof(T));
  }
}

template <class T>
void repack(const Side<T>& candidates, int32_t tile, const Side<T>& anchors) {
  constexpr int columns = kPanelColumns<T>, together = kTileRows % 4 == 0 ? 4 : 2;
  static_assert(kTileRows % together == 0 && columns % together == 0);
  const int64_t width = candidates.panels.width;
  const int32_t packed_rows = (candidates.count + columns - 1) / columns * columns;
  T* packed = anchors.panels.panel(tile);
  int32_t smallest = kNobody;
  for (int r = 0; r < kTileRows; r += together) {
    const int32_t row = tile * kTileRows + r;
    const T* from = candidates.panels.panel(row / columns) + row % columns;
    if (row < packed_rows)
      for (int64_t d = 0; d < width; ++d)
        std::memcpy(packed + d * kTileRows + r, from + d * columns, together * sizeof(T));
    else
      for (int64_t d = 0; d < width; ++d) std::memset(packed + d * kTileRows + r, 0, together * sizeof(T));
    for (int i = 0; i < together; ++i) {
      const bool is_row = row + i < candidates.count;
      anchors.half_norms[row + i] = is_row ? candidates.half_norms[row + i] : T(__builtin_nan(""));
      if (is_row && candidates.index[row + i] < smallest) smallest = candidates.index[row + i];
    }
  }
  anchors.first[tile] = smallest;
}

inline bool draw(uint64_t row_seed, const int32_t* index, int32_t begin, int32_t end, bool any,
                 uint32_t* best) {
  if (begin >= end) return any;
  uint32_t largest = any ? *best : 0;
  for (int32_t c = begin; c < end; ++c) {
    const uint32_t noise = hash_candidate(row_seed, uint32_t(index[c]));
    largest = noise > largest ? noise : largest;
  }
  *best = largest;
  return true;
}

// The difference of two elements times a power of two that brings the largest one of two rows near 1. A scale
// below 1 is for differences that overflow.
struct ScaledDifference {
  double scale;

  template <class V>
  TRIPLETOPS_INLINE V operator()(V a, V b) const {
    return scale < 1 ? a * scale - b * scale : (a - b) * scale;
  }
};

template <class T>
TRIPLETOPS_INLINE ScaledDifference scaled_difference(const T* x, const T* y, int64_t width) {
  double largest = 0;
  for (int64_t d = 0; d < width; ++d) {
    const double difference = double(x[d]) - double(y[d]);
    const double magnitude = difference < 0 ? -difference : difference;
    largest = magnitude > largest ? magnitude : largest;
  }
  return {power_of_two_for(largest)};
}

template <class T>
double measure(const Pair<T>& pair, int64_t width, Distance distance) {
  const T *x = pair.x, *y = pair.y;
  if (distance == Distance::cosine) {
    if (width > 0 && (is_zero_row(pair.x_unit) || is_zero_row(pair.y_unit))) return 1;
    const Normaliser u = pair.x_unit, v = pair.y_unit;
    return 0.5 * sum_of_squares(x, y, width,
                                [&](auto a, auto b) { return a * u.scale / u.norm - b * v.scale / v.norm; });
  }
  double scale = 1, square = sum_of_squares(x, y, width, [](auto a, auto b) { return a - b; });
  // The squares of floats are safe in double as they are.
  if (sizeof(T) == sizeof(double) && !(square > 0x1p-900 && square < 0x1p900)) {
    const ScaledDifference difference = scaled_difference(x, y, width);
    scale = difference.scale;
    square = sum_of_squares(x, y, width, difference);
  }
  const double value =
      distance == Distance::euclidean ? __builtin_sqrt(square) / scale : square / scale / scale;
  return value < kLargest<T> ? value : kLargest<T>;
}

// sums[d] += term(x[d], y[d]), the term in double.
template <class T, class Term>
TRIPLETOPS_INLINE void add_to(T* sums, const T* x, const T* y, int64_t width, Term term) {
  for (int64_t d = 0; d < width; ++d) sums[d] += T(term(double(x[d]), double(y[d])));
}

template <class T>
void pull_plainly(const T* x, const T* const* others, const T* factors, int32_t count, int64_t width,
                  bool fresh, T* sums) {
  constexpr int lanes = kLanes<T>, together = 4;
  int64_t d = 0;
  const auto step = [&](auto vectors) {
    constexpr int size = decltype(vectors)::value;
    Vector<T> own[size], sum[size];
    for (int v = 0; v < size; ++v) {
      own[v] = load_vector<T>(x + d + v * lanes);
      sum[v] = fresh ? Vector<T>{} : load_vector<T>(sums + d + v * lanes);
    }
    for (int32_t i = 0; i < count; ++i)
      for (int v = 0; v < size; ++v)
        sum[v] = multiply_add(broadcast<T>(factors[i]), own[v] - load_vector<T>(others[i] + d + v * lanes),
                              sum[v]);
    for (int v = 0; v < size; ++v) store_vector(sum[v], sums + d + v * lanes);
    d += size * lanes;
  };
  while (d + together * lanes <= width) step(std::integral_constant<int, together>());
  while (d + lanes <= width) step(std::integral_constant<int, 1>());
  for (; d < width; ++d) {
    T sum = fresh ? T(0) : sums[d];
    for (int32_t i = 0; i < count; ++i) sum = multiply_add_one(factors[i], x[d] - others[i][d], sum);
    sums[d] = sum;
  }
}

template <class T>
void pull(const Pair<T>& pair, int64_t width, Distance distance, double value, double weight, T* sums) {
  const T *x = pair.x, *y = pair.y;
  if (weight == 0) return;
  if (distance == Distance::cosine) {
    // d/dx (1 - S) = (S u - v) / |x| = ((u - v) - (1 - S) u) / |x|, which keeps its digits where u and v
    // nearly agree.
    const Normaliser u = pair.x_unit, v = pair.y_unit;
    const double outer = weight * (u.scale / (u.norm * u.lift));
    add_to(sums, x, y, width, [&](double a, double b) {
      const double unit = a * u.scale / u.norm;
      return outer * ((unit - b * v.scale / v.norm) - value * unit);
    });
    return;
  }
  if (distance == Distance::euclidean && value == 0) return;
  const double factor = pull_factor(distance, value, weight);
  if (is_plain_pull<T>(value, factor)) {
    const T rounded = T(factor);
    return pull_plainly(x, &y, &rounded, 1, width, false, sums);
  }
  if (distance == Distance::sqeuclidean) {
    const bool too_large = value >= double(kLargest<T>);
    // Sums stay finite: the sum of two infinities may be NaN.
    const auto clamp = [&](double z) {
      const double largest = double(kLargest<T>);
      return !too_large ? z : z > largest ? largest : z < -largest ? -largest : z;
    };
    for (int64_t d = 0; d < width; ++d)
      sums[d] = T(clamp(double(sums[d]) + clamp(factor * (double(x[d]) - double(y[d])))));
  } else {  // nor may the value have its digits, being subnormal
    const ScaledDifference difference = scaled_difference(x, y, width);
    const double norm = __builtin_sqrt(sum_of_squares(x, y, width, difference));
    add_to(sums, x, y, width, [&](double a, double b) { return weight * (difference(a, b) / norm); });
  }
}

}  // namespace
}  // namespace tripletops
