// The counter-based generator behind the random rules: integer arithmetic only, the same picks on every
// backend. tripletops/reference states it again in plain torch.
#pragma once

#include <cstdint>

namespace tripletops {
namespace {

inline uint64_t hash_anchor(uint64_t seed, uint64_t anchor) {
  uint64_t z = seed + (anchor + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Each step is a bijection of 32 bits: no two candidates of one anchor tie, and the winner can be read off
// its hash.
inline uint32_t hash_candidate(uint64_t row, uint32_t candidate) {
  uint32_t x = candidate * 0x9E3779B1u + uint32_t(row);
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x ^= uint32_t(row >> 32);
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

// The candidate whose hash is x.
inline uint32_t unhash_candidate(uint64_t row, uint32_t x) {
  x ^= x >> 16;
  x *= 0x7ED1B41Du;  // 0xC2B2AE35 * 0x7ED1B41D = 1 modulo 2^32, and likewise below
  x ^= x >> 13 ^ x >> 26;
  x ^= uint32_t(row >> 32);
  x *= 0xA5CB9243u;
  x ^= x >> 16;
  return (x - uint32_t(row)) * 0x0E8B2F51u;
}

}  // namespace
}  // namespace tripletops
