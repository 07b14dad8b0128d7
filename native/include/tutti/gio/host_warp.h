// A thread in the place of a GPU warp: what the I/O kernel's source needs of a warp, lane by lane. For tests without a
// GPU, and under the thread sanitizer.
#pragma once

#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <thread>

#include "tutti/checksum.h"
#include "tutti/gio/shared.h"

namespace tutti::gio {

class HostWarp {
 public:
  template <typename T>
  class PerLane {
   public:
    T& operator[](uint32_t lane) noexcept { return values_[lane]; }

   private:
    std::array<T, kLanes> values_{};
  };

  template <typename Body>
  void each(Body body) noexcept {
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      body(lane);
    }
  }
  template <typename Body>
  void single(Body body) noexcept {
    body();
  }
  template <typename Body>
  auto once(Body body) noexcept {
    return body();
  }
  template <typename Predicate>
  uint32_t ballot(Predicate predicate) noexcept {
    uint32_t mask = 0;
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      mask |= predicate(lane) ? 1U << lane : 0U;
    }
    return mask;
  }
  template <typename Value>
  uint32_t from(uint32_t lane, Value value) noexcept {
    return value(lane);
  }
  static uint32_t population(uint32_t mask) noexcept { return static_cast<uint32_t>(std::popcount(mask)); }
  static uint32_t trailing_ones(uint32_t mask) noexcept { return static_cast<uint32_t>(std::countr_one(mask)); }
  static uint64_t now() noexcept {
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  }
  static void pause() noexcept { std::this_thread::sleep_for(std::chrono::microseconds(20)); }
  static void relax() noexcept { std::this_thread::yield(); }  // while others work for this warp

  // Copies (target != 0) and returns the segment's part of the checksum, before mix and length.
  static uint64_t move(uint64_t source, uint64_t target, uint32_t bytes) noexcept {
    const auto* from = reinterpret_cast<const unsigned char*>(source);
    if (target != 0) {
      std::memcpy(reinterpret_cast<void*>(target), from, bytes);
    }
    return checksum_block_sum(from, bytes);
  }
};

}  // namespace tutti::gio
