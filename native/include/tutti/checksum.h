// multilinear64: the checksum of an object (algorithm id 1 in the superblock).
//
// The bytes are read as little-endian 32-bit words in blocks of 4 KiB (the last word and block padded with zeros):
//   block(b)  = sum over j < 1024 of word(b, j) * multiplier(j)            mod 2^64, 32x32 -> 64-bit products
//   total     = sum over b of block(b) * R^(blocks-1-b)                    mod 2^64, R odd
//   checksum  = mix(total + length * L)                                    mix is a bijection
// Everything before `mix` is linear, so it can be summed in any order: by vector lanes, or by the threads of a GPU warp
// or block, each holding the multipliers of its own positions in registers. A change confined to one aligned 32-bit
// word always changes the value: 0 < |difference * multiplier| < 2^64 and R^k is invertible. So does exchanging two
// different words of a block (multipliers are distinct). Any other change goes unseen with odds near 2^-64. Source of
// the family: Lemire and Kaser, "Strongly universal string hashing is fast", 2014.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "tutti/host_device.h"

namespace tutti {

inline constexpr uint32_t kChecksumMultilinear64 = 1;
inline constexpr size_t kChecksumBlockBytes = 4096;
inline constexpr size_t kChecksumBlockWords = kChecksumBlockBytes / 4;
inline constexpr uint64_t kChecksumRadix = 0x9E3779B97F4A7C15ULL;
inline constexpr uint64_t kChecksumLength = 0xD6E8FEB86659FD93ULL;

TUTTI_HD constexpr uint64_t checksum_mix(uint64_t x) noexcept {
  x ^= x >> 32;
  x *= 0xBF58476D1CE4E5B9ULL;
  x ^= x >> 29;
  x *= 0x94D049BB133111EBULL;
  x ^= x >> 32;
  return x;
}

// multiplier(j): splitmix64 from a fixed start, upper half, made odd.
constexpr std::array<uint32_t, kChecksumBlockWords> checksum_multipliers() noexcept {
  std::array<uint32_t, kChecksumBlockWords> table{};
  uint64_t state = 0x5475747469204B56ULL;
  for (auto& entry : table) {
    state += 0x9E3779B97F4A7C15ULL;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    z ^= z >> 31;
    entry = static_cast<uint32_t>(z >> 32) | 1U;
  }
  return table;
}

// Thread-safe, never fails. `data` needs no alignment.
uint64_t multilinear64(const void* data, size_t bytes) noexcept;

// The same value from plain C++: the reference that the vector versions are tested against.
uint64_t multilinear64_scalar(const void* data, size_t bytes) noexcept;

// block(0) of at most one block, before radix, length and mix: what a part of an object adds to its checksum.
uint64_t checksum_block_sum(const void* data, size_t bytes) noexcept;

// "avx512", "avx2", "neon" or "scalar": what multilinear64 uses on this machine.
const char* checksum_variant() noexcept;

}  // namespace tutti
