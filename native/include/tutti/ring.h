// The pair of rings between those who plan I/O and those who do it (gio_uring, Tutti section "GPU io_uring"): what they
// carry, and the form whose executors are threads. The form that a GPU works at is in gio/.
//
// An IOCB is a batch of up to 2,048 IOCTX, each one object's transfer. The planner takes a free IOCB, fills it and
// issues its id to the submission ring; an executor's lane takes the id, moves the bytes, and posts a CQE. Invariants:
// an IOCB is in exactly one of {free, being filled, submitted, running, completed}; its generation grows each time it
// becomes free, so a completion of an earlier use is recognised; the rings hold ids only and can't overflow (capacity
// >= depth).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "tutti/iocb.h"
#include "tutti/status.h"

namespace tutti {

// Bounded lock-free queue for several producers and consumers (D. Vyukov's design: a sequence number per cell).
template <typename T>
class MpmcQueue {
 public:
  explicit MpmcQueue(uint32_t least_capacity) {
    uint64_t capacity = 2;
    while (capacity < least_capacity) {
      capacity *= 2;
    }
    mask_ = capacity - 1;
    cells_ = std::make_unique<Cell[]>(capacity);
    for (uint64_t i = 0; i < capacity; ++i) {
      cells_[i].sequence.store(i, std::memory_order_relaxed);
    }
  }

  // False when full.
  bool push(const T& value) noexcept {
    uint64_t at = tail_.load(std::memory_order_relaxed);
    for (;;) {
      Cell& cell = cells_[at & mask_];
      const auto lead = static_cast<int64_t>(cell.sequence.load(std::memory_order_acquire) - at);
      if (lead == 0) {
        if (tail_.compare_exchange_weak(at, at + 1, std::memory_order_relaxed)) {
          cell.value = value;
          cell.sequence.store(at + 1, std::memory_order_release);
          return true;
        }
      } else if (lead < 0) {
        return false;
      } else {
        at = tail_.load(std::memory_order_relaxed);
      }
    }
  }

  // Pushes where there must be room. A cell that a consumer has claimed and not emptied yet (it was preempted between)
  // still counts as taken when the others have gone round the queue: so this may have to wait for that consumer.
  void put(const T& value) noexcept {
    while (!push(value)) {
      std::this_thread::yield();
    }
  }

  std::optional<T> pop() noexcept {
    uint64_t at = head_.load(std::memory_order_relaxed);
    for (;;) {
      Cell& cell = cells_[at & mask_];
      const auto lead = static_cast<int64_t>(cell.sequence.load(std::memory_order_acquire) - (at + 1));
      if (lead == 0) {
        if (head_.compare_exchange_weak(at, at + 1, std::memory_order_relaxed)) {
          T value = cell.value;
          cell.sequence.store(at + mask_ + 1, std::memory_order_release);
          return value;
        }
      } else if (lead < 0) {
        return std::nullopt;
      } else {
        at = head_.load(std::memory_order_relaxed);
      }
    }
  }

 private:
  struct Cell {
    std::atomic<uint64_t> sequence;
    T value;
  };
  std::unique_ptr<Cell[]> cells_;
  uint64_t mask_ = 0;
  alignas(64) std::atomic<uint64_t> head_{0};
  alignas(64) std::atomic<uint64_t> tail_{0};
};

// Thread-safe. Memory: depth * 64 KiB of contexts.
class Ring {
 public:
  explicit Ring(uint32_t depth) : iocbs_(depth), free_(depth), submitted_(depth), completed_(depth) {
    for (uint32_t id = 0; id < depth; ++id) {
      iocbs_[id] = std::make_unique<Iocb>();
      iocbs_[id]->header.id = id;
      free_.put(id);
    }
  }

  // A free IOCB to fill, or nullptr (the caller's EAGAIN).
  Iocb* get_iocb() noexcept {
    const auto id = free_.pop();
    return id ? iocbs_[*id].get() : nullptr;
  }

  // Hands a filled IOCB to the executors.
  void issue(Iocb& iocb) noexcept {
    std::atomic_ref(iocb.header.done).store(0, std::memory_order_relaxed);
    std::atomic_ref(iocb.header.first_error).store(0, std::memory_order_relaxed);
    submitted_.put(iocb.header.id);
  }

  // Executor side: the next batch, or nullptr.
  Iocb* take() noexcept {
    const auto id = submitted_.pop();
    return id ? iocbs_[*id].get() : nullptr;
  }

  // Executor side: one context of `iocb` ended. Returns true for the last one, after its CQE was posted.
  bool complete(Iocb& iocb, uint16_t status_slot, Status status) noexcept {
    if (status != Status::Ok) {
      uint32_t none = 0;
      std::atomic_ref(iocb.header.first_error)
          .compare_exchange_strong(none, static_cast<uint32_t>(status) << 16 | status_slot);
    }
    const uint32_t count = iocb.header.num_ioctx;
    if (std::atomic_ref(iocb.header.done).fetch_add(1, std::memory_order_acq_rel) + 1 != count) {
      return false;
    }
    completed_.put(Cqe{iocb.header.id, iocb.header.generation,
                       std::atomic_ref(iocb.header.first_error).load(std::memory_order_relaxed) >> 16, count});
    return true;
  }

  // The next completion; its IOCB becomes free again under a new generation.
  std::optional<Cqe> reap() noexcept {
    const auto cqe = completed_.pop();
    if (cqe) {
      ++iocbs_[cqe->iocb]->header.generation;
      free_.put(cqe->iocb);
    }
    return cqe;
  }

  [[nodiscard]] uint32_t depth() const noexcept { return static_cast<uint32_t>(iocbs_.size()); }

 private:
  std::vector<std::unique_ptr<Iocb>> iocbs_;
  MpmcQueue<uint32_t> free_;
  MpmcQueue<uint32_t> submitted_;
  MpmcQueue<Cqe> completed_;
};

}  // namespace tutti
