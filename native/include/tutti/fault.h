// The fault version of the device seam: real I/O on real devices, with chosen operations made to fail.
// Production code holds a null pointer. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "tutti/ring.h"

namespace tutti {

enum class FaultKind : uint8_t {
  None = 0,
  Error = 1,    // half of the bytes move, then the result is -errno
  Short = 2,    // half of the bytes move, and the result says so
  Hang = 3,     // never completes until release()
  Corrupt = 4,  // reads: one bit of the bytes that arrived is flipped; writes: one bit of what reaches the device
};

struct Fault {
  FaultKind kind = FaultKind::None;
  int error = 0;      // errno, for Error
  uint64_t seed = 0;  // chooses the bit, for Corrupt
};

class FaultInjector {
 public:
  // Every `every`-th operation in `direction` on `device` (-1 = any) fails as `fault` says, at most `limit` times.
  void add(Direction direction, int device, uint64_t every, Fault fault, uint64_t limit = UINT64_MAX) {
    const std::lock_guard lock(mutex_);
    rules_.push_back({direction, device, every, fault, limit, 0});
  }
  void clear() {
    const std::lock_guard lock(mutex_);
    rules_.clear();
  }
  // Lets every hanging operation end (as cancelled).
  void release() noexcept { released_.fetch_add(1, std::memory_order_acq_rel); }
  [[nodiscard]] uint64_t releases() const noexcept { return released_.load(std::memory_order_acquire); }
  [[nodiscard]] uint64_t injected() const noexcept { return injected_.load(std::memory_order_acquire); }

  Fault decide(Direction direction, uint32_t device) {
    const std::lock_guard lock(mutex_);
    for (auto& rule : rules_) {
      if (rule.direction != direction || (rule.device >= 0 && static_cast<uint32_t>(rule.device) != device)) {
        continue;
      }
      if (++rule.seen % rule.every == 0 && rule.limit > 0) {
        --rule.limit;
        injected_.fetch_add(1, std::memory_order_acq_rel);
        Fault fault = rule.fault;
        fault.seed += rule.seen;
        return fault;
      }
    }
    return {};
  }

 private:
  struct Rule {
    Direction direction;
    int device;
    uint64_t every;
    Fault fault;
    uint64_t limit;
    uint64_t seen;
  };
  std::mutex mutex_;
  std::vector<Rule> rules_;
  std::atomic<uint64_t> released_{0};
  std::atomic<uint64_t> injected_{0};
};

}  // namespace tutti
