// Tasks handed out one at a time to the pool's threads. Results never depend on who takes which task.
#pragma once

#include <atomic>
#include <cstdint>

#include "call.h"

namespace tripletops {

constexpr int32_t kRowsPerTask = 256;  // fixed, so that sums over rows do not depend on the number of threads
constexpr int32_t kRowsInTurn = 64;    // the same where nothing is summed: enough tasks for everyday batches

// Calls task(i, worker) for every i in [0, count); `worker` < pool.threads tells concurrent calls apart.
template <class Task>
void for_each_task(const Pool& pool, int64_t count, const Task& task) {
  if (pool.threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i, 0);
    return;
  }
  struct Shared {
    const Task& task;
    int64_t count;
    std::atomic<int64_t> next;
  } shared{task, count, {0}};
  pool.run(
      pool.threads,
      [](void* context, int worker) {
        Shared& all = *static_cast<Shared*>(context);
        for (int64_t i; (i = all.next.fetch_add(1, std::memory_order_relaxed)) < all.count;)
          all.task(i, worker);
      },
      &shared);
}

// Calls task(begin, end, worker) for [0, count) cut into ranges of `size`.
template <class Task>
void for_each_range(const Pool& pool, int64_t count, int64_t size, const Task& task) {
  for_each_task(pool, (count + size - 1) / size, [&](int64_t i, int worker) {
    task(i * size, (i + 1) * size < count ? (i + 1) * size : count, worker);
  });
}

}  // namespace tripletops
