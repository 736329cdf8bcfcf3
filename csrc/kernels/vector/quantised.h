// Quantised rows: packing them, the products of a tile in integers, and the comparison of what they stand for
// with thresholds. Included by instruction sets with fast integer products. Sums of integers are exact, so
// only the comparison rounds (docs/certified.md).
#pragma once

#include "rows.h"

namespace tripletops {
namespace {

typedef int32_t IntVector __attribute__((vector_size(Isa::vector_bytes)));

constexpr int kIntegerRows = Isa::integer_tile_rows;
constexpr int kColumns = kPanelColumns<float>;
static_assert(kColumns % kIntegerRows == 0 && kColumns <= 32);

// Without one instruction for it, pairs of products are added up in int16, which holds two pairs of numbers
// of 7 bits.
constexpr int kLargestByte = Isa::adds_integer_products ? 127 : 63;
constexpr int kByteOffset = kLargestByte + 1;
// |q_i||q_j| < 2^31: sums may wrap on the way to a product, the product itself doesn't.
constexpr int kLargestNorm = 46000, kLargestHalf = 32767;

TRIPLETOPS_INLINE IntVector broadcast_integer(int32_t value) { return value + IntVector{}; }

TRIPLETOPS_INLINE IntVector load_integers(const void* from) {
  IntVector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
constexpr bool kWide = sizeof(V) == 64;

template <class V>
TRIPLETOPS_INLINE auto to_floats(V v) {
  if constexpr (kWide<V>)
    return _mm512_cvtepi32_ps((__m512i)v);
  else
    return _mm256_cvtepi32_ps((__m256i)v);
}

// To the nearest, ties to even.
template <class V>
TRIPLETOPS_INLINE IntVector to_integers(V v) {
  if constexpr (kWide<V>)
    return (IntVector)_mm512_cvtps_epi32(v);
  else
    return (IntVector)_mm256_cvtps_epi32(v);
}

// The elements as bytes or as int16.
template <int bytes, class V>
TRIPLETOPS_INLINE void store_narrow(V v, void* to) {
  if constexpr (kWide<V> && bytes == 1) {
    _mm_storeu_si128(static_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)v));
  } else if constexpr (kWide<V>) {
    _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtepi32_epi16((__m512i)v));
  } else {
    const __m128i low = _mm256_castsi256_si128((__m256i)v), high = _mm256_extracti128_si256((__m256i)v, 1);
    const __m128i halves = _mm_packs_epi32(low, high);
    if constexpr (bytes == 1)
      _mm_storel_epi64(static_cast<__m128i*>(to), _mm_packus_epi16(halves, halves));
    else
      _mm_storeu_si128(static_cast<__m128i*>(to), halves);
  }
}

template <class V>
TRIPLETOPS_INLINE V subtract_bytes(V a, V b) {
  if constexpr (kWide<V>)
    return (V)_mm512_sub_epi8((__m512i)a, (__m512i)b);
  else
    return (V)_mm256_sub_epi8((__m256i)a, (__m256i)b);
}

// Pairs of products of unsigned with signed bytes, added up in int16.
template <class V>
TRIPLETOPS_INLINE V multiply_bytes(V a, V b) {
  if constexpr (kWide<V>)
    return (V)_mm512_maddubs_epi16((__m512i)a, (__m512i)b);
  else
    return (V)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
}

template <class V>
TRIPLETOPS_INLINE V add_halves(V a, V b) {
  if constexpr (kWide<V>)
    return (V)_mm512_add_epi16((__m512i)a, (__m512i)b);
  else
    return (V)_mm256_add_epi16((__m256i)a, (__m256i)b);
}

// Pairs of products of int16, added up in int32.
template <class V>
TRIPLETOPS_INLINE V multiply_halves(V a, V b) {
  if constexpr (kWide<V>)
    return (V)_mm512_madd_epi16((__m512i)a, (__m512i)b);
  else
    return (V)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}

// Sums of products of four int8 (`a` unsigned) or of two int16. In assembly, an instruction at a time: GCC 12
// spills the sums of a tile where it is told by intrinsics.
struct Bytes {
  static constexpr int size = 1;
  TRIPLETOPS_INLINE static IntVector column(IntVector v) {
    return subtract_bytes(v, broadcast_integer(int32_t(kByteOffset * 0x01010101u)));
  }
  template <class V>
  TRIPLETOPS_INLINE static void add_product(V& sum, V a, V b) {
    if constexpr (kWide<V>)
      asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    else
      asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  }
  TRIPLETOPS_INLINE static void add_products(IntVector& sum, IntVector a, IntVector b, IntVector a_next,
                                             IntVector b_next) {
    sum += multiply_halves(add_halves(multiply_bytes(a, b), multiply_bytes(a_next, b_next)),
                           broadcast_integer(0x00010001));
  }
};

struct Halves {
  static constexpr int size = 2;
  TRIPLETOPS_INLINE static IntVector column(IntVector v) { return v; }
  template <class V>
  TRIPLETOPS_INLINE static void add_product(V& sum, V a, V b) {
    if constexpr (kWide<V>)
      asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    else
      asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  }
  TRIPLETOPS_INLINE static void add_products(IntVector& sum, IntVector a, IntVector b, IntVector a_next,
                                             IntVector b_next) {
    sum += multiply_halves(a, b);
    sum += multiply_halves(a_next, b_next);
  }
};

// sum[r][v] = q_i . q_j of the tile whose rows begin at `anchors` and the panel at `candidates`.
template <class Integers>
TRIPLETOPS_INLINE void multiply_integers(const uint32_t* anchors, const uint32_t* candidates, int64_t depth,
                                         const int32_t* begin,
                                         IntVector (&sum)[kIntegerRows][kPanelVectors]) {
  constexpr int lanes = kLanes<float>;
#pragma GCC unroll 8
  for (int r = 0; r < kIntegerRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) sum[r][v] = load_integers(begin + v * lanes);
  for (int64_t k = 0; k < depth; k += 2, anchors += 2 * kColumns, candidates += 2 * kColumns) {
    IntVector column[2][kPanelVectors];
#pragma GCC unroll 2
    for (int step = 0; step < 2; ++step)
#pragma GCC unroll 2
      for (int v = 0; v < kPanelVectors; ++v)
        column[step][v] = Integers::column(load_integers(candidates + step * kColumns + v * lanes));
    if constexpr (Isa::adds_integer_products) {
#pragma GCC unroll 2
      for (int step = 0; step < 2; ++step)
#pragma GCC unroll 8
        for (int r = 0; r < kIntegerRows; ++r) {
          const IntVector row = broadcast_integer(int32_t(anchors[step * kColumns + r]));
#pragma GCC unroll 2
          for (int v = 0; v < kPanelVectors; ++v) Integers::add_product(sum[r][v], row, column[step][v]);
        }
    } else {
#pragma GCC unroll 8
      for (int r = 0; r < kIntegerRows; ++r) {
        const IntVector row = broadcast_integer(int32_t(anchors[r]));
        const IntVector next = broadcast_integer(int32_t(anchors[kColumns + r]));
#pragma GCC unroll 2
        for (int v = 0; v < kPanelVectors; ++v)
          Integers::add_products(sum[r][v], row, column[0][v], next, column[1][v]);
      }
    }
  }
}

typedef FloatVector Values[kIntegerRows][kPanelVectors];

// values[r][v] = the signed product less the bar of the row.
template <class Integers>
TRIPLETOPS_INLINE void signed_values(const Scan& scan, int32_t row, int32_t panel, Values& values) {
  const Quantised &anchors = *scan.anchors, &candidates = *scan.candidates;
  constexpr int lanes = kLanes<float>;
  IntVector sum[kIntegerRows][kPanelVectors];
  multiply_integers<Integers>(
      anchors.packed + int64_t(row / kColumns) * kColumns * anchors.depth + row % kColumns,
      candidates.packed + int64_t(panel) * kColumns * candidates.depth, anchors.depth,
      candidates.offset_sum + panel * kColumns, sum);
#pragma GCC unroll 2
  for (int v = 0; v < kPanelVectors; ++v) {
    const FloatVector scale = load_vector<float>(candidates.scale + panel * kColumns + v * lanes);
#pragma GCC unroll 8
    for (int r = 0; r < kIntegerRows; ++r)
      values[r][v] = multiply_add(to_floats(sum[r][v]) * scale, broadcast(scan.row_scale[row + r]),
                                  broadcast(-scan.row_bar[row + r]));
  }
}

// Lanes that pass: above the thresholds of the row or of the column; `beyond`: and below their ceilings.
// Returned are negative numbers where a pair passes, which one minimum can gather.
template <bool beyond>
TRIPLETOPS_INLINE FloatVector lack_of(const Scan& scan, int32_t row, int32_t column, FloatVector value) {
  const FloatVector bar = load_vector<float>(scan.column_bar + column);
  const FloatVector row_limit = bar + broadcast(scan.row_threshold[row]);
  const FloatVector column_limit = load_vector<float>(scan.column_limit + column);
  if constexpr (!beyond) return keep_least(column_limit, row_limit) - value;
  const FloatVector ceiling = load_vector<float>(scan.column_ceiling + column);
  const FloatVector by_row = row_limit - value;
  const FloatVector above = value - (ceiling + broadcast(scan.row_cut[row]));
  const FloatVector by_column = column_limit - value;
  const FloatVector over =
      value - (load_vector<float>(scan.column_cut + column) + broadcast(scan.row_widening[row]));
  return keep_least(keep_most(by_row, above), keep_most(by_column, over));
}

constexpr int kParts = 4;  // of a tile, each of which is looked at again if anything in it passes
constexpr int kPartRows = kIntegerRows / kParts;

template <bool beyond>
__attribute__((noinline)) Hit* list_hits(const Scan& scan, int32_t row, int32_t panel, int part,
                                         const uint32_t* allowed, const Values& values, Hit* hits) {
  constexpr int lanes = kLanes<float>;
  for (int r = part * kPartRows; r < (part + 1) * kPartRows; ++r)
    for (int v = 0; v < kPanelVectors; ++v) {
      const int32_t column = panel * kColumns + v * lanes;
      const FloatVector value = values[r][v], lack = lack_of<beyond>(scan, row + r, column, value);
      uint32_t bits = ~lanes_not_above(FloatVector{}, lack) & kAllLanes<float>;
      if (allowed) bits &= allowed[r] >> (v * lanes);
      for (; bits; bits &= bits - 1) {
        const int lane = __builtin_ctz(bits);
        *hits++ = {row + r, column + lane, value[lane]};
      }
    }
  return hits;
}

template <class Integers, bool beyond>
TRIPLETOPS_INLINE int32_t scan_tile(const Scan& scan, int32_t row, int32_t panel, const uint32_t* allowed,
                                    Hit* hits) {
  Values values;
  signed_values<Integers>(scan, row, panel, values);
  FloatVector least[kParts] = {};
#pragma GCC unroll 8
  for (int r = 0; r < kIntegerRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v)
      least[r / kPartRows] =
          keep_least(lack_of<beyond>(scan, row + r, panel * kColumns + v * kLanes<float>, values[r][v]),
                     least[r / kPartRows]);
  const FloatVector all = keep_least(keep_least(least[0], least[1]), keep_least(least[2], least[3]));
  if (__builtin_expect(lanes_not_above(FloatVector{}, all) == kAllLanes<float>, 1)) return 0;
  Hit* end = hits;
  for (int part = 0; part < kParts; ++part)
    if (lanes_not_above(FloatVector{}, least[part]) != kAllLanes<float>)
      end = list_hits<beyond>(scan, row, panel, part, allowed, values, end);
  return int32_t(end - hits);
}

int32_t scan_any(const Scan& scan, int32_t row, int32_t panel, const uint32_t* allowed, Hit* hits) {
  const bool beyond = scan.row_cut != nullptr;
  if (scan.anchors->bytes == 1)
    return beyond ? scan_tile<Bytes, true>(scan, row, panel, allowed, hits)
                  : scan_tile<Bytes, false>(scan, row, panel, allowed, hits);
  return beyond ? scan_tile<Halves, true>(scan, row, panel, allowed, hits)
                : scan_tile<Halves, false>(scan, row, panel, allowed, hits);
}

template <class Integers>
void best_of_panels(const Scan& scan, int32_t row, const int32_t* panels, int32_t count,
                    int32_t* candidates) {
  constexpr int lanes = kLanes<float>;
  FloatVector best[kIntegerRows][kPanelVectors];
  IntVector at[kIntegerRows][kPanelVectors];
  for (int r = 0; r < kIntegerRows; ++r)
    for (int v = 0; v < kPanelVectors; ++v)
      best[r][v] = broadcast(-kInfinity<float>), at[r][v] = broadcast_integer(-1);
  for (int32_t i = 0; i < count; ++i) {
    Values values;
    signed_values<Integers>(scan, row, panels[i], values);
    for (int v = 0; v < kPanelVectors; ++v) {
      const int32_t column = panels[i] * kColumns + v * lanes;
      const FloatVector bar = load_vector<float>(scan.column_bar + column);
      for (int r = 0; r < kIntegerRows; ++r) {
        FloatVector key = values[r][v] - bar;
        if (scan.row_cut) {
          const FloatVector ceiling = load_vector<float>(scan.column_ceiling + column);
          key =
              values[r][v] < ceiling + broadcast(scan.row_cut[row + r]) ? key : broadcast(-kInfinity<float>);
        }
        at[r][v] = key > best[r][v] ? broadcast_integer(panels[i]) : at[r][v];
        best[r][v] = keep_most(key, best[r][v]);
      }
    }
  }
  for (int r = 0; r < kIntegerRows; ++r) {
    float most = -kInfinity<float>;
    candidates[r] = -1;
    for (int c = 0; c < kColumns; ++c) {
      const float key = best[r][c / lanes][c % lanes];
      if (key > most) most = key, candidates[r] = at[r][c / lanes][c % lanes] * kColumns + c;
    }
  }
}

void best_of_any(const Scan& scan, int32_t row, const int32_t* panels, int32_t count, int32_t* candidates) {
  if (scan.anchors->bytes == 1)
    best_of_panels<Bytes>(scan, row, panels, count, candidates);
  else
    best_of_panels<Halves>(scan, row, panels, count, candidates);
}

// The integers of one framed row, adjacent, and what is known of the row.
template <class Integers>
TRIPLETOPS_INLINE void quantise_row(const float* z, int64_t width, const Quantised& to, int32_t position,
                                    uint32_t* integers) {
  constexpr int lanes = kLanes<float>;
  FloatVector square = {}, least = {};
  const int64_t whole = width / lanes * lanes;
  for (int64_t d = 0; d < whole; d += lanes) {
    const FloatVector v = load_vector<float>(z + d);
    square = multiply_add(v, v, square);
    least = keep_least(v, keep_least(-v, least));
  }
  float tail[lanes] = {};
  for (int64_t d = whole; d < width; ++d) tail[d - whole] = z[d];
  const FloatVector last = load_vector<float>(tail);
  square = multiply_add(last, last, square);
  least = keep_least(last, keep_least(-last, least));
  float largest = 0;
  for (int lane = 0; lane < lanes; ++lane) largest = -least[lane] > largest ? -least[lane] : largest;
  // Covers the rounding of the sums and, at 2^-24 of z, that of the framing.
  const float slack = 1 + float(width / 16 + 32) * 0x1p-24f;
  const float norm = float(__builtin_sqrt(sum_lanes<float>(square))) * slack;

  // A row too short for its scale to have an inverse counts as all residual.
  float inverse = 0;
  if (largest > 0x1p-100f) {
    inverse = float(Integers::size == 1 ? kLargestByte : kLargestHalf) / largest;
    if (Integers::size == 2 && inverse * norm > float(kLargestNorm)) inverse = float(kLargestNorm) / norm;
  }
  const float scale = inverse > 0 ? 1 / inverse : 0;
  const FloatVector up = broadcast(inverse), down = broadcast(scale);
  FloatVector left = {}, along = {};
  IntVector sum = {};
  char* bytes = reinterpret_cast<char*>(integers);
  const int64_t padded = to.depth * 4 / Integers::size;
  for (int64_t d = 0; d < padded; d += lanes) {
    IntVector q = {};
    if (d < width) {
      const FloatVector v = d < whole ? load_vector<float>(z + d) : last;
      q = to_integers(v * up);
      const FloatVector r = multiply_add(-to_floats(q), down, v);
      left = multiply_add(r, r, left), along = multiply_add(r, v, along), sum += q;
    }
    store_narrow<Integers::size>(q + broadcast_integer(Integers::size == 1 ? kByteOffset : 0),
                                 bytes + Integers::size * d);
  }
  int32_t total = 0;
  for (int lane = 0; lane < lanes; ++lane) total += sum[lane];
  to.scale[position] = scale;
  to.norm[position] = norm;
  // What framing has rounded away belongs to the residual.
  to.residual[position] = float(__builtin_sqrt(sum_lanes<float>(left))) * slack + 0x1p-22f * norm + 0x1p-62f;
  to.along[position] = float(sum_lanes<float>(along));
  to.offset_sum[position] = Integers::size == 1 ? -kByteOffset * total : 0;
}

template <class Integers>
TRIPLETOPS_INLINE void quantise_rows(const float* framed, int32_t count, int64_t width, const Quantised& to,
                                     int32_t panel, uint32_t* integers) {
  for (int32_t r = 0; r < kColumns; ++r) {
    const int32_t position = panel * kColumns + r;
    if (r < count) {
      quantise_row<Integers>(framed + r * width, width, to, position, integers + r * to.depth);
      continue;
    }
    std::memset(integers + r * to.depth, Integers::size == 1 ? kByteOffset : 0, size_t(to.depth) * 4);
    to.scale[position] = to.norm[position] = to.residual[position] = to.along[position] = 0;
    to.offset_sum[position] = 0;
  }
  // Only moved, so that their being no floats does not matter.
  interleave_rows<kColumns>(reinterpret_cast<const float*>(integers), to.depth,
                            reinterpret_cast<float*>(to.packed + int64_t(panel) * kColumns * to.depth));
}

void quantise_any(const float* framed, int32_t count, int64_t width, const Quantised& to, int32_t panel,
                  uint32_t* integers) {
  if (to.bytes == 1)
    quantise_rows<Bytes>(framed, count, width, to, panel, integers);
  else
    quantise_rows<Halves>(framed, count, width, to, panel, integers);
}

float half_square_of(const float* x, const float* y, int64_t width, const float* x_scale,
                     const float* y_scale) {
  constexpr int lanes = kLanes<float>;
  const float x0 = x_scale[0], x1 = x_scale[1], y0 = y_scale[0], y1 = y_scale[1];
  FloatVector even = {}, odd = {};
  const auto step = [&](int64_t d, FloatVector& squares) {
    const FloatVector difference = load_vector<float>(x + d) * x0 * x1 - load_vector<float>(y + d) * y0 * y1;
    squares = multiply_add(difference, difference, squares);
  };
  int64_t d = 0;
  for (; d + 2 * lanes <= width; d += 2 * lanes) step(d, even), step(d + lanes, odd);
  if (d + lanes <= width) step(d, even), d += lanes;
  double square = sum_lanes<float>(even + odd);
  for (; d < width; ++d) {
    const double difference = double(x[d] * x0 * x1 - y[d] * y0 * y1);
    square += difference * difference;
  }
  return float(0.5 * square);
}

double half_square_in_double(const Pair<float>& pair, int64_t width, Distance distance, double scale) {
  if (distance == Distance::cosine) return measure<float>(pair, width, distance);
  return 0.5 * scale * scale * sum_of_squares(pair.x, pair.y, width, [](auto a, auto b) { return a - b; });
}

constexpr QuantisedFunctions quantised_functions() {
  return {kIntegerRows, kColumns, kLargestByte, kLargestHalf,   kLargestNorm,
          quantise_any, scan_any, best_of_any,  half_square_of, half_square_in_double};
}

// A table of these alone.
constexpr Functions<float> integer_functions() {
  Functions<float> functions = {};
  functions.quantised = quantised_functions();
  return functions;
}

}  // namespace
}  // namespace tripletops
