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
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() {
    if (!shared_.empty()) spare() = std::move(shared_.front());
  }

  template <class T>
  T* take(int64_t count) {
    const size_t bytes = (size_t(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    if (bytes > left_) grow(bytes);
    char* memory = next_;
    next_ += bytes;
    left_ -= bytes;
    return reinterpret_cast<T*>(memory);
  }

  template <class T>
  T* filled(int64_t count, T value) {
    T* values = take<T>(count);
    for (int64_t i = 0; i < count; ++i) values[i] = value;
    return values;
  }

 private:
  static constexpr size_t kAlignment = 64, kBlock = 1 << 19;  // smaller requests share a block

  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  using Block = std::unique_ptr<char, Free>;

  // One block outlives its call: giving it back to the system and asking for it again costs a small batch
  // 10%.
  static Block& spare() {
    thread_local Block block;
    return block;
  }

  void grow(size_t bytes) {
    const bool shared = bytes <= kBlock;
    left_ = shared ? kBlock : bytes;
    Block block = shared ? std::move(spare()) : Block();
    if (!block) block.reset(static_cast<char*>(std::aligned_alloc(kAlignment, left_)));
    if (!block) throw std::bad_alloc();
    next_ = block.get();
    poison(next_, left_);
    (shared ? shared_ : own_).push_back(std::move(block));
  }

  std::vector<Block> shared_, own_;
  char* next_ = nullptr;
  size_t left_ = 0;
};

}  // namespace tripletops
