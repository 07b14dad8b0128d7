// A warp of the I/O kernel: what its source (gio/issuer.h, gio/mover.h) needs, on the GPU.
#pragma once

#include <cstdint>

#include "tutti/gio/shared.h"

namespace tutti::gio {

class CudaWarp {
 public:
  template <typename T>
  class PerLane {
   public:
    __device__ T& operator[](uint32_t) noexcept { return value_; }

   private:
    T value_{};
  };

  // `multipliers`: those of the checksum, in shared memory.
  __device__ explicit CudaWarp(const uint32_t* multipliers) noexcept
      : lane_(threadIdx.x % 32), multipliers_(reinterpret_cast<const uint4*>(multipliers)) {}

  template <typename Body>
  __device__ void each(Body body) noexcept {
    body(lane_);
    __syncwarp();
  }
  template <typename Body>
  __device__ void single(Body body) noexcept {
    if (lane_ == 0) {
      body();
    }
    __syncwarp();
  }
  template <typename Body>
  __device__ auto once(Body body) noexcept -> decltype(body()) {
    decltype(body()) value = 0;
    if (lane_ == 0) {
      value = body();
    }
    value = __shfl_sync(kAll, value, 0);
    __syncwarp();  // what lane 0 has seen, the others see too: a shuffle orders no memory
    return value;
  }
  template <typename Predicate>
  __device__ uint32_t ballot(Predicate predicate) noexcept {
    const uint32_t mask = __ballot_sync(kAll, predicate(lane_) ? 1 : 0);
    __syncwarp();
    return mask;
  }
  template <typename Value>
  __device__ uint32_t from(uint32_t lane, Value value) noexcept {
    return __shfl_sync(kAll, value(lane_), static_cast<int>(lane));
  }
  static __device__ uint32_t population(uint32_t mask) noexcept { return static_cast<uint32_t>(__popc(mask)); }
  static __device__ uint32_t trailing_ones(uint32_t mask) noexcept {
    return mask == kAll ? 32 : static_cast<uint32_t>(__ffs(static_cast<int>(~mask)) - 1);
  }
  static __device__ uint64_t now() noexcept {
    uint64_t value = 0;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
    return __shfl_sync(kAll, value, 0);  // one time for all lanes: they decide alike
  }
  static __device__ void pause() noexcept { __nanosleep(64); }
  static __device__ void relax() noexcept {}

  // Copies (target != 0) and returns the segment's part of the checksum, in every lane.
  __device__ uint64_t move(uint64_t source, uint64_t target, uint32_t bytes) noexcept {
    uint64_t sum = 0;
    const auto* from = reinterpret_cast<const uint4*>(source) + lane_;
    auto* to = reinterpret_cast<uint4*>(target) + lane_;
    if (bytes == kSegmentBytes && ((source | target) & 15) == 0) {
      uint4 words[kParts];
#pragma unroll
      for (uint32_t part = 0; part < kParts; ++part) {
        words[part] = load(from + part * 32);
      }
      if (target != 0) {
#pragma unroll
        for (uint32_t part = 0; part < kParts; ++part) {
          to[part * 32] = words[part];
        }
      }
#pragma unroll
      for (uint32_t part = 0; part < kParts; ++part) {
        sum += weigh(words[part], multipliers_[part * 32 + lane_]);
      }
    } else {
      sum = move_bytes(reinterpret_cast<const unsigned char*>(source), reinterpret_cast<unsigned char*>(target), bytes);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      sum += __shfl_xor_sync(kAll, sum, step);
    }
    return sum;
  }

 private:
  // Whatever isn't a whole, aligned segment: rare sizes, and the ends of others.
  __device__ uint64_t move_bytes(const unsigned char* from, unsigned char* to, uint32_t bytes) const noexcept {
    const auto* multipliers = reinterpret_cast<const uint32_t*>(multipliers_);
    uint64_t sum = 0;
    for (uint32_t word = lane_; word * 4 < bytes; word += 32) {
      uint32_t value = 0;
      for (uint32_t i = 0; i < 4 && word * 4 + i < bytes; ++i) {
        const unsigned char byte = from[word * 4 + i];
        value |= static_cast<uint32_t>(byte) << (8 * i);
        if (to != nullptr) {
          to[word * 4 + i] = byte;
        }
      }
      sum += static_cast<uint64_t>(value) * multipliers[word];
    }
    return sum;
  }

  static constexpr uint32_t kAll = 0xFFFFFFFFU;
  static constexpr uint32_t kParts = kSegmentBytes / (32 * 16);

  static __device__ uint4 load(const uint4* at) noexcept {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(at)
                 : "memory");
    return value;
  }
  static __device__ uint64_t weigh(uint4 words, uint4 by) noexcept {
    return static_cast<uint64_t>(words.x) * by.x + static_cast<uint64_t>(words.y) * by.y +
           static_cast<uint64_t>(words.z) * by.z + static_cast<uint64_t>(words.w) * by.w;
  }

  const uint32_t lane_;
  const uint4* multipliers_;
};

}  // namespace tutti::gio
