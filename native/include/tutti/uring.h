// One io_uring, by the kernel's own interface: what a lane needs and no more (liburing is not on every machine that has
// io_uring). Used by one thread. Errors are negative errno; the constructor throws std::system_error.
#pragma once

#include <linux/io_uring.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace tutti {

class Uring {
 public:
  explicit Uring(uint32_t entries);
  ~Uring();
  Uring(const Uring&) = delete;
  Uring& operator=(const Uring&) = delete;

  int register_files(const std::vector<int>& fds) noexcept;
  int register_buffers(const std::vector<std::pair<uint64_t, uint64_t>>& ranges) noexcept;

  // A cleared submission entry, or nullptr when the queue is full (submit first).
  io_uring_sqe* get_sqe() noexcept;
  [[nodiscard]] uint32_t unsubmitted() const noexcept { return pending_; }
  // Hands prepared entries to the kernel and waits for `wait_for` completions, at most `timeout_ns`. Negative errno on
  // failure; -ETIME and -EINTR mean only that fewer completions arrived.
  int submit(uint32_t wait_for, uint64_t timeout_ns) noexcept;
  // Calls handle(user_data, result) for each completion that is there. Returns how many.
  template <typename Handle>
  uint32_t reap(Handle handle) {
    uint32_t head = *cq_head_;
    uint32_t count = 0;
    while (head != __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) {
      const io_uring_cqe cqe = cqes_[head & cq_mask_];
      __atomic_store_n(cq_head_, ++head, __ATOMIC_RELEASE);
      ++count;
      handle(cqe.user_data, static_cast<int64_t>(cqe.res));
    }
    return count;
  }

 private:
  void unmap() noexcept;

  int fd_ = -1;
  void* sq_map_ = nullptr;
  void* cq_map_ = nullptr;
  void* sqe_map_ = nullptr;
  uint64_t sq_map_bytes_ = 0, cq_map_bytes_ = 0, sqe_map_bytes_ = 0;
  io_uring_sqe* sqes_ = nullptr;
  io_uring_cqe* cqes_ = nullptr;
  uint32_t *sq_head_ = nullptr, *sq_tail_ = nullptr, *sq_array_ = nullptr;
  uint32_t *cq_head_ = nullptr, *cq_tail_ = nullptr;
  uint32_t sq_mask_ = 0, cq_mask_ = 0, sq_entries_ = 0;
  uint32_t pending_ = 0;
};

}  // namespace tutti
