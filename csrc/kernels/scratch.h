// Working memory of one call: uninitialised, aligned, freed together. The environment variable
// TRIPLETOPS_POISON fills it with bytes that read as NaN, so that tests see every read of memory that nobody
// wrote.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace tripletops {

class Scratch {
 public:
  template <class T>
  T* take(int64_t count) {
    const size_t bytes = (size_t(count) * sizeof(T) + 63) / 64 * 64 + 64;
    void* memory = std::aligned_alloc(64, bytes);
    if (!memory) throw std::bad_alloc();
    blocks_.emplace_back(memory);
    static const bool poison = std::getenv("TRIPLETOPS_POISON") != nullptr;
    if (poison) std::memset(memory, 0xff, bytes);
    return static_cast<T*>(memory);
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::vector<std::unique_ptr<void, Free>> blocks_;
};

}  // namespace tripletops
