// Working memory of one call: uninitialised, aligned, freed together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace tripletops {

// Where the environment variable TRIPLETOPS_POISON is set, fresh memory is filled with bytes that read as
// NaN, so that tests see every read of memory that nobody wrote.
inline void poison(void* memory, size_t bytes) {
  static const bool wanted = std::getenv("TRIPLETOPS_POISON") != nullptr;
  if (wanted) std::memset(memory, 0xff, bytes);
}

class Scratch {
 public:
  template <class T>
  T* take(int64_t count) {
    const size_t bytes = (size_t(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    if (bytes > left_) grow(bytes);
    char* memory = next_;
    next_ += bytes;
    left_ -= bytes;
    return reinterpret_cast<T*>(memory);
  }

 private:
  static constexpr size_t kAlignment = 64, kBlock = 1 << 16;  // small requests share a block

  void grow(size_t bytes) {
    left_ = bytes > kBlock ? bytes : kBlock;
    next_ = static_cast<char*>(std::aligned_alloc(kAlignment, left_));
    if (!next_) throw std::bad_alloc();
    blocks_.emplace_back(next_);
    poison(next_, left_);
  }

  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::vector<std::unique_ptr<char, Free>> blocks_;
  char* next_ = nullptr;
  size_t left_ = 0;
};

}  // namespace tripletops
