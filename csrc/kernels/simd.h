// Vectors of the width that the including file asks for (TRIPLETOPS_VECTOR_BYTES), on GCC's vector extension,
// with intrinsics only where that has no word for the instruction. Included by the instruction-set files
// alone; everything is in an unnamed namespace, so that no code of one instruction set can be linked in place
// of another's.
#pragma once

#include <cstdint>
#include <cstring>

#if TRIPLETOPS_VECTOR_BYTES > 16
#include <immintrin.h>
#endif

namespace tripletops {
namespace {

typedef float FloatVector __attribute__((vector_size(TRIPLETOPS_VECTOR_BYTES)));
typedef double DoubleVector __attribute__((vector_size(TRIPLETOPS_VECTOR_BYTES)));

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
constexpr int kLanes = TRIPLETOPS_VECTOR_BYTES / int(sizeof(T));

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
TRIPLETOPS_INLINE DoubleVector load_doubles(const float* from) {
  typedef float Narrow __attribute__((vector_size(TRIPLETOPS_VECTOR_BYTES / 2)));
  Narrow narrow;
  std::memcpy(&narrow, from, sizeof narrow);
  return __builtin_convertvector(narrow, DoubleVector);
}

template <class T>
TRIPLETOPS_INLINE Vector<T> broadcast(T value) {
  return value - Vector<T>{};  // exact for every value, -0 included
}

// multiply_add is the one operation whose rounding differs between variants; keep_least(c, best) is c < best
// ? c : best, so that a NaN candidate never displaces anything; lanes_not_above(a, b) has bit i set where
// a[i] <= b[i].
#if TRIPLETOPS_VECTOR_BYTES == 64
TRIPLETOPS_INLINE FloatVector multiply_add(FloatVector a, FloatVector b, FloatVector c) {
  return _mm512_fmadd_ps(a, b, c);
}
TRIPLETOPS_INLINE DoubleVector multiply_add(DoubleVector a, DoubleVector b, DoubleVector c) {
  return _mm512_fmadd_pd(a, b, c);
}
TRIPLETOPS_INLINE FloatVector keep_least(FloatVector c, FloatVector best) { return _mm512_min_ps(c, best); }
TRIPLETOPS_INLINE DoubleVector keep_least(DoubleVector c, DoubleVector best) {
  return _mm512_min_pd(c, best);
}
TRIPLETOPS_INLINE uint32_t lanes_not_above(FloatVector a, FloatVector b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ);
}
TRIPLETOPS_INLINE uint32_t lanes_not_above(DoubleVector a, DoubleVector b) {
  return _mm512_cmp_pd_mask(a, b, _CMP_LE_OQ);
}
TRIPLETOPS_INLINE FloatVector square_root(FloatVector v) { return _mm512_sqrt_ps(v); }
TRIPLETOPS_INLINE DoubleVector square_root(DoubleVector v) { return _mm512_sqrt_pd(v); }
#elif TRIPLETOPS_VECTOR_BYTES == 32
TRIPLETOPS_INLINE FloatVector multiply_add(FloatVector a, FloatVector b, FloatVector c) {
  return _mm256_fmadd_ps(a, b, c);
}
TRIPLETOPS_INLINE DoubleVector multiply_add(DoubleVector a, DoubleVector b, DoubleVector c) {
  return _mm256_fmadd_pd(a, b, c);
}
TRIPLETOPS_INLINE FloatVector keep_least(FloatVector c, FloatVector best) { return _mm256_min_ps(c, best); }
TRIPLETOPS_INLINE DoubleVector keep_least(DoubleVector c, DoubleVector best) {
  return _mm256_min_pd(c, best);
}
TRIPLETOPS_INLINE uint32_t lanes_not_above(FloatVector a, FloatVector b) {
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LE_OQ)));
}
TRIPLETOPS_INLINE uint32_t lanes_not_above(DoubleVector a, DoubleVector b) {
  return uint32_t(_mm256_movemask_pd(_mm256_cmp_pd(a, b, _CMP_LE_OQ)));
}
TRIPLETOPS_INLINE FloatVector square_root(FloatVector v) { return _mm256_sqrt_ps(v); }
TRIPLETOPS_INLINE DoubleVector square_root(DoubleVector v) { return _mm256_sqrt_pd(v); }
#else
template <class V>
TRIPLETOPS_INLINE V multiply_add(V a, V b, V c) {
  return a * b + c;
}
template <class V>
TRIPLETOPS_INLINE V keep_least(V c, V best) {
  return c < best ? c : best;
}
template <class V>
TRIPLETOPS_INLINE uint32_t lanes_not_above(V a, V b) {
  const auto below = a <= b;
  uint32_t bits = 0;
  for (unsigned lane = 0; lane < sizeof(V) / sizeof a[0]; ++lane) bits |= uint32_t(below[lane] & 1) << lane;
  return bits;
}
template <class V>
TRIPLETOPS_INLINE V square_root(V v) {
  for (unsigned lane = 0; lane < sizeof(V) / sizeof v[0]; ++lane) v[lane] = __builtin_sqrt(v[lane]);
  return v;
}
#endif

template <class T>
constexpr uint32_t kAllLanes = uint32_t((uint64_t(1) << kLanes<T>)-1);

// Added up in double.
template <class T>
TRIPLETOPS_INLINE double sum_lanes(Vector<T> v) {
  double sum = 0;
  for (int lane = 0; lane < kLanes<T>; ++lane) sum += double(v[lane]);
  return sum;
}

// The scalar that rounds as one lane of multiply_add does.
template <class T>
TRIPLETOPS_INLINE T multiply_add_one(T a, T b, T c) {
#if TRIPLETOPS_VECTOR_BYTES > 16
  if constexpr (sizeof(T) == sizeof(float))
    return __builtin_fmaf(a, b, c);
  else
    return __builtin_fma(a, b, c);
#else
  return a * b + c;
#endif
}

}  // namespace
}  // namespace tripletops
