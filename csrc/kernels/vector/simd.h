// Vectors of the width that the instruction set has (`Isa`, which the including file defines), on GCC's
// vector extension, with intrinsics only where that has no word for the instruction. Included by the files of
// instruction sets alone; everything is in an unnamed namespace, so that no code of one instruction set can
// be linked in place of another's.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tripletops {
namespace {

typedef float FloatVector __attribute__((vector_size(Isa::vector_bytes)));
typedef double DoubleVector __attribute__((vector_size(Isa::vector_bytes)));

template <class T>
struct VectorOf;
template <>
struct VectorOf<float> {
  using type = FloatVector;
};
template <>
struct VectorOf<double> {
  using type = DoubleVector;
};
template <class T>
using Vector = typename VectorOf<T>::type;

template <class T>
constexpr int kLanes = Isa::vector_bytes / int(sizeof(T));

#define TRIPLETOPS_INLINE inline __attribute__((always_inline))

template <class T>
TRIPLETOPS_INLINE Vector<T> load_vector(const T* from) {
  Vector<T> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class V, class T>
TRIPLETOPS_INLINE void store_vector(V v, T* to) {
  std::memcpy(to, &v, sizeof v);
}

// As many elements as a vector of doubles has, widened.
TRIPLETOPS_INLINE DoubleVector load_doubles(const double* from) { return load_vector<double>(from); }
template <class V = DoubleVector>
TRIPLETOPS_INLINE V load_doubles(const float* from) {
#if defined(__x86_64__)
  // GCC 12 takes __builtin_convertvector of these apart, element by element.
  if constexpr (Isa::vector_bytes == 64) return _mm512_cvtps_pd(_mm256_loadu_ps(from));
  if constexpr (Isa::vector_bytes == 32) return _mm256_cvtps_pd(_mm_loadu_ps(from));
#endif
  typedef float Narrow __attribute__((vector_size(Isa::vector_bytes / 2)));
  Narrow narrow;
  std::memcpy(&narrow, from, sizeof narrow);
  return __builtin_convertvector(narrow, V);
}

template <class T>
TRIPLETOPS_INLINE Vector<T> broadcast(T value) {
  return value - Vector<T>{};  // exact for every value, -0 included
}

template <class V>
using Element = std::remove_reference_t<decltype(std::declval<V&>()[0])>;

template <class V, class T, int bytes>
constexpr bool kIs = std::is_same_v<Element<V>, T> && sizeof(V) == bytes;

// multiply_add is the one operation whose rounding differs between instruction sets.
template <class V>
TRIPLETOPS_INLINE V multiply_add(V a, V b, V c) {
#if defined(__x86_64__)
  if constexpr (Isa::fused && kIs<V, float, 64>) return _mm512_fmadd_ps(a, b, c);
  if constexpr (Isa::fused && kIs<V, double, 64>) return _mm512_fmadd_pd(a, b, c);
  if constexpr (Isa::fused && kIs<V, float, 32>) return _mm256_fmadd_ps(a, b, c);
  if constexpr (Isa::fused && kIs<V, double, 32>) return _mm256_fmadd_pd(a, b, c);
#endif
  if constexpr (!Isa::fused) return a * b + c;
}

// c < best ? c : best, so that a NaN candidate never displaces anything.
template <class V>
TRIPLETOPS_INLINE V keep_least(V c, V best) {
#if defined(__x86_64__)
  if constexpr (kIs<V, float, 64>) return _mm512_min_ps(c, best);
  if constexpr (kIs<V, double, 64>) return _mm512_min_pd(c, best);
  if constexpr (kIs<V, float, 32>) return _mm256_min_ps(c, best);
  if constexpr (kIs<V, double, 32>) return _mm256_min_pd(c, best);
#endif
  if constexpr (sizeof(V) == 16) return c < best ? c : best;
}

// c > best ? c : best.
template <class V>
TRIPLETOPS_INLINE V keep_most(V c, V best) {
#if defined(__x86_64__)
  if constexpr (kIs<V, float, 64>) return _mm512_max_ps(c, best);
  if constexpr (kIs<V, float, 32>) return _mm256_max_ps(c, best);
#endif
  if constexpr (!kIs<V, float, 64> && !kIs<V, float, 32>) return c > best ? c : best;
}

// Bit i is set where a[i] <= b[i].
template <class V>
TRIPLETOPS_INLINE uint32_t lanes_not_above(V a, V b) {
#if defined(__x86_64__)
  if constexpr (kIs<V, float, 64>) return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ);
  if constexpr (kIs<V, double, 64>) return _mm512_cmp_pd_mask(a, b, _CMP_LE_OQ);
  if constexpr (kIs<V, float, 32>) return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LE_OQ)));
  if constexpr (kIs<V, double, 32>) return uint32_t(_mm256_movemask_pd(_mm256_cmp_pd(a, b, _CMP_LE_OQ)));
#endif
  if constexpr (sizeof(V) == 16) {
    const auto below = a <= b;
    uint32_t bits = 0;
    for (unsigned lane = 0; lane < sizeof(V) / sizeof a[0]; ++lane) bits |= uint32_t(below[lane] & 1) << lane;
    return bits;
  }
}

template <class V>
TRIPLETOPS_INLINE V square_root(V v) {
#if defined(__x86_64__)
  if constexpr (kIs<V, float, 64>) return _mm512_sqrt_ps(v);
  if constexpr (kIs<V, double, 64>) return _mm512_sqrt_pd(v);
  if constexpr (kIs<V, float, 32>) return _mm256_sqrt_ps(v);
  if constexpr (kIs<V, double, 32>) return _mm256_sqrt_pd(v);
#endif
  if constexpr (sizeof(V) == 16) {
    for (unsigned lane = 0; lane < sizeof(V) / sizeof v[0]; ++lane) v[lane] = __builtin_sqrt(v[lane]);
    return v;
  }
}

template <class T>
constexpr uint32_t kAllLanes = uint32_t((uint64_t(1) << kLanes<T>)-1);

// combine(low half, high half) of a vector until one element is left.
template <class V, class Combine>
TRIPLETOPS_INLINE auto fold(V v, const Combine& combine) {
  using T = Element<V>;
  if constexpr (sizeof(V) == 2 * sizeof(T)) {
    return combine(T(v[0]), T(v[1]));
  } else {
    typedef T Half __attribute__((vector_size(sizeof(V) / 2)));
    Half low, high;
    std::memcpy(&low, &v, sizeof low);
    std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
    return fold(combine(low, high), combine);
  }
}

// Added up in double.
template <class T>
TRIPLETOPS_INLINE double sum_lanes(Vector<T> v) {
  const auto add = [](auto a, auto b) { return a + b; };
  if constexpr (sizeof(T) == sizeof(double)) {
    return fold(v, add);
  } else {
    T lanes[kLanes<T>];
    store_vector(v, lanes);
    return fold(load_doubles(lanes) + load_doubles(lanes + kLanes<double>), add);
  }
}

// The least of all lanes, none of which is NaN.
template <class T>
TRIPLETOPS_INLINE T least_lane(Vector<T> v) {
  return fold(v, [](auto a, auto b) { return a < b ? a : b; });
}

// The scalar that rounds as one lane of multiply_add does.
template <class T>
TRIPLETOPS_INLINE T multiply_add_one(T a, T b, T c) {
  if constexpr (!Isa::fused)
    return a * b + c;
  else if constexpr (sizeof(T) == sizeof(float))
    return __builtin_fmaf(a, b, c);
  else
    return __builtin_fma(a, b, c);
}

// The largest finite number.
template <class T>
constexpr T kLargest = sizeof(T) == sizeof(float) ? T(__FLT_MAX__) : T(__DBL_MAX__);

template <class T>
constexpr T kInfinity = T(__builtin_inf());

}  // namespace
}  // namespace tripletops
